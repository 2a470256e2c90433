"""Attention with soft caps and sinks equals the same formula in one piece, in float64."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from aligner.models import score_attention

ROWS, HEADS, GROUPS, LENGTH, DIMENSIONS, SCALE = 2, 6, 3, 7, 4, 0.8
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
# Row 0 has another mask than row 1.
MASKS: Mapping[str, Tensor | None] = {
    "causal": None,
    "window": CAUSAL.triu(-2),
    "rows": torch.stack([CAUSAL, CAUSAL.triu(-1)]),
}


def inputs(has_sinks: bool) -> list[Tensor]:
    """Return queries, keys, values, and sinks if `has_sinks`."""
    generator = torch.Generator().manual_seed(3)
    sizes = [(ROWS, heads, LENGTH, DIMENSIONS) for heads in (HEADS, GROUPS, GROUPS)]
    shapes = [*sizes, *([(HEADS,)] if has_sinks else [])]
    return [torch.randn(size, generator=generator).requires_grad_() for size in shapes]


def attend_at_once(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softcap: float | None, sinks
) -> Tensor:
    key, value = (tensor.repeat_interleave(HEADS // GROUPS, 1) for tensor in (key, value))
    scores = query @ key.mT * SCALE
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    visible = CAUSAL if mask is None else mask.view(-1, 1, LENGTH, LENGTH)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is None:
        return scores.softmax(-1) @ value
    column = sinks.view(1, -1, 1, 1).expand(ROWS, HEADS, LENGTH, 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ value


@pytest.mark.parametrize("block", [1, 200, 1 << 20], ids=["query", "queries", "all"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("softcap", "has_sinks"), [(1.5, False), (None, True), (1.5, True), (None, False)]
)
def test_score_attention_equals_formula(monkeypatch, softcap, has_sinks, mask, block):
    monkeypatch.setattr(score_attention, "_BLOCK_ELEMENTS", block)
    tensors = inputs(has_sinks)
    sinks = tensors[3] if has_sinks else None
    output = score_attention.attend(
        *tensors[:3], MASKS[mask], scale=SCALE, softcap=softcap, sinks=sinks
    )
    upstream = torch.linspace(-1, 2, output.numel()).view(output.shape)
    gradients = torch.autograd.grad(output, tensors, upstream)

    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = attend_at_once(
        *exact[:3], MASKS[mask], softcap, sinks=exact[3] if has_sinks else None
    )
    torch.testing.assert_close(output, expected.float(), rtol=1e-5, atol=1e-6)
    expected_gradients = torch.autograd.grad(expected, exact, upstream.double())
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted.float(), rtol=1e-5, atol=1e-5)


def test_score_attention_in_bfloat16_is_close_to_formula():
    tensors = [tensor.detach().bfloat16() for tensor in inputs(True)]
    output = score_attention.attend(*tensors[:3], None, scale=SCALE, softcap=1.5, sinks=tensors[3])
    exact = [tensor.double() for tensor in tensors]
    expected = attend_at_once(*exact[:3], None, 1.5, sinks=exact[3])
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), expected, rtol=0.02, atol=0.02)
