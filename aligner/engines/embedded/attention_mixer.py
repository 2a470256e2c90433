"""Multi-head and grouped-query attention of a layer."""

import torch
from torch import Tensor

from aligner.engines.embedded.core_attention import CoreAttention
from aligner.engines.embedded.forward_context import ForwardContext, concatenate_tokens
from aligner.engines.embedded.matmuls import Matmuls
from aligner.engines.embedded.normalization import Norms
from aligner.models.rotary import rotate
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import weight_table


class AttentionMixer:
    """Computes the attention of a model's layers for this rank's heads."""

    def __init__(
        self,
        shape: ModelShape,
        tensor_parallel_size: int,
        matmuls: Matmuls,
        norms: Norms,
        core: CoreAttention,
    ) -> None:
        """Create the attention of a model.

        Args:
            shape: Dimensions of the model.
            tensor_parallel_size: Number of tensor-parallel ranks.
            matmuls: Matmuls of the decoder.
            norms: Norms of the decoder.
            core: Attention between queries, keys and values.
        """
        self._shape = shape
        self._heads = shape.num_heads // tensor_parallel_size
        self._kv_heads = shape.kv_heads_on_rank(tensor_parallel_size)
        self._matmuls = matmuls
        self._norms = norms
        self._core = core
        # Some checkpoints store query, key and value in one tensor, interleaved by KV head. The
        # engine keeps the order of the checkpoint's file.
        self._is_interleaved = any(
            "linear_qkv" in spec.parameter and spec.part == "whole" for spec in weight_table(shape)
        )

    def mix(self, layer: int, x: Tensor, context: ForwardContext) -> Tensor:
        """Compute the attention of x [N, hidden], with the output projection. Collective.

        The keys and values of all tokens are written into the KV cache.

        Returns:
            [N, hidden].
        """
        prefix = f"decoder.layers.{layer}.self_attention."
        query, key, value, gate = self._compute_qkv(layer, x, prefix, context)

        # The decoding rows attend to the KV cache, the prompts to themselves; the two kinds need
        # different masks and kernels.
        context.store(layer, key, value)
        rows = context.num_decoding_tokens
        parts = []
        if rows:
            parts.append(self._core.attend_cache(layer, query[:rows], context))
        if context.step.prompts is not None:
            keys = context.pad_prompts(key[rows:]).transpose(1, 2)
            values = context.pad_prompts(value[rows:]).transpose(1, 2)
            parts.append(self._core.attend_prompts(layer, query[rows:], keys, values, context))
        attention = concatenate_tokens(parts)
        if gate is not None:
            attention = attention * gate.sigmoid()
        return self._matmuls.row_parallel_linear(attention, prefix + "linear_proj")

    def _compute_qkv(
        self, layer: int, x: Tensor, prefix: str, context: ForwardContext
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Compute the queries, keys and values of x [N, hidden], and the gates of the output.

        Queries and keys are normalized if the model does so, and rotated.

        Returns:
            Queries [N, heads, head dim], keys and values [N, KV heads, head dim], and gates
            [N, heads * head dim] or None if the model has none, all for this rank's heads.
        """
        fused = self._matmuls.linear(x, prefix + "linear_qkv")
        gate = None
        if self._shape.attention_gate:
            fused, gate = self._split_gate(fused)

        # Queries and keys stay in one tensor, so that one kernel rotates both.
        query_key, value = self._split_value(fused)
        if self._shape.qk_norm is not None:
            query_key = self._normalize(query_key, prefix)
        rope = self._shape.layers[layer].rope
        if rope is not None:
            query_key = rotate(
                query_key, *context.rotations[rope], is_interleaved=rope.is_interleaved
            )

        query, key = query_key.split((self._heads, self._kv_heads), 1)
        return query, key, value, gate

    def _split_gate(self, fused: Tensor) -> tuple[Tensor, Tensor]:
        """Split the gates off the projections of queries, keys and values.

        The query projection has the query of each head, followed by its gate.

        Returns:
            The projections without gates, and the gates [N, heads * head dim].
        """
        head_dim = self._shape.head_dim
        gated_width = 2 * self._heads * head_dim
        gated, key_value = fused.tensor_split((gated_width,), 1)
        queries, gates = gated.unflatten(1, (self._heads, 2, head_dim)).unbind(2)
        return torch.cat((queries.flatten(1), key_value), 1), gates.flatten(1)

    def _split_value(self, fused: Tensor) -> tuple[Tensor, Tensor]:
        """Split projections into queries and keys, [N, heads + KV heads, head dim], and values,
        [N, KV heads, head dim]."""
        head_dim = self._shape.head_dim
        if self._is_interleaved:
            # A group has the queries of one KV head, followed by that head's key and value.
            # [N, KV heads, queries of a KV head + 2, head dim]
            groups = fused.view(len(fused), self._kv_heads, -1, head_dim)
            query_key = torch.cat((groups[:, :, :-2].flatten(1, 2), groups[:, :, -2]), 1)
            return query_key, groups[:, :, -1]
        heads = fused.view(len(fused), self._heads + 2 * self._kv_heads, head_dim)
        query_key, value = heads.split((self._heads + self._kv_heads, self._kv_heads), 1)
        return query_key, value

    def _normalize(self, query_key: Tensor, prefix: str) -> Tensor:
        """Normalize queries and keys, [N, heads + KV heads, head dim]."""
        query, key = query_key.split((self._heads, self._kv_heads), 1)
        is_per_head = self._shape.qk_norm == "head"
        normalize = self._norms.normalize if is_per_head else self._norms.normalize_projection
        query = normalize(query, prefix + "q_layernorm")
        key = normalize(key, prefix + "k_layernorm")
        return torch.cat((query, key), 1)
