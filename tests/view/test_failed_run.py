"""The banner of a failed run: the exception that ended it."""

from __future__ import annotations

import json
from html import unescape
from pathlib import Path

from aligner.paths import RunPaths
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


CAUSE = "ValueError in my_reward.py:12: could not convert string to float: 'five'"


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
            assert f"<h2>{CAUSE}</h2>" in page
            assert "/home/me/my_reward.py:12 in score" in page
            assert f'href="{run}/logs?file=reward-0.log"' in page
            assert REASON in page and "restart the run with: aligner launch" in page
            assert "KeyError" not in page


def test_pages_show_recorded_exception_of_user_code(tmp_path: Path) -> None:
    paths = begin(tmp_path / "run", "experiment=tiny_ppo", name="run")
    library_frame = '  File "/site-packages/numpy/core.py", line 7, in parse\n    raise\nValueError'
    traceback = TRACEBACK.replace("ValueError", library_frame).rstrip()
    record = {"place": "ValueError in my_reward.py:12", "message": CAUSE.partition(": ")[2]}
    paths.user_errors.mkdir()
    lines = [json.dumps({**record, "traceback": traceback}), json.dumps(record)]
    (paths.user_errors / "reward-0.jsonl").write_text("\n".join(lines) + "\n")
    end(paths, exit_code=1, reason=f"{CAUSE}; then trainer rank 0 exited with code 1")
    with serving(tmp_path) as viewer:
        viewer.open()
        runs = viewer.get("/")
        page = unescape(viewer.get(paths_of(runs)["run"]).text)
    assert CAUSE in unescape(runs.text) and "exited with code 1" not in runs.text
    assert f"<h2>{CAUSE}</h2>" in page and "/numpy/core.py" in page
    assert "Raised in <code>/home/me/my_reward.py:12 in score</code>" in page
    assert "Consequence: trainer rank 0 exited with code 1</p>" in page


def test_list_shows_first_cause_of_failure(tmp_path: Path) -> None:
    paths = begin(tmp_path / "run", "experiment=tiny_ppo", name="run")
    paths.log("reward", 0).write_text(TRACEBACK)
    end(paths, exit_code=1, reason=REASON)
    with serving(tmp_path) as viewer:
        viewer.open()
        page = unescape(viewer.get("/").text)
    assert CAUSE in page and "trainer rank 0 exited" not in page


def test_banner_shows_reason_without_traceback(tmp_path: Path) -> None:
    paths = begin(tmp_path / "run", "experiment=tiny_ppo", name="run")
    paths.log("trainer", 0).write_text(OTHER)
    end(paths, exit_code=1, reason="trainer rank 0 was killed by SIGKILL")
    with serving(tmp_path) as viewer:
        viewer.open()
        page = viewer.get(paths_of(viewer.get("/"))["run"]).text
    assert "<h2>trainer rank 0 was killed by SIGKILL</h2>" in page and "KeyError" not in page


def test_exception_of_unfinished_log_is_found(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.logs.mkdir()
    paths.log("trainer", 0).write_text("Traceback (most recent call last):\n  File")
    paths.log("reward", 0).write_text(TRACEBACK)
    failure = find_failure(paths, REASON)
    assert failure is not None and failure.file == "reward-0.log"
    assert failure.traceback.startswith("Traceback") and failure.traceback.count("\n") == 5
    assert find_failure(RunPaths(tmp_path / "missing"), REASON) is None
