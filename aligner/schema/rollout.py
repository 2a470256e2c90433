"""Keys of the samples of a step and of the sampling: section `rollout`."""

from dataclasses import dataclass

from aligner.schema.options import option


@dataclass
class RolloutConfig:
    """Number of prompts and responses per training step, and sampling parameters."""

    prompts_per_step: int = option(8, "Number of prompts per training step.", minimum=1)
    samples_per_prompt: int = option(
        8, "Number of responses sampled per prompt (group size).", minimum=1
    )
    micro_batches: int = option(
        2,
        "Number of micro-batches into which the prompts of a step are split for generation."
        " Each micro-batch is scored while the next micro-batch is generated.",
        minimum=1,
    )
    max_staleness: int = option(
        0,
        "Maximum staleness of a rollout in weight versions. Above 0, rollouts are generated"
        " while the trainer processes earlier steps. 0 means synchronous, on-policy.",
        minimum=0,
    )
    max_skipped_prompts: int = option(
        8,
        "Maximum number of prompts per step that are skipped after a failure of generation or"
        " scoring. A prompt is skipped only if a retry of this prompt alone fails too. 0 means"
        " that the first failure ends the run.",
        minimum=0,
    )
    max_skipped_fraction: float = option(
        0.25,
        "Maximum fraction of `rollout.prompts_per_step` that is skipped, rounded down to whole"
        " prompts. Applies in addition to `rollout.max_skipped_prompts`.",
        minimum=0,
        maximum=1,
        read_if=".max_skipped_prompts>0",
    )
    spare_prompts: int = option(
        0,
        "Number of prompts in flight in addition to the prompts that a step needs. When enough"
        " prompts for a step are complete, the incomplete prompts are carried over to the next"
        " step (partial rollouts).",
        minimum=0,
    )
    max_deferrals: int = option(
        1,
        "Maximum number of steps over which a partial rollout is carried over; after that, the"
        " trainer waits for the rollout.",
        minimum=1,
        read_if=".spare_prompts>0",
    )
    max_response_tokens: int = option(128, "Maximum response length in tokens.", minimum=1)
    min_response_tokens: int = option(
        0,
        "Minimum response length in tokens. No end-of-sequence token is sampled before this"
        " length, and no string of `rollout.stop` that begins before it ends the response.",
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
        "Cumulative probability for nucleus sampling: tokens are sampled from the smallest set"
        " of most probable tokens that reaches this probability. 1 means all tokens.",
        above=0,
        maximum=1,
    )
    min_p: float = option(
        0.0,
        "Minimum probability of a sampled token, relative to the probability of the most"
        " probable token; 0 means all tokens.",
        minimum=0,
        maximum=1,
    )
    renormalize: bool = option(
        True,
        "Whether log-probs, including the trainer's log-probs, are renormalized over the tokens"
        " that top-k, top-p and min-p keep. False means log-probs over all tokens, which bias"
        " the policy ratios.",
        read_if=".top_k>0 or .top_p!=1.0 or .min_p>0",
    )
    stop_at_eos: bool = option(True, "Whether a response ends at an end-of-sequence token.")
    stop: list[str] = option(
        [],
        "Strings, such as `</answer>`, that end a response. The response contains the string, up to"
        " the end of the token that completes it. In an episode of several"
        " turns, the string ends the turn.",
    )
    truncate_token: str | None = option(
        None,
        'Token, such as ".", after which a response is cut before scoring. A response without'
        " this token counts as truncated. Null means no cut.",
    )
    truncate_after: int = option(
        16,
        "Number of tokens at the start of a response in which `rollout.truncate_token` is ignored.",
        minimum=0,
        read_if=".truncate_token!=null",
    )

    @property
    def can_end_responses(self) -> bool:
        """Whether a response can end before the maximum response length."""
        return self.stop_at_eos or bool(self.stop) or self.truncate_token is not None

    @property
    def skippable_prompts(self) -> int:
        """Maximum number of prompts that a step may skip."""
        # The product is rounded to 6 digits before int() truncates it, because 0.29 * 100 is
        # 28.999999999999996 in floating point.
        return min(
            self.max_skipped_prompts,
            int(round(self.max_skipped_fraction * self.prompts_per_step, 6)),
        )

    @property
    def prompts_per_micro_batch(self) -> int:
        """Number of prompts in a rollout micro-batch, without spare prompts."""
        return self.prompts_per_step // self.micro_batches

    @property
    def steps_ahead(self) -> int:
        """Number of steps by which the generation of a batch runs ahead of its training step.

        A prompt that is carried over becomes one weight version staler each time. The generation
        starts so late that the prompt does not exceed `max_staleness`.
        """
        # Without spare prompts, no prompt is carried over.
        return self.max_staleness - (self.max_deferrals if self.spare_prompts else 0)
