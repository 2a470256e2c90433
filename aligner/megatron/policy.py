"""The policy being trained and the frozen reference beside it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Protocol

from torch import Tensor

from aligner.config.model_shape import ModelShape
from aligner.config.schema import Actor
from aligner.data.checkpoint_files import trained_model
from aligner.data.types import Experience
from aligner.megatron.checkpoint import CheckpointWriter, load_checkpoint
from aligner.megatron.heads import VocabularyHead
from aligner.megatron.lora import LoraWeights
from aligner.megatron.packing import PackedBatch
from aligner.megatron.runner import ModelRunner, Stats
from aligner.megatron.world import World


class PolicyLoss(Protocol):
    """A policy loss on right-padded rows."""

    def __call__(self, logprobs: Tensor, experience: Experience, denominator: float) -> tuple[Tensor, Stats]:
        """Loss and statistics of some rows, as sums over `denominator`, the whole minibatch's response tokens.

        `logprobs` are zero outside the experience's mask.
        """
        ...


class Policy:
    """The actor: log-probs at the sampling temperature and updates, SPMD over the trainer's ranks.

    Tensors are those of the whole step, equal on every rank; each data rank computes its share of the rows, and results
    are again the whole step's on every rank.
    """

    def __init__(
        self, shape: ModelShape, world: World, settings: Actor, directory: Path, temperature: float, total_updates: int
    ) -> None:
        self.world = world
        self.temperature, self._chunk_tokens = temperature, settings.logprob_chunk_tokens
        self.runner = ModelRunner(shape, world, "vocabulary", settings, total_updates)
        self.runner.weights.load_directory(directory)
        # With adapters the initial weights are the model without them.
        self._reference = {} if isinstance(self.runner.weights, LoraWeights) else self.runner.host_copy()
        self.runner.start_training()
        self._trained = trained_model(directory, "vocabulary", shape.num_layers)
        self._checkpoints = CheckpointWriter(self.runner, self._trained)

    def logprobs(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Log-probability of each next token under the policy; int64 [B, S] and [B] to float32 [B, S-1]."""
        return self.runner.rows(
            tokens, lengths, tokens.shape[1] - 1, lambda output, batch: batch.unpack_targets(self._score(output, batch)[0])
        )

    def reference_logprobs(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """The same under the initial weights: swapped in from host memory, or with the adapters off."""
        weights = self.runner.weights
        initial = weights.adapters_off() if isinstance(weights, LoraWeights) else self.runner.swapped(self._reference)
        with initial:
            return self.logprobs(tokens, lengths)

    def train(self, experience: Experience, loss: PolicyLoss) -> dict[str, float]:
        """One optimizer step on a minibatch; returns the loss's statistics, `entropy`, `grad_norm` and `lr`."""
        denominator = float(experience.mask.sum())

        def packed_loss(output: Tensor, batch: PackedBatch) -> tuple[Tensor, Stats]:
            rows = experience.select(batch.batch_rows, batch.width).to(output.device)
            batch = _only_targets(batch, rows.mask)
            logprobs, entropy = self._score(output, batch, with_entropy=True)
            assert entropy is not None
            value, stats = loss(batch.unpack_targets(logprobs), rows, denominator)
            return value, stats | {"entropy": batch.unpack_targets(entropy.detach()).sum() / denominator}

        return self.runner.update(self.runner.share(experience.tokens, experience.lengths), packed_loss)

    def begin_save(self, directory: Path) -> None:
        """Copy weights, optimizer and schedule to host memory, and write them in the background."""
        self._checkpoints.begin(directory)

    def finish_save(self) -> None:
        """Wait until what `begin_save` began is complete."""
        self._checkpoints.finish()

    def save(self, directory: Path) -> None:
        """Write weights, optimizer and schedule."""
        self.begin_save(directory)
        self.finish_save()

    def load(self, directory: Path) -> None:
        """Read what `save` wrote, at whatever layout."""
        self.finish_save()
        load_checkpoint(self.runner, directory, self._trained)

    def _score(self, output: Tensor, batch: PackedBatch, *, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        head: VocabularyHead = self.runner.chunks[-1].output_layer
        return head.logprobs(
            output[0],
            batch.target_index,
            batch.targets,
            temperature=self.temperature,
            chunk_tokens=self._chunk_tokens,
            with_entropy=with_entropy,
        )


def _only_targets(batch: PackedBatch, mask: Tensor) -> PackedBatch:
    """The batch without the targets outside `mask` bool [N, L-1]: nothing is projected for prompts."""
    chosen = mask.flatten()[batch.target_rows]
    names = ("target_index", "targets", "target_rows")
    return dataclasses.replace(batch, **{name: getattr(batch, name)[chosen] for name in names})
