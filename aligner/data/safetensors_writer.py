"""Writing safetensors files tensor by tensor, without a second copy of any of them.

The format: eight bytes of header length, a JSON header that says where each tensor lies, and the tensors' bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from aligner.files import naming

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in _NAMES.items()}
"""torch's dtypes by their names in the format."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(file: Path, entries: Sequence[TensorEntry], read: Callable[[str], Tensor]) -> int:
    """Write the tensors that `read` gives, one at a time, and wait for the disk; returns the file's size in bytes.

    The widest types come first, each in the order of `entries`, so that all lie aligned. Raises ValueError where `read`
    gives another shape or type than the entry's.
    """
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in ordered:
        start, end = end, end + entry.size
        header[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with naming(file), file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for entry in ordered:
            tensor = read(entry.name).detach()
            if (tensor.dtype, tuple(tensor.shape)) != (entry.dtype, entry.shape):
                raise ValueError(
                    f"{file}: {entry.name} was announced as {entry.dtype} {entry.shape}, but is {tensor.dtype}"
                    f" {tuple(tensor.shape)}"
                )
            stream.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        stream.flush()
        os.fsync(stream.fileno())
    return 8 + len(text) + end
