"""The policy being trained and the frozen reference beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from megatron.core import parallel_state
from torch import Tensor

from aligner.config.model_shape import ModelShape
from aligner.config.schema import Actor
from aligner.data.types import Experience
from aligner.megatron.checkpoint import load_runner, save_runner
from aligner.megatron.logprobs import vocab_parallel_logprobs
from aligner.megatron.packing import PackedBatch
from aligner.megatron.runner import ModelRunner, Stats
from aligner.megatron.world import World


class PolicyLoss(Protocol):
    """A policy loss on right-padded rows."""

    def __call__(self, logprobs: Tensor, experience: Experience, denominator: float) -> tuple[Tensor, Stats]:
        """Loss and statistics of some rows, as sums over `denominator`, the whole minibatch's response tokens."""
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
        self.temperature = temperature
        self.runner = ModelRunner(shape, world, "vocabulary", settings.micro_batch_tokens, settings.optimizer, total_updates)
        self.runner.weights.load_directory(directory)
        self._reference = self.runner.host_copy()
        self.runner.start_training()

    def logprobs(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Log-probability of each next token under the policy; int64 [B, S] and [B] to float32 [B, S-1]."""
        return self.runner.rows(
            tokens, lengths, tokens.shape[1] - 1, lambda output, batch: batch.unpack_targets(self._score(output, batch)[0])
        )

    def reference_logprobs(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """The same under the initial weights, which wait in host memory and are swapped in."""
        with self.runner.swapped(self._reference):
            return self.logprobs(tokens, lengths)

    def train(self, experience: Experience, loss: PolicyLoss) -> dict[str, float]:
        """One optimizer step on a minibatch; returns the loss's statistics, `entropy`, `grad_norm` and `lr`."""
        denominator = float(experience.mask.sum())

        def packed_loss(output: Tensor, batch: PackedBatch) -> tuple[Tensor, Stats]:
            logprobs, entropy = self._score(output, batch)
            rows = experience.select(batch.batch_rows, batch.width)
            value, stats = loss(batch.unpack_targets(logprobs), rows, denominator)
            masked_entropy = torch.where(rows.mask, batch.unpack_targets(entropy), 0.0)
            return value, stats | {"entropy": masked_entropy.sum() / denominator}

        return self.runner.update(self.runner.share(experience.tokens, experience.lengths), packed_loss)

    def save(self, directory: Path) -> None:
        """Write weights and optimizer state, one file a rank."""
        save_runner(self.runner, directory)

    def load(self, directory: Path) -> None:
        """Read what `save` wrote at the same layout."""
        load_runner(self.runner, directory)

    def _score(self, output: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        logits = output[0].index_select(0, batch.target_index)
        group = parallel_state.get_tensor_model_parallel_group()
        return vocab_parallel_logprobs(logits, batch.targets, self.temperature, group)
