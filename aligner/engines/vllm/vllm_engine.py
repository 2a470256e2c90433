"""The vLLM engine, which runs vLLM in its own Python environment on the replica's devices."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup

from aligner.engines.engine_protocol import (
    SamplingOptions,
    ScoringRequest,
    compute_weight_format,
)
from aligner.engines.external.external_engine import ExternalEngine, WeightPiece
from aligner.engines.external.gpu_identity import gather_gpus
from aligner.engines.vllm.program.weight_memory import (
    DeviceMemory,
    HostMemory,
    Memory,
    SharedSlices,
    TensorSlice,
)
from aligner.engines.vllm.program_client import NAME, HeadlessWorkers, VLLMClient
from aligner.engines.vllm.replica_nodes import find_node
from aligner.errors import AlignerError
from aligner.models.shape import ModelShape
from aligner.schema import EngineConfig
from aligner.vllm_environment import find_vllm_python

_MIN_TEMPERATURE = 0.01
"""Minimum temperature; vLLM raises lower ones to this value."""


class VLLMEngine(ExternalEngine):
    """Generation engine that runs vLLM.

    Each worker reads the weight slices of the rank with the same index from that rank's memory, and
    loads them through vLLM's own weight loading interface. The workers are numbered like the ranks:
    tensor parallelism varies fastest, then the pipeline stage.
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
        max_sequence_length: int | None = None,
    ) -> None:
        """Start vLLM on the replica's devices, without weights. Collective over the replica.

        Args:
            directory: Directory with the model's config.json.
            shape: Dimensions of the model.
            settings: Section `engine` of the configuration.
            rank: Rank of this process among the engine's TP' x PP' x DP' ranks.
            seed: Seed of the random streams.
            group: The TP' x PP' ranks of this replica, in order; None if there is only one.
            device: Device of this rank.
            max_sequence_length: Maximum length of prompt and response in tokens; None: the model's
                maximum.

        Raises:
            AlignerError: vLLM did not start, or the replica's ranks are distributed unevenly over
                its nodes; raised on every rank.
        """
        engine_format = compute_weight_format(settings, device, shape.family)
        super().__init__(
            NAME,
            directory,
            shape,
            settings,
            engine_format,
            rank,
            group,
            device,
            max_sequence_length,
        )
        self._shared_slices: SharedSlices | None = None
        """Slices that the workers load at the moment."""
        self._allocate_memory: Callable[[int], Memory] = HostMemory
        """Function that allocates memory of a number of bytes that the workers can open."""

        self._headless_workers: HeadlessWorkers | None = None
        """vLLM's workers on this node, on the first rank of each node except the replica's first
        one."""

        node = find_node(self._replica)
        gpu_names: list[str] = []
        if self._device.type == "cuda":
            gpus = gather_gpus(self._replica, self._device, allows_several_machines=True)
            gpu_names = [gpus[index]["name"] for index in node.ranks]
            self._allocate_memory = functools.partial(DeviceMemory, self._device)
        elif node.count > 1 and len(node.ranks) > 1:
            raise AlignerError(
                f"engine.parallel: a replica of vLLM 0.32 on the CPUs of {node.count} nodes must"
                f" have one rank on each node, got {len(node.ranks)}"
            )

        def create_client() -> VLLMClient:
            python = find_vllm_python(settings.vllm)
            dtype = engine_format.dtype
            return VLLMClient(
                python, directory, self._shape, settings, seed, dtype, gpu_names, node
            )

        def start_headless_workers() -> None:
            if self._replica.rank == node.ranks.start:
                python = find_vllm_python(settings.vllm)
                dtype = engine_format.dtype
                self._headless_workers = HeadlessWorkers(
                    python, directory, self._shape, settings, seed, dtype, gpu_names, node
                )

        self._has_one_node = node.count == 1
        if self._has_one_node:
            self._replica.start_client(create_client)
            return
        try:
            # The workers of all nodes wait for each other.
            self._replica.start_client(create_client, start_headless_workers)
        except AlignerError:
            self._stop_headless_workers()
            if self._replica.client is not None:
                self._replica.client.shutdown()
            raise

    @property
    def can_restart(self) -> bool:
        """See `GenerationEngine.can_restart`.

        If the replica has several nodes, the ranks end together with vLLM's processes.
        """
        return self._has_one_node

    def shutdown(self) -> None:
        """Stop the program's processes on all nodes. Collective over the replica."""
        if self._headless_workers is not None:
            self._headless_workers.expect_exit()
        super().shutdown()
        self._stop_headless_workers()

    def _stop_headless_workers(self) -> None:
        if self._headless_workers is not None:
            self._headless_workers.shutdown()
            self._headless_workers = None

    def _find_unsupported(self, sampling: SamplingOptions) -> str | None:
        problem = None
        if sampling.returns_support:
            problem = "returning the sampling support (kept token ids) is not supported"
        elif sampling.routes:
            problem = "returning the expert routing is not supported"
        elif sampling.temperature < _MIN_TEMPERATURE:
            problem = (
                f"temperature={sampling.temperature:g} is not supported, must be at least"
                f" {_MIN_TEMPERATURE:g}"
            )
        if problem is not None:
            return f"{NAME}: {problem}; set engine.kind=embedded"

        if sampling.grammar is None:
            return None
        return cast("VLLMClient", self._client).find_grammar_problem()

    def _check_scoring(self, request: ScoringRequest) -> None:
        super()._check_scoring(request)
        # vLLM generates at least one token, which needs a position of its own.
        if len(request.tokens) == self._shape.max_positions:
            raise AlignerError(
                f"{NAME}: scores at most {self._shape.max_positions - 1} tokens, got"
                f" {len(request.tokens)}; it generates one token after them"
            )

    def _share_pieces(self, pieces: Sequence[WeightPiece]) -> dict[str, Any]:
        # A pipeline stage or an expert-parallel rank may have no weight of this group.
        if not pieces:
            return {}
        slices = [_build_tensor_slice(piece) for piece in pieces]
        self._shared_slices = SharedSlices(slices, self._allocate_memory)
        # JSON keys are strings.
        return {str(self._replica.rank): self._shared_slices.handle}

    def _free_shared_pieces(self) -> None:
        if self._shared_slices is not None:
            self._shared_slices.close()
            self._shared_slices = None


def _build_tensor_slice(piece: WeightPiece) -> TensorSlice:
    """Return a rank's piece with its position in the stored tensor of the checkpoint.

    The piece is a slice of a tensor that may itself be only a part of the stored tensor. If the
    stored tensor stacks the experts of a layer, the slice refers to the tensor of one expert, whose
    name contains the expert's index: `mlp.experts.3.down_proj` instead of `mlp.experts.down_proj`.
    vLLM 0.32 loads such tensors through weight loaders, on which a weight update depends, but
    copies stacked ones without them.
    """
    stored = piece.spec.stored_range
    index = stored.locate(piece.spec.shape, piece.slice)
    name = stored.name
    shape = stored.shape
    if stored.expert is not None:
        module, _, parameter = name.rpartition(".")
        name = f"{module}.{stored.expert}.{parameter}"
        shape = shape[1:]
        index = index[1:]
    ranges = [each for each in index if isinstance(each, slice)]
    return TensorSlice(name, shape, ranges, piece.tensor)
