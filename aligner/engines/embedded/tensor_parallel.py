"""Collectives of the tensor-parallel ranks of a replica."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class TensorParallelRanks:
    """The tensor-parallel ranks of a replica, seen from one of them.

    All ranks must call the methods in the same order. With one rank, they do nothing.

    Attributes:
        size: Number of tensor-parallel ranks (TP).
        rank: Index of this rank.
    """

    def __init__(self, size: int, rank: int, group: ProcessGroup | None) -> None:
        """Create the ranks.

        Args:
            size: Number of tensor-parallel ranks.
            rank: Index of this rank.
            group: Process group of the ranks; unused if there is one rank.
        """
        self.size = size
        self.rank = rank
        self._group = group

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sum the ranks' tensors in place, and return the sum. Collective."""
        if self.size > 1:
            dist.all_reduce(partial, group=self._group)
        return partial

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Broadcast a tensor in place from the first rank, and return it. Collective."""
        if self.size > 1:
            dist.broadcast(tensor, group=self._group, group_src=0)
        return tensor

    def gather(self, shard: Tensor) -> Tensor | None:
        """Concatenate the ranks' tensors along the last dimension. Collective.

        Args:
            shard: This rank's tensor, [..., N / TP].

        Returns:
            The tensor [..., N] on the first rank, None on the other ranks.
        """
        if self.size == 1:
            return shard

        shards = None
        if self.rank == 0:
            shards = [torch.empty_like(shard) for _ in range(self.size)]
        dist.gather(shard, shards, group=self._group, group_dst=0)
        return torch.cat(shards, -1) if shards else None
