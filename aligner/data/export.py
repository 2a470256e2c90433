"""Export of checkpoints and Hugging Face directories as new Hugging Face directories.

The new directory may have shards of another size, or another dtype. Only one tensor at a time is in
memory. The directory appears under its final name only when it is complete.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aligner.data.checkpoint_files import (
    MANIFEST,
    CheckpointReader,
    find_damaged_files,
    read_manifest,
    read_manifest_file,
)
from aligner.data.checksums import FileRecord
from aligner.data.dequantization import read_range
from aligner.data.model_directory import (
    DTYPES,
    TensorEntry,
    assemble_stored_tensors,
    write_safetensors,
)
from aligner.errors import AlignerError, ConfigError
from aligner.file_limits import read_json_object
from aligner.files import convert_write_errors, create_directory
from aligner.models.hugging_face import read_config
from aligner.models.model_source import NORMALIZATION, directory_config
from aligner.models.quantized_weights import (
    find_stored_weight,
    name_in_files,
    without_quantization,
)
from aligner.models.weight_headers import (
    tensor_files,
    tied_head_problems,
    weight_problems,
)
from aligner.models.weight_slices import (
    Head,
    TensorSpec,
    build_adapter_map,
    group_by_stored_tensor,
    weight_table,
)
from aligner.paths import RunPaths, find_complete_steps
from aligner.schema import LoraConfig

EXPORT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes that an export can have, by their names on the command line."""
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
# Further files of a model directory, which are copied if they exist.
_COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
# Folder of a model's named chat templates.
_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True)
class Source:
    """A model that can be written as a Hugging Face directory, or loaded."""

    config: dict[str, Any]
    """Content of the model's config.json."""
    entries: tuple[TensorEntry, ...]
    """Tensors of the files to write, before a conversion of their dtypes."""
    read: Callable[[str], Tensor]
    """Function that reads a tensor of the files by its name."""
    companions: Path
    """Directory with the tokenizer's files."""
    head: Head
    directory: Path
    """Directory with the model's weights."""
    argument: str
    """Command-line argument that named the model, for messages."""
    step: int = 0
    """Number of training steps before the checkpoint; 0 for a model that is not a checkpoint of a
    run."""

    def weights(self) -> Iterator[dict[str, Tensor]]:
        """Yield the weights of the model's weight table, whole and by name.

        Each item contains the weights that are stored in one tensor of the files.
        """
        table = weight_table(read_config(self.config, "the model"), self.head)
        for name, specs in group_by_stored_tensor(table).items():
            stored = self.read(name)
            yield {spec.name: select_weight(stored, spec) for spec in specs}


def parse_size(text: str) -> int:
    """Parse a size such as 5GB or 500MiB, and return it in bytes.

    Raises:
        ConfigError: The text is not a size above 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if match is None or (match[2] and match[2].upper() not in _UNITS) or float(match[1]) <= 0:
        raise ConfigError(
            f"--max-shard-size {text}: expected a size > 0 such as 5GB; units:"
            f" {', '.join(_UNITS)}, bytes by default"
        )
    return int(float(match[1]) * (_UNITS[match[2].upper()] if match[2] else 1))


def find_source(path: Path, argument: str = "SOURCE") -> Source:
    """Find the model at a path, and check that its files are complete and undamaged.

    Args:
        path: A run directory, which stands for the policy, or for the reward model that the run
            trains, in its last checkpoint; a directory `checkpoints/step_<N>`; the directory
            `policy`, `reward_model` or `critic` of a checkpoint; or a Hugging Face directory.
        argument: Command-line argument that named the path, for messages.

    Raises:
        ConfigError: There is no model at the path, or its files are incomplete or damaged.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory")
    checkpoints = RunPaths(path).checkpoints
    try:
        if checkpoints.is_dir():
            steps = find_complete_steps(checkpoints)
            if not steps:
                raise ConfigError(f"{path}: the run has no complete checkpoint yet")
            path = checkpoints / f"step_{steps[-1]}"
        parts = [path / part for part in ("policy", "reward_model") if (path / part).is_dir()]
        if parts:
            if not (path / MANIFEST).is_file():
                raise ConfigError(
                    f"{path}: incomplete checkpoint: {MANIFEST}, which is written last, is missing"
                )
            files = read_manifest_file(path / MANIFEST)["files"]
            _check_files(
                path,
                {
                    name: record
                    for name, record in files.items()
                    if name.startswith(f"{parts[0].name}/")
                },
            )
            return _checkpoint_source(parts[0], argument)
        if (path / MANIFEST).is_file() or any(path.glob("rank_*.safetensors")):
            _check_files(path, read_manifest(path).files)
            return _checkpoint_source(path, argument)
    except ConfigError:
        raise
    except AlignerError as error:
        raise ConfigError(str(error)) from error
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{path}: expected a run directory (with checkpoints/), a checkpoint (with {MANIFEST})"
            " or a Hugging Face model directory (with config.json)"
        )
    return _directory_source(path, argument)


def find_torch_dist_checkpoint(path: Path) -> Path | None:
    """Return the directory of a torch_dist checkpoint at a path; None if there is none.

    Args:
        path: A checkpoint, such as `iter_0001000`, or Megatron-LM's directory of checkpoints, which
            stands for the latest one.
    """
    with suppress(OSError, ValueError):
        latest = (path / "latest_checkpointed_iteration.txt").read_text().strip()
        path = path / (latest if latest == "release" else f"iter_{int(latest):07d}")
    with suppress(ConfigError):
        content = read_json_object(path / "metadata.json")
        if content.get("sharded_backend") == "torch_dist":
            return path
    # NeMo stores the weights in a folder of their own.
    return find_torch_dist_checkpoint(path / "weights") if (path / "weights").is_dir() else None


def _check_files(directory: Path, files: Mapping[str, FileRecord]) -> None:
    if damaged := find_damaged_files(directory, files):
        raise AlignerError(f"{directory}: the checkpoint is damaged: {'; '.join(damaged)}")


def select_weight(stored: Tensor, spec: TensorSpec) -> Tensor:
    """Return the weight that is stored as a range of a file's tensor."""
    return stored[spec.stored_range.locate(spec.shape)]


def _checkpoint_source(directory: Path, argument: str) -> Source:
    """Return the model of a checkpoint, with LoRA adapters merged into the weights."""
    reader = CheckpointReader(directory)
    manifest = reader.manifest
    table = weight_table(manifest.shape, manifest.head)
    by_name = group_by_stored_tensor(table)
    if missing := [spec.name for spec in table if spec.name not in manifest.index]:
        raise AlignerError(f"{directory}: the checkpoint lacks the tensors {', '.join(missing)}")
    lora = LoraConfig(**manifest.lora) if manifest.lora else LoraConfig()
    adapters = build_adapter_map(table, lora)

    def merge_adapter(spec: TensorSpec) -> Tensor:
        """Return a weight of the weight table with its adapter merged, in the weight's dtype."""
        weight = reader.read_weight(spec.name)
        if spec.name not in adapters:
            return weight
        down, up = (
            reader.read_weight(factor.name).float()
            for factor in (adapters[spec.name].down, adapters[spec.name].up)
        )
        # LoRA (Hu et al. 2021): W + (alpha / rank) B A, where A is `down` and B is `up`.
        product = lora.alpha / lora.rank * (up @ down)
        return (weight.float() + (product.T if spec.is_transposed else product)).to(weight.dtype)

    def read(name: str) -> Tensor:
        """Return a tensor of the exported model by its name in the model's files."""
        ((_, tensor),) = assemble_stored_tensors(by_name[name], merge_adapter)
        return tensor

    step = re.fullmatch(r"step_(\d+)", directory.absolute().parent.name)
    return Source(
        manifest.model,
        tuple(
            TensorEntry(name, reader.dtype(specs[0].name), specs[0].stored_range.shape)
            for name, specs in by_name.items()
        ),
        read,
        Path(os.path.normpath(directory / manifest.source)),
        manifest.head,
        directory,
        argument,
        int(step[1]) if step else 0,
    )


def _directory_source(directory: Path, argument: str) -> Source:
    """Return the model of a Hugging Face directory, with the tensors of its files unchanged."""
    config = directory_config(directory, argument)
    shape = read_config(config, f"{argument}={directory}")
    head: Head = (
        "scalar"
        if config["architectures"][0].endswith("ForSequenceClassification")
        else "vocabulary"
    )
    problems = weight_problems(directory, weight_table(shape, head))
    if head == "vocabulary":
        problems += tied_head_problems(directory, shape)
    if problems:
        raise ConfigError(f"{directory}: the files do not match config.json: {'; '.join(problems)}")
    files = tensor_files(directory)
    shapes = {spec.stored_range.name: spec.stored_range.shape for spec in weight_table(shape, head)}
    weights = {name: find_stored_weight(name, shapes[name], files) for name in shapes}
    quantized = {
        weight.name: (weight, shapes[name])
        for name, weight in weights.items()
        if weight.method != "plain"
    }
    # A quantized weight becomes one tensor.
    parts = {part for weight, _ in quantized.values() for part in weight.names}
    names = [*(name for name in files if name not in parts), *quantized]

    def entry(name: str) -> TensorEntry:
        """Return name, dtype and shape of a tensor; a quantized weight becomes bfloat16."""
        if name in quantized:
            return TensorEntry(name, torch.bfloat16, quantized[name][1])
        with safe_open(str(files[name]), framework="pt") as tensors:
            piece = tensors.get_slice(name)
            return TensorEntry(name, DTYPES[piece.get_dtype()], tuple(piece.get_shape()))

    def read(name: str) -> Tensor:
        """Return a tensor by its name; a quantized weight is dequantized."""
        name = weights[name].name if name in weights else name_in_files(name, files)
        if name in quantized:
            weight, weight_shape = quantized[name]
            with contextlib.ExitStack() as stack:
                return read_range(
                    weight,
                    lambda part: stack.enter_context(
                        safe_open(str(files[part]), framework="pt")
                    ).get_slice(part),
                    [slice(0, size) for size in weight_shape],
                )
        with safe_open(str(files[name]), framework="pt") as tensors:
            return tensors.get_tensor(name)

    try:
        return Source(
            without_quantization(config),
            tuple(entry(name) for name in names),
            read,
            directory,
            head,
            directory,
            argument,
        )
    except (OSError, SafetensorError, KeyError) as error:
        raise ConfigError(f"{directory}: the tensors cannot be read: {error}") from error


def export(
    source: Source,
    output: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[str]:
    """Write a model as a Hugging Face directory.

    Args:
        source: The model to write.
        output: The directory to create.
        dtype: One of EXPORT_DTYPES; None keeps the stored dtypes. Integer tensors, and weights that
            are not trained, are never converted.
        max_shard_bytes: Maximum size of a weight file in bytes; a larger tensor gets a file of its
            own.
        progress: Function that is called after each tensor with the number of bytes written and the
            total number of bytes.

    Returns:
        Messages for the user, for example that no tokenizer was found.

    Raises:
        ConfigError: `output` exists or cannot be written.
    """
    if output.exists():
        raise ConfigError(f"{output}: already exists; give a directory that does not exist yet")
    entries = list(source.entries)
    if dtype is not None:
        kind = EXPORT_DTYPES[dtype]
        table = weight_table(read_config(source.config, source.argument), source.head)
        # transformers keeps correction biases of routers in float32, too
        kept = {spec.stored_range.name for spec in table if not spec.is_trained}
        entries = [
            replace(entry, dtype=kind)
            if entry.dtype.is_floating_point and entry.name not in kept
            else entry
            for entry in entries
        ]
    config = {key: value for key, value in source.config.items() if key != "torch_dtype"}
    names = {value: key for key, value in EXPORT_DTYPES.items()}
    config["dtype"] = names.get(max(entries, key=lambda entry: entry.size).dtype, "float32")
    with convert_write_errors(output), create_directory(output) as directory:
        _write_weights(entries, source.read, directory, max_shard_bytes, progress)
        (directory / "config.json").write_text(
            json.dumps(config, indent=2) + "\n", encoding="utf-8"
        )
        if (source.directory / NORMALIZATION).is_file():
            shutil.copyfile(source.directory / NORMALIZATION, directory / NORMALIZATION)
        return _copy_companions(source.companions, directory)


def _shards(entries: Sequence[TensorEntry], max_bytes: int) -> Iterator[list[TensorEntry]]:
    """Yield the tensors of each file, in order; only a single-tensor file can exceed the limit."""
    shard: list[TensorEntry] = []
    size = 0
    for entry in entries:
        if shard and size + entry.size > max_bytes:
            yield shard
            shard, size = [], 0
        shard.append(entry)
        size += entry.size
    yield shard


def _write_weights(
    entries: Sequence[TensorEntry],
    read: Callable[[str], Tensor],
    directory: Path,
    max_shard_bytes: int,
    progress: Callable[[int, int], None],
) -> None:
    dtypes = {entry.name: entry.dtype for entry in entries}
    total = sum(entry.size for entry in entries)
    done = 0

    def convert(name: str) -> Tensor:
        """Return a tensor in the dtype of the export, and report the progress in bytes."""
        nonlocal done
        tensor = read(name).to(dtypes[name])
        done += tensor.nbytes
        progress(done, total)
        return tensor

    shards = list(_shards(entries, max_shard_bytes))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = (
            f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            if len(shards) > 1
            else "model.safetensors"
        )
        write_safetensors(directory / file, shard, convert)
        weight_map |= dict.fromkeys((entry.name for entry in shard), file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _copy_companions(source: Path, directory: Path) -> list[str]:
    """Copy the tokenizer and its settings, and return messages for the user."""
    if not source.is_dir():
        return [f"no tokenizer was copied: the initial model's directory {source} does not exist"]
    names = [name for name in _COMPANIONS if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, directory / name)
    if (source / _TEMPLATES).is_dir():
        shutil.copytree(source / _TEMPLATES, directory / _TEMPLATES)
    if any(name.startswith(("tokenizer", "vocab")) for name in names):
        return []
    return [f"no tokenizer was copied: {source} has no tokenizer files"]
