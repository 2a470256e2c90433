"""Construction of megatron-core GPT models from a model's shape and a parallel layout.

- `transformer_config`: megatron-core's configuration of a model.
- `build_model`: this rank's model chunks, without weights.
- `wrap_for_training`: megatron-core's DDP around the chunks.
"""

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
from megatron.core.fusions.fused_bias_geglu import quick_gelu
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
from aligner.megatron.expert_router import ExpertRouter
from aligner.megatron.grouped_experts import GroupedExperts
from aligner.megatron.kv_head_copies import sum_gradients_of_copies
from aligner.megatron.layer_specs import decoder_submodules, uses_transformer_engine
from aligner.megatron.output_heads import install_head
from aligner.megatron.world import World
from aligner.models.pipeline_stages import count_part_layers, name_parts, stage_layers
from aligner.models.shape import Experts, ModelShape, compute_inverse_frequencies
from aligner.models.weight_slices import Head, compute_shard_size
from aligner.schema import MegatronModelConfig, OptimizerConfig, ParallelConfig, TrainedModelConfig

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
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
# All recipes use current scaling. With delayed scaling, which uses a history of values, a resumed
# run would not be bitwise identical to an uninterrupted run.
_FP8: dict[str, dict[str, Any]] = {
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
}


def _finalize_gradients(
    model: list[MegatronModule], num_tokens: Tensor | None = None, **_: object
) -> None:
    # The losses are sums divided by a global denominator, so gradients are summed over ranks and
    # micro-batches and never divided by a number of tokens.
    finalize_model_grads(model, None)
    sum_gradients_of_copies(model)


def _architecture_settings(shape: ModelShape, tensor: int) -> dict[str, Any]:
    """Return the arguments of a TransformerConfig that follow from the model's shape.

    Args:
        shape: Dimensions of the model.
        tensor: Number of tensor-parallel ranks.
    """
    layer = shape.common_layer
    window = None if layer is None else layer.sliding_window
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        # With fewer KV heads than tensor ranks, each rank has a copy of its KV head. megatron-core
        # would split a KV head and all-gather the queries, keys and values of all heads instead.
        "num_query_groups": shape.kv_heads_on_rank(tensor) * tensor,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "normalization": {"rms": "RMSNorm", "layer": "LayerNorm"}[shape.normalization],
        "layernorm_epsilon": shape.norm_epsilon,
        # With this setting, megatron-core sums the gradients of norms of single heads, which all
        # tensor ranks hold. A norm of all heads is split over the ranks.
        "qk_layernorm": shape.qk_norm == "head",
        "softmax_scale": shape.softmax_scale,
        "attention_output_gate": shape.attention_gate,
        "gated_linear_unit": shape.gated,
        "activation_func": _ACTIVATIONS[shape.activation],
        "activation_func_clamp_value": shape.gate_limit,
        "glu_linear_offset": shape.projection_offset,
        # megatron-core's setting of the biases of all linear layers, including routers. A model
        # with some of the biases has `BiasedRowParallelLinear` and `BiasedColumnParallelLinear`.
        "add_bias_linear": shape.qkv_bias and shape.attention_output_bias and shape.ffn_bias,
        "add_qkv_bias": shape.qkv_bias,
        # Hugging Face's window includes the token itself; megatron-core's window counts the tokens
        # before and after the token. `PackedAttention` has the window of its own layer instead.
        "window_size": None if window is None else (window - 1, 0),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **({} if shape.experts is None else _expert_settings(shape.experts)),
    }


def _expert_settings(experts: Experts) -> dict[str, Any]:
    """Return the arguments of a TransformerConfig for a model with experts."""
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        # `ExpertRouter` computes the weights; megatron-core requires this value for one expert per
        # token.
        "moe_router_pre_softmax": True,
        # The choice of experts is sensitive to rounding, so the router computes in fp32 whatever
        # the dtype of the layers.
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_shared_expert_intermediate_size": experts.shared_size or None,
        "moe_shared_expert_gate": experts.has_shared_gate,
        # megatron-core's grouped GEMM stores all experts in one parameter or requires
        # transformer-engine; see `aligner.megatron.grouped_experts`.
        "moe_grouped_gemm": False,
    }


def _layout_settings(shape: ModelShape, layout: ParallelConfig) -> dict[str, Any]:
    """Return the arguments of a TransformerConfig that follow from the parallel layout."""
    is_interleaved = layout.virtual_pipeline > 1
    part_layers = count_part_layers(shape, layout)
    return {
        "tensor_model_parallel_size": layout.tensor,
        "sequence_parallel": layout.sequence,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline if is_interleaved else None,
        "pipeline_model_parallel_layout": (
            name_parts(part_layers) if layout.pipeline > 1 else None
        ),
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor_size,
        # Under the interleaved schedule, two stages exchange two messages at the same time. Batched
        # point-to-point operations could not distinguish them.
        "overlap_p2p_comm": is_interleaved,
        "batch_p2p_comm": not is_interleaved,
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
    """Return megatron-core's configuration of a model at a parallel layout.

    Args:
        shape: Dimensions of the model.
        layout: Parallel sizes.
        dtype: Dtype of parameters and activations.
        recompute: Activation recomputation: none, selective or full.
        transformer_engine: Whether the model uses transformer-engine's layers.
        fp8_recipe: Scaling recipe of fp8 GEMMs; None means GEMMs in `dtype`.
    """
    is_plain_swiglu = shape.gated and shape.activation == "silu" and not shape.ffn_bias
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig(
            **_architecture_settings(shape, layout.tensor),
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            # Weights are read from files, so random initialization would be wasted.
            perform_initialization=False,
            use_cpu_initialization=True,
            # Packed micro-batches differ in length. megatron-core then requires this dispatcher,
            # even for dense models.
            variable_seq_lengths=True,
            moe_token_dispatcher_type="alltoall",
            # This setting keeps the schedule and DDP from dividing by the number of micro-batches
            # or ranks; see _finalize_gradients.
            calculate_per_token_loss=True,
            deterministic_mode=torch.cuda.is_available()
            and torch.are_deterministic_algorithms_enabled(),
            finalize_model_grads_func=_finalize_gradients,
            gradient_accumulation_fusion=_has_fused_gradient_accumulation(),
            masked_softmax_fusion=False,
            # On GPUs, megatron-core compiles these functions; cpu_backend replaces them on CPUs.
            bias_activation_fusion=is_plain_swiglu,
            bias_dropout_fusion=False,
            # The unfused rotary embedding synchronizes with the GPU in every layer of a packed
            # micro-batch.
            apply_rope_fusion=transformer_engine and not shape.learned_positions,
            **_layout_settings(shape, layout),
            **_RECOMPUTE[recompute],
            **({} if fp8_recipe is None else _FP8[fp8_recipe]),
        )


def _has_fused_gradient_accumulation() -> bool:
    """Return whether the GEMM of a weight's gradient adds its result directly to the gradient
    buffer.

    On CPUs `cpu_backend` implements it, on GPUs apex's kernels do.
    """
    return (
        not torch.cuda.is_available()
        or importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    )


def computing_dtype(settings: MegatronModelConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of the layers' computations.

    The automatic value is bf16 on GPUs and fp32 on CPUs, which have no fast bf16 GEMM.
    """
    auto = "bf16" if device.type == "cuda" else "fp32"
    precision = auto if settings.precision == "auto" else settings.precision
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}[precision]


def build_model(
    shape: ModelShape,
    world: World,
    head: Head,
    settings: MegatronModelConfig,
    *,
    exact: bool = False,
) -> list[GPTModel]:
    """Return this rank's model chunks, without weights.

    There is one chunk, or as many as the interleaved schedule of the layout requires.

    Args:
        shape: Dimensions of the model.
        world: This rank's view of the role's ranks.
        head: Vocabulary head or scalar head.
        settings: Configuration section of the model.
        exact: `engine.exact`: use batch-invariant kernels.

    Raises:
        ConfigError: If fp8 is configured but transformer-engine's layers are not available.
    """
    dtype = computing_dtype(settings, world.device)
    recompute = settings.recompute if isinstance(settings, TrainedModelConfig) else "none"
    transformer_engine = uses_transformer_engine(shape, settings, dtype)
    fp8_recipe = settings.fp8_recipe if settings.precision == "fp8" else None
    if fp8_recipe is not None and not transformer_engine:
        raise ConfigError(
            "precision=fp8: requires transformer-engine on a GPU; install transformer-engine, or"
            " set precision=bf16"
        )
    config = transformer_config(
        shape,
        world.layout,
        dtype,
        recompute,
        transformer_engine=transformer_engine,
        fp8_recipe=fp8_recipe,
    )
    build_layers = partial(
        decoder_submodules, shape, config, exact=exact, transformer_engine=transformer_engine
    )
    # `PackedAttention` applies rotary positions itself.
    rotary = "rope" if transformer_engine else "none"
    # megatron-core 0.19 builds norms of queries and keys only if this is set. Later, it makes
    # megatron-core sum the gradients of norms, which is wrong for norms of all heads; see
    # `_architecture_settings`.
    config.qk_layernorm = shape.qk_norm is not None
    chunks = [
        _build_chunk(shape, world, head, config, chunk, build_layers, rotary)
        for chunk in range(world.layout.virtual_pipeline)
    ]
    config.qk_layernorm = shape.qk_norm == "head"
    return chunks


def _build_chunk(
    shape: ModelShape,
    world: World,
    head: Head,
    config: TransformerConfig,
    chunk: int,
    build_layers: Callable[[range], TransformerBlockSubmodules],
    rotary: str,
) -> GPTModel:
    """Return one model chunk of this rank, on its device.

    Args:
        shape: Dimensions of the model.
        world: This rank's view of the role's ranks.
        head: Vocabulary head or scalar head.
        config: megatron-core's configuration of the model.
        chunk: Index of the chunk on this pipeline stage.
        build_layers: Function that returns the specs of layers.
        rotary: megatron-core's type of rotary positions, rope or none.
    """
    chunks = world.layout.virtual_pipeline
    has_head = world.is_last_stage and chunk == chunks - 1
    stage = chunk if chunks > 1 else None
    layers = stage_layers(shape, world.layout, world.coordinates.pipeline)[chunk]
    # the rotary positions of all layers; only transformer-engine's layers use it
    rope = None if shape.common_layer is None else shape.common_layer.rope
    tensor_ranks = world.layout.tensor
    padded_vocabulary = compute_shard_size(shape.vocab_size, tensor_ranks) * tensor_ranks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = GPTModel(
            config=config,
            transformer_layer_spec=build_layers(layers),
            vocab_size=padded_vocabulary,
            max_sequence_length=shape.max_positions,
            position_embedding_type="learned_absolute" if shape.learned_positions else rotary,
            rotary_percent=1.0 if rope is None else rope.fraction,
            pre_process=world.coordinates.pipeline == 0 and chunk == 0,
            post_process=has_head,
            share_embeddings_and_output_weights=shape.tied_embeddings and head == "vocabulary",
            parallel_output=True,
            vp_stage=stage,
        )
    if rope is not None and rotary == "rope":
        # Use the engines' frequencies, which include every kind of scaling. They are float32,
        # because the angles of long contexts need this precision.
        model.rotary_pos_emb.inv_freq = torch.tensor(
            compute_inverse_frequencies(rope, shape.head_dim), dtype=torch.float32
        )
    _clear_vocabulary_padding(model, padded_vocabulary - shape.vocab_size, world)
    _mark_tensor_parallel(model)
    _mark_experts(model)
    if has_head:
        install_head(model, head, shape.vocab_size, shape.logit_scale, shape.logit_softcap)
    if model.pre_process and shape.embedding_factor != 1:
        model.embedding.register_forward_hook(
            lambda module, inputs, embedded: embedded * shape.embedding_factor
        )
    # megatron-core creates its layers in the configured dtype, but our norms and heads are created
    # in float32.
    model = model.to(device=world.device, dtype=config.params_dtype)
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            module.make_weights_contiguous()
        elif isinstance(module, ExpertRouter):
            module.keep_bias_in_float32()
    return model


def _clear_vocabulary_padding(model: GPTModel, padding: int, world: World) -> None:
    """Set the last `padding` rows of the embedding and the head to zero, on the last tensor rank.

    These rows pad the vocabulary. Files have no values for them, and uninitialized memory may
    contain NaNs.
    """
    if not padding or world.coordinates.tensor != world.layout.tensor - 1:
        return
    embedding = getattr(model, "embedding", None)
    weights = (
        None if embedding is None else embedding.word_embeddings.weight,
        getattr(getattr(model, "output_layer", None), "weight", None),
    )
    with torch.no_grad():
        for weight in weights:
            if weight is not None:
                weight[-padding:] = 0.0


def _mark_tensor_parallel(model: GPTModel) -> None:
    # megatron-core before 0.18 marks a sharded weight only when it initializes the weight. Without
    # the mark, the gradient norm would count only the shard of the first tensor rank.
    for module in model.modules():
        is_sharded = isinstance(
            module, (ColumnParallelLinear, VocabParallelEmbedding, RowParallelLinear)
        )
        # A tied head on the embedding's stage has no weight of its own.
        if not is_sharded or module.weight is None:
            continue
        if not hasattr(module.weight, "tensor_model_parallel"):
            dimension = int(isinstance(module, RowParallelLinear))
            set_tensor_model_parallel_attributes(
                module.weight, is_parallel=True, dim=dimension, stride=1
            )


def _mark_experts(model: GPTModel) -> None:
    # DDP puts parameters with `allreduce = False` into the experts' own buffers and reduces their
    # gradients over the experts' data ranks. megatron-core sets this attribute only if the
    # expert-parallel size is above 1, but even at a size of 1 the layout of experts can differ from
    # the layout of dense layers.
    for name, parameter in model.named_parameters():
        if ".local_experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]
        if name.endswith("linear_fc2.bias") and ".local_experts." in name:
            # No other rank has this bias, since experts with biases have an expert-tensor-parallel
            # size of 1 (see `layouts`). megatron-core would sum its gradient over the tensor ranks,
            # and would count it in the gradient norm only on the first of them.
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def wrap_for_training(
    chunks: Sequence[GPTModel], optimizer: OptimizerConfig
) -> list[DistributedDataParallel]:
    """Return the model chunks wrapped in megatron-core's DDP.

    DDP stores the gradients in contiguous fp32 buckets and sums them over the data and context
    ranks. With `overlap_grad_reduce`, it reduces a bucket as soon as the gradients of the last
    micro-batch are complete.
    """
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=optimizer.overlap_grad_reduce,
        overlap_param_gather=optimizer.overlap_param_gather,
        use_distributed_optimizer=optimizer.distributed,
        average_in_collective=False,
    )
    for chunk in chunks:
        # With full activation recomputation, a layer computes gradients of its weights only if its
        # input requires gradients. After a frozen embedding, make the hidden states require
        # gradients.
        if chunk.pre_process and chunk.config.recompute_granularity == "full":
            chunk.embedding.register_forward_hook(
                lambda module, inputs, hidden: _require_gradients(hidden)
            )
    wrapped = [DistributedDataParallel(chunk.config, settings, chunk) for chunk in chunks]
    if optimizer.overlap_grad_reduce:
        for parameter in itertools.chain.from_iterable(chunk.parameters() for chunk in chunks):
            parameter.is_reduced_early = parameter.requires_grad  # type: ignore[attr-defined]
        # The schedule enters no_sync for all micro-batches except the last, so only the accumulated
        # gradients are reduced.
        no_sync_functions = [chunk.no_sync for chunk in wrapped]
        wrapped[0].config.no_sync_func = (
            no_sync_functions if len(no_sync_functions) > 1 else no_sync_functions[0]
        )
    return wrapped


def _require_gradients(hidden: Tensor) -> Tensor:
    """Return the hidden states, and make them require gradients if autograd is enabled."""
    return (
        hidden if hidden.requires_grad or not torch.is_grad_enabled() else hidden.requires_grad_()
    )


def drop_last_graph(chunks: Sequence[GPTModel]) -> None:
    """Release the autograd graph of the last micro-batch.

    megatron-core's token dispatchers keep tensors of this graph until the next forward pass.
    Through the gradient hooks of the graph, these tensors refer to the model itself. Python's
    garbage collector cannot see this reference cycle and would never free it.
    """
    dispatchers = [
        getattr(module, "token_dispatcher", None) for chunk in chunks for module in chunk.modules()
    ]
    for dispatcher in filter(None, dispatchers):
        for name, value in vars(dispatcher).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                setattr(dispatcher, name, None)
