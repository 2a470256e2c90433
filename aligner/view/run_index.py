"""Discovery of runs in directories, and the data of a run that the pages show.

- `RunIndex` finds the runs, and `ViewedRun` caches the data of each run.
- Functions compute the key figures of a run, its failure counts, and the differences between
  configurations.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import yaml

from aligner.config.compose import load_config
from aligner.errors import AlignerError
from aligner.launcher.run_directory import read_state
from aligner.launcher.status import ENDED_STATES, RunStatus, build_status
from aligner.observability.console import WINDOW_STEPS, iterate_suite_metrics, window_mean
from aligner.observability.metrics import FileFollower, merge_records, read_newest_metrics
from aligner.paths import RunPaths
from aligner.schema import Config, RunConfig
from aligner.schema.conditions import format_value
from aligner.schema.keys import get_masked_values, with_values
from aligner.view.figures import LINE_COLORS
from aligner.view.run_curves import RunCurves, read_curves
from aligner.view.run_logs import Failure, find_failure
from aligner.view.run_notes import RunNotes, read_notes
from aligner.view.shown_text import printable
from aligner.view.sparklines import Sparkline, build_sparkline

# Metrics whose means over the first and the last steps are key figures, with label and format.
_COMPARED_METRICS = {
    "reward/mean": ("reward", "{:.3f}"),
    **{f"{trainer}/loss": ("loss", "{:.3f}") for trainer in ("sft", "dpo", "reward_model")},
    **{f"{trainer}/accuracy": ("accuracy", "{:.3f}") for trainer in ("dpo", "reward_model")},
    "kl/reference": ("KL to reference (nats)", "{:.3f}"),
    "response/length": ("response tokens", "{:.1f}"),
}
# Evaluation metrics that are key figures, with their labels.
_EVALUATION_LABELS = {
    "eval/pass@1": "pass@1",
    "eval/win_rate": "win rate",
    "eval/score": "evaluation score",
    "eval/loss": "held-out loss",
}
MISSING = "\N{EN DASH}"
"""Text in place of a missing value."""
# Parts of the names of metrics that count failures.
_FAILURE_NAMES = ("skipped", "lost", "failed")
# Keys that differ between any two runs, and the list of automatic values.
_RUN_SPECIFIC_KEYS = ("run.dir", "run.name", "run.date", "run.command", "run.resume", "run.chosen")

UNREADABLE = "unreadable"
"""State of a run whose files are damaged."""
# Maximum depth of a run directory below a viewed directory.
_MAX_DEPTH = 3
# Main metrics of runs, with their labels; the first that a run measured is in its overview.
_MAIN_METRICS = {
    "reward/mean": "reward",
    "sft/loss": "loss",
    "dpo/loss": "loss",
    "reward_model/loss": "loss",
}


def compute_key_figures(metrics: Sequence[Mapping[str, float]]) -> list[tuple[str, str, str]]:
    """Return the key figures of a run so far, as tuples of a label, a value and a remark."""
    steps = [record for record in metrics if record["step"] > 0]
    first = steps[:WINDOW_STEPS]
    last = steps[-WINDOW_STEPS:]
    figures = []

    for key, (label, template) in _COMPARED_METRICS.items():
        first_mean = window_mean(first, key)
        last_mean = window_mean(last, key)
        if first_mean is not None and last_mean is not None:
            figures.append(
                (label, template.format(last_mean), f"from {template.format(first_mean)}")
            )

    suite_labels = {
        key.replace("/", f"/{name}/", 1): f"{name}: {_EVALUATION_LABELS[key]}"
        for record in metrics
        for name, key, _ in iterate_suite_metrics(record)
        if key in _EVALUATION_LABELS
    }
    for key, label in {**_EVALUATION_LABELS, **suite_labels}.items():
        if evaluations := [record for record in metrics if key in record]:
            first_evaluation = evaluations[0]
            last_evaluation = evaluations[-1]
            figures.append(
                (label, f"{last_evaluation[key]:.3f}", f"from {first_evaluation[key]:.3f}")
            )

    if (seconds := window_mean(last, "time/step")) is not None:
        total = sum(record.get("time/step", 0.0) for record in steps)
        figures.append(("seconds per step", f"{seconds:.2f}", f"{total:,.0f} s in total"))
    if (rate := window_mean(last, "throughput/tokens_per_s")) is not None:
        figures.append(("tokens per second", f"{rate:,.0f}", f"last {len(last)} steps"))
    if mismatches := [
        record["mismatch/logprob_abs"] for record in steps if "mismatch/logprob_abs" in record
    ]:
        figures.append(
            ("largest mismatch", f"{max(mismatches):.1e}", "nats, engine vs. trainer log-probs")
        )
    return figures


def count_failures(metrics: Sequence[Mapping[str, float]]) -> list[tuple[str, float]]:
    """Return the metrics that count skipped, lost or failed items, and their sums over the run.

    Metrics that are already totals, or fractions, are omitted.
    """
    names = dict.fromkeys(
        key for record in metrics for key in record if any(part in key for part in _FAILURE_NAMES)
    )
    count_names = [name for name in names if not name.endswith(("_total", "_fraction"))]
    return [(name, sum(record.get(name, 0.0) for record in metrics)) for name in count_names]


def compare_configurations(configs: Mapping[str, Config]) -> list[tuple[str, list[str]]]:
    """Return the keys in which configurations differ, and the value of each configuration.

    Keys that differ between any two runs, such as the run directory, are omitted.
    """
    flat_configs = [_flatten(get_masked_values(config)) for config in configs.values()]
    keys = [
        key
        for key in dict.fromkeys(key for values in flat_configs for key in values)
        if key not in _RUN_SPECIFIC_KEYS
    ]
    rows = [(key, [values.get(key, MISSING) for values in flat_configs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the values of nested mappings as text, by dotted key."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = printable(format_value(value), 500)
    return flat


@dataclass(frozen=True)
class Overview:
    """A run's row in the table of runs."""

    key: str
    name: str
    directory: str
    experiment: str
    started: str
    """Time of the first launch in the launching machine's time zone; empty if unknown."""
    state: str
    """State of `RunStatus`, or UNREADABLE."""
    step: int = 0
    steps: int = 0
    reward: float | None = None
    """Main metric of the last step: the mean reward, or the loss of an offline run."""
    measure: str = "reward"
    seconds_per_step: float | None = None
    seconds_left: float | None = None
    note: str | None = None
    """Reason for the end of the run, and the command that resumes it; see `RunStatus`."""
    notes: RunNotes = field(default_factory=RunNotes)
    curve: Sparkline | None = None
    """Curve of the main metric; None before the second step."""
    end_reason: str | None = None
    """The launcher's reason of a failure, without the command that resumes the run."""
    failure: Failure | None = None
    """The exception that ended a failed run; None if it is unknown."""

    @property
    def cause(self) -> str:
        """The first cause of a failure, in one line: the exception that ended the run, or the
        reason."""
        if self.failure is not None:
            return self.failure.summary
        return self.end_reason or self.note or ""

    @property
    def consequence(self) -> str:
        """The launcher's reason of a failure, without the exception that precedes it."""
        reason = self.end_reason or ""
        if self.failure is None or not self.failure.user_place:
            return reason
        exception, _, consequence = reason.partition("; then ")
        return consequence if exception.startswith(self.failure.user_place) else reason

    @property
    def instructions(self) -> str:
        """The part of the note after the reason of a failure: how to resume the run."""
        return (self.note or "").removeprefix(f"{self.end_reason}; ")

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, or cannot be read."""
        return self.state in (*ENDED_STATES, UNREADABLE)


class ViewedRun:
    """A run directory with cached data, for any thread.

    The methods raise AlignerError or OSError if a file is damaged or missing.
    """

    def __init__(self, root: Path) -> None:
        self.paths = RunPaths(root)
        self.key = blake2b(str(root).encode(errors="surrogateescape"), digest_size=6).hexdigest()
        self._lock = threading.Lock()
        # The first item of each cache identifies the version of the files; the last item is the
        # data that was read from them.
        self._config: tuple[object, Config] | None = None
        self._settings: tuple[object, tuple[Config, str]] | None = None
        self._overview: tuple[object, Overview] | None = None
        self._curves: tuple[object, RunCurves, frozenset[str]] | None = None
        self._metrics: tuple[int, FileFollower, list[dict[str, float]]] | None = None

    def config(self) -> Config:
        """Return the complete configuration."""
        stamp = file_stamp(self.paths.config)
        if self._config is None or self._config[0] != stamp:
            self._config = stamp, load_config(self.paths.config)
        return self._config[1]

    def metrics(self) -> list[dict[str, float]]:
        """Return the metrics of every step."""
        with self._lock:
            if not self.paths.metrics.exists():
                return []
            size = self.paths.metrics.stat().st_size
            cached = self._metrics
            try:
                # A resumed run truncates the file to its checkpoint: read it from the beginning.
                if cached is None or size < cached[0]:
                    cached = 0, FileFollower(self.paths.metrics), []
                self._metrics = (
                    size,
                    cached[1],
                    merge_records(cached[2], cached[1].read_new_records()),
                )
            # The truncated file may have grown again beyond the read position, which is then in the
            # middle of a line: read the file from the beginning.
            except AlignerError:
                follower = FileFollower(self.paths.metrics)
                self._metrics = size, follower, merge_records([], follower.read_new_records())
            return list(self._metrics[2])

    def curves(self, metrics: Sequence[str]) -> RunCurves:
        """Return the curves of some metrics, with a limited number of points.

        The result may also contain metrics of earlier calls. The call takes milliseconds, and less
        if the file has not changed.
        """
        stamp = file_stamp(self.paths.metrics)
        cached = self._curves
        requested = frozenset(metrics) | (frozenset() if cached is None else cached[2])
        if cached is None or cached[0] != stamp or cached[2] != requested:
            cached = stamp, read_curves(self.paths.metrics, sorted(requested)), requested
            self._curves = cached
        return cached[1]

    def status(self) -> RunStatus:
        """Return the run's status, and query the run's servers and Slurm for it.

        The status of a run of another version of aligner is read from its files only.
        """
        try:
            config = self.config()
            query_services = True
        except AlignerError:
            config = _read_status_settings(self.paths.config)[0]
            query_services = False
        return build_status(
            self.paths,
            config,
            read_newest_metrics(self.paths.metrics),
            query_services=query_services,
        )

    def overview(self) -> Overview:
        """Return the run's row in the table of runs, even if its files are damaged.

        The call takes milliseconds.
        """
        files = (self.paths.config, self.paths.status, self.paths.metrics, self.paths.notes)
        stamp = tuple(map(file_stamp, files))
        # The state of a run that is not over can change without a change of its files.
        if self._overview is None or self._overview[0] != stamp or not self._overview[1].is_over:
            self._overview = stamp, self._read_overview(stamp[0])
        return self._overview[1]

    def _read_overview(self, stamp: object) -> Overview:
        name = self.paths.root.name
        directory = str(self.paths.root)
        try:
            if self._settings is None or self._settings[0] != stamp:
                self._settings = stamp, _read_status_settings(self.paths.config)
            config, started = self._settings[1]
            status = build_status(
                self.paths, config, read_newest_metrics(self.paths.metrics), query_services=False
            )
            notes = read_notes(self.paths.notes)
        except (AlignerError, OSError) as error:
            return Overview(
                self.key, name, directory, "", "", UNREADABLE, note=str(error).splitlines()[0]
            )
        launcher = read_state(self.paths.status)
        end_reason = None
        if launcher is not None and status.state == "failed":
            end_reason = launcher.end_reason
        measure = next(
            (metric for metric in _MAIN_METRICS if metric in status.metrics), "reward/mean"
        )
        return Overview(
            key=self.key,
            name=config.run.name or name,
            directory=directory,
            experiment=config.run.experiment,
            started=started,
            state=status.state,
            step=status.step,
            steps=status.steps,
            reward=status.metrics.get(measure),
            measure=_MAIN_METRICS[measure],
            seconds_per_step=status.seconds_per_step,
            seconds_left=status.seconds_left,
            note=status.note,
            notes=notes,
            curve=build_sparkline(self.curves([measure]).curves.get(measure)),
            end_reason=end_reason,
            failure=None if end_reason is None else find_failure(self.paths, end_reason),
        )


class RunIndex:
    """All runs in and below some directories."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self.directories = tuple(directory.absolute() for directory in directories)
        self._by_root: dict[Path, ViewedRun] = {}
        self._by_key: Mapping[str, ViewedRun] = {}

    def runs(self) -> list[ViewedRun]:
        """Return the runs that exist now."""
        roots = dict.fromkeys(
            root
            for directory in self.directories
            for root in _find_run_directories(directory, _MAX_DEPTH)
        )
        runs = [self._by_root.setdefault(root, ViewedRun(root)) for root in roots]
        self._by_key = {run.key: run for run in runs}
        return runs

    def run(self, key: str) -> ViewedRun | None:
        """Return the run with a key; None if it does not exist any more."""
        if key not in self._by_key:
            self.runs()
        run = self._by_key.get(key)
        return run if run is not None and run.paths.config.is_file() else None


def assign_colors(runs: Sequence[ViewedRun]) -> Mapping[str, str]:
    """Return the color of each run's curves, by the run's key.

    The color depends on the run's directory and on the older runs that prefer the same color, so
    that it stays the same when new runs start and when the viewer restarts.
    """
    by_age = sorted(runs, key=lambda run: (run.overview().started, run.key))
    colors: dict[str, str] = {}
    free_colors: list[str] = []
    for run in by_age:
        # With more runs than colors, each color is used as often as the others.
        free_colors = free_colors or list(LINE_COLORS)
        preferred = int(run.key, 16) % len(LINE_COLORS)
        order = (*LINE_COLORS[preferred:], *LINE_COLORS[:preferred])
        color = next(color for color in order if color in free_colors)
        free_colors.remove(color)
        colors[run.key] = color
    return colors


def _find_run_directories(directory: Path, depth: int) -> Iterator[Path]:
    """Yield the run directories in a directory, at most `depth` levels below it."""
    paths = RunPaths(directory)
    if paths.config.is_file() and any(
        path.exists() for path in (paths.status, paths.metrics, paths.logs, paths.job_script)
    ):
        yield directory
    elif depth:
        try:
            subdirectories = sorted(
                path
                for path in directory.iterdir()
                if not path.name.startswith(".") and path.is_dir()
            )
        except OSError:  # no permission to read the directory
            return
        for subdirectory in subdirectories:
            yield from _find_run_directories(subdirectory, depth - 1)


def _read_status_settings(path: Path) -> tuple[Config, str]:
    """Return a configuration with only the values that a run's status needs, and the launch time.

    The call is 50 times faster than loading the complete configuration.
    """
    try:
        values = yaml.load(
            path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        )
        run_values = values["run"]
        config = Config()
        run = RunConfig(
            **{
                field.name: run_values[field.name]
                for field in fields(RunConfig)
                if field.name in run_values
            }
        )
        kind = values["cluster"]["kind"]
        cluster_values = {"cluster.kind": kind}
        if kind != "local":
            cluster_values[f"cluster.{kind}.requeue"] = values["cluster"][kind]["requeue"]
        cluster = with_values(config, cluster_values).cluster
        algorithm = replace(config.algorithm, trainer=values["algorithm"]["trainer"])
        return (
            replace(config, run=run, cluster=cluster, algorithm=algorithm),
            _format_date(run_values.get("date")),
        )
    except (
        yaml.YAMLError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise AlignerError(f"{path}: not the configuration of a run: {error}") from error


def _format_date(date: Any) -> str:
    return str(date or "").replace("T", " ")[:16]


def file_stamp(path: Path) -> object:
    """Return a value that changes when a file is written; None if the file is missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
