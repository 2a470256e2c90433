"""Agent episodes that are interrupted and carried over: tokens equal those of one run, and recorded
turns are not generated again."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aligner.agents.agent_episodes import AgentEpisodes
from aligner.agents.recorded_turns import (
    RecordedTurn,
    RecordedTurns,
    build_partial_sample,
    cut_at_stop,
)
from aligner.data.collectives import samples_from_tensors, samples_to_tensors
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Completion, Prompt, Sample, create_empty_samples
from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.models.model_source import directory_shape
from aligner.schema import EngineConfig
from aligner.schema.environment import EnvironmentConfig
from aligner.servers.generator_client import build_generate_request
from aligner.servers.wire_protocol import responses_from_tensors
from tests.agents.calling_model import saved
from tests.agents.test_agents import CONTEXT, agent, episodes
from tests.engines.engines import load_directory
from tests.rounds import slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("qwen"), "qwen")


def send(samples: list[Sample]) -> list[Sample]:
    """Return the samples after a request to the generator, and a checkpoint."""
    options = SamplingOptions(1)
    requests = create_empty_samples(
        [Prompt(each.prompt_id, "", each.initial_prompt, each.metadata) for each in samples], 1
    )
    arrays = build_generate_request(samples, 1, options)
    tensors = {
        name: torch.from_numpy(array) for name, array in arrays.items() if array.dtype != object
    }
    received = samples
    if "responses" in tensors:
        received = responses_from_tensors(requests, tensors)
    stored = samples_from_tensors(samples_to_tensors(received))
    return [
        replace(each, metadata=before.metadata)
        for each, before in zip(stored, samples, strict=True)
    ]


def episodes_in_parts(
    model: Path, tasks: list[dict[str, Any]], settings: dict[str, Any], parts: list[int]
) -> tuple[list[Sample], list[Sample]]:
    """Run one episode per task, interrupted after each number of decode steps, with a new engine
    and new agents after each interruption.

    Return the complete samples, and all partial ones.
    """
    torch.set_num_threads(1)
    tokenizer = Tokenizer(model)
    chosen = EnvironmentConfig(
        **{"max_turns": 12, "max_turn_tokens": 80, "deadline_s": 100.0} | settings
    )
    prompt = tokenizer.encode("task")
    prompts = [
        Prompt(at, "task", prompt, {"at": at, "asked": f"why {at}?", **task})
        for at, task in enumerate(tasks)
    ]
    samples = create_empty_samples(prompts, 1)
    partial: list[Sample] = []
    for steps in [*parts, None]:
        engine = EmbeddedEngine(
            directory_shape(model, "model.path"),
            EngineConfig(exact=True, batch_size=16),
            0,
            2,
            tokenizer_directory=model,
        )
        load_directory(engine, model)
        places = [at for at, sample in enumerate(samples) if sample.finish_reason == "unfinished"]
        requests = [
            GenerationRequest(
                Prompt(at, "", samples[at].initial_prompt, samples[at].metadata),
                0,
                partial_sample=samples[at]
                if len(samples[at].response) or samples[at].branches
                else None,
            )
            for at in places
        ]
        source = AgentEpisodes.create(engine, tokenizer, chosen, 3, CONTEXT)
        try:
            generation = source.start(
                requests, SamplingOptions(100, stop_token_ids=tokenizer.eos_token_ids)
            )
            found: dict[int, Sample] = {}
            decoded = 0
            while not generation.is_done and (steps is None or decoded < steps):
                decoded += engine.has_work
                found |= dict(generation.step())
            found |= dict(generation.interrupt())
            assert not engine.has_work
        finally:
            source.close()
        for place, sample in found.items():
            samples[places[place]] = sample
        partial += [sample for sample in samples if sample.finish_reason == "unfinished"]
        samples = send(samples)
    return samples, partial


def assert_equal(one: Sample, other: Sample) -> None:
    assert one.finish_reason == other.finish_reason
    assert len(one.branches) == len(other.branches)
    assert torch.equal(one.rewards.nan_to_num(9.0), other.rewards.nan_to_num(9.0))
    for mine, its in zip((one, *one.branches), (other, *other.branches), strict=True):
        assert torch.equal(mine.tokens, its.tokens) and mine.prompt_length == its.prompt_length
        assert torch.equal(mine.engine_logprobs, its.engine_logprobs)


@pytest.mark.parametrize(
    ("name", "parts"), [("looks", [25, 40]), slow("branches", [100, 120]), slow("looks", [1])]
)
def test_interrupted_agents_generate_the_same_tokens(model, name, parts):
    tasks = [{}, {}, {}]
    expected, _ = episodes(model, tasks, agent(name))
    found, partial = episodes_in_parts(model, tasks, agent(name), parts)
    assert any(sample.turn_count for sample in partial)
    for one, other in zip(expected, found, strict=True):
        assert_equal(one, other)


def test_interrupted_turn_continues_from_its_tokens(model, monkeypatch):
    """The second attempt generates only the tokens that the partial sample lacks."""
    submitted = []
    submit = EmbeddedEngine.submit

    def record(self: EmbeddedEngine, tokens: Any, *rest: Any, **named: Any) -> Any:
        submitted.append(len(tokens))
        return submit(self, tokens, *rest, **named)

    monkeypatch.setattr(EmbeddedEngine, "submit", record)
    task = {"requests": [[{"role": "user", "content": "one"}]]}
    _, (partial,) = episodes_in_parts(model, [task], agent("steps"), [5])
    assert partial.finish_reason == "unfinished" and 0 < len(partial.response) < 10
    assert submitted == [partial.prompt_length, len(partial.tokens)]


def test_recorded_turns_of_another_conversation_are_dropped(model, caplog, tmp_path):
    """The agent repeats its first request with another text, as an agent with a clock would."""
    caplog.set_level(logging.WARNING, "aligner")
    task = {"mark": str(tmp_path / "mark")}
    (sample,), (partial,) = episodes_in_parts(
        model, [task], agent("changes_its_mind", "poking_agents"), [10]
    )
    assert partial.turn_count == 1
    assert sample.finish_reason == "stop" or sample.finish_reason == "length"
    assert "1 turns of partial rollouts were dropped" in caplog.text


def completion(*tokens: int) -> Completion:
    count = len(tokens)
    return Completion(
        torch.tensor(tokens),
        -torch.arange(1.0, count + 1),
        torch.full((count,), 3),
        "interrupted",
    )


def test_partial_sample_restores_turns_and_repetitions():
    request = GenerationRequest(Prompt(4, "", torch.tensor([9]), {"a": 1}), 2)
    one = torch.tensor([1, 2])
    two = torch.tensor([1, 2, 3, 4, 7])  # continues the first turn with an observation
    three = torch.tensor([1, 2, 3, 4])  # continues the first turn without one
    turns = [
        RecordedTurn(two, 0, completion(5, 6)),
        RecordedTurn(one, 1, completion(3, 8)),
        RecordedTurn(one, 0, completion(3, 4)),
        RecordedTurn(three, 0, completion(7)),
        RecordedTurn(two, 1, completion()),  # no tokens yet
        RecordedTurn(two, 2, completion(1)),  # cannot be told from repetition 1
    ]
    (partial,) = send([build_partial_sample(request, RecordedTurns(turns))])
    assert partial.finish_reason == "unfinished" and partial.initial_prompt.tolist() == [9]
    restored = RecordedTurns.from_sample(partial)
    assert {turn.key for turn in restored} == {turn.key for turn in turns[:4]}
    for turn in turns[:4]:
        found = restored.pop(turn.input_tokens, turn.repeats)
        assert torch.equal(found.tokens, turn.completion.tokens)
        assert torch.equal(found.logprobs, turn.completion.logprobs)
        assert torch.equal(found.weight_versions, turn.completion.weight_versions)
    assert not restored


def test_recorded_tokens_end_where_the_request_ends(model):
    tokenizer = Tokenizer(model)
    tokens = tokenizer.encode("say stop now").tolist()
    recorded = completion(*tokens)
    start = torch.tensor([5])
    options = SamplingOptions(100)
    assert cut_at_stop(recorded, start, options, tokenizer).finish_reason == "interrupted"
    stopped = cut_at_stop(recorded, start, replace(options, stop=("stop",)), tokenizer)
    assert stopped.finish_reason == "stop"
    assert tokenizer.decode(stopped.tokens) == "say stop"
    limited = cut_at_stop(recorded, start, replace(options, max_new_tokens=3), tokenizer)
    assert (limited.finish_reason, len(limited.tokens)) == ("length", 3)
    ended = replace(options, stop_token_ids=(tokens[1],))
    assert len(cut_at_stop(recorded, start, ended, tokenizer).tokens) == 2
