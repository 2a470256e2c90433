"""Control characters in the files of a run, in data and in models never reach a terminal."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.table import Table

from aligner.cli import main
from aligner.config.compose import compose_config, save_config
from aligner.launcher.run_directory import LauncherState, RoleState
from aligner.observability.console import PlainProgress, RunConsole, print_line, print_table
from aligner.terminal import escape_controls, format_json, print_text

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp\r\x08\ud800"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]")
COMMANDS = (["status"], ["status", "--json"])


def test_control_characters_are_visible() -> None:
    assert escape_controls("a\x1b[31m\u202e\r\x9b\x7f\ud800") == (
        r"a\x1b[31m\u202e\r\x9b\x7f\ud800"
    )
    text = "two\nlines\twith é, 日本, \N{ZERO WIDTH JOINER} and 🙂"
    assert escape_controls(text) == text


def test_json_has_no_control_characters_and_keeps_its_value() -> None:
    value = {HOSTILE: [HOSTILE, "é"]}
    text = format_json(value)
    assert not RAW.search(text) and "é" in text
    assert json.loads(text) == value


@pytest.mark.parametrize(
    "show",
    [
        lambda console: print_text(HOSTILE, console.file),
        lambda console: print_text(HOSTILE, console.file, style=""),
        lambda console: print_line(console, HOSTILE),
        lambda console: print_table(console, hostile_table()),
        lambda console: PlainProgress(3, console).show_note(HOSTILE),
        lambda console: PlainProgress(3, console).show_error(HOSTILE),
        lambda console: PlainProgress(3, console).show_step(
            {"step": 1, f"eval/{HOSTILE}/score": 1.0}, problem=HOSTILE
        ),
        lambda console: PlainProgress(3, console).show_samples(
            [{"step": 1, "prompt": HOSTILE, "response": HOSTILE, "reward": 1.0}]
        ),
    ],
)
def test_output_of_a_launch_has_no_control_characters(
    show: Callable[[RunConsole], None],
) -> None:
    file = io.StringIO()
    show(RunConsole(file=file, width=200))
    assert "gnp" in file.getvalue() and not RAW.search(file.getvalue())


def hostile_table() -> Table:
    table = Table(f"{HOSTILE}[/b]", title=f"{HOSTILE}[/b]")
    table.add_row(f"{HOSTILE}[/b]")
    return table


def test_events_of_a_launch_have_no_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    RunConsole("json").print_event("note", message=HOSTILE)
    printed = capsys.readouterr().out
    assert not RAW.search(printed) and json.loads(printed)["message"] == HOSTILE


@pytest.fixture
def hostile_run(tmp_path: Path) -> Path:
    """A run directory whose files contain control characters wherever they contain text."""
    config = compose_config(["experiment=tiny_ppo", f"run.dir={tmp_path / 'run'}"])
    run = tmp_path / "run"
    run.mkdir()
    save_config(config, run / "config.yaml")
    record = {"step": 1, "time/step": 1.0, f"eval/{HOSTILE[:-1]}/score": 0.5}
    (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    state = LauncherState(
        os.getpid(),
        None,
        socket.gethostname(),
        started=1.0,
        roles={HOSTILE[:-1]: RoleState(ranks=1)},
        ended=2.0,
        exit_code=1,
        reason=HOSTILE[:-1],
    )
    state.write(run / "status.json")
    return run


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_status_of_a_hostile_run_has_no_control_characters(
    hostile_run: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        main([command[0], str(hostile_run), *command[1:]])
    captured = capsys.readouterr()
    assert "gnp" in captured.out and not RAW.search(captured.out + captured.err)


def test_data_and_errors_have_no_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "data.jsonl"
    record = {"prompt": HOSTILE[:-1], "answer": HOSTILE[:-1], HOSTILE[:-1]: "x"}
    file.write_text(json.dumps(record) + "\n")
    for arguments in (["data", str(file)], ["data", str(file), "--json"], ["status", HOSTILE[:-1]]):
        with contextlib.suppress(SystemExit):
            main(arguments)
        captured = capsys.readouterr()
        assert "gnp" in captured.out + captured.err
        assert not RAW.search(captured.out + captured.err)
