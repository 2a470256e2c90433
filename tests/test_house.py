"""The structure of the package: unique file names, no import cycles, and files named in docs."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "aligner"
MIRRORS = (("schema", "checks"), ("engines/embedded", "engines/tensorrt_llm"))
"""Folders that have files of the same name on purpose."""


def _files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _module(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _place(file: Path) -> str:
    """Return the folder of a file, with one name for folders that mirror each other."""
    folder = str(file.parent.relative_to(PACKAGE))
    return next((mirror[0] for mirror in MIRRORS if folder in mirror), folder)


@pytest.mark.promise("no-import-cycles")
def test_file_names_are_unique_outside_mirrored_folders() -> None:
    places = {(file.name, _place(file)) for file in _files() if not file.name.startswith("__")}
    twice = [name for name, count in Counter(name for name, _ in places).items() if count > 1]
    assert not twice, {
        name: sorted(place for other, place in places if other == name) for name in twice
    }


def test_every_file_has_a_docstring() -> None:
    assert not [
        str(file.relative_to(PACKAGE)) for file in _files() if not ast.get_docstring(_tree(file))
    ]


def _imports(file: Path, modules: dict[str, Path]) -> Iterator[Path]:
    """Yield the package's files that a file imports, also inside of functions."""
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                found = modules.get(f"{node.module}.{name.name}") or modules.get(node.module)
                if found is not None and found != file:
                    yield found
        elif isinstance(node, ast.Import):
            yield from (modules[name.name] for name in node.names if name.name in modules)


@pytest.mark.promise("no-import-cycles")
def test_package_has_no_import_cycles() -> None:
    modules = {_module(file): file for file in _files()}
    left = {file: {*_imports(file, modules)} for file in _files()}
    while free := [file for file, wanted in left.items() if not wanted & left.keys()]:
        for file in free:
            del left[file]
    assert not {
        str(file.relative_to(PACKAGE)): sorted(str(each.name) for each in left[file] & left.keys())
        for file in left
    }


def test_documented_path_from_launch_to_loss_is_imported() -> None:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    files = [PACKAGE / name for name in re.findall(r"^\d+\. `([\w/]+\.py)`", page, re.MULTILINE)]
    assert files[0].parent.name == "cli" and files[-1].name == "policy_losses.py" and len(files) > 2
    for place, file in enumerate(files[1:], start=1):
        parent, _, name = _module(file).rpartition(".")
        named = re.compile(rf"\b{re.escape(parent)}(\.| import .*\b){name}\b")
        assert any(named.search(before.read_text(encoding="utf-8")) for before in files[:place]), (
            file.name
        )


def test_change_table_names_existing_files() -> None:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = page.split("## Files to edit for a change")[1].split("\n## ")[0]
    names = [name for name in re.findall(r"`([\w/]+\.py)`", rows) if "SECTION" not in name]
    assert len(re.findall(r"^\| (?!change|---)", rows, re.MULTILINE)) >= 12 and names
    assert not [name for name in names if not (PACKAGE / name).is_file()]


def test_tests_named_in_docs_exist() -> None:
    root = PACKAGE.parent
    named = {
        name
        for page in (root / "docs").glob("*.md")
        for name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text())
    }
    assert len(named) > 20
    assert not {
        f"{file}::{name}"
        for file, name in named
        if f"def {name}(" not in (root / file).read_text(encoding="utf-8")
    }
