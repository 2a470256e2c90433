"""Checkpoints of a run: completing, verifying, pruning and selecting them."""

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
from aligner.schema import Config
from aligner.schema.keys import shown
from aligner.training.end_rule import better_sign, check_named
from aligner.training.services import together
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
    """State that a run resumes from in addition to the weights.

    Everything else follows from the seed and the step.
    """

    step: int
    """Number of completed training steps."""
    kl_coefficient: float
    critic_updates: int
    """Number of updates that the critic had applied, equal to the number in its part of the
    checkpoint; 0 without a critic."""
    position: int
    """Number of prompts or examples taken from the data so far."""
    owes_evaluation: bool = False
    """Whether the run that resumes must evaluate this step, because the saving run did not."""
    by_time: bool = False
    """Whether the checkpoint was saved only because of the elapsed time."""


class RunCheckpoints:
    """Checkpoints of a run directory.

    A checkpoint is complete once its manifest is written, which happens last.
    """

    def __init__(self, config: Config, inputs: InputChecksums | None = None) -> None:
        """Create the object without reading any file.

        Args:
            config: Configuration of the run.
            inputs: Checksums that each new checkpoint records; None records none.
        """
        self._config = config
        self._settings = config.checkpoint
        self._inputs = inputs
        self._directory = run_paths(config).checkpoints
        self._undeletable: set[str] = set()

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, in order."""
        return find_complete_steps(self._directory)

    def newest(self) -> list[TrainingState]:
        """Return the states of the last `checkpoint.keep` retained checkpoints, in order.

        Raises:
            AlignerError: A checkpoint has another format.
        """
        return [
            TrainingState(**self._read(step)["state"])
            for step in sorted(self._kept())[-self._settings.keep :]
        ]

    def set_damaged_aside(self, rank: int) -> None:
        """Rename damaged checkpoints that are newer than the newest intact one. Collective.

        Rank 0 renames the directories. Afterwards the newest checkpoint is intact.

        Raises:
            AlignerError: No checkpoint is intact, or one has another format; nothing is renamed.
        """
        damaged: dict[int, str] = {}
        steps = broadcast_json(self.steps())
        is_whole = False
        for step in reversed(steps):
            # For checkpoints older than the newest intact one, read only the manifest: the
            # critic's ranks verify the files that they restore.
            if problems := self._problems(step, manifest_only=is_whole):
                damaged[step] = "; ".join(problems)
            else:
                is_whole = True

        if steps and not is_whole:
            problem_lines = "\n".join(
                f"  step_{step}: {problem}" for step, problem in damaged.items()
            )
            raise AlignerError(
                f"{self._directory}: every checkpoint is damaged; restore a checkpoint from a"
                f" backup, or start again in another run.dir:\n{problem_lines}"
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
        """Return the value of `checkpoint.best_metric`; None if the key is not set or the metric
        not measured."""
        return None if self._settings.best_metric is None else stats.get(self._settings.best_metric)

    def check_metric(self, stats: Mapping[str, float]) -> None:
        """Raise AlignerError if `checkpoint.best_metric` is unknown, according to the metrics of a
        step.

        It is unknown if the step has other metrics with the same prefix, such as eval/…. Call this
        long before the first checkpoint is saved.
        """
        name = self._settings.best_metric
        if name is not None:
            check_named(f"checkpoint.best_metric={name}", name, stats)

    def commit(self, state: TrainingState, metric: float | None = None) -> None:
        """Write the manifest, which makes a checkpoint complete.

        Args:
            state: State of the checkpoint, whose parts are all written.
            metric: Value of `checkpoint.best_metric`; None if it was not measured.

        Raises:
            AlignerError: A part of the checkpoint is incomplete.
        """
        directory = self._directory / f"step_{state.step}"
        content = {
            "format": FORMAT,
            "aligner": __version__,
            "state": asdict(state),
            "metric": (
                None if metric is None else {"name": self._settings.best_metric, "value": metric}
            ),
            "holds": (
                {
                    part: description
                    for part, description in _PARTS.items()
                    if (directory / part).is_dir()
                }
                | _HOLDS
            ),
            "files": _stored_files(directory),
            "inputs": self._inputs,
            "config": shown(self._config),
        }
        self._write(state.step, content)

    @fenced_write()
    def settle(self, step: int, metric: float | None) -> None:
        """Record the result of an evaluation that was pending when the checkpoint was saved."""
        content = self._read(step)
        content["state"]["owes_evaluation"] = False
        if metric is not None and not content["state"].get("by_time"):
            content["metric"] = {"name": self._settings.best_metric, "value": metric}
        self._write(step, content)

    def prune(self) -> None:
        """Delete the checkpoints that are not retained, and the remains of earlier failed
        deletions."""
        retained = self._kept()
        for directory in sorted(self._directory.iterdir()):
            step = parse_checkpoint_step(directory)
            if step is not None and step < max(retained) and step not in retained:
                self._delete(directory)

    @fenced_write()
    def _delete(self, directory: Path) -> None:
        """Delete a checkpoint; log a warning once if this fails."""
        try:
            # Delete the manifest first: if the deletion is interrupted, the rest is not mistaken
            # for a complete checkpoint.
            (directory / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(directory, ignore_errors=True)
            if directory.exists():
                shutil.rmtree(directory)  # raises the error that the first call ignored
        except OSError as error:
            if directory.name not in self._undeletable:
                _log.warning(
                    "cannot delete old checkpoint %s: %s; retrying after each checkpoint",
                    directory,
                    error,
                )
            self._undeletable.add(directory.name)

    def best(self) -> int | None:
        """Return the step of the best checkpoint by `checkpoint.best_metric`; the newest if several
        are equal."""
        sign = better_sign(str(self._settings.best_metric))
        values = {}
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
        """Return the steps of the checkpoints to retain: the last `checkpoint.keep`, the newest and
        the best."""
        steps = self.steps()
        best = self.best()
        # A checkpoint that was saved because of the elapsed time must not displace one that
        # `checkpoint.every` requested; of those saved by time only the newest is certain to stay.
        at_interval = {
            step
            for step in steps
            if self._settings.every and not self._read(step)["state"].get("by_time")
        }
        retained = sorted(steps, key=lambda step: (step in at_interval, step))[
            -self._settings.keep :
        ]
        return {*retained, *steps[-1:], *(() if best is None else (best,))}

    def _problems(self, step: int, *, manifest_only: bool) -> list[str]:
        """Return descriptions of the damage to a checkpoint's files. Collective."""
        files: dict[str, FileRecord] = {}
        problem = None
        try:
            files = self._read(step)["files"]
        except DamagedError as error:
            problem = str(error)
        if manifest_problems := sorted(
            {rank_problem for rank_problem in gather_json(problem) if rank_problem is not None}
        ):
            return manifest_problems
        return [] if manifest_only else find_damaged_files(self._directory / f"step_{step}", files)

    def _rename(self, damaged: Mapping[int, str]) -> None:
        """Rename damaged checkpoints, and write the damage to a file in each."""
        for step, problem in damaged.items():
            directory = self._directory / f"step_{step}"
            names = (
                directory.with_name(f"step_{step}.damaged{suffix}")
                for suffix in ("", *(f".{n}" for n in range(2, 100)))
            )
            try:
                with fenced_write():
                    renamed = directory.rename(next(name for name in names if not name.exists()))
                    write_file(renamed / DAMAGE, f"{problem}\n")
            except OSError as error:
                raise AlignerError(
                    f"{directory}: damaged ({problem}), and cannot be moved aside: {error}"
                ) from error
            _log.warning(
                "DAMAGED: checkpoint step_%d is not used and was moved to %s: %s",
                step,
                renamed,
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
    """Return the sizes and checksums that the files of a checkpoint's parts must have.

    Raises:
        AlignerError: A file that a part's manifest lists does not exist.
    """
    files = {}
    for part in (directory / name for name in _PARTS):
        recorded = read_manifest(part).files if (part / MANIFEST).is_file() else {}
        for file in sorted(part.glob("[!.]*")):
            files[f"{part.name}/{file.name}"] = recorded.get(file.name) or compute_file_record(file)
    return files
