"""The images' recipe, as far as it can be looked at without building it."""

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
# Without comments, a line an instruction.
INSTRUCTIONS = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", DOCKERFILE)).splitlines()
PINS = pinned((REPOSITORY / "constraints.txt").read_text())
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]

# What tells that an extra is there; ray, tensorrt_llm's, is looked up only.
MODULES = {
    "sentiment": "vaderSentiment",
    "verify": "math_verify",
    "wandb": "wandb",
    "mlflow": "mlflow.tracking",
    "view": "duckdb",
}


def copied() -> list[str]:
    """What comes into the images from the repository."""
    copies = [
        line.split()[1:-1]
        for line in INSTRUCTIONS
        if line.startswith("COPY ") and "--from=" not in line
    ]
    return [source for sources in copies for source in sources]


def stages() -> dict[str, list[str]]:
    """The instructions of each stage."""
    found: dict[str, list[str]] = {}
    for line in INSTRUCTIONS:
        if line.startswith("FROM "):
            name = line.split()[-1]
            found[name] = []
        elif found:
            found[name].append(line)
    return found


def extras(stage: str) -> list[str]:
    """The extras that a stage installs."""
    return [
        extra
        for line in stages()[stage]
        for call in re.findall(r"pins\.py \S+ \S+ ([\w ]+)", line)
        for extra in call.split()
    ]


def test_what_is_copied_exists_and_is_all_that_the_context_has() -> None:
    assert copied()
    for source in copied():
        assert (REPOSITORY / source).exists(), source
    lines = [
        line
        for line in (REPOSITORY / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert lines[0] == "*", "nothing is in the context unless it is named: no .git, .venv or runs"
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == set(copied())


def test_every_package_is_installed_at_the_version_that_the_tests_ran_with() -> None:
    named = re.findall(r"([\w-]+)==([\w.]+)", " ".join(INSTRUCTIONS))
    assert {name for name, _ in named} == {"hatchling", "megatron-core"}
    for name, version in named:
        assert PINS[name] == version
    assert set(extras("common")) == {*MODULES, "tensorrt_llm"} and extras("server") == ["server"]
    for stage in ("common", "server"):
        _, missing = plan({}, PINS, wanted(PROJECT, extras(stage)))
        assert missing.keys() >= {"torch", "hydra-core", "tritonclient"}


def test_both_images_are_checked_for_all_that_their_extras_bring() -> None:
    assert set(EVERYWHERE) >= set(MODULES.values())


def test_what_the_base_image_has_stays_and_what_it_lacks_is_pinned() -> None:
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
def test_a_version_that_pip_would_refuse_holds_nothing_and_is_not_replaced(version: str) -> None:
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
def test_every_version_that_pip_reads_holds(version: str) -> None:
    Version(version)
    assert plan({"torch": version}, PINS, ["torch"])[0]["torch"] == version


def test_the_base_image_is_one_version_and_can_be_given_with_its_digest() -> None:
    (base,) = re.findall(r"^ARG BASE_IMAGE=(\S+)$", DOCKERFILE, re.M)
    assert re.fullmatch(r"nvcr\.io/nvidia/tensorrt-llm/release:1\.2\.\d+", base)
    outside = {
        line.split()[1] for line in INSTRUCTIONS if line.startswith("FROM ")
    } - stages().keys()
    assert outside == {"${BASE_IMAGE}"}


@pytest.mark.parametrize("target", ["trainer", "server"])
def test_an_image_checks_itself_and_runs_as_no_root(target: str) -> None:
    lines = stages()[target]
    assert f"check_image.py {target} held.txt" in " ".join(lines)
    assert [line for line in lines if line.startswith("USER ")] == ["USER 10001"]
    assert not any(line.startswith("RUN ") for line in lines[lines.index("USER 10001") :])


@pytest.mark.parametrize("target", ["trainer", "server"])
def test_an_edit_of_the_sources_or_of_the_check_installs_no_dependency_again(target: str) -> None:
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
def test_a_user_whom_the_image_does_not_know_has_a_name_and_a_home_to_write_to(target: str) -> None:
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
def test_the_check_passes_in_the_environment_of_the_tests(tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("numpy==1.26.4\nnot-installed==1\n")
    done = check_image("server", str(tmp_path / "held.txt"), "--no-gpu")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_the_check_names_all_that_does_not_fit(tmp_path: Path) -> None:
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


def test_the_linter_of_dockerfiles_has_nothing_to_say() -> None:
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


def test_where_no_daemon_answers_the_script_that_builds_says_so_and_builds_nothing() -> None:
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
