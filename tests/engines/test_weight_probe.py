"""The probe compares log-probs of the engine with those of the trainer."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from aligner.engines.engine_protocol import GenerationEngine
from aligner.engines.weight_probe import (
    ProbeResult,
    ProbeTolerance,
    build_probe,
    find_probe_problem,
    run_probe,
)
from tests.engines import engines

pytestmark = pytest.mark.promise("weight-sync-is-verified")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engines.save_tiny(tmp_path_factory.mktemp("model"), seed=0)


def reference_logprobs(directory: Path, tokens: list[list[int]]) -> torch.Tensor:
    """Log-probs of the tokens after the first one, from transformers, [B, T-1]."""
    sequences = torch.tensor(tokens)
    with torch.no_grad():
        logits = engines.reference_model(directory)(sequences).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, sequences[:, 1:, None])[..., 0]


def test_probe_depends_on_vocabulary_seed_and_maximum_length(directory):
    shape = engines.shape_of(directory)
    probe = build_probe(shape, 100, seed=3)
    assert probe.shape == (4, 16)
    assert torch.equal(probe, build_probe(shape, 100, seed=3))
    assert not torch.equal(probe, build_probe(shape, 100, seed=4))
    assert probe.max() < shape.vocab_size
    assert build_probe(shape, 9, seed=3).shape == (4, 8)


@pytest.mark.parametrize("kind", engines.KINDS)
def test_probe_of_every_engine_equals_transformers(directory, kind):
    with engines.engine_of(kind, directory) as engine:
        engines.publish(engine, directory, 1)
        sequences = build_probe(engines.shape_of(directory), 100, seed=3)
        result = run_probe(engine, sequences)
    assert result.error is None
    scored = len(result.logprobs[0])
    assert scored == (15 if engine.can_score else 4)
    expected = reference_logprobs(directory, result.tokens)[:, -scored:]
    assert find_probe_problem(result, expected, ProbeTolerance(1e-4, False)) is None
    assert [row[:-scored] for row in result.tokens] == sequences[:, :-scored].tolist()


def test_engine_that_does_not_answer_is_reported(directory, monkeypatch):
    with engines.engine_of("embedded-in_place", directory) as engine:
        engines.publish(engine, directory, 1)
        monkeypatch.setattr(type(engine), "_take_scoring_requests", lambda self: [])
        monkeypatch.setattr(GenerationEngine, "has_work", False)
        monkeypatch.setattr(type(engine), "has_work", False)
        result = run_probe(engine, build_probe(engines.shape_of(directory), 100, seed=3))
    assert result.error is not None
    assert result.error.startswith(
        "EmbeddedEngine has no work left, but did not answer the requests of `submit_scoring`"
    )


TOKENS = [[5, 6, 7], [8, 9, 10]]
TRAINER = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])


def test_largest_difference_is_reported_with_position_and_values():
    result = ProbeResult(TOKENS, [[-1.0, -2.0], [-3.25, -4.1]])
    assert find_probe_problem(result, TRAINER, ProbeTolerance(0.3, False)) is None
    assert find_probe_problem(result, TRAINER, ProbeTolerance(0.2, False)) == (
        "position 1 of probe sequence 1 (token 9): the log-prob of the engine is -3.25, that of the"
        " trainer is -3; the tolerance is 0.2"
    )


def test_nan_is_above_every_tolerance():
    result = ProbeResult(TOKENS, [[-1.0, math.nan], [-3.0, -4.0]])
    problem = find_probe_problem(result, TRAINER, ProbeTolerance(0.5, False))
    assert problem is not None
    assert problem.startswith(
        "position 2 of probe sequence 0 (token 7): the log-prob of the engine is nan"
    )
    assert find_probe_problem(result, TRAINER, ProbeTolerance(0.5, True)) == problem


def test_tolerance_depends_on_precision_and_experts(directory):
    shape = engines.shape_of(directory)
    assert ProbeTolerance.for_precisions(("fp32", "fp32"), shape) == ProbeTolerance(1e-3, False)
    assert ProbeTolerance.for_precisions(("fp32", "bf16"), shape) == ProbeTolerance(0.5, True)
    assert ProbeTolerance.for_precisions(("fp8", "bf16"), shape) == ProbeTolerance(1.0, True)


def test_rerouted_token_of_experts_is_tolerated():
    result = ProbeResult(TOKENS, [[-1.0, -2.0], [-3.0, -6.0]])
    assert find_probe_problem(result, TRAINER, ProbeTolerance(0.1, True)) is None
    shifted = ProbeResult(TOKENS, [[-2.0, -3.0], [-4.0, -4.0]])
    problem = find_probe_problem(shifted, TRAINER, ProbeTolerance(0.1, True))
    assert problem is not None
    assert problem.endswith("; the median difference of all positions is 1; the tolerance is 0.1")


def test_error_of_the_engine_is_the_problem():
    result = ProbeResult([], [], "the engine has no weights")
    assert (
        find_probe_problem(result, TRAINER, ProbeTolerance(1, False)) == "the engine has no weights"
    )
