"""Access to the schema and to configurations by dotted keys.

This module lists the keys and sections of the schema, decides which keys a run reads, and reads and
replaces values of a configuration.
"""

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
"""Text that replaces secret values."""


@dataclass(frozen=True)
class Key:
    """A configuration key that a user may set."""

    name: str
    """Dotted key, as on the command line."""
    type_name: str
    """Python type of the values, such as `int | None`."""
    default: Any
    """Default value."""
    help: str
    """Help text."""
    choices: tuple[str, ...]
    """Allowed values; empty if all values of the type are allowed."""
    minimum: float | None
    """Inclusive lower bound."""
    above: float | None
    """Exclusive lower bound."""
    maximum: float | None
    """Inclusive upper bound."""
    below: float | None
    """Exclusive upper bound."""
    read: Condition
    """Condition under which a run reads the key: the key's own, or that of its section."""
    is_mapping: bool
    """Whether the user chooses the entries below the key, as in `model.config.hidden_size`."""

    @property
    def allows_null(self) -> bool:
        """Whether the key may be null."""
        return self.type_name.endswith(" | None")


@dataclass(frozen=True)
class Section:
    """A section of the schema with its own keys, without the keys of its subsections."""

    name: str
    """Dotted name; empty for the root."""
    help: str
    """Docstring of the section's dataclass."""
    read: Condition
    """Condition under which a run reads the keys without a condition of their own."""
    keys: tuple[Key, ...]
    """Keys in the schema's order."""


def _sections(
    kind: type,
    name: str,
    read: Condition = (),
    above: Condition = (),
    of_keys: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Section]:
    """Yield a section, then its subsections recursively.

    Args:
        kind: Dataclass of the section.
        name: Dotted name of the section; empty for the root.
        read: Condition of the section.
        above: Condition of the section's parent. It applies to the keys that `read` names, because
            a key must be read to decide whether its section is read.
        of_keys: Conditions of single keys or subsections, by field name. They take precedence over
            the conditions in the fields.
    """
    hints = typing.get_type_hints(kind)
    keys_in_condition = {
        term.key for alternatives in read for clause in alternatives for term in clause
    }
    keys = []
    nested = []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        dotted = f"{name}.{field.name}" if name else field.name
        condition_text = of_keys.get(field.name, field.metadata["read"])
        if dataclasses.is_dataclass(hint):
            conditions = (
                (read, above)
                if condition_text is None
                else (parse_condition(condition_text, dotted), read)
            )
            nested.append((typing.cast(type, hint), dotted, *conditions, field.metadata["keys"]))
            continue
        default_condition = above if dotted in keys_in_condition else read
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
                read=default_condition
                if condition_text is None
                else parse_condition(condition_text, name),
                is_mapping=typing.get_origin(hint) is dict,
            )
        )
    yield Section(name, (kind.__doc__ or "").strip(), read, tuple(keys))
    for inner in nested:
        yield from _sections(*inner)


@lru_cache(maxsize=1)
def schema_sections() -> tuple[Section, ...]:
    """Return all sections of the schema in the schema's order, beginning with the root."""
    return tuple(_sections(Config, ""))


@lru_cache(maxsize=1)
def schema_keys() -> dict[str, Key]:
    """Return all keys of the schema by dotted name."""
    return {key.name: key for section in schema_sections() for key in section.keys}


def known_key(name: str) -> str | None:
    """Return the schema key with a name, or the mapping key whose entry has the name.

    Returns None if there is no such key.

    Example:
        `known_key("model.config.hidden_size")` returns `"model.config"`.
    """
    keys = schema_keys()
    if name in keys:
        return name
    return next(
        (
            key
            for key, schema_key in keys.items()
            if schema_key.is_mapping and name.startswith(f"{key}.")
        ),
        None,
    )


def check_key(key: str, groups: Iterable[str] = ()) -> None:
    """Raise ConfigError if a name is not a key, a section, or an entry of a mapping key.

    The message suggests a similar name.

    Args:
        key: Dotted name.
        groups: Further names that may be suggested.
    """
    sections = {section.name for section in schema_sections() if section.name}
    if key in sections or known_key(key) is not None:
        return
    raise ConfigError(
        f"{key}: unknown key; {_suggestion(key, [*schema_keys(), *sections, *groups])}"
    )


def _suggestion(key: str, candidates: Sequence[str]) -> str:
    """Return a hint with the candidates that are similar to an unknown key."""
    parent, _, last = key.rpartition(".")
    if parent in candidates:
        siblings = sorted(
            name.rpartition(".")[2] for name in candidates if name.rpartition(".")[0] == parent
        )
        close_names = difflib.get_close_matches(last, siblings, n=1)
        return (
            f"did you mean {parent}.{close_names[0]}?"
            if close_names
            else f"allowed in {parent}: {', '.join(siblings)}"
        )
    same_last_part = [name for name in candidates if name.rpartition(".")[2] == last]
    close_names = (
        same_last_part
        if same_last_part and not parent
        else difflib.get_close_matches(key, candidates, n=1)
    )
    return (
        f"did you mean {' or '.join(close_names)}?" if close_names else "see docs/configuration.md"
    )


def value_at(config: Config, name: str) -> Any:
    """Return the value of a dotted key or section."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def unmet(config: Config, condition: Condition) -> tuple[Term, ...]:
    """Return the terms that must change so that a condition holds; empty if it holds.

    Of several alternatives, the one with the fewest unmet terms is chosen. A term also counts as
    unmet if the run does not read its key; the unmet terms of that key are then included.
    """
    clauses = (
        min((_unmet_terms(config, clause) for clause in alternatives), key=len)
        for alternatives in condition
    )
    return tuple(dict.fromkeys(term for clause in clauses for term in clause))


def _unmet_terms(config: Config, clause: Sequence[Term]) -> list[Term]:
    """Return the unmet terms of a clause, including those of the keys in the clause."""
    unmet_terms: dict[Term, None] = {}
    for term in clause:
        unmet_terms |= dict.fromkeys(unmet(config, schema_keys()[term.key].read))
        unmet_terms |= {} if term.holds(value_at(config, term.key)) else {term: None}
    return list(unmet_terms)


def is_read(config: Config, name: str) -> bool:
    """Return whether the run reads a key."""
    return not unmet(config, schema_keys()[name].read)


def only_read(config: Config) -> Config:
    """Return the configuration with the default values of all keys that the run does not read."""
    # Most of the hundreds of keys share the condition of their section, so that each distinct
    # condition is evaluated only once.
    conditions = {key.read for key in schema_keys().values()}
    unread = {condition for condition in conditions if unmet(config, condition)}
    return with_values(
        config, {name: key.default for name, key in schema_keys().items() if key.read in unread}
    )


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy of the configuration with other values of some dotted keys.

    Later values take precedence. A name may also be a section, or an entry of a mapping.
    """
    new_config: Config = _replaced(config, values)
    return new_config


def _replaced(value: Any, changes: Mapping[str, Any]) -> Any:
    """Return a copy of a section, a mapping or a value with changes.

    Each section is copied only once, because the names are grouped by their first part.

    Args:
        value: Section, mapping or value.
        changes: New values by dotted name relative to `value`. The empty name replaces `value`.
    """
    groups: dict[str, dict[str, Any]] = {}
    for name, new in changes.items():
        if not name:
            value = new
            groups = {}
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
    """Return the nested values of a configuration without secrets.

    The values of environment variables are masked, so that the result may be shown to users who
    cannot read the run directory.
    """
    values = dataclasses.asdict(config)
    slurm = values["cluster"]["slurm"]
    for job_settings in (slurm, *slurm["roles"].values()):
        job_settings["environment"] = dict.fromkeys(job_settings["environment"], MASK)
    return values
