"""Experts that use grouped GEMMs, as on GPUs, equal separate experts; torch supports grouped GEMMs
also on CPUs."""

from __future__ import annotations

import itertools

import pytest
import torch

from aligner.megatron import grouped_experts
from aligner.schema import ParallelConfig
from tests.megatron import families
from tests.megatron.test_families import MIXTURE_LAYOUTS, describe_cell
from tests.rounds import covering

LAYOUTS = ("single", "DP2", "PP2", "TP2+SPxEP2", "EP2 over TP2", "EP2 distributed", "CP2xEP2")
PLAIN = [family for family in families.MIXTURES if family not in families.BIASED_EXPERTS]
TYPICAL = {
    ("mixtral", "single"),
    ("mixtral", "TP2+SPxEP2"),
    ("qwen3_moe", "PP2"),
    ("qwen3_moe", "EP2 distributed"),
}


@pytest.mark.promise("grouped-experts-equal-separate-experts")
@pytest.mark.parametrize(
    ("family", "layout"), covering(itertools.product(PLAIN, LAYOUTS), TYPICAL, describe_cell)
)
def test_grouped_experts_equal_separate_experts(pool, tmp_path, family, layout):
    place = dict(MIXTURE_LAYOUTS[layout])
    ranks = ParallelConfig(**place).ranks
    directory = str(families.save(family, tmp_path))
    settings = {
        "optimizer": {
            "distributed": "distributed" in layout,
            "overlap_grad_reduce": layout == "DP2",
        }
    }
    expected = pool.run(families.family_steps, ranks, directory, place, **settings)
    found = pool.run(families.grouped_steps, ranks, directory, place, **settings)
    assert found[-1]["grouped"], "the last pipeline stage has experts"
    for one, other in zip(found, expected, strict=True):
        assert one["in_place"] == one["grouped"], "nothing is copied to be multiplied"
        torch.testing.assert_close(one["logits"], other["logits"], rtol=1e-6, atol=1e-6)
        for kind in ("gradients", "weights"):
            assert one[kind].keys() == other[kind].keys()
            for name, (_, array) in one[kind].items():
                torch.testing.assert_close(
                    array, other[kind][name][1], rtol=1e-6, atol=1e-6, msg=f"{kind} of {name}"
                )


def test_evenly_spaced_tensors_are_viewed_without_copy():
    memory = torch.arange(60.0)
    parts = [memory[start : start + 6].view(2, 3) for start in (0, 20, 40)]
    found = grouped_experts._stacked_view(parts)
    assert found is not None and torch.equal(found, torch.stack(parts))
    found.add_(1)
    assert memory[20] == 21 and memory[19] == 19
    for others in (
        parts[::-1],
        [parts[0], parts[1], memory[41:47].view(2, 3)],
        [parts[0], parts[1].clone(), parts[2]],
    ):
        assert grouped_experts._stacked_view(others) is None
        assert torch.equal(grouped_experts._stack_or_view(others), torch.stack(others))


def test_expert_without_tokens_has_zero_gradient():
    weights = [torch.randn(4, 8, requires_grad=True) for _ in range(3)]
    inputs = torch.randn(5, 8, requires_grad=True)
    outputs = grouped_experts._GroupedLinear.apply(inputs, [2, 0, 3], *weights)
    outputs.pow(2).sum().backward()
    expected = torch.cat([inputs[:2] @ weights[0].T, inputs[2:] @ weights[2].T])
    torch.testing.assert_close(outputs, expected, rtol=1e-6, atol=1e-6)
    found = [weight.grad.clone() for weight in weights]
    for weight in weights:
        weight.grad = None
    expected.pow(2).sum().backward()
    torch.testing.assert_close(found[0], weights[0].grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[2], weights[2].grad, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[1], torch.zeros(4, 8))


def test_no_tokens_give_zero_expert_gradients():
    weights = [torch.randn(4, 8, requires_grad=True) for _ in range(2)]
    inputs = torch.zeros(0, 8, requires_grad=True)
    grouped_experts._GroupedLinear.apply(inputs, [0, 0], *weights).sum().backward()
    assert all(torch.equal(weight.grad, torch.zeros(4, 8)) for weight in weights)
