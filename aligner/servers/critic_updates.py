"""The critic's numbered updates, each applied exactly once: the trainer's journal of them, and the critic's own ledger."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from aligner.errors import AlignerError
from aligner.files import write_file

_ATTEMPT_DIGITS = 9
_PREFIX, _SUFFIX = "update_", ".safetensors"


class SequenceError(AlignerError):
    """A request out of order: older than the last update, beyond the next, another run's, or unnumbered."""


@dataclass(frozen=True)
class RunId:
    """A run, and how many trainers have worked on it before the one that speaks."""

    name: str
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.name}@{self.attempt}"

    @staticmethod
    def parse(text: str) -> "RunId":
        """Read `name@attempt`; a name alone is its first attempt."""
        name, mark, attempt = text.rpartition("@")
        counted = mark and attempt.isdecimal() and len(attempt) <= _ATTEMPT_DIGITS
        return RunId(name, int(attempt)) if counted else RunId(text)


@dataclass(frozen=True)
class CriticState:
    """A state of the critic that can be had again: that of a checkpoint, or the initial one."""

    step: int | None
    """The run's checkpoint; None is the critic as it starts."""
    updates: int
    """Updates applied by then."""


INITIAL = CriticState(None, 0)


class UpdateJournal:
    """The trainer's write-ahead log: the updates since the last checkpoints, a file each, written before they are sent."""

    def __init__(self, directory: Path) -> None:
        """Makes the directory; removes what an interrupted write left behind."""
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        for file in directory.glob("*.tmp"):
            file.unlink()
        self.attempt = self._next_attempt()
        """How many trainers have worked on this run directory before this one."""

    def append(self, number: int, arrays: Mapping[str, NDArray]) -> None:
        """Write update `number`; it is on disk when this returns."""
        write_file(self._file(number), save(dict(arrays)))

    def read(self, number: int) -> dict[str, NDArray]:
        """What `append` wrote. Raises AlignerError where it is missing or damaged."""
        try:
            return load_file(self._file(number))
        except (OSError, SafetensorError) as error:
            raise AlignerError(f"cannot read the critic's update {number} from {self._file(number)}: {error}") from error

    def covers(self, first: int, last: int) -> bool:
        """Whether every update from `first` to `last` is there."""
        return all(self._file(number).exists() for number in range(first, last + 1))

    def keep(self, first: int, last: int) -> None:
        """Remove every update outside `first` to `last`."""
        for file in self._directory.glob(f"{_PREFIX}*{_SUFFIX}"):
            if not first <= int(file.name[len(_PREFIX) : -len(_SUFFIX)]) <= last:
                file.unlink()

    def _file(self, number: int) -> Path:
        return self._directory / f"{_PREFIX}{number:08d}{_SUFFIX}"

    def _next_attempt(self) -> int:
        file = self._directory / "attempt"
        try:
            attempt = int(file.read_text()) + 1 if file.exists() else 0
        except ValueError as error:
            raise AlignerError(f"{file}: got {file.read_text()[:80]!r}, must be the number of the last attempt") from error
        write_file(file, f"{attempt}\n")
        return attempt


@dataclass
class UpdateLedger:
    """The critic's record: the last numbered update of a run and its result."""

    run: RunId | None = None
    """The newest trainer that was heard; an older one, and another run's, is refused."""
    last: int = -1
    result: dict[str, float] | None = None

    def check_run(self, run: RunId) -> None:
        """Raise SequenceError for another run's trainer, and for one that a newer has replaced."""
        if self.run is not None and run.name != self.run.name:
            raise SequenceError(
                f"run_id: got {str(run)!r}, but this critic serves run {self.run.name!r}; restart it for another run"
            )
        if self.run is not None and run.attempt < self.run.attempt:
            raise SequenceError(f"run_id: got {str(run)!r}, but {str(self.run)!r} has taken over; this trainer must end")

    def is_repeat(self, number: int) -> bool:
        """Whether the update is the last one again; false when it is the next one. Raises SequenceError otherwise."""
        if number not in (self.last, self.last + 1):
            kind = "a gap" if number > self.last else "already applied, its result no longer kept"
            raise SequenceError(f"sequence_number: got {number}, {kind}; allowed: {self.last + 1}, or {self.last} again")
        return number == self.last

    def check_follows(self, number: int) -> None:
        """Raise SequenceError unless `number` is the last update, which a request for values or a checkpoint is to follow."""
        if number != self.last:
            raise SequenceError(f"sequence_number: the request is to follow update {number}; the last is {self.last}")

    def record(self, number: int, result: dict[str, float]) -> None:
        """Note that an update has been applied."""
        self.last, self.result = number, result

    def save(self, path: Path) -> None:
        """Write as JSON, atomically; which trainer it was is no part of the critic's state."""
        state = {**asdict(self), "run": None if self.run is None else self.run.name}
        write_file(path, json.dumps(state) + "\n")

    @staticmethod
    def load(path: Path) -> "UpdateLedger":
        """Read what `save` wrote. Raises AlignerError when there is nothing to read."""
        try:
            state = json.loads(path.read_text())
            return UpdateLedger(None if state["run"] is None else RunId(state["run"]), state["last"], state["result"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise AlignerError(f"cannot read the critic's update ledger {path}: {error}") from error
