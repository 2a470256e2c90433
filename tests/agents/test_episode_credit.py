"""Rewards of turns, metrics, requests that are not trained on, and the identity of episodes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from aligner.data.episode_reports import EpisodeReport, FailureKind
from aligner.data.types import Sample
from tests.agents.answering_sessions import Answering, serving
from tests.agents.calling_model import saved
from tests.agents.crediting_agents import UNTRAINED, post
from tests.agents.test_agents import agent, decode_turn, episodes, generated_spans, lines
from tests.agents.test_partial_agent_episodes import assert_equal, episodes_in_parts

MODULE = "crediting_agents"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, whose turns differ."""
    return saved(tmp_path_factory.mktemp("chatml"), "chatml")


def rewards_by_text(sample: Sample, tokenizer: Any) -> dict[str, float]:
    """Return the sum of the rewards of each turn, by its text; they must be on its last token."""
    found: dict[str, float] = {}
    for sequence in sample.sequences:
        rewards = torch.zeros(len(sequence.response))
        if sequence.rewards is not None:
            rewards = sequence.rewards.clone()
        for start, tokens, _ in generated_spans(sequence):
            last = start - sequence.prompt_length + len(tokens) - 1
            text = decode_turn(tokenizer, tokens)
            assert text not in found
            found[text] = float(rewards[last])
            rewards[last] = 0.0
        assert not rewards.any()
    return found


def test_rewards_are_on_last_tokens_of_their_turns(model, tmp_path):
    log = tmp_path / "log"
    settings = {**agent("rewards_each_turn", MODULE), "max_turn_tokens": 9}
    samples, tokenizer = episodes(model, [{"log": str(log)}] * 3, settings)
    for at, sample in enumerate(samples):
        expected = {entry["text"]: entry["reward"] for entry in lines(log) if entry["task"] == at}
        found = rewards_by_text(sample, tokenizer)
        # the last token of the main sequence also has the reward of the episode
        main_text = decode_turn(tokenizer, generated_spans(sample)[-1][1])
        found[main_text] -= 64.0
        assert {text: reward for text, reward in found.items() if reward} == expected
        assert len(found) == 8 and len(sample.branches) >= 5
        assert sample.environment_reward == 64 + sum(expected.values())


def test_reward_requests_are_checked(model):
    with serving(model, Answering(_tokenizer(model)), 1, max_turns=20) as (server, (session,)):
        url = f"{server.get_session_url(session)}/v1"
        key = session.agent_key
        body = {"messages": [{"role": "user", "content": "a"}]}

        def reward(**fields: Any) -> tuple[int, Any]:
            content = json.dumps({"reward": 1.0} | fields).encode()
            answer = post(url, key, "reward", content)
            return answer.status, answer.content

        assert "has not received a response" in reward(completion_id="x")[1]["error"]["message"]
        one = post(url, key, "chat/completions", body).content["id"]
        assert f"the only valid id is '{one}'" in reward(completion_id="x")[1]["error"]["message"]
        two = post(url, key, "chat/completions", body | {"n": 2}).content["id"]
        aside = post(url, key, "chat/completions", body, **UNTRAINED).content["id"]

        status, content = reward(completion_id="x")
        assert status == 404
        assert content["error"]["param"] == "completion_id"
        assert f"the 3 valid ids are those from '{one}' to '{aside}'" in content["error"]["message"]
        refused = {
            "2 choices; set a number from 0 to 1": {"completion_id": two},
            "got 2, but the response": {"completion_id": two, "choice": 2},
            "X-Aligner-Train: false": {"completion_id": aside},
            "without completion_id": {"choice": 0},
            "must be finite": {"reward": float("inf")},
            "greater than or equal to 0": {"completion_id": two, "choice": -1},
            "reward: got": {"reward": 1e39},
        }
        for message, fields in refused.items():
            status, content = reward(**fields)
            assert status == 400 and message in content["error"]["message"], (fields, content)
        assert reward(completion_id=one) == (200, {"reward": 1.0})
        assert reward(reward=3e38) == (200, {"reward": 3e38})
        assert reward(reward=3e38, completion_id=two, choice=1)[0] == 400
        assert reward(reward=-3e38)[1] == {"reward": 1.0}
        assert [turn.reward for turn in session.get_rewarded_turns()] == [1.0, 0.0, 0.0]

        session.start_attempt()
        assert not session.credit.has_reward
        # requests of an earlier attempt have no effect
        assert post(url, key, "reward", {"reward": 1.0}).status == 401
        assert (
            post(url, session.agent_key, "reward", {"reward": 1, "completion_id": one}).status
            == 404
        )


def test_metric_requests_are_checked(model):
    with serving(model, Answering(_tokenizer(model)), 1) as (server, (session,)):
        url = f"{server.get_session_url(session)}/v1"

        def report(metrics: Any) -> tuple[int, Any]:
            answer = post(url, session.agent_key, "metrics", json.dumps(metrics).encode())
            return answer.status, answer.content

        assert report({"pass": 1, "tool/calls": 2.5})[0] == 200
        status, content = report({"pass": 0})
        assert (status, content) == (200, {"metrics": {"pass": 0.0, "tool/calls": 2.5}})
        for invalid in (
            {"": 1},
            {"a b": 1},
            {"/a": 1},
            {"a//b": 1},
            {"..": 1},
            {"x" * 101: 1},
            {"good": 1, "a": float("nan")},
            {"a": float("inf")},
            {"a": 1e39},
            {"a": "1"},
            {"a": True},
            {"a": None},
            [1],
            {f"m{index}": 1 for index in range(99)},
        ):
            assert report(invalid)[0] == 400, invalid
        assert session.credit.metrics == {"pass": 0.0, "tool/calls": 2.5}
        assert report({f"m{index}": 1 for index in range(98)})[0] == 200


def _tokenizer(model: Path) -> Any:
    from aligner.data.tokenizer import Tokenizer

    return Tokenizer(model)


def test_retried_and_failed_agents_report_their_last_attempt(model, tmp_path):
    tasks = [
        {"turn_reward": 0.25, "lost_attempts": [1]},
        {"turn_reward": 0.25, "failed_attempts": [1]},
        {"turn_reward": 0.25, "reward": 0.5, "failed_attempts": [1]},
        {"failed_attempts": [1]},
        {"reward": 0.0, "lost_attempts": [1, 2]},
    ]
    log = tmp_path / "log"
    settings = {**agent("reports", MODULE), "failure_reward": -1.0, "retries": 1}
    tasks = [task | {"log": str(log)} for task in tasks]
    samples, _ = episodes(model, tasks, settings, journal=tmp_path / "journal")
    rewards = [sample.environment_reward for sample in samples]
    # the reward of the episode replaces the failure reward, and the reward of a turn does not
    assert [float(reward) for reward in rewards[:4]] == [0.25, -0.75, 0.75, -1.0]
    assert rewards[4].isnan()
    lost, error = FailureKind.INFRASTRUCTURE, FailureKind.ERROR
    first = {"attempts": 1.0, "only/1": 1.5}
    second = {"attempts": 2.0, "only/2": 1.5}
    assert [sample.report for sample in samples] == [
        EpisodeReport(None, (lost,), second),
        *[EpisodeReport(error, (), first)] * 3,
        EpisodeReport(lost, (lost,), second),
    ]
    again, _ = episodes(model, tasks, settings, journal=tmp_path / "journal")
    for sample, same in zip(samples, again, strict=True):
        assert_equal(sample, same)
        assert sample.report == same.report
    assert len(log.read_text().splitlines()) == 7


def test_turn_reward_without_failure_reward_keeps_failed_episode(model, tmp_path):
    task = {"turn_reward": 0.25, "failed_attempts": [1], "log": str(tmp_path / "log")}
    (sample,), _ = episodes(model, [task], agent("reports", MODULE))
    assert sample.environment_reward == 0.25 and sample.report.failure is FailureKind.ERROR


@pytest.mark.slow
def test_interrupted_agents_have_the_same_rewards(model):
    settings = {**agent("rewards_each_turn", MODULE), "max_turn_tokens": 9}
    expected, _ = episodes(model, [{}] * 2, settings)
    found, partial = episodes_in_parts(model, [{}] * 2, settings, [12, 20])
    assert any(sample.turn_count for sample in partial)
    for one, other in zip(expected, found, strict=True):
        assert_equal(one, other)
        for mine, its in zip(one.sequences, other.sequences, strict=True):
            # a stored sample has zeros instead of no rewards
            expected_rewards = torch.zeros(1) if mine.rewards is None else mine.rewards
            assert its.rewards is None or (its.rewards == expected_rewards).all()


def test_untrained_requests_are_no_turns_and_reproducible(model, tmp_path):
    runs = []
    for name in ("first", "second"):
        log = tmp_path / name
        settings = {**agent("simulates", MODULE), "max_turns": 2, "max_turn_tokens": 7}
        samples, tokenizer = episodes(model, [{"log": str(log)}] * 2, settings)
        runs.append([entry["texts"] for entry in sorted(lines(log), key=lambda e: e["task"])])
        for sample in samples:
            assert sample.finish_reason != "unfinished" and sample.environment_reward == 1
            # both turns are parts of one sequence, unless the first one was truncated
            assert sample.turn_count == 2 and sample.report is None
            assert all(
                len(tokens) <= 7
                for sequence in sample.sequences
                for _, tokens, _ in generated_spans(sequence)
            )
    assert runs[0] == runs[1]
    texts = [text for texts in runs[0] for text in texts]
    # the answers of a request, and of different episodes, differ
    assert len({*texts}) == len(texts) == 8
    # `max_tokens` of an untrained request may exceed environment.max_turn_tokens
    assert max(len(tokenizer.encode(text)) for text in texts) > 7


def test_untrained_requests_have_their_own_sampling_parameters(model, tmp_path):
    log = tmp_path / "log"
    greedy = {"temperature": 0, "max_tokens": 6, "n": 2}
    seeded = {"seed": 5, "max_tokens": 6, "extra_body": {"min_tokens": 6}}
    tasks = [{"simulator": simulator, "log": str(log)} for simulator in (greedy, seeded)]
    episodes(model, tasks, {**agent("simulates", MODULE), "max_turn_tokens": 7})
    answers = [[entry["texts"] for entry in lines(log) if entry["task"] == at] for at in (0, 1)]
    assert all(one == two for one, two in answers[0])
    assert len(answers[1]) == 2


def test_untrained_requests_have_limits_and_errors(model, tmp_path):
    log = tmp_path / "log"
    hows = ["has no turn", "loops", "leaves requests in flight", "sends invalid requests"]
    tasks = [{"how": how, "log": str(log)} for how in hows]
    settings = {**agent("misuses", MODULE), "max_untrained_requests": 9, "retries": 0}
    silent, looping, leaving, invalid = episodes(model, tasks, settings)[0]
    assert silent.report == EpisodeReport(FailureKind.NO_TURN)
    assert looping.finish_reason == "length" and looping.report is None
    assert leaving.report is None and leaving.turn_count == 1
    assert invalid.report is None and invalid.turn_count == 1
    answers = [entry for entry in lines(log) if "status" in entry]
    parts = ("must be true or false", "frequency_penalty", "top_logprobs", "min_new_tokens", "maxi")
    assert [entry["status"] for entry in answers] == [400] * len(parts)
    for entry, part in zip(answers, parts, strict=True):
        assert part in entry["error"]


def test_agents_receive_seed_prompt_and_sample_index(model, tmp_path):
    log = tmp_path / "log"
    task = {"log": str(log)}
    episodes(model, [{**task, "log": str(tmp_path / "other")}, task], agent("identifies", MODULE))
    # the helper's run has the seed 3
    seed, prompt, index = 3 * 1_000_003 + 1, 1, 0
    content = json.loads(log.read_text())
    assert content["parameters"] == [seed, index]
    known = [str(seed), str(prompt), str(index)]
    assert content["headers"] == [known, known, known, [None] * 3]

    command = {"agent_command": [sys.executable, "-m", "tests.agents.crediting_agents"]}
    episodes(model, [task], command)
    assert json.loads(log.read_text()) == [str(3 * 1_000_003), "0", "0"]
