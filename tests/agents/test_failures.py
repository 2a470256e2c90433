"""Failures of agents and environments: their kinds, their rewards, and their retries."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from aligner.agents.episode_environment import EpisodeLost, Outcome
from aligner.agents.episode_journal import EpisodeJournal
from aligner.data.episode_reports import EpisodeReport, FailureKind
from aligner.data.types import Sample
from aligner.training.rollout_builder import compute_environment_scores
from tests.agents import test_agents
from tests.agents.acting import pool_of
from tests.agents.calling_model import saved
from tests.agents.test_agents import agent, episodes
from tests.agents.test_episodes import episodes as environment_episodes
from tests.agents.test_episodes import model as environment_model

COMMAND = {"agent_command": [sys.executable, "-m", "tests.agents.failing_agents"]}
FUNCTION = agent("fails", "failing_agents")
environment_model = environment_model


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("chatml"), "chatml")


def open_episode(pool, name):
    pool.reset(name, {"name": name}, 0).result()


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        ("raise", FailureKind.ERROR),
        ("answer 1", FailureKind.ERROR),
        ("die", FailureKind.ERROR),
        ("hang", FailureKind.TIMEOUT),
        ("sleep 60", FailureKind.TIMEOUT),
        ("answer open('/no/file').read()", FailureKind.ERROR),
        ("answer __import__('socket').create_connection(('127.0.0.1', 1))", "infrastructure"),
    ],
)
def test_failed_step_has_kind_and_failure_reward(make, action, kind):
    pool = make(deadline_s=0.6, failure_reward=-2.0)
    open_episode(pool, "a")
    pool.step("a", "say").result()
    if kind == "infrastructure":
        with pytest.raises(EpisodeLost) as caught:
            pool.step("a", action).result()
        assert caught.value.kind is FailureKind.INFRASTRUCTURE
        return
    assert pool.step("a", action).result() == Outcome("", -2.0, True, kind)
    assert pool.get_retries("a") == ()
    pool.finish("a")
    open_episode(pool, "a")


def test_failed_reset_has_no_failure_reward(make):
    pool = make(failure_reward=-2.0)
    with pytest.raises(EpisodeLost) as caught:
        pool.reset("a", {"name": "a", "first": "1"}, 0).result()
    assert caught.value.kind is FailureKind.ERROR


def test_killed_worker_is_retried_despite_failure_reward(make, log):
    pool = make(retries=1, failure_reward=-2.0)
    open_episode(pool, "a")
    pending = pool.step("a", "sleep 0.5")
    log.wait_for("a", "sleep 0.5")
    os.kill(log.pids("a")[0], signal.SIGKILL)
    assert pending.result().failure is None
    assert pool.get_retries("a") == (FailureKind.INFRASTRUCTURE,)


def test_journal_repeats_failed_step_without_environment(tmp_path):
    outcomes = []
    for _ in range(2):
        pool = pool_of(
            tmp_path / "log", journal=EpisodeJournal(tmp_path / "journal"), failure_reward=0.0
        )
        pool.start()
        open_episode(pool, "a")
        outcomes.append(pool.step("a", "raise").result())
        pool.close()
    assert outcomes == [Outcome("", 0.0, True, FailureKind.ERROR)] * 2
    assert (tmp_path / "log").read_text().count("raise") == 1


def test_environment_episode_keeps_turns_with_failure_reward(environment_model):
    settings = {"max_turn_tokens": 40, "failure_reward": -4.0}
    samples, _ = environment_episodes(environment_model, settings, fails=1)
    scores = compute_environment_scores(samples, 2)
    # the second turn fails, after the first turn has earned the reward 1
    assert scores is not None and scores.tolist() == [6.0, 6.0, -3.0, -3.0, 6.0, 6.0, 6.0, 6.0]
    assert samples[2].turn_count == 2 and samples[2].finish_reason == "stop"
    assert samples[2].report == EpisodeReport(FailureKind.ERROR)
    assert samples[0].report is None


OUTCOMES = {
    "raises": (-1.0, "error", 1),
    "reports a reward, and raises": (0.25, "error", 1),
    "ends": (0.0, None, 1),
    "sends no request": (math.nan, "no_turn", 1),
    "fails before its first request": (math.nan, "no_turn", 2),
    "has no sandbox": (math.nan, "infrastructure", 2),
    "reaches no tool": (math.nan, "infrastructure", 2),
}
"""Reward, kind of failure, and number of attempts of `failing_agents.fails`, by task."""


def run_agents(
    model: Path, log: Path, hows: Sequence[str], settings: dict[str, Any], **options: Any
) -> list[Sample]:
    tasks = [{"how": how, "log": str(log), "code": os.EX_TEMPFAIL} for how in hows]
    return episodes(model, tasks, settings, **options)[0]


def test_failed_agent_keeps_turns_with_failure_reward(chat_model, tmp_path):
    log = tmp_path / "log"
    samples = run_agents(chat_model, log, [*OUTCOMES], {**FUNCTION, "failure_reward": -1.0})
    attempts = log.read_text().splitlines()
    for sample, (how, (reward, kind, count)) in zip(samples, OUTCOMES.items(), strict=True):
        assert sample.rewards.sum().item() == pytest.approx(reward, nan_ok=True), how
        assert sample.generated_token_count == (1 if math.isnan(reward) else 3), how
        report = sample.report or EpisodeReport()
        assert report.failure == kind and len(report.retries) == count - 1, how
        assert attempts.count(how) == count


@pytest.mark.slow
def test_exit_codes_of_commands_have_kinds(chat_model, tmp_path):
    log = tmp_path / "log"
    settings = {**COMMAND, "failure_reward": -1.0, "retries": 1}
    failed, refused = run_agents(chat_model, log, ["raises", "exits"], settings)
    assert failed.rewards.sum() == -1 and failed.report == EpisodeReport(FailureKind.ERROR)
    infrastructure = FailureKind.INFRASTRUCTURE
    assert refused.rewards.isnan().all()
    assert refused.report == EpisodeReport(infrastructure, (infrastructure,))


def test_server_error_of_engine_is_retried_infrastructure_failure(
    chat_model, tmp_path, monkeypatch, caplog
):
    # the engine refuses a request, because the episodes may be longer than the model permits
    monkeypatch.setattr(test_agents, "CONTEXT", 2000)
    log = tmp_path / "log"
    how = "gets a server error"
    settings = {**FUNCTION, "failure_reward": -1.0, "retries": 1}
    (sample,) = run_agents(chat_model, log, [how], settings)
    infrastructure = FailureKind.INFRASTRUCTURE
    assert sample.report == EpisodeReport(infrastructure, (infrastructure,))
    assert sample.rewards.isnan().all()
    assert log.read_text().splitlines() == [how, how]
    assert "1024 positions" in caplog.text


def test_missing_agent_program_is_infrastructure_failure(chat_model):
    settings = {"agent_command": ["no-such-program"], "failure_reward": -1.0, "retries": 0}
    (sample,) = episodes(chat_model, [{}], settings)[0]
    assert sample.report == EpisodeReport(FailureKind.INFRASTRUCTURE)


def test_crash_and_timeout_of_agent_are_its_failures(chat_model):
    settings = {
        **agent("crashes", "failing_agents"),
        "failure_reward": -1.0,
        "deadline_s": 6.0,
        "workers": 2,
        "episodes_per_worker": 1,
    }
    samples, _ = episodes(chat_model, [{"how": "crashes"}, {"how": "hangs"}], settings)
    assert [sample.report for sample in samples] == [
        EpisodeReport(FailureKind.ERROR),
        EpisodeReport(FailureKind.TIMEOUT),
    ]
    for sample in samples:
        assert sample.rewards.sum() == -1 and sample.generated_token_count == 3


def test_journal_repeats_failed_agent_episodes(chat_model, tmp_path):
    log = tmp_path / "log"
    settings = {**FUNCTION, "retries": 1}
    # without `failure_reward`, the failed episode is retried, and left out
    first, second = (
        run_agents(chat_model, log, ["raises"], settings, journal=tmp_path / "journal")[0]
        for _ in range(2)
    )
    assert first.rewards.isnan().all() and second.rewards.isnan().all()
    error = FailureKind.ERROR
    assert first.report == second.report == EpisodeReport(error, (error,))
    assert len(log.read_text().splitlines()) == 2
