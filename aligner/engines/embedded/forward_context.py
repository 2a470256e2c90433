"""Rotary angles, rows of the KV cache and attention masks of a forward pass.

All layers of a forward pass share them. `ContextBuilder` computes them before the first layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.engines.embedded import sliced_attention
from aligner.engines.embedded.cache import KVCache
from aligner.engines.embedded.decoder_step import Prompts, Step
from aligner.engines.embedded.sliced_attention import Spans
from aligner.models.rotary import compute_rotation
from aligner.models.shape import ModelShape, Rope, compute_inverse_frequencies


@dataclass(frozen=True)
class ForwardContext:
    """A step, the KV cache, and the tensors that all layers of the forward pass share."""

    step: Step
    cache: KVCache
    tokens: Tensor
    """Token ids of the decoding rows, followed by those of the prompts, int64 [R + N]."""
    positions: Tensor
    """Position of each token in its sequence, int64 [R + N]."""
    rotations: Mapping[Rope, tuple[Tensor, Tensor]]
    """Cosine and sine of the rotary angles of every token, [R + N, 1, rotated dims / 2] each, for
    each of the rotary position embeddings of the layers."""
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

    @property
    def num_decoding_tokens(self) -> int:
        """Number of tokens of the decoding rows, R, which come before those of the prompts."""
        return len(self.step.tokens)

    def pad_prompts(self, packed: Tensor) -> Tensor:
        """Return values of the prompts' tokens [N, ...] as rows [U, P, ...], zeros at padding.

        The padding comes after the prompt, so a causal mask already hides it from the prompt's
        tokens.
        """
        prompts = self.step.prompts
        assert prompts is not None and self.prompt_token_indices is not None
        padded = packed.new_zeros(len(prompts.lengths), prompts.max_length, *packed.shape[1:])
        return padded.index_put_(self.prompt_token_indices, packed)


def concatenate_tokens(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate values of the decoding rows and of the prompts, of which one may be missing."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


class ContextBuilder:
    """Builds the contexts of a decoder's forward passes."""

    def __init__(
        self,
        shape: ModelShape,
        tensor_parallel_size: int,
        device: torch.device,
        *,
        exact: bool,
        sliced: bool,
    ) -> None:
        """Create a builder.

        Args:
            shape: Dimensions of the model.
            tensor_parallel_size: Number of tensor-parallel ranks.
            device: Device of the decoder.
            exact: Value of `engine.exact`.
            sliced: Whether a step with one token per row reads only the tokens that each row has.
        """
        self._is_sliced = sliced
        self._windows = {layer.sliding_window for layer in shape.layers}
        ropes = {layer.rope for layer in shape.layers if layer.rope is not None}
        self._inverse_frequencies = {
            rope: torch.tensor(compute_inverse_frequencies(rope, shape.rotary_dim), device=device)
            for rope in ropes
        }
        self._is_exact = exact
        self._has_bool_masks = exact or not shape.has_plain_scores
        # All heads share the latents that latent attention caches.
        has_latents = shape.latent_attention is not None
        kv_heads = 1 if has_latents else shape.kv_heads_on_rank(tensor_parallel_size)
        self._queries_per_kv_head = shape.num_heads // tensor_parallel_size // kv_heads

    def build(self, step: Step, cache: KVCache, dtype: torch.dtype) -> ForwardContext:
        """Return the context of a step.

        Args:
            step: The step.
            cache: KV cache of the decoding rows and of the prompts' rows.
            dtype: Data type of the hidden states.
        """
        tokens = step.tokens
        positions = step.positions
        token_indices = None
        prompt_masks = {}
        if step.prompts is not None:
            token_indices = _compute_token_indices(step.prompts)
            tokens = torch.cat((tokens, step.prompts.tokens))
            positions = torch.cat((positions, token_indices[1]))
            prompt_masks = {
                window: self._build_prompt_mask(step.prompts.max_length, window, tokens.device)
                for window in self._windows
            }

        row_count = len(step.tokens) // step.tokens_per_row
        cache_rows = torch.arange(row_count, device=tokens.device)
        row_runs = [(0, row_count)]
        if step.rows is not None:
            cache_rows = torch.tensor(step.rows, device=tokens.device)
            row_runs = _find_row_runs(step.rows)

        spans = None
        cache_masks = {}
        if self._is_sliced and step.tokens_per_row == 1:
            lengths = (step.positions + 1).int() if step.lengths is None else step.lengths
            spans = sliced_attention.compute_spans(cache_rows, lengths, cache.size.columns)
        else:
            cache_masks = {
                window: self._build_cache_mask(step, window, dtype) for window in self._windows
            }

        return ForwardContext(
            step=step,
            cache=cache,
            tokens=tokens,
            positions=positions,
            rotations=self._compute_rotations(positions, dtype),
            cache_rows=cache_rows.repeat_interleave(step.tokens_per_row),
            row_runs=row_runs,
            cache_masks=cache_masks,
            spans=spans,
            prompt_token_indices=token_indices,
            prompt_masks=prompt_masks,
        )

    def _compute_rotations(
        self, positions: Tensor, dtype: torch.dtype
    ) -> dict[Rope, tuple[Tensor, Tensor]]:
        """Return cosine and sine of the rotary angles at the positions, int64 [N]."""
        # Angles need float32: bfloat16 cannot represent large positions exactly.
        return {
            rope: compute_rotation(positions[:, None, None].float() * frequencies, rope, dtype)
            for rope, frequencies in self._inverse_frequencies.items()
        }

    def _build_prompt_mask(
        self, length: int, window: int | None, device: torch.device
    ) -> Tensor | None:
        """Return the mask of prompts of up to `length` tokens.

        See `ForwardContext.prompt_masks`.
        """
        if not self._is_exact and (window is None or window >= length):
            return None
        mask = torch.ones(length, length, dtype=torch.bool, device=device)
        # A query attends to itself and to the `window` - 1 tokens before it.
        return mask.tril().triu(1 - (window or length))

    def _build_cache_mask(self, step: Step, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the mask of the decoding rows over the KV cache.

        See `ForwardContext.cache_masks`.
        """
        columns = torch.arange(step.columns, device=step.positions.device)
        positions = step.positions[:, None]
        is_masked = columns > positions
        if window is not None:
            is_masked |= columns <= positions - window
        is_masked = is_masked.view(-1, step.tokens_per_row, step.columns)
        if self._has_bool_masks:
            return ~is_masked

        # `CoreAttention` stacks the queries that share a KV head, so the mask of a token is
        # repeated for each of these queries.
        mask = torch.zeros(is_masked.shape, device=is_masked.device, dtype=dtype)
        mask.masked_fill_(is_masked, float("-inf"))
        return mask.repeat_interleave(self._queries_per_kv_head, 1)[:, None]


def _compute_token_indices(prompts: Prompts) -> tuple[Tensor, Tensor]:
    """Return the prompt index and the position of every prompt token, int64 [N] each."""
    # Index of the first token of each prompt among the packed tokens, [U].
    starts = prompts.lengths.cumsum(0) - prompts.lengths
    # Without values, repeat_interleave repeats the index of each prompt by its length.
    prompt_indices = torch.repeat_interleave(prompts.lengths)
    token_range = torch.arange(len(prompts.tokens), device=prompts.tokens.device)
    return prompt_indices, token_range - starts[prompt_indices]


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
