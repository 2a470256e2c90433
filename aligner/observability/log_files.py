"""The logs of a run's processes: their size limits, and their readers.

Ranks and their child processes write directly to their log, so that the log contains all output
however a process ends. The limit is therefore enforced from outside: `LogLimit.enforce` drops the
older half of a log that is too long, in place, while its processes continue to append to it. The
first line of such a log says how much was dropped.

Positions in the output of a log, such as `launcher.ranks.Rank.log_start`, count all bytes that were
ever written to the log, so that they stay valid when output is dropped.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from aligner.files import read_newer_half
from aligner.observability.logs import extract_text_lines, format_launcher_line
from aligner.paths import get_run_paths
from aligner.schema import Config

# Number of dropped bytes in the first line of a shortened log.
_DROPPED_BYTES = re.compile(rb"\b(\d+) bytes of older output were dropped\b")
_MAX_HEADER_BYTES = 1024


@dataclass(frozen=True)
class LogLimit:
    """Maximum size of each log of a run."""

    directory: Path
    """Directory of the logs, which need not exist yet."""
    max_mib: int
    """Maximum size of a log in MiB."""
    format: str
    """`text` or `json`: format of the first line of a shortened log."""

    @staticmethod
    def from_config(config: Config) -> "LogLimit":
        """Return the limit that a run's configuration sets."""
        settings = config.logging
        return LogLimit(get_run_paths(config).logs, settings.file_mib, settings.format)

    def enforce(self) -> None:
        """Drop the older half of each log that exceeds the limit.

        Output that is written while the last bytes of a log are copied may be lost, too. It is not
        included in the number of dropped bytes.
        """
        for file in self._find_logs():
            # OSError: the log was deleted, or its disk fails. The limit must not end its caller.
            with contextlib.suppress(OSError):
                self._shorten(file)

    def _find_logs(self) -> Iterator[Path]:
        """Yield the logs that exceed the limit."""
        with contextlib.suppress(OSError), os.scandir(self.directory) as entries:
            for entry in entries:
                # Slurm appends to its own files through descriptors of its own, whose positions do
                # not follow a shortened file.
                if (
                    entry.name.endswith(".log")
                    and not entry.name.startswith(("srun-", "job-"))
                    and entry.is_file(follow_symlinks=False)
                    and entry.stat(follow_symlinks=False).st_size > self.max_mib << 20
                ):
                    yield Path(entry.path)

    def _shorten(self, log: Path) -> None:
        """Replace a log by a line about the dropped output, and the newer half."""
        limit = self.max_mib << 20
        with log.open("r+b") as file:
            header_size, dropped_bytes = _read_header(file)
            newer = read_newer_half(file, limit)
            if newer is None:
                return
            end = file.tell()
            if not newer:  # the last line is longer than half of the limit
                file.seek(end - limit // 2)
                newer = file.read(limit // 2)
            dropped_bytes += end - header_size - len(newer)

            file.seek(0)
            file.write(self._build_header(log, dropped_bytes) + newer)
            # Keep the lines that were appended in the meantime, too. Do not read to the end of the
            # file, because a process may write faster than this one reads.
            new_end = file.tell()
            file.seek(end)
            appended = file.read(limit)
            file.seek(new_end)
            file.write(appended)
            file.truncate()

    def _build_header(self, log: Path, dropped_bytes: int) -> bytes:
        message = (
            f"at least {dropped_bytes} bytes of older output were dropped, because this log"
            f" exceeded logging.file_mib={self.max_mib}"
        )
        role, _, rank = log.stem.rpartition("-")
        if not rank.isdecimal():  # the log of a Triton server, which has no rank
            return f"--- {message} ---\n".encode()
        return format_launcher_line(self.format, role, int(rank), message).encode()


def count_output_bytes(log: Path) -> int:
    """Return the number of bytes that were ever written to a log, including dropped bytes."""
    with log.open("rb") as file:
        header_size, dropped_bytes = _read_header(file)
        return dropped_bytes + file.seek(0, os.SEEK_END) - header_size


def find_output_position(file: BinaryIO, output_bytes: int) -> int:
    """Return the position in the file of a log at which output begins.

    Args:
        file: The open log.
        output_bytes: Number of bytes that were written to the log before this output.

    Returns:
        The position; that of the oldest output that is still in the log if this output was dropped.
    """
    header_size, dropped_bytes = _read_header(file)
    position = header_size + max(0, output_bytes - dropped_bytes)
    # Output that was counted before may have been lost while the log was shortened.
    return min(position, file.seek(0, os.SEEK_END))


class LogFollower:
    """Reader of the lines that the ranks of a run append to their logs."""

    def __init__(self, directory: Path) -> None:
        """Follow the logs of a directory. Lines of an earlier launch are skipped.

        Args:
            directory: Directory of the logs, which need not exist yet.
        """
        self._directory = directory
        self._read_bytes = {file: count_output_bytes(file) for file in self._find_logs()}

    def read_new_lines(self) -> list[tuple[str, str]]:
        """Return the name of the role and rank, and the text, of each line that was completed since
        the last call."""
        new_lines = []
        for file in self._find_logs():
            with file.open("rb") as content:
                start = find_output_position(content, self._read_bytes.get(file, 0))
                header_size, dropped_bytes = _read_header(content)
                content.seek(start)
                block = content.read()
            complete = block[: block.rfind(b"\n") + 1]
            self._read_bytes[file] = dropped_bytes + start - header_size + len(complete)
            lines = extract_text_lines(complete.decode(errors="replace").splitlines())
            new_lines += [(file.stem, line) for line in lines]
        return new_lines

    def _find_logs(self) -> list[Path]:
        return [
            file
            for file in sorted(self._directory.glob("*-*.log"))
            # Triton's logs are long, and srun's files belong to no rank.
            if file.stem.rpartition("-")[2].isdecimal()
            and not file.name.startswith(("srun-", "job-"))
        ]


def _read_header(file: BinaryIO) -> tuple[int, int]:
    """Return the size in bytes of the line about dropped output at the beginning of a log, and the
    number of dropped bytes; zeros for a log that was never shortened."""
    file.seek(0)
    line = file.readline(_MAX_HEADER_BYTES)
    match = _DROPPED_BYTES.search(line)
    return (0, 0) if match is None else (len(line), int(match[1]))
