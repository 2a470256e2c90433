"""Models with a scalar head: the critic, and reward models.

`ValueModel` computes and trains them. The functions at the end build the critic, the initial model
of reward-model training, and a frozen reward model.
"""

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
from aligner.schema.derived import count_critic_updates

RowsLoss: TypeAlias = Callable[[Tensor, RowsT, float], tuple[Tensor, Stats]]
"""Function `loss(values, rows, denominator)` of N rows.

`values` are the head's numbers at the rows' tokens, float32 [N, L], 0 after the end of a row, and
differentiable. The function returns the rows' part of the loss and of the statistics. The parts of
all rows of a minibatch add up to its loss and statistics.
"""
ValueLoss: TypeAlias = Callable[..., tuple[Tensor, Stats]]
"""Function `loss(values, old_values, returns, mask, denominator=…)` of tensors [N, L-1]; it returns
the same results as a `RowsLoss`."""


@dataclass(frozen=True)
class _CriticRows(Rows):
    """Training rows of a critic."""

    old_values: Tensor
    """Values before the step's updates, float32 [B, S-1]."""
    returns: Tensor
    """Regression targets, float32 [B, S-1]."""


class ValueModel(CheckpointedModel):
    """A transformer with a scalar head, either trained or frozen.

    Methods are SPMD: every rank must call them with the same whole batch, and gets the whole
    result.
    """

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
        """Load the model from a directory and, if it is trained, create its optimizer.

        Args:
            shape: Dimensions of the model.
            world: This rank's view of the role's ranks.
            directory: Hugging Face directory of the weights.
            settings: Configuration section of the model; a TrainedModelConfig means that the model
                is trained.
            total_updates: Number of optimizer steps of the learning-rate schedule.
            loss: Loss of `train`.
            head: Initial head [1, H] of a trained model whose directory contains no head; None
                means zeros.
            head_scale: Factor of the initial head.
        """
        super().__init__(ModelRunner(shape, world, "scalar", settings, total_updates), directory)
        self._loss = loss
        weights = self.runner.weights
        is_trained = isinstance(settings, TrainedModelConfig)
        if head is not None and SCALAR_HEAD.name in weights:
            weights.write(SCALAR_HEAD.name, head)
        # A trained model may start from the first layers of a language model; a critic then starts
        # with a head of zeros (Huang et al. 2023, detail 5). A frozen reward model needs a trained
        # head.
        weights.load_directory(
            directory, optional=(SCALAR_HEAD.name,) if is_trained else (), partial=is_trained
        )
        if SCALAR_HEAD.name in weights and head_scale != 1.0:
            weights.write(SCALAR_HEAD.name, head_scale * weights.read(SCALAR_HEAD.name))
        if is_trained:
            self.runner.start_training()

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.runner.shape.vocab_size

    @property
    def version(self) -> int:
        """Number of optimizer steps, including skipped ones."""
        return self.runner.updates

    def values(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return the head's number at each token. Collective.

        Args:
            tokens: Right-padded rows, int64 [B, S].
            lengths: Lengths of the rows in tokens, int64 [B].

        Returns:
            float32 [B, S], 0 after the end of a row.
        """
        return self.runner.compute_rows(tokens, lengths, tokens.shape[1], _read_values)

    def train(
        self, tokens: Tensor, returns: Tensor, old_values: Tensor, mask: Tensor
    ) -> dict[str, float]:
        """Take one optimizer step of a critic. Collective.

        Entry t of the tensors [B, S-1] belongs to token t+1.

        Args:
            tokens: Right-padded rows, int64 [B, S].
            returns: Regression targets, float32 [B, S-1].
            old_values: Values before the step's updates, float32 [B, S-1].
            mask: Tokens to train on, float32 [B, S-1].

        Returns:
            The statistics of the loss, and the results of `ModelRunner.update`, such as `grad_norm`
            and `lr`.

        Raises:
            ValueError: If the model was built without a loss.
        """
        if self._loss is None:
            raise ValueError("this model was built without a loss")
        loss = self._loss
        is_trained_token = mask > 0
        # A causal model does not need the tokens after the last masked token, so shorten the rows.
        steps = torch.arange(1, mask.shape[1] + 1)
        lengths = torch.where(is_trained_token, steps, 0).amax(1).clamp(min=1) + 1

        def rows_loss(
            values: Tensor, rows: _CriticRows, denominator: float
        ) -> tuple[Tensor, Stats]:
            return loss(
                values[:, :-1], rows.old_values, rows.returns, rows.mask, denominator=denominator
            )

        return self.train_rows(
            _CriticRows(tokens, lengths, is_trained_token, old_values, returns), rows_loss
        )

    def train_rows(
        self,
        minibatch: Rows,
        loss: RowsLoss[Any],
        *,
        denominator: float | None = None,
        group_size: int = 1,
    ) -> dict[str, float]:
        """Take one optimizer step on a minibatch. Collective.

        Args:
            minibatch: Rows to train on, [B, S].
            loss: Loss of the rows of one micro-batch.
            denominator: Denominator of the loss; None means the number of tokens in the mask.
            group_size: Number of consecutive rows that the loss must receive together, in their
                order.

        Returns:
            The statistics of the loss, and the results of `ModelRunner.update`, such as `grad_norm`
            and `lr`.
        """
        global_denominator = (
            max(float(minibatch.mask.sum()), 1.0) if denominator is None else denominator
        )

        def packed_loss(output: Tensor, batch: PackedBatch) -> tuple[Tensor, Stats]:
            rows = minibatch.select(batch.batch_rows, batch.width).to(output.device)
            return loss(_read_values(output, batch), rows, global_denominator)

        return self.runner.update(
            self.runner.pack(minibatch.tokens, minibatch.lengths, group_size), packed_loss
        )

    def sleep(self) -> None:
        """Move the weights to host memory and free their device memory until `wake`.

        Between `sleep` and `wake`, only `finish_save` may be called.
        """
        self.runner.sleep()

    def wake(self) -> None:
        """Restore the weights on the device after `sleep`."""
        self.runner.wake()


def _read_values(output: Tensor, batch: PackedBatch) -> Tensor:
    """Return the head's numbers float32 [N, L] from a micro-batch's output [1, T, 1]."""
    return batch.unpack_tokens(output[0, :, 0].float())


def build_critic(config: Config, world: World, loss: ValueLoss) -> ValueModel:
    """Return the critic of a run, which trains with `loss`.

    If the critic's directory contains a head and a reward normalization, the head is scaled by the
    gain of the normalization, so that values start in the units of the rewards. The bias of the
    normalization is not applied, since the head has no bias; the critic learns this offset. If the
    critic uses only the first layers of the model, it starts with a head of zeros, because the
    directory's head reads the output of another layer.
    """
    directory = critic_directory(config)
    whole = read_shape(directory)
    shape = first_layers(config, whole)
    gain, _ = read_normalization(directory)
    scale = gain if shape == whole else 0.0
    return ValueModel(
        shape,
        world,
        directory,
        config.critic,
        total_updates=count_critic_updates(config),
        loss=loss,
        head_scale=scale,
    )


def build_initial_reward_model(config: Config, world: World) -> ValueModel:
    """Return the reward model that a run trains, before its first step.

    Its trunk is the model's trunk, reduced to the first `critic.num_layers` layers if this key is
    set. Its head has no bias and is sampled from N(0, 1/sqrt(hidden size + 1)) with the seed of the
    run (Huang et al. 2023, detail 5).
    """
    directory = model_directory(config)
    shape = first_layers(config, read_shape(directory))
    head = torch.randn(1, shape.hidden_size, generator=torch.Generator().manual_seed(config.seed))
    head = head / (shape.hidden_size + 1) ** 0.5
    return ValueModel(
        shape, world, directory, config.actor, total_updates=config.run.steps, head=head
    )


def build_reward_model(config: Config, directory: Path, world: World) -> ValueModel:
    """Return the frozen reward model that is stored in a directory."""
    return ValueModel(read_shape(directory), world, directory, config.reward)
