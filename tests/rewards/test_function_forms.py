"""Tests of reward functions that were written for TRL or verl."""

from __future__ import annotations

from typing import Any

import pytest

from aligner.config.compose import compose_config
from aligner.errors import ConfigError
from aligner.rewards.scorers import ScoringError, ScoringRequest, call_scorer, resolve_scorer
from aligner.schema.evaluation_suites import needs_prompt_messages
from tests.rewards import foreign_functions

NAME = foreign_functions.__name__
MESSAGES = [{"role": "user", "content": "1+1?"}]
VERL = {
    "data_source": "openai/gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7},
}


def score(function: str, *requests: ScoringRequest) -> list[float | None]:
    name = f"{NAME}:{function}"
    return call_scorer(name, resolve_scorer(name, timeout_s=20), requests)


def request(response: str, **metadata: Any) -> ScoringRequest:
    return ScoringRequest("1+1?", response, metadata)


@pytest.mark.parametrize(
    ("function", "requests", "expected"),
    [
        ("length_near_twenty", [request("a" * 18), request("a" * 25)], [-2, -5]),
        (
            "think_format",
            [request("<think>1</think>2", messages=MESSAGES), request("2", messages=MESSAGES)],
            [1, 0],
        ),
        (
            "boxed_equals",
            [
                request(r"it is \boxed{2}", ground_truth="2"),
                request(r"\boxed{3}", ground_truth="2"),
            ],
            [1, 0],
        ),
        ("only_math", [request("a", task="math"), request("a", task="code")], [1, None]),
        ("asks_a_service", [request("a", messages=MESSAGES)], [4]),
        ("reads_the_state", [request("a", task="math"), request("b")], [1, 1]),
        ("compute_score", [request("2", **VERL), request("3", **VERL)], [1, 0]),
        ("compute_details", [request("2", **VERL)], [7]),
        ("compute_later", [request("2", answer="2"), request("2", answer="3")], [1, 0]),
    ],
)
def test_functions_of_trl_and_verl_run_unchanged(
    function: str, requests: list[ScoringRequest], expected: list[float | None]
) -> None:
    assert score(function, *requests) == expected


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("boxed_equals", "no record has the field `ground_truth`, which the function requires"),
        ("compute_score", "the record lacks `reward_model.ground_truth` or `answer`"),
    ],
)
def test_missing_field_is_named(function: str, message: str) -> None:
    with pytest.raises(ScoringError, match=message):
        score(function, request("2"))


def test_function_that_requires_token_ids_is_refused() -> None:
    with pytest.raises(ConfigError, match="aligner passes texts but no `completion_ids`"):
        resolve_scorer(f"{NAME}:reads_token_ids")


def test_messages_are_kept_for_custom_functions_only() -> None:
    chosen = ["experiment=tiny_ppo"]
    assert not needs_prompt_messages(compose_config(chosen))
    assert needs_prompt_messages(compose_config([*chosen, "reward.function=mine:score"]))
    suite = ("evaluation.every=1", "evaluation.prompts=[a]", "evaluation.function=mine:score")
    assert needs_prompt_messages(compose_config([*chosen, *suite]))
