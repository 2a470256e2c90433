"""Checks of `logging`: tracker packages, API keys, allowed values."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from aligner.checks.check import check
from aligner.config.compose import compose_config
from aligner.errors import ConfigError


def check_config(directory: Path, *overrides: str) -> None:
    check(compose_config(["experiment=tiny_ppo", f"run.dir={directory / 'run'}", *overrides]))


@pytest.fixture(autouse=True)
def _without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_tracker_without_package_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_config(tmp_path, "logging.wandb.enabled=true", "logging.mlflow.enabled=true")
    monkeypatch.setitem(sys.modules, name, None)
    check_config(tmp_path)
    message = (
        rf"logging\.{name}\.enabled=true: the {name} package is not installed; install it with"
        rf" pip install 'aligner\[{name}\]'"
    )
    with pytest.raises(ConfigError, match=message):
        check_config(tmp_path, f"logging.{name}.enabled=true")


def test_wandb_online_requires_api_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    online = ("logging.wandb.enabled=true", "logging.wandb.mode=online")
    with pytest.raises(
        ConfigError,
        match=r"logging.wandb.mode=online: no API key found; run `wandb login`",
    ):
        check_config(tmp_path, *online)
    check_config(tmp_path, "logging.wandb.enabled=false")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0123456789abcdef\n")
    check_config(tmp_path, *online)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org:8080")
    with pytest.raises(ConfigError, match="no API key found"):
        check_config(tmp_path, *online)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    check_config(tmp_path, *online)


def test_mlflow_database_requires_full_package(
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
        check_config(tmp_path, *given)
    check_config(tmp_path, given[0], "logging.mlflow.tracking_uri=http://mlflow.example.org:5000")


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [("wandb.mode", "sometimes", "offline, online"), ("format", "xml", "text, json")],
)
def test_unknown_value_is_refused_with_choices(
    tmp_path: Path, key: str, value: str, allowed: str
) -> None:
    with pytest.raises(ConfigError, match=f"logging.{key}={value}: allowed: {allowed}"):
        check_config(tmp_path, "logging.wandb.enabled=true", f"logging.{key}={value}")
