"""The policy's weights into the engine after every update."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from aligner.resharding.plan import TransferPlan
from aligner.resharding.resharder import PublishStats, Resharder
from aligner.resharding.transport import Read
from aligner.resharding.verify import verify


class Publisher:
    """Writes the trainer's slices into the engine's views, and checks them by checksum when it is time to.

    Every rank calls `publish`; a mismatch raises on every rank, before the engine takes the new version.
    """

    def __init__(
        self,
        plan: TransferPlan,
        rank: int,
        read: Read,
        views: Mapping[str, Tensor],
        finish_update: Callable[[int], None],
        *,
        bucket_bytes: int,
        verify_every: int,
    ) -> None:
        self._plan, self._rank, self._read, self._views = plan, rank, read, views
        self._finish_update, self._verify_every = finish_update, verify_every
        self._resharder = Resharder(plan, rank, bucket_bytes=bucket_bytes)
        self._count = 0

    def publish(self, version: int) -> PublishStats:
        """Publish the weights as `version`; verified at the first call and at every `verify_every`-th after it."""
        stats = self._resharder.publish(self._read, self._views)
        if self._count == 0 or (self._verify_every and self._count % self._verify_every == 0):
            verify(self._plan, self._rank, self._read, self._views)
        self._count += 1
        self._finish_update(version)
        return stats
