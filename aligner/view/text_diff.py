"""Differences between two texts, word by word."""

import difflib
import re

# A word with the white space before it; the white space at the end of a text is a word too.
_WORD = re.compile(r"\s*\S+|\s+$")
Part = tuple[str, str]
"""Kind of a part of a text (`same`, `added` or `removed`), and its text."""


def compare_words(old: str, new: str) -> list[Part]:
    """Return the parts of two texts in their order; removed parts precede added parts."""
    old_words = _WORD.findall(old)
    new_words = _WORD.findall(new)
    matcher = difflib.SequenceMatcher(None, old_words, new_words)
    parts: list[Part] = []
    for operation, old_start, old_end, new_start, new_end in matcher.get_opcodes():
        if operation == "equal":
            parts.append(("same", "".join(new_words[new_start:new_end])))
            continue
        if old_start < old_end:
            parts.append(("removed", "".join(old_words[old_start:old_end])))
        if new_start < new_end:
            parts.append(("added", "".join(new_words[new_start:new_end])))
    return parts
