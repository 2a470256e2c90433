"""Texts with fields of a record in braces, such as `Question: {question}`."""

import re
from collections.abc import Mapping

_FIELD = re.compile(r"\{(\w+)\}")


def template_fields(template: str) -> tuple[str, ...]:
    """The names that a template has in braces, in the order in which they come, each once."""
    return tuple(dict.fromkeys(_FIELD.findall(template)))


def filled(template: str, values: Mapping[str, str]) -> str:
    """The template with its fields filled; other braces, and those of the values, stay. Raises
    KeyError for a missing one."""
    return _FIELD.sub(lambda field: values[field[1]], template)
