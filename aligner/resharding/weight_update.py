"""Interfaces of a weight sync: the engine's weight format and update, the publisher, and its
statistics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aligner.schema import EngineParallelConfig


@dataclass(frozen=True)
class WeightFormat:
    """The form in which an engine receives weights."""

    layout: EngineParallelConfig
    """Layout of the weights over the engine's ranks."""
    dtype: torch.dtype
    group_bytes: int | None
    """Maximum bytes of the tensors that an update receives at a time; None: all views of an update
    exist at the same time."""
    vocabulary_multiple: int = 1
    """Multiple to which the engine pads the vocabulary before it shards the vocabulary."""


class WeightUpdate(Protocol):
    """An engine rank's open update. It ends with one `commit` or one `abort`.

    Tensors have Hugging Face names, and are this rank's slices according to the plan's target.
    """

    def views(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Return the tensors to write, by name, without those that the engine does not have."""

    def load(self, names: Sequence[str]) -> None:
        """Load these tensors, which have been written.

        Their views are not used again, unless the format's `group_bytes` is None.
        """

    def commit(self) -> None:
        """Switch the engine to the new weights. All tensors have been loaded on every rank."""

    def abort(self) -> None:
        """Discard the update, which failed on some rank.

        The engine keeps its version, or has no version if the update has overwritten the old
        weights.
        """


@dataclass(frozen=True)
class PublishStats:
    """Statistics of a publish on one rank."""

    staging_bytes: int
    """Peak memory, in bytes, of messages that could not be sent from or received into their own
    tensors."""
    seconds: float
    """Duration of the publish in seconds, including the verification."""
    verify_seconds: float | None
    """Duration of the verification in seconds; None if the publish was not verified."""
    moved_bytes: int
    """Bytes transferred between ranks, summed over all ranks."""
    full_bytes: int
    """Bytes that a transfer of all elements would have taken, summed over all ranks."""
    changed_share: float | None
    """Share of the transferred tensors' elements that differ from the previous publish; None if
    they were not compared."""


class WeightPublisher(Protocol):
    """Sender of the policy's weights to the engine."""

    @property
    def stats(self) -> PublishStats | None:
        """Statistics of the newest publish that is complete on this rank; None before the first."""

    def publish(self, version: int) -> object:
        """Return once the engine serves the current weights as `version`.

        Every rank of the trainer calls it.

        Raises:
            AlignerError: On every rank, if the weight sync failed on any rank.
        """
