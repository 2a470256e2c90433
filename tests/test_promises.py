"""Every promise has a test or a command, and the pages list them."""

from __future__ import annotations

import re

import pytest

from tests.promises import (
    PAGES,
    ROOT,
    covering_tests,
    promises_of_source,
    read_promises,
    updated,
)


def test_every_promise_has_a_test_or_a_command() -> None:
    tests = covering_tests()
    uncovered = [
        promise.id
        for promise in read_promises()
        if not promise.commands and promise.id not in tests
    ]
    assert not uncovered, f"no test has the marker of these promises: {uncovered}"


def test_every_guarantee_to_users_has_a_test() -> None:
    tests = covering_tests()
    guarantees = [promise.id for promise in read_promises() if promise.page == "guarantees"]
    assert len(guarantees) >= 63
    assert not [name for name in guarantees if name not in tests]


def test_every_marker_names_a_promise() -> None:
    known = {promise.id for promise in read_promises()}
    unknown = {name: tests for name, tests in covering_tests().items() if name not in known}
    assert not unknown, f"tests/promises.toml has no promises with these ids: {unknown}"


def test_ids_occur_once_and_texts_are_sentences() -> None:
    promises = read_promises()
    assert len({promise.id for promise in promises}) == len(promises)
    for promise in promises:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", promise.id), promise.id
        assert promise.page in PAGES, promise.id
        assert promise.text.endswith("."), promise.id


def test_commands_of_promises_exist() -> None:
    for promise in read_promises():
        for command in promise.commands:
            module = re.match(r"python -m (benchmarks\.\w+)", command)
            assert module, f"{promise.id}: {command}"
            file = ROOT / (module[1].replace(".", "/") + ".py")
            assert file.is_file(), f"{promise.id}: {command}"


@pytest.mark.parametrize("name", PAGES)
def test_page_has_the_current_table(name: str) -> None:
    page = PAGES[name].read_text(encoding="utf-8")
    assert updated(name, page) == page, "run `python -m tests.promises`"


def test_markers_of_functions_and_modules_are_found() -> None:
    source = (
        "pytestmark = [pytest.mark.slow, pytest.mark.promise('whole-module')]\n"
        "@pytest.mark.promise('first', 'second')\n"
        "@pytest.mark.parametrize('n', [1])\n"
        "def test_one(n): ...\n"
        "def test_two(): ...\n"
    )
    assert promises_of_source(source) == {"": ["whole-module"], "test_one": ["first", "second"]}
