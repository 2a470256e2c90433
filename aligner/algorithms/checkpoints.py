"""A run's checkpoints: which are complete, which is the last, which are no longer kept."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from aligner.config.paths import RunPaths


@dataclass(frozen=True)
class RunState:
    """What a run resumes from beside the weights; all else follows from the seed and the step."""

    step: int
    """Training steps done."""
    kl_coefficient: float
    critic_updates: int
    """Sequence number of the critic's last update."""


class RunCheckpoints:
    """The checkpoints of a run directory. One counts once its manifest is written, which is done last."""

    def __init__(self, paths: RunPaths, keep: int) -> None:
        self._paths, self._keep = paths, keep

    def _manifest(self, step: int) -> Path:
        return self._paths.checkpoints / f"step_{step}" / "manifest.json"

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, in order."""
        manifests = self._paths.checkpoints.glob("step_*/manifest.json")
        return sorted(int(manifest.parent.name.removeprefix("step_")) for manifest in manifests)

    def latest(self) -> RunState | None:
        """State of the last complete checkpoint, or None."""
        steps = self.steps()
        return RunState(**json.loads(self._manifest(steps[-1]).read_text())) if steps else None

    def commit(self, state: RunState) -> None:
        """Declare a checkpoint complete, and delete those that are no longer kept."""
        manifest = self._manifest(state.step)
        temporary = manifest.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(state), indent=1) + "\n")
        temporary.replace(manifest)
        for step in self.steps()[: -self._keep]:
            # Without its manifest it no longer counts, also when the deletion is cut short.
            self._manifest(step).unlink()
            shutil.rmtree(self._manifest(step).parent)
