"""Evaluation of a stored model: what `aligner evaluate` does."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from aligner.algorithms.evaluation_scores import evaluation_metrics, perplexity
from aligner.data.export import Source
from aligner.data.prompts import drawn_tokens
from aligner.data.types import Prompt, Sample, collate
from aligner.engines import generate
from aligner.engines.generate import Job, Progress
from aligner.errors import ConfigError
from aligner.rewards.sources import TextSource
from aligner.schema import EngineConfig, MegatronModelConfig
from aligner.training.evaluator import reference_samples, text_scores, without_reference


@dataclass(frozen=True)
class EvaluationJob:
    """What is to be measured; whatever can be wrong with it has been looked at."""

    answers: Job
    initial: Job | None
    """One response of the initial model, whose perplexity is measured too, to each prompt that has no `reference`."""
    scorer: TextSource
    pass_threshold: float

    @property
    def compares(self) -> bool:
        """Whether every prompt has something to be compared with."""
        return self.initial is not None or not without_reference(self.answers.prompts)


def plan_evaluation(answers: Job, initial: Job | None, scorer: TextSource, pass_threshold: float) -> EvaluationJob:
    """The job of measuring `answers`; `initial` is that of one response of the initial model to each of the same prompts.

    Raises ConfigError for models with different tokenizers, a `reference` that is no text, and where without an initial
    model some of the prompts only have one.
    """
    for prompt in answers.prompts:
        if not isinstance(prompt.metadata.get("reference", ""), str):
            raise ConfigError(f"the `reference` of the prompt {prompt.text!r} must be a text")
        drawn_tokens(prompt.metadata, "reference", f"the prompt {prompt.text!r}", answers.tokenizer)
    lacking = without_reference(answers.prompts)
    if initial is None:
        if 0 < len(lacking) < len(answers.prompts):
            raise ConfigError(
                f"{len(lacking)} of {len(answers.prompts)} prompts have no `reference`, the first {lacking[0].text!r}: give"
                " one to all of them, or --reference MODEL, whose responses then take its place"
            )
        return EvaluationJob(answers, None, scorer, pass_threshold)
    ours, its = (job.source.companions / "tokenizer.json" for job in (answers, initial))
    if ours.read_bytes() != its.read_bytes():
        raise ConfigError(f"--reference: its tokenizer, {its}, is not that of SOURCE, {ours}")
    return EvaluationJob(answers, replace(initial, prompts=lacking), scorer, pass_threshold)


def evaluate(
    job: EvaluationJob,
    settings: EngineConfig,
    output: Path | None = None,
    *,
    overwrite: bool = False,
    progress: Callable[[Progress], None],
) -> dict[str, float]:
    """Draw the responses, score them and measure: the metrics, `eval/…`.

    Into `output`, as `generate.generate` writes it, goes a JSON object a sample with its `score` and, where there are
    references, `reference_score`. Raises what that and the scorer do.
    """
    with ExitStack() as stack:
        file = None if output is None else stack.enter_context(generate.written(output, overwrite))
        samples = list(generate.draw(job.answers, settings, progress))
        asked = [job.answers.prompts[sample.prompt_id] for sample in samples]
        scores = _scores(job, asked, samples).view(len(job.answers.prompts), -1)
        references = _reference_scores(job, settings) if job.compares else None
        metrics = evaluation_metrics(scores, job.pass_threshold, references)
        batch = collate(samples, job.answers.tokenizer.pad_token_id)
        metrics["eval/length"] = float(batch.mask.sum()) / len(samples)
        if job.initial is not None:
            metrics["eval/reference_perplexity"] = _perplexity(job.initial.source, settings, samples)
        if file is not None:
            for sample, score in zip(samples, scores.flatten().tolist(), strict=True):
                record = generate.sample_record(job.answers, sample) | {"score": score}
                if references is not None:
                    record["reference_score"] = float(references[sample.prompt_id])
                file.write(generate.json_line(record))
    return metrics


def _scores(job: EvaluationJob, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> Tensor:
    return text_scores(job.scorer, prompts, samples, job.answers.tokenizer)


def _reference_scores(job: EvaluationJob, settings: EngineConfig) -> Tensor:
    """float64 [P]"""
    drawn: list[Sample] = []
    if job.initial is not None and job.initial.prompts:
        drawn = list(generate.draw(job.initial, settings, lambda now: None))
    answers = job.answers
    samples = reference_samples(answers.prompts, drawn, answers.tokenizer, ended=bool(answers.options.stop_token_ids))
    return _scores(job, answers.prompts, samples)


def _perplexity(initial: Source, settings: EngineConfig, samples: Sequence[Sample]) -> float:
    from aligner.megatron.policy import stored_logprobs

    batch = collate(samples, 0)
    model = MegatronModelConfig(precision=settings.precision)
    model.micro_batch_tokens = max(model.micro_batch_tokens, int(batch.lengths.max()))
    return perplexity(stored_logprobs(initial, model, batch.tokens, batch.lengths, batch.mask), batch.mask)
