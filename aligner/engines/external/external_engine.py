"""Base class of the engines that run an external program, vLLM or TensorRT-LLM.

`ExternalEngine` is the engine, and `StreamedUpdate` is its weight update.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from aligner.engines.engine_protocol import EngineRequest, GenerationEngine, ScoringRequest
from aligner.engines.external.client import Client
from aligner.engines.external.replica import Replica
from aligner.engines.external.responses import Response
from aligner.errors import AlignerError
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import (
    Slice,
    TensorSpec,
    cut_shape,
    group_by_stored_tensor,
    weight_table,
)
from aligner.resharding.weight_update import ExpectedSlice, WeightFormat
from aligner.schema import EngineConfig

_MAX_WAIT_S = 0.1
"""Maximum time of one wait for completions, in seconds. The caller needs control back to send
heartbeats and to receive weights."""


@dataclass(frozen=True)
class WeightPiece:
    """A rank's slice of a tensor.

    Several tensors may be stored as parts of one tensor in the checkpoint file. The pieces of all
    these parts are always passed together, in their order in the stored tensor.
    """

    spec: TensorSpec
    """Name and shape of the whole tensor, and its position in the checkpoint."""
    slice: Slice
    """The rank's range of the tensor."""
    tensor: Tensor
    """Values of the slice, in the engine's precision."""


class ExternalEngine(GenerationEngine):
    """A `GenerationEngine` that runs an external program with a worker per rank.

    The workers are processes of the program. The first rank of a replica controls them through a
    `Client`. The other ranks pass weights to the workers, and otherwise only take part in the
    collectives.

    An update overwrites the weights: the engine has no version from the first `load` of the update
    until its `commit`.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        shape: ModelShape,
        settings: EngineConfig,
        weight_format: WeightFormat,
        rank: int,
        group: ProcessGroup | None,
        device: torch.device | str,
        max_sequence_length: int | None,
    ) -> None:
        """Prepare the engine. The subclass starts the program afterwards.

        Args:
            name: Name of the program, for messages.
            directory: Hugging Face directory of the model.
            shape: Dimensions of the model.
            settings: Section `engine` of the configuration.
            weight_format: Format in which the engine receives weights.
            rank: Rank of this process in the engine.
            group: The ranks of this rank's replica, in order; None if there is only one.
            device: Device of this rank.
            max_sequence_length: Maximum length of prompt and response in tokens; None: the model's
                maximum.

        Raises:
            AlignerError: The replica has several ranks and `group` is missing.
        """
        replica_ranks = settings.parallel.replica_ranks
        if replica_ranks > 1 and group is None:
            raise AlignerError(
                f"engine.parallel: a replica has {replica_ranks} ranks, which requires the process"
                " group of these ranks, got None"
            )
        # The program allocates memory for sequences of the maximum length, and `check` rejects
        # longer ones; both read the limit from the shape.
        max_positions = min(max_sequence_length or shape.max_positions, shape.max_positions)
        super().__init__(
            dataclasses.replace(shape, max_positions=max_positions),
            settings,
            weight_format,
            directory,
        )

        # From the unchanged shape: learned position embeddings have one row per position.
        self._weight_table = weight_table(shape)
        self._last_slices: dict[str, Tensor] = {}
        """Slices of this rank after the last update, in host memory. They are stored only with
        `engine.publish=changes`, because the next update then contains only changed elements."""
        self._device = torch.device(device)
        # Ranks of a replica are adjacent in the engine.
        self._replica = Replica(name, rank % replica_ranks, replica_ranks, group)
        self._rank = rank
        self._version: int | None = None
        self._is_cache_asleep = False
        """Whether the memory of the KV cache is released. The KV cache wakes later than the
        weights."""
        self._in_flight: dict[Any, Response] = {}
        """Requests in flight by the client's tasks, on the replica's first rank."""
        self._scoring_in_flight: dict[Any, ScoringRequest] = {}
        """Scoring requests in flight by the client's tasks, on the replica's first rank."""

    @property
    def version(self) -> int | None:
        """Version of the current weights; see `GenerationEngine.version`.

        None before the first update, during an update from its first `load` on, and after an update
        that failed since then.
        """
        return self._version

    @property
    def is_leader(self) -> bool:
        """See `GenerationEngine.is_leader`."""
        return self._replica.rank == 0

    @property
    def has_work(self) -> bool:
        """See `GenerationEngine.has_work`."""
        # A scoring request whose caller has left is never sent.
        has_scoring_requests = any(
            not request.future.cancelled() for request in self._scoring_requests
        )
        is_in_flight = bool(self._in_flight or self._scoring_in_flight)
        return is_in_flight or bool(self._arrivals) or has_scoring_requests

    def step(self) -> None:
        """Wait for completions and scores, and deliver them.

        The wait ends early if another request arrives, or the answer to a coroutine. It ends after
        `_MAX_WAIT_S` in any case. Raises AlignerError if no request is complete and the engine has
        no weights to continue.
        """
        self._submit_scoring_requests()
        self._submit_requests(self._take_arrivals())
        if not self.has_work:
            return
        # Complete responses are delivered even without weights; only waiting requires weights.
        if not any(task.done() for task in (*self._in_flight, *self._scoring_in_flight)):
            self._check_weights()
            if not self.wake_up.wait(_MAX_WAIT_S):
                self._client.check_progress()
        # The event is cleared after the wait: for what set it before, the completions are delivered
        # below, and the caller looks for requests and answers before the next wait.
        self.wake_up.clear()

        done_tasks = [task for task in self._in_flight if task.done()]
        for task in done_tasks:
            response = self._in_flight.pop(task)
            # Raise the error of a failed request.
            task.result()
            request = response.request
            if request.grammar_matcher is not None:
                # The program has matchers of its own; this one only detects dead ends.
                request.grammar_matcher.accept(response.tokens)
            request.resolve(response.to_completion())
        self._deliver_scores()

    def interrupt(self) -> None:
        """See `GenerationEngine.interrupt`."""
        client = self._client
        # Requests that have just arrived are interrupted too, so that each gets a completion.
        self._submit_requests(self._take_arrivals())
        in_flight = self._in_flight
        self._in_flight = {}

        client.interrupt()
        # Read the tokens before cancelling: the responses continue until they are cancelled.
        completions = [
            (response.request, response.to_completion()) for response in in_flight.values()
        ]
        client.cancel(in_flight)
        for request, completion in completions:
            request.resolve(completion)

    def release(self, prompt_id: int, sample_index: int) -> None:
        """Do nothing: the program frees its prefix cache itself."""

    def end_turn(self, message: Any = None) -> Any:
        """See `GenerationEngine.end_turn`."""
        return self._replica.broadcast(message)

    @property
    def _client(self) -> Client:
        """Client of the program, on the replica's first rank."""
        client = self._replica.client
        assert client is not None, "only the first rank of a replica drives the program"
        return client

    def _submit_requests(self, requests: Sequence[EngineRequest]) -> None:
        """Send requests to the program."""
        if requests:
            responses = [Response(request) for request in requests]
            tasks = self._client.start(responses, self.wake_up.set)
            self._in_flight |= dict(zip(tasks, responses, strict=True))

    def _submit_scoring_requests(self) -> None:
        """Send the queued scoring requests to the program; they fail if it has no weights."""
        with self._arrivals_lock:
            queued = self._scoring_requests
            self._scoring_requests = []
        requests = [request for request in queued if not request.future.cancelled()]
        if not requests or self._fail_without_weights(requests):
            return
        tasks = self._client.start_scoring(requests, self.wake_up.set)
        self._scoring_in_flight |= dict(zip(tasks, requests, strict=True))

    def _deliver_scores(self) -> None:
        """Deliver the scores that have arrived."""
        done_tasks = [task for task in self._scoring_in_flight if task.done()]
        for task in done_tasks:
            request = self._scoring_in_flight.pop(task)
            try:
                request.resolve(task.result())
            # Only this request fails. The error of a program that has exited is raised, because the
            # rank must exit.
            except AlignerError as error:
                request.fail(error)

    @abstractmethod
    def _share_pieces(self, pieces: Sequence[WeightPiece]) -> dict[str, Any]:
        """Share this rank's pieces with the workers, until `_free_shared_pieces`.

        Returns:
            Handles with which the workers open the pieces, as JSON.
        """

    @abstractmethod
    def _free_shared_pieces(self) -> None:
        """Free the memory that `_share_pieces` has shared, after the workers loaded the pieces."""

    def begin_update(self, version: int) -> "StreamedUpdate":
        """Open an update; see `GenerationEngine.begin_update`.

        The engine keeps the old weights until the update's first `load`.
        """
        self._check_can_update(version)
        self._incoming_version = version
        return StreamedUpdate(self, version)

    def find_wrong_weights(self, expected: Mapping[str, ExpectedSlice]) -> Sequence[str]:
        """Compare the workers' parameters with the tensors that they have received in the last
        update; see `HeldWeights.find_wrong_weights`."""
        self._verified_version = self._version
        wrong: list[str] = self._replica.run_on_client(
            "comparing weights", lambda client: client.find_wrong_weights()
        )
        return wrong

    def find_changed_weights(self) -> Sequence[str]:
        """See `HeldWeights.find_changed_weights`."""
        if self._version is None or self._version != self._verified_version:
            return ()
        changed: list[str] = self._replica.run_on_client(
            "comparing weights", lambda client: client.find_changed_weights()
        )
        return changed

    def discard_weights(self, reason: str) -> None:
        """See `GenerationEngine.discard_weights`."""
        self._version = None
        self._no_weights_reason = reason

    def restart(self) -> None:
        """See `GenerationEngine.restart`."""
        self._version = None
        self._no_weights_reason = (
            f"{self._replica.name} has exited and starts again; sync weights to the engine"
        )
        self._in_flight.clear()
        self._take_arrivals()
        with self._arrivals_lock:
            scoring_requests = [*self._scoring_in_flight.values(), *self._scoring_requests]
            self._scoring_in_flight.clear()
            self._scoring_requests = []
        self._fail_without_weights(scoring_requests)
        self._is_asleep = False
        self._is_cache_asleep = False
        self._replica.restart_client()

    def sleep(self) -> None:
        """Free the memory of the KV cache and of the weights; see `GenerationEngine.sleep`.

        Raises AlignerError if `engine.sleep` is false.
        """
        if not self._settings.sleep:
            raise AlignerError(
                f"engine.sleep=false: {self._replica.name} can release GPU memory only if it was"
                " started with engine.sleep=true"
            )
        self._check_can_sleep()
        if not self._is_asleep:
            self._replica.run_on_client("releasing GPU memory", self._release_memory)
            self._is_asleep = True
            self._is_cache_asleep = True
        if self._version is not None:
            self._version = None
            self._no_weights_reason = "sleep freed their memory; sync weights to the engine again"

    def wake(self) -> None:
        """Allocate memory for the weights. The next weight sync allocates the KV cache when it
        finishes."""
        if self._is_asleep:
            self._replica.run_on_all_ranks("freeing cached GPU memory", _free_cached_memory)
            self._replica.run_on_client(
                "waking up", lambda client: client.resume_memory(cache=False)
            )
            self._is_asleep = False

    def shutdown(self) -> None:
        """Stop the program's processes. Collective over the replica."""
        self._replica.run_on_client("shutting down", Client.shutdown)

    def _release_memory(self, client: Client) -> None:
        # The program can release memory only if all of it is allocated.
        if self._is_cache_asleep:
            client.resume_memory(cache=True)
        client.release_memory()

    def _begin_overwrite(self, version: int) -> None:
        """Finish or interrupt the responses in flight, before an update loads its first tensors.

        The engine has no version from here on.
        """
        self._version = None
        self._no_weights_reason = f"the weight update to version {version} is in progress"
        interrupt_responses = self._settings.in_flight == "interrupt"
        self._replica.run_on_client(
            "pausing generation",
            lambda client: client.pause_generation(interrupt_responses=interrupt_responses),
        )

    def _finish_overwrite(self, version: int) -> None:
        """Finish an update of which all tensors are loaded, and admit requests again.

        The workers drop the KV cache of the old weights.
        """

        def finish(client: Client) -> None:
            client.update_weights(None)
            if self._is_cache_asleep:
                client.resume_memory(cache=True)
            client.resume_generation(version)

        # The transfer has allocated buckets since `wake` emptied the cache.
        if self._is_cache_asleep:
            self._replica.run_on_all_ranks("freeing cached GPU memory", _free_cached_memory)
        self._replica.run_on_client("finishing the weight update", finish)
        self._is_cache_asleep = False
        self._version = version
        self._verified_version = None


def _free_cached_memory() -> None:
    """Return this process's cached GPU memory to the device, where the workers need it.

    PyTorch's caching allocator holds the memory of the trainer's activations and of an update's
    buckets.
    """
    torch.cuda.empty_cache()


class StreamedUpdate:
    """A `WeightUpdate` that sends one group of tensors after another to the workers.

    Each tensor is passed to the workers as soon as all parts of its stored tensor are written.
    """

    def __init__(self, engine: ExternalEngine, version: int) -> None:
        self._engine = engine
        self._version = version
        self._replica = engine._replica
        self._device = engine._device
        weight_format = engine.weight_format
        self._slices = weight_format.compute_slices(engine._weight_table, engine._rank)
        self._specs = {
            spec.name: spec for spec in engine._weight_table if spec.name in self._slices
        }
        """The tensors of which this rank has a slice, by name: not the layers and experts of other
        ranks."""
        self._missing_tensors = group_by_stored_tensor(self._specs.values())
        """Stored tensors that are not loaded yet, with the tensors that they consist of."""
        self._views: dict[str, Tensor] = {}
        """Tensors that the caller may write, by name."""
        self._written_tensors: dict[str, Tensor] = {}
        """Tensors that wait for the other parts of their stored tensor, by name."""
        self._is_overwriting = False
        """Whether the old weights are overwritten and the update is not committed."""
        self._is_open = True

    def views(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Return this rank's slices, to be written, by name, without those that the model does not
        have.

        They have the engine's precision. With `engine.publish=changes` they are in host memory and
        contain the weights of the last update; otherwise they are on the engine's device.
        """
        self._check_open()
        last_slices = self._engine._last_slices
        publishes_changes = self._engine._settings.publish == "changes"
        dtype = self._engine.weight_format.dtype
        device = torch.device("cpu") if publishes_changes else self._device

        views: dict[str, Tensor] = {}
        for name in names:
            if name not in self._specs:
                continue
            if name in last_slices:
                views[name] = last_slices[name]
            else:
                shape = self._get_slice_shape(name)
                views[name] = torch.empty(shape, dtype=dtype, device=device)

        self._views |= views
        # The caller overwrites only the changed elements of these tensors in the next update.
        if publishes_changes:
            last_slices |= views
        return views

    def load(self, names: Sequence[str]) -> None:
        """Pass written tensors to the workers. Collective over the replica.

        The first call overwrites the old weights. Raises AlignerError on every rank if a tensor is
        loaded twice, or its view was never requested.
        """
        pieces: list[WeightPiece] = []

        def collect() -> bool:
            pieces.extend(self._collect_pieces(names))
            return bool(pieces)

        # The ranks agree before the old weights are overwritten: an error of one rank leaves them
        # usable, and no rank skips a collective that another one enters.
        has_pieces = any(self._replica.run_on_all_ranks("collecting weights", collect))
        if not self._is_overwriting:
            # Before the call: if it fails, the old weights may be overwritten already.
            self._is_overwriting = True
            self._engine._begin_overwrite(self._version)
        if has_pieces:
            self._send_pieces(pieces)

    def commit(self) -> None:
        """Switch the engine to the new weights. Collective over the replica.

        Raises AlignerError, which names the missing tensors, if some were not loaded.
        """
        self._replica.run_on_all_ranks("checking the weight update", self._check_complete)
        try:
            self._engine._finish_overwrite(self._version)
            self._is_overwriting = False
        # If the last step fails, the flag stays set, and `_close` records why there are no weights.
        finally:
            self._close()

    def abort(self) -> None:
        """Discard the update.

        The engine keeps the old weights if nothing was loaded yet; otherwise it has no weights.
        """
        if self._is_open:
            self._close()

    def _get_slice_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of this rank's slice of a tensor."""
        rank_slice = self._slices[name]
        return cut_shape(
            self._specs[name].shape, rank_slice.axis, rank_slice.start, rank_slice.stop
        )

    def _send_pieces(self, pieces: Sequence[WeightPiece]) -> None:
        """Share the pieces of all ranks with the replica's workers, and wait until each worker has
        loaded its pieces."""
        handles_per_rank = self._replica.run_on_all_ranks(
            "sharing weights", lambda: self._engine._share_pieces(pieces)
        )
        handles: dict[str, Any] = {}
        for rank_handles in handles_per_rank:
            handles |= rank_handles

        # The workers have copied the pieces when the call returns, so their memory can be freed.
        try:
            self._replica.run_on_client(
                "loading weights", lambda client: client.update_weights(handles)
            )
        finally:
            self._engine._free_shared_pieces()

    def _collect_pieces(self, names: Sequence[str]) -> Sequence[WeightPiece]:
        """Return the pieces of the stored tensors that are complete now that `names` are written.

        Pieces of incomplete stored tensors wait for the other parts.
        """
        self._check_open()
        if unexpected_names := [name for name in names if name not in self._views]:
            raise AlignerError(
                f"these tensors are already loaded, or their views were never requested:"
                f" {', '.join(unexpected_names)}"
            )
        self._written_tensors |= {name: self._views.pop(name) for name in names}

        complete = {
            stored_name: specs
            for stored_name, specs in self._missing_tensors.items()
            if all(spec.name in self._written_tensors for spec in specs)
        }
        for stored_name in complete:
            del self._missing_tensors[stored_name]

        complete_specs = [spec for specs in complete.values() for spec in specs]
        return [
            WeightPiece(spec, self._slices[spec.name], self._written_tensors.pop(spec.name))
            for spec in complete_specs
        ]

    def _check_complete(self) -> None:
        self._check_open()
        if self._missing_tensors:
            raise AlignerError(
                f"the weight update to version {self._version} lacks {len(self._missing_tensors)}"
                f" tensor(s): {', '.join(self._missing_tensors)}"
            )

    def _close(self) -> None:
        """Close the update, and free its tensors."""
        self._is_open = False
        self._views.clear()
        self._written_tensors.clear()
        self._engine._incoming_version = None
        if self._is_overwriting:
            reason = (
                f"the weight update to version {self._version} failed after it had started to"
                " overwrite the old weights; sync weights to the engine again"
            )
            self._engine._no_weights_reason = reason

    def _check_open(self) -> None:
        if not self._is_open:
            raise AlignerError(f"the weight update to version {self._version} is already closed")
