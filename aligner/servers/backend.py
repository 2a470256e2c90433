"""What the critic and reward servers ask of a value model."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor


class ValueModel(Protocol):
    """A model with a scalar head, spread over the role's ranks.

    Every rank calls every method with the same full arguments, on the CPU, and gets the same full result. An AlignerError
    is raised on all ranks alike.
    """

    @property
    def version(self) -> int:
        """Optimizer steps taken."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        ...

    def values(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """float32 [B, S] of tokens int64 [B, S] and lengths int64 [B]: entry t is the value after token t."""
        ...

    def train(self, tokens: Tensor, returns: Tensor, old_values: Tensor, mask: Tensor) -> dict[str, float]:
        """One optimizer step on tokens int64 [B, S] and float32 and bool [B, S-1]; the result has at least `loss`."""
        ...

    def begin_save(self, directory: Path) -> None:
        """Begin to write weights and optimizer as they are now; what comes later does not change them."""
        ...

    def finish_save(self) -> None:
        """Wait until what was begun, if anything, is complete."""
        ...

    def load(self, directory: Path) -> None:
        """Read what was saved."""
        ...
