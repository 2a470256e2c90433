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
from aligner.paths import DAMAGE, find_complete_steps, get_run_paths, parse_checkpoint_step
from aligner.schema import Config
from aligner.schema.keys import get_masked_values
from aligner.training.end_rule import check_metric_name, get_improvement_sign
from aligner.training.services import run_and_broadcast_result
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
"""Directories that a checkpoint can contain, and the description of each in the manifest."""
_OTHER_STATE = {
    "rng": "nothing: every random stream is derived from the seed and the step",
    "data": "position, the number of prompts or examples used or skipped: state",
}
"""Descriptions, in the manifest, of the state that is not stored in a part of its own."""
_MAX_LISTED_CHANGES = 10
"""Maximum number of changed files that the error of `check_inputs` lists."""


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
        self._directory = get_run_paths(config).checkpoints
        self._undeletable_names: set[str] = set()

    def list_steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, in order."""
        return find_complete_steps(self._directory)

    def read_newest_states(self) -> list[TrainingState]:
        """Return the states of the last `checkpoint.keep` retained checkpoints, in order.

        Raises:
            AlignerError: A checkpoint has another format.
        """
        return [
            TrainingState(**self._read(step)["state"])
            # Omit a best checkpoint that is much older: the critic keeps the journal of its updates
            # since the first of these states.
            for step in sorted(self._find_retained_steps())[-self._settings.keep :]
        ]

    def rename_damaged(self, rank: int) -> None:
        """Rename damaged checkpoints that are newer than the newest intact one. Collective.

        Rank 0 renames the directories. Afterwards the newest checkpoint is intact.

        Raises:
            AlignerError: No checkpoint is intact, or one has another format; nothing is renamed.
        """
        damage_by_step: dict[int, str] = {}
        # All ranks must check the same steps, but may see a shared filesystem in different states.
        steps = broadcast_json(self.list_steps())
        has_intact = False
        for step in reversed(steps):
            # For checkpoints older than the newest intact one, read only the manifest: the
            # critic's ranks verify the files that they restore.
            if problems := self._find_damage(step, manifest_only=has_intact):
                damage_by_step[step] = "; ".join(problems)
            else:
                has_intact = True

        if steps and not has_intact:
            problem_lines = "\n".join(
                f"  step_{step}: {problem}" for step, problem in damage_by_step.items()
            )
            raise AlignerError(
                f"{self._directory}: every checkpoint is damaged; restore a checkpoint from a"
                f" backup, or start again in another run.dir:\n{problem_lines}"
            )

        run_and_broadcast_result(
            lambda: self._rename_directories(damage_by_step if rank == 0 else {})
        )

    def check_inputs(self) -> None:
        """Compare the files that the run reads with those of the newest checkpoint.

        A checkpoint of a release that recorded no checksums is not compared.

        Raises:
            ConfigError: A file changed, and `run.changes` does not list its key.
        """
        steps = self.list_steps()
        saved_inputs = self._read(steps[-1]).get("inputs") if steps else None
        if saved_inputs is None or self._inputs is None:
            return
        expected_inputs = {
            key: {name: FileRecord(*record) for name, record in files.items()}
            for key, files in saved_inputs.items()
        }
        changes = describe_input_changes(expected_inputs, self._inputs, self._config.run.changes)
        if not changes:
            return

        lines: list[str] = []
        for key_lines in changes.values():
            lines += key_lines
        if len(lines) > _MAX_LISTED_CHANGES:
            lines[_MAX_LISTED_CHANGES:] = [f"and {len(lines) - _MAX_LISTED_CHANGES} more files"]
        indented_lines = "\n".join(f"  {line}" for line in lines)
        raise ConfigError(
            f"run.resume={self._config.run.resume}: files that the run reads have changed since"
            f" checkpoint step_{steps[-1]} was saved:\n{indented_lines}\n  restore the files, start"
            f" another run, or accept the changes with run.changes=[{','.join(changes)}]"
        )

    def get_metric(self, metrics: Mapping[str, float]) -> float | None:
        """Return the value of `checkpoint.best_metric`; None if the key is not set or the metric
        not measured."""
        name = self._settings.best_metric
        return None if name is None else metrics.get(name)

    def check_metric(self, metrics: Mapping[str, float]) -> None:
        """Raise AlignerError if `checkpoint.best_metric` is unknown, according to the metrics of a
        step.

        It is unknown if the step has other metrics with the same prefix, such as eval/…. Call this
        long before the first checkpoint is saved.
        """
        name = self._settings.best_metric
        if name is not None:
            check_metric_name(f"checkpoint.best_metric={name}", name, metrics)

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
                | _OTHER_STATE
            ),
            # Checksums of all files, so that a resume detects damage to any of them.
            "files": _collect_file_records(directory),
            "inputs": self._inputs,
            "config": get_masked_values(self._config),
        }
        self._write(state.step, content)

    @fenced_write()
    def record_evaluation(self, step: int, metric: float | None) -> None:
        """Record the result of an evaluation that was pending when the checkpoint was saved."""
        content = self._read(step)
        content["state"]["owes_evaluation"] = False
        # A checkpoint saved by time is never compared with others. Manifests of older releases have
        # no `by_time`.
        if metric is not None and not content["state"].get("by_time"):
            content["metric"] = {"name": self._settings.best_metric, "value": metric}
        self._write(step, content)

    def prune(self) -> None:
        """Delete the checkpoints that are not retained, and the remains of earlier failed
        deletions."""
        retained_steps = self._find_retained_steps()
        # A newer directory without a manifest may be a checkpoint that is being written.
        for directory in sorted(self._directory.iterdir()):
            step = parse_checkpoint_step(directory)
            if step is not None and step < max(retained_steps) and step not in retained_steps:
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
            if directory.name not in self._undeletable_names:
                _log.warning(
                    "cannot delete old checkpoint %s: %s; retrying after each checkpoint",
                    directory,
                    error,
                )
            self._undeletable_names.add(directory.name)

    def find_best(self) -> int | None:
        """Return the step of the best checkpoint by `checkpoint.best_metric`; the newest if several
        are equal."""
        sign = get_improvement_sign(str(self._settings.best_metric))
        values = {}
        for step in self.list_steps():
            metric = self._read(step)["metric"]
            # The metric's name differs if the run was resumed with another `best_metric`.
            if (
                metric is not None
                and metric["name"] == self._settings.best_metric
                and not math.isnan(metric["value"])
            ):
                values[step] = sign * metric["value"]
        return max(values, key=lambda step: (values[step], step), default=None)

    def _find_retained_steps(self) -> set[int]:
        """Return the steps of the checkpoints to retain.

        These are the newest checkpoint, the best one, and the last `checkpoint.keep`.
        """
        steps = self.list_steps()
        best_step = self.find_best()
        # A checkpoint that was saved because of the elapsed time must not displace one that
        # `checkpoint.every` requested; of those saved by time only the newest is certain to stay.
        interval_steps = {
            step
            for step in steps
            if self._settings.every and not self._read(step)["state"].get("by_time")
        }
        by_priority = sorted(steps, key=lambda step: (step in interval_steps, step))
        retained_steps = {*by_priority[-self._settings.keep :], *steps[-1:]}
        if best_step is not None:
            retained_steps.add(best_step)
        return retained_steps

    def _find_damage(self, step: int, *, manifest_only: bool) -> list[str]:
        """Return descriptions of the damage to a checkpoint's files. Collective."""
        files: dict[str, FileRecord] = {}
        problem = None
        try:
            files = self._read(step)["files"]
        except DamagedError as error:
            problem = str(error)

        # The damage may be visible on one rank only. The checks of the files are collective, so all
        # ranks must agree whether to run them.
        rank_problems = gather_json(problem)
        manifest_problems = {text for text in rank_problems if text is not None}
        if manifest_problems:
            return sorted(manifest_problems)

        return [] if manifest_only else find_damaged_files(self._directory / f"step_{step}", files)

    def _rename_directories(self, damage_by_step: Mapping[int, str]) -> None:
        """Rename damaged checkpoints, and write the damage to a file in each."""
        for step, problem in damage_by_step.items():
            directory = self._directory / f"step_{step}"
            # The step may have been damaged, renamed and saved again before.
            suffixes = ["", *(f".{number}" for number in range(2, 100))]
            targets = (directory.with_name(f"step_{step}.damaged{suffix}") for suffix in suffixes)
            try:
                with fenced_write():
                    target = next(target for target in targets if not target.exists())
                    renamed_directory = directory.rename(target)
                    write_file(renamed_directory / DAMAGE, f"{problem}\n")
            except OSError as error:
                raise AlignerError(
                    f"{directory}: damaged ({problem}), and cannot be moved aside: {error}"
                ) from error
            _log.warning(
                "DAMAGED: checkpoint step_%d is not used and was moved to %s: %s",
                step,
                renamed_directory,
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


def _collect_file_records(directory: Path) -> dict[str, FileRecord]:
    """Return the sizes and checksums that the files of a checkpoint's parts must have.

    Raises:
        AlignerError: A file that a part's manifest lists does not exist.
    """
    records = {}
    for part in (directory / name for name in _PARTS):
        # The ranks that wrote the part computed its checksums from the data in memory; reading the
        # files again would be slow and would not detect damage by the write.
        part_records = read_manifest(part).files if (part / MANIFEST).is_file() else {}
        for file in sorted(part.glob("[!.]*")):
            record = part_records.get(file.name) or compute_file_record(file)
            records[f"{part.name}/{file.name}"] = record
    return records
