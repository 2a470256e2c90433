from __future__ import annotations

import pytest
import torch

from aligner.errors import ConfigError
from aligner.rewards.remote import RemoteScorer
from aligner.rewards.scorers import ScorerUnavailable, ScoringError, ScoringRequest
from aligner.rewards.sources import ScoringBatch, TextSource, WeightedSum, text_source
from aligner.schema.reward_sources import FunctionSource, RemoteSource

BATCH = ScoringBatch(lambda: [ScoringRequest("Count: ", response) for response in ("a1", "23", "")])


def settings(name: str, **numbers: float) -> FunctionSource:
    return FunctionSource(name=name, key=f"reward.sources.{name}", function="digit_fraction", **numbers)


def test_the_reward_is_the_weighted_sum_of_normalized_scores():
    parts = [
        (settings("digits", weight=2.0, gain=4.0, bias=-1.0), text_source(settings("digits"))),
        (settings("length", weight=-0.5), TextSource("length", lambda requests: [len(r.response) for r in requests])),
    ]
    scores, added = WeightedSum(parts).in_parts(BATCH)
    assert scores.dtype == torch.float32
    assert scores.tolist() == [2 * (4 * 0.5 - 1) - 1, 2 * (4 * 1 - 1) - 1, 2 * (0 - 1)]
    assert [part.tolist() for part in added] == [[2 * (4 * share - 1) for share in (0.5, 1, 0)], [-1, -1, 0]]


def test_a_refusal_names_the_source_at_fault():
    broken = TextSource("broken", lambda requests: [0.0, float("inf"), 0.0])
    with pytest.raises(ScoringError, match=r"the scorer broken returned inf.*for prompt 'Count: ' and response '23'"):
        WeightedSum([(settings("digits"), text_source(settings("digits"))), (settings("broken"), broken)])(BATCH)


def ask_nobody() -> list[str]:
    """What one source and what the sum of it say, on this rank."""
    source = TextSource("judge", RemoteScorer("http://127.0.0.1:1/", 0.1))
    told = []
    for ask in (source.raw, WeightedSum([(settings("judge"), source)])):
        try:
            ask(BATCH)
        except ScorerUnavailable as error:
            told.append(str(error))
    return told


def test_every_rank_knows_that_a_scorer_is_unavailable(pool):
    one, other = pool.run(ask_nobody, 2)
    assert one[0].startswith("the scorer judge: http://127.0.0.1:1/ gave no answer within 0.1 s")
    assert len(one) == len(other) == 2


def test_a_sum_that_overflows_is_refused():
    parts = [(settings("digits", weight=1e300), text_source(settings("digits")))]
    with pytest.raises(ScoringError, match=r"the scorer digits returned inf.*response 'a1'"):
        WeightedSum(parts)(BATCH)


def test_sources_are_made_from_their_settings():
    remote = text_source(RemoteSource(name="judge", key="reward", url="http://judge:5000/get_reward", timeout_s=7))
    assert remote == TextSource("judge", RemoteScorer("http://judge:5000/get_reward", 7), skip_special_tokens=False)
    unknown = FunctionSource(name="digits", key="reward.sources.digits", function="digits")
    with pytest.raises(ConfigError, match=r"reward\.sources\.digits\.function=digits: must be one of digit_fraction"):
        text_source(unknown)
