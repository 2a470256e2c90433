"""The parts of an algorithm against each other, and the run around it."""

from __future__ import annotations

from collections.abc import Iterator

from aligner.schema import AlgorithmConfig, Config, PreferenceConfig
from aligner.schema.derived import rows_together

_GROUPED = ("rloo", "grpo", "dr_grpo")
_OWN_TARGET = ("copg", "dpo", "cross_entropy")
"""Losses that take no advantages."""
_CORRECTED = {"clip": ("none", "token", "sequence"), "dpo": ("none", "sequence")}
"""What losses can be weighed by (`algorithm.truncated_importance`); the others are not."""


def algorithm_problems(config: Config) -> Iterator[str]:
    """One line for each thing about `algorithm` that does not fit together."""
    yield from _end_problems(config)
    if config.algorithm.trainer == "preferences":
        yield from _preference_problems(config)
        return
    yield from _loss_problems(config.algorithm)
    yield from _sample_problems(config)
    yield from _penalty_problems(config)
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


def _loss_problems(settings: AlgorithmConfig) -> Iterator[str]:
    loss = settings.loss
    if loss in _OWN_TARGET and settings.advantage != "none":
        yield f"algorithm.advantage={settings.advantage}: loss={loss} takes no advantages; give advantage=none"
    if loss not in _OWN_TARGET and settings.advantage == "none":
        yield f"algorithm.advantage=none: loss={loss} needs an estimator, such as gae or rloo"
    pairs = settings.train_on == "best_and_worst"
    if (loss == "dpo") != pairs:
        yield f"algorithm.train_on={settings.train_on}: loss=dpo and train_on=best_and_worst need each other, got loss={loss}"
    if settings.train_on == "best" and loss != "cross_entropy":
        yield f"algorithm.train_on=best: the samples left have no others beside them; give loss=cross_entropy, not {loss}"
    if settings.whiten_over == "prompt" and settings.train_on != "all":
        yield f"algorithm.train_on={settings.train_on}: whiten_over=prompt is over all of a prompt's samples"
    if settings.advantage in _GROUPED and settings.train_on != "all":
        yield f"algorithm.train_on={settings.train_on}: advantage={settings.advantage} compares all of a prompt's samples"
    if loss == "dpo":
        yield from preference_loss_problems(settings.preference)
    if loss in ("dpo", "copg") and (settings.entropy_coefficient or settings.aggregation != "token"):
        yield f"algorithm: loss={loss} is a sum over responses; leave entropy_coefficient and aggregation out"
    if loss != "clip":
        for name, plain in (("ratio_level", "token"), ("dual_clip", None)):
            if getattr(settings, name) != plain:
                yield f"algorithm.{name}={getattr(settings, name)}: read with loss=clip only, got loss={loss}"
    importance = settings.truncated_importance
    if importance not in _CORRECTED.get(loss, ("none",)):
        allowed = "; ".join(f"loss={name}: {', '.join(levels)}" for name, levels in _CORRECTED.items())
        yield f"algorithm.truncated_importance={importance}: got loss={loss}; allowed with {allowed}"


def preference_loss_problems(settings: PreferenceConfig) -> Iterator[str]:
    """What of algorithm.preference does not fit together."""
    if not settings.label_smoothing:
        return
    key = f"algorithm.preference.label_smoothing={settings.label_smoothing:g}"
    if settings.kind != "sigmoid":
        yield f"{key}: read with kind=sigmoid only, got kind={settings.kind}"
    elif settings.label_smoothing > 0.5:
        yield f"{key}: must be at most 0.5; above it the labels are turned round"


def _penalty_problems(config: Config) -> Iterator[str]:
    """What concerns the KL penalty, whitening and warm-up."""
    settings, loss = config.algorithm, config.algorithm.loss
    coefficient, in_loss = f"algorithm.kl_coefficient={settings.kl_coefficient:g}", settings.kl_placement == "loss"
    if settings.kl_coefficient and loss == "dpo":
        yield f"{coefficient}: loss=dpo is held by algorithm.preference.beta alone; give kl_coefficient=0"
    elif settings.kl_coefficient and loss in _OWN_TARGET and not in_loss:
        yield f"{coefficient}: loss={loss} reads no rewards; give kl_placement=loss, or kl_coefficient=0"
    elif settings.kl_coefficient and in_loss and loss != "copg" and settings.kl_estimator == "k1":
        yield "algorithm.kl_estimator=k1: in the loss its gradient is zero on average; give k2 or k3"
    if loss == "copg" and settings.kl_estimator != "k1":
        yield f"algorithm.kl_estimator={settings.kl_estimator}: loss=copg is defined with k1"
    if settings.early_stop_kl is not None and loss not in ("clip", "cispo"):
        yield f"algorithm.early_stop_kl={settings.early_stop_kl:g}: loss={loss} has no ratio to measure; give clip or cispo"
    if settings.whiten_rewards and (settings.advantage in _GROUPED or loss == "copg"):
        yield "algorithm.whiten_rewards=true: scores of whole responses are compared, and theirs would depend on length"
    if settings.kl_target is not None:
        samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
        if not settings.kl_coefficient:
            yield f"algorithm.kl_target={settings.kl_target:g}: a coefficient of 0 stays 0; give kl_coefficient"
        if settings.kl_horizon <= samples:
            yield f"algorithm.kl_horizon={settings.kl_horizon}: must be above a step's {samples} samples"
    warmup = settings.critic_warmup_steps
    if warmup and not settings.has_critic:
        yield f"algorithm.critic_warmup_steps={warmup}: algorithm.advantage={settings.advantage} has no critic"
    if warmup >= config.run.steps:
        yield f"algorithm.critic_warmup_steps={warmup}: the run has {config.run.steps} steps, and its policy would never learn"


def _end_problems(config: Config) -> Iterator[str]:
    """What concerns where a response ends."""
    rollout, missing = config.rollout, config.reward.missing_end_score
    if missing is not None and not rollout.stop_at_eos and rollout.truncate_token is None:
        yield (
            f"reward.missing_end_score={missing:g}: with rollout.stop_at_eos=false no response has an end; give"
            " rollout.truncate_token"
        )
    if rollout.truncate_token is not None and rollout.truncate_after >= rollout.max_response_tokens:
        yield (
            f"rollout.truncate_after={rollout.truncate_after}: responses have at most"
            f" rollout.max_response_tokens={rollout.max_response_tokens} tokens"
        )


def _sample_problems(config: Config) -> Iterator[str]:
    settings, samples = config.algorithm, config.rollout.samples_per_prompt
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
