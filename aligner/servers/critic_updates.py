"""The critic's numbered updates, each applied exactly once: the trainer's journal of them, and the
critic's own ledger."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from aligner.data.checksums import (
    DamagedError,
    read_sealed,
    read_sealed_record,
    sealed,
    sealed_record,
)
from aligner.data.claim import writing
from aligner.errors import AlignerError
from aligner.files import write_file

_ATTEMPT_DIGITS = 9
_UPDATE = re.compile(r"update_([0-9]+)\.record")


class SequenceError(AlignerError):
    """A request out of order: older than the last update, beyond the next, another run's, or
    unnumbered."""


@dataclass(frozen=True)
class RunId:
    """A run, and how often it was taken (`aligner.data.claim`) before the trainer that speaks
    did."""

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
    """The trainer's write-ahead log: the updates since the last checkpoints, a file each, written
    before they are sent."""

    def __init__(self, directory: Path) -> None:
        """Makes the directory; removes what an interrupted write left behind."""
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        for file in directory.glob("*.tmp"):
            file.unlink()

    @writing()
    def append(self, number: int, arrays: Mapping[str, NDArray]) -> None:
        """Write update `number`; it is on disk when this returns."""
        write_file(self._file(number), sealed_record(save(dict(arrays))))

    def read(self, number: int) -> dict[str, NDArray]:
        """What `append` wrote. Raises AlignerError where it is missing or damaged."""
        try:
            return load(read_sealed_record(self._file(number)))
        except (OSError, SafetensorError, DamagedError) as error:
            raise AlignerError(
                f"cannot read critic update {number} from {self._file(number)}: {error}"
            ) from error

    def covers(self, first: int, last: int) -> bool:
        """Whether every update from `first` to `last` is there."""
        return all(self._file(number).exists() for number in range(first, last + 1))

    @writing()
    def keep(self, first: int, last: int) -> None:
        """Remove every update outside `first` to `last`."""
        for file in self._directory.iterdir():
            number = _UPDATE.fullmatch(file.name)
            if number is not None and not first <= int(number[1]) <= last:
                # what cannot be removed now is the next time; whatever is asked for is written anew
                with suppress(OSError):
                    file.unlink()

    def _file(self, number: int) -> Path:
        return self._directory / f"update_{number:08d}.record"


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
                f"run_id: got {str(run)!r}, but this critic belongs to run {self.run.name!r};"
                " restart the critic to use it in another run"
            )
        if self.run is not None and run.attempt < self.run.attempt:
            raise SequenceError(
                f"run_id: got {str(run)!r}, but the newer attempt {str(self.run)!r} has taken"
                " over the run; the trainer of the older attempt must exit"
            )

    def is_repeat(self, number: int) -> bool:
        """Whether the update is the last one again; false when it is the next one. Raises
        SequenceError otherwise."""
        if number not in (self.last, self.last + 1):
            problem = (
                "updates must not be skipped"
                if number > self.last
                else "this update was already applied and its result is no longer stored"
            )
            raise SequenceError(
                f"sequence_number: got {number}; {problem}; allowed: {self.last + 1}, or"
                f" {self.last} (repeated)"
            )
        return number == self.last

    def check_follows(self, number: int) -> None:
        """Raise SequenceError unless `number` is the last update, which a request for values or a
        checkpoint is to follow."""
        if number != self.last:
            raise SequenceError(
                f"sequence_number: the request must follow update {number}, but the last update is"
                f" {self.last}"
            )

    def record(self, number: int, result: dict[str, float]) -> None:
        """Note that an update has been applied."""
        self.last, self.result = number, result

    def save(self, path: Path) -> None:
        """Write as JSON, atomically; which trainer it was is no part of the critic's state."""
        state = {**asdict(self), "run": None if self.run is None else self.run.name}
        write_file(path, sealed(json.dumps(state) + "\n"))

    @staticmethod
    def load(path: Path) -> "UpdateLedger":
        """Read what `save` wrote. Raises AlignerError when there is nothing to read."""
        try:
            state = read_sealed(path)
        except DamagedError as error:
            raise AlignerError(f"cannot read the critic's update ledger: {error}") from error
        return UpdateLedger(
            None if state["run"] is None else RunId(state["run"]), state["last"], state["result"]
        )
