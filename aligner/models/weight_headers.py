"""Headers of safetensors files, read without torch and without reading weights.

A safetensors file begins with the length of its header in eight bytes, and a JSON header, which
contains the dtype, shape and position of each tensor. The tensors' bytes follow. `aligner validate`
reads the headers to find damaged files before a process starts.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from aligner.errors import ConfigError
from aligner.file_limits import (
    MAX_INDEX_BYTES,
    MAX_SAFETENSORS_HEADER_BYTES,
    parse_json,
    read_json,
    read_json_object,
)
from aligner.models.architectures import ARCHITECTURES_BY_CLASS
from aligner.models.families import COMPUTED_BUFFERS, WEIGHTS
from aligner.models.hugging_face import count_prediction_layers, with_architecture
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
    content = read_json(index, MAX_INDEX_BYTES)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(
            f"{index}: weight_map: must be an object with a file name for each tensor"
        )
    for tensor, name in weight_map.items():
        # Linux has no longer names, and raises an error for them.
        is_name = isinstance(name, str) and 0 < len(name.encode(errors="replace")) <= 255
        if not is_name or Path(name).name != name:
            raise ConfigError(
                f"{index}: weight_map[{tensor!r:.100}]={name!r:.100}: must be the name of a file in"
                " the directory"
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
            if length > MAX_SAFETENSORS_HEADER_BYTES:
                raise ConfigError(
                    f"{file} cannot be read: its header has {length} bytes, allowed:"
                    f" {MAX_SAFETENSORS_HEADER_BYTES}"
                )
            header = parse_json(stream.read(length))
        if not isinstance(header, dict):
            raise ValueError(f"expected a JSON object, got {type(header).__name__}")
        tensors = {
            name: _stored_tensor(name, entry, 8 + length)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: its header is damaged: {error}") from error
    end = max((tensor.stop for tensor in tensors.values()), default=8 + length)
    if end > size:
        raise ConfigError(
            f"{file} cannot be read: it is truncated: it has {size} bytes, but its header names"
            f" {end}"
        )
    return tensors


def _stored_tensor(name: str, entry: Any, offset: int) -> StoredTensor:
    """Return the tensor that an entry of a header describes.

    Args:
        name: Name of the tensor, for errors.
        entry: The entry.
        offset: Offset in the file of the first byte after the header.

    Raises:
        ValueError: The entry does not describe a tensor.
    """
    fields = entry if isinstance(entry, dict) else {}
    dtype = fields.get("dtype")
    shape = fields.get("shape")
    offsets = fields.get("data_offsets")
    if (
        not isinstance(dtype, str)
        or not _is_list_of_sizes(shape)
        or not _is_list_of_sizes(offsets)
        or len(offsets) != 2
        or offsets[0] > offsets[1]
    ):
        raise ValueError(
            f"tensor {name!r:.80}: got {entry!r:.200}, expected dtype, shape and data_offsets"
            " [START, STOP]"
        )
    start, stop = offsets
    return StoredTensor(dtype, tuple(shape), offset + start, offset + stop)


def _is_list_of_sizes(value: Any) -> TypeGuard[list[int]]:
    """Return whether a value is a list of integers of at least 0."""
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


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
    config = read_json_object(path)
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
