"""Which rank's failure is the cause, and how it is told."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from aligner.errors import AlignerError
from aligner.launch.processes import RankProcess

TAIL_LINES = 15
_TAIL_BYTES = 64 * 1024
_REPORTED = "aligner: error:"
_CONSEQUENCES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "distbackenderror",
    "distnetworkerror",
    "diststoreerror",
    "broken pipe",
    "statuscode.unavailable",
)


def log_tail(log: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return file.read().decode(errors="replace").rstrip().splitlines()[-lines:]


def with_log(message: str, log: Path) -> str:
    """The message with the log's last lines and its path."""
    lines = "\n".join(f"  | {line}" for line in log_tail(log)) or "  (its log is empty)"
    return f"{message}; the end of its log:\n{lines}\nlog: {log}"


def reported_error(log: Path) -> str:
    """The last error that the command line reported in a log, without its prefix; the log's end where there is none."""
    lines = log_tail(log)
    starts = [number for number, line in enumerate(lines) if line.startswith(_REPORTED)]
    return "\n".join(lines[starts[-1] :] if starts else lines).removeprefix(_REPORTED).strip()


def describe_exit(code: int | None) -> str:
    """An exit code, or the signal's name."""
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def root_failure(failed: Sequence[RankProcess]) -> RankProcess:
    """The rank to blame: the first to fail, but not one that only complains of a lost peer while another has more to say."""

    def order(rank: RankProcess) -> tuple[bool, float, bool]:
        end = "\n".join(log_tail(rank.log)).lower()
        reported = _REPORTED in end
        consequence = not reported and any(text in end for text in _CONSEQUENCES)
        return consequence, rank.ended_at or 0.0, not reported

    return min(failed, key=order)


def failure_error(failed: Sequence[RankProcess]) -> AlignerError:
    """The error that ends the run: role, rank, exit code, last log lines, log path."""
    root = root_failure(failed)
    others = [f"{rank.role} rank {rank.rank}" for rank in failed if rank is not root]
    also = f" (then {', '.join(others)} failed)" if others else ""
    return AlignerError(with_log(f"{root.role} rank {root.rank} {describe_exit(root.exit_code)}{also}", root.log))
