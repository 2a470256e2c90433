"""Causal attention with rotary positions over packed micro-batches.

It replaces transformer-engine's attention on machines and for data types that transformer-engine
does not support.

Shapes: T is the number of tokens of all context ranks, C the context-parallel size, and a row is
one sequence. N rows are padded on the right to L tokens. Without context parallelism, C is 1.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from aligner.megatron import shared_prefixes
from aligner.megatron.packing import PackedSequences, require_packed
from aligner.megatron.rotary_positions import apply_rotation
from aligner.megatron.sharded_parameters import shard_first_dim
from aligner.models import batch_invariant, score_attention
from aligner.models.shape import LayerShape


class PackedAttention(nn.Module):
    """Causal attention within each sequence of a packed micro-batch.

    Our layers use it as their `core_attention` module. It uses PyTorch's fused kernels, or, with
    `engine.exact`, the batch-invariant kernel. If rows share prefixes, it uses the kernels of
    `shared_prefixes`, and for soft caps and sinks those of `score_attention`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *_: Any,
        layer: LayerShape,
        exact: bool = False,
        softcap: float | None = None,
        has_sinks: bool = False,
        **__: Any,
    ) -> None:
        """Create the attention of a layer.

        Args:
            config: Configuration of the model.
            layer: Rotary positions and sliding window of the layer. The module rotates queries and
                keys itself, because megatron-core would compute the cosines and sines again in
                every layer. Latent attention, which rotates a part of them, has a layer without
                rotary positions here.
            exact: `engine.exact`: use the batch-invariant kernel.
            softcap: Soft cap of the scores; None means no cap.
            has_sinks: Whether each head has a sink.
        """
        super().__init__()
        self._softcap = softcap
        self.softmax_offset: nn.Parameter | None = None
        """Sinks of this rank's heads, [heads / TP], with megatron-core's name."""
        if has_sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = shard_first_dim(torch.zeros(heads))
        self.exact = exact
        self.scale = config.softmax_scale
        self._rope = layer.rope
        self._head_dim = config.kv_channels
        self.window = None if layer.sliding_window is None else layer.sliding_window - 1
        """Number of keys before its own position that a query attends to; None means all."""

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
        """Return the attention output of this rank's tokens.

        The packed sequences are laid out as rows. Padding follows the tokens of a row, so a causal
        mask also keeps tokens from attending to padding. PyTorch's kernels apply a causal mask
        without a mask tensor. A mask tensor is needed only for a sliding window, and under context
        parallelism, where the queries of a row are two of the 2C chunks of its sequence.

        Under context parallelism, the function all-gathers the keys and values of all context
        ranks; the backward pass reduce-scatters their gradients.

        Args:
            query: [T/C, heads, dim].
            key: [T/C, key/value heads, dim].
            value: [T/C, key/value heads, dim].
            attention_mask: Ignored.
            attn_mask_type: Ignored.
            attention_bias: Ignored.
            packed_seq_params: Description of the packed micro-batch.

        Returns:
            [T/C, heads·dim], in the dtype of `query`.

        Raises:
            TypeError: If `packed_seq_params` is not a PackedSequences.
        """
        packed = require_packed(packed_seq_params, "attention")
        if self._rope is not None:
            query = apply_rotation(query, self._rope, self._head_dim, packed)
            key = apply_rotation(key, self._rope, self._head_dim, packed)
        # Rows share prefixes only without sliding windows, soft caps and sinks, without
        # `engine.exact` and without context parallelism (see `runner`), so this path need not
        # support them.
        if packed.attention_tree is not None:
            return shared_prefixes.attend(
                query, key, value, packed.attention_tree, self.scale
            ).flatten(1)
        if packed.context_group is not None:
            # One all-gather for keys and values together.
            gathered = gather_from_sequence_parallel_region(
                torch.cat([key, value], 1), group=packed.context_group
            )
            key, value = gathered.chunk(2, 1)
        # From [N, L, heads, dim] to [N, heads, L, dim].
        attended = self._attend_rows(
            packed.to_query_rows(query).transpose(1, 2),
            packed.to_key_rows(key).transpose(1, 2),
            packed.to_key_rows(value).transpose(1, 2),
            self._build_mask(packed, query.device),
        )
        return packed.from_query_rows(attended.transpose(1, 2).flatten(2))

    def _attend_rows(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Return the attention output of rows, with the kernel that supports the model.

        Args:
            query: [N, heads, L/C, dim].
            key: [N, key/value heads, L, dim].
            value: [N, key/value heads, L, dim].
            mask: Keys to which each query attends, bool; see `_build_mask`.

        Returns:
            [N, heads, L/C, dim].
        """
        visible = None if mask is None else mask[:, 0]
        if self.exact:
            if visible is None:
                width = key.shape[2]
                visible = torch.ones(width, width, dtype=torch.bool, device=key.device).tril()
            return batch_invariant.attend(query, key, value, visible, self.scale)
        if self._softcap is not None or self.softmax_offset is not None:
            return score_attention.attend(
                query,
                key,
                value,
                visible,
                scale=self.scale,
                softcap=self._softcap,
                sinks=self.softmax_offset,
            )
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def _build_mask(self, packed: PackedSequences, device: torch.device) -> Tensor | None:
        """Return which keys each query attends to.

        Returns:
            bool [N, 1, L/C, L] under context parallelism, bool [1, 1, L, L] for a sliding window
            without it. None otherwise: the mask is causal, and the kernels apply it without a
            tensor.
        """
        width = packed.key_shape[1]
        window = self.window if self.window is not None and self.window < width - 1 else None
        keys = torch.arange(width, device=device)
        if packed.query_positions is not None:
            queries = packed.query_positions[..., None]
        elif window is not None:
            queries = keys[None, :, None]
        else:
            return None
        visible = keys <= queries
        if window is not None:
            visible &= keys >= queries - window
        return visible[:, None]
