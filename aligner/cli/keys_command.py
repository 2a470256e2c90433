"""`aligner keys`: the configuration keys whose name or help contains a text."""

import argparse
import json
import textwrap

from aligner.config.reference_page import format_default, format_type
from aligner.errors import ConfigError
from aligner.schema.conditions import format_condition
from aligner.schema.foreign_names import describe_foreign_name
from aligner.schema.keys import Key, get_schema_keys

_WIDTH = 100


def print_keys(parsed: argparse.Namespace) -> None:
    """Print the keys whose name or help contains the pattern, without regard to case.

    Raises:
        ConfigError: No key contains the pattern.
    """
    pattern = parsed.pattern.lower()
    keys = [
        key
        for key in get_schema_keys().values()
        if pattern in key.name or pattern in key.help.lower()
    ]
    if not keys:
        hint = describe_foreign_name(parsed.pattern) or "docs/configuration.md lists all keys"
        raise ConfigError(f"{parsed.pattern}: no key contains this text; {hint}")
    if parsed.json:
        print(json.dumps([_describe(key) for key in keys], indent=2))
        return
    # Keys with the pattern in their name are printed last, next to the prompt of the shell.
    keys.sort(key=lambda key: pattern in key.name)
    print("\n".join(_format(key) for key in keys))


def _describe(key: Key) -> dict[str, object]:
    """Return the JSON object of a key."""
    return {
        "key": key.name,
        "type": format_type(key).replace("`", ""),
        "default": key.default,
        "choices": list(key.choices),
        "help": key.help,
        "used_only_when": format_condition(key.condition).replace("`", "") or None,
    }


def _format(key: Key) -> str:
    """Return the lines of a key: name, type and default, then its help."""
    kind = format_type(key).replace("`", "")
    text = textwrap.fill(
        key.help, _WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
    )
    return f"{key.name} ({kind}; default {format_default(key.default)})\n{text}"
