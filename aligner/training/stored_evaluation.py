"""Evaluation of a stored model, for `aligner evaluate`."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aligner.agents import generate
from aligner.agents.generate import Job, Progress
from aligner.algorithms.evaluation_scores import evaluation_metrics, judge_metrics, perplexity
from aligner.data.conversations import decode_response
from aligner.data.export import Source
from aligner.data.prompts import read_token_ids
from aligner.data.tokenizer_files import read_tokenizer
from aligner.data.types import ABSTAINED, Prompt, Sample, collate
from aligner.errors import ConfigError
from aligner.paths import get_cache_directory
from aligner.rewards.judge import JudgeMeter, open_judge
from aligner.rewards.sources import TextSource
from aligner.schema import EngineConfig, MegatronModelConfig
from aligner.schema.reward_sources import JudgeSource
from aligner.training.episode_metrics import compute_reported_means
from aligner.training.evaluator import (
    build_reference_samples,
    build_scoring_requests,
    compute_text_scores,
    select_without_reference,
    stack_wins,
)
from aligner.training.rollout_builder import compute_environment_scores


@dataclass(frozen=True)
class EvaluationJob:
    """Checked parts of an evaluation: generation of the responses, their scorer, their references.

    `plan_evaluation` builds it.
    """

    response_job: Job
    """Generation of the responses to evaluate."""
    initial_job: Job | None
    """Generation of one response of the initial model to each prompt without a `reference`; its
    model also measures the perplexity. None without an initial model."""
    scorer: TextSource | None
    """Function that scores the last turns; None if only the rewards of episodes are scores."""
    pass_threshold: float
    judge: JudgeSource | None = None
    """Judge that compares the responses with the references; None without one."""

    @property
    def has_references(self) -> bool:
        """Whether every prompt has a reference, which its responses are compared with."""
        if self.initial_job is not None:
            return True
        # An environment cannot give a reward to the text of a record.
        has_episodes = self.response_job.environment is not None
        return not has_episodes and not select_without_reference(self.response_job.prompts)


def plan_evaluation(
    response_job: Job,
    initial_job: Job | None,
    scorer: TextSource | None,
    pass_threshold: float,
    judge: JudgeSource | None = None,
) -> EvaluationJob:
    """Check the parts of an evaluation and return the job.

    Args:
        response_job: Generation of the responses to evaluate.
        initial_job: Generation of one response of the initial model to each of the same prompts;
            None without an initial model.
        scorer: Function that scores the responses, or the last turns of episodes; None if only the
            rewards of episodes are scores.
        pass_threshold: Score from which a response passes.
        judge: Judge that compares the responses with the references.

    Raises:
        ConfigError: The models have different tokenizers, or a `reference` is not a text. Without
            an initial model, also if only some prompts have a `reference`, or if a judge is set and
            some prompts have none. For single responses, also if there is no scorer; for episodes,
            also if there is a judge.
    """
    has_episodes = response_job.environment is not None
    if scorer is None and not has_episodes:
        raise ConfigError(
            "--function: is required without an environment or agent; set --function NAME"
        )
    if judge is not None and has_episodes:
        raise ConfigError(
            f"{judge.key}: compares responses to one prompt, which is not supported with"
            " multi-turn episodes; remove the judge"
        )
    # The initial model generates all references of episodes; the records' fields `reference` are
    # inputs of the environment.
    if has_episodes:
        if initial_job is not None:
            _check_tokenizers(response_job, initial_job)
        return EvaluationJob(response_job, initial_job, scorer, pass_threshold)

    for prompt in response_job.prompts:
        if not isinstance(prompt.metadata.get("reference", ""), str):
            raise ConfigError(f"the `reference` of the prompt {prompt.text!r} must be a string")
        # Read the token ids only for their errors, before any model is loaded.
        read_token_ids(
            prompt.metadata, "reference", f"the prompt {prompt.text!r}", response_job.tokenizer
        )

    unreferenced_prompts = select_without_reference(response_job.prompts)
    if initial_job is None:
        # Nothing generates missing references, but the win rate needs one for every prompt.
        if 0 < len(unreferenced_prompts) < len(response_job.prompts):
            raise ConfigError(
                f"{len(unreferenced_prompts)} of {len(response_job.prompts)} prompts have no"
                f" `reference`; the first is {unreferenced_prompts[0].text!r}; add a `reference` to"
                " every prompt, or set --reference MODEL to generate the missing references"
            )
        if judge is not None and unreferenced_prompts:
            raise ConfigError(
                f"{judge.key}: requires references to compare with; add a `reference` to every"
                " prompt, or set --reference MODEL"
            )
        return EvaluationJob(response_job, None, scorer, pass_threshold, judge)

    _check_tokenizers(response_job, initial_job)
    initial_job = replace(initial_job, prompts=unreferenced_prompts)
    return EvaluationJob(response_job, initial_job, scorer, pass_threshold, judge)


def _check_tokenizers(response_job: Job, initial_job: Job) -> None:
    """Raise ConfigError if the two models have different tokenizers."""
    companions = response_job.source.companions
    initial_companions = initial_job.source.companions
    # The initial model scores the token ids of SOURCE, so both need the same tokenizer.
    if read_tokenizer(companions).to_str() != read_tokenizer(initial_companions).to_str():
        raise ConfigError(
            f"--reference: the tokenizer in {initial_companions} differs from the tokenizer of"
            f" SOURCE in {companions}"
        )


def evaluate(
    job: EvaluationJob,
    settings: EngineConfig,
    output: Path | None = None,
    *,
    overwrite: bool = False,
    progress: Callable[[Progress], None],
) -> dict[str, float]:
    """Generate the responses, score them, and return the metrics `eval/…` and `judge/…`.

    Args:
        job: The evaluation.
        settings: Configuration of the engine.
        output: JSON-lines file with one object per sample, in the format of `generate.generate`,
            with its `score`, its `reference_score` if there are references, and its `judge_wins` if
            there is a judge. None writes no file.
        overwrite: Whether an existing file may be overwritten.
        progress: Called with the progress of the generation.

    Raises the errors of `generate.generate`, of the scorer and of the judge.
    """
    judge = None
    if job.judge is not None:
        judge = _CachedJudge(job.judge, str(job.response_job.source.directory))

    with ExitStack() as stack:
        # Open the output before the generation, whose work would be lost if this failed.
        file = None
        if output is not None:
            file = stack.enter_context(generate.open_output(output, overwrite))

        samples = list(generate.generate_samples(job.response_job, settings, progress))
        response_job = job.response_job
        prompts = [
            response_job.prompts[response_job.get_prompt_index(sample)] for sample in samples
        ]

        scores = _compute_scores(job, prompts, samples)
        lost_count = int(scores.isnan().sum())
        # As during a run, a lost episode counts with score 0.
        scores = torch.where(scores.isnan(), 0.0, scores)
        scores = scores.view(len(job.response_job.prompts), -1)  # [P, K]

        references = _build_references(job, settings) if job.has_references else []
        reference_scores = None
        if references:
            reference_scores = _compute_scores(job, job.response_job.prompts, references)
            reference_scores = torch.where(reference_scores.isnan(), 0.0, reference_scores)

        metrics = evaluation_metrics(scores, job.pass_threshold, reference_scores)
        if lost_count:
            metrics["eval/lost_episodes"] = float(lost_count)
        metrics |= compute_reported_means(samples, "eval/metrics/")
        wins = None
        if judge is not None:
            wins, win_metrics = judge.compare(job, prompts, samples, references)
            metrics |= win_metrics

        batch = collate(samples, job.response_job.tokenizer.pad_token_id)
        metrics["eval/length"] = float(batch.mask.sum()) / len(samples)
        if job.initial_job is not None:
            metrics["eval/reference_perplexity"] = _compute_perplexity(
                job.initial_job.source, settings, samples
            )

        if file is not None:
            for index, (sample, score) in enumerate(
                zip(samples, scores.flatten().tolist(), strict=True)
            ):
                score_fields: dict[str, Any] = {"score": _score_or_none(score)}
                if reference_scores is not None:
                    prompt_index = response_job.get_prompt_index(sample)
                    reference_score = float(reference_scores[prompt_index])
                    score_fields["reference_score"] = _score_or_none(reference_score)
                if wins is not None:
                    score_fields["judge_wins"] = wins[index]
                for record in generate.build_sequence_records(job.response_job, sample):
                    file.write(generate.format_json_line(record | score_fields))
    return metrics


def _score_or_none(score: float) -> float | None:
    """Return a score as it is written to the file; None if the reward function abstained."""
    return None if score == ABSTAINED else score


class _CachedJudge:
    """A judge with cached answers, and the cost of its calls since this object was created."""

    def __init__(self, source: JudgeSource, run: str) -> None:
        directory = (
            get_cache_directory() / "judge"
            if source.judge_cache is None
            else Path(source.judge_cache)
        )
        self._judge = open_judge(source, directory, run)
        self._meter = JudgeMeter([directory], run)

    def compare(
        self,
        job: EvaluationJob,
        prompts: Sequence[Prompt],
        samples: Sequence[Sample],
        references: Sequence[Sample],
    ) -> tuple[list[tuple[float, float] | None], dict[str, float]]:
        """Return the judge's result of each sample against its prompt's reference, and the metrics
        of the results."""
        tokenizer = job.response_job.tokenizer
        reference_texts = [
            decode_response(references[job.response_job.get_prompt_index(sample)], tokenizer)
            for sample in samples
        ]
        requests = build_scoring_requests(prompts, samples, tokenizer)
        wins = self._judge.compare(requests, reference_texts)
        # One reference per prompt, so this is the number of prompts.
        metrics = judge_metrics(stack_wins(wins, len(references)))
        return wins, metrics | self._meter.metrics()


def _compute_scores(
    job: EvaluationJob, prompts: Sequence[Prompt], samples: Sequence[Sample]
) -> Tensor:
    """Return the scores of the samples, float64 [B]: the rewards of episodes, and the results of
    the scorer. NaN for a lost episode."""
    tokenizer = job.response_job.tokenizer
    # With group size 1, a lost episode makes only its own score NaN.
    scores = compute_environment_scores(samples, 1)
    if job.scorer is not None:
        text_scores = compute_text_scores(job.scorer, prompts, samples, tokenizer)
        scores = text_scores if scores is None else scores + text_scores
    assert scores is not None, "`plan_evaluation` requires a scorer for single responses"
    return scores.double()


def _build_references(job: EvaluationJob, settings: EngineConfig) -> list[Sample]:
    """Return the reference of each prompt."""
    generated: list[Sample] = []
    if job.initial_job is not None and job.initial_job.prompts:
        generation = generate.generate_samples(job.initial_job, settings, lambda progress: None)
        generated = list(generation)

    response_job = job.response_job
    # A response ends with an end token only if the engine stops at one.
    append_end = bool(response_job.options.stop_token_ids)
    return build_reference_samples(
        response_job.prompts, generated, response_job.tokenizer, append_end=append_end
    )


def _compute_perplexity(
    initial_model: Source, settings: EngineConfig, samples: Sequence[Sample]
) -> float:
    """Return the perplexity of the samples under the initial model."""
    from aligner.megatron.policy import stored_logprobs

    batch = collate(samples, 0)  # any token id pads, because the mask excludes padding
    model = MegatronModelConfig(precision=settings.precision)
    # A micro-batch must hold the longest row.
    model.micro_batch_tokens = max(model.micro_batch_tokens, int(batch.lengths.max()))
    logprobs = stored_logprobs(
        initial_model, model, batch.tokens, batch.lengths, batch.mask, batch.guided_tokens
    )
    return perplexity(logprobs, batch.mask)
