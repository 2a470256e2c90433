"""What is learned."""

from dataclasses import dataclass

from aligner.schema.options import CALLABLE, callable_place, option, section


@dataclass
class PreferenceConfig:
    """The preference loss, of pairs from a file (trainer=dpo) or of the policy's own samples
    (loss=dpo)."""

    kind: str = option(
        "sigmoid",
        "sigmoid: DPO (Rafailov et al. 2023); ipo: squared (Azar et al. 2023); simpo: no reference,"
        " a target margin (Meng et al. 2024); orpo: no reference, odds beside imitation of the"
        " chosen answer (Hong et al. 2024); rpo_…: to a margin of the rewards, by KL divergence"
        " either way or squared (Adler et al. 2024, Nemotron-4); kto: of single answers with labels"
        " (Ethayarajh et al. 2024)",
        choices=("sigmoid", "ipo", "simpo", "orpo", "rpo_fwd_kl", "rpo_bwd_kl", "rpo_sq", "kto"),
    )
    beta: float = option(
        0.1,
        "weight of staying near the reference; scale of the log-probs for simpo, weight of the odds"
        " for orpo",
        minimum=1e-6,
    )
    label_smoothing: float = option(
        0.0,
        "probability that a pair's label is wrong: conservative DPO (kind=sigmoid); above 0.5"
        " labels would be turned round",
        minimum=0,
        maximum=0.5,
        read=".kind=sigmoid",
    )
    per_token: bool = option(
        False,
        "an answer counts by the mean of its tokens' log-probs instead of their sum; simpo and orpo"
        " always do that",
        read=".kind=sigmoid|ipo|rpo_fwd_kl|rpo_bwd_kl|rpo_sq",
    )
    target_margin: float = option(
        0.5,
        "by how much the chosen answer is to be ahead, in the loss's logits (SimPO's gamma)",
        minimum=0,
        read=".kind=simpo",
    )
    reward_scale: float = option(
        1.0,
        "of the rewards' difference, which is the record's `margin`, or that of the scores"
        " (loss=dpo)",
        minimum=1e-6,
        read=".kind=rpo_fwd_kl|rpo_bwd_kl|rpo_sq",
    )
    imitation_weight: float = option(
        0.0,
        "weight of the chosen answer's cross entropy a token, added to the loss (Pang et al. 2024);"
        " orpo has it with weight 1",
        minimum=0,
        read=".kind=sigmoid|ipo|simpo|rpo_fwd_kl|rpo_bwd_kl|rpo_sq",
    )
    desirable_weight: float = option(
        1.0, "of answers whose label is true", minimum=0, read=".kind=kto"
    )
    undesirable_weight: float = option(
        1.0, "of answers whose label is false", minimum=0, read=".kind=kto"
    )

    @property
    def has_pairs(self) -> bool:
        """Whether answers come in pairs, instead of one by one with a label each."""
        return self.kind != "kto"

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the policy with the model that it began as."""
        return self.kind not in ("simpo", "orpo")

    @property
    def has_margin(self) -> bool:
        """Whether the loss asks by how much the chosen answer is better."""
        return self.kind.startswith("rpo_")


@dataclass
class AlgorithmConfig:
    """What is learned from: an online algorithm is an advantage estimator, a loss and where the KL
    penalty goes."""

    name: str = option("ppo", "what this composition is called", read="always")
    trainer: str = option(
        "online",
        "online: the policy learns from its own samples; sft: from demonstrations; dpo: from"
        " preferences; reward_model: a reward model from preferences or step labels; preferences:"
        " nothing learns, samples are kept as preferences and as responses; teacher_scores: nothing"
        " learns, the model's distributions at each token of demonstrations are kept",
        choices=("online", "sft", "dpo", "reward_model", "preferences", "teacher_scores"),
    )
    pairs: str = option(
        "best_and_worst",
        "which two answers to a prompt become a preference: its best and its worst sample; all two"
        " samples of which one scored higher; demonstration: the record's own `response` over each"
        " sample (SPIN, Chen et al. 2024); none: responses alone",
        choices=("best_and_worst", "all", "demonstration", "none"),
        read=".trainer=preferences",
    )
    responses: str = option(
        "all",
        "which samples are kept as responses: all, or the best of each prompt",
        choices=("all", "best"),
        read=".trainer=preferences",
    )
    min_score: float | None = option(
        None,
        "samples that score lower are not kept as responses; null: none is left out",
        read=".trainer=preferences",
    )
    kept_fields: list[str] = option(
        [],
        "fields of the prompts' records that their responses are kept with",
        read=".trainer=preferences",
    )
    epochs: int = option(1, "passes over a step's samples", minimum=1)
    minibatches: int = option(1, "optimizer steps a pass", minimum=1)
    train_on: str = option(
        "all",
        "which of a prompt's samples are learned from: all, the one with the best score, or the"
        " best and the worst; with the latter two a prompt whose scores are all equal is left out;"
        " a function of one's own: docs/algorithms.md",
        choices=("all", "best", "best_and_worst", CALLABLE),
    )
    advantage: str = option(
        "gae",
        "gae: generalized advantage estimation, with a critic; reinforce: the return;"
        " reinforce_plus_plus: the return, whitened over the step; rloo, grpo, dr_grpo: the score"
        " against those of the prompt's other samples; grpo_steps: what the response's steps to"
        " come get, against all steps of these samples; none: for a loss that takes no advantages;"
        " a function of one's own: docs/algorithms.md",
        choices=(
            "gae",
            "reinforce",
            "reinforce_plus_plus",
            "rloo",
            "grpo",
            "grpo_steps",
            "dr_grpo",
            "none",
            CALLABLE,
        ),
    )
    loss: str = option(
        "clip",
        "clip: PPO's clipped surrogate; cispo: clipped weights without a gradient; reinforce: the"
        " policy gradient, samples taken as the policy's own; copg: contrastive policy gradient"
        " over a prompt's samples; dpo: preference of the best over the worst; cross_entropy:"
        " imitation; a function of one's own: docs/algorithms.md",
        choices=("clip", "cispo", "reinforce", "copg", "dpo", "cross_entropy", CALLABLE),
    )
    ratio_level: str = option(
        "token",
        "the policy's ratio is each token's own (token), the geometric mean of the response's"
        " (sequence), or their product (sequence_product)",
        choices=("token", "sequence", "sequence_product"),
        read=".loss=clip|*:*",
    )
    ratio_against: str = option(
        "trainer",
        "the policy's ratio is against the trainer's log-probs before the step's updates, the"
        " proximal policy (trainer), or those of the weights that drew the tokens, as the engine"
        " saw them (sampler): then the clip limits their age too",
        choices=("trainer", "sampler"),
        read=".loss=clip|cispo|*:*",
    )
    aggregation: str = option(
        "token",
        "the loss is the mean over all response tokens (token), the mean of the responses' means"
        " (sequence), or the sum of each response's tokens, divided by the responses (sum) or by"
        " these times rollout.max_response_tokens (constant)",
        choices=("token", "sequence", "sum", "constant"),
    )
    with_critic: bool = option(
        False,
        "train a critic beside the policy for an estimator of one's own; gae has one anyway",
        read=".advantage=*:*",
    )
    gamma: float = option(
        1.0,
        "discount",
        minimum=0,
        maximum=1,
        read=".advantage=gae|reinforce|reinforce_plus_plus|*:* or .loss=*:*",
    )
    lam: float = option(
        0.95, "GAE's lambda", minimum=0, maximum=1, read=".advantage=gae|*:* or .loss=*:*"
    )
    clip_low: float = option(
        0.2,
        "policy ratio's lower clip, 1 - clip_low",
        minimum=0,
        maximum=1,
        read=".loss=clip|cispo|*:* or .advantage=*:*",
    )
    clip_high: float = option(
        0.2,
        "policy ratio's upper clip, 1 + clip_high",
        minimum=0,
        read=".loss=clip|cispo|*:* or .advantage=*:*",
    )
    dual_clip: float | None = option(
        None,
        "where the advantage is negative the loss is at most this times it; no bound when null",
        minimum=1,
        read=".loss=clip|*:*",
    )
    truncated_importance: str = option(
        "none",
        "correct for the engine's probabilities differing from the trainer's: weigh each token's"
        " loss by the trainer's probability before the step's updates over the engine's, of the"
        " token or of the whole response (loss=dpo: of both), truncated; none: take them as equal",
        choices=("none", "token", "sequence"),
        read=".loss=clip|cispo|reinforce|copg|dpo|cross_entropy|*:*",
    )
    truncated_importance_cap: float = option(
        2.0, "largest weight", minimum=1, read=".truncated_importance!=none"
    )
    above_importance_cap: str = option(
        "truncate",
        "what has a larger weight keeps the largest, or is dropped from the loss",
        choices=("truncate", "drop"),
        read=".truncated_importance!=none",
    )
    replay_routes: bool = option(
        False,
        "send each token through the experts that the engine chose for it, in the policy's and the"
        " reference's log-probs and in the updates (routing replay); for mixtures of experts",
        read=".trainer=online",
    )
    uncorrected_staleness: bool = option(
        False,
        "train on samples of older weights without truncated_importance and ratio_against=sampler,"
        " as if they were the policy's own; false: refuse to",
        read="rollout.max_staleness>0",
    )
    value_clip: float = option(
        0.2,
        "values are clipped to the old ones plus or minus this",
        minimum=0,
        read=".with_critic=true or .advantage=gae",
    )
    critic_warmup_steps: int = option(
        0,
        "first steps, in which the critic learns alone: the policy, its learning-rate schedule and"
        " the KL coefficient wait",
        minimum=0,
        read=".with_critic=true or .advantage=gae",
    )
    whiten_rewards: bool = option(
        False,
        "scale the step's rewards to variance 1, mean kept",
        read=".advantage!=none or .loss=copg|*:*",
    )
    whiten_advantages: bool = option(
        True, "scale the advantages to mean 0 and variance 1", read=".advantage!=none or .loss=*:*"
    )
    whiten_over: str = option(
        "step",
        "which tokens these are of: all of the step, or those of a prompt's samples",
        choices=("step", "prompt"),
        read=".whiten_advantages=true",
    )
    kl_placement: str = option(
        "reward",
        "where the KL penalty goes: into each token's reward, or into the loss",
        choices=("reward", "loss"),
        read=".kl_coefficient>0",
    )
    kl_coefficient: float = option(0.05, "weight of the per-token KL penalty", minimum=0)
    kl_estimator: str = option(
        "k1", "estimator of the KL penalty", choices=("k1", "k2", "k3"), read=".kl_coefficient>0"
    )
    kl_target: float | None = option(
        None,
        "adapt the coefficient towards this KL per sequence; fixed when null",
        above=0,
        read=".kl_coefficient>0",
    )
    kl_horizon: int = option(
        10000, "horizon of the adaptive coefficient, in samples", minimum=1, read=".kl_target!=null"
    )
    early_stop_kl: float | None = option(
        None,
        "leave out the rest of a step's updates once policy/approx_kl of one is above this; never"
        " when null",
        minimum=0,
        read=".loss=clip|cispo|*:*",
    )
    entropy_coefficient: float = option(0.0, "weight of the entropy bonus in the loss", minimum=0)
    overlong_fraction: float = option(
        0.0,
        "a response loses up to 1 over this last share of rollout.max_response_tokens (DAPO's"
        " overlong penalty); 0: nothing",
        minimum=0,
        maximum=1,
        read=".trainer=online|preferences",
    )
    length_penalty: float = option(
        0.0,
        "a response loses this for each drawn token that it is longer, or shorter, than"
        " target_length",
        minimum=0,
        read=".trainer=online|preferences",
    )
    target_length: int = option(
        0,
        "drawn tokens that a response is to have; 0: the fewer the better",
        minimum=0,
        read=".length_penalty>0",
    )
    overlong_filter: bool = option(
        False,
        "leave responses that generation cut out of what is learned, by the policy and the critic,"
        " once they have had their part in the advantages of the others",
        read=".loss=clip|cispo|reinforce|cross_entropy|*:*",
    )
    bootstrap_cut: bool = option(
        False,
        "what follows a response that generation cut is worth what the critic says of it; false: 0,"
        " as after an end. Its score stays on its last token: reward.missing_end_score=0 takes that"
        " away",
        read=(
            ".advantage=gae and .overlong_filter=false or .with_critic=true and"
            " .overlong_filter=false"
        ),
    )
    dynamic_sampling_rounds: int = option(
        0,
        "replace prompts whose samples all have the same score by further ones, so many times at"
        " most before the run ends; 0: keep them",
        minimum=0,
        read=".trainer=online|preferences",
    )
    preference: PreferenceConfig = section(
        PreferenceConfig, read="algorithm.loss=dpo|*:* or algorithm.trainer=dpo"
    )

    @property
    def generates(self) -> bool:
        """Whether the policy is sampled from, and its samples are scored."""
        return self.trainer in ("online", "preferences")

    @property
    def learns(self) -> bool:
        """Whether a model is trained; a run that trains none keeps no checkpoints, and goes on
        behind its last step."""
        return self.trainer not in ("preferences", "teacher_scores")

    @property
    def has_demonstrations(self) -> bool:
        """Whether samples are set against the responses that prompts' records have."""
        return self.trainer == "preferences" and self.pairs == "demonstration"

    @property
    def has_labels(self) -> bool:
        """Whether single answers with a label each are learned from (KTO)."""
        return self.trainer == "dpo" and not self.preference.has_pairs

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        wants = self.advantage == "gae" or (
            self.with_critic and callable_place(self.advantage) is not None
        )
        return self.trainer == "online" and wants

    @property
    def policy_starts_after(self) -> int:
        """Steps before the first that updates the policy."""
        return self.critic_warmup_steps if self.has_critic else 0
