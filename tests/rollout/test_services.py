"""The servers as all of the trainer's ranks see them."""

from __future__ import annotations

import pytest

from tests.rollout import service_jobs


@pytest.mark.parametrize(
    ("error", "answer"), [(None, "rank 0"), ("the server is gone", "refused: the server is gone")]
)
def test_ranks_wait_for_rank_0s_server_beyond_a_collectives_timeout(pool, error, answer):
    assert pool.run(service_jobs.wait_together, 3, 2.5, 1.0, error) == [answer] * 3
