"""Test samples without a score in advantages, selections, metrics and evaluations."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from aligner.algorithms.evaluation_scores import evaluation_metrics, group_metrics
from aligner.algorithms.online_algorithm import build_online_algorithm
from aligner.algorithms.score_shaping import ScoreShaping
from aligner.algorithms.selections import all_pairs, best, best_and_worst, rejection_sampled_rows
from aligner.config.compose import compose_config
from aligner.data.pass_rates import collect_outcomes
from aligner.data.types import ABSTAINED, Prompt, Sample, collate
from aligner.schema import Config, RolloutConfig
from aligner.training.preference_sampling import build_preferences
from aligner.training.rollout_builder import RolloutBatch, select_informative
from aligner.training.services import PendingRows
from aligner.training.step_metrics import compute_rollout_metrics

NAN = math.nan
EACH = 4
SCORES = torch.tensor(
    [
        *(1.0, ABSTAINED, 3.0, 0.5),  # three scores
        *(ABSTAINED, 2.0, ABSTAINED, ABSTAINED),  # one score
        *(ABSTAINED,) * 4,
        *(NAN,) * 4,  # scoring failed
        *(2.0, 4.0, 4.0, 1.0),
    ]
)
PROMPTS = len(SCORES) // EACH


def sample(row: int, reason: str = "stop") -> Sample:
    tokens = torch.tensor([5, 6 + row % 3, 7])
    versions = torch.zeros(2, dtype=torch.int64)
    return Sample(row // EACH, row % EACH, tokens, 1, torch.zeros(2), versions, reason)  # type: ignore[arg-type]


def rollout() -> RolloutBatch:
    done: Future[torch.Tensor] = Future()
    done.set_result(SCORES)
    samples = [sample(row) for row in range(len(SCORES))]
    prompts = [Prompt(row // EACH, f"prompt {row // EACH}", torch.tensor([5])) for row in range(20)]
    return RolloutBatch(
        prompts, samples, collate(samples, 0), PendingRows((done,)), PendingRows(())
    )


def compose(name: str, *overrides: str) -> Config:
    settings = (f"algorithm={name}", f"rollout.samples_per_prompt={EACH}")
    return compose_config(["experiment=tiny_ppo", *settings, *overrides])


def advantages(name: str, rows: list[int], *overrides: str) -> torch.Tensor:
    """Return the advantages at the last response token of the given rows."""
    config = compose(name, "algorithm.kl_coefficient=0", *overrides)
    algorithm = build_online_algorithm(config)
    chosen = torch.tensor(rows)
    batch, scores = rollout().batch.select(chosen), SCORES[chosen]
    logprobs = torch.zeros(batch.mask.shape)
    values = torch.zeros(batch.tokens.shape) if config.algorithm.has_critic else None
    samples = algorithm.build_scored_samples(batch, scores, values, logprobs, logprobs, 0.0)
    return algorithm.build_experience(samples).advantages[:, -1]


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo", "gspo", "dapo"])
def test_incomplete_groups_do_not_affect_other_groups(name):
    incomplete, complete = [0, 2, 3], [16, 17, 18, 19]
    plain = ("algorithm.whiten_advantages=false",)
    combined = advantages(name, incomplete + complete, *plain)
    alone = torch.cat([advantages(name, rows, *plain) for rows in (incomplete, complete)])
    assert torch.equal(combined, alone) and combined.isfinite().all()


def test_whitening_over_a_prompt_uses_its_scored_samples():
    overrides = ("algorithm.whiten_advantages=true", "algorithm.whiten_over=prompt")
    found = advantages("reinforce", [0, 2, 3, 16, 17, 18, 19], *overrides)
    alone = advantages("reinforce", [0, 2, 3], *overrides)
    assert torch.allclose(found[:3], alone)


@pytest.mark.promise("reward-function-abstains")
@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("grpo", (), 2),
        ("rloo", (), 2),
        ("reinforce", ("algorithm.whiten_over=prompt", "algorithm.whiten_advantages=true"), 2),
        ("copg", (), EACH),
        ("ppo", (), 1),
        ("reinforce", (), 1),
        ("best_of_n", (), 1),
        ("online_dpo", (), 1),
    ],
)
def test_group_algorithms_need_two_scores_of_a_prompt(name, overrides, expected):
    assert build_online_algorithm(compose(name, *overrides)).min_scores_per_prompt == expected


def test_rows_of_groups_with_too_few_scores_are_left_out():
    assert rollout().find_scored_rows().tolist() == [0, 2, 3, 5, 16, 17, 18, 19]
    assert rollout().find_scored_rows(2).tolist() == [0, 2, 3, 16, 17, 18, 19]
    assert rollout().find_scored_rows(EACH).tolist() == [16, 17, 18, 19]


def test_selections_skip_samples_without_a_score():
    assert best_and_worst(SCORES, EACH).tolist() == [2, 3, 17, 19]
    assert best(SCORES, EACH).tolist() == [2, 17]
    assert select_informative(SCORES, EACH).tolist() == [0, 1, 2, 3, 16, 17, 18, 19]
    pairs = all_pairs(SCORES, EACH).view(-1, 2).tolist()
    assert [pair for pair in pairs if pair[0] < EACH] == [[2, 0], [2, 3], [0, 3]]
    assert all(pair[0] < EACH or pair[0] >= 16 for pair in pairs)
    assert rejection_sampled_rows(SCORES, EACH, "all", None).tolist() == [
        0,
        2,
        3,
        5,
        16,
        17,
        18,
        19,
    ]
    assert rejection_sampled_rows(SCORES, EACH, "all", 2.0).tolist() == [2, 5, 16, 17, 18]
    assert rejection_sampled_rows(SCORES, EACH, "best", None).tolist() == [2, 5, 17]


def test_shaping_gives_no_score_to_an_abstention():
    shaping = ScoreShaping(-1.0, 8, 4, 0.5, 0)
    scores = torch.tensor([ABSTAINED, NAN, 1.0])
    shaped = shaping(scores, [sample(0, "length")] * 3)
    assert shaped[0] == ABSTAINED and shaped[1].isnan() and shaped[2].isfinite()
    assert shaping.penalize_missing_ends(scores, [sample(0, "length")] * 3)[0] == ABSTAINED


def test_pass_rates_do_not_count_abstentions():
    ids = [row // EACH for row in range(len(SCORES))]
    for threshold, passed in ((1.0, 2.0), (None, 2.5)):
        found = collect_outcomes(ids, SCORES, lambda id: (id, 0), threshold)
        assert [draw.sample_count for draw in found] == [3, 1, 0, 0, 4]
        assert found[0].pass_count == passed


def test_metrics_count_abstentions_apart_from_skipped_prompts():
    settings = RolloutConfig(samples_per_prompt=EACH, prompts_per_step=PROMPTS)
    metrics = compute_rollout_metrics(rollout().drop_unscored(), settings, min_scores=2)
    assert (metrics["reward/abstained"], metrics["reward/abstained_prompts"]) == (8.0, 2.0)
    assert metrics["rollout/skipped"] == 1.0
    assert metrics["reward/mean"] == pytest.approx((1 + 3 + 0.5 + 2 + 2 + 4 + 4 + 1) / 8)
    assert metrics["reward/zero_std_fraction"] == 0.0
    assert metrics["rollout/kept_fraction"] == 8 / 20


def test_step_without_any_score_has_counts_but_no_mean(caplog):
    done: Future[torch.Tensor] = Future()
    done.set_result(torch.full_like(SCORES, ABSTAINED))
    whole = replace(rollout(), scores=PendingRows((done,)))
    settings = RolloutConfig(samples_per_prompt=EACH, prompts_per_step=PROMPTS)
    metrics = compute_rollout_metrics(whole.drop_unscored(), settings)
    assert metrics["reward/abstained"] == 20.0 and metrics["reward/abstained_prompts"] == 5.0
    assert metrics["rollout/skipped"] == 0.0 and "reward/mean" not in metrics
    assert "abstained on all samples" in caplog.text


def test_preference_pairs_have_two_scores(character_decoder):
    for pairs in ("best_and_worst", "all"):
        records, without = build_preferences(rollout(), SCORES, EACH, character_decoder, pairs)
        assert all(math.isfinite(score) for record in records for score in record["scores"])
        assert {record["prompt"] for record in records} == {"prompt 0", "prompt 4"}
        assert without == 1, "prompt 1 has one score; prompts 2 and 3 have none"


@pytest.fixture
def character_decoder():
    class Decoder:
        def decode_after(self, prompt, tokens):
            return "".join(chr(ord("a") + int(token)) for token in tokens)

    return Decoder()


def test_evaluation_excludes_and_counts_abstentions():
    scores = torch.tensor(
        [[1.0, ABSTAINED, 0.0, 1.0], [ABSTAINED] * 4, [0.0, 1.0, 0.0, 0.0]], dtype=torch.float64
    )
    references = torch.tensor([0.5, 0.5, ABSTAINED], dtype=torch.float64)
    metrics = evaluation_metrics(scores, 1.0, references)
    assert metrics["eval/abstained"] == 5.0
    assert metrics["eval/score"] == pytest.approx((2 / 3 + 1 / 4) / 2)
    assert metrics["eval/pass@1"] == pytest.approx((2 / 3 + 1 / 4) / 2)
    assert metrics["eval/pass@4"] == 1.0, "of the prompt that has four scores"
    assert metrics["eval/win_rate"] == pytest.approx(2 / 3), "of the prompt whose reference has one"
    grouped = group_metrics(scores, 1.0, ["a", "b", "a"])
    assert "eval/score/a" in grouped and "eval/score/b" not in grouped
    assert evaluation_metrics(scores[1:2], 1.0) == {"eval/abstained": 4.0}
