"""Tests of the text output of commands."""

from __future__ import annotations

import io

import pytest

from aligner.cli.command_table import COMMANDS, parse_arguments
from aligner.terminal import print_text, wrap_text
from tests.pseudo_terminal import find_long_lines

COMMAND = "aligner generate runs/sums --prompts sums.jsonl --limit 100"


class TerminalFile(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_are_wrapped_at_spaces_and_paths_stay_whole() -> None:
    path = "/a/long/path/to/a/file/with-hyphens"
    assert wrap_text(f"  the log is {path} and more", 20) == (
        f"  the log is\n    {path}\n    and more"
    )


def test_fields_of_a_step_are_not_separated_from_their_values() -> None:
    line = "step 1/6  reward 0.149  KL 0.0000  0.65 s/step"
    assert wrap_text(line, 20) == "step 1/6\n  reward 0.149\n  KL 0.0000\n  0.65 s/step"


def test_commands_have_lines_of_their_own() -> None:
    assert wrap_text(f"stopped; resume the run with: {COMMAND}", 40) == (
        f"stopped; resume the run with:\n  {COMMAND}"
    )
    assert wrap_text(f"    {COMMAND}  # generate responses", 40) == (
        f"    # generate responses\n    {COMMAND}"
    )


def test_only_terminals_receive_wrapped_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    text = "word " * 10
    terminal, pipe = TerminalFile(), io.StringIO()
    print_text(text, terminal)
    print_text(text, pipe)
    assert pipe.getvalue() == f"{text}\n"
    assert max(map(len, terminal.getvalue().splitlines())) <= 20


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_in_60_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit):
        parse_arguments([*([command] if command else []), "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert find_long_lines(lines) == []
    assert [line for line in lines if line.rstrip().endswith("-")] == []
