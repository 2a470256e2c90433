"""Conditions under which a run reads a key.

The schema writes the condition of a key as a text, in the argument `read_if` of `option`:

- `algorithm.loss=clip|cispo` holds if the key has one of these values. A value may be a pattern, as
  in file names.
- `algorithm.loss!=clip|cispo` holds for all other values.
- `rollout.spare_prompts>0` holds for a larger number.
- `null`, `{}` and `[]` stand for a key that is not set.
- A key that begins with a dot belongs to the section with the condition.
- `and` binds more strongly than `or`.
- In a tuple of conditions, all conditions must hold.
"""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from aligner.schema.options import CALLABLE, ConditionText

# Key, sign and values of a term.
_TERM = re.compile(r"(\.?\w+(?:\.\w+)*)(!=|=|>)(\S+)")
_ALWAYS = "always"
_UNSET_VALUES = ("null", "{}", "[]")
# Patterns of values with their text in the documentation.
_PATTERNS = {"*:*": CALLABLE, "experiment:*": "experiment:NAME"}


@dataclass(frozen=True)
class Term:
    """Requirement on the value of one key."""

    key: str
    """Dotted key."""
    sign: str
    """`=`, `!=` or `>`."""
    values: tuple[str, ...]
    """Patterns of values; a single number for `>`."""

    def is_met(self, value: Any) -> bool:
        """Return whether a value of the key meets the requirement."""
        if self.sign == ">":
            return value is not None and bool(value > float(self.values[0]))
        matches = any(fnmatchcase(format_value(value), pattern) for pattern in self.values)
        return matches == (self.sign == "=")

    def __str__(self) -> str:
        """Return the requirement in a few words, for messages and tables."""
        values = " or ".join(CALLABLE if value == "*:*" else value for value in self.values)
        if self.sign == ">":
            return f"{self.key} above {values}"
        if self.sign == "=":
            return f"{self.key}={values}"
        return (
            f"{self.key} set"
            if self.values[0] in _UNSET_VALUES
            else f"{self.key} other than {values}"
        )


Alternatives = tuple[tuple[Term, ...], ...]
"""Clauses of which at least one must hold; all terms of a clause must hold."""
Condition = tuple[Alternatives, ...]
"""Alternatives that must all hold; a key with an empty condition is always read."""


def format_value(value: Any) -> str:
    """Return a key's value as it is written on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_condition(conditions: ConditionText, section: str) -> Condition:
    """Parse a condition of the schema.

    Args:
        conditions: One or several conditions, see the module's docstring.
        section: Dotted name of the section with the condition.

    Raises:
        ValueError: The condition is malformed.

    Example:
        `parse_condition(".loss=clip and .epochs>1", "algorithm")`
    """
    if conditions == _ALWAYS:
        return ()
    texts = (conditions,) if isinstance(conditions, str) else conditions
    return tuple(
        tuple(
            tuple(_parse_term(term, section) for term in clause.split(" and "))
            for clause in text.split(" or ")
        )
        for text in texts
    )


def _parse_term(text: str, section: str) -> Term:
    """Parse a term such as `.loss=clip|cispo` of a section."""
    parts = _TERM.fullmatch(text)
    if parts is None:
        raise ValueError(
            f"{text!r}: invalid condition; expected KEY=VALUE|VALUE, KEY!=VALUE or KEY>NUMBER"
        )
    key, sign, values = parts.groups()
    return Term(section + key if key.startswith(".") else key, sign, tuple(values.split("|")))


def format_condition(condition: Condition) -> str:
    """Return a condition as Markdown; empty for a key that is always read."""
    parts = []
    for alternatives in condition:
        # A comma separates the alternatives if one of them contains an "and" or an "or" itself.
        has_commas = any(
            len(clause) > 1 or len(term.values) > 1 for clause in alternatives for term in clause
        )
        clauses = [" and ".join(map(_format_term, clause)) for clause in alternatives]
        parts.append((", or " if has_commas else " or ").join(clauses))
    # "and" binds more strongly than "or", so that only a semicolon separates such parts clearly.
    has_alternatives = any(len(alternatives) > 1 for alternatives in condition)
    return ("; and " if has_alternatives else " and ").join(parts)


def _format_term(term: Term) -> str:
    """Return a term as Markdown."""
    if term.sign == ">":
        return f"`{term.key}` is above {term.values[0]}"

    names = ["`" + _PATTERNS.get(value, value) + "`" for value in term.values]
    alternatives = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    if term.sign == "=":
        is_single = len(names) == 1 and names[0] != f"`{CALLABLE}`"
        return f"`{term.key}={term.values[0]}`" if is_single else f"`{term.key}` is {alternatives}"
    return f"`{term.key}` is " + (
        "set" if term.values[0] in _UNSET_VALUES else f"not {alternatives}"
    )
