"""Checks of the section `logging`: the trackers, their packages and their API keys."""

import importlib.util
import netrc
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from aligner.models.model_source import ExpectedInputs
from aligner.models.shape import ModelShape
from aligner.schema import Config

# Environment variables with which wandb authenticates.
_KEY_VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
_DEFAULT_SERVER = "https://api.wandb.ai"
# Schemes of tracking URIs that mlflow opens with sqlalchemy.
_DATABASE_SCHEMES = ("sqlite", "postgresql", "mysql", "mssql")


def find_problems(
    config: Config, model: ModelShape | None, expected: ExpectedInputs
) -> Iterator[str]:
    """Yield a line for each enabled tracker that is not installed or has no API key."""
    wandb = config.logging.wandb
    mlflow = config.logging.mlflow
    for name, tracker in (("wandb", wandb), ("mlflow", mlflow)):
        if tracker.enabled and not _is_installed(name):
            yield (
                f"logging.{name}.enabled=true: the {name} package is not installed; install it"
                f" with pip install 'aligner[{name}]', or set logging.{name}.enabled=false"
            )
    if wandb.enabled and wandb.mode == "online" and not _has_wandb_key():
        yield (
            "logging.wandb.mode=online: no API key found; run `wandb login`, set the environment"
            " variable WANDB_API_KEY, or set logging.wandb.mode=offline"
        )
    scheme = urlsplit(mlflow.tracking_uri or "").scheme.partition("+")[0]
    if mlflow.enabled and scheme in _DATABASE_SCHEMES and not _is_installed("sqlalchemy"):
        yield (
            f"logging.mlflow.tracking_uri={mlflow.tracking_uri}: a database requires the full"
            " mlflow package; install it with pip install mlflow, or set the http:// address of a"
            " tracking server"
        )


def _is_installed(package: str) -> bool:
    """Return whether a package is installed.

    A directory with the name of the package, such as the `wandb` directory of an earlier run, is a
    namespace package without an origin and does not count.
    """
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _has_wandb_key() -> bool:
    """Return whether a wandb API key is in the environment, or in the file of `wandb login`."""
    if any(os.environ.get(name) for name in _KEY_VARIABLES):
        return True
    # `wandb login` stores the API key in this file.
    file = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or _DEFAULT_SERVER).hostname
    try:
        return host is not None and netrc.netrc(file).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
