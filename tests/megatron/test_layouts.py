"""Every layout computes what transformers and torch compute in one process."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from safetensors.torch import load_file

from aligner.config.schema import Parallel
from aligner.config.weights import coordinates
from tests.megatron import jobs, reference

LAYOUTS = [
    {},
    {"tensor": 2},
    {"pipeline": 2},
    {"data": 2},
    {"tensor": 2, "pipeline": 2},
    {"tensor": 2, "data": 2},
    {"pipeline": 2, "data": 2},
    {"pipeline": 2, "last_stage_layers": 1},
]
IDS = ["x".join(f"{key}{value}" for key, value in layout.items()) or "single" for layout in LAYOUTS]


def ranks(layout: dict[str, int]) -> int:
    return Parallel(**layout).ranks


@functools.cache
def expected_steps(directory):
    return reference.policy_steps(directory)


def assert_slices_equal(parts, tensors, **tolerance):
    """Every rank's slices are the same slices of the whole tensors."""
    seen = set()
    for part in parts:
        for name, (cut, tensor) in part.items():
            whole = tensors[name]
            expected = whole if cut.axis is None else whole.narrow(cut.axis, cut.start, cut.stop - cut.start)
            torch.testing.assert_close(tensor, expected, msg=lambda text, name=name: f"{name}: {text}", **tolerance)
            seen.add(name)
    assert seen == set(tensors) - {"lm_head.weight"} or seen == set(tensors)


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_logprobs_losses_gradient_norms_and_updated_weights_agree_with_transformers(pool, llama, layout):
    expected = expected_steps(llama)
    results = pool.run(jobs.policy_step, ranks(layout), str(llama), layout)
    for result in results:
        torch.testing.assert_close(result["logprobs"], expected["logprobs"], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(result["after_logprobs"], expected["after_logprobs"], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(result["reference"], expected["logprobs"], rtol=1e-4, atol=1e-4)
        for stats, wanted in zip(result["stats"], expected["stats"], strict=True):
            for key, value in wanted.items():
                assert stats[key] == pytest.approx(value, rel=1e-4), key
            assert stats["ratio_max"] >= 1 - 1e-4
            assert 0 < stats["entropy"] < math.log(72)
    stored = load_file(llama / "model.safetensors")
    assert_slices_equal([result["before"] for result in results], stored, rtol=0, atol=0)
    weights = {name: expected["weights"][name] for name in stored}
    # Adam's first steps divide by the root of tiny squared gradients, so a rounding error moves a weight by a visible
    # fraction of the learning rate (1e-3).
    assert_slices_equal([result["after"] for result in results], weights, rtol=0, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=IDS[:3])
def test_logits_equal_those_of_transformers(pool, llama, layout):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    experience = jobs.make_experience(72)
    with torch.no_grad():
        rows = [model(row[None, :length]).logits[0] for row, length in zip(experience.tokens, experience.lengths, strict=True)]
    parts = [part for part in pool.run(jobs.logits, ranks(layout), str(llama), layout) if part is not None]
    torch.testing.assert_close(torch.cat(parts, -1), torch.cat(rows), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS[:6], ids=IDS[:6])
def test_ranks_stand_where_megatron_core_puts_them(pool, layout):
    for rank, place in enumerate(pool.run(jobs.places, ranks(layout), layout)):
        ours = coordinates(rank, Parallel(**layout))
        assert place == (ours.tensor, ours.data, ours.pipeline)


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"pipeline": 2}, {"data": 2}], ids=["single", "tp", "pp", "dp"])
def test_critic_from_the_first_layers_learns_the_same_at_every_layout(pool, untied_llama, layout):
    single = pool.run(jobs.critic_step, 1, str(untied_llama), {}, 2)[0]
    assert single["before"].abs().max() == 0, "a fresh value head says zero"
    assert single["version"] == 2
    for result in pool.run(jobs.critic_step, ranks(layout), str(untied_llama), layout, 2):
        torch.testing.assert_close(result["after"], single["after"], rtol=1e-4, atol=1e-5)
        assert result["stats"] == [pytest.approx(stats, rel=1e-4, abs=1e-7) for stats in single["stats"]]
    assert single["stats"][1]["loss"] < single["stats"][0]["loss"]


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"pipeline": 2}], ids=["single", "tp", "pp"])
def test_reward_model_agrees_with_transformers(pool, reward_llama, layout):
    from transformers import LlamaForSequenceClassification

    model = LlamaForSequenceClassification.from_pretrained(reward_llama, dtype=torch.float32).eval()
    experience = jobs.make_experience(72)
    with torch.no_grad():
        hidden = model.model(experience.tokens, attention_mask=experience.tokens != 0).last_hidden_state
        expected = model.score(hidden)[..., 0]
    inside = torch.arange(expected.shape[1]) < experience.lengths[:, None]
    for values in pool.run(jobs.reward_values, ranks(layout), str(reward_llama), layout):
        torch.testing.assert_close(values, torch.where(inside, expected, 0.0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_vocab_parallel_logprobs_and_gradients_equal_the_dense_ones(pool, world):
    generator = torch.Generator().manual_seed(2)
    logits, targets = 5 * torch.randn(7, 12, generator=generator), torch.randint(0, 12, (7,), generator=generator)
    dense = logits.clone().requires_grad_()
    distribution = torch.distributions.Categorical(logits=dense / 0.6)
    (distribution.log_prob(targets) * torch.linspace(-1, 2, 7)).sum().backward()
    parts = pool.run(jobs.token_logprobs, world, logits, targets, 0.6)
    for logprobs, entropy, _ in parts:
        torch.testing.assert_close(logprobs, distribution.log_prob(targets).detach())
        torch.testing.assert_close(entropy, distribution.entropy().detach())
    torch.testing.assert_close(torch.cat([gradient for _, _, gradient in parts], -1), dense.grad)
