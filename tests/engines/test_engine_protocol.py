"""The behaviour that all engines share, in one suite; TensorRT-LLM is a strict fake here."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Prompt, create_empty_samples
from aligner.engines.engine_loop import SingleResponses
from aligner.engines.engine_protocol import GenerationEngine, GenerationRequest, SamplingOptions
from aligner.errors import AlignerError
from tests.engines import engines
from tests.engines.engines import (
    generate,
    greedy,
    prompts,
    publish,
    requests,
    response,
    whole_logprobs,
    write,
)
from tests.engines.vllm.shared_clients import NEEDED

STOPS = tuple(range(0, engines.VOCABULARY, 6))
TRIES = 5
"""Attempts of a test that needs responses in flight: vLLM is a separate process, which may finish
them while the test looks at its samples."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Path]:
    """A function that saves a tiny model for a seed and an engine kind."""

    @functools.cache
    def save(seed: int, layers: int, head_dim: int) -> Path:
        return engines.save_tiny(
            tmp_path_factory.mktemp("model"), seed, layers=layers, head_dim=head_dim
        )

    # vLLM has no CPU kernels for smaller heads. Its model is deeper, so that responses are still in
    # flight when a test looks at them.
    return lambda seed, kind: save(seed, *((64, 32) if kind == "vllm" else (2, 8)))


@pytest.fixture
def directory(saved: Callable[[int, str], Path], kind: str) -> Path:
    return saved(0, kind)


@pytest.fixture
def other_directory(saved: Callable[[int, str], Path], kind: str) -> Path:
    """A model of the same shape with other weights."""
    return saved(1, kind)


@pytest.fixture
def model(directory: Path) -> Any:
    return engines.reference_model(directory)


@pytest.fixture(params=[*engines.KINDS, pytest.param("vllm", marks=NEEDED)])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def bare(kind: str, directory: Path) -> Iterator[GenerationEngine]:
    """An engine without weights."""
    with engines.engine_of(kind, directory) as engine:
        yield engine


@pytest.fixture
def engine(bare: GenerationEngine, directory: Path) -> GenerationEngine:
    publish(bare, directory, 0)
    return bare


@pytest.mark.promise("greedy-text-equals-transformers")
def test_greedy_text_equals_transformers(engine, model):
    samples = generate(engine, requests(), SamplingOptions(10, greedy=True))
    for prompt, sample in zip(prompts(), samples, strict=True):
        assert response(sample) == greedy(model, prompt.tokens, 10)
        assert torch.equal(sample.tokens[: sample.prompt_length], prompt.tokens)
        assert (sample.prompt_id, sample.prompt_length) == (prompt.id, len(prompt.tokens))
        assert sample.finish_reason == "length"
        assert (sample.tokens.dtype, sample.engine_logprobs.dtype) == (torch.int64, torch.float32)
        assert sample.weight_versions.tolist() == [0] * 10


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(8, temperature=0.7),
        SamplingOptions(8, top_k=5, temperature=1.3),
        SamplingOptions(8, top_p=0.5),
        SamplingOptions(8, greedy=True, temperature=0.5),
        SamplingOptions(8, min_new_tokens=6, stop_token_ids=STOPS),
    ],
    ids=["temperature", "top_k", "top_p", "greedy", "min_new_tokens"],
)
def test_logprobs_equal_full_distribution_at_temperature(engine, kind, model, options):
    if kind == "tensorrt_llm" and options.temperature != 1 and (options.greedy or options.top_k):
        pytest.skip("TensorRT-LLM returns no such log-probs (docs/tensorrt_llm.md)")
    for sample in generate(engine, requests(2), options):
        torch.testing.assert_close(
            sample.engine_logprobs,
            whole_logprobs(model, sample, options.temperature),
            atol=1e-4,
            rtol=0,
        )


@pytest.mark.parametrize("keys", [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str)
def test_sampling_support_is_returned_or_refused(engine, kind, model, keys):
    options = SamplingOptions(8, temperature=1.3, renormalize=True, **keys)
    if kind in ("tensorrt_llm", "vllm"):
        message = "vLLM: returning the sampling support (kept token ids) is not supported"
        if kind == "tensorrt_llm":
            requested = (
                "min_p=0.1"
                if "min_p" in keys
                else "returning the sampling support (kept token ids)"
            )
            message = f"TensorRT-LLM: {requested} is supported by only some releases"
        with pytest.raises(AlignerError, match=re.escape(f"{message}; set engine.kind=embedded")):
            SingleResponses(engine).start(requests(), options)
        return
    for sample in generate(engine, requests(2), options):
        assert sample.sampling_support is not None
        with torch.no_grad():
            logits = (
                model(sample.tokens[None]).logits[0, sample.prompt_length - 1 : -1]
                / options.temperature
            )
        for row, token, logprob, ids in zip(
            logits,
            sample.response,
            sample.engine_logprobs,
            sample.sampling_support.split_ids(),
            strict=True,
        ):
            assert token in ids
            among = row[ids].log_softmax(-1)[ids == token]
            torch.testing.assert_close(logprob[None], among, atol=1e-4, rtol=0)


def test_sample_depends_only_on_seed_prompt_and_index(kind, directory, engine):
    wanted = requests(3)
    batched = generate(engine, wanted, SamplingOptions(8))
    backwards = generate(engine, wanted[::-1], SamplingOptions(8))[::-1]
    (alone,) = generate(engine, wanted[4:5], SamplingOptions(8))
    assert [response(sample) for sample in batched] == [response(sample) for sample in backwards]
    assert response(alone) == response(batched[4])
    assert [(sample.prompt_id, sample.sample_index) for sample in batched] == [
        (request.prompt.id, request.sample_index) for request in wanted
    ]
    assert len({tuple(response(sample)) for sample in batched[:3]}) == 3
    with engines.engine_of(kind, directory, seed=8) as other:
        publish(other, directory, 0)
        assert [response(sample) for sample in generate(other, wanted, SamplingOptions(8))] != [
            response(sample) for sample in batched
        ]


def test_narrow_distribution_equals_greedy(engine):
    wanted = [
        response(sample) for sample in generate(engine, requests(), SamplingOptions(6, greedy=True))
    ]
    for options in (
        SamplingOptions(6, top_k=1),
        SamplingOptions(6, top_p=1e-6),
        # the lowest temperature of vLLM
        SamplingOptions(6, temperature=1e-2),
    ):
        assert [response(sample) for sample in generate(engine, requests(), options)] == wanted


def test_response_ends_at_first_stop_token(engine):
    free = generate(engine, requests(8), SamplingOptions(12))
    stopped = generate(engine, requests(8), SamplingOptions(12, stop_token_ids=STOPS))
    assert {sample.finish_reason for sample in stopped} == {"stop", "length"}
    for unlimited, sample in zip(free, stopped, strict=True):
        tokens = response(unlimited)
        ends = [at for at, token in enumerate(tokens) if token in STOPS]
        assert response(sample) == (tokens[: ends[0] + 1] if ends else tokens)
        assert sample.finish_reason == ("stop" if ends else "length")
        assert len(sample.engine_logprobs) == len(sample.weight_versions) == len(response(sample))


def test_no_stop_token_before_min_new_tokens(engine):
    samples = generate(
        engine, requests(4), SamplingOptions(12, min_new_tokens=5, stop_token_ids=STOPS)
    )
    assert all(token not in STOPS for sample in samples for token in response(sample)[:5])
    assert any(len(response(sample)) == 6 and sample.finish_reason == "stop" for sample in samples)


@pytest.mark.parametrize("min_new_tokens", [0, 4])
def test_response_ends_at_first_stop_string(engine, directory, min_new_tokens):
    tokenizer, stops = Tokenizer(directory), ("abbaba", "bbbbbb")
    limits = SamplingOptions(12, min_new_tokens=min_new_tokens)
    free = generate(engine, requests(8), limits)
    stopped = generate(engine, requests(8), dataclasses.replace(limits, stop=stops))
    assert {sample.finish_reason for sample in stopped} == {"stop", "length"}
    for unlimited, sample in zip(free, stopped, strict=True):
        tokens = response(unlimited)
        texts = [tokenizer.decode(tokens[min_new_tokens:end]) for end in range(1, len(tokens) + 1)]
        ends = [end for end, text in enumerate(texts, 1) if any(stop in text for stop in stops)]
        assert response(sample) == (tokens[: ends[0]] if ends else tokens)
        assert sample.finish_reason == ("stop" if ends else "length")
        assert len(sample.engine_logprobs) == len(sample.weight_versions) == len(response(sample))


def test_stop_string_is_found_across_an_interruption(engine):
    # external engines restart the random stream after an interruption
    options = SamplingOptions(12, greedy=True, stop=("abbaba", "bbbbbb"))
    wanted = generate(engine, requests(8), options)
    for steps in range(1, 6):
        generation = SingleResponses(engine).start(requests(8), options)
        samples = dict(itertools.chain.from_iterable(generation.step() for _ in range(steps)))
        samples |= dict(generation.interrupt())
        rest = [
            dataclasses.replace(requests(8)[index], partial_sample=sample)
            for index, sample in samples.items()
            if sample.finish_reason == "unfinished"
        ]
        resumed = iter(generate(engine, rest, options))
        for index, sample in samples.items():
            complete = next(resumed) if sample.finish_reason == "unfinished" else sample
            assert response(complete) == response(wanted[index])
            assert complete.finish_reason == wanted[index].finish_reason


def test_stop_strings_without_tokenizer_are_refused(bare, directory):
    publish(bare, directory, 0)
    bare._tokenizer_directory = None
    with pytest.raises(
        AlignerError, match="stop strings and grammars require the model's tokenizer"
    ):
        generate(bare, requests(), SamplingOptions(4, stop=("a",)))


def test_each_request_has_its_own_length_limit(engine, model):
    wanted = [
        dataclasses.replace(one, max_new_tokens=limit)
        for one, limit in zip(requests(), (3, None, 9, 1), strict=True)
    ]
    samples = generate(engine, wanted, SamplingOptions(6, greedy=True))
    assert [len(response(sample)) for sample in samples] == [3, 6, 6, 1]
    for request, sample in zip(wanted, samples, strict=True):
        assert response(sample) == greedy(model, request.prompt.tokens, 6)[: len(response(sample))]


def test_steps_return_each_response_once_with_its_index(engine, kind):
    wanted = [
        dataclasses.replace(one, max_new_tokens=limit)
        for one, limit in zip(requests(), (9, 1, 4, 2), strict=True)
    ]
    generation = SingleResponses(engine).start(wanted, SamplingOptions(9))
    found: dict[int, Any] = {}
    while not generation.is_done:
        for place, sample in generation.step():
            assert place not in found
            found[place] = sample
    assert generation.step() == []
    # An external engine computes on its own: several responses may complete between two steps.
    assert not kind.startswith("embedded") or next(iter(found)) == 1
    assert [len(response(found[place])) for place in range(4)] == [9, 1, 4, 2]
    assert generate(engine, [], SamplingOptions(3)) == []


def test_new_weights_change_tokens_and_versions(engine, directory, other_directory):
    options = SamplingOptions(5, greedy=True)
    before = generate(engine, requests(), options)
    publish(engine, other_directory, 5)
    assert engine.version == 5
    changed = engines.reference_model(other_directory)
    for prompt, old, new in zip(
        prompts(), before, generate(engine, requests(), options), strict=True
    ):
        assert new.weight_versions.tolist() == [5] * 5
        assert response(new) == greedy(changed, prompt.tokens, 5) != response(old)


def _half_way(engine: GenerationEngine) -> Any:
    """Start a generation, and run it until the first response is complete and the others are in
    flight."""
    limits = (2, 30, 30, 30)
    wanted = [
        dataclasses.replace(one, max_new_tokens=limit)
        for one, limit in zip(requests(), limits, strict=True)
    ]
    generation = SingleResponses(engine).start(wanted, SamplingOptions(30, greedy=True))
    found: dict[int, Any] = {}
    while not found:
        found |= generation.step()
    assert list(found) == [0]
    return generation, found


def test_partial_rollouts_continue_in_new_generation(engine, kind, model):
    options = SamplingOptions(30, greedy=True)
    for _ in range(TRIES):
        generation, _ = _half_way(engine)
        begun = create_empty_samples(prompts(), 1)
        for place, sample in generation.interrupt():
            begun[place] = sample
        generation.cancel()
        if all(0 < len(response(sample)) < 30 for sample in begun[1:]):
            break
    else:
        pytest.fail("no response was under way")
    if kind.startswith("embedded"):
        assert [len(response(sample)) for sample in begun] == [0, 2, 2, 2]
    going_on = [
        dataclasses.replace(one, partial_sample=sample)
        for one, sample in zip(requests(), begun, strict=True)
    ]
    for prompt, sample in zip(prompts(), generate(engine, going_on, options), strict=True):
        assert response(sample) == greedy(model, prompt.tokens, 30)


def test_finish_update_keeps_old_weights_in_flight(engine, model, other_directory):
    generation, found = _half_way(engine)
    publish(engine, other_directory, 1, "finish")
    while not generation.is_done:
        found |= generation.step()
    for place, prompt in list(enumerate(prompts()))[1:]:
        assert found[place].weight_versions.tolist() == [0] * 30
        assert response(found[place]) == greedy(model, prompt.tokens, 30)
    assert generate(engine, requests(), SamplingOptions(2))[0].weight_versions.tolist() == [1, 1]


def test_interrupted_responses_continue_with_new_weights(engine, model, directory, other_directory):
    for version in range(0, 2 * TRIES, 2):
        were_under_way = _interrupted(engine, version, model, other_directory)
        if were_under_way:
            break
        publish(engine, directory, version + 2)
    assert were_under_way


def _interrupted(engine: GenerationEngine, version: int, model: Any, other_directory: Path) -> bool:
    """Interrupt a generation with an update from `version` to the next, and check its responses.

    Returns whether all responses except the first were in flight at the update.
    """
    generation, found = _half_way(engine)
    publish(engine, other_directory, version + 1, "interrupt")
    while not generation.is_done:
        found |= generation.step()
    changed = engines.reference_model(other_directory)
    each = []
    for place, prompt in list(enumerate(prompts()))[1:]:
        sample = found[place]
        versions, tokens = sample.weight_versions.tolist(), response(sample)
        kept = versions.count(version)
        assert versions == [version] * kept + [version + 1] * (30 - kept)
        assert tokens[:kept] == greedy(model, prompt.tokens, kept)
        context = torch.cat((prompt.tokens, torch.tensor(tokens[:kept])))
        assert tokens[kept:] == greedy(changed, context, 30 - kept)
        old, new = (whole_logprobs(one, sample, 1.0) for one in (model, changed))
        torch.testing.assert_close(
            sample.engine_logprobs, torch.cat((old[:kept], new[kept:])), atol=1e-4, rtol=0
        )
        each.append(kept)
    return all(0 < kept < 30 for kept in each)


def test_error_names_all_invalid_requests(engine):
    long, empty, foreign = (
        GenerationRequest(Prompt(at, "", torch.tensor(tokens, dtype=torch.int64)), 0)
        for at, tokens in ((41, [1] * 46), (42, []), (43, [5, engines.VOCABULARY]))
    )
    with pytest.raises(AlignerError) as caught:
        generate(engine, [*requests(), long, empty, foreign], SamplingOptions(3))
    message = str(caught.value)
    assert (
        "prompt 41 has 46 tokens; with max_new_tokens=3 the sequence exceeds the model's 48 positions"
        in message
    )
    assert "prompt 42 is empty" in message
    assert "prompt 43 has token ids from 5 to 120; must be in the vocabulary, [0, 120)" in message
    assert len(generate(engine, [long], SamplingOptions(2))[0].tokens) == 48


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": 4, "min_new_tokens": 5}, "min_new_tokens=5"),
        ({"max_new_tokens": 4, "temperature": 0.0}, "temperature=0.0"),
        ({"max_new_tokens": 4, "top_k": -1}, "top_k=-1"),
        ({"max_new_tokens": 4, "top_p": 0.0}, "top_p=0.0"),
    ],
)
def test_invalid_sampling_option_is_refused(options, message):
    with pytest.raises(AlignerError, match=message):
        SamplingOptions(**options)


def test_stop_token_outside_vocabulary_is_refused(engine):
    with pytest.raises(AlignerError, match=r"stop_token_ids=\[500\]"):
        SingleResponses(engine).start(requests(), SamplingOptions(4, stop_token_ids=(1, 500)))


def test_engine_without_weights_refuses_requests(bare):
    assert bare.version is None
    with pytest.raises(AlignerError, match="the engine has no weights"):
        generate(bare, requests(), SamplingOptions(3))


def test_second_generation_is_refused_until_cancel(engine):
    generation = SingleResponses(engine).start(requests(), SamplingOptions(20))
    with pytest.raises(AlignerError, match="already generating"):
        SingleResponses(engine).start(requests(), SamplingOptions(2))
    with pytest.raises(AlignerError, match="finish or cancel the responses in flight"):
        engine.sleep()
    generation.cancel()
    assert generation.is_done
    assert generation.step() == []
    assert len(generate(engine, requests(), SamplingOptions(2))) == 4


def test_generation_cancelled_at_start_is_discarded(engine):
    for _ in range(5):
        SingleResponses(engine).start(requests(8), SamplingOptions(20)).cancel()
    assert len(generate(engine, requests(), SamplingOptions(2))) == 4


def test_sleeping_engine_refuses_requests_until_wake(engine, directory, kind):
    if kind == "vllm":
        pytest.skip("it can sleep on GPUs alone")
    options = SamplingOptions(5)
    before = [response(sample) for sample in generate(engine, requests(), options)]
    engine.sleep()
    engine.sleep()
    with pytest.raises(AlignerError, match="wake the engine first"):
        generate(engine, requests(), options)
    with pytest.raises(AlignerError, match="wake the engine first"):
        engine.begin_update(1)
    engine.wake()
    engine.wake()
    publish(engine, directory, 1)
    assert [response(sample) for sample in generate(engine, requests(), options)] == before


def test_weights_must_be_synced_again_after_sleep(engine, directory, kind):
    if kind == "vllm":
        pytest.skip("it can sleep on GPUs alone")
    options = SamplingOptions(5)
    before = [response(sample) for sample in generate(engine, requests(), options)]
    engine.sleep()
    engine.wake()
    assert engine.version is None
    with pytest.raises(
        AlignerError, match="sleep freed their memory; sync weights to the engine again"
    ):
        generate(engine, requests(), options)
    publish(engine, directory, 3)
    assert [response(sample) for sample in generate(engine, requests(), options)] == before


def test_second_open_update_is_refused(engine, directory):
    update = engine.begin_update(4)
    with pytest.raises(
        AlignerError,
        match="the weight update to version 5 cannot start: the update to version 4 is still open",
    ):
        engine.begin_update(5)
    with pytest.raises(AlignerError, match="the weight update to version 4 is open"):
        engine.sleep()
    write(engine, update, directory)
    update.commit()
    for late in (
        update.commit,
        lambda: update.views(["model.norm.weight"]),
        lambda: update.load(["model.norm.weight"]),
    ):
        with pytest.raises(AlignerError):
            late()
    update.abort()
    assert engine.version == 4


def test_update_requires_every_tensor_of_model(engine, directory):
    update = engine.begin_update(1)
    assert list(update.views(["model.norm.weight", "model.layers.99.mlp.up_proj.weight"])) == [
        "model.norm.weight"
    ]
    write(engine, update, directory, leave_out="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(AlignerError, match=r"lacks .*model\.layers\.1\.mlp\.up_proj\.weight"):
        update.commit()
    update.abort()
    publish(engine, directory, 1)
    assert engine.version == 1


def test_aborted_update_leaves_old_weights_or_none(kind, engine, directory, other_directory):
    options = SamplingOptions(4, greedy=True)
    before = [response(sample) for sample in generate(engine, requests(), options)]
    update = engine.begin_update(6)
    views = update.views(["model.norm.weight"])
    views["model.norm.weight"].copy_(engines.file_tensors(other_directory)["model.norm.weight"])
    update.load(["model.norm.weight"])
    update.abort()
    if kind == "embedded-atomic":
        assert engine.version == 0
    else:
        assert engine.version is None
        with pytest.raises(
            AlignerError,
            match=r"no weights: the weight update to version 6 .*failed.*sync weights to the engine again",
        ):
            generate(engine, requests(), options)
        publish(engine, directory, 7)
    assert [response(sample) for sample in generate(engine, requests(), options)] == before


def test_interrupted_responses_continue_after_failed_update(engine, model, directory):
    generation, found = _half_way(engine)
    engine._settings = dataclasses.replace(engine._settings, in_flight="interrupt")
    update = engine.begin_update(6)
    update.views(["model.norm.weight"])["model.norm.weight"].zero_()
    update.load(["model.norm.weight"])
    update.abort()
    if engine.version is None:
        with pytest.raises(AlignerError, match="no weights"):
            generation.step()
        publish(engine, directory, 7)
    while not generation.is_done:
        found |= generation.step()
    for place, prompt in enumerate(prompts()):
        assert response(found[place]) == greedy(model, prompt.tokens, len(response(found[place])))
