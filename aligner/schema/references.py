"""Path keys of the schema, and references to results of experiments as their values.

`experiment:NAME` refers to the result of `experiment=NAME`, and `experiment:NAME/FILE` refers to a
file in the result.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aligner.errors import ConfigError
from aligner.schema import Config
from aligner.schema.keys import is_read

_PREFIX = "experiment:"
_NAME = re.compile(r"[\w.+=-]+")
# Keys whose values are paths; `*` stands for any entry of a mapping.
_PATH_KEYS = (
    "model.path",
    "data.path",
    "data.sources.*.path",
    "data.normalization",
    "evaluation.path",
    "evaluation.suites.*.path",
    "critic.path",
    "reward.path",
    "reward.sources.*.path",
    "teacher.path",
    "teacher.sources.*.path",
    "teacher.scores",
)


@dataclass(frozen=True)
class Reference:
    """The value of a path key that refers to the result of an experiment."""

    key: str
    """Dotted key whose value is the reference."""
    experiment: str
    """Name of the experiment."""
    file: str | None
    """Path of a file in the result; None for the result itself."""

    @property
    def text(self) -> str:
        """Text of the reference in the configuration."""
        return f"{_PREFIX}{self.experiment}" + (f"/{self.file}" if self.file else "")


def parse_reference(key: str, text: str) -> Reference | None:
    """Parse the value of a path key; return None if it is an ordinary path.

    Args:
        key: Dotted key.
        text: Value of the key.

    Raises:
        ConfigError: The value begins with `experiment:`, but is malformed.
    """
    if not text.startswith(_PREFIX):
        return None

    experiment, _, file = text.removeprefix(_PREFIX).partition("/")
    parts = file.split("/")
    # A file outside the result, such as `../run/config.yaml`, does not belong to the cached result.
    if not _NAME.fullmatch(experiment) or (file and any(part in ("", ".", "..") for part in parts)):
        raise ConfigError(
            f"{key}={text}: expected experiment:NAME, or experiment:NAME/FILE for a file in the"
            " experiment's result"
        )
    return Reference(key, experiment, file or None)


def map_paths(config: Config, change: Callable[[str, str], str]) -> Config:
    """Replace each path that the run reads by `change(key, path)`; return the new configuration."""
    for pattern in _PATH_KEYS:
        # A pattern such as `data.sources.*.path` belongs to the mapping key `data.sources`.
        if is_read(config, pattern.partition(".*")[0]):
            config = _map_value(config, pattern.split("."), "", change)
    return config


def find_read_paths(config: Config) -> dict[str, str]:
    """Return the paths that the run reads, by dotted key."""
    paths: dict[str, str] = {}

    def record_path(key: str, path: str) -> str:
        paths[key] = path
        return path

    map_paths(config, record_path)
    return paths


def _map_value(
    value: Any, parts: Sequence[str], key: str, change: Callable[[str, str], str]
) -> Any:
    """Return a section, a mapping or a value in which the paths of one pattern are replaced.

    Args:
        value: Section, mapping or value.
        parts: Rest of the pattern's parts, relative to `value`.
        key: Dotted key of `value`.
        change: Returns the new path for a key and its path.
    """
    if not parts:
        return change(key, value) if isinstance(value, str) else value
    part = parts[0]
    rest = parts[1:]
    if isinstance(value, dict):
        names = [name for name in value if part in ("*", name)]
        return value | {
            name: _map_value(value[name], rest, f"{key}.{name}", change) for name in names
        }
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value  # a value of the wrong type, which the checks report
    new_value = _map_value(getattr(value, part), rest, f"{key}.{part}".removeprefix("."), change)
    return dataclasses.replace(value, **{part: new_value})
