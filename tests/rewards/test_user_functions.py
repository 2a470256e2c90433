"""Custom scoring functions in child processes: forks, async forms, abstentions and deadlocks."""

from __future__ import annotations

import math
import re
import time

import pytest
import torch

from aligner import child_function
from aligner.data.types import ABSTAINED
from aligner.errors import ConfigError
from aligner.rewards.function_forms import ScoringRequest
from aligner.rewards.scorers import (
    ScorerDeadlocked,
    ScorerTimeout,
    ScoringError,
    call_scorer,
    call_step_scorer,
    resolve_scorer,
    resolve_step_scorer,
)
from aligner.rewards.sources import CombinedReward, ScoringBatch, StepSource, TextSource
from aligner.schema.reward_sources import FunctionSource
from tests.rewards import user_functions

NAME = user_functions.__name__


def requests(*responses: str) -> list[ScoringRequest]:
    return [ScoringRequest(f"prompt {number}", each) for number, each in enumerate(responses)]


def scores(function: str, *responses: str, timeout_s: float | None = 20) -> list[float | None]:
    name = f"{NAME}:{function}"
    return call_scorer(name, resolve_scorer(name, timeout_s=timeout_s), requests(*responses))


@pytest.mark.promise("reward-answers-never-shift")
def test_forked_process_does_not_shift_scores():
    scorer = resolve_scorer(f"{NAME}:forks_at_the_second_call", timeout_s=20)
    found = [call_scorer("mine", scorer, requests("a")) for _ in range(6)]
    assert found == [[1.0], [2.0], [3.0], [4.0], [5.0], [6.0]]


def test_exception_of_forked_process_is_ignored():
    scorer = resolve_scorer(f"{NAME}:forks_and_raises", timeout_s=20)
    assert [call_scorer("mine", scorer, requests("a" * n)) for n in (1, 2, 3)] == [
        [1.0],
        [2.0],
        [3.0],
    ]


def test_exit_is_detected_while_forked_process_lives():
    began = time.monotonic()
    with pytest.raises(ScoringError, match="exited during a call: exit code 3"):
        scores("leaves_a_forked_process", "a")
    assert time.monotonic() - began < 4


@pytest.mark.promise("reward-function-abstains")
def test_none_is_an_abstention():
    assert scores("abstains_without_response", "ab", "", "c") == [2.0, None, 1.0]


@pytest.mark.parametrize(
    "function",
    [
        "numpy_scores",
        "numpy_scalars",
        "tensor_scores",
        "yields_scores",
        "other_numbers",
        "is_async",
        "is_async_generator",
        "returns_awaitables",
        "async_callable",
    ],
)
def test_numeric_types_and_async_forms_are_accepted(function):
    assert scores(function, "a", "", "abc") == [1.0, 0.0, 3.0]


def test_async_calls_share_one_event_loop():
    scorer = resolve_scorer(f"{NAME}:uses_one_loop", timeout_s=20)
    assert [call_scorer("mine", scorer, requests("a")) for _ in range(2)] == [[1.0], [1.0]]


def test_error_of_async_function_names_the_prompt():
    with pytest.raises(
        ScoringError,
        match=r"raised KeyError in user_functions.py:141: 'gold' for prompt 'prompt 0'",
    ):
        scores("async_raises", "a")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("one_score_too_few", "returned 3 scores for 4 responses; the first was for prompt"),
        ("text_scores", "returned '1.5' for prompt 'prompt 0' and response 'a'; must be a number"),
        ("list_scores", r"returned \[1.0, 2.0\] for prompt 'prompt 0'.* must be a number"),
        ("one_text", "returned str for 4 responses; must return a list with one score"),
        ("nothing", "returned NoneType for 4 responses; must return a list"),
        ("mapping", "returned dict for 4 responses; must return a list"),
    ],
)
def test_error_of_invalid_scores_names_the_function(function, message):
    name = f"{NAME}:{function}"
    place = re.escape(f"(reward.sources.mine.function={name})")
    scorer = resolve_scorer(name, "reward.sources.mine.function", 20)
    with pytest.raises(ScoringError, match=f"the scorer mine {message}.*{place}"):
        call_scorer("mine", scorer, requests("a", "b", "c", "d"))


def test_steps_may_be_async_and_abstain():
    scorer = resolve_step_scorer(f"{NAME}:async_steps", "reward.function", 20)
    assert call_step_scorer("mine", scorer, requests("ab")) == [[(1, 2.0)]]
    scorer = resolve_step_scorer(f"{NAME}:gives_steps_or_abstains", "reward.function", 20)
    assert call_step_scorer("mine", scorer, requests("ab", "")) == [[(1, 2.0)], None]


def source(name: str, **more: object) -> FunctionSource:
    return FunctionSource(name=name, key=f"reward.sources.{name}", function="own:mine", **more)  # type: ignore[arg-type]


def fixed_source(name: str, *given: float | None) -> TextSource:
    return TextSource(name, lambda asked: list(given[: len(asked)]))


@pytest.mark.parametrize(
    ("combine", "expected"),
    [
        ("sum", [11.0, 20.0, 3.0]),
        ("mean", [5.5, 20.0, 3.0]),
        ("min", [1.0, 20.0, 3.0]),
        ("mean_minus_std", [1.0, 20.0, 3.0]),
        ("mean_minus_variance", [5.5 - 20.25, 20.0, 3.0]),
    ],
)
def test_abstaining_source_is_excluded_from_ensemble(combine, expected):
    parts = [
        (source("one"), fixed_source("one", 1.0, None, 3.0, None)),
        (source("two", bias=0.0, weight=2.0), fixed_source("two", 5.0, 10.0, None, None)),
    ]
    batch = ScoringBatch(lambda: requests("a", "b", "c", "d"))
    found, given = CombinedReward(parts, combine, 1.0).compute_scores_and_parts(batch)
    assert found[:3].tolist() == expected and math.isnan(found[3])
    assert [part.tolist() for part in given] == [[1.0, 0.0, 3.0, 0.0], [10.0, 20.0, 0.0, 0.0]]


def test_bias_is_not_added_where_a_source_abstains():
    parts = [(source("one", bias=1.0, gain=2.0), fixed_source("one", None, 3.0))]
    found = CombinedReward(parts)(ScoringBatch(lambda: requests("a", "b")))
    assert math.isnan(found[0]) and found[1] == 7.0


def test_abstention_of_the_only_source_has_no_score():
    only_math = source("one", weight=0.0, task_weights={"math": 1.0})
    other = source("two", task_weights={"math": 0.0})
    batch = [ScoringRequest("p", "r", {"task": task}) for task in ("math", "else")]
    parts = [(only_math, fixed_source("one", None)), (other, fixed_source("two", 2.0))]
    found = CombinedReward(parts)(ScoringBatch(lambda: batch))
    assert math.isnan(found[0]) and found[1] == 2.0


def test_abstention_differs_from_a_response_without_steps():
    steps = StepSource("mine", lambda asked: [None, [], [(1, 2.0)]])
    batch = ScoringBatch(lambda: requests("a", "b", "c"), torch.zeros(3, 4, dtype=torch.int64))
    assert (steps.compute_raw_scores(batch)[0] == ABSTAINED).all() and steps.compute_raw_scores(
        batch
    )[1].isnan().all()
    found, _, inside = CombinedReward([(source("mine"), steps)]).compute_scores_and_steps(batch)
    assert math.isnan(found[0]) and found[1:].tolist() == [0.0, 2.0]
    assert inside is not None and inside[0].isnan().all() and inside[2, 1] == 2.0


@pytest.mark.parametrize(
    ("function", "frames"),
    [
        ("deadlocks", ["_acquire_twice", "deadlocks"]),
        ("async_deadlocks", ["_waits_forever", "async_deadlocks"]),
        ("waits_for_a_thread_that_raised", ["waits_for_a_thread_that_raised"]),
        ("is_stuck_in_c", ["is_stuck_in_c"]),
    ],
)
def test_timeout_contains_the_stack_of_the_function(function, frames):
    with pytest.raises(ScorerTimeout) as caught:
        scores(function, "a", timeout_s=0.3)
    message = str(caught.value)
    assert f"(reward.function={NAME}:{function})" in message
    for frame in frames:
        assert re.search(rf'user_functions\.py", line \d+ in {frame}\b', message), message
    assert "child_function.py" not in message and "scorers.py" not in message
    if "thread" in function:
        assert "Thread worker raised KeyError: 'gold'" in message


@pytest.mark.promise("deadlocked-reward-is-named")
def test_second_prompt_timeout_is_a_deadlock_with_stack():
    name = f"{NAME}:deadlocks"
    scorer = resolve_scorer(name, timeout_s=0.3)
    first, second = requests("a", "b")
    with pytest.raises(ScorerTimeout):
        call_scorer("mine", scorer, [first])
    with pytest.raises(ScorerDeadlocked, match=f"reward.function={name}") as caught:
        call_scorer("mine", scorer, [second])
    assert "in _acquire_twice" in str(caught.value)
    began = time.monotonic()
    with pytest.raises(ScorerDeadlocked, match="in _acquire_twice"):
        call_scorer("mine", scorer, [first])
    assert time.monotonic() - began < 0.2, "later calls fail at once"


def test_timeouts_of_one_prompt_are_no_deadlock():
    scorer = resolve_scorer(f"{NAME}:deadlocks_on_seven", timeout_s=0.3)
    good, bad, other = requests("a", "7", "b")
    for batch in ([good, bad], [bad]):
        with pytest.raises(ScorerTimeout):
            call_scorer("mine", scorer, batch)
    assert call_scorer("mine", scorer, [other]) == [1.0]
    with pytest.raises(ScorerTimeout):
        call_scorer("mine", scorer, [bad])


def test_batch_deadlock_is_detected_by_its_parts():
    scorer = resolve_scorer(f"{NAME}:deadlocks", timeout_s=0.3)
    first, second = batch = requests("a", "b")
    for part in (batch, [first]):
        with pytest.raises(ScorerTimeout):
            call_scorer("mine", scorer, part)
    with pytest.raises(ScorerDeadlocked):
        call_scorer("mine", scorer, [second])


def test_deadlock_of_every_third_call_is_detected():
    scorer = resolve_scorer(f"{NAME}:deadlocks_at_every_third_call", timeout_s=0.2)
    outcomes = []
    for number in range(12):
        try:
            call_scorer("mine", scorer, [ScoringRequest(f"prompt {number}", "a")])
        except ScoringError as error:
            outcomes.append(type(error))
    assert outcomes == [ScorerTimeout] * 3 + [ScorerDeadlocked]


def test_hanging_import_is_reported_with_its_stack(tmp_path, monkeypatch):
    (tmp_path / "slow_module.py").write_text(
        "import threading\ndef wait():\n    threading.Event().wait()\nwait()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(child_function, "_IMPORT_TIMEOUT_S", 0.5)
    with pytest.raises(ConfigError, match=r"(?s)slow_module:f: did not start .* in wait\n"):
        resolve_scorer("slow_module:f")


def test_exit_of_the_process_names_function_and_code():
    place = re.escape(f"(reward.function={NAME}:exits)")
    with pytest.raises(ScoringError, match=f"exited during a call: exit code 3 .*{place}"):
        scores("exits", "a")
