"""Responses of several turns do not depend on timing or on KV cache reuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aligner.data.types import Prompt, Sample, collate
from aligner.engines.embedded.block_pool import BlockPool
from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.embedded.scheduler import Scheduler
from aligner.engines.engine_loop import append_completion, create_unfinished_sample
from aligner.engines.engine_protocol import GenerationRequest, RequestKey, SamplingOptions
from aligner.errors import AlignerError
from aligner.megatron import world as worlds
from aligner.models.model_source import directory_shape
from aligner.schema import EngineConfig
from tests.engines.engines import Turns, load_directory
from tests.megatron import families, jobs

LENGTHS = (3, 9, 3, 20, 6, 2)
LIMIT, TURN = 40, 5
STOPS = (5, 9, 20, 33, 41, 60)


def observation_of(turn: int, place: int) -> list[int]:
    """Return the observation tokens of a response after a turn."""
    return [(7 * place + 3 * turn + at) % 70 + 2 for at in range(1 + (place + turn) % 4)]


def episodes(
    directory: str, rows: int, delays: int = 0, *, forgets: bool = False, exact: bool = True
) -> list[Sample]:
    """Generate responses of three turns each.

    An observation arrives `delays`, 2 x `delays` or 3 x `delays` engine steps after the turn ends.
    """
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(5)
    prompts = [
        Prompt(at, "", torch.randint(2, 72, (length,), generator=draw))
        for at, length in enumerate(LENGTHS)
    ]
    engine = EmbeddedEngine(
        directory_shape(Path(directory), "model.path"),
        EngineConfig(exact=exact, batch_size=rows),
        0,
        seed=2,
    )
    load_directory(engine, Path(directory))
    generation = Turns(
        engine,
        [GenerationRequest(prompt, 0) for prompt in prompts],
        SamplingOptions(LIMIT, temperature=0.8, top_p=0.9, renormalize=True, stop_token_ids=STOPS),
        TURN,
    )
    done: dict[int, Sample] = {}
    turns, due, step = dict.fromkeys(range(len(prompts)), 0), list[tuple[int, int]](), 0
    while len(done) < len(prompts):
        for place, sample in generation.step():
            turns[place] += 1
            if turns[place] == 3:
                done[place] = sample
            else:
                due.append((step + delays * (1 + place % 3), place))
        for when, place in [each for each in due if each[0] <= step]:
            due.remove((when, place))
            if forgets:
                engine._scheduler._prefix_cache.evict_all()
            generation.go_on(place, observation_of(turns[place], place))
        step += 1
    return [done[place] for place in range(len(prompts))]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return str(families.save("llama3", tmp_path_factory.mktemp("turns")))


@pytest.fixture(scope="module")
def latent_directory(tmp_path_factory):
    """A model with latent attention, whose KV cache contains latents."""
    return str(families.save("deepseek_v3", tmp_path_factory.mktemp("latents")))


@pytest.mark.promise("episode-tokens-and-logprobs")
def test_response_alternates_generated_and_observed_tokens(directory):
    for place, sample in enumerate(episodes(directory, 6)):
        assert sample.generated_mask is not None
        after = sample.generated_mask.int().diff().nonzero()[:, 0] + 1
        parts = sample.response.tensor_split(after.tolist())
        assert [part.tolist() for part in parts[1::2]] == [
            observation_of(1, place),
            observation_of(2, place),
        ]
        for turn in parts[::2]:
            ended = torch.isin(turn, torch.tensor(STOPS))
            assert not ended[:-1].any() and (bool(ended[-1]) or len(turn) == TURN)
        assert (sample.engine_logprobs[~sample.generated_mask] == 0).all() and (
            sample.engine_logprobs[sample.generated_mask] < 0
        ).any()


@pytest.mark.promise("exact-episodes-ignore-timing")
@pytest.mark.parametrize(
    "settings",
    [
        {"rows": 6, "delays": 3},
        {"rows": 6, "forgets": True},
        {"rows": 4, "delays": 2},
        {"rows": 2, "delays": 7},
        {"rows": 1},
    ],
    ids=str,
)
def test_exact_turns_ignore_timing_and_cache_eviction(directory, settings):
    for one, other in zip(episodes(directory, 6), episodes(directory, **settings), strict=True):
        assert torch.equal(one.tokens, other.tokens) and torch.equal(
            one.engine_logprobs, other.engine_logprobs
        )
        assert (
            one.generated_mask is not None
            and other.generated_mask is not None
            and torch.equal(one.generated_mask, other.generated_mask)
        )


@pytest.mark.parametrize("rows", [6, 4, 3])
def test_exact_turns_do_not_depend_on_block_placement(directory, monkeypatch, rows):
    expected, create = episodes(directory, 6), BlockPool.__init__

    def create_scattered(pool: BlockPool, blocks: int) -> None:
        create(pool, blocks)
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(rows))
        pool._free = order.tolist()

    monkeypatch.setattr(BlockPool, "__init__", create_scattered)
    for one, other in zip(expected, episodes(directory, rows, delays=2), strict=True):
        assert torch.equal(one.tokens, other.tokens) and torch.equal(
            one.engine_logprobs, other.engine_logprobs
        )


def test_blocks_of_released_sample_are_freed(directory):
    engine = EmbeddedEngine(
        directory_shape(Path(directory), "model.path"), EngineConfig(batch_size=2), 0, seed=2
    )
    load_directory(engine, Path(directory))
    prompts = [Prompt(at, "", torch.tensor([4, 8, 15 + at])) for at in range(3)]
    requests = [GenerationRequest(prompt, 0) for prompt in prompts]
    generation = Turns(engine, requests, SamplingOptions(20), 3)
    while not (complete := generation.step()):
        pass
    assert [place for place, _ in complete] == [0, 1]
    engine.release(1, 0)
    while not generation.step():
        pass
    scheduler = engine._scheduler
    assert scheduler._prefix_cache.sample_keys == [(0, 0), (2, 0)]
    cached = [*scheduler._prefix_cache._in_order]
    assert scheduler._pool.num_used == sum(len(sequence.blocks) for sequence in cached)


def test_cached_sequences_are_not_prefilled_again(directory, monkeypatch):
    engines = []
    start = Scheduler._build_step

    def counted(self, rows, guesses, beginning):
        engines.append(sum(len(one.prompt) + len(one.tokens) for one in beginning))
        return start(self, rows, guesses, beginning)

    monkeypatch.setattr(Scheduler, "_build_step", counted)
    episodes(directory, 6, delays=2)
    assert sum(engines) == sum(LENGTHS)


def largest_logprob_error(directory: str, exact: bool) -> float:
    """Return the largest difference between the engine's and the trainer's log-probs of turns."""
    actor = jobs.policy(directory, {}, {"micro_batch_tokens": 200}, exact=exact)
    batch = collate(episodes(directory, 6, delays=2, exact=exact), pad_token_id=0)
    actor.temperature = 0.8
    scored = actor.logprobs(batch.tokens, batch.lengths, sampling_support=batch.sampling_support)
    worlds.shutdown()
    return float((scored - batch.engine_logprobs)[batch.mask].abs().max())


@pytest.mark.promise("episode-tokens-and-logprobs")
@pytest.mark.parametrize(("exact", "bound"), [(True, 0.0), (False, 1e-5)])
def test_trainer_logprobs_match_every_generated_token(pool, directory, exact, bound):
    assert pool.run(largest_logprob_error, 1, directory, exact)[0] <= bound


@pytest.mark.promise("episode-tokens-and-logprobs")
def test_trainer_logprobs_match_turns_with_cached_latents(pool, latent_directory):
    assert pool.run(largest_logprob_error, 1, latent_directory, False)[0] <= 1e-5


def test_cached_latents_are_reused_over_turns(latent_directory):
    expected = episodes(latent_directory, 6, forgets=True, exact=False)
    for one, other in zip(expected, episodes(latent_directory, 6, exact=False), strict=True):
        assert torch.equal(one.tokens, other.tokens)
        torch.testing.assert_close(one.engine_logprobs, other.engine_logprobs, atol=1e-5, rtol=0)


def test_weight_update_evicts_kv_cache_between_turns(directory):
    samples = {}
    for updates in (False, True):
        torch.set_num_threads(1)
        engine = EmbeddedEngine(
            directory_shape(Path(directory), "model.path"), EngineConfig(exact=True), 0, seed=2
        )
        load_directory(engine, Path(directory))
        request = GenerationRequest(Prompt(0, "", torch.tensor([4, 8, 15])), 0)
        options = SamplingOptions(LIMIT, stop_token_ids=STOPS)
        generation = Turns(engine, [request], options, TURN)
        while not (complete := generation.step()):
            pass
        if updates:
            load_directory(engine, Path(directory))
            assert not engine._scheduler._prefix_cache.sample_keys
        generation.go_on(0, observation_of(0, 0))
        while not (complete := generation.step()):
            pass
        samples[updates] = complete[0][1]
    assert torch.equal(samples[False].engine_logprobs, samples[True].engine_logprobs)


def test_turn_without_room_is_refused(directory):
    engine = EmbeddedEngine(
        directory_shape(Path(directory), "model.path"), EngineConfig(), 0, seed=2
    )
    load_directory(engine, Path(directory))
    request = GenerationRequest(Prompt(7, "", torch.tensor([4])), 1)
    generation = Turns(engine, [request], SamplingOptions(8), 3)
    while not generation.step():
        pass
    with pytest.raises(
        AlignerError,
        match="prompt 7, sample 1: 3 response tokens and 5 observation tokens leave no room for a",
    ):
        generation.go_on(0, [2] * 5)
    generation.go_on(0, [2] * 4)
    while not (complete := generation.step()):
        pass
    assert complete[0][1].finish_reason == "length" and complete[0][1].generated_token_count == 4


@pytest.mark.parametrize("turns", [0, 1], ids=["before any answer", "in the second turn"])
def test_transferred_turn_continues_unchanged(directory, turns):
    """Also if the marks of a plain sample say that every token was generated, as after a transfer
    between ranks together with episodes."""
    torch.set_num_threads(1)
    ends = []
    for hands_over in (False, True):
        engine = EmbeddedEngine(
            directory_shape(Path(directory), "model.path"), EngineConfig(exact=True), 0, seed=2
        )
        load_directory(engine, Path(directory))
        options, prompt = SamplingOptions(LIMIT), Prompt(0, "", torch.tensor([4, 8, 15]))
        generation = Turns(engine, [GenerationRequest(prompt, 0)], options, TURN)
        for turn in range(turns):
            while not generation.step():
                pass
            generation.go_on(0, observation_of(turn, 0))
        for _ in range(2):
            assert not generation.step()
        if hands_over:
            [(_, begun)] = generation.interrupt()
            if begun.generated_mask is None:
                begun = replace(
                    begun, generated_mask=torch.ones(len(begun.response), dtype=torch.bool)
                )
            request = GenerationRequest(prompt, 0, partial_sample=begun)
            generation = Turns(engine, [request], options, TURN)
        while not (complete := generation.step()):
            pass
        ends.append(complete[0][1])
    one, other = ends
    assert torch.equal(one.tokens, other.tokens) and torch.equal(
        one.engine_logprobs, other.engine_logprobs
    )
    assert one.generated_token_count == other.generated_token_count == (turns + 1) * TURN


def generate_branches(directory: str, *, goes_on: bool, first: int) -> dict[int, Sample]:
    """Generate a turn and two branches after it, in the order that starts with `first`.

    If `goes_on`, the first branch continues the turn's blocks; otherwise both branches are prefilled.
    """
    torch.set_num_threads(1)
    engine = EmbeddedEngine(
        directory_shape(Path(directory), "model.path"),
        EngineConfig(exact=True, batch_size=4),
        0,
        seed=2,
    )
    load_directory(engine, Path(directory))
    engine.reserve(4, LIMIT + 1)
    options = SamplingOptions(TURN, stop_token_ids=STOPS)

    def generate(read: list[int], repeats: int = 0) -> Sample:
        key = RequestKey(7, 0, len(read), repeats)
        request = engine.submit(torch.tensor(read), options, key, is_continued=True)
        while not request.future.done():
            engine.step()
        prompt = Prompt(7, "", torch.tensor(read))
        sample = create_unfinished_sample(GenerationRequest(prompt, 0))
        return append_completion(sample, request.future.result())

    behind = {0: generate([5, 4, 3])}
    read = behind[0].tokens.tolist()
    for which in (first, 3 - first):
        if not goes_on:
            engine.release(7, 0)
        behind[which] = generate([*read, which])
    behind[3] = generate([*read, 1], repeats=1)
    return behind


def test_request_longer_than_cache_waits_for_next_batch(directory):
    engine = EmbeddedEngine(
        directory_shape(Path(directory), "model.path"), EngineConfig(batch_size=4), 0, seed=2
    )
    load_directory(engine, Path(directory))
    engine.reserve(4, 20)
    short = engine.submit(torch.tensor([5]), SamplingOptions(4), RequestKey(8, 0, 1))
    engine.step()
    long = engine.submit(torch.tensor([5, 4]), SamplingOptions(LIMIT), RequestKey(7, 0, 2))
    while not short.future.done():
        engine.step()
    assert not long.future.done() and engine._state.cache.size.tokens == 19
    while not long.future.done():
        engine.step()
    assert len(long.future.result().tokens) == LIMIT


def test_branch_does_not_depend_on_kv_cache_reuse(directory):
    expected = generate_branches(directory, goes_on=True, first=1)
    for goes_on, first in ((True, 2), (False, 1), (False, 2)):
        found = generate_branches(directory, goes_on=goes_on, first=first)
        for which, sample in expected.items():
            assert torch.equal(sample.tokens, found[which].tokens)
            turn = sample.split_turns()[-1]
            assert torch.equal(
                sample.engine_logprobs[-len(turn) :], found[which].engine_logprobs[-len(turn) :]
            )
    # A repeated request uses other random numbers.
    assert not torch.equal(expected[1].tokens, expected[3].tokens)
