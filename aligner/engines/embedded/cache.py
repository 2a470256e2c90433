"""Keys and values of the sequences that are being decoded, within a memory budget."""

from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.errors import AlignerError
from aligner.models.shape import ModelShape


@dataclass(frozen=True)
class CacheSize:
    """How many sequences of how many tokens fit."""

    rows: int
    columns: int


def fit(token_bytes: int, columns: int, most_rows: int, budget_mib: int | None) -> CacheSize:
    """As many rows of `columns` tokens as the budget holds, up to `most_rows`.

    Raises AlignerError when it does not hold one.
    """
    if budget_mib is None:
        return CacheSize(most_rows, columns)
    rows = min(most_rows, (budget_mib << 20) // (token_bytes * columns))
    if rows == 0:
        needed = token_bytes * columns / 2**20
        raise AlignerError(
            f"engine.kv_cache_mib={budget_mib}: the KV cache of one sequence of {columns} tokens"
            f" needs {needed:.1f} MiB; raise engine.kv_cache_mib, or shorten prompts or responses"
        )
    return CacheSize(rows, columns)


class Cache:
    """Row r, column t holds token t of the sequence that has the row.

    Its memory stays from one generation to the next, cut into rows as the next one needs them.
    """

    def __init__(
        self,
        shape: ModelShape,
        tensor: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        by_token: bool = False,
    ) -> None:
        """`by_token`: the heads of a token lie together, as `sliced_attention` reads them; else the
        tokens of a head do."""
        self._leading = (2, shape.num_layers)
        self._trailing = (shape.num_kv_heads // tensor, shape.head_dim)
        self._by_token = by_token
        self._storage = torch.empty(0, device=device, dtype=dtype)
        self.size = CacheSize(0, 0)
        self.keys = self.values = torch.empty(0)
        """[layers, rows, KV heads, columns, head dim]"""

    def resize(self, size: CacheSize) -> bool:
        """Cut into rows and columns, for other sequences than those it holds; says whether tensors
        moved or changed shape."""
        if size == self.size:
            return False
        heads, width = self._trailing
        inner = (size.columns, heads) if self._by_token else (heads, size.columns)
        shape = (*self._leading, size.rows, *inner, width)
        elements = torch.Size(shape).numel()
        if elements > self._storage.numel():
            self.free()  # first: both together may not fit
            # what is masked is multiplied with 0, and may not be NaN
            self._storage = self._storage.new_zeros(elements)
        both = self._storage[:elements].view(shape)
        self.keys, self.values = both.transpose(3, 4) if self._by_token else both
        self.size = size
        return True

    def free(self) -> None:
        """Give the memory back."""
        self._storage = self._storage.new_empty(0)
        self.size = CacheSize(0, 0)
        self.keys = self.values = torch.empty(0)

    def clear(self) -> None:
        """Forget numbers that are not finite, which would outlive the sequences that they came
        from."""
        self._storage.zero_()

    def copy_rows(self, sources: list[int], targets: list[int], width: int) -> None:
        """Copy the first `width` columns of some rows over others."""
        for tensor in (self.keys, self.values):
            if len(sources) == 1:  # without a copy between them
                tensor[:, targets[0], :, :width] = tensor[:, sources[0], :, :width]
            else:
                tensor[:, targets, :, :width] = tensor[:, sources, :, :width]

    def write_prompts(
        self, layer: int, rows: list[int], copies: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Row `rows[i]` begins with prompt `copies[i]`; keys and values [U, KV heads, P, head
        dim]."""
        self.keys[layer, rows, :, : keys.shape[2]] = keys[copies]
        self.values[layer, rows, :, : values.shape[2]] = values[copies]
