"""Tables of tokenized examples on disk, which all ranks of a machine map into memory.

A table is a directory with two files:

- `rows.arrow`: the examples as an Arrow IPC file, in batches of at most 256 rows
- `table.json`: for each batch its number of rows, position and checksum; facts about the examples
  (`description`); and a checksum of the file itself

Arrow rather than megatron-core's indexed data set: its files contain one token sequence per entry,
while an example also has a loss mask, a second response, a margin or metadata; they have no
checksums; and Arrow files can be read with pyarrow, pandas or DuckDB.

A batch is compared with its checksum when a process first reads it, so that opening a table takes
milliseconds, whatever its size, and no damaged row is trained on.
"""

import bisect
import contextlib
import itertools
import json
import mmap
import operator
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np
import pyarrow as pa
import torch
import xxhash
from torch import Tensor

from aligner.data.checksums import DamagedError, read_sealed, seal
from aligner.errors import AlignerError
from aligner.files import name_file_in_errors, open_new_file, write_file

Example = TypeVar("Example")

TABLE_FILE = "table.json"
ROWS_FILE = "rows.arrow"
TOKENS = pa.list_(pa.int32())
"""Arrow type of token ids."""
MASK = pa.list_(pa.bool_())
"""Arrow type of a loss mask."""
_BATCH_ROWS = 256
_EMPTY = np.empty(0, dtype=bool)  # of a type that every other type can represent
# Batches whose Arrow objects a process keeps; their data remain in the page cache.
_OPEN_BATCHES = 64
# Verified bytes after which a process gives its pages of the file back. Without this, an epoch
# would count the whole file as memory of each process.
_RELEASE_BYTES = 32 << 20


class DamagedTable(AlignerError):
    """The rows of a table do not match their checksum. The table has been set aside, so that it is
    built again when it is opened again."""


class Row:
    """One row of a table."""

    def __init__(self, batch: pa.RecordBatch, index: int) -> None:
        self._batch = batch
        self._index = index

    def get(self, name: str) -> Any:
        """Return the value of a column as a Python object; None if it is null."""
        return self._batch.column(name)[self._index].as_py()

    def get_tokens(self, name: str) -> Tensor:
        """Return token ids, int64 [T]."""
        return torch.from_numpy(self._get_list(name).to_numpy().astype(np.int64))

    def get_mask(self, name: str) -> Tensor | None:
        """Return a mask, bool [T]; None if it is null."""
        if not self._batch.column(name)[self._index].is_valid:
            return None
        return torch.from_numpy(self._get_list(name).to_numpy(zero_copy_only=False))

    def get_optional_tokens(self, name: str) -> Tensor | None:
        """Return token ids, int64 [T]; None if they are null."""
        is_valid = self._batch.column(name)[self._index].is_valid
        return self.get_tokens(name) if is_valid else None

    def _get_list(self, name: str) -> pa.Array:
        return self._batch.column(name)[self._index].values


@dataclass(frozen=True)
class ExampleFormat(Generic[Example]):
    """Conversion of a type of examples to rows of a table, and back."""

    name: str
    schema: pa.Schema
    to_row: Callable[[Example], Mapping[str, Any]]
    """Returns the values of the columns; token ids and masks are tensors [T]."""
    from_row: Callable[[Row], Example]


def encode_batches(
    example_format: ExampleFormat[Example], examples: Iterable[Example]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of examples in batches of at most 256 rows."""
    rows = map(example_format.to_row, examples)
    while batch := list(itertools.islice(rows, _BATCH_ROWS)):
        columns = [
            _build_column([row[field.name] for row in batch], field.type)
            for field in example_format.schema
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=example_format.schema)


def _build_column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return a column of Python values, or of token ids or masks as tensors [T] and None."""
    if not any(isinstance(value, Tensor) for value in values):
        return pa.array(values, type=kind)
    lists = [_EMPTY if value is None else value.numpy() for value in values]
    ends = np.cumsum([0, *map(len, lists)], dtype=np.int32)
    items = pa.array(np.concatenate(lists)).cast(kind.value_type)
    is_null = pa.array([value is None for value in values])
    return pa.ListArray.from_arrays(pa.array(ends), items, type=kind, mask=is_null)


def write_table(
    directory: Path,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    describe: Callable[[], Mapping[str, Any]],
) -> None:
    """Write a table.

    Args:
        directory: The directory of the table; it exists and is empty.
        schema: The columns of the rows.
        batches: The rows.
        describe: Returns the `description` of the table, a JSON object; it is called after the
            last batch.

    Raises:
        OSError: A file cannot be written; the error names it.
    """
    path = directory / ROWS_FILE
    entries = []
    with open_new_file(path) as file, name_file_in_errors(path):
        sink = _HashingFile(file)
        with pa.ipc.new_file(pa.PythonFile(sink, "w"), schema) as writer:
            for batch in batches:
                start = sink.position
                sink.digest.reset()
                writer.write_batch(batch)
                size = sink.position - start
                entries.append([batch.num_rows, start, size, sink.digest.hexdigest()])
    table = {
        "rows": sum(entry[0] for entry in entries),
        "size": sink.position,
        "description": describe(),
        "batches": entries,
    }
    write_file(directory / TABLE_FILE, seal(json.dumps(table)))


class _HashingFile:
    """A file to which Arrow writes, with a checksum of the bytes written since the last reset."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.position = 0
        self.digest = xxhash.xxh3_64()
        self.closed = False

    def write(self, content: Any) -> int:
        view = memoryview(content)
        self._file.write(view)
        self.digest.update(view)
        self.position += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self.closed = True


class ExampleTable(Sequence[Example]):
    """The examples of a table, which are decoded when they are accessed."""

    def __init__(self, directory: Path, example_format: ExampleFormat[Example]) -> None:
        """Open a table.

        Raises:
            DamagedError: The table is missing, incomplete or damaged.
        """
        self.directory = directory
        self._format = example_format
        table = read_sealed(directory / TABLE_FILE)
        self.description: Mapping[str, Any] = table["description"]
        """Facts about the examples that were stored when the table was built."""
        self._batches: Sequence[Sequence[Any]] = table["batches"]
        self._ends = list(itertools.accumulate(entry[0] for entry in self._batches))
        rows_path = directory / ROWS_FILE
        try:
            with rows_path.open("rb") as file:
                self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if len(self._mapping) != table["size"]:
                raise DamagedError(
                    f"{rows_path}: damaged: {len(self._mapping)} bytes, expected {table['size']}"
                )
            self._reader = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(self._mapping)))
        except (OSError, ValueError, pa.ArrowException) as error:
            raise DamagedError(f"{rows_path}: cannot be read: {error}") from error
        self._verified = [False] * len(self._batches)
        self._unreleased_bytes = 0
        self._get_batch = lru_cache(maxsize=_OPEN_BATCHES)(self._read_batch)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...

    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        """Return one example or several.

        Raises:
            DamagedTable: The rows do not match their checksum.
        """
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = range(len(self))[operator.index(index)]
        number = bisect.bisect_right(self._ends, position)
        first = self._ends[number - 1] if number else 0
        return self._format.from_row(Row(self._get_batch(number), position - first))

    def __iter__(self) -> Iterator[Example]:
        for number in range(len(self._batches)):
            batch = self._read_batch(number)
            for index in range(batch.num_rows):
                yield self._format.from_row(Row(batch, index))

    def iterate_values(self, *names: str) -> Iterator[tuple[Any, ...]]:
        """Yield the values of some columns, row by row, without decoding the examples."""
        for number in range(len(self._batches)):
            batch = self._read_batch(number)
            yield from zip(*(batch.column(name).to_pylist() for name in names), strict=True)

    def read_numbers(self, name: str) -> np.ndarray:
        """Return a column of numbers of all rows, [N]."""
        columns = [
            self._read_batch(number).column(name).to_numpy(zero_copy_only=False)
            for number in range(len(self._batches))
        ]
        return np.concatenate(columns)

    def _read_batch(self, number: int) -> pa.RecordBatch:
        if not self._verified[number]:
            self._verify(number)
        return self._reader.get_batch(number)

    def _verify(self, number: int) -> None:
        """Compare a batch with its checksum."""
        rows, start, size, checksum = self._batches[number]
        content = memoryview(self._mapping)[start : start + size]
        if xxhash.xxh3_64_hexdigest(content) != checksum:
            # Without its index, the directory is no table, and is built again.
            with contextlib.suppress(OSError):
                (self.directory / TABLE_FILE).unlink()
            last = self._ends[number]
            raise DamagedTable(
                f"{self.directory / ROWS_FILE}: rows {last - rows} to {last - 1} do not match their"
                " checksum, so the file is damaged on disk; the next start builds it again"
            )
        self._verified[number] = True
        self._unreleased_bytes += size
        if self._unreleased_bytes >= _RELEASE_BYTES:
            self._mapping.madvise(mmap.MADV_DONTNEED)
            self._unreleased_bytes = 0


class SelectedExamples(Sequence[Example]):
    """Examples of a sequence, in the order of given indices."""

    def __init__(self, examples: Sequence[Example], indices: np.ndarray) -> None:
        """Select examples.

        Args:
            examples: The examples.
            indices: Index of each selected example, int64 [N].
        """
        self._examples = examples
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...

    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self._examples[position] for position in self._indices[index].tolist()]
        return self._examples[int(self._indices[index])]


def delete_table(directory: Path) -> None:
    """Delete a table that is incomplete or damaged."""
    (directory / TABLE_FILE).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)
