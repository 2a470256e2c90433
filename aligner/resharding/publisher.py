"""Publishers, which send the policy's weights to the engine after every update.

- `Publisher` sends weights over a link, and switches the engine's version on all ranks or on none.
- `RemotePublisher` is the trainer's end of the weight sync to the generator role, which has its own
  ranks. It sends snapshots, so that training continues in the meantime.
- `WeightReceiver` is the generator's end.
"""

import atexit
import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from aligner.errors import AlignerError, UnansweredError
from aligner.models.shape import ModelShape
from aligner.resharding.float32_weights import view_bits
from aligner.resharding.transfer_plan import TransferPlan, plan_to_engine
from aligner.resharding.transport import (
    CachedReader,
    DeltaEncoding,
    Encoding,
    Exchange,
    ExchangeStep,
    Link,
    TensorReader,
    copy_local,
    plan_steps,
    slice_shape,
    source_rows,
)
from aligner.resharding.verify import (
    compute_expected,
    find_different,
    open_store,
    raise_if_different,
)
from aligner.resharding.weight_update import (
    ExpectedSlice,
    HeldWeights,
    PublishStats,
    WeightFormat,
    WeightProbe,
    WeightUpdate,
)
from aligner.schema import EngineConfig, ParallelConfig

_log = logging.getLogger(__name__)

# Ranks that follow rank 0 wait until the run ends: the end of rank 0 or of their own process ends
# the wait.
_FOREVER = timedelta(days=1000)
# Seconds that the end of a rank waits for its thread, which may be in a transfer that has already
# failed on another rank.
_END_S = 2.0
# Number of lost answers of one generator instance after which a weight sync fails.
_MAX_UNANSWERED = 3


class Publisher:
    """Sender of the trainer's weights to the engine, which switches on all ranks or on none.

    Every rank of the link calls `publish`. The engine's update determines whether the new weights
    are written next to the old weights or over them. The engine's version changes only after all
    ranks have received their weights.
    """

    def __init__(
        self,
        plan: TransferPlan,
        link: Link,
        *,
        read: TensorReader | None,
        begin_update: Callable[[int], WeightUpdate] | None,
        held_weights: HeldWeights | None,
        dtype: torch.dtype = torch.float32,
        bucket_bytes: int,
        verify: str,
        group_bytes: int | None = None,
        copied_names: Container[str] = (),
        publish_mode: str = "whole",
        read_previous: TensorReader | None = None,
        listener: Callable[[str, float, float], None] | None = None,
    ) -> None:
        """Create the publisher of one rank.

        Args:
            plan: The transfer plan.
            link: The connection of the plan's ranks.
            read: Reader of this rank's source slices; None on a rank without source slices.
            begin_update: Function that opens the update of this rank's engine to a version; None on
                a rank without an engine.
            held_weights: The weights that this rank's engine holds; None on a rank without an
                engine, and with `verify` "never".
            dtype: Data type of the elements during the transfer, and of the engine's views.
            bucket_bytes: Maximum staging memory in bytes.
            verify: Value of `engine.verify`.
            group_bytes: Maximum bytes of the tensors that the engine receives at a time, equal on
                all ranks; None if all views of the engine exist at the same time.
            copied_names: Names of the tensors of which `read` returns a copy instead of the
                trainer's own memory. Parts of them are staged, and only one such copy exists at a
                time.
            publish_mode: Value of `engine.publish`, "whole" or "changes".
            read_previous: Reader of this rank's source slices at the previous publish, in `dtype`.
                "changes" needs it, and needs views that hold the weights of the previous publish.
            listener: Function that is called after each part of the verification with `verify`, and
                its start and end in seconds of `time.perf_counter`.

        Raises:
            AlignerError: If the arguments do not match the plan or the link.
        """
        rank = link.rank
        problems = []
        if plan.source.get(rank) and read is None:
            problems.append(
                "the transfer plan requires this rank to send weights, but it has no weights"
            )
        if plan.target.get(rank) and begin_update is None:
            problems.append(
                "the transfer plan requires this rank to receive weights, but it has no engine"
            )
        elif plan.target.get(rank) and held_weights is None and verify != "never":
            problems.append(
                f"engine.verify={verify} requires the weights that the engine holds, but this rank"
                " has none"
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

        self._publish_mode = publish_mode
        self._read_previous = read_previous or _raise_no_weights
        self.stats: PublishStats | None = None
        """Statistics of the last publish."""
        self._plan = plan
        self._link = link
        self._dtype = dtype
        self._read = _read_bits(read or _raise_no_weights, plan, dtype)
        self._copied_names = copied_names
        self._begin_update = begin_update
        self._held_weights = held_weights
        self._group_bytes = group_bytes
        self._verify = verify
        self._listener = listener
        self._groups = [
            (group, plan_steps(group, rank, bucket_bytes))
            for group in plan.split_into_groups(group_bytes)
        ]
        self._publish_count = 0
        self._verify_seconds = 0.0

    @classmethod
    def for_engine(
        cls,
        plan: TransferPlan,
        link: Link,
        settings: EngineConfig,
        weight_format: WeightFormat,
        *,
        read: TensorReader | None = None,
        begin_update: Callable[[int], WeightUpdate] | None = None,
        held_weights: HeldWeights | None = None,
        copied_names: Container[str] = (),
        read_previous: TensorReader | None = None,
        listener: Callable[[str, float, float], None] | None = None,
    ) -> "Publisher":
        """Return a publisher to an engine with these settings and this weight format."""
        return cls(
            plan,
            link,
            read=read,
            begin_update=begin_update,
            held_weights=held_weights,
            dtype=weight_format.dtype,
            bucket_bytes=settings.bucket_mib << 20,
            verify=settings.verify,
            group_bytes=weight_format.group_bytes,
            copied_names=copied_names,
            publish_mode=settings.publish,
            read_previous=read_previous,
            listener=listener,
        )

    @torch.no_grad()
    def publish(self, version: int) -> PublishStats:
        """Publish the weights as `version`. Collective.

        If the publish is verified (`engine.verify`), checksums show

        - before the update, that the engine still holds the weights of the last verification;
        - after the update, that the engine holds the weights of the trainer.

        Raises:
            AlignerError: On every rank, if a rank failed or did not answer. The error names these
                ranks and the causes. The link is closed, and every engine has aborted its update.
                Exceptions: if the failure was in the step in which the engines switch to the new
                weights, only the engines that failed have aborted their update; and if the engine
                holds other weights than the trainer after this step, it refuses to generate with
                them.
        """
        begin = time.perf_counter()
        should_verify = self._verify == "sync" or (
            self._verify == "first" and self._publish_count == 0
        )
        self._publish_count += 1
        failure = (
            f"weight version {version} was not synced to the engine; the engine aborts its update"
        )
        update: WeightUpdate | None = None
        staging_bytes = 0
        self._verify_seconds = 0.0
        read = CachedReader(self._read)
        sends_delta = self._publish_mode == "changes" and self.stats is not None
        moved_bytes = changed_elements = 0
        expected: dict[str, ExpectedSlice] = {}

        if should_verify:
            with self._link.agreement(failure), self._timed_verification():
                self._check_unchanged()
        with ExitStack() as undo:
            for group, steps in self._groups:
                names = list(group.target.get(self._link.rank, ()))
                with self._link.agreement(failure):
                    if update is None and self._begin_update is not None:
                        update = self._begin_update(version)
                        undo.callback(update.abort)
                    views = {} if update is None else update.views(names)
                    float32_names = [name for name in views if not group.specs[name].is_trained]
                    if float32_names:
                        views = {**views} | {
                            name: view_bits(views[name], name, group.specs, self._dtype)
                            for name in float32_names
                        }
                    self._check_views(group, views)
                with self._link.agreement(failure):
                    encoding = self._build_encoding(group, steps, read, sends_delta=sends_delta)
                    copy_local(group, self._link.rank, read, views)
                    exchange = Exchange(
                        group, self._link, self._dtype, read, views, self._copied_names, encoding
                    )
                    staging_bytes = max(staging_bytes, exchange.run(steps))
                    moved_bytes = moved_bytes + exchange.sent_bytes
                    changed_elements = changed_elements + (encoding.changed_elements or 0)
                    if should_verify:
                        with self._timed_verification():
                            group_expected = compute_expected(group, self._link, self._dtype, read)
                            # The views of a group exist only until `load`.
                            if self._group_bytes is not None:
                                raise_if_different(
                                    find_different(views, group_expected, self._dtype)
                                )
                            else:
                                expected |= group_expected
                    if self._group_bytes is None and update is not None:
                        update.load(names)
                if self._group_bytes is not None:
                    # `load` may be collective over the engine's ranks: begin it only after all of
                    # them have received their tensors.
                    with self._link.agreement(failure):
                        if update is not None:
                            update.load(names)
            with self._link.agreement(
                f"weight version {version} may be loaded on only some of the engine ranks"
            ):
                totals = torch.tensor([moved_bytes, changed_elements], device=self._link.device)
                self._link.all_reduce(totals)
                if update is not None:
                    update.commit()
                # The update is committed: it must not be aborted any more.
                undo.pop_all()
        if should_verify:
            self._check_held_weights(version, expected)

        remote_elements = sum(
            transfer.numel
            for transfer in self._plan.transfers
            if transfer.source != transfer.target
        )
        moved_bytes, changed_elements = totals.tolist()
        self.stats = PublishStats(
            version=version,
            staging_bytes=staging_bytes,
            seconds=time.perf_counter() - begin,
            verify_seconds=self._verify_seconds if should_verify else None,
            moved_bytes=moved_bytes,
            full_bytes=remote_elements * self._dtype.itemsize,
            changed_share=(
                changed_elements / remote_elements if sends_delta and remote_elements else None
            ),
        )
        return self.stats

    @contextlib.contextmanager
    def _timed_verification(self) -> Iterator[None]:
        """Add the duration of the block to the verification of this publish."""
        start = time.perf_counter()
        yield
        end = time.perf_counter()
        self._verify_seconds += end - start
        if self._listener is not None:
            self._listener("verify", start, end)

    def _check_unchanged(self) -> None:
        """Raise AlignerError if weights that the engine holds have changed since the last
        verification."""
        if self._held_weights is None:
            return
        if names := self._held_weights.find_changed_weights():
            raise AlignerError(
                "the engine's weights have changed since the last weight sync, so that it may have"
                f" generated with damaged weights: {', '.join(names)}"
            )

    def _check_held_weights(self, version: int, expected: Mapping[str, ExpectedSlice]) -> None:
        """Compare the weights that the engine holds with the trainer's. Collective.

        Args:
            version: Version of the weights.
            expected: The trainer's checksums of this rank's slices, by name.

        Raises:
            AlignerError: On every rank, if weights differ; the error names them and the ranks.
        """
        failure = f"the engine does not hold weight version {version} after its weight sync"
        try:
            with self._link.agreement(failure), self._timed_verification():
                if self._held_weights is not None:
                    raise_if_different(self._held_weights.find_wrong_weights(expected))
        except AlignerError as error:
            if self._held_weights is not None:
                self._held_weights.discard_weights(str(error))
            raise

    def abort(self, store: Store) -> None:
        """Let the current publish fail on every rank. See `Link.abort`."""
        self._link.abort(store)

    def _build_encoding(
        self,
        plan: TransferPlan,
        steps: Sequence[ExchangeStep],
        read: TensorReader,
        *,
        sends_delta: bool,
    ) -> Encoding:
        """Return the encoding of this publish's pieces. Collective.

        Args:
            plan: The plan of the current group of tensors.
            steps: This rank's steps of the plan.
            read: Reader of this rank's source slices.
            sends_delta: Whether the engines still hold the weights that `read_previous` returns, so
                that only changed elements are sent.
        """
        if sends_delta:
            read_previous = CachedReader(self._read_previous)
            return DeltaEncoding.from_comparison(
                steps,
                self._link,
                self._dtype,
                lambda piece: source_rows(plan, piece, read),
                lambda piece: source_rows(plan, piece, read_previous),
            )
        return Encoding(self._dtype)

    def _check_views(self, plan: TransferPlan, views: Mapping[str, Tensor]) -> None:
        """Raise AlignerError naming every tensor whose view is missing or does not match the
        plan."""
        problems = []
        for name, target_slice in plan.target.get(self._link.rank, {}).items():
            shape = slice_shape(plan.specs[name], target_slice)
            if name not in views:
                problems.append(f"{name}: the engine has no such tensor")
            elif tuple(views[name].shape) != shape or views[name].dtype != self._dtype:
                actual = f"{tuple(views[name].shape)} of {views[name].dtype}"
                problems.append(
                    f"{name}: the engine's tensor is {actual}, the transfer plan writes {shape} of"
                    f" {self._dtype}"
                )
        if problems:
            raise AlignerError(
                "the engine does not match the transfer plan:\n" + "\n".join(problems)
            )


def _read_bits(read: TensorReader, plan: TransferPlan, dtype: torch.dtype) -> TensorReader:
    """Return a reader of the elements that are sent; see `view_bits`."""
    return lambda name: view_bits(read(name), name, plan.specs, dtype)


def _raise_no_weights(name: str) -> Tensor:
    raise AlignerError(f"{name}: this rank has no weights to read")


def plan_between_worlds(
    shape: ModelShape, trainer: ParallelConfig, weight_format: WeightFormat
) -> TransferPlan:
    """Return the plan from the trainer's ranks to the generator's ranks, which are numbered after
    the trainer's."""
    return plan_to_engine(shape, trainer, weight_format, first_engine_rank=trainer.ranks)


@dataclass(frozen=True)
class GeneratorCalls:
    """Requests of the trainer's rank 0 to the generator's server.

    Each raises AlignerError if the server does not answer.
    """

    get_instance: Callable[[], str]
    """Function that returns the name of the generator instance that answers; each restart of
    the generator creates a new instance."""
    has_restarted: Callable[[str], bool]
    """Function that returns whether the generator has been restarted since this instance. It waits
    while the generator is lost."""
    connect: Callable[[str, int, int], Future[Any]]
    """Function that lets the generator's ranks connect to a link. Its arguments are the host and
    port of the store, and the link's generation."""
    receive: Callable[[int], Future[Any]]
    """Function that lets the generator's ranks receive the weights of a version, which the trainer
    publishes at the same time. With `engine.verify`, the answer contains each replica's result of
    the probe in `probe`, and its duration in `probe_seconds`."""


class Snapshots:
    """Copies of source slices in host memory, by version.

    One thread takes snapshots, and another thread reads them. The memory of released snapshots is
    reused, so that there are never more copies than versions that are needed at the same time.
    """

    def __init__(
        self, source: TensorReader, names: Iterable[str], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Create an empty store of snapshots.

        Args:
            source: Reader of this rank's current slices.
            names: Names of the slices.
            dtype: Data type of the copies.
            device: Device on which the slices are read back.
        """
        self._source = source
        self._names = tuple(names)
        self._dtype = dtype
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._selected: dict[str, Tensor] = {}
        self._served: dict[str, Tensor] = {}
        self._by_version: dict[int, dict[str, Tensor]] = {}
        self._free: list[dict[str, Tensor]] = []
        self._changed = threading.Condition()

    @torch.no_grad()
    def take(self, version: int) -> None:
        """Copy the weights. They may change once this method returns."""
        with self._changed:
            copies = self._free.pop() if self._free else {}
        for name in self._names:
            tensor = self._source(name)
            if name not in copies:
                # Pinned memory allows asynchronous copies between host and device.
                copies[name] = torch.empty(tensor.shape, dtype=self._dtype, pin_memory=self._on_gpu)
            copies[name].copy_(tensor, non_blocking=self._on_gpu)
        if self._on_gpu:
            torch.cuda.current_stream(self._device).synchronize()
        with self._changed:
            self._by_version[version] = copies
            self._changed.notify_all()

    def select(self, version: int, timeout_s: float) -> None:
        """Let `read` return the slices of a version, once its snapshot is taken.

        Raises:
            AlignerError: If the snapshot is not taken within `timeout_s` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: version in self._by_version, timeout_s):
                raise AlignerError(
                    f"no snapshot of weight version {version} was taken within {timeout_s:g} s"
                )
            self._selected = self._by_version[version]

    def read(self, name: str) -> Tensor:
        """Return a slice of the selected version."""
        return self._selected[name].to(self._device, non_blocking=True)

    def read_served(self, name: str) -> Tensor:
        """Return a slice of the version that the engine serves."""
        return self._served[name].to(self._device, non_blocking=True)

    def release_below(self, version: int) -> None:
        """Record that the engine serves `version`, which is selected, and release older
        snapshots."""
        with self._changed:
            self._served = self._selected
            for old_version in [key for key in self._by_version if key < version]:
                self._free.append(self._by_version.pop(old_version))


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run this thread's GPU work of the block on a stream, and synchronize at the end.

    If `stream` is None, the work runs on the current stream.
    """
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


class RemotePublisher:
    """Publisher to the generator role, from snapshots, so that training continues in the meantime.

    Each rank of the trainer sends its own shards. Rank 0 decides what is transferred and when, in
    any thread that needs a version to be served, and announces each transfer in a store that it
    hosts. On each other rank, a thread follows these announcements. A snapshot is kept until the
    engine serves a newer version, so that a restarted generator receives the version that it should
    serve.
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
        read: TensorReader,
        run_on_rank0_and_share: Callable[[Callable[[], Any]], Any],
        calls: GeneratorCalls | None,
        listener: Callable[[str, float, float], None] | None = None,
        probe: WeightProbe | None = None,
    ) -> None:
        """Create the publisher of one trainer rank. Collective over the trainer's ranks.

        Args:
            plan: The plan from the trainer's to the generator's ranks.
            rank: This process's rank in the trainer.
            device: This rank's device.
            weight_format: The engine's weight format.
            settings: The configuration section `engine`.
            host: Address at which rank 0 hosts the store.
            read: Reader of this rank's source slices.
            run_on_rank0_and_share: Function that runs a function on rank 0, and returns its JSON
                result, or raises its error, on every rank.
            calls: Requests to the generator, on rank 0 only.
            listener: Function that is called after every transfer (`publish`) and every part of its
                verification (`verify`, `probe`) with the span's name, and its start and end in
                seconds of `time.perf_counter`.
            probe: Probe of the engine's log-probs; None with `engine.verify=never`.
        """
        self._plan = plan
        self._probe = probe
        self._probe_logprobs: dict[int, tuple[Tensor, float]] = {}
        """The trainer's log-probs of the probe by weight version, and the seconds that they took;
        on rank 0."""
        self._has_probed = False
        self._rank = rank
        self._device = device
        self._format = weight_format
        self._settings = settings
        self._calls = calls
        self._run_on_rank0_and_share = run_on_rank0_and_share
        self._listener = listener
        self._timeout = timedelta(seconds=settings.update_timeout_s)
        dtype = weight_format.dtype
        source = _read_bits(read, plan, dtype)
        self._snapshots = Snapshots(source, plan.source.get(rank, {}), dtype, device)

        store = None if calls is None else open_store(host, self._timeout)
        self._address: tuple[str, int] = (
            host,
            run_on_rank0_and_share(lambda: None if store is None else store.port),
        )
        self._store = store or TCPStore(*self._address, is_master=False, timeout=self._timeout)
        # Publisher over the link to the generator's ranks; None without a usable link.
        self._publisher: Publisher | None = None
        self.stats: PublishStats | None = None
        """Statistics of the newest publish."""
        self._moved_stats: PublishStats | None = None
        """Statistics of the newest publish without its probe."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._move_count = self._link_generation = 0
        self._served_version = -1
        self._target_version = -1
        self._instance = ""
        self._lock = threading.RLock()

        self._follower: threading.Thread | None = None
        if calls is None:
            self._follower = threading.Thread(
                target=self._follow_rank0, name="weights", daemon=True
            )
            self._follower.start()
            # Close also after a failed run: no thread may wait on the store when the interpreter
            # exits.
            atexit.register(self.close)

    @property
    def served(self) -> int:
        """Version that the engine serves, according to rank 0; -1 before the first. Waits while a
        generator is restored."""
        with self._lock:
            return self._served_version

    def take_snapshot(self, version: int) -> None:
        """Copy the current weights as `version`. Every rank of the trainer calls it.

        With `engine.verify`, this method also computes the log-probs of the probe, because the
        trainer does not have these weights any more when the engine has received them.
        """
        # Every rank must decide equally, so the decision does not depend on the served version,
        # which only rank 0 knows.
        is_probe_due = self._settings.verify == "sync" or not self._has_probed
        if self._probe is not None and is_probe_due:
            self._has_probed = True
            start = time.perf_counter()
            logprobs = self._probe.compute()
            end = time.perf_counter()
            if self._calls is not None:
                self._probe_logprobs[version] = (logprobs, end - start)
            if self._listener is not None:
                self._listener("probe", start, end)
        self._snapshots.take(version)

    def publish(self, version: int) -> None:
        """Return once the engine serves the current weights as `version`.

        See `WeightPublisher.publish`.
        """
        self.take_snapshot(version)
        self._run_on_rank0_and_share(lambda: None if self._calls is None else self.serve(version))

    def serve(self, version: int) -> None:
        """Return once the engine serves `version` or newer weights. For rank 0, from any thread.

        If the generator is lost, the method waits for it, and sends it the weights again.

        Raises:
            AlignerError: If the weight sync fails.
        """
        with self._lock:
            self._target_version = max(self._target_version, version)
            self._sync_to_target()

    def restore(self) -> int:
        """Send the served version again to an engine that has reported that it lacks it.

        Returns:
            The version that the engine serves now.
        """
        with self._lock:
            self._served_version = -1
            self._sync_to_target()
            return self._served_version

    def close(self) -> None:
        """Stop the thread that follows rank 0; wait at most 2 s for it."""
        deadline = time.monotonic() + _END_S
        while (
            self._follower is not None and self._follower.is_alive() and time.monotonic() < deadline
        ):
            # DistError: rank 0 has exited, which also ends the thread.
            with contextlib.suppress(dist.DistError):
                self._connect_store_client().set(self._move_key(self._rank), json.dumps({}))
            self._follower.join(0.2)

    def _sync_to_target(self) -> None:
        """Send the target version until the engine serves it. Rank 0 only."""
        calls = self._calls
        assert calls is not None, "rank 0 decides what moves"
        unanswered_count = 0
        while self._served_version < self._target_version:
            known_instance = self._instance
            try:
                self._send_version(calls, self._target_version)
            except AlignerError as error:
                self._publisher = None
                unanswered_count += _is_unanswered(error)
                has_restarted = calls.has_restarted(known_instance or self._instance)
                # The same instance may still run: a restart of its Triton server loses answers.
                is_worth_repeating = _is_unanswered(error) and unanswered_count <= _MAX_UNANSWERED
                if not (has_restarted or is_worth_repeating):
                    raise
                _log.warning(
                    "the generator was lost during a weight sync; syncing again: %s", error
                )

    def _send_version(self, calls: GeneratorCalls, version: int) -> None:
        """Send a version to the generator, over a new link if the generator has been restarted."""
        instance = calls.get_instance()
        if self._publisher is None or instance != self._instance:
            self._publisher = None
            self._instance = instance
            self._link_generation += 1
            self._announce(link=self._link_generation)
            connect_future = calls.connect(*self._address, self._link_generation)
            _run_both(connect_future, lambda: self._execute_move(link=self._link_generation))

        start = time.perf_counter()
        self._announce(version=version)
        receive_future = calls.receive(version)
        receive_future.add_done_callback(self._abort_if_failed)
        answer = _run_both(receive_future, lambda: self._execute_move(version=version))
        self.stats = self._check_probe(version, answer)
        self._served_version = version
        if self._listener is not None:
            self._listener("publish", start, time.perf_counter())

    def _check_probe(self, version: int, answer: Mapping[str, Any]) -> PublishStats | None:
        """Compare the engine's log-probs of the probe with the trainer's, and return the statistics
        of the weight sync. Rank 0 only.

        Args:
            version: Version of the weights.
            answer: Answer of the generator to the request to receive this version.

        Raises:
            AlignerError: The log-probs differ by more than rounding.
        """
        # Engines that cannot score given tokens compute no probe.
        if "probe" not in answer or self._probe is None or version not in self._probe_logprobs:
            return self._moved_stats
        trainer_logprobs, trainer_seconds = self._probe_logprobs[version]
        difference = self._probe.check(version, trainer_logprobs, answer["probe"])
        # A restarted generator may need this version again, but no older one.
        for old_version in [key for key in self._probe_logprobs if key < version]:
            del self._probe_logprobs[old_version]

        stats = self._moved_stats
        assert stats is not None, "the weights were published before the answer"
        return replace(
            stats,
            probe_seconds=trainer_seconds + answer["probe_seconds"],
            probe_logprob_abs=difference,
        )

    def _abort_if_failed(self, receive_future: Future[Any]) -> None:
        """Abort the publish on the trainer's ranks if the generator has refused it or is lost, so
        that they do not wait for the timeout."""
        publisher = self._publisher
        if receive_future.exception() is not None and publisher is not None:
            with contextlib.suppress(dist.DistError):
                publisher.abort(self._connect_store_client())

    def _connect_store_client(self) -> TCPStore:
        """Return a new client of the store: a client that waits for a key cannot be used by another
        thread."""
        return TCPStore(*self._address, is_master=False, timeout=self._timeout)

    def _move_key(self, rank: int) -> str:
        """Return the store key under which a rank reads the next move."""
        return f"move/{rank}/{self._move_count}"

    def _announce(self, **move: int) -> None:
        """Announce a move, the arguments of `_execute_move`, to the other ranks of the trainer."""
        for rank in range(1, len(self._plan.source)):
            self._store.set(self._move_key(rank), json.dumps(move))
        self._move_count += 1

    def _follow_rank0(self) -> None:
        """Execute the moves that rank 0 announces, until rank 0 or this rank exits."""
        while True:
            key = self._move_key(self._rank)
            try:
                self._store.wait([key], _FOREVER)
                move = json.loads(self._store.get(key))
            except dist.DistError:  # rank 0 has exited, which ends the run
                return
            if not move:  # written by `close`
                return
            self._move_count += 1
            try:
                self._execute_move(**move)
            except AlignerError as error:  # rank 0 has the same error from the link, and handles it
                self._publisher = None
                _log.warning("weight sync failed on trainer rank %d: %s", self._rank, error)

    def _execute_move(self, link: int | None = None, version: int | None = None) -> None:
        """Execute this rank's part of a move. Collective, with the generator's ranks.

        Args:
            link: Generation of a new link to connect.
            version: Weight version to publish.
        """
        if link is not None:
            self._publisher = self._connect_publisher(link)
        elif version is not None:
            if self._publisher is None:
                raise AlignerError("the trainer is not connected to the generator")
            self._snapshots.select(version, self._timeout.total_seconds())
            with on_stream(self._stream):
                stats = self._publisher.publish(version)
            self._moved_stats = stats
            # On rank 0, the weight sync is complete only after its probe.
            if self._calls is None:
                self.stats = stats
            self._snapshots.release_below(version)

    def _connect_publisher(self, generation: int) -> Publisher:
        """Return a publisher over a new link. Collective, with the generator's ranks."""
        link = Link(
            self._store,
            self._rank,
            self._plan.labels,
            timeout=self._timeout,
            device=self._device,
            generation=generation,
            store_host=self._plan.labels[0],
        )
        # On a GPU, each read copies the tensor from host memory.
        copied_names = () if self._device.type == "cpu" else self._plan.specs
        snapshots = self._snapshots
        return Publisher.for_engine(
            self._plan,
            link,
            self._settings,
            self._format,
            read=snapshots.read,
            read_previous=snapshots.read_served,
            copied_names=copied_names,
            listener=self._listener,
        )


def _run_both(request: Future[Any], run_own_part: Callable[[], None]) -> Any:
    """Run this rank's part while a server executes its request, wait for both, and return the
    server's answer.

    Raises:
        UnansweredError: If one of the two failed because a request got no answer.
        AlignerError: If one of the two failed otherwise. The error contains the messages of both.
    """
    errors: list[AlignerError] = []
    answer: Any = None
    for part in (run_own_part, request.result):
        try:
            answer = part()
        except AlignerError as error:
            errors.insert(0, error)
    if errors:
        kind = UnansweredError if any(map(_is_unanswered, errors)) else AlignerError
        raise kind("\n".join(map(str, errors))) from errors[0]
    return answer


def _is_unanswered(error: AlignerError) -> bool:
    """Return whether a request to the generator got no answer, as opposed to a refusal."""
    return isinstance(error, UnansweredError)


class WeightReceiver:
    """The generator's end of the weight sync, on one rank of the generator."""

    def __init__(
        self,
        plan: TransferPlan,
        rank: int,
        device: torch.device,
        weight_format: WeightFormat,
        settings: EngineConfig,
        begin_update: Callable[[int], WeightUpdate],
        held_weights: HeldWeights,
    ) -> None:
        """Create the receiver of one generator rank.

        Args:
            plan: The plan from the trainer's to the generator's ranks.
            rank: This process's rank in the plan, in which the generator's ranks follow the
                trainer's ranks.
            device: This rank's device.
            weight_format: The engine's weight format.
            settings: The configuration section `engine`.
            begin_update: Function that opens an update of the engine to a version.
            held_weights: The weights that the engine holds.
        """
        self._plan = plan
        self._rank = rank
        self._device = device
        self._format = weight_format
        self._settings = settings
        self._begin_update = begin_update
        self._held_weights = held_weights
        self._publisher: Publisher | None = None

    def connect(self, host: str, port: int, generation: int) -> None:
        """Connect to the trainer's ranks in a link, over the store that the trainer hosts.
        Collective.

        Raises:
            AlignerError: If the store or a rank does not answer within `engine.update_timeout_s`.
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
        self._publisher = Publisher.for_engine(
            self._plan,
            link,
            self._settings,
            self._format,
            begin_update=self._begin_update,
            held_weights=self._held_weights,
        )

    def receive(self, version: int) -> None:
        """Receive the weights that the trainer publishes as `version`. Collective, with the
        trainer's ranks."""
        if self._publisher is None:
            raise AlignerError("the generator is not connected to the trainer; call connect first")
        self._publisher.publish(version)
