"""The TensorRT-LLM engine: its own processes generate on the replica's GPUs, driven by one of the
replica's ranks."""

import base64
import gc
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import reduce_tensor

from aligner.data.model_directory import assemble_stored_tensors
from aligner.engines.engine_protocol import SamplingOptions
from aligner.engines.foreign.foreign_engine import ForeignEngine, Piece
from aligner.engines.foreign.gpu_places import gpu_places
from aligner.engines.tensorrt_llm.llm_client import NAME, TensorRTLLMClient, gpu_index
from aligner.errors import AlignerError
from aligner.models.shape import ModelShape
from aligner.resharding.weight_update import WeightFormat
from aligner.schema import EngineConfig, EngineParallelConfig


class TensorRTLLMEngine(ForeignEngine):
    """TensorRT-LLM's workers, one on each rank's GPU; when they sleep it keeps a copy of the model
    in host memory."""

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
        """Rank `rank` of the engine's TP' x DP' ranks; the weights are not set yet. Collective over
        the replica.

        `directory` has the model's config.json; `group` holds the TP' ranks of this replica, in
        order (None when TP' is 1); `context` is the longest sequence, prompt and response (None: as
        long as the model allows). Raises AlignerError on every rank when TensorRT-LLM does not
        start, or starts on other GPUs than the ranks'.
        """
        layout = EngineParallelConfig(tensor=1, data=settings.parallel.ranks)
        weight_format = WeightFormat(layout, dtype, settings.bucket_mib << 20)
        super().__init__(NAME, shape, settings, weight_format, rank, group, device, context)
        self._shared: dict[str, Tensor] = {}
        """What the workers look into."""
        places = gpu_places(self._replica, self._device)
        self._uuid: str = places[self._replica.rank]["uuid"]

        def start() -> None:
            devices, uuids = (
                [gpu_index(place["name"]) for place in places],
                [place["uuid"] for place in places],
            )
            self._replica.client = TensorRTLLMClient(
                directory, self._shape, settings, seed, dtype, devices, uuids
            )

        self._replica.lead("starting TensorRT-LLM", start)

    def _refused(self, options: SamplingOptions) -> str | None:
        if options.min_p or options.tells_kept:
            requested = (
                f"min_p={options.min_p:g}"
                if options.min_p
                else "returning the sampling support (kept token ids)"
            )
            return f"{requested} is supported by only some releases"
        if options.routes:
            return "returning the expert routing is not supported"
        return None

    def _share(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        parts = {piece.spec.name: piece.tensor for piece in pieces}
        self._shared = dict(
            assemble_stored_tensors([piece.spec for piece in pieces], lambda spec: parts[spec.name])
        )
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the workers read the memory itself
        return ipc_handles(self._shared, self._uuid)

    def _unshare(self) -> None:
        self._shared = {}
        if self._device.type == "cuda":
            gc.collect()
            torch.cuda.ipc_collect()


def ipc_handles(tensors: Mapping[str, Tensor], device_uuid: str) -> dict[str, str]:
    """Handles by which the worker on the GPU `device_uuid` opens these tensors: {uuid: base64 of a
    pickled list}.

    The list's entries are (name, (function, arguments)); function(*arguments) gives the tensor. A
    CUDA tensor is not copied: the receiver opens its memory, so the tensors have to live,
    unchanged, until it has answered; after that `torch.cuda.ipc_collect()` frees what it gave back.
    CPU tensors travel by value. Raises AlignerError naming the tensors and their devices when they
    lie on several.
    """
    devices = sorted({str(tensor.device) for tensor in tensors.values()})
    if len(devices) > 1:
        where = ", ".join(f"{name} ({tensor.device})" for name, tensor in tensors.items())
        raise AlignerError(
            f"tensors for GPU {device_uuid} are on several devices, must be on one: {where}"
        )
    entries = [(name, reduce_tensor(tensor.detach())) for name, tensor in tensors.items()]
    return {device_uuid: base64.b64encode(pickle.dumps(entries)).decode()}
