"""Checksums of a run's input files, and the changes that a resumed run refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from aligner.data.run_inputs import compute_input_checksums, describe_input_changes
from aligner.errors import ConfigError
from aligner.schema import Config, DataConfig, ModelConfig, RunConfig
from aligner.training.run_checkpoints import RunCheckpoints, TrainingState


@pytest.fixture
def config(tmp_path):
    model = tmp_path / "model"
    templates = model / "additional_chat_templates"
    templates.mkdir(parents=True)
    for name in ("model.safetensors", "config.json", "tokenizer.json", "README.md"):
        (model / name).write_text(name)
    (templates / "tool_use.jinja").write_text("template")
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a"}\n')
    return Config(
        model=ModelConfig(source="directory", path=str(model)),
        data=DataConfig(path=str(data)),
        run=RunConfig(dir=str(tmp_path / "run"), resume="true"),
    )


def test_checksums_cover_model_files_and_data(config):
    found = compute_input_checksums(config)
    assert {key: sorted(files) for key, files in found.items()} == {
        "model.path": [
            "additional_chat_templates/tool_use.jinja",
            "config.json",
            "model.safetensors",
            "tokenizer.json",
        ],
        "data.path": ["data.jsonl"],
    }


def test_unchanged_files_are_no_change(config):
    assert (
        describe_input_changes(compute_input_checksums(config), compute_input_checksums(config), [])
        == {}
    )


def test_evaluation_data_and_functions_are_not_covered(config):
    data = dataclasses.replace(config.data, path="function:module:records")
    suites = dataclasses.replace(config.evaluation, path=config.data.path)
    config = dataclasses.replace(config, data=data, evaluation=suites)
    assert sorted(compute_input_checksums(config)) == ["model.path"]


def test_missing_file_is_refused_with_its_name(config):
    Path(config.data.path).unlink()
    with pytest.raises(ConfigError, match=r"data\.jsonl: cannot be read: No such file"):
        compute_input_checksums(config)


def commit(config):
    (Path(config.run.dir) / "checkpoints" / "step_3" / "policy").mkdir(parents=True)
    checkpoints = RunCheckpoints(config, compute_input_checksums(config))
    checkpoints.commit(TrainingState(3, kl_coefficient=0.0, critic_updates=0, position=0))


def check(config, *, changes=()):
    run = dataclasses.replace(config.run, changes=list(changes))
    config = dataclasses.replace(config, run=run)
    RunCheckpoints(config, compute_input_checksums(config)).check_inputs()


@pytest.mark.promise("changed-inputs-refuse-a-resume")
@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("model.path", "model.safetensors"),
        ("model.path", "tokenizer.json"),
        ("model.path", "additional_chat_templates/tool_use.jinja"),
        ("data.path", "data.jsonl"),
    ],
)
def test_changed_input_file_is_refused_on_resume(config, key, name):
    commit(config)
    check(config)
    root = Path(config.model.path) if key == "model.path" else Path(config.data.path).parent
    content = bytearray((root / name).read_bytes())
    content[3] ^= 1
    (root / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"since checkpoint step_3 .*\n  {key}: {name}: \d+ byt"):
        check(config)
    check(config, changes=[key])
    check(config, changes=[key.partition(".")[0]])
    with pytest.raises(ConfigError, match=key):
        check(config, changes=["critic"])


def test_changed_weight_file_list_is_refused_on_resume(config):
    commit(config)
    model = Path(config.model.path)
    (model / "model.safetensors").rename(model / "model-2.safetensors")
    with pytest.raises(ConfigError) as refused:
        check(config)
    assert "model.safetensors: 17 bytes with checksum" in str(refused.value)
    assert "model-2.safetensors: missing when the checkpoint was saved" in str(refused.value)


def test_moved_input_files_are_no_change(config, tmp_path):
    commit(config)
    moved = Path(config.model.path).rename(tmp_path / "elsewhere")
    model = dataclasses.replace(config.model, path=str(moved))
    check(dataclasses.replace(config, model=model))


def test_checkpoint_without_checksums_is_not_compared(config):
    (Path(config.run.dir) / "checkpoints" / "step_3" / "policy").mkdir(parents=True)
    RunCheckpoints(config).commit(TrainingState(3, 0.0, 0, 0))
    check(config)
