"""What both ends of a publish offer: an engine that takes new weights, and what takes the trainer's to it."""

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


class WeightUpdate(Protocol):
    """An engine rank's open update. It ends with one `commit` or one `abort`.

    Tensors go by Hugging Face name and are this rank's slices, as the plan's target says.
    """

    def views(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Where to write these tensors; those that the engine does not have are left out."""

    def load(self, names: Sequence[str]) -> None:
        """These tensors have been written; their views are not used again, unless the format's `group_bytes` is None."""

    def commit(self) -> None:
        """All tensors have been loaded on every rank: they are the engine's now."""

    def abort(self) -> None:
        """The update failed somewhere: the engine stays at the version it had, or has none if that was overwritten."""


class WeightPublisher(Protocol):
    """What takes the policy's weights into the engine."""

    def publish(self, version: int) -> object:
        """The engine serves the weights, as `version`, when this returns.

        Every rank of the trainer calls it. Raises AlignerError on every rank.
        """
