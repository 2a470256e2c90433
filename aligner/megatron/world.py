"""A role's ranks: where this one stands in the layout, and the few collectives that the role
needs."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.errors import AlignerError
from aligner.models.weight_slices import Coordinates, coordinates
from aligner.resharding.verify import world_store
from aligner.schema import ParallelConfig


@dataclass(frozen=True)
class World:
    """One rank's view of its role's process world."""

    rank: int
    size: int
    layout: ParallelConfig
    place: Coordinates
    device: torch.device
    seed: int

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the head."""
        return self.place.pipeline == self.layout.pipeline - 1

    @property
    def speaks_for_outputs(self) -> bool:
        """Whether it contributes its data rank's model outputs: the first of the last stage's
        ranks, which hold the same."""
        return self.is_last_stage and self.place.tensor == 0 and self.place.context == 0

    @property
    def output_rank(self) -> int:
        """The lowest global rank that speaks for outputs."""
        return self.layout.ranks // self.layout.pipeline * (self.layout.pipeline - 1)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add a tensor up over all ranks, in place; adding zeros is exact, so this also assembles
        disjoint parts."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        """Element-wise maximum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor


def initialize_alone(seed: int) -> World:
    """The world of this one process, which no launcher has started."""
    if not dist.is_initialized():
        _meet(0, 1, timedelta(minutes=1))
    return initialize(ParallelConfig(), seed, timeout_s=60)


def _meet(rank: int, size: int, timeout: timedelta) -> None:
    store = world_store(rank, size, timeout)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def compute_deterministically() -> None:
    """Have torch, cuBLAS, transformer-engine and NCCL take what sums in one order, for good; to be
    called before their first.

    On a CPU all do so anyway. An algorithm of NCCL that the environment names stays. An operation
    without such a kernel then raises RuntimeError.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    torch.use_deterministic_algorithms(True)
    # Nothing here reads what it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def join(ranks: int, timeout_s: float) -> torch.device:
    """Join the role's world from RANK, WORLD_SIZE and MASTER_*; returns this rank's device.

    Raises AlignerError when the environment's world size is not `ranks`.
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
        _meet(int(os.environ.get("RANK", "0")), size, timedelta(seconds=timeout_s))
    return device


def initialize(layout: ParallelConfig, seed: int, timeout_s: float) -> World:
    """Join the role's world from RANK, WORLD_SIZE and MASTER_* and set up megatron-core's groups
    for the layout.

    Raises AlignerError when the environment's world size is not the layout's.
    """
    from megatron.core import parallel_state, tensor_parallel

    from aligner.megatron import cpu_backend

    cpu_backend.install()
    device = join(layout.ranks, timeout_s)
    rank = dist.get_rank()
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
        distributed_timeout_minutes=timeout_s / 60,  # a timedelta takes fractions
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return World(rank, layout.ranks, layout, coordinates(rank, layout), device, seed)


def shutdown() -> None:
    """Leave the world, and the threads of its process groups with it once no model is left that
    refers to them."""
    if dist.is_initialized():
        from megatron.core import parallel_state
        from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

        parallel_state.destroy_model_parallel()
        # megatron-core forgets these two, and its cache of rotary embeddings remembers the models'
        # groups.
        parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None
        parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO = None
        RotaryEmbedding.forward.cache_clear()
        dist.destroy_process_group()
