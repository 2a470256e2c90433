"""What is started again, and as what, on real processes: the trainer here, servers in
test_launch."""

from __future__ import annotations

from pathlib import Path

import pytest

from aligner.config.compose import load_config
from aligner.launcher.launcher_state import read_state
from tests.launcher.test_launch import finish, start


@pytest.mark.slow
def test_a_trainer_of_which_a_rank_is_killed_resumes_with_all_its_ranks_while_the_servers_stay(
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
def test_without_a_checkpoint_the_critic_begins_anew_with_the_trainer(run: Path) -> None:
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
def test_a_trainer_that_is_killed_again_and_again_ends_the_run(run: Path) -> None:
    code, out, error = finish(start(run, {"trainer": "killed"}, "run.max_restarts=1"), run)
    assert code == 1 and out.count("restarting trainer") == 1
    assert error.startswith("trainer rank 0 was killed by SIGKILL after 1 restart")
