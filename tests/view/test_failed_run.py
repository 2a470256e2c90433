"""The banner of a failed run: the exception that ended it."""

from __future__ import annotations

from html import unescape
from pathlib import Path

from aligner.view.run_logs import find_failure
from tests.view.served import serving
from tests.view.test_view import paths_of
from tests.view.written_runs import begin, end

TRACEBACK = """Traceback (most recent call last):
  File "/pkg/scorers.py", line 175, in call
    return function(batch)
  File "/home/me/my_reward.py", line 12, in score
    return float(text)
ValueError: could not convert string to float: 'five'
"""
OTHER = TRACEBACK.replace("ValueError: could not convert string to float: 'five'", "KeyError: 'x'")
REASON = (
    "trainer rank 0 exited with code 1: the scorer function raised ValueError: could not convert"
    " string to float: 'five' for prompt 'a; b' (reward.function=my_reward:score)"
)


def test_banner_shows_exception_location_and_command(tmp_path: Path) -> None:
    paths = begin(tmp_path / "run", "experiment=tiny_ppo", name="run")
    paths.log("reward", 0).write_text(f"ready\n{TRACEBACK}2026-11-29 06:20:51 WARNING later\n")
    paths.log("trainer", 0).write_text("aligner: error: the scorer function raised\n" + OTHER)
    end(paths, exit_code=1, reason=REASON)
    with serving(tmp_path) as viewer:
        viewer.open()
        run = paths_of(viewer.get("/"))["run"]
        for path in (run, f"{run}/state", f"{run}/samples"):
            page = unescape(viewer.get(path).text)
            assert "<h2>ValueError: could not convert string to float: 'five'</h2>" in page
            assert "/home/me/my_reward.py:12 in score" in page
            assert f'href="{run}/logs?file=reward-0.log"' in page
            assert REASON in page and "restart the run with: aligner launch" in page
            assert "KeyError" not in page


def test_banner_shows_reason_without_traceback(tmp_path: Path) -> None:
    paths = begin(tmp_path / "run", "experiment=tiny_ppo", name="run")
    paths.log("trainer", 0).write_text(OTHER)
    end(paths, exit_code=1, reason="trainer rank 0 was killed by SIGKILL")
    with serving(tmp_path) as viewer:
        viewer.open()
        page = viewer.get(paths_of(viewer.get("/"))["run"]).text
    assert "<h2>trainer rank 0 was killed by SIGKILL</h2>" in page and "KeyError" not in page


def test_exception_of_unfinished_log_is_found(tmp_path: Path) -> None:
    (tmp_path / "trainer-0.log").write_text("Traceback (most recent call last):\n  File")
    (tmp_path / "reward-0.log").write_text(TRACEBACK)
    failure = find_failure(tmp_path, REASON)
    assert failure is not None and failure.file == "reward-0.log"
    assert failure.traceback.startswith("Traceback") and failure.traceback.count("\n") == 5
    assert find_failure(tmp_path / "missing", REASON) is None
