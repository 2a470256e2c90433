"""The YAML files of a configuration.

A group is a directory under `conf/` or in the user's own directory, and an option of the group is a
file in it: `conf/algorithm/ppo.yaml` is the option `ppo` of the group `algorithm`. This module
reads these files, for Hydra and for messages, and finds the keys that each file sets.

A source is a directory with groups, or the single file of an experiment (`--config FILE`). A file
`mine.yaml` is the source of the option `mine` of the group `experiment`; the options in its
`defaults` list are first looked up in the directory of the file.
"""

import functools
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import OmegaConf

from aligner.errors import ConfigError
from aligner.file_limits import MAX_CONFIG_BYTES, MAX_YAML_VALUES, read_limited_bytes
from aligner.schema.keys import find_schema_key
from aligner.schema.renamed import RENAMED_KEYS, get_current_key, with_current_keys
from aligner.terminal import print_text

_PACKAGE = Path(__file__).resolve().parent.parent
# Hydra's header `# @package _global_`: the keys of the file begin at the root.
_PACKAGE_HEADER = re.compile(r"\s*#\s*@package\s+(\S+)")
_ROOT_PACKAGE = "_global_"
_FILE_SUFFIXES = (".yaml", ".yml")
# The name of the file becomes a part of the run's name.
_FILE_STEM = re.compile(r"[\w.+-]+")
# The numbers of Hydra's override grammar, so that a file and the command line agree.
_INTEGER = re.compile(
    r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]+|0|[1-9][0-9_]*)$",
)
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
)
_NUMERIC_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp")}


class ConfLoader(yaml.SafeLoader):
    """YAML loader that parses numbers like the command line and rejects duplicate keys.

    PyYAML's loader follows YAML 1.1, which parses a time such as 12:00:00 as a number in base 60,
    2026-11-23 as a date, and 1e-5 as a string.
    """

    def get_single_node(self) -> yaml.Node | None:
        """Return the document; raise ValueError if its aliases stand for too many values."""
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            _count_nodes(node, {})
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping.

        Raises:
            ConstructorError: A key occurs twice.
        """
        # PyYAML accepts duplicate keys, and the last one wins.
        names = set()
        for key, _ in node.value:
            if key.value in names and isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    "while constructing a mapping",
                    node.start_mark,
                    f"found duplicate key {key.value}",
                    key.start_mark,
                )
            if isinstance(key, yaml.ScalarNode):
                names.add(key.value)
        return super().construct_mapping(node, deep)


ConfLoader.yaml_implicit_resolvers = {
    # A copy, because PyYAML's loaders share these lists.
    first: [resolver for resolver in resolvers if resolver[0] not in _NUMERIC_TAGS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
ConfLoader.add_implicit_resolver("tag:yaml.org,2002:int", _INTEGER, list("-+0123456789"))
ConfLoader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def _count_nodes(node: yaml.Node, counts: dict[int, int]) -> int:
    """Return the number of values of a YAML node, in which each alias counts as its whole value.

    Args:
        node: The node.
        counts: Numbers of the nodes that were counted, by their ids; nodes are added.

    Raises:
        ValueError: There are more than `MAX_YAML_VALUES` values, or a value contains itself.
    """
    if id(node) in counts:
        return counts[id(node)]
    counts[id(node)] = MAX_YAML_VALUES  # until the count is known: the node contains itself
    total = 1
    if isinstance(node, yaml.SequenceNode):
        total += sum(_count_nodes(entry, counts) for entry in node.value)
    elif isinstance(node, yaml.MappingNode):
        total += sum(_count_nodes(entry, counts) for pair in node.value for entry in pair)
    if total > MAX_YAML_VALUES:
        raise ValueError(
            f"aliases repeat values until there are more than {MAX_YAML_VALUES} of them, or without"
            " end; write the values out"
        )
    counts[id(node)] = total
    return total


def read_yaml(file: Path) -> Any:
    """Return the content of a YAML file; None for an empty file.

    Raises:
        ConfigError: The file is not valid YAML, or cannot be read.
    """
    try:
        return yaml.load(read_limited_bytes(file, MAX_CONFIG_BYTES).decode(), ConfLoader)
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from error


class ConfSource(ConfigSource):
    """Hydra's access to a source, which it reads with `read_yaml`.

    `conf:///DIRECTORY` or `conf:///FILE.yaml` in Hydra's search path selects this class.
    """

    @staticmethod
    def scheme() -> str:
        """Return the scheme that selects this class in Hydra's search path."""
        return "conf"

    def available(self) -> bool:
        """Return whether the source exists."""
        return Path(self.path).exists()

    def is_group(self, config_path: str) -> bool:
        """Return whether a path below the source is a group."""
        source = Path(self.path)
        if source.is_file():
            return config_path in ("", "experiment")
        return (source / config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        """Return whether a path below the source is a file."""
        return self._find_file(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names of the groups and options of a group."""
        if Path(self.path).is_file():
            return [Path(self.path).stem] if config_path == "experiment" else ["experiment"]
        entries = sorted((Path(self.path) / config_path).iterdir())
        groups = [entry.name for entry in entries if entry.is_dir()]
        options = [entry.stem for entry in entries if entry.suffix == ".yaml"]
        if results_filter == ObjectType.GROUP:
            return groups
        return options if results_filter == ObjectType.CONFIG else sorted({*groups, *options})

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the content and the header of a file.

        Raises:
            ConfigLoadError: The file does not exist.
        """
        file = self._find_file(config_path)
        if file is None:
            raise ConfigLoadError(f"{config_path}: no such file in {self.path}")
        content, package = _read_option_of(Path(self.path), file)
        return ConfigResult(
            provider=self.provider,
            path=f"{self.scheme()}://{self.path}",
            config=OmegaConf.create(content),
            header={"package": package},
        )

    def _find_file(self, config_path: str) -> Path | None:
        """Return the file of a path in Hydra's notation, which may lack `.yaml`."""
        return _find_option_file(Path(self.path), config_path.removesuffix(".yaml"))


def _find_option_file(source: Path, option: str) -> Path | None:
    """Return the file of an option `GROUP/NAME`; None if the source does not have the option."""
    if source.is_dir():
        file = source / f"{option}.yaml"
    else:
        group, _, name = option.rpartition("/")
        if group != "experiment":
            return None
        file = source if name == source.stem else source.with_name(f"{name}.yaml")
    return file if file.is_file() else None


def _read_option_of(source: Path, file: Path) -> tuple[dict[str, Any], str | None]:
    """Return the content and the package of an option's file, see `_read_option_file`."""
    # A single file needs no header, because it is not in the directory of a group.
    default_package = None if source.is_dir() else _ROOT_PACKAGE
    return _read_option_file(file, file.stat().st_mtime_ns, default_package)


@functools.lru_cache(512)
def _read_option_file(
    file: Path, modified_ns: int, default_package: str | None
) -> tuple[dict[str, Any], str | None]:
    """Return the content of an option's file and the package in its header.

    The content has the current names of keys.

    Args:
        file: File of an option.
        modified_ns: Modification time of the file in nanoseconds. It belongs to the cache key, so
            that a changed file is read again.
        default_package: Package of a file without a header; None means the name of its group.

    Raises:
        ConfigError: The file does not contain a mapping, or cannot be read.
    """
    content = read_yaml(file)
    if not isinstance(content, dict | None):
        raise ConfigError(
            f"{file}: expected a mapping of keys to values, got {type(content).__name__}"
        )
    header = _PACKAGE_HEADER.match(file.read_text(encoding="utf-8"))
    package = header[1] if header else default_package
    # Without the header, Hydra nests the keys of a file below the name of its group.
    section = "" if package == _ROOT_PACKAGE else file.parent.name

    def report(key: str) -> None:
        report_old_key(key, f"{file}: ")

    return with_current_keys(content or {}, section, report), package


def find_built_in_directory() -> Path:
    """Return the directory `conf/`: inside the package of a wheel, next to it in a checkout.

    Raises:
        ConfigError: There is no such directory.
    """
    for candidate in (_PACKAGE / "conf", _PACKAGE.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise ConfigError(
        f"conf/config.yaml not found in {_PACKAGE} or its parent directory; reinstall aligner"
    )


def find_config_sources(
    config_directory: Path | None = None, config_file: Path | None = None
) -> list[Path]:
    """Return the sources of a configuration, in the order in which an option is looked up.

    Args:
        config_directory: Directory of the user's own groups (`--config-dir`).
        config_file: File of the experiment (`--config`).

    Raises:
        ConfigError: The directory or the file does not exist, or the file has no suitable name.
    """
    sources = [find_built_in_directory()]
    if config_directory is not None:
        if not config_directory.is_dir():
            raise ConfigError(f"--config-dir {config_directory}: no such directory")
        sources.append(config_directory.resolve())
    if config_file is not None:
        sources.insert(0, _check_config_file(config_file))
    return sources


def _check_config_file(file: Path) -> Path:
    """Return the absolute path of the file of `--config`.

    Raises:
        ConfigError: The file does not exist, or its name is not supported.
    """
    if file.is_dir():
        raise ConfigError(f"--config {file}: is a directory; expected a YAML file")
    if not file.is_file():
        raise ConfigError(
            f"--config {file}: no such file; use experiment=NAME for a built-in experiment"
        )
    if file.suffix not in _FILE_SUFFIXES or not _FILE_STEM.fullmatch(file.stem):
        raise ConfigError(
            f"--config {file}: the name must consist of letters, digits and . _ - + and end in"
            f" {' or '.join(_FILE_SUFFIXES)}; rename the file"
        )
    return file.absolute()


def list_group_options(sources: Iterable[Path]) -> dict[str, list[str]]:
    """Return the names of the options of each group, by the name of the group.

    Raises:
        ConfigError: Two directories define the same option.
    """
    files: dict[tuple[str, str], Path] = {}
    names = set()
    for source in sources:
        if source.is_file():
            # The file may be a changed copy of a built-in experiment with the same name.
            names.add(("experiment", source.stem))
            continue
        for file in sorted(source.glob("*/*.yaml")):
            option = (file.parent.name, file.stem)
            if option in files:
                raise ConfigError(
                    f"{file}: {option[0]}={option[1]} already exists in {files[option].parent};"
                    " rename your file"
                )
            files[option] = file
    groups: dict[str, list[str]] = {}
    for group, name in sorted(files.keys() | names):
        groups.setdefault(group, []).append(name)
    return groups


def read_option_values(sources: Sequence[Path], group: str, name: str) -> dict[str, Any]:
    """Return the keys that an option of a group sets, including the keys that it inherits.

    An option inherits the keys of the options of the same group in its `defaults` list.
    """
    values, defaults = _read_option(sources, group, name)
    inherited: dict[str, Any] = {}
    for default in defaults:
        if isinstance(default, str) and default != "_self_":
            inherited |= read_option_values(sources, group, default)
    return inherited | values


def read_chosen_options(sources: Sequence[Path], experiment: str) -> dict[str, str]:
    """Return the options of other groups that an experiment chooses, by group.

    The choices of the experiments in its `defaults` list count as its own.
    """
    choices: dict[str, str] = {}
    for default in _read_option(sources, "experiment", experiment)[1]:
        # `override /GROUP: NAME` is a mapping; the name of another experiment is a string.
        if isinstance(default, dict):
            choices |= {
                str(group).rpartition("/")[2]: str(name)
                for group, name in default.items()
                if name is not None
            }
        elif default != "_self_":
            choices |= read_chosen_options(sources, str(default))
    return choices


def find_defining_file(sources: Sequence[Path], key: str, options: Mapping[str, str]) -> str | None:
    """Return the file of the option that sets a key or a key below it; None without one.

    A file in a directory of groups is returned as `GROUP/NAME.yaml`.

    Args:
        sources: Sources of the configuration, see `find_config_sources`.
        key: Dotted key.
        options: Chosen option of each group; later options take precedence.
    """
    # The file that wins is the last one that sets the key: search from the end. Within a file, its
    # own keys take precedence over those of its `defaults` list.
    for group, name in reversed(list(options.items())):
        values, defaults = _read_option(sources, group, name)
        if any(file_key == key or file_key.startswith(f"{key}.") for file_key in values):
            return _describe_option_file(sources, group, name)
        for default in reversed(defaults):
            if not isinstance(default, str) or default == "_self_":
                continue
            if file := find_defining_file(sources, key, {group: default}):
                return file
    return None


@functools.cache
def report_old_key(key: str, prefix: str = "") -> None:
    """Print a warning that a key has been renamed, once per process and `prefix`.

    Args:
        key: Old name of the key.
        prefix: Prefix of the warning, such as the file with the key.
    """
    print_text(
        f"aligner: warning: {prefix}{key} is now {RENAMED_KEYS[key]}; the next release no longer"
        " accepts the old name",
        sys.stderr,
    )


def flatten_keys(prefix: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of nested sections by dotted key, under the current names of the keys.

    The value of a mapping key, such as `model.config`, remains one value.

    Args:
        prefix: Dotted section of `content` with a final dot; empty for the root.
        content: Nested values.
    """
    values: dict[str, Any] = {}
    for name, value in content.items():
        key = get_current_key(f"{prefix}{name}")
        # A mapping that is not the value of a key is a section.
        is_section = isinstance(value, dict) and find_schema_key(key) is None
        values |= flatten_keys(f"{key}.", value) if is_section else {key: value}
    return values


def _read_option(
    sources: Sequence[Path], group: str, name: str
) -> tuple[dict[str, Any], list[Any]]:
    """Return the keys that the file of an option sets, and its `defaults` list.

    Both are empty if no source has the file.
    """
    for source in sources:
        if (file := _find_option_file(source, f"{group}/{name}")) is not None:
            content, package = _read_option_of(source, file)
            values = {key: value for key, value in content.items() if key != "defaults"}
            prefix = "" if package == _ROOT_PACKAGE else f"{group}."
            return flatten_keys(prefix, values), content.get("defaults", [])
    return {}, []


def _describe_option_file(sources: Sequence[Path], group: str, name: str) -> str:
    """Return the file of an option as a message names it."""
    for source in sources:
        file = _find_option_file(source, f"{group}/{name}")
        if file is not None and source.is_file():
            return str(file)
    return f"{group}/{name}.yaml"
