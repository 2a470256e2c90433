"""The TensorRT-LLM engine: its own processes generate on the replica's GPUs, driven by one of the replica's ranks."""

import base64
import dataclasses
import gc
import os
import pickle
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import reduce_tensor

from aligner.data.weight_files import assemble
from aligner.engines.engine_protocol import GenerationEngine, GenerationRequest, SamplingOptions, request_problems
from aligner.engines.tensorrt_llm.generation import Replica, ReplicaGeneration
from aligner.engines.tensorrt_llm.llm_client import Client, device_index
from aligner.errors import AlignerError
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import stored_tensors, weight_table
from aligner.resharding.weight_update import WeightFormat
from aligner.schema import EngineConfig, EngineParallelConfig


class TensorRTLLMEngine(GenerationEngine):
    """A `GenerationEngine` whose replicas are TensorRT-LLM instances of TP' workers each.

    The workers are processes of TensorRT-LLM's own, one on each rank's GPU. A replica's first rank drives them; the others
    lend their GPUs, hand over weights, and return the same samples.

    An update overwrites the weights: from its first `load` on the engine has no version, until a `commit`. TensorRT-LLM
    takes whole tensors on every GPU and cuts its share out of them: `weight_format` says what to publish to.
    """

    def __init__(
        self,
        directory: Path,
        shape: ModelShape,
        settings: EngineConfig,
        rank: int,
        seed: int,
        group: ProcessGroup | None = None,
        *,
        device: torch.device | str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
        context: int | None = None,
    ) -> None:
        """Rank `rank` of the engine's TP' x DP' ranks; the weights are not set yet. Collective over the replica.

        `directory` has the model's config.json; `group` holds the TP' ranks of this replica, in order (None when TP' is 1);
        `context` is the longest sequence, prompt and response (None: as long as the model allows).
        Raises AlignerError on every rank when TensorRT-LLM does not start, or starts on other GPUs than the ranks'.
        """
        size = settings.parallel.tensor
        if size > 1 and group is None:
            raise AlignerError(f"engine.parallel.tensor={size} needs the process group of a replica's ranks, got None")
        self._table = weight_table(shape)
        shape = dataclasses.replace(shape, max_positions=min(context or shape.max_positions, shape.max_positions))
        layout = EngineParallelConfig(tensor=1, data=settings.parallel.ranks)
        super().__init__(shape, settings, WeightFormat(layout, dtype, settings.bucket_mib << 20))
        self._device = torch.device(device)
        self._replica = Replica(rank % size, size, group)
        self._version: int | None = None
        self._cache_asleep = False
        places = self._replica.gather("looking for its GPU", lambda: _place(self._device, self._replica.rank))
        if len(hosts := sorted({place["host"] for place in places})) > 1:
            raise AlignerError(
                f"engine.parallel.tensor={size}: a replica's ranks must share a machine, got {', '.join(hosts)}"
            )
        self._uuid: str = places[self._replica.rank]["uuid"]

        def start() -> None:
            devices, uuids = [place["index"] for place in places], [place["uuid"] for place in places]
            self._replica.client = Client(directory, shape, settings, seed, dtype, devices, uuids)

        self._replica.lead("starting TensorRT-LLM", start)

    @property
    def version(self) -> int | None:
        """Version of the weights that serve; None before the first update, and while or after one overwrote them."""
        return self._version

    def start(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> ReplicaGeneration:
        """Begin one sample per request. Raises AlignerError, before anything is generated, for what can not be served."""
        self._check_may_start()
        if any(request.begun is not None for request in requests):
            raise AlignerError(
                "engine.kind=tensorrt_llm: a response cannot go on from tokens that it is given; allowed: embedded"
            )
        if options.min_p or options.tells_kept:
            wanted = f"min_p={options.min_p:g}" if options.min_p else "to tell among which tokens it drew"
            raise AlignerError(f"engine.kind=tensorrt_llm: asked for {wanted}, which not every release can; allowed: embedded")
        if options.routes:
            raise AlignerError("engine.kind=tensorrt_llm: it does not tell which experts it chose; allowed: embedded")
        if problems := request_problems(requests, options, self._shape):
            raise AlignerError("\n".join(problems))
        self._generation = ReplicaGeneration(self._replica, self._check_weights, requests, options)
        return self._generation

    def begin_update(self, version: int) -> "StreamedUpdate":
        """Open an update. The old weights serve until its first `load`."""
        self._check_may_update(version)
        self._incoming = version
        return StreamedUpdate(self, version)

    def sleep(self) -> None:
        """Free the memory of keys and values and of the model; TensorRT-LLM keeps a copy of the model in host memory."""
        if not self._settings.sleep:
            raise AlignerError(
                "engine.sleep=false: TensorRT-LLM gives memory back only if it was started with engine.sleep=true"
            )
        self._check_may_sleep()
        if not self._asleep:
            self._replica.drive("going to sleep", self._release)
            self._asleep = self._cache_asleep = True
        if self._version is not None:
            self._version = None
            self._why_no_weights = "they were dropped when the engine went to sleep; publish them again"

    def wake(self) -> None:
        """Take the model's memory back; that of keys and values follows the weights that are published next."""
        if self._asleep:
            self._replica.gather("giving memory back", _give_back)
            self._replica.drive("waking up", lambda client: client.resume(cache=False))
            self._asleep = False

    def shutdown(self) -> None:
        """End TensorRT-LLM's processes. Collective over the replica."""
        self._replica.drive("shutting down", Client.shutdown)

    def _release(self, client: Client) -> None:
        if self._cache_asleep:  # more can not be released beside what is
            client.resume(cache=True)
        client.release()

    def _overwrite(self, version: int) -> None:
        """An update begins to load: responses are finished or interrupted, and the engine has no version from here on."""
        self._version, self._why_no_weights = None, f"the update to version {version} is under way"
        interrupts = self._settings.in_flight == "interrupt"
        self._replica.drive("letting responses end", lambda client: client.hold(interrupts=interrupts))

    def _finish(self, version: int) -> None:
        """An update has loaded all: the workers finish it; keys and values of the old weights are forgotten."""

        def finish(client: Client) -> None:
            client.update_weights(None)
            if self._cache_asleep:
                client.resume(cache=True)
            client.admit(version)

        if self._cache_asleep:
            self._replica.gather("giving memory back", _give_back)
        self._replica.drive("finishing the update", finish)
        self._cache_asleep = False
        self._version = version


def _give_back() -> None:
    """Let TensorRT-LLM's processes have what torch keeps of this one's GPU: the trainer's activations, an update's buckets."""
    torch.cuda.empty_cache()


def _place(device: torch.device, rank: int) -> dict[str, Any]:
    """Where this rank's GPU is. CPUs, which only a stand-in for TensorRT-LLM has, are counted by rank."""
    index, uuid = rank, f"CPU-{rank}"
    if device.type == "cuda":
        ordinal = torch.cuda.current_device() if device.index is None else device.index
        index = device_index(os.environ, ordinal)
        uuid = f"GPU-{torch.cuda.get_device_properties(ordinal).uuid}"
    return {"host": socket.gethostname(), "index": index, "uuid": uuid}


class StreamedUpdate:
    """A `WeightUpdate` that holds no more than one group of tensors."""

    def __init__(self, engine: TensorRTLLMEngine, version: int) -> None:
        self._engine, self._version, self._replica, self._device = engine, version, engine._replica, engine._device
        self._specs = {spec.name: spec for spec in engine._table}
        self._missing = stored_tensors(engine._table)
        self._views: dict[str, Tensor] = {}
        self._written: dict[str, Tensor] = {}
        self._overwrites = False
        """Whether the old weights are gone, and the new ones do not serve."""
        self._open = True

    def views(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Whole tensors in the engine's precision, on this rank's device; of those that the model has."""
        self._check_open()
        dtype = self._engine.weight_format.dtype
        views = {
            name: torch.empty(self._specs[name].shape, dtype=dtype, device=self._device)
            for name in names
            if name in self._specs
        }
        self._views |= views
        return views

    def load(self, names: Sequence[str]) -> None:
        """Hand the tensors over. From the first call on the old weights are gone. Collective over the replica."""
        taken: dict[str, Tensor] = {}
        self._replica.gather("taking weights", lambda: taken.update(self._take(names)))
        if not self._overwrites:
            self._overwrites = True
            self._engine._overwrite(self._version)
        if taken:
            self._hand_over(taken)

    def commit(self) -> None:
        """Make the weights the engine's. Collective. Raises AlignerError naming tensors that were not loaded."""
        self._replica.gather("ending the update", self._check_complete)
        try:
            self._engine._finish(self._version)
            self._overwrites = False
        finally:
            self._end()

    def abort(self) -> None:
        """Give the update up: the engine keeps its weights if nothing has been loaded, and else has none."""
        if self._open:
            self._end()

    def _hand_over(self, tensors: Mapping[str, Tensor]) -> None:
        """Give whole tensors to the replica's workers, and wait until every one has loaded its share."""

        def share() -> dict[str, str]:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # the workers read the memory itself
            return ipc_handles(tensors, self._engine._uuid)

        handles: dict[str, str] = {}
        for mine in self._replica.gather("sharing weights", share):
            handles |= mine
        self._replica.drive("loading weights", lambda client: client.update_weights(handles))
        if self._device.type == "cuda":
            gc.collect()
            torch.cuda.ipc_collect()

    def _take(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """The tensors of a file that are whole once these have been written; the rest wait for their other parts."""
        self._check_open()
        if unasked := [name for name in names if name not in self._views]:
            raise AlignerError(f"views of {', '.join(unasked)} were not asked for, or are loaded already")
        self._written |= {name: self._views.pop(name) for name in names}
        complete = {
            stored: specs for stored, specs in self._missing.items() if all(spec.name in self._written for spec in specs)
        }
        parts = [spec for specs in complete.values() for spec in specs]
        tensors = dict(assemble(parts, lambda spec: self._written[spec.name]))
        for spec in parts:
            del self._written[spec.name]
        for stored in complete:
            del self._missing[stored]
        return tensors

    def _check_complete(self) -> None:
        self._check_open()
        if self._missing:
            raise AlignerError(f"the update lacks {len(self._missing)} tensor(s): {', '.join(self._missing)}")

    def _end(self) -> None:
        self._open = False
        self._views.clear()
        self._written.clear()
        self._engine._incoming = None
        if self._overwrites:
            why = f"the update to version {self._version} failed and had begun to overwrite them; publish again"
            self._engine._why_no_weights = why

    def _check_open(self) -> None:
        if not self._open:
            raise AlignerError("this update is over; begin another one")


def ipc_handles(tensors: Mapping[str, Tensor], device_uuid: str) -> dict[str, str]:
    """Handles by which the worker on the GPU `device_uuid` opens these tensors: {uuid: base64 of a pickled list}.

    The list's entries are (name, (function, arguments)); function(*arguments) gives the tensor. A CUDA tensor is not
    copied: the receiver opens its memory, so the tensors have to live, unchanged, until it has answered; after that
    `torch.cuda.ipc_collect()` frees what it gave back. CPU tensors travel by value.
    Raises AlignerError naming the tensors and their devices when they lie on several.
    """
    devices = sorted({str(tensor.device) for tensor in tensors.values()})
    if len(devices) > 1:
        where = ", ".join(f"{name} ({tensor.device})" for name, tensor in tensors.items())
        raise AlignerError(f"tensors for GPU {device_uuid} lie on several devices, one is allowed: {where}")
    entries = [(name, reduce_tensor(tensor.detach())) for name, tensor in tensors.items()]
    return {device_uuid: base64.b64encode(pickle.dumps(entries)).decode()}
