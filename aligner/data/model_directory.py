"""The model directory: preparation, checks, and its safetensors files.

Every role reads its initial weights and tokenizer from a Hugging Face directory. This module
creates the directory of a random or GGUF model, checks that a directory is complete, reads slices
of its weights, and writes safetensors files one tensor at a time.

A safetensors file begins with the length of its header in eight bytes. The JSON header contains the
dtype, the shape and the position of each tensor. The tensors' bytes follow.
"""

import contextlib
import hashlib
import json
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aligner.config.dry_run.tiny_settings import get_text_limit
from aligner.data.checksums import FileRecord
from aligner.data.dequantization import read_range
from aligner.data.tokenizer import (
    build_character_tokenizer,
    build_lenient_tokenizer,
    read_tokenizer,
)
from aligner.data.tokenizer_classes import REGISTERED
from aligner.data.tokenizer_files import find_tokenizer_problem
from aligner.errors import ConfigError
from aligner.extras import describe_missing_modules
from aligner.files import create_directory, name_file_in_errors, open_new_file
from aligner.models.architectures import ARCHITECTURES_BY_CLASS
from aligner.models.hugging_face import (
    config_notes,
    read_described_config,
    with_architecture,
)
from aligner.models.model_source import (
    directory_config,
    directory_shape,
    gguf_file,
    model_directory,
)
from aligner.models.quantized_weights import find_stored_weight
from aligner.models.shape import ModelShape
from aligner.models.weight_headers import (
    tensor_files,
    tied_head_problems,
    weight_problems,
)
from aligner.models.weight_slices import (
    Head,
    Slice,
    TensorSpec,
    group_by_stored_tensor,
    weight_table,
)
from aligner.paths import get_run_paths
from aligner.schema import Config

_log = logging.getLogger(__name__)

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
"""torch's dtypes by their names in the safetensors format."""


@contextlib.contextmanager
def _open_safetensors(file: Path) -> Iterator[Any]:
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
    """Read slices of a directory's weights, one tensor at a time; nothing else is read from disk.

    Args:
        directory: A Hugging Face directory.
        table: The model's weight table.
        slices: The slices to read, by the name of their weight.
        optional: Names of weights that the files may lack; they are skipped.
        partial: Whether the files may contain more weights than the table.

    Yields:
        The name of each weight and its slice.

    Raises:
        ConfigError: `weight_problems` finds a problem; raised before the first slice.
    """
    if problems := weight_problems(directory, table, optional=optional, partial=partial):
        raise ConfigError(f"{directory}: the files do not match config.json: {'; '.join(problems)}")
    files = tensor_files(directory)
    # The scales of a quantized weight may be in another file than its values, so files stay open.
    with contextlib.ExitStack() as stack:
        handles: dict[Path, Any] = {}

        def open_slice(name: str) -> Any:
            file = files[name]
            if file not in handles:
                handles[file] = stack.enter_context(_open_safetensors(file))
            return handles[file].get_slice(name)

        for spec in table:
            position = spec.stored_range
            stored = find_stored_weight(position.name, position.shape, files)
            if spec.name in slices and stored.names[0] in files:
                index = position.locate(spec.shape, slices[spec.name])
                yield spec.name, read_range(stored, open_slice, index)


def assemble_stored_tensors(
    table: Sequence[TensorSpec], read: Callable[[TensorSpec], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Assemble the tensors of a file from the weights of a table, one tensor at a time.

    Args:
        table: The model's weight table.
        read: Function that returns a whole weight.

    Yields:
        The name and the content of each tensor of the file.
    """
    for name, specs in group_by_stored_tensor(table).items():
        stored = specs[0].stored_range
        if stored.step > 1 or stored.expert is not None:
            yield name, _interleave(specs, read)
            continue
        parts = [read(spec) for spec in specs]
        yield (
            name,
            (parts[0] if stored.axis is None else torch.cat(parts, stored.axis)).contiguous(),
        )


def _interleave(specs: Sequence[TensorSpec], read: Callable[[TensorSpec], Tensor]) -> Tensor:
    """Return a tensor of a file that stacks or alternates whole weights; see
    `assemble_stored_tensors`."""
    first = read(specs[0])
    whole = first.new_empty(specs[0].stored_range.shape)
    for spec in specs:
        part = first if spec is specs[0] else read(spec)
        whole[spec.stored_range.locate(spec.shape)] = part
    return whole


@dataclass(frozen=True)
class TensorEntry:
    """Name, dtype and shape of a tensor of a file to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    file: Path, entries: Sequence[TensorEntry], read: Callable[[str], Tensor]
) -> FileRecord:
    """Write a safetensors file, one tensor at a time, without a second copy of a tensor.

    Args:
        file: The file to write; it appears only when it is complete.
        entries: The tensors of the file.
        read: Function that returns a tensor by its name.

    Returns:
        Size and checksum of the file.

    Raises:
        ValueError: `read` returns a tensor of another shape or dtype than its entry.
    """
    # The widest dtypes come first, so that every tensor is aligned to its element size.
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
    text += b" " * (-len(text) % 8)  # align the first tensor
    head = len(text).to_bytes(8, "little") + text
    digest = xxhash.xxh3_64(head)
    with open_new_file(file) as stream, name_file_in_errors(file):
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


# Chat template of the tiny models of a dry run.
_PLAIN_CHAT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor"
    " %}assistant: "
)


def prepare_model(config: Config) -> Path:
    """Return the policy's model directory, and create it first if necessary.

    For `model.source=random` and `model.source=gguf` the directory is created unless it exists, and
    so are the reward models of a dry run. Several processes may call this function at once.

    Raises:
        ConfigError: The directory lacks a file or a weight that the roles read.
    """
    directory = model_directory(config)
    if config.model.source == "random":
        _create(directory, _write_random, config, config.model.config)
    elif config.model.source == "gguf" and not directory.exists():
        file = gguf_file(config.model)
        _log.info("converting %s to safetensors in %s (once, about 30 s)", file.name, directory)
        _create(directory, _write_converted, file)
    check_model_directory(directory)
    for note in config_notes(directory_config(directory, "model.path")):
        _log.info("%s: %s", directory, note)
    for name, entries in config.dry_run.models.items():
        _create(get_run_paths(config).random_model(name), _write_random, config, entries, "scalar")
    return directory


def read_shape(directory: Path) -> ModelShape:
    """Return the model's shape from the directory's configuration files.

    Raises:
        ConfigError: The directory has no supported `config.json`.
    """
    return directory_shape(directory, "model.path")


def check_model_directory(directory: Path) -> ModelShape:
    """Check that a directory has a supported configuration, all weights, and a fitting tokenizer.

    Only the headers of the weight files are read, and a head that may differ from tied embeddings.

    Returns:
        The model's shape.

    Raises:
        ConfigError: A file or weight is missing, a weight has another shape, or the tokenizer has
            tokens outside of the model's vocabulary. The error lists all problems.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such model directory")
    absent = [] if (directory / "config.json").exists() else ["config.json"]
    tokenizer_lack = find_tokenizer_problem(directory)
    absent += [] if tokenizer_lack is None else ["tokenizer.json"]
    absent += [] if any(directory.glob("*.safetensors")) else ["*.safetensors"]
    if absent:
        raise ConfigError(
            f"{directory}: incomplete Hugging Face model directory; missing: {', '.join(absent)}"
            + ("" if tokenizer_lack is None else f"; {tokenizer_lack}")
        )

    shape = read_shape(directory)
    problems = weight_problems(directory, weight_table(shape))
    problems += tied_head_problems(directory, shape)

    tokenizer = read_tokenizer(directory)
    vocabulary = tokenizer.get_vocab()
    tokens = max(len(vocabulary), 1 + max(vocabulary.values(), default=-1))
    if tokens > shape.vocab_size:
        outside = [text for text, id in vocabulary.items() if id >= shape.vocab_size]
        problems.append(
            f"the tokenizer has {tokens} tokens, more than the model's vocab_size"
            f" {shape.vocab_size}; for example {', '.join(map(repr, sorted(outside)[:3]))}"
        )
    if problems:
        raise ConfigError(f"{directory}: the files do not match config.json: {'; '.join(problems)}")
    return shape


def _create(directory: Path, write: Callable[..., None], *arguments: Any) -> None:
    """Create a directory with `write`, unless it exists.

    If several processes create it, the directory of the first process that finishes remains.
    """
    if not directory.exists():
        with contextlib.suppress(FileExistsError), create_directory(directory) as temporary:
            write(temporary, *arguments)


def _write_config(config: dict[str, Any], directory: Path) -> ModelShape:
    """Write config.json, and return the shape that it describes."""
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return read_shape(directory)


def _write_random(
    directory: Path, config: Config, entries: dict[str, Any], head: Head = "vocabulary"
) -> None:
    """Write a model with random weights from the seed, and a tokenizer of characters.

    Args:
        directory: The directory to fill.
        config: The run's configuration.
        entries: Entries of the model's config.json.
        head: Head of the model.
    """
    read_described_config(entries, "model.config")
    # transformers chooses the class by model_type.
    entries = with_architecture(entries)
    model_type = ARCHITECTURES_BY_CLASS[entries["architectures"][0]].model_type
    content = {"model_type": model_type, "dtype": "float32"} | dict(entries)
    shape = _write_config(content, directory)
    tokenizer = build_character_tokenizer(shape)
    if config.dry_run.scale != "none":
        tokenizer = build_lenient_tokenizer(shape, get_text_limit(config))
        (directory / "chat_template.jinja").write_text(_PLAIN_CHAT, encoding="utf-8")
    tokenizer.save(str(directory / "tokenizer.json"))
    if content["model_type"] in REGISTERED:
        # Without this entry, transformers rebuilds the tokenizer of the family as a byte-level BPE.
        (directory / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}) + "\n", encoding="utf-8"
        )
    table = weight_table(shape, head)
    std = config.model.initializer_std
    weights = assemble_stored_tensors(table, lambda spec: _generate_weight(spec, config.seed, std))
    _save(dict(weights), directory)


def _save(weights: Mapping[str, Tensor], directory: Path) -> None:
    entries = [
        TensorEntry(name, weight.dtype, tuple(weight.shape)) for name, weight in weights.items()
    ]
    write_safetensors(directory / "model.safetensors", entries, weights.__getitem__)


def _generate_weight(spec: TensorSpec, seed: int, std: float) -> Tensor:
    """Return a random weight in float32, which depends only on the seed and the weight's name.

    The elements are normally distributed with mean 0; the weight of a norm is ones, a bias is
    zeros.
    """
    if len(spec.shape) == 1:
        return torch.zeros(spec.shape) if spec.name.endswith("bias") else torch.ones(spec.shape)
    digest = hashlib.sha256(f"{seed}/{spec.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randn(spec.shape, generator=generator) * std


def _write_converted(directory: Path, file: Path) -> None:
    """Write the model in a GGUF file as float32 safetensors, with its tokenizer and configuration.

    Raises:
        ConfigError: A package of the extra `demo` is not installed, or the tokenizer has no special
            token for padding.
    """
    if lack := describe_missing_modules("demo", "transformers", "gguf", "accelerate"):
        raise ConfigError(f"model.source=gguf: {lack}")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # transformers raises many types of errors for a damaged file.
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
    except Exception as error:
        raise ConfigError(
            f"{file}: transformers cannot read the file: {type(error).__name__}: {error}"
        ) from error
    tokenizer.save_pretrained(directory)
    # With the EOS token as padding, the end of a response could not be distinguished from padding.
    pad = min(
        (token for token in tokenizer.all_special_ids if token != tokenizer.eos_token_id),
        default=None,
    )
    if pad is None:
        raise ConfigError(
            f"{file}: the tokenizer has no special token other than EOS for padding; use another"
            " GGUF file"
        )
    # The weights are float32 now, so the quantization of the GGUF file no longer applies.
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config |= {
        "architectures": [type(model).__name__],
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": pad,
    }
    shape = _write_config(config, directory)
    weights = {
        spec.name: model.get_parameter(spec.name).detach().contiguous()
        for spec in weight_table(shape)
    }
    _save(weights, directory)
