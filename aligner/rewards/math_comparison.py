"""Comparison of mathematical answers, and the child process in which it runs.

`is_equal` compares numbers, units, times, collections and text by the rules of `answer_forms`.
Other answers are expressions, which math-verify parses and sympy compares.

`MathChecker` calls these functions in a child process with limits on time and memory. sympy may
need unlimited time and memory for an expression. The time limits of math-verify itself are signals,
which only a main thread can receive and which do not interrupt long arithmetic.
"""

import logging
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import math_verify
import sympy
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig

from aligner.rewards.answer_forms import (
    Collection,
    Equation,
    Matrix,
    count_decimal_places,
    find_inequality_variable,
    parse_choice,
    parse_clock,
    parse_collection,
    parse_equation,
    parse_exact_number,
    parse_matrix,
    parse_words,
    remove_label,
    split_unit,
    units_agree,
)
from aligner.rewards.answer_text import is_comparable, normalize_answer, split_top_level
from aligner.rewards.final_answers import extract_final_answer, extract_gold_answer

# math-verify warns that its own time limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# A decimal with at least this many places may be a rounded value, such as 3.141593 for \pi.
_ROUNDED_PLACES = 6
# Nesting depth of collections, equations and choices within an answer.
_MAX_DEPTH = 6
_COMMAND = re.compile(r"\\[a-zA-Z]+")

_LATEX_CONFIG = math_verify.LatexExtractionConfig(
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none"
    )
)


def is_equal(answer: str, response: str) -> bool | None:
    """Return whether the answer of a response equals the answer of a record.

    Args:
        answer: Answer of the record, possibly a whole solution.
        response: Response of the model.

    Returns:
        The result; None if the record's answer is empty or has unclosed braces.
    """
    gold = normalize_answer(extract_gold_answer(answer))
    if not is_comparable(gold):
        return None
    prediction = extract_final_answer(response)
    if prediction is None:
        return False
    try:
        return _answers_agree(gold, normalize_answer(prediction), 0)
    except RecursionError:  # the response may be nested deeper than sympy's recursion
        return False


def is_parsable(answer: str) -> bool:
    """Return whether every part of a record's answer has a known form or is an expression."""
    try:
        return _is_parsable(normalize_answer(extract_gold_answer(answer)), 0)
    except RecursionError:
        return False


def _is_parsable(text: str, depth: int) -> bool:
    if depth > _MAX_DEPTH:
        return False
    text = remove_label(_unwrap_number_text(text))
    value, _ = split_unit(text)
    value = _split_percent(value)[0]
    if parse_exact_number(value) is not None or _parse_based_number(value) is not None:
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
    return parse_expression(value) is not None or _parse_ratio(value) is not None


def _answers_agree(gold: str, prediction: str, depth: int) -> bool:
    """Return whether two normalized answers agree in one of the readings of their commas.

    `1,234` is one number or a list of two numbers. See `_read_commas`.
    """
    if not gold or not prediction or depth > _MAX_DEPTH:
        return False
    if _remove_spaces(gold) == _remove_spaces(prediction):
        return True
    return any(
        _readings_agree(gold_reading, prediction_reading, depth)
        for gold_reading in _read_commas(gold)
        for prediction_reading in _read_commas(prediction)
    )


def _readings_agree(gold: str, prediction: str, depth: int) -> bool:
    """Return whether two answers agree, where a comma has only one meaning.

    The forms are tried in this order: multiple-choice letters, times, units, words, values.
    """
    gold, prediction = _unwrap_number_text(gold), _unwrap_number_text(prediction)
    choices = parse_choice(gold), parse_choice(prediction)
    if choices[0] and choices[1]:
        return choices[0].letter == choices[1].letter
    if choices[0] and choices[0].text:
        return _answers_agree(choices[0].text, prediction, depth + 1)
    if choices[1] and choices[1].text:
        return _answers_agree(gold, choices[1].text, depth + 1)

    gold, prediction = remove_label(gold), remove_label(prediction)
    clocks = parse_clock(gold), parse_clock(prediction)
    if clocks[0] and clocks[1]:
        return clocks[0].agrees_with(clocks[1])
    if clocks[0] or clocks[1]:
        return _hours_agree(gold, prediction)

    gold, gold_unit = split_unit(gold)
    prediction, prediction_unit = split_unit(prediction)
    if not units_agree(gold_unit, prediction_unit):
        return False
    words = parse_words(gold), parse_words(prediction)
    if words[0] is not None or words[1] is not None:
        return words[0] == words[1] or _keep_letters(gold) == _keep_letters(prediction) != ""
    return _values_agree(gold, prediction, depth)


def _values_agree(gold: str, prediction: str, depth: int) -> bool:
    """Return whether two answers without units agree.

    The forms are tried in this order: percentages, matrices, equations, collections, ratios,
    numbers with a base, expressions.
    """
    gold, gold_is_percent = _split_percent(gold)
    prediction, prediction_is_percent = _split_percent(prediction)
    if (
        gold_is_percent != prediction_is_percent
        and not parse_collection(gold)
        and not parse_collection(prediction)
    ):
        if gold_is_percent:
            return _values_agree(gold, prediction, depth) or _percentage_agrees(
                gold, prediction, depth
            )
        return _values_agree(gold, prediction, depth) or _percentage_agrees(prediction, gold, depth)
    if _remove_spaces(gold) == _remove_spaces(prediction):
        return True

    matrices = parse_matrix(gold), parse_matrix(prediction)
    if matrices[0] and matrices[1]:
        return _matrices_agree(matrices[0], matrices[1], depth)
    collections = parse_collection(gold), parse_collection(prediction)
    equations = parse_equation(gold), parse_equation(prediction)
    if _is_list(collections[0]) or _is_list(collections[1]):
        equations = None, None
    if equations[0] or equations[1]:
        return _equations_agree(gold, prediction, equations[0], equations[1], depth)
    if collections[0] or collections[1]:
        variables = find_inequality_variable(gold), find_inequality_variable(prediction)
        if variables[0] and variables[1] and variables[0] != variables[1]:
            return False
        return _collections_agree(gold, prediction, collections[0], collections[1], depth)

    ratios = _parse_ratio(gold), _parse_ratio(prediction)
    if ratios[0] or ratios[1]:
        return _ratios_agree(gold, prediction, ratios[0], ratios[1])
    bases = _parse_based_number(gold), _parse_based_number(prediction)
    if bases[0] and bases[1]:
        return bases[0] == bases[1]
    if bases[0] or bases[1]:
        return (bases[0] or (gold, ""))[0] == (bases[1] or (prediction, ""))[0]
    return expressions_agree(gold, prediction)


def _percentage_agrees(percentage: str, plain: str, depth: int) -> bool:
    """Return whether a percentage equals a plain value: 50% equals 0.5."""
    number = parse_exact_number(percentage)
    scaled = f"{number / 100}" if number is not None else rf"\frac{{{percentage}}}{{100}}"
    return _values_agree(scaled, plain, depth + 1) if depth < _MAX_DEPTH else False


def expressions_agree(gold: str, prediction: str) -> bool:
    """Return whether two expressions are exactly equal.

    A decimal with six or more places may also be the rounded value of the other expression.
    """
    numbers = parse_exact_number(gold), parse_exact_number(prediction)
    if numbers[0] is not None and numbers[1] is not None:
        if numbers[0] == numbers[1]:
            return True
        return _is_rounded(gold, numbers[0], prediction, numbers[1]) or _is_rounded(
            prediction, numbers[1], gold, numbers[0]
        )
    expressions = _parse_expressions(gold, prediction)
    if expressions[0] is None or expressions[1] is None:
        return False
    gold_expression, prediction_expression = expressions
    symbol_sets = [
        {str(symbol) for symbol in getattr(expression, "free_symbols", ())}
        for expression in expressions
    ]
    if symbol_sets[0] != symbol_sets[1]:
        # An identity such as \sin^2 x + \cos^2 x = 1 has fewer variables on one side.
        is_identity = isinstance(gold_expression, sympy.Expr) and isinstance(
            prediction_expression, sympy.Expr
        )
        is_identity = is_identity and (
            symbol_sets[0] < symbol_sets[1] or symbol_sets[1] < symbol_sets[0]
        )
        return is_identity and bool(sympy.simplify(gold_expression - prediction_expression) == 0)
    if (
        isinstance(gold_expression, sympy.Expr)
        and isinstance(prediction_expression, sympy.Expr)
        and not symbol_sets[0]
    ):
        return _constants_agree(
            gold_expression,
            prediction_expression,
            count_decimal_places(gold),
            count_decimal_places(prediction),
        )
    return bool(
        math_verify.verify([gold_expression], [prediction_expression], timeout_seconds=None)
    )


def _parse_expressions(gold: str, prediction: str) -> tuple[Any, Any]:
    """Return both expressions, parsed.

    math-verify ignores the case of variables. If an expression contains a letter in both cases, the
    capital letter becomes another variable, so that the two remain different.
    """
    letters = [set(re.findall(r"[a-zA-Z]", _COMMAND.sub(" ", text))) for text in (gold, prediction)]
    two_case_letters = {
        letter
        for text_letters in letters
        for letter in text_letters
        if letter.isupper() and letter.lower() in text_letters
    }
    if not two_case_letters:
        return parse_expression(gold), parse_expression(prediction)
    capital = re.compile(rf"(?<![\\a-zA-Z])([{''.join(sorted(two_case_letters))}])(?![a-zA-Z])")
    gold_text, prediction_text = (
        capital.sub(lambda match: rf"{match[0].lower()}_{{capital}}", text)
        for text in (gold, prediction)
    )
    return parse_expression(gold_text), parse_expression(prediction_text)


def _is_rounded(decimal: str, rounded: Any, other: str, value: Any) -> bool:
    """Return whether a decimal is the rounded or truncated value of a repeating fraction.

    The two may differ by at most one unit in the decimal's last place.

    Args:
        decimal: Text of the decimal.
        rounded: Value of the decimal.
        other: Text of the other number, which must not be a decimal.
        value: Value of the other number.
    """
    places = count_decimal_places(decimal)
    if places is None or places < _ROUNDED_PLACES or count_decimal_places(other) is not None:
        return False
    # A fraction repeats if its denominator has a prime factor other than 2 and 5.
    denominator = value.denominator
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator != 1 and abs(rounded - value) * 10**places <= 1


def _constants_agree(first: Any, second: Any, *places: int | None) -> bool:
    """Return whether two expressions without variables have the same value.

    Args:
        first: First expression.
        second: Second expression.
        places: Number of decimal places of each text; None for a text that is no decimal.
    """
    if first == second:
        return True
    difference = sympy.N(first - second, 40)
    if not difference.is_number or difference.has(sympy.nan, sympy.oo, sympy.zoo):
        return False
    magnitude = abs(sympy.N(first, 15))
    # 40 digits are computed; a difference below 25 digits is numerical error.
    if abs(difference) <= sympy.Float("1e-25") * (1 + magnitude):
        return True
    rounding_places = [count for count in places if count is not None and count >= _ROUNDED_PLACES]
    return bool(rounding_places) and bool(abs(difference) <= sympy.Float(10) ** -rounding_places[0])


@lru_cache(maxsize=4096)
def parse_expression(text: str) -> Any:
    """Return a sympy expression of a normalized answer, or None if math-verify cannot parse it."""
    # LaTeX drops spaces between digits, and would read "4 2" as 42.
    if re.search(r"\d\s+\d", text) or not text.strip() or "\n" in text:
        return None
    text = _DECIMAL.sub(_decimal_to_fraction, text)
    text = _DEGREES.sub(r"{(\\frac{\1\\pi}{180})}", text)
    parsed = math_verify.parse(
        f"${text}$",
        [_LATEX_CONFIG],
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


def _decimal_to_fraction(match: re.Match[str]) -> str:
    """Return a decimal as a fraction, which sympy does not round."""
    whole, places = match.groups()
    return rf"(\frac{{{int(whole + places)}}}{{{10 ** len(places)}}})"


def _equations_agree(
    gold: str,
    prediction: str,
    gold_equation: Equation | None,
    prediction_equation: Equation | None,
    depth: int,
) -> bool:
    """Return whether an equation agrees with an equation, or with the value of one side."""
    if gold_equation and prediction_equation:
        is_label = r"\text" in gold_equation.left + prediction_equation.left
        if is_label or _remove_spaces(gold_equation.left) == _remove_spaces(
            prediction_equation.left
        ):
            return _answers_agree(gold_equation.right, prediction_equation.right, depth + 1)
        if (
            gold_equation.is_assignment
            and prediction_equation.is_assignment
            and _is_constant(gold_equation.right)
        ):
            return False
        return expressions_agree(gold, prediction)
    if prediction_equation is not None:
        agrees = _answers_agree(gold, prediction_equation.right, depth + 1)
        return agrees or (
            _is_approximation(prediction_equation)
            and _answers_agree(gold, prediction_equation.left, depth + 1)
        )
    assert gold_equation is not None
    if (
        gold_equation.is_assignment
        or _is_constant(gold_equation.left)
        or _is_tuple_of_names(gold_equation.left)
    ):
        return _answers_agree(gold_equation.right, prediction, depth + 1)
    # `m+n=7` states a value, `x+y=7` is the equation of a line.
    if not re.search(r"[xyz]", _COMMAND.sub("", gold_equation.left)) and _is_constant(
        gold_equation.right
    ):
        return _answers_agree(gold_equation.right, prediction, depth + 1)
    return False


def _is_approximation(equation: Equation) -> bool:
    r"""Return whether a chain is a value and its rounded decimal: `100\pi \approx 314.16`."""
    value = parse_expression(equation.left)
    rounded = parse_exact_number(equation.right)
    if value is None or rounded is None or getattr(value, "free_symbols", True):
        return False
    difference = sympy.N(value - sympy.Rational(rounded.numerator, rounded.denominator), 15)
    return bool(difference.is_real) and abs(difference) <= abs(float(rounded)) / 100


def _is_constant(text: str) -> bool:
    """Return whether a text is an expression without variables."""
    parsed = parse_expression(text)
    return parsed is not None and not getattr(parsed, "free_symbols", ())


def _is_tuple_of_names(text: str) -> bool:
    """Return whether a text is a tuple of variables, such as `(x, y)`."""
    return (
        re.fullmatch(r"\(\s*[a-zA-Z](?:_\{\w\})?(?:\s*,\s*[a-zA-Z](?:_\{\w\})?)+\s*\)", text)
        is not None
    )


def _is_list(collection: Collection | None) -> bool:
    """Return whether a collection has several items without brackets, such as `x=1, x=2`."""
    return collection is not None and collection.opening == "" and len(collection.items) > 1


def _collections_agree(
    gold: str,
    prediction: str,
    gold_collection: Collection | None,
    prediction_collection: Collection | None,
    depth: int,
) -> bool:
    """Return whether two collections agree, or a collection of one item with a value.

    Sets are compared without regard to repetition, lists in any order, tuples and intervals in
    order. A list agrees with a tuple if its items are in the tuple's order.
    """
    if gold_collection is None or prediction_collection is None:
        collection, value = (
            (gold_collection, prediction)
            if prediction_collection is None
            else (prediction_collection, gold)
        )
        if collection is None or len(collection.items) != 1 or collection.opening == "(":
            return False
        return _answers_agree(collection.items[0], value, depth + 1)

    gold_items = _remove_repeated_name(gold_collection.items)
    prediction_items = _remove_repeated_name(prediction_collection.items)
    if gold_collection.is_ordered and prediction_collection.is_ordered:
        has_same_brackets = (gold_collection.opening, gold_collection.closing) == (
            prediction_collection.opening,
            prediction_collection.closing,
        )
        return has_same_brackets and _items_agree_in_order(gold_items, prediction_items, depth)
    if gold_collection.is_ordered or prediction_collection.is_ordered:
        # A list without brackets may have the order of the other side's tuple.
        is_list = "" in (gold_collection.opening, prediction_collection.opening)
        return is_list and _items_agree_in_order(
            _sort_by_name(gold_items), _sort_by_name(prediction_items), depth
        )
    if gold_collection.opening == prediction_collection.opening == "{":
        return _sets_agree(gold_items, prediction_items, depth)
    return _items_agree_in_any_order(gold_items, prediction_items, depth)


def _remove_repeated_name(items: Sequence[str]) -> Sequence[str]:
    """Return `x=1, 2` as `1, 2`; lists with several names stay unchanged."""
    equations = [parse_equation(item) for item in items]
    if equations and equations[0] and equations[0].is_assignment and not any(equations[1:]):
        return [equations[0].right, *items[1:]]
    return items


def _sort_by_name(items: Sequence[str]) -> Sequence[str]:
    """Return the values of `y=2, x=1` sorted by name, as a tuple contains them."""
    equations = [parse_equation(item) for item in items]
    assignments = [equation for equation in equations if equation and equation.is_assignment]
    if len(assignments) == len(items) and len({equation.left for equation in assignments}) == len(
        items
    ):
        return [
            equation.right for equation in sorted(assignments, key=lambda equation: equation.left)
        ]
    return items


def _items_agree_in_order(
    gold_items: Sequence[str], prediction_items: Sequence[str], depth: int
) -> bool:
    return len(gold_items) == len(prediction_items) and all(
        _answers_agree(gold_item, prediction_item, depth + 1)
        for gold_item, prediction_item in zip(gold_items, prediction_items, strict=True)
    )


def _items_agree_in_any_order(
    gold_items: Sequence[str], prediction_items: Sequence[str], depth: int
) -> bool:
    """Return whether each item agrees with its own item of the other list."""
    if len(gold_items) != len(prediction_items):
        return False
    remaining = list(prediction_items)
    for gold_item in gold_items:
        match = next(
            (item for item in remaining if _answers_agree(gold_item, item, depth + 1)), None
        )
        if match is None:
            return False
        remaining.remove(match)
    return True


def _sets_agree(gold_items: Sequence[str], prediction_items: Sequence[str], depth: int) -> bool:
    def contains(items: Sequence[str], item: str, agree: Callable[[str, str, int], bool]) -> bool:
        return any(agree(candidate, item, depth + 1) for candidate in items)

    return all(contains(prediction_items, item, _answers_agree) for item in gold_items) and all(
        contains(gold_items, item, _answers_agree) for item in prediction_items
    )


def _matrices_agree(gold_matrix: Matrix, prediction_matrix: Matrix, depth: int) -> bool:
    if gold_matrix.kind != prediction_matrix.kind or len(gold_matrix.rows) != len(
        prediction_matrix.rows
    ):
        return False
    return all(
        _items_agree_in_order(gold_row, prediction_row, depth)
        for gold_row, prediction_row in zip(gold_matrix.rows, prediction_matrix.rows, strict=True)
    )


def _hours_agree(gold: str, prediction: str) -> bool:
    """Return whether `3 p.m.` and `3` agree: a time without minutes may lack am or pm."""
    clock = parse_clock(gold) or parse_clock(prediction)
    plain = prediction if parse_clock(gold) else gold
    return (
        clock is not None
        and ":" not in gold + prediction
        and parse_exact_number(plain) is not None
        and parse_exact_number(plain) == clock.hour
    )


def _parse_ratio(text: str) -> list[str] | None:
    """Return the parts of a ratio such as `2:3`, or None."""
    parts = split_top_level(text, ":")
    return parts if len(parts) > 1 and all(parts) else None


def _ratios_agree(
    gold: str, prediction: str, gold_parts: list[str] | None, prediction_parts: list[str] | None
) -> bool:
    r"""Return whether two ratios agree, or a ratio with a fraction: `2:3`, `4:6`, `\frac{2}{3}`."""
    if gold_parts and prediction_parts:
        if len(gold_parts) != len(prediction_parts):
            return False
        return all(
            expressions_agree(
                f"({gold_parts[0]}) \\cdot ({prediction_part})",
                f"({prediction_parts[0]}) \\cdot ({gold_part})",
            )
            for gold_part, prediction_part in zip(gold_parts[1:], prediction_parts[1:], strict=True)
        )
    parts, value = (gold_parts, prediction) if gold_parts else (prediction_parts, gold)
    if parts is None or len(parts) != 2:
        return False
    return expressions_agree(rf"\frac{{{parts[0]}}}{{{parts[1]}}}", value)


def _parse_based_number(text: str) -> tuple[str, str] | None:
    """Return the digits and the base of a number such as `2516_{8}`."""
    match = re.fullmatch(
        r"\(?([\dA-F]+)\)?_\{?(\d{1,2}|\\text\s*\{[a-z]+\})\}?", text.replace(" ", "")
    )
    return (match[1], match[2]) if match else None


def _split_percent(text: str) -> tuple[str, bool]:
    """Return a text without its percent sign, and whether it had one."""
    plain = re.sub(r"\\text\s*\{\s*(?:per ?cent|percentage)\s*\}|\bper ?cent\b", "%", text).strip()
    return (plain[:-1].strip(), True) if plain.endswith("%") else (text, False)


def _unwrap_number_text(text: str) -> str:
    r"""Return `\text{12 apples}` as `12 apples`, because a text with a number is no word."""
    match = re.fullmatch(r"\\text\s*\{([^{}]*)\}", text)
    return match[1].strip() if match and re.search(r"\d", match[1]) else text


def _keep_letters(text: str) -> str:
    """Return the letters and digits of a text in lower case, without LaTeX's text command."""
    return re.sub(r"\\text|[^\w]", "", text).casefold()


def _remove_spaces(text: str) -> str:
    """Return a text without spaces, except between digits and letters."""
    spaced = re.sub(r"(?<=[0-9A-Za-z]) +(?=[0-9A-Za-z])", "\x00", text)
    squeezed = spaced.replace(" ", "").replace("\x00", " ")
    return re.sub(r"(?<![\w)}])\+(?=[\d\\(])", "", squeezed)


_GROUPED_DIGITS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")


def _read_commas(text: str) -> list[str]:
    """Return the readings of a text: commas as thousands separators, and as item separators."""
    if not _GROUPED_DIGITS.search(text) or re.search(
        r"[(\[{]", re.sub(r"\\text\s*\{[^{}]*\}", "", text)
    ):
        return [text]
    return [_GROUPED_DIGITS.sub(lambda match: match[0].replace(",", ""), text), text]
