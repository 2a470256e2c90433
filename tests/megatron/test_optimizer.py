"""The optimizer equals Adam and the schedules' formulas, skips steps with non-finite gradients, and
leaves frozen weights unchanged."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from aligner.data.model_directory import read_shape
from aligner.models.weight_slices import frozen_names, weight_table
from aligner.schema import OptimizerConfig, ParallelConfig
from tests.megatron import jobs, optimizer_jobs
from tests.megatron.reference import logprobs
from tests.megatron.test_layouts import assert_slices_equal

SINGLE, TP, PP, DP = {}, {"tensor": 2}, {"pipeline": 2}, {"data": 2}
# Epsilon is large, so that its placement matters; the clipping norm is below the gradients' norm.
SETTINGS = {
    "learning_rate": 1e-2,
    "epsilon": 3e-3,
    "weight_decay": 0.1,
    "clip_grad_norm": 0.5,
    "beta1": 0.8,
    "beta2": 0.9,
    "schedule": "constant",
}


def ranks(layout):
    return ParallelConfig(**layout).ranks


def adam(weights, settings: OptimizerConfig, steps: int):
    """AdamW (Loshchilov & Hutter 2019) in float64, with epsilon as in PyTorch or TensorFlow."""
    weights = {name: tensor.double().numpy() for name, tensor in weights.items()}
    first = {name: np.zeros_like(weight) for name, weight in weights.items()}
    second = {name: np.zeros_like(weight) for name, weight in weights.items()}
    for step in range(1, steps + 1):
        gradients = {
            name: optimizer_jobs.whole_gradient(name, weight.shape, step).double().numpy()
            for name, weight in weights.items()
        }
        norm = math.sqrt(sum((gradient**2).sum() for gradient in gradients.values()))
        for name, gradient in gradients.items():
            gradient = gradient * min(1.0, settings.clip_grad_norm / (norm + 1e-6))
            first[name] = settings.beta1 * first[name] + (1 - settings.beta1) * gradient
            second[name] = settings.beta2 * second[name] + (1 - settings.beta2) * gradient**2
            correction1, correction2 = 1 - settings.beta1**step, 1 - settings.beta2**step
            if settings.epsilon_placement == "tensorflow":
                rate = settings.learning_rate * math.sqrt(correction2) / correction1
                change = rate * first[name] / (np.sqrt(second[name]) + settings.epsilon)
            else:
                root = np.sqrt(second[name] / correction2) + settings.epsilon
                change = settings.learning_rate * first[name] / correction1 / root
            decay = (
                settings.learning_rate * settings.weight_decay if weights[name].ndim > 1 else 0.0
            )
            weights[name] = (1 - decay) * weights[name] - change
    return {name: torch.from_numpy(weight).float() for name, weight in weights.items()}


@pytest.mark.parametrize("placement", ["pytorch", "tensorflow"])
@pytest.mark.parametrize(
    ("layout", "distributed"),
    [(SINGLE, False), (TP, False), (PP, False), (DP, True)],
    ids=["single", "tp2", "pp2", "dp2-distributed"],
)
def test_adam_equals_float64_for_both_epsilon_placements(
    pool, untied_llama, layout, distributed, placement
):
    settings = SETTINGS | {"epsilon_placement": placement, "distributed": distributed}
    steps = list(range(1, 5))
    results = pool.run(
        optimizer_jobs.guided_steps,
        ranks(layout),
        str(untied_llama),
        layout,
        {"optimizer": settings},
        steps,
    )
    weights = load_file(untied_llama / "model.safetensors")
    expected = adam(weights, dataclasses.replace(jobs.OPTIMIZER, **settings), len(steps))
    assert_slices_equal([result["after"] for result in results], expected, rtol=1e-5, atol=1e-6)
    elsewhere = {"pytorch": "tensorflow", "tensorflow": "pytorch"}[placement]
    other = adam(
        weights,
        dataclasses.replace(jobs.OPTIMIZER, **settings | {"epsilon_placement": elsewhere}),
        len(steps),
    )
    assert (other["lm_head.weight"] - expected["lm_head.weight"]).abs().max() > 1e-3, (
        "the placement matters here"
    )


def closed_form(settings: OptimizerConfig, step: int, total: int) -> float:
    peak, least, warmup = settings.learning_rate, settings.min_learning_rate, settings.warmup_steps
    if step < warmup:
        return peak * step / warmup
    done = (step - warmup) / (total - warmup)
    kept = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[
        settings.schedule
    ]
    return least + (peak - least) * kept


def test_learning_rates_equal_closed_form_schedules(pool, untied_llama):
    grid = [
        {
            "schedule": schedule,
            "warmup_steps": warmup,
            "min_learning_rate": least,
            "learning_rate": 1e-3,
        }
        for schedule in ("constant", "linear", "cosine")
        for warmup in (0, 2)
        for least in (0.0, 2e-4)
        if schedule != "constant" or not least
    ]
    for settings, rates in zip(
        grid, pool.run(optimizer_jobs.learning_rates, 1, str(untied_llama), grid)[0], strict=True
    ):
        optimizer = dataclasses.replace(jobs.OPTIMIZER, **settings)
        assert rates == pytest.approx(
            [closed_form(optimizer, step, 4) for step in range(4)], rel=1e-9
        ), settings


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize(
    ("layout", "distributed"),
    [(PP, False), ({"tensor": 2, "pipeline": 2}, False), (DP, True)],
    ids=["pp2", "tp2pp2", "dp2-distributed"],
)
def test_non_finite_gradient_skips_step_without_effect(
    pool, untied_llama, layout, distributed, value
):
    settings = {
        "optimizer": (
            SETTINGS
            | {
                "epsilon_placement": "tensorflow",
                "schedule": "linear",
                "distributed": distributed,
            }
        )
    }
    # Only the first pipeline stage has this weight: the other stages must skip the step too.
    poison = {1: ("model.layers.0.mlp.up_proj.weight", value)}
    call = (optimizer_jobs.guided_steps, ranks(layout), str(untied_llama), layout, settings)
    spoiled, good = pool.run(*call, [1, 9, 2], poison), pool.run(*call, [1, 2])
    for with_it, without in zip(spoiled, good, strict=True):
        assert with_it["untouched"] == [True]
        assert [stats["skipped"] for stats in with_it["stats"]] == [0, 1, 0]
        assert "grad_norm" not in with_it["stats"][1]
        assert [with_it["stats"][0], with_it["stats"][2]] == without["stats"]
        assert with_it["stats"][1]["lr"] == with_it["stats"][2]["lr"], "the schedule waits too"
        for name, (_, tensor) in without["after"].items():
            assert torch.equal(with_it["after"][name][1], tensor), name


def test_too_many_skipped_steps_end_run_naming_weights(pool, untied_llama):
    settings = {"optimizer": {"max_skipped_steps": 2}}
    name = "model.layers.0.self_attn.k_proj.weight"
    bad = (name, math.nan)
    call = (optimizer_jobs.guided_steps, 2, str(untied_llama), PP, settings)
    apart = pool.run(*call, [1, 2, 3, 4], {0: bad, 2: bad})
    assert [[stats["skipped"] for stats in result["stats"]] for result in apart] == [
        [1, 0, 1, 0]
    ] * 2
    for result in pool.run(*call, [1, 2, 3], {1: bad, 2: bad}):
        assert len(result["stats"]) == 2
        message = result["error"]
        assert "the gradient norm was nan in 2 consecutive updates" in message
        assert "optimizer.max_skipped_steps=2" in message
        # The first three values of the fused QKV parameter belong to the group's queries.
        assert "model.layers.0.self_attn.q_proj.weight (3 of 4096 values on rank 0)" in message
        assert "layers.2" not in message and "rank 1" not in message


def test_gradient_norm_overflow_is_reported(pool, untied_llama):
    poison = {0: ("lm_head.weight", 3e38)}
    settings = {"optimizer": {"max_skipped_steps": 1}}
    (result,) = pool.run(
        optimizer_jobs.guided_steps, 1, str(untied_llama), {}, settings, [1], poison
    )
    assert "norm was inf in 1 consecutive updates" in result["error"]
    assert "none, but the sum of their squares overflows" in result["error"]


@pytest.mark.parametrize("layout", [SINGLE, {"tensor": 2, "pipeline": 2}], ids=["single", "tp2pp2"])
def test_update_with_nan_loss_is_skipped_and_counted(pool, untied_llama, layout):
    for result in pool.run(optimizer_jobs.spoiled_update, ranks(layout), str(untied_llama), layout):
        bad, good = result["stats"]
        assert (bad["skipped"], bad["skipped_total"]) == (1, 1)
        assert all(math.isfinite(value) for value in bad.values())
        assert "loss" not in bad and "grad_norm" not in bad and "entropy" in bad
        assert (good["skipped"], good["skipped_total"]) == (0, 1)
        assert good | {"skipped_total": 0} == result["alone"]
        for name, (_, tensor) in result["after_alone"].items():
            assert torch.equal(result["after"][name][1], tensor), name


FROZEN = ["model.embed_tokens.weight", "model.layers.[01].*", "model.layers.3.mlp.down_proj.weight"]


@pytest.fixture(scope="module")
def frozen_steps(untied_llama):
    """Frozen names, and weights and gradient norms of two AdamW steps on the other weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(untied_llama, dtype=torch.float32).eval()
    frozen = frozen_names(weight_table(read_shape(untied_llama)), FROZEN)
    trained = [parameter for name, parameter in model.named_parameters() if name not in frozen]
    experience = jobs.make_experience(72)
    adamw = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)
    norms = []
    for _ in range(2):
        adamw.zero_grad()
        given = logprobs(model, experience.tokens, experience.lengths)
        value, _ = jobs.loss(given, given, experience, float(experience.mask.sum()))
        value.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, 0.5)))
        adamw.step()
    return frozen, {name: parameter.detach() for name, parameter in model.named_parameters()}, norms


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        (SINGLE, {}),
        (SINGLE, {"recompute": "full"}),
        ({"tensor": 2, "sequence": True}, {}),
        (PP, {}),
        ({"pipeline": 2, "virtual_pipeline": 2}, {}),
        (PP | DP, {"optimizer": {"distributed": True}}),
    ],
    ids=["single", "recompute", "tp2-sequence", "pp2-whole-stage", "vpp2", "pp2dp2-distributed"],
)
def test_frozen_weights_stay_fixed_while_others_train(
    pool, untied_llama, frozen_steps, layout, settings
):
    frozen, expected, norms = frozen_steps
    optimizer = {"schedule": "constant", "epsilon": 1e-6} | settings.get("optimizer", {})
    settings = settings | {"frozen": FROZEN, "optimizer": optimizer}
    results = pool.run(
        optimizer_jobs.trained_weights, ranks(layout), str(untied_llama), layout, settings, 2
    )
    stored = load_file(untied_llama / "model.safetensors")
    for result in results:
        assert [stats["grad_norm"] for stats in result["stats"]] == pytest.approx(norms, rel=1e-4)
        for name, (cut, tensor) in result["after"].items():
            whole = stored[name] if name in frozen else expected[name]
            part = (
                whole
                if cut.axis is None
                else whole.narrow(cut.axis, cut.start, cut.stop - cut.start)
            )
            tolerance = {"rtol": 0, "atol": 0} if name in frozen else {"rtol": 0, "atol": 5e-5}
            torch.testing.assert_close(
                tensor, part, msg=lambda text, name=name: f"{name}: {text}", **tolerance
            )
        held = sum(
            tensor.numel() for name, (_, tensor) in result["after"].items() if name not in frozen
        )
        assert result["buffered"] < held + 1000, "frozen weights have no gradient buffers"
