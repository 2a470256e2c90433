"""Keys that had another name in an earlier release."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

RENAMED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "algorithm.overlong_buffer": (
            "algorithm.overlong_fraction",
            "it is a share of rollout.max_response_tokens now, not a number of tokens",
        ),
    }
)
"""Old key, or section, to the new one and what else has changed about it (empty: nothing)."""


def renamed_key(key: str, table: Mapping[str, tuple[str, str]] = RENAMED) -> str | None:
    """What to write instead of a key that was renamed, or that lies in a section that was; None for any other."""
    for old, (new, change) in table.items():
        if key == old or key.startswith(f"{old}."):
            return f"renamed to {new}{key.removeprefix(old)}" + (f"; {change}" if change else "")
    return None
