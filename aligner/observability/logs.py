"""What a rank writes to its log: lines of text or, with `logging.format=json`, a JSON object a
line."""

import json
import logging
import os
import sys
import threading
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any, TextIO, cast

REPORTED = "aligner: error:"
"""What the line begins with by which a rank tells why it ends."""

_log = logging.getLogger("aligner")
_TEXT_FORMATTER = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")


def configure_logs(format: str, role: str, rank: int | None = None) -> None:
    """Set up Python's logging in a rank's process; `rank` is the environment's RANK if not given.

    As text, records of aligner's loggers are lines of standard output with time and level, and all
    other output is unchanged; as JSON all records, warnings and printed lines are objects, except
    output that other processes or libraries write to the file directly.
    """
    handler = _Handler(sys.stdout)
    _log.setLevel(logging.INFO)
    if format == "text":
        handler.setFormatter(_TEXT_FORMATTER)
        _log.handlers, _log.propagate = [handler], False
        return
    # some libraries tell everything, and leave it to others to listen
    handler.addFilter(_is_ours_or_a_warning)
    handler.setFormatter(
        _JsonFormatter(role, int(os.environ.get("RANK", "0")) if rank is None else rank)
    )
    logging.getLogger().handlers = [handler]
    logging.captureWarnings(True)
    sys.stdout = cast(TextIO, _Lines(sys.stdout, "stdout", logging.INFO))
    sys.stderr = cast(TextIO, _Lines(sys.stderr, "stderr", logging.WARNING))


def at_step(step: int) -> None:
    """What this process logs from now on belongs to a training step."""
    for formatter in _json_formatters():
        formatter.step = step


def log_failure(error: BaseException, message: str | None) -> bool:
    """Log why this process ends, as a message or with its traceback; False, and nothing is logged,
    where logs are text."""
    if not _json_formatters():
        return False
    if message is None:
        _log.critical("%s: %s", type(error).__name__, error, exc_info=error)
    else:
        _log.error("%s %s", REPORTED, message)
    return True


def launcher_line(format: str, role: str, rank: int, message: str) -> str:
    """What the launcher adds to a rank's log, as the rank would have written it."""
    is_text = format == "text"
    text = f"--- {message} ---" if is_text else message
    record = logging.LogRecord("aligner.launcher", logging.INFO, "", 0, text, None, None)
    formatter = _TEXT_FORMATTER if is_text else _JsonFormatter(role, rank)
    return formatter.format(record) + "\n"


def text_lines(lines: list[str]) -> list[str]:
    """A log's lines as text, whatever its format: of a JSON object the message, with a traceback's
    lines where it has one."""
    found = []
    for line in lines:
        try:
            record = json.loads(line) if line.startswith("{") else None
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("message"), str):
            line = f"{record.get('traceback', '')}\n{record['message']}".strip("\n")
        found += line.splitlines() or [""]
    return found


class _JsonFormatter(logging.Formatter):
    def __init__(self, role: str, rank: int) -> None:
        super().__init__()
        self.step: int | None = None
        self._role, self._rank = role, rank

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
        entry |= {"logger": record.name, "message": record.getMessage().rstrip()}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def _is_ours_or_a_warning(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or record.name.partition(".")[0] in (
        "aligner",
        "stdout",
    )


class _Handler(logging.StreamHandler):  # of TextIO; not subscriptable before Python 3.11
    def handleError(self, record: logging.LogRecord) -> None:
        """Nothing: what is told on standard error comes back here."""


class _Lines:
    """A standard stream whose lines become records; all else is the stream's own."""

    def __init__(self, stream: TextIO, name: str, level: int) -> None:
        self._stream, self._level = stream, level
        self._logger = logging.getLogger(name)
        self._logger.setLevel(level)
        self._begun = threading.local()  # a thread's unfinished line

    def write(self, text: str) -> int:
        *whole, rest = (getattr(self._begun, "line", "") + text).split("\n")
        self._begun.line = rest
        for line in whole:
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
