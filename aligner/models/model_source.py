"""Where the models of a run come from, their shapes and a reward model's normalization, known
before any weight is read."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aligner.errors import ConfigError
from aligner.models.end_tokens import with_all_end_tokens
from aligner.models.gguf_header import gguf_shape
from aligner.models.hugging_face import (
    hugging_face_config,
    read_config,
    read_described_config,
    with_architecture,
)
from aligner.models.packaged_models import package_directory, package_version
from aligner.models.shape import ModelShape
from aligner.paths import cache_directory, run_paths
from aligner.schema import Config, ModelConfig
from aligner.schema.data_sources import FUNCTION
from aligner.schema.references import read_paths
from aligner.schema.reward_sources import ModelSource, model_sources, reward_sources
from aligner.schema.teacher_sources import TeacherSource, teacher_sources
from aligner.values import is_finite_number

ExpectedInputs = Mapping[str, ModelShape | None]
"""Directories that other experiments will have made when the run starts, with the shapes of those
that are models."""

NOTHING_EXPECTED: ExpectedInputs = MappingProxyType({})
NORMALIZATION = "normalization.json"


def is_expected(path: Path | str, expected: ExpectedInputs) -> bool:
    """Whether a path will be there when the run starts, so that nothing can be said about it
    yet."""
    return any(str(directory) in expected for directory in (Path(path), *Path(path).parents))


def directory_shape(
    directory: Path, key: str, expected: ExpectedInputs = NOTHING_EXPECTED
) -> ModelShape:
    """Return the shape of a Hugging Face model directory, with the EOS ids of all its files.

    `key` is the configuration key that names the directory.
    """
    if (shape := expected.get(str(directory))) is not None:
        return shape
    shape = read_config(directory_config(directory, key), f"{key}={directory}")
    return with_all_end_tokens(shape, directory)


def directory_config(directory: Path, key: str) -> dict[str, Any]:
    """Return the content of a Hugging Face model directory's `config.json`, with
    `architectures`."""
    file = directory / "config.json"
    if not directory.is_dir():
        raise ConfigError(f"{key}={directory}: no such model directory")
    if not file.is_file():
        raise ConfigError(
            f"{key}={directory}: has no config.json, so it is not a Hugging Face model directory"
        )
    try:
        content: dict[str, Any] = with_architecture(json.loads(file.read_bytes()))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{key}={directory}: config.json is not valid JSON ({error})") from error
    return content


def random_reward_models(config: Config) -> ExpectedInputs:
    """The reward models that a dry run makes before its roles start."""
    models = config.dry_run.models
    return {
        str(run_paths(config).random_model(name)): read_described_config(
            entries, f"dry_run.models.{name}"
        )
        for name, entries in models.items()
    }


def read_shape(config: Config, expected: ExpectedInputs = NOTHING_EXPECTED) -> ModelShape:
    """The policy's shape, from wherever `model.source` says; raises ConfigError when it is not to
    be had."""
    model = config.model
    if model.source == "random":
        if not model.config:
            raise ConfigError(
                "model.config={}: model.source=random requires the entries of a Hugging Face"
                " config.json"
            )
        return read_described_config(model.config, "model.config")
    if model.source == "gguf":
        return gguf_shape(gguf_file(model))
    return directory_shape(_given_directory(model), "model.path", expected)


def read_architecture(
    config: Config, shape: ModelShape, expected: ExpectedInputs = NOTHING_EXPECTED
) -> str:
    """The name that the policy's config.json gives its architecture; where it is still to be
    written, one of the shape's."""
    model = config.model
    if model.source == "random":
        entries: Mapping[str, Any] = with_architecture(model.config)
    elif model.source == "gguf" or is_expected(directory := _given_directory(model), expected):
        entries = hugging_face_config(shape)
    else:
        entries = directory_config(directory, "model.path")
    return str(entries["architectures"][0])


def critic_shape(
    config: Config, policy: ModelShape, expected: ExpectedInputs = NOTHING_EXPECTED
) -> ModelShape:
    """The shape of a run's critic: that of `critic.path`'s model, the policy's where null, cut to
    `critic.num_layers` if set.

    Raises ConfigError where there is no such model.
    """
    path = config.critic.path
    return first_layers(
        config, policy if path is None else directory_shape(Path(path), "critic.path", expected)
    )


def first_layers(config: Config, model: ModelShape) -> ModelShape:
    """The shape of a critic, or of a reward model that is trained, that begins from a model of this
    shape: cut to `critic.num_layers` if set.
    """
    return dataclasses.replace(model, num_layers=config.critic.num_layers or model.num_layers)


def critic_directory(config: Config) -> Path:
    """The Hugging Face directory that the critic reads its initial weights from."""
    return model_directory(config) if config.critic.path is None else Path(config.critic.path)


def gguf_file(model: ModelConfig) -> Path:
    """The one GGUF file that a package ships, which is installed or was fetched."""
    package = model.package
    if package is None:
        raise ConfigError(
            "model.package=null: model.source=gguf requires the name of the package that contains"
            " the GGUF file"
        )
    directory = package_directory(package)
    if directory is None:
        raise ConfigError(
            f"model.package={package}: the package is not installed; fetch it with `aligner fetch"
            f" {package.replace('_', '-')}`"
        )
    files = sorted(directory.rglob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(
            f"model.package={package}: expected one .gguf file in the package, found {len(files)}"
        )
    return files[0]


def model_directory(config: Config) -> Path:
    """The Hugging Face directory that every role reads its initial weights and tokenizer from.

    For source=directory it is the user's; for the other sources `aligner prepare` makes it before
    the roles start.
    """
    model = config.model
    if model.source == "random":
        return run_paths(config).initial_model
    if model.source == "gguf":
        file, package = gguf_file(model), str(model.package)
        return cache_directory() / "models" / f"{package}-{package_version(package)}-{file.stem}"
    return _given_directory(model)


def _given_directory(model: ModelConfig) -> Path:
    if model.path is None:
        raise ConfigError(
            "model.path=null: model.source=directory requires a Hugging Face model directory"
        )
    return Path(model.path)


def reward_shapes(
    config: Config, expected: ExpectedInputs = NOTHING_EXPECTED
) -> dict[ModelSource, ModelShape]:
    """The models that score, with their shapes. Raises ConfigError for one that is not there."""
    sources = model_sources(reward_sources(config.reward)) if config.algorithm.generates else ()
    return {
        source: directory_shape(Path(source.path), f"{source.key}.path", expected)
        for source in sources
    }


def teacher_shapes(
    config: Config, policy: ModelShape, expected: ExpectedInputs = NOTHING_EXPECTED
) -> dict[TeacherSource, ModelShape]:
    """The models that teach, with their shapes. Raises ConfigError for one that is not there."""
    sources = teacher_sources(config.teacher) if config.has_teacher else ()
    return {source: teacher_shape(config, source, policy, expected) for source in sources}


def teacher_shape(
    config: Config, source: TeacherSource, policy: ModelShape, expected: ExpectedInputs
) -> ModelShape:
    """A teacher's shape: the policy's own initial model may be one, also while its directory is
    still to be made.

    Raises ConfigError where there is no such model.
    """
    path = Path(source.path)
    return (
        policy
        if path == model_directory(config)
        else directory_shape(path, f"{source.key}.path", expected)
    )


def read_normalization(directory: Path) -> tuple[float, float]:
    """What a reward model's rewards are multiplied by, and what is added then: its gain and bias; 1
    and 0 without a file.

    Raises ConfigError, which names the file and what it must hold, for anything else in it.
    """
    file = directory / NORMALIZATION
    if not file.exists():
        return 1.0, 0.0
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    if (
        not isinstance(content, dict)
        or content.keys() != {"gain", "bias"}
        or not all(map(is_finite_number, content.values()))
    ):
        shown = json.dumps(content)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        raise ConfigError(
            f'{file}: must contain {{"gain": NUMBER, "bias": NUMBER}} with finite numbers,'
            f" got {shown}"
        )
    if content["gain"] <= 0:
        raise ConfigError(f"{file}: gain={content['gain']}: must be above 0")
    return float(content["gain"]), float(content["bias"])


def absent_inputs(config: Config) -> ExpectedInputs:
    """The paths that are named and not there: models with the shapes that `model.config` and
    `reward.config` describe, the critic's with the policy's, and the data of a run whose policy is
    one of them.

    They are enough to check a run and its layout; to start it all of them must be there.
    """
    likewise = config.model.config if config.model.source == "directory" else {}
    policy = _absent_model("model", config.model.path, likewise)
    critic = (
        _absent_model("model", config.critic.path, likewise) if config.algorithm.has_critic else {}
    )
    return {**policy, **critic, **_reward_model(config), **(_absent_data(config) if policy else {})}


def _reward_model(config: Config) -> dict[str, ModelShape]:
    """What `reward.config` does not say is as `model.config` describes the policy."""
    if config.reward.kind != "model":
        return {}
    likewise = config.model.config if config.model.source == "directory" else {}
    return _absent_model("reward", config.reward.path, {**likewise, **config.reward.config})


def _absent_model(key: str, path: str | None, entries: Mapping[str, Any]) -> dict[str, ModelShape]:
    if path is None or not entries or Path(path).exists():
        return {}
    return {str(Path(path)): read_described_config(entries, f"{key}.config")}


def _absent_data(config: Config) -> dict[str, None]:
    paths = [
        path for key, path in read_paths(config).items() if key.startswith(("data.", "evaluation."))
    ]
    return {
        str(Path(path)): None
        for path in paths
        if not path.startswith(FUNCTION) and not Path(path).exists()
    }
