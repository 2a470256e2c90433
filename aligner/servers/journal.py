"""The trainer's record, on disk, of the critic's updates since its last checkpoints: a write-ahead log to replay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from aligner.errors import AlignerError
from aligner.files import write_file

_PREFIX, _SUFFIX = "update_", ".safetensors"


class UpdateJournal:
    """Numbered updates, one file each, in a directory of the run. An update is written before it is sent."""

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
