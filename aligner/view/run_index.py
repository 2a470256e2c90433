"""The runs below some directories, each read as far as it has grown since the last look."""

import os
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import yaml

from aligner.config.compose import load_config
from aligner.errors import AlignerError
from aligner.launcher.status import OVER, RunStatus, status_of
from aligner.observability.console import WINDOW, suite_metrics, window_mean
from aligner.observability.logs import REPORTED, text_lines
from aligner.observability.metrics import FileFollower, read_newest_metrics, with_records
from aligner.paths import RunPaths
from aligner.schema import Config, RunConfig
from aligner.schema.conditions import value_text
from aligner.schema.keys import shown
from aligner.view.shown_text import LONGEST_LINE, printable

_BEFORE_AND_AFTER = {
    "reward/mean": ("reward", "{:.3f}"),
    **{f"{trainer}/loss": ("loss", "{:.3f}") for trainer in ("sft", "dpo", "reward_model")},
    **{f"{trainer}/accuracy": ("accuracy", "{:.3f}") for trainer in ("dpo", "reward_model")},
    "kl/reference": ("KL to reference (nats)", "{:.3f}"),
    "response/length": ("response tokens", "{:.1f}"),
}
_EVALUATED = {
    "eval/pass@1": "pass@1",
    "eval/win_rate": "win rate",
    "eval/score": "evaluation score",
    "eval/loss": "held-out loss",
}
NONE = "\N{EN DASH}"
"""Where there is no value."""
_LEFT_OUT = ("skipped", "lost", "failed")
_OWN = ("run.dir", "run.name", "run.date", "run.command", "run.resume", "run.chosen")
"""Keys that differ between any two runs, and the list of those that were chosen."""
_LOG_BYTES = 200_000
_SIGNS = {
    REPORTED: "error",
    "Traceback (most recent": "error",
    "ERROR": "error",
    "WARNING": "warning",
    "Warning:": "warning",
}
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_NO_SIGNS = ("resource_tracker", "--strict-model-config")
"""Parts of lines that Triton's processes print in every run that is well."""


def key_figures(metrics: Sequence[Mapping[str, float]]) -> list[tuple[str, str, str]]:
    """What the run comes to so far: a label, a value and what is to be said beside it."""
    steps = [record for record in metrics if record["step"] > 0]
    first, last = steps[:WINDOW], steps[-WINDOW:]
    found = []
    for key, (label, form) in _BEFORE_AND_AFTER.items():
        before, after = window_mean(first, key), window_mean(last, key)
        if before is not None and after is not None:
            found.append((label, form.format(after), f"from {form.format(before)}"))
    of_suites = {
        key.replace("/", f"/{name}/", 1): f"{name}: {_EVALUATED[key]}"
        for record in metrics
        for name, key, _ in suite_metrics(record)
        if key in _EVALUATED
    }
    for key, label in {**_EVALUATED, **of_suites}.items():
        if evaluated := [record for record in metrics if key in record]:
            then, now = evaluated[0], evaluated[-1]
            found.append((label, f"{now[key]:.3f}", f"from {then[key]:.3f}"))
    if (seconds := window_mean(last, "time/step")) is not None:
        total = sum(record.get("time/step", 0.0) for record in steps)
        found.append(("seconds per step", f"{seconds:.2f}", f"{total:,.0f} s in total"))
    if (rate := window_mean(last, "throughput/tokens_per_s")) is not None:
        found.append(("tokens per second", f"{rate:,.0f}", f"last {len(last)} steps"))
    if mismatches := [
        record["mismatch/logprob_abs"] for record in steps if "mismatch/logprob_abs" in record
    ]:
        found.append(
            ("largest mismatch", f"{max(mismatches):.1e}", "nats, engine vs. trainer log-probs")
        )
    return found


def left_out(metrics: Sequence[Mapping[str, float]]) -> list[tuple[str, float]]:
    """What was skipped, lost or failed over the whole run: metrics and their sums, but for those
    that are sums or shares."""
    names = dict.fromkeys(
        key for record in metrics for key in record if any(sign in key for sign in _LEFT_OUT)
    )
    counted = [name for name in names if not name.endswith(("_total", "_fraction"))]
    return [(name, sum(record.get(name, 0.0) for record in metrics)) for name in counted]


def differences(configs: Mapping[str, Config]) -> list[tuple[str, list[str]]]:
    """Keys in which some configurations differ, and the value of each; what differs between any two
    runs is left out."""
    flat = [_flat(shown(config)) for config in configs.values()]
    keys = [
        key for key in dict.fromkeys(key for values in flat for key in values) if key not in _OWN
    ]
    rows = [(key, [values.get(key, NONE) for values in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def log_files(directory: Path) -> list[Path]:
    """What the run's processes print, the trainer's first; links are not followed."""
    if not directory.is_dir():
        return []
    files = [
        file
        for file in directory.iterdir()
        if file.suffix == ".log" and file.is_file() and not file.is_symlink()
    ]
    return sorted(files, key=lambda file: (not file.name.startswith("trainer"), file.name))


def log_end(file: Path) -> tuple[list[tuple[str, str]], int]:
    """The last lines of a log, each with error, warning or nothing for its kind, and how many bytes
    come before them."""
    with file.open("rb") as content:
        size = content.seek(0, os.SEEK_END)
        content.seek(max(0, size - _LOG_BYTES))
        before, text = content.tell(), content.read(_LOG_BYTES).decode(errors="replace")
    text = _COLORS.sub("", text)
    # Progress is drawn over itself: of such a line the last state.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    return [
        (_kind(line), printable(line, LONGEST_LINE))
        for line in text_lines(lines[1:] if before else lines)
    ], before


def log_trouble(directory: Path) -> list[tuple[str, str, str, int]]:
    """What the ends of a run's logs complain of, errors first: a file's name, the kind, the line
    and how often it is there.

    Of a traceback the line is its last, which says what was raised.
    """
    counts: Counter[tuple[str, str, str]] = Counter()
    for file in log_files(directory):
        lines = log_end(file)[0]
        for place, (kind, line) in enumerate(lines):
            if "Traceback (most recent" in line:
                line = next(
                    (text for _, text in lines[place + 1 :] if text and not text.startswith(" ")),
                    line,
                )
            if kind:
                counts[file.name, kind, line] += 1
    return sorted(
        ((*what, count) for what, count in counts.items()), key=lambda entry: entry[1] != "error"
    )


def _kind(line: str) -> str:
    return (
        ""
        if any(sign in line for sign in _NO_SIGNS)
        else next((kind for sign, kind in _SIGNS.items() if sign in line), "")
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = printable(value_text(value), 500)
    return found


UNREADABLE = "unreadable"
"""The state of a run whose files are damaged."""
_DEPTH = 3
_MAIN = {
    "reward/mean": "reward",
    "sft/loss": "loss",
    "dpo/loss": "loss",
    "reward_model/loss": "loss",
}


@dataclass(frozen=True)
class Overview:
    """A run's line in a table of many."""

    key: str
    name: str
    directory: str
    experiment: str
    started: str
    """When it was launched first, in the launching machine's time; empty where that is not known.
    """
    state: str
    """As of `RunStatus`, or UNREADABLE."""
    step: int = 0
    steps: int = 0
    reward: float | None = None
    """The last step's mean reward; of an offline run its loss."""
    measure: str = "reward"
    seconds_per_step: float | None = None
    seconds_left: float | None = None
    note: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come of it."""
        return self.state in (*OVER, UNREADABLE)


class ViewedRun:
    """A run directory, from any thread. What is read raises AlignerError or OSError where a file is
    damaged or gone."""

    def __init__(self, root: Path) -> None:
        self.paths = RunPaths(root)
        self.key = blake2b(str(root).encode(errors="surrogateescape"), digest_size=6).hexdigest()
        self._lock = threading.Lock()
        self._config: tuple[object, Config] | None = None
        self._settings: tuple[object, tuple[Config, str]] | None = None
        self._overview: tuple[object, Overview] | None = None
        self._metrics: tuple[int, FileFollower, list[dict[str, float]]] | None = None

    def config(self) -> Config:
        """The whole configuration."""
        stamp = stamp_of(self.paths.config)
        if self._config is None or self._config[0] != stamp:
            self._config = stamp, load_config(self.paths.config)
        return self._config[1]

    def metrics(self) -> list[dict[str, float]]:
        """Every step's."""
        with self._lock:
            if not self.paths.metrics.exists():
                return []
            size, read = self.paths.metrics.stat().st_size, self._metrics
            try:
                # a run that goes on from a checkpoint cuts the file back to it
                if read is None or size < read[0]:
                    read = 0, FileFollower(self.paths.metrics), []
                self._metrics = size, read[1], with_records(read[2], read[1].new_records())
            # by now it may be longer again, and where it was read to in the middle of a line
            except AlignerError:
                follower = FileFollower(self.paths.metrics)
                self._metrics = size, follower, with_records([], follower.new_records())
            return list(self._metrics[2])

    def status(self) -> RunStatus:
        """How it is, as its servers and Slurm answer; of a run of another version of aligner as its
        files say."""
        try:
            config, asking = self.config(), True
        except AlignerError:
            config, asking = _settings(self.paths.config)[0], False
        return status_of(self.paths, config, read_newest_metrics(self.paths.metrics), asking=asking)

    def overview(self) -> Overview:
        """Its line, in milliseconds, also where its files are damaged."""
        files = (self.paths.config, self.paths.status, self.paths.metrics)
        stamp = tuple(map(stamp_of, files))
        if self._overview is None or self._overview[0] != stamp or not self._overview[1].is_over:
            self._overview = stamp, self._read_overview(stamp[0])
        return self._overview[1]

    def _read_overview(self, stamp: object) -> Overview:
        name, directory = self.paths.root.name, str(self.paths.root)
        try:
            if self._settings is None or self._settings[0] != stamp:
                self._settings = stamp, _settings(self.paths.config)
            config, started = self._settings[1]
            now = status_of(
                self.paths, config, read_newest_metrics(self.paths.metrics), asking=False
            )
        except (AlignerError, OSError) as error:
            return Overview(
                self.key, name, directory, "", "", UNREADABLE, note=str(error).splitlines()[0]
            )
        measure = next((metric for metric in _MAIN if metric in now.metrics), "reward/mean")
        return Overview(
            key=self.key,
            name=config.run.name or name,
            directory=directory,
            experiment=config.run.experiment,
            started=started,
            state=now.state,
            step=now.step,
            steps=now.steps,
            reward=now.metrics.get(measure),
            measure=_MAIN[measure],
            seconds_per_step=now.seconds_per_step,
            seconds_left=now.seconds_left,
            note=now.note,
        )


class RunIndex:
    """All runs below some directories, themselves included."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self.directories = tuple(directory.absolute() for directory in directories)
        self._known: dict[Path, ViewedRun] = {}
        self._by_key: Mapping[str, ViewedRun] = {}

    def runs(self) -> list[ViewedRun]:
        """Those that are there now."""
        roots = dict.fromkeys(
            root for directory in self.directories for root in _run_directories(directory, _DEPTH)
        )
        found = [self._known.setdefault(root, ViewedRun(root)) for root in roots]
        self._by_key = {run.key: run for run in found}
        return found

    def run(self, key: str) -> ViewedRun | None:
        """The run of a key; None where there is none any more."""
        if key not in self._by_key:
            self.runs()
        run = self._by_key.get(key)
        return run if run is not None and run.paths.config.is_file() else None


def _run_directories(directory: Path, depth: int) -> Iterator[Path]:
    paths = RunPaths(directory)
    if paths.config.is_file() and any(
        path.exists() for path in (paths.status, paths.metrics, paths.logs, paths.job_script)
    ):
        yield directory
    elif depth:
        try:
            below = sorted(
                path
                for path in directory.iterdir()
                if not path.name.startswith(".") and path.is_dir()
            )
        except OSError:  # nobody else's is ours to read
            return
        for each in below:
            yield from _run_directories(each, depth - 1)


def _settings(path: Path) -> tuple[Config, str]:
    """Of a configuration what a run's status asks for, at a fiftieth of the time of all, and when
    the run was launched."""
    try:
        values = yaml.load(
            path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        )
        own, config = values["run"], Config()
        run = RunConfig(
            **{field.name: own[field.name] for field in fields(RunConfig) if field.name in own}
        )
        slurm = replace(config.cluster.slurm, requeue=values["cluster"]["slurm"]["requeue"])
        cluster = replace(config.cluster, kind=values["cluster"]["kind"], slurm=slurm)
        algorithm = replace(config.algorithm, trainer=values["algorithm"]["trainer"])
        return replace(config, run=run, cluster=cluster, algorithm=algorithm), _time(
            own.get("date")
        )
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise AlignerError(f"{path}: not the configuration of a run: {error}") from error


def _time(date: Any) -> str:
    return str(date or "").replace("T", " ")[:16]


def stamp_of(path: Path) -> object:
    """What differs where a file has been written to; None where there is none."""
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_size, about.st_ino
