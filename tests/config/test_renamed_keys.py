"""Old names of keys and metrics are accepted, with a warning where a user can change them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aligner.config.compose import compose_config, load_config, save_config
from aligner.config.conf_files import report_old_key
from aligner.config.resume import find_resume_problems
from aligner.errors import ConfigError
from aligner.observability.metrics import read_metrics
from aligner.schema.keys import get_schema_keys, with_values
from aligner.schema.renamed import RENAMED_KEYS, RENAMED_METRICS

TINY = "experiment=tiny_ppo"


@pytest.fixture(autouse=True)
def no_earlier_warnings() -> None:
    report_old_key.cache_clear()


def test_new_names_exist_and_old_names_do_not() -> None:
    keys = get_schema_keys()
    assert set(RENAMED_KEYS.values()) <= keys.keys()
    assert not RENAMED_KEYS.keys() & keys.keys()
    assert not RENAMED_METRICS.keys() & set(RENAMED_METRICS.values())


def test_renamed_keys_stay_in_their_section() -> None:
    assert all(
        old.rpartition(".")[0] == new.rpartition(".")[0] for old, new in RENAMED_KEYS.items()
    )


@pytest.mark.parametrize(
    "override", ["algorithm.replay_routes=true", "++algorithm={replay_routes: true}"]
)
def test_old_override_sets_new_key_and_warns_once(
    override: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert compose_config([TINY, override]).algorithm.routing_replay is True
    assert capsys.readouterr().err == (
        "aligner: warning: algorithm.replay_routes is now algorithm.routing_replay; the next"
        " release no longer accepts the old name\n"
    )


def test_old_key_without_effect_is_refused_with_its_new_name() -> None:
    with pytest.raises(ConfigError, match=r"^evaluation\.asynchronous=true: has no effect with"):
        compose_config([TINY, "evaluation.beside=true"])


def test_old_key_in_file_warns_with_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "experiment" / "mine.yaml"
    file.parent.mkdir()
    file.write_text(
        "# @package _global_\ndefaults: [tiny_ppo]\ndata: {curriculum: {memory: 0.5}}\n"
    )
    config = compose_config(["experiment=mine"], tmp_path)
    assert config.data.curriculum.decay == 0.5
    assert f"{file}: data.curriculum.memory is now data.curriculum.decay" in capsys.readouterr().err
    given = ["experiment=mine", "data.curriculum.decay=0.25"]
    assert compose_config(given, tmp_path).data.curriculum.decay == 0.25


def test_older_run_is_read_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    config = compose_config([TINY, f"run.dir={tmp_path}", "run.name=old", "run.resume=auto"])
    config = with_values(config, {"environment.max_characters": 50})
    save_config(config, file)
    file.write_text(file.read_text().replace("max_characters:", "most_characters:"))
    assert "most_characters: 50" in file.read_text()
    assert load_config(file) == config
    assert list(find_resume_problems(config)) == []
    assert capsys.readouterr().err == ""


def test_removed_key_is_refused_with_its_replacement(tmp_path: Path) -> None:
    message = (
        r"engine\.verify_every: this key was removed; use engine\.verify=sync \(every weight sync,"
        r" the default\), first or never"
    )
    with pytest.raises(ConfigError, match=message):
        compose_config([TINY, "engine.verify_every=1"])
    file = tmp_path / "experiment" / "mine.yaml"
    file.parent.mkdir()
    file.write_text("# @package _global_\ndefaults: [tiny_ppo]\nengine: {verify_every: 1}\n")
    with pytest.raises(ConfigError, match=message):
        compose_config(["experiment=mine"], tmp_path)


def test_removed_key_of_older_run_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    config = compose_config([TINY, f"run.dir={tmp_path}", "run.name=old"])
    save_config(config, file)
    text = file.read_text()
    assert "  verify: sync\n" in text
    file.write_text(text.replace("  verify: sync\n", "  verify_every: 3\n"))
    assert load_config(file) == config


def test_metrics_of_older_run_have_new_names(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    old = {"step": 1, "rollout/guessed": 8.0, "response/drawn_to_16": 3.0, "reward/mean": 0.5}
    file.write_text(json.dumps(old) + "\n")
    assert read_metrics(file) == [
        {
            "step": 1,
            "rollout/draft_tokens": 8.0,
            "response/generated_to_16": 3.0,
            "reward/mean": 0.5,
        }
    ]
