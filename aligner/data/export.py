"""Hugging Face directories out of checkpoints, or out of other Hugging Face directories: other
shards, another dtype.

One tensor at a time is in memory. A directory appears under its final name only when it is
complete.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aligner.data.checkpoint_files import (
    MANIFEST,
    CheckpointReader,
    damaged_files,
    read_manifest,
    read_manifest_file,
)
from aligner.data.checksums import FileRecord
from aligner.data.model_directory import (
    DTYPES,
    TensorEntry,
    assemble,
    write_safetensors,
)
from aligner.errors import AlignerError, ConfigError
from aligner.files import asked_for, new_directory
from aligner.models.hugging_face import read_config
from aligner.models.model_source import NORMALIZATION, directory_config
from aligner.models.weight_headers import (
    file_name,
    tensor_files,
    tied_head_problems,
    weight_problems,
)
from aligner.models.weight_slices import Head, TensorSpec, adapter_map, stored_tensors, weight_table
from aligner.paths import RunPaths, complete_steps
from aligner.schema import LoraConfig

EXPORT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
# What belongs to a model beside its weights and config.json, where there is such a file.
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
_TEMPLATES = "additional_chat_templates"
"""The folder with a model's named chat templates."""


@dataclass(frozen=True)
class Source:
    """A model that can be written as a Hugging Face directory, or loaded."""

    config: dict[str, Any]
    entries: tuple[TensorEntry, ...]
    """Its tensors, as the files are to hold them."""
    read: Callable[[str], Tensor]
    """A tensor of a file, by name."""
    companions: Path
    """The directory with the tokenizer's files."""
    head: Head
    directory: Path
    """Where its files lie."""
    given_as: str
    """What a message calls it: the argument that it was given as."""
    step: int = 0
    """Training steps behind a run's checkpoint."""

    def weights(self) -> Iterator[dict[str, Tensor]]:
        """The whole tensors of the model's weight table, by name: those that lie in one tensor of a
        file at a time."""
        table = weight_table(read_config(self.config, "the model"), self.head)
        for name, specs in stored_tensors(table).items():
            stored = self.read(name)
            yield {spec.name: _part(stored, spec) for spec in specs}


def parse_size(text: str) -> int:
    """Bytes of a size such as 5GB or 500MiB. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if match is None or (match[2] and match[2].upper() not in _UNITS) or float(match[1]) <= 0:
        raise ConfigError(
            f"--max-shard-size {text}: expected a size > 0 such as 5GB; units:"
            f" {', '.join(_UNITS)}, bytes by default"
        )
    return int(float(match[1]) * (_UNITS[match[2].upper()] if match[2] else 1))


def find_source(path: Path, given_as: str = "SOURCE") -> Source:
    """The model at a path: a run directory (the policy, or the reward model that it trains, of its
    last checkpoint), a `checkpoints/step_<N>` directory, its `policy`, `reward_model` or `critic`,
    or a Hugging Face directory.

    Raises ConfigError for anything else, and for what is incomplete, naming what is wrong.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory")
    checkpoints = RunPaths(path).checkpoints
    try:
        if checkpoints.is_dir():
            steps = complete_steps(checkpoints)
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
            return _checkpoint_source(parts[0], given_as)
        if (path / MANIFEST).is_file() or any(path.glob("rank_*.safetensors")):
            _check_files(path, read_manifest(path).files)
            return _checkpoint_source(path, given_as)
    except ConfigError:
        raise
    except AlignerError as error:
        raise ConfigError(str(error)) from error
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{path}: expected a run directory (with checkpoints/), a checkpoint (with {MANIFEST})"
            " or a Hugging Face model directory (with config.json)"
        )
    return _directory_source(path, given_as)


def _check_files(directory: Path, files: Mapping[str, FileRecord]) -> None:
    if damaged := damaged_files(directory, files):
        raise AlignerError(f"{directory}: the checkpoint is damaged: {'; '.join(damaged)}")


def _part(stored: Tensor, spec: TensorSpec) -> Tensor:
    axis, start = spec.stored.axis, spec.stored.start
    return stored if axis is None else stored.narrow(axis, start, spec.shape[axis])


def _checkpoint_source(directory: Path, given_as: str) -> Source:
    reader = CheckpointReader(directory)
    manifest = reader.manifest
    table = weight_table(manifest.shape, manifest.head)
    by_name = stored_tensors(table)
    if missing := [spec.name for spec in table if spec.name not in manifest.index]:
        raise AlignerError(f"{directory}: the checkpoint lacks the tensors {', '.join(missing)}")
    lora = LoraConfig(**manifest.lora) if manifest.lora else LoraConfig()
    adapters = adapter_map(table, lora)

    def merged(spec: TensorSpec) -> Tensor:
        weight = reader.whole(spec.name)
        if spec.name not in adapters:
            return weight
        down, up = (
            reader.whole(factor.name).float()
            for factor in (adapters[spec.name].down, adapters[spec.name].up)
        )
        product = lora.alpha / lora.rank * (up @ down)
        return (weight.float() + (product.T if spec.transposed else product)).to(weight.dtype)

    def read(name: str) -> Tensor:
        ((_, tensor),) = assemble(by_name[name], merged)
        return tensor

    step = re.fullmatch(r"step_(\d+)", directory.absolute().parent.name)
    return Source(
        manifest.model,
        tuple(
            TensorEntry(name, reader.dtype(specs[0].name), specs[0].stored.shape)
            for name, specs in by_name.items()
        ),
        read,
        Path(os.path.normpath(directory / manifest.source)),
        manifest.head,
        directory,
        given_as,
        int(step[1]) if step else 0,
    )


def _directory_source(directory: Path, given_as: str) -> Source:
    """A Hugging Face directory, whose tensors are taken as they are."""
    config = directory_config(directory, given_as)
    shape = read_config(config, f"{given_as}={directory}")
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

    def entry(name: str) -> TensorEntry:
        with safe_open(str(files[name]), framework="pt") as tensors:
            piece = tensors.get_slice(name)
            return TensorEntry(name, DTYPES[piece.get_dtype()], tuple(piece.get_shape()))

    def read(name: str) -> Tensor:
        name = file_name(name, files)
        with safe_open(str(files[name]), framework="pt") as tensors:
            return tensors.get_tensor(name)

    try:
        return Source(
            config, tuple(entry(name) for name in files), read, directory, head, directory, given_as
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
    """Write a Hugging Face directory; returns what the user should know of it, such as a tokenizer
    that was not found.

    `dtype` is one of EXPORT_DTYPES, as stored where None; integers stay what they are. `progress`
    is told the bytes written, and those to write. Raises ConfigError where `output` exists or
    cannot be written.
    """
    if output.exists():
        raise ConfigError(f"{output}: already exists; give a directory that does not exist yet")
    entries = list(source.entries)
    if dtype is not None:
        kind = EXPORT_DTYPES[dtype]
        entries = [
            replace(entry, dtype=kind) if entry.dtype.is_floating_point else entry
            for entry in entries
        ]
    config = {key: value for key, value in source.config.items() if key != "torch_dtype"}
    names = {value: key for key, value in EXPORT_DTYPES.items()}
    config["dtype"] = names.get(max(entries, key=lambda entry: entry.size).dtype, "float32")
    with asked_for(output), new_directory(output) as directory:
        _write_weights(entries, source.read, directory, max_shard_bytes, progress)
        (directory / "config.json").write_text(
            json.dumps(config, indent=2) + "\n", encoding="utf-8"
        )
        if (source.directory / NORMALIZATION).is_file():
            shutil.copyfile(source.directory / NORMALIZATION, directory / NORMALIZATION)
        return _copy_companions(source.companions, directory)


def _shards(entries: Sequence[TensorEntry], max_bytes: int) -> Iterator[list[TensorEntry]]:
    """The tensors in order, cut where a file would become too large; a tensor is never cut."""
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
    types, total, done = (
        {entry.name: entry.dtype for entry in entries},
        sum(entry.size for entry in entries),
        0,
    )

    def convert(name: str) -> Tensor:
        nonlocal done
        tensor = read(name).to(types[name])
        done += tensor.nbytes
        progress(done, total)
        return tensor

    shards = list(_shards(entries, max_shard_bytes))
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = (
            f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            if len(shards) > 1
            else "model.safetensors"
        )
        write_safetensors(directory / file, shard, convert)
        places |= dict.fromkeys((entry.name for entry in shard), file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _copy_companions(source: Path, directory: Path) -> list[str]:
    if not source.is_dir():
        return [f"no tokenizer was copied: the initial model's directory {source} does not exist"]
    found = [name for name in _COMPANIONS if (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, directory / name)
    if (source / _TEMPLATES).is_dir():
        shutil.copytree(source / _TEMPLATES, directory / _TEMPLATES)
    if any(name.startswith(("tokenizer", "vocab")) for name in found):
        return []
    return [f"no tokenizer was copied: {source} has no tokenizer files"]
