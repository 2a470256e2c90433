"""What a configuration names that is not there yet, and says enough about for the run to be checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aligner.models.families import read_config
from aligner.models.model_source import ExpectedInputs
from aligner.models.shape import ModelShape
from aligner.schema import Config
from aligner.schema.data_sources import FUNCTION
from aligner.schema.references import read_paths


def absent_inputs(config: Config) -> ExpectedInputs:
    """The paths that are named and not there: models with the shapes that `model.config` and `reward.config` describe, and
    the data of a run whose policy is one of them.

    They are enough to check a run and its layout; to start it all of them must be there.
    """
    policy = _described("model", config.model.path, config.model.config) if config.model.source == "directory" else {}
    return {**policy, **_reward_model(config), **(_absent_data(config) if policy else {})}


def _reward_model(config: Config) -> dict[str, ModelShape]:
    """What `reward.config` does not say is as `model.config` describes the policy."""
    if config.reward.kind != "model":
        return {}
    likewise = config.model.config if config.model.source == "directory" else {}
    return _described("reward", config.reward.path, {**likewise, **config.reward.config})


def _described(key: str, path: str | None, entries: Mapping[str, Any]) -> dict[str, ModelShape]:
    if path is None or not entries or Path(path).exists():
        return {}
    return {str(Path(path)): read_config(entries, f"{key}.config")}


def _absent_data(config: Config) -> dict[str, None]:
    paths = [path for key, path in read_paths(config).items() if key.startswith(("data.", "evaluation."))]
    return {str(Path(path)): None for path in paths if not path.startswith(FUNCTION) and not Path(path).exists()}
