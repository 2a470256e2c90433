"""Moving a plan's pieces: within a rank by copying, between ranks in messages over a link."""

import json
import math
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from aligner.errors import AlignerError, EngineGone
from aligner.models.weight_slices import Slice, TensorSpec, cut_shape
from aligner.resharding.transfer_plan import Transfer, TransferPlan, extent

_GRACE_S = 2.0
"""How long ranks that have said nothing are waited for, once an agreement has failed, to learn what
befell them."""


class _Group(Protocol):
    """What torch's process groups for gloo and NCCL have in common, and is used here."""

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work: ...
    def recv(self, tensors: list[Tensor], from_: int, tag: int) -> dist.Work: ...
    def allreduce(self, tensors: list[Tensor]) -> dist.Work: ...
    def abort(self) -> None: ...
    def _start_coalescing(self) -> None: ...
    def _end_coalescing(self) -> dist.Work: ...


_Operation = tuple[dist.Work, tuple[int, ...]]
"""Work under way, and the ranks that it takes."""


class LostPeer(AlignerError):
    """A transfer with these ranks did not complete."""

    def __init__(self, message: str, peers: Sequence[int]) -> None:
        super().__init__(message)
        self.peers = tuple(peers)


class _Ballot(NamedTuple):
    """What a rank says of an agreement that failed: its own error, if it had one, and the peers
    that it blames for it."""

    error: str | None = None
    blamed: Sequence[int] | None = None


class Link:
    """One process's end of a process group of its own, over gloo on CPUs and NCCL on GPUs.

    The ranks may belong to one world or to several: all they share is a store. Ranks act in step;
    what fails on one fails on all, and breaks the link for good: its peers' transfers end at once.
    To go on, every rank makes a new one with the next `generation`.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        labels: Sequence[str],
        *,
        timeout: timedelta,
        device: torch.device | None = None,
        name: str = "weights",
        generation: int = 0,
        store_host: str = "the process that hosts the store",
    ) -> None:
        """Collective. `labels` names every rank, in order, in errors, and `store_host` the process
        whose end ends the store.

        `timeout` bounds each wait for another rank. An agreement that fails can take several: that
        for a transfer, that for the decision, and a few seconds for the others' reasons.

        Raises AlignerError naming the ranks that did not come; a further try needs the next
        generation too.
        """
        self.rank, self.labels, self.timeout = rank, tuple(labels), timeout
        self.device = device or torch.device("cpu")
        self._store_host = store_host
        self._title = f"link {name!r} (generation {generation})"
        self._prefix = f"{name}/{generation}"
        self._store = PrefixStore(self._prefix, store)
        self._broken: str | None = None
        self._agreements = 0
        self._given_up = False
        # gloo ends a group's connections when nothing refers to the group or to an operation of it
        # any more. The traceback of an error refers to every local variable, so none may hold them.
        self._pending: deque[list[_Operation]] = deque()
        self._await_all("arrived")
        self._group: _Group | None = self._connect()
        # A rank whose first transfer fails closes its connections. gloo would fail with that on a
        # rank that still connects, instead of with the cause.
        self._await_all("connected")
        if self._nccl:
            # all join the communicator, also who sends nothing at first
            self.all_reduce(torch.zeros(1, device=self.device))

    @classmethod
    def of_world(
        cls,
        labels: Sequence[str],
        *,
        timeout: timedelta,
        device: torch.device | None = None,
        generation: int = 0,
    ) -> "Link":
        """The link of the ranks of torch.distributed's default group, whose store rank 0 hosts."""
        return cls(
            dist.distributed_c10d._get_default_store(),
            dist.get_rank(),
            labels,
            timeout=timeout,
            device=device,
            generation=generation,
            store_host=labels[0],
        )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.labels)

    def post(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> None:
        """Start sending contiguous tensors to ranks and receiving tensors from ranks, all at once.

        The tensors must stay alive, and what is sent unchanged, until the `complete` that answers
        this `post`. Two ranks have to post what goes from one to the other in the same order.
        """
        peers = tuple(dict.fromkeys(peer for _, peer in (*sends, *receives)))
        begin = time.monotonic()
        self._pending.append([])
        try:
            # in one group call, or two ranks that send to each other would wait for each other
            if self._nccl and peers:
                self._open_group()._start_coalescing()
            for tensor, to in sends:
                self._pending[-1].append((self._open_group().send([tensor], to, 0), (to,)))
            for tensor, from_ in receives:
                self._pending[-1].append((self._open_group().recv([tensor], from_, 0), (from_,)))
            if self._nccl and peers:
                self._pending[-1][:] = [(self._open_group()._end_coalescing(), peers)]
        except RuntimeError as error:
            raise self._lost(peers, begin) from error

    def complete(self) -> None:
        """Wait for the oldest `post`. Raises AlignerError naming the peer that is gone or did not
        answer in time."""
        # the last first: when that is there the others are too, and nobody has to be woken for them
        while self._pending[0]:
            self._wait(self._pending[0][-1][1])
            del self._pending[0][-1]
        self._pending.popleft()

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks, in place."""
        self._pending.appendleft([(self._open_group().allreduce([tensor]), ())])
        self.complete()

    @contextmanager
    def agreement(self, failure: str) -> Iterator[None]:
        """Do something on every rank: the block ends well on all of them, or raises on all.

        Collective. A single entry of the store decides, so that no rank can think otherwise than
        another; the store's host must live until all of them have returned, which its own return
        does not say. `failure` heads the error, which tells what went wrong on which ranks, and
        which ones did not answer within the timeout. A rank whose engine is gone raises that, by
        which it ends.
        """
        self._open_group()
        self._agreements += 1
        cause: Exception | None = None
        try:
            if self._given_up:
                raise AlignerError(f"{self._title} was aborted")
            yield
        except Exception as error:
            cause = error
        # the process is being ended: the others need not wait for it
        except BaseException as error:
            self._refuse(_Ballot(repr(error)))
            raise
        try:
            agreed = self._decide(cause)
            problem = None if agreed else "\n".join(self._reasons())
        except dist.DistError as error:
            cause = cause or error
            problem = f"{self._store_host} does not answer: {error}"
            if isinstance(cause, AlignerError):
                problem += f"\n{self.labels[self.rank]}: {cause}"
        if problem is not None:
            self.close(problem)
            if isinstance(cause, EngineGone):
                raise cause
            raise AlignerError(f"{failure}:\n{problem}") from cause

    def close(self, reason: str = "it was closed") -> None:
        """End the connections; the peers' transfers fail at once. `reason` is told to who uses the
        link after that."""
        self._broken = reason
        for operations in self._pending:
            operations.clear()
        self._pending.clear()
        if self._group is not None and self._nccl:
            self._group.abort()
        self._group = None

    def give_up(self, store: Store) -> None:
        """Have the agreement under way, and every later one, fail on every rank, since one will not
        come. From any thread.

        `store` is a client of the link's store that no other thread uses.
        """
        # before the key is made: an agreement that begins meanwhile sees this, or is that of the
        # key
        self._given_up = True
        PrefixStore(self._prefix, store).compare_set(self._key("decision"), "", "failed")

    @property
    def _nccl(self) -> bool:
        return self.device.type == "cuda"

    def _await_all(self, stage: str) -> None:
        """Wait until every rank has reached a stage of connecting."""
        reached = [f"{stage}/{rank}" for rank in range(self.size)]
        self._store.set(reached[self.rank], "")
        try:
            self._store.wait(reached, self.timeout)
        except dist.DistStoreError as error:
            missing = [
                label
                for label, key in zip(self.labels, reached, strict=True)
                if not self._store.check([key])
            ]
            raise AlignerError(
                f"{self._title}: {', '.join(missing)} did not connect within"
                f" {self.timeout.total_seconds():g} s (engine.update_timeout_s)"
            ) from error

    def _connect(self) -> _Group:
        try:
            if not self._nccl:
                return cast(
                    _Group, dist.ProcessGroupGloo(self._store, self.rank, self.size, self.timeout)
                )
            options = dist.ProcessGroupNCCL.Options()
            # its watchdog ends the process: our own waits have to end first
            options._timeout = 2 * self.timeout
            return cast(_Group, dist.ProcessGroupNCCL(self._store, self.rank, self.size, options))
        except RuntimeError as error:
            raise AlignerError(
                f"{self._title}: {self.labels[self.rank]} could not connect: {error}"
            ) from error

    def _open_group(self) -> _Group:
        if self._group is None:
            raise AlignerError(
                f"{self._title} is closed and must be reconnected; cause: {self._broken}"
            )
        return self._group

    def _wait(self, peers: tuple[int, ...]) -> None:
        """Wait for the last operation of the oldest post, which is with these peers."""
        begin = time.monotonic()
        try:
            # NCCL itself does not notice a dead peer
            while self._nccl and not self._pending[0][-1][0].is_completed():
                waited = time.monotonic() - begin
                if waited > self.timeout.total_seconds():
                    raise RuntimeError("timed out")
                if waited > 1 and self._store.check([self._key("decision")]):
                    raise LostPeer("aborted because another rank failed", ())
                time.sleep(1e-4 if waited < 1 else 0.05)
            self._pending[0][-1][0].wait(self.timeout)
        except RuntimeError as error:
            raise self._lost(peers, begin) from error

    def _lost(self, peers: tuple[int, ...], begin: float) -> LostPeer:
        who = " or ".join(self.labels[peer] for peer in peers) or "a rank"
        if time.monotonic() - begin < self.timeout.total_seconds():
            return LostPeer(f"{who} closed the connection", peers)
        return LostPeer(f"{who} did not answer within {self.timeout.total_seconds():g} s", peers)

    def _key(self, what: str) -> str:
        return f"agreement/{self._agreements}/{what}"

    def _decide(self, cause: Exception | None) -> bool:
        """Say whether this rank's part went well, and learn whether all ranks' did."""
        decision = self._key("decision")
        late = self._store.check([decision])
        if cause is not None:
            self._refuse(
                _Ballot(
                    str(cause) or repr(cause), cause.peers if isinstance(cause, LostPeer) else None
                )
            )
        elif self._store.add(self._key("good"), 1) == self.size:
            self._store.compare_set(decision, "", "good")
            if self._agreements > 1:  # no rank needs the one before any more
                for what in ("good", "decision"):
                    self._store.delete_key(f"agreement/{self._agreements - 1}/{what}")
        try:
            self._store.wait([decision], self.timeout)
        except dist.DistStoreError:
            self._store.compare_set(decision, "", "failed")
        if self._store.get(decision) == b"good":
            return True
        if cause is None:
            self._refuse(
                _Ballot(f"not ready within {self.timeout.total_seconds():g} s", (self.rank,))
                if late
                else _Ballot()
            )
        return False

    def _refuse(self, ballot: _Ballot) -> None:
        """Say what happened first, so that who sees the connection break can read it; then break
        it."""
        try:
            self._store.set(self._key(f"ballot/{self.rank}"), json.dumps(ballot._asdict()))
            self._store.compare_set(self._key("decision"), "", "failed")
        finally:
            self.close(ballot.error or "another rank failed")

    def _reasons(self) -> list[str]:
        """One line for each thing that made an agreement fail, and for each rank that did not
        answer."""
        ballots: dict[int, _Ballot] = {}
        end = time.monotonic() + min(_GRACE_S, self.timeout.total_seconds())
        try:
            while not self._read(ballots) and time.monotonic() < end:
                time.sleep(0.01)
            silent = [rank for rank in range(self.size) if rank not in ballots]
        except dist.DistError:  # the store's host has heard enough, and left
            if not any(ballot.error for ballot in ballots.values()):
                raise
            silent = []
        blamed = {peer for ballot in ballots.values() for peer in ballot.blamed or ()}
        own: dict[str, list[int]] = {}
        for rank, ballot in ballots.items():
            if ballot.error is not None and ballot.blamed is None:
                own.setdefault(ballot.error, []).append(rank)
        lines = [
            f"{', '.join(self.labels[rank] for rank in ranks)}: {error}"
            for error, ranks in own.items()
        ]
        lines += [
            f"{self.labels[rank]}: {ballot.error}"
            for rank, ballot in ballots.items()
            if any(peer in silent for peer in ballot.blamed or ())
        ]
        lines += [f"{self.labels[rank]} does not answer" for rank in silent if rank not in blamed]
        return lines or [
            f"{self.labels[rank]}: {ballot.error}"
            for rank, ballot in ballots.items()
            if ballot.error
        ]

    def _read(self, ballots: dict[int, _Ballot]) -> bool:
        """Add the ballots that have come; whether all have, but for the ranks that others blame."""
        for rank in range(self.size):
            if rank not in ballots and self._store.check([key := self._key(f"ballot/{rank}")]):
                ballots[rank] = _Ballot(**json.loads(self._store.get(key)))
        blamed = {peer for ballot in ballots.values() for peer in ballot.blamed or ()}
        return blamed.issuperset(rank for rank in range(self.size) if rank not in ballots)


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

    `aligner.resharding.transport.Changes` sends only changed elements. Both ends of a message know
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


_INDEX = torch.int32
_BITS = {2: torch.int16, 4: torch.int32}


class Changes(Encoding):
    """Send the index and value of each element that differs from the previous publish, or the whole
    piece if that takes fewer bytes.

    Elements are compared bit by bit, so the engine gets exactly the source's bits, including the
    sign of a zero. The engine's tensors must still hold the elements of the previous publish.
    """

    def __init__(
        self, dtype: torch.dtype, counts: Mapping[Piece, int], before: Callable[[Piece], Tensor]
    ) -> None:
        """`counts` is how many numbers of each piece have changed; `before` gives its rows at the
        publish before."""
        super().__init__(dtype)
        self._counts, self._before = counts, before

    @classmethod
    def agreed(
        cls,
        order: Sequence[Step],
        link: Link,
        dtype: torch.dtype,
        rows: Callable[[Piece], Tensor],
        before: Callable[[Piece], Tensor],
    ) -> "Changes":
        """Count what has changed of the pieces that this rank sends, and hear it of those that it
        receives. Collective."""
        counts: dict[Piece, int] = {}
        sending: dict[int, list[Piece]] = {}
        receiving: dict[int, list[Piece]] = {}
        for step in order:
            sending.setdefault(step.to, []).extend(
                piece for message in step.sending for piece in message
            )
            receiving.setdefault(step.from_, []).extend(
                piece for message in step.receiving for piece in message
            )
        sent, received = [], []
        for to, pieces in sending.items():
            counts |= {
                piece: int(_changed(rows(piece).to(dtype), before(piece)).sum()) for piece in pieces
            }
            if pieces:
                sent.append(
                    (torch.tensor([counts[piece] for piece in pieces], device=link.device), to)
                )
        for from_, pieces in receiving.items():
            if pieces:
                received.append(
                    (torch.empty(len(pieces), dtype=torch.int64, device=link.device), from_)
                )
        link.post(sent, received)
        link.complete()
        changed = sum(counts.values())
        for heard, from_ in received:
            counts |= dict(zip(receiving[from_], heard.tolist(), strict=True))
        agreed = cls(dtype, counts, before)
        agreed.changed = changed
        return agreed

    def nbytes(self, piece: Piece) -> int:
        """Of what has changed, or of all."""
        return min(
            super().nbytes(piece), self._counts[piece] * (_INDEX.itemsize + self._dtype.itemsize)
        )

    def is_plain(self, piece: Piece) -> bool:
        """Whether so much has changed that all of it is less."""
        return self.nbytes(piece) == super().nbytes(piece)

    def pack(self, piece: Piece, rows: Tensor, packed: Tensor) -> None:
        """Write indices, then numbers."""
        if self.is_plain(piece):
            super().pack(piece, rows, packed)
            return
        rows = rows.to(self._dtype)
        index = _changed(rows, self._before(piece)).flatten().nonzero().flatten()
        # By bytes: numbers of two bytes may leave the next piece's indices at an address that is no
        # multiple of four.
        split = len(index) * _INDEX.itemsize
        packed[:split].copy_(index.to(_INDEX).view(torch.uint8))
        packed[split:].copy_(rows.flatten()[index].view(torch.uint8))

    def unpack(self, piece: Piece, packed: Tensor, place: Tensor) -> None:
        """Write the numbers over those that they replace."""
        if self.is_plain(piece):
            super().unpack(piece, packed, place)
            return
        split = self._counts[piece] * _INDEX.itemsize
        index = packed[:split].clone().view(_INDEX).long().to(place.device)
        numbers = packed[split:].clone().view(self._dtype).to(place.device)
        place[torch.unravel_index(index, place.shape)] = numbers


def _changed(rows: Tensor, before: Tensor) -> Tensor:
    """bool, of the rows' shape: which bits differ."""
    bits = _BITS[rows.dtype.itemsize]
    return rows.view(bits) != before.view(bits)
