from __future__ import annotations

import pytest

from benchmarks.runs import Finished, run_to_end


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The whole experiment at its own layout, with checkpoints to compare other runs' with."""
    directory = tmp_path_factory.mktemp("undisturbed") / "run"  # run.name is the directory's, and checkpoints hold it
    return run_to_end(directory, "checkpoint.every=6", "checkpoint.keep=10")
