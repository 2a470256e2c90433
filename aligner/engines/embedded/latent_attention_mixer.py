"""Multi-head latent attention of a layer (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1)."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.engines.embedded.core_attention import CoreAttention
from aligner.engines.embedded.forward_context import ForwardContext, concatenate_tokens
from aligner.engines.embedded.matmuls import Matmuls
from aligner.engines.embedded.normalization import Norms
from aligner.models.rotary import rotate
from aligner.models.shape import LatentAttention, ModelShape


class LatentAttentionMixer:
    """Computes the latent attention of a model's layers for this rank's heads.

    Decoding rows attend to the cached latents themselves, as if these were the keys and values of
    one KV head: `linear_kv_up_proj` is applied to their queries and outputs instead (section
    2.1.2). For prompts, it is cheaper to compute the keys and values of all heads.
    """

    def __init__(
        self,
        shape: ModelShape,
        latent: LatentAttention,
        weights: Mapping[str, Tensor],
        tensor_parallel_size: int,
        matmuls: Matmuls,
        norms: Norms,
        core: CoreAttention,
    ) -> None:
        """Create the latent attention of a model.

        Args:
            shape: Dimensions of the model.
            latent: Dimensions of the latent attention.
            weights: The decoder's current weights, by their names.
            tensor_parallel_size: Number of tensor-parallel ranks.
            matmuls: Matmuls of the decoder.
            norms: Norms of the decoder.
            core: Attention between queries, keys and values.
        """
        self._shape = shape
        self._latent = latent
        self._weights = weights
        self._heads = shape.num_heads // tensor_parallel_size
        self._matmuls = matmuls
        self._norms = norms
        self._core = core

    def mix(self, layer: int, x: Tensor, context: ForwardContext) -> Tensor:
        """Compute the attention of x [N, hidden], with the output projection. Collective.

        The latents and rotated keys of all tokens are written into the KV cache.

        Returns:
            [N, hidden].
        """
        prefix = f"decoder.layers.{layer}.self_attention."
        query = self._compute_query(layer, x, prefix, context)
        cached = self._compute_cached(layer, x, prefix, context)

        context.store(layer, cached, None)
        rows = context.num_decoding_tokens
        parts = []
        if rows:
            parts.append(self._decode(layer, query[:rows], prefix, context))
        if context.step.prompts is not None:
            parts.append(self._prefill(layer, query[rows:], cached[rows:], prefix, context))
        attention = concatenate_tokens(parts)
        return self._matmuls.row_parallel_linear(attention, prefix + "linear_proj")

    def _compute_query(self, layer: int, x: Tensor, prefix: str, context: ForwardContext) -> Tensor:
        """Return the rotated queries of x [N, hidden], [N, heads, head dim]."""
        latent = self._latent
        if latent.q_lora_rank is None:
            projected = self._matmuls.linear(x, prefix + "linear_q_proj")
        else:
            query_latent = self._matmuls.linear(x, prefix + "linear_q_down_proj")
            query_latent = self._norms.normalize(
                query_latent, prefix + "q_layernorm", latent.norm_epsilon
            )
            projected = self._matmuls.linear(query_latent, prefix + "linear_q_up_proj")
        query = projected.unflatten(-1, (self._heads, -1))

        unrotated, rotated = query.split((latent.qk_nope_head_dim, latent.qk_rope_head_dim), -1)
        return torch.cat((unrotated, self._rotate(layer, rotated, context)), -1)

    def _compute_cached(
        self, layer: int, x: Tensor, prefix: str, context: ForwardContext
    ) -> Tensor:
        """Return the cached part of the keys and values of x [N, hidden].

        Returns:
            Latents and rotated keys, [N, 1, kv_lora_rank + qk_rope_head_dim], the same on all
            ranks.
        """
        latent = self._latent
        key_latent, shared_key = self._matmuls.linear(x, prefix + "linear_kv_down_proj").split(
            (latent.kv_lora_rank, latent.qk_rope_head_dim), -1
        )
        key_latent = self._norms.normalize(key_latent, prefix + "kv_layernorm", latent.norm_epsilon)
        shared_key = self._rotate(layer, shared_key[:, None], context)
        return torch.cat((key_latent[:, None], shared_key), -1)

    def _rotate(self, layer: int, x: Tensor, context: ForwardContext) -> Tensor:
        """Rotate queries or keys [N, heads, qk_rope_head_dim], unless the layer has no rotary
        positions."""
        rope = self._shape.layers[layer].rope
        if rope is None:
            return x
        return rotate(x, *context.rotations[rope], is_interleaved=rope.is_interleaved)

    def _decode(self, layer: int, query: Tensor, prefix: str, context: ForwardContext) -> Tensor:
        """Compute the attention of the decoding rows over the cached latents.

        Args:
            layer: Index of the layer.
            query: Rotated queries, [R, heads, head dim].
            prefix: Prefix of the names of the layer's weights.
            context: Context of the forward pass.

        Returns:
            The attention output [R, heads * value dim].
        """
        latent = self._latent
        # Weights of keys and values, [heads, qk_nope_head_dim or v_head_dim, kv_lora_rank].
        key_weights, value_weights = (
            self._weights[prefix + "linear_kv_up_proj.weight"]
            .view(self._heads, -1, latent.kv_lora_rank)
            .split((latent.qk_nope_head_dim, latent.v_head_dim), 1)
        )
        unrotated, rotated = query.split((latent.qk_nope_head_dim, latent.qk_rope_head_dim), -1)
        # q · (W c) = (Wᵀ q) · c for a query q, the weights W of keys, and a latent c.
        latent_query = (unrotated.transpose(0, 1) @ key_weights).transpose(0, 1)
        attention = self._core.attend_cache(layer, torch.cat((latent_query, rotated), -1), context)
        latents = attention.view(len(query), self._heads, latent.kv_lora_rank)
        values = (latents.transpose(0, 1) @ value_weights.mT).transpose(0, 1)
        return values.flatten(1)

    def _prefill(
        self, layer: int, query: Tensor, cached: Tensor, prefix: str, context: ForwardContext
    ) -> Tensor:
        """Compute the attention within each prompt, with the keys and values of all heads.

        Args:
            layer: Index of the layer.
            query: Rotated queries, [N, heads, head dim].
            cached: Latents and rotated keys of the same tokens, [N, 1, cached dim].
            prefix: Prefix of the names of the layer's weights.
            context: Context of the forward pass.

        Returns:
            The attention output [N, heads * value dim].
        """
        latent = self._latent
        key_latent, shared_key = cached.split((latent.kv_lora_rank, latent.qk_rope_head_dim), -1)
        keys_and_values = self._matmuls.linear(key_latent[:, 0], prefix + "linear_kv_up_proj")
        key, value = keys_and_values.unflatten(-1, (self._heads, -1)).split(
            (latent.qk_nope_head_dim, latent.v_head_dim), -1
        )
        key = torch.cat((key, shared_key.expand(-1, self._heads, -1)), -1)
        # Fused kernels require values as long as keys.
        value = F.pad(value, (0, latent.head_dim - latent.v_head_dim))
        keys = context.pad_prompts(key).transpose(1, 2)
        values = context.pad_prompts(value).transpose(1, 2)
        attention = self._core.attend_prompts(layer, query, keys, values, context)
        heads = attention.unflatten(-1, (self._heads, latent.head_dim))
        return heads[..., : latent.v_head_dim].flatten(1)
