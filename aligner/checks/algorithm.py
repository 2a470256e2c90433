"""Checks of the section `algorithm`: its parts against each other and against the run."""

from collections.abc import Iterator

from aligner.models.model_source import ExpectedInputs
from aligner.models.shape import ModelShape
from aligner.schema import AlgorithmConfig, Config
from aligner.schema.derived import GROUP_ESTIMATORS, count_trained_samples, get_rows_per_group
from aligner.schema.reward_sources import has_step_rewards
from aligner.values import split_callable_name

LOSSES_WITHOUT_ADVANTAGES = ("copg", "dpo", "cross_entropy")
"""Losses that do not use advantages."""


# Field names of the stored responses.
_RESPONSE_FIELDS = (
    "step",
    "prompt",
    "response",
    "prompt_tokens",
    "response_tokens",
    "drawn",
    "reward",
)


def find_problems(
    config: Config, model: ModelShape | None, expected: ExpectedInputs
) -> Iterator[str]:
    """Yield a line for each conflict between parts of the algorithm, or with the run."""
    target = config.algorithm.target_length
    max_tokens = config.rollout.max_response_tokens
    if (
        config.algorithm.generates_samples
        and not config.environment.has_episodes
        and target > max_tokens
    ):
        yield (
            f"algorithm.target_length={target}: must be at most"
            f" rollout.max_response_tokens={max_tokens}"
        )
    if config.algorithm.trainer == "preferences":
        yield from _find_preference_problems(config)
    elif config.algorithm.trainer == "online":
        yield from _find_loss_problems(config.algorithm, has_teacher=config.has_teacher)
        yield from _find_sample_problems(config)
        yield from _find_penalty_problems(config)
        yield from _find_step_problems(config)
        yield from _find_replay_problems(config, model)


def _find_step_problems(config: Config) -> Iterator[str]:
    """Yield problems of step rewards with the estimator `grpo_steps`."""
    if config.algorithm.advantage != "grpo_steps":
        return
    if not has_step_rewards(config.reward):
        yield (
            "algorithm.advantage=grpo_steps: requires a reward for each step, but the reward"
            " scores whole responses; set reward.step_rewards=true with a function that scores"
            " steps, or reward.step_separator=TEXT with a process reward model"
        )
    if config.environment.has_agent:
        yield (
            "algorithm.advantage=grpo_steps: is not supported with agents, whose branches have no"
            " steps; set algorithm.advantage=grpo"
        )


def _find_preference_problems(config: Config) -> Iterator[str]:
    """Yield problems of a run that stores preference pairs."""
    samples = config.rollout.samples_per_prompt
    rounds = config.algorithm.dynamic_sampling_rounds
    for field in config.algorithm.kept_fields:
        if field in _RESPONSE_FIELDS:
            yield (
                f"algorithm.kept_fields: `{field}` is already a field of the stored responses;"
                " rename the field of the records with data.fields"
            )
    if samples < 2 and config.algorithm.pairs in ("best_and_worst", "all"):
        yield (
            f"rollout.samples_per_prompt={samples}: must be at least 2, because"
            f" algorithm.pairs={config.algorithm.pairs} forms pairs from the samples of one prompt"
        )
    if rounds:
        yield (
            f"algorithm.dynamic_sampling_rounds={rounds}: is not supported with"
            " algorithm.trainer=preferences, which drops prompts whose samples all have the same"
            " score; set algorithm.dynamic_sampling_rounds=0"
        )


def _find_loss_problems(settings: AlgorithmConfig, *, has_teacher: bool) -> Iterator[str]:
    """Yield problems of the loss with the advantage estimator and the other parts of the update."""
    loss = settings.loss
    is_user_loss = split_callable_name(settings.loss) is not None
    # A user's own loss may use advantages or not, so that neither is a problem.
    if loss in LOSSES_WITHOUT_ADVANTAGES and settings.advantage != "none":
        yield (
            f"algorithm.advantage={settings.advantage}: algorithm.loss={loss} does not use"
            " advantages; set algorithm.advantage=none"
        )
    if (
        loss not in LOSSES_WITHOUT_ADVANTAGES
        and not is_user_loss
        and settings.advantage == "none"
        and not has_teacher
    ):
        yield (
            f"algorithm.advantage=none: algorithm.loss={loss} requires advantages; set"
            " algorithm.advantage to an estimator such as gae or rloo, or set teacher.path"
        )
    if loss == "dpo" and not settings.preference.has_pairs:
        yield (
            f"algorithm.preference.kind={settings.preference.kind}: is not supported with"
            " algorithm.loss=dpo, which trains on pairs of samples; for"
            f" {settings.preference.kind}, set algorithm=kto"
        )
    has_pairs = settings.train_on == "best_and_worst"
    if (loss == "dpo") != has_pairs:
        yield (
            f"algorithm.train_on={settings.train_on}: algorithm.loss=dpo and"
            f" algorithm.train_on=best_and_worst require each other, got algorithm.loss={loss}"
        )
    if settings.train_on == "best" and loss != "cross_entropy" and not is_user_loss:
        yield (
            "algorithm.train_on=best: keeps one sample per prompt and requires"
            f" algorithm.loss=cross_entropy, got algorithm.loss={loss}"
        )
    if settings.whiten_over == "prompt" and settings.train_on != "all":
        yield (
            f"algorithm.train_on={settings.train_on}: must be `all` with"
            " algorithm.whiten_over=prompt, which normalizes over all samples of a prompt"
        )
    if (settings.advantage in GROUP_ESTIMATORS or loss == "copg") and settings.train_on != "all":
        comparing_setting = (
            f"advantage={settings.advantage}"
            if settings.advantage in GROUP_ESTIMATORS
            else "loss=copg"
        )
        yield (
            f"algorithm.train_on={settings.train_on}: must be `all` with"
            f" algorithm.{comparing_setting},"
            " which compares all samples of a prompt"
        )
    # REINFORCE has no importance ratio, so that its second epoch would be off-policy.
    if loss == "reinforce" and settings.epochs > 1:
        yield (
            f"algorithm.epochs={settings.epochs}: must be 1 with algorithm.loss=reinforce, which"
            " treats samples as on-policy; for more epochs, set algorithm.loss to clip or cispo,"
            " which use an importance ratio"
        )
    if loss in ("dpo", "copg") and (
        settings.entropy_coefficient or settings.aggregation != "token"
    ):
        yield (
            f"algorithm.loss={loss}: is computed over whole responses and supports neither"
            " algorithm.entropy_coefficient nor algorithm.aggregation; set"
            " algorithm.entropy_coefficient=0 and algorithm.aggregation=token"
        )
    if loss in ("dpo", "copg") and settings.truncated_importance == "token":
        yield (
            "algorithm.truncated_importance=token: must be none or sequence with"
            f" algorithm.loss={loss}"
        )
    # Both settings divide by the engine's probability.
    if settings.ratio_against == "sampler" and settings.truncated_importance != "none":
        yield (
            "algorithm.ratio_against=sampler: with"
            f" algorithm.truncated_importance={settings.truncated_importance} the difference"
            " between the trainer and the sampler would be corrected twice; set"
            " algorithm.truncated_importance=none or algorithm.ratio_against=trainer"
        )


def _find_replay_problems(config: Config, model: ModelShape | None) -> Iterator[str]:
    """Yield problems of routing replay with the model and the engine."""
    if not config.algorithm.routing_replay:
        return
    if model is not None and not model.num_experts:
        yield (
            "algorithm.routing_replay=true: requires a mixture-of-experts model, but the model has"
            " no experts; set algorithm.routing_replay=false"
        )
    if config.engine.kind != "embedded":
        yield (
            "algorithm.routing_replay=true: is not supported with"
            f" engine.kind={config.engine.kind}, which does not return expert routing; set"
            " algorithm.routing_replay=false, or use engine=embedded"
        )


def _find_penalty_problems(config: Config) -> Iterator[str]:
    """Yield problems of the KL penalty, of whitening, and of the critic's warm-up."""
    settings = config.algorithm
    loss = config.algorithm.loss
    coefficient = f"algorithm.kl_coefficient={settings.kl_coefficient:g}"
    is_kl_in_loss = settings.kl_placement == "loss"
    if settings.kl_coefficient and loss == "dpo":
        yield (
            f"{coefficient}: is not supported with algorithm.loss=dpo, which limits the policy's"
            " distance from the reference with algorithm.preference.beta; set"
            " algorithm.kl_coefficient=0"
        )
    elif settings.kl_coefficient and loss in LOSSES_WITHOUT_ADVANTAGES and not is_kl_in_loss:
        yield (
            f"{coefficient}: a KL penalty in the reward is not supported with"
            f" algorithm.loss={loss}, which does not use token rewards; set"
            " algorithm.kl_placement=loss or algorithm.kl_coefficient=0"
        )
    # The gradient of k1 is the score function, whose expectation is zero on on-policy samples.
    elif (
        settings.kl_coefficient
        and is_kl_in_loss
        and loss != "copg"
        and settings.kl_estimator == "k1"
    ):
        yield (
            "algorithm.kl_estimator=k1: has a gradient of zero on average with"
            " algorithm.kl_placement=loss; set k2 or k3"
        )
    # CoPG's KL term is the log-ratio of the whole response, the sum of k1.
    if loss == "copg" and settings.kl_estimator != "k1":
        yield f"algorithm.kl_estimator={settings.kl_estimator}: must be k1 with algorithm.loss=copg"
    if settings.whiten_rewards and (settings.advantage in GROUP_ESTIMATORS or loss == "copg"):
        yield (
            "algorithm.whiten_rewards=true: is not supported with"
            f" algorithm.advantage={'|'.join(GROUP_ESTIMATORS)} or algorithm.loss=copg, which"
            " compare scores of whole responses; whitening would make these scores depend on the"
            " response"
            " length; set algorithm.whiten_rewards=false"
        )
    if settings.kl_target is not None:
        samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
        if settings.kl_horizon <= samples:
            yield (
                f"algorithm.kl_horizon={settings.kl_horizon}: must be above {samples}, the number"
                " of samples in a step"
            )
    if (warmup := settings.critic_warmup_steps) >= config.run.steps:
        yield (
            f"algorithm.critic_warmup_steps={warmup}: must be below run.steps={config.run.steps},"
            " or the policy would never be trained"
        )


def _find_sample_problems(config: Config) -> Iterator[str]:
    """Yield problems of the number of samples with the parts of the algorithm that use them."""
    settings = config.algorithm
    samples = config.rollout.samples_per_prompt
    if settings.overlong_filter and not config.rollout.can_end_responses:
        yield (
            "algorithm.overlong_filter=true: with rollout.stop_at_eos=false every response counts"
            " as truncated, so no response would be trained on; set rollout.stop,"
            " rollout.truncate_token or rollout.stop_at_eos=true"
        )
    # With one sample per prompt, each of these settings has nothing to compare.
    comparing_settings = [
        f"{name}={value}"
        for name, value, is_comparing in (
            ("advantage", settings.advantage, settings.advantage in GROUP_ESTIMATORS),
            ("loss", settings.loss, settings.loss == "copg"),
            ("train_on", settings.train_on, settings.train_on != "all"),
            ("whiten_over", settings.whiten_over, settings.whiten_over == "prompt"),
            (
                "dynamic_sampling_rounds",
                settings.dynamic_sampling_rounds,
                settings.dynamic_sampling_rounds > 0,
            ),
        )
        if is_comparing
    ]
    if comparing_settings and samples < 2:
        yield (
            f"rollout.samples_per_prompt={samples}: must be at least 2, because"
            f" algorithm.{comparing_settings[0]} compares samples of one prompt"
        )
    # Rows that a loss compares are in the same minibatch, so that such groups are the units.
    units = (
        config.rollout.prompts_per_step
        * count_trained_samples(config)
        // get_rows_per_group(config)
    )
    if split_callable_name(settings.train_on) is None and units % settings.minibatches:
        unit_name = {1: "samples", 2: "pairs"}.get(get_rows_per_group(config), "prompts")
        yield (
            f"algorithm.minibatches={settings.minibatches}: must divide the {units} {unit_name} of"
            " a step"
        )
