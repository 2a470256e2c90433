"""Exceptions of the user's code: their place, their report and the error of the failed run."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aligner.config.compose import compose_config
from aligner.errors import AlignerError
from aligner.launcher.failure import add_first_cause
from aligner.observability.user_errors import (
    UserError,
    UserErrorFollower,
    delete_user_errors,
    summarize_skip_reasons,
    user_error_environment,
)
from aligner.paths import RunPaths
from aligner.user_code import (
    USER_ERRORS,
    is_connection_error,
    locate_user_error,
    report_skipped_prompt,
)

REWARD = """import json

def parse(text):
    return json.loads(text)

def score(texts):
    return [parse(text) for text in texts]
"""
CALLS = """
from aligner.child_function import ChildFunction, ChildRaised
function = ChildFunction("my_reward", "score")
for texts in (["1"], ["oops"], ["oops"], [None]):
    try:
        print(function(texts))
    except ChildRaised as error:
        print(error)
function.close()
"""


@pytest.fixture
def called(tmp_path: Path) -> tuple[str, RunPaths]:
    """Return the output of calls of a function in a rank, and the paths of the run."""
    (tmp_path / "my_reward.py").write_text(REWARD)
    config = compose_config(["experiment=tiny_ppo", f"run.dir={tmp_path / 'run'}"])
    environment = {"RANK": "1", **user_error_environment(config, "reward")}
    done = subprocess.run(
        [sys.executable, "-c", CALLS],
        cwd=tmp_path,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout, RunPaths(tmp_path / "run")


def test_exception_of_a_library_is_located_in_the_users_file(
    called: tuple[str, RunPaths],
) -> None:
    assert "JSONDecodeError in my_reward.py:4: Expecting value" in called[0]
    assert "TypeError in my_reward.py:4: the JSON object must be" in called[0]


def test_first_report_of_a_place_has_the_traceback(called: tuple[str, RunPaths]) -> None:
    follower = UserErrorFollower(called[1])
    errors = follower.read_new_errors()
    assert [error.place for error in errors] == [
        "JSONDecodeError in my_reward.py:4",
        "TypeError in my_reward.py:4",
    ]
    assert errors[0].summary.startswith("JSONDecodeError in my_reward.py:4: Expecting value")
    assert errors[0].traceback is not None and "return json.loads(text)" in errors[0].traceback
    assert errors[0].log == called[1].log("reward", 1)
    assert not follower.read_new_errors()
    delete_user_errors(called[1])
    assert not UserErrorFollower(called[1]).read_new_errors()


def test_report_of_another_process_is_shown_without_traceback(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.user_errors.mkdir()
    record = {"place": "ValueError in a.py:1", "message": "no"}
    (paths.user_errors / "trainer-0.jsonl").write_text(json.dumps(record) + "\n")
    (error,) = UserErrorFollower(paths).read_new_errors()
    assert (error.summary, error.traceback) == ("ValueError in a.py:1: no", None)


def test_exception_without_frames_is_named_by_its_type() -> None:
    assert locate_user_error(ValueError("no")) == "ValueError"


CAUSE = UserError("ValueError in a.py:1", "no", "Traceback …", Path("logs/reward-0.log"))
SKIPPED = AlignerError(
    "trainer rank 0 exited", summary="rollout.max_skipped_prompts=8: 9 were skipped"
)
TRAINER_LOG = Path("logs/trainer-0.log")


def test_failed_run_names_the_first_cause_and_both_logs() -> None:
    reasons = ["the scorer raised ValueError in a.py:1: no for prompt 'x'"]
    error = add_first_cause(SKIPPED, TRAINER_LOG, [CAUSE], reasons)
    assert str(error).splitlines() == [
        "ValueError in a.py:1: no",
        "traceback: logs/reward-0.log",
        "consequence: rollout.max_skipped_prompts=8: 9 were skipped",
        "log: logs/trainer-0.log",
    ]
    assert error.summary.startswith("ValueError in a.py:1: no; then rollout.max_skipped_prompts=8")

    named = AlignerError("trainer rank 0 exited: raised ValueError in a.py:1: no for prompt 'x'")
    assert str(add_first_cause(named, TRAINER_LOG, [CAUSE])).startswith("ValueError in a.py:1: no")


def test_older_exception_is_not_the_cause_of_prompts_that_timed_out() -> None:
    timeout = "the scorer returned no result within 1 s"
    error = add_first_cause(SKIPPED, TRAINER_LOG, [CAUSE], [timeout] * 9)
    assert str(error).startswith(f"{timeout}\nconsequence: ")
    assert "ValueError" not in str(error)
    assert summarize_skip_reasons([timeout] * 9, [CAUSE]) == timeout


def test_step_line_lists_each_reason_once() -> None:
    reasons = ["raised ValueError in a.py:1: no for prompt 'x'", "timed out", "timed out"]
    assert summarize_skip_reasons(reasons, [CAUSE]) == "timed out; ValueError in a.py:1: no"


def test_failure_without_relation_to_an_exception_is_unchanged() -> None:
    error = AlignerError("trainer rank 0 exited with code 1: CUDA out of memory")
    assert add_first_cause(error, TRAINER_LOG, [CAUSE]) is error
    assert add_first_cause(SKIPPED, TRAINER_LOG, [CAUSE]) is SKIPPED


def test_traceback_begins_in_the_users_file(called: tuple[str, RunPaths]) -> None:
    error, *_ = UserErrorFollower(called[1]).read_new_errors()
    assert error.traceback is not None
    first_frame = error.traceback.splitlines()[1]
    assert "my_reward.py" in first_frame


def test_skip_reasons_are_read_apart_from_exceptions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(USER_ERRORS, str(RunPaths(tmp_path).user_errors / "trainer-"))
    monkeypatch.setenv("RANK", "0")
    report_skipped_prompt("the judge does not answer")
    follower = UserErrorFollower(RunPaths(tmp_path))
    reports = follower.read_new_reports()
    assert (reports.errors, reports.skip_reasons) == ([], ["the judge does not answer"])
    assert not follower.read_new_reports().skip_reasons


@pytest.mark.parametrize(
    "error, is_connection",
    [
        (ConnectionRefusedError(), True),
        (TimeoutError(), True),
        (OSError(errno.EHOSTUNREACH, "no route"), True),
        (FileNotFoundError(), False),
        (ValueError(), False),
    ],
)
def test_connection_errors_are_found_in_causes(error: Exception, is_connection: bool) -> None:
    outer = RuntimeError("request failed")
    outer.__cause__ = error
    assert is_connection_error(outer) == is_connection
