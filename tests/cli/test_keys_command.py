"""Tests of `aligner keys`, `--show-config` and the help of `aligner launch`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from aligner.cli import main
from aligner.config.compose import compose_config
from aligner.schema.keys import get_schema_keys


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    """Run a command that exits with `code`; return its standard output and standard error."""
    with pytest.raises(SystemExit, match=rf"^{code}$"):
        main(list(arguments))
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_keys_lists_matches_in_name_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    output, _ = run(capsys, "keys", "KL_Co")
    assert "algorithm.kl_coefficient (float ≥ 0; default 0.05)\n    Weight of the" in output
    in_help, in_name = run(capsys, "keys", "adapters")[0], "actor.lora.targets"
    assert in_name in in_help and "adapters" not in in_name


def test_exact_key_shows_complete_help(capsys: pytest.CaptureFixture[str]) -> None:
    key = get_schema_keys()["algorithm.kl_estimator"]
    output, _ = run(capsys, "keys", key.name)
    assert " ".join(output.split()).count(key.help.replace("  ", " ")) == 1
    assert "one of k1, k2, k3; default" in output and "Used only when" in output
    # A list shows only the first sentence.
    assert "`k1`" not in run(capsys, "keys", "*kl_*")[0]


def test_keys_fit_into_60_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    output, _ = run(capsys, "keys")
    long_lines = [line for line in output.splitlines() if len(line) > 60]
    # A single word may be longer than the line.
    assert all(len(line.split()) == 1 for line in long_lines)
    assert len(output.splitlines()) > 2 * len(get_schema_keys())


def test_keys_as_json_contains_all_keys(capsys: pytest.CaptureFixture[str]) -> None:
    output, _ = run(capsys, "keys", "--json")
    keys = {entry["key"]: entry for entry in json.loads(output)}
    assert keys.keys() == get_schema_keys().keys()
    assert keys["engine.placement"]["choices"] == ["colocated", "server"]
    assert keys["rollout.temperature"]["type"].startswith("float")


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("temprature", "similar keys: rollout.temperature"),
        ("algorithm.kl_coeficient", "similar keys: algorithm.kl_coefficient"),
        ("num_generations", "TRL's num_generations is rollout.samples_per_prompt"),
        ("NUM_GENERATIONS", "TRL's num_generations is rollout.samples_per_prompt"),
        ("qqqq", "`aligner keys` lists all keys"),
    ],
)
def test_unknown_pattern_suggests_keys(
    capsys: pytest.CaptureFixture[str], pattern: str, hint: str
) -> None:
    output, errors = run(capsys, "keys", pattern, code=2)
    assert output == "" and f"{pattern}: no such key; " in errors and hint in errors


def test_name_of_another_system_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """`beta` occurs in aligner's own keys, too."""
    output, _ = run(capsys, "keys", "beta")
    assert "actor.optimizer.beta1" in output
    assert "In aligner, TRL's beta is algorithm.kl_coefficient or" in output


def test_keys_imports_no_heavy_packages() -> None:
    program = (
        "import sys; from aligner.cli import main\ntry: main(['keys', 'kl'])\nfinally:"
        " print([m for m in ('torch', 'hydra', 'pydantic', 'numpy') if m in sys.modules])"
    )
    output = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert output.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("option", "parse"),
    [
        (["--show-config"], yaml.safe_load),
        (["--show-config=yaml"], yaml.safe_load),
        (["--show-config=json"], json.loads),
        (["--show-config", "json"], json.loads),
    ],
)
def test_show_config_prints_configuration_and_starts_nothing(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    option: list[str],
    parse: Callable[[str], Any],
) -> None:
    monkeypatch.chdir(tmp_path)
    output, _ = run(capsys, "launch", *option, "experiment=tiny_ppo", "run.steps=7")
    values = parse(output)
    assert values["run"]["steps"] == 7 and values["run"]["experiment"] == "tiny_ppo"
    # The name and the directory of a launch contain its time.
    assert values["run"]["name"] is None and values["run"]["dir"] is None
    assert values["algorithm"]["advantage"] == "gae"
    assert not list(tmp_path.iterdir())


def test_show_config_masks_secrets_and_keeps_names(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123abc")
    variables = (
        "+cluster.slurm.environment.WANDB_API_KEY=${oc.env:WANDB_API_KEY}",
        "+cluster.slurm.environment.OTHER=4567def",
    )
    arguments = ["experiment=llama3_8b_ppo", *variables, f"run.dir={tmp_path / 'run'}"]
    output, _ = run(capsys, "launch", *arguments, "--show-config")
    values = yaml.safe_load(output)
    assert "0123abc" not in output and "4567def" not in output
    assert values["cluster"]["slurm"]["environment"] == {
        "WANDB_API_KEY": "${oc.env:WANDB_API_KEY}",
        "OTHER": "***",
    }
    # The printed file can be launched: it reads the variable again.
    (tmp_path / "mine.yaml").write_text(output)
    config = compose_config([], config_file=tmp_path / "mine.yaml")
    assert config.cluster.slurm.environment["WANDB_API_KEY"] == "0123abc"
    assert values["run"]["dir"] == str(tmp_path / "run")


def test_launch_help_shows_examples_experiments_and_keys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    help_text, _ = run(capsys, "launch", "--help")
    assert "aligner launch experiment=tiny_ppo\n" in help_text and "smollm2_rlhf" in help_text
    _, _, most_used = help_text.partition("most used keys")
    names = [line.split()[0].rstrip(",") for line in most_used.splitlines()[1:]]
    assert len(names) > 10
    assert {name for name in names if "=" not in name} <= get_schema_keys().keys()
