"""The wheel, installed by itself into an empty environment, away from the checkout; and with each Python that is here."""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import tomllib

from benchmarks.runs import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HEAVY = ("torch", "megatron-core")
"""Gigabytes from the registry, and not needed to check a run."""
OTHERS = ("3.10", "3.12")


def told(command: Sequence[str | Path], directory: Path, seconds: float = 300) -> str:
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=directory, env=outside, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--wheel-dir", directory, REPOSITORY]
    told(pip, directory)
    (file,) = directory.glob("aligner-*.whl")
    return file


def test_the_wheel_trains_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    told([sys.executable, "-m", "venv", tmp_path / "venv"], tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # The packages of this environment, behind its own; .pth files in it, such as that of an editable install, are not read.
    (packages / "others.pth").write_text("".join(f"{directory}\n" for directory in site.getsitepackages()))
    told([python, "-m", "pip", "install", "-qq", "--no-deps", "--force-reinstall", wheel], tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert told([python, "-c", "import aligner; print(aligner.__file__)"], empty).startswith(str(packages))
    aligner = tmp_path / "venv" / "bin" / "aligner"
    assert re.fullmatch(r"aligner \d+\.\d+\.\d+\n", told([aligner, "--version"], empty))
    assert "vocabulary 64" in told([aligner, "validate", "experiment=tiny_ppo"], empty)
    told([aligner, "launch", "experiment=tiny_ppo", "run.steps=1", "run.dir=run"], empty)
    assert (empty / "run" / "metrics.jsonl").read_text().count("\n") == 1
    assert [path.name for path in empty.iterdir()] == ["run"]


@pytest.mark.parametrize("version", OTHERS)
def test_runs_are_checked_with_other_versions_of_python(wheel: Path, tmp_path: Path, version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    told([python, "-m", "venv", tmp_path / "venv"], tmp_path)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["server"]]
    light = [line for line in needed if re.match(r"[\w.-]+", line)[0] not in HEAVY]  # type: ignore[index]
    inside = tmp_path / "venv" / "bin"
    told([inside / "python", "-m", "pip", "install", "-qq", *light], tmp_path)
    told([inside / "python", "-m", "pip", "install", "-qq", "--no-deps", wheel], tmp_path)
    told([inside / "python", "-m", "compileall", "-q", "-f", *(tmp_path / "venv" / "lib").glob("*/*/aligner")], tmp_path)
    assert told([inside / "aligner", "--version"], tmp_path).startswith("aligner ")
    for experiment in ("tiny_ppo", "arithmetic", "llama3_70b_ppo"):
        assert "parameters" in told([inside / "aligner", "validate", f"experiment={experiment}"], tmp_path)
    told([inside / "aligner", "new", "mine"], tmp_path)


def interpreter(version: str) -> Path | None:
    """An interpreter of a version: pyenv's, or one on PATH that starts; pyenv's own on PATH need not."""
    installed = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    on_path = shutil.which(f"python{version}")
    for python in [*sorted(installed.glob(f"{version}.*/bin/python")), *([Path(on_path)] if on_path else [])]:
        if subprocess.run([python, "-c", "import venv"], capture_output=True).returncode == 0:
            return python
    return None
