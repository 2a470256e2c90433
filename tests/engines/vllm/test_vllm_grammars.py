"""Guided decoding and scoring in the installed vLLM: log-probs equal those of the trainer and of
the embedded engine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Prompt, Sample
from aligner.engines.engine_loop import EngineLoop, complete_response
from aligner.engines.engine_protocol import (
    GenerationEngine,
    GenerationRequest,
    RequestKey,
    SamplingOptions,
    TokenScores,
)
from aligner.engines.external import external_engine
from aligner.engines.vllm.vllm_engine import VLLMEngine
from aligner.errors import AlignerError, UnsupportedError
from tests.engines import engines
from tests.engines.test_guided_decoding import (
    LENGTH,
    OPTIONS,
    check_dead_end,
    compare_with_trainer,
    draw_grammars,
    generate,
    letters_tokenizer,
    make_engine,
    save_model,
)
from tests.engines.vllm.shared_clients import NEEDED

pytestmark = [*NEEDED, pytest.mark.timeout(600)]


INTERRUPTED = 24
"""Number of responses that a weight sync interrupts, or that wait for other responses then."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[VLLMEngine]:
    with engines.engine_of("vllm", model, batch_size=4) as engine:
        engines.publish(engine, model, 0)
        yield engine


@pytest.mark.promise("guided-logprobs-are-exact")
def test_guided_logprobs_of_vllm_equal_trainer(pool, engine, model):
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


def test_interrupted_guided_responses_of_vllm_continue_their_text(pool, engine, model, monkeypatch):
    """A weight sync interrupts the responses. It sends the same weights again, so that the trainer
    has the log-probs of all tokens."""
    monkeypatch.setattr(external_engine, "_MAX_WAIT_S", 0.01)
    # vLLM is a separate process, and may be ahead of the responses that this process has received;
    # most requests therefore wait until others are complete
    samples = next(filter(None, (interrupt(engine, model, at) for at in range(10, 20, 2))))
    for sample in samples:
        (span,) = sample.grammar_spans
        assert (span.start, span.end) == (0, len(sample.response))
        assert sample.finish_reason == "stop"
        text = Tokenizer(model).decode(sample.response)
        assert len(text) == 120 and set(text) <= set("abcdef")
    (found,) = pool.run(compare_with_trainer, 1, str(model), 1, OPTIONS, samples)
    assert found["errors"]["policy"] < 1e-4 and found["errors"]["without grammars"] > 0.1


def interrupt(engine: VLLMEngine, model: Path, version: int) -> list[Sample] | None:
    """Return guided responses of the weights `version` and `version + 1`; None if the weight sync
    interrupted no response."""
    engines.publish(engine, model, version)
    options = replace(OPTIONS, max_new_tokens=LENGTH - 10, grammar="start: /[a-f]{120}/")
    loop = EngineLoop(engine)
    for index in range(INTERRUPTED):
        request = GenerationRequest(Prompt(index, "", torch.tensor([40, 50 + index])), 0)
        loop.spawn(index, complete_response(loop, request, options))
    found: dict[int, Sample] = {}
    while not loop.is_done and not any(
        response.output is not None and len(response.output.outputs[0].token_ids) > 5
        for response in engine._in_flight.values()
    ):
        found |= dict(loop.step())
    engines.publish(engine, model, version + 1, in_flight="interrupt")
    while not loop.is_done:
        found |= dict(loop.step())
    loop.close()
    samples = [found[index] for index in range(INTERRUPTED)]
    if any(len(sample.weight_versions.unique()) == 2 for sample in samples):
        return samples
    return None


def test_response_without_allowed_token_ends_with_one_warning(
    engine, model, tmp_path, caplog, monkeypatch
):
    directory = shutil.copytree(model, tmp_path / "letters")
    (directory / "tokenizer.json").write_text(letters_tokenizer())
    monkeypatch.setattr(engine, "_tokenizer", Tokenizer(directory))
    check_dead_end(engine, caplog)


def score_all(engine: GenerationEngine) -> list[TokenScores]:
    """Score sequences, while the engine generates at another temperature."""
    draw = torch.Generator().manual_seed(4)
    generating = engine.submit(
        torch.tensor([40, 51]), replace(OPTIONS, max_new_tokens=150), RequestKey(9, 0, 2)
    )
    engine.step()
    queued = [
        engine.submit_scoring(
            torch.randint(3, 300, (length,), generator=draw), start, top_logprobs, temperature
        )
        for length, start, top_logprobs, temperature in (
            (LENGTH - 1, 1, 25, 0.5),
            (30, 12, 0, 1.0),
            (9, 9, 3, 1.0),
            (1, 1, 2, 1.0),
            (7, 1, 100_000, 1.7),
        )
    ]
    while engine.has_work:
        engine.step()
    assert len(generating.future.result(0).tokens)
    return [request.future.result(0) for request in queued]


def test_scores_of_vllm_equal_embedded_engine(engine, model):
    expected = score_all(make_engine(model))
    found = score_all(engine)
    for scores, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(scores.logprobs, reference.logprobs, atol=1e-4, rtol=0)
        torch.testing.assert_close(scores.top_logprobs, reference.top_logprobs, atol=1e-4, rtol=0)
        assert scores.top_ids.shape == reference.top_ids.shape
    # Rounding may exchange tokens of almost equal probability.
    is_equal = found[0].top_ids == expected[0].top_ids
    assert is_equal.float().mean() > 0.98


def test_vllm_refuses_what_it_cannot_score_or_sample(engine, model):
    full = engine.submit_scoring(torch.full((LENGTH,), 3))
    with pytest.raises(AlignerError, match=f"vLLM: scores at most {LENGTH - 1} tokens"):
        full.future.result(0)
    outside = engine.submit_scoring(torch.tensor([2, 100_000]))
    with pytest.raises(AlignerError, match="must be in the vocabulary"):
        outside.future.result(0)
    for options, problem in (
        (replace(OPTIONS, temperature=0.001), "temperature=0.001 is not supported"),
        (replace(OPTIONS, routes=True), "returning the expert routing is not supported"),
        (replace(OPTIONS, top_k=3, renormalize=True), "returning the sampling support"),
    ):
        request = engine.submit(torch.tensor([40]), options, RequestKey(0, 0, 1))
        with pytest.raises(UnsupportedError, match=f"vLLM: {problem}.*; set engine.kind=embedded"):
            request.future.result(0)
    assert not engine.has_work
