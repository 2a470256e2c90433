"""Test importance weights of the behavior policy against hand-computed values and loops."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, tensor

from aligner.algorithms.policy_losses import LOSSES, LossContext, clipped_surrogate, policy_loss
from aligner.data.types import Experience
from aligner.engines.engine_protocol import SamplingOptions
from aligner.models.hugging_face import read_config
from aligner.schema import AlgorithmConfig, ParallelConfig, RolloutConfig
from aligner.training.engine_setup import build_sampling_options
from tests.algorithms import jobs
from tests.megatron import families
from tests.rounds import typical

BEHAVIOR = tensor([[0.25, 0.5, 0.05]]).log()
PROXIMAL = tensor([[0.5, 0.4, 0.2]]).log()
NEW = tensor([[0.55, 0.5, 0.1]]).log()
ADVANTAGES = tensor([[1.0, 2.0, -1.0]])
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
ALL = torch.ones(1, 3, dtype=torch.bool)
TERMS = (-1.1, -2.4, 0.8)
"""-min(r·A, clip(r)·A) of the ratios 1.1, 1.25 and 0.5, clipped to [0.8, 1.2]."""


@pytest.mark.parametrize(
    ("cap", "level", "above", "weights", "truncated"),
    [
        (None, "token", "truncate", (2.0, 0.8, 4.0), 0.0),
        (3.0, "token", "truncate", (2.0, 0.8, 3.0), 1 / 3),
        (3.0, "token", "drop", (2.0, 0.8, 0.0), 1 / 3),
        (None, "sequence", "truncate", (6.4, 6.4, 6.4), 0.0),
        (3.0, "sequence", "truncate", (3.0, 3.0, 3.0), 1.0),
        (3.0, "sequence", "drop", (0.0, 0.0, 0.0), 1.0),
        (10.0, "sequence", "drop", (6.4, 6.4, 6.4), 0.0),
    ],
)
def test_loss_terms_have_capped_importance_weights(cap, level, above, weights, truncated):
    new = NEW.clone().requires_grad_()
    loss, stats = policy_loss(
        new,
        BEHAVIOR,
        ADVANTAGES,
        ALL,
        proximal_logprobs=PROXIMAL,
        behavior_weight_cap=cap,
        behavior_level=level,
        above_behavior_cap=above,
    )
    assert loss.item() == pytest.approx(
        sum(w * term for w, term in zip(weights, TERMS, strict=True)) / 3
    )
    assert float(stats["importance_mean"]) == pytest.approx(sum(weights) / 3)
    assert float(stats["importance_truncated"]) == pytest.approx(truncated)
    # Only an unclipped r = exp(new - proximal) has a gradient: d(-w·r·A)/d(new) = -w·r·A.
    (gradient,) = torch.autograd.grad(loss, new)
    torch.testing.assert_close(gradient, tensor([[-weights[0] * 1.1 / 3, 0.0, 0.0]]))
    assert float(stats["clip_fraction"]) == pytest.approx(2 / 3)
    assert float(stats["ratio_max"]) == pytest.approx(1.25)


def random_inputs(rows: int = 6, width: int = 9) -> tuple[Tensor, ...]:
    """Return random new, behavior and proximal log-probs, advantages and a mask, [rows, width]."""
    generator = torch.Generator().manual_seed(0)
    proximal = -torch.rand(rows, width, generator=generator, dtype=torch.float64) * 3
    new, behavior = (
        proximal + 0.4 * torch.randn(rows, width, generator=generator) for _ in range(2)
    )
    advantages = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    return new, behavior, proximal, advantages, torch.rand(rows, width, generator=generator) > 0.4


def loss_in_loops(new, behavior, proximal, advantages, mask, cap, level) -> float:
    """Compute the loss from probabilities, in loops."""
    total, count = 0.0, 0
    for n, b, p, a, m in zip(
        *(part.tolist() for part in (new, behavior, proximal, advantages, mask)), strict=True
    ):
        tokens = [t for t, inside in enumerate(m) if inside]
        whole = math.prod(math.exp(p[t]) / math.exp(b[t]) for t in tokens)
        for t in tokens:
            ratio = math.exp(n[t]) / math.exp(p[t])
            weight = whole if level == "sequence" else math.exp(p[t]) / math.exp(b[t])
            total -= min(weight, cap) * min(ratio * a[t], min(max(ratio, 0.8), 1.2) * a[t])
        count += len(tokens)
    return total / count


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_corrected_loss_and_its_parts_equal_formula(level):
    new, behavior, proximal, advantages, mask = random_inputs()
    new.requires_grad_()

    def loss(rows: slice, denominator: float | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        return policy_loss(
            *(part[rows] for part in (new, behavior, advantages, mask)),
            proximal_logprobs=proximal[rows],
            behavior_weight_cap=1.5,
            behavior_level=level,
            above_behavior_cap="truncate",
            denominator=denominator,
        )

    whole, stats = loss(slice(None))
    assert whole.item() == pytest.approx(
        loss_in_loops(new, behavior, proximal, advantages, mask, 1.5, level), rel=1e-6
    )
    assert 0 < stats["importance_truncated"] < 1
    parts = [loss(slice(start, start + 2), float(mask.sum())) for start in (0, 2, 4)]
    torch.testing.assert_close(sum(part for part, _ in parts), whole)
    for name in ("importance_mean", "importance_truncated"):
        torch.testing.assert_close(sum(part[name] for _, part in parts), stats[name])
    gradients = [
        torch.autograd.grad(value, new, retain_graph=True)[0]
        for value in (sum(part for part, _ in parts), whole)
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_equal_logprobs_make_correction_exactly_neutral(level):
    new, _, old, advantages, mask = random_inputs()
    plain, _ = policy_loss(new, old, advantages, mask)
    corrected, stats = policy_loss(
        new,
        old,
        advantages,
        mask,
        proximal_logprobs=old,
        behavior_weight_cap=2.0,
        behavior_level=level,
    )
    assert torch.equal(corrected, plain)
    assert stats["importance_mean"] == 1 and stats["importance_truncated"] == 0


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_ignore_masked_out_tokens(level):
    outside = tensor([[math.nan, math.inf, 7.0]])
    mask = torch.cat((ALL, ~ALL), 1)
    settings = {"behavior_weight_cap": 3.0, "behavior_level": level}
    new = torch.cat((NEW, outside), 1).requires_grad_()
    loss, stats = policy_loss(
        new,
        torch.cat((BEHAVIOR, -outside), 1),
        torch.cat((ADVANTAGES, outside), 1),
        mask,
        proximal_logprobs=torch.cat((PROXIMAL, outside), 1),
        **settings,
    )
    alone, alone_stats = policy_loss(
        NEW, BEHAVIOR, ADVANTAGES, ALL, proximal_logprobs=PROXIMAL, **settings
    )
    torch.testing.assert_close(loss, alone)
    torch.testing.assert_close(stats, alone_stats)
    (gradient,) = torch.autograd.grad(loss, new)
    assert torch.isfinite(gradient).all() and not gradient[:, 3:].any()


def test_weights_above_cap_are_dropped_by_default():
    settings = {"proximal_logprobs": PROXIMAL, "behavior_weight_cap": 3.0}
    loss, _ = policy_loss(NEW, BEHAVIOR, ADVANTAGES, ALL, **settings)
    assert loss.item() == pytest.approx((-2.2 - 1.92) / 3)


def test_cap_without_proximal_logprobs_is_refused():
    with pytest.raises(ValueError, match=r"behavior_weight_cap=2\.0: requires proximal_logprobs"):
        policy_loss(NEW, BEHAVIOR, ADVANTAGES, ALL, behavior_weight_cap=2.0)


UNUSED = torch.zeros(1, 3)
EXPERIENCE = Experience(
    tokens=torch.zeros(1, 4, dtype=torch.int64),
    lengths=tensor([4]),
    mask=ALL,
    prompt_lengths=tensor([1]),
    engine_logprobs=BEHAVIOR,
    weight_versions=UNUSED.long(),
    finish_reasons=tensor([0]),
    groups=tensor([0]),
    scores=tensor([0.0]),
    rewards=UNUSED,
    values=UNUSED,
    old_logprobs=PROXIMAL,
    reference_logprobs=UNUSED,
    advantages=ADVANTAGES,
    returns=UNUSED,
)


def objective(**keys: Any) -> tuple[Tensor, dict[str, Tensor]]:
    context = LossContext(
        AlgorithmConfig(**keys), kl_coefficient=0.0, denominator=3.0, weights=None
    )
    return clipped_surrogate(NEW, EXPERIENCE, context)


def test_engine_is_behavior_and_trainer_is_proximal_policy():
    plain, stats = objective()
    assert float(plain) == pytest.approx(sum(TERMS) / 3)
    assert "importance_mean" not in stats
    loss, _ = objective(truncated_importance="token", truncated_importance_cap=3.0)
    assert float(loss) == pytest.approx((-2.2 - 1.92 + 2.4) / 3)
    loss, _ = objective(truncated_importance="sequence", truncated_importance_cap=3.0)
    assert float(loss) == pytest.approx(sum(TERMS))


@pytest.mark.parametrize("level", typical(["token", "sequence"], ["sequence"]))
def test_importance_weights_do_not_depend_on_layout(pool, tmp_path_factory, level):
    directory = families.save("llama3", tmp_path_factory.mktemp("llama3"))
    experience = jobs.stale_experience(72)
    for layout in ({}, {"context": 2, "data": 2}, {"tensor": 2, "pipeline": 2}):
        for logprobs, stats in pool.run(
            jobs.corrected_update, ParallelConfig(**layout).ranks, str(directory), layout, level
        ):
            tokens = float(experience.mask.sum())
            _, expected = jobs.corrected_loss(
                logprobs, torch.zeros_like(logprobs), experience, tokens, level=level
            )
            assert 0 < expected["importance_truncated"] < 1
            for name, value in expected.items():
                assert stats[name] == pytest.approx(value.item(), rel=1e-4), name


def test_keys_reach_loss_and_sampling_options():
    loss, _ = objective(
        truncated_importance="sequence", truncated_importance_cap=4.0, clip_high=0.3
    )
    assert float(loss) == pytest.approx(4 * (-1.1 - 2.5 + 0.8) / 3)
    loss, _ = objective(
        truncated_importance="token", truncated_importance_cap=3.0, above_importance_cap="drop"
    )
    assert float(loss) == pytest.approx((-2.2 - 1.92) / 3)
    sampling = {"top_k": 7, "top_p": 0.9, "min_p": 0.1, "temperature": 0.5}
    settings = RolloutConfig(**sampling, min_response_tokens=3, max_response_tokens=12)
    shape = read_config({**LLAMA, "eos_token_id": [1, 3]}, "test")
    expected = SamplingOptions(
        12, min_new_tokens=3, **sampling, stop_token_ids=(1, 3), renormalize=True
    )
    assert build_sampling_options(settings, shape) == expected
    assert not build_sampling_options(
        dataclasses.replace(settings, renormalize=False), shape
    ).renormalize
    assert (
        build_sampling_options(
            dataclasses.replace(settings, stop_at_eos=False), shape
        ).stop_token_ids
        == ()
    )


def random_experience() -> tuple[Tensor, Experience]:
    """Return new log-probs and an experience in float64.

    Engine log-probs, trainer log-probs and advantages are independent of each other.
    """
    new, behavior, proximal, advantages, mask = random_inputs()
    rows, width = new.shape
    unused, of_rows = torch.zeros(rows, width), torch.zeros(rows, dtype=torch.int64)
    experience = dataclasses.replace(
        EXPERIENCE,
        tokens=torch.zeros(rows, width + 1, dtype=torch.int64),
        lengths=of_rows,
        mask=mask,
        prompt_lengths=of_rows,
        engine_logprobs=torch.where(mask, behavior, math.nan),
        weight_versions=unused.long(),
        finish_reasons=of_rows,
        groups=of_rows,
        scores=of_rows.float(),
        rewards=unused,
        values=None,
        old_logprobs=torch.where(mask, proximal, math.inf),
        reference_logprobs=unused,
        advantages=torch.where(mask, advantages, math.nan),
        returns=None,
    )
    return torch.where(mask, new, 0.0).requires_grad_(), experience


def evaluate_loss(
    loss: str, parts: tuple[slice, ...] = (slice(None),), **keys: Any
) -> tuple[float, Tensor, dict[str, Tensor]]:
    """Return the value, gradient and statistics of a loss, summed over parts of the random rows."""
    new, experience = random_experience()
    settings, count, total, stats = (
        AlgorithmConfig(loss=loss, **keys),
        float(experience.mask.sum()),
        0.0,
        {},
    )
    for part in parts:
        rows = experience.select(torch.arange(len(new))[part])
        value, of_part = LOSSES[loss](
            new[part], rows, LossContext(settings, 0.0, count, weights=None)
        )
        total = total + value
        stats = {name: stats.get(name, 0.0) + number for name, number in of_part.items()}
    assert isinstance(total, Tensor)
    return total.item(), torch.autograd.grad(total, new)[0], stats


def by_token() -> list[tuple[int, int, float, float, float, float, list[int]]]:
    """Return a tuple for each masked token of the random experience.

    It contains the row, the position, the probability of the new policy, of the engine and of the
    old policy, the advantage, and all masked positions of the row.
    """
    new, rows = random_experience()
    places = [[t for t, inside in enumerate(row) if inside] for row in rows.mask.tolist()]
    inputs = [
        tensor.tolist()
        for tensor in (
            new.exp(),
            rows.engine_logprobs.exp(),
            rows.old_logprobs.exp(),
            rows.advantages,
        )
    ]
    return [
        (row, t, *(each[row][t] for each in inputs), places[row])
        for row in range(len(new))
        for t in places[row]
    ]


def weight_of(row: int, t: int, level: str, cap: float, above: str) -> float:
    """Return the trainer-engine ratio of a token or of its whole response, limited by the cap."""
    ratios = {place: before / engine for r, place, _, engine, before, *_ in by_token() if r == row}
    weight = math.prod(ratios.values()) if level == "sequence" else ratios[t]
    return weight if weight <= cap else cap if above == "truncate" else 0.0


@pytest.mark.parametrize(
    ("level", "above"), [("token", "truncate"), ("token", "drop"), ("sequence", "truncate")]
)
@pytest.mark.parametrize("loss", ["cispo", "reinforce", "cross_entropy"])
def test_token_losses_are_weighted_by_importance(loss, level, above):
    keys = {
        "truncated_importance": level,
        "truncated_importance_cap": 1.3,
        "above_importance_cap": above,
    }
    gradient, weights, value = torch.zeros(6, 9, dtype=torch.float64), [], 0.0
    tokens = by_token()
    for row, t, now, _, before, advantage, _ in tokens:
        factor = {
            "reinforce": advantage,
            "cross_entropy": 1.0,
            "cispo": min(max(now / before, 0.8), 1.2) * advantage,
        }[loss]
        weights.append(weight_of(row, t, level, 1.3, above))
        gradient[row, t] = -weights[-1] * factor / len(tokens)
        value -= weights[-1] * factor * math.log(now) / len(tokens)
    total, slope, stats = evaluate_loss(loss, **keys)
    assert total == pytest.approx(value, rel=1e-6)
    torch.testing.assert_close(slope, gradient, rtol=1e-6, atol=1e-12)
    assert float(stats["importance_mean"]) == pytest.approx(sum(weights) / len(tokens))
    of_parts = evaluate_loss(loss, (slice(0, 2), slice(2, 3), slice(3, 6)), **keys)
    torch.testing.assert_close(of_parts[1], slope)
    for name in ("importance_mean", "importance_truncated"):
        torch.testing.assert_close(of_parts[2][name], stats[name])
    assert 0 < stats["importance_truncated"] < 1
    assert "importance_mean" not in evaluate_loss(loss)[2]


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_product"])
def test_sampler_ratio_uses_engine_logprobs(level):
    tokens, value, clipped = by_token(), 0.0, 0
    for row, _, now, engine, _, advantage, places in tokens:
        own = [n / e for r, _, n, e, *_ in tokens if r == row]
        product = math.prod(own)
        ratio = {
            "token": now / engine,
            "sequence": product ** (1 / len(places)),
            "sequence_product": product,
        }[level]
        terms = ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage
        value, clipped = value - min(terms) / len(tokens), clipped + (terms[1] < terms[0])
    total, _, stats = evaluate_loss("clip", ratio_level=level, ratio_against="sampler")
    assert total == pytest.approx(value, rel=1e-6)
    assert float(stats["clip_fraction"]) == pytest.approx(clipped / len(tokens))
    assert total != pytest.approx(evaluate_loss("clip", ratio_level=level)[0], rel=1e-3)


@pytest.mark.parametrize("above", ["truncate", "drop"])
def test_copg_weights_responses_by_importance(above):
    new, rows = random_experience()
    rows = dataclasses.replace(
        rows, rewards=torch.where(rows.mask, torch.arange(6.0)[:, None].sin().double(), 0.0)
    )
    keys = {
        "truncated_importance": "sequence",
        "truncated_importance_cap": 1.3,
        "above_importance_cap": above,
    }
    weights = torch.tensor(
        [weight_of(row, 0, "sequence", 1.3, above) for row in range(6)], dtype=torch.float64
    )

    def gradient(**chosen: Any) -> tuple[Tensor, dict[str, Tensor]]:
        settings = AlgorithmConfig(loss="copg", **chosen)
        loss, stats = LOSSES["copg"](new, rows, LossContext(settings, 0.05, 6.0, weights=None))
        return torch.autograd.grad(loss, new)[0], stats

    (plain, _), (weighed, stats) = gradient(), gradient(**keys)
    assert plain.abs().max() > 0 and weights.unique().numel() > 2
    torch.testing.assert_close(weighed, weights[:, None] * plain, rtol=1e-6, atol=1e-12)
    assert float(stats["importance_mean"]) == pytest.approx(float(weights.mean()))


def test_cispo_sampler_ratio_is_clipped_importance():
    tokens = by_token()
    value = sum(
        min(max(n / e, 0.8), 1.2) * a * math.log(n) for _, _, n, e, _, a, _ in tokens
    ) / len(tokens)
    assert evaluate_loss("cispo", ratio_against="sampler")[0] == pytest.approx(-value, rel=1e-6)


@pytest.mark.parametrize("loss", ["clip", "cispo", "reinforce", "cross_entropy"])
def test_corrections_without_mismatch_change_no_loss(loss):
    new, rows = random_experience()
    rows = dataclasses.replace(rows, engine_logprobs=rows.old_logprobs)

    def total(**keys: Any) -> Tensor:
        return LOSSES[loss](
            new, rows, LossContext(AlgorithmConfig(**keys), 0.0, 30.0, weights=None)
        )[0]

    for keys in (
        {"truncated_importance": "token"},
        {"truncated_importance": "sequence"},
        {"ratio_against": "sampler"},
    ):
        assert torch.equal(total(**keys), total())
