from __future__ import annotations

import numpy as np
import pytest
import torch

from aligner.engines.embedded.sampling import choose, uniforms


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_frequencies_follow_the_softmax_at_the_temperature(temperature):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, generator=generator) * 2  # more than two chunks, and a part of one
    count = 200_000
    numbers = torch.rand(count, generator=generator, dtype=torch.float64)
    drawn = torch.cat([choose(logits.repeat(len(part), 1), temperature, part)[0] for part in numbers.split(20_000)])
    expected = (logits.double() / temperature).softmax(-1) * count
    observed = torch.bincount(drawn, minlength=300).double()
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    assert chi_square < 299 + 5 * (2 * 299) ** 0.5  # mean 299, standard deviation 24.5


def test_the_token_is_the_inverse_of_the_cumulative_distribution():
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(1)) * 3
    numbers = torch.linspace(0, 1, 65, dtype=torch.float64)[:-1]
    tokens, logprobs = choose(logits.clone(), 1.0, numbers)
    cumulative = logits.double().softmax(-1).cumsum(-1)
    above = cumulative.gather(1, tokens[:, None]).squeeze(1)
    below = torch.where(tokens > 0, cumulative.gather(1, (tokens[:, None] - 1).clamp_min(0)).squeeze(1), 0.0)
    assert ((below <= numbers + 1e-6) & (numbers <= above + 1e-6)).all()
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1))


@pytest.mark.parametrize("number", [0.0, 0.5, 1.0 - 2.0**-53])
@pytest.mark.parametrize("allowed", [[0], [299], [127], [128], [5, 200], [130, 131]])
def test_a_token_of_probability_zero_is_never_drawn(number, allowed):
    logits = torch.full((1, 300), float("-inf"))
    logits[0, allowed] = 1.0
    token, logprob = choose(logits, 1.0, torch.tensor([number], dtype=torch.float64))
    assert int(token) in allowed
    assert float(logprob) == pytest.approx(-np.log(len(allowed)))


def test_greedy_takes_the_best_token_and_its_logprob_at_the_temperature():
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(2))
    token, logprob = choose(logits.clone(), 0.5, None)
    assert torch.equal(token, logits.argmax(-1))
    torch.testing.assert_close(logprob, (logits / 0.5).log_softmax(-1).amax(-1))


def test_streams_are_prefixes_of_each_other_and_differ_by_every_part_of_their_name():
    base = uniforms(1, 2, 3, 8)
    assert np.array_equal(base[:5], uniforms(1, 2, 3, 5))
    others = [uniforms(*name, 8) for name in ((0, 2, 3), (1, 3, 3), (1, 2, 4), (1, 3, 2))]
    assert all(not np.array_equal(base, other) for other in others)
    assert base.min() >= 0 and base.max() < 1
