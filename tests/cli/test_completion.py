"""Tests of the scripts of `aligner completion`, in the shells that this machine has."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aligner.cli.command_table import COMMANDS
from aligner.cli.completion import _PATH_KEYS
from aligner.schema.keys import get_schema_keys

FISH = shutil.which("fish")
ZSH = shutil.which("zsh")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the script of each shell, and files to complete."""
    directory = tmp_path_factory.mktemp("scripts")
    for shell in ("bash", "zsh", "fish"):
        command = [sys.executable, "-m", "aligner", "completion", shell]
        (directory / f"script.{shell}").write_text(subprocess.check_output(command, text=True))
    (directory / "train.jsonl").touch()
    (directory / "subdirectory").mkdir()
    return directory


def complete_in_bash(directory: Path, line: str) -> str:
    """Return the line of an interactive bash after the Tab key and `|`."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(directory)
        # Without a color terminal, bash prints no escape codes.
        os.environ["TERM"] = "dumb"
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
    try:
        os.write(terminal, b"source script.bash; bind 'set bell-style none'; PS1='ready''> '\n")
        read_until(terminal, "ready> ")
        os.write(terminal, f"{line}\t|".encode())
        return read_until(terminal, "|").partition("|")[0]
    finally:
        os.kill(process, signal.SIGKILL)
        os.close(terminal)
        os.waitpid(process, 0)


def read_until(terminal: int, end: str, timeout_s: float = 20) -> str:
    """Return the output of a terminal until it contains `end`."""
    output = ""
    deadline = time.monotonic() + timeout_s
    while end not in output:
        assert time.monotonic() < deadline, output
        if select.select([terminal], [], [], 0.1)[0]:
            output += os.read(terminal, 65536).decode()
    return output


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("aligner la", "aligner launch "),
        ("aligner launch --dr", "aligner launch --dry-run "),
        ("aligner launch algorithm=gr", "aligner launch algorithm=grpo "),
        ("aligner validate reward=exact", "aligner validate reward=exact_match "),
        ("aligner launch algorithm.kl_coe", "aligner launch algorithm.kl_coefficient="),
        ("aligner launch engine.placement=c", "aligner launch engine.placement=colocated "),
        ("aligner launch seed=2 run.automatic=t", "aligner launch seed=2 run.automatic=true "),
        ("aligner launch data.path=tr", "aligner launch data.path=train.jsonl "),
        ("aligner launch run.dir=sub", "aligner launch run.dir=subdirectory/"),
        ("aligner report sub", "aligner report subdirectory/"),
    ],
)
def test_interactive_bash_completes_line(scripts: Path, line: str, completed: str) -> None:
    assert complete_in_bash(scripts, line) == completed


# Calls the completion as bash does, because `time` cannot measure the Tab key.
MEASURE = """
source script.bash
COMP_LINE="aligner launch engine.pl" COMP_POINT=24 COMP_CWORD=2
COMP_WORDS=(aligner launch engine.pl)
TIMEFORMAT=%R
time for i in {1..10}; do _aligner; done
echo "${COMPREPLY[*]}"
"""


def test_bash_completion_takes_less_than_150_ms(scripts: Path) -> None:
    done = subprocess.run(
        ["bash", "--norc", "-c", MEASURE], cwd=scripts, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "engine.placement="
    assert float(done.stderr) / 10 < 0.15


@pytest.mark.skipif(FISH is None, reason="fish is not installed")
@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("aligner la", "launch"),
        ("aligner launch --dr", "--dry-run"),
        ("aligner launch algorithm=gr", "algorithm=grpo"),
        ("aligner launch algorithm.kl_coe", "algorithm.kl_coefficient="),
        ("aligner launch data.path=tr", "data.path=train.jsonl"),
        ("aligner report sub", "subdirectory/"),
    ],
)
def test_fish_completes_line(scripts: Path, line: str, completed: str) -> None:
    command = [str(FISH), "--no-config", "-c", f"source script.fish; complete -C '{line}'"]
    done = subprocess.run(command, cwd=scripts, capture_output=True, text=True, timeout=60)
    words = [found.partition("\t")[0] for found in done.stdout.splitlines()]
    assert completed in words, done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_script_contains_all_commands_and_keys(scripts: Path, shell: str) -> None:
    script = (scripts / f"script.{shell}").read_text()
    assert all(f"{name}=" in script for name in get_schema_keys())
    assert all(name in script for name in COMMANDS)


@pytest.mark.skipif(ZSH is None, reason="zsh is not installed")
def test_zsh_script_has_valid_syntax(scripts: Path) -> None:
    done = subprocess.run(
        [str(ZSH), "-n", "script.zsh"], cwd=scripts, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_path_keys_exist() -> None:
    assert set(_PATH_KEYS) <= get_schema_keys().keys()
