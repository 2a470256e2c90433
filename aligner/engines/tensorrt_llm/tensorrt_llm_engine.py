"""The TensorRT-LLM engine, whose worker processes run on the replica's GPUs and are controlled by
the replica's first rank."""

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
from aligner.engines.engine_protocol import SamplingOptions, ScoringRequest
from aligner.engines.external.external_engine import ExternalEngine, WeightPiece
from aligner.engines.external.gpu_identity import gather_gpus
from aligner.engines.tensorrt_llm.llm_client import NAME, TensorRTLLMClient, parse_gpu_index
from aligner.errors import AlignerError, UnsupportedError
from aligner.models.shape import ModelShape
from aligner.resharding.weight_update import WeightFormat
from aligner.schema import EngineConfig, EngineParallelConfig


class TensorRTLLMEngine(ExternalEngine):
    """Generation engine that runs TensorRT-LLM, with one worker on the GPU of each rank.

    While the workers sleep, TensorRT-LLM stores the contents of their memory in host memory, except
    the KV cache and, since release 1.3, the weights.
    """

    can_score = False

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
        max_sequence_length: int | None = None,
    ) -> None:
        """Start TensorRT-LLM on the replica's GPUs, without weights. Collective over the replica.

        Args:
            directory: Directory with the model's config.json.
            shape: Dimensions of the model.
            settings: Section `engine` of the configuration.
            rank: Rank of this process among the engine's TP' x DP' ranks.
            seed: Seed of the random streams.
            group: The TP' ranks of this replica, in order; None if TP' is 1.
            device: Device of this rank.
            dtype: Data type of the weights.
            max_sequence_length: Maximum length of prompt and response in tokens; None: the model's
                maximum.

        Raises:
            AlignerError: TensorRT-LLM did not start, or started on other GPUs than those of the
                ranks; raised on every rank.
        """
        # Each worker loads whole tensors and cuts its own slices, so every rank gets all of them:
        # for the weight transfer, every rank is a replica of its own.
        layout = EngineParallelConfig(tensor=1, data=settings.parallel.ranks)
        weight_format = WeightFormat(layout, dtype, settings.bucket_mib << 20)
        super().__init__(
            NAME,
            directory,
            shape,
            settings,
            weight_format,
            rank,
            group,
            device,
            max_sequence_length,
        )
        self._shared_tensors: dict[str, Tensor] = {}
        """Stored tensors that the workers read at the moment, by name."""
        gpus = gather_gpus(self._replica, self._device)
        self._uuid: str = gpus[self._replica.rank]["uuid"]

        def create_client() -> TensorRTLLMClient:
            devices = [parse_gpu_index(gpu["name"]) for gpu in gpus]
            uuids = [gpu["uuid"] for gpu in gpus]
            return TensorRTLLMClient(directory, self._shape, settings, seed, dtype, devices, uuids)

        self._replica.start_client(create_client)

    def _find_unsupported(self, sampling: SamplingOptions) -> str | None:
        # TensorRT-LLM's own guided decoding allows only the model's end token at the end of a text,
        # and its log-probs are not restricted to the allowed tokens.
        if sampling.grammar is not None:
            return f"{NAME}: guided decoding is not supported; set engine.kind=embedded or vllm"

        problem = None
        if sampling.min_p:
            problem = f"min_p={sampling.min_p:g} is supported by only some releases"
        elif sampling.returns_support:
            problem = (
                "returning the sampling support (kept token ids) is supported by only some releases"
            )
        elif sampling.routes:
            problem = "returning the expert routing is not supported"
        return None if problem is None else f"{NAME}: {problem}; set engine.kind=embedded"

    def _check_scoring(self, request: ScoringRequest) -> None:
        raise UnsupportedError(
            f"{NAME}: computing the log-probs of given tokens is not supported; set"
            " engine.kind=embedded or vllm"
        )

    def _share_pieces(self, pieces: Sequence[WeightPiece]) -> dict[str, Any]:
        tensors_by_name = {piece.spec.name: piece.tensor for piece in pieces}
        specs = [piece.spec for piece in pieces]
        stored_tensors = assemble_stored_tensors(specs, lambda spec: tensors_by_name[spec.name])
        self._shared_tensors = dict(stored_tensors)
        if self._device.type == "cuda":
            # The workers read the same memory on streams of their own, so the values must be final.
            torch.cuda.synchronize(self._device)
        return build_ipc_handles(self._shared_tensors, self._uuid)

    def _free_shared_pieces(self) -> None:
        self._shared_tensors = {}
        if self._device.type == "cuda":
            # A reference cycle would keep tensors alive until some later collection, and with them
            # a bucket of GPU memory.
            gc.collect()
            torch.cuda.ipc_collect()


def build_ipc_handles(tensors: Mapping[str, Tensor], device_uuid: str) -> dict[str, str]:
    """Return handles with which the worker on a GPU opens tensors.

    A CUDA tensor is not copied: the worker opens its memory by CUDA IPC. The tensors must therefore
    stay allocated and unchanged until the worker has answered. Afterwards,
    `torch.cuda.ipc_collect()` frees the memory that the worker has closed. Workers refuse the
    handles of CPU tensors.

    Args:
        tensors: Tensors by name, all on one GPU.
        device_uuid: UUID of the worker's GPU.

    Returns:
        {`device_uuid`: base64 of a pickled list}. The list has an entry (name, (function,
        arguments)) per tensor; `function(*arguments)` returns the tensor.

    Raises:
        AlignerError: The tensors are on several devices; the message names them.
    """
    devices = sorted({str(tensor.device) for tensor in tensors.values()})
    if len(devices) > 1:
        tensor_devices = ", ".join(f"{name} ({tensor.device})" for name, tensor in tensors.items())
        raise AlignerError(
            f"tensors for GPU {device_uuid} are on several devices, must be on one:"
            f" {tensor_devices}"
        )

    entries = [(name, reduce_tensor(tensor.detach())) for name, tensor in tensors.items()]
    return {device_uuid: base64.b64encode(pickle.dumps(entries)).decode()}
