"""Where a run keeps its files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from aligner.errors import ConfigError
from aligner.schema import Config

PREFERENCES = "preferences.jsonl"
RESPONSES = "responses.jsonl"
LOCK = "lock"
"""In a directory that a launch works on: who does, for others to stay away."""

CHECKPOINT_MANIFEST = "manifest.json"
"""Written last: a checkpoint without it does not count."""


@dataclass(frozen=True)
class RunPaths:
    """The files of a run directory; nothing is created by naming it."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.root / "config.yaml"

    @property
    def endpoints(self) -> Path:
        """Addresses of the run's servers."""
        return self.root / "endpoints.json"

    @property
    def access_key(self) -> Path:
        """The key that the run's servers ask for."""
        return self.root / "access_key"

    @property
    def journal(self) -> Path:
        """The critic's updates since its last checkpoint."""
        return self.root / "journal"

    @property
    def metrics(self) -> Path:
        """One JSON object a training step."""
        return self.root / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """Samples with their rewards, one JSON object each."""
        return self.root / "samples.jsonl"

    @property
    def references(self) -> Path:
        """The responses that evaluation compares the policy's with, and their scores, one JSON object each."""
        return self.root / "references.jsonl"

    @property
    def preferences(self) -> Path:
        """The pairs of a run of algorithm.trainer=preferences, once it has ended: `aligner.training.preference_sampling`."""
        return self.root / PREFERENCES

    @property
    def responses(self) -> Path:
        """All samples of such a run, one JSON object each."""
        return self.root / RESPONSES

    @property
    def timeline(self) -> Path:
        """One file of spans a process: `aligner.observability.timeline`."""
        return self.root / "timeline"

    @property
    def trace(self) -> Path:
        """All of them as Chrome trace events, once the run has ended."""
        return self.root / "trace.json"

    @property
    def report(self) -> Path:
        """Where `aligner report` writes its page, if not told otherwise."""
        return self.root / "report.html"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard event files."""
        return self.root / "tensorboard"

    @property
    def wandb(self) -> Path:
        """What Weights & Biases writes, a directory a start of the run."""
        return self.root / "wandb"

    @property
    def mlflow(self) -> Path:
        """MLflow's store, where it is not elsewhere."""
        return self.root / "mlruns"

    @property
    def status(self) -> Path:
        """The launcher's word on its processes: `aligner.launch.launcher_state`."""
        return self.root / "status.json"

    @property
    def job_script(self) -> Path:
        """What `sbatch` is given, of a run that is a Slurm job."""
        return self.root / "job.sh"

    @property
    def checkpoints(self) -> Path:
        """One directory step_<N> a checkpoint."""
        return self.root / "checkpoints"

    @property
    def of_training(self) -> tuple[Path, ...]:
        """What training leaves behind, for a run that begins again to remove; what any start makes anew is not among it."""
        files = (self.metrics, self.samples, self.references, self.preferences, self.responses, self.trace, self.report)
        trackers = (self.tensorboard, self.wandb, self.mlflow, self.tracker_run("wandb"), self.tracker_run("mlflow"))
        return (*files, *trackers, self.journal, self.timeline, self.checkpoints)

    @property
    def initial_model(self) -> Path:
        """A randomly initialised model (model.source=random)."""
        return self.root / "initial_model"

    def random_model(self, name: str) -> Path:
        """A randomly initialised reward model of a dry run (dry_run.models)."""
        return self.root / "random_models" / name

    @property
    def logs(self) -> Path:
        """What the run's processes print, a file a process."""
        return self.root / "logs"

    def log(self, role: str, rank: int) -> Path:
        """Standard output and error of one process."""
        return self.logs / f"{role}-{rank}.log"

    def job_log(self, job: str) -> Path:
        """What a Slurm job's supervisor prints; `%j` stands for the job's number where Slurm is asked for one."""
        return self.logs / f"job-{job}.log"

    def tracker_run(self, tracker: str) -> Path:
        """What a tracker, wandb or mlflow, calls the run: its id there."""
        return self.root / f"{tracker}_run_id"

    def triton_log(self, group: str) -> Path:
        """What the Triton server of a server group printed."""
        return self.logs / f"{group}-triton.log"

    def checkpoint(self, step: int, part: str) -> Path:
        """Directory of one role's part, policy or critic, of a checkpoint."""
        return self.checkpoints / f"step_{step}" / part


def run_paths(config: Config) -> RunPaths:
    """The run directory's files; `run.dir` must be resolved (the launcher does so)."""
    if config.run.dir is None:
        raise ConfigError("run.dir is not set; the launcher sets it, or give run.dir=DIRECTORY")
    return RunPaths(Path(config.run.dir))


def can_resume(config: Config) -> bool:
    """Whether the run directory has what a resumed run goes on from: a checkpoint, or steps that need none (preferences)."""
    paths = run_paths(config)
    return paths.metrics.is_file() if config.algorithm.trainer == "preferences" else bool(complete_steps(paths.checkpoints))


def complete_steps(checkpoints: Path) -> list[int]:
    """Steps whose checkpoint in a run's `checkpoints/` is complete, in order."""
    manifests = checkpoints.glob(f"step_*/{CHECKPOINT_MANIFEST}")
    return sorted(int(manifest.parent.name.removeprefix("step_")) for manifest in manifests)


def cache_directory() -> Path:
    """Where converted models and other experiments' results are kept: $ALIGNER_CACHE, else the user's cache directory."""
    explicit = os.environ.get("ALIGNER_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(explicit) if explicit else Path(base) / "aligner"
