"""Distillation's advantages against loops in float64, and what an algorithm makes of them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from aligner.algorithms.distillation import distillation_advantages, reverse_kl
from aligner.algorithms.online_algorithm import OnlineAlgorithm, build_online_algorithm
from aligner.config.compose import compose_config
from aligner.data.types import FINISH_REASONS, Experience, SampleBatch, ScoredSamples, response_mask
from aligner.schema import Config, TeacherConfig
from aligner.schema.derived import asks_before_update
from aligner.schema.keys import with_values

ROWS, PROMPT, WIDTH = 6, 2, 9


def draw(seed: int = 0):
    """Log-probs of policy and teacher, float64 [rows, width], not a number outside the mask, which leaves a row empty."""
    generator = torch.Generator().manual_seed(seed)
    policy, teacher = (-torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64) * 5 for _ in range(2))
    mask = torch.rand(ROWS, WIDTH, generator=generator) > 0.4
    mask[0] = False
    return torch.where(mask, policy, math.nan), torch.where(mask, teacher, math.nan), mask


@pytest.mark.parametrize("weight", [1.0, 0.25, 3.0])
def test_each_token_has_its_own_reverse_kl_and_no_later_ones(weight):
    policy, teacher, mask = draw()
    found = distillation_advantages(policy, teacher, mask, weight)
    for row in range(ROWS):
        for place in range(WIDTH):
            inside = bool(mask[row, place])
            expected = weight * (float(teacher[row, place]) - float(policy[row, place])) if inside else 0.0
            assert float(found[row, place]) == pytest.approx(expected, abs=1e-15)
    assert torch.equal(found, -weight * reverse_kl(policy, teacher, mask))


def test_their_policy_gradient_is_that_of_the_reverse_kl_at_a_prefix():
    """In the mean over all tokens that may come next, each as often as the policy draws it."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(0)
    teacher = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    kl = (policy.exp() * (policy - teacher)).sum()
    (expected,) = torch.autograd.grad(kl, logits, retain_graph=True)
    every = torch.ones(1, 7, dtype=torch.bool)
    advantages = distillation_advantages(policy.detach()[None], teacher[None], every, 1.0)[0]
    loss = -(policy.detach().exp() * advantages * policy).sum()
    (found,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(found, expected)


ALONE = "algorithm=on_policy_distillation"


def experience(*overrides: str, teacher: bool = True) -> tuple[Config, Experience, torch.Tensor]:
    """Of random samples, the configuration, and the teacher's log-probs."""
    given = ("teacher.path=somewhere",) if teacher else ()
    config = compose_config(["experiment=tiny_ppo", "rollout.samples_per_prompt=2", *given, *overrides])
    algorithm = build_online_algorithm(config)
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = PROMPT + torch.randint(1, WIDTH - PROMPT + 1, (ROWS,), generator=generator)
    prompts = torch.full((ROWS,), PROMPT)
    mask = response_mask(lengths, prompts, WIDTH)
    old, engine, reference, its = (-2 + 0.5 * random(ROWS, WIDTH - 1) for _ in range(4))
    batch = SampleBatch(
        torch.randint(9, (ROWS, WIDTH), generator=generator),
        lengths,
        mask,
        prompts,
        engine,
        torch.zeros(mask.shape, dtype=torch.int64),
        finish_reasons=torch.full((ROWS,), FINISH_REASONS.index("stop")),
        groups=torch.arange(ROWS) // 2,
    )
    samples = algorithm.scored_samples(batch, random(ROWS), None, old, reference, 0.0, its if teacher else None)
    return config, algorithm.experience(samples), its


def test_alone_the_advantages_are_the_teachers_whatever_the_scores_are():
    _, found, teacher = experience(ALONE, "teacher.weight=0.5")
    expected = torch.where(found.mask, 0.5 * (teacher - found.old_logprobs), 0.0)
    torch.testing.assert_close(found.advantages, expected)
    assert found.teacher_logprobs is teacher


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce_plus_plus", "dapo"])
def test_beside_a_reward_they_are_added_to_the_estimators_whitened_ones(algorithm):
    _, rewarded, _ = experience(f"algorithm={algorithm}", teacher=False)
    _, both, teacher = experience(f"algorithm={algorithm}", "teacher.weight=0.1")
    expected = rewarded.advantages + torch.where(both.mask, 0.1 * (teacher - both.old_logprobs), 0.0)
    torch.testing.assert_close(both.advantages, expected)
    assert rewarded.teacher_logprobs is None


def test_the_policys_log_probs_are_those_that_the_ratio_is_against():
    _, found, teacher = experience("algorithm=grpo", "algorithm.ratio_against=sampler")
    _, plain, _ = experience("algorithm=grpo", "algorithm.ratio_against=sampler", teacher=False)
    expected = torch.where(found.mask, teacher - found.engine_logprobs, 0.0)
    torch.testing.assert_close(found.advantages - plain.advantages, expected)


def test_a_step_with_a_teacher_knows_the_policys_log_probs_before_its_only_update():
    config = compose_config(["experiment=tiny_ppo", ALONE, "algorithm.minibatches=1"])
    assert not asks_before_update(config)
    assert asks_before_update(dataclasses.replace(config, teacher=TeacherConfig(path="somewhere")))


def test_rows_that_are_selected_keep_their_own():
    _, found, teacher = experience(ALONE)
    rows = torch.tensor([4, 1])
    chosen = found.select(rows)
    assert chosen.teacher_logprobs is not None and torch.equal(chosen.teacher_logprobs, teacher[rows])


def random_samples(algorithm: OnlineAlgorithm, mask: torch.Tensor, old: torch.Tensor, teacher: torch.Tensor) -> ScoredSamples:
    """One token before the first that the mask may hold, scores that say nothing, and the policy its own reference."""
    rows, width = mask.shape
    whole, ones = torch.full((rows,), width + 1), torch.ones(rows, dtype=torch.int64)
    versions = torch.zeros(mask.shape, dtype=torch.int64)
    stop = torch.full((rows,), FINISH_REASONS.index("stop"))
    tokens = torch.zeros(rows, width + 1, dtype=torch.int64)
    batch = SampleBatch(tokens, whole, mask, ones, old, versions, finish_reasons=stop, groups=torch.arange(rows))
    return algorithm.scored_samples(batch, torch.randn(rows, dtype=torch.float64), None, old, old, 0.0, teacher)


def test_a_teachers_loss_and_its_gradient_are_those_of_loops_over_tokens():
    """200 random steps: PPO's clipped surrogate of each token with the teacher's advantage, the mean over all tokens."""
    config = compose_config(["experiment=tiny_ppo", "algorithm=on_policy_distillation", "teacher.path=somewhere"])
    algorithm = build_online_algorithm(with_values(config, {"teacher.weight": 0.7}))
    low, high = config.algorithm.clip_low, config.algorithm.clip_high
    for seed in range(200):
        drawn = draw(seed)
        old, teacher, mask = (values[drawn[2].any(1)] for values in drawn)
        generator = torch.Generator().manual_seed(1000 + seed)
        new = (old + 0.3 * torch.randn(mask.shape, generator=generator, dtype=torch.float64)).requires_grad_()
        taught = algorithm.experience(random_samples(algorithm, mask, old, teacher))
        found, _ = algorithm.loss(taught, 0.0)(new, torch.zeros_like(new), taught, algorithm.denominator(taught))
        terms = []
        for row, place in mask.nonzero().tolist():
            advantage = 0.7 * (float(teacher[row, place]) - float(old[row, place]))
            ratio = torch.exp(new[row, place] - float(old[row, place]))
            terms.append(-torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage))
        expected = sum(terms, new.new_zeros(())) / len(terms)
        gradients = [torch.autograd.grad(loss, new)[0] for loss in (found, expected)]
        for pair in ((found, expected), gradients):
            torch.testing.assert_close(*pair, rtol=1e-12, atol=1e-15)
