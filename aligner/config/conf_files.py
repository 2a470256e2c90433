"""The YAML files of a configuration: groups and their options under `conf/` and in a directory of
the user's own, and what each file sets."""

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
from aligner.schema.keys import known_key
from aligner.schema.renamed import RENAMED_KEYS, current_key, with_current_keys

_PACKAGE = Path(__file__).resolve().parent.parent
_PACKAGE_HEADER = re.compile(r"\s*#\s*@package\s+(\S+)")
"""`# @package _global_`, as Hydra reads it: the keys of the file begin at the root."""
_INTEGER = re.compile(
    r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]+|0|[1-9][0-9_]*)$",
)
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
)
_NUMERIC_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp")}


class ConfLoader(yaml.SafeLoader):
    """YAML loader that reads numbers as the command line does, and refuses duplicate keys.

    YAML 1.1 reads a time such as 12:00:00 as a number to the base 60, 2026-11-23 as a date, and
    1e-5 as a string.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping. Raises ConstructorError for a key that occurs twice."""
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
    first: [resolver for resolver in resolvers if resolver[0] not in _NUMERIC_TAGS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
ConfLoader.add_implicit_resolver("tag:yaml.org,2002:int", _INTEGER, list("-+0123456789"))
ConfLoader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def read_yaml(file: Path) -> Any:
    """Return the content of a YAML file; None for an empty file.

    Raises:
        ConfigError: The file is no valid YAML, or cannot be read.
    """
    try:
        with file.open(encoding="utf-8") as stream:
            return yaml.load(stream, ConfLoader)
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from error


class ConfSource(ConfigSource):
    """A directory of groups, for Hydra, that is read by `read_yaml`: `conf:///DIRECTORY`."""

    @staticmethod
    def scheme() -> str:
        """Return the name with which a path in Hydra's search path begins."""
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
        """Return the content of a file with its header."""
        file = self._file(config_path)
        if not file.is_file():
            raise ConfigLoadError(f"{file}: no such file")
        content, package = _read_option(file, file.stat().st_mtime_ns)
        return ConfigResult(
            provider=self.provider,
            path=f"{self.scheme()}://{self.path}",
            config=OmegaConf.create(content),
            header={"package": package},
        )

    def _file(self, config_path: str) -> Path:
        return Path(self.path) / f"{config_path.removesuffix('.yaml')}.yaml"


@functools.lru_cache(512)
def _read_option(file: Path, changed_ns: int) -> tuple[dict[str, Any], str | None]:
    """Return the content of a file that was last changed at a time, and the package that its first
    line names."""
    content = read_yaml(file)
    if not isinstance(content, dict | None):
        raise ConfigError(
            f"{file}: expected a mapping of keys to values, got {type(content).__name__}"
        )
    header = _PACKAGE_HEADER.match(file.read_text(encoding="utf-8"))
    package = header[1] if header else None
    section = "" if package == "_global_" else file.parent.name

    def report(key: str) -> None:
        report_old_key(key, f"{file}: ")

    return with_current_keys(content or {}, section, report), package


def built_in_directory() -> Path:
    """Return the directory `conf/`: in the package of a wheel, beside the package in a checkout."""
    for candidate in (_PACKAGE / "conf", _PACKAGE.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise ConfigError(
        f"conf/config.yaml not found in {_PACKAGE} or its parent directory; reinstall aligner"
    )


def group_directories(config_directory: Path | None) -> list[Path]:
    """Return the directories that hold groups: the built-in one, and the user's own."""
    if config_directory is None:
        return [built_in_directory()]
    if not config_directory.is_dir():
        raise ConfigError(f"--config-dir {config_directory}: no such directory")
    return [built_in_directory(), config_directory.resolve()]


def group_options(directories: Iterable[Path]) -> dict[str, list[str]]:
    """Return the options of every group by its name.

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


def option_values(directories: Sequence[Path], group: str, name: str) -> dict[str, Any]:
    """Return the keys that an option of a group sets, with those of the options that it begins
    with."""
    values, defaults = _option(directories, group, name)
    inherited: dict[str, Any] = {}
    for default in defaults:
        if isinstance(default, str) and default != "_self_":
            inherited |= option_values(directories, group, default)
    return inherited | values


def chosen_options(directories: Sequence[Path], experiment: str) -> dict[str, str]:
    """Return the options of other groups that an experiment, and those that it begins with,
    choose."""
    chosen: dict[str, str] = {}
    for default in _option(directories, "experiment", experiment)[1]:
        if isinstance(default, dict):
            chosen |= {
                str(group).rpartition("/")[2]: str(name)
                for group, name in default.items()
                if name is not None
            }
        elif default != "_self_":
            chosen |= chosen_options(directories, str(default))
    return chosen


def defining_option(
    directories: Sequence[Path], key: str, options: Mapping[str, str]
) -> str | None:
    """Return the option `GROUP/NAME` whose file sets a key, or a key below it.

    Args:
        directories: Those of `group_directories`.
        key: Dotted key.
        options: Chosen option of each group, the one that takes precedence last.
    """
    for group, name in reversed(list(options.items())):
        values, defaults = _option(directories, group, name)
        if any(found == key or found.startswith(f"{key}.") for found in values):
            return f"{group}/{name}"
        for default in reversed(defaults):
            if not isinstance(default, str) or default == "_self_":
                continue
            if option := defining_option(directories, key, {group: default}):
                return option
    return None


@functools.cache
def report_old_key(key: str, where: str = "") -> None:
    """Print, once in a process, that a key has another name now."""
    print(
        f"aligner: warning: {where}{key} is now {RENAMED_KEYS[key]}; the next release no longer"
        " accepts the old name",
        file=sys.stderr,
    )


def flat_keys(prefix: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dotted keys of nested sections with their values; a mapping of the user's own
    entries is one value."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        key = current_key(f"{prefix}{name}")
        is_section = isinstance(value, dict) and known_key(key) is None
        found |= flat_keys(f"{key}.", value) if is_section else {key: value}
    return found


def _option(directories: Sequence[Path], group: str, name: str) -> tuple[dict[str, Any], list[Any]]:
    """Return the keys that the file of an option sets, and its `defaults`; empty without a file."""
    for directory in directories:
        file = directory / group / f"{name}.yaml"
        if file.is_file():
            content, package = _read_option(file, file.stat().st_mtime_ns)
            own = {key: value for key, value in content.items() if key != "defaults"}
            prefix = "" if package == "_global_" else f"{group}."
            return flat_keys(prefix, own), content.get("defaults", [])
    return {}, []
