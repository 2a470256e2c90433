"""Abstentions, timeouts and deadlocks of scoring functions between reward server and client."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from aligner.data.types import ABSTAINED
from aligner.errors import AlignerError
from aligner.placement.addresses import Access, Endpoint
from aligner.rewards.scorers import ScorerDeadlocked, ScorerTimeout
from aligner.rewards.sources import TextSource
from aligner.servers.remote_client import (
    RefusedError,
    RemoteError,
    RewardClient,
    UnscoredError,
    parse_scores,
)
from aligner.servers.wire_protocol import REWARD_MODEL
from aligner.training.services import PendingRows
from tests.servers.role_main import scoring

EACH = 2


def refused_error(kind: str) -> RefusedError:
    return RefusedError("reward", "host:1", kind, "the scorer mine returned no result; in mine.py")


class Client(RewardClient):
    """A client whose requests are answered by a function of the prompts' numbers."""

    def __init__(self, answer: Callable[[list[int]], Any]) -> None:
        super().__init__([Endpoint("127.0.0.1", 1, 2, 3)], Access(), 5)
        self.answer, self.asked = answer, list[list[int]]()

    def _infer(self, endpoint, arrays):
        prompts = arrays["tokens"][:, 0].tolist()
        self.asked.append(prompts)
        found = self.answer(prompts)
        if isinstance(found, Exception):
            raise found
        return {"rewards": np.array(found, dtype=np.float32)[:, None]}

    def scores(self, prompts: int):
        tokens = torch.arange(prompts).repeat_interleave(EACH)[:, None].repeat(1, 3)
        lengths = torch.full((prompts * EACH,), 3)
        return self.score(tokens, lengths, torch.ones_like(lengths), retry_batch_rows=EACH)


@pytest.fixture
def client():
    opened = []

    def open_client(answer):
        opened.append(Client(answer))
        return opened[-1]

    yield open_client
    for each in opened:
        each.close()


def test_reward_endpoint_answers_nan_for_an_abstention():
    source = TextSource("mine", lambda requests: [None, 2.0])
    serve = scoring(source).create_endpoints(
        lambda op, tensors, is_unbatched, **given: scoring(source).score(**tensors, **given)
    )[REWARD_MODEL]
    sentences = np.array([[b"a"], [b"b"]], dtype=object)
    rewards = serve({"sentences": sentences})["rewards"]
    assert rewards.dtype == np.float32 and rewards.shape == (2, 1)
    assert math.isnan(rewards[0, 0]) and rewards[1, 0] == 2.0


def test_client_distinguishes_abstention_from_failed_scoring(client):
    wire = {"rewards": np.array([[math.nan], [1.0]], dtype=np.float32)}
    assert parse_scores(wire).tolist() == [ABSTAINED, 1.0]
    parts = wire | {"reward_parts": np.zeros((2, 2), dtype=np.float32)}
    assert parse_scores(parts).tolist() == [[ABSTAINED, 0.0, 0.0], [1.0, 0.0, 0.0]]

    def answer(prompts):
        return refused_error("ScoringError") if 1 in prompts else [math.nan, 1.0]

    found = client(answer).scores(2).result()
    assert found[:2].tolist() == [ABSTAINED, 1.0] and found[2:].isnan().all()


def test_abstentions_of_all_samples_are_no_error(client):
    asking = client(lambda prompts: [math.nan] * len(prompts))
    pending = PendingRows((asking.scores(2),))
    assert pending.result().tolist() == [ABSTAINED] * 4


def test_prompt_that_times_out_alone_is_skipped(client):
    def answer(prompts):
        return refused_error("ScorerTimeout") if 1 in prompts else [1.0] * len(prompts)

    asking = client(answer)
    assert asking.scores(3).result().isnan().tolist() == [False] * 2 + [True] * 2 + [False] * 2
    assert len(asking.asked) == 4, "the request, and each prompt once"


def test_request_of_one_prompt_that_times_out_is_not_repeated(client):
    asking = client(lambda prompts: refused_error("ScorerTimeout"))
    with pytest.raises(UnscoredError):
        asking.scores(1).result()
    assert len(asking.asked) == 1


@pytest.mark.parametrize("first", [True, False], ids=["at the request", "at a prompt"])
def test_deadlock_ends_the_requests_with_its_error(client, first):
    def answer(prompts):
        if first or len(prompts) == EACH:
            return refused_error("ScorerDeadlocked")
        return refused_error("ScorerTimeout")

    asking = client(answer)
    with pytest.raises(AlignerError, match=r"ScorerDeadlocked: .* in mine\.py"):
        PendingRows((asking.scores(3),)).result()
    assert len(asking.asked) == (1 if first else 2)


def test_deadlock_error_precedes_timeouts_of_other_requests(client):
    late = RemoteError("reward", "host:1", "Timeout", "no answer to reward_model within 5 s")
    slow, stuck = (
        client(lambda prompts: late),
        client(lambda prompts: refused_error("ScorerDeadlocked")),
    )
    with pytest.raises(AlignerError, match="ScorerDeadlocked"):
        PendingRows((slow.scores(1), stuck.scores(1))).result()


def test_timeout_after_hanging_scorer_names_the_scorer(client):
    late = RemoteError("reward", "host:1", "Timeout", "no answer to reward_model within 5 s")

    def answer(prompts):
        return late if len(prompts) == EACH else refused_error("ScorerTimeout")

    message = r"no answer to reward_model within 5 s, after a call of .* timed out: the scorer mine"
    with pytest.raises(RemoteError, match=message):
        client(answer).scores(2).result()


@pytest.mark.parametrize("kind", [ScorerTimeout, ScorerDeadlocked])
def test_kinds_of_scoring_errors_reach_the_endpoint(kind):
    def scorer(requests):
        raise kind("returned no result")

    source = TextSource("mine", scorer)
    with pytest.raises(kind, match="the scorer mine returned no result"):
        scoring(source).score(texts=["a"])
