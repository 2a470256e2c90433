"""The parts of an algorithm against each other, and the run around it."""

from collections.abc import Iterator

from aligner.models.model_source import ExpectedInputs
from aligner.models.shape import ModelShape
from aligner.schema import AlgorithmConfig, Config
from aligner.schema.derived import GROUPED, rows_together, samples_learned_from
from aligner.schema.options import callable_place
from aligner.schema.reward_sources import has_step_rewards

OWN_TARGET = ("copg", "dpo", "cross_entropy")
"""Losses that take no advantages."""


_OWN_FIELDS = ("step", "prompt", "response", "prompt_tokens", "response_tokens", "drawn", "reward")
"""Of the records of responses."""


def problems(config: Config, model: ModelShape | None, expected: ExpectedInputs) -> Iterator[str]:
    """What of the algorithm does not fit together, or the run around it."""
    target, longest = config.algorithm.target_length, config.rollout.max_response_tokens
    if config.algorithm.generates and not config.environment.draws_episodes and target > longest:
        yield (
            f"algorithm.target_length={target}: no response is so long; give at most"
            f" rollout.max_response_tokens={longest}"
        )
    if config.algorithm.trainer == "preferences":
        yield from _preference_problems(config)
    elif config.algorithm.trainer == "online":
        yield from _loss_problems(config.algorithm, has_teacher=config.has_teacher)
        yield from _sample_problems(config)
        yield from _penalty_problems(config)
        yield from _step_problems(config)
        yield from _replay_problems(config, model)


def _step_problems(config: Config) -> Iterator[str]:
    """What of rewards of steps does not fit the estimator."""
    if config.algorithm.advantage != "grpo_steps":
        return
    if not has_step_rewards(config.reward):
        yield (
            "algorithm.advantage=grpo_steps: the reward speaks of whole responses; give"
            " reward.step_rewards=true with a function of steps, or reward.step_separator=TEXT with"
            " a process reward model"
        )
    if config.environment.has_agent:
        yield (
            "algorithm.advantage=grpo_steps: an agent's branches have no steps; give"
            " algorithm.advantage=grpo"
        )


def _preference_problems(config: Config) -> Iterator[str]:
    samples, rounds = config.rollout.samples_per_prompt, config.algorithm.dynamic_sampling_rounds
    for field in config.algorithm.kept_fields:
        if field in _OWN_FIELDS:
            yield (
                f"algorithm.kept_fields: responses have a `{field}` of their own; call it otherwise"
                " (data.fields)"
            )
    if samples < 2 and config.algorithm.pairs in ("best_and_worst", "all"):
        yield (
            f"rollout.samples_per_prompt={samples}: algorithm.pairs={config.algorithm.pairs} is"
            " between samples of one prompt; give at least 2"
        )
    if rounds:
        yield (
            f"algorithm.dynamic_sampling_rounds={rounds}: algorithm.trainer=preferences leaves"
            " prompts whose samples all score the same out; give 0"
        )


def _loss_problems(settings: AlgorithmConfig, *, has_teacher: bool) -> Iterator[str]:
    loss, is_own_loss = settings.loss, callable_place(settings.loss) is not None
    if loss in OWN_TARGET and settings.advantage != "none":
        yield (
            f"algorithm.advantage={settings.advantage}: loss={loss} takes no advantages; give"
            " advantage=none"
        )
    if (
        loss not in OWN_TARGET
        and not is_own_loss
        and settings.advantage == "none"
        and not has_teacher
    ):
        yield (
            f"algorithm.advantage=none: loss={loss} needs an estimator, such as gae or rloo, or a"
            " teacher (teacher.path)"
        )
    if loss == "dpo" and not settings.preference.has_pairs:
        yield (
            f"algorithm.preference.kind={settings.preference.kind}: loss=dpo has pairs of samples;"
            " kto is for algorithm=kto"
        )
    pairs = settings.train_on == "best_and_worst"
    if (loss == "dpo") != pairs:
        yield (
            f"algorithm.train_on={settings.train_on}: loss=dpo and train_on=best_and_worst need"
            f" each other, got loss={loss}"
        )
    if settings.train_on == "best" and loss != "cross_entropy" and not is_own_loss:
        yield (
            "algorithm.train_on=best: the samples left have no others beside them; give"
            f" loss=cross_entropy, not {loss}"
        )
    if settings.whiten_over == "prompt" and settings.train_on != "all":
        yield (
            f"algorithm.train_on={settings.train_on}: whiten_over=prompt is over all of a prompt's"
            " samples"
        )
    if (settings.advantage in GROUPED or loss == "copg") and settings.train_on != "all":
        comparing = (
            f"advantage={settings.advantage}" if settings.advantage in GROUPED else "loss=copg"
        )
        yield (
            f"algorithm.train_on={settings.train_on}: {comparing} compares all of a prompt's"
            " samples"
        )
    if loss == "reinforce" and settings.epochs > 1:
        yield (
            f"algorithm.epochs={settings.epochs}: loss=reinforce takes samples as the policy's own,"
            " which they are not in a second pass; give epochs=1, or a loss with a ratio, clip or"
            " cispo"
        )
    if loss in ("dpo", "copg") and (
        settings.entropy_coefficient or settings.aggregation != "token"
    ):
        yield (
            f"algorithm: loss={loss} is a sum over responses; leave entropy_coefficient and"
            " aggregation out"
        )
    if loss in ("dpo", "copg") and settings.truncated_importance == "token":
        yield f"algorithm.truncated_importance=token: allowed with loss={loss}: none, sequence"
    if settings.ratio_against == "sampler" and settings.truncated_importance != "none":
        yield (
            f"algorithm.ratio_against=sampler: truncated_importance={settings.truncated_importance}"
            " would correct for the sampler twice; give truncated_importance=none, or"
            " ratio_against=trainer"
        )


def _replay_problems(config: Config, model: ModelShape | None) -> Iterator[str]:
    if not config.algorithm.replay_routes:
        return
    if model is not None and not model.num_experts:
        yield "algorithm.replay_routes=true: the model has no experts; give false"
    if config.engine.kind != "embedded":
        yield (
            f"algorithm.replay_routes=true: engine.kind={config.engine.kind} does not tell which"
            " experts it chose; give false, or use engine=embedded"
        )


def _penalty_problems(config: Config) -> Iterator[str]:
    """What concerns the KL penalty, whitening and warm-up."""
    settings, loss = config.algorithm, config.algorithm.loss
    coefficient, in_loss = (
        f"algorithm.kl_coefficient={settings.kl_coefficient:g}",
        settings.kl_placement == "loss",
    )
    if settings.kl_coefficient and loss == "dpo":
        yield (
            f"{coefficient}: loss=dpo is held by algorithm.preference.beta alone; give"
            " kl_coefficient=0"
        )
    elif settings.kl_coefficient and loss in OWN_TARGET and not in_loss:
        yield (
            f"{coefficient}: loss={loss} reads no rewards; give kl_placement=loss, or"
            " kl_coefficient=0"
        )
    elif settings.kl_coefficient and in_loss and loss != "copg" and settings.kl_estimator == "k1":
        yield (
            "algorithm.kl_estimator=k1: in the loss its gradient is zero on average; give k2 or k3"
        )
    if loss == "copg" and settings.kl_estimator != "k1":
        yield f"algorithm.kl_estimator={settings.kl_estimator}: loss=copg is defined with k1"
    if settings.whiten_rewards and (settings.advantage in GROUPED or loss == "copg"):
        yield (
            "algorithm.whiten_rewards=true: scores of whole responses are compared, and theirs"
            " would depend on length"
        )
    if settings.kl_target is not None:
        samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
        if settings.kl_horizon <= samples:
            yield (
                f"algorithm.kl_horizon={settings.kl_horizon}: must be above a step's {samples}"
                " samples"
            )
    if (warmup := settings.critic_warmup_steps) >= config.run.steps:
        yield (
            f"algorithm.critic_warmup_steps={warmup}: the run has {config.run.steps} steps, and its"
            " policy would never learn"
        )


def _sample_problems(config: Config) -> Iterator[str]:
    settings, samples = config.algorithm, config.rollout.samples_per_prompt
    if (
        settings.overlong_filter
        and not config.rollout.stop_at_eos
        and config.rollout.truncate_token is None
    ):
        yield (
            "algorithm.overlong_filter=true: with rollout.stop_at_eos=false no response has an end,"
            " and none would be learned from; give rollout.truncate_token, or"
            " rollout.stop_at_eos=true"
        )
    comparing = [
        f"{name}={value}"
        for name, value, compares in (
            ("advantage", settings.advantage, settings.advantage in GROUPED),
            ("loss", settings.loss, settings.loss == "copg"),
            ("train_on", settings.train_on, settings.train_on != "all"),
            ("whiten_over", settings.whiten_over, settings.whiten_over == "prompt"),
            (
                "dynamic_sampling_rounds",
                settings.dynamic_sampling_rounds,
                settings.dynamic_sampling_rounds > 0,
            ),
        )
        if compares
    ]
    if comparing and samples < 2:
        yield (
            f"rollout.samples_per_prompt={samples}: algorithm.{comparing[0]} compares samples of"
            " one prompt; give at least 2"
        )
    units = config.rollout.prompts_per_step * samples_learned_from(config) // rows_together(config)
    if callable_place(settings.train_on) is None and units % settings.minibatches:
        what = {1: "samples", 2: "pairs"}.get(rows_together(config), "prompts")
        yield (
            f"algorithm.minibatches={settings.minibatches}: a step's {units} {what} do not divide"
            f" by {settings.minibatches}"
        )
