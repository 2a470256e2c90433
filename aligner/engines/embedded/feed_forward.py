"""Feed-forward network of a layer without experts, and the activation that experts have, too."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.engines.embedded.forward_context import ForwardContext
from aligner.engines.embedded.matmuls import Matmuls
from aligner.models.shape import ModelShape

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


class Activation:
    """Activation function between the two linear layers of a feed-forward network or an expert."""

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self._function = _ACTIVATIONS[shape.activation]

    def apply(self, x: Tensor) -> Tensor:
        """Apply the activation function; with a gated network, multiply the two halves of x."""
        if not self._shape.gated:
            return self._function(x)
        gate, up = x.chunk(2, -1)
        limit = self._shape.gate_limit
        if limit is not None:
            gate = gate.clamp(max=limit)
            up = up.clamp(-limit, limit)
        offset = self._shape.projection_offset
        return self._function(gate).mul_(up + offset if offset else up)


class FeedForward:
    """Computes the feed-forward networks of the layers without experts."""

    def __init__(self, matmuls: Matmuls, activation: Activation) -> None:
        self._matmuls = matmuls
        self._activation = activation

    def apply(self, layer: int, x: Tensor, context: ForwardContext) -> Tensor:
        """Compute a layer's network of x [N, hidden], complete on every rank. Collective."""
        prefix = f"decoder.layers.{layer}.mlp."
        hidden = self._matmuls.linear(x, prefix + "linear_fc1")
        return self._matmuls.row_parallel_linear(
            self._activation.apply(hidden), prefix + "linear_fc2"
        )
