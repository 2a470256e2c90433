"""Exceptions of the user's code in a run, such as a reward function or an environment, and the
reasons of skipped prompts.

`aligner.user_code` writes them in the process that calls the code, and `UserErrorFollower` reads
them in the launcher.
"""

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aligner.observability.metrics import FileFollower
from aligner.paths import RunPaths, get_run_paths
from aligner.schema import Config
from aligner.user_code import USER_ERRORS

# Characters of a reason, and number of reasons, on the line of a step.
_MAX_REASON_CHARACTERS = 100
_LISTED_REASONS = 3


@dataclass(frozen=True)
class UserError:
    """An exception that the user's code raised during a run."""

    place: str
    """Type of the exception, and the file and line that raised it."""
    message: str
    """Message of the exception, shortened."""
    traceback: str | None
    """Complete traceback; None if the rank has reported the same place before."""
    log: Path
    """Log of the rank that called the code."""

    @property
    def summary(self) -> str:
        """The exception in one line, such as "ValueError in my_reward.py:12: no answer"."""
        return f"{self.place}: {self.message}".removesuffix(": ")


def user_error_environment(config: Config, role: str) -> dict[str, str]:
    """Return the environment variable that makes the ranks of a role report exceptions of the
    user's code."""
    return {USER_ERRORS: str(get_run_paths(config).user_errors / f"{role}-")}


def delete_user_errors(paths: RunPaths) -> None:
    """Delete the exceptions of an earlier launch."""
    for file in paths.user_errors.glob("*.jsonl"):
        file.unlink(missing_ok=True)


@dataclass(frozen=True)
class UserReports:
    """Reports of the ranks of a run, in order."""

    errors: list[UserError]
    """Exceptions of the user's code."""
    skip_reasons: list[str]
    """The reason of each skipped prompt."""


class UserErrorFollower:
    """Reader of the exceptions and skipped prompts that the ranks of a run report."""

    def __init__(self, paths: RunPaths) -> None:
        """Follow the files of a run, which need not exist yet."""
        self._paths = paths
        self._followers: dict[Path, FileFollower] = {}

    def read_new_errors(self) -> list[UserError]:
        """Return the exceptions that were reported since the last call."""
        return self.read_new_reports().errors

    def read_new_reports(self) -> UserReports:
        """Return the reports since the last call."""
        reports = UserReports([], [])
        for file in sorted(self._paths.user_errors.glob("*.jsonl")):
            follower = self._followers.setdefault(
                file, FileFollower(file, required_field="message")
            )
            log = self._paths.logs / f"{file.stem}.log"
            for record in follower.read_new_records():
                place = record.get("place")
                message = record["message"]
                if place is None:
                    reports.skip_reasons.append(message)
                else:
                    traceback = record.get("traceback")
                    reports.errors.append(UserError(place, message, traceback, log))
        return reports


def summarize_skip_reasons(reasons: Sequence[str], user_errors: Sequence[UserError]) -> str:
    """Return the distinct reasons of skipped prompts in one line, the most frequent one first.

    Args:
        reasons: The reason of each skipped prompt, at least one.
        user_errors: The exceptions of the user's code. A reason that one of them caused is
            described by the exception.
    """
    counts = Counter(_shorten_reason(reason, user_errors) for reason in reasons)
    return "; ".join(text for text, _ in counts.most_common(_LISTED_REASONS))


def find_user_error(reason: str, user_errors: Sequence[UserError]) -> UserError | None:
    """Return the newest exception of the user's code that a text names; None if it names none."""
    return next((error for error in reversed(user_errors) if error.place in reason), None)


def _shorten_reason(reason: str, user_errors: Sequence[UserError]) -> str:
    error = find_user_error(reason, user_errors)
    if error is not None:
        return error.summary
    first_line = reason.partition("\n")[0]
    return textwrap.shorten(first_line, _MAX_REASON_CHARACTERS, placeholder=" …")
