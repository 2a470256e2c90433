"""Texts with fields of a record in braces, such as `Question: {question}`."""

import re
from collections.abc import Mapping

_FIELD = re.compile(r"\{(\w+)\}")
_OPTIONAL = re.compile(r"\s*\{(\w+)\?\}")
"""A field that may be missing or empty, with the space before it."""


def template_fields(template: str) -> tuple[str, ...]:
    """The names that a template has in braces, in the order in which they come, each once."""
    return tuple(dict.fromkeys(_FIELD.findall(template)))


def filled(template: str, values: Mapping[str, str]) -> str:
    """The template with its fields filled; other braces, and those of the values, stay. Raises
    KeyError for a missing one."""
    return _FIELD.sub(lambda field: values[field[1]], template)


def optional_fields(template: str) -> tuple[str, ...]:
    """Return the names that a template has as `{name?}`: records may lack them."""
    return tuple(dict.fromkeys(_OPTIONAL.findall(template)))


def without_empty(template: str, values: Mapping[str, str]) -> str:
    """Return the template with `{name}` for each `{name?}` that has a value, and without the
    others and the space before them."""

    def kept(found: re.Match[str]) -> str:
        return found[0].replace("?}", "}") if values.get(found[1], "").strip() else ""

    return _OPTIONAL.sub(kept, template)
