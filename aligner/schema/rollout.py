"""How many samples a step takes, and how they are drawn."""

from dataclasses import dataclass

from aligner.schema.options import option


@dataclass
class RolloutConfig:
    """Number of prompts and responses per training step, and sampling parameters."""

    prompts_per_step: int = option(8, "Prompts per training step.", minimum=1)
    samples_per_prompt: int = option(8, "Responses sampled per prompt (group size).", minimum=1)
    micro_batches: int = option(
        2,
        "Number of parts in which the prompts of a step are generated; each part is scored while"
        " the next one is generated.",
        minimum=1,
    )
    max_staleness: int = option(
        0,
        "Maximum staleness of a rollout in weight versions; rollouts are generated while the"
        " steps before them train. 0 means synchronous, on-policy.",
        minimum=0,
    )
    max_skipped_prompts: int = option(
        8,
        "Maximum number of prompts per step that are skipped because generating or scoring them"
        " failed, even when retried alone; 0 means that the first failure ends the run.",
        minimum=0,
    )
    max_skipped_fraction: float = option(
        0.25,
        "Maximum share of `rollout.prompts_per_step` that is skipped, rounded down to whole"
        " prompts; limits the number in addition to `rollout.max_skipped_prompts`.",
        minimum=0,
        maximum=1,
        read=".max_skipped_prompts>0",
    )
    spare_prompts: int = option(
        0,
        "Prompts in flight in addition to those that a step needs; prompts that are incomplete"
        " when the step has enough are carried over to the next step (partial rollouts).",
        minimum=0,
    )
    max_deferrals: int = option(
        1,
        "Maximum number of steps over which a partial rollout is carried over; then the trainer"
        " waits for it.",
        minimum=1,
        read=".spare_prompts>0",
    )
    max_response_tokens: int = option(128, "Maximum response length in tokens.", minimum=1)
    min_response_tokens: int = option(
        0,
        "Minimum response length in tokens; no end-of-sequence token is sampled before it.",
        minimum=0,
    )
    temperature: float = option(
        1.0,
        "Sampling temperature; the trainer computes log-probs at the same temperature.",
        minimum=1e-3,
    )
    top_k: int = option(
        0, "Number of most probable tokens to sample from; 0 means all tokens.", minimum=0
    )
    top_p: float = option(
        1.0,
        "Cumulative probability of the smallest set of most probable tokens to sample from"
        " (nucleus sampling); 1 means all tokens.",
        above=0,
        maximum=1,
    )
    min_p: float = option(
        0.0,
        "Minimum probability of a token, relative to the most probable one, to be sampled; 0"
        " means all tokens.",
        minimum=0,
        maximum=1,
    )
    renormalize: bool = option(
        True,
        "Whether log-probs, including the trainer's, are renormalized over the tokens that"
        " top-k, top-p and min-p keep; false means over all tokens, which biases the policy"
        " ratios.",
        read=".top_k>0 or .top_p!=1.0 or .min_p>0",
    )
    stop_at_eos: bool = option(True, "Whether a response ends at an end-of-sequence token.")
    truncate_token: str | None = option(
        None,
        'Token, such as ".", after which a response is cut before it is scored; a response'
        " without this token counts as truncated. Null means no cut.",
    )
    truncate_after: int = option(
        16,
        "Number of response tokens at the start in which `rollout.truncate_token` is ignored.",
        minimum=0,
        read=".truncate_token!=null",
    )

    @property
    def skippable_prompts(self) -> int:
        """Prompts that a step may leave out."""
        # Rounded first: 0.29 of 100 prompts are 29 of them, and 28.999999999999996 in floating
        # point.
        return min(
            self.max_skipped_prompts,
            int(round(self.max_skipped_fraction * self.prompts_per_step, 6)),
        )

    @property
    def prompts_per_micro_batch(self) -> int:
        """Prompts that are drawn together, beside the spare ones."""
        return self.prompts_per_step // self.micro_batches

    @property
    def steps_ahead(self) -> int:
        """A batch is begun when weights so many versions older serve than those which its step
        trains.

        A prompt that is left behind grows older by a version each time, and is at most
        `max_staleness` old in the end.
        """
        return self.max_staleness - (self.max_deferrals if self.spare_prompts else 0)
