"""Attention over packed sequences equals dense attention with an explicit mask, with and without
context parallelism; the RMS norm equals torch's."""

from __future__ import annotations

import pytest
import torch

from tests.megatron import jobs

LENGTHS = [9, 1, 16, 6]


def dense(
    whole: dict[str, torch.Tensor], window: int | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return attention [N, L, heads·dim] with an explicit mask, and the gradients of its weighted
    sum."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in whole.items()}
    query = leaves["query"]
    key, value = (
        leaves[name].repeat_interleave(query.shape[2] // leaves[name].shape[2], 2)
        for name in ("key", "value")
    )
    scores = torch.einsum("nqhd,nkhd->nhqk", query, key) / query.shape[-1] ** 0.5
    distance = torch.arange(query.shape[1])[:, None] - torch.arange(query.shape[1])
    seen = (distance >= 0) & (distance <= (window if window is not None else query.shape[1]))
    attended = torch.einsum(
        "nhqk,nkhd->nqhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value
    ).flatten(2)
    inside = torch.arange(query.shape[1]) < torch.tensor(LENGTHS)[:, None]
    attended = torch.where(inside[..., None], attended, 0.0)
    (attended * jobs.attention_weights(attended)).sum().backward()
    return attended.detach(), {name: leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("window", [None, 0, 3, 100])
@pytest.mark.parametrize(
    "layout", [{}, {"context": 2}, {"context": 4}], ids=["whole", "cp2", "cp4"]
)
def test_packed_attention_equals_dense_attention(pool, layout, window):
    generator = torch.Generator().manual_seed(4)
    heads = {"query": 4, "key": 2, "value": 2}
    whole = {
        name: torch.randn(len(LENGTHS), max(LENGTHS), count, 8, generator=generator)
        for name, count in heads.items()
    }
    expected, gradients = dense(whole, window)
    for attended, given in pool.run(
        jobs.attend, layout.get("context", 1), layout, whole, LENGTHS, window
    ):
        torch.testing.assert_close(attended, expected, rtol=1e-5, atol=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(given[name], gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_and_gradients_equal_torch(pool, dtype):
    draw = torch.Generator().manual_seed(5)
    x, gradient = (torch.randn(11, 1, 48, generator=draw).to(dtype) for _ in range(2))
    weight = (1 + 0.3 * torch.randn(48, generator=draw)).to(dtype)
    [(normed, *gradients)] = pool.run(jobs.rms_norm, 1, x, weight, gradient)
    assert torch.equal(normed, torch.nn.functional.rms_norm(x, (48,), weight, 1e-5))
    leaves = [x.double().requires_grad_(), weight.double().requires_grad_()]
    exact = torch.autograd.grad(
        torch.nn.functional.rms_norm(leaves[0], (48,), leaves[1], 1e-5), leaves, gradient.double()
    )
    for given, expected in zip(gradients, exact, strict=True):
        torch.testing.assert_close(given, expected.to(dtype))
