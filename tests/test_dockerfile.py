"""The Dockerfile and the checks of its images, without building an image."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
from packaging.version import InvalidVersion, Version

from container.check_image import EVERYWHERE
from container.pins import pinned, plan, wanted

REPOSITORY = Path(__file__).parents[1]
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()
# Without comments, one line for each instruction.
INSTRUCTIONS = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", DOCKERFILE)).splitlines()
PINS = pinned((REPOSITORY / "constraints.txt").read_text())
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]

# A module of each extra that shows that the extra is installed.
# ray, the module of tensorrt_llm, is located without an import.
MODULES = {
    "sentiment": "vaderSentiment",
    "verify": "math_verify",
    "wandb": "wandb",
    "mlflow": "mlflow.tracking",
    "view": "duckdb",
}


def copied_paths() -> list[str]:
    """Return the paths of the repository that are copied into the images."""
    copies = [
        line.split()[1:-1]
        for line in INSTRUCTIONS
        if line.startswith("COPY ") and "--from=" not in line
    ]
    return [source for sources in copies for source in sources]


def stages() -> dict[str, list[str]]:
    """Return the instructions of each stage."""
    found: dict[str, list[str]] = {}
    for line in INSTRUCTIONS:
        if line.startswith("FROM "):
            name = line.split()[-1]
            found[name] = []
        elif found:
            found[name].append(line)
    return found


def extras(stage: str) -> list[str]:
    """Return the extras that a stage installs."""
    return [
        extra
        for line in stages()[stage]
        for call in re.findall(r"pins\.py \S+ \S+ ([\w ]+)", line)
        for extra in call.split()
    ]


def test_copied_files_equal_the_build_context() -> None:
    assert copied_paths()
    for source in copied_paths():
        assert (REPOSITORY / source).exists(), source
    lines = [
        line
        for line in (REPOSITORY / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert lines[0] == "*", "nothing is in the context unless it is named: no .git, .venv or runs"
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == set(copied_paths())


def test_packages_are_installed_at_pinned_versions() -> None:
    named = re.findall(r"([\w-]+)==([\w.]+)", " ".join(INSTRUCTIONS))
    assert {name for name, _ in named} == {"hatchling", "megatron-core"}
    for name, version in named:
        assert PINS[name] == version
    assert set(extras("common")) == {*MODULES, "tensorrt_llm"} and extras("server") == ["server"]
    for stage in ("common", "server"):
        _, missing = plan({}, PINS, wanted(PROJECT, extras(stage)))
        assert missing.keys() >= {"torch", "hydra-core", "tritonclient"}


def test_image_check_covers_modules_of_all_extras() -> None:
    assert set(EVERYWHERE) >= set(MODULES.values())


def test_packages_missing_in_base_image_are_pinned() -> None:
    base = {"torch": "2.9.0a0+nv", "numpy": "1.26.3"}
    held, missing = plan(base, PINS, wanted(PROJECT, ["server"]))
    assert (
        held["torch"] == "2.9.0a0+nv"
        and held["numpy"] == "1.26.3"
        and held["pydantic"] == PINS["pydantic"]
    )
    assert missing["nvidia-pytriton"] == "0.7.0" and "torch" not in missing
    with pytest.raises(SystemExit, match=r"constraints\.txt: no version of torch"):
        plan({}, {}, ["torch"])


@pytest.mark.parametrize(
    "version", ["1.7build1", "2.4.0-1ubuntu4", "0.0.0-unknown", "1.0~rc1", "", "1.0+", "٣.1"]
)
def test_invalid_base_version_is_not_replaced(version: str) -> None:
    with pytest.raises(InvalidVersion):
        Version(version)
    held, missing = plan({"torch": version, "numpy": "1.26.3"}, PINS, ["torch", "numpy"])
    assert "torch" not in held and held["numpy"] == "1.26.3" and not missing


@pytest.mark.parametrize(
    "version",
    [
        "2.9.0a0+145a3a7bda.nv25.10",
        "1!2.0",
        "2024.6.2",
        "1.0.post1.dev3",
        "1.0-1",
        "V1.0-Alpha_2",
        "0.1.0+Abc_1",
    ],
)
def test_valid_base_version_is_held(version: str) -> None:
    Version(version)
    assert plan({"torch": version}, PINS, ["torch"])[0]["torch"] == version


def test_base_image_is_an_argument_with_fixed_version() -> None:
    (base,) = re.findall(r"^ARG BASE_IMAGE=(\S+)$", DOCKERFILE, re.M)
    assert re.fullmatch(r"nvcr\.io/nvidia/tensorrt-llm/release:1\.2\.\d+", base)
    outside = {
        line.split()[1] for line in INSTRUCTIONS if line.startswith("FROM ")
    } - stages().keys()
    assert outside == {"${BASE_IMAGE}"}


@pytest.mark.parametrize("target", ["trainer", "server"])
def test_image_checks_itself_and_runs_as_non_root(target: str) -> None:
    lines = stages()[target]
    assert f"check_image.py {target} held.txt" in " ".join(lines)
    assert [line for line in lines if line.startswith("USER ")] == ["USER 10001"]
    assert not any(line.startswith("RUN ") for line in lines[lines.index("USER 10001") :])


@pytest.mark.parametrize("target", ["trainer", "server"])
def test_source_edit_does_not_reinstall_dependencies(target: str) -> None:
    lines = stages()["common"] + stages()[target]
    last = max(
        index
        for index, line in enumerate(lines)
        if "pip install" in line and "--requirement" in line
    )
    before = [
        source for line in lines[:last] if line.startswith("COPY ") for source in line.split()[1:-1]
    ]
    assert before == ["pyproject.toml", "constraints.txt", "container/pins.py"]
    after = [
        source for line in lines[last:] if line.startswith("COPY ") for source in line.split()[1:-1]
    ]
    assert after == ["--from=wheel", "/wheels", "container/check_image.py"]
    assert "/wheels/*.whl" in [line for line in lines if line.startswith("RUN ")][-1]


@pytest.mark.parametrize("target", ["trainer", "server"])
def test_unknown_user_has_name_and_writable_home(target: str) -> None:
    lines = stages()[target]
    (index,) = [index for index, line in enumerate(lines) if line.startswith("ENV ")]
    assert dict(pair.split("=") for pair in lines[index].split()[1:]) == {
        "HOME": "/home/aligner",
        "USER": "aligner",
        "LOGNAME": "aligner",
    }
    assert not any(line.startswith("RUN ") for line in lines[index:]), (
        "what root does must leave nothing in that home"
    )
    assert "chmod 1777 /home/aligner" in " ".join(stages()["common"])


def check_image(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "container" / "check_image.py"), *arguments]
    return subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.slow
def test_image_check_passes_in_test_environment(tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("numpy==1.26.4\nnot-installed==1\n")
    done = check_image("server", str(tmp_path / "held.txt"), "--no-gpu")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_image_check_reports_all_mismatches(tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("Hydra_Core==1.3.0\n")
    done = check_image("trainer", str(tmp_path / "held.txt"))
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert re.fullmatch(
        r"trainer image: hydra-core is 1\.3\.\d+, but HELD pins 1\.3\.0; a build step replaced it",
        lines[1],
    ), lines
    assert "trainer image: tensorrt-llm is not installed; requires 1.2.*" in lines
    assert (
        "trainer image: transformer_engine is not installed; use a TensorRT-LLM release image as"
        " BASE_IMAGE" in lines
    )


def test_hadolint_accepts_the_dockerfile() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists():
        pytest.skip("hadolint is not installed: make test installs it")
    done = subprocess.run(
        [linter, "Dockerfile"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
    bad = subprocess.run(
        [linter, "-"],
        input="FROM debian\nRUN cd /tmp\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert bad.returncode == 1 and "DL3006" in bad.stdout, "it runs"


def test_build_without_container_engine_fails() -> None:
    script = [str(REPOSITORY / "container" / "build.sh")]
    done = subprocess.run(
        script,
        env={"PATH": "/usr/bin:/bin", "ENGINE": "no-such-engine"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (69, "")
    assert (
        done.stderr == "no-such-engine: the container engine does not respond on this machine;"
        " no image was built\n"
    )
