"""megatron-core's layer specs of a pipeline stage, from the parts of a model.

A model has either transformer-engine's layers, or megatron-core's local layers with our norms,
attention and experts.
"""

import dataclasses
from functools import partial

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from aligner.megatron.attention import PackedAttention
from aligner.megatron.core_releases import get_submodules, replace_module
from aligner.megatron.decoder_layers import DecoderLayer, ParallelResidualLayer, ResidualAdd
from aligner.megatron.expert_router import ExpertRouter, ExpertsLayer
from aligner.megatron.gated_delta_net import GatedDeltaNet
from aligner.megatron.grouped_experts import GroupedExperts, supports_grouped_gemm
from aligner.megatron.latent_attention import LatentSelfAttention
from aligner.megatron.linear_layers import (
    BiasedColumnParallelLinear,
    BiasedExpertOutput,
    BiasedRowParallelLinear,
)
from aligner.megatron.norms import ProjectionNorm, choose_norm
from aligner.models.shape import Experts, LatentAttention, LayerShape, ModelShape
from aligner.schema import ActorConfig, MegatronModelConfig


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
    layer_specs = []
    for layer in layers:
        layer_shape = shape.layers[layer]
        if transformer_engine:
            spec = _transformer_engine_spec(shape, layer_shape)
        else:
            spec = _local_spec(shape, config, layer_shape, exact)
        if shape.parallel_residual:
            spec.module = ParallelResidualLayer
        if layer_shape.has_experts and shape.experts is not None:
            _set_experts(spec, shape.experts, shape.expert_layers.index(layer), config)
        layer_specs.append(spec)
    norm = TENorm if transformer_engine else choose_norm(shape)
    return TransformerBlockSubmodules(layer_specs=layer_specs, layer_norm=norm)


def _transformer_engine_spec(shape: ModelShape, layer_shape: LayerShape) -> ModuleSpec:
    """Return megatron-core's spec of a layer with transformer-engine's modules."""
    return get_gpt_layer_with_transformer_engine_spec(
        num_experts=shape.num_experts if layer_shape.has_experts else None,
        qk_layernorm=shape.qk_norm is not None,
    )


def _local_spec(
    shape: ModelShape, config: TransformerConfig, layer_shape: LayerShape, exact: bool
) -> ModuleSpec:
    """Return megatron-core's local layer spec with our norms and attention."""
    norm = choose_norm(shape)
    spec = get_gpt_layer_local_spec(
        num_experts=shape.num_experts if layer_shape.has_experts else None,
        qk_layernorm=shape.qk_norm is not None,
        normalization={"rms": "RMSNorm", "layer": "LayerNorm"}[shape.normalization],
    )
    spec.module = DecoderLayer
    _set_residual_connections(spec, shape, config)

    parts = spec.submodules
    if layer_shape.has_delta_net:
        parts.self_attention = ModuleSpec(GatedDeltaNet, params={"net": shape.delta_net})
    elif shape.latent_attention is not None:
        parts.self_attention = _latent_attention_spec(
            shape.latent_attention, layer_shape, norm, exact
        )
    else:
        _set_attention(parts.self_attention.submodules, shape, config, layer_shape, exact=exact)

    if shape.ffn_bias and layer_shape.is_dense:
        feed_forward = get_submodules(parts.mlp)
        feed_forward.linear_fc1 = BiasedColumnParallelLinear
        feed_forward.linear_fc2 = BiasedRowParallelLinear
    # The router of megatron-core 0.16 tests whether this name is None, but defines it only if
    # transformer-engine is installed.
    moe_utils.te_general_gemm = None
    return spec


def _set_residual_connections(
    spec: ModuleSpec, shape: ModelShape, config: TransformerConfig
) -> None:
    """Set the norms before and after attention and feed-forward network, and the residual scale."""
    norm = choose_norm(shape)
    parts = spec.submodules
    norm_before = IdentityOp if shape.norm_placement == "after" else norm
    parts.input_layernorm = parts.pre_mlp_layernorm = norm_before
    if shape.norm_placement != "before" or shape.residual_scale != 1:
        norm_after = None if shape.norm_placement == "before" else norm
        add = ModuleSpec(
            ResidualAdd,
            params={"config": config, "norm": norm_after, "scale": shape.residual_scale},
        )
        parts.self_attn_bda = parts.mlp_bda = add


def _set_experts(
    spec: ModuleSpec, experts: Experts, routing_index: int, config: TransformerConfig
) -> None:
    """Set our router and experts in a layer spec.

    Args:
        spec: Spec of the layer.
        experts: Dimensions and parts of the mixture of experts.
        routing_index: Index of the layer among the layers with experts.
        config: megatron-core's configuration of the model.
    """
    spec.module = ExpertsLayer
    spec.params["routing_index"] = routing_index
    mixture = get_submodules(spec.submodules.mlp)
    mixture.router = partial(ExpertRouter, experts=experts)
    if experts.has_biases:
        expert = get_submodules(mixture.experts)
        expert.linear_fc1 = BiasedColumnParallelLinear
        expert.linear_fc2 = BiasedExpertOutput
    if supports_grouped_gemm(config):
        mixture.experts = replace_module(mixture.experts, GroupedExperts)


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
        attention.q_layernorm = attention.k_layernorm = choose_norm(shape)
    elif shape.qk_norm == "projection":
        attention.q_layernorm = ModuleSpec(ProjectionNorm, params={"heads": shape.num_heads})
        attention.k_layernorm = ModuleSpec(
            ProjectionNorm, params={"heads": config.num_query_groups}
        )


def _latent_attention_spec(
    latent: LatentAttention, layer: LayerShape, norm: type[nn.Module], exact: bool
) -> ModuleSpec:
    """Return the spec of a layer's latent attention; see `_local_spec`."""
    # The core attends to queries and keys that are already rotated.
    unrotated = dataclasses.replace(layer, rope=None)
    core = ModuleSpec(PackedAttention, params={"exact": exact, "layer": unrotated})
    params = {"latent": latent, "rope": layer.rope, "norm": norm, "core_attention": core}
    return ModuleSpec(LatentSelfAttention, params=params)


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
