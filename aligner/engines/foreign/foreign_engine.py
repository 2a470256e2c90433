"""A generation engine whose replicas are another program's, each driven by its first rank."""

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from aligner.engines.engine_protocol import (
    EngineRequest,
    GenerationEngine,
    GenerationRequest,
    SamplingOptions,
)
from aligner.engines.foreign.client import Client
from aligner.engines.foreign.replica import Replica
from aligner.engines.foreign.responses import Response
from aligner.errors import AlignerError
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import (
    Slice,
    TensorSpec,
    compute_engine_slices,
    cut_shape,
    group_by_stored_tensor,
    weight_table,
)
from aligner.resharding.weight_update import WeightFormat
from aligner.schema import EngineConfig


@dataclass(frozen=True)
class Piece:
    """What a rank holds of a weight; all pieces of one tensor of a file come together, in their
    order there."""

    spec: TensorSpec
    slice: Slice
    tensor: Tensor


class ForeignEngine(GenerationEngine):
    """A `GenerationEngine` whose replicas are instances of TP' workers each.

    The workers are processes of the program's own. A replica's first rank drives them; the others
    hand over weights, and return the same samples.

    An update overwrites the weights: from its first `load` on the engine has no version, until a
    `commit`.
    """

    def __init__(
        self,
        name: str,
        shape: ModelShape,
        settings: EngineConfig,
        weight_format: WeightFormat,
        rank: int,
        group: ProcessGroup | None,
        device: torch.device | str,
        context: int | None,
    ) -> None:
        """The program, called `name`, is still to be started; weights are not set yet.

        `group` holds the TP' ranks of this rank's replica, in order (None when TP' is 1);
        `context` is the longest sequence, prompt and response (None: as long as the model allows).
        """
        size = settings.parallel.tensor
        if size > 1 and group is None:
            raise AlignerError(
                f"engine.parallel.tensor={size}: requires the process group of the replica's ranks,"
                " got None"
            )
        positions = min(context or shape.max_positions, shape.max_positions)
        super().__init__(
            dataclasses.replace(shape, max_positions=positions), settings, weight_format
        )
        self._table = weight_table(shape)
        self._last: dict[str, Tensor] = {}
        """What the last update wrote, in this process's memory, where the next one tells only what
        has changed."""
        self._device, self._replica, self._rank = (
            torch.device(device),
            Replica(name, rank % size, size, group),
            rank,
        )
        self._version: int | None = None
        self._cache_asleep = False
        self._in_flight: dict[Any, Response] = {}
        """Requests in flight by the tasks of the client, on the first rank."""

    @property
    def version(self) -> int | None:
        """Version of the weights that serve; None before the first update, and while or after one
        overwrote them."""
        return self._version

    @property
    def leads(self) -> bool:
        """See `GenerationEngine.leads`."""
        return self._replica.rank == 0

    def check(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> None:
        """See `GenerationEngine.check`."""
        if refused := self._refused(options):
            raise AlignerError(f"{self._replica.name}: {refused}; set engine.kind=embedded")
        super().check(requests, options)

    def check_branch(self, prompt_id: int) -> None:
        """Raise AlignerError: the random numbers of a branch could not differ from those of the
        episode's other sequences."""
        raise AlignerError(
            f"{self._replica.name}: episode branches are not supported (prompt"
            f" {prompt_id}); set engine.kind=embedded"
        )

    @property
    def has_work(self) -> bool:
        """See `GenerationEngine.has_work`."""
        return bool(self._arrivals or self._in_flight)

    def step(self) -> None:
        """Wait a moment for completions.

        Raises AlignerError if there is none and the engine has no weights to continue with.
        """
        client = self._client
        self._start(self._take_arrivals())
        if not any(task.done() for task in self._in_flight):
            self._check_weights()
            client.wait(list(self._in_flight))
        for task in [task for task in self._in_flight if task.done()]:
            response = self._in_flight.pop(task)
            task.result()
            response.request.resolve(response.completion())

    def interrupt(self) -> None:
        """See `GenerationEngine.interrupt`."""
        client = self._client
        self._start(self._take_arrivals())
        in_flight = self._in_flight
        self._in_flight = {}
        client.interrupt()
        completions = [(each.request, each.completion()) for each in in_flight.values()]
        client.cancel(in_flight)
        for request, completion in completions:
            request.resolve(completion)

    def release(self, prompt_id: int, sample_index: int) -> None:
        """Do nothing: the program frees its prefix cache itself."""

    def end_turn(self, message: Any = None) -> Any:
        """See `GenerationEngine.end_turn`."""
        return self._replica.share(message)

    @property
    def _client(self) -> Client:
        client = self._replica.client
        assert client is not None, "only the first rank of a replica drives the program"
        return client

    def _start(self, requests: Sequence[EngineRequest]) -> None:
        if requests:
            responses = [Response(request) for request in requests]
            self._in_flight |= dict(zip(self._client.start(responses), responses, strict=True))

    @abstractmethod
    def _refused(self, options: SamplingOptions) -> str | None:
        """Return which sampling parameter the program does not support; None if it supports all."""

    @abstractmethod
    def _share(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Handles, JSON, by which the workers find this rank's pieces of tensors, until the client
        has loaded them."""

    @abstractmethod
    def _unshare(self) -> None:
        """The workers have loaded them."""

    def begin_update(self, version: int) -> "StreamedUpdate":
        """Open an update. The old weights serve until its first `load`."""
        self._check_may_update(version)
        self._incoming = version
        return StreamedUpdate(self, version)

    def sleep(self) -> None:
        """Free the memory of keys and values and of the model."""
        if not self._settings.sleep:
            raise AlignerError(
                f"engine.sleep=false: {self._replica.name} can release GPU memory only if it was"
                " started with engine.sleep=true"
            )
        self._check_may_sleep()
        if not self._asleep:
            self._replica.drive("releasing GPU memory", self._release)
            self._asleep = self._cache_asleep = True
        if self._version is not None:
            self._version = None
            self._why_no_weights = "sleep freed their memory; sync weights to the engine again"

    def wake(self) -> None:
        """Take the model's memory back; that of keys and values follows the weights that are
        published next."""
        if self._asleep:
            self._replica.gather("freeing cached GPU memory", _give_back)
            self._replica.drive("waking up", lambda client: client.resume(cache=False))
            self._asleep = False

    def shutdown(self) -> None:
        """End the program's processes. Collective over the replica."""
        self._replica.drive("shutting down", Client.shutdown)

    def _release(self, client: Client) -> None:
        if self._cache_asleep:  # more can not be released beside what is
            client.resume(cache=True)
        client.release()

    def _overwrite(self, version: int) -> None:
        """An update begins to load: responses are finished or interrupted, and the engine has no
        version from here on."""
        self._version, self._why_no_weights = (
            None,
            f"the weight update to version {version} is in progress",
        )
        interrupts = self._settings.in_flight == "interrupt"
        self._replica.drive("pausing generation", lambda client: client.hold(interrupts=interrupts))

    def _finish(self, version: int) -> None:
        """An update has loaded all: the workers finish it; keys and values of the old weights are
        forgotten."""

        def finish(client: Client) -> None:
            client.update_weights(None)
            if self._cache_asleep:
                client.resume(cache=True)
            client.admit(version)

        if self._cache_asleep:
            self._replica.gather("freeing cached GPU memory", _give_back)
        self._replica.drive("finishing the weight update", finish)
        self._cache_asleep = False
        self._version = version


def _give_back() -> None:
    """Let the workers have what torch keeps of this process's GPU: the trainer's activations, an
    update's buckets."""
    torch.cuda.empty_cache()


class StreamedUpdate:
    """A `WeightUpdate` that holds no more than one group of tensors."""

    def __init__(self, engine: ForeignEngine, version: int) -> None:
        self._engine, self._version, self._replica, self._device = (
            engine,
            version,
            engine._replica,
            engine._device,
        )
        to = engine.weight_format
        self._specs = {spec.name: spec for spec in engine._table}
        self._slices = compute_engine_slices(
            engine._table, to.layout, engine._rank, to.vocabulary_multiple
        )
        self._missing = group_by_stored_tensor(engine._table)
        self._views: dict[str, Tensor] = {}
        self._written: dict[str, Tensor] = {}
        self._overwrites = False
        """Whether the old weights are gone, and the new ones do not serve."""
        self._open = True

    def views(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """This rank's slices in the engine's precision, on its device; of tensors that the model
        has."""
        self._check_open()
        last, keeps = self._engine._last, self._engine._settings.publish == "changes"
        dtype, device = (
            self._engine.weight_format.dtype,
            (torch.device("cpu") if keeps else self._device),
        )
        views = {
            name: (
                last[name]
                if name in last
                else torch.empty(self._shape(name), dtype=dtype, device=device)
            )
            for name in names
            if name in self._specs
        }
        self._views |= views
        if keeps:
            last |= views
        return views

    def load(self, names: Sequence[str]) -> None:
        """Hand the tensors over. From the first call on the old weights are gone. Collective over
        the replica."""
        taken: list[Piece] = []

        def take() -> bool:
            taken.extend(self._take(names))
            return bool(taken)

        has_some = any(self._replica.gather("collecting weights", take))
        if not self._overwrites:
            self._overwrites = True
            self._engine._overwrite(self._version)
        if has_some:
            self._hand_over(taken)

    def commit(self) -> None:
        """Make the weights the engine's. Collective. Raises AlignerError naming tensors that were
        not loaded."""
        self._replica.gather("checking the weight update", self._check_complete)
        try:
            self._engine._finish(self._version)
            self._overwrites = False
        finally:
            self._end()

    def abort(self) -> None:
        """Give the update up: the engine keeps its weights if nothing has been loaded, and else has
        none."""
        if self._open:
            self._end()

    def _shape(self, name: str) -> tuple[int, ...]:
        piece = self._slices[name]
        return cut_shape(self._specs[name].shape, piece.axis, piece.start, piece.stop)

    def _hand_over(self, pieces: Sequence[Piece]) -> None:
        """Give the ranks' pieces to the replica's workers, and wait until every one has loaded its
        own."""
        handles: dict[str, Any] = {}
        for mine in self._replica.gather("sharing weights", lambda: self._engine._share(pieces)):
            handles |= mine
        try:
            self._replica.drive("loading weights", lambda client: client.update_weights(handles))
        finally:
            self._engine._unshare()

    def _take(self, names: Sequence[str]) -> Sequence[Piece]:
        """Of the tensors of a file that are complete once these have been written; the rest wait
        for their other parts."""
        self._check_open()
        if unasked := [name for name in names if name not in self._views]:
            raise AlignerError(
                f"these tensors are already loaded, or their views were never requested:"
                f" {', '.join(unasked)}"
            )
        self._written |= {name: self._views.pop(name) for name in names}
        complete = {
            stored: specs
            for stored, specs in self._missing.items()
            if all(spec.name in self._written for spec in specs)
        }
        for stored in complete:
            del self._missing[stored]
        parts = [spec for specs in complete.values() for spec in specs]
        return [
            Piece(spec, self._slices[spec.name], self._written.pop(spec.name)) for spec in parts
        ]

    def _check_complete(self) -> None:
        self._check_open()
        if self._missing:
            raise AlignerError(
                f"the weight update to version {self._version} lacks {len(self._missing)}"
                f" tensor(s): {', '.join(self._missing)}"
            )

    def _end(self) -> None:
        self._open = False
        self._views.clear()
        self._written.clear()
        self._engine._incoming = None
        if self._overwrites:
            why = (
                f"the weight update to version {self._version} failed after it had started to"
                " overwrite the old weights; sync weights to the engine again"
            )
            self._engine._why_no_weights = why

    def _check_open(self) -> None:
        if not self._open:
            raise AlignerError(f"the weight update to version {self._version} is already closed")
