"""Functions that a rank runs in the tests of weight sync of only the changed elements."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from aligner.errors import AlignerError
from aligner.resharding.transport import Link
from aligner.schema import EngineParallelConfig, ParallelConfig
from tests.resharding.jobs import TIMEOUT, Rank, make_plan
from tests.resharding.layouts import cut, whole_weights

PUBLISHES = 8
BITS = {2: torch.int16, 4: torch.int32}


class Changing(Rank):
    """A rank that publishes weights of which a part has changed since the last weight sync."""

    def next_weights(self, generator: torch.Generator) -> None:
        """Change a random share of each tensor's elements; set the first to 0, -0 or NaN."""
        for name, whole in self.whole.items():
            share = (0.0, 1e-3, 0.05, 0.9)[int(torch.randint(4, (), generator=generator))]
            at = torch.rand(whole.shape, generator=generator) < share
            new = torch.where(at, torch.randn(whole.shape, generator=generator), whole)
            new.flatten()[0] = (0.0, -0.0, float("nan"))[
                int(torch.randint(3, (), generator=generator))
            ]
            self.whole[name] = new.to(self.sink.dtype).float()

    def failed_publish_of_these(self, version: int) -> str:
        """Publish the current weights, which must fail, and return the error."""
        with pytest.raises(AlignerError) as failed:
            self.publisher.publish(version)
        return str(failed.value)

    def publish_these(self, version: int) -> tuple[int, float | None]:
        """Publish the current weights, and compare the engine's weights bit by bit.

        Returns the transferred bytes and the share of changed elements; None if all were sent.
        """
        stats = self.publisher.publish(version)
        self.served = dict(self.whole)
        for name, piece in self.plan.target.get(self.link.rank, {}).items():
            wanted = cut(self.whole[name], piece).to(self.sink.dtype)
            assert torch.equal(_bits(self.sink.front[name]), _bits(wanted)), name
        return stats.moved_bytes, stats.changed_share


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(BITS[tensor.dtype.itemsize])


def publish_changes(
    trainer: ParallelConfig,
    engine: EngineParallelConfig,
    dtype: torch.dtype,
    group_bytes: int | None,
    seed: int,
) -> list[tuple[int, float | None]]:
    """Publish random changes, of which some versions are skipped; both ends start anew half-way."""
    plan = make_plan(trainer, engine, separate=True, itemsize=dtype.itemsize)
    generator = torch.Generator().manual_seed(seed)
    sync_results: list[tuple[int, float | None]] = []
    rank: Changing | None = None
    for version in range(PUBLISHES):
        if version in (0, PUBLISHES // 2):
            link = Link.from_default_group(plan.labels, timeout=TIMEOUT, generation=version)
            before, rank = (
                rank,
                Changing(
                    plan,
                    link,
                    bucket_bytes=1 << 12,
                    dtype=dtype,
                    group_bytes=group_bytes,
                    publish_mode="changes",
                ),
            )
            rank.whole = before.whole if before else whole_weights(plan.table, seed)
        assert rank is not None
        for _ in range(int(torch.randint(1, 4, (), generator=generator))):
            rank.next_weights(generator)
        sync_results.append(rank.publish_these(version))
    dist.barrier()
    return sync_results


def publish_few_changes(dtype: torch.dtype) -> list[tuple[int, float | None]]:
    """Publish from one rank to one rank: everything; nothing; three elements of a tensor and one of
    another; everything."""
    plan = make_plan(
        ParallelConfig(), EngineParallelConfig(), separate=True, itemsize=dtype.itemsize
    )
    rank = Changing(
        plan,
        Link.from_default_group(plan.labels, timeout=TIMEOUT),
        dtype=dtype,
        publish_mode="changes",
    )
    rank.whole = whole_weights(plan.table, 0)
    sync_results = [rank.publish_these(0), rank.publish_these(1)]
    rank.whole = {name: tensor.clone() for name, tensor in rank.whole.items()}
    rank.whole["model.layers.1.mlp.up_proj.weight"][3, 4:7] += 1
    rank.whole["model.norm.weight"][5] += 1
    sync_results.append(rank.publish_these(2))
    rank.whole = whole_weights(plan.table, 1)
    sync_results.append(rank.publish_these(3))
    dist.barrier()
    return sync_results


def fail_and_continue() -> list[float | None]:
    """Let a publish fail in the engine's commit, and publish to the same engine over a new link.

    Returns the shares of changed elements of the successful publishes.
    """
    plan = make_plan(
        ParallelConfig(tensor=2), EngineParallelConfig(tensor=2), separate=True, itemsize=2
    )
    link = Link.from_default_group(plan.labels, timeout=TIMEOUT)
    rank = Changing(plan, link, dtype=torch.bfloat16, publish_mode="changes")
    generator = torch.Generator().manual_seed(0)
    rank.whole = whole_weights(plan.table, 0)
    shares = [rank.publish_these(0)[1]]
    rank.next_weights(generator)
    shares.append(rank.publish_these(1)[1])

    def fail() -> None:
        raise OSError("no memory")

    rank.sink.before_commit = fail if link.rank == 3 else rank.sink.before_commit
    rank.next_weights(generator)
    assert "no memory" in rank.failed_publish_of_these(2)
    rank.sink.before_commit = lambda: None
    again = Link.from_default_group(plan.labels, timeout=TIMEOUT, generation=1)
    other = Changing(plan, again, dtype=torch.bfloat16, publish_mode="changes", sink=rank.sink)
    other.whole, other.served = rank.whole, rank.served
    shares.append(other.publish_these(3)[1])
    other.next_weights(generator)
    shares.append(other.publish_these(4)[1])
    dist.barrier()
    return shares
