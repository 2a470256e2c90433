"""Paths that name another experiment's result: `experiment:NAME`, or `experiment:NAME/FILE` for a
file in it.

`experiment:NAME@3` is that of its third round.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aligner.errors import ConfigError
from aligner.schema import Config
from aligner.schema.keys import is_read
from aligner.schema.run import MOST_ROUNDS

_PREFIX = "experiment:"
_NAME = re.compile(r"[\w.+=-]+")
_ROUND = re.compile(rf"0*[1-9]\d{{0,{len(str(MOST_ROUNDS)) - 1}}}", re.ASCII)
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
    """A path's value that names the result of an experiment."""

    key: str
    """Where the configuration has it."""
    experiment: str
    file: str | None
    """A file in the result; the result itself when None."""
    round: int | None = None
    """Which round of the experiment; that of the one that has the reference when None."""

    @property
    def text(self) -> str:
        """The value, as it was given."""
        return (
            _PREFIX
            + round_name(self.experiment, self.round)
            + (f"/{self.file}" if self.file else "")
        )


def round_name(experiment: str, number: int | None) -> str:
    """What a round of an experiment is called; the experiment itself where None."""
    return experiment if number is None else f"{experiment}@{number}"


def parse_reference(key: str, text: str) -> Reference | None:
    """The reference that a path's value is; None for an ordinary path. Raises ConfigError for a
    malformed one."""
    if not text.startswith(_PREFIX):
        return None
    named, _, file = text.removeprefix(_PREFIX).partition("/")
    experiment, counted, number = named.partition("@")
    parts = file.split("/")
    if not _NAME.fullmatch(experiment) or (file and any(part in ("", ".", "..") for part in parts)):
        raise ConfigError(
            f"{key}={text}: expected experiment:NAME, or experiment:NAME/FILE for a file in its"
            " result"
        )
    if counted and not (_ROUND.fullmatch(number) and int(number) <= MOST_ROUNDS):
        raise ConfigError(
            f"{key}={text}: @{number} is no round; they are counted from 1 to {MOST_ROUNDS}:"
            f" experiment:{experiment}@3"
        )
    return Reference(key, experiment, file or None, int(number) if counted else None)


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
        return value | {
            name: _mapped(value[name], rest, f"{key}.{name}", change) for name in chosen
        }
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value  # not what the schema wants there, which the checks tell
    changed = _mapped(getattr(value, part), rest, f"{key}.{part}".removeprefix("."), change)
    return dataclasses.replace(value, **{part: changed})
