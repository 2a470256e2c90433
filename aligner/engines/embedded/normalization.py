"""Norms of the decoder's layers."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.engines.embedded.tensor_parallel import TensorParallelRanks
from aligner.models.shape import ModelShape


class Norms:
    """RMSNorm or LayerNorm, with the decoder's weights."""

    def __init__(
        self, shape: ModelShape, weights: Mapping[str, Tensor], ranks: TensorParallelRanks
    ) -> None:
        """Create the norms of a model.

        Args:
            shape: Dimensions of the model.
            weights: The decoder's current weights, by their names.
            ranks: Tensor-parallel ranks of the replica.
        """
        self._shape = shape
        self._weights = weights
        self._ranks = ranks

    def normalize(self, x: Tensor, name: str, epsilon: float | None = None) -> Tensor:
        """Normalize x over its last dimension.

        Args:
            x: Values of any shape.
            name: Name of the norm's weights.
            epsilon: Epsilon of the norm; None for the model's.
        """
        weight = self._weights[name + ".weight"]
        epsilon = self._shape.norm_epsilon if epsilon is None else epsilon
        if self._shape.zero_centered_norms:
            weight = weight + 1
        if self._shape.normalization == "rms":
            return F.rms_norm(x, weight.shape, weight, epsilon)
        return F.layer_norm(x, weight.shape, weight, self._weights[name + ".bias"], epsilon)

    def normalize_projection(self, x: Tensor, name: str) -> Tensor:
        """Normalize queries or keys [N, heads, head dim] over the heads of all ranks together.

        Collective.
        """
        flat = x.flatten(1).float()
        # With more ranks than KV heads, `total` and `size` both count each copy of a key.
        total = self._ranks.all_reduce(flat.square().sum(-1, keepdim=True))
        size = flat.shape[1] * self._ranks.size
        normed = flat * torch.rsqrt(total / size + self._shape.norm_epsilon)
        return (normed * self._weights[name + ".weight"]).to(x.dtype).view(x.shape)
