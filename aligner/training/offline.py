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
from aligner.paths import get_run_paths
from aligner.rewards.sources import RewardNormalizer
from aligner.schema import PreferenceConfig, TeacherConfig
from aligner.training.loop import TrainingLoop, is_due
from aligner.training.run_checkpoints import TrainingState
from aligner.training.step_metrics import StepResult

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TeacherScorer(TrainingLoop):
    """Computes a teacher's log-probs of all demonstrations.

    Each step writes one of `run.steps` equal parts to a file. The run saves no checkpoints: it
    resumes after the last step whose metrics are written.
    """

    model: FrozenPolicy
    demonstrations: ExampleStream[Demonstration]
    pad_token_id: int
    vocabulary_size: int
    """Number of token ids; only ids below it are scored."""
    tokenizer_file: Path

    def resume(self, states: Sequence[TrainingState]) -> int:
        """Return the number of completed steps, according to the metrics, which are written last.

        Raises:
            ConfigError: The run was started with another value of `run.steps`.
        """
        records = (
            read_metrics(get_run_paths(self.config).metrics)
            if self.config.run.should_resume
            else []
        )
        completed_steps = int(records[-1]["step"]) if records else 0
        # The number of parts is in the file names, so another value of run.steps finds no files.
        for step in range(completed_steps):
            if not self._get_part_path(step).is_file():
                raise ConfigError(
                    f"run.steps={self.config.run.steps}: the run was started with another value of"
                    " run.steps; resume with the original value"
                )
        return completed_steps

    def step(self, step: int, timer: PhaseTimer) -> StepResult:
        """Score one part of the demonstrations and write it to its file."""
        steps = self.config.run.steps
        count = len(self.demonstrations)
        # The sizes of the parts differ by at most 1, and each demonstration is in one part.
        start = step * count // steps
        end = (step + 1) * count // steps
        part = self.demonstrations.get_range(start, end)

        with timer.phase("score"):
            rows = pad_demonstrations(part, self.pad_token_id)
            options: dict[str, Any] = {"mask": rows.mask, "temperature": 1.0}
            top_k = self.config.teacher.top_k
            top_k_logprobs = self.model.top_k_logprobs(
                rows.tokens, rows.lengths, top_k, self.vocabulary_size, **options
            )
        if self.recorder is not None:  # only rank 0 has a recorder
            with fenced_write():
                self._get_part_path(step).parent.mkdir(exist_ok=True)
                write_part(self._get_part_path(step), rows, top_k_logprobs)

        # The last outcome is the log-probability of all tokens outside the teacher's top k.
        top_k_mass = 1 - top_k_logprobs.outcomes[rows.mask][:, -1].exp()
        metrics = {
            "teacher_scores/loss": -float(top_k_logprobs.logprobs[rows.mask].mean()),
            "teacher_scores/covered": float(top_k_mass.mean()),
        }
        return StepResult(metrics, {"samples": len(part), "tokens": int(rows.lengths.sum())})

    def finish(self) -> None:
        """Write the index of the directory after all parts are complete."""
        steps = self.config.run.steps
        top_k = min(self.config.teacher.top_k, self.vocabulary_size)
        # The index makes the directory usable, so it is written only when no part is missing.
        if (
            self.recorder is not None
            and self.stop_condition.last_step == steps
            and not self.stop_condition.is_early
        ):
            with fenced_write():
                write_index(
                    get_run_paths(self.config).teacher_scores,
                    steps,
                    top_k,
                    self.vocabulary_size,
                    self.tokenizer_file,
                )

    def _get_part_path(self, step: int) -> Path:
        return get_run_paths(self.config).teacher_scores / part_name(
            step + 1, self.config.run.steps
        )


@dataclass(frozen=True)
class OfflineTask(ABC):
    """Model, conversion of examples to rows, and loss of an offline run.

    Every rank of the trainer has an instance and calls every method with the same arguments.
    """

    model: Policy | ValueModel
    pad_token_id: int
    name: ClassVar[str]
    """Prefix of the task's metrics."""
    checkpoint_part: ClassVar[str]
    """Part of the checkpoint that holds the model."""
    rows_per_example: ClassVar[int] = 1
    """Number of rows per example."""

    @abstractmethod
    def build_rows(self, examples: Sequence[Any]) -> Rows:
        """Return the examples as rows of tensors."""

    @abstractmethod
    def compute_loss(self, output: Tensor, rows: Any, denominator: float) -> tuple[Tensor, Stats]:
        """Return the loss and its statistics, as sums divided by `denominator`.

        Args:
            output: Log-probs of the policy [B, S-1], or outputs of the value head [B, S].
        """

    def compute_denominator(self, rows: Rows) -> float:
        """Return the denominator of the loss: the number of pairs for pairwise tasks, otherwise of
        trained tokens."""
        if self.rows_per_example == 2:
            return rows.tokens.shape[0] / 2
        return float(rows.mask.sum())

    def train(self, rows: Rows) -> dict[str, float]:
        """Run one optimizer step; return the statistics of the loss and of the update."""
        denominator = self.compute_denominator(rows)
        # The group size keeps the rows of a pair in one micro-batch: the loss compares them.
        group_size = self.rows_per_example
        if isinstance(self.model, ValueModel):
            return self.model.train_rows(
                rows, self.compute_loss, denominator=denominator, group_size=group_size
            )
        return self.model.train(
            rows, self._compute_policy_loss, denominator=denominator, group_size=group_size
        )

    def evaluate(self, rows: Rows, denominator: float) -> Stats:
        """Return the statistics of the loss, as sums divided by `denominator`, without training."""
        forward = self.model.values if isinstance(self.model, ValueModel) else self.model.logprobs
        _, stats = self.compute_loss(forward(rows.tokens, rows.lengths), rows, denominator)
        return stats

    def build_companion_files(self) -> Mapping[str, Any]:
        """Return JSON files to store beside the model in its current state, by file name."""
        return {}

    def _compute_policy_loss(
        self, logprobs: Tensor, entropy: Tensor, rows: Any, denominator: float
    ) -> tuple[Tensor, Stats]:
        return self.compute_loss(logprobs, rows, denominator)


@dataclass(frozen=True)
class SupervisedFineTuning(OfflineTask):
    """Task of imitating the responses of demonstrations."""

    name = "sft"
    checkpoint_part = "policy"

    def build_rows(self, examples: Sequence[Demonstration]) -> Rows:
        """Return one row per demonstration."""
        return pad_demonstrations(examples, self.pad_token_id)

    def compute_loss(self, output: Tensor, rows: Rows, denominator: float) -> tuple[Tensor, Stats]:
        """Return the cross entropy."""
        return imitation_loss(output, rows, denominator)


@dataclass(frozen=True)
class OfflineDistillation(SupervisedFineTuning):
    """Task of matching a teacher's stored distributions at each token of the responses."""

    model: Policy
    teacher: TeacherConfig

    def build_rows(self, examples: Sequence[Demonstration]) -> Rows:
        """Return one row per demonstration, with the teacher's most probable tokens."""
        rows = super().build_rows(examples)
        teacher_scores = assemble_teacher_scores(
            [example.teacher_row for example in examples if example.teacher_row is not None],
            rows.mask,
        )
        return replace(
            rows, candidates=teacher_scores.ids, candidate_targets=teacher_scores.outcomes
        )

    def evaluate(self, rows: Rows, denominator: float) -> Stats:
        """Return the statistics of the loss, as sums divided by `denominator`, without training."""
        logprobs, scored_rows = self.model.score_candidates(rows)
        _, stats = self.compute_loss(logprobs, scored_rows, denominator)
        return stats

    def compute_loss(self, output: Tensor, rows: Rows, denominator: float) -> tuple[Tensor, Stats]:
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
    checkpoint_part = "policy"
    rows_per_example = 2

    def build_rows(self, examples: Sequence[Preference]) -> PreferenceRows:
        """Return two rows per pair, with the reference's log-probs if the loss uses them."""
        rows = pad_demonstrations(flatten_pairs(examples), self.pad_token_id)
        reference_logprobs = torch.zeros(rows.mask.shape)
        if self.settings.has_reference:
            reference_logprobs = self.model.reference_logprobs(
                rows.tokens, rows.lengths, mask=rows.mask
            )
        margins = torch.tensor(
            [math.nan if pair.margin is None else pair.margin for pair in examples]
        )
        # Every tensor of `Rows` has one entry per row, so both rows of a pair have its margin.
        row_margins = margins.repeat_interleave(2)
        return PreferenceRows(rows.tokens, rows.lengths, rows.mask, reference_logprobs, row_margins)

    def compute_loss(
        self, output: Tensor, rows: PreferenceRows, denominator: float
    ) -> tuple[Tensor, Stats]:
        """Return the loss of `algorithm.preference`."""
        margins = rows.margins[::2]  # one per pair
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
    checkpoint_part = "policy"

    def build_rows(self, examples: Sequence[LabeledAnswer]) -> LabeledRows:
        """Return one row per answer, with the reference's log-probs.

        The KL baseline of the rows is 0 here: it depends on the current policy, so `train` and
        `evaluate` compute it.
        """
        rows = pad_demonstrations([example.answer for example in examples], self.pad_token_id)
        is_desirable = torch.tensor([example.is_desirable for example in examples])
        label_counts = torch.where(is_desirable, is_desirable.sum(), (~is_desirable).sum())
        # Each label gets the same total weight, whatever its number of examples.
        label_weight = len(examples) / label_counts
        reference_logprobs = self.model.reference_logprobs(
            rows.tokens, rows.lengths, mask=rows.mask
        )
        return LabeledRows(
            rows.tokens,
            rows.lengths,
            rows.mask,
            reference_logprobs,
            is_desirable,
            torch.zeros(len(examples)),
            label_weight,
        )

    def compute_denominator(self, rows: Rows) -> float:
        """Return the number of answers."""
        return float(rows.tokens.shape[0])

    def train(self, rows: Rows) -> dict[str, float]:
        """Run one optimizer step; return the statistics of the loss and of the update."""
        return super().train(self._add_baseline(rows))

    def evaluate(self, rows: Rows, denominator: float) -> Stats:
        """Return the statistics of the loss with the baseline of the current policy."""
        return super().evaluate(self._add_baseline(rows), denominator)

    def compute_loss(
        self, output: Tensor, rows: LabeledRows, denominator: float
    ) -> tuple[Tensor, Stats]:
        """Return the loss of `algorithm.preference`."""
        return labeled_answer_loss(output, rows, self.settings, denominator)

    def _add_baseline(self, rows: Any) -> LabeledRows:
        """Return the rows with the estimate of the KL: the mean log-ratio of mismatched answers, at
        least 0.

        Each prompt is combined with the answer of another prompt (Ethayarajh et al. 2024, section
        4.1).
        """
        mismatched = mismatch_answers(rows, self.pad_token_id)
        options: dict[str, Any] = {"mask": mismatched.mask}
        logprobs = self.model.logprobs(mismatched.tokens, mismatched.lengths, **options)
        log_ratios = logprobs - self.model.reference_logprobs(
            mismatched.tokens, mismatched.lengths, **options
        )

        # z0 = max(0, mean over the rows of log π(y'|x) / π_ref(y'|x)), a constant of the loss.
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
    name = "reward_model"
    checkpoint_part = "reward_model"
    rows_per_example = 2

    @classmethod
    def from_initial_model(
        cls, model: ValueModel, pad_token_id: int, samples: Sequence[Demonstration]
    ) -> "PairwiseRewardModel":
        """Build the task for a model that has not been trained, and fit its normalization.

        Raises:
            AlignerError: The model's rewards of all samples are equal.
        """
        rows = pad_demonstrations(samples, pad_token_id)
        return cls(model, pad_token_id, rows, fit_normalizer(model, rows))

    def build_rows(self, examples: Sequence[Preference]) -> PairRows:
        """Return two rows per pair, the chosen answer first; the margin is 0 for a pair without
        one."""
        rows = pad_demonstrations(flatten_pairs(examples), self.pad_token_id)
        # Only the reward at the last token of a row is trained.
        is_last = torch.arange(1, rows.tokens.shape[1]) == rows.lengths[:, None] - 1  # [B, S-1]
        margins = torch.tensor([pair.margin or 0.0 for pair in examples]).repeat_interleave(2)
        return PairRows(rows.tokens, rows.lengths, is_last, margins)

    def compute_loss(
        self, output: Tensor, rows: PairRows, denominator: float
    ) -> tuple[Tensor, Stats]:
        """Return the loss of the differences of the rewards."""
        return pairwise_loss(output, rows, denominator, self.normalizer)

    def build_companion_files(self) -> Mapping[str, Any]:
        """Return the normalization of the model in its current state."""
        return {NORMALIZATION: asdict(fit_normalizer(self.model, self.samples))}


@dataclass(frozen=True)
class ProcessRewardModel(OfflineTask):
    """Task of training a reward model to distinguish correct from incorrect steps.

    The output of the head at the last token of a step is the logit of the step's correctness.
    """

    name = "reward_model"
    checkpoint_part = "reward_model"

    def build_rows(self, examples: Sequence[LabeledSteps]) -> StepRows:
        """Return one row per answer; the mask selects the last tokens of its steps."""
        answers = [Demonstration(answer.tokens, answer.prompt_length) for answer in examples]
        rows = pad_demonstrations(answers, self.pad_token_id)
        mask = torch.zeros_like(rows.mask)  # [B, S-1]
        labels = torch.zeros(rows.mask.shape)
        for row, example in enumerate(examples):
            # Column t of the mask belongs to token t + 1.
            mask[row, example.positions - 1] = True
            labels[row, example.positions - 1] = example.labels
        return StepRows(rows.tokens, rows.lengths, mask, labels)

    def compute_loss(
        self, output: Tensor, rows: StepRows, denominator: float
    ) -> tuple[Tensor, Stats]:
        """Return the binary cross entropy."""
        return step_label_loss(output, rows, denominator)


def flatten_pairs(pairs: Sequence[Preference]) -> list[Demonstration]:
    """Return the answers of all pairs in the order chosen, rejected, chosen, rejected, …."""
    return [answer for pair in pairs for answer in (pair.chosen, pair.rejected)]


def pad_demonstrations(demonstrations: Sequence[Demonstration], pad_token_id: int) -> Rows:
    """Return right-padded rows of the demonstrations, in their order.

    The mask selects the response tokens, or the trained tokens among them.
    """
    lengths = torch.tensor([demonstration.tokens.numel() for demonstration in demonstrations])
    tokens = pad_sequence(
        [demonstration.tokens for demonstration in demonstrations],
        batch_first=True,
        padding_value=pad_token_id,
    )
    # Entry t of the mask belongs to token t + 1, because token t predicts it.
    mask = pad_sequence(
        [demonstration.loss_mask[1:] for demonstration in demonstrations], batch_first=True
    )
    return Rows(tokens, lengths, mask)


def mismatch_answers(rows: Rows, pad_token_id: int) -> Rows:
    """Return each row's prompt with the answer of the next row; the last prompt gets the first
    answer."""
    # argmax returns the first true entry of the mask; its token is one position later.
    starts = rows.mask.int().argmax(1) + 1
    prompts_and_answers = [
        (row[:start], row[start:length])
        for row, start, length in zip(rows.tokens, starts, rows.lengths, strict=True)
    ]
    count = len(prompts_and_answers)
    next_answers = [prompts_and_answers[(index + 1) % count][1] for index in range(count)]
    mismatched = [
        Demonstration(torch.cat([prompt, next_answer]), len(prompt))
        for (prompt, _), next_answer in zip(prompts_and_answers, next_answers, strict=True)
    ]
    return pad_demonstrations(mismatched, pad_token_id)


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


# Statistics of the model's update, which every task has; the others are of the task's loss.
_UPDATE_METRICS = ("entropy", "grad_norm", "lr", "skipped", "skipped_total")


@dataclass(kw_only=True)
class OfflineTrainer(TrainingLoop):
    """Training loop of an offline task.

    Every rank has all examples and builds the whole batch; the model divides it between the ranks.
    """

    task: OfflineTask
    examples: ExampleStream[Any]
    held_out_examples: Sequence[Any]
    """Examples for evaluation, never used for training."""
    _position: int = field(default=0, init=False)
    """Number of examples that the steps have consumed so far."""
    _companion_files: Mapping[str, Any] = field(default_factory=dict, init=False)
    """JSON files to store beside the model in the checkpoint that is being written."""

    def resume(self, states: Sequence[TrainingState]) -> int:
        """Restore the model and the position in the data; return the number of completed steps."""
        completed_steps = 0
        if states:
            completed_steps = states[-1].step
            self._position = states[-1].position
            directory = get_run_paths(self.config).checkpoint(
                completed_steps, self.task.checkpoint_part
            )
            self.task.model.load(directory, verified=True)

        if self.recorder is not None:
            _log.info("%s", self._describe_run(completed_steps))
        return completed_steps

    def step(self, step: int, timer: PhaseTimer) -> StepResult:
        """Run one optimizer step on the next examples."""
        size = self.config.data.batch_size
        with timer.phase("batch"):
            rows = self.task.build_rows(self.examples.take(self._position, size))
        self._position += size

        with timer.phase("train"):
            stats = self.task.train(rows)

        metrics = {
            f"{'policy' if name in _UPDATE_METRICS else self.task.name}/{name}": stats[name]
            for name in stats
        }
        return StepResult(metrics, {"samples": size, "tokens": int(rows.lengths.sum())})

    def should_evaluate(self, step: int, *, is_saved: bool) -> bool:
        """Return whether an evaluation is due: with every checkpoint, and at the interval of
        `evaluation.every`."""
        if not self.held_out_examples:
            return False
        return is_saved or is_due(self.config.evaluation.every, step)

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the loss and its statistics on the held-out examples."""
        # The denominator of all batches together makes each statistic a sum over the batches.
        denominator = sum(map(self.task.compute_denominator, self._held_out_rows))
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
            self.task.build_rows(self.held_out_examples[start : start + size])
            for start in range(0, len(self.held_out_examples), size)
        ]

    def _describe_run(self, completed_steps: int) -> str:
        steps = self.config.run.steps
        count = len(self.examples)
        size = self.config.data.batch_size
        resume_note = f"; resumed after step {completed_steps}" if completed_steps else ""
        return (
            f"{self.task.name}: {count} rows, {len(self.held_out_examples)} held out;"
            f" {size} rows per step, {count / size:.1f} steps per epoch; run.steps={steps} is"
            f" {steps * size / count:.2f} epochs{resume_note}"
        )

    def begin_save(self, step: int) -> TrainingState:
        """Start to save the model, and compute the files to store beside it."""
        directory = get_run_paths(self.config).checkpoint(step, self.task.checkpoint_part)
        self.task.model.begin_save(directory)
        # Compute them now: the next step changes the model while the checkpoint is being written.
        self._companion_files = self.task.build_companion_files()
        return TrainingState(step, kl_coefficient=0.0, critic_updates=0, position=self._position)

    def finish_save(self, state: TrainingState) -> TrainingState:
        """Wait until the model is saved, then write the companion files to its directory."""
        self.task.model.finish_save()
        if self.recorder is not None:
            directory = get_run_paths(self.config).checkpoint(state.step, self.task.checkpoint_part)
            # The loop commits the checkpoint after this, so its checksums cover these files.
            for name, content in self._companion_files.items():
                with fenced_write():
                    write_file(directory / name, json.dumps(content, indent=1) + "\n")
        return state
