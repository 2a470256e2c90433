"""Test the metrics of a training step."""

from __future__ import annotations

import dataclasses
import math
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from aligner.config.compose import compose_config
from aligner.data.pass_rates import PassRates, PromptOutcome
from aligner.data.types import Experience, Prompt, Sample, collate, collate_episodes
from aligner.engines.engine_protocol import GenerationCounts
from aligner.errors import AlignerError
from aligner.schema import RolloutConfig
from aligner.training.online import describe_run
from aligner.training.rollout_builder import RolloutBatch
from aligner.training.services import PendingRows
from aligner.training.step_metrics import (
    combine_update_metrics,
    compute_experience_metrics,
    compute_prompt_metrics,
    compute_rollout_metrics,
    compute_score_metrics,
    compute_staleness_metrics,
    count_lengths,
)


def metrics_of_ratios(engine_over_trainer: list[float]) -> dict[str, float]:
    """Return the metrics of a response with the given probability ratios, engine over trainer.

    The tokens before and after the response have another ratio.
    """
    width = len(engine_over_trainer) + 2
    trainer, nothing = torch.full((1, width), -2.0), torch.zeros(1, width)
    engine = trainer + torch.tensor([[9.0, *engine_over_trainer, 9.0]]).log()
    mask = torch.tensor([[False, *[True] * len(engine_over_trainer), False]])
    tokens, returns = torch.zeros(1, width + 1, dtype=torch.int64), torch.arange(float(width))[None]
    one = torch.tensor([1])
    return compute_experience_metrics(
        Experience(
            tokens=tokens,
            lengths=torch.tensor([width]),
            mask=mask,
            prompt_lengths=one,
            engine_logprobs=engine,
            weight_versions=nothing.long(),
            finish_reasons=one - 1,
            groups=one - 1,
            scores=torch.zeros(1),
            rewards=nothing,
            values=nothing,
            old_logprobs=trainer,
            reference_logprobs=trainer,
            advantages=nothing,
            returns=returns,
        )
    )


def test_mismatch_covers_only_response_tokens():
    metrics = metrics_of_ratios([1.0, 1.009, 1.011, 0.989])
    assert metrics["mismatch/fraction_above_1pct"] == 0.5
    assert metrics["response/trained_to_4"] == 1
    logs = [math.log(ratio) for ratio in (1.009, 1.011, 0.989)]
    assert metrics["mismatch/logprob_abs"] == pytest.approx(sum(map(abs, logs)) / 4, rel=1e-4)
    assert metrics["mismatch/kl"] == pytest.approx(
        sum(math.exp(-log) - 1 + log for log in logs) / 4, rel=1e-2
    )


def test_mismatch_kl_is_k3_estimate():
    trainer_over_engine = (2.0, 0.8, 4.0)
    expected = sum(ratio - 1 - math.log(ratio) for ratio in trainer_over_engine) / 3
    assert metrics_of_ratios([1 / ratio for ratio in trainer_over_engine])[
        "mismatch/kl"
    ] == pytest.approx(expected)


MASK = torch.tensor([[True, True, False], [True, False, False]])
POLICY = torch.tensor([[-1.0, -2.0, math.nan], [-0.5, math.nan, math.nan]])


def two_responses(reference: torch.Tensor) -> Experience:
    """Return a response of two tokens and one of a single token.

    Args:
        reference: Log-probs of the reference model, [2, 3]; those of the policy are POLICY.
    """
    rows, nothing = torch.zeros(2, dtype=torch.int64), torch.zeros(MASK.shape)
    return Experience(
        tokens=torch.zeros(2, 4, dtype=torch.int64),
        lengths=torch.tensor([3, 2]),
        mask=MASK,
        prompt_lengths=rows + 1,
        engine_logprobs=nothing,
        weight_versions=nothing.long(),
        finish_reasons=rows,
        groups=rows,
        scores=torch.zeros(2),
        rewards=nothing,
        values=None,
        old_logprobs=POLICY,
        reference_logprobs=reference,
        advantages=nothing,
        returns=None,
    )


def test_reference_kl_sums_log_ratios_per_response():
    reference = torch.tensor([[-3.0, -1.5, 0.0], [-0.75, 0.0, 0.0]])
    metrics = compute_experience_metrics(two_responses(reference))
    assert metrics["kl/reference"] == pytest.approx((2.0 - 0.5 + 0.25) / 2)


def test_teacher_kl_is_reported_per_token_and_response():
    """Tokens outside the mask do not count."""
    teacher = torch.tensor([[-3.0, -1.5, 0.0], [-0.75, 0.0, 0.0]])
    experience = two_responses(reference=POLICY)
    assert not any(name.startswith("distill/") for name in compute_experience_metrics(experience))
    metrics = compute_experience_metrics(dataclasses.replace(experience, teacher_logprobs=teacher))
    assert metrics["distill/reverse_kl"] == pytest.approx((2.0 - 0.5 + 0.25) / 3)
    assert metrics["distill/response_reverse_kl"] == pytest.approx((1.5 + 0.25) / 2)


def test_staleness_counts_response_tokens():
    drawn_by = ([6, 6, 7], [4])  # a sample with a weight sync during generation, and an old one
    samples = [
        Sample(
            prompt_id=0,
            sample_index=index,
            tokens=torch.zeros(3 + len(versions), dtype=torch.int64),
            prompt_length=3,
            engine_logprobs=torch.zeros(len(versions)),
            weight_versions=torch.tensor(versions),
            finish_reason="length",
        )
        for index, versions in enumerate(drawn_by)
    ]
    assert compute_staleness_metrics(collate(samples, pad_token_id=0), version=7) == {
        "staleness/mean": (0 + 1 + 1 + 3) / 4,
        "staleness/max": 3.0,
        "staleness/share_0": 0.25,
        "staleness/share_1": 0.5,
        "staleness/share_3": 0.25,
    }


def test_length_buckets_are_powers_of_two():
    counts = count_lengths("of", [1, 2, 3, 4, 5, 8, 9, 1024])
    assert counts == {
        "of_to_1": 1,
        "of_to_2": 1,
        "of_to_4": 2,
        "of_to_8": 2,
        "of_to_16": 1,
        "of_to_1024": 1,
    }


def test_unscored_prompts_are_counted_and_limited():
    def future(value):
        done: Future = Future()
        done.set_result(torch.tensor(value))
        return PendingRows((done,))

    nan = math.nan
    scores = future([1.0, 0.0, nan, nan, 3.0, 0.0])
    settings = RolloutConfig(samples_per_prompt=2, spare_prompts=1, prompts_per_step=12)
    sample = Sample(
        0, 0, torch.tensor([5, 6]), 1, torch.zeros(1), torch.zeros(1, dtype=torch.int64), "stop"
    )
    samples = [sample] * 6
    prompts = [Prompt(row // 2, "", torch.tensor([5])) for row in range(6)]
    counts = {
        "deferred": 1,
        "skipped": 2,
        "removed_lengths": (7, 8),
        "counts": GenerationCounts(8, 2, 3),
    }
    whole = RolloutBatch(prompts, samples, collate(samples, 0), scores, PendingRows(()), **counts)
    scored = whole.drop_unscored()
    assert [prompt.id for prompt in scored.prompts] == [0, 0, 2, 2]
    metrics = compute_rollout_metrics(scored, settings)
    # Samples that dynamic sampling dropped, and samples without a score, were also generated.
    assert (metrics["response/generated_to_1"], metrics["response/generated_to_8"]) == (6.0, 2.0)
    assert (metrics["reward/mean"], metrics["rollout/skipped"], metrics["rollout/deferred"]) == (
        1.0,
        3.0,
        1.0,
    )
    assert (metrics["rollout/draft_tokens"], metrics["rollout/accepted_fraction"]) == (8.0, 0.25)
    assert metrics["rollout/preemptions"] == 3.0
    # Four of six samples have a score; only these count as kept.
    assert (metrics["rollout/skipped_fraction"], metrics["rollout/kept_fraction"]) == (
        3 / 12,
        4 / 6,
    )
    for changed, allowed in (
        (
            {"max_skipped_prompts": 2},
            r"max_skipped_prompts=2, .*: 3 prompts of this step \(12 prompts .* at most 2 may be skipped",
        ),
        (
            {"max_skipped_fraction": 0.2},
            r"max_skipped_fraction=0\.2: 3 prompts .* at most 2 may be skipped",
        ),
        (
            {"prompts_per_step": 8},
            (
                r"max_skipped_fraction=0\.25: 3 prompts of this step \(8 prompts .* at most 2 may"
                r" be skipped"
            ),
        ),
    ):
        with pytest.raises(AlignerError, match=allowed):
            compute_rollout_metrics(scored, dataclasses.replace(settings, **changed))


def test_reward_distribution_equals_loop_over_scores():
    generator = torch.Generator().manual_seed(5)
    for prompts, each in ((1, 1), (3, 4), (5, 2), (16, 8)):
        scores = torch.randint(-2, 3, (prompts * each,), generator=generator) / 4
        numbers = sorted(scores.tolist())

        def quantile(share: float, numbers: list[float] = numbers) -> float:
            place = share * (len(numbers) - 1)
            below = math.floor(place)
            return numbers[below] + (place - below) * (numbers[math.ceil(place)] - numbers[below])

        mean = math.fsum(numbers) / len(numbers)
        expected = {
            "reward/mean": mean,
            "reward/std": math.sqrt(
                math.fsum((number - mean) ** 2 for number in numbers) / len(numbers)
            ),
            "reward/min": numbers[0],
            "reward/p10": quantile(0.1),
            "reward/p50": quantile(0.5),
            "reward/p90": quantile(0.9),
            "reward/max": numbers[-1],
        }
        if each > 1:
            groups = [
                scores.tolist()[first : first + each] for first in range(0, len(numbers), each)
            ]
            expected["reward/zero_std_fraction"] = (
                sum(len(set(group)) == 1 for group in groups) / prompts
            )
        assert compute_score_metrics(scores, each) == pytest.approx(expected, abs=1e-7)


def test_each_reward_source_reports_its_mean():
    done: Future = Future()
    nan = math.nan
    done.set_result(
        torch.tensor([[1.5, 1.0, 0.5], [2.0, 3.0, -1.0], [nan, nan, nan], [nan, nan, nan]])
    )
    sample = Sample(
        0, 0, torch.tensor([5, 6]), 1, torch.zeros(1), torch.zeros(1, dtype=torch.int64), "stop"
    )
    samples, prompts = [sample] * 4, [Prompt(row // 2, "", torch.tensor([5])) for row in range(4)]
    rollout = RolloutBatch(
        prompts, samples, collate(samples, 0), PendingRows((done,)), PendingRows(())
    ).drop_unscored()
    settings = RolloutConfig(samples_per_prompt=2, prompts_per_step=4)
    metrics = compute_rollout_metrics(rollout, settings, ("judge", "length"))
    assert (
        metrics["reward/mean"],
        metrics["reward/mean/judge"],
        metrics["reward/mean/length"],
    ) == (1.75, 2.0, -0.25)
    assert metrics["reward/zero_std_fraction"] == 0


def test_branches_follow_samples_of_scored_prompts():
    def future(value):
        done: Future = Future()
        done.set_result(value)
        return done

    branch = Sample(
        1, 0, torch.tensor([5, 6, 7]), 2, torch.zeros(1), torch.zeros(1, dtype=torch.int64), "stop"
    )
    plain = [replace(branch, prompt_id=row // 2, sample_index=row % 2) for row in range(6)]
    samples = [
        replace(plain[0], branches=(branch,)),
        *plain[1:3],
        replace(plain[3], branches=(branch, branch)),
        *plain[4:],
    ]
    prompts = [Prompt(row // 2, "", torch.tensor([5])) for row in range(6)]
    scores = PendingRows((future(torch.tensor([math.nan, math.nan, 1.0, 2.0, 3.0, 4.0])),))
    values = PendingRows((future(torch.arange(9.0)[:, None].repeat(1, 3)),), torch.arange(9))
    whole = RolloutBatch(prompts, samples, collate_episodes(samples, 0), scores, values)
    scored = whole.drop_unscored()
    assert scored.batch.episode_indices.tolist() == [
        0,
        1,
        2,
        3,
        1,
        1,
    ] and scored.batch.groups.tolist() == [
        1,
        1,
        2,
        2,
        1,
        1,
    ]
    assert scored.values.result(width=3)[:, 0].tolist() == [2.0, 3.0, 4.0, 5.0, 7.0, 8.0]
    assert (
        compute_rollout_metrics(scored, RolloutConfig(samples_per_prompt=2, prompts_per_step=4))[
            "episode/branches"
        ]
        == 0.5
    )
    alone = scored.drop_branches()
    assert len(alone.batch.tokens) == 4 and alone.values.result(width=3)[:, 0].tolist() == [
        2.0,
        3.0,
        4.0,
        5.0,
    ]


def test_skipped_prompts_are_limited_by_fraction_and_count():
    def allowed(prompts: int, fraction: float, most: int = 8) -> int:
        settings = RolloutConfig(
            prompts_per_step=prompts, max_skipped_fraction=fraction, max_skipped_prompts=most
        )
        return settings.skippable_prompts

    assert [allowed(prompts, 0.25) for prompts in (1, 3, 4, 8, 16, 1024)] == [0, 0, 1, 2, 4, 8]
    assert [allowed(100, fraction, 100) for fraction in (0.0, 0.07, 0.29, 0.58, 1.0)] == [
        0,
        7,
        29,
        58,
        100,
    ]
    assert allowed(8, 1.0) == 8 and allowed(8, 1.0, 0) == 0


def test_update_metrics_are_means_maxima_or_totals():
    done = {"loss": 1.0, "ratio_max": 1.5, "skipped": 0.0, "skipped_total": 3.0}
    skipped = {"ratio_max": 1.25, "skipped": 1.0, "skipped_total": 4.0}
    expected = {"loss": 1.0, "ratio_max": 1.5, "skipped": 0.5, "skipped_total": 4.0}
    for updates in ([done, skipped], [skipped, done]):
        assert combine_update_metrics("policy", updates) == {
            f"policy/{name}": value for name, value in expected.items()
        }


def test_announcement_reports_epochs_and_ratio_warning():
    def announce(*overrides: str) -> str:
        return describe_run(compose_config(["experiment=tiny_ppo", *overrides]), prompt_count=90)

    assert (
        announce()
        == "online: 90 prompts; 16 prompts per step, 5.6 steps per epoch; run.steps=40 is 7.11"
        " epochs"
    )
    assert announce("algorithm.epochs=4") == announce() == announce("algorithm=copg")
    for name, loss in (("copg", "copg"), ("best_of_n", "cross_entropy"), ("online_dpo", "dpo")):
        assert f"; algorithm.epochs=4: loss={loss} has no importance ratio" in announce(
            f"algorithm={name}", "algorithm.epochs=4"
        )


def test_prompt_metrics_report_epochs_and_pass_rates():
    """Two of four prompts were sampled before, one of them twice; a new one has no score."""
    before = PassRates.empty(4).with_outcomes(
        [PromptOutcome(0, 1, 0, 2, 2.0), PromptOutcome(1, 0, 0, 2, 0.0)], decay=1.0
    )
    before = before.with_outcomes([PromptOutcome(4, 1, 1, 2, 1.0)], decay=1.0)
    draws = [
        PromptOutcome(5, 0, 1, 2, 0.0),
        PromptOutcome(6, 3, 1, 0, 0.0),
        PromptOutcome(7, 1, 1, 2, 1.0),
    ]
    metrics = compute_prompt_metrics(draws, before, before.with_outcomes(draws, decay=1.0))
    assert metrics == {
        "data/epoch": 2.0,
        "data/repetitions": 1.0,
        "data/sampled_fraction": 6 / 8,
        "data/pass_rate": (4 / 6 + 0) / 2,
        "data/always_passed": 0.0,
        "data/never_passed": 0.5,
    }
    unscored = [PromptOutcome(0, 2, 0, 0, 0.0)]
    assert compute_prompt_metrics(
        unscored, PassRates.empty(4), PassRates.empty(4).with_outcomes(unscored, 1.0)
    ) == {
        "data/epoch": 0.25,
        "data/repetitions": 0.0,
        "data/sampled_fraction": 1.0,
    }
