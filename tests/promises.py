"""Read the promises and the tests that cover them, and write their tables: `python -m
tests.promises`.

`promises.toml` has one sentence for each promise. A test covers a promise if it has the marker
`@pytest.mark.promise("id")`, or if its module has it in `pytestmark`. Sources are parsed, not
imported.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[1]
PROMISES = ROOT / "tests" / "promises.toml"
PAGES = {name: ROOT / "docs" / f"{name}.md" for name in ("guarantees", "promises")}


@dataclass(frozen=True)
class Promise:
    """A promise of aligner."""

    id: str
    """Stable name, which the markers of tests use."""

    page: str
    """Page of docs/ whose table lists the promise, without suffix."""

    section: str
    """Heading above the table."""

    text: str
    """The promise in one sentence, as Markdown."""

    commands: tuple[str, ...] = ()
    """Benchmarks and campaigns that verify the promise."""


def read_promises() -> list[Promise]:
    """Return the promises in the order of the file."""
    entries = tomllib.loads(PROMISES.read_text(encoding="utf-8"))["promise"]
    return [Promise(**{**entry, "commands": tuple(entry.get("commands", ()))}) for entry in entries]


def _marked_ids(node: ast.expr) -> Iterator[str]:
    """Yield the arguments of all `pytest.mark.promise(...)` in an expression."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.promise":
            for argument in call.args:
                yield ast.literal_eval(argument)


def promises_of_source(source: str) -> dict[str, list[str]]:
    """Return the ids that each test of a module covers.

    Args:
        source: Source text of the test module.

    Returns:
        Ids by the name of the test function. The name is empty for `pytestmark`.
    """
    if "mark.promise" not in source:
        return {}

    found: dict[str, list[str]] = defaultdict(list)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for decorator in node.decorator_list:
                found[node.name].extend(_marked_ids(decorator))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            found[""].extend(_marked_ids(node.value))
    return {name: ids for name, ids in found.items() if ids}


@cache
def covering_tests() -> dict[str, list[str]]:
    """Return the tests that cover each id, as `FILE::NAME`, or `FILE` for a whole module."""
    tests: dict[str, list[str]] = defaultdict(list)
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        path = file.relative_to(ROOT).as_posix()
        for name, ids in promises_of_source(file.read_text(encoding="utf-8")).items():
            for promise_id in ids:
                tests[promise_id].append(f"{path}::{name}" if name else path)
    return tests


def _table(promises: list[Promise], tests: dict[str, list[str]]) -> str:
    title = "guarantee" if promises[0].page == "guarantees" else "promise"
    rows = [f"| {title} | tests |", "|---|---|"]
    for promise in promises:
        covered = [f"`{name}`" for name in (*tests.get(promise.id, ()), *promise.commands)]
        rows.append(f"| {promise.text} | {', '.join(covered)} |")
    return "\n".join(rows)


def updated(name: str, page: str) -> str:
    """Return a page with the current table below the heading of each section.

    Args:
        name: Name of the page, as in `Promise.page`.
        page: Present text of the page.

    Raises:
        ValueError: If the page has no table below the heading of a section.
    """
    tests = covering_tests()
    sections: dict[str, list[Promise]] = defaultdict(list)
    for promise in read_promises():
        if promise.page == name:
            sections[promise.section].append(promise)

    for section, promises in sections.items():
        place = re.compile(rf"(?<=^## {re.escape(section)}\n\n)\|(?:.*\n\|)*.*$", re.MULTILINE)
        table = _table(promises, tests)
        page, count = place.subn(lambda _, table=table: table, page)
        if count != 1:
            raise ValueError(f"docs/{name}.md: needs one heading `## {section}` above a table")
    return page


def main() -> None:
    """Update the tables of both pages."""
    for name, page in PAGES.items():
        page.write_text(updated(name, page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
