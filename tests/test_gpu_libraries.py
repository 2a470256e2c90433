"""GPU libraries that are installed but cannot be imported: real packages that raise errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.runs import run_to_end
from tests.rounds import typical

# What a library raises without a driver, with another torch, and without one of its parts.
ERRORS = {
    "OSError": "OSError('libcuda.so.1: cannot open shared object file')",
    "ImportError": "ImportError('undefined symbol: _ZN3c104cuda')",
    "RuntimeError": "RuntimeError('Found empty `transformer-engine` meta package installed.')",
}
# A GPU as far as megatron-core's imports can tell.
WITH_GPU = "import torch; torch.cuda.is_available = lambda: True"
TRAINER = "import aligner.training.setup, aligner.servers.critic_server"


def write_packages(directory: Path, error: str) -> dict[str, str]:
    """Write transformer-engine and apex, whose import raises an error.

    The error of transformer-engine is raised by a submodule, after others have been imported.

    Returns:
        Environment variables of a process that finds the packages.
    """
    torch_part = directory / "transformer_engine" / "pytorch"
    torch_part.mkdir(parents=True)
    (directory / "transformer_engine" / "__init__.py").write_text(
        "import transformer_engine.common\n__version__ = '2.9.0'\n"
    )
    (directory / "transformer_engine" / "common.py").write_text("")
    (torch_part / "__init__.py").write_text(f"raise {error}\n")
    (directory / "apex.py").write_text(f"raise {error}\n")
    repository = str(Path(__file__).parents[1])
    paths = [str(directory), repository, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run_python(program: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


@pytest.mark.parametrize("name", typical(ERRORS, ["OSError"]))
def test_broken_libraries_are_absent_for_megatron_on_cpu(tmp_path: Path, name: str) -> None:
    program = f"""
{TRAINER}
from aligner.megatron import BROKEN_LIBRARIES
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import HAVE_APEX
assert not HAVE_TE and not HAVE_APEX
assert BROKEN_LIBRARIES.keys() == {{"transformer-engine", "apex"}}, BROKEN_LIBRARIES
assert all(reason.startswith("{name}: ") for reason in BROKEN_LIBRARIES.values()), BROKEN_LIBRARIES
"""
    result = run_python(program, write_packages(tmp_path, ERRORS[name]))
    assert result.returncode == 0, result.stderr


def test_working_libraries_are_absent_for_megatron_on_cpu(tmp_path: Path) -> None:
    """On a CPU, their optimizers would fail."""
    program = f"""
{TRAINER}
from aligner.megatron import BROKEN_LIBRARIES
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER
assert not HAVE_TE and USING_PYTORCH_OPTIMIZER and not BROKEN_LIBRARIES
"""
    environment = write_packages(tmp_path, "")
    for package in (
        tmp_path / "transformer_engine" / "pytorch" / "__init__.py",
        tmp_path / "apex.py",
    ):
        package.write_text("class FusedAdam: ...\n")
    (tmp_path / "transformer_engine" / "pytorch" / "optimizers.py").write_text(
        "class FusedAdam: ...\nclass FusedSGD: ...\n"
    )
    result = run_python(program, environment)
    assert result.returncode == 0, result.stderr


def test_broken_library_is_an_error_on_gpu(tmp_path: Path) -> None:
    environment = write_packages(tmp_path, ERRORS["OSError"])
    result = run_python(f"{WITH_GPU}\n{TRAINER}", environment)
    assert result.returncode == 1
    *_, first, second = result.stderr.splitlines()
    assert "transformer-engine is installed, but cannot be imported: OSError: libcuda" in first
    assert second.startswith("apex is installed, but cannot be imported: OSError: libcuda")
    assert "correct the installation, or uninstall apex" in second


@pytest.mark.slow
def test_run_with_broken_libraries_warns_once_per_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = write_packages(tmp_path / "packages", ERRORS["OSError"])
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    run = run_to_end(tmp_path / "run", "run.steps=1")
    assert len(run.metrics) == 1
    for role in ("trainer", "critic"):
        logs = [file.read_text() for file in (tmp_path / "run" / "logs").glob(f"{role}-[0-9].log")]
        assert sum(log.count("transformer-engine is installed, but cannot") for log in logs) == 1


def test_validate_reports_broken_libraries(tmp_path: Path) -> None:
    environment = write_packages(tmp_path, ERRORS["RuntimeError"]) | {"ALIGNER_GPUS": "0"}
    command = [sys.executable, "-m", "aligner", "validate", "experiment=tiny_ppo"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    notes = [line for line in result.stdout.splitlines() if "cannot be imported" in line]
    assert len(notes) == 2
    assert notes[0].startswith(
        "note: transformer-engine is installed, but cannot be imported: RuntimeError: Found empty"
    )


def test_broken_libraries_are_refused_for_runs_on_gpus(tmp_path: Path) -> None:
    program = """
from aligner.errors import ConfigError
from aligner.gpu_libraries import find_library_notes
try:
    find_library_notes(on_gpus=True)
except ConfigError as error:
    print(error)
"""
    result = run_python(program, write_packages(tmp_path, ERRORS["ImportError"]))
    assert "transformer-engine is installed, but cannot be imported: ImportError: undefined" in (
        result.stdout
    )


@pytest.mark.parametrize(("gpus", "level"), [("0", "note"), ("1", "error")])
def test_doctor_reports_broken_libraries(tmp_path: Path, gpus: str, level: str) -> None:
    environment = write_packages(tmp_path, ERRORS["OSError"]) | {"ALIGNER_GPUS": gpus}
    command = [sys.executable, "-m", "aligner", "doctor", "--json", "--runs", str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    findings = {finding["subject"]: finding for finding in json.loads(result.stdout)}
    for library in ("transformer-engine", "apex"):
        assert findings[library]["level"] == level
        assert "OSError: libcuda.so.1" in findings[library]["found"]
        assert findings[library]["remedy"]
