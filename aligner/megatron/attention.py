"""Core attention over packed sequences, through PyTorch's fused kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from aligner.megatron.packing import PackedSequences


class PackedAttention(nn.Module):
    """Causal attention inside each sequence of a packed micro-batch, through PyTorch's fused kernels.

    `config.window_size` (left, 0) limits a query to the `left` keys before it and its own.
    """

    def __init__(self, config: TransformerConfig, *_: Any, **__: Any) -> None:
        super().__init__()
        self.scale = config.softmax_scale
        self.window = None if config.window_size is None else config.window_size[0]

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
        no mask tensor is made for whole sequences. Only attention sees the padding of rows; every matrix product runs on
        packed tokens. Under context parallelism the T tokens are this rank's, and keys and values of all context ranks are
        gathered (their gradients are summed and scattered back).
        """
        if not isinstance(packed_seq_params, PackedSequences):
            raise TypeError(f"attention runs on packed micro-batches only, got {type(packed_seq_params).__name__}")
        packed, grouped = packed_seq_params, query.shape[1] != key.shape[1]
        if packed.context_group is not None:
            both = gather_from_sequence_parallel_region(torch.cat([key, value], 1), group=packed.context_group)
            key, value = both.chunk(2, 1)
        mask = self._mask(packed, query.device)
        attended = F.scaled_dot_product_attention(
            _to_rows(query, packed.query_index, packed.query_rows),
            _to_rows(key, packed.key_index, packed.key_rows),
            _to_rows(value, packed.key_index, packed.key_rows),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=grouped,
        )
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)[packed.query_index]

    def _mask(self, packed: PackedSequences, device: torch.device) -> Tensor | None:
        """Which keys each query sees, bool [N or 1, 1, L/C, L]; None for plain causal rows."""
        width = packed.key_rows[1]
        window = self.window if self.window is not None and self.window < width - 1 else None
        keys = torch.arange(width, device=device)
        if packed.query_positions is not None:
            queries = packed.query_positions[..., None]
        elif window is not None:
            queries = keys[None, :, None]
        else:
            return None
        seen = keys <= queries
        if window is not None:
            seen &= keys >= queries - window
        return seen[:, None]


def _to_rows(tensor: Tensor, index: Tensor, rows: tuple[int, int]) -> Tensor:
    """[T, heads, dim] to [N, heads, L, dim], zeros at the padding; `index` int64 [T] is each token's place in [N·L]."""
    padded = tensor.new_zeros(rows[0] * rows[1], *tensor.shape[1:]).index_copy(0, index, tensor)
    return padded.view(*rows, *tensor.shape[1:]).transpose(1, 2)
