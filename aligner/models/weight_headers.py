"""The headers of a model directory's safetensors files, read without torch.

A file begins with eight bytes of header length and a JSON header, which has the type, shape and
position of each tensor. The tensors' bytes follow. `aligner validate` reads the headers to find
damaged files before a process starts.
"""

import functools
import json
import struct
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from aligner.errors import ConfigError
from aligner.models.families import COMPUTED_BUFFERS, WEIGHTS
from aligner.models.hugging_face import read_described_config
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import TensorSpec

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# What files may hold and a model not use: another head, and buffers that are computed.
_UNUSED = ("lm_head.weight", "embed_out.weight", "score.weight", *COMPUTED_BUFFERS)
_FLOATS = ("F64", "F32", "F16", "BF16")
_COMPARED_BYTES = 1 << 26


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    dtype: str
    """Name of the type in the format, such as BF16."""
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    stop: int
    """Byte after the last one."""


def has_weights(directory: Path) -> bool:
    """Return whether a directory has a weight file or an index of weight files."""
    return any((directory / name).is_file() for name in (SINGLE, INDEX))


def tensor_files(directory: Path) -> dict[str, Path]:
    """Return the file of each tensor, by the tensor's name.

    If a directory has both a single file and an index, transformers reads the single file.

    Raises:
        ConfigError: There is neither file, or one is damaged.
    """
    single, index = directory / SINGLE, directory / INDEX
    if single.is_file():
        return dict.fromkeys(read_header(single), single)
    if index.is_file():
        return _indexed_files(index)
    raise ConfigError(
        f"{directory}: found neither {SINGLE} nor {INDEX}; expected a Hugging Face model directory"
        " with safetensors weights"
    )


def _indexed_files(index: Path) -> dict[str, Path]:
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
    """Return the headers' entries of tensors; without those that are not in their files."""
    headers = {file: read_header(file) for file in dict.fromkeys(files.values())}
    return {name: headers[file][name] for name, file in files.items() if name in headers[file]}


def file_name(name: str, files: Container[str]) -> str:
    """A tensor's name in the files: checkpoints of a bare trunk lack the trunk's own name in
    front."""
    bare = name.partition(".")[2]
    return bare if name not in files and bare in files else name


def weight_problems(
    directory: Path,
    table: Sequence[TensorSpec],
    *,
    optional: Collection[str] = (),
    partial: bool = False,
) -> list[str]:
    """What keeps a directory's files from being the table's weights: missing, misshapen and unknown
    tensors, by name.

    Only headers are read. `optional` tensors may be absent; `partial` lets the files hold more than
    the table. A head that the model does not use, and the buffers that older releases saved, may
    always be there.
    """
    files = tensor_files(directory)
    stored = _stored_tensors(files)
    wanted = {spec.stored.name: spec.stored.shape for spec in table}
    named = {file_name(name, files): shape for name, shape in wanted.items()}
    missing = [
        f"tensor {name} {wanted[name]} is missing"
        for name in wanted
        if file_name(name, files) not in files and name not in optional
    ]
    misplaced = [
        f"tensor {name} is not in {file.name}, which {INDEX} names"
        for name, file in files.items()
        if name not in stored
    ]
    misshapen = [
        f"tensor {name} has shape {stored[name].shape}, expected {shape}"
        for name, shape in named.items()
        if name in stored and stored[name].shape != shape
    ]
    quantized = [
        f"tensor {name} has type {stored[name].dtype}; supported: {', '.join(_FLOATS)}"
        for name in named
        if name in stored and stored[name].dtype not in _FLOATS
    ]
    unknown = [
        f"tensor {name} {tensor.shape} is not part of the model"
        for name, tensor in stored.items()
        if name not in named and not name.endswith(_UNUSED)
    ]
    return missing + misplaced + misshapen + quantized + ([] if partial else unknown)


def tied_head_problems(directory: Path, shape: ModelShape) -> list[str]:
    """Return why the files of a model with tied embeddings are not such a model's, if they are not.

    transformers does not tie weights if the files have both with different values. A model here
    has one weight for both, so that it would compute other log-probs. Both tensors are read only
    if the files have a head.
    """
    if not shape.tied_embeddings:
        return []
    files = tensor_files(directory)
    stored = _stored_tensors(files)
    embedding, head = (
        next(weight.name for weight in WEIGHTS[shape.family] if weight.parameter == parameter)
        for parameter in ("embedding.word_embeddings.weight", "output_layer.weight")
    )
    embedding = file_name(embedding, files)
    if head not in stored or embedding not in stored:
        return []
    if _are_equal(files[embedding], stored[embedding], files[head], stored[head]):
        return []
    return [
        f"tie_word_embeddings=true, but tensor {head} differs from {embedding}; set"
        " tie_word_embeddings=false in config.json to keep the tensor, or remove it"
    ]


def _are_equal(file: Path, tensor: StoredTensor, other_file: Path, other: StoredTensor) -> bool:
    if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
        return False
    with file.open("rb") as first, other_file.open("rb") as second:
        first.seek(tensor.start)
        second.seek(other.start)
        left = tensor.stop - tensor.start
        while left > 0:
            count = min(left, _COMPARED_BYTES)
            if first.read(count) != second.read(count):
                return False
            left -= count
    return True


_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
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
_ARCHITECTURES = {"llama": "LlamaForCausalLM"}

_HF_NAMES = {
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


def _scalar(file: BinaryIO, code: str) -> Any:
    layout = struct.Struct("<" + code)
    return layout.unpack(file.read(layout.size))[0]


def _string(file: BinaryIO) -> str:
    return file.read(_scalar(file, "Q")).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        return _scalar(file, _SCALARS[kind])
    element, count = _scalar(file, "I"), _scalar(file, "Q")
    if element in (_STRING, _ARRAY):
        return [_value(file, element) for _ in range(count)]
    layout = struct.Struct(f"<{count}{_SCALARS[element]}")
    return list(layout.unpack(file.read(layout.size)))


def _read(path: Path) -> tuple[Mapping[str, Any], set[str]]:
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise ConfigError(f"{path}: not a GGUF file")
        version = _scalar(file, "I")
        if version not in (2, 3):
            raise ConfigError(f"{path}: GGUF version {version} is not supported; supported: 2, 3")
        tensors, entries = _scalar(file, "Q"), _scalar(file, "Q")
        fields = {_string(file): _value(file, _scalar(file, "I")) for _ in range(entries)}
        names = set()
        for _ in range(tensors):
            names.add(_string(file))
            dimensions = _scalar(file, "I")
            file.seek(8 * dimensions + 4 + 8, 1)  # sizes, type, offset
    return fields, names


def gguf_shape(path: Path) -> ModelShape:
    """Return the shape of the model in a GGUF file.

    Raises:
        ConfigError: The file is damaged, or its architecture is not supported.
    """
    status = path.stat()
    return _shape_of_version(path, status.st_ino, status.st_size, status.st_mtime_ns)


@functools.lru_cache(32)
def _shape_of_version(path: Path, inode: int, size: int, modified_ns: int) -> ModelShape:
    """Return the shape in one version of a file, which `inode`, `size` and `modified_ns`
    identify.

    Several checks of one command need the shape, and the header contains the whole vocabulary.
    """
    try:
        fields, tensors = _read(path)
    except (struct.error, KeyError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: damaged GGUF header ({error})") from error
    family = fields.get("general.architecture", "<none>")
    found = {name: fields.get(f"{family}.{key}") for name, key in _HF_NAMES.items()}
    config = {name: value for name, value in found.items() if value is not None}
    config["architectures"] = [_ARCHITECTURES.get(family, family)]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["eos_token_id"] = fields.get("tokenizer.ggml.eos_token_id")
    config["pad_token_id"] = fields.get("tokenizer.ggml.padding_token_id")
    return read_described_config(config, str(path))
