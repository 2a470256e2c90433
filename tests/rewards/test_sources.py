"""Rewards of several sources: weights, ensembles, task weights and errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from aligner.errors import ConfigError
from aligner.rewards.function_forms import ScoringRequest
from aligner.rewards.remote import RemoteScorer
from aligner.rewards.scorers import ScorerUnavailable, ScoringError
from aligner.rewards.sources import (
    COMBINATIONS,
    CombinedReward,
    ModelSource,
    ScoringBatch,
    TextSource,
    build_text_source,
)
from aligner.schema.keys import get_schema_keys
from aligner.schema.reward_sources import FunctionSource, RemoteSource

BATCH = ScoringBatch(lambda: [ScoringRequest("Count: ", response) for response in ("a1", "23", "")])


def settings(name: str, **numbers: Any) -> FunctionSource:
    return FunctionSource(
        name=name, key=f"reward.sources.{name}", function="digit_fraction", **numbers
    )


def test_reward_is_weighted_sum_of_normalized_scores():
    parts = [
        (
            settings("digits", weight=2.0, gain=4.0, bias=-1.0),
            build_text_source(settings("digits")),
        ),
        (
            settings("length", weight=-0.5),
            TextSource("length", lambda requests: [len(r.response) for r in requests]),
        ),
    ]
    scores, added = CombinedReward(parts).compute_scores_and_parts(BATCH)
    assert scores.dtype == torch.float32
    assert scores.tolist() == [2 * (4 * 0.5 - 1) - 1, 2 * (4 * 1 - 1) - 1, 2 * (0 - 1)]
    assert [part.tolist() for part in added] == [
        [2 * (4 * share - 1) for share in (0.5, 1, 0)],
        [-1, -1, 0],
    ]


def test_ensemble_combinations_equal_loop_reference():
    generator = torch.Generator().manual_seed(11)
    for _ in range(200):
        members, rows = (int(torch.randint(1, 6, (), generator=generator)) for _ in range(2))
        scores = 3 * torch.randn(members, rows, generator=generator, dtype=torch.float64)
        weight = float(torch.rand((), generator=generator))
        expected: dict[str, list[float]] = {name: [] for name in COMBINATIONS}
        there = torch.rand(members, rows, generator=generator) < 0.7
        there[0] |= ~there.any(0)
        scores[~there] = 0.0
        for row in range(rows):
            given = [float(scores[member, row]) for member in range(members) if there[member, row]]
            mean = math.fsum(given) / len(given)
            variance = math.fsum((number - mean) ** 2 for number in given) / len(given)
            expected["sum"].append(math.fsum(given))
            expected["mean"].append(mean)
            expected["min"].append(min(given))
            expected["mean_minus_std"].append(mean - weight * math.sqrt(variance))
            expected["mean_minus_variance"].append(mean - weight * variance)
        for name, combine in COMBINATIONS.items():
            assert combine(scores, there, weight).tolist() == pytest.approx(
                expected[name], rel=1e-12, abs=1e-12
            )
    assert tuple(COMBINATIONS) == get_schema_keys()["reward.combine"].choices


def test_ensemble_reward_uses_configured_combination():
    given = {"one": [1.0, 2.0, 3.0], "two": [3.0, 2.0, -5.0]}
    parts = [
        (settings(name, weight=0.5), TextSource(name, lambda _, own=own: own))
        for name, own in given.items()
    ]
    for combine, expected in (
        ("min", [0.5, 1, -2.5]),
        ("mean_minus_std", [0.75, 1, -1.5]),
        ("mean", [1, 1, -0.5]),
    ):
        scores, members = CombinedReward(parts, combine, 0.5).compute_scores_and_parts(BATCH)
        assert scores.tolist() == expected
        assert [member.tolist() for member in members] == [[0.5, 1.0, 1.5], [1.5, 1.0, -2.5]]


def test_task_weight_0_skips_the_source():
    tasks, asked = ["sums", "chat", "sums", None], {"text": [], "model": []}
    requests = [
        ScoringRequest(f"{row}", f"{row}", {"task": task} if task else {})
        for row, task in enumerate(tasks)
    ]

    def text(requests):
        asked["text"].append([request.prompt for request in requests])
        return [10.0 + int(request.prompt) for request in requests]

    class Model:
        def values(self, tokens, lengths):
            asked["model"].append(tokens[:, 0].tolist())
            return 10.0 * tokens.float()

    lengths = torch.tensor([1, 2, 2, 1])
    batch = ScoringBatch(lambda: requests, torch.tensor([[0, 9], [1, 2], [2, 3], [3, 9]]), lengths)
    parts = [
        (settings("text", task_weights={"sums": 0.0}), TextSource("text", text)),
        (
            settings("model", weight=0.0, task_weights={"sums": 2.0, "chat": 0.5}),
            ModelSource("model", Model()),
        ),
    ]
    scores, given = CombinedReward(parts).compute_scores_and_parts(batch)
    assert asked == {"text": [["1", "3"]], "model": [[0, 1, 2]]}
    assert [part.tolist() for part in given] == [
        [0, 11, 0, 13],
        [0, 10, 60, 0],
    ] and scores.tolist() == [0, 21, 60, 13]
    # A source with task weight 0 is not a member of the ensemble.
    assert CombinedReward(parts, "min")(batch).tolist() == [0, 10, 60, 13]
    assert CombinedReward(parts, "mean_minus_std", 2.0)(batch).tolist() == [0, 9.5, 60, 13]
    with pytest.raises(
        ScoringError,
        match=r"reward\.sources: no source has a nonzero weight for task=None, prompt '3'",
    ):
        CombinedReward(parts[1:])(batch)


def test_scoring_error_names_the_failing_source():
    broken = TextSource("broken", lambda requests: [0.0, float("inf"), 0.0])
    with pytest.raises(
        ScoringError,
        match=r"the scorer broken returned inf.*for prompt 'Count: ' and response '23'",
    ):
        CombinedReward(
            [
                (settings("digits"), build_text_source(settings("digits"))),
                (settings("broken"), broken),
            ]
        )(BATCH)


def unavailable_scorer_errors() -> list[str]:
    """Return the errors of one source and of the combined reward on this rank."""
    source = TextSource("judge", RemoteScorer("http://127.0.0.1:1/", 0.1))
    messages = []
    for ask in (source.compute_raw_scores, CombinedReward([(settings("judge"), source)])):
        try:
            ask(BATCH)
        except ScorerUnavailable as error:
            messages.append(str(error))
    return messages


def test_unavailable_scorer_is_reported_on_all_ranks(pool):
    one, other = pool.run(unavailable_scorer_errors, 2)
    assert one[0].startswith(
        "the scorer judge: http://127.0.0.1:1/: no successful response within 0.1 s"
    )
    assert len(one) == len(other) == 2


def test_overflowing_reward_is_refused():
    parts = [(settings("digits", weight=1e300), build_text_source(settings("digits")))]
    with pytest.raises(ScoringError, match=r"the scorer digits returned inf.*response 'a1'"):
        CombinedReward(parts)(BATCH)
    large = TextSource("large", lambda requests: [1e39] * 3)
    parts = [
        (settings("digits"), build_text_source(settings("digits"))),
        (settings("large"), large),
    ]
    # The minimum is finite, but one of its members is not.
    with pytest.raises(ScoringError, match="the scorer large returned inf"):
        CombinedReward(parts, "min")(BATCH)


def test_text_source_follows_its_settings():
    remote = build_text_source(
        RemoteSource(name="judge", key="reward", url="http://judge:5000/get_reward", timeout_s=7)
    )
    assert remote == TextSource(
        "judge", RemoteScorer("http://judge:5000/get_reward", 7), skip_special_tokens=False
    )
    unknown = FunctionSource.model_construct(
        name="digits", key="reward.sources.digits", function="digits"
    )
    with pytest.raises(
        ConfigError,
        match=r"reward\.sources\.digits\.function=digits: must be one of digit_fraction",
    ):
        build_text_source(unknown)
