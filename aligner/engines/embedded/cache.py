"""KV cache of the sequences that the embedded engine decodes, within a memory budget."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.engines.embedded.delta_net_states import DeltaNetStates
from aligner.errors import AlignerError
from aligner.models.shape import ModelShape


@dataclass(frozen=True)
class CacheSize:
    """Dimensions of the KV cache: number of sequences, and number of tokens of each sequence."""

    rows: int
    """Number of sequences."""
    columns: int
    """Maximum number of tokens of a sequence."""


def compute_cache_size(
    token_bytes: int, columns: int, max_rows: int, budget_mib: int | None, state_bytes: int = 0
) -> CacheSize:
    """Compute the size of a KV cache within the memory budget.

    Args:
        token_bytes: Bytes of the KV cache per token, over all layers, on this rank.
        columns: Maximum number of tokens of a sequence.
        max_rows: Maximum number of sequences.
        budget_mib: Value of `engine.kv_cache_mib`; None means no limit.
        state_bytes: Bytes of a sequence's states of delta nets on this rank.

    Returns:
        A size of `columns` columns and as many rows as the budget allows, at most `max_rows`.

    Raises:
        AlignerError: The budget is too small for one sequence.
    """
    if budget_mib is None:
        return CacheSize(max_rows, columns)
    row_bytes = token_bytes * columns + state_bytes
    rows = min(max_rows, (budget_mib << 20) // row_bytes)
    if rows == 0:
        needed = row_bytes / 2**20
        raise AlignerError(
            f"engine.kv_cache_mib={budget_mib}: the KV cache of one sequence of {columns} tokens"
            f" needs {needed:.1f} MiB; raise engine.kv_cache_mib, or shorten prompts or responses"
        )
    return CacheSize(rows, columns)


class KVCache:
    """KV cache of one tensor-parallel rank: row r, column t holds token t of the sequence in row r.

    With latent attention, a token has one key for all heads: its latent, followed by the rotated
    key that all heads share. Its value is the latent, so values are a view of the keys.

    The memory is kept between generations. Each generation divides it into the rows and columns
    that it needs.
    """

    def __init__(
        self,
        shape: ModelShape,
        tensor_parallel_size: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        token_major: bool = False,
    ) -> None:
        """Create an empty cache; `resize` allocates the memory.

        Args:
            shape: Dimensions of the model.
            tensor_parallel_size: Number of tensor-parallel ranks.
            device: Device of the memory.
            dtype: Data type of keys and values.
            token_major: Whether all heads of a token are contiguous in memory, as
                `sliced_attention` requires. Otherwise all tokens of a head are contiguous.
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
        self._storage = torch.empty(0, device=device, dtype=dtype)
        self.size = CacheSize(0, 0)
        """Current number of rows and columns."""
        self.layer_indices = _count_by_kind([layer.has_attention for layer in shape.layers])
        """Index of each layer among the layers of its kind, with attention or with a delta net."""
        self.delta_nets: DeltaNetStates | None = None
        """States of the layers with a delta net; None if the model has none."""
        if shape.delta_net is not None:
            self.delta_nets = DeltaNetStates(shape, tensor_parallel_size, device, dtype)
        self.keys = self.values = torch.empty(0)
        """Keys, [layers with attention, rows, KV heads, columns, head dim]; `values` has the same
        shape, but for latent attention, whose values are the first `kv_lora_rank` dimensions of the
        keys.

        This is the shape in both memory layouts.
        """

    def resize(self, size: CacheSize) -> bool:
        """Divide the memory into rows and columns.

        A new size discards the sequences in the cache.

        Returns:
            Whether the size has changed. Tensors may then have moved, and captured CUDA graphs are
            invalid.
        """
        if size == self.size:
            return False

        heads, head_dim = self._head_dims
        inner_dims = (size.columns, heads) if self._is_token_major else (heads, size.columns)
        shape = (*self._leading_dims, size.rows, *inner_dims, head_dim)
        numel = torch.Size(shape).numel()
        if numel > self._storage.numel():
            # The old and the new storage may not fit into memory at the same time.
            self.free()
            # Attention multiplies masked values by 0, so uninitialized memory must not contain NaN.
            self._storage = self._storage.new_zeros(numel)

        # [2, layers, rows, columns, KV heads, head dim] if token-major, else columns and KV heads
        # exchanged.
        keys_and_values = self._storage[:numel].view(shape)
        if self._is_token_major:
            keys_and_values = keys_and_values.transpose(3, 4)
        self.keys, self.values = keys_and_values[0], keys_and_values[-1]
        if self._latent_dim is not None:
            self.values = self.keys[..., : self._latent_dim]
        if self.delta_nets is not None:
            self.delta_nets.resize(size.rows)
        self.size = size
        return True

    def free(self) -> None:
        """Free the memory of the cache."""
        self._storage = self._storage.new_empty(0)
        if self.delta_nets is not None:
            self.delta_nets.free()
        self.size = CacheSize(0, 0)
        self.keys = self.values = torch.empty(0)

    def clear(self) -> None:
        """Fill the cache with zeros.

        Otherwise NaN and infinite values would remain in the memory after their sequences have
        ended, and would reach other sequences: attention multiplies masked values by 0, and 0 * NaN
        is NaN.
        """
        self._storage.zero_()

    def copy_rows(self, sources: list[int], targets: list[int], width: int) -> None:
        """Copy the first `width` columns of the rows `sources`, and their states of delta nets, to
        the rows `targets`."""
        if self.delta_nets is not None:
            self.delta_nets.copy_rows(sources, targets)
        for tensor in (self.keys, self.values) if self._latent_dim is None else (self.keys,):
            # A single row is copied directly; indexing with lists makes a temporary copy.
            if len(sources) == 1:
                tensor[:, targets[0], :, :width] = tensor[:, sources[0], :, :width]
            else:
                tensor[:, targets, :, :width] = tensor[:, sources, :, :width]

    def write_tokens(
        self, layer: int, rows: Tensor, columns: Tensor, keys: Tensor, values: Tensor | None
    ) -> None:
        """Write the keys and values of single tokens.

        Args:
            layer: Index of the layer.
            rows: Row of each token, int64 [R].
            columns: Column of each token, int64 [R].
            keys: Keys of the tokens, [R, KV heads, head dim].
            values: Values of the tokens, [R, KV heads, head dim]; None with latent attention.
        """
        index = self.layer_indices[layer]
        self.keys[index][rows, :, columns] = keys
        if values is not None:
            self.values[index][rows, :, columns] = values

    def write_prompts(
        self,
        layer: int,
        rows: list[int],
        prompt_indices: Tensor,
        keys: Tensor,
        values: Tensor | None,
    ) -> None:
        """Write the keys and values of prompts at the start of their rows.

        Args:
            layer: Index of the layer.
            rows: Indices of the rows to write, of length C.
            prompt_indices: Index of the prompt of each row, int64 [C].
            keys: Keys of the prompts, [U, KV heads, P, head dim].
            values: Values of the prompts, [U, KV heads, P, head dim]; None with latent attention.
        """
        index = self.layer_indices[layer]
        self.keys[index, rows, :, : keys.shape[2]] = keys[prompt_indices]
        if values is not None:
            self.values[index, rows, :, : values.shape[2]] = values[prompt_indices]


def _count_by_kind(kinds: Sequence[bool]) -> list[int]:
    """Return for each entry the number of equal entries before it."""
    return [kinds[:index].count(kind) for index, kind in enumerate(kinds)]
