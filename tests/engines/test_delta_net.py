"""States of gated delta nets in the embedded engine: turns, weight updates, and refusals."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from aligner.data.types import Prompt, Sample, collate
from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.errors import ConfigError
from aligner.megatron import world as worlds
from aligner.models.model_source import directory_shape
from aligner.schema import EngineConfig, SpeculationConfig
from tests.engines.engines import Turns, find_tolerance, generate, load_directory
from tests.engines.test_turns import episodes
from tests.megatron import families, jobs

FAMILIES = ("qwen3_5", "qwen3_next")
LIMIT = 14
LENGTHS = (3, 9, 1, 17, 9)


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request, tmp_path_factory):
    return str(families.save(request.param, tmp_path_factory.mktemp(request.param)))


def build_engine(directory: str, **settings: object) -> EmbeddedEngine:
    shape = directory_shape(Path(directory), "model.path")
    engine = EmbeddedEngine(shape, EngineConfig(**settings), 0, seed=2)
    load_directory(engine, Path(directory))
    return engine


def measure_error(
    directory: str, samples: list[Sample], temperature: float
) -> tuple[list[Sample], float]:
    """Return samples, and the largest difference between the engine's and the trainer's
    log-probs."""
    actor = jobs.policy(directory, {}, {"micro_batch_tokens": 200})
    batch = collate(samples, pad_token_id=0)
    actor.temperature = temperature
    scored = actor.logprobs(batch.tokens, batch.lengths, sampling_support=batch.sampling_support)
    worlds.shutdown()
    return samples, float((scored - batch.engine_logprobs)[batch.mask].abs().max())


def run_turns(directory: str, rows: int, delays: int) -> tuple[list[Sample], float]:
    return measure_error(directory, episodes(directory, rows, delays, exact=False), 0.8)


@pytest.mark.parametrize(("rows", "delays"), [(6, 0), (6, 2), (2, 7)])
def test_logprobs_of_turns_equal_trainer(pool, directory, rows, delays):
    ((samples, error),) = pool.run(run_turns, 1, directory, rows, delays)
    assert error < find_tolerance(directory, samples, error)


def run_with_updates(directory: str) -> tuple[list[Sample], float]:
    """Generate responses, and restart those in flight by a weight update, twice."""
    engine = build_engine(directory, batch_size=4, in_flight="interrupt", update="in_place")
    prompts = [
        Prompt(index, "", torch.arange(2, 2 + length)) for index, length in enumerate(LENGTHS)
    ]
    requests = [GenerationRequest(prompt, sample) for prompt in prompts for sample in range(2)]
    options = SamplingOptions(LIMIT, temperature=jobs.TEMPERATURE)
    generation = Turns(engine, requests, options, LIMIT)
    done: dict[int, Sample] = {}
    steps = 0
    while len(done) < len(requests):
        done |= dict(generation.step())
        steps += 1
        if steps in (3, 9):
            load_directory(engine, Path(directory))
    samples = [done[place] for place in range(len(requests))]
    return measure_error(directory, samples, jobs.TEMPERATURE)


def test_responses_restarted_by_weight_update_equal_trainer(pool, directory):
    ((samples, error),) = pool.run(run_with_updates, 1, directory)
    assert error < find_tolerance(directory, samples, error)


def test_response_does_not_depend_on_steps_per_sync(directory):
    """Steps behind the end of a response change its row's states, which the next one must not
    read."""
    prompts = [
        Prompt(index, "", torch.arange(2, 2 + length)) for index, length in enumerate((4, 2))
    ]
    requests = [GenerationRequest(prompt, sample) for prompt in prompts for sample in range(3)]
    options = SamplingOptions(LIMIT, stop_token_ids=tuple(range(2, 12)))
    one, other = (
        generate(build_engine(directory, batch_size=2, steps_per_sync=steps), requests, options)
        for steps in (1, 4)
    )
    for first, second in zip(one, other, strict=True):
        assert torch.equal(first.tokens, second.tokens)
        torch.testing.assert_close(first.engine_logprobs, second.engine_logprobs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"speculation": SpeculationConfig(tokens=2)},
            "engine.speculation.tokens=2: must be 0 for a model with gated delta nets",
        ),
        ({"exact": True}, "engine.exact=true: is not supported for models with gated delta nets"),
    ],
)
def test_settings_that_need_earlier_states_are_refused(directory, settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_engine(directory, **settings)


def test_budget_of_the_cache_includes_states(directory):
    engine = build_engine(directory, batch_size=100, kv_cache_mib=1)
    engine.reserve(100, 40)
    cache = engine._state.cache
    states = cache.delta_nets
    assert states is not None
    used = cache._storage.nbytes + states.histories.nbytes + states.states.nbytes
    sequence_bytes = used // cache.size.sequences
    assert used <= 1 << 20 < used + sequence_bytes
