"""Tests of the wheel in an empty environment outside the checkout, with several Python versions."""

from __future__ import annotations

import os
import re
import site
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import tomllib

from benchmarks.peer_environment import find_interpreter
from benchmarks.runs import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HEAVY = ("torch", "megatron-core")
"""Packages of several gigabytes that the validation of a run does not need."""
OTHERS = ("3.10", "3.12")
_CHECKS = """
import importlib, pkgutil
import aligner
from aligner.config.compose import compose_config
from aligner.config.prerequisites import plan_run
from aligner.models.model_source import absent_inputs

for module in pkgutil.walk_packages(aligner.__path__, "aligner."):
    try:
        module.name.endswith("__main__") or importlib.import_module(module.name)
    except ModuleNotFoundError as missing:
        if missing.name.partition(".")[0] == "aligner":
            raise
for experiment in ("tiny_ppo", "arithmetic", "llama3_70b_ppo"):
    plan = plan_run(compose_config([f"experiment={experiment}"]))
    plan.check(absent_inputs(plan.config))
    print(experiment)
"""
"""Code that imports every module that needs no `HEAVY` package, and validates runs."""


def run_command(command: Sequence[str | Path], directory: Path, seconds: float = 300) -> str:
    outside = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    done = subprocess.run(
        command, cwd=directory, env=outside, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def environment(python: str | Path, directory: Path) -> Path:
    """Create a virtual environment without pip, and return its `bin` directory."""
    run_command([python, "-m", "venv", "--without-pip", directory / "venv"], directory)
    return directory / "venv" / "bin"


def install(inside: Path, *packages: str | Path) -> None:
    """Install packages with the pip of this environment.

    Packages are not compiled, because a test imports only few of their thousands of files.
    """
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        inside / "python",
        "install",
        "-qq",
        "--no-compile",
    ]
    run_command([*pip, *packages], inside)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-qq",
        "--no-deps",
        "--wheel-dir",
        directory,
        REPOSITORY,
    ]
    run_command(pip, directory)
    (file,) = directory.glob("aligner-*.whl")
    return file


@pytest.mark.promise("wheel-trains")
def test_the_wheel_trains_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    python = environment(sys.executable, tmp_path) / "python"
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # Link the packages of this environment except ours, because PyTriton searches its libraries
    # only in site-packages. Debian lists directories that do not exist.
    existing = [place for place in map(Path, site.getsitepackages()) if place.is_dir()]
    for place in [path for directory in existing for path in directory.iterdir()]:
        if (
            not place.name.startswith(("aligner", "_aligner", "__editable__", "pip"))
            and not (packages / place.name).exists()
        ):
            (packages / place.name).symlink_to(place)
    install(python.parent, "--no-deps", wheel)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run_command([python, "-c", "import aligner; print(aligner.__file__)"], empty).startswith(
        str(packages)
    )
    run_command(
        [python, "-c", "import aligner_examples.calculator, aligner_examples.styled_sums"], empty
    )
    aligner = tmp_path / "venv" / "bin" / "aligner"
    assert re.fullmatch(r"aligner \d+\.\d+\.\d+\n", run_command([aligner, "--version"], empty))
    assert "vocabulary size 64" in run_command([aligner, "validate", "experiment=tiny_ppo"], empty)
    run_command([aligner, "launch", "experiment=tiny_ppo", "run.steps=1", "run.dir=run"], empty)
    assert (empty / "run" / "metrics.jsonl").read_text().count("\n") == 1
    assert [path.name for path in empty.iterdir()] == ["run"]


@pytest.mark.parametrize("version", OTHERS)
def test_validation_works_on_other_python_versions(
    wheel: Path, tmp_path: Path, version: str
) -> None:
    python = find_interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    inside = environment(python, tmp_path)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["server"]]
    light = [line for line in needed if re.match(r"[\w.-]+", line)[0] not in HEAVY]  # type: ignore[index]
    install(inside, *light)
    install(inside, "--no-deps", wheel)
    run_command(
        [
            inside / "python",
            "-m",
            "compileall",
            "-q",
            "-f",
            *(tmp_path / "venv" / "lib").glob("*/*/aligner"),
        ],
        tmp_path,
    )
    assert run_command([inside / "aligner", "--version"], tmp_path).startswith("aligner ")
    run_command([inside / "aligner", "new", "mine"], tmp_path)
    assert run_command([inside / "python", "-c", _CHECKS], tmp_path).split() == [
        "tiny_ppo",
        "arithmetic",
        "llama3_70b_ppo",
    ]
