"""The shape of the model that a run starts from, known before any weight is read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aligner.config.families import read_config
from aligner.config.gguf_header import gguf_shape
from aligner.config.model_shape import ModelShape
from aligner.config.paths import gguf_file, run_paths
from aligner.config.schema import Config
from aligner.errors import ConfigError

Coming = Mapping[str, ModelShape | None]
"""Directories that other experiments will have made when the run starts, with the shapes of those that are models."""
NOTHING: Coming = MappingProxyType({})


def is_coming(path: Path | str, coming: Coming) -> bool:
    """Whether a path will be there when the run starts, so that nothing can be said about it yet."""
    return any(str(directory) in coming for directory in (Path(path), *Path(path).parents))


def directory_shape(directory: Path, key: str, coming: Coming = NOTHING) -> ModelShape:
    """The shape of a Hugging Face model directory; `key` is the configuration key that named it."""
    if (shape := coming.get(str(directory))) is not None:
        return shape
    return read_config(directory_config(directory, key), f"{key}={directory}")


def directory_config(directory: Path, key: str) -> dict[str, Any]:
    """The content of a Hugging Face model directory's `config.json`, which `read_config` looks into."""
    file = directory / "config.json"
    if not directory.is_dir():
        raise ConfigError(f"{key}={directory}: no such model directory")
    if not file.is_file():
        raise ConfigError(f"{key}={directory}: it has no config.json, so it is no Hugging Face model directory")
    try:
        content: dict[str, Any] = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{key}={directory}: its config.json is not valid JSON ({error})") from error
    return content


def random_reward_models(config: Config) -> Coming:
    """The reward models that a dry run makes before its roles start."""
    models = config.dry_run.models
    return {
        str(run_paths(config).random_model(name)): read_config(entries, f"dry_run.models.{name}")
        for name, entries in models.items()
    }


def read_shape(config: Config, coming: Coming = NOTHING) -> ModelShape:
    """The policy's shape, from wherever `model.source` says; raises ConfigError when it is not to be had."""
    model = config.model
    if model.source == "random":
        if not model.config:
            raise ConfigError("model.config is empty; source=random needs the entries of a Hugging Face config.json")
        return read_config(model.config, "model.config")
    if model.source == "gguf":
        if model.package is None:
            raise ConfigError("model.package must name the package that ships the GGUF file (model.source=gguf)")
        return gguf_shape(gguf_file(model.package))
    if model.path is None:
        raise ConfigError("model.path must name a Hugging Face model directory (model.source=directory)")
    return directory_shape(Path(model.path), "model.path", coming)


def critic_shape(config: Config, policy: ModelShape) -> ModelShape:
    """The shape of the critic, or of a reward model that is trained: the policy's, cut to `critic.num_layers` if set."""
    return dataclasses.replace(policy, num_layers=config.critic.num_layers or policy.num_layers)
