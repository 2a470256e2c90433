"""The gated delta rule equals transformers' and its own form for single tokens."""

from __future__ import annotations

import pytest
import torch

from aligner.models import delta_net
from aligner.models.shape import DeltaNet

NET = DeltaNet(key_heads=2, value_heads=6, key_dim=5, value_dim=7, conv_width=4)
TOKENS = 19


def inputs(rows: int = 3, tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    heads = (rows, tokens, NET.value_heads)
    keys = torch.randn(2, *heads, NET.key_dim, generator=generator)
    query, key = keys / keys.norm(dim=-1, keepdim=True)
    return {
        "query": query,
        "key": key,
        "value": torch.randn(*heads, NET.value_dim, generator=generator),
        "beta": torch.rand(heads, generator=generator),
        "log_decay": -torch.rand(heads, generator=generator),
    }


@pytest.mark.parametrize("chunk_tokens", [1, 4, 19, 64])
def test_chunked_rule_equals_single_steps(chunk_tokens):
    values = inputs()
    output, state = delta_net.apply_chunked_rule(**values, chunk_tokens=chunk_tokens)
    expected_state = torch.zeros(3, NET.value_heads, NET.key_dim, NET.value_dim)
    for token in range(TOKENS):
        step = {name: value[:, token] for name, value in values.items()}
        expected, expected_state = delta_net.apply_step(**step, state=expected_state)
        torch.testing.assert_close(output[:, token], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, expected_state, rtol=1e-5, atol=1e-5)


def test_chunked_rule_and_gradients_equal_transformers():
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    tokens = 150
    own = {name: value.requires_grad_() for name, value in inputs(2, tokens).items()}
    output, state = delta_net.apply_chunked_rule(**own)
    theirs = {name: value.detach().clone().requires_grad_() for name, value in own.items()}
    expected, expected_state = torch_chunk_gated_delta_rule(
        # transformers scales the queries itself
        query=theirs["query"] * NET.key_dim**0.5,
        key=theirs["key"],
        value=theirs["value"],
        g=theirs["log_decay"],
        beta=theirs["beta"],
        output_final_state=True,
    )
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, expected_state, rtol=1e-5, atol=1e-5)

    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(4))
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    for name, value in own.items():
        expected_gradient = theirs[name].grad
        difference = (value.grad - expected_gradient).abs().max()
        assert difference < 1e-5 * expected_gradient.abs().max(), name


def test_tokens_without_correction_and_decay_keep_the_state():
    values = inputs()
    values["beta"][:, 11:] = 0.0
    values["log_decay"][:, 11:] = 0.0
    _, state = delta_net.apply_chunked_rule(**values, chunk_tokens=4)
    _, expected = delta_net.apply_chunked_rule(
        **{name: value[:, :11] for name, value in values.items()}
    )
    torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-6)


def test_convolution_with_history_continues_a_sequence():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 9, NET.channels, generator=generator)
    weight = torch.randn(NET.channels, 1, NET.conv_width, generator=generator)
    whole = delta_net.convolve(x, weight)
    expected = torch.nn.functional.conv1d(
        x.mT, weight, padding=NET.conv_width - 1, groups=NET.channels
    )
    torch.testing.assert_close(whole, torch.nn.functional.silu(expected[..., :9]).mT)
    continued = delta_net.convolve(x[:, 5:], weight, x[:, 2:5])
    torch.testing.assert_close(continued, whole[:, 5:])
