"""Headers of safetensors and GGUF files, read without torch and without reading weights.

A safetensors file begins with the length of its header in eight bytes, and a JSON header, which
contains the dtype, shape and position of each tensor. The tensors' bytes follow. `aligner validate`
reads the headers to find damaged files before a process starts.

The header of a GGUF file contains the model's shape. The module reads only the required fields. The
reader of the package gguf would wrap each of the tokenizer's 150,000 strings in arrays, which takes
seconds: too long for a check of the configuration.
"""

import functools
import json
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from aligner.errors import ConfigError
from aligner.models.architectures import ARCHITECTURES_BY_CLASS
from aligner.models.families import COMPUTED_BUFFERS, WEIGHTS
from aligner.models.hugging_face import (
    count_prediction_layers,
    read_described_config,
    with_architecture,
)
from aligner.models.quantized_weights import find_stored_weight, name_in_files
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import TensorSpec

SINGLE = "model.safetensors"
"""Name of the weight file of a model with a single file."""
INDEX = "model.safetensors.index.json"
"""Name of the index of a model with several weight files."""

# Names of tensors that a file may contain although the model does not use them: another head, and
# buffers that are computed.
_UNUSED = ("lm_head.weight", "embed_out.weight", "score.weight", *COMPUTED_BUFFERS)
# Number of bytes of one read when two tensors are compared.
_COMPARED_BYTES = 1 << 26


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    dtype: str
    """Name of the type in the format, such as BF16."""
    shape: tuple[int, ...]
    start: int
    """Offset in the file of the tensor's first byte."""
    stop: int
    """Offset in the file of the first byte after the tensor."""


def has_weights(directory: Path) -> bool:
    """Return whether a directory has a weight file or an index of weight files."""
    return any((directory / name).is_file() for name in (SINGLE, INDEX))


def tensor_files(directory: Path) -> dict[str, Path]:
    """Return the file of each tensor, by the tensor's name.

    If a directory has both a single file and an index, transformers reads the single file.

    Raises:
        ConfigError: There is neither file, or one is damaged.
    """
    single = directory / SINGLE
    index = directory / INDEX
    if single.is_file():
        return dict.fromkeys(read_header(single), single)
    if index.is_file():
        return _indexed_files(index)
    raise ConfigError(
        f"{directory}: found neither {SINGLE} nor {INDEX}; expected a Hugging Face model directory"
        " with safetensors weights"
    )


def _indexed_files(index: Path) -> dict[str, Path]:
    """Return the file of each tensor that an index names. Raises ConfigError if it is damaged."""
    try:
        content: Any = json.loads(index.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{index}: not valid JSON ({error})") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(
            f"{index}: weight_map: must be an object with a file name for each tensor"
        )
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise ConfigError(
                f"{index}: weight_map[{tensor!r}]={name!r}: must be the name of a file in the"
                " directory"
            )
    absent = [
        name for name in dict.fromkeys(weight_map.values()) if not (index.parent / name).is_file()
    ]
    if absent:
        raise ConfigError(
            f"{index}: weight_map names files that do not exist: {', '.join(absent)};"
            f" {index.parent / absent[0]} cannot be read"
        )
    return {tensor: index.parent / name for tensor, name in weight_map.items()}


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, by name.

    Raises:
        ConfigError: The file cannot be read, is no safetensors file, or is shorter than its header
            says.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            size = file.stat().st_size
            if not 2 <= length <= size - 8:
                raise ConfigError(
                    f"{file} cannot be read: it has {size} bytes, less than its header, or is not a"
                    " safetensors file"
                )
            header: Any = json.loads(stream.read(length))
        tensors = {
            name: _stored_tensor(entry, 8 + length)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: its header is damaged: {error}") from error
    end = max((tensor.stop for tensor in tensors.values()), default=8 + length)
    if end > size:
        raise ConfigError(
            f"{file} cannot be read: it is truncated: it has {size} bytes, but its header names"
            f" {end}"
        )
    return tensors


def _stored_tensor(entry: Mapping[str, Any], offset: int) -> StoredTensor:
    start, stop = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    return StoredTensor(str(entry["dtype"]), shape, offset + int(start), offset + int(stop))


def _stored_tensors(files: Mapping[str, Path]) -> dict[str, StoredTensor]:
    """Return the header entry of each tensor; tensors missing from their files are left out."""
    headers = {file: read_header(file) for file in dict.fromkeys(files.values())}
    return {name: headers[file][name] for name, file in files.items() if name in headers[file]}


def weight_problems(
    directory: Path,
    table: Sequence[TensorSpec],
    *,
    optional: Collection[str] = (),
    partial: bool = False,
) -> list[str]:
    """Return the differences between a directory's files and a weight table, one line each.

    The lines name missing and unknown tensors, tensors that are not in the file that the index
    names, and tensors of another shape or an unsupported dtype. A head that the model does not
    use, the buffers that older releases saved, and the layers of multi-token prediction that
    config.json counts are always allowed. Only headers are read.

    Args:
        directory: A Hugging Face directory.
        table: The model's weight table.
        optional: Names of tensors that may be missing.
        partial: Whether the files may contain more tensors than the table.

    Raises:
        ConfigError: A file is missing or damaged.
    """
    files = tensor_files(directory)
    stored = _stored_tensors(files)
    expected = {spec.stored_range.name: spec.stored_range.shape for spec in table}
    weights = {name: find_stored_weight(name, shape, files) for name, shape in expected.items()}
    # shape and allowed dtypes of each tensor of the files
    expected_in_files = {
        name: tensor
        for weight_name, weight in weights.items()
        for name, tensor in weight.expect_tensors(expected[weight_name]).items()
    }

    missing = [
        f"tensor {name if weight.method == 'plain' else stored_name}"
        f" {expected_in_files[stored_name][0]} is missing"
        for name, weight in weights.items()
        for stored_name in weight.names
        if stored_name not in files and name not in optional
    ]
    misplaced = [
        f"tensor {name} is not in {file.name}, which {INDEX} names"
        for name, file in files.items()
        if name not in stored
    ]
    misshapen = [
        f"tensor {name} has shape {stored[name].shape}, expected {shape}"
        for name, (shape, _) in expected_in_files.items()
        if name in stored and stored[name].shape != shape
    ]
    quantized = [
        f"tensor {name} has type {stored[name].dtype}; supported: {', '.join(dtypes)}"
        for name, (_, dtypes) in expected_in_files.items()
        if name in stored and stored[name].dtype not in dtypes
    ]
    prediction_layers = _find_prediction_layers(directory, table)
    unknown = [
        f"tensor {name} {tensor.shape} is not part of the model"
        for name, tensor in stored.items()
        if name not in expected_in_files
        and not name.endswith(_UNUSED)
        and not name.startswith(prediction_layers)
    ]
    return missing + misplaced + misshapen + quantized + ([] if partial else unknown)


def _find_prediction_layers(directory: Path, table: Sequence[TensorSpec]) -> tuple[str, ...]:
    """Return the prefixes of the tensors of multi-token prediction.

    They follow the layers, or have a prefix of their own.
    """
    path = directory / "config.json"
    if not path.is_file():
        return ()
    config = json.loads(path.read_text(encoding="utf-8"))
    count = count_prediction_layers(config)
    layers = 1 + max((spec.layer for spec in table if spec.layer is not None), default=-1)
    prefixes = [f"model.layers.{layer}." for layer in range(layers, layers + count)]
    names = with_architecture(config).get("architectures") or [""]
    architecture = ARCHITECTURES_BY_CLASS.get(names[0])
    if architecture is not None and architecture.ignored_tensors is not None:
        prefixes.append(architecture.ignored_tensors)
    return tuple(prefixes)


def tied_head_problems(directory: Path, shape: ModelShape) -> list[str]:
    """Return a problem if a model with tied embeddings has a head that differs from its embedding.

    transformers does not tie the weights if the files contain both with different values. A model
    of aligner has one weight for both, so it would compute other log-probs than transformers. The
    tensors are read only if the files contain a head.
    """
    if not shape.tied_embeddings:
        return []
    files = tensor_files(directory)
    stored = _stored_tensors(files)
    embedding, head = (
        next(weight.name for weight in WEIGHTS[shape.family] if weight.parameter == parameter)
        for parameter in ("embedding.word_embeddings.weight", "output_layer.weight")
    )
    embedding = name_in_files(embedding, files)
    if head not in stored or embedding not in stored:
        return []
    if _are_equal(files[embedding], stored[embedding], files[head], stored[head]):
        return []
    return [
        f"tie_word_embeddings=true, but tensor {head} differs from {embedding}; set"
        " tie_word_embeddings=false in config.json to keep the tensor, or remove it"
    ]


def _are_equal(file: Path, tensor: StoredTensor, other_file: Path, other: StoredTensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bytes."""
    if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
        return False
    with file.open("rb") as first, other_file.open("rb") as second:
        first.seek(tensor.start)
        second.seek(other.start)
        remaining = tensor.stop - tensor.start
        while remaining > 0:
            count = min(remaining, _COMPARED_BYTES)
            if first.read(count) != second.read(count):
                return False
            remaining -= count
    return True


# The GGUF format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
_MAGIC = b"GGUF"
# Numbers of the value types; the values of _SCALARS are the format characters of `struct`.
_STRING = 8
_ARRAY = 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
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


def _read_scalar(file: BinaryIO, code: str) -> Any:
    """Read a number; `code` is its format character of `struct`."""
    layout = struct.Struct("<" + code)
    return layout.unpack(file.read(layout.size))[0]


def _read_string(file: BinaryIO) -> str:
    return file.read(_read_scalar(file, "Q")).decode()


def _read_value(file: BinaryIO, kind: int) -> Any:
    """Read a value of the type with the number `kind`."""
    if kind == _STRING:
        return _read_string(file)
    if kind != _ARRAY:
        return _read_scalar(file, _SCALARS[kind])
    element = _read_scalar(file, "I")
    count = _read_scalar(file, "Q")
    if element in (_STRING, _ARRAY):
        return [_read_value(file, element) for _ in range(count)]
    # One call reads all numbers of an array.
    layout = struct.Struct(f"<{count}{_SCALARS[element]}")
    return list(layout.unpack(file.read(layout.size)))


def _read_gguf_header(path: Path) -> tuple[Mapping[str, Any], set[str]]:
    """Return the metadata of a GGUF file by key, and the names of its tensors."""
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise ConfigError(f"{path}: not a GGUF file")
        version = _read_scalar(file, "I")
        if version not in (2, 3):
            raise ConfigError(f"{path}: GGUF version {version} is not supported; supported: 2, 3")
        tensor_count = _read_scalar(file, "Q")
        field_count = _read_scalar(file, "Q")
        fields = {
            _read_string(file): _read_value(file, _read_scalar(file, "I"))
            for _ in range(field_count)
        }
        names = set()
        for _ in range(tensor_count):
            names.add(_read_string(file))
            dimensions = _read_scalar(file, "I")
            file.seek(8 * dimensions + 4 + 8, 1)  # sizes, type, offset
    return fields, names


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
    try:
        fields, tensors = _read_gguf_header(path)
    except (struct.error, KeyError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: damaged GGUF header ({error})") from error
    family = fields.get("general.architecture", "<none>")
    entries = {name: fields.get(f"{family}.{key}") for name, key in _GGUF_KEYS.items()}
    config = {name: value for name, value in entries.items() if value is not None}
    config["architectures"] = [_ARCHITECTURES.get(family, family)]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["eos_token_id"] = fields.get("tokenizer.ggml.eos_token_id")
    config["pad_token_id"] = fields.get("tokenizer.ggml.padding_token_id")
    return read_described_config(config, str(path))
