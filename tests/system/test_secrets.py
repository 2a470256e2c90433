"""Test that secret values of a configuration are stored only in the run's `config.yaml`."""

from __future__ import annotations

from pathlib import Path

import pytest

from aligner.config.compose import compose_config, load_config, save_config
from aligner.observability.metrics import MetricsWriter
from aligner.observability.sinks import open_sinks
from aligner.paths import get_run_paths
from aligner.training.run_checkpoints import RunCheckpoints
from aligner.view.saved_page import write_report
from tests.training.test_run_checkpoints import commit

SECRET = "not-for-others"


@pytest.mark.slow
def test_secret_values_are_stored_only_in_config_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    root = tmp_path / "run"
    root.mkdir()
    config = compose_config(
        [
            *(
                "experiment=tiny_ppo",
                f"run.dir={root}",
                "cluster=slurm",
                f"+cluster.slurm.environment.TOKEN={SECRET}",
            ),
            f"+cluster.slurm.roles.critic.environment={{TOKEN: {SECRET}}}",
            *(f"logging.{tracker}.enabled=true" for tracker in ("wandb", "mlflow")),
        ]
    )
    paths = get_run_paths(config)
    save_config(config, paths.config)
    commit(RunCheckpoints(config), 1)
    with MetricsWriter(paths, open_sinks(config, paths)) as writer:
        writer.write(1, {"reward/mean": 0.5})
    write_report(root)
    with_it = [
        path for path in root.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()
    ]
    assert with_it == [paths.config]
    assert load_config(paths.config).cluster.slurm.environment == {"TOKEN": SECRET}, (
        "a job that resumes has it"
    )
    with_name = [
        path for path in root.rglob("*") if path.is_file() and b"TOKEN" in path.read_bytes()
    ]
    # The name of the variable is in the configuration, manifest, report and both trackers.
    assert len(with_name) >= 5, with_name
