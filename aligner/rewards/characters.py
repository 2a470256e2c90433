"""Unicode characters of answers as their ASCII or LaTeX forms."""

import re

# Hyphens, dashes and minus signs that a model may write for "-".
_MINUSES = "\u2212\u2010\u2011\u2012\u2013\u2014\u2015\ufe58\ufe63\uff0d"
_SPACES = (
    "\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
)
_INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff\u200e\u200f"
_FULL_WIDTH = {0xFF01 + index: chr(0x21 + index) for index in range(94)}
_TABLE = (
    _FULL_WIDTH
    | {ord(character): "-" for character in _MINUSES}
    | {ord(character): " " for character in _SPACES}
    | {ord(character): None for character in _INVISIBLE}
    | {ord("\u2044"): "/", ord("\u2215"): "/"}
)
_VULGAR = {
    "½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5",
    "⅗": "3/5", "⅘": "4/5", "⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8",
}  # fmt: skip
_VULGAR_PATTERN = re.compile(rf"(\d?)([{''.join(_VULGAR)}])")

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")


def plain_characters(text: str) -> str:
    """Return a text with ASCII minus signs, spaces, digits, fractions and exponents."""
    text = text.translate(_TABLE)
    text = _VULGAR_PATTERN.sub(_vulgar_fraction, text)
    text = _RAISED.sub(lambda match: "^{" + match[0].translate(_SUPERSCRIPTS) + "}", text)
    return _LOWERED.sub(lambda match: "_{" + match[0].translate(_SUBSCRIPTS) + "}", text)


def _vulgar_fraction(match: re.Match[str]) -> str:
    whole, fraction = match.groups()
    return f"{whole} {_VULGAR[fraction]}" if whole else _VULGAR[fraction]
