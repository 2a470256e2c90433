"""The answer of a response to a mathematical problem: its `\boxed{}`, or the answer it states."""

import itertools
import re
from decimal import Decimal
from fractions import Fraction

from aligner.rewards.answer_text import Box, after_reasoning, boxes, has_open_box, plain_characters

Number = Decimal | Fraction

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
_SPACED = re.compile(r"(?<![\d.,/] )(?<![\w.,/])[1-9]\d{0,2}(?: \d{3})+(?![\d/])(?! \d)")

_MARKER = "####"
_HEADING = re.compile(r"(?:step|part|case|method|section|problem|question)\b", re.IGNORECASE)
_NUMBERED = re.compile(r"[\s*]*(\d+)[.)]\s+\S")
_ANSWER_WORD = re.compile(r"\b(?:answer|result|total|solution|conclusion)\b", re.IGNORECASE)
_ANSWER_IS = re.compile(r"\banswer\b[^\n\d=:]{0,60}?(?:\bis\b|:|=)", re.IGNORECASE)

# What may stand between the marker and the number: Markdown emphasis, LaTeX, words such as "about".
_BEFORE = re.compile(
    r"(?:[\s*_`~:=(\[{]|\\[(\[]|\\(?:text|mathbf|textbf|mathrm)\{|rs\.?\s|usd\b|us\b"
    r"|(?:about|approximately|exactly|only|just|x|is|so|thus|therefore)\b)*",
    re.IGNORECASE,
)
_OPERATOR = re.compile(
    r"\s*(?:[+*\u00d7÷/^]|[-](?=\s*\d)|[xX](?=\s*\d)|\\(?:times|cdot|div)\b)\s*[\d(]"
)
_SECOND = re.compile(r"\s*(?:(?:or|to)\s+)?[-+]?\d|[:,]\d")


def final_number(text: str) -> Number | None:
    r"""Return the number that a solution ends with, or None if there is none.

    The last of these statements counts: a number after `####`, the last number in a `\boxed{}`, a
    number after "answer is" or "answer:". Without any of them it is the last number of the text.
    A line that begins with `####` but has no number there is a Markdown heading.

    Thousands separators, currencies, `%`, units and trailing zeros make no difference. Of an
    equation, as in `#### 5 * 4 = 20`, the number after the last `=` counts.
    """
    plain = _plain(after_reasoning(text))
    statements = [*_marked(plain), *_boxed(plain), *_announced(plain)]
    if statements:
        return max(statements, key=lambda statement: statement[0])[1]
    numbers = _numbers(plain)
    return numbers[-1] if numbers else None


def _plain(text: str) -> str:
    """Return the text without currency signs and thousands separators."""
    text = re.sub(r"\n\s*", "\n", re.sub(r"[^\S\n]+", " ", plain_characters(text)))
    for source, target in _REPLACED:
        text = text.replace(source, target)
    text = _LAKHS.sub(lambda match: match[0].replace(",", ""), text)
    text = _THOUSANDS.sub("", text)
    return _SPACED.sub(lambda match: match[0].replace(" ", ""), text)


_REPLACED = (
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


def _marked(text: str) -> list[tuple[int, Number | None]]:
    """Return the answers after `####` with their places; None for one that is no single number."""
    statements: list[tuple[int, Number | None]] = []
    numbered: set[int] = set()
    pieces = re.split(r"#{4,}", text)
    place = len(pieces[0])
    for index, piece in enumerate(pieces[1:], start=1):
        start, place = place, place + len(_MARKER) + len(piece)
        line, _, below = piece.lstrip("\n").partition("\n")
        if heading := _NUMBERED.match(line):
            number = int(heading[1][:9])
            is_in_sequence = number == 1 or number - 1 in numbered
            numbered.add(number)
            has_text = bool(below.strip()) or index < len(pieces) - 1
            if is_in_sequence and has_text:
                continue
        found = _stated(line)
        if found:
            statements.append((start, found[0]))
    return statements


def _stated(line: str) -> tuple[Number | None] | None:
    """Return the number of a line behind `####`, or None for a heading."""
    if _leads_with_number(line):
        return (_leading(line),)
    if not _HEADING.match(line.strip(" *_:")) and _ANSWER_WORD.search(line):
        _, _, value = re.sub(r"\bis\b|=", ":", line).rpartition(":")
        if _leads_with_number(value):
            return (_leading(value),)
    if "=" in line and _leads_with_number(line.rpartition("=")[2]):
        return (_leading(line.rpartition("=")[2]),)
    return None


def _boxed(text: str) -> list[tuple[int, Number | None]]:
    found = boxes(text)
    if not found:
        return []
    numbers = _numbers(found[-1].content)
    return [(found[-1].start, numbers[-1] if numbers else None)]


def _announced(text: str) -> list[tuple[int, Number | None]]:
    statements: list[tuple[int, Number | None]] = []
    for match in _ANSWER_IS.finditer(text):
        if _leads_with_number(text[match.end() : match.end() + 400]):
            value = text[match.end() : match.end() + 400]
            line = value.lstrip().partition("\n")[0]
            statements.append((match.start(), _leading(line)))
    return statements


def _leads_with_number(text: str) -> bool:
    start = _BEFORE.match(text)
    return _NUMBER.match(text, _end(start)) is not None or _spaced_minus(text) is not None


def _leading(text: str) -> Number | None:
    """Return the number that a text begins with, or None if that is no single number.

    Two numbers next to each other (`4 2`, `42 or 43`) and sums without a result are none.
    """
    spaced = _spaced_minus(text)
    if spaced is not None:
        text = spaced
    number = _NUMBER.match(text, _end(_BEFORE.match(text)))
    if number is None:
        return None
    rest = text[number.end() :]
    if _OPERATOR.match(rest) or re.match(r"[\s\w)]*=\s*[-+(]?\s*\d", rest):
        sentence = re.split(r"[.!?](?:\s|$)", rest, maxsplit=1)[0]
        _, equals, result = sentence.rpartition("=")
        if equals and not _OPERATOR.match(_behind(result)):
            return _leading(result)
        return None if _OPERATOR.match(rest) else _value(number)
    if _SECOND.match(rest):
        return None
    return _value(number)


def _behind(text: str) -> str:
    """Return what is behind the number that a text begins with."""
    number = _NUMBER.match(text, _end(_BEFORE.match(text)))
    return text[number.end() :] if number else text


def _spaced_minus(text: str) -> str | None:
    """Return `- 5` at the start of a text as `-5`, or None for any other text."""
    match = re.match(r"[\s*]*-\s+(?=[\d.])", text)
    return None if match is None else "-" + text[match.end() :]


def _end(match: re.Match[str] | None) -> int:
    return match.end() if match else 0


def _numbers(text: str) -> list[Number]:
    values = [_value(match) for match in _NUMBER.finditer(text)]
    return [value for value in values if value is not None]


def _value(match: re.Match[str]) -> Number | None:
    parts = match.groupdict()
    if parts["time"]:
        return None
    value = _absolute_value(parts)
    if value is None or parts["sign"] != "-":
        return value
    # Decimal's own minus would round to 28 digits.
    return value.copy_negate() if isinstance(value, Decimal) else -value


def _absolute_value(parts: dict[str, str | None]) -> Number | None:
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
