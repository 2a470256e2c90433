"""A run's checkpoints: which are complete, which is the last, which are no longer kept."""

import json
import logging
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aligner.data.checkpoint_files import (
    FORMAT,
    MANIFEST,
    find_damaged_files,
    read_manifest,
    read_manifest_file,
)
from aligner.data.checksums import DamagedError, FileRecord, compute_file_record, seal
from aligner.data.collectives import broadcast_json, gather_json
from aligner.data.fencing import fenced_write
from aligner.data.run_inputs import InputChecksums, describe_input_changes
from aligner.errors import AlignerError, ConfigError
from aligner.files import write_file
from aligner.paths import DAMAGE, find_complete_steps, parse_checkpoint_step, run_paths
from aligner.rollout.services import together
from aligner.schema import Config
from aligner.schema.keys import shown
from aligner.training.end_rule import better_sign, check_named
from aligner.version import __version__

_log = logging.getLogger(__name__)
_PARTS = {
    "policy": "weights, optimizer and learning-rate schedule: policy/manifest.json",
    "reward_model": "weights, optimizer and learning-rate schedule: reward_model/manifest.json",
    "rollouts": "samples of the next steps: rollouts.safetensors, their prompts: rollouts.json",
    "pass_rates": (
        "number of times each prompt was sampled, and number of its samples that passed:"
        " pass_rates/pass_rates.safetensors"
    ),
    "critic": (
        "weights, optimizer and learning-rate schedule: critic/manifest.json; last update:"
        " critic/updates.json"
    ),
}
_SHOWN_CHANGES = 10
_HOLDS = {
    "rng": "nothing: every random stream is derived from the seed and the step",
    "data": "position, the number of prompts or examples used or skipped: state",
}


@dataclass(frozen=True)
class TrainingState:
    """What a run resumes from beside the weights; all else follows from the seed and the step."""

    step: int
    """Training steps done."""
    kl_coefficient: float
    critic_updates: int
    """Numbered updates that the critic had applied: its part of the checkpoint says the same. 0
    without a critic."""
    position: int
    """Prompts or examples taken from the data so far."""
    owes_evaluation: bool = False
    """Whether the evaluation of this step was left to the run that resumes."""
    by_time: bool = False
    """Whether it was saved for the time that had passed alone."""


class RunCheckpoints:
    """The checkpoints of a run directory. One counts once its manifest is written, which is done
    last."""

    def __init__(self, config: Config, inputs: InputChecksums | None = None) -> None:
        """`inputs` are the checksums that each new checkpoint records; None records none."""
        self._config, self._settings = config, config.checkpoint
        self._inputs = inputs
        self._directory = run_paths(config).checkpoints
        self._undeletable: set[str] = set()

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, in order."""
        return find_complete_steps(self._directory)

    def newest(self) -> list[TrainingState]:
        """States of the last `checkpoint.keep` checkpoints that stay, in order. Raises AlignerError
        for other formats."""
        return [
            TrainingState(**self._read(step)["state"])
            for step in sorted(self._kept())[-self._settings.keep :]
        ]

    def set_damaged_aside(self, rank: int) -> None:
        """Have the newest checkpoint be one that is whole: rank 0 gives the damaged ones after it
        other names. Collective.

        Raises AlignerError, with nothing changed, where none is whole, or one is of another format.
        """
        damaged: dict[int, str] = {}
        steps, is_whole = broadcast_json(self.steps()), False
        for step in reversed(steps):
            # Of those before the newest whole one the manifest alone is read: the critic's ranks
            # check what they restore.
            if problems := self._problems(step, manifest_only=is_whole):
                damaged[step] = "; ".join(problems)
            else:
                is_whole = True
        if steps and not is_whole:
            told = "\n".join(f"  step_{step}: {problem}" for step, problem in damaged.items())
            raise AlignerError(
                f"{self._directory}: every checkpoint is damaged; restore a checkpoint from a"
                f" backup, or start again in another run.dir:\n{told}"
            )
        together(lambda: self._rename(damaged if rank == 0 else {}))

    def check_inputs(self) -> None:
        """Compare the files that the run reads with those of the newest checkpoint.

        A checkpoint of a release that recorded no checksums is not compared.

        Raises:
            ConfigError: A file changed, and `run.changes` does not list its key.
        """
        steps = self.steps()
        saved = self._read(steps[-1]).get("inputs") if steps else None
        if saved is None or self._inputs is None:
            return
        expected = {
            key: {name: FileRecord(*record) for name, record in files.items()}
            for key, files in saved.items()
        }
        changes = describe_input_changes(expected, self._inputs, self._config.run.changes)
        if not changes:
            return

        lines = [line for key in changes for line in changes[key]]
        if len(lines) > _SHOWN_CHANGES:
            lines[_SHOWN_CHANGES:] = [f"and {len(lines) - _SHOWN_CHANGES} more files"]
        shown = "\n".join(f"  {line}" for line in lines)
        raise ConfigError(
            f"run.resume={self._config.run.resume}: files that the run reads have changed since"
            f" checkpoint step_{steps[-1]} was saved:\n{shown}\n  restore the files, start another"
            f" run, or accept the changes with run.changes=[{','.join(changes)}]"
        )

    def metric(self, stats: Mapping[str, float]) -> float | None:
        """What a checkpoint taken now is worth, by `checkpoint.best_metric`; None where that is not
        set, or not measured."""
        return None if self._settings.best_metric is None else stats.get(self._settings.best_metric)

    def check_metric(self, stats: Mapping[str, float]) -> None:
        """Raise AlignerError when a step has metrics of the kind of `checkpoint.best_metric`, such
        as eval/…, but not it.

        To be asked long before the first checkpoint is taken.
        """
        name = self._settings.best_metric
        if name is not None:
            check_named(f"checkpoint.best_metric={name}", name, stats)

    def commit(self, state: TrainingState, metric: float | None = None) -> None:
        """Declare a checkpoint, whose parts are complete, complete. Raises AlignerError where one
        is not."""
        directory = self._directory / f"step_{state.step}"
        content = {
            "format": FORMAT,
            "aligner": __version__,
            "state": asdict(state),
            "metric": (
                None if metric is None else {"name": self._settings.best_metric, "value": metric}
            ),
            "holds": (
                {part: what for part, what in _PARTS.items() if (directory / part).is_dir()}
                | _HOLDS
            ),
            "files": _stored_files(directory),
            "inputs": self._inputs,
            "config": shown(self._config),
        }
        self._write(state.step, content)

    @fenced_write()
    def settle(self, step: int, metric: float | None) -> None:
        """Note what a checkpoint's evaluation, which was owed, has found."""
        content = self._read(step)
        content["state"]["owes_evaluation"] = False
        if metric is not None and not content["state"].get("by_time"):
            content["metric"] = {"name": self._settings.best_metric, "value": metric}
        self._write(step, content)

    def prune(self) -> None:
        """Delete the checkpoints that are no longer kept, and what is left of ones that could not
        be deleted before."""
        kept = self._kept()
        for directory in sorted(self._directory.iterdir()):
            step = parse_checkpoint_step(directory)
            if step is not None and step < max(kept) and step not in kept:
                self._delete(directory)

    @fenced_write()
    def _delete(self, directory: Path) -> None:
        try:
            # Without its manifest it no longer counts, also when the deletion is cut short.
            (directory / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(directory, ignore_errors=True)
            if directory.exists():
                shutil.rmtree(directory)  # to learn what keeps the rest of it
        except OSError as error:
            if directory.name not in self._undeletable:
                _log.warning(
                    "cannot delete old checkpoint %s: %s; retrying after each checkpoint",
                    directory,
                    error,
                )
            self._undeletable.add(directory.name)

    def best(self) -> int | None:
        """The step whose checkpoint is the best by `checkpoint.best_metric`, the newest of
        equals."""
        sign, values = better_sign(str(self._settings.best_metric)), {}
        for step in self.steps():
            metric = self._read(step)["metric"]
            if (
                metric is not None
                and metric["name"] == self._settings.best_metric
                and not math.isnan(metric["value"])
            ):
                values[step] = sign * metric["value"]
        return max(values, key=lambda step: (values[step], step), default=None)

    def _kept(self) -> set[int]:
        steps, best = self.steps(), self.best()
        # When the clock strikes is no reason to delete what was asked for: beside that the newest
        # alone stays.
        asked_for = {
            step
            for step in steps
            if self._settings.every and not self._read(step)["state"].get("by_time")
        }
        wanted = sorted(steps, key=lambda step: (step in asked_for, step))[-self._settings.keep :]
        return {*wanted, *steps[-1:], *(() if best is None else (best,))}

    def _problems(self, step: int, *, manifest_only: bool) -> list[str]:
        """What is damaged in a checkpoint, by file. Collective."""
        files: dict[str, FileRecord] = {}
        problem = None
        try:
            files = self._read(step)["files"]
        except DamagedError as error:
            problem = str(error)
        if found := sorted({each for each in gather_json(problem) if each is not None}):
            return found
        return [] if manifest_only else find_damaged_files(self._directory / f"step_{step}", files)

    def _rename(self, damaged: Mapping[int, str]) -> None:
        """Set checkpoints aside, with what is wrong with them."""
        for step, problem in damaged.items():
            directory = self._directory / f"step_{step}"
            names = (
                directory.with_name(f"step_{step}.damaged{more}")
                for more in ("", *(f".{n}" for n in range(2, 100)))
            )
            try:
                with fenced_write():
                    aside = directory.rename(next(name for name in names if not name.exists()))
                    write_file(aside / DAMAGE, f"{problem}\n")
            except OSError as error:
                raise AlignerError(
                    f"{directory}: damaged ({problem}), and cannot be moved aside: {error}"
                ) from error
            _log.warning(
                "DAMAGED: checkpoint step_%d is not used and was moved to %s: %s",
                step,
                aside,
                problem,
            )

    @fenced_write()
    def _write(self, step: int, content: Mapping[str, Any]) -> None:
        write_file(
            self._directory / f"step_{step}" / MANIFEST,
            seal(json.dumps(content, indent=1) + "\n"),
        )

    def _read(self, step: int) -> dict[str, Any]:
        return read_manifest_file(self._directory / f"step_{step}" / MANIFEST)


def _stored_files(directory: Path) -> dict[str, FileRecord]:
    """What every file of a checkpoint's parts must be. Raises AlignerError for one that a part
    names and does not have."""
    files = {}
    for part in (directory / name for name in _PARTS):
        known = read_manifest(part).files if (part / MANIFEST).is_file() else {}
        for file in sorted(part.glob("[!.]*")):
            files[f"{part.name}/{file.name}"] = known.get(file.name) or compute_file_record(file)
    return files
