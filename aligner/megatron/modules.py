"""The modules that megatron-core lets us choose: norm, core attention over packed sequences, and the scalar head."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from aligner.megatron.packing import PackedSequences


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm; megatron-core's own fallback refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        # Tells megatron-core to add this weight's gradients up over the tensor ranks when each saw part of the tokens.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class PackedAttention(nn.Module):
    """Causal attention inside each sequence of a packed micro-batch, through PyTorch's fused kernels."""

    def __init__(self, config: TransformerConfig, *_: Any, **__: Any) -> None:
        super().__init__()
        self.scale = config.softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """Attend; query [T, heads, dim], key and value [T, key/value heads, dim] to [T, heads·dim].

        The sequences are laid out as rows, padded on the right: a causal mask alone keeps a token from seeing padding, so
        no mask tensor is made. Only attention sees the padding; every matrix product runs on packed tokens.
        """
        if not isinstance(packed_seq_params, PackedSequences):
            raise TypeError(f"attention runs on packed micro-batches only, got {type(packed_seq_params).__name__}")
        index, rows = packed_seq_params.row_index, packed_seq_params.rows
        attended = F.scaled_dot_product_attention(
            _to_rows(query, index, rows),
            _to_rows(key, index, rows),
            _to_rows(value, index, rows),
            is_causal=True,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)[index]


def _to_rows(tensor: Tensor, index: Tensor, rows: tuple[int, int]) -> Tensor:
    """[T, heads, dim] to [N, heads, L, dim], zeros at the padding; `index` int64 [T] is each token's place in [N·L]."""
    padded = tensor.new_zeros(rows[0] * rows[1], *tensor.shape[1:]).index_copy(0, index, tensor)
    return padded.view(*rows, *tensor.shape[1:]).transpose(1, 2)


class ScalarHead(nn.Module):
    """One number a token, in the place of the vocabulary projection; the whole head lives on every tensor rank."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size))

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """[T, 1, hidden] to [T, 1, 1], with megatron-core's (output, bias) convention."""
        return F.linear(hidden, self.weight), None


def decoder_submodules(config: TransformerConfig) -> TransformerBlockSubmodules:
    """This pipeline stage's layers for the Llama family: megatron-core's local layers around our norm and attention."""
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    layer.submodules.self_attention.submodules.core_attention = PackedAttention
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)
