"""Forward pass of a decoder-only transformer with a KV cache, on one tensor-parallel rank.

A step may combine two kinds of work: it decodes new tokens for rows of the KV cache, and it
prefills prompts into other rows. All tokens of a step go through the layers as one packed tensor,
the tokens of the decoding rows first and the prompts' tokens after them; only attention treats the
two kinds separately.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from aligner.engines.embedded import sliced_attention
from aligner.engines.embedded.cache import Cache
from aligner.engines.embedded.products import Products
from aligner.engines.embedded.sliced_attention import Spans
from aligner.models import batch_invariant
from aligner.models.rotary import rotate
from aligner.models.shape import ModelShape, compute_inverse_frequencies
from aligner.models.weight_slices import weight_table

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True)
class Prompts:
    """Prompts to prefill, and the rows of the KV cache that receive them.

    Several rows can start with the same prompt, which is computed only once.
    """

    tokens: Tensor
    """Token ids of all U prompts, concatenated without padding, int64 [N]."""
    lengths: Tensor
    """Number of tokens of each prompt, int64 [U]."""
    width: int
    """Number of tokens of the longest prompt."""
    copies: Tensor
    """Index of the prompt of each new row, int64 [C]."""
    rows: list[int]
    """Index of each new row in the KV cache, of length C."""


@dataclass(frozen=True)
class Step:
    """Input of one forward pass: rows that decode their next token, and prompts to prefill."""

    tokens: Tensor
    """Newest token of each decoding row, int64 [R].

    If `width` is greater than 1, each row has `width` consecutive entries: its newest token,
    followed by its draft tokens. R is then the number of rows times `width`.
    """
    positions: Tensor
    """Position of each token in its sequence, int64 [R]."""
    columns: int
    """Number of columns of the KV cache that the pass reads; greater than every position."""
    prompts: Prompts | None = None
    """Prompts to prefill; None if there are none."""
    width: int = 1
    """Number of tokens per decoding row: 1, or more with speculative decoding."""
    rows: list[int] | None = None
    """Indices of the decoding rows in the KV cache, in ascending order.

    None means the first rows of the cache.
    """
    scores: bool = True
    """Whether the pass computes logits."""
    lengths: Tensor | None = None
    """Number of tokens of its row to which each token attends, int32 [R].

    Only a sliced decoder uses it, in a step with one token per row. None means all tokens up to the
    token's position.
    """
    routes: list[Tensor] | None = None
    """List to which each layer appends its expert routing; None disables the recording.

    Each entry has the experts of every token, uint8 or int16 [R + N, K], with the decoding rows
    first.
    """

    def followed_by(self, tokens: Tensor) -> "Step":
        """Return the decode step that follows this one.

        Args:
            tokens: Tokens that were sampled from this step's logits, int64 [R]. This step must have
                one token per row.
        """
        return Step(tokens, self.positions + 1, self.columns + 1, rows=self.rows)


@dataclass(frozen=True)
class _Geometry:
    """Rotations, cache rows and attention masks of a step, which all layers share."""

    rotation: tuple[Tensor, Tensor] | None
    """Cosine and sine of the rotary angles of every token, [N, 1, rotated dims / 2] each.

    None if the model has no rotary position embedding.
    """
    rows: Tensor
    """Row of the KV cache of each decoding token, int64 [R]."""
    runs: list[tuple[int, int]]
    """Runs of consecutive cache rows in the step, as pairs of first row and number of rows."""
    mask: Tensor | None
    """Attention mask of the decoding rows over the KV cache; None if `spans` replaces it.

    It is added to the scores, [rows, 1, queries of a KV head, columns]. With `engine.exact` it is
    bool [rows, width, columns] instead, and True marks the keys to which a query attends.
    """
    spans: Spans | None
    """Part of the KV cache that each row reads; None unless the decoder is sliced."""
    at: tuple[Tensor, Tensor] | None
    """Prompt index and position of every prompt token, int64 [N] each.

    None if the step has no prompts.
    """
    visible: Tensor | None
    """Attention mask of the prompts, bool [P, P]; True marks the keys to which a query attends.

    None means a causal mask, which the fused kernel applies without a tensor.
    """


class Decoder:
    """Decoder-only transformer on one tensor-parallel rank of a replica.

    The forward pass and the exchange of logits and tensors are collective: all tensor-parallel
    ranks of the replica must call them in the same order.

    Attributes:
        exact: Whether the decoder uses batch-invariant kernels (`engine.exact`).
        sliced: Whether a step with one token per row reads only the used part of each cache row.
    """

    def __init__(
        self,
        shape: ModelShape,
        tensor: int,
        place: int,
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
            tensor: Number of tensor-parallel ranks (TP).
            place: Index of this rank among the tensor-parallel ranks.
            group: Process group of the tensor-parallel ranks; unused if `tensor` is 1.
            device: Device of the weights and of the KV cache.
            exact: Value of `engine.exact`.
            packed: Value of `engine.packed_weights`.
            sliced: Whether a step with one token per row reads only the tokens that each row has.
                The KV cache must then be stored by token (see `Cache`).
        """
        self.exact = exact
        self.sliced = sliced
        self._products = Products(exact=exact, packed=packed)
        self._shape = shape
        self._tensor = tensor
        self._place = place
        self._group = group
        self._heads = shape.num_heads // tensor
        self._kv_heads = shape.num_kv_heads // tensor
        self._activation = _ACTIVATIONS[shape.activation]
        # Some checkpoints store query, key and value in one tensor, interleaved by KV head. The
        # engine keeps the order of the checkpoint's file.
        self._interleaved = any(
            "linear_qkv" in spec.parameter and spec.part == "whole" for spec in weight_table(shape)
        )
        rotary = shape.position == "rotary"
        self._frequencies = (
            torch.tensor(compute_inverse_frequencies(shape), device=device) if rotary else None
        )
        self._weights: dict[str, Tensor] = {}

    def use(self, weights: dict[str, Tensor]) -> None:
        """Set the weights, by their megatron-core names.

        Call this method again whenever the values of the weights change, because packed copies of
        the old values may exist.
        """
        self._weights = weights
        self._products.use(weights)

    def forward(self, step: Step, cache: Cache) -> Tensor:
        """Compute this rank's share of the logits of each row's next token. Collective.

        The pass writes the keys and values of all tokens into the cache.

        Returns:
            The logits of the decoding rows, followed by those of the C new rows, [R + C, V / TP];
            no rows if `step.scores` is False.
        """
        prompts = step.prompts
        tokens, positions, geometry = self._prepare(step, cache)
        x = self._embed(tokens, positions)
        for layer in range(self._shape.num_layers):
            x = self._layer(layer, x, step, geometry, cache)

        rows = len(step.tokens)
        if prompts is not None:
            # Only the last token of a prompt has a next token to predict.
            last_tokens = rows + prompts.lengths.cumsum(0) - 1
            x = torch.cat((x[:rows], x[last_tokens][prompts.copies]))

        normed = self._norm(x if step.scores else x[:0], "decoder.final_layernorm")
        head = "embedding.word_embeddings" if self._shape.tied_embeddings else "output_layer"
        return self._products.linear(normed, head)

    def gather_logits(self, share: Tensor) -> Tensor | None:
        """Gather the shares of the logits on the replica's first rank. Collective.

        Args:
            share: This rank's share, [B, V / TP].

        Returns:
            The logits [B, V] on the first rank, None on the other ranks.
        """
        if self._tensor == 1:
            return share
        shares = (
            [torch.empty_like(share) for _ in range(self._tensor)] if self._place == 0 else None
        )
        dist.gather(share, shares, group=self._group, group_dst=0)
        # The slice drops the logits of the vocabulary's padding, which the last ranks compute.
        return torch.cat(shares, -1)[:, : self._shape.vocab_size] if shares else None

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Broadcast a tensor in place from the replica's first rank, and return it. Collective."""
        if self._tensor > 1:
            dist.broadcast(tensor, group=self._group, group_src=0)
        return tensor

    def _prepare(self, step: Step, cache: Cache) -> tuple[Tensor, Tensor, _Geometry]:
        """Return the tokens and positions of a step, decoding rows first, and its geometry."""
        tokens = step.tokens
        positions = step.positions
        prompts = step.prompts

        token_indices = visible = None
        if prompts is not None:
            ends = prompts.lengths.cumsum(0)
            # Without values, repeat_interleave repeats the index of each prompt by its length.
            prompt_indices = torch.repeat_interleave(prompts.lengths)
            prompt_positions = (
                torch.arange(len(prompts.tokens), device=tokens.device)
                - (ends - prompts.lengths)[prompt_indices]
            )
            tokens = torch.cat((tokens, prompts.tokens))
            positions = torch.cat((positions, prompt_positions))
            token_indices = (prompt_indices, prompt_positions)
            window = self._shape.sliding_window
            if self.exact or (window is not None and window < prompts.width):
                visible = torch.ones(
                    prompts.width, prompts.width, dtype=torch.bool, device=tokens.device
                )
                # A query attends to itself and to the `window` - 1 tokens before it.
                visible = visible.tril().triu(1 - (window or prompts.width))

        rotation = None
        if self._frequencies is not None:
            # Angles need float32: bfloat16 cannot represent large positions exactly.
            angles = positions[:, None, None].float() * self._frequencies
            dtype = self._weights["embedding.word_embeddings.weight"].dtype
            rotation = angles.cos().to(dtype), angles.sin().to(dtype)

        count = len(step.tokens) // step.width
        rows = torch.arange(count, device=tokens.device)
        runs = [(0, count)]
        if step.rows is not None:
            rows = torch.tensor(step.rows, device=tokens.device)
            runs = _runs(step.rows)

        spans = mask = None
        if self.sliced and step.width == 1:
            lengths = (step.positions + 1).int() if step.lengths is None else step.lengths
            spans = sliced_attention.spans(rows, lengths, cache.size.columns)
        else:
            mask = self._cache_mask(step)

        return (
            tokens,
            positions,
            _Geometry(
                rotation,
                rows.repeat_interleave(step.width),
                runs,
                mask,
                spans,
                token_indices,
                visible,
            ),
        )

    def _cache_mask(self, step: Step) -> Tensor:
        """Return the mask of the decoding rows over the KV cache (see `_Geometry.mask`)."""
        columns = torch.arange(step.columns, device=step.positions.device)
        positions = step.positions[:, None]
        hidden = columns > positions
        if self._shape.sliding_window is not None:
            hidden |= columns <= positions - self._shape.sliding_window
        hidden = hidden.view(-1, step.width, step.columns)
        if self.exact:
            return ~hidden
        # `_attend_rows` stacks the queries that share a KV head, so the mask of a token is repeated
        # for each of these queries.
        dtype = self._weights["embedding.word_embeddings.weight"].dtype
        mask = torch.zeros(hidden.shape, device=hidden.device, dtype=dtype).masked_fill_(
            hidden, float("-inf")
        )
        return mask.repeat_interleave(self._heads // self._kv_heads, 1)[:, None]

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Look up the token embeddings, and add the model's learned position embeddings, if any."""
        table = self._weights["embedding.word_embeddings.weight"]
        if self._tensor == 1:
            x = F.embedding(tokens, table)
        else:
            # Each rank has a part of the vocabulary. A rank contributes zeros for the tokens of the
            # other ranks, so that the all-reduce returns the complete embeddings.
            local_tokens = tokens - self._place * len(table)
            is_local = (local_tokens >= 0) & (local_tokens < len(table))
            x = self._sum(F.embedding(local_tokens.where(is_local, 0), table) * is_local[:, None])
        if self._shape.position == "learned":
            x = x + F.embedding(positions, self._weights["embedding.position_embeddings.weight"])
        return x

    def _layer(
        self, layer: int, x: Tensor, step: Step, geometry: _Geometry, cache: Cache
    ) -> Tensor:
        """Compute one transformer layer, from x [N, hidden] to [N, hidden]."""
        name = f"decoder.layers.{layer}."
        normed = self._norm(x, name + "input_layernorm")
        query, key, value = self._project(normed, name + "self_attention.", geometry.rotation)

        rows = len(step.tokens)
        parts = []
        if rows:
            parts.append(
                self._attend_cache(
                    layer, query[:rows], key[:rows], value[:rows], step, geometry, cache
                )
            )
        if step.prompts is not None:
            parts.append(
                self._attend_prompts(
                    layer, query[rows:], key[rows:], value[rows:], step, geometry, cache
                )
            )
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        attended = self._row_parallel(attended, name + "self_attention.linear_proj")

        if self._shape.parallel_residual:
            return (
                x
                + attended
                + self._mlp(self._norm(x, name + "pre_mlp_layernorm"), name + "mlp.", step)
            )
        x = x + attended
        # The sum above is a new tensor, so the in-place addition overwrites nothing else.
        return x.add_(self._mlp(self._norm(x, name + "pre_mlp_layernorm"), name + "mlp.", step))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._weights[name + ".weight"]
        if self._shape.normalization == "rms":
            return F.rms_norm(x, weight.shape, weight, self._shape.norm_epsilon)
        return F.layer_norm(
            x, weight.shape, weight, self._weights[name + ".bias"], self._shape.norm_epsilon
        )

    def _project(
        self, x: Tensor, name: str, rotation: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the queries, keys and values of x [N, hidden].

        Queries and keys are normalized if the model does so, and rotated.

        Returns:
            Queries [N, heads, head dim], keys and values [N, KV heads, head dim], all for this
            rank's heads.
        """
        shape = self._shape
        fused = self._products.linear(x, name + "linear_qkv")

        # Queries and keys stay in one tensor, so that one kernel rotates both.
        if self._interleaved:
            # A group has the queries of one KV head, followed by that head's key and value.
            groups = fused.view(len(x), self._kv_heads, -1, shape.head_dim)
            query_key = torch.cat((groups[:, :, :-2].flatten(1, 2), groups[:, :, -2]), 1)
            value = groups[:, :, -1]
        else:
            heads = fused.view(len(x), self._heads + 2 * self._kv_heads, shape.head_dim)
            query_key, value = heads.split((self._heads + self._kv_heads, self._kv_heads), 1)

        if shape.qk_norm:
            query, key = query_key.split((self._heads, self._kv_heads), 1)
            query_key = torch.cat(
                (self._norm(query, name + "q_layernorm"), self._norm(key, name + "k_layernorm")), 1
            )
        if rotation is not None:
            query_key = rotate(query_key, *rotation)

        query, key = query_key.split((self._heads, self._kv_heads), 1)
        return query, key, value

    def _attend_cache(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        step: Step,
        geometry: _Geometry,
        cache: Cache,
    ) -> Tensor:
        """Write new tokens into the KV cache, and compute their attention over their rows.

        Returns:
            The attention output of the decoding rows, [R, heads * head dim].
        """
        token_index = geometry.rows, slice(None), step.positions
        keys = cache.keys[layer]
        values = cache.values[layer]
        keys[token_index] = key
        values[token_index] = value

        if geometry.spans is not None:
            return sliced_attention.attend(
                query, keys, values, geometry.spans, self._shape.sliding_window
            )

        # Slices of consecutive rows are views. Indexing with a list of rows would copy the cache.
        assert geometry.mask is not None
        counts = [count for _, count in geometry.runs]
        queries = query.unflatten(0, (-1, step.width)).split(counts)
        cache_slices = [
            (slice(first, first + count), slice(None), slice(step.columns))
            for first, count in geometry.runs
        ]
        parts = zip(queries, cache_slices, geometry.mask.split(counts), strict=True)
        attended = [
            self._attend_rows(part, keys[cache_slice], values[cache_slice], mask)
            for part, cache_slice, mask in parts
        ]
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _attend_rows(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Compute the attention of decoding rows over a contiguous slice of the KV cache.

        Args:
            query: [B, width, heads, head dim].
            keys: [B, KV heads, columns, head dim].
            values: [B, KV heads, columns, head dim].
            mask: These rows' part of `_Geometry.mask`.

        Returns:
            The attention output [B * width, heads * head dim].
        """
        rows, width, _, size = query.shape
        if self.exact:
            return (
                batch_invariant.attend(query.transpose(1, 2), keys, values, mask)
                .transpose(1, 2)
                .reshape(rows * width, -1)
            )
        # Stack the queries that share a KV head, so that the kernel reads each key once. The shape
        # is [B, KV heads, width * queries of a KV head, head dim].
        grouped = query.reshape(rows, width, self._kv_heads, -1, size).transpose(1, 2).flatten(2, 3)
        attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        return attended.unflatten(2, (width, -1)).transpose(1, 2).reshape(rows * width, -1)

    def _attend_prompts(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        step: Step,
        geometry: _Geometry,
        cache: Cache,
    ) -> Tensor:
        """Compute the attention within each prompt, and write its keys and values into the cache.

        Returns:
            The attention output of the prompt tokens, [N, heads * head dim].
        """
        prompts = step.prompts
        token_indices = geometry.at
        assert prompts is not None and token_indices is not None
        size = (len(prompts.lengths), prompts.width)

        def pad(packed: Tensor) -> Tensor:
            # From [N, heads, head dim] to [U, heads, P, head dim].
            return (
                packed.new_zeros(*size, *packed.shape[1:])
                .index_put_(token_indices, packed)
                .transpose(1, 2)
            )

        queries = pad(query)
        keys = pad(key)
        values = pad(value)
        if self.exact:
            assert geometry.visible is not None
            attended = batch_invariant.attend(queries, keys, values, geometry.visible)
        else:
            attended = F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=geometry.visible,
                is_causal=geometry.visible is None,
                enable_gqa=True,
            )
        cache.write_prompts(layer, prompts.rows, prompts.copies, keys, values)
        return attended.transpose(1, 2)[token_indices].flatten(1)

    def _mlp(self, x: Tensor, name: str, step: Step) -> Tensor:
        """Compute the feed-forward network of x [N, hidden], dense or mixture of experts."""
        if self._shape.num_experts:
            return self._sum(self._experts(x, name, step))
        inner = self._products.linear(x, name + "linear_fc1")
        return self._row_parallel(self._activate(inner), name + "linear_fc2")

    def _activate(self, x: Tensor) -> Tensor:
        """Apply the activation function; with a gated network, multiply the two halves of x."""
        if not self._shape.gated:
            return self._activation(x)
        gate, up = x.chunk(2, -1)
        return self._activation(gate).mul_(up)

    def _experts(self, x: Tensor, name: str, step: Step) -> Tensor:
        """Compute this rank's share of the weighted sum of each token's experts.

        Source: Shazeer et al. 2017, "Outrageously Large Neural Networks", section 2.1.
        """
        shape = self._shape
        probabilities = self._products.linear(x, name + "router").float().softmax(-1)
        weights, experts = probabilities.topk(shape.experts_per_token, -1)
        if step.routes is not None:
            step.routes.append(experts.to(torch.uint8 if shape.num_experts <= 256 else torch.int16))
        if shape.normalize_expert_weights:
            weights = weights / weights.sum(-1, keepdim=True)

        output = torch.zeros_like(x)
        # `slot` is the expert's rank among the K experts of a token, which selects its weight.
        for expert in range(shape.num_experts):
            token, slot = (experts == expert).nonzero(as_tuple=True)
            if len(token):
                inner = self._activate(
                    self._products.expert(x[token], name + "experts.linear_fc1", expert)
                )
                outer = self._products.expert(inner, name + "experts.linear_fc2", expert)
                output.index_add_(0, token, outer * weights[token, slot, None].to(x.dtype))
        return output

    def _row_parallel(self, x: Tensor, name: str) -> Tensor:
        """Compute a layer whose inputs are split over the ranks.

        Args:
            x: This rank's inputs, [N, inputs / TP].
            name: Name of the layer's weights.

        Returns:
            The complete outputs [N, outputs] on every rank.
        """
        if self._tensor == 1:
            return self._products.linear(x, name)
        # Each rank would add the bias; it is added once, after the all-reduce.
        total = self._sum(self._products.linear(x, name, with_bias=False))
        bias = self._weights.get(name + ".bias")
        return total if bias is None else total + bias

    def _sum(self, partial: Tensor) -> Tensor:
        """Sum the ranks' partial results in place (all-reduce)."""
        if self._tensor > 1:
            dist.all_reduce(partial, group=self._group)
        return partial


def _runs(rows: list[int]) -> list[tuple[int, int]]:
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
