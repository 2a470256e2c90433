"""`engine.steps_per_sync`: several decode steps per host synchronization change no response."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from aligner.data.types import Sample
from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.engine_loop import SingleResponses
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.errors import AlignerError
from tests.engines.engines import Turns, generate
from tests.engines.test_embedded import make_engine, make_requests, response, save_llama
from tests.engines.test_generation import mixed_requests, record_steps

STOPS = tuple(range(0, 200, 9))
WAYS = {
    "all": SamplingOptions(12),
    "greedy": SamplingOptions(12, greedy=True),
    "stops": SamplingOptions(12, stop_token_ids=STOPS),
    "least": SamplingOptions(12, stop_token_ids=STOPS, min_new_tokens=2),
    "truncated": SamplingOptions(12, top_k=20, renormalize=False, stop_token_ids=STOPS),
    "kept": SamplingOptions(12, top_p=0.9, renormalize=True, stop_token_ids=STOPS),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), tied=True)


def assert_same(samples: list[Sample], expected: list[Sample]) -> None:
    for sample, wanted in zip(samples, expected, strict=True):
        assert response(sample) == response(wanted)
        assert (sample.finish_reason, sample.weight_versions.tolist()) == (
            wanted.finish_reason,
            wanted.weight_versions.tolist(),
        )
        torch.testing.assert_close(
            sample.engine_logprobs, wanted.engine_logprobs, atol=1e-5, rtol=0
        )
        if wanted.sampling_support is not None:
            assert sample.sampling_support.ids.tolist() == wanted.sampling_support.ids.tolist()


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [3, 64])
def test_responses_do_not_depend_on_steps_per_sync(
    directory: Path, way: str, count: int, rows: int
) -> None:
    """The responses have different lengths, and with three rows some start while others are in
    flight."""
    options, requests = WAYS[way], mixed_requests(3)
    expected = generate(make_engine(directory), requests, options)
    samples = generate(
        make_engine(directory, steps_per_sync=count, batch_size=rows), requests, options
    )
    assert_same(samples, expected)
    assert way in ("all", "greedy") or {sample.finish_reason for sample in samples} == {
        "stop",
        "length",
    }


def test_steps_per_sync_stops_at_nearest_length_limit(directory: Path) -> None:
    """Limits of 4, 7 and 12 tokens: prefill yields the first token, then 3, 3 and 5 steps run per
    sync."""
    engine = make_engine(directory, steps_per_sync=8)
    steps = record_steps(engine)
    requests = [
        GenerationRequest(make_requests()[0].prompt, index, limit)
        for index, limit in enumerate((4, 7, 12))
    ]
    generation = SingleResponses(engine).start(requests, SamplingOptions(12))
    counts = []
    while not generation.is_done:
        before = len(steps)
        generation.step()
        counts.append(len(steps) - before)
    assert counts == [1, 3, 3, 5]
    assert [len(step.tokens) for step in steps] == [0, *[3] * 3, *[2] * 3, *[1] * 5]


def test_turns_do_not_depend_on_steps_per_sync(directory: Path) -> None:
    def generate_turns(engine: EmbeddedEngine) -> list[Sample]:
        requests, found = make_requests(), dict[int, Sample]()
        generation = Turns(engine, requests, SamplingOptions(12, stop_token_ids=STOPS), 5)
        turns = dict.fromkeys(range(len(requests)), 1)
        while not generation.is_done:
            for place, sample in generation.step():
                found[place] = sample
                if turns[place] == 1:
                    turns[place] = 2
                    generation.go_on(place, [5, 6])
        return [found[place] for place in range(len(requests))]

    assert_same(
        generate_turns(make_engine(directory, steps_per_sync=4)),
        generate_turns(make_engine(directory)),
    )


def generate_on_rank(directory: Path, count: int) -> list[tuple[list[int], list[float]]]:
    engine = make_engine(
        directory, tensor=2, rank=dist.get_rank(), group=dist.group.WORLD, steps_per_sync=count
    )
    return [
        (response(each), each.engine_logprobs.tolist())
        for each in generate(engine, mixed_requests(), WAYS["stops"])
    ]


def test_tensor_parallel_samples_do_not_depend_on_steps_per_sync(pool, directory: Path) -> None:
    first, _ = pool.run(generate_on_rank, 2, directory, 4)
    alone, _ = pool.run(generate_on_rank, 2, directory, 1)
    assert [tokens for tokens, _ in first] == [tokens for tokens, _ in alone]


def test_nan_logits_raise_and_discard_tokens_since_sync(directory: Path) -> None:
    engine = make_engine(directory, steps_per_sync=4)
    generation = SingleResponses(engine).start(make_requests(), SamplingOptions(12))
    generation.step()
    engine._weights.tensors["decoder.final_layernorm.weight"].fill_(float("nan"))
    with pytest.raises(AlignerError, match="not finite"):
        generation.step()
    assert [len(sample.tokens) - sample.prompt_length for _, sample in generation.interrupt()] == [
        1
    ] * len(make_requests())
