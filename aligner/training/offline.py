"""Offline trainers: supervised fine-tuning, distillation, preferences, reward models, teacher
scores.

`OfflineTrainer` trains an `OfflineTask` on a file's demonstrations, preferences or labeled steps.
`TeacherScorer` computes a teacher's log-probs of demonstrations and stores them for later
distillation; it trains nothing.
"""

import json
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from aligner.algorithms.offline_losses import (
    LabeledRows,
    PairRows,
    PreferenceRows,
    StepRows,
    imitation_loss,
    labeled_answer_loss,
    offline_distillation_loss,
    pairwise_loss,
    sequence_rewards,
    step_label_loss,
)
from aligner.algorithms.preference_losses import pair_loss
from aligner.data.examples import Demonstration, LabeledAnswer, LabeledSteps, Preference
from aligner.data.fencing import fenced_write
from aligner.data.prompts import ExampleStream
from aligner.data.teacher_scores import assemble_teacher_scores, part_name, write_index, write_part
from aligner.data.types import Rows, Stats
from aligner.errors import AlignerError, ConfigError
from aligner.files import write_file
from aligner.megatron.policy import FrozenPolicy, Policy
from aligner.megatron.value_model import ValueModel
from aligner.models.model_source import NORMALIZATION
from aligner.observability.metrics import read_metrics
from aligner.observability.timeline import PhaseTimer
from aligner.paths import run_paths
from aligner.rewards.sources import RewardNormalizer
from aligner.schema import PreferenceConfig, TeacherConfig
from aligner.training.loop import TrainingLoop, is_due
from aligner.training.run_checkpoints import TrainingState
from aligner.training.step_metrics import StepResult

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TeacherScorer(TrainingLoop):
    """Scores all demonstrations once with a teacher; each step writes one of `run.steps` equal
    parts to a file.

    The run saves no checkpoints: it resumes after the last step whose metrics are written.
    """

    model: FrozenPolicy
    demonstrations: Sequence[Demonstration]
    pad_token_id: int
    vocabulary: int
    """Number of token ids; only ids below it are scored."""
    tokenizer_file: Path

    def resume(self, saved: Sequence[TrainingState]) -> int:
        """Return the number of completed steps, according to the metrics, which are written last.

        Raises:
            ConfigError: The run was started with another value of `run.steps`.
        """
        done = read_metrics(run_paths(self.config).metrics) if self.config.run.resumes else []
        first = int(done[-1]["step"]) if done else 0
        for step in range(first):
            if not self._part(step).is_file():
                raise ConfigError(
                    f"run.steps={self.config.run.steps}: the run was started with another value of"
                    " run.steps; resume with the original value"
                )
        return first

    def step(self, step: int, timer: PhaseTimer) -> StepResult:
        """Score one part of the demonstrations and write it to its file."""
        steps = self.config.run.steps
        count = len(self.demonstrations)
        part = self.demonstrations[step * count // steps : (step + 1) * count // steps]

        with timer.phase("score"):
            rows = demonstration_rows(part, self.pad_token_id)
            options: dict[str, Any] = {"mask": rows.mask, "temperature": 1.0}
            top_k_logprobs = self.model.top_k_logprobs(
                rows.tokens, rows.lengths, self.config.teacher.top_k, self.vocabulary, **options
            )
        if self.recorder is not None:
            with fenced_write():
                self._part(step).parent.mkdir(exist_ok=True)
                write_part(self._part(step), rows, top_k_logprobs)

        # The last outcome is the log-probability of all tokens outside the teacher's top k.
        covered = 1 - top_k_logprobs.outcomes[rows.mask][:, -1].exp()
        metrics = {
            "teacher_scores/loss": -float(top_k_logprobs.logprobs[rows.mask].mean()),
            "teacher_scores/covered": float(covered.mean()),
        }
        return StepResult(metrics, {"samples": len(part), "tokens": int(rows.lengths.sum())})

    def finish(self) -> None:
        """Write the index of the directory after all parts are complete."""
        steps = self.config.run.steps
        top_k = min(self.config.teacher.top_k, self.vocabulary)
        if self.recorder is not None and self.stop.last == steps and not self.stop.is_early:
            with fenced_write():
                write_index(
                    run_paths(self.config).teacher_scores,
                    steps,
                    top_k,
                    self.vocabulary,
                    self.tokenizer_file,
                )

    def _part(self, step: int) -> Path:
        return run_paths(self.config).teacher_scores / part_name(step + 1, self.config.run.steps)


@dataclass(frozen=True)
class OfflineTask(ABC):
    """What an offline run trains: the model, the rows of its examples, and the loss.

    Every rank of the trainer has an instance and calls every method with the same arguments.
    """

    model: Policy | ValueModel
    pad_token_id: int
    name: ClassVar[str]
    """Prefix of the task's metrics."""
    part: ClassVar[str]
    """Part of the checkpoint that holds the model."""
    group: ClassVar[int] = 1
    """Number of rows per example."""

    @abstractmethod
    def rows(self, examples: Sequence[Any]) -> Rows:
        """Return the examples as rows of tensors."""

    @abstractmethod
    def loss(self, output: Tensor, rows: Any, denominator: float) -> tuple[Tensor, Stats]:
        """Return the loss and its statistics, as sums divided by `denominator`.

        Args:
            output: Log-probs of the policy [B, S-1], or outputs of the value head [B, S].
        """

    def count(self, rows: Rows) -> float:
        """Return the denominator of the loss: the number of pairs for pairwise tasks, otherwise of
        trained tokens."""
        return rows.tokens.shape[0] / 2 if self.group == 2 else float(rows.mask.sum())

    def train(self, rows: Rows) -> dict[str, float]:
        """Run one optimizer step; return the statistics of the loss and of the update."""
        if isinstance(self.model, ValueModel):
            return self.model.train_rows(
                rows, self.loss, denominator=self.count(rows), group_size=self.group
            )
        return self.model.train(
            rows, self._policy_loss, denominator=self.count(rows), group_size=self.group
        )

    def evaluate(self, rows: Rows, denominator: float) -> Stats:
        """Return the statistics of the loss, as sums divided by `denominator`, without training."""
        output = self.model.values if isinstance(self.model, ValueModel) else self.model.logprobs
        return self.loss(output(rows.tokens, rows.lengths), rows, denominator)[1]

    def companions(self) -> Mapping[str, Any]:
        """Return JSON files to store beside the model in its current state, by file name."""
        return {}

    def _policy_loss(
        self, logprobs: Tensor, entropy: Tensor, rows: Any, denominator: float
    ) -> tuple[Tensor, Stats]:
        return self.loss(logprobs, rows, denominator)


@dataclass(frozen=True)
class SupervisedFineTuning(OfflineTask):
    """Task of imitating the responses of demonstrations."""

    name = "sft"
    part = "policy"

    def rows(self, examples: Sequence[Demonstration]) -> Rows:
        """Return one row per demonstration."""
        return demonstration_rows(examples, self.pad_token_id)

    def loss(self, output: Tensor, rows: Rows, denominator: float) -> tuple[Tensor, Stats]:
        """Return the cross entropy."""
        return imitation_loss(output, rows, denominator)


@dataclass(frozen=True)
class OfflineDistillation(SupervisedFineTuning):
    """Task of matching a teacher's stored distributions at each token of the responses."""

    model: Policy
    teacher: TeacherConfig

    def rows(self, examples: Sequence[Demonstration]) -> Rows:
        """Return one row per demonstration, with the teacher's most probable tokens."""
        rows = super().rows(examples)
        teacher_scores = assemble_teacher_scores(
            [example.teacher_row for example in examples if example.teacher_row is not None],
            rows.mask,
        )
        return replace(
            rows, candidates=teacher_scores.ids, candidate_targets=teacher_scores.outcomes
        )

    def evaluate(self, rows: Rows, denominator: float) -> Stats:
        """Return the statistics of the loss, as sums divided by `denominator`, without training."""
        return self.loss(*self.model.score_candidates(rows), denominator)[1]

    def loss(self, output: Tensor, rows: Rows, denominator: float) -> tuple[Tensor, Stats]:
        """Return the divergence from the teacher, plus the configured share of the cross
        entropy."""
        return offline_distillation_loss(output, rows, self.teacher, denominator)


@dataclass(frozen=True)
class DirectPreferenceOptimization(OfflineTask):
    """Task of preferring the chosen over the rejected answer of each pair.

    The reference model is the model that the run starts from.
    """

    model: Policy
    settings: PreferenceConfig
    name = "dpo"
    part = "policy"
    group = 2

    def rows(self, examples: Sequence[Preference]) -> PreferenceRows:
        """Return two rows per pair, with the reference's log-probs if the loss uses them."""
        rows = demonstration_rows(pair_members(examples), self.pad_token_id)
        reference = torch.zeros(rows.mask.shape)
        if self.settings.has_reference:
            reference = self.model.reference_logprobs(rows.tokens, rows.lengths, mask=rows.mask)
        margins = torch.tensor(
            [math.nan if pair.margin is None else pair.margin for pair in examples]
        )
        return PreferenceRows(
            rows.tokens, rows.lengths, rows.mask, reference, margins.repeat_interleave(2)
        )

    def loss(
        self, output: Tensor, rows: PreferenceRows, denominator: float
    ) -> tuple[Tensor, Stats]:
        """Return the loss of `algorithm.preference`."""
        margins = rows.margins[::2]
        return pair_loss(
            output, rows.reference_logprobs, rows.mask, self.settings, denominator, margins=margins
        )


@dataclass(frozen=True)
class KahnemanTverskyOptimization(OfflineTask):
    """Task of making desirable answers more probable and undesirable answers less probable.

    The reference model is the model that the run starts from.
    """

    model: Policy
    settings: PreferenceConfig
    name = "dpo"
    part = "policy"

    def rows(self, examples: Sequence[LabeledAnswer]) -> LabeledRows:
        """Return one row per answer, with the reference's log-probs.

        The KL baseline of the rows is 0 here: it depends on the current policy, so `train` and
        `evaluate` compute it.
        """
        rows = demonstration_rows([example.answer for example in examples], self.pad_token_id)
        desirable = torch.tensor([example.is_desirable for example in examples])
        # Each class gets the same total weight, whatever its number of examples.
        share = len(examples) / torch.where(desirable, desirable.sum(), (~desirable).sum())
        reference = self.model.reference_logprobs(rows.tokens, rows.lengths, mask=rows.mask)
        return LabeledRows(
            rows.tokens,
            rows.lengths,
            rows.mask,
            reference,
            desirable,
            torch.zeros(len(examples)),
            share,
        )

    def count(self, rows: Rows) -> float:
        """Return the number of answers."""
        return float(rows.tokens.shape[0])

    def train(self, rows: Rows) -> dict[str, float]:
        """Run one optimizer step; return the statistics of the loss and of the update."""
        return super().train(self._with_baseline(rows))

    def evaluate(self, rows: Rows, denominator: float) -> Stats:
        """Return the statistics of the loss with the baseline of the current policy."""
        return super().evaluate(self._with_baseline(rows), denominator)

    def loss(self, output: Tensor, rows: LabeledRows, denominator: float) -> tuple[Tensor, Stats]:
        """Return the loss of `algorithm.preference`."""
        return labeled_answer_loss(output, rows, self.settings, denominator)

    def _with_baseline(self, rows: Any) -> LabeledRows:
        """Return the rows with the estimate of the KL: the mean log-ratio of mismatched answers, at
        least 0.

        Each prompt is combined with the answer of another prompt (Ethayarajh et al. 2024, section
        4.1).
        """
        mismatched = with_others_answers(rows, self.pad_token_id)
        options: dict[str, Any] = {"mask": mismatched.mask}
        logprobs = self.model.logprobs(mismatched.tokens, mismatched.lengths, **options)
        log_ratios = logprobs - self.model.reference_logprobs(
            mismatched.tokens, mismatched.lengths, **options
        )

        baseline = torch.where(mismatched.mask, log_ratios, 0.0).sum(1).mean().clamp(min=0)
        baseline_rows: LabeledRows = replace(rows, baseline=baseline.expand(len(rows.tokens)))
        return baseline_rows


@dataclass(frozen=True)
class PairwiseRewardModel(OfflineTask):
    """Task of training a reward model to score the chosen answer above the rejected one.

    The loss uses normalized rewards: with the untrained head, the initial policy's samples have
    mean 0 and standard deviation 1. The checkpoint stores the normalization of the trained head
    (Huang et al. 2023, detail 6).
    """

    model: ValueModel
    samples: Rows
    """Samples of the initial policy; the mask covers whole sequences."""
    normalizer: RewardNormalizer
    """Normalization of the model before its first step."""
    name = part = "reward_model"
    group = 2

    @classmethod
    def start(
        cls, model: ValueModel, pad_token_id: int, samples: Sequence[Demonstration]
    ) -> "PairwiseRewardModel":
        """Build the task for a model that has not been trained, and fit its normalization.

        Raises:
            AlignerError: The model's rewards of all samples are equal.
        """
        rows = demonstration_rows(samples, pad_token_id)
        return cls(model, pad_token_id, rows, fit_normalizer(model, rows))

    def rows(self, examples: Sequence[Preference]) -> PairRows:
        """Return two rows per pair, the chosen answer first; the margin is 0 for a pair without
        one."""
        rows = demonstration_rows(pair_members(examples), self.pad_token_id)
        # Only the reward at the last token of a row is trained.
        last = torch.arange(1, rows.tokens.shape[1]) == rows.lengths[:, None] - 1
        margins = torch.tensor([pair.margin or 0.0 for pair in examples]).repeat_interleave(2)
        return PairRows(rows.tokens, rows.lengths, last, margins)

    def loss(self, output: Tensor, rows: PairRows, denominator: float) -> tuple[Tensor, Stats]:
        """Return the loss of the differences of the rewards."""
        return pairwise_loss(output, rows, denominator, self.normalizer)

    def companions(self) -> Mapping[str, Any]:
        """Return the normalization of the model in its current state."""
        return {NORMALIZATION: asdict(fit_normalizer(self.model, self.samples))}


@dataclass(frozen=True)
class ProcessRewardModel(OfflineTask):
    """Task of training a reward model to distinguish correct from incorrect steps.

    The output of the head at the last token of a step is the logit of the step's correctness.
    """

    name = part = "reward_model"

    def rows(self, examples: Sequence[LabeledSteps]) -> StepRows:
        """Return one row per answer; the mask selects the last tokens of its steps."""
        answers = [Demonstration(answer.tokens, answer.prompt_length) for answer in examples]
        rows = demonstration_rows(answers, self.pad_token_id)
        mask = torch.zeros_like(rows.mask)
        labels = torch.zeros(rows.mask.shape)
        for row, example in enumerate(examples):
            # Column t of the mask belongs to token t + 1.
            mask[row, example.positions - 1] = True
            labels[row, example.positions - 1] = example.labels
        return StepRows(rows.tokens, rows.lengths, mask, labels)

    def loss(self, output: Tensor, rows: StepRows, denominator: float) -> tuple[Tensor, Stats]:
        """Return the binary cross entropy."""
        return step_label_loss(output, rows, denominator)


def pair_members(pairs: Sequence[Preference]) -> list[Demonstration]:
    """Return the answers of all pairs in the order chosen, rejected, chosen, rejected, …."""
    return [member for pair in pairs for member in (pair.chosen, pair.rejected)]


def demonstration_rows(demonstrations: Sequence[Demonstration], pad_token_id: int) -> Rows:
    """Return right-padded rows of the demonstrations, in their order.

    The mask selects the response tokens, or the trained tokens among them.
    """
    lengths = torch.tensor([demonstration.tokens.numel() for demonstration in demonstrations])
    tokens = pad_sequence(
        [demonstration.tokens for demonstration in demonstrations],
        batch_first=True,
        padding_value=pad_token_id,
    )
    mask = pad_sequence(
        [demonstration.loss_mask[1:] for demonstration in demonstrations], batch_first=True
    )
    return Rows(tokens, lengths, mask)


def with_others_answers(rows: Rows, pad_token_id: int) -> Rows:
    """Return each row's prompt with the answer of the next row; the last prompt gets the first
    answer."""
    starts = rows.mask.int().argmax(1) + 1
    parts = [
        (row[:start], row[start:length])
        for row, start, length in zip(rows.tokens, starts, rows.lengths, strict=True)
    ]
    answers = [parts[(index + 1) % len(parts)][1] for index in range(len(parts))]
    mixed = [
        Demonstration(torch.cat([parts[index][0], answer]), len(parts[index][0]))
        for index, answer in enumerate(answers)
    ]
    return demonstration_rows(mixed, pad_token_id)


def fit_normalizer(model: ValueModel, samples: Rows) -> RewardNormalizer:
    """Return the normalization that gives the model's rewards of the samples mean 0 and deviation
    1. Collective.

    Raises:
        AlignerError: The rewards are all equal, or not finite.
    """
    rewards = sequence_rewards(model.values(samples.tokens, samples.lengths), samples)
    try:
        return RewardNormalizer.fit(rewards)
    except ValueError as error:
        raise AlignerError(
            f"cannot normalize the scores of the reward model for {len(rewards)} samples from the"
            f" initial policy: {error}"
        ) from error


_OF_EVERY_UPDATE = ("entropy", "grad_norm", "lr", "skipped", "skipped_total")


@dataclass(kw_only=True)
class OfflineTrainer(TrainingLoop):
    """Training loop of an offline task; every rank has all examples."""

    task: OfflineTask
    examples: ExampleStream[Any]
    held_out: Sequence[Any]
    """Examples for evaluation, never used for training."""
    _position: int = field(default=0, init=False)
    """Number of examples taken so far."""
    _companions: Mapping[str, Any] = field(default_factory=dict, init=False)
    """JSON files to store beside the model in the checkpoint that is being written."""

    def resume(self, saved: Sequence[TrainingState]) -> int:
        """Restore the model and the position in the data; return the number of completed steps."""
        first = 0
        if saved:
            first = saved[-1].step
            self._position = saved[-1].position
            self.task.model.load(
                run_paths(self.config).checkpoint(first, self.task.part), verified=True
            )
        if self.recorder is not None:
            _log.info("%s", self._announcement(first))
        return first

    def step(self, step: int, timer: PhaseTimer) -> StepResult:
        """Run one optimizer step on the next examples."""
        size = self.config.data.batch_size
        with timer.phase("batch"):
            rows = self.task.rows(self.examples.take(self._position, size))
        self._position += size
        with timer.phase("train"):
            stats = self.task.train(rows)

        prefixed = {
            f"{'policy' if name in _OF_EVERY_UPDATE else self.task.name}/{name}": stats[name]
            for name in stats
        }
        return StepResult(prefixed, {"samples": size, "tokens": int(rows.lengths.sum())})

    def is_evaluated(self, step: int, *, saves: bool) -> bool:
        """Return whether an evaluation is due: with every checkpoint, and at the interval of
        `evaluation.every`."""
        return bool(self.held_out) and (saves or is_due(self.config.evaluation.every, step))

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the loss and its statistics on the held-out examples."""
        denominator = sum(map(self.task.count, self._held_out_rows))
        batch_stats = [self.task.evaluate(rows, denominator) for rows in self._held_out_rows]
        return {
            f"eval/{name}": sum(float(stats[name]) for stats in batch_stats)
            for name in batch_stats[0]
        }

    @cached_property
    def _held_out_rows(self) -> list[Rows]:
        """Held-out examples as rows, in batches of the size of a step."""
        size = self.config.data.batch_size
        return [
            self.task.rows(self.held_out[start : start + size])
            for start in range(0, len(self.held_out), size)
        ]

    def _announcement(self, first: int) -> str:
        data = self.config.data
        steps = self.config.run.steps
        rows = len(self.examples)
        size = data.batch_size
        resumed = f"; resumed after step {first}" if first else ""
        return (
            f"{self.task.name}: {rows} rows, {len(self.held_out)} held out; {size} rows per step,"
            f" {rows / size:.1f} steps per epoch; run.steps={steps} is"
            f" {steps * size / rows:.2f} epochs{resumed}"
        )

    def begin_save(self, step: int) -> TrainingState:
        """Start to save the model, and compute the files to store beside it."""
        self.task.model.begin_save(run_paths(self.config).checkpoint(step, self.task.part))
        # Compute them now: the next step changes the model while the checkpoint is being written.
        self._companions = self.task.companions()
        return TrainingState(step, kl_coefficient=0.0, critic_updates=0, position=self._position)

    def finish_save(self, state: TrainingState) -> TrainingState:
        """Wait until the model is saved, then write the companion files to its directory."""
        self.task.model.finish_save()
        if self.recorder is not None:
            directory = run_paths(self.config).checkpoint(state.step, self.task.part)
            for name, content in self._companions.items():
                with fenced_write():
                    write_file(directory / name, json.dumps(content, indent=1) + "\n")
        return state
