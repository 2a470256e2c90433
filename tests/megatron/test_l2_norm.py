"""Gradient norms equal those computed in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from aligner.megatron.l2_norm import l2_norm

LARGE = 28_000_000


def float64_norm(tensor: torch.Tensor) -> float:
    return math.sqrt(sum(float(chunk.double().square().sum()) for chunk in tensor.split(1 << 20)))


@pytest.fixture(scope="module")
def large_gradient():
    return torch.randn(LARGE, generator=torch.Generator().manual_seed(0))


@pytest.mark.promise("gradient-norm-equals-float64")
def test_norm_of_large_tensor_equals_float64(large_gradient):
    assert float(l2_norm(large_gradient)) == pytest.approx(float64_norm(large_gradient), rel=1e-6)


@pytest.fixture
def single_rank(tmp_path):
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.promise("gradient-norm-equals-float64")
def test_megatron_gradient_norm_equals_float64(large_gradient, single_rank):
    from megatron.core.optimizer import clip_grads

    from aligner.megatron import cpu_backend

    cpu_backend.install()
    small = torch.ones(3, 5)
    norm = clip_grads.get_grad_norm_fp32([large_gradient, small])
    expected = math.hypot(float64_norm(large_gradient), math.sqrt(15))
    assert norm == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (4_096,), (65_536,), (2, 65_537)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_norm_of_any_shape_and_dtype_equals_float64(shape, dtype):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert float(l2_norm(tensor)) == pytest.approx(float64_norm(tensor.reshape(-1)), rel=1e-6)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_norm_of_non_finite_values_is_not_finite(value):
    tensor = torch.zeros(70_000)
    tensor[69_000] = value
    assert not math.isfinite(float(l2_norm(tensor)))


def test_norm_of_strided_tensor_counts_each_element_once():
    assert float(l2_norm(torch.ones(4, 6).t()[:, 1:3])) == pytest.approx(math.sqrt(12))
