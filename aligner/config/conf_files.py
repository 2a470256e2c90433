"""The YAML files of a configuration.

A group is a directory under `conf/` or in the user's own directory, and an option of the group is a
file in it: `conf/algorithm/ppo.yaml` is the option `ppo` of the group `algorithm`. This module
reads these files, for Hydra and for messages, and finds the keys that each file sets.
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
from aligner.schema.keys import find_schema_key
from aligner.schema.renamed import RENAMED_KEYS, get_current_key, with_current_keys

_PACKAGE = Path(__file__).resolve().parent.parent
# Hydra's header `# @package _global_`: the keys of the file begin at the root.
_PACKAGE_HEADER = re.compile(r"\s*#\s*@package\s+(\S+)")
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


def read_yaml(file: Path) -> Any:
    """Return the content of a YAML file; None for an empty file.

    Raises:
        ConfigError: The file is not valid YAML, or cannot be read.
    """
    try:
        with file.open(encoding="utf-8") as stream:
            return yaml.load(stream, ConfLoader)
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from error


class ConfSource(ConfigSource):
    """Hydra's access to a directory of groups, which it reads with `read_yaml`.

    `conf:///DIRECTORY` in Hydra's search path selects this class.
    """

    @staticmethod
    def scheme() -> str:
        """Return the scheme that selects this class in Hydra's search path."""
        return "conf"

    def available(self) -> bool:
        """Return whether the directory exists."""
        return self.is_group("")

    def is_group(self, config_path: str) -> bool:
        """Return whether a path below the directory is a group."""
        return (Path(self.path) / config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        """Return whether a path below the directory is a file."""
        return self._file(config_path).is_file()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names of the groups and options of a group."""
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
        file = self._file(config_path)
        if not file.is_file():
            raise ConfigLoadError(f"{file}: no such file")
        content, package = _read_option_file(file, file.stat().st_mtime_ns)
        return ConfigResult(
            provider=self.provider,
            path=f"{self.scheme()}://{self.path}",
            config=OmegaConf.create(content),
            header={"package": package},
        )

    def _file(self, config_path: str) -> Path:
        """Return the file of a path in Hydra's notation, which may lack `.yaml`."""
        return Path(self.path) / f"{config_path.removesuffix('.yaml')}.yaml"


@functools.lru_cache(512)
def _read_option_file(file: Path, modified_ns: int) -> tuple[dict[str, Any], str | None]:
    """Return the content of an option's file and the package in its header.

    The content has the current names of keys. The package is None without a header.

    Args:
        file: File of an option.
        modified_ns: Modification time of the file in nanoseconds. It belongs to the cache key, so
            that a changed file is read again.

    Raises:
        ConfigError: The file does not contain a mapping, or cannot be read.
    """
    content = read_yaml(file)
    if not isinstance(content, dict | None):
        raise ConfigError(
            f"{file}: expected a mapping of keys to values, got {type(content).__name__}"
        )
    header = _PACKAGE_HEADER.match(file.read_text(encoding="utf-8"))
    package = header[1] if header else None
    # Without the header, Hydra nests the keys of a file below the name of its group.
    section = "" if package == "_global_" else file.parent.name

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


def find_group_directories(config_directory: Path | None) -> list[Path]:
    """Return the directories with groups: the built-in one, then the user's own.

    Raises:
        ConfigError: The user's directory does not exist.
    """
    if config_directory is None:
        return [find_built_in_directory()]
    if not config_directory.is_dir():
        raise ConfigError(f"--config-dir {config_directory}: no such directory")
    return [find_built_in_directory(), config_directory.resolve()]


def list_group_options(directories: Iterable[Path]) -> dict[str, list[str]]:
    """Return the names of the options of each group, by the name of the group.

    Raises:
        ConfigError: Two directories define the same option.
    """
    files: dict[tuple[str, str], Path] = {}
    for directory in directories:
        for file in sorted(directory.glob("*/*.yaml")):
            option = (file.parent.name, file.stem)
            if option in files:
                raise ConfigError(
                    f"{file}: {option[0]}={option[1]} already exists in {files[option].parent};"
                    " rename your file"
                )
            files[option] = file
    groups: dict[str, list[str]] = {}
    for group, name in sorted(files):
        groups.setdefault(group, []).append(name)
    return groups


def read_option_values(directories: Sequence[Path], group: str, name: str) -> dict[str, Any]:
    """Return the keys that an option of a group sets, including the keys that it inherits.

    An option inherits the keys of the options of the same group in its `defaults` list.
    """
    values, defaults = _read_option(directories, group, name)
    inherited: dict[str, Any] = {}
    for default in defaults:
        if isinstance(default, str) and default != "_self_":
            inherited |= read_option_values(directories, group, default)
    return inherited | values


def read_chosen_options(directories: Sequence[Path], experiment: str) -> dict[str, str]:
    """Return the options of other groups that an experiment chooses, by group.

    The choices of the experiments in its `defaults` list count as its own.
    """
    choices: dict[str, str] = {}
    for default in _read_option(directories, "experiment", experiment)[1]:
        # `override /GROUP: NAME` is a mapping; the name of another experiment is a string.
        if isinstance(default, dict):
            choices |= {
                str(group).rpartition("/")[2]: str(name)
                for group, name in default.items()
                if name is not None
            }
        elif default != "_self_":
            choices |= read_chosen_options(directories, str(default))
    return choices


def find_defining_option(
    directories: Sequence[Path], key: str, options: Mapping[str, str]
) -> str | None:
    """Return the option `GROUP/NAME` whose file sets a key or a key below it; None without one.

    Args:
        directories: Directories with groups, see `find_group_directories`.
        key: Dotted key.
        options: Chosen option of each group; later options take precedence.
    """
    # The file that wins is the last one that sets the key: search from the end. Within a file, its
    # own keys take precedence over those of its `defaults` list.
    for group, name in reversed(list(options.items())):
        values, defaults = _read_option(directories, group, name)
        if any(file_key == key or file_key.startswith(f"{key}.") for file_key in values):
            return f"{group}/{name}"
        for default in reversed(defaults):
            if not isinstance(default, str) or default == "_self_":
                continue
            if option := find_defining_option(directories, key, {group: default}):
                return option
    return None


@functools.cache
def report_old_key(key: str, prefix: str = "") -> None:
    """Print a warning that a key has been renamed, once per process and `prefix`.

    Args:
        key: Old name of the key.
        prefix: Prefix of the warning, such as the file with the key.
    """
    print(
        f"aligner: warning: {prefix}{key} is now {RENAMED_KEYS[key]}; the next release no longer"
        " accepts the old name",
        file=sys.stderr,
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
    directories: Sequence[Path], group: str, name: str
) -> tuple[dict[str, Any], list[Any]]:
    """Return the keys that the file of an option sets, and its `defaults` list.

    Both are empty if no directory has the file.
    """
    for directory in directories:
        file = directory / group / f"{name}.yaml"
        if file.is_file():
            content, package = _read_option_file(file, file.stat().st_mtime_ns)
            values = {key: value for key, value in content.items() if key != "defaults"}
            prefix = "" if package == "_global_" else f"{group}."
            return flatten_keys(prefix, values), content.get("defaults", [])
    return {}, []
