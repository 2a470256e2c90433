"""What a run is evaluated on, against the trainer and the data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from aligner.checks.data import path_problem
from aligner.models.model_source import NOTHING_EXPECTED, ExpectedInputs, is_expected
from aligner.schema import Config, EvaluationConfig
from aligner.schema.data_sources import fields_problems
from aligner.schema.scoring_functions import function_problem

_EVERY_RUNS = ("eval", "policy", "throughput")
_ONLINE = ("reward", "response", "kl", "value", "mismatch", "rollout", "staleness")


def evaluation_problems(config: Config, coming: ExpectedInputs = NOTHING_EXPECTED) -> Iterator[str]:
    """One line for each thing that is wrong with what a run is evaluated on, and how, but for the prompts' content."""
    settings, metric = config.evaluation, config.checkpoint.best_metric
    if config.algorithm.trainer == "online":
        evaluated = settings.every > 0
        advice = "give evaluation.every=STEPS"
        yield from _online_problems(settings, coming)
    else:
        evaluated = config.data.held_out > 0
        advice = "give data.held_out=ROWS"
        yield from _offline_problems(config)
    kinds = [*_EVERY_RUNS, *(_ONLINE if config.algorithm.trainer == "online" else (config.algorithm.trainer,))]
    if metric is not None and metric.partition("/")[0] not in kinds:
        yield f"checkpoint.best_metric={metric}: the metrics of this run begin with {', '.join(f'{kind}/' for kind in kinds)}"
    if metric is not None and metric.startswith("eval/") and not evaluated:
        yield f"checkpoint.best_metric={metric}: the run is never evaluated; {advice}"


def _online_problems(settings: EvaluationConfig, coming: ExpectedInputs) -> Iterator[str]:
    if settings.every and settings.path is None and not settings.prompts:
        yield (
            f"evaluation.every={settings.every}: there is nothing to evaluate on; give evaluation.path=FILE or"
            " evaluation.prompts=[…]"
        )
    if settings.path is not None and settings.prompts:
        yield "evaluation.prompts: evaluation.path is given as well; give one of them"
    path = settings.path
    if path is not None and not is_expected(path, coming) and (problem := path_problem(Path(path), "online")):
        yield f"evaluation.path={path}: {problem}"
    if any(not prompt.strip() for prompt in settings.prompts):
        yield "evaluation.prompts: a prompt is empty"
    yield from fields_problems("evaluation.fields", settings.fields)
    if settings.function is not None and (problem := function_problem(settings.function)):
        yield f"evaluation.function={settings.function}: {problem}"
    if settings.greedy and settings.samples > 1:
        yield (
            f"evaluation.samples={settings.samples}: so many responses to a prompt, all greedy, would be the same; give"
            " evaluation.greedy=false, or one sample"
        )


def _offline_problems(config: Config) -> Iterator[str]:
    settings, trainer = config.evaluation, config.algorithm.trainer
    if trainer == "preferences" and settings.every:
        yield f"evaluation.every={settings.every}: algorithm.trainer=preferences learns nothing that could be evaluated"
    for name in ("path", "prompts", "function"):
        if value := getattr(settings, name):
            yield (
                f"evaluation.{name}={value}: only algorithm.trainer=online is evaluated on prompts, got"
                f" algorithm.trainer={trainer}; the trainers that learn from files are on data.held_out rows"
            )
