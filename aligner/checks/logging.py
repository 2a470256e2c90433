"""The trackers against what is installed."""

import importlib.util
import netrc
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from aligner.models.model_source import ExpectedInputs
from aligner.models.shape import ModelShape
from aligner.schema import Config

_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
_SERVER = "https://api.wandb.ai"
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")


def problems(config: Config, model: ModelShape | None, expected: ExpectedInputs) -> Iterator[str]:
    """A tracker that is asked for but not installed, or has no key to its server."""
    wandb, mlflow = config.logging.wandb, config.logging.mlflow
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
    if mlflow.enabled and scheme in _DATABASES and not _is_installed("sqlalchemy"):
        yield (
            f"logging.mlflow.tracking_uri={mlflow.tracking_uri}: a database requires the full"
            " mlflow package; install it with pip install mlflow, or set the http:// address of a"
            " tracking server"
        )


def _is_installed(package: str) -> bool:
    """Not only a directory of that name, such as wandb leaves where it was used."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _has_wandb_key() -> bool:
    """Whether there is one where `wandb login` leaves it, or in the environment."""
    if any(os.environ.get(name) for name in _KEYS):
        return True
    file = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or _SERVER).hostname
    try:
        return host is not None and netrc.netrc(file).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
