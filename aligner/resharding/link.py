"""The processes that a plan spans, joined: point-to-point transfers, sums, and decisions that all
of them share."""

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from aligner.errors import AlignerError, EngineGone

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
