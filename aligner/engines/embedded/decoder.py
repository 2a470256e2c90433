"""The forward pass of a decoder-only transformer over a key-value cache, one tensor-parallel rank
of it."""

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
from aligner.models.shape import ModelShape, inverse_frequencies
from aligner.models.weight_slices import weight_table

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True)
class Prompts:
    """Sequences to run for the first time, and the rows of the cache that each is for."""

    tokens: Tensor
    """int64 [N]: all of them, one after another"""
    lengths: Tensor
    """int64 [U]"""
    width: int
    """The longest."""
    copies: Tensor
    """int64 [C]: which of them each new row begins with"""
    rows: list[int]
    """The cache's, of each of those."""


@dataclass(frozen=True)
class Step:
    """What a forward pass computes: the next token of some of the cache's rows, and prompts for
    others."""

    tokens: Tensor
    """int64 [R]: the newest token of each row; where `width` is above 1, that and the guessed ones
    after it, row by row"""
    positions: Tensor
    """int64 [R]: its place in its sequence"""
    columns: int
    """Columns of the cache that matter: above every position."""
    prompts: Prompts | None = None
    width: int = 1
    """Tokens of each row."""
    rows: list[int] | None = None
    """The cache's, in ascending order; None: its first ones."""
    scores: bool = True
    """Whether logits are wanted."""
    lengths: Tensor | None = None
    """Of a step of one token a row whose decoder is `sliced`, int32 [R]: how many tokens of its row
    each sees; None: those up to its place."""
    routes: list[Tensor] | None = None
    """Where given it gets the experts of every token, rows first: uint8 or int16 [R + N, K], one
    for each layer."""

    def followed_by(self, tokens: Tensor) -> "Step":
        """The step of the tokens [R] that this one, of one token a row, has drawn."""
        return Step(tokens, self.positions + 1, self.columns + 1, rows=self.rows)


@dataclass(frozen=True)
class _Geometry:
    """What every layer's attention needs to know of a step."""

    rotation: tuple[Tensor, Tensor] | None
    """Cosine and sine of every token's angles, [N, 1, rotated dims / 2]"""
    rows: Tensor
    """int64 [R]: the cache's row of each token"""
    runs: list[tuple[int, int]]
    """Rows of the step that follow each other in the cache: the first one there, and how many."""
    mask: Tensor | None
    """Added to the scores of rows against the cache, [rows, 1, queries of a KV head, columns]; for
    `engine.exact` bool [rows, width, columns]: what is seen; None where `spans` say it"""
    spans: Spans | None
    """What of the cache each row reads, where that is all that is read of it."""
    at: tuple[Tensor, Tensor] | None
    """Sequence and place of every prompt token, int64 [N] each"""
    visible: Tensor | None
    """Which prompt tokens see which, bool [P, P]; None: all before them, which the fused kernel
    knows by itself"""


class Decoder:
    """All tensor-parallel ranks of a replica call it together."""

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
        """Rank `place` of `tensor`, whose process group is `group` (unused when `tensor` is 1).

        `exact` is `engine.exact`, `packed` is `engine.packed_weights`. `sliced`: a step of one
        token a row reads no more of the cache, which lies by token then, than each row has.
        """
        self.exact, self.sliced = exact, sliced
        self._products = Products(exact=exact, packed=packed)
        self._shape, self._tensor, self._place, self._group = shape, tensor, place, group
        self._heads, self._kv_heads = shape.num_heads // tensor, shape.num_kv_heads // tensor
        self._activation = _ACTIVATIONS[shape.activation]
        # Where a file fuses query, key and value group by group, the storage is the file's.
        self._interleaved = any(
            "linear_qkv" in spec.parameter and spec.part == "whole" for spec in weight_table(shape)
        )
        rotary = shape.position == "rotary"
        self._frequencies = (
            torch.tensor(inverse_frequencies(shape), device=device) if rotary else None
        )
        self._weights: dict[str, Tensor] = {}

    def use(self, weights: dict[str, Tensor]) -> None:
        """Compute with these weights from now on, by megatron-core's names. To be called again when
        their values change."""
        self._weights = weights
        self._products.use(weights)

    def forward(self, step: Step, cache: Cache) -> Tensor:
        """This rank's vocabulary share of the logits of each row's next token, old rows first: [R +
        C, V / TP].

        Writes the tokens' keys and values into the cache.
        """
        prompts = step.prompts
        tokens, positions, geometry = self._prepare(step, cache)
        x = self._embed(tokens, positions)
        for layer in range(self._shape.num_layers):
            x = self._layer(layer, x, step, geometry, cache)
        rows = len(step.tokens)
        if prompts is not None:
            last = rows + prompts.lengths.cumsum(0) - 1
            x = torch.cat((x[:rows], x[last][prompts.copies]))
        normed = self._norm(x if step.scores else x[:0], "decoder.final_layernorm")
        head = "embedding.word_embeddings" if self._shape.tied_embeddings else "output_layer"
        return self._products.linear(normed, head)

    def gather_logits(self, share: Tensor) -> Tensor | None:
        """Whole logits [B, V] on the replica's first rank, None on the others."""
        if self._tensor == 1:
            return share
        # The last ranks' logits of the padding of the vocabulary are dropped.
        shares = (
            [torch.empty_like(share) for _ in range(self._tensor)] if self._place == 0 else None
        )
        dist.gather(share, shares, group=self._group, group_dst=0)
        return torch.cat(shares, -1)[:, : self._shape.vocab_size] if shares else None

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The first rank's tensor on all ranks of the replica."""
        if self._tensor > 1:
            dist.broadcast(tensor, group=self._group, group_src=0)
        return tensor

    def _prepare(self, step: Step, cache: Cache) -> tuple[Tensor, Tensor, _Geometry]:
        """Every token and its position, rows first and then the prompts', and the step's
        geometry."""
        tokens, positions, prompts = step.tokens, step.positions, step.prompts
        at = visible = None
        if prompts is not None:
            ends = prompts.lengths.cumsum(0)
            sequence = torch.repeat_interleave(prompts.lengths)
            place = (
                torch.arange(len(prompts.tokens), device=tokens.device)
                - (ends - prompts.lengths)[sequence]
            )
            tokens, positions = torch.cat((tokens, prompts.tokens)), torch.cat((positions, place))
            at = (sequence, place)
            window = self._shape.sliding_window
            if self.exact or (window is not None and window < prompts.width):
                visible = torch.ones(
                    prompts.width, prompts.width, dtype=torch.bool, device=tokens.device
                )
                visible = visible.tril().triu(1 - (window or prompts.width))
        rotation = None
        if self._frequencies is not None:
            angles = positions[:, None, None].float() * self._frequencies
            dtype = self._weights["embedding.word_embeddings.weight"].dtype
            rotation = angles.cos().to(dtype), angles.sin().to(dtype)
        count = len(step.tokens) // step.width
        rows, runs = torch.arange(count, device=tokens.device), [(0, count)]
        if step.rows is not None:
            rows, runs = torch.tensor(step.rows, device=tokens.device), _runs(step.rows)
        spans = mask = None
        if self.sliced and step.width == 1:
            seen = (step.positions + 1).int() if step.lengths is None else step.lengths
            spans = sliced_attention.spans(rows, seen, cache.size.columns)
        else:
            mask = self._cache_mask(step)
        return (
            tokens,
            positions,
            _Geometry(rotation, rows.repeat_interleave(step.width), runs, mask, spans, at, visible),
        )

    def _cache_mask(self, step: Step) -> Tensor:
        column, position = (
            torch.arange(step.columns, device=step.positions.device),
            step.positions[:, None],
        )
        hidden = column > position
        if self._shape.sliding_window is not None:
            hidden |= column <= position - self._shape.sliding_window
        hidden = hidden.view(-1, step.width, step.columns)
        if self.exact:
            return ~hidden
        dtype = self._weights["embedding.word_embeddings.weight"].dtype
        mask = torch.zeros(hidden.shape, device=hidden.device, dtype=dtype).masked_fill_(
            hidden, float("-inf")
        )
        return mask.repeat_interleave(self._heads // self._kv_heads, 1)[:, None]

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        table = self._weights["embedding.word_embeddings.weight"]
        if self._tensor == 1:
            x = F.embedding(tokens, table)
        else:
            local = tokens - self._place * len(table)
            here = (local >= 0) & (local < len(table))
            x = self._sum(F.embedding(local.where(here, 0), table) * here[:, None])
        if self._shape.position == "learned":
            x = x + F.embedding(positions, self._weights["embedding.position_embeddings.weight"])
        return x

    def _layer(
        self, layer: int, x: Tensor, step: Step, geometry: _Geometry, cache: Cache
    ) -> Tensor:
        """x [N, hidden] to [N, hidden]."""
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
        """Queries [N, heads, head dim], keys and values [N, KV heads, head dim] of x [N, hidden];
        the first two rotated."""
        shape = self._shape
        fused = self._products.linear(x, name + "linear_qkv")
        if self._interleaved:
            groups = fused.view(len(x), self._kv_heads, -1, shape.head_dim)
            turning, value = (
                torch.cat((groups[:, :, :-2].flatten(1, 2), groups[:, :, -2]), 1),
                groups[:, :, -1],
            )
        else:
            heads = fused.view(len(x), self._heads + 2 * self._kv_heads, shape.head_dim)
            turning, value = heads.split((self._heads + self._kv_heads, self._kv_heads), 1)
        if shape.qk_norm:
            query, key = turning.split((self._heads, self._kv_heads), 1)
            turning = torch.cat(
                (self._norm(query, name + "q_layernorm"), self._norm(key, name + "k_layernorm")), 1
            )
        if rotation is not None:
            turning = rotate(turning, *rotation)
        query, key = turning.split((self._heads, self._kv_heads), 1)
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
        """New tokens of rows against their cache: [R, heads * head dim]."""
        place = geometry.rows, slice(None), step.positions
        keys, values = cache.keys[layer], cache.values[layer]
        keys[place], values[place] = key, value
        if geometry.spans is not None:
            return sliced_attention.attend(
                query, keys, values, geometry.spans, self._shape.sliding_window
            )
        assert geometry.mask is not None
        counts = [count for _, count in geometry.runs]
        queries = query.unflatten(0, (-1, step.width)).split(counts)
        held = [
            (slice(first, first + count), slice(None), slice(step.columns))
            for first, count in geometry.runs
        ]
        parts = zip(queries, held, geometry.mask.split(counts), strict=True)
        attended = [self._attend_rows(part, keys[at], values[at], mask) for part, at, mask in parts]
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _attend_rows(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """query [B, width, heads, head dim] against [B, KV heads, columns, head dim]: [B * width,
        heads * head dim]."""
        rows, width, _, size = query.shape
        if self.exact:
            return (
                batch_invariant.attend(query.transpose(1, 2), keys, values, mask)
                .transpose(1, 2)
                .reshape(rows * width, -1)
            )
        # The queries that share a KV head are one's, one after another.
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
        """Prompts against themselves, [N, heads * head dim]; their keys and values go to the rows
        that begin with them."""
        prompts, at = step.prompts, geometry.at
        assert prompts is not None and at is not None
        size = (len(prompts.lengths), prompts.width)

        def pad(packed: Tensor) -> Tensor:
            return packed.new_zeros(*size, *packed.shape[1:]).index_put_(at, packed).transpose(1, 2)

        queries, keys, values = pad(query), pad(key), pad(value)
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
        return attended.transpose(1, 2)[at].flatten(1)

    def _mlp(self, x: Tensor, name: str, step: Step) -> Tensor:
        """Feed-forward network of x [N, hidden]."""
        if self._shape.num_experts:
            return self._sum(self._experts(x, name, step))
        inner = self._products.linear(x, name + "linear_fc1")
        return self._row_parallel(self._activate(inner), name + "linear_fc2")

    def _activate(self, x: Tensor) -> Tensor:
        if not self._shape.gated:
            return self._activation(x)
        gate, up = x.chunk(2, -1)
        return self._activation(gate).mul_(up)

    def _experts(self, x: Tensor, name: str, step: Step) -> Tensor:
        """This rank's share of the weighted sum of each token's experts (Shazeer et al. 2017,
        section 2.1)."""
        shape = self._shape
        probabilities = self._products.linear(x, name + "router").float().softmax(-1)
        weights, chosen = probabilities.topk(shape.experts_per_token, -1)
        if step.routes is not None:
            step.routes.append(chosen.to(torch.uint8 if shape.num_experts <= 256 else torch.int16))
        if shape.normalize_expert_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        output = torch.zeros_like(x)
        for expert in range(shape.num_experts):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            if len(token):
                inner = self._activate(
                    self._products.expert(x[token], name + "experts.linear_fc1", expert)
                )
                outer = self._products.expert(inner, name + "experts.linear_fc2", expert)
                output.index_add_(0, token, outer * weights[token, slot, None].to(x.dtype))
        return output

    def _row_parallel(self, x: Tensor, name: str) -> Tensor:
        """A layer whose inputs are cut over the ranks: [N, inputs / TP] to the whole [N,
        outputs]."""
        if self._tensor == 1:
            return self._products.linear(x, name)
        total, bias = (
            self._sum(self._products.linear(x, name, with_bias=False)),
            self._weights.get(name + ".bias"),
        )
        return total if bias is None else total + bias

    def _sum(self, partial: Tensor) -> Tensor:
        if self._tensor > 1:
            dist.all_reduce(partial, group=self._group)
        return partial


def _runs(rows: list[int]) -> list[tuple[int, int]]:
    """Where ascending numbers follow each other: the first one, and how many; one of none where
    there are none."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        first, count = runs[-1] if runs else (0, 0)
        if runs and row == first + count:
            runs[-1] = first, count + 1
        else:
            runs.append((row, 1))
    return runs or [(0, 0)]
