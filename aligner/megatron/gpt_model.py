"""GPT models in megatron-core from a model's shape and a parallel layout."""

import importlib.util
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from aligner.errors import ConfigError
from aligner.megatron.layers import (
    GroupedExperts,
    decoder_submodules,
    install_head,
    uses_transformer_engine,
)
from aligner.megatron.world import World
from aligner.models.shape import ModelShape, inverse_frequencies
from aligner.models.weight_slices import Head, vocabulary_rows
from aligner.schema import MegatronModelConfig, OptimizerConfig, ParallelConfig, TrainedModelConfig

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}
# Recipes whose scales are those of the numbers at hand: one with a history of them would not resume
# to the bit.
_FP8: dict[str, dict[str, Any]] = {
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
}


def _finalize_gradients(
    model: list[MegatronModule], num_tokens: Tensor | None = None, **_: object
) -> None:
    # Our losses are sums over a global denominator: gradients are added up, and never divided by a
    # count.
    finalize_model_grads(model, None)


def _architecture_settings(shape: ModelShape) -> dict[str, Any]:
    """The arguments of a TransformerConfig that the model's shape decides."""
    window = shape.sliding_window
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "normalization": {"rms": "RMSNorm", "layer": "LayerNorm"}[shape.normalization],
        "layernorm_epsilon": shape.norm_epsilon,
        "qk_layernorm": shape.qk_norm,
        "gated_linear_unit": shape.gated,
        "activation_func": _ACTIVATIONS[shape.activation],
        "add_bias_linear": shape.linear_bias,
        "add_qkv_bias": shape.qkv_bias,
        # Ours counts the token itself, megatron-core's the tokens before it and after it.
        "window_size": None if window is None else (window - 1, 0),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **(_expert_settings(shape) if shape.num_experts else {}),
    }


def _expert_settings(shape: ModelShape) -> dict[str, Any]:
    return {
        "num_moe_experts": shape.num_experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.ffn_hidden_size,
        # A softmax over the chosen experts alone is one over all of them, scaled so that the chosen
        # sum to one.
        "moe_router_pre_softmax": not shape.normalize_expert_weights,
        # The choice of experts is sensitive to rounding, so it is made in fp32 whatever the layers
        # compute in.
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        # megatron-core's grouped products put all experts in one parameter, or need
        # transformer-engine: see grouped_experts.
        "moe_grouped_gemm": False,
    }


def _layout_arguments(layout: ParallelConfig) -> dict[str, Any]:
    interleaved = layout.virtual_pipeline > 1
    return {
        "tensor_model_parallel_size": layout.tensor,
        "sequence_parallel": layout.sequence,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline if interleaved else None,
        "num_layers_in_last_pipeline_stage": (
            layout.last_stage_layers if layout.pipeline > 1 and not interleaved else None
        ),
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor_size,
        # Batched, the two messages that two interleaved stages exchange at once are told apart by
        # nothing.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


def transformer_config(
    shape: ModelShape,
    layout: ParallelConfig,
    dtype: torch.dtype,
    recompute: str = "none",
    *,
    transformer_engine: bool = False,
    fp8_recipe: str | None = None,
) -> TransformerConfig:
    """megatron-core's description of the model at a layout, whose layers are transformer-engine's
    or not.

    With an `fp8_recipe` their products are of fp8 numbers.
    """
    plain_swiglu = shape.gated and shape.activation == "silu" and not shape.linear_bias
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig(
            **_architecture_settings(shape),
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            # Weights are read from files, so none are drawn.
            perform_initialization=False,
            use_cpu_initialization=True,
            # Packed micro-batches differ in length; megatron-core ties that to this dispatcher, for
            # dense models too.
            variable_seq_lengths=True,
            moe_token_dispatcher_type="alltoall",
            # With it neither the schedule nor DDP divides by micro-batches or ranks (see
            # _finalize_gradients).
            calculate_per_token_loss=True,
            deterministic_mode=torch.cuda.is_available()
            and torch.are_deterministic_algorithms_enabled(),
            finalize_model_grads_func=_finalize_gradients,
            gradient_accumulation_fusion=_adds_gradients_in_products(),
            masked_softmax_fusion=False,
            # megatron-core's, compiled where there is a GPU; cpu_backend has others.
            bias_activation_fusion=plain_swiglu,
            bias_dropout_fusion=False,
            # Unfused, it synchronizes with the GPU in every layer of a packed micro-batch.
            apply_rope_fusion=transformer_engine and shape.position == "rotary",
            **_layout_arguments(layout),
            **_RECOMPUTE[recompute],
            **({} if fp8_recipe is None else _FP8[fp8_recipe]),
        )


def _adds_gradients_in_products() -> bool:
    """Whether a weight's gradient is added to its buffer by the product that computes it: on a CPU,
    and by apex's kernels."""
    return (
        not torch.cuda.is_available()
        or importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    )


def computing_dtype(settings: MegatronModelConfig, device: torch.device) -> torch.dtype:
    """What the layers compute in: a GPU in bf16 unless told otherwise; a CPU has no fast bf16
    product."""
    auto = "bf16" if device.type == "cuda" else "fp32"
    chosen = auto if settings.precision == "auto" else settings.precision
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}[chosen]


def build_model(
    shape: ModelShape,
    world: World,
    head: Head,
    settings: MegatronModelConfig,
    *,
    exact: bool = False,
) -> list[GPTModel]:
    """This rank's chunks of the model, weights not yet read: one, or as many as the layout
    interleaves.

    `exact` is `engine.exact`. Raises ConfigError for fp8 products where transformer-engine's layers
    cannot be had.
    """
    dtype = computing_dtype(settings, world.device)
    recompute = settings.recompute if isinstance(settings, TrainedModelConfig) else "none"
    engine = uses_transformer_engine(settings, dtype)
    fp8_recipe = settings.fp8_recipe if settings.precision == "fp8" else None
    if fp8_recipe is not None and not engine:
        raise ConfigError(
            "precision=fp8: requires transformer-engine on a GPU; install transformer-engine, or"
            " set precision=bf16"
        )
    config = transformer_config(
        shape, world.layout, dtype, recompute, transformer_engine=engine, fp8_recipe=fp8_recipe
    )
    layers = partial(decoder_submodules, shape, config, exact=exact, transformer_engine=engine)
    rotary = "rope" if engine else "none"  # our attention rotates by itself
    chunks = range(world.layout.virtual_pipeline)
    return [_build_chunk(shape, world, head, config, chunk, layers, rotary) for chunk in chunks]


def _build_chunk(
    shape: ModelShape,
    world: World,
    head: Head,
    config: TransformerConfig,
    chunk: int,
    layers: Callable[[int | None], TransformerBlockSubmodules],
    rotary: str,
) -> GPTModel:
    chunks = world.layout.virtual_pipeline
    holds_head = world.is_last_stage and chunk == chunks - 1
    stage = chunk if chunks > 1 else None
    tensor_ranks = world.layout.tensor
    padded_vocabulary = vocabulary_rows(shape.vocab_size, tensor_ranks) * tensor_ranks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = GPTModel(
            config=config,
            transformer_layer_spec=layers(stage),
            vocab_size=padded_vocabulary,
            max_sequence_length=shape.max_positions,
            position_embedding_type={"rotary": rotary, "learned": "learned_absolute"}[
                shape.position
            ],
            rotary_percent=shape.rotary_fraction,
            pre_process=world.place.pipeline == 0 and chunk == 0,
            post_process=holds_head,
            share_embeddings_and_output_weights=shape.tied_embeddings and head == "vocabulary",
            parallel_output=True,
            vp_stage=stage,
        )
    if shape.position == "rotary" and rotary == "rope":
        # Those that the engines use too, every scaling included; in float32, since positions of
        # long contexts need the digits.
        model.rotary_pos_emb.inv_freq = torch.tensor(
            inverse_frequencies(shape), dtype=torch.float32
        )
    _clear_padding(model, padded_vocabulary - shape.vocab_size, world)
    _mark_tensor_parallel(model)
    _mark_experts(model)
    if holds_head:
        install_head(model, head, shape.vocab_size)
    # Layers are made in the config's type, but norms and heads of our own are not.
    model = model.to(device=world.device, dtype=config.params_dtype)
    for experts in (module for module in model.modules() if isinstance(module, GroupedExperts)):
        experts.lay_together()
    return model


def _clear_padding(model: GPTModel, padding: int, world: World) -> None:
    """Set the rows of the embedding and the head that pad the vocabulary to zero: files have no
    values for them, and memory that nothing has written may contain NaNs."""
    if not padding or world.place.tensor != world.layout.tensor - 1:
        return
    embedding = getattr(model, "embedding", None)
    candidates = (
        None if embedding is None else embedding.word_embeddings.weight,
        getattr(getattr(model, "output_layer", None), "weight", None),
    )
    with torch.no_grad():
        for weight in candidates:
            if weight is not None:
                weight[-padding:] = 0.0


def _mark_tensor_parallel(model: GPTModel) -> None:
    # megatron-core marks a cut weight only where it draws it; unmarked, it would be counted once in
    # the gradient norm instead of once a slice.
    for module in model.modules():
        cut = isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding, RowParallelLinear))
        if cut and module.weight is not None:  # a tied head of the same stage has none of its own
            dimension = int(isinstance(module, RowParallelLinear))
            set_tensor_model_parallel_attributes(
                module.weight, is_parallel=True, dim=dimension, stride=1
            )


def _mark_experts(model: GPTModel) -> None:
    # megatron-core adds experts' gradients up over the experts' own data ranks only where it is
    # marked, and marks it only where expert parallelism is above 1; experts may be cut otherwise
    # than the dense layers without it.
    for name, parameter in model.named_parameters():
        if ".local_experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]


def wrap_for_training(
    chunks: Sequence[GPTModel], optimizer: OptimizerConfig
) -> list[DistributedDataParallel]:
    """megatron-core's DDP: contiguous fp32 gradient buffers, summed over the data and context
    ranks."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=optimizer.overlap_grad_reduce,
        overlap_param_gather=optimizer.overlap_param_gather,
        use_distributed_optimizer=optimizer.distributed,
        average_in_collective=False,
    )
    for chunk in chunks:
        # A recomputed layer whose input asks for no gradient gets none for its weights either:
        # behind a frozen embedding, let the hidden states ask for one.
        if chunk.pre_process and chunk.config.recompute_granularity == "full":
            chunk.embedding.register_forward_hook(
                lambda module, inputs, hidden: _asking_for_gradients(hidden)
            )
    wrapped = [DistributedDataParallel(chunk.config, settings, chunk) for chunk in chunks]
    if optimizer.overlap_grad_reduce:
        for parameter in itertools.chain.from_iterable(chunk.parameters() for chunk in chunks):
            parameter.is_reduced_early = parameter.requires_grad  # type: ignore[attr-defined]
        # Only what the last micro-batch has come to is summed.
        each = [chunk.no_sync for chunk in wrapped]
        wrapped[0].config.no_sync_func = each if len(each) > 1 else each[0]
    return wrapped


def _asking_for_gradients(hidden: Tensor) -> Tensor:
    return (
        hidden if hidden.requires_grad or not torch.is_grad_enabled() else hidden.requires_grad_()
    )


def drop_last_graph(chunks: Sequence[GPTModel]) -> None:
    """Let go of the last micro-batch's autograd graph.

    Token dispatchers keep tensors of it until the next forward pass; through the graph's gradient
    hooks these refer to the model itself, in a cycle that Python cannot see and would never
    collect.
    """
    dispatchers = [
        getattr(module, "token_dispatcher", None) for chunk in chunks for module in chunk.modules()
    ]
    for dispatcher in filter(None, dispatchers):
        for name, value in vars(dispatcher).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                setattr(dispatcher, name, None)
