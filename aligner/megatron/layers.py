"""The layers and the head of a pipeline stage: megatron-core's own around our norms, our attention
and our heads."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from aligner.data.types import KeptTokens
from aligner.megatron.attention import PackedAttention
from aligner.megatron.cpu_backend import told_of_gradient
from aligner.megatron.logprobs import vocab_parallel_logprobs, vocab_parallel_top
from aligner.megatron.packing import PackedSequences, Routes
from aligner.models.shape import ModelShape, inverse_frequencies
from aligner.models.weight_slices import Head
from aligner.schema import ActorConfig, MegatronModelConfig

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


def _mark_for_sequence_parallelism(norm: nn.Module, config: TransformerConfig) -> None:
    # Tells megatron-core to add the gradients up over the tensor ranks when each saw part of the
    # tokens.
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm; megatron-core's own fallback refuses sequence parallelism."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps)
        _mark_for_sequence_parallelism(self, config)

    def forward(self, x: Tensor) -> Tensor:
        """Normed x [..., H], of the same shape."""
        return super().forward(x) if x.is_cuda else _RmsNorm.apply(x, self.weight, self.eps)


class _RmsNorm(Function):
    """torch's, of whose operators on a CPU each keeps and goes over a tensor of its own: this one
    keeps its input alone."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        context.save_for_backward(x, weight)
        context.epsilon = epsilon
        return F.rms_norm(x, weight.shape, weight, epsilon)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """With y = w x r and r = (mean(x^2) + epsilon)^-1/2: w g r - x r^3 mean(w g x), and the sum
        of g x r."""
        x, weight = context.saved_tensors
        size = weight.numel()
        rows, upstream, scale = (
            x.reshape(-1, size).float(),
            gradient.reshape(-1, size).float(),
            weight.float(),
        )
        inverse = (
            torch.linalg.vector_norm(rows, dim=-1)
            .square_()
            .div_(size)
            .add_(context.epsilon)
            .rsqrt_()
        )
        product = upstream * rows
        along = (product @ scale).mul_(inverse**3).div_(-size)
        for_x = (upstream * scale).mul_(inverse[:, None]).addcmul_(rows, along[:, None])
        return for_x.view(x.shape).to(x.dtype), (inverse @ product).to(weight.dtype), None


class LayerNorm(nn.LayerNorm):
    """Layer norm with a bias; megatron-core's own fallback refuses sequence parallelism."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps)
        _mark_for_sequence_parallelism(self, config)


class ParallelResidualLayer(TransformerLayer):
    """x + attention(norm(x)) + mlp(other norm(x)), as in GPT-NeoX (Black et al. 2022, section
    2.1)."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """[T, 1, H] to [T, 1, H], with megatron-core's (output, context) convention."""
        attended, context = self._forward_attention(hidden_states, **kwargs)
        added = self.mlp(self._forward_pre_mlp_layernorm(hidden_states))
        return self._forward_post_mlp(added, attended), context


class _Replay:
    """What a layer's router asks which experts its tokens take, in the place of megatron-core's
    RouterReplay.

    That one keeps what to replay in lists of the whole process, in which micro-batches in flight,
    models beside each other and passes without a backward pass would take each other's.
    """

    def __init__(self, routes: Routes, layer: int) -> None:
        self._routes, self._experts = routes, routes.experts[:, layer]

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., Any],
    ) -> tuple[Tensor, Tensor]:
        """Scores and numbers of each token's experts, [T, K], of scores [T, experts];
        differentiable like the router's own."""
        _, chosen = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        places, experts = self._routes.places, self._experts.to(chosen)
        elsewhere = (chosen[places].sort(-1).values != experts.sort(-1).values).any(-1)
        self._routes.differing.append(elsewhere.sum())
        chosen = chosen.index_copy(0, places, experts)
        return scores.gather(1, chosen), chosen


class ExpertsLayer(TransformerLayer):
    """A layer with experts, of which the micro-batch may say which its tokens take.

    The micro-batch is an argument of every pass, of one that recomputes too: nothing outlives it.
    """

    def forward(
        self,
        hidden_states: Tensor,
        *,
        packed_seq_params: PackedSequences | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[T, 1, H] to [T, 1, H], with megatron-core's (output, context) convention."""
        routes = None if packed_seq_params is None else packed_seq_params.routes
        self.mlp.router.router_replay = (
            None if routes is None else _Replay(routes, self.layer_number - 1)
        )
        try:
            output: tuple[Tensor, Tensor | None] = super().forward(
                hidden_states, packed_seq_params=packed_seq_params, **kwargs
            )
            return output
        finally:
            self.mlp.router.router_replay = None


def uses_transformer_engine(settings: MegatronModelConfig, dtype: torch.dtype) -> bool:
    """Whether the layers are transformer-engine's; else they are megatron-core's own around our
    norms and attention.

    Not with adapters, since its linear layers may hold the norm before them, and not in float32,
    for which the attention of its releases up to 2.10 has no kernel over packed sequences.
    """
    has_adapters = isinstance(settings, ActorConfig) and settings.lora.rank > 0
    return HAVE_TE and torch.cuda.is_available() and dtype == torch.bfloat16 and not has_adapters


def decoder_submodules(
    shape: ModelShape,
    config: TransformerConfig,
    chunk: int | None = None,
    *,
    exact: bool = False,
    transformer_engine: bool = False,
) -> TransformerBlockSubmodules:
    """This pipeline stage's layers, or those of one of its chunks: transformer-engine's, or our
    own.

    `exact` is `engine.exact`.
    """
    if transformer_engine:
        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=shape.num_experts or None, qk_layernorm=shape.qk_norm
        )
        norm = TENorm
    else:
        layer, norm = _own_layer(shape, exact)
    if shape.parallel_residual:
        layer.module = ParallelResidualLayer
    if shape.num_experts:
        layer.module = ExpertsLayer
        if can_group(config):
            layer.submodules.mlp.submodules.experts.module = GroupedExperts
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, chunk), layer_norm=norm
    )


def _own_layer(shape: ModelShape, exact: bool) -> tuple[ModuleSpec, type]:
    """megatron-core's local layer around our norms and our attention over packed sequences."""
    norm = {"rms": RMSNorm, "layer": LayerNorm}[shape.normalization]
    layer = get_gpt_layer_local_spec(
        num_experts=shape.num_experts or None,
        qk_layernorm=shape.qk_norm,
        normalization={"rms": "RMSNorm", "layer": "LayerNorm"}[shape.normalization],
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    attention = layer.submodules.self_attention.submodules
    rotation = inverse_frequencies(shape) if shape.position == "rotary" else None
    attention.core_attention = ModuleSpec(
        PackedAttention, params={"exact": exact, "frequencies": rotation}
    )
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = norm
    # megatron-core 0.16's router asks whether this is None, but names it only where
    # transformer-engine is.
    moe_utils.te_general_gemm = None
    return layer, norm


class VocabularyHead(ColumnParallelLinear):
    """The vocabulary projection, put off until it is known which tokens to score.

    The model's output is the final hidden states; `logprobs` projects them, a chunk of tokens at a
    time. The weight [V/TP, H] stays where megatron-core put it: here, or in the embedding when that
    is tied and on the same stage.
    """

    def __init__(
        self,
        replaced: ColumnParallelLinear,
        tied_weight: nn.Parameter | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """`vocab_size` is the number of tokens; the weights of all ranks together may have more
        rows, which are padding. None: all rows are tokens."""
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
        # In a tuple, which keeps a tied embedding from being counted as this module's too.
        self._projection = (replaced.weight if tied_weight is None else tied_weight,)

    @property
    def projection(self) -> nn.Parameter:
        """The weight [V/TP, H], wherever it lies."""
        return self._projection[0]

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        """The hidden states as they are, with megatron-core's (output, bias) convention."""
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
        kept: KeptTokens | None = None,
        candidates: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probability of `targets` int64 [M] after the tokens at `index` int64 [M], and
        entropies if asked for, among what they were drawn among (`kept` [M]; None: all); with
        `candidates` as `vocab_parallel_logprobs` has them.

        `hidden` is the model's output, [T, H], or [T/TP, H] with sequence parallelism. Results are
        float32 [M], equal on every tensor rank and differentiable.
        """
        return vocab_parallel_logprobs(
            self._chosen(hidden, index),
            self.projection,
            targets,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            group=self.tp_group,
            with_entropy=with_entropy,
            kept=kept,
            candidates=candidates,
            vocab_size=self._vocab_size,
        )

    def top(
        self, hidden: Tensor, index: Tensor, count: int, *, below: int, chunk_tokens: int
    ) -> Tensor:
        """The `count` most probable ids below `below` after the tokens at `index` int64 [M]; int64
        [M, count]."""
        sizes: dict[str, Any] = {
            "below": below,
            "chunk_tokens": chunk_tokens,
            "group": self.tp_group,
        }
        return vocab_parallel_top(self._chosen(hidden, index), self.projection, count, **sizes)

    def _chosen(self, hidden: Tensor, index: Tensor) -> Tensor:
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=self.tp_group).index_select(
                0, index
            )
        return copy_to_tensor_model_parallel_region(
            hidden.index_select(0, index), group=self.tp_group
        )


class ScalarHead(nn.Module):
    """One number a token, in the place of the vocabulary projection; the whole head lives on every
    tensor rank."""

    def __init__(self, hidden_size: int, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size))
        # Tells megatron-core to add this weight's gradients up over the tensor ranks when each saw
        # part of the tokens.
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        self._gather = sequence_parallel

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        """[T, 1, H] to [T, 1, 1] with megatron-core's (output, bias) convention; from [T/TP, 1, H]
        if sequence parallel."""
        values = F.linear(hidden, self.weight)
        if self._gather:
            # Every tensor rank computes the same loss of the whole, so each takes its own tokens'
            # gradients.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def install_head(model: GPTModel, head: Head, vocab_size: int | None = None) -> None:
    """Replace the output layer of a last stage by our head; call before the model is wrapped for
    training. `vocab_size` is the number of tokens, without padding; None: all rows are tokens."""
    if head == "vocabulary":
        tied = model.output_layer.weight is None
        model.output_layer = VocabularyHead(
            model.output_layer,
            model.embedding.word_embeddings.weight if tied else None,
            vocab_size,
        )
    else:
        model.output_layer = ScalarHead(
            model.config.hidden_size, sequence_parallel=model.config.sequence_parallel
        )
