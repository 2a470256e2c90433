"""Interfaces of a weight sync: the engine's weight format, update and held weights, the publisher,
and its statistics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from aligner.models.weight_slices import Slice, TensorSpec, compute_engine_slices
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
    has_outer_weights_on_all_stages: bool = False
    """Whether every pipeline stage of the engine holds the embedding, final norm and head."""

    def compute_slices(self, table: tuple[TensorSpec, ...], rank: int) -> dict[str, Slice]:
        """Return the slices that a rank of the engine receives, by the name of the weight.

        Args:
            table: The model's weight table.
            rank: Rank of the engine.
        """
        return compute_engine_slices(
            table,
            self.layout,
            rank,
            self.vocabulary_multiple,
            has_outer_weights_on_all_stages=self.has_outer_weights_on_all_stages,
        )


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
class ExpectedSlice:
    """Checksum of the trainer's elements of a slice that an engine rank must hold."""

    shape: tuple[int, ...]
    """Shape of the whole tensor, in elements of the transfer's dtype."""
    axis: int | None
    """Dimension along which the slice is cut; None means the whole tensor."""
    start: int
    """First index of the slice along `axis`."""
    checksum: int
    """Checksum of the slice; see `aligner.resharding.verify.checksum`."""


class HeldWeights(Protocol):
    """The weights that an engine rank holds, that is, the parameters that it computes with.

    The methods are collective over the ranks of a replica.
    """

    def find_wrong_weights(self, expected: Mapping[str, ExpectedSlice]) -> Sequence[str]:
        """Compare the held weights with the trainer's after an update, and return the names of
        those that differ.

        The result also contains weights that the engine does not hold.

        Args:
            expected: The trainer's checksums of this rank's slices, by Hugging Face name. Empty if
                the engine receives weights in groups: it then compares its parameters with the
                tensors that it has received in the update.
        """

    def find_changed_weights(self) -> Sequence[str]:
        """Return the names of the held weights that have changed since the last call of
        `find_wrong_weights`.

        Weights that the engine shares with the trainer are not checked, because training changes
        them. The result is empty if the engine has no weights.
        """

    def discard_weights(self, reason: str) -> None:
        """Refuse to generate with the current weights, which are wrong.

        Args:
            reason: Reason, for error messages.
        """


class WeightProbe(Protocol):
    """Log-probs of fixed sequences, which the trainer and the engine compute with the same weights.

    See `aligner.engines.weight_probe`.
    """

    def compute(self) -> Tensor:
        """Return the log-probs of the trainer's current weights. Collective over the trainer."""

    def check(self, version: int, trainer_logprobs: Tensor, results: Sequence[Any]) -> float:
        """Return the maximum difference of the engine's log-probs in nats.

        Args:
            version: Version of the weights, for the error message.
            trainer_logprobs: Result of `compute`.
            results: JSON values of each replica's result.

        Raises:
            AlignerError: The log-probs of a replica differ by more than rounding.
        """


@dataclass(frozen=True)
class PublishStats:
    """Statistics of a publish on one rank."""

    version: int
    """Version of the weights."""
    staging_bytes: int
    """Peak memory, in bytes, of messages that could not be sent from or received into their own
    tensors."""
    seconds: float
    """Duration of the publish in seconds, including the verification."""
    verify_seconds: float | None
    """Duration of the verification by checksums in seconds; None if the publish was not
    verified."""
    moved_bytes: int
    """Bytes transferred between ranks, summed over all ranks."""
    full_bytes: int
    """Bytes that a transfer of all elements would have taken, summed over all ranks."""
    changed_share: float | None
    """Share of the transferred tensors' elements that differ from the previous publish; None if
    they were not compared."""
    probe_seconds: float | None = None
    """Time in seconds that engine and trainer computed the probe; None without a probe."""
    probe_logprob_abs: float | None = None
    """Maximum difference between the engine's and the trainer's log-probs of the probe, in nats;
    None without a probe."""


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
