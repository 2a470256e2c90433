"""The CPU backend: fused functions and gradient buffers equal plain torch and autograd."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from aligner.megatron import cpu_backend


def plain_swiglu(y: torch.Tensor) -> torch.Tensor:
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


def test_swiglu_and_gradient_equal_autograd():
    y, upstream = torch.randn(5, 12, requires_grad=True), torch.randn(5, 6)
    expected = plain_swiglu(y)
    expected.backward(upstream)
    torch.testing.assert_close(cpu_backend.swiglu(y.detach()), expected.detach())
    torch.testing.assert_close(cpu_backend.swiglu_back(upstream, y.detach()), y.grad)


def test_weighted_swiglu_and_gradients_equal_autograd():
    y, weights, upstream = (
        torch.randn(5, 12, requires_grad=True),
        torch.rand(5, 1, requires_grad=True),
        torch.randn(5, 6),
    )
    expected = plain_swiglu(y) * weights
    expected.backward(upstream)
    torch.testing.assert_close(
        cpu_backend.weighted_swiglu(y.detach(), weights.detach()), expected.detach()
    )
    for_y, for_weights = cpu_backend.weighted_swiglu_back(upstream, y.detach(), weights.detach())
    torch.testing.assert_close(for_y, y.grad)
    torch.testing.assert_close(for_weights, weights.grad)


def test_stale_gradients_are_overwritten_or_zeroed():
    product, idle, other = (torch.nn.Parameter(torch.empty(2, 3)) for _ in range(3))
    buffer = SimpleNamespace(params=[product, idle, other])
    for parameter in buffer.params:
        parameter.main_grad = torch.zeros(2, 3)
    left, right = torch.randn(2, 4), torch.randn(4, 3)
    for parameter in (product, idle):
        cpu_backend.accumulate_matmul(parameter.main_grad, left, right)
    other.main_grad += 1
    for parameter in buffer.params:
        parameter.main_grad[0, 0] = torch.nan  # a skipped step leaves such values in the buffer
    cpu_backend.reset_gradient_buffer(buffer)
    assert other.main_grad.tolist() == torch.zeros(2, 3).tolist()
    for _ in range(2):
        cpu_backend.accumulate_matmul(product.main_grad, left, right)
    # the hook that runs before DDP reduces the gradients over the ranks
    cpu_backend._zero_blanks_before(lambda group: None)(buffer)
    torch.testing.assert_close(product.main_grad, 2 * left @ right)
    assert idle.main_grad.tolist() == torch.zeros(2, 3).tolist()
    cpu_backend.accumulate_matmul(idle.main_grad, left, right)
    torch.testing.assert_close(idle.main_grad, left @ right)


def test_embedding_gradient_is_added_only_to_main_grad():
    weight, tokens = torch.nn.Parameter(torch.randn(7, 3)), torch.tensor([[2, 5, 2], [0, 2, 6]])
    upstream = torch.randn(2, 3, 3)
    lookup = cpu_backend._LayerFunctions().embedding
    # Without a gradient buffer, autograd stores the gradient in weight.grad.
    lookup(tokens, weight).backward(upstream)
    expected, weight.grad = weight.grad, None
    weight.main_grad = torch.ones(7, 3)
    rows = lookup(tokens, weight)
    assert torch.equal(rows, F.embedding(tokens, weight))
    rows.backward(upstream)
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, 1 + expected)
    with torch.no_grad():
        assert torch.equal(lookup(tokens, weight), rows)


def test_adamw_without_compiler_has_differentiable_step():
    cpu_backend.remove_compiler_from_optimizers()
    start = torch.ones(2, requires_grad=True)
    weight = start.clone()
    weight.grad = torch.ones(2)

    torch.optim.AdamW([weight], differentiable=True).step()

    weight.sum().backward()
    assert start.grad is not None
    assert torch.all(start.grad > 0.9)
