"""The files of a model checkpoint, which any layout can read, whatever layout wrote them.

A checkpoint directory contains one file `rank_<k>.safetensors` for each rank k, with the slices
that the rank wrote, and `manifest.json`. The manifest describes the model, the contents of the
checkpoint, and the file of each slice of each tensor. Tensors have their Hugging Face names and
orientation: `NAME` is the weight (the fp32 main weight of a bf16 model), `NAME/exp_avg` and
`NAME/exp_avg_sq` are Adam's moments, `NAME/momentum_buffer` is Muon's momentum.
"""

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aligner.data.checksums import DamagedError, FileRecord, find_damage, read_sealed, seal
from aligner.data.collectives import gather_json, shard_across_ranks
from aligner.data.model_directory import DTYPES
from aligner.errors import AlignerError
from aligner.file_limits import read_json_object
from aligner.models.architectures import ARCHITECTURES_BY_CLASS
from aligner.models.hugging_face import (
    read_config,
    with_architecture,
    without_prediction_layers,
)
from aligner.models.quantized_weights import without_quantization
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import Head, Slice, cut_shape
from aligner.paths import CHECKPOINT_MANIFEST

FORMAT = 4
"""Version of the checkpoint format."""
WEIGHT = "weight"
"""Kind of a tensor that is a weight."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Kinds of the tensors of Adam's state."""
MOMENTUM = ("momentum_buffer",)
"""Kind of the tensor of Muon's state."""
MANIFEST = CHECKPOINT_MANIFEST


def derive_model_config(directory: Path, head: Head, num_layers: int) -> dict[str, Any]:
    """Return the config.json of the model that is built from a Hugging Face directory.

    Args:
        directory: The Hugging Face directory of the initial model.
        head: The head of the built model; with "scalar" the class and its labels change.
        num_layers: Number of decoder layers of the built model, the first layers of the initial
            model.
    """
    content = read_json_object(directory / "config.json")
    config = without_prediction_layers(with_architecture(content))
    if head == "scalar":
        config |= {
            "architectures": [ARCHITECTURES_BY_CLASS[config["architectures"][0]].scalar_name],
            "num_labels": 1,
        }
        config = {
            key: value for key, value in config.items() if key not in ("id2label", "label2id")
        }
    architecture = ARCHITECTURES_BY_CLASS[config["architectures"][0]]
    if config.get("model_type") in architecture.other_model_types:
        config["model_type"] = architecture.model_type  # the type that transformers knows
    config["n_layer" if "n_layer" in config else "num_hidden_layers"] = num_layers
    config = without_quantization(config)
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:num_layers]
    return config


@dataclass(frozen=True)
class Piece:
    """A stored slice of a tensor: the range `[start, stop)` of the dimension `axis`."""

    rank: int
    """Rank whose file contains the slice."""
    axis: int | None
    """None if the slice is the whole tensor."""
    start: int
    stop: int


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint and the slices in which it is stored; slices do not overlap."""

    shape: tuple[int, ...]
    trained: bool
    """Whether the checkpoint contains the tensor's optimizer state."""
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint's `manifest.json`. The field names are the keys of the file."""

    aligner: str
    """Version of aligner that wrote the checkpoint."""
    model: dict[str, Any]
    """Hugging Face configuration of the model."""
    head: Head
    source: str
    """Directory of the initial model: absolute, or relative to the checkpoint if both are in the
    same run directory."""
    holds: dict[str, str]
    """Description of each part of the checkpoint (weights, optimizer, schedule), by its name."""
    layout: dict[str, Any]
    optimizer: dict[str, Any]
    lora: dict[str, Any] | None
    """Settings of the LoRA adapters, which are stored beside the weights as NAME.lora_A.weight and
    NAME.lora_B.weight; None without adapters."""
    updates: int
    """Number of requested updates, including those skipped because of non-finite gradients."""
    adam_steps: int
    """Number of applied updates, also of Muon."""
    schedule_steps: int
    files: dict[str, FileRecord]
    """Size and checksum of every rank's file, by file name."""
    index: dict[str, Entry]
    format: int = FORMAT

    def to_json(self) -> str:
        """Return the text of the file with its checksum, one tensor per line."""
        content = asdict(self)
        lines = []
        for name, entry in content.pop("index").items():
            description = [
                entry["shape"],
                entry["trained"],
                [list(piece.values()) for piece in entry["pieces"]],
            ]
            lines.append(f"  {json.dumps(name)}: {json.dumps(description)}")
        head = json.dumps({"format": content.pop("format"), **content}, indent=1)
        return seal(head.removesuffix("\n}") + ',\n "index": {\n' + ",\n".join(lines) + "\n }\n}\n")

    @property
    def optimizer_kind(self) -> str:
        """Kind of optimizer in the settings; older checkpoints lack the entry and have Adam."""
        return str(self.optimizer.get("kind", "adam"))

    @property
    def shape(self) -> ModelShape:
        """Shape of the model."""
        return read_config(self.model, "the checkpoint's model")


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank_{rank}.safetensors"


def tensor_key(name: str, kind: str) -> str:
    """Return a tensor's key in a rank's file; `kind` is WEIGHT or one of MOMENTS or MOMENTUM."""
    return name if kind == WEIGHT else f"{name}/{kind}"


def read_manifest_file(file: Path) -> dict[str, Any]:
    """Read the manifest of a model's or a run's checkpoint.

    Raises:
        DamagedError: The file cannot be read, or its content does not match its checksum.
        AlignerError: The checkpoint has another format.
    """
    try:
        content = read_sealed(file)
    except DamagedError:
        # Before format 4 a manifest had no checksum, and began with its format.
        older = (
            re.match(rb'\{\s*"format": ([0-9]+),', file.read_bytes()) if file.is_file() else None
        )
        if older is None or int(older[1]) >= FORMAT:
            raise
        content = {"format": int(older[1])}
    checkpoint_format = content.get("format")
    if checkpoint_format != FORMAT:
        raise AlignerError(
            f"{file}: checkpoint format {checkpoint_format} is not supported; this release of"
            f" aligner reads format {FORMAT}"
        )
    with _name_damage(file):
        content["files"] = {name: FileRecord(*record) for name, record in content["files"].items()}
        for name in content["files"]:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"files: {name!r} is not in the directory of the checkpoint")
    return content


@contextlib.contextmanager
def _name_damage(file: Path) -> Iterator[None]:
    """Raise AlignerError with the name of a manifest if its entries have wrong types."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise AlignerError(f"{file}: not a manifest of a checkpoint: {error}") from error


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a model checkpoint, and check that the checkpoint is complete.

    Only the sizes of the ranks' files are checked; see `find_damaged_files` for their checksums.

    Raises:
        AlignerError: The directory is not a model checkpoint, it has another format, or a file is
            missing or has another size. The error names the file.
    """
    file = directory / MANIFEST
    if not file.is_file():
        problem = (
            "the directory does not exist"
            if not directory.is_dir()
            else f"{MANIFEST}, which is written last, is missing"
        )
        raise AlignerError(f"{directory}: not a complete checkpoint: {problem}")
    content = read_manifest_file(file)
    fields = {field.name for field in dataclasses.fields(Manifest)}
    if content.keys() != fields:
        difference = ", ".join(sorted(content.keys() ^ fields))
        raise AlignerError(
            f"{file}: not a model checkpoint; missing or unknown entries: {difference}"
        )
    files = content["files"]
    with _name_damage(file):
        content["index"] = {
            name: Entry(tuple(shape), trained, tuple(Piece(*piece) for piece in pieces))
            for name, (shape, trained, pieces) in content["index"].items()
        }
        unknown = {
            rank_file(piece.rank) for entry in content["index"].values() for piece in entry.pieces
        } - files.keys()
    sizes = {
        name: (directory / name).stat().st_size if (directory / name).is_file() else None
        for name in files
    }
    problems = [
        f"{name} contains tensors but is not listed in {MANIFEST}" for name in sorted(unknown)
    ] + [
        (
            f"{name} is missing"
            if sizes[name] is None
            else f"{name} has {sizes[name]} bytes, expected {record.size}"
        )
        for name, record in files.items()
        if sizes[name] != record.size
    ]
    if problems:
        raise AlignerError(f"{directory}: the checkpoint is incomplete: {'; '.join(problems)}")
    return Manifest(**content)


def find_damaged_files(directory: Path, files: Mapping[str, FileRecord]) -> list[str]:
    """Return one line for each file of a checkpoint that does not match its record, sorted.

    Collective: every rank reads its share of the files; if the layout has not changed, its own
    file.
    """
    rank_problems = gather_json(
        find_damage(directory, dict(shard_across_ranks(list(files.items()))))
    )
    return sorted(problem for problems in rank_problems for problem in problems)


def describe_model_differences(saved: ModelShape, model: ModelShape) -> list[str]:
    """Return one line for each attribute in which a checkpoint's model differs from a model."""
    pairs = (
        (field.name, getattr(saved, field.name), getattr(model, field.name))
        for field in dataclasses.fields(saved)
    )
    return [
        f"{name} is {saved_value} in the checkpoint, but {model_value} in the model"
        for name, saved_value, model_value in pairs
        if saved_value != model_value
    ]


def make_portable_path(source: Path, directory: Path) -> str:
    """Return the path of the initial model that a checkpoint at `directory` records.

    The path is relative if the model is in the same run directory, because run directories may be
    moved.
    """
    run = directory.absolute().parents[:3][-1]  # <run>/checkpoints/step_<N>/<part>
    absolute = source.absolute()
    return (
        os.path.relpath(absolute, directory.absolute())
        if absolute.is_relative_to(run)
        else str(absolute)
    )


class CheckpointReader:
    """Reads slices of a checkpoint's tensors.

    Files are opened on first use and mapped into memory, so that only the requested slices are
    read.
    """

    def __init__(self, directory: Path) -> None:
        """Read the manifest. Raises AlignerError for the reasons given in `read_manifest`."""
        self.directory = directory
        self.manifest = read_manifest(directory)
        self._open: dict[int, Any] = {}

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a weight is stored."""
        return DTYPES[self._read_range(self.manifest.index[name].pieces[0].rank, name).get_dtype()]

    def read_weight(self, name: str) -> Tensor:
        """Read a whole weight."""
        return self.read(WEIGHT, Slice(name, None, 0, 0))

    def read(self, kind: str, wanted: Slice) -> Tensor:
        """Read a slice of a weight or of its optimizer state.

        Args:
            kind: WEIGHT, or one of MOMENTS or MOMENTUM.
            wanted: The slice. Its axis is None, or the axis along which the checkpoint stores the
                tensor in slices: all layouts slice a tensor along the same axis.
        """
        entry = self.manifest.index[wanted.name]
        key = tensor_key(wanted.name, kind)
        first = entry.pieces[0]
        if first.axis is None:
            return self._read_range(
                first.rank, key, _ranges(entry.shape, wanted.axis, wanted.start, wanted.stop)
            )
        axis = first.axis
        start, stop = (0, entry.shape[axis]) if wanted.axis is None else (wanted.start, wanted.stop)

        # Read the overlap of the wanted range with each stored slice, in order.
        parts = []
        for piece in sorted(entry.pieces, key=lambda piece: piece.start):
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low < high:
                piece_shape = cut_shape(entry.shape, axis, piece.start, piece.stop)
                parts.append(
                    self._read_range(
                        piece.rank,
                        key,
                        _ranges(piece_shape, axis, low - piece.start, high - piece.start),
                    )
                )
        return parts[0] if len(parts) == 1 else torch.cat(parts, axis)

    def _read_range(self, rank: int, key: str, ranges: tuple[slice, ...] | None = None) -> Any:
        """Read a range of a tensor; without `ranges`, return a lazy handle of the tensor."""
        file = self.directory / rank_file(rank)
        try:
            if rank not in self._open:
                self._open[rank] = safe_open(str(file), framework="pt")
            tensor = self._open[rank].get_slice(key)
            return tensor if ranges is None else tensor[ranges]
        except (OSError, SafetensorError) as error:
            raise AlignerError(f"{file}: {key} cannot be read: {error}") from error


def _ranges(shape: tuple[int, ...], axis: int | None, start: int, stop: int) -> tuple[slice, ...]:
    """Return the index of the range `[start, stop)` of `axis`; None selects the whole tensor."""
    return tuple(
        slice(start, stop) if dimension == axis else slice(0, size)
        for dimension, size in enumerate(shape)
    )
