"""The ranks of a role: process groups, coordinates in the parallel layout, and collectives."""

import logging
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.errors import AlignerError
from aligner.gpu_libraries import describe_broken_library
from aligner.megatron import BROKEN_LIBRARIES
from aligner.models.weight_slices import Coordinates, compute_coordinates
from aligner.resharding.verify import world_store
from aligner.schema import ParallelConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class World:
    """One rank's view of its role's world, with the collectives over all ranks of the role."""

    rank: int
    """Global rank within the role."""
    size: int
    """Number of ranks of the role."""
    layout: ParallelConfig
    coordinates: Coordinates
    """Ranks of this process in the tensor, context, data, pipeline and expert dimensions."""
    device: torch.device
    seed: int

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank belongs to the last pipeline stage, which holds the head."""
        return self.coordinates.pipeline == self.layout.pipeline - 1

    @property
    def is_output_rank(self) -> bool:
        """Whether this rank contributes the model outputs of its data rank.

        All tensor and context ranks of the last stage have the same outputs; the first of these
        ranks contributes them.
        """
        return self.is_last_stage and self.coordinates.tensor == 0 and self.coordinates.context == 0

    @property
    def first_output_rank(self) -> int:
        """The lowest global rank that contributes model outputs."""
        return self.layout.ranks // self.layout.pipeline * (self.layout.pipeline - 1)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor of any shape over all ranks, in place, and return it.

        Adding zeros is exact, so the sum also assembles disjoint parts of a tensor.
        """
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Take the element-wise maximum of a tensor over all ranks, in place, and return it."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor


def initialize_single_process(seed: int) -> World:
    """Return a world that consists of this process only, without environment variables."""
    if not dist.is_initialized():
        _init_process_group(0, 1, timedelta(minutes=1))
    return initialize(ParallelConfig(), seed, timeout_s=60)


def _init_process_group(rank: int, size: int, timeout: timedelta) -> None:
    # torch's own store would listen on every interface.
    store = world_store(rank, size, timeout)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def enable_deterministic_kernels() -> None:
    """Make torch, cuBLAS, transformer-engine and NCCL use deterministic reductions from now on.

    Call this before the first use of any of these libraries. On a CPU all reductions are
    deterministic anyway. An NCCL algorithm that the environment sets is kept. Afterwards, an
    operation without a deterministic kernel raises RuntimeError.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    torch.use_deterministic_algorithms(True)
    # Filling uninitialized memory costs time, and no code here reads memory that it has not
    # written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def join(ranks: int, timeout_s: float) -> torch.device:
    """Join the role's world and return this rank's device.

    RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* in the environment describe the world. Collective.

    Args:
        ranks: Number of ranks of the role's layout.
        timeout_s: Timeout of collectives, in seconds.

    Raises:
        AlignerError: If WORLD_SIZE is not `ranks`.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size != ranks:
        raise AlignerError(
            f"WORLD_SIZE={size}: must be {ranks}, the number of ranks in the role's parallel layout"
        )
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        _init_process_group(int(os.environ.get("RANK", "0")), size, timedelta(seconds=timeout_s))
    return device


def initialize(layout: ParallelConfig, seed: int, timeout_s: float) -> World:
    """Join the role's world and create megatron-core's model-parallel groups for the layout.

    RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* in the environment describe the world. Collective.

    Args:
        layout: Parallel sizes of the role.
        seed: Seed of the run.
        timeout_s: Timeout of collectives, in seconds.

    Raises:
        AlignerError: If WORLD_SIZE is not the number of ranks of the layout.
    """
    from megatron.core import parallel_state, tensor_parallel

    from aligner.megatron import cpu_backend

    cpu_backend.install()
    device = join(layout.ranks, timeout_s)
    rank = dist.get_rank()
    if rank == 0:
        for library, reason in BROKEN_LIBRARIES.items():
            _log.warning(
                "%s; the run does not use it on CPUs", describe_broken_library(library, reason)
            )
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=(
            layout.virtual_pipeline if layout.virtual_pipeline > 1 else None
        ),
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor_size,
        # megatron-core passes this to timedelta, which accepts fractions.
        distributed_timeout_minutes=timeout_s / 60,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return World(rank, layout.ranks, layout, compute_coordinates(rank, layout), device, seed)


def shutdown() -> None:
    """Destroy the role's process groups.

    Their threads end once no model that refers to the groups exists any more.
    """
    if dist.is_initialized():
        from megatron.core import parallel_state
        from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

        parallel_state.destroy_model_parallel()
        # megatron-core does not reset these two groups, and its cache of rotary embeddings keeps
        # references to the models' groups.
        parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None
        parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO = None
        RotaryEmbedding.forward.cache_clear()
        dist.destroy_process_group()
