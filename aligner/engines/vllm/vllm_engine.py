"""The vLLM engine, which runs vLLM in its own Python environment on the replica's devices."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from aligner.engines.engine_protocol import SamplingOptions, weight_format
from aligner.engines.foreign.foreign_engine import ForeignEngine, Piece
from aligner.engines.foreign.gpu_places import gpu_places
from aligner.engines.vllm.program.weight_memory import (
    DeviceMemory,
    HostMemory,
    Memory,
    Placed,
    SharedPieces,
)
from aligner.engines.vllm.program_client import NAME, VLLMClient
from aligner.models.shape import ModelShape
from aligner.schema import EngineConfig
from aligner.vllm_environment import find_vllm_python


class VLLMEngine(ForeignEngine):
    """Generation engine that runs vLLM.

    Each worker reads the weight slices of the rank with the same index from that rank's memory, and
    loads them through vLLM's own weight loading interface.
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
        device: torch.device | str = "cpu",
        context: int | None = None,
    ) -> None:
        """Start vLLM on the replica's devices, without weights. Collective over the replica.

        Args:
            directory: Directory with the model's config.json.
            shape: Dimensions of the model.
            settings: Section `engine` of the configuration.
            rank: Rank of this process among the engine's TP' x DP' ranks.
            seed: Seed of the random streams.
            group: The TP' ranks of this replica, in order; None if TP' is 1.
            device: Device of this rank.
            context: Maximum length of prompt and response in tokens; None: the model's maximum.

        Raises:
            AlignerError: vLLM did not start, or the replica's GPUs are on several machines; raised
                on every rank.
        """
        engine_format = weight_format(settings, device)
        super().__init__(NAME, shape, settings, engine_format, rank, group, device, context)
        self._shared: SharedPieces | None = None
        """Pieces that the workers load at the moment."""
        rank_gpus = gpu_places(self._replica, self._device) if self._device.type == "cuda" else []
        gpu_names = [gpu["name"] for gpu in rank_gpus]
        self._memory_of: Callable[[int], Memory] = (
            functools.partial(DeviceMemory, self._device) if gpu_names else HostMemory
        )
        """Function that allocates memory of a number of bytes that the workers can open."""

        def start() -> None:
            python = find_vllm_python(settings.vllm)
            self._replica.client = VLLMClient(
                python, directory, self._shape, settings, seed, engine_format.dtype, gpu_names
            )

        self._replica.lead("starting vLLM", start)

    def _refused(self, options: SamplingOptions) -> str | None:
        if options.tells_kept:
            return "returning the sampling support (kept token ids) is not supported"
        if options.routes:
            return "returning the expert routing is not supported"
        return None

    def _share(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        self._shared = SharedPieces([_placed(piece) for piece in pieces], self._memory_of)
        return {str(self._replica.rank): self._shared.handle}

    def _unshare(self) -> None:
        if self._shared is not None:
            self._shared.close()
            self._shared = None


def _placed(piece: Piece) -> Placed:
    """Return the position of a rank's piece in the stored tensor of the checkpoint.

    The piece is a slice of a tensor that may itself be only a part of the stored tensor.
    """
    stored = piece.spec.stored
    axis = piece.slice.axis if stored.axis is None else stored.axis
    return Placed(
        stored.name, list(stored.shape), axis, stored.start + piece.slice.start, piece.tensor
    )
