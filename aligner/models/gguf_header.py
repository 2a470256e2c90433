"""Headers of GGUF files: the model's shape, read without the package gguf and without weights.

The header contains the metadata as typed values, and the names and sizes of the tensors. This
module keeps only the numbers and texts of the metadata and skips arrays, for example the 150,000
strings of a tokenizer. The reader of the package gguf would wrap each string in arrays, which takes
seconds: too long for a check of the configuration.

The header is untrusted. Every count is compared with the rest of the file and with the limits in
`aligner.file_limits` before anything is read.
"""

import functools
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from aligner.errors import ConfigError
from aligner.file_limits import (
    MAX_GGUF_ARRAY_ELEMENTS,
    MAX_GGUF_FIELDS,
    MAX_GGUF_NESTING,
    MAX_GGUF_STRING_BYTES,
    MAX_GGUF_TENSORS,
)
from aligner.models.hugging_face import read_described_config
from aligner.models.shape import ModelShape

# The GGUF format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
_MAGIC = b"GGUF"
# Maximum number of a tensor's dimensions (GGML_MAX_DIMS).
_MAX_DIMENSIONS = 4
# Numbers per byte in the format with the fewest bits per number (IQ1_S, 1.56 bits), rounded up.
_MAX_NUMBERS_PER_BYTE = 8
# Numbers of the value types; the values of _SCALARS are the format characters of `struct`.
_STRING = 8
_ARRAY = 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_UINT32 = _SCALARS[4]
_UINT64 = _SCALARS[10]
# Hugging Face architecture by the value of GGUF's `general.architecture`.
_ARCHITECTURES = {"llama": "LlamaForCausalLM"}

# GGUF key, without the architecture's prefix, by the entry of config.json.
_GGUF_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "head_dim": "attention.key_length",
}


@dataclass(frozen=True)
class _Array:
    """An array of the metadata, which was skipped."""

    count: int
    """Number of elements."""


class _HeaderReader:
    """Reader of a GGUF header, which raises ConfigError if the header exceeds a limit."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        """Create a reader.

        Args:
            file: The file, at its start.
            path: Path of the file, for errors.
            size: Size of the file in bytes.
        """
        self._file = file
        self._path = path
        self._size = size
        self._position = 0
        self._array_elements = 0
        self._entry = "header"

    def read(self) -> tuple[Mapping[str, Any], set[str]]:
        """Return the metadata by key, and the names of the tensors."""
        if self._file.read(len(_MAGIC)) != _MAGIC:
            raise ConfigError(f"{self._path}: not a GGUF file")
        self._position = len(_MAGIC)
        version = self._read_number(_UINT32)
        if version not in (2, 3):
            raise ConfigError(
                f"{self._path}: GGUF version {version} is not supported; supported: 2, 3"
            )
        tensor_count = self._read_number(_UINT64)
        field_count = self._read_number(_UINT64)
        self._check("number of tensors", tensor_count, MAX_GGUF_TENSORS)
        self._check("number of metadata entries", field_count, MAX_GGUF_FIELDS)

        fields: dict[str, Any] = {}
        for index in range(field_count):
            self._entry = f"metadata entry {index}"
            key = self._read_string()
            self._entry = key[:100]
            fields[key] = self._read_value(self._read_number(_UINT32))

        names = set()
        for index in range(tensor_count):
            self._entry = f"tensor {index}"
            names.add(self._read_string())
            self._check_tensor()
        return fields, names

    def _check_tensor(self) -> None:
        """Read the sizes, the type and the offset of a tensor, and check them."""
        dimensions = self._read_number(_UINT32)
        self._check("number of dimensions", dimensions, _MAX_DIMENSIONS)
        sizes = [self._read_number(_UINT64) for _ in range(dimensions)]
        # Readers allocate the tensor before they read it.
        self._check("number of elements", math.prod(sizes), _MAX_NUMBERS_PER_BYTE * self._size)
        self._read_number(_UINT32)  # type
        self._check("offset", self._read_number(_UINT64), self._size)

    def _read_value(self, kind: int, depth: int = 0) -> Any:
        """Read a value of the type with the number `kind`; an array is skipped."""
        if kind == _STRING:
            return self._read_string()
        if kind in _SCALARS:
            return self._read_number(_SCALARS[kind])
        if kind != _ARRAY:
            raise self._error(f"value type {kind} is unknown")

        element = self._read_number(_UINT32)
        count = self._read_number(_UINT64)
        self._array_elements += count
        self._check("array elements of the file", self._array_elements, MAX_GGUF_ARRAY_ELEMENTS)
        self._check("nested arrays", depth + 1, MAX_GGUF_NESTING)
        if element in _SCALARS:
            self._skip(count * _SCALARS[element].size)
            return _Array(count)
        for _ in range(count):
            if element == _STRING:
                self._skip(self._read_length())
            else:
                self._read_value(element, depth + 1)
        return _Array(count)

    def _read_string(self) -> str:
        content = self._read_bytes(self._read_length())
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise self._error(str(error)) from error

    def _read_length(self) -> int:
        """Read the length of a string in bytes."""
        length = int(self._read_number(_UINT64))
        self._check("length of a string", length, MAX_GGUF_STRING_BYTES)
        return length

    def _read_number(self, layout: struct.Struct) -> Any:
        return layout.unpack(self._read_bytes(layout.size))[0]

    def _read_bytes(self, count: int) -> bytes:
        self._advance(count)
        content = self._file.read(count)
        if len(content) != count:
            raise self._error("the file was truncated while it was read")
        return content

    def _skip(self, count: int) -> None:
        self._advance(count)
        self._file.seek(count, 1)

    def _advance(self, count: int) -> None:
        """Move the position by `count` bytes; raise ConfigError after the end of the file."""
        remaining = self._size - self._position
        if count > remaining:
            raise self._error(f"needs {count} bytes, but the file has only {remaining} more")
        self._position += count

    def _check(self, quantity: str, value: int, limit: int) -> None:
        if value > limit:
            raise self._error(f"{quantity} is {value}, allowed: {limit}")

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self._path}: damaged GGUF header: {self._entry!r}: {problem}")


def gguf_shape(path: Path) -> ModelShape:
    """Return the shape of the model in a GGUF file.

    Raises:
        ConfigError: The file is damaged, or its architecture is not supported.
    """
    status = path.stat()
    return _read_gguf_shape(path, status.st_ino, status.st_size, status.st_mtime_ns)


@functools.lru_cache(32)
def _read_gguf_shape(path: Path, inode: int, size: int, modified_ns: int) -> ModelShape:
    """Return the shape in a GGUF file; `inode`, `size` and `modified_ns` identify its version.

    The result is cached because several checks of one command need the shape, and the header
    contains the whole vocabulary.
    """
    with path.open("rb") as file:
        fields, tensors = _HeaderReader(file, path, size).read()
    family = fields.get("general.architecture", "<none>")
    entries = {name: fields.get(f"{family}.{key}") for name, key in _GGUF_KEYS.items()}
    config = {name: value for name, value in entries.items() if value is not None}
    config["eos_token_id"] = fields.get("tokenizer.ggml.eos_token_id")
    config["pad_token_id"] = fields.get("tokenizer.ggml.padding_token_id")
    for name, value in config.items():
        if isinstance(value, _Array):
            raise ConfigError(
                f"{path}: the value of {_GGUF_KEYS.get(name, name)} is an array of {value.count}"
                " elements; supported: a number"
            )
    config["architectures"] = [_ARCHITECTURES.get(family, family)]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    return read_described_config(config, str(path))
