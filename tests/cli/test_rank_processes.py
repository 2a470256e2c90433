"""The configuration that ranks read at their start, and the process of a rank."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from aligner.cli import rank_processes
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


@pytest.fixture
def default_thresholds() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("default_thresholds")
def test_objects_in_use_cause_few_garbage_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    def count_collections(config: object) -> int:
        before = sum(generation["collections"] for generation in gc.get_stats())
        objects = [[index] for index in range(100_000)]
        after = sum(generation["collections"] for generation in gc.get_stats())
        assert len(objects) == 100_000
        return after - before

    monkeypatch.setattr(rank_processes, "load", lambda name: count_collections)
    config = compose_config(["experiment=tiny_ppo"])
    assert rank_processes._run_role("trainer", config) <= 20
