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
from aligner.masking import MASK, is_secret_entry, mask_secrets
from aligner.schema import Config
from aligner.schema.conditions import Condition, Term, parse_condition
from aligner.schema.environment_text import Reference, with_references
from aligner.schema.foreign_names import describe_foreign_name
from aligner.schema.renamed import REMOVED_KEYS


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
    condition: Condition
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
    condition: Condition
    """Condition under which a run reads the keys without a condition of their own."""
    keys: tuple[Key, ...]
    """Keys in the schema's order."""


def _iterate_sections(
    kind: type,
    name: str,
    condition: Condition = (),
    parent_condition: Condition = (),
    key_conditions: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Section]:
    """Yield a section, then its subsections recursively.

    Args:
        kind: Dataclass of the section.
        name: Dotted name of the section; empty for the root.
        condition: Condition of the section.
        parent_condition: Condition of the section's parent. It applies to the keys that `condition`
            names, because a key must be read to decide whether its section is read.
        key_conditions: Conditions of single keys or subsections, by field name. They take
            precedence over the conditions in the fields.
    """
    hints = typing.get_type_hints(kind)
    # Without this exception, `algorithm.trainer=online` as the condition of `algorithm` would also
    # be the condition of `algorithm.trainer` itself, and is_read would not terminate.
    keys_in_condition = {
        term.key for alternatives in condition for clause in alternatives for term in clause
    }

    keys = []
    subsections = []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        dotted_key = f"{name}.{field.name}" if name else field.name
        condition_text = key_conditions.get(field.name, field.metadata["read_if"])
        if dataclasses.is_dataclass(hint):
            if condition_text is None:
                conditions = (condition, parent_condition)
            else:
                conditions = (parse_condition(condition_text, dotted_key), condition)
            subsections.append(
                (typing.cast(type, hint), dotted_key, *conditions, field.metadata["keys"])
            )
            continue

        default_condition = parent_condition if dotted_key in keys_in_condition else condition
        factory = field.default_factory
        keys.append(
            Key(
                name=dotted_key,
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
                condition=default_condition
                if condition_text is None
                else parse_condition(condition_text, name),
                is_mapping=typing.get_origin(hint) is dict,
            )
        )

    yield Section(name, (kind.__doc__ or "").strip(), condition, tuple(keys))
    for subsection in subsections:
        yield from _iterate_sections(*subsection)


@lru_cache(maxsize=1)
def get_schema_sections() -> tuple[Section, ...]:
    """Return all sections of the schema in the schema's order, beginning with the root."""
    return tuple(_iterate_sections(Config, ""))


@lru_cache(maxsize=1)
def get_schema_keys() -> dict[str, Key]:
    """Return all keys of the schema by dotted name."""
    return {key.name: key for section in get_schema_sections() for key in section.keys}


def find_schema_key(name: str) -> str | None:
    """Return the schema key with a name, or the mapping key whose entry has the name.

    Returns None if there is no such key.

    Example:
        `find_schema_key("model.config.hidden_size")` returns `"model.config"`.
    """
    keys = get_schema_keys()
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

    The message suggests a similar name, or the key that replaces a name of another system.

    Args:
        key: Dotted name.
        groups: Further names that may be suggested.
    """
    sections = {section.name for section in get_schema_sections() if section.name}
    if key in sections or find_schema_key(key) is not None:
        return
    if key in REMOVED_KEYS:
        raise ConfigError(f"{key}: this key was removed; {REMOVED_KEYS[key]}")
    candidates = [*get_schema_keys(), *sections, *groups]
    # A part such as `temperature`, which occurs in aligner's keys, needs no other system's name.
    own_parts = {name.rpartition(".")[2] for name in candidates}
    is_own_part = key.rpartition(".")[2] in own_parts
    hint = describe_foreign_name(key, is_exact=is_own_part) or _suggest_key(key, candidates)
    raise ConfigError(f"{key}: unknown key; {hint}")


def _suggest_key(key: str, candidates: Sequence[str]) -> str:
    """Return a hint with the candidates that are similar to an unknown key."""
    parent, _, last_part = key.rpartition(".")
    if parent in candidates:
        siblings = sorted(
            name.rpartition(".")[2] for name in candidates if name.rpartition(".")[0] == parent
        )
        close_names = difflib.get_close_matches(last_part, siblings, n=1)
        if close_names:
            return f"did you mean {parent}.{close_names[0]}?"
        return f"allowed in {parent}: {', '.join(siblings)}"

    # A key without its section, such as `temperature`, is ambiguous: name all keys that end in it.
    same_last_part = [name for name in candidates if name.rpartition(".")[2] == last_part]
    close_names = (
        same_last_part
        if same_last_part and not parent
        else difflib.get_close_matches(key, candidates, n=1)
    )
    return (
        f"did you mean {' or '.join(close_names)}?" if close_names else "see docs/configuration.md"
    )


def get_value(config: Config, name: str) -> Any:
    """Return the value of a dotted key or section."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def find_unmet_terms(config: Config, condition: Condition) -> tuple[Term, ...]:
    """Return the terms that must change so that a condition holds; empty if it holds.

    Of several alternatives, the one with the fewest unmet terms is chosen. A term also counts as
    unmet if the run does not read its key; the unmet terms of that key are then included.
    """
    # A condition is a conjunction of alternatives, so that its unmet terms are the union of one
    # clause for each of them. Duplicates are removed, but the order of the terms is kept.
    clauses = (
        min((_find_unmet_in_clause(config, clause) for clause in alternatives), key=len)
        for alternatives in condition
    )
    return tuple(dict.fromkeys(term for clause in clauses for term in clause))


def _find_unmet_in_clause(config: Config, clause: Sequence[Term]) -> list[Term]:
    """Return the unmet terms of a clause, including those of the keys in the clause."""
    unmet_terms: dict[Term, None] = {}
    for term in clause:
        # A value that the run does not read has no effect, even if it meets the term.
        unmet_terms |= dict.fromkeys(
            find_unmet_terms(config, get_schema_keys()[term.key].condition)
        )
        unmet_terms |= {} if term.is_met(get_value(config, term.key)) else {term: None}
    return list(unmet_terms)


def is_read(config: Config, name: str) -> bool:
    """Return whether the run reads a key."""
    return not find_unmet_terms(config, get_schema_keys()[name].condition)


def with_unread_defaults(config: Config) -> Config:
    """Return the configuration with the default values of all keys that the run does not read."""
    # Most of the hundreds of keys share the condition of their section, so that each distinct
    # condition is evaluated only once.
    conditions = {key.condition for key in get_schema_keys().values()}
    unread = {condition for condition in conditions if find_unmet_terms(config, condition)}
    return with_values(
        config,
        {name: key.default for name, key in get_schema_keys().items() if key.condition in unread},
    )


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy of the configuration with other values of some dotted keys.

    Later values take precedence. A name may also be a section, or an entry of a mapping.
    """
    new_config: Config = _replace(config, values)
    return new_config


def _replace(value: Any, changes: Mapping[str, Any]) -> Any:
    """Return a copy of a section, a mapping or a value with changes.

    Each section is copied only once, because the names are grouped by their first part.

    Args:
        value: Section, mapping or value.
        changes: New values by dotted name relative to `value`. The empty name replaces `value`.
    """
    groups: dict[str, dict[str, Any]] = {}
    for name, new_value in changes.items():
        if not name:
            # A new value of the whole section replaces the earlier changes of its keys.
            value = new_value
            groups = {}
            continue
        part, _, rest = name.partition(".")
        groups.setdefault(part, {})[rest] = new_value

    if not groups:
        return value
    if isinstance(value, dict):
        return value | {part: _replace(value.get(part), inner) for part, inner in groups.items()}
    return dataclasses.replace(
        value, **{part: _replace(getattr(value, part), inner) for part, inner in groups.items()}
    )


def get_masked_values(config: Config) -> dict[str, Any]:
    """Return the nested values of a configuration without secrets.

    The result may be shown to users who cannot read the run directory. Texts from environment
    variables are replaced by their interpolations. The variables of jobs, passwords in URLs,
    and entries with names such as `api_key` are masked.
    """
    values = with_references(dataclasses.asdict(config))
    jobs = [values["cluster"][kind] for kind in ("slurm", "kubernetes", "skypilot")]
    for job in jobs:
        for settings in (job, *job["roles"].values()):
            settings["environment"] = {
                name: value if isinstance(value, Reference) else MASK
                for name, value in settings["environment"].items()
            }
    masked: dict[str, Any] = _mask_value(values)
    return masked


def _mask_value(value: Any, name: str = "") -> Any:
    """Return a value without secrets.

    Args:
        value: Nested mappings and lists of values.
        name: Name of the key or entry that has the value.
    """
    if isinstance(value, dict):
        return {key: _mask_value(entry, str(key)) for key, entry in value.items()}
    if isinstance(value, list):
        return [_mask_value(entry, name) for entry in value]
    if not isinstance(value, str):
        return value
    if isinstance(value, Reference):
        return Reference(mask_secrets(value))
    return MASK if value and is_secret_entry(name) else mask_secrets(value)
