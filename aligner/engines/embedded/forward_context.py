"""Rotary angles, places in the KV cache and attention masks of a forward pass.

All layers of a forward pass share them. `ContextBuilder` computes them before the first layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.engines.embedded import block_attention, sliced_attention
from aligner.engines.embedded.block_attention import BlockPlan
from aligner.engines.embedded.cache import KVCache
from aligner.engines.embedded.decoder_step import Prompts, Step
from aligner.engines.embedded.sliced_attention import Spans
from aligner.models.rotary import compute_rotation
from aligner.models.shape import ModelShape, Rope, compute_inverse_frequencies

# Maximum size of the keys that a step copies per layer, instead of reading them where they are. The
# fused kernel over few contiguous keys takes half of the time of `block_attention`; larger copies
# do not fit into the caches of a processor core.
_MAX_COPIED_BYTES = 512 << 10


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
    stored_tokens: Tensor | None
    """Index of each token to store in the KV cache among all tokens, int64 [K]; None means all
    tokens in their order. A token occurs once for each block that it is stored in."""
    stored_blocks: Tensor
    """Block that receives each of these tokens, int64 [K]."""
    stored_offsets: Tensor
    """Index of each of these tokens in its block, int64 [K]."""
    cache_masks: Mapping[int | None, Tensor]
    """Attention mask of the decoding rows over the tokens of their block tables, by the sliding
    window of the layer; empty if `spans` replaces it.

    With `block_plan`, it is added to the scores, [rows, 1, tokens of the block tables]. Otherwise
    it is added to the scores, [rows, 1, queries of a KV head, tokens]; with `engine.exact`, soft
    caps or sinks it is bool [rows, tokens per row, tokens] instead, and True marks the keys to
    which a query attends.
    """
    block_plan: BlockPlan | None
    """Plan of the attention over blocks; None if the rows' blocks are read in another way."""
    copied_blocks: Tensor | None
    """Indices with which `KVCache.gather` copies the blocks of the decoding rows; None if the
    blocks are read in another way, or there are no decoding rows."""
    spans: Mapping[int | None, Spans]
    """Part of the KV cache that each row reads, by the sliding window of the layer; empty unless
    the decoder is sliced."""
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

    def store(self, layer: int, keys: Tensor, values: Tensor | None) -> None:
        """Write keys and values [R + N, KV heads, head dim] into the KV cache; the values are None
        with latent attention."""
        # Prompts that are only scored are not stored, and need no cache.
        if not len(self.stored_blocks):
            return
        if self.stored_tokens is not None:
            keys = keys.index_select(0, self.stored_tokens)
            values = None if values is None else values.index_select(0, self.stored_tokens)
        self.cache.write_tokens(layer, self.stored_blocks, self.stored_offsets, keys, values)


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
        # The shapes of `block_attention` differ from step to step, which CUDA graphs do not allow.
        # Its matmuls are not batch-invariant.
        self._has_block_attention = device.type == "cpu" and not exact
        self._has_fused_kernel = shape.has_plain_scores and not exact
        # All heads share the latents that latent attention caches.
        has_latents = shape.latent_attention is not None
        kv_heads = 1 if has_latents else shape.kv_heads_on_rank(tensor_parallel_size)
        self._kv_heads = kv_heads
        self._queries_per_kv_head = shape.num_heads // tensor_parallel_size // kv_heads
        self._last_plan: tuple[Tensor, Tensor, BlockPlan] | None = None
        """Block tables and numbers of blocks of the last step with a plan, and the plan."""

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

        block_plan = None
        copied_blocks = None
        spans = {}
        cache_masks = {}
        if self._is_sliced and step.tokens_per_row == 1:
            spans = {
                window: sliced_attention.compute_spans(
                    step.block_tables, step.positions + 1, cache.size.block_tokens, window
                )
                for window in self._windows
            }
        elif len(step.tokens):
            if self._reads_blocks(step, cache):
                block_plan = self._get_block_plan(step, cache.size.block_tokens)
            else:
                copied_blocks = cache.locate(step.block_tables)
            columns = step.block_tables.shape[1] * cache.size.block_tokens
            cache_masks = {
                window: self._build_cache_mask(step, columns, window, dtype, block_plan is not None)
                for window in self._windows
            }

        stored_tokens, stored_blocks, stored_offsets = _locate_stored_tokens(
            step, cache.size.block_tokens
        )
        return ForwardContext(
            step=step,
            cache=cache,
            tokens=tokens,
            positions=positions,
            rotations=self._compute_rotations(positions, dtype),
            stored_tokens=stored_tokens,
            stored_blocks=stored_blocks,
            stored_offsets=stored_offsets,
            cache_masks=cache_masks,
            block_plan=block_plan,
            copied_blocks=copied_blocks,
            spans=spans,
            prompt_token_indices=token_indices,
            prompt_masks=prompt_masks,
        )

    def _reads_blocks(self, step: Step, cache: KVCache) -> bool:
        """Return whether the decoding rows of a step use `block_attention`."""
        if not self._has_block_attention or step.tokens_per_row > 1:
            return False
        if cache.keys.dtype != torch.float32:
            return False
        heads, block_tokens, head_dim = cache.keys.shape[2:]
        block_bytes = heads * block_tokens * head_dim * cache.keys.element_size()
        return not self._has_fused_kernel or (
            step.block_tables.numel() * block_bytes > _MAX_COPIED_BYTES
        )

    def _get_block_plan(self, step: Step, block_tokens: int) -> BlockPlan:
        """Return the plan of the attention over blocks.

        The plan of the last step is used again, unless a row has got a new block since.
        """
        num_blocks = step.positions // block_tokens + 1
        if self._last_plan is not None:
            last_tables, last_num_blocks, plan = self._last_plan
            if torch.equal(num_blocks, last_num_blocks) and torch.equal(
                step.block_tables, last_tables
            ):
                return plan
        plan = block_attention.build_plan(
            step.block_tables, num_blocks, self._kv_heads, self._queries_per_kv_head
        )
        self._last_plan = (step.block_tables, num_blocks, plan)
        return plan

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

    def _build_cache_mask(
        self, step: Step, columns: int, window: int | None, dtype: torch.dtype, has_plan: bool
    ) -> Tensor:
        """Return the mask of the decoding rows over the tokens of their block tables.

        See `ForwardContext.cache_masks`.

        Args:
            step: The step.
            columns: Number of tokens of the block tables.
            window: Number of tokens of the sliding window; None means no window.
            dtype: Data type of the hidden states.
            has_plan: Whether the step has a plan of the attention over blocks.
        """
        column_range = torch.arange(columns, device=step.positions.device)
        positions = step.positions[:, None]
        is_masked = column_range > positions
        if window is not None:
            is_masked |= column_range <= positions - window
        is_masked = is_masked.view(-1, step.tokens_per_row, columns)
        if not self._has_fused_kernel and not has_plan:
            return ~is_masked

        mask = torch.zeros(is_masked.shape, device=is_masked.device, dtype=dtype)
        mask.masked_fill_(is_masked, float("-inf"))
        if has_plan:
            return mask
        # `CoreAttention` stacks the queries that share a KV head, so the mask of a token is
        # repeated for each of these queries.
        return mask.repeat_interleave(self._queries_per_kv_head, 1)[:, None]


def _locate_stored_tokens(step: Step, block_tokens: int) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return which tokens a step stores in the KV cache, their blocks, and their indices in these
    blocks; see `ForwardContext`."""
    rows = torch.arange(len(step.block_tables), device=step.tokens.device)
    rows = rows.repeat_interleave(step.tokens_per_row)
    blocks = step.block_tables[rows, step.positions // block_tokens]
    offsets = step.positions % block_tokens
    prompts = step.prompts
    if prompts is None:
        return None, blocks, offsets
    decoding_tokens = torch.arange(len(step.tokens), device=step.tokens.device)
    return (
        torch.cat((decoding_tokens, prompts.stored_tokens + len(step.tokens))),
        torch.cat((blocks, prompts.stored_blocks)),
        torch.cat((offsets, prompts.stored_offsets)),
    )


def _compute_token_indices(prompts: Prompts) -> tuple[Tensor, Tensor]:
    """Return the prompt index and the position of every prompt token, int64 [N] each."""
    # Index of the first token of each prompt among the packed tokens, [U].
    starts = prompts.lengths.cumsum(0) - prompts.lengths
    # Without values, repeat_interleave repeats the index of each prompt by its length.
    prompt_indices = torch.repeat_interleave(prompts.lengths)
    token_range = torch.arange(len(prompts.tokens), device=prompts.tokens.device)
    return prompt_indices, token_range - starts[prompt_indices]
