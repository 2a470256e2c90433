"""Differences of two texts, word by word."""

from __future__ import annotations

import random
import time

import pytest

from aligner.view.text_diff import compare_words


def test_changed_words_are_marked() -> None:
    parts = compare_words("it is 5 apples", "it is 72 apples\n")
    assert parts == [
        ("same", "it is"),
        ("removed", " 5"),
        ("added", " 72"),
        ("same", " apples"),
        ("added", "\n"),
    ]


@pytest.mark.parametrize(("old", "new"), [("", ""), ("", "new text"), ("a b", "a b"), (" x", "y ")])
def test_parts_contain_both_texts(old: str, new: str) -> None:
    parts = compare_words(old, new)
    assert "".join(text for kind, text in parts if kind != "removed") == new
    if old != new:
        assert any(kind != "same" for kind, _ in parts)


def test_long_texts_are_compared_within_seconds() -> None:
    words = [
        random.Random(seed).choices(["the", "of", "a", "number", "is", "equal", "to"], k=4000)
        for seed in (1, 2)
    ]
    started_s = time.process_time()
    compare_words(" ".join(words[0]), " ".join(words[1]))
    assert time.process_time() - started_s < 5
