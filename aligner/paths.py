"""Where a run keeps its files."""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from aligner.errors import ConfigError
from aligner.schema import Config

OPENMP_WAITS = {"GOMP_SPINCOUNT": "20000"}
"""How long a thread spins between parallel regions, in turns: about a millisecond. One that spins
on takes the core of another process; to wake one that sleeps costs a tenth of a training step.
Counts only before torch is imported."""


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Have exactly these environment variables meanwhile."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


PREFERENCES = "preferences.jsonl"
RESPONSES = "responses.jsonl"
TEACHER_SCORES = "teacher_scores"
TEACHER_SCORES_INDEX = "index.json"
"""Written last: teacher scores without it are not complete."""
LOCK = "lock"
"""In a directory that a launch works on: who does, for others to stay away."""

RECORDS = "data.jsonl"
"""In a run's directory before it is launched: records that were given to `aligner.launch` as such.
"""

PRIVATE = 0o700
"""Mode of a run directory that a launch makes: prompts, samples and what the environment keeps
secret are in it."""

CHECKPOINT_MANIFEST = "manifest.json"
"""Written last: a checkpoint without it does not count."""
DAMAGE = "damage.txt"
"""In a checkpoint that was found damaged and set aside: what is wrong with it."""


class RunPaths:
    """The files of a run directory; nothing is created by naming it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        """The resolved configuration."""
        self.records = root / RECORDS
        """What the run learns from, where that was no file."""
        self.endpoints = root / "endpoints.json"
        """Addresses of the run's servers."""
        self.access_key = root / "access_key"
        """The key that the run's servers ask for."""
        self.tls = root / "tls"
        """The certificate that the run's servers show, where the run has made it, and its key:
        `aligner.placement.tls`."""
        self.claim = root / "claim"
        """Who has taken the run last, and how many before; it stays where training begins again:
        `aligner.data.claim`."""
        self.journal = root / "journal"
        """The critic's updates since its last checkpoint."""
        self.episodes = root / "episodes"
        """What environments said to episodes, a directory a process:
        `aligner.agents.episode_journal`."""
        self.judge = root / "judge"
        """What judges have said, which a run that begins anew keeps:
        `aligner.rewards.judge`."""
        self.metrics = root / "metrics.jsonl"
        """One JSON object a training step."""
        self.metrics_checksum = root / "metrics.jsonl.checksum"
        """Size and checksum of `metrics`, of what is on disk so far."""
        self.samples = root / "samples.jsonl"
        """Samples with their rewards, one JSON object each."""
        self.sample_files = root / "samples"
        """All samples, two files a step: `aligner.observability.sample_files`."""
        self.references = root / "references.jsonl"
        """`references_of` prompts that are of no suite."""
        self.preferences, self.responses = root / PREFERENCES, root / RESPONSES
        """Pairs and samples of algorithm.trainer=preferences, once it has ended:
        `aligner.training.preference_sampling`."""
        self.teacher_scores = root / TEACHER_SCORES
        """What a run of algorithm.trainer=teacher_scores keeps: `aligner.data.teacher_scores`."""
        self.timeline = root / "timeline"
        """One file of spans a process: `aligner.observability.timeline`."""
        self.trace = root / "trace.json"
        """All of them as Chrome trace events, once the run has ended."""
        self.report = root / "report.html"
        """Where `aligner report` writes its page, if not told otherwise."""
        self.tensorboard = root / "tensorboard"
        """TensorBoard event files."""
        self.wandb = root / "wandb"
        """What Weights & Biases writes, a directory a start of the run."""
        self.mlflow = root / "mlruns"
        """MLflow's store, where it is not elsewhere."""
        self.end = root / "end.txt"
        """Why the run has ended before its last step, where it did so by what it reached."""
        self.status = root / "status.json"
        """The launcher's word on its processes: `aligner.launcher.run_directory`."""
        self.job_script = root / "job.sh"
        """What `sbatch` is given, of a run that is a Slurm job."""
        self.checkpoints = root / "checkpoints"
        """One directory step_<N> a checkpoint."""
        self.set_aside = root / "set_aside"
        """What starts have left that came to no checkpoint, in a directory 1, 2, … each."""
        self.initial_model = root / "initial_model"
        """A randomly initialised model (model.source=random)."""
        self.stages = root / "stages"
        """What each role is at while it starts, a file a role: `aligner.observability.timeline`."""
        self.logs = root / "logs"
        """What the run's processes print, a file a process."""

    def references_of(self, suite: str | None) -> Path:
        """The responses that an evaluation compares the policy's with, and their scores, one JSON
        object each."""
        return self.references if suite is None else self.root / f"references-{suite}.jsonl"

    @property
    def of_training(self) -> tuple[Path, ...]:
        """What training leaves behind, for a run that begins again to set aside; what any start
        makes anew is not among it."""
        files = (
            self.metrics,
            self.metrics_checksum,
            self.samples,
            self.references,
            self.preferences,
            self.responses,
            self.trace,
            self.report,
        )
        trackers = (
            self.tensorboard,
            self.wandb,
            self.mlflow,
            self.tracker_run("wandb"),
            self.tracker_run("mlflow"),
        )
        directories = (
            self.teacher_scores,
            self.sample_files,
            self.journal,
            self.episodes,
            self.timeline,
            self.checkpoints,
        )
        of_suites = sorted(self.root.glob("references-*.jsonl"))
        return (*files, *of_suites, self.end, *trackers, *directories)

    def random_model(self, name: str) -> Path:
        """A randomly initialised reward model of a dry run (dry_run.models)."""
        return self.root / "random_models" / name

    def log(self, role: str, rank: int) -> Path:
        """Standard output and error of one process."""
        return self.logs / f"{role}-{rank}.log"

    def heartbeat(self, role: str, rank: int) -> Path:
        """What one process touches while it lives."""
        return self.root / "heartbeats" / f"{role}-{rank}"

    def job_log(self, job: str) -> Path:
        """What a Slurm job's supervisor prints; `%j` stands for the job's number where Slurm is
        asked for one."""
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
        raise ConfigError(
            "run.dir: is not set; set run.dir=DIRECTORY, or start the run with `aligner launch`"
        )
    return RunPaths(Path(config.run.dir))


def can_resume(config: Config) -> bool:
    """Whether the run directory has what a resumed run goes on from: a checkpoint, or steps that
    need none."""
    paths = run_paths(config)
    return (
        bool(complete_steps(paths.checkpoints))
        if config.algorithm.learns
        else paths.metrics.is_file()
    )


def early_end(paths: RunPaths) -> str | None:
    """Why the run has ended before its last step, by what it reached; None of one that has not
    ended so."""
    return paths.end.read_text(encoding="utf-8").strip() if paths.end.is_file() else None


def complete_steps(checkpoints: Path) -> list[int]:
    """Steps whose checkpoint in a run's `checkpoints/` is complete, in order."""
    steps = [
        checkpoint_step(manifest.parent)
        for manifest in checkpoints.glob(f"step_*/{CHECKPOINT_MANIFEST}")
    ]
    return sorted(step for step in steps if step is not None)


def checkpoint_step(directory: Path) -> int | None:
    """The step whose checkpoint a directory is by its name; None for a copy, what was set aside,
    and anything else."""
    name = re.fullmatch(r"step_(0|[1-9][0-9]*)", directory.name)
    return None if name is None else int(name[1])


def cache_directory() -> Path:
    """Where converted models and other experiments' results are kept: $ALIGNER_CACHE, else the
    user's cache directory."""
    explicit = os.environ.get("ALIGNER_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(explicit) if explicit else Path(base) / "aligner"
