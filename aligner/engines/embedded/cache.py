"""Paged KV cache of the embedded engine: blocks of tokens, within a memory budget."""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.engines.embedded.delta_net_states import DeltaNetStates
from aligner.errors import AlignerError
from aligner.models.layouts import count_blocks
from aligner.models.shape import ModelShape


@dataclass(frozen=True)
class CacheSize:
    """Dimensions of the KV cache."""

    sequences: int
    """Maximum number of sequences in flight."""
    tokens: int
    """Maximum number of tokens of a sequence."""
    block_tokens: int
    """Number of tokens of a block."""
    blocks: int
    """Number of blocks, which all sequences share."""

    @classmethod
    def from_sequences(cls, sequences: int, tokens: int, block_tokens: int) -> "CacheSize":
        """Return the size of a cache in which all sequences may have the maximum length."""
        blocks = sequences * count_blocks(tokens, block_tokens)
        return cls(sequences, tokens, block_tokens, blocks)


def compute_cache_size(
    token_bytes: int,
    tokens: int,
    max_sequences: int,
    budget_mib: int | None,
    block_tokens: int,
    state_bytes: int = 0,
) -> CacheSize:
    """Compute the size of a KV cache within the memory budget.

    Args:
        token_bytes: Bytes of the KV cache per token, over all layers, on this rank.
        tokens: Maximum number of tokens of a sequence.
        max_sequences: Maximum number of sequences in flight.
        budget_mib: Value of `engine.kv_cache_mib`; None means no limit.
        block_tokens: Number of tokens of a block.
        state_bytes: Bytes of a sequence's states of delta nets on this rank.

    Returns:
        A size with blocks for `max_sequences` sequences of the maximum length, or as many blocks as
        the budget allows. States of delta nets are allocated for the maximum number of sequences,
        which the budget then limits, too.

    Raises:
        AlignerError: The budget is too small for one sequence.
    """
    size = CacheSize.from_sequences(max_sequences, tokens, block_tokens)
    if budget_mib is None:
        return size
    budget = budget_mib << 20
    block_bytes = token_bytes * block_tokens
    sequence_bytes = block_bytes * count_blocks(tokens, block_tokens) + state_bytes
    if budget < sequence_bytes:
        needed = sequence_bytes / 2**20
        raise AlignerError(
            f"engine.kv_cache_mib={budget_mib}: the KV cache of one sequence of {tokens} tokens"
            f" needs {needed:.1f} MiB; raise engine.kv_cache_mib, or shorten prompts or responses"
        )
    sequences = min(max_sequences, budget // sequence_bytes) if state_bytes else max_sequences
    affordable_blocks = (budget - sequences * state_bytes) // block_bytes
    return CacheSize(sequences, tokens, block_tokens, min(size.blocks, affordable_blocks))


class KVCache:
    """Paged KV cache of one tensor-parallel rank (Kwon et al. 2023, "PagedAttention").

    A block holds the keys and values of `CacheSize.block_tokens` consecutive tokens of a sequence.
    The block table of a sequence lists its blocks in the order of its tokens. Sequences may share
    blocks.

    With latent attention, a token has one key for all heads: its latent, followed by the rotated
    key that all heads share. Its value is the latent, so values are a view of the keys.

    The memory is kept between generations. Each generation divides it into the blocks that it
    needs.
    """

    def __init__(
        self,
        shape: ModelShape,
        tensor_parallel_size: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        token_major: bool = False,
        null_block: bool = False,
    ) -> None:
        """Create an empty cache; `resize` allocates the memory.

        Args:
            shape: Dimensions of the model.
            tensor_parallel_size: Number of tensor-parallel ranks.
            device: Device of the memory.
            dtype: Data type of keys and values.
            token_major: Whether all heads of a token are contiguous in memory, as
                `sliced_attention` requires. Otherwise all tokens of a head of a block are
                contiguous.
            null_block: Whether to allocate one block that belongs to no sequence, after the others.
                The padding rows of a CUDA graph write to it.
        """
        # Keys and values are one tensor, so that they share an allocation.
        self._leading_dims = (2, shape.num_attention_layers)
        self._head_dims = (shape.kv_heads_on_rank(tensor_parallel_size), shape.head_dim)
        latent = shape.latent_attention
        self._latent_dim = None if latent is None else latent.kv_lora_rank
        if latent is not None:
            self._leading_dims = (1, shape.num_layers)
            self._head_dims = (1, latent.cached_dim)
        self._is_token_major = token_major
        self._has_null_block = null_block
        self._storage = torch.empty(0, device=device, dtype=dtype)
        self._blocks = torch.empty(0)
        """View of the storage, [keys and values, layers, blocks, …]."""
        self.size = CacheSize(0, 0, 1, 0)
        """Current size."""
        self.layer_indices = _count_by_kind([layer.has_attention for layer in shape.layers])
        """Index of each layer among the layers of its kind, with attention or with a delta net."""
        self.delta_nets: DeltaNetStates | None = None
        """States of the layers with a delta net; None if the model has none."""
        if shape.delta_net is not None:
            self.delta_nets = DeltaNetStates(shape, tensor_parallel_size, device, dtype)
        self.keys = self.values = torch.empty(0)
        """Keys, [layers with attention, blocks, KV heads, block tokens, head dim]; `values` has the
        same shape, but for latent attention, whose values are the first `kv_lora_rank` dimensions
        of the keys.

        This is the shape in both memory layouts.
        """

    @property
    def null_block(self) -> int:
        """Index of the block that belongs to no sequence."""
        assert self._has_null_block, "only a cache for CUDA graphs has a null block"
        return self.size.blocks

    def resize(self, size: CacheSize) -> bool:
        """Divide the memory into blocks.

        A new size discards the sequences in the cache.

        Returns:
            Whether the size has changed. Tensors may then have moved, and captured CUDA graphs are
            invalid.
        """
        if size == self.size:
            return False

        heads, head_dim = self._head_dims
        tokens = size.block_tokens
        inner_dims = (tokens, heads) if self._is_token_major else (heads, tokens)
        blocks = size.blocks + self._has_null_block
        shape = (*self._leading_dims, blocks, *inner_dims, head_dim)
        numel = torch.Size(shape).numel()
        if numel > self._storage.numel():
            # The old and the new storage may not fit into memory at the same time.
            self.free()
            # Attention multiplies masked values by 0, so uninitialized memory must not contain NaN.
            self._storage = _allocate_zeros(numel, self._storage)

        # [2, layers, blocks, tokens, KV heads, head dim] if token-major, else tokens and KV heads
        # exchanged.
        self._blocks = self._storage[:numel].view(shape)
        keys_and_values = self._blocks
        if self._is_token_major:
            keys_and_values = keys_and_values.transpose(3, 4)
        self.keys, self.values = keys_and_values[0], keys_and_values[-1]
        if self._latent_dim is not None:
            self.values = self.keys[..., : self._latent_dim]
        if self.delta_nets is not None:
            self.delta_nets.resize(size.sequences)
        self.size = size
        return True

    def free(self) -> None:
        """Free the memory of the cache."""
        self._storage = self._storage.new_empty(0)
        if self.delta_nets is not None:
            self.delta_nets.free()
        self.size = CacheSize(0, 0, 1, 0)
        self._blocks = self.keys = self.values = torch.empty(0)

    def clear(self, blocks: int) -> None:
        """Fill the first `blocks` blocks with zeros.

        Otherwise NaN and infinite values would remain in the memory after their sequences have
        ended, and would reach other sequences: attention multiplies masked values by 0, and 0 * NaN
        is NaN.
        """
        self._blocks[:, :, :blocks] = 0
        if self._has_null_block:
            self._blocks[:, :, self.null_block] = 0

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block of all layers."""
        self._blocks[:, :, target] = self._blocks[:, :, source]

    def write_tokens(
        self, layer: int, blocks: Tensor, offsets: Tensor, keys: Tensor, values: Tensor | None
    ) -> None:
        """Write the keys and values of tokens.

        Args:
            layer: Index of the layer.
            blocks: Block of each token, int64 [R].
            offsets: Index of each token in its block, int64 [R].
            keys: Keys of the tokens, [R, KV heads, head dim].
            values: Values of the tokens, [R, KV heads, head dim]; None with latent attention.
        """
        index = self.layer_indices[layer]
        self.keys[index][blocks, :, offsets] = keys
        if values is not None:
            self.values[index][blocks, :, offsets] = values

    def locate(self, block_tables: Tensor) -> Tensor:
        """Return the indices with which `gather` copies the blocks of sequences, for all layers.

        Args:
            block_tables: Blocks of each sequence, int64 [B, M].

        Returns:
            int64 [B, M] if the cache is token-major. Otherwise the indices of the blocks' heads,
            int64 [B, KV heads, M], so that one copy suffices.
        """
        if self._is_token_major:
            return block_tables
        heads = self._head_dims[0]
        head_range = torch.arange(heads, device=block_tables.device)[:, None]
        return block_tables[:, None] * heads + head_range

    def gather(self, layer: int, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the keys and values of sequences into contiguous memory.

        Args:
            layer: Index of the layer.
            indices: Result of `locate`.

        Returns:
            Keys and values, [B, KV heads, M * block tokens, head or value dim] each.
        """
        index = self.layer_indices[layer]
        keys = self._gather_blocks(self.keys[index], indices)
        if self._latent_dim is not None:
            return keys, keys[..., : self._latent_dim]
        return keys, self._gather_blocks(self.values[index], indices)

    def _gather_blocks(self, blocks: Tensor, indices: Tensor) -> Tensor:
        """Copy blocks [blocks, KV heads, block tokens, head dim]; see `gather`."""
        if self._is_token_major:
            # [B, M, block tokens, KV heads, head dim]
            copies = blocks.transpose(1, 2)[indices]
            return copies.flatten(1, 2).transpose(1, 2)
        copies = blocks.flatten(0, 1).index_select(0, indices.flatten())
        return copies.view(*indices.shape[:2], -1, blocks.shape[-1])


def _allocate_zeros(numel: int, like: Tensor) -> Tensor:
    """Return a tensor of zeros with the dtype and device of another tensor.

    On CPUs, the memory is committed as it is used: blocks that were never used take no memory.
    """
    if like.device.type != "cpu":
        return like.new_zeros(numel)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, numel * like.element_size(), flags=flags)
    return torch.frombuffer(memory, dtype=like.dtype)


def _count_by_kind(kinds: Sequence[bool]) -> list[int]:
    """Return for each entry the number of equal entries before it."""
    return [kinds[:index].count(kind) for index, kind in enumerate(kinds)]
