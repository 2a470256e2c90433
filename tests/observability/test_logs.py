"""Text and JSON logs of processes, and the launcher that reads them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from aligner.launcher.failure import find_root_failure, read_log_tail, read_reported_error
from aligner.observability.logs import format_launcher_line

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
SPEAKS = """
import logging, sys, threading, warnings
from aligner.errors import AlignerError
from aligner.observability.logs import set_log_step, configure_logs, log_failure
configure_logs(sys.argv[1], "reward.1")
logging.getLogger("aligner.training").info("replaying %d", 3)
logging.getLogger("megatron").warning("a library's word")
logging.getLogger("wandb").setLevel(logging.DEBUG)
logging.getLogger("wandb").info("what nobody asked for")
set_log_step(7)
print("a scorer's line", "ü", sep="\\n")
other = threading.Thread(target=print, args=("another thread",))
print("half a", end=" "); other.start(); print("line"); other.join()
print("to standard error", file=sys.stderr)
warnings.warn("deprecated")
try:
    raise ValueError("no such thing")
except ValueError as error:
    assert log_failure(error, None) == log_failure(AlignerError("a\\nb"), "step 7: a\\nb")
"""


def log_lines(format: str) -> list[str]:
    environment = {**os.environ, "RANK": "2"}
    command = [sys.executable, "-c", SPEAKS, format]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        check=True,
    )
    return done.stdout.splitlines()


def test_each_line_of_text_log_has_time_level_role_and_rank() -> None:
    lines = log_lines("text")
    prefix = rf"{TIME} (DEBUG|INFO|WARNING|ERROR|CRITICAL) reward\.1 2: "
    assert [line for line in lines if not re.match(prefix, line)] == []
    levels_and_texts = [tuple(line.split(" ", 5)[2::3]) for line in lines]
    for entry in [
        ("INFO", "replaying 3"),
        ("WARNING", "a library's word"),
        ("INFO", "a scorer's line"),
        ("INFO", "ü"),
        ("INFO", "to standard error"),
        ("CRITICAL", "Traceback (most recent call last):"),
        ("CRITICAL", "ValueError: no such thing"),
        ("CRITICAL", "aligner: error: step 7: a"),
        ("CRITICAL", "b"),
    ]:
        assert entry in levels_and_texts, entry
    assert [text for level, text in levels_and_texts if "deprecated" in text and level == "WARNING"]
    assert not [line for line in lines if "what nobody asked for" in line]


def test_json_log_lines_have_level_role_rank_and_step() -> None:
    records = [json.loads(line) for line in log_lines("json")]
    assert {(record["role"], record["rank"]) for record in records} == {("reward.1", 2)}
    assert all(record["time"].endswith("+00:00") for record in records)
    assert ["step" in record for record in records] == [False, False] + [True] * (len(records) - 2)
    said = [(record["level"], record["message"]) for record in records]
    expected = [
        ("info", "replaying 3"),
        ("warning", "a library's word"),
        ("info", "a scorer's line"),
        ("info", "ü"),
    ]
    assert said[:4] == expected
    assert sorted(said[4:6]) == [("info", "another thread"), ("info", "half a line")]
    assert said[6] == ("warning", "to standard error")
    assert said[7][0] == "warning" and "UserWarning: deprecated" in said[7][1]
    assert said[8:] == [
        ("critical", "ValueError: no such thing"),
        ("error", "aligner: error: step 7: a\nb"),
    ]
    assert records[8]["traceback"].startswith("Traceback (most recent call last):")


def rank(log: Path, ended_at: float) -> SimpleNamespace:
    return SimpleNamespace(
        role="trainer", rank=0, log=log, log_start=0, ended_at=ended_at, exit_code=1
    )


def line(message: str, **more: str) -> str:
    return (
        json.dumps({"level": "error", "role": "trainer", "rank": 0, "message": message, **more})
        + "\n"
    )


def test_launcher_reads_errors_from_json_logs(tmp_path: Path) -> None:
    victim, cause = tmp_path / "trainer-0.log", tmp_path / "trainer-1.log"
    victim.write_text(
        line("RuntimeError: lost", traceback="Traceback\nRuntimeError: Connection closed by peer")
    )
    cause.write_text(
        line("loading")
        + "a library's own line\n"
        + line("aligner: error: step 3: the reward is nan\nfor 'abc'")
    )
    failed = [rank(victim, 1.0), rank(cause, 1.5)]
    assert find_root_failure(failed).log == cause
    assert read_reported_error(failed[1]) == "step 3: the reward is nan\nfor 'abc'"
    assert read_log_tail(cause) == [
        "loading",
        "a library's own line",
        "aligner: error: step 3: the reward is nan",
        "for 'abc'",
    ]
    assert read_log_tail(victim)[-1] == "RuntimeError: lost"


def test_launcher_lines_have_the_format_of_the_log() -> None:
    line = format_launcher_line("text", "critic", 1, "critic is started again")
    assert re.fullmatch(rf"{TIME} INFO critic 1: --- critic is started again ---\n", line)
    record = json.loads(format_launcher_line("json", "critic", 1, "critic is started again"))
    assert (record["role"], record["rank"], record["message"]) == (
        "critic",
        1,
        "critic is started again",
    )
