"""Norms of a model's layers, with sequence parallelism, which megatron-core's own norms lack.

transformer-engine's layers have norms of their own.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from aligner.megatron.sharded_parameters import mark_for_sequence_parallelism, shard_first_dim
from aligner.models.shape import ModelShape


def choose_norm(shape: ModelShape) -> type[nn.Module]:
    """Return the class of a model's norms."""
    if shape.normalization == "layer":
        return LayerNorm
    return ZeroCenteredRMSNorm if shape.zero_centered_norms else RMSNorm


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm with sequence parallelism, which megatron-core's fallback lacks."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps)
        _mark_parameters(self, config)

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x [..., H], in its shape and dtype."""
        return super().forward(x) if x.is_cuda else _RmsNorm.apply(x, self.weight, self.eps)


class _RmsNorm(Function):
    """Root-mean-square norm for CPUs, which saves only its input and its weight.

    On a CPU, torch computes the norm by single operators, each of which allocates and saves a
    tensor of its own.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return the norm of x [..., H], in its shape and dtype."""
        context.save_for_backward(x, weight)
        context.epsilon = epsilon
        return F.rms_norm(x, weight.shape, weight, epsilon)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of x and the weight.

        With y = w x r and r = (mean(x^2) + epsilon)^-1/2, and g the gradient of y, they are
        w g r - x r^3 mean(w g x), and the sum of g x r over all rows.

        Args:
            context: Autograd context of the forward pass.
            gradient: Gradient g of the output, [..., H].
        """
        x, weight = context.saved_tensors
        size = weight.numel()
        rows = x.reshape(-1, size).float()
        upstream = gradient.reshape(-1, size).float()
        scale = weight.float()
        # r = (mean(x^2) + epsilon)^-1/2
        inverse = (
            torch.linalg.vector_norm(rows, dim=-1)
            .square_()
            .div_(size)
            .add_(context.epsilon)
            .rsqrt_()
        )
        product = upstream * rows
        along = (product @ scale).mul_(inverse**3).div_(-size)  # -r^3 mean(w g x)
        for_x = (upstream * scale).mul_(inverse[:, None]).addcmul_(rows, along[:, None])
        return for_x.view(x.shape).to(x.dtype), (inverse @ product).to(weight.dtype), None


class LayerNorm(nn.LayerNorm):
    """Layer norm with a bias and sequence parallelism, which megatron-core's fallback lacks."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps)
        _mark_parameters(self, config)


class ZeroCenteredRMSNorm(RMSNorm):
    """Root-mean-square norm that multiplies by 1 + weight, as in Gemma."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x [..., H], in its shape and dtype."""
        weight = self.weight + 1
        if x.is_cuda:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        return _RmsNorm.apply(x, weight, self.eps)


class ProjectionNorm(nn.Module):
    """Root-mean-square norm of the queries or keys of all heads of a token together, as in OLMo 2.

    Each tensor rank has the weights of its own heads.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, heads: int, eps: float = 1e-5
    ) -> None:
        """Create a norm.

        Args:
            config: Configuration of the model.
            hidden_size: Number of dimensions of a head.
            heads: Number of heads on all tensor ranks together. Copies of a KV head count as heads:
                they do not change the mean of the squares.
            eps: Epsilon of the norm.
        """
        super().__init__()
        self._size = heads * hidden_size
        self._epsilon = eps
        self._group = get_tensor_model_parallel_group()
        self.weight = shard_first_dim(torch.ones(self._size // config.tensor_model_parallel_size))

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of this rank's heads [..., heads / TP, head dim], in their shape and
        dtype."""
        flat = x.flatten(-2).float()
        total = _SumOverRanks.apply(flat.square().sum(-1, keepdim=True), self._group)
        normed = flat * torch.rsqrt(total / self._size + self._epsilon)
        return (normed * self.weight).to(x.dtype).view(x.shape)


class _SumOverRanks(Function):
    """Sum over the ranks of a group, on each of which a part of the loss depends on the sum."""

    @staticmethod
    def forward(context: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the sum of the ranks' tensors, of any shape."""
        context.group = group
        return _sum_over_ranks(x, group)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the sum of the ranks' gradients."""
        return _sum_over_ranks(gradient, context.group), None


def _sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return x
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _mark_parameters(norm: nn.Module, config: TransformerConfig) -> None:
    for parameter in norm.parameters():
        mark_for_sequence_parallelism(parameter, is_enabled=config.sequence_parallel)
