"""Where the models of a run come from, their shapes and a reward model's normalization, known
before any weight is read."""

import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from aligner.errors import AlignerError, ConfigError
from aligner.files import finish_directory, start_directory
from aligner.models.families import SCALAR_HEAD
from aligner.models.hugging_face import (
    config_notes,
    hugging_face_config,
    read_config,
    read_described_config,
    with_architecture,
)
from aligner.models.shape import ModelShape
from aligner.models.vocabulary import with_all_end_tokens
from aligner.models.weight_headers import (
    gguf_shape,
    has_weights,
    tied_head_problems,
    weight_problems,
)
from aligner.models.weight_slices import weight_table
from aligner.paths import cache_directory, run_paths
from aligner.schema import Config, ModelConfig
from aligner.schema.data_sources import FUNCTION
from aligner.schema.options import is_finite_number
from aligner.schema.references import map_paths, read_paths
from aligner.schema.reward_sources import ModelSource, model_sources, reward_sources
from aligner.schema.teacher_sources import TeacherSource, teacher_sources

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


_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_SMALL = ["*.json", "*.jinja", "merges.txt"]
_WEIGHTS = "*.safetensors"
_WAIT_S = 10.0


def with_found_models(config: Config, *, weights: bool) -> Config:
    """The configuration with directories of the cache instead of names such as `Qwen/Qwen3-0.6B`.

    Without `weights` a model whose weights are not there is found too: enough to check a run. A
    directory of that name, or a described model (`model.config`) that is still to come, stays as it
    is. Raises ConfigError as `find_model` does.
    """

    def found(key: str, path: str) -> str:
        section = key.partition(".")[0]
        is_model = key.endswith(".path") and section in ("model", "critic", "reward", "teacher")
        if not is_model or Path(path).exists() or not _NAME.fullmatch(path):
            return path
        is_reward = section == "reward" or (
            config.reward.kind == "model" and path == config.reward.path
        )
        described = (
            {}
            if section == "teacher"
            else config.model.config or (config.reward.config if is_reward else {})
        )
        return path if described else str(find_model(path, key, weights=weights))

    return map_paths(config, found)


def find_model(name: str, key: str, *, weights: bool = True) -> Path:
    """The directory in the Hugging Face cache of the model `name`; what is missing there is
    downloaded.

    `key` is the configuration key that names it. Raises ConfigError where there is no such model,
    or no way to it.
    """
    # A fifth of a second, for those who name a model.
    from huggingface_hub import constants, snapshot_download

    patterns = [*_SMALL, _WEIGHTS] if weights else _SMALL
    why = "the cached files lack config.json, tokenizer.json" + (
        " or .safetensors files" if weights else ""
    )
    for settings in (
        {"local_files_only": True},
        {"allow_patterns": patterns, "etag_timeout": _WAIT_S},
    ):
        try:
            # Without a network the second gives what the cache has of it.
            directory = Path(snapshot_download(name, **settings))
            if _is_whole(directory, weights):
                return directory
        # Whatever its HTTP client raises: no network, no such model, no right to it, a full disk.
        except Exception as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
    raise ConfigError(
        f"{key}={name}: is not a directory, is not complete in the Hugging Face cache"
        f" ({constants.HF_HUB_CACHE}), and could not be downloaded: {why}; run `hf download"
        f" {name}` on a machine with network access. Then copy the printed directory to this"
        f" machine and set {key}=DIRECTORY, or copy the full cache and set HF_HUB_CACHE to the"
        " copy"
    )


def _is_whole(directory: Path, weights: bool) -> bool:
    """Whether a snapshot has a configuration and a tokenizer and, if they are wanted, all files of
    weights."""
    tokenizers = ({"tokenizer.json"}, {"vocab.json", "merges.txt"})
    has_tokenizer = any(all((directory / name).is_file() for name in set_) for set_ in tokenizers)
    if not (directory / "config.json").is_file() or not has_tokenizer:
        return False
    index = directory / "model.safetensors.index.json"
    if not weights or not index.is_file():
        return not weights or (directory / "model.safetensors").is_file()
    try:
        files = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, LookupError, AttributeError):
        return False
    return all((directory / str(file)).is_file() for file in files)


_REQUIREMENT = re.compile(r"([A-Za-z0-9][\w.-]*)(==[\w.+!-]+)?")


def package_directory(package: str) -> Path | None:
    """Where the files of an importable package are, installed or fetched; None where it is
    neither."""
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0])
    found = (
        directory
        for directory in _fetched().glob(f"*/{package}")
        if "." not in directory.parent.name
    )
    return next(found, None)  # the names of what is still being fetched have dots


def package_version(package: str) -> str:
    """The version of a package that `package_directory` finds."""
    directory = package_directory(package)
    if directory is not None and _fetched() in directory.parents:
        return next(iter(metadata.distributions(path=[str(directory.parent)]))).version
    return metadata.version(metadata.packages_distributions()[package][0])


def fetch_package(requirement: str) -> Path:
    """Fetch a package, `NAME` or `NAME==VERSION`, without what it depends on; returns where it is
    unpacked.

    None of its code is run, and it replaces one that was fetched before. Raises ConfigError for
    another requirement, and AlignerError with what pip, or uv where there is no pip, says.
    """
    named = _REQUIREMENT.fullmatch(requirement)
    if named is None:
        raise ConfigError(f"{requirement}: must be a package NAME or NAME==VERSION")
    target = _fetched() / re.sub(r"[-_.]+", "_", named[1].lower())
    started = start_directory(target)
    command = [
        *_installer(),
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--target",
        str(started),
        requirement,
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        shutil.rmtree(started)
        raise AlignerError(
            f"{requirement}: could not be fetched:"
            f" {done.stderr.strip() or f'exit code {done.returncode}'}"
        )
    finish_directory(started, target)
    return target


def _installer() -> list[str]:
    """The environments that uv makes have no pip, and uv names itself to what it runs."""
    # Not find_spec, of which setuptools' own finder concludes that this process is pip.
    if next(iter(metadata.distributions(name="pip")), None) is not None:
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        raise ConfigError("fetching a package requires pip or uv; install one of them")
    return [uv, "pip", "install", "--python", sys.executable]


def _fetched() -> Path:
    return cache_directory().absolute() / "packages"


@dataclass(frozen=True)
class _StoredModel:
    """A model directory that a run reads."""

    key: str
    """Configuration key that names the directory."""
    directory: Path
    use: Literal["language", "reward", "critic"]


def weight_file_problems(config: Config, expected: ExpectedInputs) -> Iterator[str]:
    """Yield damaged weight files and indexes, and tensors that do not match config.json.

    A directory without weight files is skipped: a configuration can be checked before the weights
    are downloaded, and the run's preparation refuses such a directory. The sections of the
    configuration report a config.json that cannot be read.
    """
    for model in _stored_models(config, expected):
        if not has_weights(model.directory):
            continue
        try:
            problems = _file_problems(model)
        except ConfigError as error:
            problems = [str(error)]
        for problem in problems:
            yield f"{model.key}={model.directory}: {problem}"


def stored_model_notes(config: Config, expected: ExpectedInputs) -> Iterator[str]:
    """Yield the notes of `config_notes` about each model directory that the run reads, and about
    the description of a random model."""
    if config.model.source == "random":
        for note in config_notes(config.model.config):
            yield f"model.config: {note}"
    for model in _stored_models(config, expected):
        for note in config_notes(directory_config(model.directory, model.key)):
            yield f"{model.key}={model.directory}: {note}"


def _file_problems(model: _StoredModel) -> list[str]:
    shape = directory_shape(model.directory, model.key)
    if model.use == "reward":
        return weight_problems(model.directory, weight_table(shape, "scalar"))
    if model.use == "critic":
        # It is trained: its head may be new, and another head may be left in the files.
        table = weight_table(shape, "scalar")
        return weight_problems(model.directory, table, optional=(SCALAR_HEAD.name,), partial=True)
    problems = weight_problems(model.directory, weight_table(shape))
    return problems + tied_head_problems(model.directory, shape)


def _stored_models(config: Config, expected: ExpectedInputs) -> Iterator[_StoredModel]:
    """Yield the models whose directories exist and have a supported config.json, each directory
    once per use."""
    seen = set()
    for model in _named_models(config):
        if str(model.directory) in expected or (model.directory, model.use) in seen:
            continue
        seen.add((model.directory, model.use))
        try:
            directory_shape(model.directory, model.key)
        except ConfigError:  # the section of the key reports it
            continue
        yield model


def _named_models(config: Config) -> Iterator[_StoredModel]:
    if config.model.source == "directory" and config.model.path is not None:
        yield _StoredModel("model.path", Path(config.model.path), "language")
    if config.algorithm.has_critic and config.critic.path is not None:
        yield _StoredModel("critic.path", Path(config.critic.path), "critic")
    try:
        rewards = reward_sources(config.reward) if config.algorithm.generates else ()
        teachers = teacher_sources(config.teacher) if config.has_teacher else ()
    except ConfigError:  # their sections report it
        return
    for source in model_sources(rewards):
        yield _StoredModel(f"{source.key}.path", Path(source.path), "reward")
    for teacher in teachers:
        yield _StoredModel(f"{teacher.key}.path", Path(teacher.path), "language")
