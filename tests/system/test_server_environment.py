"""A run whose servers have a Python environment of their own (`server.python`)."""

from __future__ import annotations

import site
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.runs import Finished, Launch, repeatable, run_to_end

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PYTRITON = ("pytriton", "nvidia_pytriton")
ONE_RANK = ("run.steps=2", "actor.parallel.data=1", "checkpoint.every=0")
SCORER = """
import sys

def score(requests):
    # The module is installed only in the servers' environment, like PyTriton.
    import pytriton

    print("scored by", sys.prefix, flush=True)
    return [float(len(request.response) % 3) for request in requests]
"""


def make_environment(directory: Path, without: tuple[str, ...] = ()) -> Path:
    """Create an environment with links to the packages of this one, and return its interpreter.

    PyTriton finds its libraries only in the `site-packages` of its interpreter, so that a .pth file
    would not suffice.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    (packages,) = (directory / "lib").glob("python*/site-packages")
    for root in map(Path, site.getsitepackages()):
        for place in root.iterdir() if root.is_dir() else ():
            link = packages / place.name
            if not place.name.startswith(without or "\0") and not link.exists():
                link.symlink_to(place)
    return directory / "bin" / "python"


@pytest.fixture(scope="module")
def trainer_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment without PyTriton."""
    python = make_environment(tmp_path_factory.mktemp("trainer") / "venv", PYTRITON)
    imported = subprocess.run([python, "-c", "import pytriton"], capture_output=True, text=True)
    assert "No module named 'pytriton'" in imported.stderr
    return python


@pytest.fixture(scope="module")
def server_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with PyTriton and a module with a reward function."""
    python = make_environment(tmp_path_factory.mktemp("servers") / "venv")
    (packages,) = (python.parents[1] / "lib").glob("python*/site-packages")
    (packages / "servers_only.py").write_text(SCORER)
    return python


def launch(directory: Path, python: Path, *overrides: str) -> Finished:
    with Launch(directory, *overrides, python=python) as started:
        return started.finish(180)


@pytest.mark.promise("servers-own-environment")
def test_trainer_without_pytriton_trains_with_servers_of_other_environment(
    tmp_path: Path, trainer_python: Path, server_python: Path
) -> None:
    overrides = (*ONE_RANK, f"server.python={server_python}")
    with Launch(tmp_path / "run", *overrides, python=trainer_python) as started:
        started.wait_for_step(1)
        programs = {
            role: started.rank(role, 0).cmdline()[0] for role in ("critic", "reward", "trainer")
        }
        finished = started.finish(180)

    assert finished.code == 0, finished.report()
    assert programs["critic"] == programs["reward"] == str(server_python)
    assert programs["trainer"] != str(server_python)
    # The same packages compute the same values in one environment.
    same = run_to_end(tmp_path / "same", *ONE_RANK)
    assert len(finished.metrics) == 2
    assert repeatable(finished.metrics) == repeatable(same.metrics)


def test_reward_function_needs_only_the_servers_environment(
    tmp_path: Path, trainer_python: Path, server_python: Path
) -> None:
    function = "reward.function=servers_only:score"
    overrides = ("algorithm=grpo", *ONE_RANK, function, f"server.python={server_python}")

    finished = launch(tmp_path / "run", trainer_python, *overrides)

    assert finished.code == 0, finished.report()
    # The trial call before the run, and the scores of the run.
    for role in ("prepare", "reward"):
        log = finished.paths.log(role, 0).read_text()
        assert f"scored by {server_python.parents[1]}" in log, role


def test_trainer_without_pytriton_requires_interpreter_of_servers(
    tmp_path: Path, trainer_python: Path
) -> None:
    finished = launch(tmp_path / "run", trainer_python, *ONE_RANK)

    assert finished.code == 2, finished.report()
    assert "pytriton is not installed" in finished.error
    assert "or set server.python to the Python interpreter" in " ".join(finished.error.split())
