"""Batches, staleness and lengths against each other, the model and the servers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from aligner.errors import ConfigError
from aligner.models.layouts import cache_bytes_per_token
from aligner.models.model_source import (
    ExpectedInputs,
    reward_shapes,
)
from aligner.models.shape import ModelShape
from aligner.placement.devices import device_of
from aligner.placement.roles import has_generator
from aligner.schema import Config, RolloutConfig
from aligner.schema.derived import rows_together
from aligner.schema.keys import value_at
from aligner.schema.reward_sources import has_reward_model


def spare_prompt_problems(rollout: RolloutConfig) -> Iterator[str]:
    """Spare prompts against the batch and the staleness bound."""
    key = f"rollout.spare_prompts={rollout.spare_prompts}"
    if rollout.spare_prompts > rollout.prompts_per_step:
        yield f"{key}: more than a step takes, rollout.prompts_per_step={rollout.prompts_per_step}"
    if rollout.spare_prompts and rollout.max_staleness <= rollout.max_deferrals:
        yield (
            f"{key}: what is left behind rollout.max_deferrals={rollout.max_deferrals} times is more versions old than"
            f" rollout.max_staleness={rollout.max_staleness} allows; give {rollout.max_deferrals + 1} or more"
        )


def staleness_problems(config: Config) -> Iterator[str]:
    """What samples drawn ahead of training need."""
    key = f"rollout.max_staleness={config.rollout.max_staleness}"
    if config.engine.placement != "server":
        yield f"{key}: an engine on the trainer's ranks cannot draw while these train; give engine.placement=server"
    if config.algorithm.trainer != "online":
        yield f"{key}: algorithm.trainer={config.algorithm.trainer} trains nothing that samples could be ahead of"
    if config.critic.with_reward:
        yield f"{key}: critic.with_reward=true gives scores with values, which are wanted later; give critic.with_reward=false"


def batch_problems(config: Config) -> Iterator[str]:
    """Prompts and samples that do not divide."""
    rollout, parts, replicas = config.rollout, config.rollout.micro_batches, config.engine.parallel.data
    if rollout.min_response_tokens > rollout.max_response_tokens:
        yield (
            f"rollout.min_response_tokens={rollout.min_response_tokens}: it is above"
            f" rollout.max_response_tokens={rollout.max_response_tokens}"
        )
    samples = rollout.prompts_per_micro_batch * rollout.samples_per_prompt
    if rollout.prompts_per_step % parts:
        yield f"rollout.prompts_per_step={rollout.prompts_per_step}: does not divide by rollout.micro_batches={parts}"
    elif samples % replicas:
        yield f"engine.parallel.data={replicas}: the {samples} samples of a rollout micro-batch do not divide by {replicas}"


def length_problems(config: Config, shape: ModelShape, coming: ExpectedInputs) -> Iterator[str]:
    """One line for each thing that prompts and responses at their longest do not fit into."""
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    longest = prompt + response
    described = f"data.max_prompt_tokens={prompt} + rollout.max_response_tokens={response}"
    if longest > shape.max_positions:
        yield f"{described}: {longest} tokens, but the model has {shape.max_positions} positions"
    budget, token = config.engine.kv_cache_mib, _cache_bytes_per_token(config, shape)
    if budget is not None and token * (longest - 1) > budget << 20:
        yield (
            f"engine.kv_cache_mib={budget}: keys and values of the longest sequence, {longest} tokens ({described}), need"
            f" {token * (longest - 1) / 2**20:.1f} MiB"
        )
    yield from _micro_batches(config, longest, described)
    taken = config.server.max_sequence_length
    if taken is not None and taken < longest:
        yield (
            f"server.max_sequence_length={taken}: the servers would refuse the longest sequence, {longest} tokens"
            f" ({described}); give {longest} or more, or leave it out"
        )
    yield from _requests(config, longest)
    yield from _reward_models(config, shape, coming, longest, described)


def _cache_bytes_per_token(config: Config, shape: ModelShape) -> int:
    return cache_bytes_per_token(shape, config.engine.parallel.tensor, device_of(config, config.engine.precision).itemsize)


def _micro_batches(config: Config, longest: int, described: str) -> Iterator[str]:
    roles = {"actor": rows_together(config)}
    if config.algorithm.has_critic:
        roles["critic"] = 1
    if has_reward_model(config.reward):
        roles["reward"] = 1
    for role, together in roles.items():
        tokens = value_at(config, f"{role}.micro_batch_tokens")
        if tokens < together * longest:
            what = "the longest sequence" if together == 1 else f"{together} of the longest sequence together"
            yield f"{role}.micro_batch_tokens={tokens}: must hold {what}, {together * longest} tokens ({described})"


def _requests(config: Config, longest: int) -> Iterator[str]:
    """Requests that the servers would refuse whole: padding counts, so every row may be as long as the longest."""
    rollout, server, critic = config.rollout, config.server, config.algorithm.has_critic
    prompts = rollout.prompts_per_micro_batch
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    # Of a batch that was drawn ahead the values are asked for when it is taken, as a whole.
    asked = samples if critic and rollout.steps_ahead else prompts * rollout.samples_per_prompt
    requests = [("scores or values of", min(asked, server.max_batch_size), longest, "a smaller server.max_batch_size")]
    if critic:
        rows = samples // config.algorithm.minibatches
        requests.append(("an update of the critic with", rows, longest, "more algorithm.minibatches"))
    if has_generator(config):
        rows = prompts + rollout.spare_prompts
        requests.append(("samples for", rows, config.data.max_prompt_tokens, "more rollout.micro_batches"))
    if config.evaluation.every:
        requests += _evaluation_requests(config, longest)
    for what, rows, tokens, instead in requests:
        if rows * tokens > server.max_request_tokens:
            yield (
                f"server.max_request_tokens={server.max_request_tokens}: a request for {what} {rows} rows of up to {tokens}"
                f" tokens would be refused; give {rows * tokens} or more, or {instead}"
            )


def _evaluation_requests(config: Config, longest: int) -> Iterator[tuple[str, int, int, str]]:
    """Those of held-out prompts, all of which are asked for at once. How many a file has is not known before it is read."""
    settings, instead = config.evaluation, "a smaller evaluation.count"
    prompts = min(len(settings.prompts) or sys.maxsize, settings.count or sys.maxsize)
    if settings.function is None:
        rows = min(prompts * settings.samples, config.server.max_batch_size)
        yield "the evaluation's scores of", rows, longest, "a smaller server.max_batch_size"
    if has_generator(config) and prompts < sys.maxsize:
        yield "the evaluation's samples for", prompts, config.data.max_prompt_tokens, instead


def _reward_models(config: Config, shape: ModelShape, coming: ExpectedInputs, longest: int, described: str) -> Iterator[str]:
    try:
        shapes = reward_shapes(config, coming)
    except ConfigError:
        return  # told with the other problems of the reward
    for source, model in shapes.items():
        named = f"{source.key}.path={source.path}"
        if model.max_positions < longest:
            yield (
                f"{named}: it has {model.max_positions} positions, the longest sequence {longest} tokens ({described}); give"
                " shorter ones, or another model"
            )
        # The tokenizer, which is large, is read only where embeddings alone do not settle it.
        if model.vocab_size < shape.vocab_size and model.vocab_size < (vocabulary := _used_vocabulary(config, shape)):
            yield (
                f"{named}: it knows {model.vocab_size} tokens, the policy writes {vocabulary}; give a reward model of the"
                " policy's vocabulary (model.path)"
            )


def _used_vocabulary(config: Config, shape: ModelShape) -> int:
    """How many tokens the policy writes: those of its tokenizer, where its embeddings have rows to spare."""
    if config.model.source != "directory" or config.model.path is None:
        return shape.vocab_size
    try:
        tokenizer = json.loads((Path(config.model.path) / "tokenizer.json").read_bytes())
        words, added = tokenizer["model"]["vocab"], {token["id"] for token in tokenizer["added_tokens"]}
    except (OSError, ValueError, LookupError, TypeError):
        return shape.vocab_size  # there is none yet, or it is not as it must be, which is told when it is opened
    ids = set(words.values()) if isinstance(words, dict) else set(range(len(words)))
    return min(shape.vocab_size, len(ids | added))
