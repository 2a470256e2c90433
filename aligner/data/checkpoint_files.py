"""A model's checkpoint on disk, whatever the layout that wrote it and the one that reads it.

A directory holds `rank_<k>.safetensors`, each with the slices that rank k wrote, and
`manifest.json`, which says what was trained, what the checkpoint holds, and which slice of which
tensor lies where. Tensors go by their Hugging Face names and in their orientation: `NAME` is the
weight (the fp32 main weight of a bf16 model), `NAME/exp_avg` and `NAME/exp_avg_sq` are Adam's
moments, `NAME/momentum_buffer` is Muon's momentum.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aligner.data.checksums import DamagedError, FileRecord, damage, read_sealed, sealed
from aligner.data.collectives import dealt, gather_json
from aligner.data.model_directory import DTYPES
from aligner.errors import AlignerError
from aligner.models.hugging_face import ARCHITECTURES, read_config, with_architecture
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import Head, Slice, cut_shape
from aligner.paths import CHECKPOINT_MANIFEST

FORMAT = 4
WEIGHT, MOMENTS, MOMENTUM = "weight", ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)
"""Kinds of tensors: the weight, Adam's state of it, and Muon's."""
MANIFEST = CHECKPOINT_MANIFEST


def built_config(directory: Path, head: Head, num_layers: int) -> dict[str, Any]:
    """The config.json of what is built of a Hugging Face directory's model with a head and so many
    of its first layers."""
    config: dict[str, Any] = with_architecture(
        json.loads((directory / "config.json").read_text(encoding="utf-8"))
    )
    if head == "scalar":
        config |= {
            "architectures": [ARCHITECTURES[config["architectures"][0]].scalar_name],
            "num_labels": 1,
        }
        config = {
            key: value for key, value in config.items() if key not in ("id2label", "label2id")
        }
    config["n_layer" if "n_layer" in config else "num_hidden_layers"] = num_layers
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:num_layers]
    return config


@dataclass(frozen=True)
class Piece:
    """Where a slice of a tensor lies: the rank whose file has it, and the range `[start, stop)` of
    `axis` that it is."""

    rank: int
    axis: int | None
    start: int
    stop: int


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint, cut into pieces; several that hold the same never occur."""

    shape: tuple[int, ...]
    trained: bool
    """Whether its optimizer's state is there."""
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint's `manifest.json` says."""

    aligner: str
    model: dict[str, Any]
    head: Head
    source: str
    """Directory of the initial model: absolute, or relative to the checkpoint where it lies in the
    same run directory."""
    holds: dict[str, str]
    """What the checkpoint holds, and as what."""
    layout: dict[str, Any]
    optimizer: dict[str, Any]
    lora: dict[str, Any] | None
    """The settings of the adapters, where there are any: NAME.lora_A.weight and NAME.lora_B.weight,
    beside the weights."""
    updates: int
    """Updates asked for; one whose gradients were not finite counts too."""
    adam_steps: int
    """Updates made, Muon's too."""
    schedule_steps: int
    files: dict[str, FileRecord]
    """Size and checksum of every rank's file."""
    index: dict[str, Entry]
    format: int = FORMAT

    def to_json(self) -> str:
        """As the file's text, one tensor a line, sealed."""
        content = asdict(self)
        lines = []
        for name, entry in content.pop("index").items():
            told = [
                entry["shape"],
                entry["trained"],
                [list(piece.values()) for piece in entry["pieces"]],
            ]
            lines.append(f"  {json.dumps(name)}: {json.dumps(told)}")
        head = json.dumps({"format": content.pop("format"), **content}, indent=1)
        return sealed(
            head.removesuffix("\n}") + ',\n "index": {\n' + ",\n".join(lines) + "\n }\n}\n"
        )

    @property
    def optimizer_kind(self) -> str:
        """The settings' kind of optimizer; before there were others it was Adam."""
        return str(self.optimizer.get("kind", "adam"))

    @property
    def shape(self) -> ModelShape:
        """The model's shape."""
        return read_config(self.model, "the checkpoint's model")


def rank_file(rank: int) -> str:
    """Name of a rank's file."""
    return f"rank_{rank}.safetensors"


def tensor_key(name: str, kind: str) -> str:
    """A tensor's key in a rank's file; `kind` is WEIGHT, or one of MOMENTS or MOMENTUM."""
    return name if kind == WEIGHT else f"{name}/{kind}"


def read_manifest_file(file: Path) -> dict[str, Any]:
    """What a model's or a run's checkpoint says of itself. Raises DamagedError, and AlignerError
    for another format's."""
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
    found = content.get("format")
    if found != FORMAT:
        raise AlignerError(
            f"{file}: checkpoint format {found} is not supported; this release of aligner reads"
            f" format {FORMAT}"
        )
    content["files"] = {name: FileRecord(*record) for name, record in content["files"].items()}
    return content


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a complete checkpoint.

    Raises AlignerError for a directory that is none, of another format, or that lacks a file or a
    part of one, by name.
    """
    file = directory / MANIFEST
    if not file.is_file():
        found = (
            "the directory does not exist"
            if not directory.is_dir()
            else f"{MANIFEST}, which is written last, is missing"
        )
        raise AlignerError(f"{directory}: not a complete checkpoint: {found}")
    content = read_manifest_file(file)
    fields = {field.name for field in dataclasses.fields(Manifest)}
    if content.keys() != fields:
        difference = ", ".join(sorted(content.keys() ^ fields))
        raise AlignerError(
            f"{file}: not a model checkpoint; missing or unknown entries: {difference}"
        )
    content["index"] = {
        name: Entry(tuple(shape), trained, tuple(Piece(*piece) for piece in pieces))
        for name, (shape, trained, pieces) in content["index"].items()
    }
    files = content["files"]
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


def damaged_files(directory: Path, files: Mapping[str, FileRecord]) -> list[str]:
    """What is wrong with a checkpoint's files, by name. Collective: every rank reads its share, at
    one layout its own file."""
    found = gather_json(damage(directory, dict(dealt(list(files.items())))))
    return sorted(problem for problems in found for problem in problems)


def model_differences(saved: ModelShape, model: ModelShape) -> list[str]:
    """How a checkpoint's model differs from another."""
    pairs = (
        (field.name, getattr(saved, field.name), getattr(model, field.name))
        for field in dataclasses.fields(saved)
    )
    return [
        f"{name} is {theirs} in the checkpoint, but {ours} in the model"
        for name, theirs, ours in pairs
        if theirs != ours
    ]


def portable_source(source: Path, directory: Path) -> str:
    """The initial model's directory as a checkpoint at `directory` records it: run directories may
    be moved."""
    run = directory.absolute().parents[:3][-1]  # <run>/checkpoints/step_<N>/<part>
    absolute = source.absolute()
    return (
        os.path.relpath(absolute, directory.absolute())
        if absolute.is_relative_to(run)
        else str(absolute)
    )


class CheckpointReader:
    """Reads slices of a checkpoint's tensors; each file is mapped, and only what is asked for is
    read."""

    def __init__(self, directory: Path) -> None:
        """Raises AlignerError for what `read_manifest` refuses."""
        self.directory = directory
        self.manifest = read_manifest(directory)
        self._open: dict[int, Any] = {}

    def dtype(self, name: str) -> torch.dtype:
        """In what type a weight is stored."""
        return DTYPES[self._slice(self.manifest.index[name].pieces[0].rank, name).get_dtype()]

    def whole(self, name: str) -> Tensor:
        """All of a weight."""
        return self.read(WEIGHT, Slice(name, None, 0, 0))

    def read(self, kind: str, wanted: Slice) -> Tensor:
        """A slice of a weight or of its optimizer's state; a tensor is cut along one axis at most,
        always the same one."""
        entry, key = self.manifest.index[wanted.name], tensor_key(wanted.name, kind)
        first = entry.pieces[0]
        if first.axis is None:
            return self._slice(
                first.rank, key, _ranges(entry.shape, wanted.axis, wanted.start, wanted.stop)
            )
        axis = first.axis
        start, stop = (0, entry.shape[axis]) if wanted.axis is None else (wanted.start, wanted.stop)
        parts = []
        for piece in sorted(entry.pieces, key=lambda piece: piece.start):
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low < high:
                held = cut_shape(entry.shape, axis, piece.start, piece.stop)
                parts.append(
                    self._slice(
                        piece.rank, key, _ranges(held, axis, low - piece.start, high - piece.start)
                    )
                )
        return parts[0] if len(parts) == 1 else torch.cat(parts, axis)

    def _slice(self, rank: int, key: str, ranges: tuple[slice, ...] | None = None) -> Any:
        """A range of a tensor; without one the tensor in the file, of which nothing is read."""
        file = self.directory / rank_file(rank)
        try:
            if rank not in self._open:
                self._open[rank] = safe_open(str(file), framework="pt")
            whole = self._open[rank].get_slice(key)
            return whole if ranges is None else whole[ranges]
        except (OSError, SafetensorError) as error:
            raise AlignerError(f"{file}: {key} cannot be read: {error}") from error


def _ranges(shape: tuple[int, ...], axis: int | None, start: int, stop: int) -> tuple[slice, ...]:
    return tuple(
        slice(start, stop) if at == axis else slice(0, size) for at, size in enumerate(shape)
    )
