"""The numbers of a training step, from its samples and its experience."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.algorithms.advantages import masked_mean
from aligner.algorithms.distillation import reverse_kl
from aligner.algorithms.kl import approximate_kl
from aligner.algorithms.selections import score_bounds
from aligner.data.conversations import build_transcript, decode_branches, decode_response
from aligner.data.pass_rates import PassRates, PromptOutcome
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import ABSTAINED, Experience, SampleBatch
from aligner.errors import AlignerError
from aligner.observability.metrics import MetricsWriter, RecordWriter
from aligner.resharding.weight_update import PublishStats
from aligner.rewards.judge import JudgeMeter
from aligner.rollout.rollout_builder import RolloutBatch
from aligner.schema import RolloutConfig
from aligner.training.step_samples import SampleRecorder, StepSamples


@dataclass(frozen=True)
class StepResult:
    """What a step leaves."""

    metrics: dict[str, float]
    processed: Mapping[str, int]
    """How many `samples` and `tokens` it went through; its throughput is measured in these."""
    rollout: RolloutBatch | None = None
    scores: Tensor | None = None
    """float32 [B]: those of the rollout's samples"""
    sampled: StepSamples | None = None
    """All that was drawn, for it to be kept."""


@dataclass(frozen=True)
class Recorder:
    """What rank 0 writes down; the other ranks have none."""

    metrics: MetricsWriter
    samples: RecordWriter
    tokenizer: Tokenizer
    sampled: SampleRecorder | None = None
    """None: of all that is sampled `samples` alone are kept."""
    judges: JudgeMeter | None = None
    """None: no judge scores."""

    def truncate_after(self, step: int, *, amends: bool) -> None:
        """Forget what a resumed run is about to do again; see `MetricsWriter.truncate_after`."""
        self.metrics.truncate_after(step, amends=amends)
        self.samples.truncate_after(step)
        if self.sampled is not None:
            self.sampled.truncate_after(step)

    def keep(self, step: int, result: StepResult) -> None:
        """Begin to write all that the step has sampled, if anything; whoever needs it complete
        calls `settle`."""
        if self.sampled is not None and result.sampled is not None:
            self.sampled.write(step, result.sampled)

    def settle(self, step: int) -> None:
        """Return once all that was sampled up to this step is written."""
        if self.sampled is not None:
            self.sampled.settle(step)

    def write_samples(self, step: int, result: StepResult, count: int) -> None:
        """Write so many samples, evenly spread over the step's, if it has any."""
        if result.rollout is None or result.scores is None:
            return
        prompts, samples = result.rollout.prompts, result.rollout.samples
        apart = max(1, -(-len(samples) // count))
        chosen = [(index, samples[index]) for index in range(0, len(samples), apart)]
        records = [
            {
                "prompt": prompts[index].text,
                "response": decode_response(sample, self.tokenizer),
                "reward": float(result.scores[index]),
                # A sample that came over the wire among episodes may be marked as drawn throughout.
                **(
                    {"turns": build_transcript(sample, self.tokenizer)}
                    if sample.generated_token_count < len(sample.response)
                    else {}
                ),
                **(
                    {"branches": decode_branches(sample, self.tokenizer)} if sample.branches else {}
                ),
            }
            for index, sample in chosen
        ]
        self.samples.write(step, records)


_log = logging.getLogger(__name__)


def sequence_kl(experience: Experience) -> float:
    """KL(policy ‖ reference) per response in nats: the sum over tokens of log-prob differences,
    mean over responses."""
    difference = approximate_kl(experience.old_logprobs, experience.reference_logprobs)
    return float(torch.where(experience.mask, difference, 0.0).sum(1).mean())


def draw_metrics(
    draws: Sequence[PromptOutcome], before: PassRates, after: PassRates
) -> dict[str, float]:
    """Where the run is in its prompts with a step's draws, by the pass rates before them and after.

    `data/epoch`: how many passes over the prompts have been taken with the last of these, of
    several sources over as many prompts as they have together; `data/repetitions`: how often a
    prompt of the step was sampled before, in the mean; `data/sampled_fraction`: the share of the
    stream so far that was sampled, the others being passed over. Of the prompts that have samples
    so far `data/pass_rate` is the mean pass rate, `data/always_passed` and `data/never_passed` are
    the shares of those whose samples all passed, or none.
    """
    positions, earlier = (
        1 + max(draw.position for draw in draws),
        [int(before.drawn[draw.example]) for draw in draws],
    )
    metrics = {
        "data/epoch": positions / len(after.drawn),
        "data/repetitions": sum(earlier) / len(draws),
        "data/sampled_fraction": int(after.drawn.sum()) / positions,
    }
    rates = after.compute_rates()
    if len(known := rates[~rates.isnan()]):
        metrics["data/pass_rate"] = float(known.mean())
        metrics["data/always_passed"] = float((known == 1).double().mean())
        metrics["data/never_passed"] = float((known == 0).double().mean())
    return metrics


def length_counts(name: str, lengths: Iterable[int]) -> dict[str, float]:
    """A histogram of response lengths: `NAME_to_<tokens>` counts those of so many or fewer, and
    more than half as many.

    Only lengths that occur have one.
    """
    counts = Counter(1 << (length - 1).bit_length() for length in lengths)
    return {f"{name}_to_{edge}": float(counts[edge]) for edge in sorted(counts)}


def publish_metrics(stats: PublishStats) -> dict[str, float]:
    """What the newest publish that has ended took: MiB that crossed from rank to rank, what share
    that is of what all numbers would have been, seconds on this rank and, where they were compared,
    the share of numbers that had changed."""
    found = {"publish/mib": stats.moved_bytes / 2**20, "publish/seconds": stats.seconds}
    if stats.full_bytes:
        found["publish/share"] = stats.moved_bytes / stats.full_bytes
    if stats.changed_share is not None:
        found["publish/changed"] = stats.changed_share
    return found


_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


def score_metrics(
    scores: Tensor,
    samples_per_prompt: int,
    parts: Tensor | None = None,
    sources: Sequence[str] = (),
) -> dict[str, float]:
    """How the scores [N] of samples, each prompt's in a row, are distributed; empty if no sample
    has a score, which is then not finite.

    `reward/p10` to `reward/p90` are quantiles, linear between two scores;
    `reward/zero_std_fraction` is the share of prompts whose samples all score alike, of which
    algorithms that compare them learn nothing, among those with two scores or more;
    `reward/mean/NAME` is the mean of what a source has given, of `parts` [N, P] by P sources.
    """
    high, low = score_bounds(scores, samples_per_prompt)
    comparable = scores.isfinite().view(-1, samples_per_prompt).sum(1) > 1
    parts = None if parts is None else parts[scores.isfinite()]
    scores = scores[scores.isfinite()]
    if not len(scores):
        return {}
    numbers = scores.double()
    quantiles = numbers.quantile(torch.tensor([*_QUANTILES.values()], dtype=torch.float64)).tolist()
    metrics = {
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std(unbiased=False)),
        "reward/min": float(scores.min()),
        **{f"reward/{name}": value for name, value in zip(_QUANTILES, quantiles, strict=True)},
        "reward/max": float(scores.max()),
    }
    if bool(comparable.any()):
        alike = high.amax(1) == low.amin(1)
        metrics["reward/zero_std_fraction"] = float(alike[comparable].double().mean())
    if parts is not None:
        metrics |= {
            f"reward/mean/{name}": float(part.mean())
            for name, part in zip(sources, parts.double().T, strict=True)
        }
    return metrics


def abstention_metrics(
    scores: Tensor, samples_per_prompt: int, least_scores: int
) -> dict[str, float]:
    """How often the reward function abstained, of the scores [N] of samples.

    `reward/abstained` counts the samples; `reward/abstained_prompts` counts the prompts that had
    fewer than `least_scores` scores left because of abstentions, so that none of their samples was
    trained on.
    """
    abstained = (scores == ABSTAINED).view(-1, samples_per_prompt)
    scored = scores.isfinite().view(-1, samples_per_prompt)
    left_out = abstained.any(1) & (scored.sum(1) < least_scores)
    return {
        "reward/abstained": float(abstained.sum()),
        "reward/abstained_prompts": float(left_out.sum()),
    }


def rollout_metrics(
    rollout: RolloutBatch,
    settings: RolloutConfig,
    sources: Sequence[str] = (),
    least_scores: int = 1,
) -> dict[str, float]:
    """Scores and lengths of a step's samples, before any selection among them; `sources` are the
    names of the reward's, and `least_scores` is described by `abstention_metrics`.

    `rollout/kept_fraction` is the share of the generated samples that have a score and that dynamic
    sampling has kept; scores are those of all that have one. `rollout/skipped` counts the prompts
    that could not be drawn or scored, `rollout/skipped_fraction` is their share of
    `prompts_per_step`, and `rollout/deferred` counts the prompts that were left to later steps,
    where they may be; `rollout/draft_tokens` is the number of draft tokens of rank 0's engine, and
    `rollout/accepted_fraction` the accepted share of them; `episode/turns` are the policy's turns
    in an episode, `episode/branches` its branches, and `episode/environment_s` is how long
    one of rank 0's waited for its environment, all turns together; `response/generated_to_…` are
    the lengths of all that were generated. Lengths count generated tokens, without branches. Raises
    AlignerError when more were skipped than the settings allow.
    """
    scores, parts, samples = (
        rollout.all_scores.result(),
        rollout.all_scores.parts(),
        rollout.samples,
    )
    unscored = scores.isnan()
    skipped = rollout.skipped + int(unscored.sum()) // settings.samples_per_prompt
    if skipped > settings.skippable_prompts:
        raise AlignerError(
            f"rollout.max_skipped_prompts={settings.max_skipped_prompts},"
            f" rollout.max_skipped_fraction={settings.max_skipped_fraction:g}: {skipped} prompts"
            f" of this step ({settings.prompts_per_step} prompts per step) were skipped, because"
            " generation or scoring failed, but at most"
            f" {settings.skippable_prompts} may be skipped. The reasons are in the log of trainer"
            " rank 0"
        )
    kept = len(samples) / len(scores)
    counts = abstention_metrics(scores, settings.samples_per_prompt, least_scores) | {
        "rollout/skipped": float(skipped),
        "rollout/skipped_fraction": skipped / settings.prompts_per_step,
    }
    if settings.spare_prompts:
        counts["rollout/deferred"] = float(rollout.deferred)
    guessed, accepted = rollout.guesses
    if guessed:
        counts |= {
            "rollout/draft_tokens": float(guessed),
            "rollout/accepted_fraction": accepted / guessed,
        }
    lengths = [sample.generated_token_count for sample in samples]
    counts |= length_counts("response/generated", [*lengths, *rollout.left_out])
    if branches := sum(len(sample.branches) for sample in samples):
        counts["episode/branches"] = branches / len(samples)
    if rollout.environment_s is not None:
        counts["episode/environment_s"] = rollout.environment_s
    if any(sample.rewards is not None for sample in samples):
        counts["episode/turns"] = sum(sample.turn_count for sample in samples) / len(samples)
    counts |= score_metrics(scores, settings.samples_per_prompt, parts, sources)
    if not samples:
        _log.warning(
            "the reward function abstained on all samples of the step, so nothing is trained"
        )
        return counts | {"rollout/kept_fraction": kept}
    return counts | {
        "response/length": sum(lengths) / len(samples),
        "response/ended_fraction": (
            sum(sample.finish_reason == "stop" for sample in samples) / len(samples)
        ),
        "rollout/kept_fraction": kept,
    }


def experience_metrics(experience: Experience) -> dict[str, float]:
    """KL, the critic's fit, and how far the engine's probabilities are from the trainer's before
    the update.

    Over the response tokens: `mismatch/logprob_abs`, the mean absolute difference of log-probs;
    `mismatch/kl`, k3 of the engine against the trainer, which is the behavior KL: of the weights
    that drew each token, however old, against the newest; `mismatch/fraction_above_1pct`, the share
    of tokens whose probability ratio, engine over trainer, is off from 1 by more than 1%.
    `distill/reverse_kl` is the policy's KL to its teacher, estimated from the samples, a token in
    the mean, and `distill/response_reverse_kl` a response. `response/trained_to_…` are the lengths
    of the responses that are learned from.
    """
    mask = experience.mask
    mismatch = torch.where(mask, experience.engine_logprobs - experience.old_logprobs, 0.0)
    metrics: dict[str, Tensor | float] = {
        "mismatch/logprob_abs": masked_mean(mismatch.abs(), mask),
        "mismatch/kl": masked_mean(torch.expm1(-mismatch) + mismatch, mask),
        "mismatch/fraction_above_1pct": masked_mean(
            (torch.expm1(mismatch).abs() > 0.01).float(), mask
        ),
        "kl/reference": sequence_kl(experience),
    }
    if experience.teacher_logprobs is not None:
        apart = reverse_kl(experience.old_logprobs, experience.teacher_logprobs, mask)
        metrics |= {
            "distill/reverse_kl": masked_mean(apart, mask),
            "distill/response_reverse_kl": apart.sum(1).mean(),
        }
    if experience.values is not None and experience.returns is not None:
        returns, errors = experience.returns[mask], (experience.returns - experience.values)[mask]
        if returns.var(unbiased=False) > 0:
            metrics["value/explained_variance"] = 1 - errors.var(unbiased=False) / returns.var(
                unbiased=False
            )
    lengths = length_counts("response/trained", mask.sum(1).tolist())
    return {name: float(value) for name, value in metrics.items()} | lengths


def staleness_metrics(batch: SampleBatch, version: int) -> dict[str, float]:
    """How many weight versions behind the trainer's, `version`, the response tokens were drawn.

    `staleness/share_<lag>` is the share of the tokens that were so many behind; only lags that
    occur have one.
    """
    lags = (version - batch.weight_versions)[batch.mask]
    found, counts = (each.tolist() for each in lags.unique(return_counts=True))
    shares = {
        f"staleness/share_{lag}": count / lags.numel()
        for lag, count in zip(found, counts, strict=True)
    }
    return {
        "staleness/mean": float(lags.double().mean()),
        "staleness/max": float(found[-1]),
    } | shares


def update_metrics(prefix: str, updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """A step's updates as one: maxima of the names that end in _max or _total, means of the others.

    What an update lacks, because it was skipped, is left to the others.
    """
    combined = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        combined[f"{prefix}/{name}"] = (
            max(values) if name.endswith(("_max", "_total")) else sum(values) / len(values)
        )
    return combined
