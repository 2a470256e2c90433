"""Layers and output heads of a pipeline stage, for megatron-core's layer specs.

- Expert layers: `GroupedExperts` computes a layer's experts with two grouped GEMMs, since single
  GEMMs for one expert after another would leave a GPU waiting for kernel launches. Each expert's
  weights stay separate parameters with megatron-core's names, so files, checkpoints, resharding and
  gradient buffers do not depend on the grouping. `ExpertRouter` chooses the experts of a token, and
  `ExpertsLayer` adds routing replay.
- Norms: `RMSNorm` and `LayerNorm` with sequence parallelism.
- `decoder_submodules`: layer specs of a stage, with transformer-engine's or our own modules.
- Heads: `VocabularyHead` for log-probs and `ScalarHead` for values and rewards.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from aligner.data.types import SamplingSupport
from aligner.megatron.attention import PackedAttention
from aligner.megatron.cpu_backend import mark_gradient_accumulated
from aligner.megatron.gated_delta_net import GatedDeltaNet
from aligner.megatron.latent_attention import LatentSelfAttention
from aligner.megatron.logprobs import TokenMasks, vocab_parallel_logprobs, vocab_parallel_top_ids
from aligner.megatron.packing import PackedSequences, RoutingReplay
from aligner.models.expert_choice import choose_experts, compute_scores, compute_weights
from aligner.models.shape import Experts, LatentAttention, LayerShape, ModelShape
from aligner.models.weight_slices import Head
from aligner.schema import ActorConfig, MegatronModelConfig

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


def _mark_for_sequence_parallelism(norm: nn.Module, config: TransformerConfig) -> None:
    # With sequence parallelism, each tensor rank sees a part of the tokens. This attribute makes
    # megatron-core's finalize_model_grads sum the gradients over the tensor ranks.
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm with sequence parallelism, which megatron-core's fallback lacks."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps)
        _mark_for_sequence_parallelism(self, config)

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
        _mark_for_sequence_parallelism(self, config)


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
        self.weight = nn.Parameter(torch.ones(self._size // config.tensor_model_parallel_size))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

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
        context.group = group
        return _sum_over_ranks(x, group)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum_over_ranks(gradient, context.group), None


def _sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return x
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class BiasedColumnParallelLinear(ColumnParallelLinear):
    """megatron-core's column-parallel layer, with a bias whatever `add_bias_linear` is.

    megatron-core has one setting for the biases of all layers, but many models have only some.
    """

    def __init__(self, *arguments: Any, bias: bool, **keywords: Any) -> None:
        super().__init__(*arguments, bias=True, **keywords)


class BiasedRowParallelLinear(RowParallelLinear):
    """megatron-core's row-parallel layer, with a bias whatever `add_bias_linear` is."""

    def __init__(self, *arguments: Any, bias: bool, **keywords: Any) -> None:
        super().__init__(*arguments, bias=True, **keywords)


class BiasedExpertOutput(BiasedRowParallelLinear):
    """Second linear layer of an expert with biases, which one rank holds as a whole."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        # No collective follows the layer. megatron-core adds the bias to the output in place, which
        # autograd does not allow for the output of a collective, even of one rank.
        self.explicit_expert_comm = True


class ResidualAdd(nn.Module):
    """Residual connection: the residual stream plus the scaled norm of a module's output.

    It replaces megatron-core's bias-dropout-add.
    """

    def __init__(
        self, config: TransformerConfig, norm: type[nn.Module] | None, scale: float
    ) -> None:
        """Create the connection.

        Args:
            config: Configuration of the model.
            norm: Class of the norm after the module; None if there is none.
            scale: Factor of the module's output.
        """
        super().__init__()
        self.norm = (
            None if norm is None else norm(config, config.hidden_size, eps=config.layernorm_epsilon)
        )
        self._scale = scale

    def forward(
        self, is_training: bool, is_fused: bool
    ) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
        """Return the function that megatron-core calls with (output, bias), residual and
        dropout."""
        return self._add

    def _add(
        self, output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float
    ) -> Tensor:
        """Return the new residual stream [T, 1, H]; there is no dropout."""
        output, bias = output_with_bias
        if bias is not None:
            output = output + bias
        if self.norm is not None:
            output = self.norm(output)
        return residual + output if self._scale == 1 else residual + output * self._scale


class DecoderLayer(TransformerLayer):
    """megatron-core's layer, without its gradients in passes that need none."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        # megatron-core enables gradients for its fused bias-dropout-add. The norm in `ResidualAdd`
        # would then build a graph in every inference.
        self.bias_dropout_add_exec_handler = nullcontext


class ParallelResidualLayer(DecoderLayer):
    """Layer with a parallel residual: x + attention(norm(x)) + mlp(other norm(x)).

    GPT-NeoX uses it (Black et al. 2022, section 2.1).
    """

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output [T, 1, H], with megatron-core's (output, context) convention.

        Args:
            hidden_states: [T, 1, H].
            **kwargs: Arguments of megatron-core's attention.
        """
        attended, context = self._forward_attention(hidden_states, **kwargs)
        mlp_output = self.mlp(self._forward_pre_mlp_layernorm(hidden_states))
        return self._forward_post_mlp(mlp_output, attended), context


class ExpertRouter(TopKRouter):
    """Router that chooses and weighs experts as the embedded engine and transformers do.

    megatron-core's own functions normalize all sigmoid scores, and rank groups of experts by
    another number of scores than some models.
    """

    def __init__(self, *arguments: Any, experts: Experts, **keywords: Any) -> None:
        """Create a router.

        Args:
            *arguments: Arguments of megatron-core's router.
            experts: The mixture of experts.
            **keywords: Keyword arguments of megatron-core's router.
        """
        super().__init__(*arguments, **keywords)
        self._experts = experts
        if experts.has_correction_bias:
            # A parameter, unlike megatron-core's buffer of this name, has a place in the weight
            # table. Without gradients it gets neither a gradient buffer nor an optimizer state.
            self.expert_bias = nn.Parameter(torch.zeros(experts.count), requires_grad=False)
        if experts.has_router_bias:
            self.bias = nn.Parameter(torch.zeros(experts.count))
            self.bias.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
        self.routing_replay: RoutingReplay | None = None
        """Recorded routing of the micro-batch of the current pass."""
        self.routing_index = 0
        """Index of the layer among the layers with experts."""

    def keep_bias_in_float32(self) -> None:
        """Convert the correction bias to float32.

        The differences of its values are small compared with the values.
        """
        if self.expert_bias is not None:
            self.expert_bias.data = self.expert_bias.data.float()

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weights of the experts, and which experts each token has.

        Args:
            logits: Output of the router's matmul, [T, 1, experts].
            padding_mask: Ignored.

        Returns:
            float32 [T, experts], zero for other experts than the token's, and bool [T, experts].
        """
        scores = compute_scores(logits.flatten(0, 1), self._experts)
        expert_ids = choose_experts(scores, self._experts, self.expert_bias)
        if self.routing_replay is not None:
            expert_ids = self._replay(expert_ids, self.routing_replay)
        weights = compute_weights(scores, expert_ids, self._experts)
        return (
            torch.zeros_like(scores).scatter(1, expert_ids, weights),
            torch.zeros_like(scores, dtype=torch.bool).scatter(1, expert_ids, True),
        )

    def _replay(self, expert_ids: Tensor, routing_replay: RoutingReplay) -> Tensor:
        """Return the expert ids, int64 [T, K], with recorded ids where they exist.

        The method also counts the tokens for which the router has chosen other experts.
        """
        token_index = routing_replay.token_index
        recorded = routing_replay.experts[:, self.routing_index].to(expert_ids)
        chosen = expert_ids[token_index]
        # Only the set of experts matters. Keeping the router's order of an equal set also keeps the
        # rounding of the sum of their weights.
        is_mismatch = (chosen.sort(-1).values != recorded.sort(-1).values).any(-1)
        routing_replay.mismatch_counts.append(is_mismatch.sum())
        replayed = torch.where(is_mismatch[:, None], recorded, chosen)
        return expert_ids.index_copy(0, token_index, replayed)


class ExpertsLayer(DecoderLayer):
    """Layer with experts that replays the routing that a micro-batch contains.

    The micro-batch is an argument of every forward pass, including passes that recompute
    activations, so the layer keeps no state between passes. megatron-core's RouterReplay keeps
    recorded routing in global lists of the process. Micro-batches in flight, several models in a
    process, and passes without a backward pass would mix up their entries.
    """

    def __init__(self, *arguments: Any, routing_index: int, **keywords: Any) -> None:
        """Create a layer.

        Args:
            *arguments: Arguments of megatron-core's layer.
            routing_index: Index of the layer among the layers with experts.
            **keywords: Keyword arguments of megatron-core's layer.
        """
        super().__init__(*arguments, **keywords)
        self.mlp.router.routing_index = routing_index

    def forward(
        self,
        hidden_states: Tensor,
        *,
        packed_seq_params: PackedSequences | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output [T, 1, H], with megatron-core's (output, context) convention.

        Args:
            hidden_states: [T, 1, H].
            packed_seq_params: The micro-batch, with recorded routing or without.
            **kwargs: Other arguments of megatron-core's layer.
        """
        if packed_seq_params is not None:
            self.mlp.router.routing_replay = packed_seq_params.routing_replay
        try:
            output: tuple[Tensor, Tensor | None] = super().forward(
                hidden_states, packed_seq_params=packed_seq_params, **kwargs
            )
            return output
        finally:
            self.mlp.router.routing_replay = None


def uses_transformer_engine(
    shape: ModelShape, settings: MegatronModelConfig, dtype: torch.dtype
) -> bool:
    """Return whether a model uses transformer-engine's layers.

    Otherwise, the model uses megatron-core's local layers with our norms and our attention.
    transformer-engine is not used with LoRA, since its linear layers may contain the preceding
    norm. It is not used in float32 either, since its attention over packed sequences has no float32
    kernel in releases up to 2.10. It is used for models only whose layers are all equal and have
    no parts that it lacks.
    """
    has_adapters = isinstance(settings, ActorConfig) and settings.lora.rank > 0
    return (
        HAVE_TE
        and torch.cuda.is_available()
        and dtype == torch.bfloat16
        and not has_adapters
        and _has_plain_layers(shape)
    )


def _has_plain_layers(shape: ModelShape) -> bool:
    """Return whether transformer-engine's layers have all parts of the model's layers."""
    layer = shape.common_layer
    if layer is None:
        return False
    rope = layer.rope
    return (
        (rope is None or (rope.attention_factor == 1 and not rope.is_interleaved))
        and shape.latent_attention is None
        and shape.qk_norm != "projection"
        and shape.has_plain_scores
        and not (shape.experts is not None and shape.experts.has_biases)
        and shape.norm_placement == "before"
        and not shape.zero_centered_norms
        and shape.residual_scale == 1
        # transformer-engine's layers have biases in all linear layers, or in none of these two
        and shape.attention_output_bias == shape.ffn_bias
        and not shape.attention_gate
        and shape.delta_net is None
    )


def decoder_submodules(
    shape: ModelShape,
    config: TransformerConfig,
    layers: range,
    *,
    exact: bool = False,
    transformer_engine: bool = False,
) -> TransformerBlockSubmodules:
    """Return the layer specs of this pipeline stage, or of one of its model chunks.

    Args:
        shape: Dimensions of the model.
        config: megatron-core's configuration of the model.
        layers: Indices of the layers.
        exact: `engine.exact`: use batch-invariant kernels.
        transformer_engine: Whether to use transformer-engine's modules.
    """
    norm = TENorm if transformer_engine else _choose_norm(shape)
    layer_specs = []
    for layer in layers:
        has_experts = shape.layers[layer].has_experts
        if transformer_engine:
            spec = get_gpt_layer_with_transformer_engine_spec(
                num_experts=shape.num_experts if has_experts else None,
                qk_layernorm=shape.qk_norm is not None,
            )
        else:
            spec = _local_layer_spec(shape, config, shape.layers[layer], exact)
        if shape.parallel_residual:
            spec.module = ParallelResidualLayer
        if has_experts:
            assert shape.experts is not None
            spec.module = ExpertsLayer
            spec.params["routing_index"] = shape.expert_layers.index(layer)
            spec.submodules.mlp.submodules.router = partial(ExpertRouter, experts=shape.experts)
            if shape.experts.has_biases:
                linears = spec.submodules.mlp.submodules.experts.submodules
                linears.linear_fc1 = BiasedColumnParallelLinear
                linears.linear_fc2 = BiasedExpertOutput
            if supports_grouped_gemm(config):
                spec.submodules.mlp.submodules.experts.module = GroupedExperts
        layer_specs.append(spec)
    return TransformerBlockSubmodules(layer_specs=layer_specs, layer_norm=norm)


def _choose_norm(shape: ModelShape) -> type[nn.Module]:
    """Return the class of a model's norms."""
    if shape.normalization == "layer":
        return LayerNorm
    return ZeroCenteredRMSNorm if shape.zero_centered_norms else RMSNorm


def _local_layer_spec(
    shape: ModelShape, config: TransformerConfig, layer_shape: LayerShape, exact: bool
) -> ModuleSpec:
    """Return megatron-core's local layer spec with our norms and attention."""
    norm = _choose_norm(shape)
    layer = get_gpt_layer_local_spec(
        num_experts=shape.num_experts if layer_shape.has_experts else None,
        qk_layernorm=shape.qk_norm is not None,
        normalization={"rms": "RMSNorm", "layer": "LayerNorm"}[shape.normalization],
    )
    layer.module = DecoderLayer
    norm_before = IdentityOp if shape.norm_placement == "after" else norm
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm_before
    if shape.norm_placement != "before" or shape.residual_scale != 1:
        norm_after = None if shape.norm_placement == "before" else norm
        add = ModuleSpec(
            ResidualAdd,
            params={"config": config, "norm": norm_after, "scale": shape.residual_scale},
        )
        layer.submodules.self_attn_bda = layer.submodules.mlp_bda = add
    if layer_shape.has_delta_net:
        layer.submodules.self_attention = ModuleSpec(GatedDeltaNet, params={"net": shape.delta_net})
    elif shape.latent_attention is not None:
        layer.submodules.self_attention = _latent_attention_spec(
            shape.latent_attention, layer_shape, norm, exact
        )
    else:
        attention = layer.submodules.self_attention.submodules
        _set_attention(attention, shape, config, layer_shape, exact=exact)
    if shape.ffn_bias and layer_shape.is_dense:
        mlp = layer.submodules.mlp.submodules
        mlp.linear_fc1 = BiasedColumnParallelLinear
        mlp.linear_fc2 = BiasedRowParallelLinear
    # The router of megatron-core 0.16 tests whether this name is None, but defines it only if
    # transformer-engine is installed.
    moe_utils.te_general_gemm = None
    return layer


def _set_attention(
    attention: SelfAttentionSubmodules,
    shape: ModelShape,
    config: TransformerConfig,
    layer_shape: LayerShape,
    *,
    exact: bool,
) -> None:
    """Set our attention and norms in megatron-core's spec of an attention module."""
    attention.core_attention = ModuleSpec(
        PackedAttention,
        params={
            "exact": exact,
            "layer": layer_shape,
            "softcap": shape.attention_softcap,
            "has_sinks": shape.attention_sinks,
        },
    )
    if shape.attention_output_bias:
        attention.linear_proj = BiasedRowParallelLinear
    if shape.qk_norm == "head":
        attention.q_layernorm = attention.k_layernorm = _choose_norm(shape)
    elif shape.qk_norm == "projection":
        attention.q_layernorm = ModuleSpec(ProjectionNorm, params={"heads": shape.num_heads})
        attention.k_layernorm = ModuleSpec(
            ProjectionNorm, params={"heads": config.num_query_groups}
        )


def _latent_attention_spec(
    latent: LatentAttention, layer: LayerShape, norm: type[nn.Module], exact: bool
) -> ModuleSpec:
    """Return the spec of a layer's latent attention; see `_local_layer_spec`."""
    # The core attends to queries and keys that are already rotated.
    unrotated = dataclasses.replace(layer, rope=None)
    core = ModuleSpec(PackedAttention, params={"exact": exact, "layer": unrotated})
    params = {"latent": latent, "rope": layer.rope, "norm": norm, "core_attention": core}
    return ModuleSpec(LatentSelfAttention, params=params)


class VocabularyHead(ColumnParallelLinear):
    """Vocabulary projection that computes logits only for the tokens that are scored.

    The model's output is the final hidden states. `logprobs` projects them, one chunk of tokens at
    a time. The weight [V/TP, H] stays in the module in which megatron-core created it: this module
    or, if head and embedding are tied and on the same pipeline stage, the embedding.
    """

    def __init__(
        self,
        replaced: ColumnParallelLinear,
        tied_weight: nn.Parameter | None = None,
        vocab_size: int | None = None,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
    ) -> None:
        """Take over the weight of an output layer.

        Args:
            replaced: megatron-core's output layer.
            tied_weight: Weight of the embedding if the head has none of its own.
            vocab_size: Number of tokens in the vocabulary. The weights of all ranks together may
                have more rows, which are padding; None means that all rows are tokens.
            logit_scale: Factor of the logits.
            logit_softcap: Soft cap of the logits; None means no cap.
        """
        super().__init__(
            replaced.input_size,
            replaced.output_size,
            config=replaced.config,
            init_method=replaced.config.init_method,
            bias=False,
            skip_weight_param_allocation=True,
            tp_group=replaced.tp_group,
        )
        self.weight = replaced.weight
        self._vocab_size = vocab_size
        self._logit_scale = logit_scale
        self._logit_softcap = logit_softcap
        # A tuple hides a tied embedding from torch, which would register it as a parameter of this
        # module too.
        self._projection = (replaced.weight if tied_weight is None else tied_weight,)

    @property
    def projection(self) -> nn.Parameter:
        """The weight [V/TP, H], in this module or in a tied embedding."""
        return self._projection[0]

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        """Return the hidden states unchanged, with megatron-core's (output, bias) convention."""
        return hidden, None

    def logprobs(
        self,
        hidden: Tensor,
        index: Tensor,
        targets: Tensor,
        *,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool = False,
        sampling_support: SamplingSupport | None = None,
        candidates: Tensor | None = None,
        token_masks: TokenMasks | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the log-probs of targets and, optionally, entropies.

        Collective over the tensor ranks; see `vocab_parallel_logprobs`.

        Args:
            hidden: The model's output, [T, H], or [T/TP, H] with sequence parallelism.
            index: Indices of the tokens before the targets, int64 [M].
            targets: Global token ids, int64 [M].
            temperature: Temperature of the distribution.
            chunk_tokens: Maximum number of tokens whose logits exist at the same time.
            with_entropy: Whether to compute entropies.
            sampling_support: Sampling support of each target, [M]; None means the whole vocabulary.
            candidates: Candidate token ids of each target, int64 [M, k].
            token_masks: Allowed tokens of each target; None means the whole vocabulary.

        Returns:
            Log-probs, float32 [M], or [M, 2 + k] with candidates, and entropies, float32 [M], or
            None. They are equal on every tensor rank and differentiable.
        """
        return vocab_parallel_logprobs(
            self._select_hidden(hidden, index),
            self.projection,
            targets,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            group=self.tp_group,
            with_entropy=with_entropy,
            sampling_support=sampling_support,
            candidates=candidates,
            vocab_size=self._vocab_size,
            token_masks=token_masks,
            softcap=self._logit_softcap,
        )

    def top_ids(
        self,
        hidden: Tensor,
        index: Tensor,
        count: int,
        *,
        id_limit: int,
        chunk_tokens: int,
        token_masks: TokenMasks | None = None,
    ) -> Tensor:
        """Return the `count` most probable next token ids below `id_limit` after each token at
        `index`.

        Collective over the tensor ranks.

        Args:
            hidden: The model's output, [T, H], or [T/TP, H] with sequence parallelism.
            index: Indices of the tokens, int64 [M].
            count: Number of ids of each token; at most `id_limit`.
            id_limit: Only ids below this value are returned.
            chunk_tokens: Maximum number of tokens whose logits exist at the same time.
            token_masks: Allowed tokens after each token, which come before all others; None means
                the whole vocabulary.

        Returns:
            int64 [M, count], most probable first.
        """
        options: dict[str, Any] = {
            "id_limit": id_limit,
            "chunk_tokens": chunk_tokens,
            "group": self.tp_group,
            "token_masks": token_masks,
        }
        # a soft cap does not change the order of the logits
        return vocab_parallel_top_ids(
            self._select_hidden(hidden, index), self.projection, count, **options
        )

    def _select_hidden(self, hidden: Tensor, index: Tensor) -> Tensor:
        """Return the hidden states [M, H] of the tokens at `index`, int64 [M], times the factor of
        the logits.

        Each tensor rank computes the part of the gradients that results from its part of the
        vocabulary. The backward pass sums these parts over the tensor ranks, by a reduce-scatter
        with sequence parallelism and by an all-reduce without it.
        """
        if self.sequence_parallel:
            gathered = gather_from_sequence_parallel_region(hidden, group=self.tp_group)
            selected = gathered.index_select(0, index)
        else:
            selected = copy_to_tensor_model_parallel_region(
                hidden.index_select(0, index), group=self.tp_group
            )
        return selected if self._logit_scale == 1 else selected * self._logit_scale


class ScalarHead(nn.Module):
    """Output head that computes one number for each token, for critics and reward models.

    It replaces the vocabulary projection. Every tensor rank holds the whole head.
    """

    def __init__(self, hidden_size: int, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size))
        # With sequence parallelism, megatron-core must sum the gradients over the tensor ranks; see
        # _mark_for_sequence_parallelism.
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        self._is_sequence_parallel = sequence_parallel

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        """Return the head's numbers [T, 1, 1], with megatron-core's (output, bias) convention.

        Args:
            hidden: Final hidden states, [T, 1, H], or [T/TP, 1, H] with sequence parallelism.
            weight: Ignored.
            runtime_gather_output: Ignored.
        """
        values = F.linear(hidden, self.weight)
        if self._is_sequence_parallel:
            # Every tensor rank computes the same loss from all tokens, so in the backward pass each
            # rank takes the gradients of its own tokens instead of summing them.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def install_head(
    model: GPTModel,
    head: Head,
    vocab_size: int | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> None:
    """Replace the output layer of a last pipeline stage by one of our heads.

    Call it before the model is wrapped for training.

    Args:
        model: Model chunk of the last stage.
        head: Vocabulary head or scalar head.
        vocab_size: Number of tokens without padding; None means that all rows are tokens.
        logit_scale: Factor of the logits.
        logit_softcap: Soft cap of the logits; None means no cap.
    """
    if head == "vocabulary":
        is_tied = model.output_layer.weight is None
        model.output_layer = VocabularyHead(
            model.output_layer,
            model.embedding.word_embeddings.weight if is_tied else None,
            vocab_size,
            logit_scale,
            logit_softcap,
        )
    else:
        model.output_layer = ScalarHead(
            model.config.hidden_size, sequence_parallel=model.config.sequence_parallel
        )
