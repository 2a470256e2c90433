"""How a key of the schema is written: its default, its help text and its bounds."""

from __future__ import annotations

from dataclasses import field
from typing import Any

CALLABLE = "module:callable"
"""Among the choices of a key: a function of the user's own is one too."""


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
) -> Any:
    """A field with its default, its help text and its bounds; `above` and `below` are themselves not allowed."""
    bounds = {"minimum": minimum, "above": above, "maximum": maximum, "below": below}
    metadata = {"help": help, "choices": choices, **bounds}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type) -> Any:
    """A nested group of keys."""
    return field(default_factory=kind)


def callable_place(name: str) -> tuple[str, str] | None:
    """The module of a `module:callable`, and what it is called there; None for any other name."""
    module, _, function = name.partition(":")
    return (module, function) if module and function else None
