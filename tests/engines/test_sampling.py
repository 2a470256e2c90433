from __future__ import annotations

import numpy as np
import pytest
import torch

from aligner.engines.embedded.sampling import choose, uniforms
from aligner.engines.engine_protocol import SamplingOptions
from aligner.errors import AlignerError


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_frequencies_follow_the_softmax_at_the_temperature(temperature):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, generator=generator) * 2  # more than two chunks, and a part of one
    count = 200_000
    numbers = torch.rand(count, generator=generator, dtype=torch.float64)
    drawn = torch.cat(
        [choose(logits.repeat(len(part), 1), SamplingOptions(1, temperature), part)[0] for part in numbers.split(20_000)]
    )
    expected = (logits.double() / temperature).softmax(-1) * count
    observed = torch.bincount(drawn, minlength=300).double()
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    assert chi_square < 299 + 5 * (2 * 299) ** 0.5  # mean 299, standard deviation 24.5


def test_the_token_is_the_inverse_of_the_cumulative_distribution():
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(1)) * 3
    numbers = torch.linspace(0, 1, 65, dtype=torch.float64)[:-1]
    tokens, logprobs = choose(logits.clone(), SamplingOptions(1), numbers)
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
    token, logprob = choose(logits, SamplingOptions(1), torch.tensor([number], dtype=torch.float64))
    assert int(token) in allowed
    assert float(logprob) == pytest.approx(-np.log(len(allowed)))


def test_greedy_takes_the_best_token_and_its_logprob_at_the_temperature():
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(2))
    token, logprob = choose(logits.clone(), SamplingOptions(1, 0.5, greedy=True), None)
    assert torch.equal(token, logits.argmax(-1))
    torch.testing.assert_close(logprob, (logits / 0.5).log_softmax(-1).amax(-1))


def test_streams_are_prefixes_of_each_other_and_differ_by_every_part_of_their_name():
    base = uniforms(1, 2, 3, 8)
    assert np.array_equal(base[:5], uniforms(1, 2, 3, 5))
    others = [uniforms(*name, 8) for name in ((0, 2, 3), (1, 3, 3), (1, 2, 4), (1, 3, 2))]
    assert all(not np.array_equal(base, other) for other in others)
    assert base.min() >= 0 and base.max() < 1


def exact_distribution(logits: torch.Tensor, options: SamplingOptions) -> torch.Tensor:
    """float64 [V], worked out with a sort of the whole vocabulary."""
    probabilities = (logits.double() / options.temperature).softmax(-1)
    order = sorted(range(len(logits)), key=lambda token: -float(probabilities[token]))
    kept = order[: options.top_k or None]
    whole = sum(float(probabilities[token]) for token in kept)
    mass, nucleus = 0.0, []
    for token in kept:
        if mass >= options.top_p * whole:
            break
        nucleus.append(token)
        mass += float(probabilities[token])
    exact = torch.zeros(len(logits), dtype=torch.float64)
    exact[nucleus] = probabilities[nucleus] / mass
    return exact


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(1, temperature=0.6),
        SamplingOptions(1, top_k=20),
        SamplingOptions(1, temperature=1.5, top_k=1),
        SamplingOptions(1, top_p=0.8),
        SamplingOptions(1, temperature=2.5, top_p=0.97),  # more tokens than are sorted at first
        SamplingOptions(1, temperature=0.8, top_k=50, top_p=0.9),
    ],
    ids=["temperature", "top-k", "top-1", "top-p", "wide-top-p", "all"],
)
def test_ten_thousand_samples_follow_the_exact_distribution(options):
    count, logits = 10_000, 2 * torch.randn(900, generator=torch.Generator().manual_seed(5))
    streams = [uniforms(11, prompt, sample, 1) for prompt in range(100) for sample in range(100)]
    numbers = torch.from_numpy(np.concatenate(streams))
    drawn, logprobs = choose(logits.repeat(count, 1), options, numbers)
    exact = exact_distribution(logits, options)
    observed = torch.bincount(drawn, minlength=900).double()
    assert float(observed[exact == 0].sum()) == 0
    # Tokens that are expected fewer than five times are counted as one, as the test's theory asks.
    rare = exact * count < 5
    expected = torch.cat((exact[~rare], exact[rare].sum()[None])) * count
    found = torch.cat((observed[~rare], observed[rare].sum()[None]))
    degrees = int((expected > 0).sum()) - 1
    chi_square = float(((found - expected).square() / expected)[expected > 0].sum())
    assert chi_square <= degrees + 4 * (2 * degrees) ** 0.5
    # Log-probs are those of all tokens at the temperature, whatever was cut off.
    torch.testing.assert_close(logprobs, (logits / options.temperature).log_softmax(-1)[drawn], atol=1e-5, rtol=0)


def test_a_stop_token_may_be_forbidden_row_by_row():
    logits = torch.tensor([5.0, 1.0, 0.0]).repeat(4, 1)
    options = SamplingOptions(2, stop_token_ids=(0,), greedy=True)
    token, logprob = choose(logits.clone(), options, None, torch.tensor([True, False, True, False]))
    assert token.tolist() == [0, 1, 0, 1]
    torch.testing.assert_close(logprob, logits[0].log_softmax(-1)[token])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0: must be at least 1"),
        ({"max_new_tokens": 4, "min_new_tokens": 5}, "min_new_tokens=5: must be within 0 and max_new_tokens=4"),
        ({"max_new_tokens": 4, "temperature": 0.0}, "temperature=0.0: must be above 0"),
        ({"max_new_tokens": 4, "top_k": -1}, "top_k=-1: must be at least 0"),
        ({"max_new_tokens": 4, "top_p": 1.5}, "top_p=1.5: must be above 0 and at most 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(AlignerError, match=message):
        SamplingOptions(**options)
