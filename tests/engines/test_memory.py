"""The arithmetic of an engine's memory against the embedded engine itself."""

from __future__ import annotations

import pytest
import torch

from aligner.config.families import read_config
from aligner.config.memory.states import engine_weights, shared_weights
from aligner.config.schema import Engine, EngineParallel, Parallel
from aligner.engines.embedded.engine import EmbeddedEngine
from aligner.engines.embedded.weights import parameters
from tests.megatron.test_memory import GPT2, LLAMA, MIXTRAL, NEOX, QWEN3, TIED

MODELS = {"llama": LLAMA, "tied": TIED, "qwen3": QWEN3, "neox": NEOX, "gpt2": GPT2, "mixtral": MIXTRAL}
PADDING = 0.01
"""Of the storage: every parameter begins on a line of its own."""


@pytest.mark.parametrize("name", MODELS)
def test_an_engine_stores_as_many_weights_as_computed(name: str) -> None:
    shape = read_config(MODELS[name], "test")
    engine = EmbeddedEngine(shape, Engine(), 0, 1)
    assert 4 * engine_weights(shape, 1) <= engine.nbytes <= (1 + PADDING) * 4 * engine_weights(shape, 1)
    halves = sum(parameter.numel for parameter in parameters(shape, 2))
    assert halves == engine_weights(shape, 2)


@pytest.mark.parametrize("name", MODELS)
def test_an_engine_that_shares_stores_the_rest(name: str) -> None:
    shape = read_config(MODELS[name], "test")
    trained = {parameter.name: torch.empty(parameter.shape) for parameter in parameters(shape, 1)}
    settings = Engine(update="shared", parallel=EngineParallel())
    engine = EmbeddedEngine(shape, settings, 0, 1, shared=trained)
    rest = engine_weights(shape, 1) - shared_weights(shape, Parallel(), 0, 1)
    assert 4 * rest <= engine.nbytes <= (1 + PADDING) * 4 * rest
