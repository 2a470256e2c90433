"""Checks of the section `reward`: its sources against the model, the layout and the timeouts."""

import os
from collections.abc import Iterator
from pathlib import Path

from aligner.checks.trained_model import (
    find_micro_batch_problems,
    find_precision_problems,
    find_reader_problems,
)
from aligner.errors import ConfigError
from aligner.models.layouts import layout_problems
from aligner.models.model_source import ExpectedInputs, directory_shape, read_normalization
from aligner.models.shape import ModelShape
from aligner.schema import Config, ParallelConfig
from aligner.schema.evaluation_suites import get_active_suites
from aligner.schema.reward_sources import (
    JudgeSource,
    ModelSource,
    RemoteSource,
    Source,
    has_step_rewards,
    parse_reward_sources,
    select_model_sources,
)


def find_problems(
    config: Config, model: ModelShape | None, expected: ExpectedInputs
) -> Iterator[str]:
    """Yield a line for each problem of the reward's sources and of their placement."""
    if not config.algorithm.generates_samples:
        return
    missing_end_score = config.reward.missing_end_score
    rollout = config.rollout
    if missing_end_score is not None and not rollout.can_end_responses:
        yield (
            f"reward.missing_end_score={missing_end_score:g}: with rollout.stop_at_eos=false no"
            " response ends before its length limit; set rollout.stop, rollout.truncate_token or"
            " rollout.stop_at_eos=true"
        )
    if has_step_rewards(config.reward) and config.critic_serves_reward:
        yield (
            "critic.with_reward=true: is not supported with per-step rewards, which require a"
            " separate reward server; set critic.with_reward=false"
        )
    try:
        sources = parse_reward_sources(config.reward)
    except ConfigError as error:
        yield str(error)
        return

    # Only Megatron models are computed by several ranks; other sources run on rank 0.
    models = select_model_sources(sources)
    yield from _find_layout_problems(config, models)
    layout_key, layout = _get_reward_layout(config)
    # Rank 0 requests the scores of HTTP sources, while the other ranks wait in a collective.
    if layout.ranks > 1:
        yield from _find_timeout_problems(config, sources)
    for source in sources:
        if isinstance(source, JudgeSource):
            yield from _find_judge_problems(config, source)
    if models:
        yield from find_micro_batch_problems(config, "reward", config.reward)
        yield from find_precision_problems(config, "reward", config.reward, None)

    for source in models:
        try:
            shape = directory_shape(Path(source.path), f"{source.key}.path", expected)
            yield from layout_problems(layout_key, layout, shape)
            read_normalization(Path(source.path))
        except ConfigError as error:
            yield str(error)
        else:
            yield from find_reader_problems(
                config, model, f"{source.key}.path", Path(source.path), shape
            )


def _get_reward_layout(config: Config) -> tuple[str, ParallelConfig]:
    """Return the key and the layout with which reward models run."""
    if config.critic_serves_reward:
        return "critic.parallel", config.critic.parallel
    return "reward.parallel", config.reward.parallel


def _find_layout_problems(config: Config, models: tuple[ModelSource, ...]) -> Iterator[str]:
    """Yield problems of `reward.parallel` with the processes that compute the reward."""
    reward = config.reward
    layout = config.reward.parallel
    if config.critic_serves_reward and layout not in (ParallelConfig(), config.critic.parallel):
        yield (
            "reward.parallel: critic.with_reward=true runs the reward models with the layout"
            " critic.parallel; remove reward.parallel, or set it to the values of critic.parallel"
        )
    elif not config.critic_serves_reward and layout.ranks != 1 and not models:
        yield (
            f"reward.parallel: got {layout.ranks} ranks, must be 1, because no reward source is a"
            f" model (reward.kind={reward.kind})"
        )


def _find_timeout_problems(config: Config, sources: tuple[Source, ...]) -> Iterator[str]:
    """Yield sources whose timeout exceeds the time that the other ranks wait in a collective."""
    limit = config.cluster.collective_timeout_s
    for source in sources:
        if isinstance(source, RemoteSource) and source.timeout_s >= limit:
            yield (
                f"{source.key}.timeout_s={source.timeout_s:g}: must be below"
                f" cluster.collective_timeout_s={limit:g}, the time that the other ranks wait for"
                " the scores"
            )
        if isinstance(source, JudgeSource) and source.max_duration_s >= limit:
            yield (
                f"{_describe_judge_duration(source)} must be below"
                f" cluster.collective_timeout_s={limit:g}, the time that the other ranks wait for"
                " the scores"
            )


def _describe_judge_duration(source: JudgeSource) -> str:
    """Return the beginning of a message about the maximum duration of a judgment."""
    return (
        f"{source.key}.judge_timeout_s={source.judge_timeout_s:g},"
        f" {source.key}.judge_tries={source.judge_tries}: one judgment may take"
        f" {source.max_duration_s:g} s, which"
    )


def find_judge_access_problems(config: Config, source: JudgeSource) -> Iterator[str]:
    """Yield a problem of the judge's API key.

    The key of a Slurm job is not checked, because the job has its own environment.
    """
    if config.cluster.kind == "local" and (problem := find_judge_key_problem(source)):
        yield problem


def _find_judge_problems(config: Config, source: JudgeSource) -> Iterator[str]:
    """Yield problems of a judge's API key, of its timeouts, and of its comparisons."""
    yield from find_judge_access_problems(config, source)
    request_s = config.server.request_timeout_s
    if source.max_duration_s >= request_s:
        limit = f"server.request_timeout_s={request_s:g}"
        yield (
            f"{_describe_judge_duration(source)} must be below {limit}, the time that the trainer"
            " waits for the scores"
        )
    if source.is_comparison:
        yield from _find_comparison_problems(config, source)


def _find_comparison_problems(config: Config, source: JudgeSource) -> Iterator[str]:
    """Yield the reasons why a judge cannot compare the samples of a prompt.

    All samples of a prompt must be in the same request, and must continue the same prompt.
    """
    setting = f"{source.key}.judge_asks={source.judge_asks}"
    rollout = config.rollout
    server = config.server
    samples = rollout.samples_per_prompt
    if samples < 2:
        yield (
            f"{setting}: compares the samples of a prompt and requires at least 2 samples, got"
            f" rollout.samples_per_prompt={samples}"
        )
    max_rows = server.max_batch_size
    # Requests are filled up to `max_rows` rows, so that only a multiple keeps each prompt in one.
    if rollout.prompts_per_step * samples > max_rows and max_rows % samples:
        yield (
            f"{setting}: compares the samples of a prompt, but server.max_batch_size={max_rows}"
            " would split these samples over several requests; set server.max_batch_size to a"
            f" multiple of rollout.samples_per_prompt={samples}"
        )
    if config.environment.has_episodes:
        yield (
            f"{setting}: compares responses to one prompt, which is not supported with multi-turn"
            f" episodes; set {source.key}.judge_asks=score"
        )
    # A suite with its own function does not call the judge of the training reward.
    for suite in get_active_suites(config):
        if suite.settings.function is None:
            yield (
                f"{setting}: compares the samples of a prompt, but evaluation scores each response"
                f" and each reference response separately; set {suite.key}.function or"
                " evaluation.every=0"
            )


def find_judge_key_problem(source: JudgeSource) -> str | None:
    """Return the problem of a judge's API key in the environment of this process.

    Returns None if there is no problem, or if the judge needs no key. The message does not contain
    the API key.
    """
    name = source.judge_key_variable
    if name is None:
        return None
    # The endpoint receives the key in an HTTP header, which must not contain spaces or controls.
    key = os.environ.get(name, "").strip()
    setting = f"{source.key}.judge_key_variable={name}"
    if not key:
        return (
            f"{setting}: the environment variable is not set or is empty; set {name} to the"
            " endpoint's API key"
        )
    if not (key.isascii() and key.isprintable()) or " " in key:
        return (
            f"{setting}: the API key in the environment variable is not valid: the key contains"
            " spaces, or characters that are not allowed in an HTTP header"
        )
    return None
