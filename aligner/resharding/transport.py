"""Moving a plan's pieces: within a rank by copying, between ranks in buckets over torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from aligner.config.weights import Slice, TensorSpec, cut_shape
from aligner.errors import AlignerError
from aligner.resharding.plan import Transfer, TransferPlan, extent

Read = Callable[[str], Tensor]
"""This rank's source slice of a tensor by its Hugging Face name and in its orientation."""


@dataclass(frozen=True)
class Piece:
    """Rows `[start, stop)`, along dimension 0, of what a transfer carries."""

    transfer: Transfer
    start: int
    stop: int
    numel: int


def slice_shape(spec: TensorSpec, piece: Slice) -> tuple[int, ...]:
    """Shape of a slice."""
    return cut_shape(spec.shape, piece.axis, piece.start, piece.stop)


def part(tensor: Tensor, spec: TensorSpec, held: Slice, axis: int | None, start: int, stop: int) -> Tensor:
    """The view of `tensor`, the slice `held`, that covers `[start, stop)` of the whole tensor along `axis`.

    Raises AlignerError when `tensor` is not of the slice's shape.
    """
    if tuple(tensor.shape) != slice_shape(spec, held):
        raise AlignerError(f"{spec.name}: got shape {tuple(tensor.shape)}, the layout says {slice_shape(spec, held)}")
    return tensor if axis is None else tensor.narrow(axis, start - extent(spec, held, axis)[0], stop - start)


def given(plan: TransferPlan, transfer: Transfer, read: Read) -> Tensor:
    """What the sender of a transfer gives."""
    held = plan.source[transfer.source][transfer.name]
    spec = plan.specs[transfer.name]
    return part(read(transfer.name), spec, held, transfer.axis, transfer.start, transfer.stop)


def wanted(plan: TransferPlan, transfer: Transfer, views: Mapping[str, Tensor]) -> Tensor:
    """Where the receiver of a transfer writes it."""
    held = plan.target[transfer.target][transfer.name]
    spec = plan.specs[transfer.name]
    return part(views[transfer.name], spec, held, transfer.axis, transfer.start, transfer.stop)


def buckets(transfers: Sequence[Transfer], specs: Mapping[str, TensorSpec], limit: int) -> list[list[Piece]]:
    """Cut transfers into row ranges and fill buckets of at most `limit` elements (at least one row), in order."""
    filled: list[list[Piece]] = []
    free = 0
    for transfer in transfers:
        rows = specs[transfer.name].shape[0] if transfer.axis != 0 else transfer.stop - transfer.start
        width = transfer.numel // rows
        start = 0
        while start < rows:
            fits = min(rows - start, free // width)
            if fits == 0:
                filled.append([])
                free = max(limit, width)
                continue
            filled[-1].append(Piece(transfer, start, start + fits, fits * width))
            free -= fits * width
            start += fits
    return filled


def copy_local(plan: TransferPlan, rank: int, read: Read, views: Mapping[str, Tensor]) -> None:
    """Copy what this rank already holds into its views."""
    for transfer in plan.local(rank):
        wanted(plan, transfer, views).copy_(given(plan, transfer, read))


class BucketTransport:
    """Point-to-point exchange of one rank's remote transfers.

    In round r a rank sends to the rank r places after it and receives from the one r places before it, one bucket each
    way at a time, both posted before either is waited for: no order of the ranks can deadlock, and no more than two
    buckets are held. Works over any backend with point-to-point operations (gloo, NCCL).
    """

    def __init__(
        self, plan: TransferPlan, rank: int, group: ProcessGroup | None, bucket_bytes: int, timeout: timedelta
    ) -> None:
        """`rank` is this process's rank in `group`, which is also the plan's numbering."""
        self._plan, self._rank, self._group, self._timeout = plan, rank, group, timeout
        world = max([*plan.source, *plan.target]) + 1
        limit = bucket_bytes // plan.itemsize
        self._rounds: list[tuple[int, int, list[list[Piece]], list[list[Piece]]]] = []
        for distance in range(1, world):
            to, from_ = (rank + distance) % world, (rank - distance) % world
            sending = buckets(plan.between(rank, to), plan.specs, limit)
            receiving = buckets(plan.between(from_, rank), plan.specs, limit)
            if sending or receiving:
                self._rounds.append((to, from_, sending, receiving))
        self._longest = max(
            (sum(piece.numel for piece in bucket) for *_, out, into in self._rounds for bucket in (*out, *into)), default=0
        )

    def exchange(self, read: Read, views: Mapping[str, Tensor]) -> None:
        """Send and receive every remote piece; the pieces travel in the views' dtype."""
        if not self._rounds:
            return
        like = next(iter(views.values()))
        outgoing, incoming = (torch.empty(self._longest, dtype=like.dtype, device=like.device) for _ in range(2))
        for to, from_, sending, receiving in self._rounds:
            for index in range(max(len(sending), len(receiving))):
                operations = []
                if index < len(sending):
                    filled = self._pack(sending[index], read, outgoing)
                    operations.append(dist.P2POp(dist.isend, filled, group=self._group, group_peer=to))
                if index < len(receiving):
                    awaited = incoming[: sum(piece.numel for piece in receiving[index])]
                    operations.append(dist.P2POp(dist.irecv, awaited, group=self._group, group_peer=from_))
                self._finish(operations, to, from_)
                if index < len(receiving):
                    self._unpack(receiving[index], awaited, views)

    def _finish(self, operations: list[dist.P2POp], to: int, from_: int) -> None:
        try:
            for work in dist.batch_isend_irecv(operations):
                work.wait(self._timeout)
        except RuntimeError as error:
            raise AlignerError(
                f"weights: rank {self._rank} could not send to rank {to} or receive from rank {from_}"
                f" within {self._timeout.total_seconds():.0f} s: {error}"
            ) from error

    def _pack(self, bucket: list[Piece], read: Read, buffer: Tensor) -> Tensor:
        offset = 0
        for piece in bucket:
            rows = given(self._plan, piece.transfer, read)[piece.start : piece.stop]
            buffer[offset : offset + piece.numel].view(rows.shape).copy_(rows)
            offset += piece.numel
        return buffer[:offset]

    def _unpack(self, bucket: list[Piece], buffer: Tensor, views: Mapping[str, Tensor]) -> None:
        offset = 0
        for piece in bucket:
            rows = wanted(self._plan, piece.transfer, views)[piece.start : piece.stop]
            rows.copy_(buffer[offset : offset + piece.numel].view(rows.shape))
            offset += piece.numel
