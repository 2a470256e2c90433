"""Functions that define the keys and sections of the schema as dataclass fields."""

import difflib
from collections.abc import Collection
from dataclasses import field
from typing import Any

ConditionText = str | tuple[str, ...]
"""A condition (see `aligner.schema.conditions`), or several conditions that must all hold."""

CALLABLE = "module:callable"
"""Choice of a key that also accepts the name of a user function."""


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    read_if: ConditionText | None = None,
) -> Any:
    """Return the dataclass field of a configuration key.

    Args:
        default: Default value. Lists and mappings are copied for each configuration.
        help: Help text for the reference page.
        choices: Allowed values; empty if all values of the type are allowed.
        minimum: Inclusive lower bound.
        above: Exclusive lower bound.
        maximum: Inclusive upper bound.
        below: Exclusive upper bound.
        read_if: Condition under which a run reads the key (`aligner.schema.conditions`). None means
            the condition of the section.

    Example:
        `temperature: float = option(1.0, "Sampling temperature.", above=0)`
    """
    bounds = {"minimum": minimum, "above": above, "maximum": maximum, "below": below}
    metadata = {"help": help, "choices": choices, "read_if": read_if, **bounds}
    # A dataclass does not allow mutable defaults, which all configurations would share.
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type, read_if: ConditionText | None = None, **keys: ConditionText) -> Any:
    """Return the dataclass field of a nested section.

    Args:
        kind: Dataclass of the section.
        read_if: Condition under which a run reads the keys of the section. The keys that the
            condition itself names have the condition of the parent section. None means the
            condition of the parent section for all keys.
        keys: Conditions of single keys or subsections of `kind`, by field name. They are needed if
            several sections have the same dataclass.
    """
    return field(default_factory=kind, metadata={"read_if": read_if, "keys": keys})


def format_key_hint(
    section: str, entry: object, allowed: Collection[str], default_hint: str
) -> str:
    """Return a hint for an unknown entry of a section: a similar entry, or `default_hint`.

    Args:
        section: Dotted name of the section.
        entry: Unknown entry.
        allowed: Names of all entries.
        default_hint: Hint if no entry is similar.
    """
    close_names = difflib.get_close_matches(str(entry), allowed, n=1)
    return f"did you mean {section}.{close_names[0]}?" if close_names else default_hint
