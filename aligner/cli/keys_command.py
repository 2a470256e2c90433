"""`aligner keys`: the configuration keys whose name or help contains a text."""

import argparse
import difflib
import fnmatch
import json
import re
import shutil
import textwrap
from collections.abc import Sequence

from aligner.errors import ConfigError
from aligner.schema.conditions import format_condition
from aligner.schema.foreign_names import describe_foreign_name
from aligner.schema.key_texts import format_default, format_type
from aligner.schema.keys import Key, get_schema_keys

_MAX_WIDTH = 100
# The first sentence of a help. An abbreviation such as `e.g.` is not followed by a capital letter.
_FIRST_SENTENCE = re.compile(r".+?[.](?= [A-Z`]|$)")


def print_keys(parsed: argparse.Namespace) -> None:
    """Print the keys whose name or help matches the pattern, without regard to case.

    The exact name of a key prints only this key, with its complete help.

    Raises:
        ConfigError: No key matches the pattern.
    """
    pattern = parsed.pattern.lower()
    keys = _find_keys(pattern)
    foreign_name = describe_foreign_name(pattern) if pattern else None
    if not keys:
        raise ConfigError(f"{parsed.pattern}: no such key; {foreign_name or _suggest(pattern)}")

    if parsed.json:
        print(json.dumps([_describe(key) for key in keys], indent=2))
        return
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
    is_complete = len(keys) == 1
    print("\n".join(_format(key, width, is_complete=is_complete) for key in keys))
    if foreign_name is not None:
        note = foreign_name[0].upper() + foreign_name[1:]
        print(textwrap.fill(note, width, break_on_hyphens=False, break_long_words=False))


def _find_keys(pattern: str) -> Sequence[Key]:
    """Return the keys that match a pattern in lower case: a text, or a name with `*` or `?`.

    Keys with the text in their name follow the keys with the text only in their help, so that they
    are next to the prompt of the shell.
    """
    keys = get_schema_keys()
    if pattern in keys:
        return [keys[pattern]]
    if "*" in pattern or "?" in pattern:
        return [key for key in keys.values() if fnmatch.fnmatchcase(key.name, pattern)]
    in_name = [key for key in keys.values() if pattern in key.name]
    in_help = [
        key for key in keys.values() if pattern in key.help.lower() and pattern not in key.name
    ]
    return [*in_help, *in_name]


def _suggest(pattern: str) -> str:
    """Return a hint for a pattern that matches no key: the keys with similar names."""
    keys = get_schema_keys()
    names_by_part: dict[str, list[str]] = {}
    for name in keys:
        names_by_part.setdefault(name.rpartition(".")[2], []).append(name)

    similar_names = difflib.get_close_matches(pattern, keys, n=3)
    # A name without its section, such as `temprature`, is similar only to the last part of a key.
    for part in difflib.get_close_matches(pattern.rpartition(".")[2], names_by_part, n=2):
        similar_names += names_by_part[part]
    if similar_names:
        return f"similar keys: {', '.join(dict.fromkeys(similar_names))}"
    return "`aligner keys` lists all keys"


def _describe(key: Key) -> dict[str, object]:
    """Return the JSON object of a key."""
    return {
        "key": key.name,
        "type": _without_code_marks(format_type(key)),
        "default": key.default,
        "choices": list(key.choices),
        "help": key.help,
        "used_only_when": _without_code_marks(format_condition(key.condition)) or None,
    }


def _format(key: Key, width: int, *, is_complete: bool) -> str:
    """Return the lines of a key: name, type and default, then its help.

    Args:
        key: The key.
        width: Width of a line in columns.
        is_complete: Whether to return the complete help and the condition under which a run reads
            the key, instead of the first sentence of the help.
    """
    kind = _without_code_marks(format_type(key))
    paragraphs = [f"{key.name} ({kind}; default {format_default(key.default)})"]
    sentence = _FIRST_SENTENCE.match(key.help)
    paragraphs.append(key.help if is_complete or sentence is None else sentence[0])
    condition = _without_code_marks(format_condition(key.condition))
    if is_complete and condition:
        paragraphs.append(f"Used only when {condition}.")
    return "\n".join(
        textwrap.fill(
            paragraph,
            width,
            initial_indent="" if index == 0 else "    ",
            subsequent_indent="    ",
            break_on_hyphens=False,
            break_long_words=False,
        )
        for index, paragraph in enumerate(paragraphs)
    )


def _without_code_marks(text: str) -> str:
    """Return a text without the backticks that mark code in Markdown."""
    return text.replace("`", "")
