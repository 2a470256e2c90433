"""Quantities that are derived from several keys."""

from aligner.schema import Config, EvaluationConfig
from aligner.values import split_callable_name

GROUP_ESTIMATORS = ("rloo", "grpo", "grpo_steps", "grpo_turns", "dr_grpo")
"""Advantage estimators that compare the samples of a prompt."""
LOSSES_WITHOUT_RATIO = ("reinforce", "copg", "dpo", "cross_entropy")
"""Losses without a ratio between the policy and the policy that generated the samples."""


def get_overlong_buffer(config: Config) -> int:
    """Return the number of final tokens up to `rollout.max_response_tokens` that cost score.

    0 means that long responses are not penalized.
    """
    # Soft overlong punishment (DAPO, Yu et al. 2025).
    fraction = config.algorithm.overlong_fraction
    max_tokens = config.rollout.max_response_tokens
    return max(1, round(fraction * max_tokens)) if fraction else 0


def count_policy_updates(config: Config) -> int:
    """Return the number of optimizer steps of the policy or reward model in the whole run."""
    settings = config.algorithm
    if settings.trainer != "online":
        return config.run.steps
    return (
        (config.run.steps - settings.steps_before_policy_updates)
        * settings.epochs
        * settings.minibatches
    )


def get_weights_version(config: Config, step: int) -> int:
    """Return the version of the policy's weights after a step of an online run.

    The version is the number of the step, but 0 while the weights are the initial ones
    (`algorithm.critic_warmup_steps`).

    The version is always the number of the step if samples may be generated ahead of training, and
    with `engine.sleep`, because an engine that has discarded its weights needs a weight sync even
    if the weights have not changed.
    """
    counts_every_step = config.rollout.max_staleness > 0 or config.engine.sleep
    return step if counts_every_step or step > config.algorithm.steps_before_policy_updates else 0


def count_critic_updates(config: Config) -> int:
    """Return the number of optimizer steps of the critic in the whole run."""
    return config.run.steps * config.algorithm.epochs * config.algorithm.minibatches


def get_max_sequence_length(config: Config) -> int:
    """Return the maximum number of tokens of a prompt and its response."""
    responses = config.rollout if config.algorithm.generates_samples else config.data
    return config.data.max_prompt_tokens + responses.max_response_tokens


def describe_max_sequence_length(config: Config) -> str:
    """Return the keys and values whose sum is `get_max_sequence_length`, for messages."""
    section = "rollout" if config.algorithm.generates_samples else "data"
    response = get_max_sequence_length(config) - config.data.max_prompt_tokens
    return (
        f"data.max_prompt_tokens={config.data.max_prompt_tokens} +"
        f" {section}.max_response_tokens={response}"
    )


def needs_logprobs_before_update(config: Config) -> bool:
    """Return whether a step must compute the trainer's log-probs before its first update.

    If a step has only one update, the update computes the log-probs itself. They are needed earlier
    if the advantages depend on them, with a KL penalty in the reward or a teacher's log-probs, or
    if a function of the user may use them.
    """
    settings = config.algorithm
    # Advantages are computed before the first update. These depend, or may depend, on log-probs.
    has_kl_reward = settings.kl_placement == "reward" and settings.kl_coefficient > 0
    has_teacher_advantage = config.has_teacher and config.teacher.loss == "advantage"
    has_user_function = (
        split_callable_name(settings.advantage) is not None
        or split_callable_name(settings.train_on) is not None
    )
    return (
        settings.epochs * settings.minibatches > 1
        or has_kl_reward
        or has_teacher_advantage
        or has_user_function
    )


def has_reference(config: Config) -> bool:
    """Return whether the trainer keeps the initial policy as the reference."""
    trainer = config.algorithm.trainer
    return trainer == "online" or (trainer == "dpo" and config.algorithm.preference.has_reference)


def get_rows_per_group(config: Config) -> int:
    """Return the number of rows of a minibatch that must be in the same micro-batch.

    These rows are a pair, or all samples of a prompt.
    """
    if config.algorithm.trainer in ("dpo", "reward_model") and not config.algorithm.has_labels:
        return 2
    if config.algorithm.trainer != "online":
        return 1
    return {"dpo": 2, "copg": config.rollout.samples_per_prompt}.get(config.algorithm.loss, 1)


def get_min_scores(config: Config) -> int:
    """Return how many samples of a prompt must have a score so that the prompt is trained on.

    A sample has no score if the reward function abstained. An estimator that compares samples needs
    two scores, and `copg` computes its loss from all samples of a prompt.
    """
    settings = config.algorithm
    if settings.loss == "copg":
        return config.rollout.samples_per_prompt
    is_grouped = settings.advantage in GROUP_ESTIMATORS or settings.whiten_over == "prompt"
    return 2 if is_grouped and settings.train_on == "all" else 1


def count_trained_samples(config: Config) -> int:
    """Return the number of samples per prompt that are trained on.

    This is the maximum number if a function of the user selects the samples.
    """
    # A function of the user (`module:callable`) may select all samples.
    all_samples = config.rollout.samples_per_prompt
    return {"best": 1, "best_and_worst": 2}.get(config.algorithm.train_on, all_samples)


def is_greedy(settings: EvaluationConfig) -> bool:
    """Return whether an evaluation uses greedy decoding."""
    # With the default, null, a single sample is greedy; several greedy samples would be equal.
    return settings.samples == 1 if settings.greedy is None else settings.greedy
