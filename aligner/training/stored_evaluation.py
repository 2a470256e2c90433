"""Evaluation of a stored model: what `aligner evaluate` does."""

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
    """What is to be measured; whatever can be wrong with it has been looked at."""

    answers: Job
    initial: Job | None
    """One response of the initial model, whose perplexity is measured too, to each prompt that has
    no `reference`."""
    scorer: TextSource
    pass_threshold: float
    judge: JudgeSource | None = None
    """What compares the responses with the references."""

    @property
    def compares(self) -> bool:
        """Whether every prompt has something to be compared with."""
        return self.initial is not None or not without_reference(self.answers.prompts)


def plan_evaluation(
    answers: Job,
    initial: Job | None,
    scorer: TextSource,
    pass_threshold: float,
    judge: JudgeSource | None = None,
) -> EvaluationJob:
    """The job of measuring `answers`; `initial` is that of one response of the initial model to
    each of the same prompts.

    Raises ConfigError for models with different tokenizers, a `reference` that is no text, and
    where without an initial model some of the prompts only have one, or none and a judge is to
    compare.
    """
    for prompt in answers.prompts:
        if not isinstance(prompt.metadata.get("reference", ""), str):
            raise ConfigError(f"the `reference` of the prompt {prompt.text!r} must be a string")
        read_token_ids(
            prompt.metadata, "reference", f"the prompt {prompt.text!r}", answers.tokenizer
        )
    lacking = without_reference(answers.prompts)
    if initial is None:
        if 0 < len(lacking) < len(answers.prompts):
            raise ConfigError(
                f"{len(lacking)} of {len(answers.prompts)} prompts have no `reference`; the first"
                f" is {lacking[0].text!r}; add a `reference` to every prompt, or set --reference"
                " MODEL to generate the missing references"
            )
        if judge is not None and lacking:
            raise ConfigError(
                f"{judge.key}: requires references to compare with; add a `reference` to every"
                " prompt, or set --reference MODEL"
            )
        return EvaluationJob(answers, None, scorer, pass_threshold, judge)
    ours, its = (job.source.companions for job in (answers, initial))
    if read_tokenizer(ours).to_str() != read_tokenizer(its).to_str():
        raise ConfigError(
            f"--reference: the tokenizer in {its} differs from the tokenizer of SOURCE in {ours}"
        )
    return EvaluationJob(answers, replace(initial, prompts=lacking), scorer, pass_threshold, judge)


def evaluate(
    job: EvaluationJob,
    settings: EngineConfig,
    output: Path | None = None,
    *,
    overwrite: bool = False,
    progress: Callable[[Progress], None],
) -> dict[str, float]:
    """Draw the responses, score them and measure: the metrics, `eval/…`, and of a judge `judge/…`.

    Into `output`, as `generate.generate` writes it, goes a JSON object a sample with its `score`
    and, where there are references, `reference_score`, and where a judge compares, `judge_wins`.
    Raises what that, the scorer and the judge do.
    """
    asking = None if job.judge is None else _Asking(job.judge, str(job.answers.source.directory))
    with ExitStack() as stack:
        file = None if output is None else stack.enter_context(generate.written(output, overwrite))
        samples = list(generate.draw(job.answers, settings, progress))
        asked = [job.answers.prompts[sample.prompt_id] for sample in samples]
        scores = _scores(job, asked, samples).view(len(job.answers.prompts), -1)
        others = _references(job, settings) if job.compares else []
        references = _scores(job, job.answers.prompts, others) if others else None
        metrics, wins = evaluation_metrics(scores, job.pass_threshold, references), None
        if asking is not None:
            wins, told = asking.compared(job, asked, samples, others)
            metrics |= told
        batch = collate(samples, job.answers.tokenizer.pad_token_id)
        metrics["eval/length"] = float(batch.mask.sum()) / len(samples)
        if job.initial is not None:
            metrics["eval/reference_perplexity"] = _perplexity(
                job.initial.source, settings, samples
            )
        if file is not None:
            for place, (sample, score) in enumerate(
                zip(samples, scores.flatten().tolist(), strict=True)
            ):
                record = generate.sample_record(job.answers, sample) | {"score": _known(score)}
                if references is not None:
                    record["reference_score"] = _known(float(references[sample.prompt_id]))
                if wins is not None:
                    record["judge_wins"] = wins[place]
                file.write(generate.json_line(record))
    return metrics


def _known(score: float) -> float | None:
    """Return a score as it is written; None if the reward function abstained."""
    return None if score == ABSTAINED else score


class _Asking:
    """A judge whose answers are kept in the cache, and what it has cost since this was made."""

    def __init__(self, source: JudgeSource, run: str) -> None:
        directory = (
            cache_directory() / "judge" if source.judge_cache is None else Path(source.judge_cache)
        )
        self._judge, self._meter = (
            open_judge(source, directory, run),
            JudgeMeter([directory], run),
        )

    def compared(
        self,
        job: EvaluationJob,
        prompts: Sequence[Prompt],
        samples: Sequence[Sample],
        references: Sequence[Sample],
    ) -> tuple[list[tuple[float, float] | None], dict[str, float]]:
        """What each sample has won against its prompt's reference, and the metrics of that."""
        tokenizer = job.answers.tokenizer
        others = [decode_response(references[sample.prompt_id], tokenizer) for sample in samples]
        wins = self._judge.compare(scoring_requests(prompts, samples, tokenizer), others)
        return wins, judge_metrics(judged_wins(wins, len(references))) | self._meter.metrics()


def _scores(job: EvaluationJob, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> Tensor:
    return text_scores(job.scorer, prompts, samples, job.answers.tokenizer)


def _references(job: EvaluationJob, settings: EngineConfig) -> list[Sample]:
    """What each prompt's responses are compared with."""
    drawn: list[Sample] = []
    if job.initial is not None and job.initial.prompts:
        drawn = list(generate.draw(job.initial, settings, lambda now: None))
    answers = job.answers
    return reference_samples(
        answers.prompts, drawn, answers.tokenizer, ended=bool(answers.options.stop_token_ids)
    )


def _perplexity(initial: Source, settings: EngineConfig, samples: Sequence[Sample]) -> float:
    from aligner.megatron.policy import stored_logprobs

    batch = collate(samples, 0)
    model = MegatronModelConfig(precision=settings.precision)
    model.micro_batch_tokens = max(model.micro_batch_tokens, int(batch.lengths.max()))
    return perplexity(
        stored_logprobs(initial, model, batch.tokens, batch.lengths, batch.mask), batch.mask
    )
