"""Facts about an episode besides its tokens and rewards: its failures and its metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class FailureKind(str, Enum):
    """Cause of the failure of an episode's agent or environment.

    The model can learn only from failures that it may have caused itself, which are `ERROR` and
    `TIMEOUT`.
    """

    ERROR = "error"
    """The agent or environment raised an exception, gave an invalid answer, exited with a nonzero
    code, or crashed its process, after a turn of the policy."""
    TIMEOUT = "timeout"
    """The agent or environment exceeded its deadline after a turn of the policy."""
    NO_TURN = "no_turn"
    """The agent ended or failed before it received a completion, or the environment failed before
    the first turn."""
    INFRASTRUCTURE = "infrastructure"
    """A process could not start or was killed, the endpoint returned a server error, or a service
    or tool that the agent or environment uses was not reachable or timed out."""

    @property
    def is_attributable(self) -> bool:
        """Whether the policy may have caused the failure."""
        return self in (FailureKind.ERROR, FailureKind.TIMEOUT)

    def before_first_turn(self) -> "FailureKind":
        """Return the kind of the failure if it occurred before the first turn of the policy."""
        return FailureKind.NO_TURN if self.is_attributable else self


@dataclass(frozen=True)
class EpisodeReport:
    """Failures and metrics of an episode."""

    failure: FailureKind | None = None
    """Failure that ended the episode; None if the episode ended regularly."""
    retries: tuple[FailureKind, ...] = ()
    """Failures after which the agent or environment was started again."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that the agent has reported, by their names; finite numbers."""

    @property
    def is_empty(self) -> bool:
        """Whether the report contains neither failures nor metrics."""
        return self.failure is None and not self.retries and not self.metrics

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values, for `from_json`."""
        return {
            "failure": None if self.failure is None else self.failure.value,
            "retries": [kind.value for kind in self.retries],
            "metrics": dict(self.metrics),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "EpisodeReport":
        """Return the report from the result of `to_json`. Raises KeyError or ValueError."""
        failure = fields["failure"]
        return cls(
            None if failure is None else FailureKind(failure),
            tuple(map(FailureKind, fields["retries"])),
            dict(fields["metrics"]),
        )
