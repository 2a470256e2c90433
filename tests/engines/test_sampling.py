"""Sampling from logits: distribution, truncation, support, log-probs and random streams."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aligner.engines.embedded.sampling import generate_uniforms, sample_tokens
from aligner.engines.engine_protocol import SamplingOptions
from aligner.errors import AlignerError


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_token_frequencies_follow_softmax_at_temperature(temperature):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, generator=generator) * 2  # two whole chunks and a partial one
    count = 200_000
    numbers = torch.rand(count, generator=generator, dtype=torch.float64)
    tokens = torch.cat(
        [
            sample_tokens(logits.repeat(len(part), 1), SamplingOptions(1, temperature), part)[0]
            for part in numbers.split(20_000)
        ]
    )
    expected = (logits.double() / temperature).softmax(-1) * count
    observed = torch.bincount(tokens, minlength=300).double()
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    assert chi_square < 299 + 5 * (2 * 299) ** 0.5  # mean 299, standard deviation 24.5


def test_token_is_inverse_of_cumulative_distribution():
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(1)) * 3
    numbers = torch.linspace(0, 1, 65, dtype=torch.float64)[:-1]
    tokens, logprobs, _ = sample_tokens(logits.clone(), SamplingOptions(1), numbers)
    cumulative = logits.double().softmax(-1).cumsum(-1)
    above = cumulative.gather(1, tokens[:, None]).squeeze(1)
    below = torch.where(
        tokens > 0, cumulative.gather(1, (tokens[:, None] - 1).clamp_min(0)).squeeze(1), 0.0
    )
    assert ((below <= numbers + 1e-6) & (numbers <= above + 1e-6)).all()
    torch.testing.assert_close(
        logprobs, logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    )


@pytest.mark.parametrize("number", [0.0, 0.5, 1.0 - 2.0**-53])
@pytest.mark.parametrize("allowed", [[0], [299], [127], [128], [5, 200], [130, 131]])
def test_token_of_probability_zero_is_never_sampled(number, allowed):
    logits = torch.full((1, 300), float("-inf"))
    logits[0, allowed] = 1.0
    token, logprob, _ = sample_tokens(
        logits, SamplingOptions(1), torch.tensor([number], dtype=torch.float64)
    )
    assert int(token) in allowed
    assert float(logprob) == pytest.approx(-np.log(len(allowed)))


def test_greedy_returns_argmax_and_logprob_at_temperature():
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(2))
    token, logprob, _ = sample_tokens(logits.clone(), SamplingOptions(1, 0.5, greedy=True), None)
    assert torch.equal(token, logits.argmax(-1))
    torch.testing.assert_close(logprob, (logits / 0.5).log_softmax(-1).amax(-1))


def test_random_streams_are_prefixes_and_differ_by_key():
    base = generate_uniforms((1, 2, 3), 8)
    assert np.array_equal(base[:5], generate_uniforms((1, 2, 3), 5))
    others = [generate_uniforms(name, 8) for name in ((0, 2, 3), (1, 3, 3), (1, 2, 4), (1, 3, 2))]
    assert all(not np.array_equal(base, other) for other in others)
    assert base.min() >= 0 and base.max() < 1


def exact_distribution(logits: torch.Tensor, options: SamplingOptions) -> torch.Tensor:
    """Return the sampling distribution, float64 [V], computed by sorting the whole vocabulary."""
    probabilities = (logits.double() / options.temperature).softmax(-1)
    order = sorted(range(len(logits)), key=lambda token: -float(probabilities[token]))
    order = [
        token for token in order if probabilities[token] >= options.min_p * probabilities[order[0]]
    ]
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


@pytest.mark.promise("sampling-follows-the-exact-distribution")
@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(1, temperature=0.6),
        SamplingOptions(1, top_k=20),
        SamplingOptions(1, temperature=1.5, top_k=1),
        SamplingOptions(1, top_p=0.8),
        SamplingOptions(1, temperature=2.5, top_p=0.97),  # more tokens than the first partial sort
        SamplingOptions(1, temperature=1.7, min_p=0.05),
        SamplingOptions(1, temperature=1.7, min_p=0.02, top_p=0.9),
        SamplingOptions(1, temperature=0.8, top_k=50, top_p=0.9, min_p=0.01),
    ],
    ids=["temperature", "top-k", "top-1", "top-p", "wide-top-p", "min-p", "min-p-top-p", "all"],
)
def test_ten_thousand_samples_follow_the_exact_distribution(options):
    count, logits = 10_000, 2 * torch.randn(900, generator=torch.Generator().manual_seed(5))
    streams = [
        generate_uniforms((11, prompt, sample), 1) for prompt in range(100) for sample in range(100)
    ]
    numbers = torch.from_numpy(np.concatenate(streams))
    tokens, logprobs, kept = sample_tokens(logits.repeat(count, 1), options, numbers)
    exact = exact_distribution(logits, options)
    observed = torch.bincount(tokens, minlength=900).double()
    assert float(observed[exact == 0].sum()) == 0
    # The chi-square test requires merging all tokens with an expected count below five.
    rare = exact * count < 5
    expected = torch.cat((exact[~rare], exact[rare].sum()[None])) * count
    found = torch.cat((observed[~rare], observed[rare].sum()[None]))
    degrees = int((expected > 0).sum()) - 1
    chi_square = float(((found - expected).square() / expected)[expected > 0].sum())
    assert chi_square <= degrees + 4 * (2 * degrees) ** 0.5
    # Without renormalize, log-probs are those of the full distribution at the temperature.
    assert kept is None
    torch.testing.assert_close(
        logprobs, (logits / options.temperature).log_softmax(-1)[tokens], atol=1e-5, rtol=0
    )


TRUNCATED = {
    "top-p": {"top_p": 0.95},
    "top-k": {"top_k": 20},
    "both": {"top_p": 0.95, "top_k": 20},
    "min-p": {"min_p": 0.05},
    "all": {"top_p": 0.9, "top_k": 50, "min_p": 0.01, "temperature": 1.7},
    "wide-top-p": {"top_p": 0.97, "temperature": 2.5},
    "one": {"top_k": 1},
}


@pytest.mark.parametrize("keys", TRUNCATED.values(), ids=TRUNCATED)
def test_support_and_renormalized_logprobs_are_exact(keys):
    options = SamplingOptions(1, renormalize=True, **keys)
    rows = 2 * torch.randn(3, 900, generator=torch.Generator().manual_seed(6))
    exact = [exact_distribution(row, options) for row in rows]
    numbers = torch.linspace(0, 1, 5001, dtype=torch.float64)[:-1]
    for row, distribution in zip(rows, exact, strict=True):
        tokens, logprobs, kept = sample_tokens(row.repeat(len(numbers), 1), options, numbers)
        assert kept is not None and kept.ids.dtype == torch.int32
        inside = distribution.nonzero()[:, 0].tolist()
        assert [sorted(ids.tolist()) for ids in kept.split_ids()] == [inside] * len(numbers)
        torch.testing.assert_close(logprobs.double(), distribution.log()[tokens], atol=1e-5, rtol=0)
        found = (
            torch.full((900,), -torch.inf, dtype=torch.float64)
            .index_copy(0, tokens, logprobs.double())
            .exp()
        )
        if len(inside) <= 50:
            assert float(found.sum()) == pytest.approx(1, abs=1e-5), "every one of them was drawn"
    # Each row of a call has its own support.
    _, _, kept = sample_tokens(rows.clone(), options, numbers[:3])
    assert [sorted(ids.tolist()) for ids in kept.split_ids()] == [
        each.nonzero()[:, 0].tolist() for each in exact
    ]


def test_renormalize_changes_no_token_and_needs_truncation():
    logits, numbers = (
        2 * torch.randn(64, 900, generator=torch.Generator().manual_seed(7)),
        torch.rand(64).double(),
    )
    is_stop_allowed = torch.arange(64) % 2 == 0
    for keys in ({}, {"min_new_tokens": 1, "stop_token_ids": (3, 5)}):
        plain, renormalized = (
            SamplingOptions(1, **keys),
            SamplingOptions(1, **keys, renormalize=True),
        )
        expected, got = (
            sample_tokens(logits.clone(), options, numbers, is_stop_allowed)
            for options in (plain, renormalized)
        )
        assert (
            torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1]) and got[2] is None
        )
    greedy = SamplingOptions(1, greedy=True, top_k=5, renormalize=True)
    assert sample_tokens(logits.clone(), greedy, None)[2] is None
    for keys in TRUNCATED.values():
        plain, renormalized = (
            SamplingOptions(1, **keys),
            SamplingOptions(1, **keys, renormalize=True),
        )
        assert torch.equal(
            sample_tokens(logits.clone(), plain, numbers)[0],
            sample_tokens(logits.clone(), renormalized, numbers)[0],
        )


def test_forbidden_stop_token_is_not_in_sampling_support():
    options = SamplingOptions(2, top_k=3, renormalize=True, stop_token_ids=(0,))
    logits, numbers = (
        torch.tensor([5.0, 1.0, 0.0, -1.0, -2.0]).repeat(2, 1),
        torch.zeros(2, dtype=torch.float64),
    )
    token, logprob, kept = sample_tokens(
        logits.clone(), options, numbers, torch.tensor([True, False])
    )
    assert token.tolist() == [0, 1]
    assert [ids.tolist() for ids in kept.split_ids()] == [[0, 1, 2], [1, 2, 3]]
    wanted = torch.stack([logits[0, :3].log_softmax(-1)[0], logits[0, 1:4].log_softmax(-1)[0]])
    torch.testing.assert_close(logprob, wanted)


def test_stop_tokens_are_forbidden_per_row():
    logits = torch.tensor([5.0, 1.0, 0.0]).repeat(4, 1)
    options = SamplingOptions(2, stop_token_ids=(0,), greedy=True)
    token, logprob, _ = sample_tokens(
        logits.clone(), options, None, torch.tensor([True, False, True, False])
    )
    assert token.tolist() == [0, 1, 0, 1]
    torch.testing.assert_close(logprob, logits[0].log_softmax(-1)[token])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0: must be at least 1"),
        (
            {"max_new_tokens": 4, "min_new_tokens": 5},
            "min_new_tokens=5: must be between 0 and max_new_tokens=4",
        ),
        ({"max_new_tokens": 4, "temperature": 0.0}, "temperature=0.0: must be above 0"),
        ({"max_new_tokens": 4, "top_k": -1}, "top_k=-1: must be at least 0"),
        ({"max_new_tokens": 4, "top_p": 1.5}, "top_p=1.5: must be above 0 and at most 1"),
        (
            {"max_new_tokens": 4, "min_p": -0.5},
            "min_p=-0.5: must be at least 0 and at most 1; 0 disables min-p",
        ),
    ],
)
def test_invalid_sampling_option_is_refused(options, message):
    with pytest.raises(AlignerError, match=message):
        SamplingOptions(**options)
