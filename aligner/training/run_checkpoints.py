"""A run's checkpoints: which are complete, which is the last, which are no longer kept."""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import aligner
from aligner.data.checkpoint_files import FORMAT, MANIFEST, read_manifest_file
from aligner.errors import AlignerError
from aligner.files import write_file
from aligner.paths import complete_steps, run_paths
from aligner.schema import Config

_PARTS = {
    "policy": "weights, optimizer and learning-rate schedule: policy/manifest.json",
    "reward_model": "weights, optimizer and learning-rate schedule: reward_model/manifest.json",
    "rollouts": "samples of the steps to come: rollouts.safetensors, their prompts: rollouts.json",
    "critic": "weights, optimizer and learning-rate schedule: critic/manifest.json; its last update: critic/updates.json",
}
_HOLDS = {
    "rng": "nothing: every random stream follows from the seed and the step",
    "data": "position, the number of prompts or examples taken: state",
}


@dataclass(frozen=True)
class TrainingState:
    """What a run resumes from beside the weights; all else follows from the seed and the step."""

    step: int
    """Training steps done."""
    kl_coefficient: float
    critic_updates: int
    """Numbered updates that the critic had applied: its part of the checkpoint says the same. 0 without a critic."""
    position: int
    """Prompts or examples taken from the data so far."""
    owes_evaluation: bool = False
    """Whether the evaluation of this step was left to the run that resumes."""


class RunCheckpoints:
    """The checkpoints of a run directory. One counts once its manifest is written, which is done last."""

    def __init__(self, config: Config) -> None:
        self._config, self._settings = config, config.checkpoint
        self._directory = run_paths(config).checkpoints

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, in order."""
        return complete_steps(self._directory)

    def newest(self) -> list[TrainingState]:
        """States of the last `checkpoint.keep` complete checkpoints, in order. Raises AlignerError for another format's."""
        return [TrainingState(**self._read(step)["state"]) for step in self.steps()[-self._settings.keep :]]

    def metric(self, stats: Mapping[str, float]) -> float | None:
        """What a checkpoint taken now is worth, by `checkpoint.best_metric`; None where that is not set, or not measured."""
        return None if self._settings.best_metric is None else stats.get(self._settings.best_metric)

    def check_metric(self, stats: Mapping[str, float]) -> None:
        """Raise AlignerError when a step has metrics of the kind of `checkpoint.best_metric`, such as eval/…, but not it.

        To be asked long before the first checkpoint is taken.
        """
        name = self._settings.best_metric
        kind = f"{name}".partition("/")[0] + "/"
        if name is not None and name not in stats and any(known.startswith(kind) for known in stats):
            raise AlignerError(f"checkpoint.best_metric={name}: no such metric; this step's: {', '.join(sorted(stats))}")

    def commit(self, state: TrainingState, metric: float | None = None) -> None:
        """Declare a checkpoint, whose parts are complete, complete."""
        directory = self._directory / f"step_{state.step}"
        content = {
            "format": FORMAT,
            "aligner": aligner.__version__,
            "state": asdict(state),
            "metric": None if metric is None else {"name": self._settings.best_metric, "value": metric},
            "holds": {part: what for part, what in _PARTS.items() if (directory / part).is_dir()} | _HOLDS,
            "config": asdict(self._config),
        }
        self._write(state.step, content)

    def settle(self, step: int, metric: float | None) -> None:
        """Note what a checkpoint's evaluation, which was owed, has found."""
        content = self._read(step)
        content["state"]["owes_evaluation"] = False
        if metric is not None:
            content["metric"] = {"name": self._settings.best_metric, "value": metric}
        self._write(step, content)

    def prune(self) -> None:
        """Delete the checkpoints that are no longer kept."""
        for step in sorted(set(self.steps()) - self._kept()):
            # Without its manifest it no longer counts, also when the deletion is cut short.
            (self._directory / f"step_{step}" / MANIFEST).unlink()
            shutil.rmtree(self._directory / f"step_{step}")

    def best(self) -> int | None:
        """The step whose checkpoint is the best by `checkpoint.best_metric`, the newest of equals.

        The highest value is the best one, but for losses, perplexities and distances from another distribution.
        """
        name = str(self._settings.best_metric)
        sign = -1 if name.endswith(("loss", "perplexity", "_kl")) or name.startswith(("kl/", "mismatch/")) else 1
        values = {}
        for step in self.steps():
            metric = self._read(step)["metric"]
            if metric is not None and metric["name"] == self._settings.best_metric and not math.isnan(metric["value"]):
                values[step] = sign * metric["value"]
        return max(values, key=lambda step: (values[step], step), default=None)

    def _kept(self) -> set[int]:
        best = self.best()
        return {*self.steps()[-self._settings.keep :], *(() if best is None else (best,))}

    def _write(self, step: int, content: Mapping[str, Any]) -> None:
        write_file(self._directory / f"step_{step}" / MANIFEST, json.dumps(content, indent=1) + "\n")

    def _read(self, step: int) -> dict[str, Any]:
        return read_manifest_file(self._directory / f"step_{step}" / MANIFEST)
