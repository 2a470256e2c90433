"""Guided decoding in the installed vLLM: log-probs over the allowed tokens equal the trainer's."""

from __future__ import annotations

from pathlib import Path

import pytest

from aligner.engines.engine_protocol import SamplingOptions
from aligner.errors import AlignerError
from tests.engines import engines
from tests.engines.test_guided_decoding import (
    OPTIONS,
    compare_with_trainer,
    draw_grammars,
    generate,
    save_model,
)
from tests.engines.vllm.shared_clients import NEEDED

pytestmark = [*NEEDED, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.promise("guided-logprobs-are-exact")
def test_guided_logprobs_of_vllm_equal_trainer(pool, model):
    with engines.engine_of("vllm", model, batch_size=4) as engine:
        engines.publish(engine, model, 0)
        samples = generate(engine, draw_grammars(4, 12), OPTIONS)
        with pytest.raises(AlignerError, match=r"Unimplemented keys: .*uniqueItems"):
            generate(engine, ['start: %json {"type": "array", "uniqueItems": true}'], OPTIONS)
        greedy = generate(
            engine, draw_grammars(5, 4), SamplingOptions(60, greedy=True, stop_token_ids=(1, 2))
        )
    assert sum(sample.finish_reason == "stop" for sample in samples) >= 5
    for tensor in (1, 2):
        for found in pool.run(compare_with_trainer, tensor, str(model), tensor, OPTIONS, samples):
            assert found["errors"]["policy"] < 1e-4
            assert found["errors"]["without grammars"] > 0.1
    assert len(greedy) == 4
