"""The test matrix, and the page that it writes: docs/compatibility.md."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import test_matrix
from benchmarks.runs import REPOSITORY
from benchmarks.test_matrix import CHECKS, COMBINATIONS, Check, build_page, read_results


def test_compatibility_page_is_current() -> None:
    assert test_matrix.PAGE.read_text() == build_page(read_results()), (
        "run `python -m benchmarks.test_matrix --page`"
    )


def test_results_belong_to_combinations_and_checks() -> None:
    results = read_results()

    assert results.keys() <= {combination.name for combination in COMBINATIONS}
    for result in results.values():
        assert "problem" in result or result["checks"].keys() == {
            *(check.name for check in CHECKS),
            "run",
        }


def test_files_of_checks_exist() -> None:
    for check in CHECKS:
        files = [word for word in check.arguments if word.endswith(".py")]
        assert files and all((REPOSITORY / file).is_file() for file in files)


def test_page_names_failures_and_missing_results() -> None:
    passed = {check.name: "3 passed" for check in CHECKS}
    results = {
        "pinned": {
            "versions": {"Python": "3.11.7", "torch": "2.13.0"},
            "checks": {**passed, "engine": "1 failed, 2 passed", "run": "failed: exit code 1"},
            "failed": ["tests.engines.test_families::test_a[b]"],
        },
        "megatron-0.17": {"problem": "pip could not install it"},
    }

    page = build_page(results)

    (row,) = [line for line in page.splitlines() if line.startswith("| `pinned`")]
    assert "| 3.11.7 | 2.13.0 |" in row
    assert "| 1 failed, 2 passed |" in row and row.endswith("| failed: exit code 1 |")
    assert "- `pinned`: failed: `tests.engines.test_families::test_a[b]`" in page
    assert "- `megatron-0.17`: pip could not install it" in page
    assert "- `megatron-0.19`: not tested" in page


def test_checks_count_passed_failed_and_skipped_tests(tmp_path: Path) -> None:
    tests = tmp_path / "test_these.py"
    tests.write_text(
        "import pytest\n"
        "def test_a(): pass\n"
        "def test_b(): assert False\n"
        "@pytest.mark.skip\n"
        "def test_c(): pass\n"
    )
    options = ("-c", str(tmp_path / "pytest.ini"), "--rootdir", str(tmp_path))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    text, failed = test_matrix._run_tests(
        Path(sys.executable), Check("some", "", (str(tests), *options))
    )

    assert text == "1 failed, 1 passed, 1 skipped"
    assert failed == ["test_these::test_b"]


def test_versions_of_an_environment_are_read() -> None:
    versions = test_matrix._read_versions(Path(sys.executable))

    assert versions["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert "+" not in versions["torch"]
