"""References to the result of another experiment in place of a path.

`experiment:NAME` is the result of `experiment=NAME`, and `experiment:NAME/FILE` a file in it.
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
_PATHS = (
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
    """The configuration key that holds the reference."""
    experiment: str
    """The name of the experiment."""
    file: str | None
    """A file in the result; None for the result itself."""

    @property
    def text(self) -> str:
        """The reference as written in the configuration."""
        return f"{_PREFIX}{self.experiment}" + (f"/{self.file}" if self.file else "")


def parse_reference(key: str, text: str) -> Reference | None:
    """Parse the value of a path key; return None if it is an ordinary path.

    Raises:
        ConfigError: The value begins with `experiment:` and is malformed.
    """
    if not text.startswith(_PREFIX):
        return None

    experiment, _, file = text.removeprefix(_PREFIX).partition("/")
    parts = file.split("/")
    if not _NAME.fullmatch(experiment) or (file and any(part in ("", ".", "..") for part in parts)):
        raise ConfigError(
            f"{key}={text}: expected experiment:NAME, or experiment:NAME/FILE for a file in the"
            " experiment's result"
        )
    return Reference(key, experiment, file or None)


def map_paths(config: Config, change: Callable[[str, str], str]) -> Config:
    """Replace each path that the run reads by `change(key, path)`; return the new configuration."""
    for pattern in _PATHS:
        if is_read(config, pattern.partition(".*")[0]):
            config = _mapped(config, pattern.split("."), "", change)
    return config


def read_paths(config: Config) -> dict[str, str]:
    """Return each path that the run reads, by its key."""
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
        return value | {
            name: _mapped(value[name], rest, f"{key}.{name}", change) for name in chosen
        }
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value  # a value of the wrong type, which the checks report
    changed = _mapped(getattr(value, part), rest, f"{key}.{part}".removeprefix("."), change)
    return dataclasses.replace(value, **{part: changed})
