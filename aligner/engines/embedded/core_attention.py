"""Attention of queries over the KV cache and within prompts, for all kinds of attention layers."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from aligner.engines.embedded import block_attention, sliced_attention
from aligner.engines.embedded.forward_context import ForwardContext
from aligner.models import batch_invariant, score_attention
from aligner.models.shape import ModelShape


class CoreAttention:
    """Softmax attention of this rank's heads.

    Decoding rows read the blocks of the KV cache in one of three ways. On CPUs, `block_attention`
    reads the blocks of fp32 caches where they are, unless they are few. On GPUs, `sliced_attention`
    does so if the decoder is sliced. Otherwise the blocks of each row are copied into contiguous
    memory, for PyTorch's fused kernels. With `engine.exact`, the batch-invariant kernel reads the
    copies, and for soft caps and sinks `score_attention`.
    """

    def __init__(
        self,
        shape: ModelShape,
        weights: Mapping[str, Tensor],
        *,
        exact: bool,
    ) -> None:
        """Create the attention of a model.

        Args:
            shape: Dimensions of the model.
            weights: The decoder's current weights, by their names.
            exact: Value of `engine.exact`.
        """
        self._shape = shape
        self._weights = weights
        self._is_exact = exact
        self._has_fused_kernel = shape.has_plain_scores and not exact

    def attend_cache(self, layer: int, query: Tensor, context: ForwardContext) -> Tensor:
        """Compute the attention of decoding rows over the KV cache, which contains their tokens.

        Args:
            layer: Index of the layer.
            query: [R, heads, head dim]. A query attends to its own token, too.
            context: Context of the forward pass.

        Returns:
            The attention output of the decoding rows, [R, heads * value dim].
        """
        cache = context.cache
        shape = self._shape
        step = context.step
        window = shape.layers[layer].sliding_window
        keys = cache.keys[cache.layer_indices[layer]]
        values = cache.values[cache.layer_indices[layer]]
        if context.spans:
            spans = context.spans[window]
            return sliced_attention.attend(query, keys, values, spans, shape.softmax_scale)
        mask = context.cache_masks[window]
        if context.block_plan is not None:
            return block_attention.attend(
                query,
                keys,
                values,
                context.block_plan,
                mask,
                scale=shape.softmax_scale,
                softcap=shape.attention_softcap,
                sinks=self._get_sinks(layer),
            )

        assert context.copied_blocks is not None
        keys, values = cache.gather(layer, context.copied_blocks)
        return self._attend_rows(
            layer, query.unflatten(0, (-1, step.tokens_per_row)), keys, values, mask
        )

    def attend_prompts(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, context: ForwardContext
    ) -> Tensor:
        """Compute the attention within each prompt.

        Args:
            layer: Index of the layer.
            query: [N, heads, head dim].
            keys: [U, KV heads, P, head dim].
            values: [U, KV heads, P, value dim].
            context: Context of the forward pass.

        Returns:
            The attention output of the prompt tokens, [N, heads * value dim].
        """
        token_indices = context.prompt_token_indices
        assert token_indices is not None
        queries = context.pad_prompts(query).transpose(1, 2)
        mask = context.prompt_masks[self._shape.layers[layer].sliding_window]
        if self._has_fused_kernel:
            attention = F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None,
                scale=self._shape.softmax_scale,
                enable_gqa=True,
            )
        else:
            attention = self._attend_scores(layer, queries, keys, values, mask)
        return attention.transpose(1, 2)[token_indices].flatten(1)

    def _attend_rows(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor
    ) -> Tensor:
        """Compute the attention of decoding rows over contiguous keys and values.

        Args:
            layer: Index of the layer.
            query: [B, W, heads, head dim], where W is `Step.tokens_per_row`.
            keys: [B, KV heads, columns, head dim].
            values: [B, KV heads, columns, value dim].
            mask: An entry of `ForwardContext.cache_masks`.

        Returns:
            The attention output [B * W, heads * value dim].
        """
        rows, tokens_per_row, _, head_dim = query.shape
        if not self._has_fused_kernel:
            attention = self._attend_scores(layer, query.transpose(1, 2), keys, values, mask)
            return attention.transpose(1, 2).reshape(rows * tokens_per_row, -1)

        # Stack the queries that share a KV head, so that the kernel reads each key once. The shape
        # is [B, KV heads, W * queries of a KV head, head dim].
        grouped = query.reshape(rows, tokens_per_row, keys.shape[1], -1, head_dim)
        stacked = grouped.transpose(1, 2).flatten(2, 3)
        attention = F.scaled_dot_product_attention(
            stacked, keys, values, attn_mask=mask, scale=self._shape.softmax_scale
        )
        # [B, KV heads, W, queries of a KV head, head dim] -> [B * W, heads * head dim]
        unstacked = attention.unflatten(2, (tokens_per_row, -1))
        return unstacked.transpose(1, 2).reshape(rows * tokens_per_row, -1)

    def _attend_scores(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None
    ) -> Tensor:
        """Compute attention with separate operations, batch-invariant or with caps or sinks.

        Args:
            layer: Index of the layer.
            query: [B, heads, L, head dim].
            keys: [B, KV heads, W, head dim].
            values: [B, KV heads, W, head dim].
            visible: Keys to which a query attends, bool [B, L, W] or [L, W]; None means a causal
                mask.

        Returns:
            The attention output [B, heads, L, head dim].
        """
        shape = self._shape
        if self._is_exact:
            assert visible is not None
            return batch_invariant.attend(query, keys, values, visible, shape.softmax_scale)
        return score_attention.attend(
            query,
            keys,
            values,
            visible,
            scale=shape.softmax_scale,
            softcap=shape.attention_softcap,
            sinks=self._get_sinks(layer),
        )

    def _get_sinks(self, layer: int) -> Tensor | None:
        """Return the sink of each head, [heads]; None if the model has no sinks."""
        if not self._shape.attention_sinks:
            return None
        return self._weights[f"decoder.layers.{layer}.self_attention.core_attention.softmax_offset"]
