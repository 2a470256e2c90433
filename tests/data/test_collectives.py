"""`run_on_rank0`: results and errors of rank 0 reach every rank."""

from __future__ import annotations

import pytest

from tests.data import collective_jobs


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_rank_gets_result_of_rank0(pool, ranks):
    results = pool.run(collective_jobs.get_answer, ranks)
    assert [result["callers"] for result in results] == [[0], [], []][:ranks]
    assert [list(result["answer"]) for result in results] == [["answer", 1]] * ranks


def test_action_may_exceed_collective_timeout_with_heartbeats(pool):
    results = pool.run(collective_jobs.get_answer, 3, 2.5, 1.0, 0.2)
    assert [result["answer"] for result in results] == [["answer", 1]] * 3


@pytest.mark.parametrize("heartbeat_s", [None, 0.2])
@pytest.mark.parametrize(
    ("kind", "on_rank0", "on_others"),
    [
        ("listed", "TransientError: the server restarts", "TransientError: the server restarts"),
        ("other", "ConfigError: the key is unknown", "AlignerError: the key is unknown"),
        ("foreign", "ValueError: 3 is too large", "AlignerError: ValueError: 3 is too large"),
    ],
)
def test_error_of_rank0_reaches_every_rank(pool, kind, on_rank0, on_others, heartbeat_s):
    errors = pool.run(collective_jobs.get_error, 3, kind, heartbeat_s)
    assert errors == [on_rank0, on_others, on_others]


def test_failed_heartbeat_is_followed_by_no_broadcast(pool):
    assert pool.run(collective_jobs.count_broadcasts_with_lost_peer, 2) == [1, 0]
