"""The generator's endpoint, on one rank: what it answers, and what it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from aligner.config.compose import compose_config
from aligner.data.model_directory import prepare_model, read_shape
from aligner.data.types import Prompt
from aligner.engines.build import build_engine
from aligner.engines.protocol import GenerationRequest, SamplingOptions
from aligner.engines.receiver import WeightReceiver
from aligner.errors import AlignerError
from aligner.servers.generator import Generator
from aligner.servers.generator_client import request_arrays, response_samples
from aligner.servers.protocol import GENERATE, RequestError
from aligner.servers.serving import _control_request
from aligner.servers.validation import Limits, validate

PROMPTS = [Prompt(7, "", torch.tensor([5, 6, 9])), Prompt(2**40, "", torch.tensor([8]))]
OPTIONS = SamplingOptions(max_new_tokens=4, temperature=0.7, stop_token_ids=(1,))


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    config = compose_config(
        ["experiment=tiny_ppo", "engine.placement=server", f"run.dir={tmp_path_factory.mktemp('run') / 'run'}"]
    )
    directory = prepare_model(config)
    shape = read_shape(directory)
    built = build_engine(shape, config.engine, directory, seed=config.seed)
    built.config, built.shape, built.directory = config, shape, directory
    return built


def serving(engine):
    receiver = WeightReceiver(engine.config, engine.shape, engine, 0, torch.device("cpu"))
    generator = Generator(engine.config, engine, receiver, rank=0)

    def call(op, tensors=None, **arguments):
        return generator.handlers[op](**(tensors or {}), **arguments)

    return call, generator.endpoints(call)[GENERATE]


def test_an_engine_without_weights_says_so_and_takes_none_before_it_is_connected(engine):
    call, serve = serving(engine)
    assert call("version")["version"] == -1
    with pytest.raises(AlignerError, match="none were published yet"):
        serve(request_arrays(PROMPTS, 2, OPTIONS))
    with pytest.raises(AlignerError, match="connect comes first"):
        call("receive", version=1)


def test_samples_over_the_wire_are_those_of_the_engine(engine):
    engine.load_directory(engine.directory, version=3)
    call, serve = serving(engine)
    arrays = request_arrays(PROMPTS, 2, OPTIONS)
    validate(GENERATE, arrays, Limits(engine.shape.vocab_size, engine.shape.max_positions))
    got = response_samples(PROMPTS, 2, serve(arrays))
    expected = engine.generate([GenerationRequest(prompt, index) for prompt in PROMPTS for index in range(2)], OPTIONS)
    assert call("version")["version"] == 3
    for one, other in zip(got, expected, strict=True):
        assert (one.prompt_id, one.sample_index, one.finish_reason) == (
            other.prompt_id,
            other.sample_index,
            other.finish_reason,
        )
        for name in ("tokens", "engine_logprobs", "weight_versions"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"options": "{"}, "options: not JSON"),
        ({"options": "[]"}, "options: got list, allowed: an object with"),
        ({"options": '{"max_new_tokens": 2, "topk": 1}'}, "options: got topk, allowed: an object with .*top_k"),
        ({"options": "{}"}, "options: .*max_new_tokens"),
        ({"options": '{"max_new_tokens": 2, "temperature": 0}'}, "temperature=0: must be above 0"),
        ({"options": '{"max_new_tokens": "2"}'}, "options: "),
        ({"samples_per_prompt": 0}, "samples_per_prompt: got 0, allowed: at least 1"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(engine, changed, message):
    _, serve = serving(engine)
    arrays = request_arrays(PROMPTS, 2, OPTIONS)
    for name, value in changed.items():
        arrays[name] = np.array([value.encode() if isinstance(value, str) else value])
    with pytest.raises(AlignerError, match=message):
        serve(arrays)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"op": "receive"}, "receive got keys op, allowed: op, version"),
        ({"op": "receive", "version": -1}, "receive got version -1, allowed: an integer, 0 to"),
        ({"op": "connect", "host": 3, "port": 1, "generation": 0}, "connect got host 3, allowed: a string"),
        ({"op": "connect", "host": "a", "port": 0, "generation": 0}, "connect got port 0, allowed: an integer, 1 to"),
        ({"op": ["connect"]}, r"got op \['connect'\], allowed: "),
    ],
)
def test_what_is_no_order_to_move_weights_is_refused(request_, message):
    with pytest.raises(RequestError, match=message):
        _control_request(json.dumps(request_), ("connect", "receive"))
