"""Tables of examples: every example is restored, and no damaged row is read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.data import example_table
from aligner.data.checksums import DamagedError
from aligner.data.example_table import (
    ROWS_FILE,
    TABLE_FILE,
    DamagedTable,
    ExampleFormat,
    ExampleTable,
    SelectedExamples,
    encode_batches,
    write_table,
)
from aligner.data.examples import (
    DEMONSTRATIONS,
    LABELED_ANSWERS,
    LABELED_STEPS,
    PREFERENCES,
    Demonstration,
    LabeledAnswer,
    LabeledSteps,
    Preference,
)
from aligner.data.teacher_scores import TeacherScoresRow


def write(directory: Path, example_format: ExampleFormat, examples: Sequence) -> ExampleTable:
    directory.mkdir()
    batches = encode_batches(example_format, examples)
    write_table(directory, example_format.schema, batches, lambda: {"source": "test"})
    return ExampleTable(directory, example_format)


def demonstration(length: int) -> Demonstration:
    return Demonstration(torch.arange(length), 1)


TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=20).map(torch.tensor)


@st.composite
def demonstrations(draw: st.DrawFn) -> Demonstration:
    tokens = draw(TOKENS)
    masks = st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)).map(torch.tensor)
    rows = st.builds(
        TeacherScoresRow, st.just(Path("scores/part")), st.integers(0, 2**40), st.integers(0, 99)
    )
    return Demonstration(
        tokens,
        draw(st.integers(1, len(tokens))),
        draw(st.none() | masks),
        draw(st.none() | rows),
        draw(st.none() | TOKENS),
    )


def without_scores(example: Demonstration) -> Demonstration:
    return Demonstration(
        example.tokens, example.prompt_length, example.response_mask, None, example.prompt
    )


ANSWERS = demonstrations().map(without_scores)
STEPS = st.integers(1, 5).map(
    lambda count: LabeledSteps(
        torch.arange(20), 2, torch.arange(count) + 3, torch.arange(count) % 2 * 1.0
    )
)
EXAMPLES = (
    demonstrations().map(lambda example: (DEMONSTRATIONS, example))
    | st.builds(Preference, ANSWERS, ANSWERS, st.none() | st.floats(0, 9)).map(
        lambda example: (PREFERENCES, example)
    )
    | st.builds(LabeledAnswer, ANSWERS, st.booleans()).map(
        lambda example: (LABELED_ANSWERS, example)
    )
    | STEPS.map(lambda example: (LABELED_STEPS, example))
)


@settings(max_examples=60, deadline=None)
@given(EXAMPLES)
def test_examples_of_every_type_are_restored(
    tmp_path_factory: pytest.TempPathFactory, pair: tuple[ExampleFormat, object]
) -> None:
    example_format, example = pair
    table = write(tmp_path_factory.mktemp("table") / "t", example_format, [example])
    # The text of a tensor contains all of its values and its type.
    with torch._tensor_str.printoptions(threshold=1 << 20):
        assert repr(table[0]) == repr(example)


def test_examples_are_found_by_any_index(tmp_path):
    lengths = [index % 50 + 1 for index in range(1000)]
    table = write(tmp_path / "t", DEMONSTRATIONS, [demonstration(length) for length in lengths])
    assert len(table) == 1000 and table.description == {"source": "test"}
    assert [len(example.tokens) for example in table] == lengths
    assert [len(table[index].tokens) for index in (0, 255, 256, 999, -1, np.int64(512))] == [
        lengths[index] for index in (0, 255, 256, 999, -1, 512)
    ]
    assert [len(example.tokens) for example in table[250:260:3]] == lengths[250:260:3]
    selected = SelectedExamples(table, np.array([300, 2]))
    assert [len(example.tokens) for example in selected] == [lengths[300], lengths[2]]
    with pytest.raises(IndexError):
        table[1000]


@pytest.mark.promise("damaged-data-are-never-trained-on")
@pytest.mark.parametrize("position", [0.02, 0.5, 0.9])
def test_flipped_byte_is_found_before_its_row_is_used(tmp_path, position):
    examples = [demonstration(40) for _ in range(1000)]
    directory = write(tmp_path / "t", DEMONSTRATIONS, examples).directory
    file = directory / ROWS_FILE
    content = bytearray(file.read_bytes())
    content[int(len(content) * position)] ^= 1
    file.write_bytes(content)

    table = ExampleTable(directory, DEMONSTRATIONS)
    with pytest.raises(DamagedTable, match=r"rows \d+ to \d+ do not match their checksum"):
        list(table)
    # The table is not opened again, so that it is built again.
    with pytest.raises(DamagedError):
        ExampleTable(directory, DEMONSTRATIONS)


@pytest.mark.parametrize("name", [ROWS_FILE, TABLE_FILE])
def test_truncated_file_is_no_table(tmp_path, name):
    directory = write(tmp_path / "t", DEMONSTRATIONS, [demonstration(40)] * 1000).directory
    os.truncate(directory / name, (directory / name).stat().st_size - 8)
    with pytest.raises(DamagedError, match=name):
        ExampleTable(directory, DEMONSTRATIONS)


def test_reading_a_table_does_not_keep_it_in_memory(tmp_path, monkeypatch):
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[2]) * os.sysconf("SC_PAGE_SIZE")

    table = write(tmp_path / "t", DEMONSTRATIONS, [demonstration(4000)] * 10_000)
    size = (table.directory / ROWS_FILE).stat().st_size
    monkeypatch.setattr(example_table, "_RELEASE_BYTES", 1 << 20)
    before = resident_bytes()  # of pages that belong to files
    for index in range(len(table)):
        table[index]
    assert size > 150 << 20 and resident_bytes() - before < 20 << 20
