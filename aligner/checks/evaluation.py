"""Checks of the section `evaluation` against the trainer, the data and the engine."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from aligner.checks import environment as environment_checks
from aligner.checks.data import find_path_problem
from aligner.checks.reward import find_judge_access_problems
from aligner.errors import ConfigError
from aligner.models.model_source import ExpectedInputs, is_expected
from aligner.models.shape import ModelShape
from aligner.schema import Config
from aligner.schema.data_sources import find_fields_problems
from aligner.schema.evaluation_suites import Suite, parse_evaluation_suites
from aligner.schema.reward_sources import (
    FunctionSource,
    parse_evaluation_judge,
    parse_reward_sources,
)
from aligner.schema.scoring_functions import ENVIRONMENT, find_function_problem


def find_problems(
    config: Config, model: ModelShape | None, expected: ExpectedInputs
) -> Iterator[str]:
    """Yield a line for each problem of the evaluation, except for the content of the prompts."""
    settings = config.evaluation
    trainer = config.algorithm.trainer
    if not config.algorithm.trains_model and settings.every:
        yield (
            f"evaluation.every={settings.every}: algorithm.trainer={trainer} trains no model, so"
            " there is nothing to evaluate; set evaluation.every=0"
        )
    # Offline trainers compute the loss of held-out records.
    elif (
        config.algorithm.trains_model
        and trainer != "online"
        and settings.every
        and not config.data.held_out
    ):
        yield (
            f"evaluation.every={settings.every}: requires held-out records; set data.held_out=ROWS"
        )
    if trainer == "online":
        yield from _find_online_problems(config, model, expected)


def _find_online_problems(
    config: Config, model: ModelShape | None, expected: ExpectedInputs
) -> Iterator[str]:
    """Yield problems of the suites, and of asynchronous evaluation."""
    for suite in parse_evaluation_suites(config):
        yield from _find_suite_problems(config, suite, expected)
        # The section's own problems are reported once, by its own check.
        if suite.environment != config.environment:
            suite_config = replace(config, environment=suite.environment)
            for problem in environment_checks.find_problems(suite_config, model, expected):
                yield suite.rename_environment_keys(problem)
    if config.evaluation.every and config.evaluation.asynchronous:
        yield from _find_asynchronous_problems(config)


def _find_suite_problems(config: Config, suite: Suite, expected: ExpectedInputs) -> Iterator[str]:
    """Yield problems of the prompts, the scoring and the sampling of a suite."""
    settings = suite.settings
    key = suite.key
    # Without data.tasks, evaluation.questions has no effect.
    questions = bool(config.data.tasks) and settings.questions
    if questions and (settings.path is not None or settings.prompts):
        yield (
            f"{key}.questions={questions}: {key}.path or {key}.prompts is also set; set only one"
            " of these keys"
        )
    if config.evaluation.every and settings.path is None and not settings.prompts and not questions:
        yield (
            f"evaluation.every={config.evaluation.every}: requires evaluation prompts; set"
            f" {key}.path=FILE or {key}.prompts=[…], or {key}.questions=NUMBER with data.tasks"
        )
    if settings.path is not None and settings.prompts:
        yield f"{key}.prompts: {key}.path is also set; set only one of the two keys"
    path = settings.path
    if (
        path is not None
        and not is_expected(path, expected)
        and (problem := find_path_problem(Path(path), "online"))
    ):
        yield f"{key}.path={path}: {problem}"
    if any(not prompt.strip() for prompt in settings.prompts):
        yield f"{key}.prompts: must not contain an empty prompt"
    yield from find_fields_problems(f"{key}.fields", settings.fields)
    if settings.function is not None and (problem := find_function_problem(settings.function)):
        yield f"{key}.function={settings.function}: {problem}"
    yield from _find_judge_problems(config, suite)
    has_no_reward = suite.environment != config.environment and not suite.environment.has_episodes
    if settings.function is None and has_no_reward and _is_environment_reward(config):
        yield (
            f"{key}.function=null: the run's reward is that of its environment, but"
            f" {suite.environment_key} has no environment or agent; set {key}.function"
        )
    if settings.greedy and settings.samples > 1:
        yield (
            f"{key}.samples={settings.samples}: must be 1 with greedy decoding, because all"
            f" responses to a prompt would be the same; set {key}.greedy=false or {key}.samples=1"
        )


def _is_environment_reward(config: Config) -> bool:
    """Return whether the rewards of a run come from its environment alone."""
    return all(
        isinstance(source, FunctionSource) and source.function == ENVIRONMENT
        for source in parse_reward_sources(config.reward)
    )


def _find_asynchronous_problems(config: Config) -> Iterator[str]:
    """Yield the reasons why a step cannot be evaluated while the next step trains."""
    key = "evaluation.asynchronous=true"
    run = config.run
    if not config.rollout.steps_ahead:
        advice = "engine.placement=server rollout.max_staleness=1"
        yield f"{key}: requires a generator that generates while the policy trains; set {advice}"
    # While a step is evaluated, the next step already trains, so that the run would end too late.
    end_settings = {"run.end_at": run.end_at, "run.end_without_gain": run.end_without_gain}
    for name, value in end_settings.items():
        if value is not None and (name != "run.end_at" or str(value).startswith("eval/")):
            yield (
                f"{key}: is not supported with {name}={value}, which needs the evaluation of a"
                " step before the next step begins; remove one of the two settings"
            )


def _find_judge_problems(config: Config, suite: Suite) -> Iterator[str]:
    """Yield problems of the judge that compares responses with reference responses."""
    try:
        judge = parse_evaluation_judge(suite.settings, suite.key)
    except ConfigError as error:
        yield str(error)
        return
    if judge is None:
        return
    yield from find_judge_access_problems(config, judge)
    if suite.environment.has_episodes:
        yield (
            f"{judge.key}: compares responses to one prompt, which is not supported with"
            " multi-turn episodes; remove the judge"
        )
