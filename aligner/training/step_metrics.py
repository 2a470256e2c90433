"""Metrics of a training step, and the object with which rank 0 records metrics and samples."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from aligner.schema import RolloutConfig
from aligner.training.episode_metrics import warn_of_left_out_episodes
from aligner.training.rollout_builder import RolloutBatch
from aligner.training.step_samples import SampleRecorder, StepSamples

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """Result of a training step."""

    metrics: dict[str, float]
    processed_counts: Mapping[str, int]
    """Number of `samples` and `tokens` that the step processed, from which its throughput is
    computed."""
    rollout: RolloutBatch | None = None
    scores: Tensor | None = None
    """Scores of the rollout's samples, float32 [B]."""
    step_samples: StepSamples | None = None
    """All samples that the step generated, for the sample files."""


@dataclass(frozen=True)
class Recorder:
    """Writes metrics and samples of a run; only rank 0 has one."""

    metrics_writer: MetricsWriter
    sample_writer: RecordWriter
    """Writer of a few samples of some steps."""
    tokenizer: Tokenizer
    sample_recorder: SampleRecorder | None = None
    """Writer of the sample files with all samples; None if only `sample_writer` writes samples."""
    judge_meter: JudgeMeter | None = None
    """Meter of the judges' calls; None without judges."""

    def truncate_after(self, step: int, *, owes_evaluation: bool) -> None:
        """Delete the records of the steps after `step`, which a resumed run repeats.

        Args:
            step: The last step to keep.
            owes_evaluation: Whether the metrics of an evaluation will be added to the record of
                `step`; see `MetricsWriter.truncate_after`.
        """
        self.metrics_writer.truncate_after(step, amends=owes_evaluation)
        self.sample_writer.truncate_after(step)
        if self.sample_recorder is not None:
            self.sample_recorder.truncate_after(step)

    def write_all_samples(self, step: int, result: StepResult) -> None:
        """Start to write all samples of the step to the sample files, if there are any.

        Call `wait_until_written` to wait until they are written.
        """
        if self.sample_recorder is not None and result.step_samples is not None:
            self.sample_recorder.write(step, result.step_samples)

    def wait_until_written(self, step: int) -> None:
        """Wait until all samples up to this step are written."""
        if self.sample_recorder is not None:
            self.sample_recorder.wait_until_written(step)

    def write_samples(self, step: int, result: StepResult, count: int) -> None:
        """Write at most `count` samples, evenly spaced among those of the step, if it has any."""
        if result.rollout is None or result.scores is None:
            return
        samples = result.rollout.samples
        # Round up, so that at most `count` samples are written.
        stride = max(1, -(-len(samples) // count))
        records = []
        for index in range(0, len(samples), stride):
            sample = samples[index]
            record: dict[str, Any] = {
                "prompt": result.rollout.prompts[index].text,
                "response": decode_response(sample, self.tokenizer),
                "reward": float(result.scores[index]),
            }
            # Do not test for a `generated_mask`: a single-turn response that was batched with
            # episodes has one too, all true.
            if sample.generated_token_count < len(sample.response):
                record["turns"] = build_transcript(sample, self.tokenizer)
            if sample.branches:
                record["branches"] = decode_branches(sample, self.tokenizer)
            if sample.report is not None:
                record |= sample.report.to_json()
            records.append(record)
        self.sample_writer.write(step, records)


def compute_sequence_kl(experience: Experience) -> float:
    """Return an estimate of KL(policy ‖ reference) in nats per response.

    The estimate for a response is the sum of its tokens' log-prob differences (k1 of
    `approximate_kl`); the result is the mean over the responses.
    """
    difference = approximate_kl(experience.old_logprobs, experience.reference_logprobs)
    return float(torch.where(experience.mask, difference, 0.0).sum(1).mean())


def compute_prompt_metrics(
    outcomes: Sequence[PromptOutcome], earlier_rates: PassRates, current_rates: PassRates
) -> dict[str, float]:
    """Return metrics of the prompts of a step, and of the pass rates after it.

    The data has N examples; a prompt is one occurrence of an example in the stream.

    * `data/epoch`: length of the stream up to the last prompt of the step, divided by N; with one
      source, the number of epochs.
    * `data/repetitions`: mean number of times that the examples of the step were sampled before it.
    * `data/sampled_fraction`: fraction of the stream's prompts so far that were sampled. The
      curriculum skipped the others, or their generation failed or is not complete.
    * `data/pass_rate`: mean pass rate over all examples of the run that have a scored sample so
      far.
    * `data/always_passed`, `data/never_passed`: fractions of these examples whose pass rate is 1,
      or 0.

    Args:
        outcomes: Outcomes of the prompts of the step.
        earlier_rates: Pass rates before the step.
        current_rates: Pass rates after the step.
    """
    # Positions count from 0, so this is the length of the stream up to the last prompt.
    stream_length = 1 + max(outcome.position for outcome in outcomes)
    earlier_counts = [int(earlier_rates.selection_counts[outcome.example]) for outcome in outcomes]
    metrics = {
        "data/epoch": stream_length / len(current_rates.selection_counts),
        "data/repetitions": sum(earlier_counts) / len(outcomes),
        "data/sampled_fraction": int(current_rates.selection_counts.sum()) / stream_length,
    }

    rates = current_rates.compute_rates()
    # The rate of an example without a scored sample is NaN.
    rates = rates[~rates.isnan()]
    if len(rates):
        metrics["data/pass_rate"] = float(rates.mean())
        metrics["data/always_passed"] = float((rates == 1).double().mean())
        metrics["data/never_passed"] = float((rates == 0).double().mean())
    return metrics


def count_lengths(name: str, lengths: Iterable[int]) -> dict[str, float]:
    """Return a histogram of response lengths with edges at powers of two.

    `NAME_to_<tokens>` counts the lengths in (tokens/2, tokens]; `NAME_to_2` also counts the lengths
    of 0. Empty bins are omitted.
    """
    # The bit length of n - 1 is the exponent of the smallest power of two that is at least n. For
    # n = 0 it is 1, because Python ignores the sign of -1.
    counts = Counter(1 << (length - 1).bit_length() for length in lengths)
    return {f"{name}_to_{edge}": float(counts[edge]) for edge in sorted(counts)}


def compute_publish_metrics(stats: PublishStats) -> dict[str, float]:
    """Return metrics of the last completed weight sync.

    * `publish/mib`: MiB transferred between ranks, summed over all ranks.
    * `publish/seconds`: duration on this rank in seconds.
    * `publish/share`: transferred bytes, divided by those that a transfer of all elements would
      take.
    * `publish/changed`: fraction of the transferred tensors' elements that differ from the previous
      weight sync; absent if they were not compared.
    """
    metrics = {"publish/mib": stats.moved_bytes / 2**20, "publish/seconds": stats.seconds}
    if stats.full_bytes:
        metrics["publish/share"] = stats.moved_bytes / stats.full_bytes
    if stats.changed_share is not None:
        metrics["publish/changed"] = stats.changed_share
    return metrics


def compute_verification_metrics(stats: PublishStats) -> dict[str, float]:
    """Return metrics of the last completed weight sync, if it was verified (`engine.verify`).

    * `verify/version`: weight version of the sync.
    * `verify/checksum_seconds`: duration of the comparison of checksums on this rank in seconds.
    * `verify/probe_seconds`: time in seconds that engine and trainer computed the probe.
    * `verify/logprob_abs`: maximum difference between the engine's and the trainer's log-probs of
      the probe, in nats.
    """
    values = {
        "verify/checksum_seconds": stats.verify_seconds,
        "verify/probe_seconds": stats.probe_seconds,
        "verify/logprob_abs": stats.probe_logprob_abs,
    }
    metrics = {name: value for name, value in values.items() if value is not None}
    return {"verify/version": float(stats.version), **metrics} if metrics else {}


_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


def compute_score_metrics(
    scores: Tensor,
    samples_per_prompt: int,
    source_scores: Tensor | None = None,
    source_names: Sequence[str] = (),
) -> dict[str, float]:
    """Return metrics of the distribution of the scores; empty if no sample has a score.

    * `reward/mean`, `reward/std`, `reward/min`, `reward/max`: mean, population standard deviation
      and extremes.
    * `reward/p10`, `reward/p50`, `reward/p90`: quantiles, interpolated linearly.
    * `reward/zero_std_fraction`: fraction of the prompts with two or more scores for which all
      scores are equal; algorithms that compare the samples of a prompt learn nothing from these.
    * `reward/mean/NAME`: mean of the scores of one reward source.

    Args:
        scores: Scores [N] of N = P·K samples, consecutive for each of P prompts; not finite for a
            sample without a score.
        samples_per_prompt: Number K of samples per prompt.
        source_scores: Scores of each of R reward sources [N, R]; None with one source.
        source_names: Names of the R sources.
    """
    # The scores as [P, K] each; a sample without a score has -inf in `highs`, and inf in `lows`.
    highs, lows = score_bounds(scores, samples_per_prompt)
    has_score = scores.isfinite()
    # Count before the samples without a score are removed below.
    is_comparable = has_score.view(-1, samples_per_prompt).sum(1) > 1
    source_scores = None if source_scores is None else source_scores[has_score]
    scores = scores[has_score]
    if not len(scores):
        return {}

    probabilities = torch.tensor([*_QUANTILES.values()], dtype=torch.float64)
    quantiles = scores.double().quantile(probabilities).tolist()
    metrics = {
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std(unbiased=False)),
        "reward/min": float(scores.min()),
        **{f"reward/{name}": value for name, value in zip(_QUANTILES, quantiles, strict=True)},
        "reward/max": float(scores.max()),
    }
    if bool(is_comparable.any()):
        has_equal_scores = highs.amax(1) == lows.amin(1)
        metrics["reward/zero_std_fraction"] = float(has_equal_scores[is_comparable].double().mean())
    if source_scores is not None:
        metrics |= {
            f"reward/mean/{name}": float(column.mean())
            for name, column in zip(source_names, source_scores.double().T, strict=True)
        }
    return metrics


def compute_abstention_metrics(
    scores: Tensor, samples_per_prompt: int, min_scores: int
) -> dict[str, float]:
    """Return metrics of the samples for which the reward function abstained.

    * `reward/abstained`: number of samples.
    * `reward/abstained_prompts`: number of prompts that have, because of abstentions, fewer than
      `min_scores` scores, so that none of their samples is used for training.

    Args:
        scores: Scores [N], consecutive for each prompt.
        samples_per_prompt: Number of samples per prompt.
        min_scores: Minimum number of scores of a prompt.
    """
    is_abstention = (scores == ABSTAINED).view(-1, samples_per_prompt)
    has_score = scores.isfinite().view(-1, samples_per_prompt)
    is_unused_prompt = is_abstention.any(1) & (has_score.sum(1) < min_scores)
    return {
        "reward/abstained": float(is_abstention.sum()),
        "reward/abstained_prompts": float(is_unused_prompt.sum()),
    }


def compute_rollout_metrics(
    rollout: RolloutBatch,
    settings: RolloutConfig,
    source_names: Sequence[str] = (),
    min_scores: int = 1,
) -> dict[str, float]:
    """Return metrics of the scores and lengths of a step's samples, and of their generation.

    The score metrics cover all samples with a score; see `compute_score_metrics` and
    `compute_abstention_metrics`. `response/length`, `response/ended_fraction`, `episode/turns` and
    `episode/branches` cover the samples that have a score and that dynamic sampling kept.

    * `rollout/kept_fraction`: fraction of the generated samples that have a score and that dynamic
      sampling kept.
    * `rollout/skipped`: number of prompts that could not be generated or scored;
      `rollout/skipped_fraction` is their fraction of `prompts_per_step`.
    * `rollout/deferred`: number of prompts carried over to the next step as partial rollouts; only
      with `rollout.spare_prompts` > 0.
    * `rollout/draft_tokens`: number of draft tokens of rank 0's engine;
      `rollout/accepted_fraction` is the fraction that was accepted.
    * `episode/turns`: mean number of the policy's turns per episode; `episode/branches` is the mean
      number of its branches.
    * `episode/environment_s`: mean over rank 0's episodes of the seconds spent waiting for the
      environment, summed over the turns.
    * `episode/failures/…`, `episode/retries/…`, `episode/left_out_fraction`, `episode/metrics/…`:
      see `compute_episode_metrics`.
    * `response/length`: mean length; `response/ended_fraction` is the fraction of the samples that
      ended before the length limit.
    * `response/generated_to_…`: histogram of the lengths of all generated samples.

    Lengths count generated tokens, without branches.

    Args:
        rollout: Samples of the step with a score; `all_scores` covers all generated samples.
        settings: Section `rollout` of the configuration.
        source_names: Names of the reward's sources.
        min_scores: See `compute_abstention_metrics`.

    Raises:
        AlignerError: More prompts were skipped than the settings allow.
    """
    scores = rollout.all_scores.result()
    source_scores = rollout.all_scores.get_source_scores()
    samples = rollout.samples

    # NaN means that scoring failed, which affects all samples of a prompt. An abstention has
    # another non-finite score.
    is_unscored = scores.isnan()
    skipped = rollout.skipped + int(is_unscored.sum()) // settings.samples_per_prompt
    if skipped > settings.skippable_prompts:
        raise AlignerError(
            f"rollout.max_skipped_prompts={settings.max_skipped_prompts},"
            f" rollout.max_skipped_fraction={settings.max_skipped_fraction:g}: {skipped} prompts"
            f" of this step ({settings.prompts_per_step} prompts per step) were skipped, because"
            " generation or scoring failed, but at most"
            f" {settings.skippable_prompts} may be skipped. The reasons are in the log of trainer"
            " rank 0"
        )

    kept_fraction = len(samples) / len(scores)
    metrics = compute_abstention_metrics(scores, settings.samples_per_prompt, min_scores) | {
        "rollout/skipped": float(skipped),
        "rollout/skipped_fraction": skipped / settings.prompts_per_step,
    }
    if settings.spare_prompts:
        metrics["rollout/deferred"] = float(rollout.deferred)
    counts = rollout.counts
    if counts.draft_tokens:
        metrics |= {
            "rollout/draft_tokens": float(counts.draft_tokens),
            "rollout/accepted_fraction": counts.accepted_tokens / counts.draft_tokens,
        }
    if counts.preemptions:
        metrics["rollout/preemptions"] = float(counts.preemptions)

    lengths = [sample.generated_token_count for sample in samples]
    # Include the removed samples: otherwise the histogram would depend on the scores.
    metrics |= count_lengths("response/generated", [*lengths, *rollout.removed_lengths])

    metrics |= rollout.episode_metrics
    warn_of_left_out_episodes(rollout.episode_metrics)
    if branch_count := sum(len(sample.branches) for sample in samples):
        metrics["episode/branches"] = branch_count / len(samples)
    if rollout.environment_s is not None:
        metrics["episode/environment_s"] = rollout.environment_s
    # Only samples of episodes have rewards of an environment.
    if any(sample.rewards is not None for sample in samples):
        metrics["episode/turns"] = sum(sample.turn_count for sample in samples) / len(samples)

    metrics |= compute_score_metrics(
        scores, settings.samples_per_prompt, source_scores, source_names
    )
    if not samples:
        # Some of the samples may lack a score because scoring failed, if steps may skip prompts.
        _log.warning(
            "the reward function abstained on all samples of the step, so nothing is trained"
        )
        return metrics | {"rollout/kept_fraction": kept_fraction}

    ended_count = sum(sample.finish_reason == "stop" for sample in samples)
    return metrics | {
        "response/length": sum(lengths) / len(samples),
        "response/ended_fraction": ended_count / len(samples),
        "rollout/kept_fraction": kept_fraction,
    }


def compute_experience_metrics(experience: Experience) -> dict[str, float]:
    """Return metrics of the samples used for training: KL, critic, and the mismatch of log-probs.

    The mismatch metrics compare the engine's probabilities of the response tokens with the
    trainer's before the update:

    * `mismatch/logprob_abs`: mean absolute difference of the log-probs.
    * `mismatch/kl`: k3 estimate of the KL of the engine against the trainer. This is the behavior
      KL: it compares the weights that generated each token, which may be older, with the newest
      weights.
    * `mismatch/fraction_above_1pct`: fraction of tokens whose probability ratio, engine over
      trainer, differs from 1 by more than 1%.

    The other metrics:

    * `kl/reference`: see `compute_sequence_kl`.
    * `distill/reverse_kl`: sample estimate of KL(policy ‖ teacher) in nats, mean per token;
      `distill/response_reverse_kl` is the sum over a response, mean per response.
    * `value/explained_variance`: 1 - Var(return - value) / Var(return).
    * `response/trained_to_…`: histogram of the lengths of the responses used for training.
    """
    mask = experience.mask
    mismatch = torch.where(mask, experience.engine_logprobs - experience.old_logprobs, 0.0)
    # |exp(d) - 1| is the relative difference of the probabilities; expm1 is accurate near 0.
    is_above_1pct = torch.expm1(mismatch).abs() > 0.01
    metrics: dict[str, Tensor | float] = {
        "mismatch/logprob_abs": masked_mean(mismatch.abs(), mask),
        # k3 = exp(-d) - 1 + d, with d the difference of the log-probs (Schulman 2020).
        "mismatch/kl": masked_mean(torch.expm1(-mismatch) + mismatch, mask),
        "mismatch/fraction_above_1pct": masked_mean(is_above_1pct.float(), mask),
        "kl/reference": compute_sequence_kl(experience),
    }

    if experience.teacher_logprobs is not None:
        teacher_kl = reverse_kl(experience.old_logprobs, experience.teacher_logprobs, mask)
        metrics |= {
            "distill/reverse_kl": masked_mean(teacher_kl, mask),
            "distill/response_reverse_kl": teacher_kl.sum(1).mean(),
        }

    if experience.values is not None and experience.returns is not None:
        returns = experience.returns[mask]
        errors = (experience.returns - experience.values)[mask]
        return_variance = returns.var(unbiased=False)
        if return_variance > 0:
            error_variance = errors.var(unbiased=False)
            metrics["value/explained_variance"] = 1 - error_variance / return_variance

    lengths = count_lengths("response/trained", mask.sum(1).tolist())
    return {name: float(value) for name, value in metrics.items()} | lengths


def compute_staleness_metrics(batch: SampleBatch, version: int) -> dict[str, float]:
    """Return the staleness of the response tokens in weight versions.

    `staleness/share_<lag>` is the fraction of the tokens that were generated by weights `lag`
    versions older than `version`; lags that do not occur are omitted.

    Args:
        batch: Samples with the weight version of each token.
        version: Version of the trainer's weights.
    """
    lags = (version - batch.weight_versions)[batch.mask]
    # `unique` sorts the lags, so the last one is the maximum.
    distinct_lags, counts = (values.tolist() for values in lags.unique(return_counts=True))
    shares = {
        f"staleness/share_{lag}": count / lags.numel()
        for lag, count in zip(distinct_lags, counts, strict=True)
    }
    return {
        "staleness/mean": float(lags.double().mean()),
        "staleness/max": float(distinct_lags[-1]),
    } | shares


def combine_update_metrics(prefix: str, updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of a step's updates into one dict, with `prefix/` before each name.

    Names that end in `_max` or `_total` get the maximum, others the mean. `_total` metrics are
    running counts, so their maximum is the newest value. Each metric is combined over the updates
    that have it; a skipped update lacks the metrics that are not finite.
    """
    combined = {}
    # A dict instead of a set: the order of the metrics must not depend on string hashes.
    names = dict.fromkeys(name for update in updates for name in update)
    for name in names:
        values = [update[name] for update in updates if name in update]
        if name.endswith(("_max", "_total")):
            combined[f"{prefix}/{name}"] = max(values)
        else:
            combined[f"{prefix}/{name}"] = sum(values) / len(values)
    return combined
