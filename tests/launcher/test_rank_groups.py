"""Tests of trainer restarts with real processes; test_launch tests server restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from aligner.config.compose import load_config
from aligner.launcher.run_directory import read_state
from tests.launcher.test_launch import finish, start


@pytest.mark.slow
def test_killed_trainer_rank_restarts_no_server(
    run: Path,
) -> None:
    code, out, error = finish(
        start(run, {"trainer": "killed_after_checkpoint"}, "actor.parallel.pipeline=2"), run
    )
    assert code == 0, error
    assert (
        "trainer rank 0 was killed by SIGKILL; restarting trainer (1 of 3 in the last hour)" in out
    )
    assert load_config(run / "config.yaml").run.resume == "true"
    assert (state := read_state(run / "status.json")) is not None
    assert {name: role.restarts for name, role in state.roles.items()} == {
        "critic": 0,
        "reward": 0,
        "trainer": 1,
    }
    for rank in (0, 1):
        log = (run / "logs" / f"trainer-{rank}.log").read_text()
        assert (
            log.count(f"trainer rank {rank} of 2") == 2
            and "--- restarting trainer (restart 1 of this launch) ---" in log
        )


@pytest.mark.slow
def test_critic_restarts_if_trainer_has_no_checkpoint(run: Path) -> None:
    code, out, error = finish(
        start(run, {"trainer": "killed_at_first"}, "actor.parallel.pipeline=2"), run
    )
    assert code == 0, error
    assert (
        "critic rank 0 was updated by a trainer that now restarts from step 0, and was killed;"
        " restarting critic (1 of 3 in the last hour)" in out
    )
    assert (state := read_state(run / "status.json")) is not None
    assert {name: role.restarts for name, role in state.roles.items()} == {
        "critic": 1,
        "reward": 0,
        "trainer": 1,
    }


@pytest.mark.slow
def test_trainer_over_its_restart_limit_ends_the_run(run: Path) -> None:
    code, out, error = finish(start(run, {"trainer": "killed"}, "run.max_restarts=1"), run)
    assert code == 1 and out.count("restarting trainer") == 1
    assert error.startswith("trainer rank 0 was killed by SIGKILL after 1 restart")
