"""A role's ranks: where this one stands in the layout, and the few collectives that the role needs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.config.schema import Parallel
from aligner.config.weights import Coordinates, coordinates
from aligner.errors import AlignerError


@dataclass(frozen=True)
class World:
    """One rank's view of its role's process world."""

    rank: int
    size: int
    layout: Parallel
    place: Coordinates
    device: torch.device

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.place.pipeline == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the head."""
        return self.place.pipeline == self.layout.pipeline - 1

    @property
    def speaks_for_outputs(self) -> bool:
        """Whether this rank is the one that contributes its data rank's model outputs: last stage, first tensor rank."""
        return self.is_last_stage and self.place.tensor == 0

    @property
    def output_rank(self) -> int:
        """The lowest global rank that speaks for outputs."""
        return self.layout.tensor * self.layout.data * (self.layout.pipeline - 1)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add a tensor up over all ranks, in place; adding zeros is exact, so this also assembles disjoint parts."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        """Element-wise maximum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier()


def initialize(layout: Parallel, seed: int, timeout_s: float) -> World:
    """Join the role's world from RANK, WORLD_SIZE and MASTER_* and set up megatron-core's groups for the layout.

    Raises AlignerError when the environment's world size is not the layout's.
    """
    from megatron.core import parallel_state, tensor_parallel

    from aligner.megatron import cpu_backend

    cpu_backend.install()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size != layout.ranks:
        raise AlignerError(f"the role's layout needs {layout.ranks} ranks, but WORLD_SIZE is {size}")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    rank = dist.get_rank()
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        distributed_timeout_minutes=max(1, int(timeout_s / 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return World(rank, size, layout, coordinates(rank, layout), device)


def shutdown() -> None:
    """Leave the world."""
    if dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
