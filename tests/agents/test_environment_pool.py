"""The environment pool: a failure affects only its own episode, and workers are replaced."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import CancelledError, wait

import pytest

from aligner.agents.environment_pool import EnvironmentPool
from aligner.agents.episode_environment import EpisodeLost, Outcome
from aligner.errors import AlignerError, ConfigError
from aligner.schema.environment import EnvironmentConfig
from tests.agents.acting import pool_of
from tests.agents.conftest import have_exited
from tests.rounds import bounds_seconds, typical


def open_episodes(pool, *names, **task):
    for answer in [
        pool.reset(name, {"name": name, **task}, seed) for seed, name in enumerate(names)
    ]:
        answer.result()


@bounds_seconds
def test_steps_of_environments_run_concurrently(make):
    pool = make(workers=2, episodes_per_worker=32)
    names = [f"e{number}" for number in range(64)]
    open_episodes(pool, *names)
    start = time.monotonic()
    answers = [answer.result() for answer in [pool.step(name, "sleep 0.2") for name in names]]
    assert time.monotonic() - start < 3.2  # a quarter of the sequential time
    assert len({answer.observation for answer in answers}) == 64 and not any(
        answer.done for answer in answers
    )


def test_pool_reports_call_and_wait_times(make):
    pool, spans = make(episodes_per_worker=2), []
    assert pool.take_environment_wait_s() is None
    pool.listener = lambda name, start, end: spans.append(
        (name, threading.current_thread().name, end - start)
    )
    open_episodes(pool, "a", "b")
    pool.take_environment_wait_s()
    spans.clear()
    answers = [pool.step(name, "sleep 0.3") for name in "ab"]
    pool.wait(answers)
    assert wait(answers).not_done == set()
    for name in "ab":
        pool.finish(name)
    open_episodes(pool, "c", "d")
    (first, of_wait, wait_s), (second, of_pool, call_s), *_ = sorted(
        spans, key=lambda span: span[0] != "wait"
    )
    assert (first, second) == ("wait", "environments") and of_wait != of_pool == "environments"
    assert wait_s > 0.2 and call_s > 0.2
    assert 0.3 <= pool.take_environment_wait_s() < 5  # the mean of two new episodes


def test_outcome_has_observation_reward_and_done(make, log):
    pool = make()
    messages = '[{"role": "tool", "content": "größer \U0001f600"}, {"role": "user", "content": ""}]'
    assert pool.reset("a", {"name": "a", "first": messages}, 1).result() == Outcome(
        [{"role": "tool", "content": "größer \U0001f600"}, {"role": "user", "content": ""}],
        0.0,
        False,
    )
    assert pool.step("a", 'answer ("", 0.1 + 0.2, False)').result() == Outcome("", 0.1 + 0.2, False)
    numpy = "[__import__('numpy').float32(0.5), __import__('numpy').bool_(True)]"
    assert pool.step("a", f"answer ['end', *{numpy}]").result() == Outcome("end", 0.5, True)
    assert pool.reset("b", {"name": "b", "first": "[]"}, 1).result() == Outcome([])


def test_workers_import_no_torch_and_ignore_prints(make):
    pool = make()
    open_episodes(pool, "a")
    assert pool.step("a", "print").result().observation.startswith("print: ")
    assert (
        pool.step("a", "answer (str('torch' in sys.modules), 0, False)").result().observation
        == "False"
    )


def test_new_episodes_wait_for_a_free_slot_in_order(make, log):
    pool = make(episodes_per_worker=2)
    open_episodes(pool, "a", "b")
    third, fourth, fifth = (pool.reset(name, {"name": name}, 0) for name in "cde")
    for _ in range(3):
        assert pool.step("a", "say").result() and pool.step("b", "say").result()
    assert not third.done()
    pool.finish("a")
    assert third.result() and not fourth.done()
    pool.finish("d")  # before it got a slot
    assert fourth.cancelled()
    assert pool.step("b", "done").result().done  # an episode that is done frees its slot
    assert fifth.result()
    log.wait_for("b", "close")
    assert log.calls("a") == ["reset", "say", "say", "say", "close"] and log.calls("d") == []


def test_invalid_pool_calls_raise_immediately(make):
    pool = make()
    with pytest.raises(AlignerError, match="episode a is unknown; reset it before a step"):
        pool.step("a", "say")
    open_episodes(pool, "a", "b")
    with pytest.raises(AlignerError, match="episode a is already open"):
        pool.reset("a", {}, 0)
    with pytest.raises(AlignerError, match=r"episode c: its task must be JSON: .*set"):
        pool.reset("c", {"name": {1}}, 0)
    pending = pool.step("a", "sleep 0.2")
    with pytest.raises(
        AlignerError, match="episode a is still waiting for the answer to its previous step"
    ):
        pool.step("a", "say")
    pending.result()
    pool.step("a", "done").result()
    with pytest.raises(AlignerError, match="episode a is done and accepts no more steps"):
        pool.step("a", "say")
    with pytest.raises(EpisodeLost):
        pool.step("b", "raise").result()
    with pytest.raises(
        AlignerError, match=r"episode b is lost and accepts no more steps: .*nobody is in"
    ):
        pool.step("b", "say")
    pool.finish("a")
    with pytest.raises(AlignerError, match="episode a is unknown or already finished"):
        pool.finish("a")
    open_episodes(pool, "a")


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("raise", "step raised ValueError in acting.py:75: nobody is in"),
        ("exit", "step raised SystemExit in acting.py:73: enough"),
        ("memory", "step raised MemoryError"),
        (
            "answer ('', 0)",
            "step returned ('', 0); must be a tuple (observation, reward, done)",
        ),
        ("answer None", "step returned None; must be a tuple (observation"),
        (
            "answer (None, 0, False)",
            "step returned the observation None; must be a string or a list of messages",
        ),
        (
            "answer (['a'], 0, False)",
            "step returned the observation ['a']; must be a string or a list of messages",
        ),
        ("answer ([{'role': 'user'}], 0, False)", "exactly `role` and `content`"),
        ("answer ([{'role': 'user', 'content': 1}], 0, False)", "exactly `role` and `content`"),
        (
            "answer ([{'role': 'user', 'content': '', 'x': ''}], 0, False)",
            "exactly `role` and `content`",
        ),
        ("answer ('\\ud800', 0, False)", "all values must be strings that can be encoded as UTF-8"),
        (
            "answer ('x' * 1001, 0, False)",
            "step returned an observation of 1001 characters; must have at most 1000 characters",
        ),
        (
            "answer ([{'role': '', 'content': ''}] * 1001, 0, False)",
            "step returned 1001 messages; must return at most 1000",
        ),
        (
            "answer ('', float('nan'), False)",
            "step returned reward=nan; must be a finite number",
        ),
        ("answer ('', 10**400, False)", "must be a finite number"),
        ("answer ('', '1', False)", "step returned reward='1'; must be a finite number"),
        ("answer ('', True, False)", "step returned reward=True; must be a finite number"),
        ("answer ('', 1, 0)", "step returned done=0; must be True or False"),
    ],
)
def test_failed_step_loses_episode_with_reason(shared, action, message):
    name = f"episode of {action[:30]}"
    open_episodes(shared, name)
    shared.step(name, "say").result()
    with pytest.raises(EpisodeLost) as caught:
        shared.step(name, action).result()
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"episode {name}: step 2 failed: ")
    assert str(caught.value).endswith("; gave up after 0 retries")
    shared.finish(name)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    pool = pool_of(tmp_path_factory.mktemp("shared") / "log", memory_mib=2000)
    pool.start()
    yield pool
    pool.close()


def test_plain_step_and_invalid_reset_are_reported(make):
    pool = make(kind="Plain")
    with pytest.raises(
        EpisodeLost, match=r"episode a: reset failed: reset returned the observation 1; "
    ):
        open_episodes(pool, "a", first="1")
    open_episodes(pool, "b")
    with pytest.raises(EpisodeLost, match=r"define it as `async def step`"):
        pool.step("b", "say").result()


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        ("tests.agents.nowhere:Told", {}, "No module named 'tests.agents.nowhere'"),
        ("tests.agents.acting:Nobody", {}, "has no attribute 'Nobody'"),
        ("tests.agents.acting:NOTHING", {}, "'NOTHING' has no reset and no step"),
        (
            "tests.agents.acting:NoStep",
            {},
            "'NoStep' has no step: must be a class with `reset` and `step`",
        ),
        (
            "tests.agents.acting:Told",
            {"logs": ""},
            r"'Told' does not accept the arguments \['logs'\]: ",
        ),
        ("Told", {}, "No module named 'Told'"),
    ],
)
def test_missing_or_unfit_class_is_refused_at_start(target, arguments, message):
    pool = EnvironmentPool(target, arguments, EnvironmentConfig(workers=2, deadline_s=1, retries=0))
    with pytest.raises(ConfigError, match=message):
        pool.start()
    pool.close()


def test_late_step_loses_episode_but_not_worker(make, log):
    pool = make(deadline_s=0.6)
    open_episodes(pool, "late", "other")
    start = time.monotonic()
    with pytest.raises(
        EpisodeLost, match=r"episode late: step 1 failed: timed out after 0.6 s; gave up"
    ):
        pool.step("late", "sleep 60").result()
    assert time.monotonic() - start < 3
    pool.step("other", "say").result()
    assert (
        len(log.pids()) == 1
        and log.calls("other") == ["reset", "say"]
        and log.calls("late")[-1] == "close"
    )


@bounds_seconds
@pytest.mark.parametrize(
    "how", typical(["hang", "hold", "task hang", "deaf", "die", "task die"], ("hang", "die"))
)
def test_other_episodes_survive_loss_of_their_worker(make, log, how):
    pool = make(deadline_s=1.0)
    open_episodes(pool, "guilty", "busy", "idle")
    before = pool.step("idle", "say").result()
    busy = pool.step("busy", "sleep 0.7")  # sent earlier, so its deadline ends earlier
    time.sleep(0.1)
    with pytest.raises(
        EpisodeLost,
        match=r"episode guilty: step 1 failed: .*(timed out after 1 s|exited with code 3)",
    ):
        pool.step("guilty", how).result()
    assert busy.result().observation.startswith("sleep 0.7: ")
    after = pool.step("idle", "say").result()
    assert before.observation.startswith("say: ") and before != after
    assert (
        log.calls("idle") == ["reset", "say", "reset", "say", "say"] and len(log.pids("idle")) == 2
    )
    assert log.calls("guilty")[:2] == ["reset", how]
    assert have_exited(log.pids("idle")[:1])


def test_killed_worker_is_replaced_when_needed(make, log):
    pool = make(retries=1)
    open_episodes(pool, "a", "b")
    first_outcome = pool.step("a", "say").result()
    os.kill(log.pids()[0], signal.SIGKILL)
    assert have_exited(log.pids()[:1])
    assert pool.step("a", "say").result() != first_outcome
    assert log.calls("a") == ["reset", "say", "reset", "say", "say"] and log.calls("b") == ["reset"]
    pending = pool.step("a", "sleep 0.5")
    log.wait_for("a", "sleep 0.5")
    os.kill(log.pids("a")[1], signal.SIGKILL)
    assert pending.result().observation.startswith("sleep 0.5: ") and len(log.pids("a")) == 3


def test_retried_step_equals_undisturbed_step(make, log, tmp_path):
    pool = make(retries=2, deadline_s=0.8)
    open_episodes(pool, "a")
    outcomes = [pool.step("a", "say").result()]
    for kind in ("raise", "sleep 60"):
        outcomes.append(pool.step("a", f"once {tmp_path / kind[:5]} {kind}").result())
    with pytest.raises(EpisodeLost, match=r"episode a: step 4 failed: .*gave up after 2 retries"):
        pool.step("a", "raise").result()
    for marker in ("raise", "sleep"):
        (tmp_path / marker).touch()
    open_episodes(pool, "again")
    actions = ["say", f"once {tmp_path / 'raise'} raise", f"once {tmp_path / 'sleep'} sleep 60"]
    assert [pool.step("again", action).result() for action in actions] == outcomes


@pytest.mark.parametrize("first", ["str(os.getpid())", "'same'"])
def test_episode_with_different_replay_is_lost(make, log, first):
    pool = make(retries=5)
    open_episodes(pool, "a", first=first)
    pool.step("a", "answer (str(os.getpid()), 0, False)").result()
    os.kill(log.pids()[0], signal.SIGKILL)
    call = "reset" if "pid" in first else "step 1"
    with pytest.raises(
        EpisodeLost,
        match=rf"episode a: {call} returned a different answer on replay: ",
    ):
        pool.step("a", "say").result()
    open_episodes(pool, "b")


def test_finish_during_a_step_closes_the_environment(make, log):
    pool = make(episodes_per_worker=1)
    open_episodes(pool, "a")
    pending = pool.step("a", "sleep 60")
    log.wait_for("a", "sleep 60")
    pool.finish("a")
    assert pending.cancelled()
    open_episodes(pool, "a")
    assert log.calls("a") == ["reset", "sleep 60", "close", "reset"] and len(log.pids()) == 1


@pytest.mark.parametrize("is_finished", [True, False])
def test_only_unfinished_calls_report_their_exceptions(make, log, capfd, is_finished):
    pool = make(deadline_s=60 if is_finished else 0.5, retries=0)
    open_episodes(pool, "a")
    pending = pool.step("a", "sleep 60")
    log.wait_for("a", "sleep 60")
    if is_finished:
        pool.finish("a")
    else:
        assert isinstance(pending.exception(), EpisodeLost)
    log.wait_for("a", "close")
    # the traceback of a call that has timed out names the line that it waited in
    assert ("CancelledError" in capfd.readouterr().err) == (not is_finished)


@pytest.mark.slow
def test_closed_pool_leaves_no_processes(make, log):
    pool = make(workers=3, deadline_s=60)
    open_episodes(pool, "a", "b", "c", "d")
    pool.step("a", "child").result()
    hanging = [pool.step("b", "hang"), pool.step("c", "thread 60")]
    log.wait_for("b", "hang")
    log.wait_for("c", "thread 60")
    assert len(log.pids()) == 4
    pool.close()
    wait(hanging)
    assert have_exited(log.pids(), 0.5)
    assert "close" in log.calls("a") and "close" in log.calls("d")
    with pytest.raises(CancelledError):
        hanging[0].result()
    with pytest.raises(
        AlignerError, match="the environment pool was not started, or is already closed"
    ):
        pool.reset("e", {}, 0)
    pool.close()
