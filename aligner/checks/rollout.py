"""Batches, staleness and lengths against the engine, the algorithm and the model."""

from collections.abc import Iterator

from aligner.models.model_source import ExpectedInputs
from aligner.models.shape import ModelShape
from aligner.schema import AlgorithmConfig, Config
from aligner.schema.derived import WITHOUT_RATIO, longest_sequence, longest_sequence_keys


def problems(config: Config, model: ModelShape | None, expected: ExpectedInputs) -> Iterator[str]:
    """What samples cannot be drawn as."""
    if not config.algorithm.generates:
        return
    longest = longest_sequence(config)
    if model is not None and longest > model.max_positions:
        yield (
            f"{longest_sequence_keys(config)}: {longest} tokens, but the model has"
            f" {model.max_positions} positions"
        )
    yield from _batch_problems(config)
    yield from _length_problems(config)
    if config.rollout.max_staleness:
        yield from _staleness_problems(config)
    yield from _spare_prompt_problems(config)


def _batch_problems(config: Config) -> Iterator[str]:
    """Prompts and samples that do not divide."""
    rollout, parts, replicas = (
        config.rollout,
        config.rollout.micro_batches,
        config.engine.parallel.data,
    )
    samples = rollout.prompts_per_micro_batch * rollout.samples_per_prompt
    if rollout.prompts_per_step % parts:
        yield (
            f"rollout.prompts_per_step={rollout.prompts_per_step}: does not divide by"
            f" rollout.micro_batches={parts}"
        )
    elif samples % replicas:
        yield (
            f"engine.parallel.data={replicas}: the {samples} samples of a rollout micro-batch do"
            f" not divide by {replicas}"
        )


def _length_problems(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.min_response_tokens > rollout.max_response_tokens:
        yield (
            f"rollout.min_response_tokens={rollout.min_response_tokens}: it is above"
            f" rollout.max_response_tokens={rollout.max_response_tokens}"
        )
    if rollout.truncate_token is not None and rollout.truncate_after >= rollout.max_response_tokens:
        yield (
            f"rollout.truncate_after={rollout.truncate_after}: responses have at most"
            f" rollout.max_response_tokens={rollout.max_response_tokens} tokens"
        )


def _staleness_problems(config: Config) -> Iterator[str]:
    """What samples drawn ahead of training need."""
    key = f"rollout.max_staleness={config.rollout.max_staleness}"
    if config.engine.placement != "server":
        yield (
            f"{key}: an engine on the trainer's ranks cannot draw while these train; give"
            " engine.placement=server"
        )
    if config.algorithm.trainer != "online":
        yield (
            f"{key}: algorithm.trainer={config.algorithm.trainer} trains nothing that samples could"
            " be ahead of"
        )
    elif not _is_sound_with_age(config.algorithm):
        loss = config.algorithm.loss
        levels = "sequence" if loss in ("dpo", "copg") else "token or sequence"
        ratio = "" if loss in WITHOUT_RATIO else ", or algorithm.ratio_against=sampler"
        yield (
            f"{key}: algorithm.loss={loss} would take what older weights drew as the policy's own;"
            f" give algorithm.truncated_importance={levels}{ratio}, or"
            " algorithm.uncorrected_staleness=true to have it so"
        )
    if config.critic_scores:
        yield (
            f"{key}: critic.with_reward=true gives scores with values, which are wanted later; give"
            " critic.with_reward=false"
        )


def _is_sound_with_age(settings: AlgorithmConfig) -> bool:
    """Whether something accounts for which weights drew a sample, or nothing is to."""
    corrected = settings.truncated_importance != "none" or settings.ratio_against == "sampler"
    return corrected or settings.uncorrected_staleness


def _spare_prompt_problems(config: Config) -> Iterator[str]:
    rollout = config.rollout
    key = f"rollout.spare_prompts={rollout.spare_prompts}"
    if rollout.spare_prompts > rollout.prompts_per_step:
        yield f"{key}: more than a step takes, rollout.prompts_per_step={rollout.prompts_per_step}"
    if rollout.spare_prompts and rollout.max_staleness <= rollout.max_deferrals:
        yield (
            f"{key}: what is left behind rollout.max_deferrals={rollout.max_deferrals} times is"
            f" more versions old than rollout.max_staleness={rollout.max_staleness} allows; give"
            f" {rollout.max_deferrals + 1} or more"
        )
