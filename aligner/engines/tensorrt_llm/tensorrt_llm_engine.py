"""The TensorRT-LLM engine: its own processes generate on the replica's GPUs, driven by one of the replica's ranks."""

from __future__ import annotations

import dataclasses
import gc
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions, request_problems
from aligner.engines.tensorrt_llm.generation import Replica, ReplicaGeneration
from aligner.engines.tensorrt_llm.llm_client import Client, device_index
from aligner.engines.tensorrt_llm.update import StreamedUpdate, UpdateSteps, ipc_handles
from aligner.errors import AlignerError
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import weight_table
from aligner.resharding.weight_update import WeightFormat
from aligner.schema import EngineConfig, EngineParallelConfig


class TensorRTLLMEngine:
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
        self._settings, self._device = settings, torch.device(device)
        layout = EngineParallelConfig(tensor=1, data=settings.parallel.ranks)
        self._format = WeightFormat(layout, dtype, settings.bucket_mib << 20)
        self._context = min(context or shape.max_positions, shape.max_positions)
        self._shape = dataclasses.replace(shape, max_positions=self._context)
        self._table = weight_table(shape)
        self._replica = Replica(rank % size, size, group)
        self._version: int | None = None
        self._missing = "none were published yet"
        self._update: StreamedUpdate | None = None
        self._incoming = 0
        self._overwrites = self._asleep = self._cache_asleep = False
        self._generation: ReplicaGeneration | None = None
        places = self._replica.gather("looking for its GPU", lambda: _place(self._device, self._replica.rank))
        if len(hosts := sorted({place["host"] for place in places})) > 1:
            raise AlignerError(
                f"engine.parallel.tensor={size}: a replica's ranks must share a machine, got {', '.join(hosts)}"
            )
        self._uuid: str = places[self._replica.rank]["uuid"]

        def start() -> None:
            devices, uuids = [place["index"] for place in places], [place["uuid"] for place in places]
            self._replica.client = Client(directory, shape, settings, seed, self._context, dtype, devices, uuids)

        self._replica.lead("starting TensorRT-LLM", start)

    @property
    def weight_format(self) -> WeightFormat:
        """Whole tensors on every rank, in buckets: the workers have memory of their own."""
        return self._format

    @property
    def version(self) -> int | None:
        """Version of the weights that serve; None before the first update, and while or after one overwrote them."""
        return self._version

    def start(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> ReplicaGeneration:
        """Begin one sample per request. Raises AlignerError, before anything is generated, for what can not be served."""
        self._check_awake("generate")
        self._check_weights()
        if self._under_way:
            raise AlignerError("the engine is generating already: finish or cancel the earlier generation first")
        if any(request.begun is not None for request in requests):
            raise AlignerError(
                "engine.kind=tensorrt_llm: a response cannot go on from tokens that it is given; allowed: embedded"
            )
        if problems := request_problems(requests, options, self._shape):
            raise AlignerError("\n".join(problems))
        self._generation = ReplicaGeneration(self._replica, self._check_weights, requests, options)
        return self._generation

    def begin_update(self, version: int) -> StreamedUpdate:
        """Open an update. The old weights serve until its first `load`."""
        self._check_awake("take new weights")
        if self._update is not None:
            raise AlignerError(
                f"an update to version {version} can not begin: the one to version {self._incoming} is still open"
            )
        self._incoming = version
        steps = UpdateSteps(self._overwrite, self._hand_over, self._finish, self._close)
        self._update = StreamedUpdate(steps, self._replica, self._table, self._format, self._device)
        return self._update

    def sleep(self) -> None:
        """Free the memory of keys and values and of the model; TensorRT-LLM keeps a copy of the model in host memory."""
        if not self._settings.sleep:
            raise AlignerError(
                "engine.sleep=false: TensorRT-LLM gives memory back only if it was started with engine.sleep=true"
            )
        if self._update is not None:
            raise AlignerError(f"the engine can not sleep: the update to version {self._incoming} is open")
        if self._under_way:
            raise AlignerError("the engine can not sleep: responses are under way; finish or cancel them first")
        if not self._asleep:
            self._replica.drive("going to sleep", self._release)
            self._asleep = self._cache_asleep = True
        if self._version is not None:
            self._version = None
            self._missing = "they were dropped when the engine went to sleep; publish them again"

    def wake(self) -> None:
        """Take the model's memory back; that of keys and values follows the weights that are published next."""
        if self._asleep:
            self._replica.drive("waking up", Client.resume_model)
            self._asleep = False

    def shutdown(self) -> None:
        """End TensorRT-LLM's processes. Collective over the replica."""
        self._replica.drive("shutting down", Client.shutdown)

    @property
    def _under_way(self) -> bool:
        return self._generation is not None and not self._generation.done

    def _check_awake(self, what: str) -> None:
        if self._asleep:
            raise AlignerError(f"the engine sleeps and can not {what}: wake it first")

    def _check_weights(self) -> None:
        if self._version is None:
            raise AlignerError(f"the engine has no weights: {self._missing}")

    def _overwrite(self) -> None:
        """Let the responses under way be finished or interrupted; the engine has no version from here on."""
        self._version, self._overwrites = None, True
        self._missing = f"the update to version {self._incoming} is under way"
        interrupts = self._settings.in_flight == "interrupt"
        self._replica.drive("letting responses end", lambda client: client.hold(interrupts=interrupts))

    def _hand_over(self, tensors: Mapping[str, Tensor]) -> None:
        """Give whole tensors to the replica's workers, and wait until every one has loaded its share."""
        handles: dict[str, str] = {}
        for mine in self._replica.gather("sharing weights", lambda: self._handles(tensors)):
            handles |= mine
        self._replica.drive("loading weights", lambda client: client.update_weights(handles))
        if self._device.type == "cuda":
            gc.collect()
            torch.cuda.ipc_collect()

    def _finish(self) -> None:
        """Have the workers finish the update; keys and values of the old weights are forgotten."""
        version = self._incoming

        def finish(client: Client) -> None:
            client.update_weights(None)
            if self._cache_asleep:
                client.resume_cache()
            client.admit(version)

        self._replica.drive("finishing the update", finish)
        self._cache_asleep = self._overwrites = False
        self._version = version

    def _close(self) -> None:
        """The update is over. What it has begun to overwrite is lost unless it was finished."""
        self._update = None
        if self._overwrites:
            self._overwrites = False
            version = self._incoming
            self._missing = f"the update to version {version} failed and had begun to overwrite them; publish again"

    def _handles(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the workers read the memory itself
        return ipc_handles(tensors, self._uuid)

    def _release(self, client: Client) -> None:
        if self._cache_asleep:  # more can not be released beside what is
            client.resume_cache()
        client.release()


def _place(device: torch.device, rank: int) -> dict[str, Any]:
    """Where this rank's GPU is. CPUs, which only a stand-in for TensorRT-LLM has, are counted by rank."""
    index, uuid = rank, f"CPU-{rank}"
    if device.type == "cuda":
        ordinal = torch.cuda.current_device() if device.index is None else device.index
        index = device_index(os.environ, ordinal)
        uuid = f"GPU-{torch.cuda.get_device_properties(ordinal).uuid}"
    return {"host": socket.gethostname(), "index": index, "uuid": uuid}
