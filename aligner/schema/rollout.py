"""How many samples a step takes, and how they are drawn."""

from dataclasses import dataclass

from aligner.schema.options import option


@dataclass
class RolloutConfig:
    """How many samples a step takes, and how they are drawn."""

    prompts_per_step: int = option(8, "prompts a training step", minimum=1)
    samples_per_prompt: int = option(8, "samples a prompt", minimum=1)
    micro_batches: int = option(
        2,
        "generation is cut into so many parts, each scored while the next is generated",
        minimum=1,
    )
    max_staleness: int = option(
        0,
        "samples are drawn by weights so many versions older, while the steps before theirs train;"
        " 0: by the newest, in turn",
        minimum=0,
    )
    max_skipped_prompts: int = option(
        8,
        "a step leaves out so many prompts at most that can not be drawn or scored, also not alone;"
        " 0: the first ends the run",
        minimum=0,
    )
    max_skipped_fraction: float = option(
        0.25,
        "and such a share of rollout.prompts_per_step at most, rounded down to whole prompts",
        minimum=0,
        maximum=1,
        read=".max_skipped_prompts>0",
    )
    spare_prompts: int = option(
        0,
        "so many prompts more than a step takes are under way; those that are not complete by then"
        " go on with the next step's",
        minimum=0,
    )
    max_deferrals: int = option(
        1,
        "a prompt is left behind by so many steps at most, and then waited for",
        minimum=1,
        read=".spare_prompts>0",
    )
    max_response_tokens: int = option(128, "longest response, in tokens", minimum=1)
    min_response_tokens: int = option(
        0, "no end-of-sequence token is drawn before so many tokens", minimum=0
    )
    temperature: float = option(
        1.0, "sampling temperature; log-probs are taken at it everywhere", minimum=1e-3
    )
    top_k: int = option(0, "draw among the k most probable tokens; 0: among all", minimum=0)
    top_p: float = option(
        1.0,
        "draw among the fewest tokens whose probabilities reach this",
        above=0,
        maximum=1,
    )
    min_p: float = option(
        0.0,
        "draw among tokens at least this share as probable as the likeliest one; 0: among all",
        minimum=0,
        maximum=1,
    )
    renormalize: bool = option(
        True,
        "log-probs, the trainer's too, are of the tokens that are left to draw among; false: of"
        " all, and ratios are biased",
        read=".top_k>0 or .top_p!=1.0 or .min_p>0",
    )
    stop_at_eos: bool = option(True, "a response ends at an end-of-sequence token")
    truncate_token: str | None = option(
        None,
        'a response is cut behind this token, such as ".", before it is scored; one without it has'
        " no end; null: none is",
    )
    truncate_after: int = option(
        16,
        "response tokens in which truncate_token does not count yet",
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
