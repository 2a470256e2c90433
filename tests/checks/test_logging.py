from __future__ import annotations

import sys
from pathlib import Path

import pytest

from aligner.checks.check import check
from aligner.config.compose import compose_config
from aligner.errors import ConfigError


def checked(directory: Path, *overrides: str) -> None:
    check(compose_config(["experiment=tiny_ppo", f"run.dir={directory / 'run'}", *overrides]))


@pytest.fixture(autouse=True)
def _without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_refused_with_its_extra_if_it_is_asked_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked(tmp_path, "logging.wandb.enabled=true", "logging.mlflow.enabled=true")
    monkeypatch.setitem(sys.modules, name, None)
    checked(tmp_path)
    told = (
        rf"logging\.{name}\.enabled=true: the {name} package is not installed; install it with"
        rf" pip install 'aligner\[{name}\]'"
    )
    with pytest.raises(ConfigError, match=told):
        checked(tmp_path, f"logging.{name}.enabled=true")


def test_a_key_to_the_server_must_be_in_the_environment_or_where_login_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    online = ("logging.wandb.enabled=true", "logging.wandb.mode=online")
    with pytest.raises(
        ConfigError,
        match=r"logging.wandb.mode=online: no API key found; run `wandb login`",
    ):
        checked(tmp_path, *online)
    checked(tmp_path, "logging.wandb.enabled=false")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0123456789abcdef\n")
    checked(tmp_path, *online)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org:8080")
    with pytest.raises(ConfigError, match="no API key found"):
        checked(tmp_path, *online)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    checked(tmp_path, *online)


def test_a_database_is_refused_where_the_client_alone_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    given = (
        "logging.mlflow.enabled=true",
        "logging.mlflow.tracking_uri=postgresql+psycopg://db/mlflow",
    )
    with pytest.raises(
        ConfigError,
        match=(
            r"tracking_uri=postgresql\+psycopg://db/mlflow: a database requires the full mlflow"
            " package"
        ),
    ):
        checked(tmp_path, *given)
    checked(tmp_path, given[0], "logging.mlflow.tracking_uri=http://mlflow.example.org:5000")


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [("wandb.mode", "sometimes", "offline, online"), ("format", "xml", "text, json")],
)
def test_other_values_are_refused_with_those_allowed(
    tmp_path: Path, key: str, value: str, allowed: str
) -> None:
    with pytest.raises(ConfigError, match=f"logging.{key}={value}: allowed: {allowed}"):
        checked(tmp_path, "logging.wandb.enabled=true", f"logging.{key}={value}")
