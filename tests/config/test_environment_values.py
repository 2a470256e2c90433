"""Environment variables in configurations: stored as interpolations, resolved by the run only."""

from __future__ import annotations

import copy
import json
import os
import pickle
from pathlib import Path

import pytest

from aligner.config.compose import compose_config, load_config, load_own_config, save_config
from aligner.config.resume import find_resume_problems
from aligner.errors import ConfigError
from aligner.masking import mask_secrets
from aligner.paths import get_run_paths
from aligner.schema import Config
from aligner.schema.keys import get_masked_values, with_values
from aligner.view.saved_page import write_report
from tests import other_user

SECRET = "Zq7vLw2pXk9mRt4s"
BASE = ("experiment=tiny_ppo", "logging.mlflow.enabled=true", "logging.wandb.enabled=true")


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED", SECRET)
    monkeypatch.setenv("STEPS", "7")
    monkeypatch.setenv("KIND", "json")


def compose(root: Path, *overrides: str) -> Config:
    return compose_config([*BASE, f"run.dir={root}", *overrides])


def test_values_are_stored_as_interpolations(tmp_path: Path) -> None:
    config = compose(
        tmp_path,
        "logging.mlflow.tracking_uri=https://user:${oc.env:PLANTED}@host",
        'logging.wandb.tags=["a b","${oc.env:PLANTED}"]',
        "+logging.mlflow.tags={inner: {deep: 'x${oc.env:PLANTED}'}}",
        "logging.wandb.group=${logging.mlflow.tracking_uri}",
        'logging.wandb.entity=${oc.env:NOT_SET,"a default"}',
    )
    settings = config.logging
    assert settings.mlflow.tracking_uri == f"https://user:{SECRET}@host" == settings.wandb.group
    assert settings.wandb.tags == ["a b", SECRET] and settings.wandb.entity == "a default"
    assert settings.mlflow.tags == {"inner": {"deep": f"x{SECRET}"}}

    file = tmp_path / "config.yaml"
    save_config(config, file)
    text = file.read_text()
    assert SECRET not in text and "https://user:${oc.env:PLANTED}@host" in text
    # The trainer's process resolves the same values from its own environment.
    assert load_own_config(file) == config
    assert SECRET not in json.dumps(get_masked_values(config))
    assert SECRET not in str(config.run.command)


def test_copies_of_a_configuration_keep_interpolations(tmp_path: Path) -> None:
    config = compose(tmp_path, "logging.wandb.project=${oc.env:PLANTED}")
    copies = (
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        with_values(config, {"seed": 5}),
    )
    for each in copies:
        assert each.logging.wandb.project == SECRET
        save_config(each, tmp_path / "config.yaml")
        assert "project: ${oc.env:PLANTED}\n" in (tmp_path / "config.yaml").read_text()


def test_numbers_and_choices_are_stored_as_values(tmp_path: Path) -> None:
    config = compose(tmp_path, "run.steps=${oc.env:STEPS}", "logging.format=${oc.env:KIND}")
    save_config(config, tmp_path / "config.yaml")
    read = load_config(tmp_path / "config.yaml")
    assert (read.run.steps, read.logging.format) == (7, "json")


def test_paths_in_messages_show_the_values_of_run_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOB_LABEL", "experiment-7")
    config = compose_config([*BASE, f"run.dir={tmp_path}/${{oc.env:JOB_LABEL}}"])
    assert mask_secrets(f"log: {config.run.dir}/log") == f"log: {tmp_path}/experiment-7/log"
    compose(tmp_path, "logging.wandb.group=${oc.env:JOB_LABEL}")
    assert mask_secrets("group experiment-7") == "group ${oc.env:JOB_LABEL}"


def test_literal_interpolations_stay_literal(tmp_path: Path) -> None:
    literal = "logging.wandb.tags=['\\${oc.env:PLANTED}']"
    config = compose(tmp_path, literal, "logging.wandb.project=${oc.env:PLANTED}")
    file = tmp_path / "config.yaml"
    save_config(config, file)
    for each in (config, load_config(file), load_own_config(file)):
        assert each.logging.wandb.tags == ["${oc.env:PLANTED}"]


@pytest.mark.promise("readers-resolve-no-variables")
def test_reader_never_resolves_its_environment(tmp_path: Path) -> None:
    config = compose(tmp_path)
    file = tmp_path / "config.yaml"
    save_config(config, file)
    text = file.read_text().replace("project: aligner", "project: ${oc.env:PLANTED}")
    decoded = "'${oc.decode:${oc.env:PLANTED}}'"
    text = text.replace("experiment: aligner", f"experiment: {decoded}")
    file.write_text(text)
    read = load_config(file)
    assert read.logging.wandb.project == "${oc.env:PLANTED}"
    page = write_report(tmp_path, tmp_path / "page.html").read_text()
    assert SECRET not in page and "${oc.env:PLANTED}" in page

    # An interpolation in place of a number is an error, which does not contain the value either.
    file.write_text(text.replace("seed: ", "seed: ${oc.env:PLANTED} #"))
    with pytest.raises(ConfigError, match="seed=") as caught:
        load_config(file)
    assert SECRET not in str(caught.value)


def test_missing_variable_names_key_and_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    override = "logging.wandb.project=${oc.env:PLANTED}"
    file = tmp_path / "config.yaml"
    save_config(compose(tmp_path, override), file)
    monkeypatch.delenv("PLANTED")
    expected = (
        r"logging.wandb.project=\$\{oc.env:PLANTED\}: the environment variable PLANTED is not set;"
        " export it before you start the run"
    )
    with pytest.raises(ConfigError, match=f"^{expected}"):
        compose(tmp_path, override)
    with pytest.raises(ConfigError, match=f"^{file}: {expected}"):
        load_own_config(file)
    assert load_config(file).logging.wandb.project == "${oc.env:PLANTED}"


def test_resume_compares_interpolations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ("environment.target=a:B", "+environment.arguments.url=${oc.env:PLANTED}")
    paths = get_run_paths(config := compose(tmp_path, *overrides, "run.resume=auto"))
    save_config(config, paths.config)
    assert not list(find_resume_problems(config))
    monkeypatch.setenv("OTHER", "AnotherSecretValue1")
    changed = compose(tmp_path, overrides[0], "+environment.arguments.url=${oc.env:OTHER}")
    changed = with_values(changed, {"run.resume": "auto"})
    (problem,) = find_resume_problems(changed)
    assert 'environment.arguments.url: "${oc.env:PLANTED}" -> "${oc.env:OTHER}"' in problem
    assert "AnotherSecretValue1" not in problem and SECRET not in problem


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("logging.mlflow.tracking_uri=https://user:{}@host", "password"),
        ("logging.mlflow.tracking_uri=https://{}@host", "access token"),
        ("reward.kind=remote reward.url=http://host/?api_key={}", "secret parameter"),
        ("environment.target=a:B +environment.arguments.api_key={}", "secret"),
        ("environment.target=a:B +environment.arguments.headers.Authorization={}", "secret"),
        ("cluster=slurm +cluster.slurm.environment.HF_TOKEN={}", "secret"),
    ],
)
def test_literal_secret_is_refused(tmp_path: Path, override: str, problem: str) -> None:
    *others, last = override.format(SECRET).split()
    with pytest.raises(ConfigError, match=f"contains an? {problem}") as caught:
        compose(tmp_path, *others, last)
    assert SECRET not in str(caught.value)
    assert str(caught.value).startswith(last.lstrip("+").partition("=")[0])
    assert compose(tmp_path, *others, last.replace(SECRET, "${oc.env:PLANTED}"))


def test_list_in_a_variable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAGS", f"[{SECRET}]")
    with pytest.raises(ConfigError, match="cannot contain a list or a mapping") as caught:
        compose(tmp_path, "logging.wandb.tags='${oc.decode:${oc.env:TAGS}}'")
    assert SECRET not in str(caught.value)


@other_user.needs_root
def test_only_the_owner_of_a_run_resolves_variables(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    save_config(compose(tmp_path, "logging.wandb.project=${oc.env:PLANTED}"), file)
    os.chown(file, other_user.UID, other_user.UID)
    with pytest.raises(ConfigError, match=r"only a launch of the owner resolves them"):
        load_own_config(file)
    save_config(compose(tmp_path), file)
    os.chown(file, other_user.UID, other_user.UID)
    assert load_own_config(file).logging.wandb.project == "aligner"
