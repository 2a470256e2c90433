"""All ranks of the trainer wait for the servers' answers to rank 0."""

from __future__ import annotations

import pytest

from tests.training import service_jobs


@pytest.mark.parametrize(
    ("error", "answer"), [(None, "rank 0"), ("the server is gone", "refused: the server is gone")]
)
def test_ranks_wait_for_server_beyond_collective_timeout(pool, error, answer):
    assert pool.run(service_jobs.wait_on_all_ranks, 3, 2.5, 1.0, error) == [answer] * 3
