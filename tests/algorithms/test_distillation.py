"""Test advantages and divergences of distillation against float64 loops, TRL and transformers."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from aligner.algorithms.distillation import distillation_advantages, divergence, reverse_kl
from aligner.algorithms.offline_losses import offline_distillation_loss
from aligner.algorithms.online_algorithm import OnlineAlgorithm, build_online_algorithm
from aligner.config.compose import compose_config
from aligner.data.types import (
    FINISH_REASONS,
    Experience,
    SampleBatch,
    ScoredSamples,
    build_response_mask,
)
from aligner.schema import Config, ParallelConfig, TeacherConfig
from aligner.schema.derived import needs_logprobs_before_update
from aligner.schema.keys import with_values
from tests.algorithms import jobs
from tests.megatron.jobs import TEMPERATURE, make_experience
from tests.megatron.reference import save_llama
from tests.trl_source import needs_trl, trl_functions

ROWS, PROMPT, WIDTH = 6, 2, 9


def random_logprobs(seed: int = 0):
    """Return random log-probs of policy and teacher, float64, and a mask, [rows, width] each.

    Log-probs outside the mask are NaN. The first row of the mask is empty.
    """
    generator = torch.Generator().manual_seed(seed)
    policy, teacher = (
        -torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64) * 5 for _ in range(2)
    )
    mask = torch.rand(ROWS, WIDTH, generator=generator) > 0.4
    mask[0] = False
    return torch.where(mask, policy, math.nan), torch.where(mask, teacher, math.nan), mask


@pytest.mark.parametrize("weight", [1.0, 0.25, 3.0])
def test_token_advantage_is_its_negative_reverse_kl(weight):
    policy, teacher, mask = random_logprobs()
    found = distillation_advantages(policy, teacher, mask, weight)
    for row in range(ROWS):
        for place in range(WIDTH):
            inside = bool(mask[row, place])
            expected = (
                weight * (float(teacher[row, place]) - float(policy[row, place])) if inside else 0.0
            )
            assert float(found[row, place]) == pytest.approx(expected, abs=1e-15)
    assert torch.equal(found, -weight * reverse_kl(policy, teacher, mask))


def test_policy_gradient_equals_reverse_kl_gradient():
    """The expectation is over all next tokens, weighted by the policy's probabilities."""
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
    """Return a configuration, the experience of random samples, and the teacher's log-probs."""
    given = ("teacher.path=somewhere",) if teacher else ()
    config = compose_config(
        ["experiment=tiny_ppo", "rollout.samples_per_prompt=2", *given, *overrides]
    )
    algorithm = build_online_algorithm(config)
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = PROMPT + torch.randint(1, WIDTH - PROMPT + 1, (ROWS,), generator=generator)
    prompts = torch.full((ROWS,), PROMPT)
    mask = build_response_mask(lengths, prompts, WIDTH)
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
    samples = algorithm.build_scored_samples(
        batch, random(ROWS), None, old, reference, 0.0, its if teacher else None
    )
    return config, algorithm.build_experience(samples), its


def test_distillation_advantages_ignore_scores():
    _, found, teacher = experience(ALONE, "teacher.weight=0.5")
    expected = torch.where(found.mask, 0.5 * (teacher - found.old_logprobs), 0.0)
    torch.testing.assert_close(found.advantages, expected)
    assert found.teacher_logprobs is teacher


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce_plus_plus", "dapo"])
def test_teacher_and_reward_advantages_are_summed(algorithm):
    _, rewarded, _ = experience(f"algorithm={algorithm}", teacher=False)
    _, both, teacher = experience(f"algorithm={algorithm}", "teacher.weight=0.1")
    expected = rewarded.advantages + torch.where(
        both.mask, 0.1 * (teacher - both.old_logprobs), 0.0
    )
    torch.testing.assert_close(both.advantages, expected)
    assert rewarded.teacher_logprobs is None


def test_sampler_ratio_makes_advantages_use_engine_logprobs():
    _, found, teacher = experience("algorithm=grpo", "algorithm.ratio_against=sampler")
    _, plain, _ = experience("algorithm=grpo", "algorithm.ratio_against=sampler", teacher=False)
    expected = torch.where(found.mask, teacher - found.engine_logprobs, 0.0)
    torch.testing.assert_close(found.advantages - plain.advantages, expected)


def test_teacher_advantages_need_extra_logprob_pass():
    config = compose_config(["experiment=tiny_ppo", ALONE, "algorithm.minibatches=1"])
    assert not needs_logprobs_before_update(config)
    assert needs_logprobs_before_update(
        dataclasses.replace(config, teacher=TeacherConfig(path="somewhere"))
    )
    assert not needs_logprobs_before_update(
        dataclasses.replace(config, teacher=TeacherConfig(path="somewhere", loss="forward_kl"))
    )


def test_selected_rows_keep_their_teacher_logprobs():
    _, found, teacher = experience(ALONE)
    rows = torch.tensor([4, 1])
    chosen = found.select(rows)
    assert chosen.teacher_logprobs is not None and torch.equal(
        chosen.teacher_logprobs, teacher[rows]
    )


def random_samples(
    algorithm: OnlineAlgorithm, mask: torch.Tensor, old: torch.Tensor, teacher: torch.Tensor
) -> ScoredSamples:
    """Return samples with prompts of one token and random scores.

    The policy is its own reference model.
    """
    rows, width = mask.shape
    whole, ones = torch.full((rows,), width + 1), torch.ones(rows, dtype=torch.int64)
    versions = torch.zeros(mask.shape, dtype=torch.int64)
    stop = torch.full((rows,), FINISH_REASONS.index("stop"))
    tokens = torch.zeros(rows, width + 1, dtype=torch.int64)
    batch = SampleBatch(
        tokens, whole, mask, ones, old, versions, finish_reasons=stop, groups=torch.arange(rows)
    )
    return algorithm.build_scored_samples(
        batch, torch.randn(rows, dtype=torch.float64), None, old, old, 0.0, teacher
    )


def test_distillation_loss_equals_token_loop():
    """Compare 200 random steps with the mean of PPO's clipped surrogate over all tokens.

    The advantage of each token is the teacher's.
    """
    config = compose_config(
        ["experiment=tiny_ppo", "algorithm=on_policy_distillation", "teacher.path=somewhere"]
    )
    algorithm = build_online_algorithm(with_values(config, {"teacher.weight": 0.7}))
    low, high = config.algorithm.clip_low, config.algorithm.clip_high
    for seed in range(200):
        inputs = random_logprobs(seed)
        old, teacher, mask = (values[inputs[2].any(1)] for values in inputs)
        generator = torch.Generator().manual_seed(1000 + seed)
        new = (
            old + 0.3 * torch.randn(mask.shape, generator=generator, dtype=torch.float64)
        ).requires_grad_()
        taught = algorithm.build_experience(random_samples(algorithm, mask, old, teacher))
        found, _ = algorithm.build_loss(taught, 0.0)(
            new, torch.zeros_like(new), taught, algorithm.loss_denominator(taught)
        )
        terms = []
        for row, place in mask.nonzero().tolist():
            advantage = 0.7 * (float(teacher[row, place]) - float(old[row, place]))
            ratio = torch.exp(new[row, place] - float(old[row, place]))
            terms.append(
                -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
            )
        expected = sum(terms, new.new_zeros(())) / len(terms)
        gradients = [torch.autograd.grad(loss, new)[0] for loss in (found, expected)]
        for pair in ((found, expected), gradients):
            torch.testing.assert_close(*pair, rtol=1e-12, atol=1e-15)


KINDS = ("forward_kl", "reverse_kl", "jensen_shannon")


def by_loops(kind: str, teacher: list[Tensor], policy: list[Tensor], beta: float) -> Tensor:
    """Return the divergence of two distributions as a sum over outcomes."""
    total = torch.zeros((), dtype=torch.float64)
    for one, other in zip(teacher, policy, strict=True):
        mixture = beta * one + (1 - beta) * other
        total = total + {
            "forward_kl": lambda t, p, m: t * torch.log(t / p),
            "reverse_kl": lambda t, p, m: p * torch.log(p / t),
            "jensen_shannon": (
                lambda t, p, m: beta * t * torch.log(t / m) + (1 - beta) * p * torch.log(p / m)
            ),
        }[kind](one, other, mixture)
    return total


def outcomes(logits: Tensor, ids: Tensor) -> Tensor:
    """Return log-probs of the given tokens and of the sum of all others, [..., k+1].

    Args:
        logits: [..., V].
        ids: Token ids, [..., k].
    """
    every = logits.log_softmax(-1)
    others = torch.ones_like(every, dtype=torch.bool).scatter(-1, ids, False)
    rest = torch.where(others, every, -torch.inf).logsumexp(-1, keepdim=True).clamp(min=-500)
    return torch.cat([every.gather(-1, ids), rest], -1)


@pytest.mark.parametrize("kind", KINDS)
def test_divergence_loss_equals_token_loop(
    kind,
):
    """Compare 200 random steps, in which the divergence is added to the loss of a reward.

    The vocabularies have 2 to 9 tokens; the teacher returns log-probs of 1 to all of them.
    """
    composed = compose_config(
        ["experiment=tiny_ppo", "algorithm=reinforce_plus_plus", "teacher.path=somewhere"]
    )
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        size = int(torch.randint(2, 10, (), generator=generator))
        count = int(torch.randint(1, size + 1, (), generator=generator))
        beta, weight = (0.05 + 0.9 * torch.rand(2, generator=generator)).tolist()
        settings = {"teacher.loss": kind, "teacher.beta": beta, "teacher.weight": weight}
        algorithm = build_online_algorithm(with_values(composed, settings))
        mask = torch.rand(4, 5, generator=generator) > 0.4
        mask[:, 0] = True
        logits, its = (
            3 * torch.randn(4, 5, size, generator=generator, dtype=torch.float64) for _ in range(2)
        )
        logits.requires_grad_()
        ids = its.topk(count).indices
        token_logprobs = torch.where(mask, logits.log_softmax(-1)[..., 0], 0.0)
        taught = algorithm.build_experience(
            random_samples(
                algorithm, mask, token_logprobs.detach(), torch.zeros_like(token_logprobs)
            )
        )
        plain = algorithm.build_loss(taught, 0.0)(
            token_logprobs, torch.zeros_like(token_logprobs), taught, float(mask.sum())
        )[0]
        seen = {
            "candidates": ids,
            "candidate_targets": outcomes(its, ids),
            "candidate_logprobs": outcomes(logits, ids),
        }
        rows = dataclasses.replace(
            taught, **{name: torch.where(mask[..., None], each, 0) for name, each in seen.items()}
        )
        found, stats = algorithm.build_loss(rows, 0.0)(
            token_logprobs, torch.zeros_like(token_logprobs), rows, float(mask.sum())
        )

        terms = []
        teacher, policy = its.softmax(-1), logits.softmax(-1)
        for row, place in mask.nonzero().tolist():
            candidate_ids = ids[row, place].tolist()
            others = [token for token in range(size) if token not in candidate_ids]
            both = [[of[row, place, token] for token in candidate_ids] for of in (teacher, policy)]
            if others:
                both = [
                    [*each, of[row, place, others].sum()]
                    for each, of in zip(both, (teacher, policy), strict=True)
                ]
            terms.append(by_loops(kind, *both, beta))
        mean = torch.stack(terms).mean()
        assert float(stats["teacher_divergence"]) == pytest.approx(float(mean), rel=1e-9)
        offline, offline_stats = offline_distillation_loss(
            token_logprobs, rows, with_values(composed, settings).teacher, float(mask.sum())
        )
        torch.testing.assert_close(offline, found - plain, rtol=1e-9, atol=1e-12)
        assert offline_stats["teacher_divergence"] == stats["teacher_divergence"]
        gradients = [
            torch.autograd.grad(loss, logits, retain_graph=True)[0]
            for loss in (found, plain + weight * mean)
        ]
        torch.testing.assert_close(found, plain + weight * mean, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def test_divergence_loss_keeps_advantages():
    _, plain, _ = experience("algorithm=grpo", teacher=False)
    _, found, _ = experience("algorithm=grpo", "teacher.loss=reverse_kl")
    assert torch.equal(found.advantages, plain.advantages)


def test_scaled_jensen_shannon_approaches_both_kls():
    generator = torch.Generator().manual_seed(4)
    teacher, policy = (
        torch.randn(5, 7, generator=generator, dtype=torch.float64).log_softmax(-1)
        for _ in range(2)
    )
    for kind, beta, share in (("forward_kl", 1e-6, 1e-6), ("reverse_kl", 1 - 1e-6, 1e-6)):
        found = divergence("jensen_shannon", teacher, policy, beta) / share
        torch.testing.assert_close(found, divergence(kind, teacher, policy), rtol=1e-4, atol=1e-9)
    with pytest.raises(
        ValueError, match="unknown divergence 'kl'; allowed: forward_kl, reverse_kl, jensen_shannon"
    ):
        divergence("kl", teacher, policy)


@pytest.mark.promise("divergences-equal-trl")
@needs_trl
@pytest.mark.parametrize(
    ("kind", "beta", "theirs"),
    [("forward_kl", 0.5, 0), ("reverse_kl", 0.5, 1), ("jensen_shannon", 0.3, 0.3)],
)
def test_divergences_and_gradients_equal_trl(kind, beta, theirs):
    """Compare 200 random cases of the top-k tokens and a tail bucket."""
    trl = trl_functions(
        "experimental/server_distillation/server_distillation_trainer.py",
        "_jsd_divergence",
        "_add_tail_bucket",
        torch=torch,
        F=torch.nn.functional,
    )
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        logits, its = (
            2 * torch.randn(6, 12, generator=generator, dtype=torch.float64) for _ in range(2)
        )
        logits.requires_grad_()
        ids = its.topk(int(torch.randint(1, 12, (), generator=generator))).indices
        found = divergence(kind, outcomes(its, ids), outcomes(logits, ids), beta).mean()
        every = torch.ones_like(ids, dtype=torch.bool)
        policy, mask = trl["_add_tail_bucket"](logits.log_softmax(-1).gather(-1, ids), every)
        teacher, _ = trl["_add_tail_bucket"](its.log_softmax(-1).gather(-1, ids), every)
        expected = trl["_jsd_divergence"](policy, teacher, theirs, mask).sum(-1).mean()
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        gradients = [
            torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (found, expected)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_megatron_divergence_equals_transformers(pool, tmp_path):
    from transformers import LlamaForCausalLM

    directories = [
        save_llama(tmp_path / name, tied=True, seed=seed)
        for name, seed in (("policy", 11), ("teacher", 5))
    ]
    composed = compose_config(["experiment=tiny_ppo", ALONE, "teacher.path=somewhere"])
    configs = {
        f"{kind} {count}": with_values(
            composed, {"teacher.loss": kind, "teacher.top_k": count, "teacher.beta": 0.3}
        )
        for kind in KINDS
        for count in (4, 72)
    }
    rows, expected = make_experience(72), {}
    policy, teacher = (
        LlamaForCausalLM.from_pretrained(directory, dtype=torch.float64)
        for directory in directories
    )
    with torch.no_grad():
        its = teacher(rows.tokens).logits[:, :-1] / TEMPERATURE
    for name, config in configs.items():
        policy.zero_grad()
        ids = its.topk(config.teacher.top_k).indices
        logits = policy(rows.tokens).logits[:, :-1] / TEMPERATURE
        apart = divergence(config.teacher.loss, outcomes(its, ids), outcomes(logits, ids), 0.3)
        loss = apart[rows.mask].mean()
        loss.backward()
        norm = (
            torch.stack([parameter.grad.square().sum() for parameter in policy.parameters()])
            .sum()
            .sqrt()
        )
        expected[name] = {
            "teacher_divergence": float(loss.detach()),
            "loss": float(loss.detach()),
            "grad_norm": float(norm),
        }
    given = [str(directory) for directory in directories]
    for layout in (
        {},
        {"data": 2},
        {"tensor": 2, "sequence": True},
        {"tensor": 2},
        {"pipeline": 2},
        {"context": 2},
    ):
        for found in pool.run(
            jobs.taught_updates, ParallelConfig(**layout).ranks, *given, layout, 30, configs
        ):
            for name, numbers in expected.items():
                for key, number in numbers.items():
                    assert found[name][key] == pytest.approx(number, rel=1e-4), (name, layout, key)
