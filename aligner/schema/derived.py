"""Quantities that follow from several keys."""

from aligner.schema import Config, EvaluationConfig
from aligner.values import callable_place

GROUPED = ("rloo", "grpo", "grpo_steps", "dr_grpo")
"""Estimators that compare the samples of a prompt."""
WITHOUT_RATIO = ("reinforce", "copg", "dpo", "cross_entropy")
"""Losses that no ratio to the policy which drew the samples limits."""


def overlong_buffer(config: Config) -> int:
    """Tokens before `rollout.max_response_tokens` over which a response loses score; 0: it loses
    none."""
    share, longest = config.algorithm.overlong_fraction, config.rollout.max_response_tokens
    return max(1, round(share * longest)) if share else 0


def policy_updates(config: Config) -> int:
    """Optimizer steps of the policy, or of what else is trained, over the whole run."""
    settings = config.algorithm
    if settings.trainer != "online":
        return config.run.steps
    return (
        (config.run.steps - settings.policy_starts_after) * settings.epochs * settings.minibatches
    )


def weights_version(config: Config, step: int) -> int:
    """What the policy's weights are called after so many steps of an online run: by that number,
    and 0 as long as they are the initial ones (`algorithm.critic_warmup_steps`).

    Where samples may be drawn ahead they are counted by the step's number throughout; so they are
    with `engine.sleep`, for an engine that has dropped its weights must be given them again.
    """
    counts_all = config.rollout.max_staleness > 0 or config.engine.sleep
    return step if counts_all or step > config.algorithm.policy_starts_after else 0


def critic_updates(config: Config) -> int:
    """Optimizer steps of the critic over the whole run."""
    return config.run.steps * config.algorithm.epochs * config.algorithm.minibatches


def longest_sequence(config: Config) -> int:
    """Tokens of the longest prompt and response together."""
    responses = config.rollout if config.algorithm.generates else config.data
    return config.data.max_prompt_tokens + responses.max_response_tokens


def longest_sequence_keys(config: Config) -> str:
    """The keys and values that it is the sum of."""
    section = "rollout" if config.algorithm.generates else "data"
    response = longest_sequence(config) - config.data.max_prompt_tokens
    return (
        f"data.max_prompt_tokens={config.data.max_prompt_tokens} +"
        f" {section}.max_response_tokens={response}"
    )


def asks_before_update(config: Config) -> bool:
    """Whether a step has to know the trainer's log-probs before its update begins.

    A step's only update computes them itself, unless advantages hang on them (a KL penalty in the
    reward, a teacher's log-probs) or a function of the user's own may ask for them.
    """
    settings = config.algorithm
    in_reward = settings.kl_placement == "reward" and settings.kl_coefficient > 0
    taught = config.has_teacher and config.teacher.loss == "advantage"
    own = (
        callable_place(settings.advantage) is not None
        or callable_place(settings.train_on) is not None
    )
    return settings.epochs * settings.minibatches > 1 or in_reward or taught or own


def has_reference(config: Config) -> bool:
    """Whether the trainer keeps the initial policy beside the policy."""
    trainer = config.algorithm.trainer
    return trainer == "online" or (trainer == "dpo" and config.algorithm.preference.has_reference)


def rows_together(config: Config) -> int:
    """How many rows of a minibatch must be in one micro-batch: a pair, or all of a prompt's
    samples."""
    if config.algorithm.trainer in ("dpo", "reward_model") and not config.algorithm.has_labels:
        return 2
    if config.algorithm.trainer != "online":
        return 1
    return {"dpo": 2, "copg": config.rollout.samples_per_prompt}.get(config.algorithm.loss, 1)


def least_scores(config: Config) -> int:
    """Number of samples of a prompt that must have a score for any of them to be trained on.

    Samples on which the reward function abstained have none. Two are compared; `copg` computes its
    loss from all samples of a prompt.
    """
    settings = config.algorithm
    if settings.loss == "copg":
        return config.rollout.samples_per_prompt
    is_grouped = settings.advantage in GROUPED or settings.whiten_over == "prompt"
    return 2 if is_grouped and settings.train_on == "all" else 1


def samples_learned_from(config: Config) -> int:
    """How many of a prompt's samples are learned from, at most where a function of the user's own
    selects them."""
    all_samples = config.rollout.samples_per_prompt
    return {"best": 1, "best_and_worst": 2}.get(config.algorithm.train_on, all_samples)


def draws_greedily(settings: EvaluationConfig) -> bool:
    """Whether responses are the most probable tokens."""
    return settings.samples == 1 if settings.greedy is None else settings.greedy
