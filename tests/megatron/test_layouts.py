"""Every layout gives the results of transformers and torch in one process."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from aligner.models.weight_slices import compute_coordinates
from aligner.schema import ParallelConfig
from tests.megatron import jobs, reference

DISTRIBUTED = {"optimizer": {"distributed": True}}
OVERLAP = {"optimizer": {"overlap_grad_reduce": True}}
OVERLAP_DISTRIBUTED = {"optimizer": {"overlap_grad_reduce": True, "distributed": True}}
GATHER = {
    "optimizer": {"overlap_grad_reduce": True, "distributed": True, "overlap_param_gather": True}
}
# Layout, and keys of the actor's section that do not change the results.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "single": ({}, {}),
    "tp2": ({"tensor": 2}, {}),
    "pp2": ({"pipeline": 2}, {}),
    "dp2": ({"data": 2}, {}),
    "tp2-pp2": ({"tensor": 2, "pipeline": 2}, {}),
    "tp2-dp2": ({"tensor": 2, "data": 2}, {}),
    "pp2-dp2": ({"pipeline": 2, "data": 2}, {}),
    "pp2-uneven": ({"pipeline": 2, "last_stage_layers": 1}, {}),
    "pp3": ({"pipeline": 3}, {}),
    "pp2-stages-dp2-distributed": (
        {"pipeline": 2, "stage_layers": [3, 1], "data": 2},
        DISTRIBUTED,
    ),
    "tp2-sp": ({"tensor": 2, "sequence": True}, {}),
    # Two tensor ranks have a copy of each KV head.
    "tp4-sp": ({"tensor": 4, "sequence": True}, {}),
    "tp4-dp2-distributed": ({"tensor": 4, "data": 2}, DISTRIBUTED),
    "tp4-dp2-overlap-distributed": ({"tensor": 4, "data": 2}, OVERLAP_DISTRIBUTED),
    "tp2-sp-pp2": ({"tensor": 2, "sequence": True, "pipeline": 2}, {}),
    "vpp2": ({"pipeline": 2, "virtual_pipeline": 2}, {}),
    "vpp2-dp2": ({"pipeline": 2, "virtual_pipeline": 2, "data": 2}, {}),
    "vpp2-tp2-sp": ({"pipeline": 2, "virtual_pipeline": 2, "tensor": 2, "sequence": True}, {}),
    "vpp2-cp2": ({"pipeline": 2, "virtual_pipeline": 2, "context": 2}, {}),
    "cp2": ({"context": 2}, {}),
    "cp4": ({"context": 4}, {}),
    "cp2-tp2": ({"context": 2, "tensor": 2}, {}),
    "cp2-tp2-sp": ({"context": 2, "tensor": 2, "sequence": True}, {}),
    "cp2-dp2": ({"context": 2, "data": 2}, {}),
    "dp2-distributed": ({"data": 2}, DISTRIBUTED),
    "pp2-dp2-distributed": ({"pipeline": 2, "data": 2}, DISTRIBUTED),
    "vpp2-dp2-distributed": ({"pipeline": 2, "virtual_pipeline": 2, "data": 2}, DISTRIBUTED),
    "cp2-dp2-distributed": ({"context": 2, "data": 2}, DISTRIBUTED),
    "dp2-overlap": ({"data": 2}, OVERLAP),
    "cp2-dp2-overlap-distributed": ({"context": 2, "data": 2}, OVERLAP_DISTRIBUTED),
    "pp2-dp2-overlap": ({"pipeline": 2, "data": 2}, OVERLAP),
    "vpp2-dp2-overlap-distributed": (
        {"pipeline": 2, "virtual_pipeline": 2, "data": 2},
        OVERLAP_DISTRIBUTED,
    ),
    "dp2-gather-distributed": ({"data": 2}, GATHER),
    "vpp2-dp2-gather-distributed": ({"pipeline": 2, "virtual_pipeline": 2, "data": 2}, GATHER),
    "full-recompute-tp2-sp-dp2-gather": (
        {"tensor": 2, "sequence": True, "data": 2},
        {"recompute": "full", **GATHER},
    ),
    "full-recompute-dp2-overlap": ({"data": 2}, {"recompute": "full", **OVERLAP}),
    "full-recompute": ({}, {"recompute": "full"}),
    "selective-recompute": ({}, {"recompute": "selective"}),
    "full-recompute-tp2-sp-pp2": (
        {"tensor": 2, "sequence": True, "pipeline": 2},
        {"recompute": "full"},
    ),
    "selective-recompute-cp2-vpp2": (
        {"context": 2, "pipeline": 2, "virtual_pipeline": 2},
        {"recompute": "selective"},
    ),
}


TYPICAL = ("single", "tp2-pp2", "tp2-sp", "vpp2", "cp2", "dp2-distributed", "pp2-dp2-overlap")
"""Layouts that the first round of tests runs."""


def layouts(*names: str) -> Any:
    """Parametrize a test by the named layouts, or by all layouts; the typical ones run in the first
    round."""
    rows = [
        pytest.param(*LAYOUTS[name], id=name, marks=() if name in TYPICAL else pytest.mark.slow)
        for name in names or LAYOUTS
    ]
    return pytest.mark.parametrize(("layout", "settings"), rows)


def ranks(layout: dict[str, Any]) -> int:
    return ParallelConfig(**layout).ranks


@functools.cache
def expected_steps(directory):
    return reference.policy_steps(directory)


def assert_slices_equal(parts, tensors, **tolerance):
    """Assert that every rank's slices equal the same slices of the whole tensors."""
    seen = set()
    for part in parts:
        for name, (cut, tensor) in part.items():
            whole = tensors[name]
            expected = (
                whole
                if cut.axis is None
                else whole.narrow(cut.axis, cut.start, cut.stop - cut.start)
            )
            torch.testing.assert_close(
                tensor, expected, msg=lambda text, name=name: f"{name}: {text}", **tolerance
            )
            seen.add(name)
    assert seen == set(tensors) - {"lm_head.weight"} or seen == set(tensors)


@pytest.mark.promise("training-equals-transformers")
@layouts()
def test_training_equals_transformers_at_every_layout(pool, untied_llama, layout, settings):
    assert_steps_agree(pool, untied_llama, layout, settings)


@layouts(
    "single",
    "tp2",
    "pp2",
    "tp2-pp2",
    "pp2-uneven",
    "tp2-sp-pp2",
    "vpp2",
    "vpp2-cp2",
    "pp2-dp2-distributed",
)
def test_tied_embedding_training_equals_transformers(pool, tied_llama, layout, settings):
    assert_steps_agree(pool, tied_llama, layout, settings)


@pytest.mark.promise("padded-vocabulary-trains-alike")
@layouts("tp2", "tp2-pp2", "tp2-sp")
def test_padded_vocabulary_training_equals_transformers(pool, odd_llama, layout, settings):
    assert_steps_agree(pool, odd_llama, layout, settings)


@pytest.mark.promise("reference-on-device-is-equal")
@pytest.mark.parametrize("layout", [{}, {"tensor": 2, "pipeline": 2}])
def test_reference_on_device_is_bit_identical_to_host(pool, untied_llama, layout):
    steps = [
        pool.run(
            jobs.policy_step,
            ranks(layout),
            str(untied_llama),
            layout,
            {"reference_on_device": on_device},
        )
        for on_device in (False, True)
    ]
    for waiting, resident in zip(*steps, strict=True):
        assert torch.equal(waiting["reference"], resident["reference"])
        assert not torch.equal(resident["reference"], resident["after_logprobs"])
        assert all(
            torch.equal(tensor, waiting["after"][name][1])
            for name, (_, tensor) in resident["after"].items()
        )


def assert_steps_agree(pool, directory, layout, settings):
    expected = expected_steps(directory)
    results = pool.run(jobs.policy_step, ranks(layout), str(directory), layout, settings)
    for result in results:
        torch.testing.assert_close(result["logprobs"], expected["logprobs"], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            result["after_logprobs"], expected["after_logprobs"], rtol=1e-3, atol=1e-3
        )
        torch.testing.assert_close(result["reference"], expected["logprobs"], rtol=1e-4, atol=1e-4)
        for stats, wanted in zip(result["stats"], expected["stats"], strict=True):
            for key, value in wanted.items():
                assert stats[key] == pytest.approx(value, rel=1e-4), key
            assert stats["ratio_max"] >= 1 - 1e-4
            assert 0 < stats["entropy"] < math.log(72)
    stored = load_file(directory / "model.safetensors")
    assert_slices_equal([result["before"] for result in results], stored, rtol=0, atol=0)
    assert_slices_equal(
        [result["gradients"] for result in results], expected["gradients"], rtol=1e-4, atol=2e-6
    )
    weights = {name: expected["weights"][name] for name in stored}
    # The tolerance is a hundredth of the learning rate.
    assert_slices_equal([result["after"] for result in results], weights, rtol=0, atol=1e-5)


@layouts("single", "tp2", "pp2", "tp2-sp-pp2", "vpp2", "cp2-tp2-sp", "cp2-dp2")
def test_logits_equal_transformers_at_every_layout(pool, untied_llama, layout, settings):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(untied_llama, dtype=torch.float32).eval()
    experience = jobs.make_experience(72)
    expected = torch.zeros(*experience.tokens.shape, 72)
    with torch.no_grad():
        for row, (tokens, length) in enumerate(
            zip(experience.tokens, experience.lengths.tolist(), strict=True)
        ):
            expected[row, :length] = model(tokens[None, :length]).logits[0]
    for logits in pool.run(jobs.logits, ranks(layout), str(untied_llama), layout, settings):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor": 2},
        {"data": 2},
        {"tensor": 2, "pipeline": 2},
        {"pipeline": 2, "data": 2},
        {"tensor": 2, "context": 2},
        {"context": 2, "data": 2},
        {"context": 2, "pipeline": 2},
        {"tensor": 2, "data": 2, "expert": 2},
        {"tensor": 2, "data": 2, "expert": 2, "expert_tensor": 1},
        {"tensor": 2, "data": 2, "expert": 4, "expert_tensor": 1},
        {"context": 2, "data": 2, "expert": 2},
        {"data": 2, "pipeline": 2, "expert": 2},
    ],
    ids=lambda layout: "-".join(f"{key}{value}" for key, value in layout.items()),
)
def test_rank_coordinates_equal_megatron_core(pool, layout):
    places = pool.run(jobs.places, ranks(layout), layout)
    assert places == [
        compute_coordinates(rank, ParallelConfig(**layout)) for rank in range(len(places))
    ]


@layouts(
    "single",
    "tp2",
    "pp2",
    "dp2",
    "tp2-sp",
    "tp2-sp-pp2",
    "vpp2",
    "cp2",
    "cp2-tp2-sp",
    "dp2-distributed",
)
def test_truncated_critic_does_not_depend_on_layout(pool, untied_llama, layout, settings):
    layers = 4 if layout.get("virtual_pipeline") else 2
    single = pool.run(jobs.critic_step, 1, str(untied_llama), {}, layers)[0]
    assert single["before"].abs().max() == 0, "a fresh value head says zero"
    assert single["version"] == 2
    for result in pool.run(
        jobs.critic_step, ranks(layout), str(untied_llama), layout, layers, settings
    ):
        torch.testing.assert_close(result["after"], single["after"], rtol=1e-4, atol=1e-5)
        assert result["stats"] == [
            pytest.approx(stats, rel=1e-4, abs=1e-7) for stats in single["stats"]
        ]
    assert single["stats"][1]["loss"] < single["stats"][0]["loss"]


@layouts("single", "tp2", "pp2", "vpp2", "cp2-tp2-sp")
def test_reward_model_agrees_with_transformers(pool, reward_llama, layout, settings):
    from transformers import LlamaForSequenceClassification

    model = LlamaForSequenceClassification.from_pretrained(reward_llama, dtype=torch.float32).eval()
    experience = jobs.make_experience(72)
    with torch.no_grad():
        hidden = model.model(
            experience.tokens, attention_mask=experience.tokens != 0
        ).last_hidden_state
        expected = model.score(hidden)[..., 0]
    inside = torch.arange(expected.shape[1]) < experience.lengths[:, None]
    for values in pool.run(jobs.reward_values, ranks(layout), str(reward_llama), layout):
        torch.testing.assert_close(values, torch.where(inside, expected, 0.0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("recompute", "runs"), [("none", 1), ("selective", 2), ("full", 2)])
def test_recompute_repeats_attention_in_backward_pass(pool, untied_llama, recompute, runs):
    forward, update = pool.run(
        jobs.attention_calls, 1, str(untied_llama), {"recompute": recompute}
    )[0]
    assert update == runs * forward > 0


@layouts("single", "tp2-sp", "vpp2", "cp2", "dp2-distributed")
def test_bf16_computes_near_fp32_and_keeps_fp32_main_weights(pool, untied_llama, layout, settings):
    expected = expected_steps(untied_llama)
    small = {"optimizer": settings.get("optimizer", {}) | {"learning_rate": 1e-6}}
    for result in pool.run(jobs.bf16_step, ranks(layout), str(untied_llama), layout, small):
        # bf16 has 8 significant bits: logits of up to 20 have an error of about 0.05.
        torch.testing.assert_close(result["logprobs"], expected["logprobs"], rtol=0, atol=0.3)
        assert (result["logprobs"] - expected["logprobs"]).abs().max() > 1e-4
        assert result["stats"]["grad_norm"] == pytest.approx(
            expected["stats"][0]["grad_norm"], rel=0.05
        )
        before, after = result["weights"]
        assert all(weight.dtype == torch.bfloat16 for weight in before)
        same = torch.cat([torch.eq(*pair).flatten() for pair in zip(before, after, strict=True)])
        assert same.float().mean() > 0.99, "updates of 1e-6 are too small for bf16 weights"
        before, after = result["mains"]
        assert before.dtype == torch.float32
        assert ((after - before).abs() > 5e-7).float().mean() > 0.9, "the main weights take them"


def test_too_long_sequence_is_refused(pool, untied_llama):
    message = pool.run(jobs.refused_sequence, 1, str(untied_llama), 129)[0]
    assert message.startswith(
        "AlignerError: sequence 1 of the batch has 129 tokens, but the model has 128 positions"
    )


@pytest.mark.parametrize(
    "layout",
    [
        {"data": 4},
        {"pipeline": 2, "virtual_pipeline": 2},
        {"context": 2, "data": 2},
        {"tensor": 2, "sequence": True},
    ],
    ids=["dp4", "vpp2", "cp2-dp2", "tp2-sp"],
)
def test_single_sequence_update_does_not_depend_on_layout(pool, untied_llama, layout):
    expected = pool.run(jobs.short_step, 1, str(untied_llama), {})[0]
    for logprobs, stats in pool.run(jobs.short_step, ranks(layout), str(untied_llama), layout):
        torch.testing.assert_close(logprobs, expected[0], rtol=1e-4, atol=1e-5)
        assert stats == pytest.approx(expected[1], rel=1e-4)
