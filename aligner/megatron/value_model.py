"""Models with one number a token: the critic, and a reward model."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from aligner.config.model_shape import ModelShape
from aligner.config.model_source import critic_shape
from aligner.config.paths import model_directory
from aligner.config.schema import Config, MegatronModel, TrainedModel
from aligner.data.checkpoint_files import trained_model
from aligner.data.model_directory import read_shape
from aligner.megatron.checkpoint import CheckpointWriter, load_checkpoint
from aligner.megatron.packing import PackedBatch
from aligner.megatron.runner import ModelRunner, Stats
from aligner.megatron.world import World


class ValueLoss(Protocol):
    """A value loss on right-padded rows."""

    def __call__(
        self, values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, denominator: float
    ) -> tuple[Tensor, Stats]:
        """Loss and statistics of some rows [N, L-1], as sums over `denominator`, the whole batch's mask count."""
        ...


class ValueModel:
    """A transformer with a scalar head, SPMD over its role's ranks.

    Every rank calls every method with the same whole batch, and every rank gets the whole result.
    """

    def __init__(
        self,
        shape: ModelShape,
        world: World,
        directory: Path,
        settings: MegatronModel | TrainedModel,
        *,
        total_updates: int = 1,
        loss: ValueLoss | None = None,
    ) -> None:
        self.world, self.shape = world, shape
        self._loss = loss
        self.runner = ModelRunner(shape, world, "scalar", settings, total_updates)
        # A critic may start from a language model's first layers, and then with a head of zeros (Huang et al. 2023,
        # detail 5); a reward model needs a trained head.
        is_critic = isinstance(settings, TrainedModel)
        self.runner.weights.load_directory(directory, optional=("score.weight",) if is_critic else (), partial=is_critic)
        if is_critic:
            self.runner.start_training()
        self._trained = trained_model(directory, "scalar", shape.num_layers)
        self._checkpoints = CheckpointWriter(self.runner, self._trained)

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.shape.vocab_size

    @property
    def version(self) -> int:
        """Optimizer steps taken."""
        return self.runner.updates

    def values(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """The head's number at each token; int64 [B, S] and [B] to float32 [B, S], zeros past a sequence's end."""
        return self.runner.rows(
            tokens, lengths, tokens.shape[1], lambda output, batch: batch.unpack_tokens(output[0, :, 0].float())
        )

    def train(self, tokens: Tensor, returns: Tensor, old_values: Tensor, mask: Tensor) -> dict[str, float]:
        """One optimizer step; tokens int64 [B, S], the others float32 [B, S-1] where entry t speaks of token t+1.

        Returns the loss's statistics, `grad_norm` and `lr`.
        """
        if self._loss is None:
            raise ValueError("this model was built without a loss")
        loss, chosen = self._loss, mask > 0
        denominator = float(chosen.sum())
        # What comes after the last token that is learned from cannot matter to a causal model.
        steps = torch.arange(1, mask.shape[1] + 1)
        lengths = torch.where(chosen, steps, 0).amax(1).clamp(min=1) + 1

        def packed_loss(output: Tensor, batch: PackedBatch) -> tuple[Tensor, Stats]:
            values = batch.unpack_tokens(output[0, :, 0].float())[:, :-1]
            rows = (part[batch.batch_rows, : batch.width - 1].to(values.device) for part in (old_values, returns, chosen))
            return loss(values, *rows, denominator=denominator)

        return self.runner.update(self.runner.share(tokens, lengths), packed_loss)

    def sleep(self) -> None:
        """Keep the weights in host memory and free the device's, until `wake`; only `finish_save` may be called."""
        self.runner.sleep()

    def wake(self) -> None:
        """Bring the weights back to the device, as they were."""
        self.runner.wake()

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


def build_critic(config: Config, world: World, loss: ValueLoss) -> ValueModel:
    """The critic of a run, trained with `loss`."""
    directory = model_directory(config)
    return ValueModel(
        critic_shape(config, read_shape(directory)),
        world,
        directory,
        config.critic,
        total_updates=config.run.steps * config.algorithm.epochs * config.algorithm.minibatches,
        loss=loss,
    )


def build_reward_model(config: Config, directory: Path, world: World) -> ValueModel:
    """The frozen reward model in a directory."""
    return ValueModel(read_shape(directory), world, directory, config.reward)
