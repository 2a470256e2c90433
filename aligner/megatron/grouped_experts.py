"""Experts of a layer, computed by two grouped GEMMs.

Single GEMMs for one expert after another would leave a GPU waiting for kernel launches. Each
expert's weights stay separate parameters with megatron-core's names, so files, checkpoints,
resharding and gradient buffers do not depend on the grouping.
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

from aligner.megatron.cpu_backend import mark_gradient_accumulated

# torch's grouped GEMM requires rows whose size is a multiple of this number of bytes.
_ALIGNED_BYTES = 16


def supports_grouped_gemm(config: TransformerConfig) -> bool:
    """Return whether to compute the experts of this configuration with torch's grouped GEMM.

    The grouped GEMM exists for bf16 with aligned rows on GPUs from Hopper on. On a CPU it would
    gain nothing.
    """
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
    # `GroupedExperts` uses megatron-core's fused SwiGLU, which supports experts without biases
    # only.
    return aligned and config.params_dtype == torch.bfloat16 and config.bias_activation_fusion


class GroupedExperts(SequentialMLP):
    """megatron-core's experts of a rank, computed by grouped GEMMs.

    The token dispatcher passes the tokens sorted by expert.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        # DDP fills its gradient buffer from the last parameter to the first. Reversing the experts
        # here puts them into the buffer in ascending order, so that one view covers all of them.
        experts = self.local_experts._modules
        self.local_experts._modules = dict(reversed(experts.items()))

    def make_weights_contiguous(self) -> None:
        """Move the weights of all experts of a layer into one tensor, in the order of the experts.

        The parameters become views of this tensor. The grouped GEMM reads contiguous weights in
        place, but would have to copy other weights.
        """
        for weights in self._expert_weights():
            for weight, view in zip(
                weights, torch.stack([weight.data for weight in weights]), strict=True
            ):
                weight.data = view

    def forward(
        self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor
    ) -> tuple[Tensor, None]:
        """Return the experts' outputs with megatron-core's (output, bias) convention.

        Args:
            tokens: Hidden states sorted by expert, bf16 [T, H].
            tokens_per_expert: Number of tokens of each local expert, int64 [E].
            probs: The router's weight of each token, [T].

        Returns:
            bf16 [T, H] and None.
        """
        up, down = self._expert_weights()
        counts = tokens_per_expert.tolist()
        hidden = _GroupedLinear.apply(tokens, counts, *up)  # type: ignore[no-untyped-call]
        hidden = weighted_bias_swiglu_impl(hidden, None, probs.unsqueeze(-1), False)
        return _GroupedLinear.apply(hidden, counts, *down), None  # type: ignore[no-untyped-call]

    def _expert_weights(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the weights of both linear layers, in the order of the experts."""
        experts = [
            self.local_experts.get_submodule(str(index)) for index in range(self.num_local_experts)
        ]
        return [expert.linear_fc1.weight for expert in experts], [
            expert.linear_fc2.weight for expert in experts
        ]


class _GroupedLinear(Function):
    """Linear layers of E experts: each row of the input times the weight of its expert."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, counts: Sequence[int], *weights: Tensor) -> Tensor:
        """Return the outputs of all rows.

        Args:
            context: Autograd context.
            inputs: Rows sorted by expert, [T, in].
            counts: Number of rows of each expert.
            *weights: One weight [out, in] for each expert.

        Returns:
            [T, out].
        """
        ends = torch.tensor(counts).cumsum(0).to(inputs.device, torch.int32)
        context.save_for_backward(inputs, ends)
        context.counts = counts
        context.weights = weights
        if not len(inputs):
            return inputs.new_empty(0, len(weights[0]))
        return F.grouped_mm(inputs, _stack_or_view(weights).transpose(1, 2), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs and of the weights.

        The gradient of a weight with a DDP gradient buffer (`main_grad`) is added to the buffer.

        Args:
            context: Autograd context of the forward pass.
            gradient: Gradient of the outputs, [T, out].
        """
        inputs, ends = context.saved_tensors
        weights = context.weights
        if not len(inputs):
            for_inputs = inputs
            for_weights = inputs.new_zeros(len(weights), *weights[0].shape)
        else:
            gradient = gradient.contiguous()
            for_inputs = F.grouped_mm(gradient, _stack_or_view(weights), offs=ends)
            for_weights = F.grouped_mm(gradient.t(), inputs, offs=ends)
            # The grouped GEMM does not write the results of empty groups.
            if empty := [expert for expert, count in enumerate(context.counts) if not count]:
                for_weights[empty] = 0.0
        if not context.needs_input_grad[2]:
            return for_inputs, None, *[None] * len(weights)
        if not hasattr(weights[0], "main_grad"):
            return for_inputs, None, *for_weights
        totals = [weight.main_grad for weight in weights]
        if (total_view := _stacked_view(totals)) is not None:
            total_view.add_(for_weights)
        else:
            torch._foreach_add_(totals, list(for_weights.to(totals[0].dtype)))
        return for_inputs, None, *map(mark_gradient_accumulated, weights)


def _stack_or_view(tensors: Sequence[Tensor]) -> Tensor:
    """Return E tensors of one shape as one tensor [E, …]: a view if possible, otherwise a copy."""
    view = _stacked_view(tensors)
    return torch.stack(tuple(tensors)) if view is None else view


def _stacked_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return E tensors of one shape as a view [E, …] of their memory; None if no view exists.

    A view exists if the tensors are contiguous and lie in one storage, in this order and at equal
    distances.
    """
    first = tensors[0].detach()
    starts = [tensor.data_ptr() for tensor in tensors]
    step = starts[1] - starts[0] if len(starts) > 1 else first.nbytes
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if (
        starts != [starts[0] + index * step for index in range(len(starts))]
        or step < first.nbytes
        or len(storages) > 1
    ):
        return None
    if not all(tensor.is_contiguous() for tensor in tensors):
        return None
    return first.as_strided((len(tensors), *first.shape), (step // first.itemsize, *first.stride()))
