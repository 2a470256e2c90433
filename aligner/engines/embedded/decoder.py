"""A decoder of the Llama kind with a static key-value cache, one tensor-parallel rank of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from aligner.config.model_shape import ModelShape
from aligner.config.rope import inverse_frequencies
from aligner.engines.embedded.weights import EngineWeights


@dataclass
class Cache:
    """Keys and values of a batch: the prompts in columns [0, prompt_width), then one column a decoded token."""

    keys: list[Tensor]
    """By layer: [B, KV heads, columns, head dim]"""
    values: list[Tensor]
    prompt_lengths: Tensor
    """int64 [B]"""
    prompt_width: int
    mask: Tensor
    """Added to attention scores, [B, 1, 1, columns]: minus infinity at the padding behind a shorter prompt, else 0"""
    filled: int
    """Columns written so far."""

    def select(self, rows: Tensor) -> None:
        """Keep some rows (int64 [N])."""
        for layer in range(len(self.keys)):
            self.keys[layer] = self.keys[layer].index_select(0, rows)
            self.values[layer] = self.values[layer].index_select(0, rows)
        self.prompt_lengths, self.mask = self.prompt_lengths[rows], self.mask[rows]


class Decoder:
    """The forward pass: prompts at once, then token by token. All tensor-parallel ranks call it together."""

    def __init__(self, shape: ModelShape, weights: EngineWeights, tensor: int, place: int, group: ProcessGroup | None) -> None:
        """Rank `place` of `tensor`, whose process group is `group` (unused when `tensor` is 1)."""
        self._shape, self._weights = shape, weights
        self._tensor, self._place, self._group = tensor, place, group
        self._heads, self._kv_heads = shape.num_heads // tensor, shape.num_kv_heads // tensor
        device = weights.embedding.device
        self._frequencies = torch.tensor(inverse_frequencies(shape), device=device)

    def prefill(self, tokens: Tensor, lengths: Tensor, copies: Tensor, columns: int) -> tuple[Tensor, Cache]:
        """Run right-padded prompts and keep their keys and values for further decoding.

        tokens: int64 [U, P]; lengths: int64 [U]; copies: int64 [B], the prompt of each row of the cache.
        Returns this rank's vocabulary share of the logits of each prompt's last token, [U, V / TP], and a cache with
        room for `columns` columns.
        """
        rows, width = tokens.shape
        x = self._embed(tokens)
        rotation = self._rotation(torch.arange(width, device=tokens.device))
        # A causal mask alone keeps a token from seeing padding; a sliding window must be told.
        window = self._window(torch.arange(width, device=tokens.device), torch.arange(width, device=tokens.device))
        visible = None if window is None else window & torch.ones_like(window).tril()
        keys, values = [], []
        for layer in range(self._shape.num_layers):
            q, k, v = self._project(layer, x.flatten(0, 1), rotation, rows)
            size = (len(copies), self._kv_heads, columns, self._shape.head_dim)
            keys.append(k.new_empty(size))
            values.append(v.new_empty(size))
            keys[-1][:, :, :width] = k[copies]
            values[-1][:, :, :width] = v[copies]
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=visible is None, enable_gqa=True)
            x = self._finish_layer(layer, x, attended.transpose(1, 2).reshape(rows, width, -1))
        last = x[torch.arange(rows, device=x.device), lengths - 1]
        at = torch.arange(columns, device=x.device)
        padding = (at >= lengths[copies, None]) & (at < width)
        mask = torch.zeros(padding.shape, dtype=x.dtype, device=x.device).masked_fill_(padding, float("-inf"))
        return self._head(last), Cache(keys, values, lengths[copies], width, mask[:, None, None], width)

    def decode(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Append one token to every row. tokens: int64 [B]; returns logits [B, V / TP]."""
        shape, column = self._shape, cache.filled
        cache.filled += 1
        x = self._embed(tokens)
        rotation = self._rotation(cache.prompt_lengths[:, None] + (column - cache.prompt_width))
        mask = cache.mask[..., : cache.filled]
        at = torch.arange(cache.filled, device=tokens.device)
        columns = torch.where(at < cache.prompt_width, at, cache.prompt_lengths[:, None] + at - cache.prompt_width)
        window = self._window(cache.prompt_lengths + (column - cache.prompt_width), columns)
        if window is not None:
            mask = mask.masked_fill(~window[:, None, None], float("-inf"))
        scale = shape.head_dim**-0.5
        for layer in range(shape.num_layers):
            q, k, v = self._project(layer, x, rotation, len(tokens))
            cache.keys[layer][:, :, column] = k[:, :, 0]
            cache.values[layer][:, :, column] = v[:, :, 0]
            # The queries that share a KV head are the rows of one small matrix product.
            grouped = q.reshape(len(tokens), self._kv_heads, -1, shape.head_dim)
            scores = (grouped * scale) @ cache.keys[layer][:, :, : cache.filled].mT
            attended = scores.add_(mask).softmax(-1) @ cache.values[layer][:, :, : cache.filled]
            x = self._finish_layer(layer, x, attended.reshape(len(tokens), -1))
        return self._head(x)

    def _window(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """Whether a query at a position [Q] sees a key at a position [K] or [Q, K], past the window; bool [Q, K].

        None where the model has no window, or one that nothing leaves.
        """
        window = self._shape.sliding_window
        if window is None or keys.shape[-1] <= window:
            return None
        return keys > queries[:, None] - window

    def gather_logits(self, share: Tensor) -> Tensor | None:
        """Whole logits [B, V] on the replica's first rank, None on the others."""
        if self._tensor == 1:
            return share
        shares = [torch.empty_like(share) for _ in range(self._tensor)] if self._place == 0 else None
        dist.gather(share, shares, group=self._group, group_dst=0)
        return torch.cat(shares, -1) if shares else None

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The first rank's tensor on all ranks of the replica."""
        if self._tensor > 1:
            dist.broadcast(tensor, group=self._group, group_src=0)
        return tensor

    def _sum(self, partial: Tensor) -> Tensor:
        if self._tensor > 1:
            dist.all_reduce(partial, group=self._group)
        return partial

    def _embed(self, tokens: Tensor) -> Tensor:
        table = self._weights.embedding
        if self._tensor == 1:
            return F.embedding(tokens, table)
        local = tokens - self._place * len(table)
        here = (local >= 0) & (local < len(table))
        return self._sum(F.embedding(local.where(here, 0), table) * here[..., None])

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of int64 positions [*, T], as [*, 1, T, head dim / 2]."""
        angles = positions[..., None].float() * self._frequencies
        dtype = self._weights.embedding.dtype
        return angles.cos().to(dtype).unsqueeze(-3), angles.sin().to(dtype).unsqueeze(-3)

    def _project(self, layer: int, x: Tensor, rotation: tuple[Tensor, Tensor], rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries, rotated keys, and values, [rows, heads, T, head dim], of x [rows * T, hidden]."""
        weights, shape = self._weights.layers[layer], self._shape
        normed = F.rms_norm(x, (shape.hidden_size,), weights.attention_norm, shape.norm_epsilon)
        fused = F.linear(normed, weights.qkv, weights.qkv_bias).view(
            rows, -1, self._heads + 2 * self._kv_heads, shape.head_dim
        )
        rotated, v = fused.transpose(1, 2).split((self._heads + self._kv_heads, self._kv_heads), 1)
        if weights.query_norm is not None and weights.key_norm is not None:
            q, k = rotated.split((self._heads, self._kv_heads), 1)
            q = F.rms_norm(q, q.shape[-1:], weights.query_norm, shape.norm_epsilon)
            k = F.rms_norm(k, k.shape[-1:], weights.key_norm, shape.norm_epsilon)
            rotated = torch.cat((q, k), 1)
        cosine, sine = rotation
        first, second = rotated.chunk(2, -1)
        turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
        q, k = turned.split((self._heads, self._kv_heads), 1)
        return q, k, v

    def _finish_layer(self, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        """Output projection, feed-forward network and residuals. x [..., hidden], attended [..., heads * head dim]."""
        weights, shape = self._weights.layers[layer], self._shape
        x = x + self._sum(F.linear(attended, weights.attention_out))
        normed = F.rms_norm(x, (shape.hidden_size,), weights.mlp_norm, shape.norm_epsilon)
        gate, up = F.linear(normed, weights.gate_up).chunk(2, -1)
        return x.add_(self._sum(F.linear(F.silu(gate).mul_(up), weights.mlp_out)))

    def _head(self, x: Tensor) -> Tensor:
        """This rank's share of the logits of x [B, hidden]."""
        normed = F.rms_norm(x, (self._shape.hidden_size,), self._weights.final_norm, self._shape.norm_epsilon)
        return F.linear(normed, self._weights.head)
