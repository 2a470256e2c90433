"""The way of weights to a generator with ranks of its own: the trainer's end, beside training, and
the generator's."""

import atexit
import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from aligner.errors import AlignerError, UnansweredError
from aligner.models.shape import ModelShape
from aligner.resharding.link import Link
from aligner.resharding.publisher import Publisher
from aligner.resharding.rank_store import open_store
from aligner.resharding.transfer_plan import TransferPlan, plan_to_engine
from aligner.resharding.transport import Read
from aligner.resharding.weight_update import PublishStats, WeightFormat, WeightUpdate
from aligner.schema import EngineConfig, ParallelConfig

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
