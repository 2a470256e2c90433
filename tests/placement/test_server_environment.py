"""Checks of the servers' Python environment (`server.python`), and the command of their ranks."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

from aligner.checks.check import check
from aligner.config.compose import compose_config
from aligner.errors import ConfigError
from aligner.launcher.rank_environment import VERSION, adopt_environment, build_role_command
from aligner.placement.server_environment import find_environment_problems
from aligner.schema import Config
from aligner.version import __version__
from benchmarks.runs import REPOSITORY

GENERATOR = ("engine.placement=server",)


def make_config(directory: Path, python: str | Path, *overrides: str) -> Config:
    return compose_config(
        [
            "experiment=tiny_ppo",
            f"run.dir={directory / 'run'}",
            f"server.python={python}",
            *overrides,
        ]
    )


def problems(directory: Path, python: str | Path, *overrides: str) -> list[str]:
    return list(find_environment_problems(make_config(directory, python, *overrides)))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory from which aligner cannot be imported, without PYTHONPATH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path


def interpreter(directory: Path, *search_path: Path) -> Path:
    """Write a program that runs this interpreter with no packages except those of `search_path`."""
    program = directory / "python"
    path = os.pathsep.join(map(str, search_path))
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{path}" exec "{sys.executable}" -S "$@"\n')
    program.chmod(0o755)
    return program


def packages(directory: Path, torch: str, *modules: str) -> Path:
    """Create a directory with empty modules, and with the metadata of a release of torch."""
    site = directory / "site"
    for module in modules:
        (site / module).mkdir(parents=True)
    info = site / f"torch-{torch}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n")
    return site


def test_complete_environment_of_servers_is_accepted(tmp_path: Path) -> None:
    assert problems(tmp_path, sys.executable, *GENERATOR) == []


def test_missing_interpreter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        check(make_config(tmp_path, tmp_path / "absent"))

    assert str(raised.value) == (
        f"server.python={tmp_path / 'absent'}: no such program; set the path of the Python"
        f" interpreter of an environment in which 'aligner[server]' {__version__} is installed"
    )


@pytest.mark.parametrize("program", ["/bin/true", "/bin/false"])
def test_other_program_is_refused_as_interpreter(tmp_path: Path, program: str) -> None:
    (problem,) = problems(tmp_path, program)

    assert problem.startswith(f"server.python={program}: is not a working Python interpreter: ")


def test_environment_without_aligner_is_refused(elsewhere: Path) -> None:
    python = interpreter(elsewhere)

    assert problems(elsewhere, python) == [
        f"server.python={python}: aligner cannot be imported there (ModuleNotFoundError: No module"
        f" named 'aligner'); install it there with {python} -m pip install"
        f" 'aligner[server]=={__version__}'"
    ]


def test_other_release_of_aligner_is_refused(elsewhere: Path) -> None:
    (elsewhere / "old" / "aligner").mkdir(parents=True)
    (elsewhere / "old" / "aligner" / "version.py").write_text("__version__ = '0.1.0'\n")
    python = interpreter(elsewhere, elsewhere / "old")

    (problem,) = problems(elsewhere, python)

    assert problem.startswith(
        f"server.python={python}: aligner 0.1.0 is installed there, but this process is aligner"
        f" {__version__}; install it there with"
    )


def test_environment_without_pytriton_is_refused(elsewhere: Path) -> None:
    python = interpreter(elsewhere, REPOSITORY, packages(elsewhere, "1.0", "aiohttp"))

    assert problems(elsewhere, python) == [
        f"server.python={python}: pytriton is not installed; install the server extra: pip install"
        " 'aligner[server]'"
    ]


def test_environment_without_package_of_reward_function_is_refused(elsewhere: Path) -> None:
    site = packages(elsewhere, "1.0", "aiohttp", "pytriton")
    python = interpreter(elsewhere, REPOSITORY, site)

    (problem,) = problems(elsewhere, python, "reward.function=sentiment")

    assert problem.startswith(f"server.python={python}: vaderSentiment is not installed; install")


@pytest.mark.parametrize("cluster", ["slurm", "kubernetes"])
def test_servers_in_another_image_are_not_checked(elsewhere: Path, cluster: str) -> None:
    """The trainer's image has no PyTriton."""
    python = interpreter(elsewhere, REPOSITORY, packages(elsewhere, "1.0", "aiohttp"))
    job = f"cluster.{cluster}"
    settings = (f"cluster={cluster}", f"{job}.image=trainer:1")

    assert len(problems(elsewhere, python, *settings)) == 1
    with_images = [f"{job}.roles.{role}.image=server:1" for role in ("critic", "reward")]
    assert len(problems(elsewhere, python, *settings, with_images[0])) == 1
    assert problems(elsewhere, python, *settings, *with_images) == []


def test_torch_of_generator_must_be_the_trainers(elsewhere: Path) -> None:
    site = packages(elsewhere, "1.0+cpu", "aiohttp", "pytriton")
    python = interpreter(elsewhere, REPOSITORY, site)

    # Only the generator forms a process group with the trainer.
    assert problems(elsewhere, python) == []
    (problem,) = problems(elsewhere, python, *GENERATOR)
    assert problem.startswith(
        f"server.python={python}: torch 1.0+cpu is installed there, but torch"
        f" {metadata.version('torch')} here; "
    )


def test_only_servers_run_with_the_servers_interpreter(tmp_path: Path) -> None:
    config = make_config(tmp_path, "/servers/bin/python")
    file = str(tmp_path / "run" / "config.yaml")
    own = (sys.executable, "-m", "aligner")

    assert build_role_command("prepare", config) == (*own, "prepare", "--config", file)
    assert build_role_command("trainer", config) == (*own, "train", "--config", file)
    # The image of a container has its own `aligner`, except with server.python.
    for program in (None, ("aligner",)):
        assert build_role_command("reward.1", config, program) == (
            *("/servers/bin/python", "-m", "aligner", "serve", "role=reward.1"),
            *("--config", file),
        )
    assert build_role_command("trainer", config, ("aligner",))[:2] == ("aligner", "train")


def test_rank_of_other_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VERSION, "0.1.0")

    with pytest.raises(
        ConfigError, match=rf"aligner {__version__} is installed in this .* 0\.1\.0"
    ):
        adopt_environment()
