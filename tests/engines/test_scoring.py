"""Log-probs of given tokens equal those of a full forward pass, also beside requests in flight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aligner.engines.embedded import scoring
from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.embedded.scoring import select_next_pass
from aligner.engines.engine_protocol import (
    RequestKey,
    SamplingOptions,
    ScoringRequest,
    TokenScores,
)
from aligner.errors import AlignerError
from aligner.models.model_source import directory_shape
from aligner.schema import EngineConfig, EngineParallelConfig
from tests.engines.engines import load_directory, save_tiny

LENGTHS = (9, 1, 30, 14)
SEQUENCES = [
    torch.randint(2, 70, (length,), generator=torch.Generator().manual_seed(length))
    for length in LENGTHS
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), seed=3)


def create_engine(model: Path, **settings: Any) -> EmbeddedEngine:
    torch.set_num_threads(1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    size = dist.get_world_size() if dist.is_initialized() else 1
    config = EngineConfig(parallel=EngineParallelConfig(size, 1), **settings)
    group = dist.group.WORLD if size > 1 else None
    engine = EmbeddedEngine(directory_shape(model, "model.path"), config, rank, 2, group)
    load_directory(engine, model)
    return engine


def score_all(model: Path, settings: dict[str, Any], **arguments: Any) -> list[TokenScores]:
    """Score the sequences on all ranks of the world; the result is that of the first rank."""
    engine = create_engine(model, **settings)
    if not engine.is_leader:
        engine.follow()
        return []
    queued = [engine.submit_scoring(tokens, **arguments) for tokens in SEQUENCES]
    while engine.has_work:
        engine.step()
    engine.end_turn()
    return [request.future.result(0) for request in queued]


@torch.no_grad()
def expected_logprobs(model: Path, tokens: torch.Tensor, temperature: float = 1) -> torch.Tensor:
    """Log-probs of all next tokens [T-1, V], from transformers."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    logits = network(tokens[None]).logits[0, :-1]
    return (logits / temperature).log_softmax(-1)


def assert_equals_transformers(
    model: Path, found: list[TokenScores], top: int, temperature: float = 1
) -> None:
    for tokens, scores in zip(SEQUENCES, found, strict=True):
        expected = expected_logprobs(model, tokens, temperature)
        own = expected.gather(1, tokens[1:, None])[:, 0]
        assert torch.allclose(scores.logprobs, own, atol=1e-5)
        values, ids = expected.topk(top)
        assert torch.equal(scores.top_ids, ids)
        assert torch.allclose(scores.top_logprobs, values, atol=1e-5)
        # evaluation harnesses compare the two numbers
        is_greedy = scores.top_ids[:, 0] == tokens[1:]
        assert torch.equal(scores.logprobs == scores.top_logprobs[:, 0], is_greedy)


@pytest.mark.parametrize("settings", [{}, {"exact": True}, {"packed_weights": False}])
def test_scores_equal_transformers(
    model: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # several chunks of positions for one sequence
    monkeypatch.setattr(scoring, "_MAX_CHUNK_LOGITS", 120 * 7)
    found = score_all(model, settings, top_logprobs=5, temperature=0.7)
    assert_equals_transformers(model, found, 5, 0.7)


@pytest.mark.slow
def test_scores_of_two_ranks_equal_transformers(pool: Any, model: Path) -> None:
    found = pool.run(score_all, 2, model, {}, top_logprobs=3)[0]
    assert_equals_transformers(model, found, 3)


def test_start_selects_the_scored_tokens(model: Path) -> None:
    engine = create_engine(model)
    tokens = SEQUENCES[0]
    queued = [engine.submit_scoring(tokens, start, top_logprobs=2) for start in (1, 6, 9)]
    engine.step()
    whole, last, none = [request.future.result(0) for request in queued]
    assert torch.equal(last.logprobs, whole.logprobs[5:])
    assert torch.equal(last.top_ids, whole.top_ids[5:])
    assert none.logprobs.shape == (0,) and none.top_ids.shape == (0, 2)


def test_exact_scores_equal_logprobs_of_generation(model: Path) -> None:
    engine = create_engine(model, exact=True)
    request = engine.submit(SEQUENCES[0], SamplingOptions(20, temperature=0.8), RequestKey(0, 0, 9))
    while engine.has_work:
        engine.step()
    completion = request.future.result(0)
    tokens = torch.cat([SEQUENCES[0], completion.tokens])
    scoring_request = engine.submit_scoring(tokens, 9, temperature=0.8)
    engine.step()
    scores = scoring_request.future.result(0)
    torch.testing.assert_close(scores.logprobs, completion.logprobs, atol=1e-6, rtol=0)


def test_scoring_does_not_disturb_requests_in_flight(model: Path) -> None:
    def generate(*, scores: bool) -> list[int]:
        engine = create_engine(model, exact=True)
        request = engine.submit(SEQUENCES[0], SamplingOptions(20), RequestKey(0, 0, 9))
        while engine.has_work:
            if scores:
                engine.submit_scoring(SEQUENCES[2], top_logprobs=4)
            engine.step()
            if request.future.done():
                break
        tokens: list[int] = request.future.result(0).tokens.tolist()
        return tokens

    assert generate(scores=True) == generate(scores=False)


def test_long_sequences_are_scored_in_separate_passes() -> None:
    def requests(*lengths: int) -> list[ScoringRequest]:
        return [
            ScoringRequest(torch.zeros(length, dtype=torch.int64), 1, 0, 1.0) for length in lengths
        ]

    assert select_next_pass([]) == 0
    assert select_next_pass(requests(20000, 10)) == 1
    assert select_next_pass(requests(4000, 4000, 100)) == 2
    assert select_next_pass(requests(10, 4000, 4000)) == 2


def test_cancelled_score_is_not_computed(model: Path) -> None:
    engine = create_engine(model)
    request = engine.submit_scoring(SEQUENCES[0])
    assert engine.has_work
    request.future.cancel()
    assert not engine.has_work


def test_invalid_scoring_requests_are_refused(model: Path) -> None:
    engine = create_engine(model)
    for tokens, start, message in (
        (SEQUENCES[0], 0, "start=0: must be from 1 to the number of tokens, 9"),
        (SEQUENCES[0], 10, "start=10"),
        (torch.tensor([2, 500]), 1, "token ids from 2 to 500; must be in the vocabulary"),
        (torch.full((100,), 3), 1, "100 tokens exceed the 48 positions"),
    ):
        with pytest.raises(AlignerError, match=message):
            engine.submit_scoring(tokens, start).future.result(0)


def test_engine_without_weights_refuses_to_score(model: Path) -> None:
    engine = EmbeddedEngine(directory_shape(model, "model.path"), EngineConfig(), 0, seed=2)
    request = engine.submit_scoring(SEQUENCES[0])
    engine.step()
    with pytest.raises(AlignerError, match="the engine has no weights"):
        request.future.result(0)
