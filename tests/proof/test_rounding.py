"""Tolerances of proofs follow from the rounding errors of transformers, and from nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aligner.proof.comparison import TOLERANCE, choose_tolerance, may_be_rounding
from aligner.proof.reference import measure_rounding


@pytest.mark.parametrize(
    ("rounding", "tolerance"),
    [(0.0, TOLERANCE), (4e-6, TOLERANCE), (3e-5, 6e-5), (0.2, TOLERANCE), (math.nan, TOLERANCE)],
)
def test_tolerance_is_twice_the_rounding_error(rounding, tolerance):
    """A difference of 0.2 is no rounding error: float64 has chosen other experts."""
    assert choose_tolerance(rounding) == tolerance


@pytest.mark.parametrize(
    ("errors", "expected"),
    [([9e-6], False), ([9e-6, 2e-5], True), ([2e-5, 0.5], False), ([2e-5, math.nan], False)],
)
def test_rounding_is_measured_only_for_small_errors(errors, expected):
    assert may_be_rounding(errors) is expected


class Norm(nn.Module):
    """A model that computes in float32, as the norms and routers of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 1, 50))

    def forward(self) -> Tensor:
        weight = self.weight.float()
        return weight.softmax(-1, dtype=torch.float32) * weight.to(torch.float32).exp()


def test_rounding_error_is_the_difference_to_float64_in_all_operations():
    samples: list[tuple[Tensor, Tensor]] = []

    def compute_errors(results: Any, expected: Any) -> dict[str, float]:
        samples.append((results["weight"], expected["weight"]))
        weight = expected["weight"]
        assert results["output"].dtype == torch.float32
        assert expected["output"].dtype == weight.dtype == torch.float64
        exact = weight.exp() / weight.exp().sum() * weight.exp()
        torch.testing.assert_close(expected["output"], exact, rtol=1e-12, atol=0)
        return {"output": float(((results["output"] - exact) / exact).abs().max())}

    def run(model: Norm) -> dict[str, Tensor]:
        return {"output": model().detach(), "weight": model.weight.detach().clone()}

    errors = measure_rounding(Norm, run, compute_errors)
    assert 1e-8 < errors["output"] < 1e-6
    assert all(torch.equal(one.double(), other) for one, other in samples)
    (first, _), (second, _) = samples[:2]
    assert 1e-8 < (first - second).abs().max() < 1e-5
