"""Exceptions of the user's code: their place, their report and the error of the failed run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aligner.config.compose import compose_config
from aligner.errors import AlignerError
from aligner.launcher.failure import add_user_error
from aligner.observability.user_errors import (
    UserError,
    UserErrorFollower,
    delete_user_errors,
    user_error_environment,
)
from aligner.paths import RunPaths
from aligner.user_code import locate_user_error

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


def test_failed_run_names_the_first_cause() -> None:
    cause = UserError("ValueError in a.py:1", "no", "Traceback …", Path("logs/reward-0.log"))
    skipped = AlignerError(
        "trainer rank 0 exited", summary="rollout.max_skipped_prompts=8: 9 were skipped"
    )
    error = add_user_error(skipped, [cause])
    assert str(error).splitlines() == [
        "ValueError in a.py:1: no",
        "traceback: logs/reward-0.log",
        "consequence: rollout.max_skipped_prompts=8: 9 were skipped",
    ]
    assert error.summary.startswith("ValueError in a.py:1: no; then rollout.max_skipped_prompts=8")

    named = AlignerError("trainer rank 0 exited: raised ValueError in a.py:1: no for prompt 'x'")
    assert str(add_user_error(named, [cause])).startswith("ValueError in a.py:1: no")


def test_failure_without_relation_to_an_exception_is_unchanged() -> None:
    cause = UserError("ValueError in a.py:1", "no", None, Path("logs/reward-0.log"))
    error = AlignerError("trainer rank 0 exited with code 1: CUDA out of memory")
    assert add_user_error(error, [cause]) is error
