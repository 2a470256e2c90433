"""Properties of single values. Worker processes import this module without the schema, which keeps
their start fast."""

import sys
from typing import Any


def callable_place(name: str) -> tuple[str, str] | None:
    """Return the module and the attribute of `module:callable`; None for any other name."""
    module, _, function = name.partition(":")
    return (module, function) if module and function else None


def is_finite_number(value: Any) -> bool:
    """Return whether a value is a number that a float can hold.

    The value is compared and not converted, because an integer may be too large for a float.
    """
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )
