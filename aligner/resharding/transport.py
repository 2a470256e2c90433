"""Moving a plan's pieces: within a rank by copying, between ranks in messages over a link."""

import math
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from aligner.errors import AlignerError
from aligner.models.weight_slices import Slice, TensorSpec, cut_shape
from aligner.resharding.link import Link
from aligner.resharding.transfer_plan import Transfer, TransferPlan, extent

Read = Callable[[str], Tensor]
"""This rank's source slice of a tensor by its Hugging Face name and in its orientation."""

_IN_FLIGHT = 2
"""Batches under way each way: one moves while another is packed or unpacked."""
_BATCHES_PER_BUCKET = 2 * _IN_FLIGHT
_SMALL_BYTES = 1 << 18
"""Pieces below this share a message: packing them costs less than a message for each."""


@dataclass(frozen=True)
class Piece:
    """Rows `[start, stop)`, along dimension 0, of what a transfer carries."""

    transfer: Transfer
    start: int
    stop: int
    numel: int


Message = tuple[Piece, ...]
"""What travels in one operation, in this order."""

Batch = tuple[Message, ...]
"""What travels at once."""


@dataclass(frozen=True)
class Step:
    """One batch out and one in, either of which may be empty."""

    to: int
    sending: Batch
    from_: int
    receiving: Batch


class Encoding:
    """How pieces are represented in messages: all elements, in the transfer's dtype.

    `aligner.resharding.encodings.Changes` sends only changed elements. Both ends of a message know
    its size in bytes before it is sent.
    """

    changed: int | None = None
    """Number of elements that this rank sends and that differ from the previous publish; None if
    they were not compared."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def nbytes(self, piece: Piece) -> int:
        """Return the size of an encoded piece in bytes, a multiple of the element size."""
        return piece.numel * self._dtype.itemsize

    def is_plain(self, piece: Piece) -> bool:
        """Return whether a piece is sent as all of its elements, which needs no staging memory."""
        return True

    def pack(self, piece: Piece, rows: Tensor, packed: Tensor) -> None:
        """Encode the source's `rows` of a piece into `packed`, uint8 [nbytes]."""
        packed.view(self._dtype).view(rows.shape).copy_(rows)

    def unpack(self, piece: Piece, packed: Tensor, place: Tensor) -> None:
        """Decode `packed`, uint8 [nbytes], into `place`, the rows of the engine's tensor."""
        place.copy_(packed.view(self._dtype).view(place.shape))


def slice_shape(spec: TensorSpec, piece: Slice) -> tuple[int, ...]:
    """Shape of a slice."""
    return cut_shape(spec.shape, piece.axis, piece.start, piece.stop)


def part(
    tensor: Tensor, spec: TensorSpec, held: Slice, axis: int | None, start: int, stop: int
) -> Tensor:
    """The view of `tensor`, the slice `held`, that covers `[start, stop)` of the whole tensor along
    `axis`.

    Raises AlignerError when `tensor` is not of the slice's shape.
    """
    if tuple(tensor.shape) != slice_shape(spec, held):
        raise AlignerError(
            f"{spec.name}: got shape {tuple(tensor.shape)}, expected {slice_shape(spec, held)}"
        )
    return (
        tensor
        if axis is None
        else tensor.narrow(axis, start - extent(spec, held, axis)[0], stop - start)
    )


def given(plan: TransferPlan, transfer: Transfer, read: Read) -> Tensor:
    """What the sender of a transfer gives."""
    return _part_of(
        plan, transfer, plan.source[transfer.source][transfer.name], read(transfer.name)
    )


def wanted(plan: TransferPlan, transfer: Transfer, views: Mapping[str, Tensor]) -> Tensor:
    """Where the receiver of a transfer writes it."""
    return _part_of(
        plan, transfer, plan.target[transfer.target][transfer.name], views[transfer.name]
    )


def rows_of(plan: TransferPlan, piece: Piece, read: Read) -> Tensor:
    """What the sender of a piece gives."""
    return given(plan, piece.transfer, read)[piece.start : piece.stop]


def _part_of(plan: TransferPlan, transfer: Transfer, held: Slice, tensor: Tensor) -> Tensor:
    return part(
        tensor, plan.specs[transfer.name], held, transfer.axis, transfer.start, transfer.stop
    )


def messages(
    transfers: Sequence[Transfer], specs: Mapping[str, TensorSpec], limit: int, small: int
) -> list[Message]:
    """Cut transfers into row ranges of at most `limit` elements (at least one row), a message each.

    What is left over of at most `small` elements is put together, in messages of at most `limit`,
    at the end.
    """
    large: list[Message] = []
    packed: list[list[Piece]] = []
    free = 0
    for transfer in transfers:
        rows = (
            specs[transfer.name].shape[0] if transfer.axis != 0 else transfer.stop - transfer.start
        )
        width = transfer.numel // rows
        step = max(1, limit // width)
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            piece = Piece(transfer, start, stop, (stop - start) * width)
            if piece.numel > small:
                large.append((piece,))
                continue
            if piece.numel > free:
                packed.append([])
                free = limit
            packed[-1].append(piece)
            free -= piece.numel
    return [*large, *map(tuple, packed)]


def batches(order: Sequence[Message], limit: int) -> list[Batch]:
    """Consecutive messages together, as long as they are no more than `limit` elements."""
    filled: list[list[Message]] = []
    free = 0
    for message in order:
        if (numel := numel_of_message(message)) > free:
            filled.append([])
            free = limit
        filled[-1].append(message)
        free -= numel
    return [tuple(batch) for batch in filled]


def numel_of_message(message: Message) -> int:
    """Number of elements."""
    return sum(piece.numel for piece in message)


def steps(plan: TransferPlan, rank: int, bucket_bytes: int) -> list[Step]:
    """A rank's batches of at most a quarter of a bucket, in an order that can not deadlock.

    In round r a rank sends to the rank r places after it and receives from the one r places before
    it. The i-th batch of a round is in the i-th step of the round on both sides, so the earliest
    step that is not complete anywhere can always go on. Raises AlignerError when a batch would not
    hold one row of every tensor.
    """
    limit = bucket_bytes // _BATCHES_PER_BUCKET // plan.itemsize
    widest, name = max((spec.numel // spec.shape[0], spec.name) for spec in plan.table)
    if limit < widest:
        needed = _BATCHES_PER_BUCKET * widest * plan.itemsize
        raise AlignerError(
            f"a bucket of {bucket_bytes} bytes is too small: one row of {name} needs a bucket of"
            f" {needed} bytes; raise engine.bucket_mib"
        )
    small = min(limit, _SMALL_BYTES // plan.itemsize)

    def between(source: int, target: int) -> list[Batch]:
        return batches(messages(plan.between(source, target), plan.specs, limit, small), limit)

    world = len(plan.labels)
    found: list[Step] = []
    for distance in range(1, world):
        to, from_ = (rank + distance) % world, (rank - distance) % world
        both = zip_longest(between(rank, to), between(from_, rank), fillvalue=())
        found += [Step(to, sending, from_, receiving) for sending, receiving in both]
    return found


def copy_local(plan: TransferPlan, rank: int, read: Read, views: Mapping[str, Tensor]) -> None:
    """Copy the slices that this rank already holds into its views, except shared tensors."""
    for transfer in plan.between(rank, rank):
        source = given(plan, transfer, read)
        view = wanted(plan, transfer, views)
        places = {
            (tensor.data_ptr(), tensor.stride(), tensor.dtype, tensor.device)
            for tensor in (source, view)
        }
        if len(places) > 1:
            view.copy_(source)
        del source, view  # before another is read: it may be a copy


class ReadOnce:
    """A source whose last tensor is kept: a large one is read once, not once a message."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._last: tuple[str, Tensor] | None = None

    def __call__(self, name: str) -> Tensor:
        """The tensor of this name."""
        if self._last is None or self._last[0] != name:
            self._last = None  # before another is made
            self._last = name, self._read(name)
        return self._last[1]


@dataclass(frozen=True)
class _Carried:
    """A message and the tensor that it travels in: its own place, or staging memory."""

    message: Message
    tensor: Tensor
    staged: bool

    def parts(self, encoding: Encoding) -> Iterator[tuple[Piece, Tensor]]:
        """Where each piece lies in a staged message."""
        offset = 0
        for piece in self.message:
            size = encoding.nbytes(piece)
            yield piece, self.tensor[offset : offset + size]
            offset += size


class Exchange:
    """Sends and receives one rank's remote pieces.

    Two batches are under way each way. A message that is one contiguous piece, of the travelling
    dtype and not encoded, is sent from, or received into, its own place; only the others take
    staging memory. Of the tensors in `copied`, of which `read` makes copies, a message that is the
    whole copy is sent from there; a part would keep all of the copy alive, and is staged.
    """

    def __init__(
        self,
        plan: TransferPlan,
        link: Link,
        dtype: torch.dtype,
        read: Read,
        views: Mapping[str, Tensor],
        copied: Container[str] = (),
        encoding: Encoding | None = None,
    ) -> None:
        """`encoding` None: numbers travel as they are."""
        self._plan, self._link, self._dtype, self._read, self._views = (
            plan,
            link,
            dtype,
            read,
            views,
        )
        self._copied, self._encoding = copied, encoding or Encoding(dtype)
        self.sent_bytes = 0
        self._staging: dict[tuple[str, int], Tensor] = {}
        self._posted: deque[tuple[list[_Carried], list[_Carried]]] = deque()
        self._most_copies = 0

    def run(self, order: Sequence[Step]) -> int:
        """Take these steps; returns the bytes of staging memory that it took, at most a bucket."""
        for number, step in enumerate(order):
            self._post(step, number % _IN_FLIGHT)
            if len(self._posted) == _IN_FLIGHT:
                self._complete()
        while self._posted:
            self._complete()
        return self._most_copies + sum(buffer.nbytes for buffer in self._staging.values())

    def _post(self, step: Step, slot: int) -> None:
        sent = self._carry(step.sending, self._own_rows, ("out", slot))
        received = self._carry(step.receiving, self._place, ("in", slot))
        for carried in sent:
            if carried.staged:
                for piece, packed in carried.parts(self._encoding):
                    self._encoding.pack(piece, self._rows(piece), packed)
        self.sent_bytes += sum(each.tensor.nbytes for each in sent)
        self._link.post(
            [(each.tensor, step.to) for each in sent if each.tensor.numel()],
            [(each.tensor, step.from_) for each in received if each.tensor.numel()],
        )
        self._posted.append((sent, received))  # what is sent has to live until it has left
        self._most_copies = max(
            self._most_copies, sum(self._bytes_of_copies(sent) for sent, _ in self._posted)
        )

    def _complete(self) -> None:
        """Wait for the oldest step, and put what it brought into its place."""
        self._link.complete()
        _, received = self._posted.popleft()
        for carried in received:
            if carried.staged:
                for piece, packed in carried.parts(self._encoding):
                    self._encoding.unpack(piece, packed, self._place(piece))

    def _own_rows(self, piece: Piece) -> Tensor | None:
        transfer = piece.transfer
        held = slice_shape(
            self._plan.specs[transfer.name], self._plan.source[transfer.source][transfer.name]
        )
        is_part = piece.numel < math.prod(held)
        return None if is_part and transfer.name in self._copied else self._rows(piece)

    def _bytes_of_copies(self, sent: list[_Carried]) -> int:
        own = (carried for carried in sent if not carried.staged)
        return sum(
            carried.tensor.nbytes
            for carried in own
            if carried.message[0].transfer.name in self._copied
        )

    def _rows(self, piece: Piece) -> Tensor:
        return rows_of(self._plan, piece, self._read)

    def _place(self, piece: Piece) -> Tensor:
        return wanted(self._plan, piece.transfer, self._views)[piece.start : piece.stop]

    def _carry(
        self, batch: Batch, locate: Callable[[Piece], Tensor | None], slot: tuple[str, int]
    ) -> list[_Carried]:
        """What each message travels in: what `locate` finds, or staging memory.

        `slot` names the staging memory, which the step before the last has left.
        """
        encoding = self._encoding
        own = [
            (
                self._travelling(locate(message[0]))
                if len(message) == 1 and encoding.is_plain(message[0])
                else None
            )
            for message in batch
        ]
        sizes = [
            0 if tensor is not None else sum(map(encoding.nbytes, message))
            for message, tensor in zip(batch, own, strict=True)
        ]
        staging = self._buffer(slot, sum(sizes)).split(sizes)
        return [
            _Carried(message, part if tensor is None else tensor, tensor is None)
            for message, tensor, part in zip(batch, own, staging, strict=True)
        ]

    def _travelling(self, tensor: Tensor | None) -> Tensor | None:
        """The tensor, when it can be sent or received as it is."""
        if tensor is None:
            return None
        fits = (
            tensor.is_contiguous()
            and tensor.dtype == self._dtype
            and tensor.device == self._link.device
        )
        return tensor if fits else None

    def _buffer(self, slot: tuple[str, int], size: int) -> Tensor:
        """uint8 [`size`]."""
        if slot not in self._staging or self._staging[slot].numel() < size:
            self._staging.pop(slot, None)  # before another is made
            self._staging[slot] = torch.empty(size, dtype=torch.uint8, device=self._link.device)
        return self._staging[slot][:size]
