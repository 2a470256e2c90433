"""Fixtures of the system tests."""

from __future__ import annotations

import pytest

from benchmarks.runs import Finished, run_to_end

STEPS = 30
"""Training steps; fewer than the experiment's 40, because the reward has converged by then."""
COMPARED = (f"run.steps={STEPS}", "algorithm.kl_target=0.2", "algorithm.kl_horizon=1000")
"""Overrides of the undisturbed run and of the runs that are compared with it.

The adaptive KL coefficient is state that a resumed run must restore.
"""


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A complete run at the experiment's layout, with checkpoints that other runs must equal."""
    # run.name is the name of the directory, and checkpoints contain it.
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    return run_to_end(directory, "checkpoint.every=6", "checkpoint.keep=10", *COMPARED)
