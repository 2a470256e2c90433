"""Agents that use the OpenAI endpoint: requests are generated once, and the samples have exactly
these tokens."""

from __future__ import annotations

import json
import logging
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

from aligner.agents.agent_episodes import AgentEpisodes
from aligner.agents.episode_journal import EpisodeJournal
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Prompt, Sample
from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.engine_loop import EpisodeFollower, EpisodeSource, run_steps
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.errors import ConfigError
from aligner.models.model_source import directory_shape
from aligner.schema import EngineConfig, EngineParallelConfig
from aligner.schema.environment import EnvironmentConfig
from tests.agents.calling_model import saved
from tests.engines.engines import load_directory

CONTEXT = 800


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: saved(tmp_path_factory.mktemp(name), name) for name in ("qwen", "chatml", "reasons")
    }


def episodes(
    model: Path,
    tasks: list[dict[str, Any]],
    settings: dict[str, Any],
    journal: Path | None = None,
    first: int = 0,
    **options: Any,
) -> tuple[list[Sample], Tokenizer]:
    """Run one episode per task on all ranks of the world, and return the samples and the tokenizer.

    A journal, if given, forgets the episodes of prompts before `first`.
    """
    torch.set_num_threads(1)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    group = dist.group.WORLD if size > 1 else None
    tokenizer, chosen_engine = (
        Tokenizer(model),
        EngineConfig(exact=True, batch_size=16, parallel=EngineParallelConfig(size, 1)),
    )
    engine = EmbeddedEngine(
        directory_shape(model, "model.path"),
        chosen_engine,
        rank,
        2,
        group,
        tokenizer_directory=model,
    )
    load_directory(engine, model)
    chosen = EnvironmentConfig(
        **{"max_turns": 12, "max_turn_tokens": 80, "deadline_s": 60.0} | settings
    )
    prompt = tokenizer.encode("task")
    requests = [
        GenerationRequest(Prompt(at, "task", prompt, {"at": at, "asked": f"why {at}?", **task}), 0)
        for at, task in enumerate(tasks)
    ]
    episode_journal = None if journal is None else EpisodeJournal(journal)
    source: EpisodeSource = EpisodeFollower(engine)
    if rank == 0:
        source = AgentEpisodes.create(engine, tokenizer, chosen, 3, CONTEXT, episode_journal)
    sampling = SamplingOptions(100, stop_token_ids=tokenizer.eos_token_ids, **options)
    try:
        source.drop_journal_before(first)
        found = run_steps(source.start(requests, sampling))
        # the next step could not start otherwise
        assert not engine.has_work
    finally:
        source.close()
    return [found[place] for place in range(len(requests))], tokenizer


def samples_of(model: Path, tasks: list[dict[str, Any]], settings: dict[str, Any]) -> list[Sample]:
    return episodes(model, tasks, settings)[0]


def agent(name: str, module: str = "openai_agents") -> dict[str, Any]:
    assert not module.startswith("test_"), "agents in test modules start slowly"
    return {"agent": f"tests.agents.{module}:{name}"}


def generated_spans(sample: Sample) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Return start, tokens and log-probs of each contiguous span of generated tokens."""
    marks = (
        torch.ones(len(sample.response), dtype=torch.bool)
        if sample.generated_mask is None
        else sample.generated_mask
    )
    borders = [0, *((marks[1:] != marks[:-1]).nonzero()[:, 0] + 1).tolist(), len(marks)]
    return [
        (
            sample.prompt_length + start,
            sample.response[start:end],
            sample.engine_logprobs[start:end],
        )
        for start, end in pairwise(borders)
        if marks[start]
    ]


def decode_turn(tokenizer: Tokenizer, tokens: torch.Tensor) -> str:
    ended = bool(tokenizer.is_eos(tokens[-1:]))
    return tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=False)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.promise("agent-training-uses-generated-tokens")
@pytest.mark.parametrize("template", ["qwen", "reasons"])
def test_agent_samples_have_the_generated_tokens(models, template, tmp_path):
    log = tmp_path / "log"
    samples, tokenizer = episodes(models[template], [{"log": str(log)}] * 4, agent("looks"))
    whole = calls = 0
    for at, sample in enumerate(samples):
        entries = [entry for entry in lines(log) if entry["task"] == at]
        parts = [part for each in (sample, *sample.branches) for part in generated_spans(each)]
        assert len(parts) == len(entries) == 3
        texts = {decode_turn(tokenizer, tokens): logprobs for _, tokens, logprobs in parts}
        for entry in entries:
            if entry["text"] is not None:
                assert texts[entry["text"]].tolist() == pytest.approx(entry["logprobs"], abs=1e-6)
            calls += entry["text"] is None
        assert float(sample.rewards.sum()) == 0.5 and all(
            branch.rewards is None for branch in sample.branches
        )
        whole += not sample.branches
    if template == "qwen":
        assert whole >= 2 and calls >= 2


def test_agent_logprobs_equal_forward_pass(models):
    samples, _ = episodes(models["qwen"], [{}], agent("branches"))
    reference = LlamaForCausalLM.from_pretrained(models["qwen"]).eval()
    assert samples[0].branches
    for sample in (samples[0], *samples[0].branches):
        with torch.no_grad():
            logprobs = reference(sample.tokens[None]).logits[0].log_softmax(-1)
        for start, tokens, recorded in generated_spans(sample):
            expected = logprobs[start - 1 : start - 1 + len(tokens)].gather(1, tokens[:, None])[
                :, 0
            ]
            assert torch.allclose(expected, recorded, atol=1e-4)


@pytest.mark.promise("agent-training-uses-generated-tokens")
def test_agent_samples_ignore_order_of_parallel_requests(models):
    forwards, _ = episodes(models["chatml"], [{}] * 3, agent("branches"))
    backwards, _ = episodes(models["chatml"], [{"forwards": False}] * 3, agent("branches"))
    for one, other in zip(forwards, backwards, strict=True):
        assert len(one.branches) == len(other.branches) >= 3
        for mine, its in zip((one, *one.branches), (other, *other.branches), strict=True):
            assert torch.equal(mine.tokens, its.tokens) and mine.prompt_length == its.prompt_length
            assert torch.equal(mine.engine_logprobs, its.engine_logprobs)
        # Six turns: the first, one for each of the three parallel requests, a second choice of one
        # of them, and the last. Each is trained on once.
        parts = [part for each in (one, *one.branches) for part in generated_spans(each)]
        assert len(parts) == 6
    assert not torch.equal(forwards[0].tokens, forwards[1].tokens)


@pytest.mark.promise("agents-equal-on-every-placement")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        ("looks", [{}] * 3),
        ("branches", [{}, {"forwards": False}]),
        ("misbehaves", [{"how": "endless"}, {"how": "silent"}]),
    ],
)
def test_replica_samples_of_agents_equal_one_rank(pool, models, name, tasks):
    alone, _ = episodes(models["qwen"], tasks, agent(name))
    first, _ = pool.run(samples_of, 2, models["qwen"], tasks, agent(name))
    for one, other in zip(alone, first, strict=True):
        assert len(one.branches) == len(other.branches)
        assert one.finish_reason == other.finish_reason
        assert torch.equal(one.rewards.nan_to_num(9.0), other.rewards.nan_to_num(9.0))
        for mine, its in zip((one, *one.branches), (other, *other.branches), strict=True):
            assert torch.equal(mine.tokens, its.tokens)
            assert mine.prompt_length == its.prompt_length
            torch.testing.assert_close(mine.engine_logprobs, its.engine_logprobs, atol=1e-5, rtol=0)


def test_agent_command_yields_scored_samples(models):
    settings = {"agent_command": [sys.executable, "-m", "tests.agents.openai_agents"]}
    samples, _ = episodes(models["qwen"], [{}] * 2, settings)
    assert all(
        not sample.rewards.isnan().any() and sample.generated_token_count for sample in samples
    )


def test_different_user_messages_start_separate_branches(models):
    system = {"role": "system", "content": "be brief"}
    settings = {**agent("steps"), "max_turn_tokens": 3}
    one, two = {"role": "user", "content": "one"}, {"role": "user", "content": "two"}
    samples, tokenizer = episodes(
        models["qwen"], [{"requests": [[system, one], [system, two]]}], settings
    )
    first, other = samples[0], samples[0].branches[0]
    assert (
        len(samples[0].branches) == 1
        and first.generated_mask is None
        and other.generated_mask is None
    )
    texts = {
        tokenizer.decode(each.tokens[: each.prompt_length]).split("\n")[3]
        for each in (first, other)
    }
    assert texts == {"one", "two"}


def test_first_branch_of_each_reason_is_logged(models, caplog):
    one, two = {"role": "user", "content": "one"}, {"role": "user", "content": "two"}
    settings = {**agent("steps"), "max_turn_tokens": 3}
    with caplog.at_level(logging.INFO, "aligner"):
        episodes(models["qwen"], [{"requests": [[one], [two]]}] * 2, settings)
    logged = [text for text in caplog.messages if "starts a new branch" in text]
    assert len(logged) == 1
    assert (
        "the request does not continue an earlier turn"
        ' (messages.0.content was "one", and is now "two")' in logged[0]
    )
    counts = [text for text in caplog.messages if text.startswith("agent episodes: ")]
    assert counts == [
        "agent episodes: 2 requests started a new branch: the request does not continue an earlier"
        " turn"
    ]


def test_completion_request_continues_earlier_tokens(models):
    def draw(requests: list[str]) -> tuple[Sample, Tokenizer]:
        task = {"requests": requests, "with": {"max_tokens": 3}}
        samples, tokenizer = episodes(models["qwen"], [task], agent("steps"))
        return samples[0], tokenizer

    alone, tokenizer = draw(["yes yes"])
    answer = tokenizer.decode(alone.response, skip_special_tokens=False)
    sample, _ = draw(["yes yes", f"yes yes{answer} and?"])
    assert not sample.branches and sample.generated_mask is not None
    assert (
        torch.equal(sample.split_turns()[0], alone.response)
        and tokenizer.decode(sample.split_turns()[1]) == " and?"
    )


@pytest.mark.promise("killed-agent-endpoint-keeps-weights")
@pytest.mark.slow
def test_finished_episode_is_replayed_without_its_agent(models, tmp_path):
    log, journal, settings = (
        tmp_path / "log",
        tmp_path / "journal",
        {**agent("looks"), "retries": 0},
    )
    tasks = [{"log": str(log)}, {"log": str(log)}, {"asked": 1}]  # the last task fails

    def draw(**options: Any) -> tuple[list[Sample], int]:
        samples, _ = episodes(models["qwen"], tasks, settings, journal=journal, **options)
        return samples, len(lines(log))

    first, begun = draw()
    again, replayed = draw()
    assert replayed == begun == 6
    for one, other in zip(first, again, strict=True):
        assert (
            torch.equal(one.rewards.nan_to_num(9.0), other.rewards.nan_to_num(9.0))
            and one.metadata == other.metadata
        )
        assert one.finish_reason == other.finish_reason and len(one.branches) == len(other.branches)
        for mine, its in zip((one, *one.branches), (other, *other.branches), strict=True):
            assert torch.equal(mine.tokens, its.tokens) and mine.prompt_length == its.prompt_length
            assert torch.equal(mine.engine_logprobs, its.engine_logprobs)
    assert first[2].rewards.isnan().any()
    _, greedy = draw(temperature=0.5)  # other sampling options, as in an evaluation
    assert greedy == replayed + 6
    _, forgotten = draw(first=1)
    assert forgotten == greedy + 3


@pytest.mark.slow
def test_failed_or_silent_agent_has_nan_reward(models, tmp_path):
    hows = ["silent", "raises", "dies", "hangs", "recovers"]
    tasks = [{"how": how, "mark": str(tmp_path / "mark")} for how in hows]
    settings = {
        **agent("misbehaves"),
        "deadline_s": 4.0,
        "retries": 1,
        "workers": 2,
        "episodes_per_worker": 1,
    }
    samples, _ = episodes(models["qwen"], tasks, settings)
    assert [bool(sample.rewards.isnan().any()) for sample in samples] == [
        True,
        True,
        True,
        True,
        False,
    ]


def test_endless_or_overflowing_agent_is_truncated(models, tmp_path):
    log = tmp_path / "log"
    tasks = [{"how": "endless"}, {"how": "overflows", "log": str(log)}]
    samples, _ = episodes(models["qwen"], tasks, {**agent("misbehaves"), "max_turns": 6})
    assert [sample.finish_reason for sample in samples] == ["length", "length"]
    assert 1 + len(samples[0].branches) == 6 and not samples[0].rewards.isnan().any()
    assert lines(log)[-1]["text"] == "" and lines(log)[-1]["finish"] == "length"
    assert all(len(each.tokens) <= CONTEXT for each in (samples[1], *samples[1].branches))


def test_invalid_request_returns_openai_error(models, tmp_path):
    log = tmp_path / "log"
    samples, _ = episodes(models["qwen"], [{"log": str(log)}], agent("pokes", "poking_agents"))
    answers = json.loads(log.read_text())
    expected = dict.fromkeys(("another's key", "another's address"), 401)
    expected |= {
        "no such path": 404,
        "no such method": 405,
        "megabytes": 413,
        "models": 200,
        "right": 200,
    }
    assert {name: status for name, (status, _) in answers.items()} == {
        name: expected.get(name, 400) for name in answers
    }
    errors = {
        name: content["error"] for name, (status, content) in answers.items() if status != 200
    }
    assert all(
        error["message"] and error["type"] and {"param", "code"} <= {*error}
        for error in errors.values()
    )
    assert (
        errors["too long"]["code"] == "context_length_exceeded"
        and "messages.0.role" in errors["no role"]["message"]
    )
    for name in ("echo", "several"):
        assert "other values are not supported in training" in errors[name]["message"]
    assert not samples[0].branches and samples[0].generated_mask is None


def test_plain_and_streamed_answers_have_calls_and_logprobs(models, tmp_path):
    log = tmp_path / "log"
    samples, tokenizer = episodes(
        models["qwen"], [{"log": str(log)}], agent("streams", "poking_agents")
    )
    answers = json.loads(log.read_text())
    assert answers["called"] == [["look", '{"at": "here"}']] and answers["finish"] == "tool_calls"
    parts = [
        tokens
        for each in (samples[0], *samples[0].branches)
        for _, tokens, _ in generated_spans(each)
    ]
    assert len(parts) == 5 and len(answers["usage"]) == 1 and answers["usage"][0] in map(len, parts)
    assert {answers["text"][0], answers["streamed"]} <= {
        decode_turn(tokenizer, tokens) for tokens in parts
    }
    assert answers["text"][1] in ("stop", "length") and "".join(answers["text"][2]).startswith(
        answers["text"][0]
    )
    for text, reason in answers["stopped"]:
        assert reason == "stop" and "look" not in text


def test_conversation_in_three_protocols_is_one_sequence(models, tmp_path):
    log = tmp_path / "log"
    samples, _ = episodes(
        models["qwen"], [{"log": str(log)}], agent("speaks_three_protocols", "poking_agents")
    )
    answers = json.loads(log.read_text())
    assert not samples[0].branches and len(generated_spans(samples[0])) == 4
    assert answers["message"]["type"] == "message"
    assert answers["refusal"] == [401, "authentication_error"]


def test_sampling_parameters_of_agent_are_ignored_and_logged(models, caplog):
    others = {"top_k": 5, "min_p": 0.5, "repetition_penalty": 1.5}
    wanted = {"temperature": 0.3, "reasoning_effort": "low", "extra_body": {**others, "odd": 1}}
    samples, _ = episodes(
        models["chatml"],
        [{"requests": [[{"role": "user", "content": "why?"}]], "with": wanted}],
        agent("steps"),
    )
    assert samples[0].generated_token_count
    assert all(
        f"agent requests set {name}, which is ignored" in caplog.text
        for name in ("temperature", *others)
    )
    assert "requests set reasoning_effort, which is ignored" in caplog.text
    assert "requests set odd, which is unknown and ignored" in caplog.text


def test_repeated_request_after_disconnect_reuses_answer(models, caplog):
    caplog.set_level("INFO")
    samples, _ = episodes(models["chatml"], [{}], agent("leaves", "poking_agents"))
    assert "the client disconnected" in caplog.text
    assert not samples[0].branches and samples[0].generated_mask is None


def test_request_after_episode_end_is_refused(models, tmp_path):
    episodes(
        models["chatml"],
        [{"log": str(tmp_path / "log")}] * 2,
        agent("after_the_end", "poking_agents"),
    )
    assert (tmp_path / "log.told").read_text() == "401"


@pytest.mark.parametrize(("matching", "branches"), [(["arguments"], 0), ([], 1)])
def test_rewritten_arguments_branch_unless_matching_allows(models, matching, branches):
    samples, _ = episodes(models["qwen"], [{}], agent("rewrites") | {"matching": matching})
    assert len(samples[0].branches) == branches
    assert sum(len(generated_spans(each)) for each in (samples[0], *samples[0].branches)) == 2


def test_call_ids_are_unique_and_replaceable(models, tmp_path):
    log = tmp_path / "log"
    samples, _ = episodes(models["qwen"], [{"log": str(log)}], agent("answers_in_parallel"))
    (entry,) = lines(log)
    # the trained model answers most requests with the same call
    assert len(entry["ids"]) > 3 and len({*entry["ids"]}) == len(entry["ids"])
    # six answers to one conversation, one of which is continued with another id
    parts = [part for each in (samples[0], *samples[0].branches) for part in generated_spans(each)]
    assert len(parts) == 7 and len(samples[0].branches) == 5


def test_developer_message_is_rendered_as_in_records(models):
    request = [{"role": role, "content": "be brief"} for role in ("developer", "user")]
    task = {"requests": [request], "with": {"max_tokens": 3}}
    (sample,), tokenizer = episodes(models["qwen"], [task], agent("steps"))
    prompt = tokenizer.decode(sample.tokens[: sample.prompt_length], skip_special_tokens=False)
    assert prompt.startswith("<|user|>system\nbe brief<|end|>\n<|user|>user\n")


def test_unknown_agent_is_refused_at_start(models):
    with pytest.raises(ConfigError, match="no_such"):
        episodes(models["chatml"], [{}], agent("no_such"))


def test_every_branch_has_kept_token_ids(models):
    samples, _ = episodes(models["chatml"], [{}], agent("branches"), top_p=0.8, renormalize=True)
    assert samples[0].branches
    for sample in (samples[0], *samples[0].branches):
        marks = (
            torch.ones(len(sample.response), dtype=torch.bool)
            if sample.generated_mask is None
            else sample.generated_mask
        )
        assert (
            sample.sampling_support is not None
            and (sample.sampling_support.counts > 0).tolist() == marks.tolist()
        )
        for token, ids in zip(
            sample.response[marks].tolist(),
            sample.sampling_support.select(marks).split_ids(),
            strict=True,
        ):
            assert token in ids.tolist()
