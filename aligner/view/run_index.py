"""The runs below some directories, each read as far as it has grown since the last look."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import yaml

from aligner.config.compose import load_config
from aligner.errors import AlignerError
from aligner.launcher.status import OVER, RunStatus, status_of
from aligner.observability.metrics import FileFollower, read_newest_metrics, with_records
from aligner.paths import RunPaths
from aligner.schema import Config, RunConfig

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
