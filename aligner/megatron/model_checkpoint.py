"""A model's checkpoint: saved at one layout, read at any other; the format is
`aligner/data/checkpoint_files.py`'s.

Each slice of each weight is written once, by one of the ranks that hold it. A directory appears
under its final name only when every rank's file is in it.
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aligner.data.checkpoint_files import (
    MANIFEST,
    WEIGHT,
    CheckpointReader,
    Entry,
    Manifest,
    Piece,
    built_config,
    damaged_files,
    model_differences,
    portable_source,
    rank_file,
    read_manifest,
    tensor_key,
)
from aligner.data.checksums import DamagedError, FileRecord
from aligner.data.claim import writing
from aligner.data.collectives import broadcast_json, gather_json
from aligner.data.model_directory import TensorEntry, write_safetensors
from aligner.errors import AlignerError
from aligner.files import finish_directory, start_directory, write_file
from aligner.megatron.named_weights import NamedWeights
from aligner.megatron.optimizer_state import OptimizerState
from aligner.megatron.runner import ModelRunner
from aligner.megatron.world import World
from aligner.models.weight_slices import cut_shape
from aligner.schema import ActorConfig, MegatronModelConfig, TrainedModelConfig
from aligner.version import __version__


@dataclass(frozen=True)
class _Unit:
    """A megatron-core parameter, the named weights in it, and the rank that writes them."""

    parameter: nn.Parameter
    weights: NamedWeights
    names: tuple[str, ...]
    writer: int = 0


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that is being written."""

    directory: Path
    started: Path  # what it is called until it is complete
    manifest: Manifest
    written: Future[FileRecord | str | None]
    """What `_write_rank_file` returns."""


class CheckpointedModel:
    """A model that is saved, one checkpoint at a time, and loaded. Every rank calls every
    method."""

    def __init__(self, runner: ModelRunner, directory: Path) -> None:
        """`directory` has the model that training starts from, with its tokenizer."""
        self.runner, self.world = runner, runner.world
        self._source, self._config = (
            directory,
            built_config(directory, runner.head, runner.shape.num_layers),
        )
        self._pending: _Pending | None = None

    def save(self, directory: Path) -> None:
        """Write weights, optimizer and schedule."""
        self.begin_save(directory)
        self.finish_save()

    def begin_save(self, directory: Path) -> None:
        """Copy the state to host memory and write it from there; it may change as soon as this
        returns. Collective."""
        self.finish_save()
        runner, world = self.runner, self.world
        started = directory.with_name(
            _on_first_rank(world, directory, lambda: start_directory(directory).name)
        )
        state = runner.optimizer_state()
        steps = int(world.max_(torch.tensor(float(state.steps), dtype=torch.float64)))
        units, index = _assign_writers(runner, state if steps else None)
        manifest = Manifest(
            aligner=__version__,
            model=self._config,
            head=runner.head,
            source=portable_source(self._source, directory),
            holds={
                "weights": (
                    "fp32 main weights if they exist, otherwise weights in the model's precision"
                ),
                "optimizer": (
                    "Adam's moments, Muon's momentum for matrices that Muon updates, and the step"
                    " count"
                ),
                "schedule": "step of the learning-rate schedule",
                "rng": "nothing: all random streams derive from the seed and the step",
            },
            layout=asdict(world.layout),
            optimizer=(
                asdict(runner.settings.optimizer)
                if isinstance(runner.settings, TrainedModelConfig)
                else {}
            ),
            lora=_lora(runner),
            updates=runner.updates,
            adam_steps=steps,
            schedule_steps=runner.scheduler.num_steps,
            files={},
            index=index,
        )
        file, tensors = started / rank_file(world.rank), _snapshot(state, units, world.rank)
        # Its thread ends with the file. It is not a daemon: a rank that ends by itself finishes its
        # file first.
        executor = ThreadPoolExecutor(1, "checkpoint-writer")
        self._pending = _Pending(
            directory, started, manifest, executor.submit(_write_rank_file, file, tensors)
        )
        executor.shutdown(wait=False)

    def finish_save(self) -> None:
        """Wait until the checkpoint that was begun, if any, is complete under its final name.
        Collective.

        Raises AlignerError on every rank when one could not write its file.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        directory, started, results = (
            pending.directory,
            pending.started,
            gather_json(pending.written.result()),
        )
        errors = [result for result in results if isinstance(result, str)]
        files = {
            rank_file(rank): FileRecord(*it)
            for rank, it in enumerate(results)
            if it and not isinstance(it, str)
        }

        def complete() -> None:
            try:
                if errors:
                    raise AlignerError("; ".join(errors))
                write_file(started / MANIFEST, replace(pending.manifest, files=files).to_json())
                read_manifest(started)  # every file that the index names is there, at its size
                finish_directory(started, directory)
            except AlignerError:
                shutil.rmtree(started, ignore_errors=True)
                raise

        _on_first_rank(self.world, directory, complete)

    def load(self, directory: Path, *, verified: bool = False) -> None:
        """Take weights, optimizer and schedule from a checkpoint of the same model, saved at
        whatever layout. Collective.

        `verified` says that its files' checksums have been found to be right. Raises AlignerError,
        with nothing changed, for a checkpoint that is incomplete, damaged, of another format, of
        another model, or of another kind of optimizer.
        """
        self.finish_save()
        runner, reader = self.runner, CheckpointReader(directory)
        if not verified and (damaged := damaged_files(directory, reader.manifest.files)):
            raise DamagedError(f"{directory}: the checkpoint is damaged: {'; '.join(damaged)}")
        manifest, state = reader.manifest, runner.optimizer_state()
        _check_optimizer(directory, manifest, runner.settings)
        problems = gather_json(_problems(runner, manifest, state))
        if everyone := sorted({problem for found in problems for problem in found}):
            raise AlignerError(
                f"{directory}: the checkpoint does not match the model: {'; '.join(everyone)}"
            )
        for unit in _units(runner):
            kept = (
                state.kinds(unit.parameter)
                if unit.parameter in state and manifest.adam_steps
                else ()
            )
            tensors = {kind: _read_parameter(unit, reader, kind) for kind in (WEIGHT, *kept)}
            unit.parameter.data.copy_(tensors[WEIGHT])
            if unit.parameter in state:
                state.load(unit.parameter, tensors, manifest.adam_steps)
        state.set_steps(manifest.adam_steps)
        runner.updates = manifest.updates
        runner.scheduler.num_steps = 0
        runner.scheduler.step(increment=manifest.schedule_steps)


def _on_first_rank(world: World, directory: Path, action: Callable[[], str | None]) -> Any:
    """Rank 0 acts and the others wait; what comes of it, or what it could not do, all of them
    hear."""
    result = error = None
    if world.rank == 0:
        try:
            with writing():
                result = action()
        except (OSError, AlignerError) as problem:
            error = str(problem)
    result, error = broadcast_json([result, error])
    if error:
        raise AlignerError(f"{directory}: the checkpoint could not be written: {error}")
    return result


def _write_rank_file(file: Path, tensors: Mapping[str, Tensor]) -> FileRecord | str | None:
    """What the file must be, None where there is nothing to write, or what went wrong."""
    entries = [
        TensorEntry(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()
    ]
    try:
        return write_safetensors(file, entries, tensors.__getitem__) if entries else None
    except BaseException as error:  # whatever it is: the other ranks wait to hear of it
        told = error.strerror if isinstance(error, OSError) else None
        return f"{file}: {told or repr(error)}"


def _check_optimizer(directory: Path, manifest: Manifest, settings: MegatronModelConfig) -> None:
    """A checkpoint of before the first update fits any optimizer."""
    kind = (
        settings.optimizer.kind
        if isinstance(settings, TrainedModelConfig)
        else manifest.optimizer_kind
    )
    if manifest.adam_steps and manifest.optimizer_kind != kind:
        raise AlignerError(
            f"{directory}: the checkpoint has the optimizer state of"
            f" optimizer.kind={manifest.optimizer_kind}, which cannot be loaded with"
            f" optimizer.kind={kind}; resume with optimizer.kind={manifest.optimizer_kind}, or"
            " start a new run from its weights (`aligner convert`)"
        )


def _problems(runner: ModelRunner, manifest: Manifest, state: OptimizerState) -> list[str]:
    if manifest.head != runner.head:
        return [f"the head is {manifest.head} in the checkpoint, but {runner.head} in the model"]
    if differences := model_differences(manifest.shape, runner.shape):
        return differences
    if manifest.lora != _lora(runner):
        return [
            f"the LoRA adapters are {manifest.lora} in the checkpoint, but {_lora(runner)} in the"
            " model"
        ]
    specs = {spec.name: spec for weights in _named_weights(runner) for spec in weights.table}
    index = manifest.index
    missing = [
        f"{name} {spec.shape} is missing" for name, spec in specs.items() if name not in index
    ]
    unknown = [
        f"{name} {entry.shape} is not in the model"
        for name, entry in index.items()
        if name not in specs
    ]
    misshapen = [
        f"{name} has shape {entry.shape}, must be {specs[name].shape}"
        for name, entry in index.items()
        if name in specs and entry.shape != specs[name].shape
    ]
    untrained = [
        f"{name} was frozen and has no optimizer state"
        for unit in _units(runner)
        for name in unit.names
        if manifest.adam_steps
        and unit.parameter in state
        and name in index
        and not index[name].trained
    ]
    return missing + unknown + misshapen + untrained


def _lora(runner: ModelRunner) -> dict[str, Any] | None:
    settings = runner.settings
    return (
        asdict(settings.lora) if isinstance(settings, ActorConfig) and settings.lora.rank else None
    )


def _read_parameter(unit: _Unit, reader: CheckpointReader, kind: str) -> Tensor:
    """A parameter's weight, or some of its state, out of its named parts, on the host."""
    whole = torch.zeros(unit.parameter.shape, dtype=torch.float32)
    for name in unit.names:
        unit.weights.scatter(name, whole, reader.read(kind, unit.weights.slices[name]))
    return whole


def _named_weights(runner: ModelRunner) -> list[NamedWeights]:
    """The model's own weights, and its adapters."""
    return (
        [runner.weights] if runner.trained is runner.weights else [runner.weights, runner.trained]
    )


def _units(runner: ModelRunner) -> list[_Unit]:
    """This rank's parameters with the named weights in them, in the table's order, writers not yet
    chosen."""
    found: dict[nn.Parameter, _Unit] = {}
    for weights in _named_weights(runner):
        for name in weights:
            parameter = weights.parameter(name)
            unit = found.get(parameter, _Unit(parameter, weights, ()))
            found[parameter] = replace(unit, names=(*unit.names, name))
    return list(found.values())


def _assign_writers(
    runner: ModelRunner, state: OptimizerState | None
) -> tuple[list[_Unit], dict[str, Entry]]:
    """Who writes what: this rank's units with their writers, and every rank's as the manifest's
    index. Collective.

    Of the ranks that hold the same slices of the same weights, the one with the least to write so
    far writes them. `state` is None where there is none yet.
    """
    units = _units(runner)
    told = [
        [
            (
                len(state.kinds(unit.parameter))
                if state is not None and unit.parameter in state
                else 0
            ),
            [_described(unit.weights, name) for name in unit.names],
        ]
        for unit in units
    ]
    holders: dict[str, list[int]] = {}
    for rank, held in enumerate(gather_json(told)):
        for description in held:
            holders.setdefault(json.dumps(description), []).append(rank)
    written, writers = [0] * runner.world.size, {}
    index: dict[str, Entry] = {}
    for key, ranks in holders.items():
        writer = writers[key] = min(ranks, key=written.__getitem__)
        kept, slices = json.loads(key)
        for name, shape, axis, start, stop in slices:
            piece, before = Piece(writer, axis, start, stop), index.get(name)
            index[name] = Entry(tuple(shape), kept > 0, (*(before.pieces if before else ()), piece))
            written[writer] += math.prod(cut_shape(tuple(shape), axis, start, stop)) * (1 + kept)
    chosen = [
        replace(unit, writer=writers[json.dumps(held)])
        for unit, held in zip(units, told, strict=True)
    ]
    return chosen, index


def _described(weights: NamedWeights, name: str) -> list[Any]:
    cut = weights.slices[name]
    return [name, list(weights.specs[name].shape), cut.axis, cut.start, cut.stop]


def _snapshot(state: OptimizerState, units: Sequence[_Unit], rank: int) -> dict[str, Tensor]:
    """What this rank writes, copied to host memory, by key. Collective: one parameter at a time
    comes together."""
    tensors = {}
    for unit in units:
        if unit.parameter in state:
            whole = state.gather(unit.parameter, unit.writer)
        else:
            whole = {WEIGHT: unit.parameter.detach()} if unit.writer == rank else None
        for kind, tensor in (whole or {}).items():
            for name in unit.names:
                piece = unit.weights.gather(name, tensor)
                tensors[tensor_key(name, kind)] = torch.empty(piece.shape, dtype=piece.dtype).copy_(
                    piece
                )
    return tensors
