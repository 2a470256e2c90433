"""Keys of the algorithm: section `algorithm`."""

from dataclasses import dataclass

from aligner.schema.options import CALLABLE, option, section
from aligner.values import split_callable_name


@dataclass
class PreferenceConfig:
    """Preference loss on pairs from a file (`algorithm.trainer=dpo`) or on the policy's own
    samples (`algorithm.loss=dpo`)."""

    kind: str = option(
        "sigmoid",
        "Preference loss. `sigmoid`: DPO (Rafailov et al. 2023); `ipo`: IPO (Azar et al. 2023);"
        " `simpo`: SimPO, without a reference (Meng et al. 2024); `orpo`: ORPO, without a"
        " reference (Hong et al. 2024); `rpo_fwd_kl`, `rpo_bwd_kl`, `rpo_sq`: reward-aware"
        " losses with margins (Adler et al. 2024); `kto`: KTO on labeled responses (Ethayarajh"
        " et al. 2024).",
        choices=("sigmoid", "ipo", "simpo", "orpo", "rpo_fwd_kl", "rpo_bwd_kl", "rpo_sq", "kto"),
    )
    beta: float = option(
        0.1,
        "Strength of the regularization towards the reference. For `simpo`, scale of the"
        " log-probs; for `orpo`, weight of the odds-ratio loss.",
        minimum=1e-6,
    )
    label_smoothing: float = option(
        0.0,
        "Assumed probability that the label of a pair is wrong (conservative DPO).",
        minimum=0,
        maximum=0.5,
        read_if=".kind=sigmoid",
    )
    per_token: bool = option(
        False,
        "Whether the log-prob of a response is the mean over its tokens instead of the sum."
        " `simpo` and `orpo` always use the mean.",
        read_if=".kind=sigmoid|ipo|rpo_fwd_kl|rpo_bwd_kl|rpo_sq",
    )
    target_margin: float = option(
        0.5,
        "Target margin between the chosen and the rejected response in the logits of the loss"
        " (SimPO's gamma).",
        minimum=0,
        read_if=".kind=simpo",
    )
    reward_scale: float = option(
        1.0,
        "Factor of the reward difference of a pair. The reward difference is the record's"
        " `margin`, or the difference of the scores with `algorithm.loss=dpo`.",
        minimum=1e-6,
        read_if=".kind=rpo_fwd_kl|rpo_bwd_kl|rpo_sq",
    )
    imitation_weight: float = option(
        0.0,
        "Weight of the per-token cross-entropy of the chosen response, which is added to the"
        " loss (Pang et al. 2024); 0 means no cross-entropy term. For `orpo`, the weight is"
        " always 1.",
        minimum=0,
        read_if=".kind=sigmoid|ipo|simpo|rpo_fwd_kl|rpo_bwd_kl|rpo_sq",
    )
    desirable_weight: float = option(
        1.0, "Loss weight of responses with the label true.", minimum=0, read_if=".kind=kto"
    )
    undesirable_weight: float = option(
        1.0, "Loss weight of responses with the label false.", minimum=0, read_if=".kind=kto"
    )

    @property
    def has_pairs(self) -> bool:
        """Whether the records are pairs of responses, instead of single labeled responses."""
        return self.kind != "kto"

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the policy with the reference, its initial model."""
        return self.kind not in ("simpo", "orpo")

    @property
    def has_margin(self) -> bool:
        """Whether the loss uses the reward margin between the chosen and the rejected response."""
        return self.kind.startswith("rpo_")


@dataclass
class AlgorithmConfig:
    """Trainer, advantage estimator, loss and KL penalty."""

    name: str = option("ppo", "Name of this combination of algorithm settings.", read_if="always")
    trainer: str = option(
        "online",
        "`online`: reinforcement learning on the policy's own samples; `sft`: supervised"
        " fine-tuning on demonstrations; `dpo`: preference optimization; `reward_model`: reward"
        " model training on preferences or step labels; `preferences`: no training, the"
        " samples are stored as preference pairs and responses; `teacher_scores`: no training, the"
        " model's top-k log-probs of demonstrations are stored.",
        choices=("online", "sft", "dpo", "reward_model", "preferences", "teacher_scores"),
    )
    pairs: str = option(
        "best_and_worst",
        "Preference pairs that are stored for each prompt. `best_and_worst`: the prompt's best"
        " and worst sample; `all`: every pair of samples with different scores; `demonstration`:"
        " the record's `response` as chosen and each sample as rejected (SPIN, Chen et al."
        " 2024); `none`: no pairs, only responses.",
        choices=("best_and_worst", "all", "demonstration", "none"),
        read_if=".trainer=preferences",
    )
    responses: str = option(
        "all",
        "Samples that are written to `responses.jsonl`. `all`: all samples; `best`: the best"
        " sample of each prompt.",
        choices=("all", "best"),
        read_if=".trainer=preferences",
    )
    min_score: float | None = option(
        None,
        "Minimum score of a sample that is written to `responses.jsonl`; null means no minimum.",
        read_if=".trainer=preferences",
    )
    kept_fields: list[str] = option(
        [],
        "Fields of a prompt's record that are stored with the prompt's responses.",
        read_if=".trainer=preferences",
    )
    epochs: int = option(1, "Number of passes over the samples of a step (PPO epochs).", minimum=1)
    minibatches: int = option(1, "Number of optimizer steps per pass.", minimum=1)
    train_on: str = option(
        "all",
        "Samples of a prompt that are trained on. `all`: all samples; `best`: the best sample;"
        " `best_and_worst`: the best and the worst sample. `best` and `best_and_worst` skip"
        " prompts whose samples all have the same score. `module:callable`: your own function,"
        " see docs/algorithms.md.",
        choices=("all", "best", "best_and_worst", CALLABLE),
    )
    advantage: str = option(
        "gae",
        "Advantage estimator. `gae`: generalized advantage estimation with a critic;"
        " `reinforce`: return; `reinforce_plus_plus`: return whitened over the step; `rloo`,"
        " `grpo`, `dr_grpo`: score relative to the prompt's other samples; `grpo_steps`: GRPO"
        " with step rewards; `grpo_turns`: GRPO with the discounted return of each turn of an"
        " episode; `none`: no advantages, for losses that do not use advantages;"
        " `module:callable`: your own function, see docs/algorithms.md.",
        choices=(
            "gae",
            "reinforce",
            "reinforce_plus_plus",
            "rloo",
            "grpo",
            "grpo_steps",
            "grpo_turns",
            "dr_grpo",
            "none",
            CALLABLE,
        ),
    )
    loss: str = option(
        "clip",
        "Policy loss. `clip`: PPO's clipped surrogate; `cispo`: clipped importance weights"
        " without a gradient; `reinforce`: policy gradient without a ratio; `copg`: contrastive"
        " policy gradient over a prompt's samples; `dpo`: preference loss with the best sample"
        " as chosen and the worst sample as rejected; `cross_entropy`: imitation of the samples;"
        " `module:callable`: your own function, see docs/algorithms.md.",
        choices=("clip", "cispo", "reinforce", "copg", "dpo", "cross_entropy", CALLABLE),
    )
    ratio_level: str = option(
        "token",
        "Level of the policy ratio. `token`: ratio of each token; `sequence`: geometric mean of"
        " the token ratios of the response (GSPO); `sequence_product`: product of the token"
        " ratios of the response.",
        choices=("token", "sequence", "sequence_product"),
        # `*:*` is the name of a user's own loss, which may use any of these settings.
        read_if=".loss=clip|*:*",
    )
    ratio_against: str = option(
        "trainer",
        "Denominator of the policy ratio. `trainer`: the trainer's log-probs before the updates"
        " of the step (proximal policy); `sampler`: the engine's log-probs from generation. With"
        " `sampler`, clipping also limits the effect of staleness.",
        choices=("trainer", "sampler"),
        read_if=".loss=clip|cispo|*:*",
    )
    aggregation: str = option(
        "token",
        "Aggregation of token losses. `token`: mean over all response tokens; `sequence`: mean"
        " over the tokens of each response, then mean over responses; `sum`: sum over the tokens"
        " of each response, then mean over responses; `constant`: as `sum`, divided by"
        " `rollout.max_response_tokens`.",
        choices=("token", "sequence", "sum", "constant"),
    )
    with_critic: bool = option(
        False,
        "Whether to train a critic for your own advantage estimator"
        " (`algorithm.advantage=module:callable`). `algorithm.advantage=gae` always trains a"
        " critic.",
        read_if=".advantage=*:*",
    )
    gamma: float = option(
        1.0,
        "Discount factor per token; with `algorithm.advantage=grpo_turns` per turn.",
        minimum=0,
        maximum=1,
        read_if=".advantage=gae|reinforce|reinforce_plus_plus|grpo_turns|*:* or .loss=*:*",
    )
    lam: float = option(
        0.95, "Lambda of GAE.", minimum=0, maximum=1, read_if=".advantage=gae|*:* or .loss=*:*"
    )
    clip_low: float = option(
        0.2,
        "Lower clip range: the policy ratio is clipped at 1 - `clip_low`.",
        minimum=0,
        maximum=1,
        read_if=".loss=clip|cispo|*:* or .advantage=*:*",
    )
    clip_high: float = option(
        0.2,
        "Upper clip range: the policy ratio is clipped at 1 + `clip_high`.",
        minimum=0,
        read_if=".loss=clip|cispo|*:* or .advantage=*:*",
    )
    dual_clip: float | None = option(
        None,
        "Dual-clip bound: maximum loss of a token with a negative advantage, as a multiple of"
        " the absolute advantage. Null means no bound.",
        minimum=1,
        read_if=".loss=clip|*:*",
    )
    truncated_importance: str = option(
        "none",
        "Truncated importance sampling (TIS): the loss is multiplied by an importance weight."
        " The weight is the trainer's probability before the updates of the step, divided by the"
        " engine's probability. `none`: no correction; `token`: one weight per token;"
        " `sequence`: one weight per response (one weight per pair for `algorithm.loss=dpo`).",
        choices=("none", "token", "sequence"),
        read_if=".loss=clip|cispo|reinforce|copg|dpo|cross_entropy|*:*",
    )
    truncated_importance_cap: float = option(
        2.0, "Maximum importance weight.", minimum=1, read_if=".truncated_importance!=none"
    )
    above_importance_cap: str = option(
        "truncate",
        "Handling of importance weights above the cap. `truncate`: the weight is set to the"
        " cap; `drop`: the token or response is excluded from the loss.",
        choices=("truncate", "drop"),
        read_if=".truncated_importance!=none",
    )
    routing_replay: bool = option(
        False,
        "Whether the policy and the reference use the engine's expert routing of each token for"
        " log-probs and updates (routing replay). Only for mixture-of-experts models.",
        read_if=".trainer=online",
    )
    uncorrected_staleness: bool = option(
        False,
        "Whether to allow training on stale samples as if they were on-policy, without"
        " `algorithm.truncated_importance` or `algorithm.ratio_against=sampler`. With false,"
        " such a configuration is an error.",
        read_if="rollout.max_staleness>0",
    )
    value_clip: float = option(
        0.2,
        "Clip range of the value loss: maximum difference between the clipped value and the old"
        " value.",
        minimum=0,
        read_if=".with_critic=true or .advantage=gae",
    )
    critic_warmup_steps: int = option(
        0,
        "Number of steps at the start of the run in which only the critic trains. The policy,"
        " its learning-rate schedule and the KL coefficient do not change in these steps.",
        minimum=0,
        read_if=".with_critic=true or .advantage=gae",
    )
    whiten_rewards: bool = option(
        False,
        "Whether to scale the rewards of a step to variance 1, without changing their mean.",
        read_if=".advantage!=none or .loss=copg|*:*",
    )
    whiten_advantages: bool = option(
        True,
        "Whether to normalize advantages to mean 0 and variance 1.",
        read_if=".advantage!=none or .loss=*:*",
    )
    whiten_over: str = option(
        "step",
        "Tokens over which advantages are normalized. `step`: all tokens of the step; `prompt`:"
        " all tokens of the samples of a prompt.",
        choices=("step", "prompt"),
        read_if=".whiten_advantages=true",
    )
    kl_placement: str = option(
        "reward",
        "Placement of the KL penalty. `reward`: the penalty is subtracted from the reward of"
        " each token; `loss`: the penalty is added to the loss.",
        choices=("reward", "loss"),
        read_if=".kl_coefficient>0",
    )
    kl_coefficient: float = option(
        0.05, "Weight of the per-token KL penalty; 0 means no penalty.", minimum=0
    )
    kl_estimator: str = option(
        "k1",
        "Estimator of the KL divergence, with log-ratio d = log π - log π_ref. `k1`: d; `k2`:"
        " d²/2; `k3`: exp(-d) - 1 + d.",
        choices=("k1", "k2", "k3"),
        read_if=".kl_coefficient>0",
    )
    kl_target: float | None = option(
        None,
        "Target KL divergence per sequence for an adaptive KL coefficient; null means a fixed"
        " coefficient.",
        above=0,
        read_if=".kl_coefficient>0",
    )
    kl_horizon: int = option(
        10000,
        "Horizon of the adaptive KL coefficient in samples.",
        minimum=1,
        read_if=".kl_target!=null",
    )
    early_stop_kl: float | None = option(
        None,
        "Maximum of `policy/approx_kl` in an update. After an update with a higher value, the"
        " remaining updates of the step are skipped. Null means no maximum.",
        minimum=0,
        read_if=".loss=clip|cispo|*:*",
    )
    entropy_coefficient: float = option(
        0.0, "Weight of the entropy bonus in the loss; 0 means no bonus.", minimum=0
    )
    overlong_fraction: float = option(
        0.0,
        "Fraction of `rollout.max_response_tokens` in which the penalty of a response rises"
        " from 0 to 1; the penalty is 1 at the maximum length (DAPO's soft overlong penalty). 0"
        " means no penalty.",
        minimum=0,
        maximum=1,
        read_if=".trainer=online|preferences",
    )
    length_penalty: float = option(
        0.0,
        "Penalty that is subtracted from the score for each token by which the response length"
        " differs from `algorithm.target_length`; 0 means no penalty.",
        minimum=0,
        read_if=".trainer=online|preferences",
    )
    target_length: int = option(
        0,
        "Response length without a length penalty, in generated tokens; 0 means that every"
        " generated token is penalized.",
        minimum=0,
        read_if=".length_penalty>0",
    )
    overlong_filter: bool = option(
        False,
        "Whether to exclude truncated responses from the policy and critic losses. Truncated"
        " responses still count in the advantages of the prompt's other samples.",
        read_if=".loss=clip|cispo|reinforce|cross_entropy|*:*",
    )
    bootstrap_cut: bool = option(
        False,
        "Whether the return of a truncated response includes the critic's value after the last"
        " token (bootstrapping). False means a value of 0, as for a complete response. The score"
        " of the response is included in both cases, unless `reward.missing_end_score=0`.",
        read_if=(
            ".advantage=gae and .overlong_filter=false or .with_critic=true and"
            " .overlong_filter=false"
        ),
    )
    dynamic_sampling_rounds: int = option(
        0,
        "Maximum number of rounds of DAPO's dynamic sampling: each round samples new prompts to"
        " replace prompts whose samples all have the same score. The run fails if too few prompts"
        " with different scores are found. 0 means no replacement.",
        minimum=0,
        read_if=".trainer=online|preferences",
    )
    preference: PreferenceConfig = section(
        PreferenceConfig, read_if="algorithm.loss=dpo|*:* or algorithm.trainer=dpo"
    )

    @property
    def generates_samples(self) -> bool:
        """Whether the run generates samples of the policy and scores them."""
        return self.trainer in ("online", "preferences")

    @property
    def trains_model(self) -> bool:
        """Whether the run trains a model.

        A run that does not train a model has no checkpoints, and resumes after its last step.
        """
        return self.trainer not in ("preferences", "teacher_scores")

    @property
    def has_demonstrations(self) -> bool:
        """Whether preference pairs consist of the record's response and a sample (SPIN)."""
        return self.trainer == "preferences" and self.pairs == "demonstration"

    @property
    def has_labels(self) -> bool:
        """Whether the run trains on single responses with labels (KTO)."""
        return self.trainer == "dpo" and not self.preference.has_pairs

    @property
    def has_critic(self) -> bool:
        """Whether the run trains a critic in addition to the policy."""
        needs_critic = self.advantage == "gae" or (
            self.with_critic and split_callable_name(self.advantage) is not None
        )
        # The default of `advantage` is gae, also in runs that have no advantages.
        return self.trainer == "online" and needs_critic

    @property
    def steps_before_policy_updates(self) -> int:
        """Number of steps before the first step that updates the policy."""
        return self.critic_warmup_steps if self.has_critic else 0
