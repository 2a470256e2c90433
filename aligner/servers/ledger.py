"""Which numbered updates the critic has applied: each exactly once, in order."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from aligner.errors import AlignerError


class SequenceError(AlignerError):
    """An update that may not be applied now: older than the last, beyond the next, another run's, or unnumbered."""


@dataclass
class UpdateLedger:
    """The last numbered update of a run and its result."""

    run_id: str | None = None
    """The run of the first numbered update; another's are refused."""
    last: int = -1
    result: dict[str, float] | None = None

    def is_repeat(self, run_id: str | None, number: int) -> bool:
        """Whether the update is the last one again; false when it is the next one. Raises SequenceError otherwise."""
        if self.run_id is not None and run_id != self.run_id:
            raise SequenceError(
                f"run_id: got {run_id!r}, but this critic serves run {self.run_id!r}; restart it for another run"
            )
        if number not in (self.last, self.last + 1):
            kind = "a gap" if number > self.last else "already applied, its result no longer kept"
            raise SequenceError(f"sequence_number: got {number}, {kind}; allowed: {self.last + 1}, or {self.last} again")
        return number == self.last

    def record(self, run_id: str | None, number: int, result: dict[str, float]) -> None:
        """Note that an update has been applied."""
        self.run_id, self.last, self.result = run_id, number, result

    def save(self, path: Path) -> None:
        """Write as JSON, atomically."""
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self)) + "\n")
        temporary.replace(path)

    @staticmethod
    def load(path: Path) -> UpdateLedger:
        """Read what `save` wrote. Raises AlignerError when there is nothing to read."""
        try:
            return UpdateLedger(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise AlignerError(f"cannot read the critic's update ledger {path}: {error}") from error
