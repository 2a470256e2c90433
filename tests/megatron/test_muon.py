"""Muon equals singular value iterations, torch's Muon and float64 steps, at every layout."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
from safetensors.torch import load_file

from aligner.megatron.muon import assign_owners, orthogonalize
from tests.megatron import families, jobs, optimizer_jobs
from tests.megatron.test_layouts import LAYOUTS, assert_slices_equal, ranks
from tests.megatron.test_optimizer import SETTINGS, adam
from tests.rounds import slow

MUON = {"kind": "muon"}
GUIDED = SETTINGS | MUON | {"momentum": 0.8, "update_rms": 0.3}
STEPS = [1, 2, 3]


def by_singular_values(matrix, steps):
    """Apply the Newton-Schulz polynomial to each singular value, in float64."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    moved = []
    for value in (values / values.norm()).tolist():
        for _ in range(steps):
            value = 3.4445 * value - 4.7750 * value**3 + 2.0315 * value**5
        moved.append(value)
    return left @ torch.diag(torch.tensor(moved, dtype=torch.float64)) @ right


def random_matrix(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize(
    "matrix",
    [
        random_matrix(24, 40),
        random_matrix(40, 24),
        random_matrix(32, 32),
        random_matrix(40, 3) @ random_matrix(3, 24),
    ],
    ids=["wide", "tall", "square", "of rank 3"],
)
def test_newton_schulz_changes_only_singular_values(matrix, steps):
    torch.testing.assert_close(
        orthogonalize(matrix, steps).double(), by_singular_values(matrix, steps), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize(("rows", "columns"), [(24, 40), (96, 64)])
def test_five_newton_schulz_steps_are_nearly_orthogonal(rows, columns):
    matrix = random_matrix(rows, columns)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    assert values.min() > 0.002 * values.norm()
    found = orthogonalize(matrix, 5)
    kept = torch.linalg.svdvals(found)
    assert kept.min() > 0.68 and kept.max() < 1.21
    assert torch.linalg.matrix_norm(found - left @ right, 2) < 0.33
    assert not orthogonalize(torch.zeros(rows, columns), 5).any()


@pytest.mark.parametrize(("rows", "columns"), [(24, 40), (96, 64)])
def test_bf16_newton_schulz_equals_torch_muon(rows, columns):
    weight, gradient = torch.nn.Parameter(torch.zeros(rows, columns)), random_matrix(rows, columns)
    weight.grad = gradient
    torch.optim.Muon(
        [weight],
        lr=1.0,
        weight_decay=0.0,
        momentum=0.0,
        nesterov=False,
        adjust_lr_fn="match_rms_adamw",
    ).step()
    update = orthogonalize(gradient.bfloat16(), 5).float() * 0.2 * math.sqrt(max(rows, columns))
    torch.testing.assert_close(update, -weight.detach(), rtol=1e-2, atol=1e-3)


def test_costly_items_are_assigned_first():
    assert assign_owners([1, 5, 3, 4, 2], 2) == [0, 0, 1, 1, 0]
    assert assign_owners([1, 1], 3) == [0, 1]


def is_matrix(name, weight):
    return ".layers." in name and weight.ndim == 2


def clipped_gradients(weights, settings, step):
    gradients = {
        name: optimizer_jobs.whole_gradient(name, weight.shape, step)
        for name, weight in weights.items()
    }
    norm = math.sqrt(sum(float((gradient.double() ** 2).sum()) for gradient in gradients.values()))
    return {
        name: gradient.double() * min(1.0, settings.clip_grad_norm / (norm + 1e-6))
        for name, gradient in gradients.items()
    }


def muon(weights, settings, steps):
    """Return weights after Muon on the layers' matrices and AdamW on the rest, in float64."""
    found = adam(weights, settings, len(steps))
    matrices = {
        name: weight.double() for name, weight in weights.items() if is_matrix(name, weight)
    }
    momenta = dict.fromkeys(matrices, torch.zeros((), dtype=torch.float64))
    for step in steps:
        gradients = clipped_gradients(weights, settings, step)
        for name, matrix in matrices.items():
            gradient = gradients[name]
            momenta[name] = settings.momentum * momenta[name] + (1 - settings.momentum) * gradient
            ahead = settings.momentum * momenta[name] + (1 - settings.momentum) * gradient
            size = settings.update_rms * math.sqrt(max(matrix.shape))
            change = size * by_singular_values(ahead, settings.newton_schulz_steps)
            decay = settings.learning_rate * settings.weight_decay
            matrices[name] = (1 - decay) * matrix - settings.learning_rate * change
    return found | {name: matrix.float() for name, matrix in matrices.items()}


@pytest.fixture(scope="module")
def guided(pool, untied_llama):
    """A function that returns Muon steps from given gradients at a layout, and expected weights."""
    weights = load_file(untied_llama / "model.safetensors")

    def run(layout, **changes):
        settings = GUIDED | changes
        results = pool.run(
            optimizer_jobs.guided_steps,
            ranks(layout),
            str(untied_llama),
            layout,
            {"optimizer": settings},
            STEPS,
        )
        return results, muon(weights, dataclasses.replace(jobs.OPTIMIZER, **settings), STEPS)

    return run


@pytest.mark.promise("muon-equals-float64-at-every-layout")
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ({}, {"epsilon_placement": "tensorflow"}),
        ({"tensor": 2, "data": 2}, {}),
        ({"tensor": 2, "pipeline": 2}, {"overlap_grad_reduce": True}),
        slow({}, {"newton_schulz_steps": 1}),
        slow({"tensor": 2}, {}),
        slow({"pipeline": 2}, {}),
        slow({"data": 2}, {}),
        slow({"context": 2, "data": 2}, {}),
    ],
)
def test_muon_updates_matrices_and_adam_the_rest(guided, layout, changes):
    results, expected = guided(layout, **changes)
    # Muon must treat the queries, keys and values of each group, gates and ups as separate
    # matrices: orthogonalizing a whole fused parameter gives other weights.
    assert_slices_equal([result["after"] for result in results], expected, rtol=1e-5, atol=2e-6)


def test_muon_steps_equal_torch_within_bf16_error(guided, untied_llama):
    ((result,), _), weights = guided({}), load_file(untied_llama / "model.safetensors")
    settings = dataclasses.replace(jobs.OPTIMIZER, **GUIDED | {"update_rms": 0.2})
    (result,), _ = guided({}, update_rms=0.2)
    matrices = {
        name: torch.nn.Parameter(weight.clone())
        for name, weight in weights.items()
        if is_matrix(name, weight)
    }
    optimizer = torch.optim.Muon(
        matrices.values(),
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in STEPS:
        for name, gradient in clipped_gradients(weights, settings, step).items():
            if name in matrices:
                matrices[name].grad = gradient.float()
        optimizer.step()
    for name, matrix in matrices.items():
        found = result["after"][name][1]
        assert (found - matrix).norm() < 0.02 * (found - weights[name]).norm(), name


def test_nan_gradient_skips_muon_step_without_effect(pool, untied_llama):
    poison = {1: ("model.layers.0.mlp.up_proj.weight", math.nan)}
    layout = {"tensor": 2}
    call = (
        optimizer_jobs.guided_steps,
        2,
        str(untied_llama),
        layout,
        {"optimizer": GUIDED | {"schedule": "linear"}},
    )
    spoiled, good = pool.run(*call, [1, 9, 2], poison), pool.run(*call, [1, 2])
    for with_it, without in zip(spoiled, good, strict=True):
        assert with_it["untouched"] == [True]
        assert [stats["skipped"] for stats in with_it["stats"]] == [0, 1, 0]
        assert [with_it["stats"][0], with_it["stats"][2]] == without["stats"]
        for name, (_, tensor) in without["after"].items():
            assert torch.equal(with_it["after"][name][1], tensor), name


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A function that returns a family's model directory and creates it once."""
    return functools.cache(lambda name: str(families.save(name, tmp_path_factory.mktemp(name))))


@pytest.fixture(scope="module")
def alone(pool, family):
    """A function that returns results and final weights of a family's updates on one rank."""

    def run(name):
        (result,) = pool.run(jobs.policy_step, 1, family(name), {}, {"optimizer": MUON}, 3)
        return result, {weight: tensor for weight, (_, tensor) in result["after"].items()}

    return functools.cache(run)


@pytest.mark.promise("muon-equals-float64-at-every-layout")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama3", "tp2-sp"),
        ("llama3", "pp2-dp2"),
        ("llama3", "tp4-sp"),
        slow("llama3", "tp4-dp2-distributed"),
        slow("llama3", "tp2-pp2"),
        slow("llama3", "tp2-dp2"),
        slow("llama3", "vpp2-tp2-sp"),
        slow("llama3", "cp2-dp2"),
        slow("gpt2", "tp2-pp2"),
        slow("pythia", "tp2-dp2"),
        slow("mixtral", "tp2-sp-pp2"),
    ],
)
def test_muon_updates_do_not_depend_on_the_layout(pool, family, alone, name, layout):
    expected, weights = alone(name)
    layout, _ = LAYOUTS[layout]
    assert_updates_agree(
        pool.run(jobs.policy_step, ranks(layout), family(name), layout, {"optimizer": MUON}, 3),
        expected,
        weights,
    )


@pytest.mark.promise("muon-equals-float64-at-every-layout")
@pytest.mark.parametrize(
    "layout",
    [
        {"data": 2, "expert": 2},
        slow({"tensor": 2, "sequence": True, "data": 2, "expert": 2, "expert_tensor": 1}),
    ],
)
def test_muon_expert_updates_do_not_depend_on_layout(pool, family, alone, layout):
    expected, weights = alone("mixtral")
    results = pool.run(
        jobs.policy_step, ranks(layout), family("mixtral"), layout, {"optimizer": MUON}, 3
    )
    assert_updates_agree(results, expected, weights)


def assert_updates_agree(results, expected, weights):
    for result in results:
        for stats, wanted in zip(result["stats"], expected["stats"], strict=True):
            assert stats == {
                key: pytest.approx(value, rel=1e-3, abs=1e-6) for key, value in wanted.items()
            }
    moved = max(
        float((weights[name] - tensor).abs().max())
        for name, (_, tensor) in expected["before"].items()
    )
    assert moved > 1e-3
    assert_slices_equal([result["after"] for result in results], weights, rtol=0, atol=1e-5)


def test_muon_critic_does_not_depend_on_layout(pool, untied_llama):
    call = (jobs.critic_step, str(untied_llama))
    (single,) = pool.run(call[0], 1, call[1], {}, 2, {"optimizer": MUON})
    (adams,) = pool.run(call[0], 1, call[1], {}, 2)
    assert not torch.equal(single["after"], adams["after"])
    for result in pool.run(call[0], 2, call[1], {"tensor": 2}, 2, {"optimizer": MUON}):
        torch.testing.assert_close(result["after"], single["after"], rtol=1e-4, atol=1e-5)
