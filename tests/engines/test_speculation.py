"""Speculative decoding changes the number of forward passes, but not the responses."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from aligner.config.compose import compose_config
from aligner.data.types import Sample
from aligner.engines.embedded.speculation import PromptLookup
from aligner.engines.engine_loop import SingleResponses
from aligner.engines.engine_protocol import (
    GenerationCounts,
    GenerationRequest,
    SamplingOptions,
)
from aligner.schema import SpeculationConfig
from tests.engines.engines import generate
from tests.engines.test_embedded import make_engine, make_prompts, response, save_model
from tests.engines.test_generation import begin, record_steps

GUESSES = SpeculationConfig(tokens=4, ngram=1, rows=3)
OPTIONS = {
    "drawn": SamplingOptions(40, temperature=0.25),
    "greedy": SamplingOptions(40, greedy=True),
    "kept": SamplingOptions(40, temperature=0.4, top_p=0.9, top_k=30, renormalize=True),
    "stops": SamplingOptions(
        40, temperature=0.4, min_new_tokens=9, stop_token_ids=tuple(range(0, 200, 5))
    ),
}


LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 3,
}


@pytest.fixture(scope="module", params=["llama", "mistral", "deepseek_v3"])
def directory(request, tmp_path_factory) -> Path:
    settings = {"mistral": {"sliding_window": 4}, "deepseek_v3": LATENT}.get(request.param, {})
    return save_model(
        tmp_path_factory.mktemp(request.param), request.param, tie_word_embeddings=True, **settings
    )


def requests() -> list[GenerationRequest]:
    """Return requests with different length limits."""
    return [
        GenerationRequest(prompt, 0, limit)
        for prompt, limit in zip(make_prompts(), (40, 25, 38, 40, 31), strict=True)
    ]


def assert_same(samples: list[Sample], others: list[Sample]) -> None:
    assert [response(sample) for sample in samples] == [response(sample) for sample in others]
    # A low temperature amplifies rounding errors.
    for sample, other in zip(samples, others, strict=True):
        torch.testing.assert_close(sample.engine_logprobs, other.engine_logprobs, atol=1e-4, rtol=0)


def drafted(directory: Path, options: SamplingOptions, **settings) -> tuple[list[Sample], int, int]:
    """Generate speculatively; return samples, number of draft tokens, number of accepted tokens."""
    engine = make_engine(directory, batch_size=3, speculation=GUESSES, **settings)
    samples = generate(engine, requests(), options)
    counts = engine.take_counts()
    return samples, counts.draft_tokens, counts.accepted_tokens


def test_lookup_drafts_tokens_after_last_ngram_match():
    lookup = PromptLookup(2)
    assert lookup.draft([1, 2, 3], 4) == []
    assert lookup.draft([1, 2, 3, 4, 1, 2], 3) == [3, 4, 1]
    assert lookup.draft([1, 2, 3, 4, 1, 2, 9, 1, 2], 2) == [9, 1], "the last time counts"
    assert lookup.draft([1, 2, 3, 4, 1, 2, 9, 1, 2, 7, 7, 7], 5) == [7] * 5, "a loop goes on"
    assert PromptLookup(3).draft([1, 2], 4) == []


@pytest.mark.promise("speculation-changes-no-sample")
@pytest.mark.parametrize("name", OPTIONS)
def test_speculative_samples_equal_plain_samples(directory, name):
    options = OPTIONS[name]
    samples, guessed, accepted = drafted(directory, options)
    plain = generate(make_engine(directory, batch_size=3), requests(), options)
    assert_same(samples, plain)
    assert 0 < accepted < guessed, "some are right and some are wrong"
    for one, other in zip(samples, plain, strict=True):
        assert one.finish_reason == other.finish_reason
        assert torch.equal(one.weight_versions, other.weight_versions)
        if options.renormalize:
            assert [ids.tolist() for ids in one.sampling_support.split_ids()] == [
                ids.tolist() for ids in other.sampling_support.split_ids()
            ]


@pytest.mark.promise("speculation-changes-no-sample")
def test_accepted_draft_tokens_save_steps(directory):
    engine, options = (
        make_engine(directory, batch_size=1, speculation=GUESSES),
        SamplingOptions(40, greedy=True),
    )
    steps = record_steps(engine)
    samples = generate(engine, requests(), options)
    counts = engine.take_counts()
    guessed, accepted = counts.draft_tokens, counts.accepted_tokens
    assert len(steps) == sum(len(response(sample)) for sample in samples) - accepted
    assert 0 < accepted <= guessed == sum(step.tokens_per_row - 1 for step in steps)
    assert engine.take_counts() == GenerationCounts()


def test_no_draft_tokens_above_speculation_rows(directory):
    engine = make_engine(directory, speculation=GUESSES)
    steps = record_steps(engine)
    generate(engine, requests(), SamplingOptions(40, greedy=True))
    assert {
        step.tokens_per_row for step in steps if len(step.tokens) // step.tokens_per_row > 3
    } == {1}
    assert {
        step.tokens_per_row for step in steps if len(step.tokens) // step.tokens_per_row <= 3
    } > {1}


def test_exact_speculative_samples_equal_plain_bitwise(directory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        wide = save_model(
            directory.parent / f"{directory.name}-exact", "llama", intermediate_size=64
        )
        options = OPTIONS["drawn"]
        samples, _, accepted = drafted(wide, options, exact=True)
        plain = generate(make_engine(wide, batch_size=3, exact=True), requests(), options)
    finally:
        torch.set_num_threads(threads)
    assert accepted > 0
    for one, other in zip(samples, plain, strict=True):
        assert torch.equal(one.tokens, other.tokens) and torch.equal(
            one.engine_logprobs, other.engine_logprobs
        )


def test_speculation_equals_plain_after_update_and_transfer(directory):
    options = SamplingOptions(40, greedy=True)
    found = []
    for speculation in (SpeculationConfig(), GUESSES):
        engine = make_engine(directory, batch_size=3, speculation=speculation)
        generation, samples = SingleResponses(engine).start(requests(), options), {}
        for _ in range(4):
            samples |= generation.step()
        begin(engine, directory, 1, "interrupt").commit()
        for _ in range(4):
            samples |= generation.step()
        begun = dict(generation.interrupt())
        generation.cancel()
        rest = [
            dataclasses.replace(requests()[place], partial_sample=sample)
            for place, sample in begun.items()
        ]
        samples |= zip(begun, generate(engine, rest, options), strict=True)
        found.append([samples[place] for place in range(5)])
    assert_same(*found)


def test_speculation_is_refused_with_routing_replay():
    from aligner.checks.engine import _find_sampling_problems

    config = compose_config(
        ["experiment=arithmetic", "algorithm.routing_replay=true", "engine.speculation.tokens=4"]
    )
    (problem,) = _find_sampling_problems(config)
    assert problem.startswith(
        "engine.speculation.tokens=4: is not supported with algorithm.routing_replay=true"
    )
