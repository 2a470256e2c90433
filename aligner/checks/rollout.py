"""Checks of the section `rollout`: batches, staleness and lengths.

The checks compare these settings with the engine, the algorithm and the model.
"""

from collections.abc import Iterator

from aligner.models.model_source import ExpectedInputs
from aligner.models.shape import ModelShape
from aligner.schema import AlgorithmConfig, Config
from aligner.schema.derived import (
    LOSSES_WITHOUT_RATIO,
    describe_max_sequence_length,
    get_max_sequence_length,
)


def find_problems(
    config: Config, model: ModelShape | None, expected: ExpectedInputs
) -> Iterator[str]:
    """Yield a line for each reason why samples cannot be generated with these settings.

    Args:
        model: Shape of the policy; None if it could not be read.
        expected: Not used; the checks of all sections have the same parameters.
    """
    if not config.algorithm.generates_samples:
        return
    max_length = get_max_sequence_length(config)
    if model is not None and max_length > model.max_positions:
        yield (
            f"{describe_max_sequence_length(config)}: {max_length} tokens exceed the"
            f" {model.max_positions} positions of the model; set smaller lengths"
        )
    yield from _find_batch_problems(config)
    yield from _find_length_problems(config)
    if config.rollout.max_staleness:
        yield from _find_staleness_problems(config)
    yield from _find_spare_prompt_problems(config)


def _find_batch_problems(config: Config) -> Iterator[str]:
    """Yield a line for each number of prompts or samples that cannot be divided evenly."""
    rollout = config.rollout
    micro_batches = config.rollout.micro_batches
    replicas = config.engine.parallel.data
    samples = rollout.prompts_per_micro_batch * rollout.samples_per_prompt
    if rollout.prompts_per_step % micro_batches:
        yield (
            f"rollout.prompts_per_step={rollout.prompts_per_step}: must be a multiple of"
            f" rollout.micro_batches={micro_batches}"
        )
    # Each replica generates the same number of samples of a micro-batch.
    elif samples % replicas:
        yield (
            f"engine.parallel.data={replicas}: must divide the {samples} samples of a rollout"
            " micro-batch"
        )


def _find_length_problems(config: Config) -> Iterator[str]:
    """Yield a line for each pair of length limits that contradict each other."""
    rollout = config.rollout
    if rollout.min_response_tokens > rollout.max_response_tokens:
        yield (
            f"rollout.min_response_tokens={rollout.min_response_tokens}: must be at most"
            f" rollout.max_response_tokens={rollout.max_response_tokens}"
        )
    if not all(rollout.stop):
        yield f"rollout.stop={rollout.stop}: must not contain an empty string"
    # `truncate_token` is searched for only after the first `truncate_after` tokens of a response.
    if rollout.truncate_token is not None and rollout.truncate_after >= rollout.max_response_tokens:
        yield (
            f"rollout.truncate_after={rollout.truncate_after}: must be below"
            f" rollout.max_response_tokens={rollout.max_response_tokens}"
        )


def _find_staleness_problems(config: Config) -> Iterator[str]:
    """Yield a line for each reason why the run cannot train on stale samples.

    The caller has checked that `rollout.max_staleness` is above 0.
    """
    key = f"rollout.max_staleness={config.rollout.max_staleness}"
    if config.engine.placement != "server":
        yield (
            f"{key}: a colocated engine cannot generate while the trainer trains; set"
            " engine.placement=server, or rollout.max_staleness=0"
        )
    if config.algorithm.trainer != "online":
        yield (
            f"{key}: must be 0 with algorithm.trainer={config.algorithm.trainer}, which does not"
            " train on the samples"
        )
    elif not _is_staleness_allowed(config.algorithm):
        # `dpo` and `copg` are losses over whole responses, with one importance weight each.
        loss = config.algorithm.loss
        levels = "sequence" if loss in ("dpo", "copg") else "token or sequence"
        ratio = "" if loss in LOSSES_WITHOUT_RATIO else ", or algorithm.ratio_against=sampler"
        yield (
            f"{key}: algorithm.loss={loss} would treat samples of older weights as on-policy; set"
            f" algorithm.truncated_importance={levels}{ratio}, or accept the bias with"
            " algorithm.uncorrected_staleness=true"
        )
    if config.critic_serves_reward:
        yield (
            f"{key}: is not supported with critic.with_reward=true. This setting computes scores"
            " and values in one request, but asynchronous training computes values only when the"
            " trainer takes the batch; set critic.with_reward=false"
        )


def _is_staleness_allowed(settings: AlgorithmConfig) -> bool:
    """Return whether the loss corrects for stale samples, or the user accepts the bias."""
    is_corrected = settings.truncated_importance != "none" or settings.ratio_against == "sampler"
    return is_corrected or settings.uncorrected_staleness


def _find_spare_prompt_problems(config: Config) -> Iterator[str]:
    """Yield a line for each reason why the batch size or the maximum staleness does not allow
    `rollout.spare_prompts`."""
    rollout = config.rollout
    key = f"rollout.spare_prompts={rollout.spare_prompts}"
    if rollout.spare_prompts > rollout.prompts_per_step:
        yield f"{key}: must be at most rollout.prompts_per_step={rollout.prompts_per_step}"
    # Generation must run ahead by at least one step, and each deferral adds one weight version to
    # this staleness; see `RolloutConfig.steps_ahead`.
    if rollout.spare_prompts and rollout.max_staleness <= rollout.max_deferrals:
        yield (
            f"{key}: a prompt that is carried over rollout.max_deferrals={rollout.max_deferrals}"
            f" times is older than rollout.max_staleness={rollout.max_staleness} allows; set"
            f" rollout.max_staleness to {rollout.max_deferrals + 1} or more"
        )
