"""Plain names and one-line descriptions of metrics for plots; docs/metrics.md has normal values and
remedies.

The plots take their titles from here, unless they show several metrics.
"""

import re

# Plain names and descriptions by metric name; `*` matches any characters. The first matching
# pattern is used. `{}` in a name is the text that the last `*` matches.
_METRICS = {
    "reward/mean": ("Mean reward", "Mean score of the samples, before shaping."),
    "reward/mean/*": ("Mean reward of {}", "Mean score of one reward source, times its weight."),
    "reward/std": ("Standard deviation of the reward", "Standard deviation of the scores."),
    "reward/min": ("Lowest reward", "Lowest score."),
    "reward/max": ("Highest reward", "Highest score."),
    "reward/p*": ("Reward, {}th percentile", "Quantiles of the scores."),
    "reward/abstained": (
        "Abstentions of the reward function",
        "Samples for which the reward function abstained.",
    ),
    "reward/abstained_prompts": (
        "Prompts left out because of abstentions",
        "Prompts of which no sample was trained on, because the reward function abstained.",
    ),
    "reward/zero_std_fraction": (
        "Prompts with equal scores (fraction)",
        "Fraction of prompts whose samples all have the same score.",
    ),
    "kl/reference": (
        "KL to the reference (nats per response)",
        "Estimated KL divergence of the policy from the reference.",
    ),
    "kl/coef": ("KL coefficient", "Factor of the KL penalty in this step."),
    "distill/reverse_kl": (
        "KL from the teacher (nats per token)",
        "Estimated KL from the teacher, nats per token.",
    ),
    "distill/response_reverse_kl": (
        "KL from the teacher (nats per response)",
        "Estimated KL from the teacher, nats per response.",
    ),
    "response/length": ("Response length (tokens)", "Mean generated tokens per response."),
    "response/generated_to_*": (
        "Generated responses of at most {} tokens",
        "Generated responses in one range of lengths; the shorter ranges are counted separately.",
    ),
    "response/trained_to_*": (
        "Trained responses of at most {} tokens",
        "Responses in one range of lengths that were trained on.",
    ),
    "response/ended_fraction": (
        "Complete responses (fraction)",
        "Fraction of responses that ended before the length limit.",
    ),
    "rollout/kept_fraction": (
        "Samples kept by dynamic sampling (fraction)",
        "Fraction of samples with a score that dynamic sampling kept.",
    ),
    "rollout/skipped": ("Skipped prompts", "Prompts whose generation or scoring failed."),
    "rollout/skipped_fraction": (
        "Skipped prompts (fraction)",
        "Skipped prompts as a fraction of the prompts of a step.",
    ),
    "rollout/deferred": (
        "Partial rollouts carried over",
        "Prompts carried over to the next step as partial rollouts.",
    ),
    "rollout/draft_tokens": ("Draft tokens", "Draft tokens of speculative decoding on rank 0."),
    "rollout/accepted_fraction": (
        "Accepted draft tokens (fraction)",
        "Fraction of the draft tokens that were accepted.",
    ),
    "rollout/preemptions": (
        "Preempted responses",
        "Responses on rank 0 that lost their blocks of the KV cache and were prefilled again.",
    ),
    "episode/turns": ("Turns per episode", "Mean turns of the policy per episode."),
    "episode/branches": ("Branches per episode", "Mean branches per episode."),
    "episode/failures/*": (
        "Failed episodes: {}",
        "Episodes that a failure of this kind has ended.",
    ),
    "episode/retries/*": (
        "Retries of episodes: {}",
        "Failures of this kind after which an episode was retried.",
    ),
    "episode/metrics/*": (
        "Metric of the agent: {}",
        "Mean of a metric over the episodes whose agents reported it.",
    ),
    "episode/left_out_fraction": (
        "Episodes left out (fraction)",
        "Fraction of the episodes that are not trained on because of failures.",
    ),
    "episode/environment_s": (
        "Wait for the environment (seconds per episode)",
        "Mean seconds that an episode waited for its environment.",
    ),
    "value/explained_variance": (
        "Explained variance of the critic",
        "1 - Var(return - value) / Var(return), before the updates.",
    ),
    "mismatch/logprob_abs": (
        "Log-prob difference of engine and trainer (nats)",
        "Mean absolute difference of engine and trainer log-probs, nats.",
    ),
    "mismatch/kl": (
        "KL of engine and trainer (nats per token)",
        "KL between the generating and the newest weights, nats per token.",
    ),
    "mismatch/fraction_above_1pct": (
        "Tokens whose probability differs by over 1% (fraction)",
        "Fraction of tokens whose probabilities differ by over 1%.",
    ),
    "mismatch/expert_routing": (
        "Expert choices that differ (fraction)",
        "Fraction of expert choices that differ between engine and trainer.",
    ),
    "staleness/*": (
        "Staleness, {} (weight versions)",
        "Age of the generated tokens in weight versions.",
    ),
    "publish/mib": ("Size of a weight sync (MiB)", "MiB sent in the last weight sync."),
    "publish/share": (
        "Weights sent in a weight sync (fraction)",
        "Bytes sent in the last weight sync, as a fraction of all weights.",
    ),
    "publish/changed": (
        "Changed weight elements (fraction)",
        "Fraction of weight elements that changed since the previous weight sync.",
    ),
    "publish/seconds": (
        "Duration of a weight sync (seconds)",
        "Duration of the last weight sync in seconds.",
    ),
    "verify/version": (
        "Verified weight version",
        "Weight version of the last verified weight sync.",
    ),
    "verify/checksum_seconds": (
        "Comparison of checksums (seconds)",
        "Seconds to compare checksums in the last weight sync.",
    ),
    "verify/probe_seconds": (
        "Log-probs of the probe (seconds)",
        "Seconds to compute the log-probs of the probe in the last weight sync.",
    ),
    "verify/logprob_abs": (
        "Log-prob difference in the probe (nats)",
        "Largest difference of engine and trainer log-probs in the probe, nats.",
    ),
    "data/epoch": ("Passes over the prompts", "Number of passes over the prompts so far."),
    "data/repetitions": (
        "Earlier uses of the step's prompts",
        "Mean number of earlier uses of the step's prompts.",
    ),
    "data/sampled_fraction": (
        "Used prompts (fraction)",
        "Fraction of the prompts so far that were used, not skipped.",
    ),
    "data/pass_rate": (
        "Mean pass rate of the prompts",
        "Mean pass rate of the prompts used so far.",
    ),
    "data/always_passed": (
        "Prompts that always pass (fraction)",
        "Fraction of the prompts used so far with pass rate 1.",
    ),
    "data/never_passed": (
        "Prompts that never pass (fraction)",
        "Fraction of the prompts used so far with pass rate 0.",
    ),
    "preferences/pairs": ("Preference pairs per step", "Preference pairs that the step stored."),
    "preferences/without_pair": (
        "Prompts without a pair",
        "Prompts of the step whose samples give no pair.",
    ),
    "preferences/margin": (
        "Score margin of the pairs",
        "Mean difference between chosen and rejected scores.",
    ),
    "preferences/responses": ("Stored responses per step", "Responses that the step stored."),
    "teacher_scores/loss": (
        "Cross-entropy of the teacher (nats per token)",
        "The teacher's cross-entropy of the demonstrations, nats per token.",
    ),
    "teacher_scores/covered": (
        "Probability of the stored tokens",
        "Total probability of the stored top-k tokens, averaged over tokens.",
    ),
    "eval/*metrics/*": (
        "Evaluation: metric of the agent: {}",
        "Mean of a metric over the episodes whose agents reported it.",
    ),
    "eval/*abstained": (
        "Evaluation: abstentions",
        "Responses for which the reward function abstained.",
    ),
    "eval/*score*": ("Evaluation: score", "Mean score on held-out prompts."),
    "eval/*pass@*": ("Evaluation: pass@{}", "Probability that at least one of k responses passes."),
    "eval/*judge_win_rate*": (
        "Evaluation: win rate according to the judge",
        "Win rate against the references, according to the judge.",
    ),
    "eval/*win_rate*": (
        "Evaluation: win rate",
        "Fraction of responses that score above the reference; ties count half.",
    ),
    "eval/*judge_ties": (
        "Evaluation: ties of the judge (fraction)",
        "Fraction of judge comparisons without a winner.",
    ),
    "eval/*judge_order_bias": (
        "Evaluation: order bias of the judge (fraction)",
        "Fraction of comparisons that the same position won in both orders.",
    ),
    "eval/*judge_unreadable": (
        "Evaluation: judge comparisons without an answer",
        "Judge comparisons without a valid answer.",
    ),
    "eval/*reference_kl": (
        "Evaluation: KL from the initial model (nats per response)",
        "Estimated KL from the initial model, nats per response.",
    ),
    "eval/*reference_perplexity": (
        "Evaluation: perplexity under the initial model",
        "Perplexity of the responses under the initial model.",
    ),
    "eval/*length": ("Evaluation: response length (tokens)", "Mean generated tokens per response."),
    "eval/*lost_episodes": (
        "Evaluation: lost episodes",
        "Episodes whose environment failed; they score 0.",
    ),
    "judge/questions": ("Judge requests", "New judge requests that were answered."),
    "judge/from_cache": (
        "Judge requests from the cache",
        "Judge requests answered from the cache.",
    ),
    "judge/asked_again": (
        "Repeated judge requests",
        "Repeated judge requests after an invalid answer.",
    ),
    "judge/unreadable": (
        "Judge requests without an answer",
        "Judge requests without a valid answer after all attempts.",
    ),
    "judge/tokens_*": ("Tokens of the judge: {}", "Prompt or completion tokens of the judge."),
    "judge/cost": ("Cost of the judge per step", "Cost of the step's judge requests."),
    "judge/cost_total": ("Cost of the judge, total", "Cost of all judge requests of the run."),
    "policy/updates": (
        "Policy updates per step",
        "Optimizer steps of the policy in this training step.",
    ),
    "policy/entropy": (
        "Entropy of the policy (nats per token)",
        "Entropy of the sampling distribution.",
    ),
    "policy/reference_kl": (
        "KL of policy and reference (nats per response)",
        "Log-ratio of policy and reference, nats per response.",
    ),
    "policy/loss": ("Policy loss", "Value of the policy's loss."),
    "value/loss": ("Value loss", "Half the squared error of the critic's values, clipped."),
    "*/loss": ("Loss", "Value of the loss."),
    "*/approx_kl": (
        "KL of the updates (nats per token)",
        "KL from the policy before the updates, nats per token.",
    ),
    "*/clip_fraction": (
        "Clipped tokens (fraction)",
        "Fraction of tokens whose ratio or value is clipped.",
    ),
    "*/dual_clip_fraction": (
        "Tokens with dual clip (fraction)",
        "Fraction of tokens whose loss the dual clip bounds.",
    ),
    "*/ratio_max": (
        "Largest policy ratio",
        "Largest ratio of the new to the old probability of a token.",
    ),
    "*/importance_mean": ("Mean importance weight", "Mean importance weight, trainer over engine."),
    "*/importance_truncated": (
        "Truncated importance weights (fraction)",
        "Fraction of importance weights above the cap.",
    ),
    "*/kl_loss": ("KL term of the loss (nats per token)", "KL term of the loss, nats per token."),
    "*/teacher_divergence": (
        "Divergence from the teacher (nats per token)",
        "Divergence from the teacher, nats per token.",
    ),
    "*/cross_entropy": (
        "Cross-entropy (nats per token)",
        "Cross-entropy of the response tokens, nats per token.",
    ),
    "*/chosen_nll": (
        "Cross-entropy of the chosen responses (nats per token)",
        "Cross-entropy of the chosen responses, nats per token.",
    ),
    "*/chosen_reward": ("Reward of the chosen responses", "Mean reward of the chosen responses."),
    "*/rejected_reward": (
        "Reward of the rejected responses",
        "Mean reward of the rejected responses.",
    ),
    "*/margin": ("Reward margin, chosen minus rejected", "Chosen minus rejected reward."),
    "*/accuracy": (
        "Accuracy (fraction)",
        "Fraction of pairs, responses or steps that are classified correctly.",
    ),
    "*/kl": (
        "KL from the reference (nats per response)",
        "Estimated KL from the reference, nats per response.",
    ),
    "*/grad_norm": ("Gradient norm", "Global gradient norm before clipping."),
    "*/lr": ("Learning rate", "Step size of the optimizer, which follows the schedule."),
    "*/head_lr": (
        "Learning rate of the scalar head",
        "Step size of the scalar head, if it has a learning rate of its own.",
    ),
    "*/skipped": (
        "Skipped updates (fraction)",
        "Fraction of updates skipped because of NaN or infinite gradients.",
    ),
    "*/skipped_total": ("Skipped updates, total", "Skipped updates since the start of the run."),
    "time/step": ("Time per step (seconds)", "Seconds per step."),
    "time/generate": (
        "Time of generation (seconds)",
        "Seconds of generation, or of waiting for the generator.",
    ),
    "time/logprobs": (
        "Time of log-probs (seconds)",
        "Seconds for log-probs of policy and reference.",
    ),
    "time/server_wait": (
        "Wait for servers (seconds)",
        "Seconds of waiting for reward, critic and teacher.",
    ),
    "time/train": ("Time of policy updates (seconds)", "Seconds of policy updates."),
    "time/reshard": ("Time of weight sync (seconds)", "Seconds of the weight sync."),
    "time/snapshot": (
        "Time of weight copies (seconds)",
        "Seconds to copy the weights for an asynchronous weight sync.",
    ),
    "time/evaluate": ("Time of evaluation (seconds)", "Seconds of evaluation."),
    "time/checkpoint": (
        "Blocking time of checkpoints (seconds)",
        "Seconds in which saving a checkpoint blocked training.",
    ),
    "time/batch": ("Time of batch preparation (seconds)", "Seconds to prepare the rows of a step."),
    "time/score": ("Time of teacher log-probs (seconds)", "Seconds for the teacher's log-probs."),
    "throughput/samples_per_s": (
        "Throughput (samples per second)",
        "Samples per second of the step.",
    ),
    "throughput/tokens_per_s": (
        "Throughput (tokens per second)",
        "Prompt and response tokens per second of the step.",
    ),
}

# Endings of evaluation metrics that are bounds of the 95% interval.
_BOUNDS = {"_low": "lower bound", "_high": "upper bound"}


def describe_metric(name: str) -> str:
    """Return one sentence that explains a metric; an empty string for an unknown metric."""
    return _find_metric(name)[1]


def name_metric(name: str) -> str:
    """Return the plain name of a metric; the metric's own name for an unknown metric.

    The plain name of an evaluation metric ends with the evaluation suite, if the metric has one.
    """
    plain_name = _find_metric(name)[0]
    # `eval/metrics/NAME` belongs to no suite, and the name of an agent's metric may have slashes
    suite = re.fullmatch(r"eval/(?!metrics/)([^/]+)/(?:metrics/.+|[^/]+)", name)
    if suite is not None and plain_name != name:
        return f"{plain_name}, {suite[1]}"
    return plain_name


def _find_metric(name: str) -> tuple[str, str]:
    for ending, bound in _BOUNDS.items():
        is_bound = name.startswith("eval/") and "/metrics/" not in name and name.endswith(ending)
        if is_bound:
            plain_name, description = _find_metric(name.removesuffix(ending))
            return f"{plain_name}, {bound}", description
    if name in _METRICS:
        return _METRICS[name]
    for pattern, (plain_name, description) in _METRICS.items():
        if match := re.fullmatch(re.escape(pattern).replace(r"\*", "(.*)"), name):
            return plain_name.replace("{}", match[match.lastindex or 0]), description
    return name, ""
