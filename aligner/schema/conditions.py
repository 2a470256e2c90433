"""When a run reads a key: conditions over the values of other keys, as the schema writes them
beside a key's help.

`algorithm.loss=clip|cispo` holds for one of these values, each a pattern as in file names, `!=` for
any other value, and `rollout.spare_prompts>0` for a larger number; `null`, `{}` and `[]` stand for
none. A key that begins with a dot is in the section that the condition is written in. Terms are
joined by `and`, and these by `or`; of several conditions in a tuple all must hold.
"""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from aligner.schema.options import CALLABLE, Read

_TERM = re.compile(r"(\.?\w+(?:\.\w+)*)(!=|=|>)(\S+)")
_ALWAYS = "always"
_UNSET = ("null", "{}", "[]")
_PATTERNS = {"*:*": CALLABLE, "experiment:*": "experiment:NAME"}
"""Patterns of values, and how they are shown."""


@dataclass(frozen=True)
class Term:
    """What one key must be."""

    key: str
    sign: str
    values: tuple[str, ...]

    def holds(self, value: Any) -> bool:
        """Whether the key's value is as it must be."""
        if self.sign == ">":
            return value is not None and bool(value > float(self.values[0]))
        matches = any(fnmatchcase(value_text(value), pattern) for pattern in self.values)
        return matches == (self.sign == "=")

    def __str__(self) -> str:
        """In a few words, for messages and tables."""
        values = " or ".join(CALLABLE if value == "*:*" else value for value in self.values)
        if self.sign == ">":
            return f"{self.key} above {values}"
        if self.sign == "=":
            return f"{self.key}={values}"
        return f"{self.key} set" if self.values[0] in _UNSET else f"{self.key} other than {values}"


Alternatives = tuple[tuple[Term, ...], ...]
"""Of one of these all terms must hold."""
Condition = tuple[Alternatives, ...]
"""All of these must hold; a key without any is always read."""


def value_text(value: Any) -> str:
    """A key's value as it is written on the command line."""
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def parse_condition(written: Read, section: str) -> Condition:
    """The condition that the schema has in a section. Raises ValueError for one that is not written
    as it must be."""
    if written == _ALWAYS:
        return ()
    texts = (written,) if isinstance(written, str) else written
    return tuple(
        tuple(
            tuple(_term(term, section) for term in clause.split(" and "))
            for clause in text.split(" or ")
        )
        for text in texts
    )


def _term(text: str, section: str) -> Term:
    parts = _TERM.fullmatch(text)
    if parts is None:
        raise ValueError(
            f"{text!r}: invalid condition; expected KEY=VALUE|VALUE, KEY!=VALUE or KEY>NUMBER"
        )
    key, sign, values = parts.groups()
    return Term(section + key if key.startswith(".") else key, sign, tuple(values.split("|")))


def condition_text(condition: Condition) -> str:
    """Return a condition as Markdown, empty for a key that is always read."""
    parts = []
    for alternatives in condition:
        has_commas = any(
            len(clause) > 1 or len(term.values) > 1 for clause in alternatives for term in clause
        )
        clauses = [" and ".join(map(_term_text, clause)) for clause in alternatives]
        parts.append((", or " if has_commas else " or ").join(clauses))
    has_alternatives = any(len(alternatives) > 1 for alternatives in condition)
    return ("; and " if has_alternatives else " and ").join(parts)


def _term_text(term: Term) -> str:
    if term.sign == ">":
        return f"`{term.key}` is above {term.values[0]}"

    names = ["`" + _PATTERNS.get(value, value) + "`" for value in term.values]
    listed = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    if term.sign == "=":
        is_single = len(names) == 1 and names[0] != f"`{CALLABLE}`"
        return f"`{term.key}={term.values[0]}`" if is_single else f"`{term.key}` is {listed}"
    return f"`{term.key}` is " + ("set" if term.values[0] in _UNSET else f"not {listed}")
