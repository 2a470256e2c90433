r"""Forms of answers that are compared by their own rules.

The forms are units (`12 cm`, `18 \text{ m}^2`, `\$5`, `90^\circ`), numbers, times, multiple-choice
letters, text, collections, equations and matrices. Other answers are expressions, which
`math_comparison` compares with math-verify and sympy. All functions expect answers in the notation
of `answer_text.normalize_answer`.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from aligner.rewards.answer_text import match_braces, split_top_level

# All names of each unit, in lower case, by the unit's canonical name.
_UNIT_NAMES = {
    "m": "m meter meters metre metres",
    "cm": "cm cms centimeter centimeters centimetre centimetres",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "dm": "dm decimeter decimeters decimetre decimetres",
    "km": "km kms kilometer kilometers kilometre kilometres",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard yards",
    "mi": "mi mile miles",
    "g": "g gm gram grams gramme grammes",
    "kg": "kg kgs kilogram kilograms",
    "mg": "mg milligram milligrams",
    "t": "t ton tons tonne tonnes",
    "lb": "lb lbs pound pounds",
    "oz": "oz ounce ounces",
    "l": "l liter liters litre litres",
    "ml": "ml milliliter milliliters millilitre millilitres",
    "gal": "gal gallon gallons",
    "s": "s sec secs second seconds",
    "min": "min mins minute minutes",
    "h": "h hr hrs hour hours",
    "day": "d day days",
    "week": "wk week weeks",
    "month": "month months",
    "year": "yr yrs year years",
    "degree": "deg degree degrees",
    "radian": "rad rads radian radians",
    "°C": "°c celsius",
    "°F": "°f fahrenheit",
    "USD": "usd dollar dollars $ us$ bucks",
    "cent": "cent cents ¢",
    "EUR": "€ eur euro euros",
    "GBP": "£ gbp",
    "JPY": "¥ yen jpy",
    "INR": "₹ inr rs rupee rupees",
    "mph": "mph",
    "kmh": "kmh kph",
    "N": "n newton newtons",
    "J": "j joule joules",
    "W": "w watt watts",
    "V": "v volt volts",
    "A": "a ampere amperes amp amps",
    "Pa": "pa pascal pascals",
    "Hz": "hz hertz",
    "K": "k kelvin",
    "mol": "mol mole moles",
    "unit": "unit units u",
    "acre": "acre acres",
}
_CANONICAL_UNITS = {name: unit for unit, names in _UNIT_NAMES.items() for name in names.split()}
_COMPOUND_UNITS = {"mph": "mi/h", "kmh": "km/h"}
_POWER_WORDS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}
# Words between a number and its unit that do not belong to the unit.
_FILLER_WORDS = frozenset(["of", "the", "a", "an", "and", "each", "total", "all", "about"])

# A unit in LaTeX at the end of an answer: text commands, powers, products and quotients.
_UNIT_TAIL = re.compile(
    r"(?:\s|\\cdot|\^\{?-?\d\}?|/|per\b|\\text\s*\{(?:[^{}]|\{-?\d\})*\}(?:\s*\^\s*\{?-?\d\}?)?)*$"
)
# A unit in plain words after a number.
_PLAIN_UNIT_TAIL = re.compile(
    r"(?<=[\d})!%])(?P<space>\s*)(?P<words>[A-Za-z$€£¥₹¢][A-Za-z.$€£¥₹¢-]*"
    r"(?:[ /]+[A-Za-z.-]+|\s*\^\s*\{?-?\d\}?)*)$"
)
_TEXT_COMMAND = re.compile(r"\\text\s*\{((?:[^{}]|\{-?\d\})*)\}")
_NUMERIC = re.compile(r"[-+±\d.,\s{}()/^_!]|\\(?:frac|sqrt|pi|pm|cdot|times)(?![a-zA-Z])")
_MULTIPLES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MULTIPLE = re.compile(
    r"(?P<value>[^a-zA-Z]*?\d)\s*(?:\\text\s*\{)?\s*(?P<name>thousand|million|billion|trillion)\b"
    r"\s*\}?(?P<unit>.*)",
    re.IGNORECASE | re.DOTALL,
)
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
# Words that introduce a value, such as "The answer is".
_LABEL = re.compile(
    r"(?:.*\b(?:is|are|answer|equals?|be|about|approximately|approx|exactly|around|roughly|only|or)"
    r"|.*[:=])\s*",
    re.IGNORECASE | re.DOTALL,
)


def split_unit(text: str) -> tuple[str, str]:
    """Return the value and the canonical unit of a normalized answer; the unit is "" without one.

    Currencies may precede the value. `(mod n)` counts as a unit, and `3 million` becomes a power of
    ten.
    """
    currency = re.match(
        r"(-?)\s*\\text\{\s*(?:US)?(USD|€|£|¥|₹|Rs\.?)\s*\}\s*(-?.*\d.*)", text, re.DOTALL
    )
    if currency:
        sign, unit, value = currency.groups()
        return split_unit(sign + value)[0], canonicalize_unit(unit)

    modulus = re.fullmatch(r"(.+?)\s*\\pmod\s*\{?\s*(\w+)\s*\}?", text, re.DOTALL)
    if modulus:
        return modulus[1], f"mod {modulus[2]}"
    if (multiple := _MULTIPLE.fullmatch(text)) and _is_numeric(multiple["value"]):
        power = _MULTIPLES[multiple["name"].lower()]
        value = rf"{multiple['value']}\times 10^{{{power}}}"
        return value, canonicalize_unit(re.sub(r"\\text|[{}]", " ", multiple["unit"]))
    if _TRIGONOMETRIC.search(text):
        return text, ""
    degrees = re.fullmatch(
        r"(.*[\d}pi)])\s*\^\{\\circ\}\s*(?:\\text\s*\{\s*([CF])\s*\}|([CF]))?", text, re.DOTALL
    )
    if degrees:
        scale = degrees[2] or degrees[3]
        return degrees[1].strip(), f"°{scale}" if scale else "degree"

    start = _find_unit_tail(text)
    tail = text[start:]
    if _TEXT_COMMAND.search(tail) and (value := text[:start].strip()) and _is_numeric_end(value):
        return value, canonicalize_unit(_unit_words(tail))
    plain = _PLAIN_UNIT_TAIL.search(text)
    if plain and (value := text[: plain.start()].strip()) and _is_numeric(value):
        words = plain["words"]
        if _is_unit(words, is_spaced=bool(plain["space"])):
            return value, canonicalize_unit(words)
    return text, ""


def remove_label(text: str) -> str:
    r"""Return a text without words before its value: `\text{The answer is }5`, `\text{Area}=5`."""
    label = re.match(r"\s*\\text\s*\{([^{}]*)\}\s*", text)
    if label and label.end() < len(text):
        rest = text[label.end() :]
        if _LABEL.fullmatch(label[1].strip()) and not rest.startswith("^"):
            return rest
    return text


def units_agree(first: str, second: str) -> bool:
    """Return whether two units are equal, or one of them is missing.

    Units are not converted. Other words, as in `12 apples`, agree if one contains the other.
    """
    if not first or not second or "unit" in (first, second):
        return True
    if first == second:
        return True
    if _is_known_unit(first) or _is_known_unit(second):
        return not (_is_known_unit(first) and _is_known_unit(second)) and _words_agree(
            first, second
        )
    return _words_agree(first, second)


def canonicalize_unit(words: str) -> str:
    """Return the canonical name of a unit: `square meters`, `sq m` and `m^2` become `m^2`."""
    text = words.strip().lower().replace("°", " °").strip().rstrip(".")
    text = re.sub(r"\\cdot|\*|\bin(?= (?:total|all)\b)", " ", text)
    text = re.sub(r"^(\S+)\s+([a-z]+)\s*\^\s*\{?-(\d)\}?$", _power_to_quotient, text.strip())
    text = re.sub(r"\^\s*\{?\s*(-?\d)\s*\}?", r"^\1", text)
    text = re.sub(
        r"\s*(?:/|\bper\b|\ban?\b(?=\s+(?:hour|second|minute|day|week|month|year)))\s*", " / ", text
    )
    parts: list[str] = []
    power = ""
    for token in re.findall(r"[^\s^.,()]+|\^-?\d", text.replace(".", "")):
        if token in _POWER_WORDS:
            power = f"^{_POWER_WORDS[token]}"
        elif token in ("squared", "cubed") and parts:
            parts[-1] += "^2" if token == "squared" else "^3"
        elif token.startswith("^") and parts:
            parts[-1] += token
        elif token not in _FILLER_WORDS or (token in _CANONICAL_UNITS and len(text) <= 2):
            parts.append(_CANONICAL_UNITS.get(token, token) + power)
            power = ""
    if power and not parts:
        parts.append(f"unit{power}")
    unit = " ".join(parts).replace(" / ", "/")
    unit = re.sub(r"^unit(?:\^\d)?$", "unit", unit)
    return _COMPOUND_UNITS.get(unit, unit)


def _power_to_quotient(match: re.Match[str]) -> str:
    """Return `m s^-2` as `m/s^2`."""
    power = "" if match[3] == "1" else f"^{match[3]}"
    return f"{match[1]}/{match[2]}{power}"


def _is_known_unit(unit: str) -> bool:
    atoms = re.split(r"[ /]", re.sub(r"\^-?\d", "", unit))
    return all(atom in _UNIT_NAMES for atom in atoms)


def _words_agree(first: str, second: str) -> bool:
    """Return whether the words of one unit, without plural s, contain those of the other."""
    first_words, second_words = (
        {word.rstrip("s") for word in re.split(r"[ /]", unit) if word} for unit in (first, second)
    )
    return first_words <= second_words or second_words <= first_words


def _is_unit(words: str, *, is_spaced: bool) -> bool:
    """Return whether plain words after a number are a unit, not variables or functions."""
    match = re.match(r"[A-Za-z$€£¥₹¢]+", words)
    if match is None:
        return False
    name = match[0].lower()
    if len(name) == 1 and name.isalpha():
        # The excluded letters are more often variables than units.
        return is_spaced and name in _CANONICAL_UNITS and name not in "niakdu"
    return name in _CANONICAL_UNITS or name in _POWER_WORDS or (is_spaced and len(name) > 2)


def _is_numeric(text: str) -> bool:
    """Return whether a text contains a digit and otherwise only symbols of numbers."""
    return bool(re.search(r"\d", text)) and not _NUMERIC.sub("", text)


def _is_numeric_end(value: str) -> bool:
    """Return whether the text before a unit is mathematics instead of words."""
    return not re.search(r"[A-Za-z]{3,}", re.sub(r"\\[A-Za-z]+", "", value)) or "=" in value


def _find_unit_tail(text: str) -> int:
    """Return the index at which the unit at the end of a text begins, or the text's length."""
    fraction = re.search(r"\\frac\{\s*\\text\{[^{}]*\}", text)
    if fraction:
        braces = match_braces(text)
        first_end = braces.get(text.index("{", fraction.start()), 0)
        end = braces.get(first_end + 1, 0)
        if end and not _UNIT_TAIL.sub("", text[end + 1 :]).strip():
            return fraction.start()
    start = text.find("\\text")
    while start >= 0:
        if _UNIT_TAIL.match(text, start):
            return start
        start = text.find("\\text", start + 1)
    return len(text)


def _unit_words(tail: str) -> str:
    """Return the words of a unit in LaTeX, with a fraction as a quotient."""
    fraction = re.match(r"\\frac\{(.*)\}\{(.*)\}\s*$", tail, re.DOTALL)
    if fraction:
        tail = f"{fraction[1]}/{fraction[2]}"
    return _TEXT_COMMAND.sub(r" \1 ", tail)


# Larger powers of ten are left to sympy, because their exact value would be a huge integer.
_MAX_EXPONENT = 400

_DECIMAL = r"(?:\d{1,1000}(?:\.\d{0,1000})?|\.\d{1,1000})"
_INTEGER = r"\d{1,1000}"
_SIGNED_DECIMAL = rf"[-+]?\s*{_DECIMAL}"
_FRACTION_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:(?P<whole>{_INTEGER})\s*)?"
    rf"\\frac\{{\s*(?P<top>{_SIGNED_DECIMAL})\s*\}}\{{\s*(?P<bottom>{_SIGNED_DECIMAL})\s*\}}"
)
_SLASH_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:(?P<whole>{_INTEGER})\s+)?\(?(?P<top>{_SIGNED_DECIMAL})\)?\s*/\s*"
    rf"\(?(?P<bottom>{_SIGNED_DECIMAL})\)?"
)
_POWER_NUMBER = re.compile(
    rf"(?P<mantissa>{_SIGNED_DECIMAL})\s*(?:\\times|\\cdot|x|X|\*)\s*10\s*\^\s*\{{?\s*(?P<power>[-+]?\d{{1,4}})\s*\}}?"
    rf"|(?P<plain>{_SIGNED_DECIMAL})[eE](?P<exponent>[-+]?\d{{1,4}})"
)
_REPEATING = re.compile(
    r"(?P<sign>[-+]?)\s*(?P<whole>\d{0,50})\.(?P<head>\d{0,50})"
    r"\\(?:overline|bar|dot)\s*\{?(?P<cycle>\d{1,50})\}?"
)

_CLOCK = re.compile(
    r"(?P<hour>\d{1,2})(?::(?P<minute>\d{2})(?::(?P<second>\d{2}))?)?\s*"
    r"(?:(?P<half>[ap])\.?\s?m\.?|(?P<oclock>o'?\s?clock)|(?P<noon>noon)|midnight)?",
    re.IGNORECASE,
)
_CHOICE = re.compile(r"\(\s*([A-Ja-j])\s*\)|([A-J])|([A-J])\)")
_CHOICE_WITH_TEXT = re.compile(r"(?:\(\s*([A-J])\s*\)|([A-J])\s*[.):])\s*[.:]?\s*(.+)", re.DOTALL)
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
# Names of mathematical functions, which are no words of a text answer.
_FUNCTIONS = frozenset(
    re.findall(
        r"\w+",
        "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp lim max min gcd lcm"
        " mod det deg dim ker sqrt frac abs floor ceil",
    )
)
_WORD_SYNONYMS = {
    "no solution": "emptyset",
    "no solutions": "emptyset",
    "no real solution": "emptyset",
    "no real solutions": "emptyset",
    "empty set": "emptyset",
    "all real numbers": "reals",
    "all reals": "reals",
    "real numbers": "reals",
    "dne": "does not exist",
    "infinity": "infty",
    "infinite": "infty",
}

_RELATION = re.compile(r"\\(?:le|ge|ne)(?![a-zA-Z])|<|>")
_FLIPPED_RELATIONS = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
# Left sides of an assignment: a variable, a function, an angle, or a text such as \text{Area}.
_QUANTITY_NAME = re.compile(
    r"(?:\\(?:angle|triangle|overline|text|operatorname|mathcal|mathbb|vec|hat)\s*)?"
    r"(?:\{?[A-Za-z]{1,4}\}?|\\(?:alpha|beta|gamma|theta|lambda|mu|phi|omega|rho|sigma|ell))"
    r"(?:_\{?\w{1,4}\}?)*'*(?:\s*\([^()=]{1,12}\))?(?:\^\{-1\}(?:\([a-z]\))?)?"
    r"|\\text\s*\{[^{}]*\}(?:\s*\([^()=]{1,12}\))?|\|[A-Za-z]{1,3}\|"
    r"|\[[A-Z]{2,6}\]|m\s*\\angle\s*[A-Z]{1,3}"
)


@dataclass(frozen=True)
class Collection:
    """Several answers: a set, a tuple, an interval, a list or a union."""

    opening: str
    r"""`{`, `(`, `[`, "" for a list without brackets, or `\cup` for a union."""
    closing: str
    """Closing bracket; "" for a list without brackets and for a union."""
    items: tuple[str, ...]

    @property
    def is_ordered(self) -> bool:
        """Whether the order of the items matters."""
        return self.opening in ("(", "[")


def parse_exact_number(text: str) -> Fraction | None:
    """Return the exact value of a number, or None for any other text.

    Decimals, fractions, mixed numbers, repeating decimals and powers of ten are numbers.
    """
    text = text.strip()
    # Brackets around the whole number, or around all but its sign.
    while (inner := re.fullmatch(r"([-+]?)\s*(?:\{([^{}]*)\}|\(([^()]*)\))", text)) is not None:
        text = inner[1] + (inner[2] or inner[3] or "").strip()
    if re.fullmatch(rf"[-+]?\s*{_DECIMAL}", text):
        return Fraction(text.replace(" ", "").rstrip("."))
    if match := _FRACTION_NUMBER.fullmatch(text) or _SLASH_NUMBER.fullmatch(text):
        return _parse_fraction(match)
    if match := _POWER_NUMBER.fullmatch(text):
        mantissa = (match["mantissa"] or match["plain"]).replace(" ", "")
        power = int(match["power"] or match["exponent"])
        if abs(power) > _MAX_EXPONENT:
            return None
        return Fraction(mantissa.rstrip(".")) * Fraction(10) ** power
    if match := _REPEATING.fullmatch(text):
        return _parse_repeating_decimal(match)
    if match := re.fullmatch(r"([-+]?)\s*10\s*\^\s*\{([-+]?\d{1,3})\}", text):
        return (-1 if match[1] == "-" else 1) * Fraction(10) ** int(match[2])
    return None


def _parse_fraction(match: re.Match[str]) -> Fraction | None:
    """Return the value of a fraction or mixed number; None for a denominator of 0."""
    top = Fraction(match["top"].replace(" ", "").rstrip("."))
    bottom = Fraction(match["bottom"].replace(" ", "").rstrip("."))
    if bottom == 0 or (match["whole"] and (top < 0 or bottom < 0)):
        return None
    value = int(match["whole"] or 0) + top / bottom
    return -value if match["sign"] == "-" else value


def _parse_repeating_decimal(match: re.Match[str]) -> Fraction:
    r"""Return the value of a repeating decimal such as `0.1\overline{6}`.

    With a cycle of n digits after h digits, the cycle's value is cycle / ((10^n - 1) · 10^h).
    """
    scale = 10 ** len(match["head"])
    cycle = match["cycle"]
    value = Fraction(int(match["whole"] or 0)) + Fraction(int(match["head"] or 0), scale)
    value += Fraction(int(cycle), (10 ** len(cycle) - 1) * scale)
    return -value if match["sign"] == "-" else value


def count_decimal_places(text: str) -> int | None:
    """Return the number of decimal places of a decimal, or None for any other text."""
    match = re.fullmatch(r"[-+]?\s*\d*\.(\d+)", text.strip())
    return len(match[1]) if match else None


@dataclass(frozen=True)
class Clock:
    """A time of day."""

    hour: int
    minute: int
    second: int
    half: str
    """`a` or `p` for am or pm, "" if the answer does not say."""

    def agrees_with(self, other: "Clock") -> bool:
        """Return whether two times are equal; am or pm may be missing in one of them."""
        if (self.minute, self.second) != (other.minute, other.second):
            return False
        if bool(self.half) == bool(other.half):
            return self._hour_of_day() == other._hour_of_day()
        # Only one of the times says am or pm; the other one may be in 12 or 24 hours.
        return self.hour == other.hour or self._hour_of_day() == other._hour_of_day()

    def _hour_of_day(self) -> int:
        if not self.half:
            return self.hour
        return self.hour % 12 + (12 if self.half == "p" else 0)


def parse_clock(text: str) -> Clock | None:
    """Return the time of day in a normalized answer such as `12:30` or `3 p.m.`, or None."""
    plain = _TEXT.sub(r" \1 ", text).replace("\\", " ").strip().rstrip(".")
    match = _CLOCK.fullmatch(re.sub(r"\s*:\s*", ":", re.sub(r"\s+", " ", plain)))
    if match is None or not (match["minute"] or match["half"] or match["oclock"]):
        return None
    hour, minute, second = (int(match[name] or 0) for name in ("hour", "minute", "second"))
    if hour > 24 or minute > 59 or second > 59:
        return None
    return Clock(hour, minute, second, "p" if match["noon"] else (match["half"] or "").lower())


@dataclass(frozen=True)
class Choice:
    """The letter of a multiple-choice answer, and the text of the option."""

    letter: str
    """Capital letter."""
    text: str
    """Text of the option; "" if the answer does not contain it."""


def parse_choice(text: str) -> Choice | None:
    """Return the multiple-choice letter of a normalized answer, or None.

    The text of the option is "" if the answer does not contain it.
    """
    plain = re.sub(r"^\s*\\text\s*\{([^{}]*)\}", r"\1 ", text).strip()
    plain = re.sub(r"^(?:option|choice|answer)\b\s*:?\s*(?=\S)", "", plain, flags=re.IGNORECASE)
    if match := _CHOICE.fullmatch(plain.rstrip(".")):
        return Choice((match[1] or match[2] or match[3]).upper(), "")
    if match := _CHOICE_WITH_TEXT.fullmatch(plain):
        return Choice(match[1] or match[2], match[3].strip())
    return None


def parse_words(text: str) -> str | None:
    r"""Return the words of a text answer in lower case, or None for mathematics.

    Articles and punctuation are removed, and synonyms such as "no solution" and `\emptyset` become
    equal.
    """
    if text in (r"\emptyset", r"\{\}", r"\{ \}"):
        return "emptyset"
    if text in (r"\mathbb{R}", r"(-\infty,\infty)", r"(-\infty, \infty)", r"(-\infty, +\infty)"):
        return "reals"
    has_text = _TEXT.search(text) is not None
    plain = _TEXT.sub(r" \1 ", text)
    outside_text = _COMMAND.sub(" ", _TEXT.sub(" ", text))
    words = re.findall(r"[^\W\d_]{2,}", _COMMAND.sub(" ", plain))
    if not words or all(word.lower() in _FUNCTIONS for word in words):
        return None
    # A single short word without vowels, or with relations and braces, is a variable or formula.
    is_short = len(words) == 1 and len(words[0]) <= 3 and not re.search("[eiou]", words[0].lower())
    if not has_text and (is_short or re.search(r"[=^_+{}<>]", plain)):
        return None
    if has_text and re.search(r"[=^_+<>]|\\(?:frac|sqrt|infty|begin)", text):
        return None
    # A word that is called like a function, or follows a digit, is a factor of a formula.
    if (
        not has_text
        and re.search(r"[^\W\d_]{2,}\(|\d[^\W\d_]|\\", outside_text)
        and len(words) == 1
    ):
        return None
    plain = re.sub(r"[^\w\s%./:+-]", " ", _COMMAND.sub(" ", plain).casefold())
    tokens = [token.strip(".:-") for token in plain.split()]
    kept_tokens = [token for token in tokens if token and token not in ("the", "a", "an")]
    words_text = " ".join(kept_tokens)
    return _WORD_SYNONYMS.get(words_text, words_text)


def parse_collection(text: str) -> Collection | None:
    r"""Return the items of `\{1,2\}`, `(1,2]`, `1, 2`, `\pm 2`, or a union; None for one value."""
    text = text.strip()
    union = _split_union(text)
    if len(union) > 1:
        return Collection(r"\cup", "", tuple(union))
    if both_values := _expand_plus_minus(text):
        return Collection("", "", both_values)
    if (interval := _parse_interval(text)) is not None:
        return interval

    # The name of a point before its coordinates: A(1,2).
    text = re.sub(r"^[A-Z]\s*(?=\([^()]*,[^()]*\)$)", "", text)
    items = split_top_level(text, ",;")
    items = _expand_items([item for item in items if item])
    if len(items) > 1:
        return Collection("", "", tuple(items))
    bracketed = _split_brackets(text)
    if bracketed is None:
        return None
    opening, closing, content = bracketed
    # Set-builder notation: `\{x | x > 2\}` is the interval of its condition.
    set_builder = re.match(r"\s*[a-zA-Z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\||:)\s*(.*)", content)
    if set_builder and opening == "{":
        return parse_collection(set_builder[1])
    parts = [part for part in split_top_level(content, ",;") if part]
    if opening == "{":
        parts = _expand_items(parts)
    # Parentheses around one value only group it.
    if opening == "(" and closing == ")" and len(parts) < 2:
        return None
    return Collection(opening, closing, tuple(parts))


def _split_brackets(text: str) -> tuple[str, str, str] | None:
    """Return the opening bracket, the closing bracket and the content of a text in brackets.

    The result is None if no single pair of brackets encloses the whole text.
    """
    opening = r"\{" if text.startswith(r"\{") else text[:1]
    closing = r"\}" if text.endswith(r"\}") else text[-1:]
    if opening == "]" and closing in ("[", "]"):
        # The European notation of open intervals.
        return "(", ")" if closing == "[" else "]", text[1:-1]
    if opening == "[" and closing == "[" and len(text) > 1:
        return "[", ")", text[1:-1]
    if opening not in (r"\{", "(", "[") or closing not in (r"\}", ")", "]"):
        return None
    depth = 0
    for match in re.finditer(r"\\.|[(\[{)\]}]", text, re.DOTALL):
        token = match[0]
        depth += token in ("(", "[", "{", r"\{")
        depth -= token in (")", "]", "}", r"\}")
        if depth == 0 and token in (")", "]", r"\}"):
            if match.end() != len(text):
                return None
            break
    return opening[-1], closing[-1], text[len(opening) : len(text) - len(closing)]


def _split_union(text: str) -> list[str]:
    """Return the parts of a union."""
    marked = re.sub(r"\\cup(?![a-zA-Z])", "\x00", text)
    parts = split_top_level(marked, "\x00")
    return [part for part in parts if part] if len(parts) > 1 else [text]


def _expand_plus_minus(text: str) -> tuple[str, ...] | None:
    r"""Return both values of an expression with one `\pm`, or None for any other text."""
    signs = re.findall(r"\\(?:pm|mp)(?![a-zA-Z])", text)
    if len(signs) != 1 or split_top_level(text, ",;")[1:]:
        return None
    before, after = re.split(r"\\(?:pm|mp)(?![a-zA-Z])", text)
    return (f"{before.strip()}+{after.strip()}".lstrip("+"), f"{before.strip()}-{after.strip()}")


def _expand_items(items: list[str]) -> list[str]:
    r"""Return the items, with both values for each item with `\pm`."""
    return [value for item in items for value in _expand_plus_minus(item) or (item,)]


def _parse_interval(text: str) -> Collection | None:
    r"""Return the interval of an inequality in one variable such as `1 < x \le 3`, or None."""
    if "=" in text or "," in text or ";" in text:
        return None
    operators = _RELATION.findall(text)
    parts = [part.strip() for part in _RELATION.split(text)]
    if not 1 <= len(operators) <= 2 or not all(parts):
        return None
    variable = re.compile(r"[a-zA-Z](?:_\{?\w\}?)?|\\(?:theta|alpha|lambda)|\|[a-z]\|")
    variable_indices = [index for index, part in enumerate(parts) if variable.fullmatch(part)]
    # With two relations the variable is in the middle.
    variable_indices = [index for index in variable_indices if index == 1 or len(parts) == 2]
    if len(variable_indices) != 1:
        return None
    name = parts[variable_indices[0]]
    # An inequality whose bounds contain the variable is no interval.
    if any(
        re.search(rf"(?<![\\a-zA-Z]){re.escape(name)}(?![a-zA-Z])", part)
        for part in parts[: variable_indices[0]] + parts[variable_indices[0] + 1 :]
    ):
        return None
    if len(operators) == 1:
        operator = operators[0]
        bound = parts[1 - variable_indices[0]]
        if name.startswith("|"):
            return _parse_absolute_interval(operator, bound) if variable_indices[0] == 0 else None
        if operator == r"\ne":
            return Collection(r"\cup", "", (rf"(-\infty,{bound})", rf"({bound},\infty)"))
        if variable_indices[0] == 1:  # `3 < x` is `x > 3`
            operator = _FLIPPED_RELATIONS[operator]
        if operator in (">", r"\ge"):
            return Collection("[" if operator == r"\ge" else "(", ")", (bound, r"\infty"))
        return Collection("(", "]" if operator == r"\le" else ")", (r"-\infty", bound))

    if all(operator in ("<", r"\le") for operator in operators):
        lower, upper = (parts[0], operators[0]), (parts[2], operators[1])
    elif all(operator in (">", r"\ge") for operator in operators):
        lower, upper = (parts[2], operators[1]), (parts[0], operators[0])
    else:
        return None
    return Collection(
        "[" if lower[1] in (r"\le", r"\ge") else "(",
        "]" if upper[1] in (r"\le", r"\ge") else ")",
        (lower[0], upper[0]),
    )


def _parse_absolute_interval(operator: str, bound: str) -> Collection | None:
    """Return the interval of `|x| < 3`, or the union of `|x| > 3`; None for other bounds."""
    if parse_exact_number(bound) is None or operator == r"\ne":
        return None
    if operator in ("<", r"\le"):
        brackets = ("(", ")") if operator == "<" else ("[", "]")
        return Collection(*brackets, (f"-{bound}", bound))
    lower_bracket, upper_bracket = (")", "(") if operator == ">" else ("]", "[")
    return Collection(
        r"\cup", "", (rf"(-\infty,-{bound}{lower_bracket}", rf"{upper_bracket}{bound},\infty)")
    )


def find_inequality_variable(text: str) -> str | None:
    """Return the variable of an inequality that `parse_collection` reads as an interval."""
    if _parse_interval(text) is None:
        return None
    parts = [part.strip() for part in _RELATION.split(text)]
    candidates = [part for part in parts if re.fullmatch(r"[a-zA-Z](?:_\{?\w\}?)?|\\[a-z]+", part)]
    variables = [part for part in candidates if part not in (r"\infty", r"\pi")]
    return variables[0] if variables else None


@dataclass(frozen=True)
class Equation:
    r"""An equation, a chain of equations, or a membership such as `x \in [1,2]`."""

    left: str
    right: str
    """Text after the last sign."""
    is_assignment: bool
    """Whether the left side is the name of a quantity or a function."""


def parse_equation(text: str) -> Equation | None:
    """Return the sides of an equation, or None for an answer without one.

    `5 = x` is reversed to `x = 5`.
    """
    parts = [part.strip() for part in _split_equals(text)]
    if len(parts) < 2 or not parts[-1]:
        return None
    if (
        len(parts) == 2
        and _QUANTITY_NAME.fullmatch(parts[1])
        and parse_exact_number(parts[0]) is not None
    ):
        parts.reverse()
    return Equation(parts[0], parts[-1], _QUANTITY_NAME.fullmatch(parts[0]) is not None)


def _split_equals(text: str) -> list[str]:
    r"""Return the parts of a text between its signs `=`, `\in` and `\equiv`."""
    marked = re.sub(r"\\in(?![a-zA-Z])|\\equiv(?![a-zA-Z])", "=", text)
    return split_top_level(marked, "=")


@dataclass(frozen=True)
class Matrix:
    """The cells of a matrix or determinant."""

    kind: str
    """`matrix`, or `v` for a determinant or norm, which equals only its own kind."""
    rows: tuple[tuple[str, ...], ...]
    """Cells of each row."""


def parse_matrix(text: str) -> Matrix | None:
    """Return the cells of a LaTeX matrix, or None."""
    match = re.fullmatch(
        r"[\[(]?\s*\\begin\{(?P<kind>[pbBvV]?(?:small)?matrix|array)\}(?:\{[^{}]*\})?(?P<body>.*)"
        r"\\end\{(?P=kind)\}\s*[\])]?",
        text,
        re.DOTALL,
    )
    if match is None or r"\begin" in match["body"]:
        return None
    rows = [
        row
        for row in re.split(r"\\\\|\\cr(?![a-z])", match["body"].replace(r"\hline", ""))
        if row.strip()
    ]
    kind = match["kind"][:1].lower() if match["kind"][:1] in "vV" else "matrix"
    return Matrix(kind, tuple(tuple(cell.strip() for cell in row.split("&")) for row in rows))
