"""Base class of the engines that run an external program, vLLM or TensorRT-LLM.

`ForeignEngine` is the engine, and `StreamedUpdate` is its weight update.
"""

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
    """A rank's slice of a tensor.

    Several tensors may be stored as parts of one tensor in the checkpoint file. The pieces of all
    these parts are always passed together, in their order in the stored tensor.
    """

    spec: TensorSpec
    """Name, shape and place in the checkpoint of the whole tensor."""
    slice: Slice
    """The rank's range of the tensor."""
    tensor: Tensor
    """Values of the slice, in the engine's precision."""


class ForeignEngine(GenerationEngine):
    """A `GenerationEngine` that runs an external program with TP' workers per replica.

    The workers are processes of the program. The first rank of a replica controls them through a
    `Client`. The other ranks pass weights to the workers, and otherwise only take part in the
    collectives.

    An update overwrites the weights: the engine has no version from the first `load` of the update
    until its `commit`.
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
        """Prepare the engine. The subclass starts the program afterwards.

        Args:
            name: Name of the program, for messages.
            shape: Dimensions of the model.
            settings: Section `engine` of the configuration.
            weight_format: Format in which the engine receives weights.
            rank: Rank of this process in the engine.
            group: The TP' ranks of this rank's replica, in order; None if TP' is 1.
            device: Device of this rank.
            context: Maximum length of prompt and response in tokens; None: the model's maximum.

        Raises:
            AlignerError: TP' is greater than 1 and `group` is missing.
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
        """Slices of this rank after the last update, in host memory. They are stored only with
        `engine.publish=changes`, because the next update then contains only changed elements."""
        self._device = torch.device(device)
        self._replica = Replica(name, rank % size, size, group)
        self._rank = rank
        self._version: int | None = None
        self._cache_asleep = False
        """Whether the memory of the KV cache is released. The KV cache wakes later than the
        weights."""
        self._in_flight: dict[Any, Response] = {}
        """Requests in flight by the client's tasks, on the replica's first rank."""

    @property
    def version(self) -> int | None:
        """Version of the current weights; see `GenerationEngine.version`.

        None before the first update, during an update from its first `load` on, and after an update
        that failed since then.
        """
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
        """Raise AlignerError, because a branch would have the same random numbers as the episode's
        other token sequences."""
        raise AlignerError(
            f"{self._replica.name}: episode branches are not supported (prompt"
            f" {prompt_id}); set engine.kind=embedded"
        )

    @property
    def has_work(self) -> bool:
        """See `GenerationEngine.has_work`."""
        return bool(self._arrivals or self._in_flight)

    def step(self) -> None:
        """Wait a moment for completions, and deliver them.

        Raises AlignerError if no request is complete and the engine has no weights to continue.
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
        # Read the tokens before cancelling: the responses continue until they are cancelled.
        completions = [(response.request, response.completion()) for response in in_flight.values()]
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
        """Client of the program, on the replica's first rank."""
        client = self._replica.client
        assert client is not None, "only the first rank of a replica drives the program"
        return client

    def _start(self, requests: Sequence[EngineRequest]) -> None:
        """Send requests to the program."""
        if requests:
            responses = [Response(request) for request in requests]
            self._in_flight |= dict(zip(self._client.start(responses), responses, strict=True))

    @abstractmethod
    def _refused(self, options: SamplingOptions) -> str | None:
        """Return a message that names an unsupported sampling parameter; None if all are
        supported."""

    @abstractmethod
    def _share(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Share this rank's pieces with the workers, until `_unshare`.

        Returns:
            Handles with which the workers open the pieces, as JSON.
        """

    @abstractmethod
    def _unshare(self) -> None:
        """Free the memory that `_share` has shared, after the workers have loaded the pieces."""

    def begin_update(self, version: int) -> "StreamedUpdate":
        """Open an update; see `GenerationEngine.begin_update`.

        The engine keeps the old weights until the update's first `load`.
        """
        self._check_may_update(version)
        self._incoming = version
        return StreamedUpdate(self, version)

    def sleep(self) -> None:
        """Free the memory of the KV cache and of the weights; see `GenerationEngine.sleep`.

        Raises AlignerError if `engine.sleep` is false.
        """
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
        """Allocate memory for the weights. The next weight sync allocates the KV cache when it
        finishes."""
        if self._asleep:
            self._replica.gather("freeing cached GPU memory", _give_back)
            self._replica.drive("waking up", lambda client: client.resume(cache=False))
            self._asleep = False

    def shutdown(self) -> None:
        """Stop the program's processes. Collective over the replica."""
        self._replica.drive("shutting down", Client.shutdown)

    def _release(self, client: Client) -> None:
        # The program can release memory only if all of it is allocated.
        if self._cache_asleep:
            client.resume(cache=True)
        client.release()

    def _overwrite(self, version: int) -> None:
        """Finish or interrupt the responses in flight, before an update loads its first tensors.

        The engine has no version from here on.
        """
        self._version = None
        self._why_no_weights = f"the weight update to version {version} is in progress"
        interrupts = self._settings.in_flight == "interrupt"
        self._replica.drive("pausing generation", lambda client: client.hold(interrupts=interrupts))

    def _finish(self, version: int) -> None:
        """Finish an update of which all tensors are loaded, and admit requests again.

        The workers drop the KV cache of the old weights.
        """

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
    """Return this process's cached GPU memory to the device, where the workers need it.

    PyTorch's caching allocator holds the memory of the trainer's activations and of an update's
    buckets.
    """
    torch.cuda.empty_cache()


class StreamedUpdate:
    """A `WeightUpdate` that sends one group of tensors after another to the workers.

    Each tensor is passed to the workers as soon as all parts of its stored tensor are written.
    """

    def __init__(self, engine: ForeignEngine, version: int) -> None:
        self._engine = engine
        self._version = version
        self._replica = engine._replica
        self._device = engine._device
        weight_format = engine.weight_format
        self._specs = {spec.name: spec for spec in engine._table}
        self._slices = compute_engine_slices(
            engine._table, weight_format.layout, engine._rank, weight_format.vocabulary_multiple
        )
        self._missing = group_by_stored_tensor(engine._table)
        """Stored tensors that are not loaded yet, with the tensors that they consist of."""
        self._views: dict[str, Tensor] = {}
        """Tensors that the caller may write, by name."""
        self._written: dict[str, Tensor] = {}
        """Tensors that wait for the other parts of their stored tensor, by name."""
        self._overwrites = False
        """Whether the old weights are overwritten and the update is not committed."""
        self._open = True

    def views(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Return this rank's slices, to be written, by name, without those that the model does not
        have.

        They have the engine's precision. With `engine.publish=changes` they are in host memory and
        contain the weights of the last update; otherwise they are on the engine's device.
        """
        self._check_open()
        last_slices = self._engine._last
        has_changes_only = self._engine._settings.publish == "changes"
        dtype = self._engine.weight_format.dtype
        device = torch.device("cpu") if has_changes_only else self._device
        views = {
            name: (
                last_slices[name]
                if name in last_slices
                else torch.empty(self._shape(name), dtype=dtype, device=device)
            )
            for name in names
            if name in self._specs
        }
        self._views |= views
        if has_changes_only:
            last_slices |= views
        return views

    def load(self, names: Sequence[str]) -> None:
        """Pass written tensors to the workers. Collective over the replica.

        The first call overwrites the old weights. Raises AlignerError on every rank if a tensor is
        loaded twice, or its view was never requested.
        """
        pieces: list[Piece] = []

        def take() -> bool:
            pieces.extend(self._take(names))
            return bool(pieces)

        has_pieces = any(self._replica.gather("collecting weights", take))
        if not self._overwrites:
            self._overwrites = True
            self._engine._overwrite(self._version)
        if has_pieces:
            self._hand_over(pieces)

    def commit(self) -> None:
        """Switch the engine to the new weights. Collective over the replica.

        Raises AlignerError, which names the missing tensors, if some were not loaded.
        """
        self._replica.gather("checking the weight update", self._check_complete)
        try:
            self._engine._finish(self._version)
            self._overwrites = False
        finally:
            self._end()

    def abort(self) -> None:
        """Discard the update.

        The engine keeps the old weights if nothing was loaded yet; otherwise it has no weights.
        """
        if self._open:
            self._end()

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of this rank's slice of a tensor."""
        rank_slice = self._slices[name]
        return cut_shape(
            self._specs[name].shape, rank_slice.axis, rank_slice.start, rank_slice.stop
        )

    def _hand_over(self, pieces: Sequence[Piece]) -> None:
        """Share the pieces of all ranks with the replica's workers, and wait until each worker has
        loaded its pieces."""
        handles: dict[str, Any] = {}
        for rank_handles in self._replica.gather(
            "sharing weights", lambda: self._engine._share(pieces)
        ):
            handles |= rank_handles
        try:
            self._replica.drive("loading weights", lambda client: client.update_weights(handles))
        finally:
            self._engine._unshare()

    def _take(self, names: Sequence[str]) -> Sequence[Piece]:
        """Return the pieces of the stored tensors that are complete now that `names` are written.

        Pieces of incomplete stored tensors wait for the other parts.
        """
        self._check_open()
        if unexpected := [name for name in names if name not in self._views]:
            raise AlignerError(
                f"these tensors are already loaded, or their views were never requested:"
                f" {', '.join(unexpected)}"
            )
        self._written |= {name: self._views.pop(name) for name in names}
        complete = {
            stored: specs
            for stored, specs in self._missing.items()
            if all(spec.name in self._written for spec in specs)
        }
        for stored in complete:
            del self._missing[stored]

        complete_specs = [spec for specs in complete.values() for spec in specs]
        return [
            Piece(spec, self._slices[spec.name], self._written.pop(spec.name))
            for spec in complete_specs
        ]

    def _check_complete(self) -> None:
        self._check_open()
        if self._missing:
            raise AlignerError(
                f"the weight update to version {self._version} lacks {len(self._missing)}"
                f" tensor(s): {', '.join(self._missing)}"
            )

    def _end(self) -> None:
        """Close the update, and free its tensors."""
        self._open = False
        self._views.clear()
        self._written.clear()
        self._engine._incoming = None
        if self._overwrites:
            reason = (
                f"the weight update to version {self._version} failed after it had started to"
                " overwrite the old weights; sync weights to the engine again"
            )
            self._engine._why_no_weights = reason

    def _check_open(self) -> None:
        if not self._open:
            raise AlignerError(f"the weight update to version {self._version} is already closed")
