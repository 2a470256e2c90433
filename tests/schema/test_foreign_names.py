"""Tests of the suggestions for names of TRL, verl and OpenRLHF."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aligner.cli.command_table import parse_arguments
from aligner.config.compose import compose_config
from aligner.errors import ConfigError
from aligner.schema.foreign_names import SYSTEMS
from aligner.schema.keys import get_schema_keys

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("num_generations", "rollout.samples_per_prompt"),
        ("per_device_train_batch_size", "actor.micro_batch_tokens"),
        ("max_completion_length", "rollout.max_response_tokens"),
        ("beta", "algorithm.kl_coefficient"),
        ("lora_r", "actor.lora.rank"),
        ("actor.lr", "actor.optimizer.learning_rate"),
        ("actor_rollout_ref.actor.optim.lr", "actor.optimizer.learning_rate"),
        ("data.train_batch_size", "rollout.prompts_per_step"),
        ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_coefficient"),
        ("kl_coef", "algorithm.kl_coefficient"),
        ("n_samples_per_prompt", "rollout.samples_per_prompt"),
        ("init_kl_coef", "algorithm.kl_coefficient"),
        ("micro_train_batch_size", "actor.micro_batch_tokens"),
    ],
)
def test_unknown_key_of_another_system_names_the_key(name: str, key: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{name}: unknown key; in aligner")) as error:
        compose_config(["experiment=tiny_ppo", f"{name}=1"])
    assert re.search(rf" is (\S+ or )?{re.escape(key)}\b", str(error.value))


@pytest.mark.parametrize("name", ["temperature", "sleep"])
def test_part_of_an_own_key_suggests_the_own_key(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose_config(["experiment=tiny_ppo", f"{name}=1"])
    assert not any(system in str(error.value) for system in SYSTEMS)


def test_option_of_another_system_names_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["launch", "--init_kl_coef", "0.01"])
    assert "algorithm.kl_coefficient" in capsys.readouterr().err


def test_suggested_keys_exist() -> None:
    keys = {key for names in SYSTEMS.values() for found in names.values() for key in found}
    assert keys <= get_schema_keys().keys()


@pytest.mark.parametrize("system", SYSTEMS)
def test_migration_page_names_the_same_keys(system: str) -> None:
    """Names that share a row have their keys in the row, too."""
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {system}\n")[2]
    rows = [row.split("|") for row in section.partition("\n## ")[0].splitlines() if row[:1] == "|"]
    compared = 0
    for name, keys in SYSTEMS[system].items():
        named = [row for row in rows if re.search(rf"`(--|\w+\.)?{re.escape(name)}[`= ]", row[1])]
        # An algorithm that is selected by name has no row of its own for the key.
        text = "|".join(row[2] for row in named if "=" not in row[2])
        if text:
            compared += 1
            assert any(f"`{key}`" in text for key in keys), (name, keys, text)
    assert compared >= 15
