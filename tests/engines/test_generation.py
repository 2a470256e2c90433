"""Continuous batching of the embedded engine: rows, prefill, updates and sleep do not change
samples."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from aligner.data.types import Prompt, Sample
from aligner.engines.embedded import cache as cache_module
from aligner.engines.embedded.cache import CacheSize
from aligner.engines.embedded.decoder_step import Step
from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.engine_loop import SingleResponses
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.errors import AlignerError
from aligner.schema import EngineConfig, EngineParallelConfig
from tests.engines.engines import engine_bytes, generate
from tests.engines.test_embedded import (
    load_transformers,
    make_engine,
    make_prompts,
    make_requests,
    response,
    save_llama,
    save_model,
    shape_of,
)

OPTIONS = SamplingOptions(12)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), tied=True)


@pytest.fixture(scope="module")
def other_directory(tmp_path_factory) -> Path:
    """A model of the same shape with other weights."""
    path = save_llama(tmp_path_factory.mktemp("other"), tied=True)
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    save_file(
        {name: tensor.flip(-1).contiguous() for name, tensor in tensors.items()},
        path / "model.safetensors",
    )
    return path


def mixed_requests(samples: int = 4) -> list[GenerationRequest]:
    """Return requests with length limits from 2 to 12 tokens, unordered."""
    return [
        GenerationRequest(request.prompt, request.sample_index, 2 + 7 * index % 11)
        for index, request in enumerate(make_requests(samples))
    ]


def record_steps(engine: EmbeddedEngine) -> list[Step]:
    """Return a list to which the engine's subsequent steps are appended."""
    steps: list[Step] = []
    forward = engine._state.forward

    def observe(step, cache):
        steps.append(step)
        return forward(step, cache)

    engine._state.forward = observe
    return steps


def assert_same(samples: list[Sample], others: list[Sample]) -> None:
    assert [response(sample) for sample in samples] == [response(sample) for sample in others]
    for sample, other in zip(samples, others, strict=True):
        torch.testing.assert_close(sample.engine_logprobs, other.engine_logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rows", [1, 2, 5, 64])
def test_samples_do_not_depend_on_batch_size(directory, rows):
    requests = mixed_requests()
    samples = generate(make_engine(directory, batch_size=rows), requests, OPTIONS)
    alone = [generate(make_engine(directory), [request], OPTIONS)[0] for request in requests]
    assert_same(samples, alone)
    assert [len(response(sample)) for sample in samples] == [
        request.max_new_tokens for request in requests
    ]


def test_samples_do_not_depend_on_order_or_replica(directory):
    requests = mixed_requests()
    expected = generate(make_engine(directory), requests, OPTIONS)
    order = torch.randperm(len(requests), generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = generate(
        make_engine(directory, batch_size=3), [requests[at] for at in order], OPTIONS
    )
    assert_same(shuffled, [expected[at] for at in order])
    halves = [
        generate(make_engine(directory, rank=replica), requests[replica::2], OPTIONS)
        for replica in (0, 1)
    ]
    assert_same(halves[0], expected[0::2])
    assert_same(halves[1], expected[1::2])


def test_next_response_starts_when_one_ends(directory):
    requests = [
        GenerationRequest(prompt, 0, limit)
        for prompt, limit in zip(make_prompts(), (2, 9, 2, 2, 2), strict=True)
    ]
    engine = make_engine(directory, batch_size=2)
    steps = record_steps(engine)
    generate(engine, requests, OPTIONS)
    # The short responses run one after another next to the long one: 9 steps, not 2 + 9 + 2.
    assert len(steps) == 9


def test_prompt_is_prefilled_once_for_all_its_samples(directory):
    engine = make_engine(directory, batch_size=3)
    steps = record_steps(engine)
    prompt = make_prompts()[3]
    # The first samples of the prompt start together, the later ones while other samples are in
    # flight.
    generate(
        engine,
        [GenerationRequest(prompt, index, limit) for index, limit in enumerate((3, 9, 9, 9, 4, 5))],
        OPTIONS,
    )
    assert [len(step.prompts.tokens) for step in steps if step.prompts is not None] == [
        len(prompt.tokens)
    ]
    engine = make_engine(directory)
    steps = record_steps(engine)
    generate(engine, make_requests(4), OPTIONS)
    distinct = {tuple(prompt.tokens.tolist()) for prompt in make_prompts()}
    assert sum(len(step.prompts.lengths) for step in steps if step.prompts is not None) == len(
        distinct
    )


def test_responses_are_returned_as_they_complete(directory):
    engine = make_engine(directory)
    generation = SingleResponses(engine).start(mixed_requests(1), OPTIONS)
    steps = []
    while not generation.is_done:
        steps.append([(index, len(response(sample))) for index, sample in generation.step()])
    lengths = {index: length for step in steps for index, length in step}
    assert lengths == {
        index: request.max_new_tokens for index, request in enumerate(mixed_requests(1))
    }
    assert all(length == number for number, step in enumerate(steps, start=1) for _, length in step)
    assert generation.step() == []


def test_kv_cache_budget_limits_rows_but_not_samples(tmp_path):
    directory = save_model(tmp_path, "llama", max_position_embeddings=4096)
    # KV cache per token: 2 x 3 layers x 2 heads x 8 dimensions in 4 bytes.
    prompts = [Prompt(index, "", torch.arange(700) % 200) for index in range(3)]
    requests = [GenerationRequest(prompt, 0) for prompt in prompts]
    free, short = make_engine(directory), make_engine(directory, kv_cache_mib=1)
    steps = record_steps(short)
    assert_same(
        generate(short, requests, SamplingOptions(4)), generate(free, requests, SamplingOptions(4))
    )
    rows = (1 << 20) // (2 * 3 * 2 * 8 * 4 * 703)
    assert max(len(step.tokens) for step in steps) == min(3, rows)
    assert short._state.cache._storage.nbytes <= 1 << 20
    long = GenerationRequest(Prompt(9, "", torch.arange(3000) % 200), 0)
    with pytest.raises(
        AlignerError,
        match=r"engine.kv_cache_mib=1: the KV cache of one sequence of 3003 tokens needs 1\.1 MiB",
    ):
        generate(short, [*requests, long], SamplingOptions(4))
    assert len(generate(short, requests, SamplingOptions(4))) == 3


@pytest.mark.parametrize(("rows", "steps"), [(64, 1), (64, 5), (3, 7)])
def test_transferred_partial_rollouts_continue_unchanged(directory, rows, steps):
    """Sampled, not greedy. With three rows, some responses have not started, and some use a row
    again."""
    engine, requests = make_engine(directory, batch_size=rows), mixed_requests()
    expected = generate(make_engine(directory), requests, OPTIONS)
    generation = SingleResponses(engine).start(requests, OPTIONS)
    samples = dict(pair for _ in range(steps) for pair in generation.step())
    begun = dict(generation.interrupt())
    generation.cancel()
    assert sorted([*samples, *begun]) == list(range(len(requests)))
    assert {len(sample.response) for sample in begun.values()} >= ({0, 2} if rows == 3 else {steps})
    rest = list(reversed(begun))
    wanted = [dataclasses.replace(requests[place], partial_sample=begun[place]) for place in rest]
    samples |= zip(rest, generate(engine, wanted, OPTIONS), strict=True)
    assert_same([samples[place] for place in range(len(requests))], expected)
    assert all(
        torch.equal(samples[place].weight_versions, one.weight_versions)
        for place, one in enumerate(expected)
    )


def test_partial_rollout_at_length_limit_is_refused(directory):
    engine, request = make_engine(directory), make_requests()[0]
    generation = SingleResponses(engine).start([request], OPTIONS)
    generation.step(), generation.step()
    ((_, begun),) = generation.interrupt()
    generation.cancel()
    with pytest.raises(AlignerError, match="sample 0 has 2 tokens already, but max_new_tokens=2"):
        SingleResponses(engine).start(
            [dataclasses.replace(request, partial_sample=begun)], SamplingOptions(2)
        )


def begin(engine: EmbeddedEngine, directory: Path, version: int, in_flight="finish"):
    """Start an update, and write all weights of a directory without committing."""
    source = make_engine(directory)._weights.views
    engine._settings = dataclasses.replace(engine._settings, in_flight=in_flight)
    update = engine.begin_update(version)
    for name, view in update.views(list(source)).items():
        view.copy_(source[name])
    update.load(list(source))
    return update


@pytest.mark.parametrize("update_kind", ["atomic", "in_place"])
def test_interrupted_responses_continue_with_new_weights(directory, other_directory, update_kind):
    engine = make_engine(directory, update=update_kind, batch_size=7)
    requests = make_requests(2)
    before, after = (
        generate(make_engine(path), requests, OPTIONS) for path in (directory, other_directory)
    )
    generation = SingleResponses(engine).start(requests, OPTIONS)
    samples = dict(pair for _ in range(5) for pair in generation.step())
    begin(engine, other_directory, 1, "interrupt").commit()
    while not generation.is_done:
        samples |= generation.step()
    assert len(samples) == 10
    for index, sample in samples.items():
        versions = sample.weight_versions.tolist()
        assert versions == sorted(versions)
        kept = versions.count(0)
        assert kept in (0, 5)  # seven had a row, three were waiting
        assert response(sample)[:kept] == response(before[index])[:kept]
        if kept == 0:
            assert response(sample) == response(after[index])
    assert sum(sample.weight_versions[0] == 1 for sample in samples.values()) == 3
    # From the sixth token on, the log-probs equal the new weights' log-probs given all previous
    # tokens.
    model = load_transformers(other_directory)
    for sample in samples.values():
        with torch.no_grad():
            logits = model(sample.tokens[None]).logits[0, sample.prompt_length - 1 : -1]
        wanted = (
            logits.log_softmax(-1).gather(1, sample.tokens[sample.prompt_length :, None]).squeeze(1)
        )
        new = sample.weight_versions == 1
        torch.testing.assert_close(sample.engine_logprobs[new], wanted[new], atol=1e-4, rtol=0)


@pytest.mark.parametrize("update_kind", ["atomic", "in_place"])
def test_finish_update_applies_only_to_waiting_responses(directory, other_directory, update_kind):
    engine = make_engine(directory, update=update_kind, batch_size=7)
    requests = make_requests(2)
    before, after = (
        generate(make_engine(path), requests, OPTIONS) for path in (directory, other_directory)
    )
    generation = SingleResponses(engine).start(requests, OPTIONS)
    generation.step()
    begin(engine, other_directory, 1, "finish").commit()
    samples: dict[int, Sample] = {}
    while not generation.is_done:
        samples |= generation.step()
    versions = [set(samples[index].weight_versions.tolist()) for index in range(len(requests))]
    assert sorted(map(tuple, versions)) == [(0,)] * 7 + [(1,)] * 3
    for index, version in enumerate(versions):
        assert response(samples[index]) == response((before if version == {0} else after)[index])


def test_old_weights_serve_until_atomic_commit(directory, other_directory):
    engine, requests = make_engine(directory), make_requests()
    old, new = (
        generate(make_engine(path), requests, OPTIONS) for path in (directory, other_directory)
    )
    for version in (1, 2):
        update = begin(engine, other_directory, version)
        assert_same(generate(engine, requests, OPTIONS), old)
        assert engine.version == 0
        update.abort()
        assert_same(generate(engine, requests, OPTIONS), old)
    begin(engine, other_directory, 3).commit()
    assert_same(generate(engine, requests, OPTIONS), new)
    begin(engine, directory, 4).commit()  # the two weight buffers swap again
    assert_same(generate(engine, requests, OPTIONS), old)
    assert engine.version == 4


def test_failed_in_place_update_leaves_no_weights(directory):
    engine = make_engine(directory, update="in_place")
    update = begin(engine, directory, 6)
    with pytest.raises(
        AlignerError, match="no weights: the weight update to version 6 is in progress"
    ):
        generate(engine, make_requests(), OPTIONS)
    update.abort()
    with pytest.raises(
        AlignerError,
        match="the weight update to version 6 failed after it had started to overwrite the old weights; sync weights"
        " to the engine again",
    ):
        generate(engine, make_requests(), OPTIONS)
    begin(engine, directory, 7).commit()
    assert len(generate(engine, make_requests(), OPTIONS)) == 5


def test_second_or_incomplete_update_is_refused(directory):
    engine = make_engine(directory)
    update = engine.begin_update(1)
    with pytest.raises(
        AlignerError,
        match="the weight update to version 2 cannot start: the update to version 1 is still open",
    ):
        engine.begin_update(2)
    names = list(engine._weights.views)
    assert list(update.views(["lm_head.weight", names[0], "score.weight"])) == names[:1]
    update.load(names[2:])
    with pytest.raises(
        AlignerError,
        match=rf"the weight update to version 1 lacks 2 tensor\(s\): {names[0]}, {names[1]}$",
    ):
        update.commit()
    update.abort()
    with pytest.raises(AlignerError, match="the weight update to version 1 is already closed"):
        update.commit()
    assert engine.version == 0


def test_sleep_frees_memory_and_refuses_requests_until_wake(directory):
    engine = make_engine(directory)
    before = generate(engine, make_requests(), OPTIONS)
    begin(engine, directory, 1).commit()
    held = engine_bytes(engine)
    generation = SingleResponses(engine).start(make_requests(), OPTIONS)
    with pytest.raises(AlignerError, match="finish or cancel the responses in flight"):
        engine.sleep()
    generation.cancel()
    engine.sleep()
    engine.sleep()
    assert engine_bytes(engine) == 0 < held
    for attempt in (
        lambda: generate(engine, make_requests(), OPTIONS),
        lambda: engine.begin_update(2),
    ):
        with pytest.raises(AlignerError, match=r"the engine is asleep .* wake the engine first"):
            attempt()
    engine.wake()
    assert engine.version is None
    with pytest.raises(
        AlignerError, match="sleep freed their memory; sync weights to the engine again"
    ):
        generate(engine, make_requests(), OPTIONS)
    begin(engine, directory, 2).commit()
    assert_same(generate(engine, make_requests(), OPTIONS), before)


def test_second_generation_is_refused_until_cancel(directory):
    engine = make_engine(directory)
    first = SingleResponses(engine).start(make_requests(), OPTIONS)
    with pytest.raises(AlignerError, match="already generating"):
        SingleResponses(engine).start(make_requests(), OPTIONS)
    first.cancel()
    assert first.is_done
    assert len(generate(engine, make_requests(), OPTIONS)) == 5


def test_no_response_ends_before_min_new_tokens(directory):
    stops = tuple(range(0, 200, 2))
    engine, requests = make_engine(directory), make_requests(4)
    for greedy in (False, True):
        early = generate(engine, requests, SamplingOptions(12, stop_token_ids=stops, greedy=greedy))
        late = generate(
            engine,
            requests,
            SamplingOptions(12, min_new_tokens=6, stop_token_ids=stops, greedy=greedy),
        )
        assert (
            min(len(response(sample)) for sample in early)
            < 6
            < max(len(response(sample)) for sample in late)
        )
        for sample in late:
            assert not set(response(sample)[:6]) & set(stops)
            assert sample.finish_reason == ("stop" if response(sample)[-1] in stops else "length")
    # Forbidden stop tokens keep their share of the distribution in the log-probs.
    model = load_transformers(directory)
    for sample in late:
        with torch.no_grad():
            logits = model(sample.tokens[None]).logits[0, sample.prompt_length - 1 : -1]
        wanted = (
            logits.log_softmax(-1).gather(1, sample.tokens[sample.prompt_length :, None]).squeeze(1)
        )
        torch.testing.assert_close(sample.engine_logprobs, wanted, atol=1e-4, rtol=0)


def test_shared_weights_are_used_without_copy(directory):
    from aligner.engines.embedded.engine_weights import compute_parameters

    owner = make_engine(directory)
    theirs = {
        name: tensor for name, tensor in owner._weights.tensors.items() if "linear_fc" in name
    }
    engine = EmbeddedEngine(shape_of(directory), EngineConfig(update="shared"), 0, 7, shared=theirs)
    update = engine.begin_update(0)
    for name, view in update.views(list(owner._weights.views)).items():
        if view.data_ptr() != owner._weights.views[name].data_ptr():
            view.copy_(owner._weights.views[name])
    update.load(list(owner._weights.views))
    update.commit()
    assert_same(
        generate(engine, make_requests(), OPTIONS), generate(owner, make_requests(), OPTIONS)
    )
    shared = sum(
        parameter.numel * 4
        for parameter in compute_parameters(shape_of(directory), EngineParallelConfig())
        if parameter.name in theirs
    )
    assert engine._weights.views["model.layers.0.mlp.up_proj.weight"].data_ptr() == (
        owner._weights.views["model.layers.0.mlp.up_proj.weight"].data_ptr()
    )
    assert engine._weights.storage.nbytes <= owner._weights.storage.nbytes - shared


def test_wake_can_be_retried_after_memory_error(directory, monkeypatch):
    engine = make_engine(directory)
    before = generate(engine, make_requests(), OPTIONS)
    engine.sleep()
    with monkeypatch.context() as patch:
        patch.setattr(
            EmbeddedEngine, "_allocate_weights", lambda _: (_ for _ in ()).throw(MemoryError)
        )
        with pytest.raises(MemoryError):
            engine.wake()
    with pytest.raises(AlignerError, match="the engine is asleep"):
        engine.begin_update(1)
    engine.wake()
    begin(engine, directory, 1).commit()
    assert_same(generate(engine, make_requests(), OPTIONS), before)


def test_nan_weights_are_reported_and_replaceable(directory):
    engine = make_engine(directory)
    before = generate(engine, make_requests(), OPTIONS)
    for options in (OPTIONS, SamplingOptions(12, greedy=True), SamplingOptions(12, top_p=0.9)):
        update = begin(engine, directory, 1)
        update.views(["model.norm.weight"])["model.norm.weight"][0] = float("nan")
        update.commit()
        with pytest.raises(AlignerError, match=r"not finite: .* version 1 for NaN"):
            generate(engine, make_requests(), options)
        begin(engine, directory, 2).commit()
        assert_same(generate(engine, make_requests(), OPTIONS), before)


def test_failed_step_can_be_retried(directory):
    engine = make_engine(directory, batch_size=7)
    expected = generate(make_engine(directory), make_requests(2), OPTIONS)
    generation = SingleResponses(engine).start(make_requests(2), OPTIONS)
    samples = dict(pair for _ in range(3) for pair in generation.step())
    forward = engine._state.forward

    def fail_half_way(step, cache):
        cache.keys[1].zero_()
        raise RuntimeError("out of memory")

    engine._state.forward = fail_half_way
    with pytest.raises(RuntimeError, match="out of memory"):
        generation.step()
    engine._state.forward = forward
    while not generation.is_done:
        samples |= generation.step()
    assert_same([samples[index] for index in range(10)], expected)


def test_prompts_of_unequal_length_are_prefilled_separately(tmp_path):
    engine = make_engine(save_model(tmp_path, "llama", max_position_embeddings=4096))
    steps = record_steps(engine)
    prompts = [
        Prompt(index, "", torch.arange(length) % 200)
        for index, length in enumerate([3000, *range(2, 20)])
    ]
    generate(engine, [GenerationRequest(prompt, 0) for prompt in prompts], SamplingOptions(2))
    padded = [
        len(step.prompts.lengths) * step.prompts.max_length
        for step in steps
        if step.prompts is not None
    ]
    assert len(padded) > 1
    assert max(padded) <= 8192


def test_kv_cache_is_freed_before_resize_allocates(directory, monkeypatch):
    engine = make_engine(directory)
    generate(engine, make_requests()[:1], OPTIONS)
    cache = engine._state.cache
    allocate = cache_module._allocate_zeros
    held = []

    def watch(numel, like):
        held.append(cache.keys.numel())
        return allocate(numel, like)

    monkeypatch.setattr(cache_module, "_allocate_zeros", watch)
    size = cache.size
    cache.resize(CacheSize.from_sequences(size.sequences, 2 * size.tokens, size.block_tokens))
    assert held == [0]
