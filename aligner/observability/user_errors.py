"""Exceptions of the user's code in a run, such as a reward function or an environment.

`aligner.user_code.report_user_error` writes them in the process that calls the code, and
`UserErrorFollower` reads them in the launcher.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aligner.observability.metrics import FileFollower
from aligner.paths import RunPaths, get_run_paths
from aligner.schema import Config
from aligner.user_code import USER_ERRORS


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


class UserErrorFollower:
    """Reader of the exceptions that the ranks of a run report."""

    def __init__(self, paths: RunPaths) -> None:
        """Follow the files of a run, which need not exist yet."""
        self._paths = paths
        self._followers: dict[Path, FileFollower] = {}

    def read_new_errors(self) -> Sequence[UserError]:
        """Return the exceptions that were reported since the last call."""
        errors = []
        for file in sorted(self._paths.user_errors.glob("*.jsonl")):
            follower = self._followers.setdefault(file, FileFollower(file, required_field="place"))
            log = self._paths.logs / f"{file.stem}.log"
            errors += [
                UserError(record["place"], record["message"], record.get("traceback"), log)
                for record in follower.read_new_records()
            ]
        return errors
