"""Comparison of mathematical answers: what `math` calls in its child process.

Only this process imports math-verify and sympy. Numbers, units, times, collections and text are
compared by the rules of `answer_forms`; what remains are expressions, which math-verify parses.
"""

import importlib.util
import logging
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import math_verify
import sympy
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig

from aligner.child_function import ChildFunction, ChildLost, ChildTooSlow
from aligner.errors import AlignerError, ConfigError
from aligner.rewards.answer_forms import (
    Collection,
    Equation,
    Matrix,
    decimal_places,
    exact_number,
    inequality_variable,
    parse_choice,
    parse_clock,
    parse_collection,
    parse_equation,
    parse_matrix,
    parse_words,
    split_unit,
    units_agree,
    without_label,
)
from aligner.rewards.answer_text import is_comparable, normalized, split_top_level
from aligner.rewards.final_answers import final_answer, gold_answer

# math-verify warns that its own time limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# A decimal with at least so many places may be a rounded value, such as 3.141593 for \pi.
_ROUNDED_PLACES = 6
_MAX_DEPTH = 6
_COMMAND = re.compile(r"\\[a-zA-Z]+")

_LATEX = math_verify.LatexExtractionConfig(
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none"
    )
)


def equal(answer: str, response: str) -> bool | None:
    """Return whether the answer of a response equals the record's; None if that has no answer."""
    gold = normalized(gold_answer(answer))
    if not is_comparable(gold):
        return None
    found = final_answer(response)
    if found is None:
        return False
    try:
        return _agree(gold, normalized(found), 0)
    # Text of a model may be nested deeper than sympy's recursion.
    except RecursionError:
        return False


def is_parsable(answer: str) -> bool:
    """Return whether every part of a record's answer is a known form or an expression."""
    try:
        return _is_parsable(normalized(gold_answer(answer)), 0)
    except RecursionError:
        return False


def _is_parsable(text: str, depth: int) -> bool:
    if depth > _MAX_DEPTH:
        return False
    text = without_label(_from_text(text))
    value, _ = split_unit(text)
    value = _percentage(value)[0]
    if exact_number(value) is not None or _based(value) is not None:
        return True
    if any(parse(text) is not None for parse in (parse_clock, parse_choice, parse_words)):
        return True
    if (matrix := parse_matrix(value)) is not None:
        return all(_is_parsable(cell, depth + 1) for row in matrix.rows for cell in row)
    if (collection := parse_collection(value)) is not None:
        return bool(collection.items) and all(
            _is_parsable(item, depth + 1) for item in collection.items
        )
    if (equation := parse_equation(value)) is not None and equation.is_assignment:
        return _is_parsable(equation.right, depth + 1)
    return parse_expression(value) is not None or _ratio(value) is not None


def _agree(gold: str, found: str, depth: int) -> bool:
    """Compare two normalized answers in each reading of their commas."""
    if not gold or not found or depth > _MAX_DEPTH:
        return False
    if _squeezed(gold) == _squeezed(found):
        return True
    return any(
        _agree_as_read(one, other, depth)
        for one in _comma_readings(gold)
        for other in _comma_readings(found)
    )


def _agree_as_read(gold: str, found: str, depth: int) -> bool:
    gold, found = _from_text(gold), _from_text(found)
    choices = parse_choice(gold), parse_choice(found)
    if choices[0] and choices[1]:
        return choices[0].letter == choices[1].letter
    if choices[0] and choices[0].text:
        return _agree(choices[0].text, found, depth + 1)
    if choices[1] and choices[1].text:
        return _agree(gold, choices[1].text, depth + 1)

    gold, found = without_label(gold), without_label(found)
    clocks = parse_clock(gold), parse_clock(found)
    if clocks[0] and clocks[1]:
        return clocks[0].agrees(clocks[1])
    if clocks[0] or clocks[1]:
        return _agrees_with_hour(gold, found)

    (gold, gold_unit), (found, found_unit) = split_unit(gold), split_unit(found)
    if not units_agree(gold_unit, found_unit):
        return False
    words = parse_words(gold), parse_words(found)
    if words[0] is not None or words[1] is not None:
        return words[0] == words[1] or _letters(gold) == _letters(found) != ""
    return _values_agree(gold, found, depth)


def _values_agree(gold: str, found: str, depth: int) -> bool:
    """Compare two answers without units."""
    (gold, gold_percent), (found, found_percent) = _percentage(gold), _percentage(found)
    if gold_percent != found_percent and not parse_collection(gold) and not parse_collection(found):
        if gold_percent:
            return _values_agree(gold, found, depth) or _agree_scaled(gold, found, depth)
        return _values_agree(gold, found, depth) or _agree_scaled(found, gold, depth)
    if _squeezed(gold) == _squeezed(found):
        return True

    matrices = parse_matrix(gold), parse_matrix(found)
    if matrices[0] and matrices[1]:
        return _matrices_agree(matrices[0], matrices[1], depth)
    collections = parse_collection(gold), parse_collection(found)
    equations = parse_equation(gold), parse_equation(found)
    if _is_list(collections[0]) or _is_list(collections[1]):
        equations = None, None
    if equations[0] or equations[1]:
        return _equations_agree(gold, found, equations[0], equations[1], depth)
    if collections[0] or collections[1]:
        variables = inequality_variable(gold), inequality_variable(found)
        if variables[0] and variables[1] and variables[0] != variables[1]:
            return False
        return _collections_agree(gold, found, collections[0], collections[1], depth)

    ratios = _ratio(gold), _ratio(found)
    if ratios[0] or ratios[1]:
        return _ratios_agree(gold, found, ratios[0], ratios[1])
    bases = _based(gold), _based(found)
    if bases[0] and bases[1]:
        return bases[0] == bases[1]
    if bases[0] or bases[1]:
        return (bases[0] or (gold, ""))[0] == (bases[1] or (found, ""))[0]
    return expressions_agree(gold, found)


def _agree_scaled(percentage: str, plain: str, depth: int) -> bool:
    """Compare a percentage with a plain value: 50% equals 0.5."""
    number = exact_number(percentage)
    scaled = f"{number / 100}" if number is not None else rf"\frac{{{percentage}}}{{100}}"
    return _values_agree(scaled, plain, depth + 1) if depth < _MAX_DEPTH else False


def expressions_agree(gold: str, found: str) -> bool:
    """Compare two expressions exactly; decimals with six or more places may be rounded values."""
    numbers = exact_number(gold), exact_number(found)
    if numbers[0] is not None and numbers[1] is not None:
        if numbers[0] == numbers[1]:
            return True
        return _is_rounded(gold, numbers[0], found, numbers[1]) or _is_rounded(
            found, numbers[1], gold, numbers[0]
        )
    parsed = _parse_both(gold, found)
    if parsed[0] is None or parsed[1] is None:
        return False
    one, other = parsed
    symbols = [{str(symbol) for symbol in getattr(each, "free_symbols", ())} for each in parsed]
    if symbols[0] != symbols[1]:
        # An identity such as \sin^2 x + \cos^2 x = 1 has fewer variables on one side.
        is_identity = isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr)
        is_identity = is_identity and (symbols[0] < symbols[1] or symbols[1] < symbols[0])
        return is_identity and bool(sympy.simplify(one - other) == 0)
    if isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr) and not symbols[0]:
        return _constants_agree(one, other, decimal_places(gold), decimal_places(found))
    return bool(math_verify.verify([one], [other], timeout_seconds=None))


def _parse_both(gold: str, found: str) -> tuple[Any, Any]:
    """Parse two expressions. math-verify ignores the case of variables; where an expression has a
    letter in both cases, these are different variables."""
    letters = [set(re.findall(r"[a-zA-Z]", _COMMAND.sub(" ", text))) for text in (gold, found)]
    both = {
        letter for own in letters for letter in own if letter.isupper() and letter.lower() in own
    }
    if not both:
        return parse_expression(gold), parse_expression(found)
    capital = re.compile(rf"(?<![\\a-zA-Z])([{''.join(sorted(both))}])(?![a-zA-Z])")
    first, second = (
        capital.sub(lambda match: rf"{match[0].lower()}_{{capital}}", text)
        for text in (gold, found)
    )
    return parse_expression(first), parse_expression(second)


def _is_rounded(decimal: str, rounded: Any, other: str, value: Any) -> bool:
    """Return whether a decimal is a repeating fraction, rounded to the places it has."""
    places = decimal_places(decimal)
    if places is None or places < _ROUNDED_PLACES or decimal_places(other) is not None:
        return False
    denominator = value.denominator
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator != 1 and abs(rounded - value) * 10**places <= 1


def _constants_agree(one: Any, other: Any, *places: int | None) -> bool:
    if one == other:
        return True
    difference = sympy.N(one - other, 40)
    if not difference.is_number or difference.has(sympy.nan, sympy.oo, sympy.zoo):
        return False
    size = abs(sympy.N(one, 15))
    if abs(difference) <= sympy.Float("1e-25") * (1 + size):
        return True
    rounded = [count for count in places if count is not None and count >= _ROUNDED_PLACES]
    return bool(rounded) and bool(abs(difference) <= sympy.Float(10) ** -rounded[0])


@lru_cache(maxsize=4096)
def parse_expression(text: str) -> Any:
    """Return a sympy expression of a normalized answer, or None if math-verify cannot parse it."""
    # LaTeX drops spaces between digits, and would read "4 2" as 42.
    if re.search(r"\d\s+\d", text) or not text.strip() or "\n" in text:
        return None
    text = _DECIMAL.sub(_as_fraction, text)
    text = _DEGREES.sub(r"{(\\frac{\1\\pi}{180})}", text)
    parsed = math_verify.parse(
        f"${text}$",
        [_LATEX],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    if not parsed or isinstance(parsed[0], str):
        return None
    expression = parsed[0]
    if isinstance(expression, sympy.Expr):
        # math-verify reads `i` as a variable.
        units = {symbol: sympy.I for symbol in expression.free_symbols if str(symbol) == "i"}
        expression = expression.subs(units) if units else expression
    return expression


# Degrees remain only as the argument of a trigonometric function.
_DEGREES = re.compile(r"(\d+)\s*\^\{\\circ\}")
_DECIMAL = re.compile(r"(?<![\d.\w])(\d*)\.(\d+)(?![\d.])")


def _as_fraction(match: re.Match[str]) -> str:
    """Return a decimal as a fraction, which sympy does not round."""
    whole, places = match.groups()
    return rf"(\frac{{{int(whole + places)}}}{{{10 ** len(places)}}})"


def _equations_agree(
    gold: str, found: str, one: Equation | None, other: Equation | None, depth: int
) -> bool:
    if one and other:
        is_label = r"\text" in one.left + other.left
        if is_label or _squeezed(one.left) == _squeezed(other.left):
            return _agree(one.right, other.right, depth + 1)
        if one.is_assignment and other.is_assignment and _is_constant(one.right):
            return False
        return expressions_agree(gold, found)
    if other is not None:
        is_equal = _agree(gold, other.right, depth + 1)
        return is_equal or (_is_approximation(other) and _agree(gold, other.left, depth + 1))
    assert one is not None
    if one.is_assignment or _is_constant(one.left) or _is_tuple_of_names(one.left):
        return _agree(one.right, found, depth + 1)
    # `m+n=7` states a value, `x+y=7` is the equation of a line.
    if not re.search(r"[xyz]", _COMMAND.sub("", one.left)) and _is_constant(one.right):
        return _agree(one.right, found, depth + 1)
    return False


def _is_approximation(equation: Equation) -> bool:
    r"""Return whether a chain is a value and its rounded decimal: `100\pi \approx 314.16`."""
    value, rounded = parse_expression(equation.left), exact_number(equation.right)
    if value is None or rounded is None or getattr(value, "free_symbols", True):
        return False
    difference = sympy.N(value - sympy.Rational(rounded.numerator, rounded.denominator), 15)
    return bool(difference.is_real) and abs(difference) <= abs(float(rounded)) / 100


def _is_constant(text: str) -> bool:
    parsed = parse_expression(text)
    return parsed is not None and not getattr(parsed, "free_symbols", ())


def _is_tuple_of_names(text: str) -> bool:
    return (
        re.fullmatch(r"\(\s*[a-zA-Z](?:_\{\w\})?(?:\s*,\s*[a-zA-Z](?:_\{\w\})?)+\s*\)", text)
        is not None
    )


def _is_list(collection: Collection | None) -> bool:
    """Return whether a collection has several items without brackets, such as `x=1, x=2`."""
    return collection is not None and collection.opening == "" and len(collection.items) > 1


def _collections_agree(
    gold: str, found: str, one: Collection | None, other: Collection | None, depth: int
) -> bool:
    if one is None or other is None:
        single, value = (one, found) if other is None else (other, gold)
        if single is None or len(single.items) != 1 or single.opening == "(":
            return False
        return _agree(single.items[0], value, depth + 1)

    first, second = _without_repeated_name(one.items), _without_repeated_name(other.items)
    if one.is_ordered and other.is_ordered:
        same_brackets = (one.opening, one.closing) == (other.opening, other.closing)
        return same_brackets and _in_order(first, second, depth)
    if one.is_ordered or other.is_ordered:
        is_list = "" in (one.opening, other.opening)
        return is_list and _in_order(_by_name(first), _by_name(second), depth)
    if one.opening == other.opening == "{":
        return _same_set(first, second, depth)
    return _in_any_order(first, second, depth)


def _without_repeated_name(items: Sequence[str]) -> Sequence[str]:
    """Return `x=1, 2` as `1, 2`; lists with several names stay as they are."""
    equations = [parse_equation(item) for item in items]
    if equations and equations[0] and equations[0].is_assignment and not any(equations[1:]):
        return [equations[0].right, *items[1:]]
    return items


def _by_name(items: Sequence[str]) -> Sequence[str]:
    """Return `y=2, x=1` in the order of the names, as a tuple has them."""
    equations = [parse_equation(item) for item in items]
    named = [each for each in equations if each and each.is_assignment]
    if len(named) == len(items) and len({each.left for each in named}) == len(items):
        return [each.right for each in sorted(named, key=lambda each: each.left)]
    return items


def _in_order(first: Sequence[str], second: Sequence[str], depth: int) -> bool:
    return len(first) == len(second) and all(
        _agree(one, other, depth + 1) for one, other in zip(first, second, strict=True)
    )


def _in_any_order(first: Sequence[str], second: Sequence[str], depth: int) -> bool:
    if len(first) != len(second):
        return False
    left = list(second)
    for one in first:
        match = next((other for other in left if _agree(one, other, depth + 1)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _same_set(first: Sequence[str], second: Sequence[str], depth: int) -> bool:
    def contains(items: Sequence[str], item: str, agree: Callable[[str, str, int], bool]) -> bool:
        return any(agree(each, item, depth + 1) for each in items)

    return all(contains(second, item, _agree) for item in first) and all(
        contains(first, item, _agree) for item in second
    )


def _matrices_agree(one: Matrix, other: Matrix, depth: int) -> bool:
    if one.kind != other.kind or len(one.rows) != len(other.rows):
        return False
    return all(
        _in_order(first, second, depth) for first, second in zip(one.rows, other.rows, strict=True)
    )


def _agrees_with_hour(gold: str, found: str) -> bool:
    """Compare `3 p.m.` with `3`: a time without minutes may lack its half of the day."""
    clock = parse_clock(gold) or parse_clock(found)
    plain = found if parse_clock(gold) else gold
    return (
        clock is not None
        and ":" not in gold + found
        and exact_number(plain) is not None
        and exact_number(plain) == clock.hour
    )


def _ratio(text: str) -> list[str] | None:
    parts = split_top_level(text, ":")
    return parts if len(parts) > 1 and all(parts) else None


def _ratios_agree(gold: str, found: str, one: list[str] | None, other: list[str] | None) -> bool:
    """Compare `2:3` with `4:6` and `\\frac{2}{3}`."""
    if one and other:
        if len(one) != len(other):
            return False
        return all(
            expressions_agree(f"({one[0]}) \\cdot ({b})", f"({other[0]}) \\cdot ({a})")
            for a, b in zip(one[1:], other[1:], strict=True)
        )
    parts, value = (one, found) if one else (other, gold)
    if parts is None or len(parts) != 2:
        return False
    return expressions_agree(rf"\frac{{{parts[0]}}}{{{parts[1]}}}", value)


def _based(text: str) -> tuple[str, str] | None:
    """Return the digits and the base of a number such as `2516_{8}`."""
    match = re.fullmatch(
        r"\(?([\dA-F]+)\)?_\{?(\d{1,2}|\\text\s*\{[a-z]+\})\}?", text.replace(" ", "")
    )
    return (match[1], match[2]) if match else None


def _percentage(text: str) -> tuple[str, bool]:
    plain = re.sub(r"\\text\s*\{\s*(?:per ?cent|percentage)\s*\}|\bper ?cent\b", "%", text).strip()
    return (plain[:-1].strip(), True) if plain.endswith("%") else (text, False)


def _from_text(text: str) -> str:
    r"""Return `\text{12 apples}` as `12 apples`: a text with a number is no word."""
    match = re.fullmatch(r"\\text\s*\{([^{}]*)\}", text)
    return match[1].strip() if match and re.search(r"\d", match[1]) else text


def _letters(text: str) -> str:
    return re.sub(r"\\text|[^\w]", "", text).casefold()


def _squeezed(text: str) -> str:
    """Return a text without spaces, except between digits and letters."""
    spaced = re.sub(r"(?<=[0-9A-Za-z]) +(?=[0-9A-Za-z])", "\x00", text)
    squeezed = spaced.replace(" ", "").replace("\x00", " ")
    return re.sub(r"(?<![\w)}])\+(?=[\d\\(])", "", squeezed)


_GROUPED = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")


def _comma_readings(text: str) -> list[str]:
    """Return a text with its commas as thousands separators, and as separators of items."""
    if not _GROUPED.search(text) or re.search(r"[(\[{]", re.sub(r"\\text\s*\{[^{}]*\}", "", text)):
        return [text]
    return [_GROUPED.sub(lambda match: match[0].replace(",", ""), text), text]


_MEMORY_BYTES = 4 << 30


def require_math_verify(key: str) -> None:
    """Raise ConfigError naming `key`, its place in the configuration, where math-verify is not
    installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            f"{key}=math: requires the math-verify package; install it with pip install"
            " 'aligner[verify]'"
        )


class MathChecker:
    """Compares responses with answers in a child process; threads take turns."""

    def __init__(self, seconds: float = 2.0) -> None:
        """Limit each comparison to `seconds` of processor time."""
        module = "aligner.rewards.math_comparison"
        self.child = ChildFunction(module, "equal", processor_s=seconds, memory_bytes=_MEMORY_BYTES)
        self._parser = ChildFunction(
            module, "is_parsable", processor_s=seconds, memory_bytes=_MEMORY_BYTES
        )

    def equal(self, answer: str, response: str) -> bool | None:
        """Return whether the answer of a response equals the record's answer.

        Returns False if the comparison takes too long, and None if the record's answer is empty or
        has unclosed braces. Raises AlignerError if the child process fails.
        """
        try:
            return self.child(answer, response)
        except ChildTooSlow:
            return False
        except ChildLost as error:
            raise AlignerError(f"math-verify {error}; see its error output") from error

    def is_parsable(self, answer: str) -> bool:
        """Return whether a record's answer can be parsed within the time limit."""
        try:
            return self._parser(answer)
        except ChildTooSlow:
            return False
        except ChildLost as error:
            raise AlignerError(f"math-verify {error}; see its error output") from error

    def close(self) -> None:
        """End the child processes."""
        self.child.close()
        self._parser.close()
