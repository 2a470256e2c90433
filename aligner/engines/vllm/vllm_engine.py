"""The vLLM engine: vLLM, in an environment of its own, generates on the replica's devices."""

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
    """vLLM's workers; each takes the slices of the rank in its place, from that rank's memory, by
    vLLM's own interface."""

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
        """Rank `rank` of the engine's TP' x DP' ranks; the weights are not set yet. Collective over
        the replica.

        `directory` has the model's config.json; `group` holds the TP' ranks of this replica, in
        order (None when TP' is 1); `context` is the longest sequence, prompt and response (None: as
        long as the model allows). Raises AlignerError on every rank when vLLM does not start, or
        the replica's GPUs are on several machines.
        """
        takes = weight_format(settings, device)
        super().__init__(NAME, shape, settings, takes, rank, group, device, context)
        self._shared: SharedPieces | None = None
        places = gpu_places(self._replica, self._device) if self._device.type == "cuda" else []
        gpus = [place["name"] for place in places]
        self._memory_of: Callable[[int], Memory] = (
            functools.partial(DeviceMemory, self._device) if gpus else HostMemory
        )

        def start() -> None:
            python = find_vllm_python(settings.vllm)
            self._replica.client = VLLMClient(
                python, directory, self._shape, settings, seed, takes.dtype, gpus
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
    """Where a rank's piece lies in the tensor of a checkpoint, of which it may be a part's
    slice."""
    stored = piece.spec.stored
    axis = piece.slice.axis if stored.axis is None else stored.axis
    return Placed(
        stored.name, list(stored.shape), axis, stored.start + piece.slice.start, piece.tensor
    )
