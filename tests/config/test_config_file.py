"""Tests of `--config FILE`, the file of an experiment anywhere."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from aligner.cli import main
from aligner.config.compose import (
    compose_config,
    describe_unread_keys,
    find_user_keys,
    load_config,
    save_config,
)
from aligner.config.conf_files import find_built_in_directory
from aligner.errors import ConfigError


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_file_is_composed_like_an_experiment(tmp_path: Path) -> None:
    file = write(
        tmp_path / "mine.yaml",
        "defaults:\n  - tiny_ppo\n  - override /algorithm: grpo\nrun: {steps: 3}\nseed: 5\n",
    )
    config = compose_config(["seed=7"], config_file=file)
    # `algorithm=grpo` is the option of the file, `rollout.prompts_per_step=16` is inherited.
    assert config.algorithm.advantage == "grpo" and config.rollout.prompts_per_step == 16
    # Overrides take precedence over the file.
    assert (config.run.steps, config.seed) == (3, 7)
    assert config.run.experiment == "mine" and str(config.run.name).startswith("mine-")


@pytest.mark.parametrize("header", ["", "# @package _global_\n"])
@pytest.mark.parametrize("name", ["mine.yaml", "v1.5.yml", "2.yaml"])
def test_header_and_suffix_are_optional(tmp_path: Path, header: str, name: str) -> None:
    file = write(tmp_path / name, f"{header}run: {{steps: 3}}\n")
    config = compose_config([], config_file=file)
    assert config.run.steps == 3 and config.run.experiment == Path(name).stem


def test_copy_of_a_built_in_experiment_keeps_its_name(tmp_path: Path) -> None:
    text = (find_built_in_directory() / "experiment" / "tiny_ppo.yaml").read_text()
    file = write(tmp_path / "tiny_ppo.yaml", text.replace("steps: 40", "steps: 41"))
    assert compose_config([], config_file=file).run.steps == 41
    assert compose_config(["experiment=tiny_ppo"]).run.steps == 40


def test_defaults_list_finds_files_in_the_same_directory(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "run: {steps: 5}\nrollout: {samples_per_prompt: 3}\n")
    file = write(tmp_path / "mine.yaml", "defaults: [base]\nrun: {steps: 6}\n")
    config = compose_config([], config_file=file)
    assert (config.run.steps, config.rollout.samples_per_prompt) == (6, 3)
    assert {"run.steps", "rollout.samples_per_prompt"} <= find_user_keys([], config, None, file)


def test_file_is_combined_with_own_groups(tmp_path: Path) -> None:
    write(tmp_path / "groups" / "data" / "two.yaml", "prompts: [ab, cd]\n")
    file = write(tmp_path / "mine.yaml", "defaults:\n  - override /data: two\n")
    assert compose_config([], tmp_path / "groups", file).data.prompts == ["ab", "cd"]


def test_changed_file_is_read_again(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.yaml", "run: {steps: 3}\n")
    assert compose_config([], config_file=file).run.steps == 3
    file.write_text("run: {steps: 12}\n")
    assert compose_config([], config_file=file).run.steps == 12


def test_command_of_the_run_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = write(Path("my configs/mine.yaml"), "run: {steps: 3}\n")
    config = compose_config(["seed=2"], config_file=file)
    words = shlex.split(config.run.command)
    assert words == ["aligner", "launch", "--config", "my configs/mine.yaml", "seed=2"]


def test_unread_key_of_the_file_is_reported(tmp_path: Path) -> None:
    file = write(
        tmp_path / "mine.yaml",
        "defaults:\n  - override /algorithm: sft\nrollout: {temperature: 0.5}\n",
    )
    config = compose_config([], config_file=file)
    (note,) = describe_unread_keys(config, config_file=file)
    assert note.startswith("rollout.temperature: has no effect with algorithm.trainer=sft")


def test_file_with_automatic_values_needs_no_experiment(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.yaml", "run: {automatic: true}\n")
    assert compose_config([], config_file=file).run.automatic


def test_shown_configuration_can_be_used_as_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["launch", "experiment=tiny_ppo", "run.steps=9", "--show-config"])
    file = write(tmp_path / "shown.yaml", capsys.readouterr().out)
    config = compose_config([f"run.dir={tmp_path / 'run'}"], config_file=file)
    assert config.run.steps == 9
    save_config(config, tmp_path / "config.yaml")
    # The composed configuration of a run can be used in the same way.
    again = compose_config(["run.name=again"], config_file=tmp_path / "config.yaml")
    assert again.rollout == config.rollout and again.actor == config.actor
    assert load_config(tmp_path / "config.yaml").rollout == config.rollout


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("mine.yaml", "run: {stepss: 3}\n", "run.stepss: unknown key; did you mean run.steps? (in"),
        ("mine.yaml", "run: {steps: x}\n", "run.steps=x: expected int, got str (in {file})"),
        ("mine.yaml", "defaults: [absent]\n", "Could not load 'experiment/absent'."),
        ("mine.yaml", "defaults: [mine]\n", "circular defaults"),
        ("mine.yaml", "- 1\n", "{file}: expected a mapping of keys to values, got list"),
        ("mine.yaml", "a: [\n", "{file}: "),
        ("my file.yaml", "seed: 2\n", "the name must consist of letters, digits"),
        ("mine.json", "{}", "end in .yaml or .yml; rename the file"),
        ("absent.yaml", None, "{file}: no such file"),
        ("directory.yaml/mine.yaml", "seed: 2\n", "is a directory; expected a YAML file"),
    ],
)
def test_invalid_file_is_an_error(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    file = tmp_path / name
    if text is not None:
        write(file, text)
    if file.parent != tmp_path:
        file = file.parent
    with pytest.raises(ConfigError) as error:
        compose_config([], config_file=file)
    assert message.format(file=file) in str(error.value)


def test_file_and_experiment_cannot_be_combined(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.yaml", "seed: 2\n")
    with pytest.raises(ConfigError, match=r"cannot be combined with experiment=NAME"):
        compose_config(["experiment=tiny_ppo"], config_file=file)


def test_validate_accepts_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "mine.yaml", yaml.safe_dump({"actor": {"parallel": {"tensor": 2}}}))
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["validate", "--config", str(file)])
    assert "TP2 PP1 DP1" in capsys.readouterr().out
