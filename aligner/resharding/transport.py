"""Weight transfer between ranks: the link that connects them, messages, and their encodings.

- `Link` connects the ranks of a transfer plan. It has point-to-point transfers, all-reduce, and
  agreements, which succeed on all ranks or fail on all ranks.
- `plan_steps` cuts a plan's transfers into messages, batches and steps. `copy_local` executes the
  transfers within a rank, and `Exchange` those between ranks.
- `Encoding` sends all elements; `DeltaEncoding` sends only changed elements
  (`engine.publish=changes`).
"""

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

from aligner.errors import AlignerError, EngineExited
from aligner.models.weight_slices import Slice, TensorSpec, cut_shape
from aligner.resharding.transfer_plan import Transfer, TransferPlan, extent

# Seconds to wait for the ballots of the other ranks after an agreement has failed. The ballots
# contain the reasons of the failure.
_GRACE_S = 2.0


class _Group(Protocol):
    """The methods of torch's gloo and NCCL process groups that `Link` uses."""

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work: ...
    def recv(self, tensors: list[Tensor], from_: int, tag: int) -> dist.Work: ...
    def allreduce(self, tensors: list[Tensor]) -> dist.Work: ...
    def abort(self) -> None: ...
    def _start_coalescing(self) -> None: ...
    def _end_coalescing(self) -> dist.Work: ...


# An asynchronous operation, and the peer ranks that take part in it.
_Operation = tuple[dist.Work, tuple[int, ...]]


class LostPeer(AlignerError):
    """A transfer with the ranks `peers` did not complete.

    `peers` is empty for an all-reduce, and if another rank's failure aborted the transfer.
    """

    def __init__(self, message: str, peers: Sequence[int]) -> None:
        super().__init__(message)
        self.peers = tuple(peers)


class _Ballot(NamedTuple):
    """A rank's report on a failed agreement."""

    error: str | None = None
    """Error of the rank; None if its block succeeded in time."""
    blamed: Sequence[int] | None = None
    """Ranks that caused `error`.

    - None: the error is the rank's own, or there is no error.
    - The peers of a transfer that did not complete.
    - Empty: an all-reduce did not complete, or another rank's failure aborted a transfer.
    - Only the rank itself: its block succeeded, but after the agreement had failed.
    """


class Link:
    """One process's end of a process group that is separate from the default group.

    The group uses gloo on CPUs and NCCL on GPUs. The ranks may belong to one world or to several
    worlds; they share only a store. All ranks perform the same operations in the same order.

    A failure on one rank is a failure on all ranks, and breaks the link permanently. With gloo, the
    pending transfers of the other ranks fail immediately. With NCCL, they fail after the failed
    decision is in the store, or at the timeout. To continue, every rank creates a new link with the
    next `generation`.
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
        """Connect to the other ranks. Collective.

        Args:
            store: The key-value store that all ranks share.
            rank: This process's rank in the link.
            labels: The name of each rank in error messages, in the order of the ranks.
            timeout: Maximum duration of each wait for another rank. A failing agreement can take
                several waits: one for a transfer, one for the decision, and a few seconds for the
                reports of the other ranks.
            device: Device of the transferred tensors; default CPU.
            name: Name of the link; prefix of its keys in the store.
            generation: Number of the attempt to connect. After a failure, the next attempt needs
                the next generation.
            store_host: Label of the process that hosts the store. The store ends with this process.

        Raises:
            AlignerError: If ranks did not connect in time; the error names them.
        """
        self.rank = rank
        self.labels = tuple(labels)
        self.timeout = timeout
        self.device = device or torch.device("cpu")
        self._store_host = store_host
        self._title = f"link {name!r} (generation {generation})"
        self._prefix = f"{name}/{generation}"
        self._store = PrefixStore(self._prefix, store)
        self._close_reason: str | None = None
        self._agreement_count = 0
        self._is_aborted = False
        # gloo closes the connections when the last reference to the group and to its operations is
        # gone; `close` relies on this. The traceback of an error keeps local variables alive, so
        # operations are stored only here.
        self._pending: deque[list[_Operation]] = deque()

        self._wait_for_all_ranks("arrived")
        self._group: _Group | None = self._connect()
        # A rank whose first transfer fails closes its connections. Without this wait, a rank that
        # is still connecting would report gloo's connection error instead of the cause.
        self._wait_for_all_ranks("connected")

        if self._uses_nccl:
            # NCCL creates the communicator at the first collective, which needs every rank, also
            # the ranks that have nothing to send at first.
            self.all_reduce(torch.zeros(1, device=self.device))

    @classmethod
    def from_default_group(
        cls,
        labels: Sequence[str],
        *,
        timeout: timedelta,
        device: torch.device | None = None,
        generation: int = 0,
    ) -> "Link":
        """Return a link of the ranks of torch.distributed's default group, whose rank 0 hosts the
        store. Collective."""
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

        The tensors must stay alive, and sent tensors must stay unchanged, until the `complete` call
        for this `post`. For each pair of ranks, sender and receiver must post the transfers in the
        same order.

        Args:
            sends: Tensors and their destination ranks.
            receives: Tensors to receive into, and their source ranks.

        Raises:
            LostPeer: If a peer closed the connection.
        """
        peers = tuple(dict.fromkeys(peer for _, peer in (*sends, *receives)))
        begin = time.monotonic()
        self._pending.append([])
        try:
            # NCCL needs one group call for all transfers: otherwise two ranks that send to each
            # other would wait for each other.
            if self._uses_nccl and peers:
                self._require_group()._start_coalescing()
            for tensor, to in sends:
                self._pending[-1].append((self._require_group().send([tensor], to, 0), (to,)))
            for tensor, from_ in receives:
                self._pending[-1].append((self._require_group().recv([tensor], from_, 0), (from_,)))
            if self._uses_nccl and peers:
                self._pending[-1][:] = [(self._require_group()._end_coalescing(), peers)]
        except RuntimeError as error:
            raise self._lost_peer_error(peers, begin) from error

    def complete(self) -> None:
        """Wait for the transfers of the oldest `post`.

        Raises:
            LostPeer: If a peer closed the connection or did not answer in time; the error names it.
                With NCCL, also if another rank failed; `peers` is then empty.
        """
        # Wait for the last operation first: when it is done, the other operations usually are done
        # too, and this thread is not woken for each of them.
        while self._pending[0]:
            self._wait_for_last_operation(self._pending[0][-1][1])
            del self._pending[0][-1]
        self._pending.popleft()

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks, in place. Collective.

        Raises:
            LostPeer: If a rank closed the connection or did not answer in time, or another rank
                failed; `peers` is empty.
        """
        # Put the operation first, so that `complete` waits for it, not for the oldest `post`.
        self._pending.appendleft([(self._require_group().allreduce([tensor]), ())])
        self.complete()

    @contextmanager
    def agreement(self, failure: str) -> Iterator[None]:
        """Run the block on every rank: it succeeds on all ranks, or raises on all ranks.

        Collective. A single entry of the store contains the decision, so all ranks read the same
        decision. The process that hosts the store must run until all ranks have returned from the
        agreement; it may return before the other ranks have returned.

        Args:
            failure: First line of the error. The following lines report what went wrong on which
                ranks, and which ranks did not answer within the timeout.

        Raises:
            AlignerError: If the block failed on any rank. The link is closed then.
            EngineExited: On a rank whose block raised this error, which ends its process.
        """
        self._require_group()
        self._agreement_count += 1
        cause: Exception | None = None
        try:
            if self._is_aborted:
                raise AlignerError(f"{self._title} was aborted")
            yield
        except Exception as error:
            cause = error
        # The process is being terminated: the other ranks need not wait for it.
        except BaseException as error:
            self._report_failure(_Ballot(repr(error)))
            raise

        try:
            is_agreed = self._decide(cause)
            problem = None if is_agreed else "\n".join(self._collect_reasons())
        except dist.DistError as error:
            cause = cause or error
            problem = f"{self._store_host} does not answer: {error}"
            if isinstance(cause, AlignerError):
                problem += f"\n{self.labels[self.rank]}: {cause}"

        if problem is not None:
            self.close(problem)
            if isinstance(cause, EngineExited):
                raise cause
            raise AlignerError(f"{failure}:\n{problem}") from cause

    def close(self, reason: str = "it was closed") -> None:
        """Close the connections.

        With gloo, the pending transfers of the peers fail immediately. With NCCL, they fail after
        the failed decision is in the store, or at the timeout.

        Args:
            reason: Cause that later uses of the link report in their errors.
        """
        self._close_reason = reason
        for operations in self._pending:
            operations.clear()
        self._pending.clear()
        if self._group is not None and self._uses_nccl:
            self._group.abort()
        self._group = None

    def abort(self, store: Store) -> None:
        """Make the current agreement and all later agreements fail on every rank, because a rank is
        lost.

        May be called from any thread.

        Args:
            store: A client of the link's store that no other thread uses.
        """
        # An agreement that begins after this line sees the flag. One that began earlier has already
        # increased the count, so its key is the one below.
        self._is_aborted = True
        PrefixStore(self._prefix, store).compare_set(self._agreement_key("decision"), "", "failed")

    @property
    def _uses_nccl(self) -> bool:
        return self.device.type == "cuda"

    def _wait_for_all_ranks(self, stage: str) -> None:
        """Wait until every rank has reached a stage of connecting.

        Args:
            stage: Name of the stage.

        Raises:
            AlignerError: If ranks did not reach the stage within the timeout; the error names them.
        """
        stage_keys = [f"{stage}/{rank}" for rank in range(self.size)]
        self._store.set(stage_keys[self.rank], "")
        try:
            self._store.wait(stage_keys, self.timeout)
        except dist.DistStoreError as error:
            missing = [
                label
                for label, key in zip(self.labels, stage_keys, strict=True)
                if not self._store.check([key])
            ]
            raise AlignerError(
                f"{self._title}: {', '.join(missing)} did not connect within"
                f" {self.timeout.total_seconds():g} s (engine.update_timeout_s)"
            ) from error

    def _connect(self) -> _Group:
        try:
            if not self._uses_nccl:
                return cast(
                    _Group, dist.ProcessGroupGloo(self._store, self.rank, self.size, self.timeout)
                )
            options = dist.ProcessGroupNCCL.Options()
            # NCCL's watchdog kills the process after this timeout, so the waits of this class must
            # end earlier.
            options._timeout = 2 * self.timeout
            return cast(_Group, dist.ProcessGroupNCCL(self._store, self.rank, self.size, options))
        except RuntimeError as error:
            raise AlignerError(
                f"{self._title}: {self.labels[self.rank]} could not connect: {error}"
            ) from error

    def _require_group(self) -> _Group:
        """Return the process group. Raise AlignerError if the link is closed."""
        if self._group is None:
            raise AlignerError(
                f"{self._title} is closed and must be reconnected; cause: {self._close_reason}"
            )
        return self._group

    def _wait_for_last_operation(self, peers: tuple[int, ...]) -> None:
        """Wait for the last operation of the oldest post; `peers` are its peers."""
        begin = time.monotonic()
        try:
            # NCCL does not notice that a peer has exited: poll the operation and the decision, and
            # enforce the timeout here.
            while self._uses_nccl and not self._pending[0][-1][0].is_completed():
                waited = time.monotonic() - begin
                if waited > self.timeout.total_seconds():
                    raise RuntimeError("timed out")
                if waited > 1 and self._store.check([self._agreement_key("decision")]):
                    raise LostPeer("aborted because another rank failed", ())
                time.sleep(1e-4 if waited < 1 else 0.05)
            self._pending[0][-1][0].wait(self.timeout)
        except RuntimeError as error:
            raise self._lost_peer_error(peers, begin) from error

    def _lost_peer_error(self, peers: tuple[int, ...], begin: float) -> LostPeer:
        who = " or ".join(self.labels[peer] for peer in peers) or "a rank"
        if time.monotonic() - begin < self.timeout.total_seconds():
            return LostPeer(f"{who} closed the connection", peers)
        return LostPeer(f"{who} did not answer within {self.timeout.total_seconds():g} s", peers)

    def _agreement_key(self, entry: str) -> str:
        """Return the store key of an entry of the current agreement."""
        return f"agreement/{self._agreement_count}/{entry}"

    def _decide(self, cause: Exception | None) -> bool:
        """Report this rank's outcome, and return whether all ranks succeeded.

        Args:
            cause: This rank's error; None if its block succeeded.
        """
        decision = self._agreement_key("decision")
        # The decision may exist before this rank reports: another rank failed, or timed out while
        # it waited for this rank. It cannot be "good", which needs all ranks.
        is_already_failed = self._store.check([decision])

        if cause is not None:
            self._report_failure(
                _Ballot(
                    str(cause) or repr(cause), cause.peers if isinstance(cause, LostPeer) else None
                )
            )
        elif self._store.add(self._agreement_key("good"), 1) == self.size:
            self._store.compare_set(decision, "", "good")
            if self._agreement_count > 1:  # no rank reads the previous agreement any more
                for entry in ("good", "decision"):
                    self._store.delete_key(f"agreement/{self._agreement_count - 1}/{entry}")

        try:
            self._store.wait([decision], self.timeout)
        except dist.DistStoreError:
            # compare_set succeeds for one writer only, so a late "good" cannot overwrite "failed".
            self._store.compare_set(decision, "", "failed")
        if self._store.get(decision) == b"good":
            return True

        if cause is None:
            self._report_failure(
                _Ballot(f"not ready within {self.timeout.total_seconds():g} s", (self.rank,))
                if is_already_failed
                else _Ballot()
            )
        return False

    def _report_failure(self, ballot: _Ballot) -> None:
        """Store this rank's ballot, set a missing decision to failed, and close the link.

        The ballot is stored first, so that a peer whose connection breaks can read the reason.
        """
        try:
            self._store.set(
                self._agreement_key(f"ballot/{self.rank}"), json.dumps(ballot._asdict())
            )
            self._store.compare_set(self._agreement_key("decision"), "", "failed")
        finally:
            self.close(ballot.error or "another rank failed")

    def _collect_reasons(self) -> list[str]:
        """Return one line for each cause of a failed agreement, and for each rank that did not
        report."""
        ballots: dict[int, _Ballot] = {}
        end = time.monotonic() + min(_GRACE_S, self.timeout.total_seconds())
        try:
            while not self._read_ballots(ballots) and time.monotonic() < end:
                time.sleep(0.01)
            silent = [rank for rank in range(self.size) if rank not in ballots]
        except dist.DistError:
            # The store's host has exited, normally because it has collected its own reasons. Use
            # the ballots that were read before.
            if not any(ballot.error for ballot in ballots.values()):
                raise
            silent = []

        # List causes, not consequences:
        # 1. the ranks' own errors (`blamed` is None);
        # 2. errors that blame a rank without a ballot;
        # 3. ranks without a ballot that no rank blames.
        # If there are none, list all errors: all ranks have ballots, which blame each other or the
        # reporting rank itself (it was late), or no rank at all (an all-reduce did not complete).
        blamed = {peer for ballot in ballots.values() for peer in ballot.blamed or ()}
        ranks_by_error: dict[str, list[int]] = {}
        for rank, ballot in ballots.items():
            if ballot.error is not None and ballot.blamed is None:
                ranks_by_error.setdefault(ballot.error, []).append(rank)
        lines = [
            f"{', '.join(self.labels[rank] for rank in ranks)}: {error}"
            for error, ranks in ranks_by_error.items()
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

    def _read_ballots(self, ballots: dict[int, _Ballot]) -> bool:
        """Add new ballots to `ballots`. Return whether all ranks have reported, except ranks that
        are blamed."""
        for rank in range(self.size):
            if rank not in ballots and self._store.check(
                [key := self._agreement_key(f"ballot/{rank}")]
            ):
                ballots[rank] = _Ballot(**json.loads(self._store.get(key)))
        blamed = {peer for ballot in ballots.values() for peer in ballot.blamed or ()}
        return blamed.issuperset(rank for rank in range(self.size) if rank not in ballots)


TensorReader = Callable[[str], Tensor]
"""Function that returns this rank's source slice of a tensor, by its Hugging Face name and in its
Hugging Face orientation."""

# Batches in flight in each direction: one is transferred while another is packed or unpacked.
_IN_FLIGHT = 2
# Batches, of both directions, that share a rank's staging memory (`engine.bucket_mib`).
_BATCHES_PER_BUCKET = 2 * _IN_FLIGHT
# Pieces of at most this size (bytes) share a message: packing them costs less than a message each.
_SMALL_BYTES = 1 << 18


@dataclass(frozen=True)
class Piece:
    """Rows `[start, stop)` of the part of a tensor that a transfer sends.

    The rows are indices of dimension 0, counted from the start of this part.
    """

    transfer: Transfer
    start: int
    stop: int
    numel: int
    """Number of elements of the rows."""


Message = tuple[Piece, ...]
"""The pieces of one send operation, in this order."""

Batch = tuple[Message, ...]
"""The messages that are posted at the same time."""


@dataclass(frozen=True)
class ExchangeStep:
    """One outgoing batch and one incoming batch of a rank; either may be empty."""

    to_rank: int
    outgoing: Batch
    from_rank: int
    incoming: Batch


class Encoding:
    """Representation of pieces in messages: all elements, in the transfer's dtype.

    `DeltaEncoding` sends only changed elements. Both ends of a message know its size in bytes
    before it is sent.
    """

    changed_elements: int | None = None
    """Number of elements that this rank sends and that differ from the previous publish; None if
    they were not compared."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def nbytes(self, piece: Piece) -> int:
        """Return the size of an encoded piece in bytes, a multiple of the element size."""
        return piece.numel * self._dtype.itemsize

    def is_plain(self, piece: Piece) -> bool:
        """Return whether all elements of a piece are sent unencoded.

        Only such a piece can be sent without staging memory.
        """
        return True

    def pack(self, piece: Piece, rows: Tensor, packed: Tensor) -> None:
        """Encode the source's `rows` of a piece into `packed`, uint8 [nbytes]."""
        packed.view(self._dtype).view(rows.shape).copy_(rows)

    def unpack(self, piece: Piece, packed: Tensor, target: Tensor) -> None:
        """Decode `packed`, uint8 [nbytes], into `target`, the rows of the engine's tensor."""
        target.copy_(packed.view(self._dtype).view(target.shape))


def slice_shape(spec: TensorSpec, held_slice: Slice) -> tuple[int, ...]:
    """Return the shape of a slice of a tensor."""
    return cut_shape(spec.shape, held_slice.axis, held_slice.start, held_slice.stop)


def narrow_slice(
    tensor: Tensor, spec: TensorSpec, held_slice: Slice, axis: int | None, start: int, stop: int
) -> Tensor:
    """Return a range of a whole tensor, as a view of a tensor that contains only a slice of it.

    Args:
        tensor: The part `held_slice` of the whole tensor. It must contain the range.
        spec: The whole tensor.
        held_slice: The position of `tensor` in the whole tensor.
        axis: Dimension of the range; None means the whole tensor.
        start: First index of the range, counted in the whole tensor.
        stop: End of the range, counted in the whole tensor.

    Raises:
        AlignerError: If `tensor` does not have the shape of `held_slice`.
    """
    if tuple(tensor.shape) != slice_shape(spec, held_slice):
        raise AlignerError(
            f"{spec.name}: got shape {tuple(tensor.shape)}, expected"
            f" {slice_shape(spec, held_slice)}"
        )
    return (
        tensor
        if axis is None
        else tensor.narrow(axis, start - extent(spec, held_slice, axis)[0], stop - start)
    )


def source_view(plan: TransferPlan, transfer: Transfer, read: TensorReader) -> Tensor:
    """Return the part of the sender's tensor that a transfer sends."""
    return _narrow_to_transfer(
        plan, transfer, plan.source[transfer.source][transfer.name], read(transfer.name)
    )


def target_view(plan: TransferPlan, transfer: Transfer, views: Mapping[str, Tensor]) -> Tensor:
    """Return the part of the receiver's tensor that a transfer writes."""
    return _narrow_to_transfer(
        plan, transfer, plan.target[transfer.target][transfer.name], views[transfer.name]
    )


def source_rows(plan: TransferPlan, piece: Piece, read: TensorReader) -> Tensor:
    """Return the rows of the sender's tensor that a piece sends."""
    return source_view(plan, piece.transfer, read)[piece.start : piece.stop]


def _narrow_to_transfer(
    plan: TransferPlan, transfer: Transfer, held_slice: Slice, tensor: Tensor
) -> Tensor:
    return narrow_slice(
        tensor, plan.specs[transfer.name], held_slice, transfer.axis, transfer.start, transfer.stop
    )


def split_into_messages(
    transfers: Sequence[Transfer],
    specs: Mapping[str, TensorSpec],
    limit: int,
    max_shared_numel: int,
) -> list[Message]:
    """Cut transfers into row ranges, and return messages of these row ranges.

    A large row range is one message. Small row ranges share messages, which are at the end of the
    list.

    Args:
        transfers: The transfers between two ranks.
        specs: The tensors by name.
        limit: Maximum number of elements of a message, unless a single row has more.
        max_shared_numel: Row ranges of at most this number of elements share messages.
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
            if piece.numel > max_shared_numel:
                large.append((piece,))
                continue
            if piece.numel > free:
                packed.append([])
                free = limit
            packed[-1].append(piece)
            free -= piece.numel
    return [*large, *map(tuple, packed)]


def group_into_batches(messages: Sequence[Message], limit: int) -> list[Batch]:
    """Group consecutive messages into batches of at most `limit` elements."""
    batches: list[list[Message]] = []
    free = 0
    for message in messages:
        if (numel := message_numel(message)) > free:
            batches.append([])
            free = limit
        batches[-1].append(message)
        free -= numel
    return [tuple(batch) for batch in batches]


def message_numel(message: Message) -> int:
    """Return the number of elements of a message."""
    return sum(piece.numel for piece in message)


def plan_steps(plan: TransferPlan, rank: int, bucket_bytes: int) -> list[ExchangeStep]:
    """Return a rank's steps, in an order that cannot deadlock.

    A batch is at most a quarter of the staging memory. There is one round for each distance between
    ranks: a rank sends to rank + distance and receives from rank - distance (modulo the number of
    ranks). Sender and receiver have a batch at the same step of the same round. Therefore the ranks
    that are at the earliest unfinished round and step wait only for each other.

    Args:
        plan: The transfer plan.
        rank: The rank whose steps are planned.
        bucket_bytes: Maximum size of the staging memory in bytes (`engine.bucket_mib`).

    Raises:
        AlignerError: If a quarter of the staging memory is too small for one row of any tensor.
    """
    limit = bucket_bytes // _BATCHES_PER_BUCKET // plan.itemsize
    widest, name = max((spec.numel // spec.shape[0], spec.name) for spec in plan.table)
    if limit < widest:
        needed = _BATCHES_PER_BUCKET * widest * plan.itemsize
        raise AlignerError(
            f"a bucket of {bucket_bytes} bytes is too small: one row of {name} needs a bucket of"
            f" {needed} bytes; raise engine.bucket_mib"
        )
    max_shared_numel = min(limit, _SMALL_BYTES // plan.itemsize)

    def batches_between(source: int, target: int) -> list[Batch]:
        return group_into_batches(
            split_into_messages(
                plan.transfers_between(source, target), plan.specs, limit, max_shared_numel
            ),
            limit,
        )

    world = len(plan.labels)
    steps: list[ExchangeStep] = []
    for distance in range(1, world):
        to_rank = (rank + distance) % world
        from_rank = (rank - distance) % world
        batch_pairs = zip_longest(
            batches_between(rank, to_rank), batches_between(from_rank, rank), fillvalue=()
        )
        steps += [
            ExchangeStep(to_rank, outgoing, from_rank, incoming)
            for outgoing, incoming in batch_pairs
        ]
    return steps


def copy_local(
    plan: TransferPlan, rank: int, read: TensorReader, views: Mapping[str, Tensor]
) -> None:
    """Execute the transfers from this rank to itself; skip tensors that are the same memory in
    source and target.

    Args:
        plan: The transfer plan.
        rank: This rank.
        read: Reader of this rank's source slices.
        views: The engine's tensors on this rank by name.
    """
    for transfer in plan.transfers_between(rank, rank):
        source = source_view(plan, transfer, read)
        view = target_view(plan, transfer, views)
        memory_locations = {
            (tensor.data_ptr(), tensor.stride(), tensor.dtype, tensor.device)
            for tensor in (source, view)
        }
        if len(memory_locations) > 1:
            view.copy_(source)
        # `source` may be a copy: free it before the next tensor is read.
        del source, view


class CachedReader:
    """Reader that keeps its last tensor, so that a tensor is read once, not once per message."""

    def __init__(self, read: TensorReader) -> None:
        self._read = read
        self._last: tuple[str, Tensor] | None = None

    def __call__(self, name: str) -> Tensor:
        """Return the tensor of this name."""
        if self._last is None or self._last[0] != name:
            self._last = None  # free the old tensor before the new one is created
            self._last = name, self._read(name)
        return self._last[1]


@dataclass(frozen=True)
class _MessageBuffer:
    """A message and the memory that it is sent from or received into."""

    message: Message
    tensor: Tensor
    is_staged: bool
    """Whether `tensor` is staging memory, uint8, instead of the rows of the piece itself."""

    def split(self, encoding: Encoding) -> Iterator[tuple[Piece, Tensor]]:
        """Yield each piece of a staged message and its encoded bytes."""
        offset = 0
        for piece in self.message:
            size = encoding.nbytes(piece)
            yield piece, self.tensor[offset : offset + size]
            offset += size


class Exchange:
    """Sender and receiver of one rank's transfers with other ranks.

    Two batches are in flight in each direction. A message that consists of one contiguous piece in
    the transfer's dtype, without encoding, is sent directly from the source tensor, or received
    directly into the engine's tensor. All other messages need staging memory.

    For the tensors in `copied_names`, `read` returns copies. A message that is the whole copy is
    sent directly from the copy. A part of a copy is staged instead, because it would keep the whole
    copy alive.
    """

    def __init__(
        self,
        plan: TransferPlan,
        link: Link,
        dtype: torch.dtype,
        read: TensorReader,
        views: Mapping[str, Tensor],
        copied_names: Container[str] = (),
        encoding: Encoding | None = None,
    ) -> None:
        """Create the exchange.

        Args:
            plan: The transfer plan.
            link: The connection of the plan's ranks.
            dtype: Data type of the elements during the transfer.
            read: Reader of this rank's source slices.
            views: The engine's tensors on this rank by name.
            copied_names: Names of the tensors of which `read` returns a copy.
            encoding: Encoding of the pieces; None sends all elements.
        """
        self._plan = plan
        self._link = link
        self._dtype = dtype
        self._read = read
        self._views = views
        self._copied_names = copied_names
        self._encoding = encoding or Encoding(dtype)
        self.sent_bytes = 0
        """Bytes that this rank has sent to other ranks."""
        self._staging: dict[tuple[str, int], Tensor] = {}
        self._posted: deque[tuple[list[_MessageBuffer], list[_MessageBuffer]]] = deque()
        self._peak_copy_bytes = 0

    def run(self, steps: Sequence[ExchangeStep]) -> int:
        """Execute the steps.

        Returns:
            Bytes of the staging memory, plus the peak bytes of the copies that were sent directly.
        """
        for number, step in enumerate(steps):
            self._post(step, number % _IN_FLIGHT)
            if len(self._posted) == _IN_FLIGHT:
                self._complete()
        while self._posted:
            self._complete()
        return self._peak_copy_bytes + sum(buffer.nbytes for buffer in self._staging.values())

    def _post(self, step: ExchangeStep, slot: int) -> None:
        """Pack the outgoing batch of a step, and start its transfers."""
        outgoing = self._allocate_buffers(step.outgoing, self._direct_source_rows, ("out", slot))
        incoming = self._allocate_buffers(step.incoming, self._target_rows, ("in", slot))
        for buffer in outgoing:
            if buffer.is_staged:
                for piece, packed in buffer.split(self._encoding):
                    self._encoding.pack(piece, self._source_rows(piece), packed)
        self.sent_bytes += sum(buffer.tensor.nbytes for buffer in outgoing)

        # A delta without changed elements has no bytes, and both ends skip its message.
        self._link.post(
            [(buffer.tensor, step.to_rank) for buffer in outgoing if buffer.tensor.numel()],
            [(buffer.tensor, step.from_rank) for buffer in incoming if buffer.tensor.numel()],
        )
        self._posted.append((outgoing, incoming))  # keeps the tensors alive during the transfer
        self._peak_copy_bytes = max(
            self._peak_copy_bytes, sum(self._copy_bytes(outgoing) for outgoing, _ in self._posted)
        )

    def _complete(self) -> None:
        """Wait for the oldest step, and unpack its staged messages into the engine's tensors."""
        self._link.complete()
        _, incoming = self._posted.popleft()
        for buffer in incoming:
            if buffer.is_staged:
                for piece, packed in buffer.split(self._encoding):
                    self._encoding.unpack(piece, packed, self._target_rows(piece))

    def _direct_source_rows(self, piece: Piece) -> Tensor | None:
        """Return the source rows of a piece; None if they are a part of a copy."""
        transfer = piece.transfer
        held_shape = slice_shape(
            self._plan.specs[transfer.name], self._plan.source[transfer.source][transfer.name]
        )
        is_part = piece.numel < math.prod(held_shape)
        return None if is_part and transfer.name in self._copied_names else self._source_rows(piece)

    def _copy_bytes(self, outgoing: list[_MessageBuffer]) -> int:
        """Return the bytes of the copies that are sent directly, without staging."""
        direct = (buffer for buffer in outgoing if not buffer.is_staged)
        return sum(
            buffer.tensor.nbytes
            for buffer in direct
            if buffer.message[0].transfer.name in self._copied_names
        )

    def _source_rows(self, piece: Piece) -> Tensor:
        return source_rows(self._plan, piece, self._read)

    def _target_rows(self, piece: Piece) -> Tensor:
        return target_view(self._plan, piece.transfer, self._views)[piece.start : piece.stop]

    def _allocate_buffers(
        self, batch: Batch, locate: Callable[[Piece], Tensor | None], slot: tuple[str, int]
    ) -> list[_MessageBuffer]:
        """Return the memory of each message: the rows that `locate` returns, or staging memory.

        Args:
            batch: The messages of one batch.
            locate: Function that returns the rows of a piece; None if the piece must be staged.
            slot: Direction and number of the staging memory. The batch that used this slot before
                is complete, because only `_IN_FLIGHT` batches are in flight.
        """
        encoding = self._encoding
        direct_tensors = [
            (
                self._usable_directly(locate(message[0]))
                if len(message) == 1 and encoding.is_plain(message[0])
                else None
            )
            for message in batch
        ]
        sizes = [
            0 if tensor is not None else sum(map(encoding.nbytes, message))
            for message, tensor in zip(batch, direct_tensors, strict=True)
        ]
        staging = self._staging_buffer(slot, sum(sizes)).split(sizes)
        return [
            _MessageBuffer(message, staged if tensor is None else tensor, tensor is None)
            for message, tensor, staged in zip(batch, direct_tensors, staging, strict=True)
        ]

    def _usable_directly(self, tensor: Tensor | None) -> Tensor | None:
        """Return the tensor if it can be sent or received without staging, else None."""
        if tensor is None:
            return None
        is_usable = (
            tensor.is_contiguous()
            and tensor.dtype == self._dtype
            and tensor.device == self._link.device
        )
        return tensor if is_usable else None

    def _staging_buffer(self, slot: tuple[str, int], size: int) -> Tensor:
        """Return the staging memory of a slot, uint8 [size]; it grows if it is too small."""
        if slot not in self._staging or self._staging[slot].numel() < size:
            self._staging.pop(slot, None)  # free the old buffer before the new one is allocated
            self._staging[slot] = torch.empty(size, dtype=torch.uint8, device=self._link.device)
        return self._staging[slot][:size]


_INDEX_DTYPE = torch.int32
# Integer dtype by element size in bytes, for bitwise comparisons.
_BITS_DTYPES = {2: torch.int16, 4: torch.int32}


class DeltaEncoding(Encoding):
    """Encoding that sends the index and value of each element that differs from the previous
    publish, or the whole piece if that takes fewer bytes.

    Elements are compared bit by bit, so the engine gets exactly the source's bits, including the
    sign of a zero. The engine's tensors must still hold the elements of the previous publish.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        counts: Mapping[Piece, int],
        read_previous_rows: Callable[[Piece], Tensor],
    ) -> None:
        """Create the encoding.

        Args:
            dtype: Data type of the elements.
            counts: Number of changed elements of each piece that this rank sends or receives.
            read_previous_rows: Function that returns the rows of a piece at the previous publish.
        """
        super().__init__(dtype)
        self._counts = counts
        self._read_previous_rows = read_previous_rows

    @classmethod
    def from_comparison(
        cls,
        steps: Sequence[ExchangeStep],
        link: Link,
        dtype: torch.dtype,
        read_rows: Callable[[Piece], Tensor],
        read_previous_rows: Callable[[Piece], Tensor],
    ) -> "DeltaEncoding":
        """Count the changed elements of the pieces that this rank sends, and exchange the counts
        with the other ranks. Collective.

        Args:
            steps: The steps of this rank.
            link: The connection of the ranks.
            dtype: Data type of the elements.
            read_rows: Function that returns the rows of a piece.
            read_previous_rows: Function that returns the rows of a piece at the previous publish.
        """
        counts: dict[Piece, int] = {}
        outgoing: dict[int, list[Piece]] = {}
        incoming: dict[int, list[Piece]] = {}
        for step in steps:
            outgoing.setdefault(step.to_rank, []).extend(
                piece for message in step.outgoing for piece in message
            )
            incoming.setdefault(step.from_rank, []).extend(
                piece for message in step.incoming for piece in message
            )

        sends, receives = [], []
        for to_rank, pieces in outgoing.items():
            counts |= {
                piece: int(
                    _differs_bitwise(read_rows(piece).to(dtype), read_previous_rows(piece)).sum()
                )
                for piece in pieces
            }
            if pieces:
                sends.append(
                    (torch.tensor([counts[piece] for piece in pieces], device=link.device), to_rank)
                )
        for from_rank, pieces in incoming.items():
            if pieces:
                receives.append(
                    (torch.empty(len(pieces), dtype=torch.int64, device=link.device), from_rank)
                )
        link.post(sends, receives)
        link.complete()

        # Sum before the received counts are added: each rank reports only the elements that it
        # sends.
        changed_elements = sum(counts.values())
        for received_counts, from_rank in receives:
            counts |= dict(zip(incoming[from_rank], received_counts.tolist(), strict=True))
        encoding = cls(dtype, counts, read_previous_rows)
        encoding.changed_elements = changed_elements
        return encoding

    def nbytes(self, piece: Piece) -> int:
        """Return the size of an encoded piece in bytes: of its changed elements, or of all elements
        if that is smaller."""
        return min(
            super().nbytes(piece),
            self._counts[piece] * (_INDEX_DTYPE.itemsize + self._dtype.itemsize),
        )

    def is_plain(self, piece: Piece) -> bool:
        """Return whether all elements are sent, because that takes no more bytes than the
        changes."""
        return self.nbytes(piece) == super().nbytes(piece)

    def pack(self, piece: Piece, rows: Tensor, packed: Tensor) -> None:
        """Write the indices of the changed elements, then their values, into `packed`."""
        if self.is_plain(piece):
            super().pack(piece, rows, packed)
            return
        rows = rows.to(self._dtype)
        index = (
            _differs_bitwise(rows, self._read_previous_rows(piece)).flatten().nonzero().flatten()
        )
        # Copy bytes: after 2-byte values, the next piece's indices may start at an address that is
        # not a multiple of 4, which int32 views do not allow.
        split = len(index) * _INDEX_DTYPE.itemsize
        packed[:split].copy_(index.to(_INDEX_DTYPE).view(torch.uint8))
        packed[split:].copy_(rows.flatten()[index].view(torch.uint8))

    def unpack(self, piece: Piece, packed: Tensor, target: Tensor) -> None:
        """Write the changed elements of `packed` into `target`."""
        if self.is_plain(piece):
            super().unpack(piece, packed, target)
            return
        split = self._counts[piece] * _INDEX_DTYPE.itemsize
        # The clones are aligned; see `pack`.
        index = packed[:split].clone().view(_INDEX_DTYPE).long().to(target.device)
        values = packed[split:].clone().view(self._dtype).to(target.device)
        target[torch.unravel_index(index, target.shape)] = values


def _differs_bitwise(rows: Tensor, previous_rows: Tensor) -> Tensor:
    """Return which elements differ in their bits: bool, in the shape of `rows`."""
    bits_dtype = _BITS_DTYPES[rows.dtype.itemsize]
    return rows.view(bits_dtype) != previous_rows.view(bits_dtype)
