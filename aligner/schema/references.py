"""Paths that name another experiment's result: `experiment:NAME`, or `experiment:NAME/FILE` for a file in it."""

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
_PATHS = (
    "model.path",
    "data.path",
    "data.sources.*.path",
    "data.normalization",
    "evaluation.path",
    "reward.path",
    "reward.sources.*.path",
)


@dataclass(frozen=True)
class Reference:
    """A path's value that names the result of an experiment."""

    key: str
    """Where the configuration has it."""
    experiment: str
    file: str | None
    """A file in the result; the result itself when None."""

    @property
    def text(self) -> str:
        """The value, as it was given."""
        return _PREFIX + self.experiment + (f"/{self.file}" if self.file else "")


def parse_reference(key: str, text: str) -> Reference | None:
    """The reference that a path's value is; None for an ordinary path. Raises ConfigError for a malformed one."""
    if not text.startswith(_PREFIX):
        return None
    experiment, _, file = text.removeprefix(_PREFIX).partition("/")
    parts = file.split("/")
    if not _NAME.fullmatch(experiment) or (file and any(part in ("", ".", "..") for part in parts)):
        raise ConfigError(f"{key}={text}: expected experiment:NAME, or experiment:NAME/FILE for a file in its result")
    return Reference(key, experiment, file or None)


def map_paths(config: Config, change: Callable[[str, str], str]) -> Config:
    """The configuration with each path that the run reads replaced by `change(key, path)`."""
    for pattern in _PATHS:
        if is_read(config, pattern.partition(".*")[0]):
            config = _mapped(config, pattern.split("."), "", change)
    return config


def read_paths(config: Config) -> dict[str, str]:
    """Each path that the run reads, by its key."""
    found: dict[str, str] = {}

    def note(key: str, path: str) -> str:
        found[key] = path
        return path

    map_paths(config, note)
    return found


def _mapped(value: Any, parts: Sequence[str], key: str, change: Callable[[str, str], str]) -> Any:
    if not parts:
        return change(key, value) if isinstance(value, str) else value
    part, rest = parts[0], parts[1:]
    if isinstance(value, dict):
        chosen = [name for name in value if part in ("*", name)]
        return value | {name: _mapped(value[name], rest, f"{key}.{name}", change) for name in chosen}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value  # not what the schema wants there, which the checks tell
    changed = _mapped(getattr(value, part), rest, f"{key}.{part}".removeprefix("."), change)
    return dataclasses.replace(value, **{part: changed})
