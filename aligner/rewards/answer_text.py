"""LaTeX of answers in one notation: `\\dfrac12` and `½` become `\frac{1}{2}`."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

# Hyphens, dashes and minus signs that a model may write for "-".
_MINUSES = "\u2212\u2010\u2011\u2012\u2013\u2014\u2015\ufe58\ufe63\uff0d"
_UNICODE_SPACES = (
    "\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
)
_INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff\u200e\u200f"
_FULL_WIDTH = {0xFF01 + index: chr(0x21 + index) for index in range(94)}
_TABLE = (
    _FULL_WIDTH
    | {ord(character): "-" for character in _MINUSES}
    | {ord(character): " " for character in _UNICODE_SPACES}
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


_UNICODE = {
    "π": r"\pi ", "√": r"\sqrt ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
    "⩽": r"\le ", "⩾": r"\ge ", "\u00d7": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
    "∙": r"\cdot ", "÷": "/", "\u222a": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "°": r"^{\circ}",
    "∅": r"\emptyset ", "±": r"\pm ", "\u211d": r"\mathbb{R}", "θ": r"\theta ",
    "\u03b1": r"\alpha ", "β": r"\beta ",
    "≈": r"\approx ", "∠": r"\angle ", "…": r"\ldots ", "λ": r"\lambda ", "\u2032": "'",
    "\u2228": r"\lor ", "\u2019": "'", "“": '"', "”": '"', "⟨": "(", "⟩": ")",
    "↦": r"\mapsto ", "∘": r"^{\circ}",
    "€": r"\text{€}", "£": r"\text{£}", "¥": r"\text{¥}", "₹": r"\text{₹}", "¢": r"\text{¢}",
}  # fmt: skip

_SIZES = re.compile(
    r"\\(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle|limits|nolimits|rm"
    r"|bf|it|tt|sf|cal|Large|large|normalsize|small|hfill|newline|nonumber|noindent)(?![a-zA-Z])"
    r"(?:\s*\.(?!\d))?"
)
_SKIPS = re.compile(r"\\(?:[hv]space|[hv]phantom|phantom|label|tag)\*?\{[^{}]*\}")
_COLORS = re.compile(r"\\(?:text)?color\s*\{[^{}]*\}")
_CURRENCY_IN_TEXT = re.compile(r"\\text\s*\{\s*\\text\s*\{(USD|€|£|¥|₹)\}\s*([^{}]*\d[^{}]*)\}")
_FONTS = re.compile(
    r"\\(?:mathbf|mathit|mathsf|mathtt|boldsymbol|bm|mathnormal|underline|underbrace|emph|bold)"
    r"(?=\s*\{)"
)
_TEXTS = re.compile(
    r"\\(?:textbf|textit|textrm|textsf|texttt|textnormal|textup|textsc|mbox|hbox|mathrm"
    r"|text)(?=\s*\{)"
)
_MODULUS = re.compile(r"\(?\s*\\text\s*\{\s*\(?mod\s*\}\s*(\w+)\s*\)?|\(\s*\\?mod\s+(\w+)\s*\)")
_PRIMES = re.compile(r"(?<=\d)\s*(''|\"|')\s*$")
_CASES = re.compile(r"\\begin\{cases\}(.*)\\end\{cases\}", re.DOTALL)
_NESTED_TEXT = re.compile(r"\\text\s*\{([^{}]*)\\text\s*\{([^{}]*)\}([^{}]*)\}")
_SPACES = re.compile(r"\\(?:[,;:> \n]|quad(?![a-zA-Z])|qquad(?![a-zA-Z])|space(?![a-zA-Z]))|~|\s+")

_LATEX_THOUSANDS = re.compile(
    r"(?<![\d.])(\d{1,3})((?:(?:\{,\}|,\\[!,;: ]|\\[,;: ](?!\\)|\{\\,\}|\{ \}|')\d{3})+)(?!\d)"
)
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,/}] )(?<![\d.,/}\w])[1-9]\d{0,2}(?: \d{3})+(?![\d/])")
_DECIMAL_COMMA = re.compile(r"(?<=\d)\{,\}(?=\d)")
_AND = re.compile(
    r"\\text\s*\{\s*,?\s*(?:and|or|und|oder)\s*\}|(?<![\w\\])(?:and|or)(?!\w)|\\lor\b"
)
_WORDS = (
    (re.compile(r"\\(?:dfrac|tfrac|cfrac|sfrac)(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\(?:leqslant|leqq|leq)(?![a-zA-Z])"), r"\\le"),
    (re.compile(r"\\(?:geqslant|geqq|geq)(?![a-zA-Z])"), r"\\ge"),
    (re.compile(r"\\neq(?![a-zA-Z])"), r"\\ne"),
    (re.compile(r"\\lt(?![a-zA-Z])"), "<"),
    (re.compile(r"\\gt(?![a-zA-Z])"), ">"),
    (re.compile(r"<=|=<"), r"\\le "),
    (re.compile(r">=|=>"), r"\\ge "),
    (re.compile(r"!="), r"\\ne "),
    (re.compile(r"\\(?:approx|simeq|doteq)(?![a-zA-Z])"), "="),
    (re.compile(r"\\(?:lbrace)(?![a-zA-Z])"), r"\\{"),
    (re.compile(r"\\(?:rbrace)(?![a-zA-Z])"), r"\\}"),
    (re.compile(r"\\(?:langle|lparen)(?![a-zA-Z])"), "("),
    (re.compile(r"\\(?:rangle|rparen)(?![a-zA-Z])"), ")"),
    (re.compile(r"\\lbrack(?![a-zA-Z])"), "["),
    (re.compile(r"\\rbrack(?![a-zA-Z])"), "]"),
    (re.compile(r"\\(?:varnothing|O)(?![a-zA-Z])"), r"\\emptyset"),
    (re.compile(r"\\(?:R|Reals|reals)(?![a-zA-Z])"), r"\\mathbb{R}"),
    (re.compile(r"\\mathbb\s*R"), r"\\mathbb{R}"),
    (re.compile(r"\\(?:lvert|rvert|vert)(?![a-zA-Z])"), "|"),
    (re.compile(r"\\div(?![a-zA-Z])"), "/"),
    (re.compile(r"\\(?:mid)(?![a-zA-Z])"), "|"),
    (re.compile(r"\\backslash(?![a-zA-Z])"), r"\\setminus"),
    (re.compile(r"\\degree(?:s)?(?![a-zA-Z])"), r"^{\\circ}"),
    (re.compile(r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\}|\{\s*o\s*\})"), r"^{\\circ}"),
    (re.compile(r"\^\s*\{?\s*\\prime\s*\}?"), "'"),
    (re.compile(r"\\pounds(?![a-zA-Z])"), r"\\text{£}"),
    (re.compile(r"\\(?:euro|EUR)(?![a-zA-Z])(?:\{\})?"), r"\\text{€}"),
    (re.compile(r"\\operatorname\*?\s*\{\s*(sin|cos|tan|ln|log|gcd|max|min|det)\s*\}"), r"\\\1 "),
    (re.compile(r"\\(?:dots|cdots|ldots|dotsc|dotsb)(?![a-zA-Z])|\.\.\.+"), r"\\ldots "),
    (re.compile(r"\\binom\s*(\d)\s*(\d)(?!\d)"), r"\\binom{\1}{\2}"),
    (re.compile(r"(?<![\\a-zA-Z])sqrt(?![a-zA-Z])"), r"\\sqrt"),
    (re.compile(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])"), r"\\pi "),
    (re.compile(r"(?<![\\a-zA-Z])(?:infinity|infty|inf)(?![a-zA-Z])"), r"\\infty "),
    (re.compile(r"(?<=\d)\s*(?:\\text\s*\{\s*to\s*\}|\sto\s)\s*(?=\d)"), ":"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"(?<=[\w)}])\s*\*\s*(?=[\w({\\])"), r"\\cdot "),
    (re.compile(r"(?<=\d)\s+x\s+(?=10\s*\^)|(?<=\d)x(?=10\s*\^)"), r"\\times "),
)  # fmt: skip
_QUOTED = re.compile(r"(?<![\w}')])[`'\"]+|[`'\"]+$")
_MATRIX = r"\begin"
_SYMBOL = re.compile(r"\w|\\(?:emptyset|infty|\{)")


def normalized(answer: str) -> str:
    """Return the LaTeX of an answer in one notation, without formatting.

    Never raises, and returns its own results unchanged in value.
    """
    text = re.sub(r"\s+", " ", plain_characters(answer))
    for character, command in _UNICODE.items():
        text = text.replace(character, command)
    text = _without_boxes(_without_dollars(text))
    text = text.replace(r"\$", r"\text{USD}").replace(r"\%", "%").replace(r"\#", "#")
    text = text.replace(r"\&", "&").replace(r"\_", "_")
    if _MATRIX not in text:
        # Commands whose backslash was escaped twice; between rows it is a line break.
        text = re.sub(r"\\\\(?=[a-zA-Z{}%,;!])", r"\\", text)

    text = _without_markdown(text)
    text = _LATEX_THOUSANDS.sub(lambda match: re.sub(r"[^\d]", "", match[0]), text)
    text = _DECIMAL_COMMA.sub(".", text).replace(r"\!", "").replace("{,}", ",")
    for pattern, replacement in _WORDS:
        text = pattern.sub(replacement, text)
    text = _SKIPS.sub("", _SIZES.sub("", text))
    text = _COLORS.sub(" ", text)
    text = re.sub(r"^\s*\\sim(?![a-zA-Z])", "", text)
    text = _TEXTS.sub(lambda _: r"\text", text)
    text = _CURRENCY_IN_TEXT.sub(r"\\text{\1}\2", text)
    text = re.sub(r"\\text\s*\{\s*([+-]?\\infty)\s*\}", r"\1", text)
    text = _MODULUS.sub(lambda match: rf"\pmod{{{match[1] or match[2]}}}", text)
    text = _PRIMES.sub(_length_unit, text)
    if "&" not in text:
        text = _CASES.sub(lambda match: re.sub(r"\\\\", ",", match[1]), text)
    text = _NESTED_TEXT.sub(r"\\text{\1\2\3}", text)
    text = _SPACES.sub(" ", text) if _MATRIX not in text else _matrix_spaces(text)
    text = re.sub(r"(?<=\d)\s*\\Omega\s*$", r"\\text{ohm}", text)
    text = unwrapped(text, _FONTS)
    text = _AND.sub(",", text)
    text = _SPACED_THOUSANDS.sub(lambda match: match[0].replace(" ", ""), text)
    text = _with_arguments(text)
    text = re.sub(r"\^\s*\(([^()]*)\)", r"^{\1}", text)
    text = re.sub(r"([_^])\s*(-?\d+)", r"\1{\2}", text)
    return _trimmed(text)


def _length_unit(match: re.Match[str]) -> str:
    """Return the feet of `5'` or the inches of `5''` as a unit."""
    return r"\text{ft}" if match[1] == "'" else r"\text{in}"


def _matrix_spaces(text: str) -> str:
    return re.sub(r"(?<!\\)\\(?:[,;:>]|quad|qquad)(?![a-zA-Z])|~|\s+", " ", text)


def _without_dollars(text: str) -> str:
    r"""Remove the delimiters of math mode: `$`, `\(`, `\)`, `\[` and `\]`."""
    text = re.sub(r"(?<!\\)\\[()]", " ", text)
    text = re.sub(r"(?<!\\)\\\[|(?<!\\)\\\](?!\d)", " ", text)
    delimiters = re.findall(r"(?<!\\)\$", text)
    if len(delimiters) % 2:
        # A single `$` before a number is a currency.
        text = re.sub(r"(?<!\\)\$(?=\s*-?[\d.])", r"\\$", text, count=1)
    return re.sub(r"(?<!\\)\$", "", text)


def _without_boxes(text: str) -> str:
    for _ in range(5):
        found = boxes(text)
        if not found:
            break
        for box in reversed(found):
            text = text[: box.start] + box.content + text[box.end :]
    return text


def _without_markdown(text: str) -> str:
    text = re.sub(r"^\s*\*\*(?!\*)(.*?)\*\*(?=[\s.,]*$)", r"\1", text, flags=re.DOTALL)
    text = re.sub(r"^\s*`([^`]*)`\s*$", r"\1", text)
    return re.sub(r"^[\s>#]+(?=\S)", "", text)


def unwrapped(text: str, command: re.Pattern[str]) -> str:
    """Replace each `command{content}` by its content."""
    for _ in range(20):
        match = command.search(text)
        if match is None:
            break
        opening = text.index("{", match.end())
        end = matching_braces(text).get(opening)
        if end is None:
            text = text[: match.start()] + text[match.end() :]
        else:
            text = text[: match.start()] + text[opening + 1 : end] + text[end + 1 :]
    return text


_ARGUMENTS = re.compile(r"\\(frac|sqrt|binom)(?![a-zA-Z])\s*")


def _with_arguments(text: str) -> str:
    r"""Put braces around the arguments of `\frac`, `\sqrt` and `\binom`: `\frac12`, `\sqrt3`."""
    result: list[str] = []
    position = 0
    braces = matching_braces(text)
    while match := _ARGUMENTS.search(text, position):
        result.append(text[position : match.start()] + f"\\{match[1]}")
        position = match.end()
        if match[1] == "sqrt" and text[position : position + 1] == "[":
            closing = text.find("]", position)
            if closing > 0:
                result.append(text[position : closing + 1])
                position = closing + 1
        for _ in range(1 if match[1] == "sqrt" else 2):
            argument, position = _argument(text, position, braces)
            result.append("{" + argument + "}")
            # Arguments may contain commands without braces themselves.
            if "\\" in argument:
                result[-1] = "{" + _with_arguments(argument) + "}"
    result.append(text[position:])
    return "".join(result)


def _argument(text: str, position: int, braces: dict[int, int]) -> tuple[str, int]:
    """Return the argument that begins at a position, and the position behind it."""
    while text[position : position + 1] == " ":
        position += 1
    character = text[position : position + 1]
    if character == "{" and position in braces:
        return text[position + 1 : braces[position]].strip(), braces[position] + 1
    if character == "(" and (end := _closing_parenthesis(text, position)) is not None:
        return text[position + 1 : end].strip(), end + 1
    if command := re.compile(r"\\[a-zA-Z]+(?:\{[^{}]*\})?").match(text, position):
        return command[0], command.end()
    return character, position + len(character)


def _closing_parenthesis(text: str, start: int) -> int | None:
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return None


def _trimmed(text: str) -> str:
    """Remove spaces around operators, and punctuation around the text."""
    text = re.sub(r"\{\s*\}(?![\w\\{])", "", text.strip()) if r"\{" not in text else text.strip()
    text = re.sub(r"\s*\\text\{\s*[.,;:]?\s*\}\s*$", "", text)
    text = re.sub(r"^\s*(?:=|:)\s*", "", text)
    text = re.sub(r"\.\s*\}\s*$", "}", text) if text.startswith(r"\text{") else text
    while text.endswith((".", ",", ";", ":", " ", "\\", "!", "?")) and not text.endswith(
        (r"\.", r"\,")
    ):
        if text.endswith("!") and re.search(r"[\w)}]!$", text):
            break
        text = text[:-1]
    return re.sub(r" +", " ", text).strip()


def is_comparable(gold: str) -> bool:
    """Return whether a normalized answer has content, and its braces are closed."""
    return bool(_SYMBOL.search(gold)) and is_balanced(gold)


def is_balanced(text: str) -> bool:
    """Return whether all braces and LaTeX environments are closed."""
    plain = re.sub(r"\\.", "", text, flags=re.DOTALL)
    matched = matching_braces(plain)
    if plain.count("{") != len(matched) or plain.count("}") != len(matched):
        return False
    return text.count(r"\begin") == text.count(r"\end")


def split_top_level(text: str, separators: str) -> list[str]:
    """Split a text at characters that are in no brackets; one part if a bracket is not closed."""
    parts = [""]
    depth = 0
    for token in _tokens(text):
        if token in _OPENING:
            depth += 1
        elif token in _CLOSING:
            depth -= 1
        if depth == 0 and len(token) == 1 and token in separators:
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts]


_OPENING = ("{", "(", "[", r"\{", r"\begin")
_CLOSING = ("}", ")", "]", r"\}", r"\end")


def _tokens(text: str) -> Iterable[str]:
    return (match[0] for match in re.finditer(r"\\[a-zA-Z]+|\\.|.", text, re.DOTALL))
