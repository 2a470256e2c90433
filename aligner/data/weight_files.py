"""Reading weights from a Hugging Face directory's safetensors: only the slices that are asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from aligner.config.weights import Slice, TensorSpec
from aligner.errors import ConfigError


def tensor_files(directory: Path) -> dict[str, Path]:
    """The file that holds each tensor, one file or sharded. Raises ConfigError where there is neither."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.is_file():
        return {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    if not single.is_file():
        raise ConfigError(f"{directory}: neither model.safetensors nor model.safetensors.index.json is there")
    with safe_open(str(single), framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), single)


def read_slices(directory: Path, table: Sequence[TensorSpec], slices: Mapping[str, Slice]) -> Iterator[tuple[str, Tensor]]:
    """Each named slice of the table's tensors; nothing else is read from the disk.

    Raises ConfigError, before anything is given, that names every tensor that is missing or of another shape.
    """
    files, specs = tensor_files(directory), [spec for spec in table if spec.name in slices]
    by_file: dict[Path, list[TensorSpec]] = {}
    for spec in specs:
        if spec.name in files:
            by_file.setdefault(files[spec.name], []).append(spec)
    missing = [spec.name for spec in specs if spec.name not in files]
    problems = [f"the model lacks {', '.join(missing)}"] if missing else []
    for file, held in by_file.items():
        with safe_open(str(file), framework="pt") as tensors:
            shapes = {spec: tuple(tensors.get_slice(spec.name).get_shape()) for spec in held}
        problems += [
            f"{spec.name} is {shape}, the model's configuration says {spec.shape}"
            for spec, shape in shapes.items()
            if shape != spec.shape
        ]
    if problems:
        raise ConfigError(f"{directory}: {'; '.join(problems)}")
    for file, held in by_file.items():
        with safe_open(str(file), framework="pt") as tensors:
            for spec in held:
                piece = slices[spec.name]
                cut = slice(None) if piece.axis is None else slice(piece.start, piece.stop)
                stored = tensors.get_slice(spec.name)
                yield spec.name, stored[:, cut] if piece.axis == 1 else stored[cut]


def read_tensor(directory: Path, name: str) -> Tensor | None:
    """One whole tensor, or None where there is none of that name."""
    file = tensor_files(directory).get(name)
    if file is None:
        return None
    with safe_open(str(file), framework="pt") as tensors:
        return tensors.get_tensor(name)
