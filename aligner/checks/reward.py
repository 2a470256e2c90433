"""The reward's sources against the model, the layout and the machine."""

import os
from collections.abc import Iterator
from pathlib import Path

from aligner.checks.trained_model import micro_batch_problems, precision_problems, reader_problems
from aligner.errors import ConfigError
from aligner.models.layouts import layout_problems
from aligner.models.model_source import ExpectedInputs, directory_shape, read_normalization
from aligner.models.shape import ModelShape
from aligner.schema import Config, ParallelConfig
from aligner.schema.evaluation_suites import evaluated_suites
from aligner.schema.reward_sources import (
    JudgeSource,
    ModelSource,
    RemoteSource,
    Source,
    has_step_rewards,
    model_sources,
    reward_sources,
)


def problems(config: Config, model: ModelShape | None, expected: ExpectedInputs) -> Iterator[str]:
    """What is wrong with the reward's sources, and with where they run."""
    if not config.algorithm.generates:
        return
    missing, rollout = config.reward.missing_end_score, config.rollout
    if missing is not None and not rollout.stop_at_eos and rollout.truncate_token is None:
        yield (
            f"reward.missing_end_score={missing:g}: with rollout.stop_at_eos=false no response"
            " can end with an end-of-sequence token; set rollout.truncate_token or"
            " rollout.stop_at_eos=true"
        )
    if has_step_rewards(config.reward) and config.critic_scores:
        yield (
            "critic.with_reward=true: is not supported with per-step rewards, which require a"
            " separate reward server; set critic.with_reward=false"
        )
    try:
        sources = reward_sources(config.reward)
    except ConfigError as error:
        yield str(error)
        return
    models = model_sources(sources)
    yield from _place_problems(config, models)
    layout_key, layout = _layout(config)
    if layout.ranks > 1:
        yield from _patience_problems(config, sources)
    for source in sources:
        if isinstance(source, JudgeSource):
            yield from _judge_problems(config, source)
    if models:
        yield from micro_batch_problems(config, "reward", config.reward)
        yield from precision_problems(config, "reward", config.reward, None)
    for source in models:
        try:
            shape = directory_shape(Path(source.path), f"{source.key}.path", expected)
            yield from layout_problems(layout_key, layout, shape)
            read_normalization(Path(source.path))
        except ConfigError as error:
            yield str(error)
        else:
            yield from reader_problems(
                config, model, f"{source.key}.path", Path(source.path), shape
            )


def _layout(config: Config) -> tuple[str, ParallelConfig]:
    """The layout at which reward models run, and its key."""
    if config.critic_scores:
        return "critic.parallel", config.critic.parallel
    return "reward.parallel", config.reward.parallel


def _place_problems(config: Config, models: tuple[ModelSource, ...]) -> Iterator[str]:
    reward, own = config.reward, config.reward.parallel
    if config.critic_scores and own not in (ParallelConfig(), config.critic.parallel):
        yield (
            "reward.parallel: critic.with_reward=true runs the reward models with the layout"
            " critic.parallel; remove reward.parallel, or set it to the values of critic.parallel"
        )
    elif not config.critic_scores and own.ranks != 1 and not models:
        yield (
            f"reward.parallel: got {own.ranks} ranks, must be 1, because no reward source is a"
            f" model (reward.kind={reward.kind})"
        )


def _patience_problems(config: Config, sources: tuple[Source, ...]) -> Iterator[str]:
    limit = config.cluster.collective_timeout_s
    for source in sources:
        if isinstance(source, RemoteSource) and source.timeout_s >= limit:
            yield (
                f"{source.key}.timeout_s={source.timeout_s:g}: must be below"
                f" cluster.collective_timeout_s={limit:g}, the time that the other ranks wait for"
                " the scores"
            )
        if isinstance(source, JudgeSource) and source.longest_s >= limit:
            yield (
                f"{_judge_patience(source)} must be below cluster.collective_timeout_s={limit:g},"
                " the time that the other ranks wait for the scores"
            )


def _judge_patience(source: JudgeSource) -> str:
    return (
        f"{source.key}.judge_timeout_s={source.judge_timeout_s:g},"
        f" {source.key}.judge_tries={source.judge_tries}: one judgment may take"
        f" {source.longest_s:g} s, which"
    )


def unasked_problems(config: Config, source: JudgeSource) -> Iterator[str]:
    """What keeps a judge from being asked."""
    if config.cluster.kind == "local" and (problem := judge_key_problem(source)):
        yield problem  # a job has an environment of its own


def _judge_problems(config: Config, source: JudgeSource) -> Iterator[str]:
    """What keeps a judge from being asked, or its answers from being waited for."""
    yield from unasked_problems(config, source)
    patience_s = config.server.request_timeout_s
    if source.longest_s >= patience_s:
        limit = f"server.request_timeout_s={patience_s:g}"
        yield (
            f"{_judge_patience(source)} must be below {limit}, the time that the trainer waits"
            " for the scores"
        )
    if source.compares:
        yield from _comparison_problems(config, source)


def _comparison_problems(config: Config, source: JudgeSource) -> Iterator[str]:
    """What keeps the samples of a prompt from coming to the judge together, with the same prompt
    before them."""
    asks, rollout, server = (
        f"{source.key}.judge_asks={source.judge_asks}",
        config.rollout,
        config.server,
    )
    each = rollout.samples_per_prompt
    if each < 2:
        yield (
            f"{asks}: compares the samples of a prompt and requires at least 2 samples, got"
            f" rollout.samples_per_prompt={each}"
        )
    size = server.max_batch_size
    if rollout.prompts_per_step * each > size and size % each:
        yield (
            f"{asks}: compares the samples of a prompt, but server.max_batch_size={size} would"
            " split these samples over several requests; set server.max_batch_size to a multiple"
            f" of rollout.samples_per_prompt={each}"
        )
    if config.environment.draws_episodes:
        yield (
            f"{asks}: compares responses to one prompt, which is not supported with multi-turn"
            f" episodes; set {source.key}.judge_asks=score"
        )
    for suite in evaluated_suites(config):
        if suite.settings.function is None:
            yield (
                f"{asks}: compares the samples of a prompt, but evaluation scores each response"
                f" and each reference response separately; set {suite.key}.function or"
                " evaluation.every=0"
            )


def judge_key_problem(source: JudgeSource) -> str | None:
    """What is wrong with the endpoint's key in this process's environment, which is not told
    itself."""
    name = source.judge_key_variable
    if name is None:
        return None
    key, given = os.environ.get(name, "").strip(), f"{source.key}.judge_key_variable={name}"
    if not key:
        return (
            f"{given}: the environment variable is not set or is empty; set {name} to the"
            " endpoint's API key"
        )
    if not (key.isascii() and key.isprintable()) or " " in key:
        return (
            f"{given}: the API key in the environment variable is not valid: the key contains"
            " spaces, or characters that are not allowed in an HTTP header"
        )
    return None
