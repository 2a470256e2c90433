"""What ranks find out when they start."""

from __future__ import annotations

from pathlib import Path

from aligner.cli.rank_processes import stored_config
from aligner.config.compose import compose_config, save_config


def test_a_configuration_is_read_once_and_again_when_it_was_written_anew(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    save_config(compose_config(["experiment=tiny_ppo", "run.resume=false"]), file)
    first = stored_config(file)
    assert stored_config(file) is first and not first.run.resumes
    save_config(
        compose_config(["experiment=tiny_ppo", "run.name=run", "run.resume=true"]), file
    )  # as where the trainer is started again
    assert stored_config(file).run.resumes
