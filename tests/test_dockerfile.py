"""The Dockerfile and the checks of its images, without building an image."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import tomllib
from packaging.version import InvalidVersion, Version

from container.check_image import EVERYWHERE, EXTRAS
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
    assert set(extras("cpu")) == {*MODULES, "server", "demo"}
    for stage in ("common", "server", "cpu"):
        _, missing = plan({}, PINS, wanted(PROJECT, extras(stage)))
        assert missing.keys() >= {"torch", "hydra-core", "tritonclient"}


def test_image_check_covers_modules_of_all_extras() -> None:
    assert set(EVERYWHERE) >= set(MODULES.values())
    assert set(EXTRAS["trainer"]) == set(extras("common"))
    assert set(EXTRAS["server"]) == {*extras("common"), *extras("server")}


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


def test_version_of_package_that_is_installed_twice_is_the_imported_one(tmp_path: Path) -> None:
    for directory, version in (("pip", "84.2.1"), ("system", "66.1.1")):
        metadata = tmp_path / directory / f"setuptools-{version}.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: setuptools\nVersion: {version}\n"
        )
    program = "from container.pins import installed; print(installed()['setuptools'])"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={"PYTHONPATH": f"{REPOSITORY}:{tmp_path}/pip:{tmp_path}/system"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "84.2.1\n"


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
    bases = {line.split()[-1]: line.split()[1] for line in INSTRUCTIONS if line.startswith("FROM ")}
    assert (bases.pop("trainer"), bases.pop("server")) == ("common", "common")
    # The CPU image, and the wheel that it contains, need no image of NVIDIA's registry.
    assert bases == {
        "wheel": "${PYTHON_IMAGE}",
        "common": "${BASE_IMAGE}",
        "cpu": "${PYTHON_IMAGE}",
    }


@pytest.mark.parametrize(
    ("target", "check"),
    [
        ("trainer", "trainer held.txt"),
        ("server", "server held.txt"),
        ("cpu", "server constraints.txt --no-gpu"),
    ],
)
def test_image_checks_itself_and_runs_as_non_root(target: str, check: str) -> None:
    lines = stages()[target]
    assert " ".join(lines).count(f"check_image.py {check}") == 1
    assert [line for line in lines if line.startswith("USER ")] == ["USER 10001"]
    assert not any(line.startswith("RUN ") for line in lines[lines.index("USER 10001") :])


@pytest.mark.parametrize("target", ["trainer", "server", "cpu"])
def test_source_edit_does_not_reinstall_dependencies(target: str) -> None:
    lines = [*(stages()["common"] if target != "cpu" else ()), *stages()[target]]
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


@pytest.mark.parametrize("target", ["trainer", "server", "cpu"])
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
    stage = "cpu" if target == "cpu" else "common"
    assert "chmod 1777 /home/aligner" in " ".join(stages()[stage])


# Stands for pip in a stage: every file among its arguments must exist. `pip wheel` needs the files
# that pyproject.toml names, and writes a wheel.
_PIP = """
import glob, pathlib, sys, tomllib
words = sys.argv[1:]
for flag in ("--constraint", "--requirement"):
    for index, word in enumerate(words):
        if word == flag:
            lines = pathlib.Path(words[index + 1]).read_text().splitlines()
            lines = [line for line in lines if not line.startswith("#")]
            assert lines and all("==" in line for line in lines), (word, lines[:3])
for word in words:
    if word.endswith(".whl"):
        assert glob.glob(word), word
if words[0] == "wheel":
    project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())
    target = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    for path in (*target["packages"], *target["force-include"], project["tool"]["hatch"]["version"]["path"]):
        assert pathlib.Path(path).exists(), path
    directory = pathlib.Path(words[words.index("--wheel-dir") + 1])
    directory.mkdir(parents=True)
    (directory / "aligner-0-py3-none-any.whl").touch()
"""
# Runs pins.py without installed packages, and stands for check_image.py, which imports all packages.
_PYTHON = """#!/bin/sh
case $1 in
    */check_image.py) test -f "$1" && test -f "$3" ;;
    *) exec {python} -S "$@" ;;
esac
"""


def copy_context(directory: Path) -> None:
    """Copy the build context, the files that .dockerignore does not exclude."""
    for source in copied_paths():
        target = directory / source
        target.parent.mkdir(parents=True, exist_ok=True)
        if (REPOSITORY / source).is_dir():
            shutil.copytree(
                REPOSITORY / source, target, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(REPOSITORY / source, target)


def copy_into(sources: list[Path], target: Path, is_directory: bool) -> None:
    """Copy files, or the contents of directories, like the instruction COPY."""
    for source in sources:
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            copied = target / source.name if is_directory else target
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copied)


def run_stage(name: str, directory: Path, environment: dict[str, str]) -> Path:
    """Execute the instructions of a stage in a directory of its own; return the stage's root."""
    root = directory / name
    (line,) = [line for line in INSTRUCTIONS if re.fullmatch(rf"FROM \S+ AS {name}", line)]
    base = line.split()[1]
    if base in stages():
        shutil.copytree(run_stage(base, directory, environment), root, dirs_exist_ok=True)
    root.mkdir(exist_ok=True)
    workdir = root

    def locate(path: str) -> Path:
        return root / path[1:] if path.startswith("/") else workdir / path

    inherited = stages().get(base, [])
    for line in [line for line in inherited if line.startswith("WORKDIR ")]:
        workdir = locate(line.split()[1])
    for line in stages()[name]:
        kind, _, rest = line.partition(" ")
        if kind == "WORKDIR":
            workdir = locate(rest)
            workdir.mkdir(parents=True, exist_ok=True)
        elif kind == "COPY":
            flags = [word for word in rest.split() if word.startswith("--from=")]
            *sources, target = [word for word in rest.split() if not word.startswith("--")]
            origin = directory / "context"
            if flags:
                origin = run_stage(flags[0].removeprefix("--from="), directory, environment)
            is_directory = target.endswith("/") or len(sources) > 1
            copy_into(
                [origin / source.strip("/") for source in sources], locate(target), is_directory
            )
        elif kind == "RUN":
            command = re.sub(r"(?<=\s)/(wheels|home)", rf"{root}/\1", rest)
            done = subprocess.run(
                ["bash", "-euc", command],
                cwd=workdir,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{name}: {line}\n{done.stdout}{done.stderr}"
    return root


@pytest.mark.parametrize("target", ["trainer", "server", "cpu"])
def test_stages_contain_the_files_that_their_commands_read(tmp_path: Path, target: str) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "pip.py").write_text(_PIP)
    scripts = {
        "pip": f'#!/bin/sh\nexec {sys.executable} {programs}/pip.py "$@"\n',
        "python3": _PYTHON.format(python=sys.executable),
        "useradd": "#!/bin/sh\n",
        "chmod": "#!/bin/sh\n",
    }
    for name, script in scripts.items():
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    copy_context(tmp_path / "context")
    root = run_stage(target, tmp_path, {"PATH": f"{programs}:/usr/bin:/bin"})
    installed = {path.name for path in (root / "opt/aligner").iterdir()}
    assert {"requirements.txt", "constraints.txt", "pyproject.toml", "container"} <= installed
    assert ("held.txt" in installed) == (target != "cpu")
    assert [path.name for path in (root / "wheels").iterdir()] == ["aligner-0-py3-none-any.whl"]
    assert {path.name for path in (root / "opt/aligner/container").iterdir()} >= {
        "pins.py",
        "check_image.py",
    }


def check_image(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the check; it finds the distributions in the directory `path` first."""
    command = [sys.executable, str(REPOSITORY / "container" / "check_image.py"), *arguments]
    paths = [str(path), str(REPOSITORY)] if path else [str(REPOSITORY)]
    return subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def install(directory: Path, name: str, version: str, requirements: Sequence[str] = ()) -> None:
    """Write the metadata of an installed distribution."""
    metadata = directory / f"{name}-{version}.dist-info"
    metadata.mkdir(parents=True)
    lines = [f"Requires-Dist: {line}" for line in requirements]
    header = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    (metadata / "METADATA").write_text("\n".join([*header, *lines, ""]))


def install_aligner(directory: Path) -> None:
    """Write the metadata of aligner, with the requirements of pyproject.toml."""
    optional = [
        f'{line} ; extra == "{extra}"'
        for extra, lines in PROJECT["optional-dependencies"].items()
        for line in lines
    ]
    install(directory, "aligner", "0.3.0", [*PROJECT["dependencies"], *optional])


@pytest.mark.slow
def test_image_check_passes_in_test_environment(tmp_path: Path) -> None:
    install_aligner(tmp_path / "packages")
    install(tmp_path / "packages", "torch", "2.13.0+cpu")
    (tmp_path / "held.txt").write_text("numpy==1.26.4\ntorch==2.13.0\nnot-installed==1\n")
    done = check_image("server", str(tmp_path / "held.txt"), "--no-gpu", path=tmp_path / "packages")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_image_check_names_every_violated_requirement(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    install_aligner(packages)
    # The versions of NVIDIA's images that aligner accepts, and versions that it does not.
    accepted = {
        "torch": "2.9.0a0+145a3a7bda.nv25.10",
        "huggingface_hub": "0.36.0",
        "llguidance": "0.7.29",
    }
    refused = {
        "pyarrow": "26.0.0",
        "tensorboard": "2.10.1",
        "psutil": "1.7build1",
        "math-verify": "0.1.0",
        "aiohttp": "3.8.0",
        "ray": "1.0.0",
    }
    for name, version in {**accepted, **refused}.items():
        install(packages, name, version)
    done = check_image("server", "--no-gpu", path=packages)
    assert done.returncode == 1
    assert sorted(done.stderr.splitlines()) == [
        "server image: aiohttp is 3.8.0; aligner requires >=3.10",
        "server image: math-verify is 0.1.0; aligner requires >=0.8",
        "server image: psutil is 1.7build1; aligner requires >=5.9",
        "server image: pyarrow is 26.0.0; aligner requires <26",
        "server image: tensorboard is 2.10.1; aligner requires >=2.16",
    ]


@pytest.mark.slow
def test_image_check_reports_all_mismatches(tmp_path: Path) -> None:
    install_aligner(tmp_path)
    install(tmp_path, "torch", "2.13.0+cpu")
    install(tmp_path, "psutil", "1.7build1")
    (tmp_path / "held.txt").write_text(
        "Hydra_Core==1.3.0\ntorch==2.13.0+cu128\npsutil==1.7build2\n"
    )
    broken = tmp_path / "xxhash"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise OSError('libc.so.9: not found')\n")
    done = check_image("trainer", str(tmp_path / "held.txt"), path=tmp_path)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert any(
        re.fullmatch(
            r"trainer image: hydra-core is 1\.3\.\d+, but HELD pins 1\.3\.0; a build step"
            r" replaced it",
            line,
        )
        for line in lines
    ), lines
    for replaced in (
        "torch is 2.13.0+cpu, but HELD pins 2.13.0+cu128",
        "psutil is 1.7build1, but HELD pins 1.7build2",
    ):
        assert f"trainer image: {replaced}; a build step replaced it" in lines
    assert "trainer image: tensorrt-llm is not installed; requires 1.2.*" in lines
    assert "trainer image: ray is not installed; aligner requires >=2.40" in lines
    assert (
        "trainer image: transformer_engine is not installed; use a TensorRT-LLM release image as"
        " BASE_IMAGE" in lines
    )
    assert (
        "trainer image: aligner.training.setup cannot be imported: OSError: libc.so.9: not found"
        in lines
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
