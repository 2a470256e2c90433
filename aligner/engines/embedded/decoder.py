"""Forward pass of a decoder-only transformer with a KV cache, on one tensor-parallel rank.

A step may combine two kinds of work: it decodes new tokens for rows of the KV cache, and it
prefills prompts into other rows. All tokens of a step go through the layers as one packed tensor,
the tokens of the decoding rows first and the prompts' tokens after them; only attention treats the
two kinds separately.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from aligner.engines.embedded import sliced_attention
from aligner.engines.embedded.cache import KVCache
from aligner.engines.embedded.delta_net_mixer import DeltaNetMixer
from aligner.engines.embedded.matmuls import Matmuls
from aligner.engines.embedded.sliced_attention import Spans
from aligner.models import batch_invariant, score_attention
from aligner.models.expert_choice import choose_experts, compute_scores, compute_weights
from aligner.models.rotary import compute_rotation, rotate
from aligner.models.shape import (
    Experts,
    LatentAttention,
    ModelShape,
    Rope,
    compute_inverse_frequencies,
)
from aligner.models.weight_slices import weight_table

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


@dataclass(frozen=True)
class Prompts:
    """Prompts to prefill, and the rows of the KV cache that receive them.

    Several rows can start with the same prompt, which is computed only once. Without rows, the keys
    and values are not stored.
    """

    tokens: Tensor
    """Token ids of all U prompts, concatenated without padding, int64 [N]."""
    lengths: Tensor
    """Number of tokens of each prompt, int64 [U]."""
    max_length: int
    """Number of tokens of the longest prompt, P."""
    prompt_indices: Tensor
    """Index of the prompt of each new row, int64 [C]."""
    rows: list[int]
    """Index of each new row in the KV cache, of length C."""


@dataclass(frozen=True)
class Step:
    """Input of one forward pass: rows that decode their next token, and prompts to prefill."""

    tokens: Tensor
    """Newest token of each decoding row, int64 [R].

    If `tokens_per_row` is greater than 1, each row has as many consecutive entries: its newest
    token, followed by its draft tokens. R is then the number of rows times `tokens_per_row`.
    """
    positions: Tensor
    """Position of each token in its sequence, int64 [R]."""
    columns: int
    """Number of columns of the KV cache that the pass reads; greater than every position."""
    prompts: Prompts | None = None
    """Prompts to prefill; None if there are none."""
    tokens_per_row: int = 1
    """Number of tokens per decoding row: 1, or more with speculative decoding."""
    rows: list[int] | None = None
    """Indices of the decoding rows in the KV cache, in ascending order.

    None means the first rows of the cache.
    """
    needs_logits: bool = True
    """Whether the pass computes logits."""
    lengths: Tensor | None = None
    """Number of tokens of its row to which each token attends, int32 [R].

    Only a sliced decoder uses it, in a step with one token per row. None means all tokens up to the
    token's position.
    """
    expert_routing: list[Tensor] | None = None
    """List to which each layer appends its expert routing; None disables the recording.

    Each entry has the experts of every token, uint8 or int16 [R + N, K], with the decoding rows
    first.
    """

    def build_next_step(self, tokens: Tensor) -> "Step":
        """Return the decode step that follows this one.

        Args:
            tokens: Tokens that were sampled from this step's logits, int64 [R]. This step must have
                one token per row.
        """
        return Step(tokens, self.positions + 1, self.columns + 1, rows=self.rows)


@dataclass(frozen=True)
class _AttentionMetadata:
    """Rotations, cache rows and attention masks of a step, which all layers share."""

    rotations: Mapping[Rope, tuple[Tensor, Tensor]]
    """Cosine and sine of the rotary angles of every token, [N, 1, rotated dims / 2] each, for each
    of the rotary position embeddings of the layers."""
    cache_rows: Tensor
    """Row of the KV cache of each decoding token, int64 [R]."""
    row_runs: list[tuple[int, int]]
    """Runs of consecutive cache rows in the step, as pairs of first row and number of rows."""
    cache_masks: Mapping[int | None, Tensor]
    """Attention mask of the decoding rows over the KV cache, by the sliding window of the layer;
    empty if `spans` replaces it.

    It is added to the scores, [rows, 1, queries of a KV head, columns]. With `engine.exact`, soft
    caps or sinks it is bool [rows, tokens per row, columns] instead, and True marks the keys to
    which a query attends.
    """
    spans: Spans | None
    """Part of the KV cache that each row reads; None unless the decoder is sliced."""
    prompt_token_indices: tuple[Tensor, Tensor] | None
    """Prompt index and position of every prompt token, int64 [N] each.

    None if the step has no prompts.
    """
    prompt_masks: Mapping[int | None, Tensor | None]
    """Attention mask of the prompts, bool [P, P], by the sliding window of the layer; True marks
    the keys to which a query attends. Empty if the step has no prompts.

    None means a causal mask, which the fused kernel applies without a tensor.
    """


class Decoder:
    """Decoder-only transformer on one tensor-parallel rank of a replica.

    The forward pass and the exchange of logits and tensors are collective: all tensor-parallel
    ranks of the replica must call them in the same order.

    Attributes:
        is_exact: Whether the decoder uses batch-invariant kernels (`engine.exact`).
        is_sliced: Whether a step with one token per row reads only the used part of each cache row.
    """

    def __init__(
        self,
        shape: ModelShape,
        tensor_parallel_size: int,
        rank: int,
        group: ProcessGroup | None,
        device: torch.device,
        *,
        exact: bool = False,
        packed: bool = False,
        sliced: bool = False,
    ) -> None:
        """Create a decoder without weights.

        Args:
            shape: Dimensions of the model.
            tensor_parallel_size: Number of tensor-parallel ranks (TP).
            rank: Index of this rank among the tensor-parallel ranks.
            group: Process group of the tensor-parallel ranks; unused if there is one rank.
            device: Device of the weights and of the KV cache.
            exact: Value of `engine.exact`.
            packed: Value of `engine.packed_weights`.
            sliced: Whether a step with one token per row reads only the tokens that each row has.
                The KV cache must then be stored by token (see `KVCache`).
        """
        self.is_exact = exact
        self.is_sliced = sliced
        self._matmuls = Matmuls(exact=exact, packed=packed)
        self._shape = shape
        self._tensor_parallel_size = tensor_parallel_size
        self._rank = rank
        self._group = group
        self._heads = shape.num_heads // tensor_parallel_size
        # All heads share the latents that latent attention caches.
        has_latents = shape.latent_attention is not None
        self._kv_heads = 1 if has_latents else shape.kv_heads_on_rank(tensor_parallel_size)
        self._activation = _ACTIVATIONS[shape.activation]
        # Some checkpoints store query, key and value in one tensor, interleaved by KV head. The
        # engine keeps the order of the checkpoint's file.
        self._is_qkv_interleaved = any(
            "linear_qkv" in spec.parameter and spec.part == "whole" for spec in weight_table(shape)
        )
        ropes = {layer.rope for layer in shape.layers if layer.rope is not None}
        self._inverse_frequencies = {
            rope: torch.tensor(compute_inverse_frequencies(rope, shape.rotary_dim), device=device)
            for rope in ropes
        }
        self._windows = {layer.sliding_window for layer in shape.layers}
        self._delta_net = None
        if shape.delta_net is not None:
            self._delta_net = DeltaNetMixer(shape, tensor_parallel_size, self._matmuls)
        self._weights: dict[str, Tensor] = {}

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        """Set the weights, by their megatron-core names.

        Call this method again whenever the values of the weights change, because packed copies of
        the old values may exist.
        """
        self._weights = weights
        self._matmuls.set_weights(weights)

    def forward(self, step: Step, cache: KVCache) -> Tensor:
        """Compute this rank's shard of the logits of each row's next token. Collective.

        The pass writes the keys and values of all tokens into the cache.

        Returns:
            The logits of the decoding rows, followed by those of the C new rows, [R + C, V / TP];
            no rows if `step.needs_logits` is False.
        """
        x = self.compute_hidden_states(step, cache)
        rows = len(step.tokens)
        prompts = step.prompts
        if prompts is not None:
            # Only the last token of a prompt has a next token to predict.
            last_tokens = rows + prompts.lengths.cumsum(0) - 1
            x = torch.cat((x[:rows], x[last_tokens][prompts.prompt_indices]))

        # Zero rows skip the work of the output layer, and the result still has its width.
        return self.compute_logits(x if step.needs_logits else x[:0])

    def compute_hidden_states(self, step: Step, cache: KVCache) -> Tensor:
        """Compute the output of the last layer for all tokens of a step. Collective.

        The pass writes the keys and values of all tokens into the cache.

        Returns:
            The hidden states of the decoding rows, followed by those of the prompts' tokens,
            [R + N, hidden].
        """
        tokens, positions, metadata = self._prepare(step, cache)
        x = self._embed(tokens, positions)
        for layer in range(self._shape.num_layers):
            x = self._apply_layer(layer, x, step, metadata, cache)
        return x

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Compute this rank's shard of the logits, [N, V / TP], of hidden states [N, hidden]."""
        normed = self._apply_norm(hidden_states, "decoder.final_layernorm")
        if self._shape.logit_scale != 1:
            normed = normed * self._shape.logit_scale
        head = "embedding.word_embeddings" if self._shape.tied_embeddings else "output_layer"
        logits = self._matmuls.linear(normed, head)
        softcap = self._shape.logit_softcap
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)

    def gather_logits(self, logits_shard: Tensor) -> Tensor | None:
        """Gather the shards of the logits on the replica's first rank. Collective.

        Args:
            logits_shard: This rank's part of the vocabulary, [B, V / TP].

        Returns:
            The logits [B, V] on the first rank, None on the other ranks.
        """
        if self._tensor_parallel_size == 1:
            return logits_shard

        shards = None
        if self._rank == 0:
            shards = [torch.empty_like(logits_shard) for _ in range(self._tensor_parallel_size)]
        dist.gather(logits_shard, shards, group=self._group, group_dst=0)
        # The slice drops the logits of the vocabulary's padding, which the last ranks compute.
        return torch.cat(shards, -1)[:, : self._shape.vocab_size] if shards else None

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Broadcast a tensor in place from the replica's first rank, and return it. Collective."""
        if self._tensor_parallel_size > 1:
            dist.broadcast(tensor, group=self._group, group_src=0)
        return tensor

    def _prepare(self, step: Step, cache: KVCache) -> tuple[Tensor, Tensor, _AttentionMetadata]:
        """Return the tokens and positions of a step, decoding rows first, and its attention
        metadata."""
        tokens = step.tokens
        positions = step.positions
        prompts = step.prompts

        token_indices = None
        prompt_masks = {}
        if prompts is not None:
            # Index of the first token of each prompt in the packed tensor, [U].
            starts = prompts.lengths.cumsum(0) - prompts.lengths
            # Without values, repeat_interleave repeats the index of each prompt by its length.
            prompt_indices = torch.repeat_interleave(prompts.lengths)
            prompt_positions = (
                torch.arange(len(prompts.tokens), device=tokens.device) - starts[prompt_indices]
            )
            tokens = torch.cat((tokens, prompts.tokens))
            positions = torch.cat((positions, prompt_positions))
            token_indices = (prompt_indices, prompt_positions)

            prompt_masks = {
                window: self._build_prompt_mask(prompts.max_length, window, tokens.device)
                for window in self._windows
            }

        dtype = self._weights["embedding.word_embeddings.weight"].dtype
        # Angles need float32: bfloat16 cannot represent large positions exactly.
        rotations = {
            rope: compute_rotation(positions[:, None, None].float() * frequencies, rope, dtype)
            for rope, frequencies in self._inverse_frequencies.items()
        }

        row_count = len(step.tokens) // step.tokens_per_row
        cache_rows = torch.arange(row_count, device=tokens.device)
        row_runs = [(0, row_count)]
        if step.rows is not None:
            cache_rows = torch.tensor(step.rows, device=tokens.device)
            row_runs = _find_row_runs(step.rows)

        spans = None
        cache_masks = {}
        if self.is_sliced and step.tokens_per_row == 1:
            lengths = (step.positions + 1).int() if step.lengths is None else step.lengths
            spans = sliced_attention.compute_spans(cache_rows, lengths, cache.size.columns)
        else:
            cache_masks = {window: self._build_cache_mask(step, window) for window in self._windows}

        metadata = _AttentionMetadata(
            rotations,
            cache_rows.repeat_interleave(step.tokens_per_row),
            row_runs,
            cache_masks,
            spans,
            token_indices,
            prompt_masks,
        )
        return tokens, positions, metadata

    def _build_prompt_mask(
        self, length: int, window: int | None, device: torch.device
    ) -> Tensor | None:
        """Return the mask of prompts of up to `length` tokens.

        See `_AttentionMetadata.prompt_masks`.
        """
        if not self.is_exact and (window is None or window >= length):
            return None
        mask = torch.ones(length, length, dtype=torch.bool, device=device)
        # A query attends to itself and to the `window` - 1 tokens before it.
        return mask.tril().triu(1 - (window or length))

    def _build_cache_mask(self, step: Step, window: int | None) -> Tensor:
        """Return the mask of the decoding rows over the KV cache.

        See `_AttentionMetadata.cache_masks`.
        """
        columns = torch.arange(step.columns, device=step.positions.device)
        positions = step.positions[:, None]
        is_masked = columns > positions
        if window is not None:
            is_masked |= columns <= positions - window
        is_masked = is_masked.view(-1, step.tokens_per_row, step.columns)
        if self.is_exact or not self._shape.has_plain_scores:
            return ~is_masked

        # `_attend_rows` stacks the queries that share a KV head, so the mask of a token is repeated
        # for each of these queries.
        dtype = self._weights["embedding.word_embeddings.weight"].dtype
        mask = torch.zeros(is_masked.shape, device=is_masked.device, dtype=dtype)
        mask.masked_fill_(is_masked, float("-inf"))
        return mask.repeat_interleave(self._heads // self._kv_heads, 1)[:, None]

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Look up the token embeddings, and add the model's learned position embeddings, if any."""
        table = self._weights["embedding.word_embeddings.weight"]
        if self._tensor_parallel_size == 1:
            x = F.embedding(tokens, table)
        else:
            # Each rank has a part of the vocabulary. A rank contributes zeros for the tokens of the
            # other ranks, so that the all-reduce returns the complete embeddings.
            local_tokens = tokens - self._rank * len(table)
            is_local = (local_tokens >= 0) & (local_tokens < len(table))
            partial = F.embedding(local_tokens.where(is_local, 0), table) * is_local[:, None]
            x = self._all_reduce(partial)
        if self._shape.learned_positions:
            x = x + F.embedding(positions, self._weights["embedding.position_embeddings.weight"])
        scale = self._shape.embedding_factor
        return x if scale == 1 else x * scale

    def _apply_layer(
        self, layer: int, x: Tensor, step: Step, metadata: _AttentionMetadata, cache: KVCache
    ) -> Tensor:
        """Compute one transformer layer, from x [N, hidden] to [N, hidden]."""
        prefix = f"decoder.layers.{layer}."
        has_norm_before = self._shape.norm_placement != "after"
        normed = self._apply_norm(x, prefix + "input_layernorm") if has_norm_before else x
        latent = self._shape.latent_attention
        output_layer = "linear_proj"
        if self._shape.layers[layer].has_delta_net:
            mixed = self._apply_delta_net(layer, normed, step, metadata, cache)
            output_layer = "out_proj"
        elif latent is None:
            mixed = self._attend(layer, normed, step, metadata, cache)
        else:
            mixed = self._attend_latents(layer, normed, latent, step, metadata, cache)
        mixed = self._apply_row_parallel(mixed, f"{prefix}self_attention.{output_layer}")

        # Parallel residual, as in GPT-NeoX: attention and MLP both read the layer's input.
        if self._shape.parallel_residual:
            residual = x + mixed
            normed = self._apply_norm(x, prefix + "pre_mlp_layernorm")
            return residual + self._apply_mlp(normed, prefix + "mlp.")

        x = x + self._prepare_output(mixed, prefix + "self_attn_bda.norm")
        normed = self._apply_norm(x, prefix + "pre_mlp_layernorm") if has_norm_before else x
        experts = self._shape.experts if self._shape.layers[layer].has_experts else None
        if experts is None:
            output = self._apply_mlp(normed, prefix + "mlp.")
        else:
            output = self._apply_experts(normed, prefix + "mlp.", experts, step)
        # The sum above is a new tensor, so the in-place addition overwrites nothing else.
        return x.add_(self._prepare_output(output, prefix + "mlp_bda.norm"))

    def _apply_delta_net(
        self, layer: int, x: Tensor, step: Step, metadata: _AttentionMetadata, cache: KVCache
    ) -> Tensor:
        """Compute a gated delta net from x [N, hidden] to the outputs of this rank's value heads.

        The decoding rows continue their states, and prompts leave theirs in the rows of the cache.

        Returns:
            The outputs after the gated norm, [N, value heads * value dim].
        """
        assert self._delta_net is not None and cache.delta_nets is not None
        assert step.tokens_per_row == 1, "a state of a delta net advances by one token"
        prefix = f"decoder.layers.{layer}.self_attention."
        index = cache.layer_indices[layer]
        rows = len(step.tokens)
        prompts = step.prompts
        parts = []
        if rows:
            parts.append(
                self._delta_net.mix_rows(
                    x[:rows],
                    prefix,
                    self._weights,
                    metadata.cache_rows,
                    cache.delta_nets.histories[index],
                    cache.delta_nets.states[index],
                )
            )
        if prompts is not None:
            assert metadata.prompt_token_indices is not None
            mixed, histories, states = self._delta_net.mix_prompts(
                x[rows:],
                prefix,
                self._weights,
                prompts.lengths,
                prompts.max_length,
                metadata.prompt_token_indices,
            )
            parts.append(mixed)
            # Prompts that are only scored have no rows.
            if prompts.rows:
                cache.delta_nets.histories[index, prompts.rows] = histories[prompts.prompt_indices]
                cache.delta_nets.states[index, prompts.rows] = states[prompts.prompt_indices]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _prepare_output(self, x: Tensor, norm: str) -> Tensor:
        """Return an output of attention or MLP as it is added to the residual stream."""
        if self._shape.norm_placement != "before":
            x = self._apply_norm(x, norm)
        scale = self._shape.residual_scale
        return x if scale == 1 else x * scale

    def _apply_norm(self, x: Tensor, name: str, epsilon: float | None = None) -> Tensor:
        """Normalize x over its last dimension, with RMSNorm or LayerNorm.

        Args:
            x: Values of any shape.
            name: Name of the norm's weights.
            epsilon: Epsilon of the norm; None for the model's.
        """
        weight = self._weights[name + ".weight"]
        epsilon = self._shape.norm_epsilon if epsilon is None else epsilon
        if self._shape.zero_centered_norms:
            weight = weight + 1
        if self._shape.normalization == "rms":
            return F.rms_norm(x, weight.shape, weight, epsilon)
        return F.layer_norm(x, weight.shape, weight, self._weights[name + ".bias"], epsilon)

    def _normalize_projection(self, x: Tensor, name: str) -> Tensor:
        """Normalize queries or keys [N, heads, head dim] over the heads of all ranks together."""
        flat = x.flatten(1).float()
        # With more ranks than KV heads, `total` and `size` both count each copy of a key.
        total = self._all_reduce(flat.square().sum(-1, keepdim=True))
        size = flat.shape[1] * self._tensor_parallel_size
        normed = flat * torch.rsqrt(total / size + self._shape.norm_epsilon)
        return (normed * self._weights[name + ".weight"]).to(x.dtype).view(x.shape)

    def _attend(
        self, layer: int, x: Tensor, step: Step, metadata: _AttentionMetadata, cache: KVCache
    ) -> Tensor:
        """Compute attention from x [N, hidden] to the outputs of this rank's heads.

        Returns:
            The attention output [N, heads * head dim].
        """
        prefix = f"decoder.layers.{layer}.self_attention."
        rope = self._shape.layers[layer].rope
        rotation = None if rope is None else metadata.rotations[rope]
        query, key, value, gate = self._compute_qkv(x, prefix, rope, rotation)

        # The decoding rows attend to the KV cache, the prompts to themselves; the two kinds need
        # different masks and kernels.
        rows = len(step.tokens)
        parts = []
        if rows:
            cache.write_tokens(layer, metadata.cache_rows, step.positions, key[:rows], value[:rows])
            parts.append(self._attend_cache(layer, query[:rows], step, metadata, cache))
        prompts = step.prompts
        if prompts is not None:
            keys, values = (self._pad_prompts(t[rows:], prompts, metadata) for t in (key, value))
            # Prompts that are only scored have no rows.
            if prompts.rows:
                cache.write_prompts(layer, prompts.rows, prompts.prompt_indices, keys, values)
            parts.append(self._attend_prompts(layer, query[rows:], keys, values, prompts, metadata))
        attention = parts[0] if len(parts) == 1 else torch.cat(parts)
        return attention if gate is None else attention * gate.sigmoid()

    def _attend_latents(
        self,
        layer: int,
        x: Tensor,
        latent: LatentAttention,
        step: Step,
        metadata: _AttentionMetadata,
        cache: KVCache,
    ) -> Tensor:
        """Compute multi-head latent attention, from x [N, hidden] to [N, heads * value dim].

        Decoding rows attend to the cached latents themselves, as if these were the keys and values
        of one KV head: `linear_kv_up_proj` is applied to their queries and outputs instead. For
        prompts, it is cheaper to compute the keys and values of all heads.

        Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.2.
        """
        prefix = f"decoder.layers.{layer}.self_attention."
        rope = self._shape.layers[layer].rope
        rotation = None if rope is None else metadata.rotations[rope]
        query, cached = self._compute_latents(x, prefix, latent, rope, rotation)

        rows = len(step.tokens)
        parts = []
        if rows:
            cache.write_tokens(layer, metadata.cache_rows, step.positions, cached[:rows], None)
            # Weights of keys and values, [heads, qk_nope_head_dim or v_head_dim, kv_lora_rank].
            key_weights, value_weights = (
                self._weights[prefix + "linear_kv_up_proj.weight"]
                .view(self._heads, -1, latent.kv_lora_rank)
                .split((latent.qk_nope_head_dim, latent.v_head_dim), 1)
            )
            unrotated, rotated = query[:rows].split(
                (latent.qk_nope_head_dim, latent.qk_rope_head_dim), -1
            )
            # q · (W c) = (Wᵀ q) · c for a query q, the weights W of keys, and a latent c.
            latent_query = (unrotated.transpose(0, 1) @ key_weights).transpose(0, 1)
            attention = self._attend_cache(
                layer, torch.cat((latent_query, rotated), -1), step, metadata, cache
            )
            latents = attention.view(rows, self._heads, latent.kv_lora_rank)
            values = (latents.transpose(0, 1) @ value_weights.mT).transpose(0, 1)
            parts.append(values.flatten(1))
        prompts = step.prompts
        if prompts is not None:
            key_latent, shared_key = cached[rows:].split(
                (latent.kv_lora_rank, latent.qk_rope_head_dim), -1
            )
            keys_and_values = self._matmuls.linear(key_latent[:, 0], prefix + "linear_kv_up_proj")
            key, value = keys_and_values.unflatten(-1, (self._heads, -1)).split(
                (latent.qk_nope_head_dim, latent.v_head_dim), -1
            )
            key = torch.cat((key, shared_key.expand(-1, self._heads, -1)), -1)
            # Fused kernels require values as long as keys.
            value = F.pad(value, (0, latent.head_dim - latent.v_head_dim))
            keys, values = (self._pad_prompts(t, prompts, metadata) for t in (key, value))
            if prompts.rows:
                cache.write_prompts(
                    layer,
                    prompts.rows,
                    prompts.prompt_indices,
                    self._pad_prompts(cached[rows:], prompts, metadata),
                    None,
                )
            attention = self._attend_prompts(layer, query[rows:], keys, values, prompts, metadata)
            heads = attention.unflatten(-1, (self._heads, latent.head_dim))
            parts.append(heads[..., : latent.v_head_dim].flatten(1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _compute_latents(
        self,
        x: Tensor,
        prefix: str,
        latent: LatentAttention,
        rope: Rope | None,
        rotation: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the queries and the latents of x [N, hidden].

        Returns:
            Queries of this rank's heads, [N, heads, head dim], and the cached part of keys and
            values, [N, 1, kv_lora_rank + qk_rope_head_dim], which is the same on all ranks.
        """
        if latent.q_lora_rank is None:
            projected = self._matmuls.linear(x, prefix + "linear_q_proj")
        else:
            query_latent = self._matmuls.linear(x, prefix + "linear_q_down_proj")
            query_latent = self._apply_norm(
                query_latent, prefix + "q_layernorm", latent.norm_epsilon
            )
            projected = self._matmuls.linear(query_latent, prefix + "linear_q_up_proj")
        query = projected.unflatten(-1, (self._heads, -1))

        key_latent, shared_key = self._matmuls.linear(x, prefix + "linear_kv_down_proj").split(
            (latent.kv_lora_rank, latent.qk_rope_head_dim), -1
        )
        key_latent = self._apply_norm(key_latent, prefix + "kv_layernorm", latent.norm_epsilon)
        shared_key = shared_key[:, None]
        if rope is not None and rotation is not None:
            is_interleaved = rope.is_interleaved
            unrotated, rotated = query.split((latent.qk_nope_head_dim, latent.qk_rope_head_dim), -1)
            query = torch.cat(
                (unrotated, rotate(rotated, *rotation, is_interleaved=is_interleaved)), -1
            )
            shared_key = rotate(shared_key, *rotation, is_interleaved=is_interleaved)
        return query, torch.cat((key_latent[:, None], shared_key), -1)

    def _compute_qkv(
        self, x: Tensor, prefix: str, rope: Rope | None, rotation: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Compute the queries, keys and values of x [N, hidden], and the gates of the output.

        Queries and keys are normalized if the model does so, and rotated.

        Returns:
            Queries [N, heads, head dim], keys and values [N, KV heads, head dim], and gates
            [N, heads * head dim] or None if the model has none, all for this rank's heads.
        """
        shape = self._shape
        fused = self._matmuls.linear(x, prefix + "linear_qkv")
        gate = None
        if shape.attention_gate:
            # The query projection has the query of each head, followed by its gate.
            gated_width = 2 * self._heads * shape.head_dim
            gated, key_value = fused.tensor_split((gated_width,), 1)
            queries, gates = gated.unflatten(1, (self._heads, 2, shape.head_dim)).unbind(2)
            fused = torch.cat((queries.flatten(1), key_value), 1)
            gate = gates.flatten(1)

        # Queries and keys stay in one tensor, so that one kernel rotates both.
        if self._is_qkv_interleaved:
            # A group has the queries of one KV head, followed by that head's key and value.
            # [N, KV heads, queries of a KV head + 2, head dim]
            groups = fused.view(len(x), self._kv_heads, -1, shape.head_dim)
            query_key = torch.cat((groups[:, :, :-2].flatten(1, 2), groups[:, :, -2]), 1)
            value = groups[:, :, -1]
        else:
            heads = fused.view(len(x), self._heads + 2 * self._kv_heads, shape.head_dim)
            query_key, value = heads.split((self._heads + self._kv_heads, self._kv_heads), 1)

        if shape.qk_norm is not None:
            query, key = query_key.split((self._heads, self._kv_heads), 1)
            normalize = self._apply_norm if shape.qk_norm == "head" else self._normalize_projection
            query = normalize(query, prefix + "q_layernorm")
            key = normalize(key, prefix + "k_layernorm")
            query_key = torch.cat((query, key), 1)
        if rope is not None and rotation is not None:
            query_key = rotate(query_key, *rotation, is_interleaved=rope.is_interleaved)

        query, key = query_key.split((self._heads, self._kv_heads), 1)
        return query, key, value, gate

    def _attend_cache(
        self,
        layer: int,
        query: Tensor,
        step: Step,
        metadata: _AttentionMetadata,
        cache: KVCache,
    ) -> Tensor:
        """Compute the attention of decoding rows over the KV cache, which contains their tokens.

        Args:
            layer: Index of the layer.
            query: [R, heads, head dim].
            step: The step.
            metadata: Attention metadata of the step.
            cache: The KV cache. A query attends to its own token, too.

        Returns:
            The attention output of the decoding rows, [R, heads * value dim].
        """
        keys = cache.keys[cache.layer_indices[layer]]
        values = cache.values[cache.layer_indices[layer]]
        window = self._shape.layers[layer].sliding_window
        if metadata.spans is not None:
            return sliced_attention.attend(
                query, keys, values, metadata.spans, window, self._shape.softmax_scale
            )

        # Slices of consecutive rows are views. Indexing with a list of rows would copy the cache.
        counts = [count for _, count in metadata.row_runs]
        queries = query.unflatten(0, (-1, step.tokens_per_row)).split(counts)
        cache_slices = [
            (slice(first, first + count), slice(None), slice(step.columns))
            for first, count in metadata.row_runs
        ]
        masks = metadata.cache_masks[window].split(counts)
        attention = [
            self._attend_rows(layer, run_queries, keys[cache_slice], values[cache_slice], mask)
            for run_queries, cache_slice, mask in zip(queries, cache_slices, masks, strict=True)
        ]
        return attention[0] if len(attention) == 1 else torch.cat(attention)

    def _attend_rows(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor
    ) -> Tensor:
        """Compute the attention of decoding rows over a contiguous slice of the KV cache.

        Args:
            layer: Index of the layer.
            query: [B, W, heads, head dim], where W is `Step.tokens_per_row`.
            keys: [B, KV heads, columns, head dim].
            values: [B, KV heads, columns, value dim].
            mask: These rows' part of an `_AttentionMetadata.cache_masks`.

        Returns:
            The attention output [B * W, heads * value dim].
        """
        rows, tokens_per_row, _, head_dim = query.shape
        if self.is_exact or not self._shape.has_plain_scores:
            attention = self._attend_scores(layer, query.transpose(1, 2), keys, values, mask)
            return attention.transpose(1, 2).reshape(rows * tokens_per_row, -1)

        # Stack the queries that share a KV head, so that the kernel reads each key once. The shape
        # is [B, KV heads, W * queries of a KV head, head dim].
        grouped = query.reshape(rows, tokens_per_row, self._kv_heads, -1, head_dim)
        stacked = grouped.transpose(1, 2).flatten(2, 3)
        attention = F.scaled_dot_product_attention(
            stacked, keys, values, attn_mask=mask, scale=self._shape.softmax_scale
        )
        # [B, KV heads, W, queries of a KV head, head dim] -> [B * W, heads * head dim]
        unstacked = attention.unflatten(2, (tokens_per_row, -1))
        return unstacked.transpose(1, 2).reshape(rows * tokens_per_row, -1)

    def _attend_prompts(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        prompts: Prompts,
        metadata: _AttentionMetadata,
    ) -> Tensor:
        """Compute the attention within each prompt.

        Args:
            layer: Index of the layer.
            query: [N, heads, head dim].
            keys: [U, KV heads, P, head dim].
            values: [U, KV heads, P, value dim].
            prompts: The prompts.
            metadata: Attention metadata of the step.

        Returns:
            The attention output of the prompt tokens, [N, heads * value dim].
        """
        token_indices = metadata.prompt_token_indices
        assert token_indices is not None
        queries = self._pad_prompts(query, prompts, metadata)
        mask = metadata.prompt_masks[self._shape.layers[layer].sliding_window]
        if self.is_exact or not self._shape.has_plain_scores:
            attention = self._attend_scores(layer, queries, keys, values, mask)
        else:
            attention = F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None,
                scale=self._shape.softmax_scale,
                enable_gqa=True,
            )
        return attention.transpose(1, 2)[token_indices].flatten(1)

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
        if self.is_exact:
            assert visible is not None
            return batch_invariant.attend(query, keys, values, visible, shape.softmax_scale)
        prefix = f"decoder.layers.{layer}.self_attention.core_attention."
        return score_attention.attend(
            query,
            keys,
            values,
            visible,
            scale=shape.softmax_scale,
            softcap=shape.attention_softcap,
            sinks=self._weights[prefix + "softmax_offset"] if shape.attention_sinks else None,
        )

    def _pad_prompts(
        self, packed: Tensor, prompts: Prompts, metadata: _AttentionMetadata
    ) -> Tensor:
        """Return values of the prompts' tokens [N, heads, dim] as rows [U, heads, P, dim].

        The padding comes after the prompt, so a causal mask already hides it from the prompt's
        tokens.
        """
        token_indices = metadata.prompt_token_indices
        assert token_indices is not None
        padded = packed.new_zeros(len(prompts.lengths), prompts.max_length, *packed.shape[1:])
        return padded.index_put_(token_indices, packed).transpose(1, 2)

    def _apply_mlp(self, x: Tensor, prefix: str) -> Tensor:
        """Compute the feed-forward network of x [N, hidden]."""
        hidden = self._matmuls.linear(x, prefix + "linear_fc1")
        return self._apply_row_parallel(self._apply_activation(hidden), prefix + "linear_fc2")

    def _apply_activation(self, x: Tensor) -> Tensor:
        """Apply the activation function; with a gated network, multiply the two halves of x."""
        if not self._shape.gated:
            return self._activation(x)
        gate, up = x.chunk(2, -1)
        limit = self._shape.gate_limit
        if limit is not None:
            gate = gate.clamp(max=limit)
            up = up.clamp(-limit, limit)
        offset = self._shape.projection_offset
        return self._activation(gate).mul_(up + offset if offset else up)

    def _apply_experts(self, x: Tensor, prefix: str, experts: Experts, step: Step) -> Tensor:
        """Compute the weighted sum of each token's experts.

        Every rank has a slice of each expert's intermediate dimension; an all-reduce over the ranks
        completes the sum.

        Source: Shazeer et al. 2017, "Outrageously Large Neural Networks", section 2.1.
        """
        scores = compute_scores(self._matmuls.linear(x, prefix + "router"), experts)
        # [N, K] each
        chosen = choose_experts(scores, experts, self._weights.get(prefix + "router.expert_bias"))
        weights = compute_weights(scores, chosen, experts)
        if step.expert_routing is not None:
            index_dtype = torch.uint8 if experts.count <= 256 else torch.int16
            step.expert_routing.append(chosen.to(index_dtype))

        output = torch.zeros_like(x)
        # `slot` is the index of the expert among the K experts of a token; it selects the weight.
        for expert in range(experts.count):
            token_indices, slot = (chosen == expert).nonzero(as_tuple=True)
            if len(token_indices):
                hidden = self._matmuls.expert_linear(
                    x[token_indices], prefix + "experts.linear_fc1", expert
                )
                # The all-reduce sums the ranks' outputs, so one rank adds the bias.
                expert_output = self._matmuls.expert_linear(
                    self._apply_activation(hidden),
                    prefix + "experts.linear_fc2",
                    expert,
                    with_bias=self._rank == 0,
                )
                expert_weights = weights[token_indices, slot, None].to(x.dtype)
                output.index_add_(0, token_indices, expert_output * expert_weights)
        if experts.shared_size:
            output += self._apply_shared_experts(x, prefix + "shared_experts.", experts)
        return self._all_reduce(output)

    def _apply_shared_experts(self, x: Tensor, prefix: str, experts: Experts) -> Tensor:
        """Compute this rank's part of the shared experts' output, which the ranks have to sum.

        Source: Dai et al. 2024, "DeepSeekMoE", section 3.2.
        """
        hidden = self._matmuls.linear(x, prefix + "linear_fc1")
        output = self._matmuls.linear(self._apply_activation(hidden), prefix + "linear_fc2")
        if experts.has_shared_gate:
            output = output * F.linear(x, self._weights[prefix + "gate_weight"]).sigmoid()
        return output

    def _apply_row_parallel(self, x: Tensor, name: str) -> Tensor:
        """Compute a layer whose inputs are split over the ranks.

        Args:
            x: This rank's inputs, [N, inputs / TP].
            name: Name of the layer's weights.

        Returns:
            The complete outputs [N, outputs] on every rank.
        """
        if self._tensor_parallel_size == 1:
            return self._matmuls.linear(x, name)
        # Each rank would add the bias; it is added once, after the all-reduce.
        total = self._all_reduce(self._matmuls.linear(x, name, with_bias=False))
        bias = self._weights.get(name + ".bias")
        return total if bias is None else total + bias

    def _all_reduce(self, partial: Tensor) -> Tensor:
        """Sum the ranks' partial results in place (all-reduce)."""
        if self._tensor_parallel_size > 1:
            dist.all_reduce(partial, group=self._group)
        return partial


def _find_row_runs(rows: list[int]) -> list[tuple[int, int]]:
    """Split ascending row indices into runs of consecutive rows.

    Returns:
        Pairs of first row and number of rows; [(0, 0)] if `rows` is empty.
    """
    runs: list[tuple[int, int]] = []
    for row in rows:
        first, count = runs[-1] if runs else (0, 0)
        if runs and row == first + count:
            runs[-1] = first, count + 1
        else:
            runs.append((row, 1))
    return runs or [(0, 0)]
