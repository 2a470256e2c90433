"""Checkpoints of a model: saved at one parallel layout, loaded at any other.

`aligner/data/checkpoint_files.py` defines the format. Each slice of each weight is written once, by
one of the ranks that hold it. A checkpoint directory appears under its final name only when it
contains the files of every rank.
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
    derive_model_config,
    describe_model_differences,
    find_damaged_files,
    make_portable_path,
    rank_file,
    read_manifest,
    tensor_key,
)
from aligner.data.checksums import DamagedError, FileRecord
from aligner.data.collectives import gather_json, run_on_rank0
from aligner.data.fencing import fenced_write
from aligner.data.model_directory import TensorEntry, write_safetensors
from aligner.errors import AlignerError
from aligner.files import finish_directory, start_directory, write_file
from aligner.megatron.named_weights import NamedWeights
from aligner.megatron.optimizer_state import OptimizerState
from aligner.megatron.runner import ModelRunner
from aligner.models.weight_slices import cut_shape
from aligner.schema import ActorConfig, MegatronModelConfig, TrainedModelConfig
from aligner.version import __version__


@dataclass(frozen=True)
class _ParameterEntry:
    """A megatron-core parameter, the named weights in it, and the rank that writes them."""

    parameter: nn.Parameter
    weights: NamedWeights
    names: tuple[str, ...]
    writer: int = 0
    written_names: tuple[str, ...] = ()
    """Names of the weights that the writer writes: all, except copies of KV heads that the writer
    of another parameter writes."""


@dataclass(frozen=True)
class _PendingSave:
    """A checkpoint that a background thread is writing."""

    directory: Path
    temporary_directory: Path
    """Directory of the files until the checkpoint is complete."""
    manifest: Manifest
    write_result: Future[FileRecord | str | None]
    """Result of `_write_rank_file`."""


class CheckpointedModel:
    """A model that can be saved, one checkpoint at a time, and loaded.

    It is the base class of `Policy` and `ValueModel`. All methods are collective over the role's
    ranks.
    """

    def __init__(self, runner: ModelRunner, directory: Path) -> None:
        """Store the model and the directory from which it was loaded.

        Args:
            runner: The model on this rank.
            directory: Hugging Face directory of the initial model, with its tokenizer.
        """
        self.runner = runner
        self.world = runner.world
        self._source = directory
        self._config = derive_model_config(directory, runner.head, runner.shape.num_layers)
        self._pending_save: _PendingSave | None = None

    def save(self, directory: Path) -> None:
        """Write weights, optimizer state and learning-rate schedule. Collective."""
        self.begin_save(directory)
        self.finish_save()

    def begin_save(self, directory: Path) -> None:
        """Copy the state to host memory and start to write it in a background thread. Collective.

        The model may change as soon as the method returns.
        """
        # Only one checkpoint is written at a time.
        self.finish_save()
        runner = self.runner
        world = self.world
        temporary_directory = directory.with_name(
            _write_on_rank0(directory, lambda: start_directory(directory).name)
        )
        state = runner.optimizer_state()
        # A rank that trains nothing reports 0 steps.
        steps = int(world.all_reduce_max(torch.tensor(float(state.steps), dtype=torch.float64)))
        entries, index = _assign_writers(runner, state if steps else None)
        manifest = Manifest(
            aligner=__version__,
            model=self._config,
            head=runner.head,
            source=make_portable_path(self._source, directory),
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
            lora=_lora_settings(runner),
            updates=runner.updates,
            adam_steps=steps,
            schedule_steps=runner.scheduler.num_steps,
            files={},
            index=index,
        )
        file = temporary_directory / rank_file(world.rank)
        tensors = _copy_to_host(state, entries, world.rank)
        # The thread ends after this file. It is not a daemon thread, so a rank finishes its file
        # before it exits normally.
        executor = ThreadPoolExecutor(1, "checkpoint-writer")
        self._pending_save = _PendingSave(
            directory,
            temporary_directory,
            manifest,
            executor.submit(_write_rank_file, file, tensors),
        )
        executor.shutdown(wait=False)

    def finish_save(self) -> None:
        """Wait until the pending checkpoint, if any, is complete under its final name. Collective.

        Raises:
            AlignerError: On every rank, if any rank could not write its file.
        """
        pending = self._pending_save
        self._pending_save = None
        if pending is None:
            return
        directory = pending.directory
        temporary_directory = pending.temporary_directory
        results = gather_json(pending.write_result.result())
        errors = [result for result in results if isinstance(result, str)]
        files = {
            rank_file(rank): FileRecord(*record)
            for rank, record in enumerate(results)
            if record and not isinstance(record, str)
        }

        def complete() -> None:
            """Write the manifest, and move the checkpoint to its final directory.

            Raises:
                AlignerError: A rank could not write its files, or a file is incomplete. The
                    temporary directory is deleted.
            """
            try:
                if errors:
                    raise AlignerError("; ".join(errors))
                write_file(
                    temporary_directory / MANIFEST,
                    replace(pending.manifest, files=files).to_json(),
                )
                # Check that every file in the index exists and has its size.
                read_manifest(temporary_directory)
                finish_directory(temporary_directory, directory)
            except AlignerError:
                shutil.rmtree(temporary_directory, ignore_errors=True)
                raise

        _write_on_rank0(directory, complete)

    def load(self, directory: Path, *, verified: bool = False) -> None:
        """Load weights, optimizer state and learning-rate schedule from a checkpoint. Collective.

        The checkpoint must be of the same model; its parallel layout may differ.

        Args:
            directory: Directory of the checkpoint.
            verified: Whether the checksums of its files have already been verified.

        Raises:
            AlignerError: If the checkpoint is incomplete, damaged, of another format, of another
                model, or of another kind of optimizer. In this case, the model is unchanged.
        """
        self.finish_save()
        runner = self.runner
        reader = CheckpointReader(directory)
        if not verified and (damaged := find_damaged_files(directory, reader.manifest.files)):
            raise DamagedError(f"{directory}: the checkpoint is damaged: {'; '.join(damaged)}")
        manifest = reader.manifest
        state = runner.optimizer_state()
        _check_optimizer(directory, manifest, runner.settings)
        # Every rank receives the problems of all ranks, so that all ranks raise the same error
        # before any of them has changed its model.
        rank_problems = gather_json(_find_problems(runner, manifest, state))
        if all_problems := sorted({problem for problems in rank_problems for problem in problems}):
            raise AlignerError(
                f"{directory}: the checkpoint does not match the model: {'; '.join(all_problems)}"
            )
        for entry in _parameter_entries(runner):
            state_kinds = (
                state.kinds(entry.parameter)
                if entry.parameter in state and manifest.adam_steps
                else ()
            )
            tensors = {
                kind: _read_parameter(entry, reader, kind) for kind in (WEIGHT, *state_kinds)
            }
            entry.parameter.data.copy_(tensors[WEIGHT])
            if entry.parameter in state:
                state.load(entry.parameter, tensors, manifest.adam_steps)
        state.set_steps(manifest.adam_steps)
        runner.updates = manifest.updates
        # `step` also sets the learning rates of the optimizer.
        runner.scheduler.num_steps = 0
        runner.scheduler.step(increment=manifest.schedule_steps)


def _write_on_rank0(directory: Path, action: Callable[[], str | None]) -> Any:
    """Run `action` on rank 0 and return its result on every rank. Collective.

    Raises:
        AlignerError: On every rank, if the action raised OSError or AlignerError.
    """

    def run() -> str | None:
        """Write files unless another trainer has taken over the run directory.

        Raises:
            AlignerError: The files cannot be written.
        """
        try:
            with fenced_write():
                return action()
        except (OSError, AlignerError) as error:
            raise AlignerError(
                f"{directory}: the checkpoint could not be written: {error}"
            ) from error

    return run_on_rank0(run)


def _write_rank_file(file: Path, tensors: Mapping[str, Tensor]) -> FileRecord | str | None:
    """Write this rank's tensors to a safetensors file.

    Returns:
        Size and checksum of the file; None if there is nothing to write; an error message if
        writing failed.
    """
    entries = [
        TensorEntry(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()
    ]
    try:
        return write_safetensors(file, entries, tensors.__getitem__) if entries else None
    # Report every kind of error, because the other ranks wait for this rank's result.
    except BaseException as error:
        reason = error.strerror if isinstance(error, OSError) else None
        return f"{file}: {reason or repr(error)}"


def _check_optimizer(directory: Path, manifest: Manifest, settings: MegatronModelConfig) -> None:
    """Raise AlignerError if the checkpoint has the state of another kind of optimizer.

    A checkpoint from before the first update has no state and fits any optimizer.
    """
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


def _find_problems(runner: ModelRunner, manifest: Manifest, state: OptimizerState) -> list[str]:
    """Return descriptions of all differences between a checkpoint and this rank's model."""
    if manifest.head != runner.head:
        return [f"the head is {manifest.head} in the checkpoint, but {runner.head} in the model"]
    if differences := describe_model_differences(manifest.shape, runner.shape):
        return differences
    if manifest.lora != _lora_settings(runner):
        return [
            f"the LoRA adapters are {manifest.lora} in the checkpoint, but {_lora_settings(runner)}"
            " in the model"
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
        for parameter_entry in _parameter_entries(runner)
        for name in parameter_entry.names
        if manifest.adam_steps
        and parameter_entry.parameter in state
        and name in index
        and not index[name].trained
    ]
    return missing + unknown + misshapen + untrained


def _lora_settings(runner: ModelRunner) -> dict[str, Any] | None:
    """Return the configuration of the model's adapters, or None if it has none."""
    settings = runner.settings
    return (
        asdict(settings.lora) if isinstance(settings, ActorConfig) and settings.lora.rank else None
    )


def _read_parameter(entry: _ParameterEntry, reader: CheckpointReader, kind: str) -> Tensor:
    """Return a parameter's weight or a kind of its optimizer state, float32 in host memory.

    The parameter is assembled from its named weights in the checkpoint.
    """
    # Rows that pad the vocabulary are not stored and stay zero.
    whole = torch.zeros(entry.parameter.shape, dtype=torch.float32)
    for name in entry.names:
        entry.weights.scatter(name, whole, reader.read(kind, entry.weights.slices[name]))
    return whole


def _named_weights(runner: ModelRunner) -> list[NamedWeights]:
    """Return the model's own weights and, if there are any, its adapters."""
    return (
        [runner.weights]
        if runner.trained_weights is runner.weights
        else [runner.weights, runner.trained_weights]
    )


def _parameter_entries(runner: ModelRunner) -> list[_ParameterEntry]:
    """Return this rank's parameters with their named weights, in the table's order.

    The writers are not assigned yet.
    """
    entries: dict[nn.Parameter, _ParameterEntry] = {}
    for weights in _named_weights(runner):
        for name in weights:
            parameter = weights.parameter(name)
            entry = entries.get(parameter, _ParameterEntry(parameter, weights, ()))
            entries[parameter] = replace(entry, names=(*entry.names, name))
    return list(entries.values())


def _assign_writers(
    runner: ModelRunner, state: OptimizerState | None
) -> tuple[list[_ParameterEntry], dict[str, Entry]]:
    """Choose the rank that writes each parameter. Collective.

    Among the ranks that hold the same slices of the same weights, the writer is the rank to which
    the fewest elements have been assigned before.

    Args:
        runner: The model on this rank.
        state: Optimizer state; None before the first step.

    Returns:
        This rank's parameters with their writers, and the manifest's index of all ranks' slices.
    """
    entries = _parameter_entries(runner)
    # For each parameter: the number of its state tensors, and its named slices. Ranks with equal
    # descriptions hold the same data.
    descriptions = [
        [
            (
                len(state.kinds(entry.parameter))
                if state is not None and entry.parameter in state
                else 0
            ),
            [_describe_slice(entry.weights, name) for name in entry.names],
        ]
        for entry in entries
    ]
    holders: dict[str, list[int]] = {}
    for rank, rank_descriptions in enumerate(gather_json(descriptions)):
        for description in rank_descriptions:
            holders.setdefault(json.dumps(description), []).append(rank)
    written_elements = [0] * runner.world.size
    writers = {}
    written_names: dict[str, list[str]] = {}
    index: dict[str, Entry] = {}
    for key, ranks in holders.items():
        writer = writers[key] = min(ranks, key=written_elements.__getitem__)
        state_count, slices = json.loads(key)
        for name, shape, axis, start, stop in slices:
            piece = Piece(writer, axis, start, stop)
            previous = index[name].pieces if name in index else ()
            # Different parameters of several tensor ranks may have copies of the same KV head.
            if any((other.axis, other.start) == (axis, start) for other in previous):
                continue
            index[name] = Entry(tuple(shape), state_count > 0, (*previous, piece))
            written_names.setdefault(key, []).append(name)
            elements = math.prod(cut_shape(tuple(shape), axis, start, stop))
            written_elements[writer] += elements * (1 + state_count)
    keys = map(json.dumps, descriptions)
    assigned_entries = [
        replace(entry, writer=writers[key], written_names=tuple(written_names.get(key, ())))
        for entry, key in zip(entries, keys, strict=True)
    ]
    return assigned_entries, index


def _describe_slice(weights: NamedWeights, name: str) -> list[Any]:
    """Return name, whole shape, axis, start and stop of this rank's slice of a weight, as JSON."""
    weight_slice = weights.slices[name]
    return [
        name,
        list(weights.specs[name].shape),
        weight_slice.axis,
        weight_slice.start,
        weight_slice.stop,
    ]


def _copy_to_host(
    state: OptimizerState, entries: Sequence[_ParameterEntry], rank: int
) -> dict[str, Tensor]:
    """Return copies in host memory of all tensors that this rank writes, by key. Collective.

    The ranks gather the state of one parameter at a time, which limits the device memory.
    """
    tensors = {}
    for entry in entries:
        if entry.parameter in state:
            whole = state.gather(entry.parameter, entry.writer)
        else:
            whole = {WEIGHT: entry.parameter.detach()} if entry.writer == rank else None
        for kind, tensor in (whole or {}).items():
            for name in entry.written_names:
                piece = entry.weights.gather(name, tensor)
                tensors[tensor_key(name, kind)] = torch.empty(piece.shape, dtype=piece.dtype).copy_(
                    piece
                )
    return tensors
