"""Recorded expert routing: each token's experts under the weights that generated the next token."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aligner.data.types import Prompt, Sample
from aligner.engines.engine_loop import SingleResponses
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.errors import AlignerError
from tests.engines.engines import generate, prompts, requests
from tests.engines.test_embedded import load_transformers, make_engine, save_model
from tests.engines.test_generation import begin
from tests.megatron import families

OPTIONS = SamplingOptions(12, routes=True)


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def directory(request, tmp_path_factory) -> Path:
    return families.save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def other_directory(directory, tmp_path_factory) -> Path:
    """A model of the same shape with other weights."""
    model = load_transformers(directory)
    for parameter in model.parameters():
        parameter.data = parameter.data.flip(-1).contiguous()
    path = tmp_path_factory.mktemp("other")
    model.save_pretrained(path)
    return path


@torch.no_grad()
def routes_of(model: Any, tokens: Tensor) -> Tensor:
    """Return transformers' sorted expert ids [T-1, L, K] of all tokens except the last."""
    chosen: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, inputs, output: chosen.append(output[2]))
        for layer in model.model.layers
    ]
    model(tokens[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1)[:-1].sort(-1).values


def recorded_routing(sample: Sample) -> Tensor:
    assert sample.expert_routing is not None
    assert sample.expert_routing.dtype == torch.uint8
    return sample.expert_routing.long().sort(-1).values


def small_requests(samples: int = 4) -> list[GenerationRequest]:
    """Return requests with unordered limits from 2 to 12 tokens, and token ids in the families'
    vocabulary."""
    return [
        dataclasses.replace(
            one,
            prompt=dataclasses.replace(one.prompt, tokens=one.prompt.tokens % 72),
            max_new_tokens=2 + 7 * index % 11,
        )
        for index, one in enumerate(requests(samples))
    ]


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_recorded_routing_equals_transformers(directory, rows):
    """With three rows, later samples of a prompt copy its routing from samples in flight."""
    model = load_transformers(directory)
    for sample in generate(make_engine(directory, batch_size=rows), small_requests(), OPTIONS):
        assert torch.equal(recorded_routing(sample), routes_of(model, sample.tokens))


def test_routing_is_recorded_only_on_request(directory, tmp_path):
    silent = dataclasses.replace(OPTIONS, routes=False)
    recorded, unrecorded = (
        generate(make_engine(directory), small_requests(1), options)
        for options in (OPTIONS, silent)
    )
    assert [sample.expert_routing for sample in unrecorded] == [None] * 4
    assert [sample.tokens.tolist() for sample in recorded] == [
        sample.tokens.tolist() for sample in unrecorded
    ]
    with pytest.raises(
        AlignerError,
        match="routes=true: requires a mixture-of-experts model; this model has no experts",
    ):
        generate(
            make_engine(save_model(tmp_path, "llama")),
            [GenerationRequest(prompts(1)[0], 0)],
            OPTIONS,
        )


def expected_of_versions(models: list[Any], sample: Sample) -> Tensor:
    """Return transformers' routing of each token under the weights that generated the next token.

    The prompt's routing is that of the sample's first version.
    """
    versions = torch.cat(
        [sample.weight_versions[:1].expand(sample.prompt_length - 1), sample.weight_versions]
    )
    under = torch.stack([routes_of(model, sample.tokens) for model in models])
    return under[versions, torch.arange(len(versions))]


@pytest.mark.promise("routing-of-the-generating-version")
@pytest.mark.parametrize("steps", [1, 5])
def test_prefill_keeps_routing_of_the_generating_version(directory, other_directory, steps):
    engine = make_engine(directory, batch_size=3)
    generation = SingleResponses(engine).start(small_requests(), OPTIONS)
    samples = dict(pair for _ in range(steps) for pair in generation.step())
    begin(engine, other_directory, 1, "interrupt").commit()
    while not generation.is_done:
        samples |= generation.step()
    models = [load_transformers(path) for path in (directory, other_directory)]
    for sample in samples.values():
        assert torch.equal(recorded_routing(sample), expected_of_versions(models, sample))
    assert any(len(set(sample.weight_versions.tolist())) == 2 for sample in samples.values())


def test_late_sample_has_prompt_routing_of_new_weights(directory, other_directory):
    """The samples that started before the update keep the prompt routing of the old weights."""
    prompt = Prompt(0, "", torch.arange(2, 9))
    wanted = [GenerationRequest(prompt, index, limit) for index, limit in enumerate((3, 12, 6))]
    engine = make_engine(directory, batch_size=2)
    generation = SingleResponses(engine).start(wanted, OPTIONS)
    samples = dict(generation.step())
    begin(engine, other_directory, 1, "interrupt").commit()
    while not generation.is_done:
        samples |= generation.step()
    models = [load_transformers(path) for path in (directory, other_directory)]
    assert [set(samples[place].weight_versions.tolist()) for place in range(3)] == [
        {0, 1},
        {0, 1},
        {1},
    ]
    for sample in samples.values():
        assert torch.equal(recorded_routing(sample), expected_of_versions(models, sample))
    assert not torch.equal(recorded_routing(samples[1])[:6], recorded_routing(samples[2])[:6])


@pytest.mark.promise("routing-of-the-generating-version")
@pytest.mark.parametrize(("rows", "steps"), [(64, 5), (3, 7)])
@pytest.mark.parametrize("renewed", [False, True])
def test_transferred_responses_keep_their_routing(directory, other_directory, rows, steps, renewed):
    engine, wanted = make_engine(directory, batch_size=rows), small_requests()
    generation = SingleResponses(engine).start(wanted, OPTIONS)
    samples = dict(pair for _ in range(steps) for pair in generation.step())
    begun = dict(generation.interrupt())
    generation.cancel()
    assert all(
        (sample.expert_routing is None) == (not len(sample.response)) for sample in begun.values()
    )
    if renewed:
        begin(engine, other_directory, 1).commit()
    rest = [
        dataclasses.replace(wanted[place], partial_sample=sample) for place, sample in begun.items()
    ]
    samples |= zip(begun, generate(engine, rest, OPTIONS), strict=True)
    models = [load_transformers(path) for path in (directory, other_directory)]
    for sample in samples.values():
        assert torch.equal(recorded_routing(sample), expected_of_versions(models, sample))


def test_failed_step_leaves_no_routing(directory):
    engine = make_engine(directory, batch_size=3)
    generation = SingleResponses(engine).start(small_requests(), OPTIONS)
    samples: dict[int, Sample] = {}
    forward, runs = engine._state.forward, 0

    def fail_now_and_then(step, cache):
        nonlocal runs
        runs += 1
        result = forward(step, cache)
        if runs % 3 == 2:
            raise RuntimeError("out of memory")
        return result

    engine._state.forward = fail_now_and_then
    while not generation.is_done:
        with contextlib.suppress(RuntimeError):
            samples |= generation.step()
    model = load_transformers(directory)
    for sample in samples.values():
        assert torch.equal(recorded_routing(sample), routes_of(model, sample.tokens))
