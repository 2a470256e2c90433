"""A layer's experts in two grouped products, where one after another would keep a GPU waiting for
launches.

Each expert's weights stay parameters of their own, with megatron-core's names: files, checkpoints,
resharding and gradient buffers know nothing of the groups.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from aligner.megatron.cpu_backend import told_of_gradient

_ALIGNED_BYTES = 16
"""Rows of what is multiplied must be multiples of it."""


def can_group(config: TransformerConfig) -> bool:
    """Whether torch has grouped products for these experts: in bf16, on GPUs from Hopper on. On a
    CPU they gain nothing."""
    if not (
        torch.cuda.is_available()
        and hasattr(F, "grouped_mm")
        and torch.cuda.get_device_capability() >= (9, 0)
    ):
        return False
    width = (config.moe_ffn_hidden_size or 0) // config.expert_tensor_parallel_size
    aligned = all(
        size * config.params_dtype.itemsize % _ALIGNED_BYTES == 0
        for size in (width, config.hidden_size)
    )
    # megatron-core's fused SwiGLU, the only one here, is for experts without biases.
    return aligned and config.params_dtype == torch.bfloat16 and config.bias_activation_fusion


class GroupedExperts(SequentialMLP):
    """megatron-core's experts of a rank, all at once; tokens come sorted by expert."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        # Gradient buffers are filled from the last parameter to the first: so experts lie there in
        # their order.
        experts = self.local_experts._modules
        self.local_experts._modules = dict(reversed(experts.items()))

    def lay_together(self) -> None:
        """Give the experts' weights one memory, where they lie behind each other; of other memory
        copies are multiplied."""
        for weights in self._weights():
            for weight, place in zip(
                weights, torch.stack([weight.data for weight in weights]), strict=True
            ):
                weight.data = place

    def forward(
        self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor
    ) -> tuple[Tensor, None]:
        """[T, H], int64 [E] and the router's weights [T] to [T, H], with megatron-core's (output,
        bias) convention."""
        up, down = self._weights()
        counts = tokens_per_expert.tolist()
        hidden = _GroupedLinear.apply(tokens, counts, *up)  # type: ignore[no-untyped-call]
        hidden = weighted_bias_swiglu_impl(hidden, None, probs.unsqueeze(-1), False)
        return _GroupedLinear.apply(hidden, counts, *down), None  # type: ignore[no-untyped-call]

    def _weights(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Of both layers, by expert."""
        experts = [
            self.local_experts.get_submodule(str(place)) for place in range(self.num_local_experts)
        ]
        return [expert.linear_fc1.weight for expert in experts], [
            expert.linear_fc2.weight for expert in experts
        ]


class _GroupedLinear(Function):
    """Rows of an input [T, in], so many an expert, each times its expert's weight [out, in]: [T,
    out]."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, counts: Sequence[int], *weights: Tensor) -> Tensor:
        """`counts` of tokens, by expert, are as many as weights."""
        ends = torch.tensor(counts).cumsum(0).to(inputs.device, torch.int32)
        context.save_for_backward(inputs, ends)
        context.counts, context.weights = counts, weights
        if not len(inputs):
            return inputs.new_empty(0, len(weights[0]))
        return F.grouped_mm(inputs, _together(weights).transpose(1, 2), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs and of the weights; these go into their buffers where they have
        some."""
        (inputs, ends), weights = context.saved_tensors, context.weights
        if not len(inputs):
            for_inputs, for_weights = inputs, inputs.new_zeros(len(weights), *weights[0].shape)
        else:
            gradient = gradient.contiguous()
            for_inputs = F.grouped_mm(gradient, _together(weights), offs=ends)
            for_weights = F.grouped_mm(gradient.t(), inputs, offs=ends)
            if empty := [expert for expert, count in enumerate(context.counts) if not count]:
                for_weights[empty] = 0.0
        if not context.needs_input_grad[2]:
            return for_inputs, None, *[None] * len(weights)
        if not hasattr(weights[0], "main_grad"):
            return for_inputs, None, *for_weights
        totals = [weight.main_grad for weight in weights]
        if (together := _view(totals)) is not None:
            together.add_(for_weights)
        else:
            torch._foreach_add_(totals, list(for_weights.to(totals[0].dtype)))
        return for_inputs, None, *map(told_of_gradient, weights)


def _together(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape as one [E, …]: their own memory, or a copy."""
    view = _view(tensors)
    return torch.stack(tuple(tensors)) if view is None else view


def _view(tensors: Sequence[Tensor]) -> Tensor | None:
    """Tensors of one shape as one [E, …], where they lie in one memory in this order, equally far
    apart; else None."""
    first, starts = tensors[0].detach(), [tensor.data_ptr() for tensor in tensors]
    step = starts[1] - starts[0] if len(starts) > 1 else first.nbytes
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if (
        starts != [starts[0] + place * step for place in range(len(starts))]
        or step < first.nbytes
        or len(storages) > 1
    ):
        return None
    if not all(tensor.is_contiguous() for tensor in tensors):
        return None
    return first.as_strided((len(tensors), *first.shape), (step // first.itemsize, *first.stride()))
