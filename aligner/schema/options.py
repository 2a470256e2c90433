"""How a key of the schema is written: its default, its help text and its bounds."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(
    default: Any, help: str, *, choices: tuple[str, ...] = (), minimum: float | None = None, maximum: float | None = None
) -> Any:
    """A field with its default, its help text and its bounds."""
    metadata = {"help": help, "choices": choices, "minimum": minimum, "maximum": maximum}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type) -> Any:
    """A nested group of keys."""
    return field(default_factory=kind)
