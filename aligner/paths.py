"""Paths of a run's files, and environment variables of processes."""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from aligner.errors import ConfigError
from aligner.schema import Config

OPENMP_ENVIRONMENT = {"GOMP_SPINCOUNT": "20000"}
"""Environment variables that limit the number of iterations for which an OpenMP thread spins
between parallel regions. The limit corresponds to about a millisecond.

A thread that spins longer occupies a core that another process needs. Without spinning, waking the
threads takes a tenth of the time of a training step. The variables have an effect only if they are
set before torch is imported.
"""


@contextlib.contextmanager
def replace_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Replace all environment variables of this process by `values` inside the block."""
    # `os.environ` itself is changed, because a new object would not change the environment of C
    # libraries.
    original = dict(os.environ)
    os.environ.clear()
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(original)


PREFERENCES = "preferences.jsonl"
RESPONSES = "responses.jsonl"
TEACHER_SCORES = "teacher_scores"
TEACHER_SCORES_INDEX = "index.json"
"""Index file of teacher scores. It is written last: teacher scores without it are incomplete."""
LOCK = "lock"
"""Lock file in a directory that a launch uses; it describes the launch that holds the lock."""

RECORDS = "data.jsonl"
"""File in a run directory with the records that were passed to `aligner.launch` as Python
objects."""

PRIVATE_MODE = 0o700
"""Mode of a run directory that a launch creates, because it contains prompts, samples, and secrets
of the environment."""

CHECKPOINT_MANIFEST = "manifest.json"
"""Manifest of a checkpoint. It is written last: a checkpoint without it is incomplete."""
DAMAGE = "damage.txt"
"""File in a damaged checkpoint that was set aside; it describes the damage."""


class RunPaths:
    """Paths of the files of a run directory. The class creates no files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        """The resolved configuration."""
        self.records = root / RECORDS
        """Training data that was passed as Python objects instead of a file."""
        self.endpoints = root / "endpoints.json"
        """Addresses of the run's servers."""
        self.access_key = root / "access_key"
        """Key that clients must send to the run's servers."""
        self.node_key = root / "node_key"
        """Key with which the processes of a job's nodes authenticate each other."""
        self.tls = root / "tls"
        """TLS certificate of the run's servers and its key, if the run has created them; see
        `aligner.placement.tls`."""
        self.claim = root / "claim"
        """Fencing record with the holder of the run and the number of the attempt; see
        `aligner.data.fencing`. The file is kept when training begins again."""
        self.journal = root / "journal"
        """Journal of the critic's updates since the critic's last checkpoint."""
        self.episodes = root / "episodes"
        """Answers of environments to episodes, one directory per process; see
        `aligner.agents.episode_journal`."""
        self.judge = root / "judge"
        """Cache of the judges' answers, kept when training begins again; see
        `aligner.rewards.judge`."""
        self.metrics = root / "metrics.jsonl"
        """Metrics, one JSON object per training step."""
        self.metrics_checksum = root / "metrics.jsonl.checksum"
        """Size and checksum of `metrics`; see `aligner.observability.metrics`."""
        self.samples = root / "samples.jsonl"
        """Samples with their rewards, one JSON object per sample."""
        self.sample_files = root / "samples"
        """All samples, two files per step; see `aligner.observability.sample_files`."""
        self.references = root / "references.jsonl"
        """Reference responses of the prompts that belong to no suite; see `get_references_file`."""
        self.preferences = root / PREFERENCES
        """Preference pairs of a finished run with algorithm.trainer=preferences; see
        `aligner.training.preference_sampling`."""
        self.responses = root / RESPONSES
        """Samples of a finished run with algorithm.trainer=preferences."""
        self.teacher_scores = root / TEACHER_SCORES
        """Teacher top-k log-probs of a run with algorithm.trainer=teacher_scores; see
        `aligner.data.teacher_scores`."""
        self.timeline = root / "timeline"
        """Spans, one file per process; see `aligner.observability.timeline`."""
        self.profile = root / "profile"
        """Profiles of training steps (`profile.steps`), one file per step and rank."""
        self.bundles = root / "bundles"
        """OCI bundles of a Slurm job's roles; see `aligner.placement.oci_bundle`."""
        self.trace = root / "trace.json"
        """All spans as Chrome trace events, written when the run ends."""
        self.report = root / "report.html"
        """Default output of `aligner report`."""
        self.tensorboard = root / "tensorboard"
        """TensorBoard event files."""
        self.wandb = root / "wandb"
        """Files of Weights & Biases, one directory per launch of the run."""
        self.mlflow = root / "mlruns"
        """Default store of MLflow."""
        self.end = root / "end.txt"
        """Reason why an end rule ended the run before its last step."""
        self.notes = root / "notes.json"
        """Note and tags of a user; see `aligner.view.run_notes`. The file is kept when training
        begins again."""
        self.status = root / "status.json"
        """Status of the run's processes, written by the launcher; see
        `aligner.launcher.run_directory`."""
        self.job_script = root / "job.sh"
        """Script for `sbatch`, if the run is a Slurm job."""
        self.job_set = root / "jobset.yaml"
        """JobSet of the run, if it runs on Kubernetes."""
        self.task_file = root / "skypilot.yaml"
        """SkyPilot task of the run, if it runs with SkyPilot."""
        self.checkpoints = root / "checkpoints"
        """Checkpoints, in one directory step_<N> per checkpoint."""
        self.set_aside = root / "set_aside"
        """Files of launches that wrote no complete checkpoint, in one directory 1, 2, … per
        launch."""
        self.initial_model = root / "initial_model"
        """Randomly initialized model (model.source=random)."""
        self.data_files = root / "data_files.json"
        """Checksums of the files of the training data, see `aligner.data.example_cache`."""
        self.stages = root / "stages"
        """Current stage of each role while it starts, one file per role; see
        `aligner.observability.timeline`."""
        self.user_errors = root / "user_errors"
        """Exceptions of reward functions and environments in the current launch, one file per rank;
        see `aligner.observability.user_errors`."""
        self.logs = root / "logs"
        """Output of the run's processes, one file per process."""

    def get_references_file(self, suite: str | None) -> Path:
        """Return the file with an evaluation's reference responses and their scores, one JSON
        object per response.

        Args:
            suite: Name of the evaluation suite; None for prompts that belong to no suite.
        """
        return self.references if suite is None else self.root / f"references-{suite}.jsonl"

    @property
    def training_files(self) -> tuple[Path, ...]:
        """Files and directories of training that are set aside when training begins again. Files
        that every launch creates anew are not included."""
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
            self.profile,
            self.checkpoints,
        )
        suite_references = sorted(self.root.glob("references-*.jsonl"))
        return (*files, *suite_references, self.end, *trackers, *directories)

    def random_model(self, name: str) -> Path:
        """Return the directory of a randomly initialized reward model of a dry run
        (dry_run.models)."""
        return self.root / "random_models" / name

    def log(self, role: str, rank: int) -> Path:
        """Return the log of one process: its standard output and error."""
        return self.logs / f"{role}-{rank}.log"

    def heartbeat(self, role: str, rank: int) -> Path:
        """Return the heartbeat file of one process, which the process touches regularly."""
        return self.root / "heartbeats" / f"{role}-{rank}"

    def job_log(self, job: str) -> Path:
        """Return the log of a Slurm job's supervisor; Slurm replaces the job `%j` by the job's
        number."""
        return self.logs / f"job-{job}.log"

    def tracker_run(self, tracker: str) -> Path:
        """Return the file with the run's id in a tracker, `wandb` or `mlflow`."""
        return self.root / f"{tracker}_run_id"

    def triton_log(self, group: str) -> Path:
        """Return the log of the Triton server of a server group."""
        return self.logs / f"{group}-triton.log"

    def bundle(self, role: str) -> Path:
        """Return the OCI bundle of a role of a Slurm job."""
        return self.bundles / role

    def checkpoint(self, step: int, part: str) -> Path:
        """Return the directory of a part, `policy` or `critic`, of a checkpoint."""
        return self.checkpoints / f"step_{step}" / part


def get_run_paths(config: Config) -> RunPaths:
    """Return the paths of a configuration's run directory.

    `run.dir` must be resolved, which the launcher does.

    Raises:
        ConfigError: If `run.dir` is not set.
    """
    if config.run.dir is None:
        raise ConfigError(
            "run.dir: is not set; set run.dir=DIRECTORY, or start the run with `aligner launch`"
        )
    return RunPaths(Path(config.run.dir))


def can_resume(config: Config) -> bool:
    """Return whether a run can be resumed.

    Its directory must have a complete checkpoint or, for a run that trains no weights, recorded
    steps.
    """
    paths = get_run_paths(config)
    if config.algorithm.trains_model:
        return bool(find_complete_steps(paths.checkpoints))
    return paths.metrics.is_file()


def read_early_end(paths: RunPaths) -> str | None:
    """Return the reason why an end rule ended a run before its last step; None for other runs."""
    return paths.end.read_text(encoding="utf-8").strip() if paths.end.is_file() else None


def find_complete_steps(checkpoints: Path) -> list[int]:
    """Return the steps with a complete checkpoint in the directory `checkpoints`, in ascending
    order."""
    steps = [
        parse_checkpoint_step(manifest.parent)
        for manifest in checkpoints.glob(f"step_*/{CHECKPOINT_MANIFEST}")
    ]
    return sorted(step for step in steps if step is not None)


def parse_checkpoint_step(directory: Path) -> int | None:
    """Return the step in the name of a checkpoint directory; None for any other directory, such as
    a copy or a checkpoint that was set aside."""
    # Leading zeros are not allowed, so that each step has only one name.
    match = re.fullmatch(r"step_(0|[1-9][0-9]*)", directory.name)
    return None if match is None else int(match[1])


def get_cache_directory() -> Path:
    """Return the directory for converted models and the results of prerequisite experiments:
    $ALIGNER_CACHE, or `aligner` in the user's cache directory."""
    configured = os.environ.get("ALIGNER_CACHE")
    # An empty variable counts as unset (XDG Base Directory Specification).
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(configured) if configured else Path(user_cache) / "aligner"


def redirect_library_caches() -> None:
    """Let libraries write their caches below aligner's cache if the home directory is read-only.

    Containers often have a read-only root. The function sets environment variables, before the
    libraries are imported; variables that the user has set are unchanged. It does nothing without
    $ALIGNER_CACHE, because aligner's cache is then in the home directory, too.
    """
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home() raises without a home
    if os.access(home, os.W_OK) or not os.environ.get("ALIGNER_CACHE"):
        return
    directory = get_cache_directory() / "libraries"
    variables = {
        "XDG_CACHE_HOME": directory,  # vLLM, wandb, torch extensions
        "TRITON_CACHE_DIR": directory / "triton",
        "FLASHINFER_WORKSPACE_BASE": directory,
    }
    # Models that are already in the cache of Hugging Face are still found.
    hub = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "huggingface"
    if hub.is_dir():
        variables["HF_HOME"] = hub
    for name, path in variables.items():
        os.environ.setdefault(name, str(path.absolute()))
