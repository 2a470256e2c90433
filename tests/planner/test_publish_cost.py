"""What a publish costs is what its plan moves and what its publisher asks of the link."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from aligner.planner.publish_cost import publish_cost
from aligner.resharding.link import Link
from aligner.resharding.publisher import Publisher
from aligner.resharding.transfer_plan import plan_resharding
from aligner.resharding.transport import slice_shape, steps
from aligner.schema import EngineParallelConfig, ParallelConfig
from tests.resharding.layouts import tiny_shape

BUCKET = 1 << 14
SHAPE = tiny_shape("llama")


def test_all_weights_cross_to_each_replica_and_larger_buckets_take_fewer_rounds() -> None:
    plan = plan_resharding(
        SHAPE,
        ParallelConfig(tensor=2),
        EngineParallelConfig(data=2),
        first_engine_rank=2,
        itemsize=2,
    )
    weights = 2 * sum(spec.numel for spec in plan.table)
    cost = publish_cost(plan, None, BUCKET)
    assert (
        cost.bytes == 2 * weights
        and cost.received == weights
        and weights <= cost.sent < 1.1 * weights
    )
    assert (
        cost.rounds
        == max(len(steps(plan, rank, BUCKET)) for rank in range(4))
        > publish_cost(plan, None, 1 << 20).rounds
    )
    assert cost.seconds is None and cost.at(weights / 2).seconds == max(cost.sent, weights) / (
        weights / 2
    )
    grouped = publish_cost(plan, BUCKET, BUCKET)
    assert (grouped.bytes, grouped.sent, grouped.received) == (cost.bytes, cost.sent, cost.received)
    assert grouped.rounds >= cost.rounds and grouped.votes > cost.votes


def test_what_stays_on_its_rank_crosses_nothing() -> None:
    cost = publish_cost(
        plan_resharding(SHAPE, ParallelConfig(tensor=2), EngineParallelConfig(tensor=2)),
        None,
        BUCKET,
    )
    assert (cost.bytes, cost.most, cost.rounds) == (0, 0, 0)


class CountingLink(Link):
    """Counts how often its ranks agree."""

    votes = 0

    @contextlib.contextmanager
    def agreement(self, failure: str) -> Iterator[None]:
        self.votes += 1
        with super().agreement(failure):
            yield


class Sink:
    """An engine that has all views at once."""

    def __init__(self, views: dict[str, torch.Tensor]) -> None:
        self._views = views

    def views(self, names: list[str]) -> dict[str, torch.Tensor]:
        return {name: self._views[name] for name in names}

    def load(self, names: list[str]) -> None:
        """They are in their places."""

    commit = abort = lambda self: None


@pytest.mark.parametrize("group_bytes", [None, BUCKET])
def test_a_publisher_votes_as_often_as_is_said(group_bytes: int | None) -> None:
    plan = plan_resharding(SHAPE, ParallelConfig(), EngineParallelConfig())
    link = CountingLink(HashStore(), 0, plan.labels, timeout=timedelta(seconds=20))
    weights = {
        name: torch.zeros(slice_shape(plan.specs[name], piece))
        for name, piece in plan.target[0].items()
    }
    sink: Any = Sink(weights)
    publisher = Publisher(
        plan,
        link,
        read=weights.__getitem__,
        begin_update=lambda version: sink,
        bucket_bytes=BUCKET,
        verify_every=0,
        group_bytes=group_bytes,
    )
    publisher.publish(1)
    assert link.votes == publish_cost(plan, group_bytes, BUCKET).votes
