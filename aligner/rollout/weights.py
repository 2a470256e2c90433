"""What the rollouts ask of the way that takes the trainer's weights to an engine."""

from __future__ import annotations

from typing import Protocol


class Publishes(Protocol):
    """What takes the policy's weights into the engine."""

    def publish(self, version: int) -> object:
        """The engine serves the weights, as `version`, when this returns.

        Every rank of the trainer calls it. Raises AlignerError on every rank.
        """
        ...


class Offers(Publishes, Protocol):
    """To an engine that is a role of its own: the trainer goes on while weights are on their way."""

    def offer(self, version: int) -> None:
        """Keep the weights as they are now, as `version`. Every rank of the trainer calls it."""
        ...

    def serve(self, version: int) -> None:
        """Return once the engine serves `version` or newer weights. Rank 0's, from any thread.

        An engine that was lost is awaited and gets its weights again. Raises AlignerError where that fails.
        """
        ...

    def restore(self) -> int:
        """As `serve` for the version that serves, of an engine that has said that it does not; returns the version."""
        ...

    @property
    def served(self) -> int:
        """The version that serves, as far as rank 0 knows; -1 before the first."""
        ...

    def close(self) -> None:
        """Hang up."""
        ...
