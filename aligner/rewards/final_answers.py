r"""The final answer of a response to a mathematical problem, as a number or as LaTeX.

`extract_final_number` returns the number that a solution ends with, in the notation of GSM8K's
data: `#### 42`. Numbers are exact: decimals and fractions are never rounded to floating point.
`extract_final_answer` returns the content of the last `\boxed{}`, or the answer that the text
states.
"""

import itertools
import re
from decimal import Decimal
from fractions import Fraction

from aligner.rewards.answer_text import (
    Box,
    find_boxes,
    has_open_box,
    normalize_characters,
    strip_reasoning,
)

Number = Decimal | Fraction
"""Exact value of a number."""

_DIGITS = r"(?:\d+(?:\.\d+)?|(?<![\w.])\.\d+)"
_SIGN = r"(?:(?<![\w)])[-+])?"
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})(?:"
    # \frac{3}{4}, and 1\frac{3}{4} with the whole part before it
    r"(?P<whole>\d+)?\s*\\frac\{(?P<over>\d{1,40})\}\{(?P<under>\d{1,40})\}"
    # 3/4 and 1 3/4, but no date such as 3/4/2020
    r"|(?:(?P<mixed>\d{1,40})[ ])?(?P<top>\d{1,40})\s?/\s?(?P<bottom>\d{1,40})(?![\d/]|\.\d)"
    # 12:30 is a time, and 10:1 a ratio: no number
    r"|(?P<time>\d+(?::\d+)+)"
    # 3x10^4, 3\times10^{4}
    rf"|(?P<mantissa>{_DIGITS})\s*[x*\u00d7]\s*10\s*(?:\^|\*\*)\s*\{{?(?P<power>[-+]?\d{{1,4}})\}}?"
    # 2^10
    r"|(?P<base>\d{1,6})(?:\^|\*\*)\{?(?P<exponent>\d{1,3})\}?"
    # 42, 4.2, 1e5, 4.2 million
    rf"|(?P<plain>{_DIGITS}(?:[eE][+-]?\d{{1,6}}(?!\w))?)"
    r"(?:\s+(?P<multiple>thousand|million|billion|trillion)\b)?"
    r")",
    re.IGNORECASE,
)
_MULTIPLES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}

# The thousands separators of LaTeX and of texts. A space is one only between groups of three
# digits, the first of which has one to three: "1 234", but not "4 2".
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\}|\\,|,\\!|['\u2019_])(?=\d{3}(?!\d))")
_LAKHS = re.compile(r"(?<![\d.,])\d{1,2}(?:,\d{2})+,\d{3}(?![\d,])")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,/] )(?<![\w.,/])[1-9]\d{0,2}(?: \d{3})+(?![\d/])(?! \d)")

_MARKER = "####"
# Lines that structure a solution, which may follow `####` as a Markdown heading.
_HEADING = re.compile(r"(?:step|part|case|method|section|problem|question)\b", re.IGNORECASE)
_NUMBERED_HEADING = re.compile(r"[\s*]*(\d+)[.)]\s+\S")
_ANSWER_WORD = re.compile(r"\b(?:answer|result|total|solution|conclusion)\b", re.IGNORECASE)
_ANSWER_IS = re.compile(r"\banswer\b[^\n\d=:]{0,60}?(?:\bis\b|:|=)", re.IGNORECASE)

# Text allowed between the marker and the number: Markdown emphasis, LaTeX, words like "about".
_NUMBER_PREFIX = re.compile(
    r"(?:[\s*_`~:=(\[{]|\\[(\[]|\\(?:text|mathbf|textbf|mathrm)\{|rs\.?\s|usd\b|us\b"
    r"|(?:about|approximately|exactly|only|just|x|is|so|thus|therefore)\b)*",
    re.IGNORECASE,
)
# An operator with its second operand: the number before it is not the result.
_OPERATOR = re.compile(
    r"\s*(?:[+*\u00d7÷/^]|[-](?=\s*\d)|[xX](?=\s*\d)|\\(?:times|cdot|div)\b)\s*[\d(]"
)
# A second number after the first one, as in "42 or 43": there is no single number.
_SECOND_NUMBER = re.compile(r"\s*(?:(?:or|to)\s+)?[-+]?\d|[:,]\d")


def extract_final_number(text: str) -> Number | None:
    r"""Return the number that a solution ends with, or None if there is none.

    The last of these statements counts: a number after `####`, the last number in a `\boxed{}`, a
    number after "answer is" or "answer:". Without any of them it is the last number of the text. A
    line that begins with `####` but contains no number there is a Markdown heading.

    Thousands separators, currencies, `%`, units and trailing zeros make no difference. In an
    equation, as in `#### 5 * 4 = 20`, the number after the last `=` counts.
    """
    plain = _simplify_text(strip_reasoning(text))
    statements = [
        *_find_marked_numbers(plain),
        *_find_boxed_number(plain),
        *_find_announced_numbers(plain),
    ]
    if statements:
        return max(statements, key=lambda statement: statement[0])[1]
    numbers = _find_numbers(plain)
    return numbers[-1] if numbers else None


def _simplify_text(text: str) -> str:
    """Return the text without currency signs and thousands separators."""
    text = re.sub(r"\n\s*", "\n", re.sub(r"[^\S\n]+", " ", normalize_characters(text)))
    for source, target in _REPLACEMENTS:
        text = text.replace(source, target)
    text = _LAKHS.sub(lambda match: match[0].replace(",", ""), text)
    text = _THOUSANDS.sub("", text)
    return _SPACED_THOUSANDS.sub(lambda match: match[0].replace(" ", ""), text)


_REPLACEMENTS = (
    ("\\$", ""),
    ("$", ""),
    ("€", ""),
    ("£", ""),
    ("\\pounds", ""),
    ("¥", ""),
    ("₹", ""),
    ("\\dfrac", "\\frac"),
    ("\\tfrac", "\\frac"),
    ("\\times", "\u00d7"),
    ("\\cdot", "\u00d7"),
    ("\\!", ""),
    ("\\%", "%"),
)


def _find_marked_numbers(text: str) -> list[tuple[int, Number | None]]:
    """Return the numbers after `####` with their positions.

    The number is None for a line that states no single number. Numbered headings such as `#### 2.
    Sum` are skipped: the number is 1 or follows an earlier heading's number, and text follows.
    """
    statements: list[tuple[int, Number | None]] = []
    heading_numbers: set[int] = set()
    sections = re.split(r"#{4,}", text)
    position = len(sections[0])
    for index, section in enumerate(sections[1:], start=1):
        start = position
        position = position + len(_MARKER) + len(section)
        line, _, following_text = section.lstrip("\n").partition("\n")
        if heading := _NUMBERED_HEADING.match(line):
            number = int(heading[1][:9])
            is_in_sequence = number == 1 or number - 1 in heading_numbers
            heading_numbers.add(number)
            has_text = bool(following_text.strip()) or index < len(sections) - 1
            if is_in_sequence and has_text:
                continue
        line_value = _parse_marked_line(line)
        if line_value:
            statements.append((start, line_value[0]))
    return statements


def _parse_marked_line(line: str) -> tuple[Number | None] | None:
    """Return the number of a line after `####`, as a tuple of one element.

    The element is None if the line states no single number; the result is None for a heading.
    """
    if _starts_with_number(line):
        return (_parse_leading_number(line),)
    if not _HEADING.match(line.strip(" *_:")) and _ANSWER_WORD.search(line):
        _, _, value = re.sub(r"\bis\b|=", ":", line).rpartition(":")
        if _starts_with_number(value):
            return (_parse_leading_number(value),)
    if "=" in line and _starts_with_number(line.rpartition("=")[2]):
        return (_parse_leading_number(line.rpartition("=")[2]),)
    return None


def _find_boxed_number(text: str) -> list[tuple[int, Number | None]]:
    """Return the last number of the last box with the box's position, as a list of one element."""
    boxes = find_boxes(text)
    if not boxes:
        return []
    numbers = _find_numbers(boxes[-1].content)
    return [(boxes[-1].start, numbers[-1] if numbers else None)]


def _find_announced_numbers(text: str) -> list[tuple[int, Number | None]]:
    """Return the numbers after "answer is" or "answer:" with their positions."""
    statements: list[tuple[int, Number | None]] = []
    for match in _ANSWER_IS.finditer(text):
        if _starts_with_number(text[match.end() : match.end() + 400]):
            value = text[match.end() : match.end() + 400]
            line = value.lstrip().partition("\n")[0]
            statements.append((match.start(), _parse_leading_number(line)))
    return statements


def _starts_with_number(text: str) -> bool:
    """Return whether a text starts with a number, after formatting and words such as "about"."""
    start = _NUMBER_PREFIX.match(text)
    return _NUMBER.match(text, _match_end(start)) is not None or _join_minus(text) is not None


def _parse_leading_number(text: str) -> Number | None:
    """Return the number at the start of a text, or None if it is no single number.

    Two adjacent numbers (`4 2`, `42 or 43`) and sums without a result are no single number.
    """
    joined_text = _join_minus(text)
    if joined_text is not None:
        text = joined_text
    match = _NUMBER.match(text, _match_end(_NUMBER_PREFIX.match(text)))
    if match is None:
        return None
    rest = text[match.end() :]
    if _OPERATOR.match(rest) or re.match(r"[\s\w)]*=\s*[-+(]?\s*\d", rest):
        sentence = re.split(r"[.!?](?:\s|$)", rest, maxsplit=1)[0]
        _, equals, result = sentence.rpartition("=")
        if equals and not _OPERATOR.match(_text_after_number(result)):
            return _parse_leading_number(result)
        return None if _OPERATOR.match(rest) else _parse_number(match)
    if _SECOND_NUMBER.match(rest):
        return None
    return _parse_number(match)


def _text_after_number(text: str) -> str:
    """Return the text after the number at its start."""
    match = _NUMBER.match(text, _match_end(_NUMBER_PREFIX.match(text)))
    return text[match.end() :] if match else text


def _join_minus(text: str) -> str | None:
    """Return a text that starts with `- 5` with `-5` instead, or None for any other text."""
    match = re.match(r"[\s*]*-\s+(?=[\d.])", text)
    return None if match is None else "-" + text[match.end() :]


def _match_end(match: re.Match[str] | None) -> int:
    return match.end() if match else 0


def _find_numbers(text: str) -> list[Number]:
    """Return the values of all numbers of a text, in order."""
    values = [_parse_number(match) for match in _NUMBER.finditer(text)]
    return [value for value in values if value is not None]


def _parse_number(match: re.Match[str]) -> Number | None:
    """Return the value of a match of _NUMBER, or None for a time or a division by 0."""
    parts = match.groupdict()
    if parts["time"]:
        return None
    value = _parse_unsigned_number(parts)
    if value is None or parts["sign"] != "-":
        return value
    # Decimal's own minus would round to 28 digits.
    return value.copy_negate() if isinstance(value, Decimal) else -value


def _parse_unsigned_number(parts: dict[str, str | None]) -> Number | None:
    numerator = parts["over"] or parts["top"]
    if numerator:
        denominator = int(parts["under"] or parts["bottom"] or 0)
        whole = int((parts["whole"] or parts["mixed"] or "0")[:40])
        return None if denominator == 0 else whole + Fraction(int(numerator), denominator)

    if parts["mantissa"]:
        return Decimal(f"{parts['mantissa']}e{parts['power']}")
    if parts["base"]:
        return Decimal(int(parts["base"]) ** int(parts["exponent"] or 1))

    multiple = _MULTIPLES.get((parts["multiple"] or "").lower())
    return Decimal(f"{parts['plain']}e{multiple}" if multiple else f"{parts['plain']}")


_SPACE = r"(?:[\s$]|\\quad|\\qquad|\\[ ,;])*"
_TEXT_OPEN = r"(?:\\(?:text|mbox)\s*\{)?\s*"
# Text between two formulas that are items of one list: a comma, "and" or "or".
_CONNECTOR = re.compile(
    rf"{_SPACE}(?:[,;]\s*{_TEXT_OPEN}(?:and|or)?|{_TEXT_OPEN}(?:and|or))\s*\}}?{_SPACE}"
)
# A percent sign, degrees or a unit in text after a box.
_FOLLOWING_UNIT = re.compile(
    r"\s*(?:\\?%|\^\s*\{?\\circ\}?"
    r"|(?:\\[,; ]|~)*\s*\\(?:text|mathrm)\s*\{[^{}]{1,30}\}(?:\s*\^\s*\{?\d\}?)?)"
)
_ANNOUNCEMENT = re.compile(
    r"(?:\banswer\b[^\n=:$\d]{0,60}?(?:\bis\b|:|=)|#{4}(?!#))\s*", re.IGNORECASE
)
_MATH_MODE = re.compile(
    r"\$\$(?P<display>.+?)\$\$|(?<!\\)\$(?P<inline>[^$\n]+?)(?<!\\)\$|\\\((?P<round>.+?)\\\)"
    r"|\\\[(?P<square>.+?)\\\]",
    re.DOTALL,
)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")
_PLAIN_NUMBER = re.compile(
    r"(?<![\w.])-?\s?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?(?:\s?/\s?\d+)?|\.\d+)(?![\w/]|[.,]\d)%?"
)
_CHOICE = re.compile(r"(?<![\w])\(([A-J])\)")
# Characters of a response or answer that may be an answer as a whole.
_MAX_SHORT_CHARACTERS = 80


def extract_final_answer(response: str) -> str | None:
    r"""Return the LaTeX or text of the answer that a response ends with, or None.

    The last `\boxed{}` counts. Boxes that are joined by commas, "and" or "or" are one list. Without
    a box, the answer is the first of these that exists: the text after the last "answer is",
    "answer:" or `####`; the last formula in math mode; a short response as a whole; its last number
    or option letter. A response that ends within a box has no answer.
    """
    text = strip_reasoning(response)
    if has_open_box(text):
        return None
    if boxes := find_boxes(text):
        return _extract_boxed_answer(text, boxes)
    announcements = list(_ANNOUNCEMENT.finditer(text))
    if announcements and (statement := _parse_statement(text[announcements[-1].end() :])):
        return statement
    if formulas := list(_MATH_MODE.finditer(text)):
        return _join_last_spans(
            text, [(match.start(), match.end(), _formula_content(match)) for match in formulas]
        )
    return _extract_plain_answer(text)


def _extract_boxed_answer(text: str, boxes: list[Box]) -> str:
    """Return the last box, with the boxes of its list, or with a unit after it."""
    spans = [(box.start, box.end, box.content) for box in boxes]
    answer = _join_last_spans(text, spans)
    unit = _FOLLOWING_UNIT.match(text, boxes[-1].end)
    return answer + unit[0] if unit and answer == boxes[-1].content else answer


def _join_last_spans(text: str, spans: list[tuple[int, int, str]]) -> str:
    """Return the last span and the preceding spans that only connectors separate from it."""
    contents = [spans[-1][2]]
    for (_, end, content), (start, _, _) in zip(spans[-2::-1], spans[:0:-1], strict=False):
        if not _CONNECTOR.fullmatch(text[end:start]):
            break
        contents.insert(0, content)
    return ", ".join(contents)


def _join_first_spans(text: str, spans: list[tuple[int, int, str]]) -> str:
    """Return the first span and the following spans that only connectors separate from it."""
    contents = [spans[0][2]]
    for (_, end, _), (start, _, content) in itertools.pairwise(spans):
        if not _CONNECTOR.fullmatch(text[end:start]):
            break
        contents.append(content)
    return ", ".join(contents)


def _formula_content(match: re.Match[str]) -> str:
    """Return the content of a match of _MATH_MODE, without its delimiters."""
    return next(content for content in match.groupdict().values() if content)


def _parse_statement(text: str) -> str:
    """Return the answer at the start of a text: its formulas, or the rest of the sentence."""
    text = text.lstrip(" \t\n*:")[:2000]
    end = _SENTENCE_END.search(text)
    sentence = text[: end.start()] if end else text
    formulas = list(_MATH_MODE.finditer(text))
    if formulas and formulas[0].start() <= len(sentence):
        sentence_formulas = [
            match for match in formulas if match.start() <= max(len(sentence), formulas[0].end())
        ]
        spans = [
            (match.start(), match.end(), _formula_content(match)) for match in sentence_formulas
        ]
        following_text = text[spans[-1][1] :]
        unit = re.match(r"\s*(%|[a-zA-Z]+(?:\^\d)?)\s*(?:[.*]|$)", following_text)
        answer = _join_first_spans(text, spans)
        return f"{answer} {unit[1]}" if unit and len(spans) == 1 else answer
    return sentence.strip(" *_`")


def _extract_plain_answer(text: str) -> str | None:
    """Return the answer of a text without boxes, statements and formulas, or None."""
    stripped = text.strip(" \n*_`")
    if not stripped:
        return None
    last_line = stripped.rpartition("\n")[2]
    if re.search(r"[^\W\d_]{2,}", last_line) and "\\" not in last_line:
        # Of "Therefore, x = 5." the right side counts.
        _, equals, right = last_line.rpartition("=")
        if equals and re.search(r"[\w]", right):
            return right.strip()
    is_prose = (
        len(stripped) > _MAX_SHORT_CHARACTERS or len(re.findall(r"[^\W\d_]{2,}", stripped)) > 2
    )
    if not is_prose and "\n" not in stripped:
        return stripped
    numbers = _PLAIN_NUMBER.findall(text)
    if numbers:
        return numbers[-1]
    if letters := _CHOICE.findall(text):
        return letters[-1]
    return stripped if len(stripped) <= _MAX_SHORT_CHARACTERS and "\n" not in stripped else None


def extract_gold_answer(answer: str) -> str:
    r"""Return the answer of a record's field `answer`.

    The field may be a whole solution with a `\boxed{}` or `####`, or a text that states the answer.
    """
    if find_boxes(answer) or "####" in answer:
        return extract_final_answer(answer) or answer
    if (
        len(answer) > _MAX_SHORT_CHARACTERS * 2
        and (stated_answer := extract_final_answer(answer))
        and stated_answer != answer
    ):
        return stated_answer
    formulas = list(_MATH_MODE.finditer(answer))
    if len(formulas) == 1 and _ANNOUNCEMENT.search(answer):
        return _formula_content(formulas[0])
    return answer
