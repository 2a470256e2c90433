"""The result of a check of the machine."""

from dataclasses import dataclass

OK = "ok"
"""Level of a finding without consequences."""
NOTE = "note"
"""Level of a finding that matters only to some runs."""
WARNING = "warning"
"""Level of a finding that makes some runs fail, or makes them slow."""
ERROR = "error"
"""Level of a finding with which no run works."""


@dataclass(frozen=True)
class Finding:
    """What a check has found on this machine."""

    subject: str
    """The checked part of the machine, such as "shared memory"."""
    level: str
    """`ok`, `note`, `warning` or `error`."""
    found: str
    """What was found and, unless the level is `ok`, its consequence."""
    remedy: str | None = None
    """What to do about it; None if nothing needs to be done."""
