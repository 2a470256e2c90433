"""From command-line overrides to a validated `Config`, and to and from a run's `config.yaml`."""

import dataclasses
import functools
import os
import pickle
import re
import shlex
import typing
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from aligner.config.conf_files import (
    ConfSource,
    defining_option,
    group_directories,
    group_options,
    option_values,
    read_yaml,
    report_old_key,
)
from aligner.config.overrides import check_read, current_values, given_keys, parse_override
from aligner.errors import ConfigError
from aligner.files import write_file
from aligner.schema import Config
from aligner.schema.key_validation import InvalidKeys, KeyProblem, section_line, validated
from aligner.schema.keys import MASK, check_key, known_key, schema_keys, unmet, value_at
from aligner.schema.renamed import with_current_keys

AUTOMATIC = "automatic"
"""The root of a run without an experiment, and its name."""
_WITHOUT_EXPERIMENT = (
    "without an experiment, set your own model, data and reward: model.path=DIRECTORY_OR_NAME"
    " algorithm=grpo data.path=FILE reward.function=NAME"
)
_HYDRAS_OWN_GROUPS = [
    f"~hydra/{group}"
    for group in ("launcher", "sweeper", "help", "hydra_help", "hydra_logging", "job_logging")
]
"""Groups of Hydra's command line, without which a composition takes a sixth less time."""


def compose_config(overrides: Sequence[str], config_directory: Path | None = None) -> Config:
    """The configuration of a run from `experiment=NAME`, or a model and data of the user's own, and
    further overrides.

    `config_directory` holds the user's own groups (`experiment/mine.yaml`), beside the built-in
    ones. With `run.automatic` the keys that nobody gives are still to be chosen:
    `aligner.config.defaults`. Raises ConfigError for whatever is unknown, of the wrong type or
    missing, and for overrides that the run does not read.
    """
    directories = group_directories(config_directory)
    options = group_options(directories)
    parsed = [parse_override(text, options) for text in overrides]
    keys = {override.key_or_group for override in parsed}
    experiment = next(
        (str(entry.value()) for entry in reversed(parsed) if entry.key_or_group == "experiment"),
        AUTOMATIC,
    )
    if "experiment" not in keys and not keys & {"model", "model.path"}:
        raise ConfigError(
            f"experiment=NAME is missing; experiments: {', '.join(options['experiment'])};"
            f" {_WITHOUT_EXPERIMENT}"
        )
    root = "config" if "experiment" in keys else AUTOMATIC
    config = _compose(root, parsed, directories, options)
    check_read(config, parsed, options, directories)
    if (
        "experiment" not in keys
        and config.algorithm.generates
        and not any(key.startswith("reward") for key in keys)
    ):
        raise ConfigError(
            "reward.function=NAME is missing: a run without an experiment requires a reward;"
            " docs/rewards.md lists the other reward sources"
        )
    config = _with_engine_replicas(_with_names(config, experiment))
    return dataclasses.replace(
        config, run=dataclasses.replace(config.run, command=_command(overrides, config_directory))
    )


def keys_given(
    overrides: Sequence[str], config: Config, config_directory: Path | None = None
) -> frozenset[str]:
    """The keys to which the command line of a composed configuration, or its experiment, gives
    values."""
    directories = group_directories(config_directory)
    options = group_options(directories)
    return given_keys(
        [parse_override(text, options) for text in overrides],
        options,
        directories,
        config.run.experiment,
    )


def unread_notes(config: Config, config_directory: Path | None = None) -> list[str]:
    """A line for each reason for which the run does not read keys that its experiment's file
    sets."""
    found: dict[str, list[str]] = {}
    directories = group_directories(config_directory)
    for key in option_values(directories, "experiment", config.run.experiment):
        known = schema_keys()[key]
        if value_at(config, key) != known.default and (terms := unmet(config, known.read)):
            found.setdefault(current_values(config, terms), []).append(key)
    return [f"{', '.join(keys)}: has no effect with {why}" for why, keys in found.items()]


def _command(overrides: Sequence[str], config_directory: Path | None) -> str:
    """What launches the same again, but for which run directory and whether it goes on there."""
    groups = () if config_directory is None else ("--config-dir", str(config_directory))
    kept = (
        _masked(text)
        for text in overrides
        if text.partition("=")[0] not in ("run.dir", "run.resume")
    )
    return shlex.join(("aligner", "launch", *groups, *kept))


def _masked(override: str) -> str:
    """An override without the values of environment variables: the command is shown, and told to
    trackers."""
    key = override.partition("=")[0]
    is_secret = key.lstrip("+").startswith("cluster") and "environment" in override
    return f"{key}={MASK}" if is_secret else override


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration as YAML, atomically."""
    write_file(path, config_text(dataclasses.asdict(config)))


def config_text(values: Mapping[str, Any]) -> str:
    """A configuration, nested, as YAML."""
    return yaml.safe_dump(_escaped(values), sort_keys=False, allow_unicode=True)


def load_config(path: Path) -> Config:
    """Read a run's `config.yaml`. Raises ConfigError if it is missing or not valid."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such configuration file")
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: the configuration must be a mapping of keys to values")
    try:
        return _validated(OmegaConf.create(with_current_keys(values)))
    except (ConfigError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {_explain(error)}") from error


def _compose(
    root: str, overrides: Sequence[Override], directories: Sequence[Path], groups: Collection[str]
) -> Config:
    """Return the validated composition of a root, of the options of groups and of overrides."""
    named = [override for override in overrides if override.key_or_group in groups]
    options = [override for override in named if not isinstance(override.value(), dict)]
    changes = [override for override in overrides if override not in options]
    chosen = tuple(str(override.input_line) for override in options)
    # The files of a user may change during the lifetime of this process.
    composed = _composed if len(directories) == 1 else _composed.__wrapped__
    typed = " ".join(str(override.input_line) for override in named)
    try:
        node, choices = pickle.loads(composed(root, chosen, tuple(directories)))
        for override in changes:
            _apply(override, node)
        return _validated(node)
    except InvalidKeys as error:
        keys = [override.key_or_group for override in changes]
        lines = [_line(problem, keys, choices, directories) for problem in error.problems]
        raise ConfigError("\n".join(lines)) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error)) from error
    # Hydra does not say in which file these errors are.
    except RecursionError as error:
        raise ConfigError(f"{typed}: circular defaults, or keys nested too deeply") from error
    except (ValueError, OSError) as error:
        raise ConfigError(f"{typed}: {_explain(error)}") from error


@functools.lru_cache(512)
def _composed(root: str, options: tuple[str, ...], directories: tuple[Path, ...]) -> bytes:
    """Return the composition of a root and options of groups on top of the schema's defaults, and
    the chosen option of each group.

    Both are pickled, which is the fastest way to copy them.
    """
    Plugins.instance().register(ConfSource)
    # Hydra looks for the root before it has the search path.
    ConfigStore.instance().store(name=root, node=read_yaml(directories[0] / f"{root}.yaml"))
    search_path = ",".join(_quoted(f"{ConfSource.scheme()}://{path}") for path in directories)
    overrides = [f"hydra.searchpath=[{search_path}]", *_HYDRAS_OWN_GROUPS, *options]
    GlobalHydra.instance().clear()
    with initialize(config_path=None, version_base="1.3"):
        composed = compose(root, overrides=overrides, return_hydra_config=True)
    with open_dict(composed):
        hydra = composed.pop("hydra")

    choices = {str(group): name for group, name in hydra.runtime.choices.items() if name}
    node = OmegaConf.unsafe_merge(pickle.loads(_defaults()), composed)
    OmegaConf.set_struct(node, True)  # a mapping gets new entries only with +KEY=VALUE
    return pickle.dumps((node, choices))


@functools.cache
def _defaults() -> bytes:
    return pickle.dumps(OmegaConf.create(dataclasses.asdict(Config())))


def _quoted(text: str) -> str:
    """Return a text as a quoted value of Hydra's override grammar."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _apply(override: Override, node: DictConfig) -> None:
    """Change a composition as an override says."""
    key, value = override.key_or_group, override.value()
    if known_key(key) is None:
        if not isinstance(value, dict):
            raise ConfigError(section_line(key, value))
        value = with_current_keys(value, key, report_old_key)
    is_new = override.is_add() or override.is_force_add()
    OmegaConf.update(node, key, value, merge=True, force_add=is_new)


def _validated(node: DictConfig) -> Config:
    values = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    return validated(typing.cast(dict[str, Any], values))


def _line(
    problem: KeyProblem,
    overridden: Sequence[str],
    choices: Mapping[str, str],
    directories: Sequence[Path],
) -> str:
    """Return the line of a problem, with the file that sets the key unless an override does."""
    key = problem.key
    experiment = choices.get("experiment")
    if key.partition(".")[0] == "experiment":
        return (
            "the first line must be `# @package _global_`, followed by the keys (in"
            f" experiment/{experiment}.yaml)"
        )
    if any(key == name or key.startswith(f"{name}.") for name in overridden):
        return problem.line
    # The keys of an experiment take precedence over those of the groups.
    ordered = {group: name for group, name in choices.items() if group != "experiment"}
    if experiment is not None:
        ordered["experiment"] = experiment
    option = defining_option(directories, key, ordered)
    return problem.line if option is None else f"{problem.line} (in {option}.yaml)"


def _explain(error: BaseException) -> str:
    """Return one line about an error of Hydra, OmegaConf or a validation."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OmegaConfBaseException) and cause.full_key:
            return _explain_key(cause)
        cause = cause.__cause__ or cause.__context__
    where = ""
    message = str(error).partition("Config search path")[0]
    if isinstance(error, ConfigCompositionException) and (
        file := re.match(r"In '([^']+)': (\w+ raised while composing config:)?", message)
    ):
        where = f" (in {file[1]}.yaml)"
        message = message.removeprefix(file[0])
    return " ".join(message.split()) + where


def _explain_key(error: OmegaConfBaseException) -> str:
    """Return one line about an error of OmegaConf at a key."""
    key = str(error.full_key)
    message = str(error).partition("\n")[0]
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)):
        try:
            check_key(key)
        except ConfigError as unknown:
            return str(unknown)
        return f"{key}: no such entry; add it with +{key}=VALUE"
    if isinstance(error, InterpolationResolutionError):
        return f"{key}: {message}; write a literal ${{ as \\${{"
    if isinstance(error, MissingMandatoryValue):
        return f"{key}=???: requires a value; set {key}=VALUE"
    return f"{key}: {message}"


def default_name(experiment: str = AUTOMATIC) -> str:
    """A run's name where nobody gives one."""
    return f"{experiment}-{datetime.now():%Y%m%d-%H%M%S}"


def _with_names(config: Config, experiment: str) -> Config:
    """Fill in the names that depend on the command line and the clock."""
    run = config.run
    if run.resumes and run.name is None and run.dir is None:
        raise ConfigError(
            f"run.resume={run.resume}: requires the directory or name of the run to resume; set"
            " run.dir=DIRECTORY or run.name=NAME"
        )
    started = _started_name(Path(run.dir or Path("runs") / str(run.name))) if run.resumes else None
    if started and run.name not in (None, started):
        raise ConfigError(
            f"run.name={run.name}: the run to resume is named {started}; remove run.name and set"
            " run.dir"
        )
    name = run.name or started or _directory_name(run.dir) or default_name(experiment)
    if not re.fullmatch(r"[\w.+=-]+", name) or name in (".", ".."):
        raise ConfigError(f"run.name={name}: must consist of letters, digits and . _ - + =")
    directory = os.path.abspath(run.dir or Path("runs") / name)  # noqa: PTH100 - Path.resolve would follow links
    if unusable := next((c for c in directory if c in "\0\n\r" or "\ud800" <= c <= "\udfff"), None):
        raise ConfigError(
            f"run.dir={directory!r}: must not contain the character {unusable!r}; choose another"
            " directory"
        )
    named = dataclasses.replace(run, experiment=experiment, name=name, dir=directory)
    return dataclasses.replace(config, run=named)


def _directory_name(directory: str | None) -> str:
    """Return a run's name from its directory's, with `_` in place of characters that a name cannot
    have; empty if there is no such name."""
    name = re.sub(r"[^\w.+=-]+", "_", Path(directory or "").name)
    return "" if name in (".", "..") else name


def _started_name(directory: Path) -> str | None:
    """The name that the run in a directory was started with: its servers know it by that, wherever
    the directory is now."""
    file = directory / "config.yaml"
    if not file.is_file():
        return None
    try:
        return str(read_yaml(file)["run"]["name"])
    except (ConfigError, LookupError, TypeError) as error:
        raise ConfigError(f"{file}: not the configuration of a run: {error}") from error


def _with_engine_replicas(config: Config) -> Config:
    """Where engine.parallel.data is 0: as many replicas as fill the trainer's ranks."""
    engine = config.engine
    if engine.parallel.data != 0:
        return config
    replicas = max(1, config.actor.parallel.ranks // max(1, engine.parallel.tensor))
    filled = dataclasses.replace(
        engine, parallel=dataclasses.replace(engine.parallel, data=replicas)
    )
    return dataclasses.replace(config, engine=filled)


def _escaped(value: Any) -> Any:
    """The value with `${` in its strings kept from being read back as an interpolation."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, dict):
        return {key: _escaped(entry) for key, entry in value.items()}
    return [_escaped(entry) for entry in value] if isinstance(value, list) else value
