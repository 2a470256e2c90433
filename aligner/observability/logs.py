"""Log output of a rank: lines of text or, with `logging.format=json`, one JSON object per line."""

import json
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any, TextIO, cast

from aligner.file_limits import parse_json
from aligner.masking import mask_secrets

ERROR_PREFIX = "aligner: error:"
"""Beginning of the line in which a rank reports the error that ends it."""
NOTE_PREFIX = "aligner: note:"
"""Beginning of a note that the launcher shows on the terminal."""
# Time, level, role and rank at the beginning of a line of a text log.
_TEXT_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [A-Z]+ \S+ \d+: ")

_log = logging.getLogger("aligner")


def configure_logs(format: str, role: str, rank: int | None = None) -> None:
    """Configure Python's logging in the process of a rank.

    Records of all loggers, warnings and printed lines become lines with time, level, role and rank,
    or JSON objects. Records of libraries below WARNING are omitted. Output that other processes or
    C++ libraries write directly to the file keeps its own format.

    Args:
        format: `text` or `json`.
        role: The role of the process.
        rank: The rank in the role; default is the environment variable RANK.
    """
    handler = _Handler(sys.stdout)
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    _log.setLevel(logging.INFO)
    is_text = format == "text"
    handler.setFormatter(_TextFormatter(role, rank) if is_text else _JsonFormatter(role, rank))
    # Some libraries log many records below WARNING, and expect the application to filter them.
    handler.addFilter(_is_own_or_warning)
    logging.getLogger().handlers = [handler]
    logging.captureWarnings(True)
    sys.stdout = cast(TextIO, _LoggedStream(sys.stdout, "stdout", logging.INFO))
    # Progress bars and notes of libraries are on standard error, too. In a text log, they are not
    # marked as warnings.
    error_level = logging.INFO if is_text else logging.WARNING
    sys.stderr = cast(TextIO, _LoggedStream(sys.stderr, "stderr", error_level))


def set_log_step(step: int) -> None:
    """Set the training step of all following JSON log records of this process."""
    for formatter in _json_formatters():
        formatter.step = step


def log_failure(error: BaseException, message: str | None) -> bool:
    """Log the error that ends this process, if `configure_logs` was called.

    Args:
        error: The error that ends the process.
        message: The message to log; None logs the error with its traceback.

    Returns:
        Whether the failure was logged.
    """
    if not any(isinstance(handler, _Handler) for handler in logging.getLogger().handlers):
        return False
    if not _json_formatters():
        text = "".join(traceback.format_exception(error)) if message is None else message
        prefix = "" if message is None else f"{ERROR_PREFIX} "
        _log.critical("%s%s", prefix, text.rstrip())
    elif message is None:
        _log.critical("%s: %s", type(error).__name__, error, exc_info=error)
    else:
        _log.error("%s %s", ERROR_PREFIX, message)
    return True


def format_launcher_line(format: str, role: str, rank: int, message: str) -> str:
    """Return a line that the launcher appends to a rank's log, in the format of the rank's
    lines."""
    is_text = format == "text"
    text = f"--- {message} ---" if is_text else message
    record = logging.LogRecord("aligner.launcher", logging.INFO, "", 0, text, None, None)
    formatter = _TextFormatter(role, rank) if is_text else _JsonFormatter(role, rank)
    return formatter.format(record) + "\n"


def extract_text_lines(lines: list[str]) -> list[str]:
    """Return the lines of a log as text, without time, level, role and rank.

    A JSON object becomes its message, preceded by the lines of its traceback if it has one.
    """
    text_lines = []
    for line in lines:
        line = _TEXT_PREFIX.sub("", line)
        try:
            record = parse_json(line) if line.startswith("{") else None
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("message"), str):
            line = f"{record.get('traceback', '')}\n{record['message']}".strip("\n")
        text_lines += line.splitlines() or [""]
    return text_lines


class _TextFormatter(logging.Formatter):
    """Formatter of lines such as "2026-11-29 06:46:34 INFO trainer 0: message".

    Each line of a message of several lines, such as a traceback, has the time, level, role and
    rank.
    """

    def __init__(self, role: str, rank: int) -> None:
        super().__init__(datefmt="%Y-%m-%d %H:%M:%S")
        self._process_name = f"{role} {rank}"

    def format(self, record: logging.LogRecord) -> str:
        time = self.formatTime(record, self.datefmt)
        prefix = f"{time} {record.levelname} {self._process_name}: "
        text = mask_secrets(super().format(record)).rstrip("\n")
        return "\n".join(f"{prefix}{line}" for line in text.split("\n"))


class _JsonFormatter(logging.Formatter):
    """Formatter that writes a record as one JSON object with the role, the rank and the step."""

    def __init__(self, role: str, rank: int) -> None:
        super().__init__()
        self.step: int | None = None
        self._role = role
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(
            timespec="milliseconds"
        )
        entry: dict[str, Any] = {
            "time": time,
            "level": record.levelname.lower(),
            "role": self._role,
            "rank": self._rank,
        }
        if self.step is not None:
            entry["step"] = self.step
        entry |= {"logger": record.name, "message": mask_secrets(record.getMessage()).rstrip()}
        if record.exc_info:
            entry["traceback"] = mask_secrets(self.formatException(record.exc_info))
        return json.dumps(entry, ensure_ascii=False)


def _is_own_or_warning(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or record.name.partition(".")[0] in (
        "aligner",
        "stdout",
        "stderr",
    )


class _Handler(logging.StreamHandler):  # of TextIO; not subscriptable before Python 3.11
    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing: a report on standard error would become a record of this handler again."""


class _LoggedStream:
    """A standard stream whose lines become log records; other attributes are those of the original
    stream."""

    def __init__(self, stream: TextIO, name: str, level: int) -> None:
        self._stream = stream
        self._level = level
        self._logger = logging.getLogger(name)
        self._logger.setLevel(level)
        self._unfinished = threading.local()  # each thread's unfinished line

    def write(self, text: str) -> int:
        *lines, rest = (getattr(self._unfinished, "line", "") + text).split("\n")
        self._unfinished.line = rest
        for line in lines:
            if line.strip():
                self._logger.log(self._level, "%s", line)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _json_formatters() -> list[_JsonFormatter]:
    handlers = logging.getLogger().handlers
    return [
        handler.formatter for handler in handlers if isinstance(handler.formatter, _JsonFormatter)
    ]
