"""The schema as a flat list of dotted keys, for error messages, checks and the reference page."""

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from aligner.errors import ConfigError
from aligner.schema import Config
from aligner.schema.conditions import Condition, Term, parse_condition

MASK = "***"
"""Stands for a value that is kept secret."""


@dataclass(frozen=True)
class Key:
    """One key that a user may write."""

    name: str
    """Dotted, as on the command line."""
    type_name: str
    default: Any
    help: str
    choices: tuple[str, ...]
    minimum: float | None
    above: float | None
    maximum: float | None
    below: float | None
    read: Condition
    """When a run reads it, its section's included."""
    is_mapping: bool
    """Entries below the key are the user's own (`model.config.hidden_size`)."""

    @property
    def allows_null(self) -> bool:
        """Whether null is a value of the key."""
        return self.type_name.endswith(" | None")


@dataclass(frozen=True)
class Section:
    """A group of keys with what it is for."""

    name: str
    """Dotted; empty for the root."""
    help: str
    read: Condition
    """When a run reads those of its keys that do not say otherwise."""
    keys: tuple[Key, ...]


def _sections(
    kind: type,
    name: str,
    read: Condition = (),
    above: Condition = (),
    of_keys: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Section]:
    """A section and those in it: `read` is its condition, `above` what holds for the keys that this
    names, and `of_keys` are conditions of single keys.
    """
    hints = typing.get_type_hints(kind)
    named = {term.key for alternatives in read for clause in alternatives for term in clause}
    keys, nested = [], []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        dotted = f"{name}.{field.name}" if name else field.name
        written = of_keys.get(field.name, field.metadata["read"])
        if dataclasses.is_dataclass(hint):
            conditions = (
                (read, above) if written is None else (parse_condition(written, dotted), read)
            )
            nested.append((typing.cast(type, hint), dotted, *conditions, field.metadata["keys"]))
            continue
        own = above if dotted in named else read
        factory = field.default_factory
        keys.append(
            Key(
                name=dotted,
                type_name=(
                    str(hint).replace("typing.", "") if typing.get_origin(hint) else hint.__name__
                ),
                default=field.default if factory is dataclasses.MISSING else factory(),
                help=field.metadata["help"],
                choices=field.metadata["choices"],
                minimum=field.metadata["minimum"],
                above=field.metadata["above"],
                maximum=field.metadata["maximum"],
                below=field.metadata["below"],
                read=own if written is None else parse_condition(written, name),
                is_mapping=typing.get_origin(hint) is dict,
            )
        )
    yield Section(name, (kind.__doc__ or "").strip(), read, tuple(keys))
    for inner in nested:
        yield from _sections(*inner)


@lru_cache(maxsize=1)
def schema_sections() -> tuple[Section, ...]:
    """Every section of the schema, the root first, in the schema's order."""
    return tuple(_sections(Config, ""))


@lru_cache(maxsize=1)
def schema_keys() -> dict[str, Key]:
    """Every key of the schema by its dotted name."""
    return {key.name: key for section in schema_sections() for key in section.keys}


def known_key(name: str) -> str | None:
    """The key of the schema that a name is, or an entry of; None for any other."""
    keys = schema_keys()
    if name in keys:
        return name
    return next(
        (key for key, known in keys.items() if known.is_mapping and name.startswith(f"{key}.")),
        None,
    )


def check_key(key: str, groups: Iterable[str] = ()) -> None:
    """Raise ConfigError, with the nearest key, unless `key` is a key, a section or an entry of a
    mapping."""
    sections = {section.name for section in schema_sections() if section.name}
    if key in sections or known_key(key) is not None:
        return
    raise ConfigError(
        f"{key}: unknown key; {_suggestion(key, [*schema_keys(), *sections, *groups])}"
    )


def _suggestion(key: str, candidates: Sequence[str]) -> str:
    parent, _, last = key.rpartition(".")
    if parent in candidates:
        siblings = sorted(
            name.rpartition(".")[2] for name in candidates if name.rpartition(".")[0] == parent
        )
        close = difflib.get_close_matches(last, siblings, n=1)
        return (
            f"did you mean {parent}.{close[0]}?"
            if close
            else f"allowed in {parent}: {', '.join(siblings)}"
        )
    same = [name for name in candidates if name.rpartition(".")[2] == last]
    close = same if same and not parent else difflib.get_close_matches(key, candidates, n=1)
    return f"did you mean {' or '.join(close)}?" if close else "see docs/configuration.md"


def value_at(config: Config, name: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def unmet(config: Config, condition: Condition) -> tuple[Term, ...]:
    """What would have to be otherwise for a condition to hold, in the fewest changes; nothing where
    it holds.

    A term does not hold either where the run does not read its key.
    """
    clauses = (
        min((_unmet_terms(config, clause) for clause in alternatives), key=len)
        for alternatives in condition
    )
    return tuple(dict.fromkeys(term for clause in clauses for term in clause))


def _unmet_terms(config: Config, clause: Sequence[Term]) -> list[Term]:
    found: dict[Term, None] = {}
    for term in clause:
        found |= dict.fromkeys(unmet(config, schema_keys()[term.key].read))
        found |= {} if term.holds(value_at(config, term.key)) else {term: None}
    return list(found)


def is_read(config: Config, name: str) -> bool:
    """Whether the run reads a key."""
    return not unmet(config, schema_keys()[name].read)


def only_read(config: Config) -> Config:
    """The configuration with the schema's own values of the keys that the run does not read."""
    # of hundreds of keys, many of which have a section's
    conditions = {key.read for key in schema_keys().values()}
    unread = {condition for condition in conditions if unmet(config, condition)}
    return with_values(
        config, {name: key.default for name, key in schema_keys().items() if key.read in unread}
    )


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the configuration with other values of some dotted keys.

    Later values take precedence. A name may also be a section, or an entry of a mapping.
    """
    changed: Config = _replaced(config, values)
    return changed


def _replaced(value: Any, changes: Mapping[str, Any]) -> Any:
    """Return a value with changes by dotted names, which are relative to it; an empty name is the
    value itself.

    Each section is copied only once, because the names are grouped by their first part.
    """
    groups: dict[str, dict[str, Any]] = {}
    for name, new in changes.items():
        if not name:
            value, groups = new, {}
            continue
        part, _, rest = name.partition(".")
        groups.setdefault(part, {})[rest] = new

    if not groups:
        return value
    if isinstance(value, dict):
        return value | {part: _replaced(value.get(part), inner) for part, inner in groups.items()}
    return dataclasses.replace(
        value, **{part: _replaced(getattr(value, part), inner) for part, inner in groups.items()}
    )


def shown(config: Config) -> dict[str, Any]:
    """The configuration, nested, for whoever may not read the run directory: without the values of
    environment variables."""
    values = dataclasses.asdict(config)
    slurm = values["cluster"]["slurm"]
    for place in (slurm, *slurm["roles"].values()):
        place["environment"] = dict.fromkeys(place["environment"], MASK)
    return values
