"""Publishing the trainer's weights into the engine, shard to shard."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from aligner.errors import AlignerError
from aligner.resharding.plan import TransferPlan
from aligner.resharding.transport import BucketTransport, Read, copy_local, slice_shape


@dataclass(frozen=True)
class PublishStats:
    """What one rank moved into its own views, and how long the publish took there."""

    bytes_local: int
    bytes_remote: int
    seconds: float


class Resharder:
    """Executes one rank's part of a plan, as often as the weights change."""

    def __init__(
        self,
        plan: TransferPlan,
        rank: int,
        group: ProcessGroup | None = None,
        bucket_bytes: int = 64 << 20,
        timeout: timedelta = timedelta(minutes=5),
    ) -> None:
        """`rank` is this process's rank in `group` (None: the default group) and in the plan."""
        if bucket_bytes < plan.itemsize:
            raise AlignerError(f"a bucket of {bucket_bytes} bytes does not hold one element of {plan.itemsize} bytes")
        self._plan, self._rank = plan, rank
        self._transport = BucketTransport(plan, rank, group, bucket_bytes, timeout)

    @torch.no_grad()
    def publish(self, read: Read, views: Mapping[str, Tensor]) -> PublishStats:
        """Write this rank's target slices; collective over all ranks of the plan.

        `read(name)` gives this rank's source slice, `views[name]` is written; both as the plan cuts them. A source of
        another dtype is converted to the views'. At any time a rank holds, beyond its own slices, one bucket to send,
        one received, and what `read` allocates for one tensor.
        """
        self._check(views)
        begin = time.perf_counter()
        copy_local(self._plan, self._rank, read, views)
        self._transport.exchange(read, views)
        return PublishStats(
            self._plan.bytes_local(self._rank), self._plan.bytes_received(self._rank), time.perf_counter() - begin
        )

    def _check(self, views: Mapping[str, Tensor]) -> None:
        for name, wanted in self._plan.target.get(self._rank, {}).items():
            if name not in views:
                raise AlignerError(f"{name}: the engine gives no view of it, the plan writes it")
            view, shape = views[name], slice_shape(self._plan.specs[name], wanted)
            if tuple(view.shape) != shape or view.element_size() != self._plan.itemsize:
                raise AlignerError(
                    f"{name}: the engine's view is {tuple(view.shape)} of {view.dtype}, the plan writes {shape} in"
                    f" {self._plan.itemsize} bytes an element"
                )
