"""Tests of the table of commands and of the exit of a command."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aligner.cli.command_table import COMMANDS, load, parse_arguments
from aligner.cli.rank_processes import ROLES


@pytest.mark.parametrize(
    "function", [*(command.function for command in COMMANDS.values()), *ROLES.values()]
)
def test_every_command_and_role_has_its_function(function: str) -> None:
    found = load(function)
    assert inspect.isfunction(found) and found.__module__ == function.partition(":")[0]


def test_overrides_may_follow_options() -> None:
    parsed = parse_arguments(["launch", "experiment=tiny_ppo", "--dry-run", "seed=2"])
    assert (parsed.command, parsed.overrides, parsed.dry_run) == (
        "launch",
        ["experiment=tiny_ppo", "seed=2"],
        True,
    )


@pytest.mark.parametrize(
    "arguments", [[], ["launch", "--dry"], ["status", "run", "more"], ["absent"]]
)
def test_wrong_arguments_exit_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(arguments)
    assert ended.value.code == 2


@pytest.mark.promise("launcher-imports-stay-light")
def test_validate_does_not_import_torch() -> None:
    """The import of torch takes seconds, which would delay an error message."""
    code = (
        "import sys; from aligner.cli import main\ntry: main()\nfinally: assert 'torch' not in"
        " sys.modules, 'torch'"
    )
    arguments = ["validate", "experiment=tiny_ppo"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "trainer" in done.stdout, done.stderr


ENDING = """
import atexit, sys, threading, time
from aligner import cli

class Held:
    def __del__(self):
        print("taken apart")

def work():
    time.sleep(0.2)
    print("thread")

held = Held()
atexit.register(print, "handler")
threading.Thread(target=work).start()
cli.run()
"""


@pytest.mark.parametrize("arguments, code", [(["--version"], 0), (["nothing"], 2)])
def test_command_exit_runs_no_destructors(arguments: list[str], code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines()[-2:] == ["thread", "handler"]
    command, buffered = (
        [sys.executable, "-m", "aligner", *arguments],
        {
            **os.environ,
            "PYTHONUNBUFFERED": "",
        },
    )
    with Path("/dev/full").open("w") as full:
        lost = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, env=buffered, text=True, check=False
        )
    # Python itself reports the failed write, with exit code 120.
    assert lost.returncode == (code or 120) and ("No space left" in lost.stderr) == (code == 0)
