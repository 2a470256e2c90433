"""Which parts of an algorithm fit each other, and the run around it."""

from __future__ import annotations

from collections.abc import Iterator

from aligner.config.schema import Algorithm, Config

_GROUPED = ("rloo", "grpo", "dr_grpo")
_OWN_TARGET = ("copg", "dpo", "cross_entropy")
"""Losses that take no advantages."""


def algorithm_problems(config: Config) -> Iterator[str]:
    """One line for each thing about `algorithm` that does not fit together."""
    if config.algorithm.trainer == "preferences":
        yield from _preference_problems(config)
        return
    yield from _loss_problems(config.algorithm)
    yield from _sample_problems(config)
    if config.critic.with_reward and not config.algorithm.has_critic:
        yield (
            f"critic.with_reward=true: algorithm.advantage={config.algorithm.advantage} has no critic whose processes could"
            " serve the reward; leave it out"
        )


def _preference_problems(config: Config) -> Iterator[str]:
    samples, rounds = config.rollout.samples_per_prompt, config.algorithm.dynamic_sampling_rounds
    if samples < 2:
        yield f"rollout.samples_per_prompt={samples}: preferences are between samples of one prompt; give at least 2"
    if rounds:
        yield (
            f"algorithm.dynamic_sampling_rounds={rounds}: algorithm.trainer=preferences leaves prompts whose samples all score"
            " the same out; give 0"
        )
    if config.critic.with_reward:
        yield "critic.with_reward=true: algorithm.trainer=preferences has no critic; leave it out"


def rows_together(config: Config) -> int:
    """How many rows of a minibatch must be in one micro-batch: a pair, or all of a prompt's samples."""
    if config.algorithm.trainer in ("dpo", "reward_model"):
        return 2
    if config.algorithm.trainer != "online":
        return 1
    return {"dpo": 2, "copg": config.rollout.samples_per_prompt}.get(config.algorithm.loss, 1)


def _loss_problems(settings: Algorithm) -> Iterator[str]:
    loss, wanted = settings.loss, "none" if settings.loss in _OWN_TARGET else "an estimator"
    if loss in _OWN_TARGET and settings.advantage != "none":
        yield f"algorithm.advantage={settings.advantage}: loss={loss} takes no advantages; give advantage=none"
    if loss not in _OWN_TARGET and settings.advantage == "none":
        yield f"algorithm.advantage=none: loss={loss} needs {wanted}, such as gae or rloo"
    pairs = settings.train_on == "best_and_worst"
    if (loss == "dpo") != pairs:
        yield f"algorithm.train_on={settings.train_on}: loss=dpo and train_on=best_and_worst need each other, got loss={loss}"
    if settings.train_on == "best" and loss != "cross_entropy":
        yield f"algorithm.train_on=best: the samples left have no others beside them; give loss=cross_entropy, not {loss}"
    if settings.whiten_over == "prompt" and settings.train_on != "all":
        yield f"algorithm.train_on={settings.train_on}: whiten_over=prompt is over all of a prompt's samples"
    if settings.advantage in _GROUPED and settings.train_on != "all":
        yield f"algorithm.train_on={settings.train_on}: advantage={settings.advantage} compares all of a prompt's samples"
    if loss in ("dpo", "copg") and settings.kl_placement == "reward" and settings.kl_coefficient:
        where = "algorithm.preference.beta" if loss == "dpo" else "the coefficient in the loss: kl_placement=loss"
        yield f"algorithm.kl_coefficient={settings.kl_coefficient:g}: loss={loss} reads no rewards; it is held by {where}"
    if loss in ("dpo", "copg") and (settings.entropy_coefficient or settings.aggregation != "token"):
        yield f"algorithm: loss={loss} is a sum over responses; leave entropy_coefficient and aggregation out"
    if loss != "clip":
        for name, plain in (("ratio_level", "token"), ("dual_clip", None), ("truncated_importance", "none")):
            if getattr(settings, name) != plain:
                yield f"algorithm.{name}={getattr(settings, name)}: read with loss=clip only, got loss={loss}"


def _sample_problems(config: Config) -> Iterator[str]:
    settings, samples = config.algorithm, config.rollout.samples_per_prompt
    buffer, longest = config.reward.overlong_buffer, config.rollout.max_response_tokens
    if buffer > longest:
        yield f"reward.overlong_buffer={buffer}: must be at most rollout.max_response_tokens={longest}"
    comparing = [
        f"{name}={value}"
        for name, value, compares in (
            ("advantage", settings.advantage, settings.advantage in _GROUPED),
            ("loss", settings.loss, settings.loss == "copg"),
            ("train_on", settings.train_on, settings.train_on != "all"),
            ("whiten_over", settings.whiten_over, settings.whiten_over == "prompt"),
            ("dynamic_sampling_rounds", settings.dynamic_sampling_rounds, settings.dynamic_sampling_rounds > 0),
        )
        if compares
    ]
    if comparing and samples < 2:
        yield (
            f"rollout.samples_per_prompt={samples}: algorithm.{comparing[0]} compares samples of one prompt; give at least 2"
        )
    kept = {"all": samples, "best": 1, "best_and_worst": 2}[settings.train_on]
    units = config.rollout.prompts_per_step * kept // rows_together(config)
    if units % settings.minibatches:
        what = {1: "samples", 2: "pairs"}.get(rows_together(config), "prompts")
        yield f"algorithm.minibatches={settings.minibatches}: a step's {units} {what} do not divide by {settings.minibatches}"
