"""The offline trainer: learning from a file's demonstrations, preferences or labeled steps."""

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


@dataclass(kw_only=True)
class TeacherScorer(TrainingLoop):
    """All demonstrations once, each step one of `run.steps` equal parts of them, and a file.

    No checkpoint is kept: a run goes on behind the last step whose metrics are written.
    """

    model: FrozenPolicy
    demonstrations: Sequence[Demonstration]
    pad_token_id: int
    vocabulary: int
    """Only ids below it are told."""
    tokenizer_file: Path

    def resume(self, saved: Sequence[TrainingState]) -> int:
        """Go on where the metrics end: they are written last. Raises ConfigError for a run that was
        cut into other parts."""
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
        """Score a part, and write it down."""
        steps, count = self.config.run.steps, len(self.demonstrations)
        part = self.demonstrations[step * count // steps : (step + 1) * count // steps]
        with timer.phase("score"):
            rows = demonstration_rows(part, self.pad_token_id)
            asked: dict[str, Any] = {"mask": rows.mask, "temperature": 1.0}
            taught = self.model.top_k_logprobs(
                rows.tokens, rows.lengths, self.config.teacher.top_k, self.vocabulary, **asked
            )
        if self.recorder is not None:
            with fenced_write():
                self._part(step).parent.mkdir(exist_ok=True)
                write_part(self._part(step), rows, taught)
        covered = 1 - taught.outcomes[rows.mask][:, -1].exp()
        metrics = {
            "teacher_scores/loss": -float(taught.logprobs[rows.mask].mean()),
            "teacher_scores/covered": float(covered.mean()),
        }
        return StepResult(metrics, {"samples": len(part), "tokens": int(rows.lengths.sum())})

    def finish(self) -> None:
        """Complete the directory, once all parts are there."""
        steps, top = self.config.run.steps, min(self.config.teacher.top_k, self.vocabulary)
        if self.recorder is not None and self.stop.last == steps and not self.stop.is_early:
            with fenced_write():
                write_index(
                    run_paths(self.config).teacher_scores,
                    steps,
                    top,
                    self.vocabulary,
                    self.tokenizer_file,
                )

    def _part(self, step: int) -> Path:
        return run_paths(self.config).teacher_scores / part_name(step + 1, self.config.run.steps)


@dataclass(frozen=True)
class OfflineTask(ABC):
    """What is learned, and from which kind of example. Every rank calls every method with the
    same."""

    model: Policy | ValueModel
    pad_token_id: int
    name: ClassVar[str]
    """What its metrics begin with."""
    part: ClassVar[str]
    """The checkpoint's part that holds the model."""
    group: ClassVar[int] = 1
    """Rows of an example."""

    @abstractmethod
    def rows(self, examples: Sequence[Any]) -> Rows:
        """Examples as rows of tensors."""

    @abstractmethod
    def loss(self, output: Tensor, rows: Any, denominator: float) -> tuple[Tensor, Stats]:
        """Of the model's log-probs [B, S-1], or its head's numbers [B, S]; sums over
        `denominator`."""

    def count(self, rows: Rows) -> float:
        """How many of what the loss is a mean over: pairs where an example is one, else tokens."""
        return rows.tokens.shape[0] / 2 if self.group == 2 else float(rows.mask.sum())

    def train(self, rows: Rows) -> dict[str, float]:
        """One optimizer step; the loss's statistics, and those of every update."""
        if isinstance(self.model, ValueModel):
            return self.model.train_rows(
                rows, self.loss, denominator=self.count(rows), group_size=self.group
            )
        return self.model.train(
            rows, self._policy_loss, denominator=self.count(rows), group_size=self.group
        )

    def evaluate(self, rows: Rows, denominator: float) -> Stats:
        """The loss's statistics as sums over `denominator`; nothing is trained."""
        output = self.model.values if isinstance(self.model, ValueModel) else self.model.logprobs
        return self.loss(output(rows.tokens, rows.lengths), rows, denominator)[1]

    def companions(self) -> Mapping[str, Any]:
        """JSON files that belong beside the model as it is now, by name."""
        return {}

    def _policy_loss(
        self, logprobs: Tensor, entropy: Tensor, rows: Any, denominator: float
    ) -> tuple[Tensor, Stats]:
        return self.loss(logprobs, rows, denominator)


@dataclass(frozen=True)
class SupervisedFineTuning(OfflineTask):
    """Imitation of the responses alone."""

    name = "sft"
    part = "policy"

    def rows(self, examples: Sequence[Demonstration]) -> Rows:
        """A row a demonstration."""
        return demonstration_rows(examples, self.pad_token_id)

    def loss(self, output: Tensor, rows: Rows, denominator: float) -> tuple[Tensor, Stats]:
        """Cross entropy."""
        return imitation_loss(output, rows, denominator)


@dataclass(frozen=True)
class OfflineDistillation(SupervisedFineTuning):
    """At each token of the responses, what a teacher has said of it once."""

    model: Policy
    teacher: TeacherConfig

    def rows(self, examples: Sequence[Demonstration]) -> Rows:
        """A row a demonstration, with the teacher's most probable tokens."""
        rows = super().rows(examples)
        taught = assemble_teacher_scores(
            [example.teacher_row for example in examples if example.teacher_row is not None],
            rows.mask,
        )
        return replace(rows, candidates=taught.ids, candidate_targets=taught.outcomes)

    def evaluate(self, rows: Rows, denominator: float) -> Stats:
        """The loss's statistics as sums over `denominator`; nothing is trained."""
        return self.loss(*self.model.score_candidates(rows), denominator)[1]

    def loss(self, output: Tensor, rows: Rows, denominator: float) -> tuple[Tensor, Stats]:
        """The divergence from the teacher, and what is asked of the cross entropy."""
        return offline_distillation_loss(output, rows, self.teacher, denominator)


@dataclass(frozen=True)
class DirectPreferenceOptimization(OfflineTask):
    """The policy prefers one answer over another. The reference is the model that the run starts
    from."""

    model: Policy
    settings: PreferenceConfig
    name = "dpo"
    part = "policy"
    group = 2

    def rows(self, examples: Sequence[Preference]) -> PreferenceRows:
        """Two rows a pair, with the reference's log-probs where the loss looks at them."""
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
        """That of `algorithm.preference`."""
        margins = rows.margins[::2]
        return pair_loss(
            output, rows.reference_logprobs, rows.mask, self.settings, denominator, margins=margins
        )


@dataclass(frozen=True)
class KahnemanTverskyOptimization(OfflineTask):
    """The policy comes nearer to desirable answers and leaves others. The reference is the model
    that the run starts from."""

    model: Policy
    settings: PreferenceConfig
    name = "dpo"
    part = "policy"

    def rows(self, examples: Sequence[LabeledAnswer]) -> LabeledRows:
        """A row an answer, with the reference's log-probs; the baseline hangs on the policy that
        then learns from them."""
        rows = demonstration_rows([example.answer for example in examples], self.pad_token_id)
        desirable = torch.tensor([example.is_desirable for example in examples])
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
        """Answers."""
        return float(rows.tokens.shape[0])

    def train(self, rows: Rows) -> dict[str, float]:
        """One optimizer step."""
        return super().train(self._with_baseline(rows))

    def evaluate(self, rows: Rows, denominator: float) -> Stats:
        """The loss's statistics, against the policy as it is now."""
        return super().evaluate(self._with_baseline(rows), denominator)

    def loss(self, output: Tensor, rows: LabeledRows, denominator: float) -> tuple[Tensor, Stats]:
        """That of `algorithm.preference`."""
        return labeled_answer_loss(output, rows, self.settings, denominator)

    def _with_baseline(self, rows: Any) -> LabeledRows:
        """The KL estimate: the mean log-ratio of other prompts' answers, at least 0 (Ethayarajh et
        al. 2024, section 4.1)."""
        others = with_others_answers(rows, self.pad_token_id)
        asked: dict[str, Any] = {"mask": others.mask}
        logprobs = self.model.logprobs(others.tokens, others.lengths, **asked)
        log_ratios = logprobs - self.model.reference_logprobs(
            others.tokens, others.lengths, **asked
        )
        baseline = torch.where(others.mask, log_ratios, 0.0).sum(1).mean().clamp(min=0)
        learned: LabeledRows = replace(rows, baseline=baseline.expand(len(rows.tokens)))
        return learned


@dataclass(frozen=True)
class PairwiseRewardModel(OfflineTask):
    """A reward model prefers one answer over another.

    The loss is that of normalized rewards, under which the initial policy's samples had mean 0 and
    deviation 1 when the head was new; what is stored is the normalization of the head as it has
    become (Huang et al. 2023, detail 6).
    """

    model: ValueModel
    samples: Rows
    """Of the initial policy; whole sequences."""
    normalizer: RewardNormalizer
    """Of the model before its first step."""
    name = part = "reward_model"
    group = 2

    @classmethod
    def start(
        cls, model: ValueModel, pad_token_id: int, samples: Sequence[Demonstration]
    ) -> "PairwiseRewardModel":
        """Normalize a model that has not been trained. Raises AlignerError where its rewards of the
        samples are equal."""
        rows = demonstration_rows(samples, pad_token_id)
        return cls(model, pad_token_id, rows, fit_normalizer(model, rows))

    def rows(self, examples: Sequence[Preference]) -> PairRows:
        """Two rows a pair, the chosen one first; a pair without a margin has 0."""
        rows = demonstration_rows(pair_members(examples), self.pad_token_id)
        last = torch.arange(1, rows.tokens.shape[1]) == rows.lengths[:, None] - 1
        margins = torch.tensor([pair.margin or 0.0 for pair in examples]).repeat_interleave(2)
        return PairRows(rows.tokens, rows.lengths, last, margins)

    def loss(self, output: Tensor, rows: PairRows, denominator: float) -> tuple[Tensor, Stats]:
        """That of the rewards' differences."""
        return pairwise_loss(output, rows, denominator, self.normalizer)

    def companions(self) -> Mapping[str, Any]:
        """The normalization of the model as it is."""
        return {NORMALIZATION: asdict(fit_normalizer(self.model, self.samples))}


@dataclass(frozen=True)
class ProcessRewardModel(OfflineTask):
    """A reward model tells right steps from wrong ones: the head's number at a step's end is the
    logit of its being right."""

    name = part = "reward_model"

    def rows(self, examples: Sequence[LabeledSteps]) -> StepRows:
        """A row an answer, which learns at its steps' last tokens."""
        answers = [Demonstration(each.tokens, each.prompt_length) for each in examples]
        rows = demonstration_rows(answers, self.pad_token_id)
        mask, labels = torch.zeros_like(rows.mask), torch.zeros(rows.mask.shape)
        for row, example in enumerate(examples):
            mask[row, example.positions - 1] = True
            labels[row, example.positions - 1] = example.labels
        return StepRows(rows.tokens, rows.lengths, mask, labels)

    def loss(self, output: Tensor, rows: StepRows, denominator: float) -> tuple[Tensor, Stats]:
        """Binary cross entropy."""
        return step_label_loss(output, rows, denominator)


def pair_members(pairs: Sequence[Preference]) -> list[Demonstration]:
    """Chosen, rejected, chosen, rejected, …"""
    return [member for pair in pairs for member in (pair.chosen, pair.rejected)]


def demonstration_rows(demonstrations: Sequence[Demonstration], pad_token_id: int) -> Rows:
    """Right-padded rows of demonstrations, in their order; the mask is that of the responses, or of
    what is learned there."""
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
    """Each row's prompt with the answer of the row behind it, the last one's with the first's."""
    starts = rows.mask.int().argmax(1) + 1
    parts = [
        (row[:start], row[start:length])
        for row, start, length in zip(rows.tokens, starts, rows.lengths, strict=True)
    ]
    answers = [parts[(place + 1) % len(parts)][1] for place in range(len(parts))]
    mixed = [
        Demonstration(torch.cat([parts[place][0], answer]), len(parts[place][0]))
        for place, answer in enumerate(answers)
    ]
    return demonstration_rows(mixed, pad_token_id)


def fit_normalizer(model: ValueModel, samples: Rows) -> RewardNormalizer:
    """What gives the model's rewards of the samples mean 0 and deviation 1. Collective.

    Raises AlignerError where they are all equal, or not finite.
    """
    rewards = sequence_rewards(model.values(samples.tokens, samples.lengths), samples)
    try:
        return RewardNormalizer.fit(rewards)
    except ValueError as error:
        raise AlignerError(
            f"cannot normalize the scores of the reward model for {len(rewards)} samples from the"
            f" initial policy: {error}"
        ) from error


_log = logging.getLogger(__name__)
_OF_EVERY_UPDATE = ("entropy", "grad_norm", "lr", "skipped", "skipped_total")


@dataclass(kw_only=True)
class OfflineTrainer(TrainingLoop):
    """What a task says is learned from the examples, which every rank has."""

    task: OfflineTask
    examples: ExampleStream[Any]
    held_out: Sequence[Any]
    """Examples that are evaluated on and never trained on."""
    _position: int = field(default=0, init=False)
    """Examples taken so far."""
    _companions: Mapping[str, Any] = field(default_factory=dict, init=False)
    """What belongs beside the model in the checkpoint that is being written."""

    def resume(self, saved: Sequence[TrainingState]) -> int:
        """Restore the model and the place in the data."""
        first = 0
        if saved:
            first, self._position = saved[-1].step, saved[-1].position
            self.task.model.load(
                run_paths(self.config).checkpoint(first, self.task.part), verified=True
            )
        if self.recorder is not None:
            _log.info("%s", self._announcement(first))
        return first

    def step(self, step: int, timer: PhaseTimer) -> StepResult:
        """An optimizer step on the next examples."""
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
        """At every checkpoint, and every so many steps."""
        return bool(self.held_out) and (saves or is_due(self.config.evaluation.every, step))

    def evaluate(self, step: int) -> dict[str, float]:
        """The loss and its statistics on the held-out examples."""
        denominator = sum(map(self.task.count, self._held_out_rows))
        found = [self.task.evaluate(rows, denominator) for rows in self._held_out_rows]
        return {f"eval/{name}": sum(float(stats[name]) for stats in found) for name in found[0]}

    @cached_property
    def _held_out_rows(self) -> list[Rows]:
        """The held-out examples, as many at a time as a step takes."""
        size = self.config.data.batch_size
        return [
            self.task.rows(self.held_out[start : start + size])
            for start in range(0, len(self.held_out), size)
        ]

    def _announcement(self, first: int) -> str:
        data, steps = self.config.data, self.config.run.steps
        rows, size = len(self.examples), data.batch_size
        resumed = f"; resumed after step {first}" if first else ""
        return (
            f"{self.task.name}: {rows} rows, {len(self.held_out)} held out; {size} rows per step,"
            f" {rows / size:.1f} steps per epoch; run.steps={steps} is"
            f" {steps * size / rows:.2f} epochs{resumed}"
        )

    def begin_save(self, step: int) -> TrainingState:
        """The model, and what belongs beside it."""
        self.task.model.begin_save(run_paths(self.config).checkpoint(step, self.task.part))
        self._companions = self.task.companions()
        return TrainingState(step, kl_coefficient=0.0, critic_updates=0, position=self._position)

    def finish_save(self, state: TrainingState) -> TrainingState:
        """Companions go where the model then is."""
        self.task.model.finish_save()
        if self.recorder is not None:
            directory = run_paths(self.config).checkpoint(state.step, self.task.part)
            for name, content in self._companions.items():
                with fenced_write():
                    write_file(directory / name, json.dumps(content, indent=1) + "\n")
        return state
