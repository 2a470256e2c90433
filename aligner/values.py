"""Properties of single values.

Worker processes import this module without the schema, so that the processes start fast.
"""

import sys
from typing import Any


def split_callable_name(name: str) -> tuple[str, str] | None:
    """Return the module and the attribute of a name `module:callable`.

    Returns None if the name has another form. The module is not imported.
    """
    module, _, function = name.partition(":")
    return (module, function) if module and function else None


def is_finite_number(value: Any) -> bool:
    """Return whether a value is a number that a float can hold; booleans are not numbers here."""
    # The value is compared, not converted: float() raises OverflowError for a large integer.
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )
