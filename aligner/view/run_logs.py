"""Logs of a run's processes: their last lines, the problems in them, and the exception that ended
the run."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from aligner.masking import mask_secrets
from aligner.observability.logs import ERROR_PREFIX, extract_text_lines
from aligner.observability.user_errors import UserErrorFollower
from aligner.paths import RunPaths
from aligner.view.shown_text import MAX_LINE_LENGTH, printable

_TRACEBACK = "Traceback (most recent"
# Size of the displayed end of a log, in bytes.
_LOG_BYTES = 200_000
# Texts that mark a line of a log as an error or a warning.
_PROBLEM_MARKS = {
    ERROR_PREFIX: "error",
    _TRACEBACK: "error",
    "ERROR": "error",
    "WARNING": "warning",
    "Warning:": "warning",
}
# ANSI escape sequences of colors.
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
# Parts of lines that Triton's processes print in every healthy run.
_HARMLESS_MARKS = ("resource_tracker", "--strict-model-config")
# Maximum length of an exception's message that the launcher's reason is searched for. The launcher
# shortens long reasons.
_MAX_SEARCHED_LENGTH = 100
# A frame of a traceback: file, line number and function.
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
Line = tuple[str, str]
"""Kind of a line (`error`, `warning` or empty), and its text."""


@dataclass(frozen=True)
class Failure:
    """The exception that ended a run."""

    file: str
    """Name of the log."""
    exception: str
    """Last line of the traceback: the type and the message."""
    traceback: str
    """All lines of the traceback."""
    user_place: str = ""
    """Type of the exception, and the line of the user's code that raised it, such as
    "ValueError in my_reward.py:12"; empty if the run recorded no exception of the user's code."""

    @property
    def summary(self) -> str:
        """The exception with the file and the line that raised it, in one line."""
        kind, separator, message = self.exception.partition(": ")
        if self.user_place:
            return f"{self.user_place}{separator}{message}"
        frame = self._find_frame()
        if frame is None:
            return self.exception
        return f"{kind} in {Path(frame[0]).name}:{frame[1]}{separator}{message}"

    @property
    def location(self) -> str:
        """File, line and function that raised the exception, as `FILE:LINE in FUNCTION`."""
        frame = self._find_frame()
        return "{}:{} in {}".format(*frame) if frame is not None else self.file

    def _find_frame(self) -> tuple[str, str, str] | None:
        """Return the file, line and function that raised the exception: the innermost frame of the
        user's code if it is known, otherwise the innermost frame."""
        frames = _FRAME.findall(self.traceback)
        user_frames = [
            frame
            for frame in frames
            if self.user_place.endswith(f" in {Path(frame[0]).name}:{frame[1]}")
        ]
        return next(reversed(user_frames or frames), None)


def list_log_files(directory: Path) -> list[Path]:
    """Return the logs of a run's processes, the trainer's first; symbolic links are omitted."""
    if not directory.is_dir():
        return []
    files = [
        file
        for file in directory.iterdir()
        if file.suffix == ".log" and file.is_file() and not file.is_symlink()
    ]
    return sorted(files, key=lambda file: (not file.name.startswith("trainer"), file.name))


def read_log_end(file: Path) -> tuple[list[Line], int]:
    """Return the last lines of a log.

    Returns:
        The kind ("error", "warning" or an empty string) and the text of each line, and the number
        of bytes before the first line.
    """
    with file.open("rb") as content:
        size = content.seek(0, os.SEEK_END)
        content.seek(max(0, size - _LOG_BYTES))
        skipped_bytes = content.tell()
        text = content.read(_LOG_BYTES).decode(errors="replace")
    # Libraries and child processes write directly to a log, where nothing masks their secrets.
    text = mask_secrets(_COLORS.sub("", text))
    # A progress bar overwrites its line with carriage returns: only its last state remains.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    shown_lines: list[Line] = []
    # The first line of a partly read file is incomplete.
    for line in lines[1:] if skipped_bytes else lines:
        # The level is at the beginning of a line of a text log, which is not shown.
        level_kind = "" if line.startswith("{") else _classify_line(line)
        shown_lines += [
            (_classify_line(text) or level_kind, printable(text, MAX_LINE_LENGTH))
            for text in extract_text_lines([line])
        ]
    return shown_lines, skipped_bytes


def find_log_problems(directory: Path) -> list[tuple[str, str, str, int]]:
    """Return the errors and warnings at the ends of a run's logs, errors first.

    Each entry consists of the file's name, the kind, the line and its number of occurrences. For a
    traceback, the line is the last line of the traceback, which contains the exception.
    """
    counts: Counter[tuple[str, str, str]] = Counter()
    for file in list_log_files(directory):
        lines = read_log_end(file)[0]
        for index, (kind, line) in enumerate(lines):
            if _TRACEBACK in line:
                line = next(
                    (text for _, text in lines[index + 1 :] if text and not text.startswith(" ")),
                    line,
                )
            if kind:
                counts[file.name, kind, line] += 1
    return sorted(
        ((*problem, count) for problem, count in counts.items()),
        key=lambda entry: entry[1] != "error",
    )


def _classify_line(line: str) -> str:
    """Return "error", "warning" or an empty string for a line of a log."""
    return (
        ""
        if any(mark in line for mark in _HARMLESS_MARKS)
        else next((kind for mark, kind in _PROBLEM_MARKS.items() if mark in line), "")
    )


def find_failure(paths: RunPaths, reason: str) -> Failure | None:
    """Return the exception that ended a run; None if neither the recorded exceptions of the user's
    code nor the logs contain it.

    Args:
        paths: The paths of the run.
        reason: The launcher's reason for the end of the run, which quotes the exception.
    """
    user_errors = UserErrorFollower(paths).read_new_errors()
    causes = [error for error in user_errors if error.traceback and error.place in reason]
    if causes:
        cause = causes[-1]
        traceback = printable(cause.traceback or "")
        exception = f"{cause.place.partition(' in ')[0]}: {printable(cause.message)}"
        return Failure(cause.log.name, exception.removesuffix(": "), traceback, cause.place)

    failures = [
        Failure(file.name, lines[-1], "\n".join(lines))
        for file in list_log_files(paths.logs)
        for lines in _find_tracebacks(read_log_end(file)[0])
    ]
    matches = [failure for failure in failures if _is_quoted(failure.exception, reason)]
    # The traceback of the user's code has the innermost frames: an outer process repeats the
    # message of an exception in an exception of its own.
    return max(matches, key=lambda failure: failure.traceback.count("\n"), default=None)


def _is_quoted(exception: str, reason: str) -> bool:
    """Return whether a reason contains an exception's message, or its type if it has no message."""
    kind, _, message = exception.partition(": ")
    return (message or kind)[:_MAX_SEARCHED_LENGTH] in reason


def _find_tracebacks(lines: Sequence[Line]) -> Iterator[list[str]]:
    """Yield the lines of each traceback, from its first line to the line with the exception."""
    for index, (_, line) in enumerate(lines):
        if line.startswith(_TRACEBACK):
            end = next(
                (
                    number
                    for number in range(index + 1, len(lines))
                    if lines[number][1] and not lines[number][1].startswith(" ")
                ),
                None,
            )
            if end is not None:
                yield [text for _, text in lines[index : end + 1]]
