"""The policy's weights into the engine after every update."""

import atexit
import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from aligner.errors import AlignerError, UnansweredError
from aligner.models.shape import ModelShape
from aligner.resharding.transfer_plan import TransferPlan, plan_to_engine
from aligner.resharding.transport import (
    Changes,
    Encoding,
    Exchange,
    Link,
    Read,
    ReadOnce,
    Step,
    copy_local,
    rows_of,
    slice_shape,
    steps,
)
from aligner.resharding.verify import open_store, verify
from aligner.resharding.weight_update import PublishStats, WeightFormat, WeightUpdate
from aligner.schema import EngineConfig, ParallelConfig


class Publisher:
    """Takes the trainer's weights into the engine, on all ranks or on none.

    Every rank of the link calls `publish`. Pieces are written beside or over the engine's weights,
    as its update has it; only when all ranks have theirs does the engine's version change.
    """

    def __init__(
        self,
        plan: TransferPlan,
        link: Link,
        *,
        read: Read | None,
        begin_update: Callable[[int], WeightUpdate] | None,
        dtype: torch.dtype = torch.float32,
        bucket_bytes: int,
        verify_every: int,
        group_bytes: int | None = None,
        copied: Container[str] = (),
        travels: str = "whole",
        before: Read | None = None,
    ) -> None:
        """`read` gives this rank's source slices and is None on a rank that has none;
        `begin_update(version)` opens the update of this rank's engine and is None on a rank without
        one.

        Pieces travel as `dtype`, which the engine's views have too. `group_bytes`, the same on
        every rank: most bytes of tensors that the engine takes at a time; None where all its views
        exist at once. `copied` names the tensors of which `read` gives a copy, not the trainer's
        own memory: they are staged, and one such copy lives at a time.

        `travels` is `engine.publish`. With "changes" `before` gives what `read` gave at the publish
        before, in the travelling dtype, and the engine's views hold what that wrote. Raises
        AlignerError when these do not fit the plan or the link.
        """
        rank, problems = link.rank, []
        if plan.source.get(rank) and read is None:
            problems.append(
                "the transfer plan requires this rank to send weights, but it has no weights"
            )
        if plan.target.get(rank) and begin_update is None:
            problems.append(
                "the transfer plan requires this rank to receive weights, but it has no engine"
            )
        if len(plan.labels) != link.size:
            problems.append(
                f"the transfer plan has {len(plan.labels)} ranks, but the link has"
                f" {link.size} ranks"
            )
        if dtype.itemsize != plan.itemsize:
            problems.append(
                f"{dtype} has {dtype.itemsize} bytes per element, but the transfer plan requires"
                f" {plan.itemsize} bytes"
            )
        if problems:
            raise AlignerError(f"{link.labels[rank]}: " + "; ".join(problems))
        self._travels, self._before = travels, before or _no_source
        self.stats: PublishStats | None = None
        """Of the last publish."""
        self._plan, self._link, self._dtype = plan, link, dtype
        self._read = read or _no_source
        self._copied, self._begin_update = copied, begin_update
        self._group_bytes, self._verify_every = group_bytes, verify_every
        self._groups = [
            (group, steps(group, rank, bucket_bytes)) for group in plan.groups(group_bytes)
        ]
        self._count = 0

    @classmethod
    def to_engine(
        cls,
        plan: TransferPlan,
        link: Link,
        settings: EngineConfig,
        to: WeightFormat,
        *,
        read: Read | None = None,
        begin_update: Callable[[int], WeightUpdate] | None = None,
        copied: Container[str] = (),
        before: Read | None = None,
    ) -> "Publisher":
        """To an engine of these settings, in the format that it takes."""
        return cls(
            plan,
            link,
            read=read,
            begin_update=begin_update,
            dtype=to.dtype,
            bucket_bytes=settings.bucket_mib << 20,
            verify_every=settings.verify_every,
            group_bytes=to.group_bytes,
            copied=copied,
            travels=settings.publish,
            before=before,
        )

    @torch.no_grad()
    def publish(self, version: int) -> PublishStats:
        """Publish the weights as `version`; verified at the first call and at every
        `verify_every`-th after it.

        Raises AlignerError on every rank, naming the ranks where something failed and what it was,
        and those that did not answer; the link is broken then. Unless the failure was in the last
        step, an engine's taking what it had received, every engine has aborted its update; in that
        step only those have that failed in it.
        """
        begin = time.perf_counter()
        verifies = self._count == 0 or (
            self._verify_every > 0 and self._count % self._verify_every == 0
        )
        self._count += 1
        failure = (
            f"weight version {version} was not synced to the engine; the engine aborts its update"
        )
        update: WeightUpdate | None = None
        staging, verify_seconds, read = 0, 0.0, ReadOnce(self._read)
        compares = self._travels == "changes" and self.stats is not None
        moved = changed = 0
        with ExitStack() as undo:
            for group, order in self._groups:
                names = list(group.target.get(self._link.rank, ()))
                with self._link.agreement(failure):
                    if update is None and self._begin_update is not None:
                        update = self._begin_update(version)
                        undo.callback(update.abort)
                    views = {} if update is None else update.views(names)
                    self._check(group, views)
                with self._link.agreement(failure):
                    encoding = self._encoding(group, order, read, compares=compares)
                    copy_local(group, self._link.rank, read, views)
                    exchange = Exchange(
                        group, self._link, self._dtype, read, views, self._copied, encoding
                    )
                    staging = max(staging, exchange.run(order))
                    moved, changed = moved + exchange.sent_bytes, changed + (encoding.changed or 0)
                    if verifies:
                        start = time.perf_counter()
                        verify(group, self._link, self._dtype, read, views)
                        verify_seconds += time.perf_counter() - start
                    if self._group_bytes is None and update is not None:
                        update.load(names)
                if self._group_bytes is not None:
                    # ranks of an engine may load together: all of them have to come
                    with self._link.agreement(failure):
                        if update is not None:
                            update.load(names)
            with self._link.agreement(
                f"weight version {version} may be loaded on only some of the engine ranks"
            ):
                of_all = torch.tensor([moved, changed], device=self._link.device)
                self._link.all_reduce(of_all)
                if update is not None:
                    update.commit()
                undo.pop_all()
        whole = sum(
            transfer.numel
            for transfer in self._plan.transfers
            if transfer.source != transfer.target
        )
        moved, changed = of_all.tolist()
        self.stats = PublishStats(
            staging_bytes=staging,
            seconds=time.perf_counter() - begin,
            verify_seconds=verify_seconds if verifies else None,
            moved_bytes=moved,
            whole_bytes=whole * self._dtype.itemsize,
            changed=changed / whole if compares and whole else None,
        )
        return self.stats

    def give_up(self, store: Store) -> None:
        """Have the publish under way fail on every rank, as `Link.give_up` has it."""
        self._link.give_up(store)

    def _encoding(
        self, plan: TransferPlan, order: Sequence[Step], read: Read, *, compares: bool
    ) -> Encoding:
        """Return the encoding of this publish's pieces. Collective.

        Args:
            compares: Whether the engines still hold the weights that `before` gives.
        """
        if compares:
            before = ReadOnce(self._before)
            return Changes.agreed(
                order,
                self._link,
                self._dtype,
                lambda piece: rows_of(plan, piece, read),
                lambda piece: rows_of(plan, piece, before),
            )
        return Encoding(self._dtype)

    def _check(self, plan: TransferPlan, views: Mapping[str, Tensor]) -> None:
        """Raise an error that names every tensor whose view is missing or is not as the plan
        says."""
        problems = []
        for name, wanted in plan.target.get(self._link.rank, {}).items():
            shape = slice_shape(plan.specs[name], wanted)
            if name not in views:
                problems.append(f"{name}: the engine has no such tensor")
            elif tuple(views[name].shape) != shape or views[name].dtype != self._dtype:
                has = f"{tuple(views[name].shape)} of {views[name].dtype}"
                problems.append(
                    f"{name}: the engine's tensor is {has}, the transfer plan writes {shape} of"
                    f" {self._dtype}"
                )
        if problems:
            raise AlignerError(
                "the engine does not match the transfer plan:\n" + "\n".join(problems)
            )


def _no_source(name: str) -> Tensor:
    raise AlignerError(f"{name}: this rank has no weights to read")


_log = logging.getLogger(__name__)

_FOREVER = timedelta(days=1000)
"""Who follows waits for as long as the run goes: rank 0's end, or its own, ends it."""
_END_S = 2.0
"""How long the end of a rank waits for its thread, which may be in the middle of a move that has
failed elsewhere."""
_UNANSWERED = 3
"""Answers of one start of the generator that may be lost before a weight sync fails."""


def plan_between_worlds(
    shape: ModelShape, trainer: ParallelConfig, to: WeightFormat
) -> TransferPlan:
    """The plan from the trainer's ranks to the generator's, which are counted behind them."""
    return plan_to_engine(shape, trainer, to, first_engine_rank=trainer.ranks)


@dataclass(frozen=True)
class GeneratorCalls:
    """What the trainer's rank 0 asks of the generator's server; each raises AlignerError where it
    does not answer."""

    instance: Callable[[], str]
    """The name of its start that answers."""
    is_another: Callable[[str], bool]
    """Whether it has been started again since that start; waits where it is gone."""
    connect: Callable[[str, int, int], Future[Any]]
    """Have its ranks join a link over the store at a host and port, by the link's generation."""
    receive: Callable[[int], Future[Any]]
    """Have its ranks take the weights that are published meanwhile as a version."""


class Snapshots:
    """Copies of source slices in host memory, by version; one thread takes them, another reads
    them.

    The memory of what is forgotten is used again, so that there are never more copies than versions
    that are wanted at once.
    """

    def __init__(
        self, source: Read, names: Iterable[str], dtype: torch.dtype, device: torch.device
    ) -> None:
        """`source` gives this rank's slices of `names` as they are now; copies are kept as `dtype`
        and read on `device`."""
        self._source, self._names, self._dtype, self._device = source, tuple(names), dtype, device
        self._on_gpu = device.type == "cuda"
        self._selected: dict[str, Tensor] = {}
        self._served: dict[str, Tensor] = {}
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._free: list[dict[str, Tensor]] = []
        self._changed = threading.Condition()

    @torch.no_grad()
    def take(self, version: int) -> None:
        """Copy the weights; they may change once this returns."""
        with self._changed:
            copies = self._free.pop() if self._free else {}
        for name in self._names:
            tensor = self._source(name)
            if name not in copies:
                copies[name] = torch.empty(tensor.shape, dtype=self._dtype, pin_memory=self._on_gpu)
            copies[name].copy_(tensor, non_blocking=self._on_gpu)
        if self._on_gpu:
            torch.cuda.current_stream(self._device).synchronize()
        with self._changed:
            self._kept[version] = copies
            self._changed.notify_all()

    def select(self, version: int, timeout_s: float) -> None:
        """Have `read` give a version, once it is taken. Raises AlignerError when it is not in
        time."""
        with self._changed:
            if not self._changed.wait_for(lambda: version in self._kept, timeout_s):
                raise AlignerError(
                    f"no snapshot of weight version {version} was taken within {timeout_s:g} s"
                )
            self._selected = self._kept[version]

    def read(self, name: str) -> Tensor:
        """The slice of the version that was selected."""
        return self._selected[name].to(self._device, non_blocking=True)

    def read_served(self, name: str) -> Tensor:
        """The slice of the version that was the last to serve."""
        return self._served[name].to(self._device, non_blocking=True)

    def forget_below(self, version: int) -> None:
        """This version, which is selected, serves; older ones are not read any more."""
        with self._changed:
            self._served = self._selected
            for old in [kept for kept in self._kept if kept < version]:
                self._free.append(self._kept.pop(old))


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Have this thread's work on a GPU done in a stream, all of it at the end; None: where it is
    done anyway."""
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


class RemotePublisher:
    """To the generator role, shard to shard, from copies that each rank of the trainer keeps:
    training goes on meanwhile.

    Rank 0 decides what moves when, from whichever thread wants a version to serve, and announces it
    in a store that it hosts; a thread of each other rank follows. A copy is kept until a newer
    version serves, so that a generator that was lost and started again gets the version that it
    should have.
    """

    def __init__(
        self,
        plan: TransferPlan,
        rank: int,
        device: torch.device,
        weight_format: WeightFormat,
        settings: EngineConfig,
        *,
        host: str,
        read: Read,
        together: Callable[[Callable[[], Any]], Any],
        calls: GeneratorCalls | None,
        listener: Callable[[str, float, float], None] | None = None,
    ) -> None:
        """Collective. `rank` is the trainer's, on `device`; `read` gives its source slices. `calls`
        are rank 0's alone.

        `host` is where rank 0 hosts the store. `together` runs a function on every rank and gives
        each rank 0's JSON result, or its error. `listener` is told of every move, from when to when
        in seconds of `time.perf_counter`.
        """
        self._plan, self._rank, self._device, self._format = plan, rank, device, weight_format
        self._settings, self._calls, self._together, self._listener = (
            settings,
            calls,
            together,
            listener,
        )
        self._timeout = timedelta(seconds=settings.update_timeout_s)
        self._snapshots = Snapshots(read, plan.source.get(rank, {}), weight_format.dtype, device)
        store = None if calls is None else open_store(host, self._timeout)
        self._address: tuple[str, int] = (
            host,
            together(lambda: None if store is None else store.port),
        )
        self._store = store or TCPStore(*self._address, is_master=False, timeout=self._timeout)
        self._publisher: Publisher | None = None
        """Of the link to the generator's ranks; None where it is not there, or broken."""
        self.stats: PublishStats | None = None
        """Of the newest publish."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._moves = self._links = 0
        self._serving, self._wanted, self._instance = -1, -1, ""
        self._lock = threading.RLock()
        self._follower: threading.Thread | None = None
        if calls is None:
            self._follower = threading.Thread(target=self._follow, name="weights", daemon=True)
            self._follower.start()
            # also where the run has failed: no thread may wait when the interpreter ends
            atexit.register(self.close)

    @property
    def served(self) -> int:
        """The version that serves, as far as rank 0 knows; -1 before the first. Waits while a
        generator is restored."""
        with self._lock:
            return self._serving

    def offer(self, version: int) -> None:
        """Keep a copy of the weights as they are now, as `version`. Every rank of the trainer calls
        it."""
        self._snapshots.take(version)

    def publish(self, version: int) -> None:
        """As `WeightPublisher`."""
        self.offer(version)
        self._together(lambda: None if self._calls is None else self.serve(version))

    def serve(self, version: int) -> None:
        """Return once the engine serves `version` or newer weights. Rank 0's, from any thread.

        An engine that was lost is awaited and gets its weights again. Raises AlignerError where
        that fails.
        """
        with self._lock:
            self._wanted = max(self._wanted, version)
            self._bring_up_to_date()

    def restore(self) -> int:
        """As `serve` for the version that serves, of an engine that has said that it does not;
        returns the version."""
        with self._lock:
            self._serving = -1
            self._bring_up_to_date()
            return self._serving

    def close(self) -> None:
        """Hang up."""
        deadline = time.monotonic() + _END_S
        while (
            self._follower is not None and self._follower.is_alive() and time.monotonic() < deadline
        ):
            with contextlib.suppress(dist.DistError):  # rank 0 has ended, and with it the thread
                self._another_client().set(self._key(self._rank), json.dumps({}))
            self._follower.join(0.2)

    def _bring_up_to_date(self) -> None:
        calls = self._calls
        assert calls is not None, "rank 0 decides what moves"
        unanswered = 0
        while self._serving < self._wanted:
            known = self._instance
            try:
                self._move_to(calls, self._wanted)
            except AlignerError as error:
                self._publisher = None
                unanswered += _was_unanswered(error)
                is_another = calls.is_another(known or self._instance)
                # Not another start of it: its Triton may have been restarted, and the answer lost.
                is_worth_repeating = _was_unanswered(error) and unanswered <= _UNANSWERED
                if not (is_another or is_worth_repeating):
                    raise
                _log.warning(
                    "the generator was lost during a weight sync; syncing again: %s", error
                )

    def _move_to(self, calls: GeneratorCalls, version: int) -> None:
        """Have the generator take a version, over a new link where the one there was is of another
        start of it."""
        instance = calls.instance()
        if self._publisher is None or instance != self._instance:
            self._publisher, self._instance = None, instance
            self._links += 1
            self._announce(link=self._links)
            joined = calls.connect(*self._address, self._links)
            _both(joined, lambda: self._act(link=self._links))
        start = time.perf_counter()
        self._announce(version=version)
        received = calls.receive(version)
        received.add_done_callback(self._give_up)
        _both(received, lambda: self._act(version=version))
        self._serving = version
        if self._listener is not None:
            self._listener("publish", start, time.perf_counter())

    def _give_up(self, received: Future[Any]) -> None:
        """No rank of the trainer waits for a generator that has refused, or is gone."""
        publisher = self._publisher
        if received.exception() is not None and publisher is not None:
            with contextlib.suppress(dist.DistError):
                publisher.give_up(self._another_client())

    def _another_client(self) -> TCPStore:
        """Of the store: one that waits for a key does nothing else."""
        return TCPStore(*self._address, is_master=False, timeout=self._timeout)

    def _key(self, rank: int) -> str:
        """Of the next move, for a rank that follows."""
        return f"move/{rank}/{self._moves}"

    def _announce(self, **move: int) -> None:
        for rank in range(1, len(self._plan.source)):
            self._store.set(self._key(rank), json.dumps(move))
        self._moves += 1

    def _follow(self) -> None:
        while True:
            key = self._key(self._rank)
            try:
                self._store.wait([key], _FOREVER)
                move = json.loads(self._store.get(key))
            except dist.DistError:  # rank 0 has ended, and with it the run
                return
            if not move:
                return
            self._moves += 1
            try:
                self._act(**move)
            except AlignerError as error:  # rank 0 knows: the link has told it
                self._publisher = None
                _log.warning("weight sync failed on trainer rank %d: %s", self._rank, error)

    def _act(self, link: int | None = None, version: int | None = None) -> None:
        """This rank's part of what was announced. Collective, with the generator's ranks."""
        if link is not None:
            self._publisher = self._join(link)
        elif version is not None:
            if self._publisher is None:
                raise AlignerError("the trainer is not connected to the generator")
            self._snapshots.select(version, self._timeout.total_seconds())
            with on_stream(self._stream):
                self.stats = self._publisher.publish(version)
            self._snapshots.forget_below(version)

    def _join(self, generation: int) -> Publisher:
        link = Link(
            self._store,
            self._rank,
            self._plan.labels,
            timeout=self._timeout,
            device=self._device,
            generation=generation,
            store_host=self._plan.labels[0],
        )
        copied = () if self._device.type == "cpu" else self._plan.specs
        copies = self._snapshots
        return Publisher.to_engine(
            self._plan,
            link,
            self._settings,
            self._format,
            read=copies.read,
            before=copies.read_served,
            copied=copied,
        )


def _both(asked: Future[Any], act: Callable[[], None]) -> None:
    """Act while a server does what it was asked; raises what went wrong at either end."""
    errors: list[AlignerError] = []
    for part in (act, asked.result):
        try:
            part()
        except AlignerError as error:
            errors.insert(0, error)
    if errors:
        kind = UnansweredError if any(map(_was_unanswered, errors)) else AlignerError
        raise kind("\n".join(map(str, errors))) from errors[0]


def _was_unanswered(error: AlignerError) -> bool:
    """Whether a request to the generator got no answer, rather than a refusal."""
    return isinstance(error, UnansweredError)


class WeightReceiver:
    """One rank of the generator: its end of the way."""

    def __init__(
        self,
        plan: TransferPlan,
        rank: int,
        device: torch.device,
        weight_format: WeightFormat,
        settings: EngineConfig,
        begin_update: Callable[[int], WeightUpdate],
    ) -> None:
        """`rank` is the plan's, behind those of the trainer; `begin_update(version)` opens an
        update of its engine."""
        self._plan, self._rank, self._device, self._format = plan, rank, device, weight_format
        self._settings, self._begin_update = settings, begin_update
        self._publisher: Publisher | None = None

    def connect(self, host: str, port: int, generation: int) -> None:
        """Join the trainer's ranks in a link, over the store that they host. Collective.

        Raises AlignerError where the store or a rank does not answer within
        `engine.update_timeout_s`.
        """
        timeout = timedelta(seconds=self._settings.update_timeout_s)
        try:
            store = TCPStore(host, port, is_master=False, timeout=timeout)
        except RuntimeError as error:
            raise AlignerError(
                f"cannot connect to the trainer's weight-sync store at {host}:{port}"
                f" (engine.update_timeout_s={self._settings.update_timeout_s:g}): {error}; check"
                " that the trainer is running and that the generator's node can reach this port"
            ) from error
        link = Link(
            store,
            self._rank,
            self._plan.labels,
            timeout=timeout,
            device=self._device,
            generation=generation,
        )
        self._publisher = Publisher.to_engine(
            self._plan, link, self._settings, self._format, begin_update=self._begin_update
        )

    def receive(self, version: int) -> None:
        """Take the weights that the trainer publishes as `version`. Collective, with the trainer's
        ranks."""
        if self._publisher is None:
            raise AlignerError("the generator is not connected to the trainer; call connect first")
        self._publisher.publish(version)
