"""How a key of the schema is written: its default, its help text, its bounds, and when a run reads
it."""

import difflib
from collections.abc import Collection
from dataclasses import field
from typing import Any

Read = str | tuple[str, ...]
"""A condition, or several of which all must hold."""

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
    read: Read | None = None,
) -> Any:
    """A field with its default, its help text and its bounds; `above` and `below` are themselves
    not allowed.

    `read` is the condition under which a run reads the key (`aligner.schema.conditions`), instead
    of its section's.
    """
    bounds = {"minimum": minimum, "above": above, "maximum": maximum, "below": below}
    metadata = {"help": help, "choices": choices, "read": read, **bounds}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type, read: Read | None = None, **keys: Read) -> Any:
    """A nested group of keys, and the condition under which a run reads them; of those that it
    names only what is above holds.

    `keys` are the conditions of single keys, or sections, of a kind that several sections have in
    common.
    """
    return field(default_factory=kind, metadata={"read": read, "keys": keys})


def key_hint(section: str, entry: object, allowed: Collection[str], otherwise: str) -> str:
    """What to tell of an entry that a section does not have: the one that it is near to, or
    `otherwise`."""
    close = difflib.get_close_matches(str(entry), allowed, n=1)
    return f"did you mean {section}.{close[0]}?" if close else otherwise
