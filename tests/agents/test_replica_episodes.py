"""Episodes on a tensor-parallel replica equal those of one rank, despite environment delays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aligner.agents.environment_pool import EnvironmentPool
from aligner.agents.episodes import EnvironmentEpisodes
from aligner.data.model_directory import read_shape
from aligner.data.tokenizer import Tokenizer, build_character_tokenizer
from aligner.data.types import Sample
from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.engine_loop import EpisodeFollower, SampleStarter, run_steps
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.errors import AlignerError
from aligner.models.model_source import directory_shape
from aligner.schema import EngineConfig, EngineParallelConfig
from aligner.schema.environment import EnvironmentConfig
from tests.agents.test_branches import CALLER, forgetful_model
from tests.agents.test_episodes import make_prompt
from tests.engines.engines import load_directory
from tests.megatron import families
from tests.rounds import slow

STOPS = tuple(range(20, 60))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = families.save("llama3", tmp_path_factory.mktemp("led"))
    build_character_tokenizer(read_shape(directory)).save(str(directory / "tokenizer.json"))
    return str(directory)


def run_episodes(
    directory: str, settings: dict[str, Any], parts: tuple[int | None, ...] = (None,)
) -> list[Sample] | str:
    """Run two episodes for each of four prompts on all ranks; return the samples or the error.

    After each number of steps in `parts`, the episodes are transferred to a new generation.
    """
    torch.set_num_threads(1)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    group = dist.group.WORLD if size > 1 else None
    model, parallel = Path(directory), EngineParallelConfig(tensor=size, data=1)
    chosen = EnvironmentConfig(
        **{"target": "tests.agents.teller:Teller", "max_turn_tokens": 6} | settings
    )
    engine = EmbeddedEngine(
        directory_shape(model, "model.path"),
        EngineConfig(exact=True, batch_size=3, parallel=parallel),
        rank,
        2,
        group,
    )
    load_directory(engine, model)
    tokenizer = Tokenizer(model)
    pool = EnvironmentPool.from_config(chosen) if rank == 0 else None
    if (model / "chat_template.jinja").exists():
        prompts = [make_prompt(tokenizer, at, is_chat=True, fails=False) for at in range(4)]
    else:
        prompts = [make_prompt(tokenizer, at, is_chat=False, fails=at == 3) for at in range(4)]
    requests = [GenerationRequest(prompt, index) for prompt in prompts for index in range(2)]
    stops = STOPS if (settings.get("turn_end") or "turn_end" not in settings) else ()
    options, found = (
        SamplingOptions(48, stop_token_ids=(*tokenizer.eos_token_ids, *stops)),
        dict[int, Sample](),
    )

    try:
        if pool is not None:
            pool.start()
        source: SampleStarter = EpisodeFollower(engine)
        if pool is not None:
            source = EnvironmentEpisodes(engine, pool, tokenizer, chosen, seed=3)
        for steps in parts:
            places = [place for place in range(len(requests)) if place not in found]
            generation = source.start([requests[place] for place in places], options)
            found |= {places[at]: sample for at, sample in run_steps(generation, steps).items()}
            for at, sample in [] if generation.is_done else generation.interrupt():
                requests[places[at]] = replace(
                    requests[places[at]], partial_sample=sample if len(sample.response) else None
                )
            generation.cancel()
        return [found[place] for place in range(len(requests))]
    except AlignerError as error:
        return str(error)
    finally:
        if pool is not None:
            pool.close()


@pytest.mark.promise("episodes-equal-on-every-placement")
@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({}, (None,)),
        slow({"arguments": {"delay_s": 0.05, "spread": 3}}, (None,)),
        slow({}, (3, 8, None)),
    ],
    ids=["at once", "at times of their own", "in parts"],
)
def test_replica_episodes_equal_one_rank(pool, directory, settings, parts):
    alone = run_episodes(directory, {})
    ranks = pool.run(run_episodes, 2, directory, settings, parts)
    assert len(alone) == 8 and any(sample.rewards.isnan().any() for sample in alone)
    for one, other in zip(alone, ranks[0], strict=True):
        assert torch.equal(one.tokens, other.tokens) and one.finish_reason == other.finish_reason
        assert torch.equal(one.rewards.nan_to_num(9.0), other.rewards.nan_to_num(9.0))
        assert (
            one.generated_mask is None
            or other.generated_mask is None
            or torch.equal(one.generated_mask, other.generated_mask)
        )
        torch.testing.assert_close(one.engine_logprobs, other.engine_logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("parts", [(None,), (5, 9, None)], ids=["at once", "in parts"])
def test_replica_branches_equal_one_rank(pool, tmp_path, parts):
    directory = str(forgetful_model(tmp_path))
    settings = {"target": CALLER, "turn_end": None, "max_turn_tokens": 12}
    alone = run_episodes(directory, settings)
    first, _ = pool.run(run_episodes, 2, directory, settings, parts)
    assert any(len(sample.branches) == 2 for sample in alone)
    for one, other in zip(alone, first, strict=True):
        assert len(one.branches) == len(other.branches)
        for mine, its in zip(one.sequences, other.sequences, strict=True):
            assert torch.equal(mine.tokens, its.tokens)
            assert torch.equal(mine.rewards, its.rewards)


def test_error_of_first_rank_is_raised_on_every_rank(pool, directory):
    errors = pool.run(run_episodes, 2, directory, {"turn_end": "two tokens"})
    assert errors[0] == errors[1] and "environment.turn_end" in errors[0]
