r"""The `\boxed{}` of a response."""

import re
from dataclasses import dataclass

_BOX = re.compile(
    r"(?:\\(?:boxed|fbox|framebox)\b|(?<![\w\\])boxed(?=\{))\s*(?:(?P<open>\{)|(?P<bare>[^\s{}\\$.,;]+))"
)
# Escaped characters are skipped: `\\{` is no brace of LaTeX's groups.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_THINK_END = "</think>"


@dataclass(frozen=True)
class Box:
    r"""One `\boxed{}`."""

    start: int
    """Index of its backslash in the text."""
    end: int
    """Index behind its closing brace."""
    content: str


def after_reasoning(text: str) -> str:
    """Return the text after the last `</think>`, and of that the text in the last `<answer>` tags.

    A response without these tags is returned unchanged.
    """
    text = text.rpartition(_THINK_END)[2]
    _, opened, answer = text.rpartition("<answer>")
    return answer.partition("</answer>")[0] if opened else text


def boxes(text: str) -> list[Box]:
    """Return the outermost boxes with balanced braces, in their order."""
    closed_by = matching_braces(text)
    found: list[Box] = []
    position = 0
    while match := _BOX.search(text, position):
        position = match.end()
        if match["bare"]:
            found.append(Box(match.start(), match.end(), match["bare"]))
        elif (end := closed_by.get(match.end() - 1)) is not None:
            found.append(Box(match.start(), end + 1, text[match.end() : end]))
            position = end + 1
    return found


def has_open_box(text: str) -> bool:
    r"""Return whether the last `\boxed{` of the text is never closed."""
    starts = [match.end() - 1 for match in _BOX.finditer(text) if match["open"]]
    return bool(starts) and starts[-1] not in matching_braces(text)


def matching_braces(text: str) -> dict[int, int]:
    """Return the index of the closing brace for the index of each opening brace that has one."""
    closed_by: dict[int, int] = {}
    opened: list[int] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            closed_by[opened.pop()] = brace.start()
    return closed_by
