"""Composition, loading and saving of configurations.

`compose_config` turns command-line overrides into a validated `Config`. `save_config` writes the
`config.yaml` of a run, and `load_config` reads it.
"""

import dataclasses
import functools
import os
import pickle
import re
import shlex
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
    find_built_in_directory,
    find_config_sources,
    find_defining_file,
    list_group_options,
    read_option_values,
    read_yaml,
    report_old_key,
)
from aligner.config.environment_values import (
    escape_interpolations,
    find_literal_secrets,
    resolve_with_references,
    unresolve_values,
    with_environment_texts,
)
from aligner.config.overrides import (
    check_read,
    collect_user_keys,
    format_current_values,
    parse_override,
)
from aligner.errors import ConfigError
from aligner.files import write_file
from aligner.masking import MASK, mask_secrets
from aligner.schema import Config
from aligner.schema.environment_text import Reference, has_references, with_references
from aligner.schema.key_validation import (
    InvalidKeys,
    KeyProblem,
    format_section_error,
    validate_config,
)
from aligner.schema.keys import (
    check_key,
    find_schema_key,
    find_unmet_terms,
    get_schema_keys,
    get_value,
)
from aligner.schema.renamed import with_current_keys, without_removed_keys

AUTOMATIC = "automatic"
"""Root file of a run without an experiment, and the experiment name of such a run."""
_WITHOUT_EXPERIMENT = (
    "without an experiment, set your own model, data and reward: model.path=DIRECTORY_OR_NAME"
    " algorithm=grpo data.path=FILE reward.function=NAME"
)
# Hydra's groups for its own command line. A composition without them is one sixth faster.
_REMOVED_HYDRA_GROUPS = [
    f"~hydra/{group}"
    for group in ("launcher", "sweeper", "help", "hydra_help", "hydra_logging", "job_logging")
]


def compose_config(
    overrides: Sequence[str],
    config_directory: Path | None = None,
    config_file: Path | None = None,
    *,
    is_partial: bool = False,
) -> Config:
    """Compose and validate the configuration of a run.

    With `run.automatic`, `aligner.config.defaults` must still choose the values of the keys that
    the user did not set.

    Args:
        overrides: Overrides of the command line: `experiment=NAME`, or the user's own model and
            data, and further `key=value` overrides.
        config_directory: Directory of the user's own groups, such as `experiment/mine.yaml`, in
            addition to the built-in groups.
        config_file: File of the experiment, instead of `experiment=NAME`.
        is_partial: Whether the model and the reward may be missing, for commands that only read
            data.

    Raises:
        ConfigError: A key or a group option is unknown, has a value of the wrong type, or is
            missing; or the run does not read a key that an override sets.

    Example:
        `compose_config(["experiment=arithmetic", "run.steps=10"])`
    """
    sources = find_config_sources(config_directory, config_file)
    options = list_group_options(sources)
    parsed_overrides = [parse_override(text, options) for text in overrides]
    if config_file is not None:
        if any(override.key_or_group == "experiment" for override in parsed_overrides):
            raise ConfigError(
                f"--config {config_file}: cannot be combined with experiment=NAME; the file may"
                " name the experiment in its `defaults` list"
            )
        experiment_override = f"experiment={quote(config_file.stem)}"
        parsed_overrides.insert(0, parse_override(experiment_override, options))
    keys = {override.key_or_group for override in parsed_overrides}
    # As in Hydra, the last override of the same group wins.
    experiment = next(
        (
            str(entry.value())
            for entry in reversed(parsed_overrides)
            if entry.key_or_group == "experiment"
        ),
        AUTOMATIC,
    )
    if "experiment" not in keys and not is_partial and not keys & {"model", "model.path"}:
        raise ConfigError(
            f"experiment=NAME is missing; experiments: {', '.join(options['experiment'])};"
            f" {_WITHOUT_EXPERIMENT}"
        )

    root = "config" if "experiment" in keys else AUTOMATIC
    config = _compose(root, parsed_overrides, sources, options)
    if secret_lines := list(find_literal_secrets(config)):
        raise ConfigError("\n".join(secret_lines))
    check_read(config, parsed_overrides, options, sources)
    if (
        "experiment" not in keys
        and not is_partial
        and config.algorithm.generates_samples
        and not any(key.startswith("reward") for key in keys)
    ):
        raise ConfigError(
            "reward.function=NAME is missing: a run without an experiment requires a reward;"
            " docs/rewards.md lists the other reward sources"
        )

    config = _with_engine_replicas(_with_names(config, experiment))
    return dataclasses.replace(
        config,
        run=dataclasses.replace(
            config.run, command=_format_command(overrides, config_directory, config_file)
        ),
    )


def find_user_keys(
    overrides: Sequence[str],
    config: Config,
    config_directory: Path | None = None,
    config_file: Path | None = None,
) -> frozenset[str]:
    """Return the keys that the command line or the experiment sets in a composed configuration."""
    sources = find_config_sources(config_directory, config_file)
    options = list_group_options(sources)
    return collect_user_keys(
        [parse_override(text, options) for text in overrides],
        options,
        sources,
        config.run.experiment,
    )


def describe_unread_keys(
    config: Config, config_directory: Path | None = None, config_file: Path | None = None
) -> list[str]:
    """Return notes about the keys that the experiment's file sets, but that the run does not read.

    Keys with the same reason share a line.
    """
    keys_by_reason: dict[str, list[str]] = {}
    sources = find_config_sources(config_directory, config_file)
    for key in read_option_values(sources, "experiment", config.run.experiment):
        schema_key = get_schema_keys()[key]
        if get_value(config, key) != schema_key.default and (
            terms := find_unmet_terms(config, schema_key.condition)
        ):
            keys_by_reason.setdefault(format_current_values(config, terms), []).append(key)
    return [
        f"{', '.join(keys)}: has no effect with {reason}" for reason, keys in keys_by_reason.items()
    ]


def _format_command(
    overrides: Sequence[str], config_directory: Path | None, config_file: Path | None
) -> str:
    """Return the command that launches the same run again.

    The command contains neither `run.dir` nor `run.resume`. Secret values are masked.
    """
    options = list_config_options(config_directory, config_file)
    repeated_overrides = (
        mask_override(text)
        for text in overrides
        if text.partition("=")[0] not in ("run.dir", "run.resume")
    )
    return shlex.join(("aligner", "launch", *options, *repeated_overrides))


def list_config_options(config_directory: Path | None, config_file: Path | None) -> list[str]:
    """Return the options of the command line for a directory of groups and an experiment's file."""
    options: list[str] = []
    if config_directory is not None:
        options += ["--config-dir", str(config_directory)]
    if config_file is not None:
        options += ["--config", str(config_file)]
    return options


def mask_override(override: str) -> str:
    """Return an override without the values of environment variables and other secrets.

    The command is displayed and sent to the trackers.
    """
    key = override.partition("=")[0]
    # The whole override is searched: `cluster.slurm={environment: {…}}` has the values inside.
    is_secret = key.lstrip("+").startswith("cluster") and "environment" in override
    return f"{key}={MASK}" if is_secret else mask_secrets(override)


def save_config(config: Config, path: Path) -> None:
    """Write a configuration as YAML, atomically.

    The file contains `${oc.env:NAME}` instead of the values of environment variables.
    """
    write_file(path, format_config(dataclasses.asdict(config)))


def format_config(values: Mapping[str, Any]) -> str:
    """Return the nested values of a configuration as YAML.

    The only interpolations are those of environment variables.
    """
    return yaml.safe_dump(_escape(with_references(values)), sort_keys=False, allow_unicode=True)


def load_config(path: Path) -> Config:
    """Read the `config.yaml` of a run, which may use old names of keys, to display or compare it.

    Interpolations of environment variables are not resolved, because the file may belong to the
    run of another user: the configuration contains them as text (`Reference`).

    Raises:
        ConfigError: The file is missing or not valid.
    """
    values = _read_stored_values(path)
    try:
        unresolved = unresolve_values(values)
        return with_environment_texts(validate_config(unresolved), unresolved)
    except ConfigError as error:
        raise ConfigError(f"{path}: {_explain(error)}") from error


def load_own_config(path: Path) -> Config:
    """Read the `config.yaml` of a run that this process executes, with its environment variables.

    Raises:
        ConfigError: The file is missing or not valid, an environment variable is not set, or the
            file has environment variables and belongs to another user.
    """
    values = _read_stored_values(path)
    if has_references(unresolve_values(values)) and (owner := path.stat().st_uid) != os.geteuid():
        raise ConfigError(
            f"{path}: contains environment variables and belongs to the user with the id {owner};"
            " only a launch of the owner resolves them"
        )
    try:
        return _resolve_and_validate(OmegaConf.create(values))
    except (ConfigError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {_explain(error)}") from error


def _read_stored_values(path: Path) -> dict[str, Any]:
    """Return the nested values of a stored configuration, with the current names of the keys."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such configuration file")
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: the configuration must be a mapping of keys to values")
    try:
        return without_removed_keys(with_current_keys(values))
    except ConfigError as error:
        raise ConfigError(f"{path}: {_explain(error)}") from error


def _compose(
    root: str,
    overrides: Sequence[Override],
    sources: Sequence[Path],
    group_names: Collection[str],
) -> Config:
    """Compose and validate a root file, options of groups, and overrides of keys.

    Args:
        root: Name of the root file in the built-in directory, without `.yaml`.
        overrides: Parsed overrides of the command line.
        sources: Sources of the configuration, see `find_config_sources`.
        group_names: Names of all groups.

    Raises:
        ConfigError: The composition fails or is not valid.
    """
    group_overrides = [override for override in overrides if override.key_or_group in group_names]
    # `group={...}` changes keys of a section that has the name of a group; it chooses no option.
    options = [override for override in group_overrides if not isinstance(override.value(), dict)]
    changes = [override for override in overrides if override not in options]
    option_texts = tuple(str(override.input_line) for override in options)

    # Overrides of keys are not part of the cached composition, so that runs with the same options
    # share it. They are applied to the caller's own copy of the node below.
    # The user's files may change during the lifetime of this process, so that a composition with
    # these files must not come from the cache.
    compose_options = _compose_options if len(sources) == 1 else _compose_options.__wrapped__
    command_line_text = " ".join(str(override.input_line) for override in group_overrides)

    try:
        node, choices = pickle.loads(compose_options(root, option_texts, tuple(sources)))
        for override in changes:
            _apply(override, node)
        return _resolve_and_validate(node)
    except InvalidKeys as error:
        keys = [override.key_or_group for override in changes]
        lines = [_format_problem(problem, keys, choices, sources) for problem in error.problems]
        raise ConfigError("\n".join(lines)) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error)) from error
    # Hydra does not say in which file these errors are.
    except RecursionError as error:
        raise ConfigError(
            f"{command_line_text}: circular defaults, or keys nested too deeply"
        ) from error
    except (ValueError, OSError) as error:
        raise ConfigError(f"{command_line_text}: {_explain(error)}") from error


@functools.lru_cache(512)
def _compose_options(root: str, options: tuple[str, ...], sources: tuple[Path, ...]) -> bytes:
    """Compose a root file and options of groups on top of the schema's defaults.

    Returns:
        The pickled pair of the composed node and the chosen option of each group. Each caller
        needs its own copy, and unpickling is the fastest way to copy a node.
    """
    Plugins.instance().register(ConfSource)
    # Hydra looks for the root before it sets up the search path, so the root must be in the store.
    ConfigStore.instance().store(
        name=root, node=read_yaml(find_built_in_directory() / f"{root}.yaml")
    )
    search_path = ",".join(quote(f"{ConfSource.scheme()}://{path}") for path in sources)
    overrides = [f"hydra.searchpath=[{search_path}]", *_REMOVED_HYDRA_GROUPS, *options]
    # initialize() raises if Hydra is still initialized, as in the program of a user of the API.
    GlobalHydra.instance().clear()
    with initialize(config_path=None, version_base="1.3"):
        composed_node = compose(root, overrides=overrides, return_hydra_config=True)
    with open_dict(composed_node):
        hydra = composed_node.pop("hydra")

    choices = {str(group): name for group, name in hydra.runtime.choices.items() if name}
    node = OmegaConf.unsafe_merge(pickle.loads(_pickle_defaults()), composed_node)
    OmegaConf.set_struct(node, True)  # a mapping gets new entries only with +KEY=VALUE
    return pickle.dumps((node, choices))


@functools.cache
def _pickle_defaults() -> bytes:
    """Return the schema's default configuration as a pickled node."""
    return pickle.dumps(OmegaConf.create(dataclasses.asdict(Config())))


def quote(text: str) -> str:
    """Return a text as a quoted value of Hydra's override grammar."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _apply(override: Override, node: DictConfig) -> None:
    """Apply an override of a key or of a section to a composed node, in place.

    Raises:
        ConfigError: The override sets a section to a value that is not a mapping.
    """
    key = override.key_or_group
    value = override.value()
    if find_schema_key(key) is None:
        if not isinstance(value, dict):
            raise ConfigError(format_section_error(key, value))
        value = with_current_keys(value, key, report_old_key)
    is_new = override.is_add() or override.is_force_add()
    OmegaConf.update(node, key, value, merge=True, force_add=is_new)


def _resolve_and_validate(node: DictConfig) -> Config:
    """Resolve the interpolations of a node and return the validated configuration."""
    values, references = resolve_with_references(node)
    return with_environment_texts(validate_config(values), references)


def _format_problem(
    problem: KeyProblem,
    overridden_keys: Sequence[str],
    choices: Mapping[str, str],
    sources: Sequence[Path],
) -> str:
    """Return the error line of a problem, with the file that sets the key unless an override does.

    Args:
        problem: Problem of a key's value.
        overridden_keys: Keys and sections that the command line sets.
        choices: Chosen option of each group.
        sources: Sources of the configuration.
    """
    key = problem.key
    experiment = choices.get("experiment")
    # Without the header, Hydra nests the keys of an experiment's file below `experiment`.
    if key.partition(".")[0] == "experiment":
        return (
            "the first line must be `# @package _global_`, followed by the keys (in"
            f" experiment/{experiment}.yaml)"
        )
    if any(key == name or key.startswith(f"{name}.") for name in overridden_keys):
        return problem.message
    # The keys of an experiment take precedence over those of the groups.
    ordered_choices = {group: name for group, name in choices.items() if group != "experiment"}
    if experiment is not None:
        ordered_choices["experiment"] = experiment
    file = find_defining_file(sources, key, ordered_choices)
    return problem.message if file is None else f"{problem.message} (in {file})"


def _explain(error: BaseException) -> str:
    """Return a one-line message for an error of Hydra, OmegaConf or a validation."""
    # An OmegaConf error in the chain of causes names the key; it is more helpful than the others.
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OmegaConfBaseException) and cause.full_key:
            return _explain_key(cause)
        cause = cause.__cause__ or cause.__context__

    # Hydra puts the file at the beginning of its message, and appends the whole search path.
    file_note = ""
    message = str(error).partition("Config search path")[0]
    if isinstance(error, ConfigCompositionException) and (
        file_match := re.match(r"In '([^']+)': (\w+ raised while composing config:)?", message)
    ):
        file_note = f" (in {file_match[1]}.yaml)"
        message = message.removeprefix(file_match[0])
    return " ".join(message.split()) + file_note


def _explain_key(error: OmegaConfBaseException) -> str:
    """Return a one-line message for an error of OmegaConf that names a key."""
    key = str(error.full_key)
    message = str(error).partition("\n")[0]
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)):
        try:
            check_key(key)
        except ConfigError as unknown_key_error:
            return str(unknown_key_error)
        return f"{key}: no such entry; add it with +{key}=VALUE"
    if match := re.search(r"Environment variable '(.*)' not found", message):
        return (
            f"{key}=${{oc.env:{match[1]}}}: the environment variable {match[1]} is not set; export"
            f" it before you start the run, or set {key}=VALUE"
        )
    if isinstance(error, InterpolationResolutionError):
        return f"{key}: {message}; write a literal ${{ as \\${{"
    if isinstance(error, MissingMandatoryValue):
        return f"{key}=???: requires a value; set {key}=VALUE"
    return f"{key}: {message}"


def make_default_name(experiment: str = AUTOMATIC) -> str:
    """Return the name of a run without `run.name`: the experiment and the current time."""
    return f"{experiment}-{datetime.now():%Y%m%d-%H%M%S}"


def _with_names(config: Config, experiment: str) -> Config:
    """Return the configuration with the experiment, the name and the absolute directory of the run.

    Raises:
        ConfigError: The run to resume has no directory, or has another name; or the name or the
            directory contains a character that is not supported.
    """
    run = config.run
    if run.should_resume and run.name is None and run.dir is None:
        raise ConfigError(
            f"run.resume={run.resume}: requires the directory or name of the run to resume; set"
            " run.dir=DIRECTORY or run.name=NAME"
        )
    started_name = (
        _read_started_name(Path(run.dir or Path("runs") / str(run.name)))
        if run.should_resume
        else None
    )
    if started_name and run.name not in (None, started_name):
        raise ConfigError(
            f"run.name={run.name}: the run to resume is named {started_name}; remove run.name and"
            " set run.dir"
        )

    name = run.name or started_name or _derive_run_name(run.dir) or make_default_name(experiment)
    if not re.fullmatch(r"[\w.+=-]+", name) or name in (".", ".."):
        raise ConfigError(f"run.name={name}: must consist of letters, digits and . _ - + =")

    directory = os.path.abspath(run.dir or Path("runs") / name)  # noqa: PTH100 - Path.resolve would follow links
    # File names, logs or YAML cannot contain null bytes, line breaks or surrogates.
    if bad_character := next(
        (
            character
            for character in directory
            if character in "\0\n\r" or "\ud800" <= character <= "\udfff"
        ),
        None,
    ):
        raise ConfigError(
            f"run.dir={directory!r}: must not contain the character {bad_character!r}; choose"
            " another directory"
        )
    run_with_names = dataclasses.replace(run, experiment=experiment, name=name, dir=directory)
    return dataclasses.replace(config, run=run_with_names)


def _derive_run_name(directory: str | None) -> str:
    """Return a run name that is derived from the name of the run directory.

    `_` replaces the characters that a run name must not contain. The result is empty if the
    directory has no usable name.
    """
    name = re.sub(r"[^\w.+=-]+", "_", Path(directory or "").name)
    return "" if name in (".", "..") else name


def _read_started_name(directory: Path) -> str | None:
    """Return the name with which the run in a directory was started; None if there is no run.

    A resumed run keeps this name even if its directory was moved, because the run's servers use
    the name.

    Raises:
        ConfigError: The directory's `config.yaml` is not the configuration of a run.
    """
    file = directory / "config.yaml"
    if not file.is_file():
        return None
    try:
        return str(read_yaml(file)["run"]["name"])
    except (ConfigError, LookupError, TypeError) as error:
        raise ConfigError(f"{file}: not the configuration of a run: {error}") from error


def _with_engine_replicas(config: Config) -> Config:
    """Return the configuration with a positive `engine.parallel.data`.

    If the key is 0, the engine gets as many replicas as fit on the trainer's ranks.
    """
    engine = config.engine
    if engine.parallel.data != 0:
        return config
    replica_ranks = max(1, engine.parallel.replica_ranks)
    replicas = max(1, config.actor.parallel.ranks // replica_ranks)
    engine_with_replicas = dataclasses.replace(
        engine, parallel=dataclasses.replace(engine.parallel, data=replicas)
    )
    return dataclasses.replace(config, engine=engine_with_replicas)


def _escape(value: Any) -> Any:
    """Return a value in whose strings `${` is escaped, so that OmegaConf reads it literally."""
    if isinstance(value, Reference):
        return str(value)
    if isinstance(value, str):
        return escape_interpolations(value)
    if isinstance(value, dict):
        return {key: _escape(entry) for key, entry in value.items()}
    return [_escape(entry) for entry in value] if isinstance(value, list) else value
