"""The fast and the slow round of tests cover each pair of a layout's dimension and a model's part."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.megatron import families, test_families
from tests.rounds import choose_covering_rows, covering, slow


def list_rows_of_ci(rows):
    """Return the rows, with and without marks, that `make test` and `make test-rest` run."""
    marked = [row if hasattr(row, "marks") else pytest.param(*row) for row in rows]
    return [
        param.values for param in marked if "families" not in {mark.name for mark in param.marks}
    ]


def test_rounds_cover_each_family_and_each_pair_of_dimension_and_part():
    test = test_families.test_training_equals_transformers
    (cells,) = (mark.args[1] for mark in test.pytestmark if mark.name == "parametrize")
    chosen = list_rows_of_ci(cells)
    described = [test_families.describe_cell(cell) for cell in chosen]
    covered = set().union(*described)
    for cell in test_families.ALL_CELLS:
        assert test_families.describe_cell(cell) <= covered, cell
    assert {family for family, _ in chosen} == families.CONFIGS.keys()
    assert len(chosen) < len(test_families.ALL_CELLS) / 2 == len(cells) / 2


@pytest.mark.parametrize(
    ("family", "layout", "pair"),
    [
        ("llama3", "TP2xPP2", "groups of query heads at tensor=2"),
        ("llama3", "PP3", "tied_embeddings=True at pipeline=3"),
        ("mistral", "CP2", "sliding_window at context=2"),
        ("gemma2", "DP2", "attention_softcap at data=2"),
        ("gpt-oss", "EP2 over TP2", "attention_sinks=True at expert_tensor=1"),
        ("deepseek_v3", "EP2", "experts.groups at expert=2"),
        ("deepseek_v3", "VPP2", "latent_attention at virtual_pipeline=2"),
        ("qwen3_next", "EP2 distributed", "delta_net at distributed optimizer"),
        ("smollm3", "single", "no rope at one rank"),
        ("olmo2-multi-query", "TP2+SP", "one KV head at sequence=True"),
    ],
)
def test_cell_is_described_by_pairs(family, layout, pair):
    assert {family, pair} <= test_families.describe_cell((family, layout))


def test_rows_are_chosen_until_all_features_are_covered():
    features = {"a": "wx", "b": "xyz", "c": "z", "d": "v"}
    assert choose_covering_rows("abcd", "", features.get) == ["b", "a", "d"]
    assert choose_covering_rows("abcd", "d", features.get) == ["b", "a"]
    rows = covering("abcd", "d", features.get)
    assert rows[:2] == [slow("a"), slow("b")] and rows[3] == "d"
    assert {mark.name for mark in rows[2].marks} == {"slow", "families"}


@pytest.mark.parametrize(("end", "outcomes"), [("1", "1 skipped"), ("9e12", "1 passed")])
def test_tests_after_the_end_of_the_round_are_skipped(end, outcomes):
    test = "tests/test_exit_codes.py::test_child_killed_by_signal_has_exit_code_137"
    printed = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", test],
        env={**os.environ, "ALIGNER_TESTS_END": end},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert outcomes in printed, printed
