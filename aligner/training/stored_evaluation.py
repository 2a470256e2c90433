"""Evaluation of a stored model, for `aligner evaluate`."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

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
from aligner.paths import cache_directory
from aligner.rewards.judge import JudgeMeter, open_judge
from aligner.rewards.sources import TextSource
from aligner.schema import EngineConfig, MegatronModelConfig
from aligner.schema.reward_sources import JudgeSource
from aligner.training.evaluator import (
    judged_wins,
    reference_samples,
    scoring_requests,
    text_scores,
    without_reference,
)


@dataclass(frozen=True)
class EvaluationJob:
    """What to evaluate: the responses to generate, their scorer and their references; already
    checked."""

    answers: Job
    initial: Job | None
    """Generation of one response of the initial model to each prompt without a `reference`; its
    model also measures the perplexity. None without an initial model."""
    scorer: TextSource
    pass_threshold: float
    judge: JudgeSource | None = None
    """Judge that compares the responses with the references; None without one."""

    @property
    def compares(self) -> bool:
        """Whether every prompt has a reference, which its responses are compared with."""
        return self.initial is not None or not without_reference(self.answers.prompts)


def plan_evaluation(
    answers: Job,
    initial: Job | None,
    scorer: TextSource,
    pass_threshold: float,
    judge: JudgeSource | None = None,
) -> EvaluationJob:
    """Check the parts of an evaluation and return the job.

    Args:
        answers: Generation of the responses to evaluate.
        initial: Generation of one response of the initial model to each of the same prompts; None
            without an initial model.
        scorer: Function that scores the responses.
        pass_threshold: Score from which a response passes.
        judge: Judge that compares the responses with the references.

    Raises:
        ConfigError: The models have different tokenizers, or a `reference` is not a text. Without
            an initial model, also if only some prompts have a `reference`, or if a judge is set and
            some prompts have none.
    """
    for prompt in answers.prompts:
        if not isinstance(prompt.metadata.get("reference", ""), str):
            raise ConfigError(f"the `reference` of the prompt {prompt.text!r} must be a string")
        read_token_ids(
            prompt.metadata, "reference", f"the prompt {prompt.text!r}", answers.tokenizer
        )
    unreferenced_prompts = without_reference(answers.prompts)
    if initial is None:
        if 0 < len(unreferenced_prompts) < len(answers.prompts):
            raise ConfigError(
                f"{len(unreferenced_prompts)} of {len(answers.prompts)} prompts have no"
                f" `reference`; the first is {unreferenced_prompts[0].text!r}; add a `reference` to"
                " every prompt, or set --reference MODEL to generate the missing references"
            )
        if judge is not None and unreferenced_prompts:
            raise ConfigError(
                f"{judge.key}: requires references to compare with; add a `reference` to every"
                " prompt, or set --reference MODEL"
            )
        return EvaluationJob(answers, None, scorer, pass_threshold, judge)

    answers_companions, initial_companions = (job.source.companions for job in (answers, initial))
    # The initial model scores the token ids of SOURCE, so both need the same tokenizer.
    if read_tokenizer(answers_companions).to_str() != read_tokenizer(initial_companions).to_str():
        raise ConfigError(
            f"--reference: the tokenizer in {initial_companions} differs from the tokenizer of"
            f" SOURCE in {answers_companions}"
        )
    return EvaluationJob(
        answers, replace(initial, prompts=unreferenced_prompts), scorer, pass_threshold, judge
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
        job: What to evaluate.
        settings: Configuration of the engine.
        output: JSON-lines file with one object per sample, in the format of `generate.generate`,
            with its `score`, its `reference_score` if there are references, and its `judge_wins` if
            there is a judge. None writes no file.
        overwrite: Whether an existing file may be overwritten.
        progress: Called with the progress of the generation.

    Raises the errors of `generate.generate`, of the scorer and of the judge.
    """
    judge_run = None if job.judge is None else _Asking(job.judge, str(job.answers.source.directory))
    with ExitStack() as stack:
        file = None if output is None else stack.enter_context(generate.written(output, overwrite))
        samples = list(generate.draw(job.answers, settings, progress))
        prompts = [job.answers.prompts[sample.prompt_id] for sample in samples]

        scores = _scores(job, prompts, samples).view(len(job.answers.prompts), -1)
        reference_responses = _references(job, settings) if job.compares else []
        references = (
            _scores(job, job.answers.prompts, reference_responses) if reference_responses else None
        )

        metrics = evaluation_metrics(scores, job.pass_threshold, references)
        wins = None
        if judge_run is not None:
            wins, wins_metrics = judge_run.compared(job, prompts, samples, reference_responses)
            metrics |= wins_metrics

        batch = collate(samples, job.answers.tokenizer.pad_token_id)
        metrics["eval/length"] = float(batch.mask.sum()) / len(samples)
        if job.initial is not None:
            metrics["eval/reference_perplexity"] = _perplexity(
                job.initial.source, settings, samples
            )

        if file is not None:
            for index, (sample, score) in enumerate(
                zip(samples, scores.flatten().tolist(), strict=True)
            ):
                record = generate.sample_record(job.answers, sample) | {"score": _known(score)}
                if references is not None:
                    record["reference_score"] = _known(float(references[sample.prompt_id]))
                if wins is not None:
                    record["judge_wins"] = wins[index]
                file.write(generate.json_line(record))
    return metrics


def _known(score: float) -> float | None:
    """Return a score as it is written to the file; None if the reward function abstained."""
    return None if score == ABSTAINED else score


class _Asking:
    """A judge with cached answers, and the cost of its calls since this object was created."""

    def __init__(self, source: JudgeSource, run: str) -> None:
        directory = (
            cache_directory() / "judge" if source.judge_cache is None else Path(source.judge_cache)
        )
        self._judge = open_judge(source, directory, run)
        self._meter = JudgeMeter([directory], run)

    def compared(
        self,
        job: EvaluationJob,
        prompts: Sequence[Prompt],
        samples: Sequence[Sample],
        references: Sequence[Sample],
    ) -> tuple[list[tuple[float, float] | None], dict[str, float]]:
        """Return the judge's result of each sample against its prompt's reference, and the metrics
        of the results."""
        tokenizer = job.answers.tokenizer
        reference_texts = [
            decode_response(references[sample.prompt_id], tokenizer) for sample in samples
        ]
        wins = self._judge.compare(scoring_requests(prompts, samples, tokenizer), reference_texts)
        return wins, judge_metrics(judged_wins(wins, len(references))) | self._meter.metrics()


def _scores(job: EvaluationJob, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> Tensor:
    return text_scores(job.scorer, prompts, samples, job.answers.tokenizer)


def _references(job: EvaluationJob, settings: EngineConfig) -> list[Sample]:
    """Return the reference of each prompt."""
    generated: list[Sample] = []
    if job.initial is not None and job.initial.prompts:
        generated = list(generate.draw(job.initial, settings, lambda now: None))
    answers = job.answers
    return reference_samples(
        answers.prompts, generated, answers.tokenizer, ended=bool(answers.options.stop_token_ids)
    )


def _perplexity(initial: Source, settings: EngineConfig, samples: Sequence[Sample]) -> float:
    """Return the perplexity of the samples under the initial model."""
    from aligner.megatron.policy import stored_logprobs

    batch = collate(samples, 0)
    model = MegatronModelConfig(precision=settings.precision)
    model.micro_batch_tokens = max(model.micro_batch_tokens, int(batch.lengths.max()))
    return perplexity(
        stored_logprobs(initial, model, batch.tokens, batch.lengths, batch.mask), batch.mask
    )
