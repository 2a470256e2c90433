"""The policy being trained and the frozen reference beside it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from aligner.data.checkpoint_files import trained_model
from aligner.data.types import Rows
from aligner.megatron.checkpoint import CheckpointWriter, load_checkpoint
from aligner.megatron.heads import VocabularyHead
from aligner.megatron.lora import LoraWeights
from aligner.megatron.packing import PackedBatch
from aligner.megatron.runner import ModelRunner, Stats
from aligner.megatron.world import World
from aligner.models.shape import ModelShape
from aligner.schema import ActorConfig

_R = TypeVar("_R", bound=Rows, contravariant=True)


class PolicyLoss(Protocol[_R]):
    """A loss of the policy on right-padded rows."""

    def __call__(self, logprobs: Tensor, entropy: Tensor, rows: _R, denominator: float) -> tuple[Tensor, Stats]:
        """Loss and statistics of some rows, as sums over `denominator`, which speaks of the whole minibatch.

        `logprobs` and `entropy` [N, L-1] are zero outside the rows' mask; both are differentiable.
        """
        ...


class Policy:
    """The actor: log-probs at the sampling temperature and updates, SPMD over the trainer's ranks.

    Tensors are those of the whole step, equal on every rank; each data rank computes its share of the rows, and results
    are again the whole step's on every rank.
    """

    def __init__(
        self,
        shape: ModelShape,
        world: World,
        settings: ActorConfig,
        directory: Path,
        temperature: float,
        total_updates: int,
        *,
        with_reference: bool = True,
    ) -> None:
        """Without a reference no copy of the initial weights is kept, and `reference_logprobs` is not there."""
        self.world = world
        self.temperature, self._chunk_tokens = temperature, settings.logprob_chunk_tokens
        self.runner = ModelRunner(shape, world, "vocabulary", settings, total_updates)
        self.runner.weights.load_directory(directory)
        # With adapters the initial weights are the model without them.
        keeps_copy = with_reference and not isinstance(self.runner.weights, LoraWeights)
        self._reference = self.runner.host_copy() if keeps_copy else {}
        self.runner.start_training()
        self._trained = trained_model(directory, "vocabulary", shape.num_layers)
        self._checkpoints = CheckpointWriter(self.runner, self._trained)

    def logprobs(self, tokens: Tensor, lengths: Tensor, *, temperature: float | None = None) -> Tensor:
        """Log-probability of each next token under the policy; int64 [B, S] and [B] to float32 [B, S-1].

        `temperature` is the sampling temperature where None.
        """

        def read(output: Tensor, batch: PackedBatch) -> Tensor:
            return batch.unpack_targets(self._score(output, batch, temperature=temperature)[0])

        return self.runner.rows(tokens, lengths, tokens.shape[1] - 1, read)

    def reference_logprobs(self, tokens: Tensor, lengths: Tensor, *, temperature: float | None = None) -> Tensor:
        """The same under the initial weights: swapped in from host memory, or with the adapters off."""
        weights = self.runner.weights
        initial = weights.adapters_off() if isinstance(weights, LoraWeights) else self.runner.swapped(self._reference)
        with initial:
            return self.logprobs(tokens, lengths, temperature=temperature)

    def train(
        self, minibatch: Rows, loss: PolicyLoss[Any], *, denominator: float | None = None, group: int = 1
    ) -> dict[str, float]:
        """One optimizer step on a minibatch; returns the loss's statistics, `entropy`, `grad_norm` and `lr`.

        `denominator` is the loss's; the number of tokens in the mask where None. The loss sees every `group` rows in a row
        together, in their order.
        """
        tokens = max(float(minibatch.mask.sum()), 1.0)
        shared = tokens if denominator is None else denominator

        def packed_loss(output: Tensor, batch: PackedBatch) -> tuple[Tensor, Stats]:
            rows = minibatch.select(batch.batch_rows, batch.width).to(output.device)
            batch = _only_targets(batch, rows.mask)
            logprobs, entropy = self._score(output, batch, with_entropy=True)
            assert entropy is not None
            entropies = batch.unpack_targets(entropy)
            value, stats = loss(batch.unpack_targets(logprobs), entropies, rows, shared)
            return value, stats | {"entropy": entropies.detach().sum() / tokens}

        return self.runner.update(self.runner.share(minibatch.tokens, minibatch.lengths, group), packed_loss)

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

    def _score(
        self, output: Tensor, batch: PackedBatch, *, with_entropy: bool = False, temperature: float | None = None
    ) -> tuple[Tensor, Tensor | None]:
        head: VocabularyHead = self.runner.chunks[-1].output_layer
        return head.logprobs(
            output[0],
            batch.target_index,
            batch.targets,
            temperature=self.temperature if temperature is None else temperature,
            chunk_tokens=self._chunk_tokens,
            with_entropy=with_entropy,
        )


def _only_targets(batch: PackedBatch, mask: Tensor) -> PackedBatch:
    """The batch without the targets outside `mask` bool [N, L-1]: nothing is projected for prompts."""
    chosen = mask.flatten()[batch.target_rows]
    names = ("target_index", "targets", "target_rows")
    return dataclasses.replace(batch, **{name: getattr(batch, name)[chosen] for name in names})
