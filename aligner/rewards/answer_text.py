r"""Normalization of answers: `\dfrac12` and `½` become `\frac{1}{2}`.

The module maps Unicode characters to ASCII or LaTeX, finds the `\boxed{}` of responses, writes
LaTeX in one notation, and splits texts at separators outside of brackets.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

# Hyphens, dashes and minus signs that a model may write instead of "-".
_MINUSES = "\u2212\u2010\u2011\u2012\u2013\u2014\u2015\ufe58\ufe63\uff0d"
_UNICODE_SPACES = (
    "\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
)
_INVISIBLE_CHARACTERS = "\u200b\u200c\u200d\u2060\ufeff\u200e\u200f"
_FULL_WIDTH = {0xFF01 + index: chr(0x21 + index) for index in range(94)}
_CHARACTER_TABLE = (
    _FULL_WIDTH
    | {ord(character): "-" for character in _MINUSES}
    | {ord(character): " " for character in _UNICODE_SPACES}
    | {ord(character): None for character in _INVISIBLE_CHARACTERS}
    | {ord("\u2044"): "/", ord("\u2215"): "/"}
)
_VULGAR_FRACTIONS = {
    "½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5",
    "⅗": "3/5", "⅘": "4/5", "⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8",
}  # fmt: skip
_VULGAR_PATTERN = re.compile(rf"(\d?)([{''.join(_VULGAR_FRACTIONS)}])")

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SUPERSCRIPT_PATTERN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_SUBSCRIPT_PATTERN = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")


def normalize_characters(text: str) -> str:
    """Return a text with ASCII minus signs, spaces, digits, fractions and exponents.

    Invisible characters are removed.
    """
    text = text.translate(_CHARACTER_TABLE)
    text = _VULGAR_PATTERN.sub(_expand_vulgar_fraction, text)
    text = _SUPERSCRIPT_PATTERN.sub(
        lambda match: "^{" + match[0].translate(_SUPERSCRIPTS) + "}", text
    )
    return _SUBSCRIPT_PATTERN.sub(lambda match: "_{" + match[0].translate(_SUBSCRIPTS) + "}", text)


def _expand_vulgar_fraction(match: re.Match[str]) -> str:
    """Return `2½` as `2 1/2`, and `½` as `1/2`."""
    whole, fraction = match.groups()
    return f"{whole} {_VULGAR_FRACTIONS[fraction]}" if whole else _VULGAR_FRACTIONS[fraction]


_BOX = re.compile(
    r"(?:\\(?:boxed|fbox|framebox)\b|(?<![\w\\])boxed(?=\{))\s*(?:(?P<open>\{)|(?P<bare>[^\s{}\\$.,;]+))"
)
# Escaped characters are skipped: `\\{` is no brace of LaTeX's groups.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_THINK_END = "</think>"


@dataclass(frozen=True)
class Box:
    r"""One `\boxed{}` of a text."""

    start: int
    """Index of its backslash in the text."""
    end: int
    """Index after its closing brace."""
    content: str


def strip_reasoning(text: str) -> str:
    """Return the text after the last `</think>` without the reasoning before it.

    If that text contains `<answer>` tags, the function returns the content of the last one. A
    response without these tags is returned unchanged.
    """
    text = text.rpartition(_THINK_END)[2]
    _, opening_tag, answer = text.rpartition("<answer>")
    return answer.partition("</answer>")[0] if opening_tag else text


def find_boxes(text: str) -> list[Box]:
    """Return the outermost boxes with balanced braces, in their order."""
    closing_indices = match_braces(text)
    boxes: list[Box] = []
    position = 0
    while match := _BOX.search(text, position):
        position = match.end()
        if match["bare"]:
            boxes.append(Box(match.start(), match.end(), match["bare"]))
        elif (end := closing_indices.get(match.end() - 1)) is not None:
            boxes.append(Box(match.start(), end + 1, text[match.end() : end]))
            position = end + 1
    return boxes


def has_open_box(text: str) -> bool:
    r"""Return whether the last `\boxed{` of a text is never closed."""
    starts = [match.end() - 1 for match in _BOX.finditer(text) if match["open"]]
    return bool(starts) and starts[-1] not in match_braces(text)


def match_braces(text: str) -> dict[int, int]:
    """Return the index of the closing brace for the index of each opening brace.

    Braces without a partner are absent.
    """
    closing_indices: dict[int, int] = {}
    open_braces: list[int] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            open_braces.append(brace.start())
        elif brace[0] == "}" and open_braces:
            closing_indices[open_braces.pop()] = brace.start()
    return closing_indices


_UNICODE_COMMANDS = {
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

# Commands that change only the size, the font or the position of symbols.
_SIZE_COMMANDS = re.compile(
    r"\\(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle|limits|nolimits|rm"
    r"|bf|it|tt|sf|cal|Large|large|normalsize|small|hfill|newline|nonumber|noindent)(?![a-zA-Z])"
    r"(?:\s*\.(?!\d))?"
)
_LAYOUT_COMMANDS = re.compile(r"\\(?:[hv]space|[hv]phantom|phantom|label|tag)\*?\{[^{}]*\}")
_COLOR_COMMANDS = re.compile(r"\\(?:text)?color\s*\{[^{}]*\}")
_CURRENCY_IN_TEXT = re.compile(r"\\text\s*\{\s*\\text\s*\{(USD|€|£|¥|₹)\}\s*([^{}]*\d[^{}]*)\}")
_FONT_COMMANDS = re.compile(
    r"\\(?:mathbf|mathit|mathsf|mathtt|boldsymbol|bm|mathnormal|underline|underbrace|emph|bold)"
    r"(?=\s*\{)"
)
_TEXT_COMMANDS = re.compile(
    r"\\(?:textbf|textit|textrm|textsf|texttt|textnormal|textup|textsc|mbox|hbox|mathrm"
    r"|text)(?=\s*\{)"
)
_MODULUS = re.compile(r"\(?\s*\\text\s*\{\s*\(?mod\s*\}\s*(\w+)\s*\)?|\(\s*\\?mod\s+(\w+)\s*\)")
_PRIMES = re.compile(r"(?<=\d)\s*(''|\"|')\s*$")
_CASES = re.compile(r"\\begin\{cases\}(.*)\\end\{cases\}", re.DOTALL)
_NESTED_TEXT = re.compile(r"\\text\s*\{([^{}]*)\\text\s*\{([^{}]*)\}([^{}]*)\}")
_SPACES = re.compile(r"\\(?:[,;:> \n]|quad(?![a-zA-Z])|qquad(?![a-zA-Z])|space(?![a-zA-Z]))|~|\s+")

# Thousands separators of LaTeX and of texts.
_LATEX_THOUSANDS = re.compile(
    r"(?<![\d.])(\d{1,3})((?:(?:\{,\}|,\\[!,;: ]|\\[,;: ](?!\\)|\{\\,\}|\{ \}|')\d{3})+)(?!\d)"
)
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,/}] )(?<![\d.,/}\w])[1-9]\d{0,2}(?: \d{3})+(?![\d/])")
_DECIMAL_COMMA = re.compile(r"(?<=\d)\{,\}(?=\d)")
_AND = re.compile(
    r"\\text\s*\{\s*,?\s*(?:and|or|und|oder)\s*\}|(?<![\w\\])(?:and|or)(?!\w)|\\lor\b"
)
# Patterns of equivalent notations with their replacements, applied in this order.
_REPLACEMENTS = (
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
_ENVIRONMENT = r"\begin"
_CONTENT = re.compile(r"\w|\\(?:emptyset|infty|\{)")


def normalize_answer(answer: str) -> str:
    """Return the LaTeX of an answer in one notation, without formatting.

    The function never raises, and the value of a normalized answer does not change if it is
    normalized again. The order of the steps matters: later patterns expect the result of earlier
    ones.
    """
    # Characters, delimiters of math mode and boxes
    text = re.sub(r"\s+", " ", normalize_characters(answer))
    for character, command in _UNICODE_COMMANDS.items():
        text = text.replace(character, command)
    text = _remove_boxes(_remove_math_delimiters(text))
    text = text.replace(r"\$", r"\text{USD}").replace(r"\%", "%").replace(r"\#", "#")
    text = text.replace(r"\&", "&").replace(r"\_", "_")
    if _ENVIRONMENT not in text:
        # Commands whose backslash was escaped twice; between rows it is a line break.
        text = re.sub(r"\\\\(?=[a-zA-Z{}%,;!])", r"\\", text)

    # Markdown and thousands separators
    text = _remove_markdown(text)
    text = _LATEX_THOUSANDS.sub(lambda match: re.sub(r"[^\d]", "", match[0]), text)
    text = _DECIMAL_COMMA.sub(".", text).replace(r"\!", "").replace("{,}", ",")

    # Equivalent commands, and commands that change only the layout
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    text = _LAYOUT_COMMANDS.sub("", _SIZE_COMMANDS.sub("", text))
    text = _COLOR_COMMANDS.sub(" ", text)
    text = re.sub(r"^\s*\\sim(?![a-zA-Z])", "", text)

    # Text within formulas, units and cases
    text = _TEXT_COMMANDS.sub(lambda _: r"\text", text)
    text = _CURRENCY_IN_TEXT.sub(r"\\text{\1}\2", text)
    text = re.sub(r"\\text\s*\{\s*([+-]?\\infty)\s*\}", r"\1", text)
    text = _MODULUS.sub(lambda match: rf"\pmod{{{match[1] or match[2]}}}", text)
    text = _PRIMES.sub(_prime_to_unit, text)
    if "&" not in text:  # with `&`, each case has a condition
        text = _CASES.sub(lambda match: re.sub(r"\\\\", ",", match[1]), text)
    text = _NESTED_TEXT.sub(r"\\text{\1\2\3}", text)

    # Spaces, fonts, separators of lists, and braces around arguments
    text = _SPACES.sub(" ", text) if _ENVIRONMENT not in text else _normalize_matrix_spaces(text)
    text = re.sub(r"(?<=\d)\s*\\Omega\s*$", r"\\text{ohm}", text)
    text = unwrap_command(text, _FONT_COMMANDS)
    text = _AND.sub(",", text)
    text = _SPACED_THOUSANDS.sub(lambda match: match[0].replace(" ", ""), text)
    text = _brace_arguments(text)
    text = re.sub(r"\^\s*\(([^()]*)\)", r"^{\1}", text)
    text = re.sub(r"([_^])\s*(-?\d+)", r"\1{\2}", text)
    return _trim(text)


def _prime_to_unit(match: re.Match[str]) -> str:
    """Return the feet of `5'` or the inches of `5''` as a unit."""
    return r"\text{ft}" if match[1] == "'" else r"\text{in}"


def _normalize_matrix_spaces(text: str) -> str:
    r"""Return a text with plain spaces; `\\` remains, because it ends the rows of a matrix."""
    return re.sub(r"(?<!\\)\\(?:[,;:>]|quad|qquad)(?![a-zA-Z])|~|\s+", " ", text)


def _remove_math_delimiters(text: str) -> str:
    r"""Return a text without the delimiters of math mode: `$`, `\(`, `\)`, `\[` and `\]`."""
    text = re.sub(r"(?<!\\)\\[()]", " ", text)
    text = re.sub(r"(?<!\\)\\\[|(?<!\\)\\\](?!\d)", " ", text)
    delimiters = re.findall(r"(?<!\\)\$", text)
    if len(delimiters) % 2:
        # A single `$` before a number is a currency.
        text = re.sub(r"(?<!\\)\$(?=\s*-?[\d.])", r"\\$", text, count=1)
    return re.sub(r"(?<!\\)\$", "", text)


def _remove_boxes(text: str) -> str:
    """Return a text whose boxes are replaced by their contents, up to five levels deep."""
    for _ in range(5):
        boxes = find_boxes(text)
        if not boxes:
            break
        for box in reversed(boxes):
            text = text[: box.start] + box.content + text[box.end :]
    return text


def _remove_markdown(text: str) -> str:
    """Return a text without Markdown's bold, code, quotes and headings around it."""
    text = re.sub(r"^\s*\*\*(?!\*)(.*?)\*\*(?=[\s.,]*$)", r"\1", text, flags=re.DOTALL)
    text = re.sub(r"^\s*`([^`]*)`\s*$", r"\1", text)
    return re.sub(r"^[\s>#]+(?=\S)", "", text)


def unwrap_command(text: str, command: re.Pattern[str]) -> str:
    """Return a text with each `command{content}` replaced by its content, at most 20 times."""
    for _ in range(20):
        match = command.search(text)
        if match is None:
            break
        opening = text.index("{", match.end())
        end = match_braces(text).get(opening)
        if end is None:
            text = text[: match.start()] + text[match.end() :]
        else:
            text = text[: match.start()] + text[opening + 1 : end] + text[end + 1 :]
    return text


_ARGUMENTS = re.compile(r"\\(frac|sqrt|binom)(?![a-zA-Z])\s*")


def _brace_arguments(text: str) -> str:
    r"""Return a text with braces around the arguments of `\frac`, `\sqrt` and `\binom`.

    `\frac12` becomes `\frac{1}{2}`.
    """
    result: list[str] = []
    position = 0
    braces = match_braces(text)
    while match := _ARGUMENTS.search(text, position):
        result.append(text[position : match.start()] + f"\\{match[1]}")
        position = match.end()
        if match[1] == "sqrt" and text[position : position + 1] == "[":
            closing = text.find("]", position)
            if closing > 0:
                result.append(text[position : closing + 1])
                position = closing + 1
        for _ in range(1 if match[1] == "sqrt" else 2):
            argument, position = _parse_argument(text, position, braces)
            result.append("{" + argument + "}")
            # An argument may itself contain commands without braces.
            if "\\" in argument:
                result[-1] = "{" + _brace_arguments(argument) + "}"
    result.append(text[position:])
    return "".join(result)


def _parse_argument(text: str, position: int, braces: dict[int, int]) -> tuple[str, int]:
    """Return the argument that begins at a position, and the position after it."""
    while text[position : position + 1] == " ":
        position += 1
    character = text[position : position + 1]
    if character == "{" and position in braces:
        return text[position + 1 : braces[position]].strip(), braces[position] + 1
    if character == "(" and (end := _find_closing_parenthesis(text, position)) is not None:
        return text[position + 1 : end].strip(), end + 1
    if command := re.compile(r"\\[a-zA-Z]+(?:\{[^{}]*\})?").match(text, position):
        return command[0], command.end()
    return character, position + len(character)


def _find_closing_parenthesis(text: str, start: int) -> int | None:
    """Return the index of the parenthesis that closes the one at `start`, or None."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return None


def _trim(text: str) -> str:
    """Return a text without surrounding spaces and punctuation, empty braces and repeated spaces.

    A leading `=` or `:` is removed too.
    """
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
    """Return whether a normalized answer has content, and all its braces are closed."""
    return bool(_CONTENT.search(gold)) and is_balanced(gold)


def is_balanced(text: str) -> bool:
    """Return whether all braces and LaTeX environments are closed."""
    plain = re.sub(r"\\.", "", text, flags=re.DOTALL)
    matched = match_braces(plain)
    if plain.count("{") != len(matched) or plain.count("}") != len(matched):
        return False
    return text.count(r"\begin") == text.count(r"\end")


def split_top_level(text: str, separators: str) -> list[str]:
    """Return the parts of a text between separators that are outside of all brackets.

    Args:
        text: Text to split.
        separators: Characters that separate parts.

    Returns:
        The parts without surrounding whitespace; one part if a bracket is not closed.
    """
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
    """Yield the LaTeX commands, escaped characters and single characters of a text."""
    return (match[0] for match in re.finditer(r"\\[a-zA-Z]+|\\.|.", text, re.DOTALL))
