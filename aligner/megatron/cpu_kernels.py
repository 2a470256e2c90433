"""megatron-core's fused element-wise functions for a CPU: in place where they can be, since fresh memory is what costs there.

Each takes the place of a function of the same name that megatron-core compiles for GPUs, and keeps its signature. They are
called where autograd does not record.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(y: Tensor) -> Tensor:
    """silu(gate) * up of y [..., 2F], the gates in the first half (Shazeer 2020)."""
    gate, up = y.chunk(2, -1)
    return F.silu(gate).mul_(up)


def swiglu_back(g: Tensor, y: Tensor) -> Tensor:
    """Gradient [..., 2F] of `swiglu`, given its output's g [..., F]."""
    gate, up = y.chunk(2, -1)
    gradient = torch.empty_like(y)
    for_gate, for_up = gradient.chunk(2, -1)
    torch.mul(g, up, out=for_gate)
    torch.ops.aten.silu_backward.grad_input(for_gate, gate, grad_input=for_gate)
    torch.ops.aten.silu.out(gate, out=for_up).mul_(g)
    return gradient


def weighted_swiglu(y: Tensor, weights: Tensor) -> Tensor:
    """`swiglu` of each token times its weight [..., 1], in y's type."""
    return (swiglu(y) * weights).to(y.dtype)


def weighted_swiglu_back(g: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `weighted_swiglu` for y and for the weights."""
    for_weights = (swiglu(y) * g.to(weights.dtype)).sum(-1, keepdim=True)
    return swiglu_back((g * weights).to(y.dtype), y), for_weights.to(weights.dtype)


def scale_tensors(_: int, overflow: Tensor, tensors: Sequence[Sequence[Tensor]], scale: float) -> None:
    """Write the first list's tensors times `scale` into the second list's."""
    for source, target in zip(tensors[0], tensors[1], strict=True):
        torch.mul(source, scale, out=target)
