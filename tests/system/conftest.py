from __future__ import annotations

import pytest

from benchmarks.runs import Finished, run_to_end

STEPS = 30
"""Of the experiment's 40: the reward is where it is going by then."""
COMPARED = (f"run.steps={STEPS}", "algorithm.kl_target=0.2", "algorithm.kl_horizon=1000")
"""Of the undisturbed run and those that are compared with it: also a coefficient that a resumed run
has to know."""


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The whole experiment at its own layout, with checkpoints to compare other runs' with."""
    # run.name is the directory's, and checkpoints hold it
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    return run_to_end(directory, "checkpoint.every=6", "checkpoint.keep=10", *COMPARED)
