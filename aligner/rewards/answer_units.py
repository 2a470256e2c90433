"""Units of answers: `12 cm`, `18 \\text{ m}^2`, `\\$5`, `90^\\circ`."""

import re

from aligner.rewards.boxes import matching_braces

_NAMES = {
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
_UNITS = {name: unit for unit, names in _NAMES.items() for name in names.split()}
_COMPOUND = {"mph": "mi/h", "kmh": "km/h"}
_POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}
_FILLERS = frozenset(["of", "the", "a", "an", "and", "each", "total", "all", "about"])

_TAIL = re.compile(
    r"(?:\s|\\cdot|\^\{?-?\d\}?|/|per\b|\\text\s*\{(?:[^{}]|\{-?\d\})*\}(?:\s*\^\s*\{?-?\d\}?)?)*$"
)
_PLAIN_TAIL = re.compile(
    r"(?<=[\d})!%])(?P<space>\s*)(?P<words>[A-Za-z$€£¥₹¢][A-Za-z.$€£¥₹¢-]*"
    r"(?:[ /]+[A-Za-z.-]+|\s*\^\s*\{?-?\d\}?)*)$"
)
_TEXT = re.compile(r"\\text\s*\{((?:[^{}]|\{-?\d\})*)\}")
_NUMERIC = re.compile(r"[-+±\d.,\s{}()/^_!]|\\(?:frac|sqrt|pi|pm|cdot|times)(?![a-zA-Z])")
_MULTIPLES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MULTIPLE = re.compile(
    r"(?P<value>[^a-zA-Z]*?\d)\s*(?:\\text\s*\{)?\s*(?P<name>thousand|million|billion|trillion)\b"
    r"\s*\}?(?P<unit>.*)",
    re.IGNORECASE | re.DOTALL,
)
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_LABEL = re.compile(
    r"(?:.*\b(?:is|are|answer|equals?|be|about|approximately|approx|exactly|around|roughly|only|or)"
    r"|.*[:=])\s*",
    re.IGNORECASE | re.DOTALL,
)


def split_unit(text: str) -> tuple[str, str]:
    """Return the value and the unit of a normalized answer; the unit is "" without one."""
    currency = re.match(
        r"(-?)\s*\\text\{\s*(?:US)?(USD|€|£|¥|₹|Rs\.?)\s*\}\s*(-?.*\d.*)", text, re.DOTALL
    )
    if currency:
        sign, unit, value = currency.groups()
        return split_unit(sign + value)[0], canonical_unit(unit)

    modulus = re.fullmatch(r"(.+?)\s*\\pmod\s*\{?\s*(\w+)\s*\}?", text, re.DOTALL)
    if modulus:
        return modulus[1], f"mod {modulus[2]}"
    if (multiple := _MULTIPLE.fullmatch(text)) and _is_numeric(multiple["value"]):
        power = _MULTIPLES[multiple["name"].lower()]
        value = rf"{multiple['value']}\times 10^{{{power}}}"
        return value, canonical_unit(re.sub(r"\\text|[{}]", " ", multiple["unit"]))
    if _TRIGONOMETRIC.search(text):
        return text, ""
    degrees = re.fullmatch(
        r"(.*[\d}pi)])\s*\^\{\\circ\}\s*(?:\\text\s*\{\s*([CF])\s*\}|([CF]))?", text, re.DOTALL
    )
    if degrees:
        scale = degrees[2] or degrees[3]
        return degrees[1].strip(), f"°{scale}" if scale else "degree"

    start = _start_of_tail(text)
    tail = text[start:]
    if _TEXT.search(tail) and (value := text[:start].strip()) and _is_numeric_end(value):
        return value, canonical_unit(_unit_words(tail))
    plain = _PLAIN_TAIL.search(text)
    if plain and (value := text[: plain.start()].strip()) and _is_numeric(value):
        words = plain["words"]
        if _is_unit(words, spaced=bool(plain["space"])):
            return value, canonical_unit(words)
    return text, ""


def without_label(text: str) -> str:
    r"""Return a text without words before its value: `\text{The answer is }5`, `\text{Area}=5`."""
    label = re.match(r"\s*\\text\s*\{([^{}]*)\}\s*", text)
    if label and label.end() < len(text):
        rest = text[label.end() :]
        if _LABEL.fullmatch(label[1].strip()) and not rest.startswith("^"):
            return rest
    return text


def units_agree(one: str, other: str) -> bool:
    """Return whether two units are equal, or one of them is missing.

    Units are not converted. Other words, as in `12 apples`, agree if one contains the other.
    """
    if not one or not other or "unit" in (one, other):
        return True
    if one == other:
        return True
    if _is_known(one) or _is_known(other):
        return not (_is_known(one) and _is_known(other)) and _words_agree(one, other)
    return _words_agree(one, other)


def canonical_unit(words: str) -> str:
    """Return one name for all names of a unit: `square meters`, `sq m` and `m^2` are `m^2`."""
    text = words.strip().lower().replace("°", " °").strip().rstrip(".")
    text = re.sub(r"\\cdot|\*|\bin(?= (?:total|all)\b)", " ", text)
    text = re.sub(r"^(\S+)\s+([a-z]+)\s*\^\s*\{?-(\d)\}?$", _as_quotient, text.strip())
    text = re.sub(r"\^\s*\{?\s*(-?\d)\s*\}?", r"^\1", text)
    text = re.sub(
        r"\s*(?:/|\bper\b|\ban?\b(?=\s+(?:hour|second|minute|day|week|month|year)))\s*", " / ", text
    )
    parts: list[str] = []
    power = ""
    for token in re.findall(r"[^\s^.,()]+|\^-?\d", text.replace(".", "")):
        if token in _POWERS:
            power = f"^{_POWERS[token]}"
        elif token in ("squared", "cubed") and parts:
            parts[-1] += "^2" if token == "squared" else "^3"
        elif token.startswith("^") and parts:
            parts[-1] += token
        elif token not in _FILLERS or (token in _UNITS and len(text) <= 2):
            parts.append(_UNITS.get(token, token) + power)
            power = ""
    if power and not parts:
        parts.append(f"unit{power}")
    unit = " ".join(parts).replace(" / ", "/")
    unit = re.sub(r"^unit(?:\^\d)?$", "unit", unit)
    return _COMPOUND.get(unit, unit)


def _as_quotient(match: re.Match[str]) -> str:
    """Return `m s^-2` as `m/s^2`."""
    power = "" if match[3] == "1" else f"^{match[3]}"
    return f"{match[1]}/{match[2]}{power}"


def _is_known(unit: str) -> bool:
    atoms = re.split(r"[ /]", re.sub(r"\^-?\d", "", unit))
    return all(atom in _NAMES for atom in atoms)


def _words_agree(one: str, other: str) -> bool:
    first, second = (
        {word.rstrip("s") for word in re.split(r"[ /]", unit) if word} for unit in (one, other)
    )
    return first <= second or second <= first


def _is_unit(words: str, *, spaced: bool) -> bool:
    """Return whether plain words behind a number are a unit, not variables or functions."""
    first = re.match(r"[A-Za-z$€£¥₹¢]+", words)
    if first is None:
        return False
    name = first[0].lower()
    if len(name) == 1 and name.isalpha():
        return spaced and name in _UNITS and name not in "niakdu"
    return name in _UNITS or name in _POWERS or (spaced and len(name) > 2)


def _is_numeric(text: str) -> bool:
    return bool(re.search(r"\d", text)) and not _NUMERIC.sub("", text)


def _is_numeric_end(value: str) -> bool:
    return not re.search(r"[A-Za-z]{3,}", re.sub(r"\\[A-Za-z]+", "", value)) or "=" in value


def _start_of_tail(text: str) -> int:
    r"""Return where the unit at the end begins: `\text{…}` with powers, products and quotients."""
    fraction = re.search(r"\\frac\{\s*\\text\{[^{}]*\}", text)
    if fraction:
        braces = matching_braces(text)
        first_end = braces.get(text.index("{", fraction.start()), 0)
        end = braces.get(first_end + 1, 0)
        if end and not _TAIL.sub("", text[end + 1 :]).strip():
            return fraction.start()
    start = text.find("\\text")
    while start >= 0:
        if _TAIL.match(text, start):
            return start
        start = text.find("\\text", start + 1)
    return len(text)


def _unit_words(tail: str) -> str:
    fraction = re.match(r"\\frac\{(.*)\}\{(.*)\}\s*$", tail, re.DOTALL)
    if fraction:
        tail = f"{fraction[1]}/{fraction[2]}"
    return _TEXT.sub(r" \1 ", tail)
