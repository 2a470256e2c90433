"""The lines of aligner that each test runs, measured by coverage.py; a plugin of pytest.

Measure the tests and combine the files of all processes with

    export COVERAGE_PROCESS_START=$PWD/tests/coverage.ini COVERAGE_FILE=$PWD/.coverage
    python -m pytest -p tests.covered_lines -m "not slow"
    unset COVERAGE_PROCESS_START
    python -m coverage combine --rcfile tests/coverage.ini

Both variables name absolute paths, because tests start processes in other directories. coverage.py
measures every Python process that finds them in its environment. It labels a line with a context,
the test that ran it:

- in pytest's process, the test that this plugin reports,
- in a process that a test starts, the test in PYTEST_CURRENT_TEST at the start of the process,
- in a rank of `tests/worker_pool.py`, the test that calls the rank.

A process that several tests use is labelled with the test that started it; its lines therefore count
as those of all tests of that file. The lines of a process that is killed are lost.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest

from tests.worker_pool import WorkerPool


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Label the lines of a test, its fixtures included, with the test."""
    _switch_context(item.nodeid)
    result = yield
    _switch_context("")
    return result


def pytest_configure() -> None:
    """Label and save the lines of each call of a rank, because the pool kills its ranks."""
    run = WorkerPool.run

    def measured_run(
        pool: WorkerPool, function: Callable[..., Any], world: int, *args: Any, **options: Any
    ) -> list[Any]:
        test, _, _ = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")
        name = (function.__module__, function.__name__)
        return run(pool, _call_with_context, world, test, name, *args, **options)

    WorkerPool.run = measured_run  # type: ignore[method-assign]


def _call_with_context(test: str, name: tuple[str, str], *args: Any, **options: Any) -> Any:
    module, function = name
    _switch_context(test)
    try:
        return getattr(importlib.import_module(module), function)(*args, **options)
    finally:
        _switch_context("")
        if (measurement := coverage.Coverage.current()) is not None:
            measurement.save()


def _switch_context(test: str) -> None:
    if (measurement := coverage.Coverage.current()) is not None:
        measurement.switch_context(test)


def labelled_test(context: str) -> str:
    """Return the test, or the test file, that a context names.

    Args:
        context: Label of coverage.py: the test at the start of the process, as in
            PYTEST_CURRENT_TEST, and after a `|` the test that the plugin has reported.

    Returns:
        The id of the reported test. If only the test at the start of the process is known, its
        file, because later tests of the file may use the process too. Empty for lines that ran
        outside of tests.
    """
    reported = context.rfind("|tests/") + 1
    started = re.fullmatch(r"(.*) \((setup|call|teardown)\)\|?", context[reported:], re.DOTALL)
    return started[1].partition("::")[0] if started else context[reported:].removesuffix("|")


class CoveredLines:
    """The combined measurement of a test run."""

    def __init__(self, file: Path) -> None:
        self._data = coverage.CoverageData(str(file))
        self._data.read()

    def tests(self, path: str, lines: Collection[int]) -> set[str]:
        """Return the tests that run any of the lines.

        Args:
            path: Path of the source file, relative to the repository.
            lines: Line numbers, the first line is 1.

        Returns:
            Ids of tests, and test files. An empty text stands for lines that ran outside of tests,
            such as the lines of a module that pytest imports.
        """
        contexts = self._data.contexts_by_lineno(path)
        return {labelled_test(context) for line in lines for context in contexts.get(line, ())}
