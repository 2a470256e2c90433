"""With `engine.exact`, the engine's log-probs equal the trainer's bitwise, independent of both
batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from aligner.data.types import Prompt, Sample, collate
from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.megatron import world as worlds
from aligner.models import batch_invariant
from aligner.models.model_source import directory_shape
from aligner.schema import EngineConfig
from tests.engines.engines import generate, load_directory
from tests.megatron import families, jobs
from tests.rounds import typical

DENSE = [family for family in families.CONFIGS if family not in families.WITHOUT_EXACT]
LENGTHS = (3, 9, 1, 20)
NEW_TOKENS = (14, 9, 34, 5, 11, 14, 2, 30)
OPTIONS = {
    "all": {"temperature": 1.0},
    "warm": {"temperature": 0.7},
    "top-p": {"temperature": 1.3, "top_p": 0.9},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "dp2": {"data": 2},
    "pp2": {"pipeline": 2},
    "cp2": {"context": 2},
}


def generate_samples(
    directory: str, sampling: dict[str, float], *, exact: bool = True, rows: int = 3
) -> list[Sample]:
    """Generate responses of different lengths; with fewer rows than requests, some start while
    others are in flight."""
    generator = torch.Generator().manual_seed(5)
    shape = directory_shape(Path(directory), "model.path")
    prompts = [
        Prompt(at, "", torch.randint(2, 72, (length,), generator=generator))
        for at, length in enumerate(LENGTHS)
    ]
    engine = EmbeddedEngine(shape, EngineConfig(exact=exact, batch_size=rows), 0, seed=2)
    load_directory(engine, Path(directory))
    requests = [
        GenerationRequest(prompts[index // 2], index % 2, limit)
        for index, limit in enumerate(NEW_TOKENS)
    ]
    return generate(engine, requests, SamplingOptions(max(NEW_TOKENS), **sampling))


def differing_fractions(
    directory: str, layout: dict[str, Any], budget: int, *, exact: bool = True
) -> dict[str, float]:
    """Return, for each of OPTIONS, the fraction of response tokens whose log-probs differ in the
    trainer."""
    torch.set_num_threads(1)
    actor = jobs.policy(directory, layout, {"micro_batch_tokens": budget}, exact=exact)
    found = {}
    for name, sampling in OPTIONS.items():
        batch = collate(generate_samples(directory, sampling, exact=exact), pad_token_id=0)
        actor.temperature = sampling["temperature"]
        scored = actor.logprobs(
            batch.tokens, batch.lengths, sampling_support=batch.sampling_support
        )
        found[name] = float((scored != batch.engine_logprobs)[batch.mask].double().mean())
    worlds.shutdown()
    return found


@pytest.mark.promise("exact-engine-logprobs")
@pytest.mark.parametrize("family", typical(DENSE, ("llama3", "gpt2")))
def test_exact_logprobs_equal_trainer_bitwise(pool, tmp_path, family):
    directory = str(families.save(family, tmp_path))
    for budget in (1000, 60):  # large packed micro-batches, and small ones
        (found,) = pool.run(differing_fractions, 1, directory, {}, budget)
        assert found == dict.fromkeys(OPTIONS, 0.0)
    (found,) = pool.run(differing_fractions, 1, directory, {}, 60, exact=False)
    assert min(found.values()) > 0.1, "they would be without it"


@pytest.mark.promise("exact-engine-logprobs")
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "single"])
def test_exact_logprobs_equal_trainer_at_layouts_without_tp(pool, tmp_path, layout):
    directory = str(families.save("llama3", tmp_path))
    for found in pool.run(differing_fractions, 2, directory, LAYOUTS[layout], 1000):
        assert found == dict.fromkeys(OPTIONS, 0.0)


def samples_by_rows(directory: str, rows: int) -> list[Sample]:
    torch.set_num_threads(1)
    return generate_samples(directory, OPTIONS["warm"], rows=rows)


@pytest.mark.promise("exact-engine-logprobs")
def test_exact_samples_do_not_depend_on_batch_size(pool, tmp_path):
    directory = str(families.save("qwen3", tmp_path))
    whole, alone = (pool.run(samples_by_rows, 1, directory, rows)[0] for rows in (8, 1))
    for one, other in zip(whole, alone, strict=True):
        assert torch.equal(one.tokens, other.tokens) and torch.equal(
            one.engine_logprobs, other.engine_logprobs
        )


def attend_slice(length: int, queries: slice, heads: int = 4, groups: int = 2) -> torch.Tensor:
    """Return batch-invariant causal attention of a sequence's `queries` over its first `length`
    keys."""
    draw = torch.Generator().manual_seed(7)
    query, key, value = (
        torch.randn(1, count, 64, 16, generator=draw) for count in (heads, groups, groups)
    )
    seen = torch.ones(64, 64, dtype=torch.bool).tril()[queries, :length]
    return batch_invariant.attend(
        query[:, :, queries], key[:, :, :length], value[:, :, :length], seen
    )


def test_attention_equals_sdpa_and_is_batch_invariant():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        draw = torch.Generator().manual_seed(7)
        query, key, value = (torch.randn(1, count, 64, 16, generator=draw) for count in (4, 2, 2))
        whole = attend_slice(64, slice(0, 64))
        expected = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-5)
        for place in (0, 1, 15, 16, 17, 40, 63):
            assert torch.equal(
                attend_slice(place + 1, slice(place, place + 1))[:, :, 0], whole[:, :, place]
            )
    finally:
        torch.set_num_threads(threads)


def test_long_attention_does_not_depend_on_later_keys():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        draw = torch.Generator().manual_seed(7)
        query, key, value = (torch.randn(1, count, 900, 16, generator=draw) for count in (4, 2, 2))
        whole = batch_invariant.attend(
            query, key, value, torch.ones(900, 900, dtype=torch.bool).tril()
        )
        for length in (256, 257, 385, 400, 513, 768, 800, 899):
            seen = torch.ones(1, length, dtype=torch.bool)
            alone = batch_invariant.attend(
                query[:, :, length - 1 : length], key[:, :, :length], value[:, :, :length], seen
            )
            assert torch.equal(alone[:, :, 0], whole[:, :, length - 1])
    finally:
        torch.set_num_threads(threads)
