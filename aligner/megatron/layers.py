"""The layers of a pipeline stage: megatron-core's own around the modules that it lets us choose."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from aligner.megatron.attention import PackedAttention
from aligner.models.shape import ModelShape


def _mark_for_sequence_parallelism(norm: nn.Module, config: TransformerConfig) -> None:
    # Tells megatron-core to add the gradients up over the tensor ranks when each saw part of the tokens.
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm; megatron-core's own fallback refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        _mark_for_sequence_parallelism(self, config)


class LayerNorm(nn.LayerNorm):
    """Layer norm with a bias; megatron-core's own fallback refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        _mark_for_sequence_parallelism(self, config)


class ParallelResidualLayer(TransformerLayer):
    """x + attention(norm(x)) + mlp(other norm(x)), as in GPT-NeoX (Black et al. 2022, section 2.1)."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """[T, 1, H] to [T, 1, H], with megatron-core's (output, context) convention."""
        attended, context = self._forward_attention(hidden_states, **kwargs)
        added = self.mlp(self._forward_pre_mlp_layernorm(hidden_states))
        return self._forward_post_mlp(added, attended), context


def decoder_submodules(shape: ModelShape, config: TransformerConfig, chunk: int | None = None) -> TransformerBlockSubmodules:
    """This pipeline stage's layers, or those of one of its chunks: transformer-engine's where it is, or our own."""
    layer, norm = _transformer_engine_layer(shape) if HAVE_TE and torch.cuda.is_available() else _own_layer(shape)
    if shape.parallel_residual:
        layer.module = ParallelResidualLayer
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config, chunk), layer_norm=norm)


def _transformer_engine_layer(shape: ModelShape) -> tuple[ModuleSpec, type]:
    # Experts stay one module each: transformer-engine's grouped ones have no parameter for a single expert.
    layer = get_gpt_layer_with_transformer_engine_spec(num_experts=shape.num_experts or None, qk_layernorm=shape.qk_norm)
    return layer, TENorm


def _own_layer(shape: ModelShape) -> tuple[ModuleSpec, type]:
    """megatron-core's local layer around our norms and our attention over packed sequences."""
    norm = {"rms": RMSNorm, "layer": LayerNorm}[shape.normalization]
    layer = get_gpt_layer_local_spec(
        num_experts=shape.num_experts or None,
        qk_layernorm=shape.qk_norm,
        normalization={"rms": "RMSNorm", "layer": "LayerNorm"}[shape.normalization],
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = norm
    # megatron-core 0.16's router asks whether this is None, but names it only where transformer-engine is.
    moe_utils.te_general_gemm = None
    return layer, norm
