"""What both ends of a publish offer: an engine that takes new weights, and what takes the trainer's
to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aligner.schema import EngineParallelConfig


@dataclass(frozen=True)
class WeightFormat:
    """How an engine takes its weights."""

    layout: EngineParallelConfig
    """To publish to, over the engine's ranks."""
    dtype: torch.dtype
    group_bytes: int | None
    """Most bytes of tensors that an update takes at a time; None: all its views exist at once."""
    vocabulary_multiple: int = 1
    """To which the engine pads the vocabulary before it is cut."""


class WeightUpdate(Protocol):
    """An engine rank's open update. It ends with one `commit` or one `abort`.

    Tensors go by Hugging Face name and are this rank's slices, as the plan's target says.
    """

    def views(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Where to write these tensors; those that the engine does not have are left out."""

    def load(self, names: Sequence[str]) -> None:
        """These tensors have been written; their views are not used again, unless the format's
        `group_bytes` is None."""

    def commit(self) -> None:
        """All tensors have been loaded on every rank: they are the engine's now."""

    def abort(self) -> None:
        """The update failed somewhere: the engine stays at the version it had, or has none if that
        was overwritten."""


@dataclass(frozen=True)
class PublishStats:
    """What a publish took on one rank."""

    staging_bytes: int
    """The most memory that messages took which could not travel from or into their own places."""
    seconds: float
    """Of the whole publish, verification included."""
    verify_seconds: float | None
    """None when the publish was not verified."""
    moved_bytes: int
    """That crossed from rank to rank, of all ranks."""
    whole_bytes: int
    """That would have crossed with all numbers as they are."""
    changed: float | None
    """Share of the numbers that would have crossed which are others than at the publish before;
    None: not compared."""


class WeightPublisher(Protocol):
    """What takes the policy's weights into the engine."""

    @property
    def stats(self) -> PublishStats | None:
        """Of the newest publish that this rank has seen the end of; None before the first."""

    def publish(self, version: int) -> object:
        """The engine serves the weights, as `version`, when this returns.

        Every rank of the trainer calls it. Raises AlignerError on every rank.
        """
