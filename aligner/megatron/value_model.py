"""Models with one number a token: the critic, and a reward model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from aligner.data.model_directory import read_shape
from aligner.data.types import Rows, RowsT, Stats
from aligner.megatron.model_checkpoint import CheckpointedModel
from aligner.megatron.packing import PackedBatch
from aligner.megatron.runner import ModelRunner
from aligner.megatron.world import World
from aligner.models.families import SCALAR_HEAD
from aligner.models.model_source import (
    critic_directory,
    first_layers,
    model_directory,
    read_normalization,
)
from aligner.models.shape import ModelShape
from aligner.schema import Config, MegatronModelConfig, TrainedModelConfig
from aligner.schema.derived import critic_updates

RowsLoss: TypeAlias = Callable[[Tensor, RowsT, float], tuple[Tensor, Stats]]
"""`loss(values, rows, denominator)` and statistics of some rows, as sums over what speaks of the
whole minibatch.

`values` [N, L] are the head's numbers at the rows' tokens, zeros past a sequence's end;
differentiable.
"""
ValueLoss: TypeAlias = Callable[..., tuple[Tensor, Stats]]
"""`loss(values, old_values, returns, mask, denominator=…)` and statistics of some rows [N, L-1], as
`RowsLoss`."""


@dataclass(frozen=True)
class _CriticRows(Rows):
    """What a critic learns from, [B, S-1]."""

    old_values: Tensor
    returns: Tensor


class ValueModel(CheckpointedModel):
    """A transformer with a scalar head. Every rank calls every method with the same whole batch,
    and gets the whole result."""

    def __init__(
        self,
        shape: ModelShape,
        world: World,
        directory: Path,
        settings: MegatronModelConfig | TrainedModelConfig,
        *,
        total_updates: int = 1,
        loss: ValueLoss | None = None,
        head: Tensor | None = None,
        head_scale: float = 1.0,
    ) -> None:
        """`head` [1, H] is what a trained model's head is where the directory has none; zeros where
        None.

        `head_scale` is what the directory's head, or that one, is multiplied by.
        """
        super().__init__(ModelRunner(shape, world, "scalar", settings, total_updates), directory)
        self._loss = loss
        weights, is_trained = self.runner.weights, isinstance(settings, TrainedModelConfig)
        if head is not None and SCALAR_HEAD.name in weights:
            weights.write(SCALAR_HEAD.name, head)
        # What is trained may start from a language model's first layers, a critic then with a head
        # of zeros (Huang et al. 2023, detail 5); a frozen reward model needs a trained head.
        weights.load_directory(
            directory, optional=(SCALAR_HEAD.name,) if is_trained else (), partial=is_trained
        )
        if SCALAR_HEAD.name in weights and head_scale != 1.0:
            weights.write(SCALAR_HEAD.name, head_scale * weights.read(SCALAR_HEAD.name))
        if is_trained:
            self.runner.start_training()

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.runner.shape.vocab_size

    @property
    def version(self) -> int:
        """Optimizer steps taken."""
        return self.runner.updates

    def values(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """The head's number at each token; int64 [B, S] and [B] to float32 [B, S], zeros past a
        sequence's end."""
        return self.runner.rows(tokens, lengths, tokens.shape[1], _values)

    def train(
        self, tokens: Tensor, returns: Tensor, old_values: Tensor, mask: Tensor
    ) -> dict[str, float]:
        """One optimizer step; tokens int64 [B, S], the others float32 [B, S-1] where entry t speaks
        of token t+1.

        Returns the loss's statistics, `grad_norm` and `lr`.
        """
        if self._loss is None:
            raise ValueError("this model was built without a loss")
        loss, chosen = self._loss, mask > 0
        # What comes after the last token that is learned from cannot matter to a causal model.
        steps = torch.arange(1, mask.shape[1] + 1)
        lengths = torch.where(chosen, steps, 0).amax(1).clamp(min=1) + 1

        def rows_loss(
            values: Tensor, rows: _CriticRows, denominator: float
        ) -> tuple[Tensor, Stats]:
            return loss(
                values[:, :-1], rows.old_values, rows.returns, rows.mask, denominator=denominator
            )

        return self.train_rows(_CriticRows(tokens, lengths, chosen, old_values, returns), rows_loss)

    def train_rows(
        self,
        minibatch: Rows,
        loss: RowsLoss[Any],
        *,
        denominator: float | None = None,
        group: int = 1,
    ) -> dict[str, float]:
        """One optimizer step on a minibatch; returns the loss's statistics, `grad_norm` and `lr`.

        `denominator` is the loss's; the number of tokens in the mask where None. The loss sees
        every `group` rows in a row together, in their order.
        """
        shared = max(float(minibatch.mask.sum()), 1.0) if denominator is None else denominator

        def packed_loss(output: Tensor, batch: PackedBatch) -> tuple[Tensor, Stats]:
            rows = minibatch.select(batch.batch_rows, batch.width).to(output.device)
            return loss(_values(output, batch), rows, shared)

        return self.runner.update(
            self.runner.share(minibatch.tokens, minibatch.lengths, group), packed_loss
        )

    def sleep(self) -> None:
        """Keep the weights in host memory and free the device's, until `wake`; only `finish_save`
        may be called."""
        self.runner.sleep()

    def wake(self) -> None:
        """Bring the weights back to the device, as they were."""
        self.runner.wake()


def _values(output: Tensor, batch: PackedBatch) -> Tensor:
    return batch.unpack_tokens(output[0, :, 0].float())


def build_critic(config: Config, world: World, loss: ValueLoss) -> ValueModel:
    """The critic of a run, trained with `loss`.

    A head that its directory has is scaled by the gain of a reward normalization there, so that
    values begin in the units of the rewards; the bias, which no head has, is left to be learned. A
    model that is cut begins with a head of zeros: the directory's reads another layer's output.
    """
    directory = critic_directory(config)
    whole = read_shape(directory)
    shape, (gain, _) = first_layers(config, whole), read_normalization(directory)
    scale = gain if shape == whole else 0.0
    return ValueModel(
        shape,
        world,
        directory,
        config.critic,
        total_updates=critic_updates(config),
        loss=loss,
        head_scale=scale,
    )


def build_initial_reward_model(config: Config, world: World) -> ValueModel:
    """The reward model that a run trains, before its first step: the model's trunk, cut to
    `critic.num_layers` if set.

    Its head has no bias and is drawn from the seed, N(0, 1/sqrt(hidden size + 1)) (Huang et al.
    2023, detail 5).
    """
    directory = model_directory(config)
    shape = first_layers(config, read_shape(directory))
    head = torch.randn(1, shape.hidden_size, generator=torch.Generator().manual_seed(config.seed))
    head = head / (shape.hidden_size + 1) ** 0.5
    return ValueModel(
        shape, world, directory, config.actor, total_updates=config.run.steps, head=head
    )


def build_reward_model(config: Config, directory: Path, world: World) -> ValueModel:
    """The frozen reward model in a directory."""
    return ValueModel(read_shape(directory), world, directory, config.reward)
