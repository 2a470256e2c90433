"""From command-line overrides to a checked-for-type `Config`, and to and from a run's
`config.yaml`."""

import contextlib
import dataclasses
import functools
import os
import pickle
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from aligner.config.overrides import (
    check_key,
    check_read,
    current_values,
    given_keys,
    option_values,
    parse_override,
)
from aligner.errors import ConfigError
from aligner.files import write_file
from aligner.schema import Config
from aligner.schema.keys import MASK, schema_keys, schema_sections, unmet, value_at

_PACKAGE = Path(__file__).resolve().parent.parent
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
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def built_in_directory() -> Path:
    """Where `conf/` is: inside the package when installed from a wheel, beside it in a checkout."""
    for candidate in (_PACKAGE / "conf", _PACKAGE.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise ConfigError(
        f"conf/config.yaml not found in {_PACKAGE} or its parent directory; reinstall aligner"
    )


def compose_config(overrides: Sequence[str], config_directory: Path | None = None) -> Config:
    """The configuration of a run from `experiment=NAME`, or a model and data of the user's own, and
    further overrides.

    `config_directory` holds the user's own groups (`experiment/mine.yaml`), beside the built-in
    ones. With `run.automatic` the keys that nobody gives are still to be chosen:
    `aligner.config.defaults`. Raises ConfigError for whatever is unknown, of the wrong type or
    missing, and for overrides that the run does not read.
    """
    directories = _directories(config_directory)
    options = _group_options(directories)
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
    named = [override for override in parsed if override.key_or_group in options]
    config = _compose("config" if "experiment" in keys else AUTOMATIC, parsed, directories, named)
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
    directories = _directories(config_directory)
    options = _group_options(directories)
    return given_keys(
        [parse_override(text, options) for text in overrides],
        options,
        directories,
        config.run.experiment,
    )


def _directories(config_directory: Path | None) -> list[Path]:
    """Those that hold groups: the built-in ones', and the user's own."""
    return [
        built_in_directory(),
        *([] if config_directory is None else [_user_directory(config_directory)]),
    ]


def unread_notes(config: Config, config_directory: Path | None = None) -> list[str]:
    """A line for each reason for which the run does not read keys that its experiment's file
    sets."""
    found: dict[str, list[str]] = {}
    for key in option_values(_directories(config_directory), "experiment", config.run.experiment):
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
    try:
        with _times_as_text():
            return _as_config(OmegaConf.unsafe_merge(pickle.loads(_schema()), OmegaConf.load(path)))
    # OmegaConf raises OSError for a file that is a number.
    except (
        OmegaConfBaseException,
        yaml.YAMLError,
        UnicodeDecodeError,
        RecursionError,
        OSError,
    ) as error:
        raise ConfigError(f"{path}: {_explain(error)}") from error


def _user_directory(directory: Path) -> Path:
    if not directory.is_dir():
        raise ConfigError(f"--config-dir {directory}: no such directory")
    return directory.resolve()


def group_options(config_directory: Path | None = None) -> dict[str, list[str]]:
    """Options of every group, built-in and the user's own, by group name; an option that both
    define is an error."""
    return _group_options(_directories(config_directory))


def _group_options(directories: Iterable[Path]) -> dict[str, list[str]]:
    """Options of every group, by group name; an option that two directories define is an error."""
    found: dict[tuple[str, str], Path] = {}
    for directory in directories:
        for file in sorted(directory.glob("*/*.yaml")):
            option = (file.parent.name, file.stem)
            if option in found:
                raise ConfigError(
                    f"{file}: {option[0]}={option[1]} already exists in {found[option].parent};"
                    " rename your file"
                )
            found[option] = file
    groups: dict[str, list[str]] = {}
    for group, name in sorted(found):
        groups.setdefault(group, []).append(name)
    return groups


def _compose(
    root: str, overrides: Sequence[Override], directories: Sequence[Path], named: Sequence[Override]
) -> Config:
    """The composition of what these directories have, from a root; `named` are the overrides that
    name groups."""
    options = tuple(
        str(override.input_line) for override in named if not isinstance(override.value(), dict)
    )
    named_options = " ".join(str(override.input_line) for override in named)
    try:
        with _times_as_text():
            # A user's files may change while this process lives.
            composed = _composed if len(directories) == 1 else _composed.__wrapped__
            node = pickle.loads(composed(root, options, tuple(directories)))
            values = [override for override in overrides if override.input_line not in options]
            # as Hydra's compose() does last
            ConfigLoaderImpl._apply_overrides_to_config(values, node)
            return _as_config(node)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(_explain(error)) from error
    # Of the rest Hydra does not say in which file it is.
    except RecursionError as error:
        raise ConfigError(
            f"{named_options}: circular defaults, or keys nested too deeply"
        ) from error
    except UnicodeDecodeError as error:
        files = [
            str(file)
            for directory in directories
            for file in directory.glob("*/*.yaml")
            if not _is_text(file)
        ]
        raise ConfigError(f"{', '.join(files)}: {_explain(error)}") from error
    except (ValueError, OSError) as error:
        raise ConfigError(f"{named_options}: {_explain(error)}") from error


def _is_text(file: Path) -> bool:
    try:
        file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


@contextlib.contextmanager
def _times_as_text() -> Iterator[None]:
    """A time such as 12:00:00 is read as it is written, as on the command line: YAML 1.1 has it as
    a number to the base 60."""
    constructors = yaml.constructor.SafeConstructor.yaml_constructors  # of OmegaConf's loader, too
    numbers = {tag: constructors[tag] for tag in _NUMBERS}

    def as_text(construct: Callable[..., Any]) -> Callable[..., Any]:
        return lambda loader, node: node.value if ":" in node.value else construct(loader, node)

    constructors.update({tag: as_text(construct) for tag, construct in numbers.items()})
    try:
        yield
    finally:
        constructors.update(numbers)


@functools.lru_cache(512)
def _composed(root: str, options: tuple[str, ...], directories: tuple[Path, ...]) -> bytes:
    """Return the composition of a root and options of groups, pickled, the fast way to copy it.

    Types are checked once, in the result. To check them in each file takes twice as long, and is
    done where something is wrong: those errors name the file.
    """
    try:
        untyped = _composed_by_hydra(root, options, directories, schema={})
        node = OmegaConf.unsafe_merge(pickle.loads(_schema()), untyped)
        OmegaConf.set_struct(node, True)  # as Hydra does
    except (HydraException, OmegaConfBaseException):
        node = _composed_by_hydra(root, options, directories, schema=pickle.loads(_schema()))
    return pickle.dumps(node)


def _composed_by_hydra(
    root: str, options: Sequence[str], directories: Sequence[Path], schema: Any
) -> DictConfig:
    search = [f"file://{directory}" for directory in directories[1:]]
    quoted = ",".join("'" + path.replace("\\", "\\\\").replace("'", "\\'") + "'" for path in search)
    overrides = [f"hydra.searchpath=[{quoted}]", *_HYDRAS_OWN_GROUPS, *options]

    ConfigStore.instance().store(name="schema", node=schema)
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(directories[0]), version_base="1.3"):
        return compose(root, overrides=overrides)


@functools.cache
def _schema() -> bytes:
    """What OmegaConf makes of the schema, in a tenth of a second; pickled, the fast way to copy."""
    return pickle.dumps(OmegaConf.structured(Config))


def _as_config(node: Any) -> Config:
    config = OmegaConf.to_object(node)
    if not isinstance(config, Config):
        raise ConfigError("the configuration must be a mapping of keys to values")
    written: Config = _with_choices(config)
    return written


def _with_choices(section: Any) -> Any:
    """A section with true and false, which YAML does not take for words, as such where words are
    allowed that are so."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            changed[field.name] = _with_choices(value)
        elif value in ("True", "False") and value.lower() in field.metadata["choices"]:
            changed[field.name] = value.lower()
    return dataclasses.replace(section, **changed)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _explain(error: BaseException) -> str:
    """One line about what Hydra, OmegaConf or the YAML reader refused: key, value, expected
    type."""
    where = ""
    if isinstance(error, ConfigCompositionException) and (
        file := re.match(r"In '([^']+)'", str(error))
    ):
        where = f" (in {file[1]}.yaml)"
    message = re.sub(
        r"^In '[^']+': (\w+ raised while composing config:)?",
        "",
        str(error).partition("Config search path")[0],
    )
    for cause in _causes(error):
        if isinstance(cause, OmegaConfBaseException) and cause.full_key:
            if where and cause.full_key == "experiment":
                return f"the first line must be `# @package _global_`, followed by the keys{where}"
            return _explain_key(cause) + where
    return " ".join(message.split()) + where


def _explain_key(error: OmegaConfBaseException) -> str:
    key, message = str(error.full_key), str(error).partition("\n")[0]
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)):
        try:
            check_key(key)
        except ConfigError as unknown:
            return str(unknown)
        return f"{key}: no such entry; add it with +{key}=VALUE"
    known = schema_keys().get(key)
    if known is None:
        sections = {section.name for section in schema_sections()}
        if key in sections:
            return (
                f"{key}={error.value}: is a section; set a key of this section, such as"
                f" {_first_key(key)}=…"
            )
        return f"{key}: {message}"
    if "Interpolation" in type(error).__name__:
        return f"{key}: {message}; write a literal ${{ as \\${{"
    if isinstance(error, MissingMandatoryValue):
        return f"{key}=???: requires a value; set {key}=VALUE"
    expected = known.type_name.replace(" | None", " or null")
    if error.value is None:
        return f"{key}=null: expected {expected}, got null"
    if known.is_mapping:
        return (
            f"{key}={error.value}: expected a mapping; write {key}={{NAME: VALUE}}, or add one"
            f" entry with +{key}.NAME=VALUE"
        )
    if known.type_name.startswith("list") and not isinstance(error.value, (dict, list)):
        return (
            f"{key}={error.value}: expected {expected}, got a single value; write"
            f" {key}=[{error.value}]"
        )
    value = str(error.value).lower() if isinstance(error.value, bool) else error.value
    return f"{key}={value}: expected {expected}, got {type(error.value).__name__}"


def _first_key(section: str) -> str:
    return next(name for name in schema_keys() if name.startswith(section + "."))


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
        return str(yaml.safe_load(file.read_text())["run"]["name"])
    except (yaml.YAMLError, LookupError, TypeError, UnicodeDecodeError) as error:
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
