r"""The answer of a response to a mathematical problem: its `\boxed{}`, or the answer it states."""

import itertools
import re

from aligner.rewards.boxes import Box, after_reasoning, boxes, has_open_box

_SPACE = r"(?:[\s$]|\\quad|\\qquad|\\[ ,;])*"
_TEXT_OPEN = r"(?:\\(?:text|mbox)\s*\{)?\s*"
_CONNECTOR = re.compile(
    rf"{_SPACE}(?:[,;]\s*{_TEXT_OPEN}(?:and|or)?|{_TEXT_OPEN}(?:and|or))\s*\}}?{_SPACE}"
)
_UNIT_BEHIND = re.compile(
    r"\s*(?:\\?%|\^\s*\{?\\circ\}?"
    r"|(?:\\[,; ]|~)*\s*\\(?:text|mathrm)\s*\{[^{}]{1,30}\}(?:\s*\^\s*\{?\d\}?)?)"
)
_ANNOUNCED = re.compile(
    r"(?:\banswer\b[^\n=:$\d]{0,60}?(?:\bis\b|:|=)|#{4}(?!#))\s*", re.IGNORECASE
)
_MATH = re.compile(
    r"\$\$(?P<display>.+?)\$\$|(?<!\\)\$(?P<inline>[^$\n]+?)(?<!\\)\$|\\\((?P<round>.+?)\\\)"
    r"|\\\[(?P<square>.+?)\\\]",
    re.DOTALL,
)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")
_PLAIN_NUMBER = re.compile(
    r"(?<![\w.])-?\s?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?(?:\s?/\s?\d+)?|\.\d+)(?![\w/]|[.,]\d)%?"
)
_CHOICE = re.compile(r"(?<![\w])\(([A-J])\)")
_LONG = 80


def final_answer(response: str) -> str | None:
    r"""Return the LaTeX or text of the answer that a response ends with, or None.

    The last `\boxed{}` counts. Boxes joined by commas, "and" or "or" are one list. Without a box it
    is what follows the last "answer is", "answer:" or `####`, otherwise the last formula in math
    mode, otherwise a short response as a whole, otherwise its last number or option letter. A
    response that ends within a box has no answer.
    """
    text = after_reasoning(response)
    if has_open_box(text):
        return None
    if found := boxes(text):
        return _boxed_answer(text, found)
    announced = list(_ANNOUNCED.finditer(text))
    if announced and (stated := _statement(text[announced[-1].end() :])):
        return stated
    if formulas := list(_MATH.finditer(text)):
        return _joined(text, [(each.start(), each.end(), _formula(each)) for each in formulas])
    return _plain_answer(text)


def _boxed_answer(text: str, found: list[Box]) -> str:
    spans = [(box.start, box.end, box.content) for box in found]
    answer = _joined(text, spans)
    behind = _UNIT_BEHIND.match(text, found[-1].end)
    return answer + behind[0] if behind and answer == found[-1].content else answer


def _joined(text: str, spans: list[tuple[int, int, str]]) -> str:
    """Return the last span, with those before it that only a connector separates from it."""
    contents = [spans[-1][2]]
    for (_, end, content), (start, _, _) in zip(spans[-2::-1], spans[:0:-1], strict=False):
        if not _CONNECTOR.fullmatch(text[end:start]):
            break
        contents.insert(0, content)
    return ", ".join(contents)


def _joined_from_first(text: str, spans: list[tuple[int, int, str]]) -> str:
    """Return the first span, with those behind it that only a connector separates from it."""
    contents = [spans[0][2]]
    for (_, end, _), (start, _, content) in itertools.pairwise(spans):
        if not _CONNECTOR.fullmatch(text[end:start]):
            break
        contents.append(content)
    return ", ".join(contents)


def _formula(match: re.Match[str]) -> str:
    return next(content for content in match.groupdict().values() if content)


def _statement(text: str) -> str:
    """Return the answer at the start of a text: formulas, or the rest of the sentence."""
    text = text.lstrip(" \t\n*:")[:2000]
    end = _SENTENCE_END.search(text)
    sentence = text[: end.start()] if end else text
    formulas = list(_MATH.finditer(text))
    if formulas and formulas[0].start() <= len(sentence):
        inside = [
            each for each in formulas if each.start() <= max(len(sentence), formulas[0].end())
        ]
        chosen = [(each.start(), each.end(), _formula(each)) for each in inside]
        behind = text[chosen[-1][1] :]
        unit = re.match(r"\s*(%|[a-zA-Z]+(?:\^\d)?)\s*(?:[.*]|$)", behind)
        answer = _joined_from_first(text, chosen)
        return f"{answer} {unit[1]}" if unit and len(chosen) == 1 else answer
    return sentence.strip(" *_`")


def _plain_answer(text: str) -> str | None:
    stripped = text.strip(" \n*_`")
    if not stripped:
        return None
    last_line = stripped.rpartition("\n")[2]
    if re.search(r"[^\W\d_]{2,}", last_line) and "\\" not in last_line:
        # Of "Therefore, x = 5." the right side counts.
        _, equals, right = last_line.rpartition("=")
        if equals and re.search(r"[\w]", right):
            return right.strip()
    is_prose = len(stripped) > _LONG or len(re.findall(r"[^\W\d_]{2,}", stripped)) > 2
    if not is_prose and "\n" not in stripped:
        return stripped
    numbers = _PLAIN_NUMBER.findall(text)
    if numbers:
        return numbers[-1]
    if letters := _CHOICE.findall(text):
        return letters[-1]
    return stripped if len(stripped) <= _LONG and "\n" not in stripped else None


def gold_answer(answer: str) -> str:
    r"""Return the answer of a record, which may be a whole solution with a `\boxed{}` or `####`."""
    if boxes(answer) or "####" in answer:
        return final_answer(answer) or answer
    if len(answer) > _LONG * 2 and (announced := final_answer(answer)) and announced != answer:
        return announced
    formulas = list(_MATH.finditer(answer))
    if len(formulas) == 1 and _ANNOUNCED.search(answer):
        return _formula(formulas[0])
    return answer
