"""Tests of the configuration that ranks read at their start."""

from __future__ import annotations

from pathlib import Path

from aligner.cli.rank_processes import load_cached_config
from aligner.config.compose import compose_config, save_config


def test_stored_config_is_cached_until_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    save_config(compose_config(["experiment=tiny_ppo", "run.resume=false"]), file)
    first = load_cached_config(file)
    assert load_cached_config(file) is first and not first.run.should_resume
    save_config(
        compose_config(["experiment=tiny_ppo", "run.name=run", "run.resume=true"]), file
    )  # like a restart of the trainer
    assert load_cached_config(file).run.should_resume
