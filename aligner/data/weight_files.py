"""Safetensors files: a Hugging Face directory's slices that are asked for, read; tensors, written
one at a time.

The format: eight bytes of header length, a JSON header that says where each tensor lies, and the
tensors' bytes.
"""

import contextlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aligner.data.checksums import FileRecord
from aligner.errors import ConfigError
from aligner.files import naming, new_file
from aligner.models.weight_headers import file_name, tensor_files, weight_problems
from aligner.models.weight_slices import Slice, TensorSpec, stored_tensors

_DTYPE_NAMES = {
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
DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
"""torch's dtypes by their names in the format."""


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        handle = safe_open(str(file), framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    with handle as tensors:
        yield tensors


def read_slices(
    directory: Path,
    table: Sequence[TensorSpec],
    slices: Mapping[str, Slice],
    *,
    optional: Collection[str] = (),
    partial: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Each named slice of the table's tensors; nothing else is read from the disk, one tensor at a
    time.

    `optional` tensors that the files lack are left out. Raises ConfigError, before anything is
    given, for what `weight_problems` finds.
    """
    if problems := weight_problems(directory, table, optional=optional, partial=partial):
        raise ConfigError(f"{directory}: the files do not match config.json: {'; '.join(problems)}")
    files = tensor_files(directory)
    by_file: dict[Path, list[TensorSpec]] = {}
    for spec in table:
        if spec.name in slices and (file := files.get(file_name(spec.stored.name, files))):
            by_file.setdefault(file, []).append(spec)
    for file, held in by_file.items():
        with _opened(file) as tensors:
            for spec in held:
                whole = tensors.get_slice(file_name(spec.stored.name, files))
                yield spec.name, whole[_ranges(spec, slices[spec.name])]


def _ranges(spec: TensorSpec, piece: Slice) -> tuple[slice, ...]:
    """Where a slice of a tensor lies in the file's tensor."""
    ranges = [slice(0, size) for size in spec.shape]
    if piece.axis is not None:
        ranges[piece.axis] = slice(piece.start, piece.stop)
    axis, offset = spec.stored.axis, spec.stored.start
    if axis is not None:
        ranges[axis] = slice(ranges[axis].start + offset, ranges[axis].stop + offset)
    return tuple(ranges)


def assemble(
    table: Sequence[TensorSpec], read: Callable[[TensorSpec], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, by name and one at a time, out of the table's, which `read` gives
    whole."""
    for name, specs in stored_tensors(table).items():
        parts = [read(spec) for spec in specs]
        axis = specs[0].stored.axis
        yield name, (parts[0] if axis is None else torch.cat(parts, axis)).contiguous()


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


def write_safetensors(
    file: Path, entries: Sequence[TensorEntry], read: Callable[[str], Tensor]
) -> FileRecord:
    """Write the tensors that `read` gives, one at a time, without a second copy of any; returns
    size and checksum.

    The widest types come first, each in the order of `entries`, so that all lie aligned. Raises
    ValueError where `read` gives another shape or type than the entry's.
    """
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in ordered:
        start, end = end, end + entry.size
        header[entry.name] = {
            "dtype": _DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    digest = xxhash.xxh3_64(head)
    with new_file(file) as stream, naming(file):
        stream.write(head)
        for entry in ordered:
            tensor = read(entry.name).detach()
            if (tensor.dtype, tuple(tensor.shape)) != (entry.dtype, entry.shape):
                raise ValueError(
                    f"{file}: tensor {entry.name}: expected {entry.dtype} {entry.shape}, got"
                    f" {tensor.dtype} {tuple(tensor.shape)}"
                )
            content = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            digest.update(content)
            stream.write(content)
    return FileRecord(len(head) + end, digest.hexdigest())
