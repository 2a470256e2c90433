"""Raw records of files, Hugging Face datasets, functions and standard input, read in chunks.

`open_record_source` returns the source of a path. `RecordSource.scan` reads a source once and
divides it into chunks of consecutive records. A chunk can be sent to another process, which reads
only the bytes of the chunk. No source is held in memory as a whole, except the records of a
function and standard input.
"""

import codecs
import csv
import gzip
import io
import itertools
import json
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TextIO, cast

import xxhash

from aligner.child_function import ChildFunction, ChildLost, ChildRaised
from aligner.errors import ConfigError
from aligner.file_limits import (
    MAX_EXPANDED_BYTES,
    MAX_EXPANSION,
    MAX_JSON_DEPTH,
    MAX_JSON_VALUES,
    MAX_RECORD_BYTES,
    MAX_ROW_GROUP_BYTES,
)
from aligner.schema.data_sources import FILE_SUFFIXES, FUNCTION, get_file_kind, is_dataset

# Bytes of a chunk of a file, before it is extended to the end of a record. A chunk takes a process
# about a second to parse, so that all processes end at about the same time.
_CHUNK_BYTES = 2 << 20
# Records of a chunk of a dataset or a list.
_CHUNK_RECORDS = 2048


@dataclass(frozen=True)
class RawRecord:
    """A record before it is parsed."""

    content: bytes | Mapping[str, Any]
    """A line of a file, or the fields of the record."""
    origin: str
    """Origin of the record for messages: FILE:LINE, or DIRECTORY[INDEX]."""
    is_json: bool = True
    """Whether a line of a file is a JSON object; otherwise it is a prompt."""


@dataclass(frozen=True)
class RecordChunk(ABC):
    """Consecutive records of a source."""

    size: int
    """Size of the chunk, in the unit of its source (bytes or records), to report progress."""

    @abstractmethod
    def read(self) -> Iterator[RawRecord]:
        """Yield the records.

        Raises:
            ConfigError: The file cannot be read, or has changed since it was scanned.
        """


class RecordSource(ABC):
    """The records of one path of the configuration."""

    counts_records: ClassVar[bool] = False
    """Whether sizes are numbers of records; otherwise they are bytes."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Sum of the sizes of the chunks."""

    @abstractmethod
    def scan(self) -> Iterator[RecordChunk]:
        """Divide the source into chunks, in the order of the records.

        Raises:
            ConfigError: The source cannot be read, or is empty.
        """

    def compute_content_checksum(self) -> str | None:
        """Return the checksum of records that are not in a file; None if the records are in
        files."""
        return None

    def read(self) -> Iterator[RawRecord]:
        """Yield all records, see `scan`."""
        for chunk in self.scan():
            yield from chunk.read()


def open_record_source(
    path: Path,
    key: str,
    kind: str | None = None,
    timeout_s: float | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> RecordSource:
    """Return the source of a file, of standard input, of a Hugging Face dataset or of a function.

    Args:
        path: A file, `-` for standard input, a directory with a dataset, or a Python function as
            `function:MODULE:CALLABLE`.
        key: The configuration key of the path and the text after it, for messages.
        kind: One of FILE_SUFFIXES. None uses the file's suffix, or `txt` for standard input.
        timeout_s: The deadline of a function, in seconds; None is no deadline.
        arguments: The keyword arguments of a function.

    Raises:
        ConfigError: The type of the file is not supported.
    """
    if str(path).startswith(FUNCTION):
        return _FunctionSource(path, key, timeout_s, arguments or {})
    if path.is_dir():
        return _DatasetSource(path, key)
    if str(path) == "-":
        return _StandardInput(key, is_json=kind == "jsonl")

    kind = kind or get_file_kind(path)
    if kind == "parquet":
        return _ParquetSource(path, key)
    if kind in ("json", "json.gz"):
        return _JsonSource(path, key)
    if kind == "jsonl.gz":
        return _CompressedLineSource(path, key)
    if kind == "csv":
        return _CsvSource(path, key)
    if kind in FILE_SUFFIXES:
        return _LineSource(path, key, is_json=kind == "jsonl")
    allowed = ", ".join(f".{suffix}" for suffix in FILE_SUFFIXES)
    raise ConfigError(f"{key}{path}: unsupported file type {path.suffix!r}; allowed: {allowed}")


def hash_raw_record(record: RawRecord) -> int:
    """Return a 64-bit hash of a record's content, to count duplicates.

    Raises:
        ConfigError: The values are nested more deeply than Python can encode.
    """
    content = record.content
    if not isinstance(content, bytes):
        try:
            text = json.dumps(content, sort_keys=True, default=str)
        except RecursionError as error:
            raise ConfigError(
                f"{record.origin}: the values of the record are nested too deeply; flatten or"
                " remove them"
            ) from error
        content = text.encode("utf-8", "surrogatepass")
    return xxhash.xxh3_64_intdigest(content)


def is_blank(record: RawRecord) -> bool:
    """Return whether a record is an empty line of a JSON Lines file. An empty line of a text file
    is an empty prompt."""
    return record.is_json and isinstance(record.content, bytes) and not record.content.strip()


@dataclass(frozen=True)
class _FileStamp:
    """Attributes of a file that change when it is written."""

    size: int
    modified_ns: int
    inode: int

    @staticmethod
    def read(path: Path) -> "_FileStamp":
        status = path.stat()
        return _FileStamp(status.st_size, status.st_mtime_ns, status.st_ino)


def _get_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # reading the file reports the error
        return 0


def _changed_file_error(path: Path) -> ConfigError:
    return ConfigError(
        f"{path}: the file changed while it was read; start again when it is complete"
    )


@contextmanager
def _require_unchanged(path: Path) -> Iterator[None]:
    """Raise ConfigError at the end of a `with` block if the file has changed since its start."""
    stamp = _FileStamp.read(path)
    yield
    if _FileStamp.read(path) != stamp:
        raise _changed_file_error(path)


@dataclass(frozen=True)
class _LineChunk(RecordChunk):
    """Lines of a text file."""

    path: Path
    start: int
    """Position of the first byte."""
    checksum: str
    """Checksum of the bytes at the time of the scan."""
    first_line: int
    """Number of the first line, from 1."""
    is_json: bool

    def read(self) -> Iterator[RawRecord]:
        content = _read_range(self.path, self.start, self.size, self.checksum)
        yield from _split_lines(content, str(self.path), self.first_line, is_json=self.is_json)


def _read_range(path: Path, start: int, size: int, checksum: str) -> bytes:
    """Return a range of a file's bytes; raise ConfigError if they do not match the checksum."""
    try:
        with path.open("rb") as stream:
            stream.seek(start)
            content = stream.read(size)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if xxhash.xxh3_64_hexdigest(content) != checksum:
        raise _changed_file_error(path)
    return content


def _split_lines(
    content: bytes, name: str, first_line: int, *, is_json: bool
) -> Iterator[RawRecord]:
    """Yield the lines of a part of a text file."""
    if first_line == 1:
        content = content.removeprefix(codecs.BOM_UTF8)
    # Split bytes at line feeds only: `splitlines` of a text also splits at characters such as
    # U+2028, which JSON allows inside strings.
    lines = content.replace(b"\r\n", b"\n").removesuffix(b"\n").split(b"\n")
    for number, line in enumerate(lines, start=first_line):
        yield RawRecord(line, f"{name}:{number}", is_json)


@dataclass(frozen=True)
class _LineSource(RecordSource):
    """A text file whose lines are JSON objects or prompts."""

    path: Path
    key: str
    is_json: bool

    @property
    def size(self) -> int:
        return _get_size(self.path)

    def scan(self) -> Iterator[RecordChunk]:
        start = 0
        line = 1
        for content in self._read_blocks():
            yield _LineChunk(
                len(content),
                self.path,
                start,
                xxhash.xxh3_64_hexdigest(content),
                line,
                self.is_json,
            )
            start += len(content)
            line += content.count(b"\n")

    def read(self) -> Iterator[RawRecord]:
        """Yield all lines; unlike the chunks of `scan`, this reads the file only once."""
        line = 1
        for content in self._read_blocks():
            yield from _split_lines(content, str(self.path), line, is_json=self.is_json)
            line += content.count(b"\n")

    def _read_blocks(self) -> Iterator[bytes]:
        """Yield the content of the file in blocks of whole lines.

        Raises:
            ConfigError: The file cannot be read, or is empty.
        """
        line = 1
        try:
            with self.path.open("rb") as stream:
                is_first = True
                while content := _read_lines(stream, self.path, line):
                    if is_first and not content.removeprefix(codecs.BOM_UTF8).strip(b"\r\n"):
                        break
                    yield content
                    is_first = False
                    line += content.count(b"\n")
        except OSError as error:
            raise ConfigError(f"{self.key}{self.path} cannot be read: {error}") from error
        if is_first:
            raise ConfigError(f"{self.key}{self.path}: the file is empty")


def _read_lines(stream: BinaryIO, path: Path, first_line: int) -> bytes:
    """Return the next lines of a file, about `_CHUNK_BYTES`; empty at the end of the file.

    Args:
        stream: The file, at the start of a line.
        path: Path of the file, for errors.
        first_line: Number of the first line, from 1, for errors.

    Raises:
        ConfigError: A line is longer than `MAX_RECORD_BYTES`.
    """
    content = stream.read(_CHUNK_BYTES)
    rest = stream.readline(MAX_RECORD_BYTES + 1)
    if len(rest) > MAX_RECORD_BYTES:
        line = first_line + content.count(b"\n")
        raise _long_record_error(f"{path}:{line}")
    return content + rest


def _long_record_error(origin: str) -> ConfigError:
    return ConfigError(
        f"{origin}: the record has more than {MAX_RECORD_BYTES} bytes, the maximum of a record;"
        " split or remove it"
    )


def _check_expansion(path: Path, expanded_bytes: int, compressed_bytes: int) -> None:
    """Raise ConfigError if a compressed file is much larger than text can be.

    Args:
        path: Path of the file.
        expanded_bytes: Number of bytes that have been decompressed.
        compressed_bytes: Number of bytes of the file that have been read.
    """
    if expanded_bytes > max(MAX_EXPANDED_BYTES, MAX_EXPANSION * compressed_bytes):
        raise ConfigError(
            f"{path}: {compressed_bytes} compressed bytes contain more than {expanded_bytes} bytes,"
            f" allowed: {MAX_EXPANSION} times as many; decompress the file if it is valid"
        )


def _is_compressed(path: Path) -> bool:
    """Return whether the name of a file ends with `.gz`."""
    return path.suffix == ".gz"


def _open_file(path: Path) -> BinaryIO:
    """Open a file for reading bytes; a file that is compressed with gzip is decompressed."""
    return cast(BinaryIO, gzip.open(path)) if _is_compressed(path) else path.open("rb")


def _get_position(stream: BinaryIO) -> int:
    """Return the position in the file itself, also if it is compressed."""
    file = stream.fileobj if isinstance(stream, gzip.GzipFile) else stream
    return int(file.tell())


@dataclass(frozen=True)
class _CompressedLineSource(RecordSource):
    """A JSON Lines file that is compressed with gzip.

    The chunks contain their lines: a process cannot start to decompress in the middle of the file.
    """

    path: Path
    key: str

    @property
    def size(self) -> int:
        return _get_size(self.path)

    def scan(self) -> Iterator[RecordChunk]:
        position = 0
        line = 1
        try:
            with _require_unchanged(self.path), _open_file(self.path) as stream:
                while content := _read_lines(stream, self.path, line):
                    _check_expansion(self.path, stream.tell(), _get_position(stream))
                    if line == 1 and not content.removeprefix(codecs.BOM_UTF8).strip(b"\r\n"):
                        raise ConfigError(f"{self.key}{self.path}: the file is empty")
                    lines = _split_lines(content, str(self.path), line, is_json=True)
                    end = _get_position(stream)
                    yield _ListChunk(end - position, tuple(lines))
                    position = end
                    line += content.count(b"\n")
                if position == 0:
                    raise ConfigError(f"{self.key}{self.path}: the file is empty")
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"{self.key}{self.path} cannot be read: {error}") from error


@dataclass(frozen=True)
class _CsvSource(RecordSource):
    """A CSV file (RFC 4180): the first line contains the names of the fields."""

    path: Path
    key: str

    @property
    def size(self) -> int:
        return _get_size(self.path)

    def scan(self) -> Iterator[RecordChunk]:
        position = 0
        try:
            with _require_unchanged(self.path), self.path.open("rb") as stream:
                text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
                rows = self._iterate_rows(text)
                while records := tuple(itertools.islice(rows, _CHUNK_RECORDS)):
                    yield _ListChunk(stream.tell() - position, records)
                    position = stream.tell()
                if position == 0:
                    raise ConfigError(f"{self.key}{self.path}: the file has no records")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.key}{self.path} cannot be read: {error}") from error

    def _iterate_rows(self, text: TextIO) -> Iterator[RawRecord]:
        # The default limit of 128 KiB per field is less than a long document.
        csv.field_size_limit(MAX_RECORD_BYTES)
        row_bytes = 0

        def read_lines() -> Iterator[str]:
            nonlocal row_bytes
            while text_line := text.readline(MAX_RECORD_BYTES + 1):
                row_bytes += len(text_line)
                if row_bytes > MAX_RECORD_BYTES:
                    raise _long_record_error(f"{self.path}:{line}")
                yield text_line

        rows = csv.reader(read_lines(), strict=True)
        names: list[str] = []
        # A field may contain line breaks: a row begins after the last line of the row before it.
        line = 1
        try:
            for row in rows:
                if not names:
                    names = self._read_names(row)
                elif row:  # an empty line is an empty row
                    yield RawRecord(self._to_values(names, row, line), f"{self.path}:{line}")
                line = rows.line_num + 1
                row_bytes = 0
        except csv.Error as error:
            raise ConfigError(f"{self.path}:{line}: not valid CSV: {error}") from error

    def _read_names(self, row: Sequence[str]) -> list[str]:
        if not row or not all(row) or len({*row}) < len(row):
            raise ConfigError(
                f"{self.path}:1: the first line of a CSV file must contain the names of the"
                f" fields, each once; got {row}"
            )
        return list(row)

    def _to_values(self, names: Sequence[str], row: Sequence[str], line: int) -> dict[str, str]:
        if len(row) != len(names):
            raise ConfigError(
                f"{self.path}:{line}: the row has {len(row)} fields, but the first line names"
                f" {len(names)}: {', '.join(names)}"
            )
        return dict(zip(names, row, strict=True))


@dataclass(frozen=True)
class _JsonSource(RecordSource):
    """A JSON file: one array of objects, or one object per line."""

    path: Path
    key: str

    @property
    def size(self) -> int:
        return _get_size(self.path)

    def scan(self) -> Iterator[RecordChunk]:
        try:
            with _open_file(self.path) as stream:
                beginning = stream.read(_CHUNK_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
            if beginning.startswith(b"["):
                yield from self._scan_array()
            elif _is_compressed(self.path):
                yield from _CompressedLineSource(self.path, self.key).scan()
            else:
                yield from _LineSource(self.path, self.key, is_json=True).scan()
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"{self.key}{self.path} cannot be read: {error}") from error

    def _scan_array(self) -> Iterator[RecordChunk]:
        with _require_unchanged(self.path), _open_file(self.path) as stream:
            if stream.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
                stream.seek(0)
            elements = self._iterate_elements(_ElementStream(stream, self.path))
            position = 0
            while records := tuple(itertools.islice(elements, _CHUNK_RECORDS)):
                end = _get_position(stream)
                yield _ListChunk(end - position, records)
                position = end
            if position == 0:
                raise ConfigError(f"{self.key}{self.path}: the array is empty")

    def _iterate_elements(self, stream: "_ElementStream") -> Iterator[RawRecord]:
        """Yield the elements of the array. An element that is not an object becomes a line, so that
        parsing reports it like a line of JSON Lines."""
        # The backends in C replace lone surrogates by question marks, and refuse large integers.
        from ijson.backends import python as ijson
        from ijson.common import JSONError, ObjectBuilder

        index = 0
        depth = 0
        try:
            # `ijson.items` would also compute the path of each value, whose length grows with the
            # depth.
            for event, value in ijson.basic_parse(stream, use_float=True):
                is_end = event in ("end_map", "end_array")
                depth -= is_end
                if depth == 1 and not is_end:
                    builder = ObjectBuilder()
                if depth > MAX_JSON_DEPTH:
                    stream.stop(f"is nested more than {MAX_JSON_DEPTH} levels deep")
                    # The parser may have read the rest of the file before.
                    stream.raise_problem()
                elif depth > 0:
                    builder.event(event, value)
                depth += event in ("start_map", "start_array")
                if depth == 1 and event != "start_array":
                    element = builder.value
                    is_object = isinstance(element, dict)
                    content = element if is_object else json.dumps(element).encode()
                    yield RawRecord(content, f"{self.path}[{index}]")
                    index += 1
                    stream.start_element(index)
        # Python refuses to convert thousands of digits with a ValueError.
        except (JSONError, ValueError) as error:
            stream.raise_problem()
            raise ConfigError(f"{self.path}[{index}]: not valid JSON: {error}") from error


class _ElementStream:
    """A file whose elements are read one after the other, each within limits.

    If an element exceeds a limit, the file ends there for the parser, so that the parser stops
    itself. `raise_problem` then raises the error.
    """

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self._stream = stream
        self._path = path
        self._element_bytes = 0
        self._element_values = 0
        self._index = 0
        self._problem: ConfigError | None = None

    def start_element(self, index: int) -> None:
        """Begin the element with an index, up to the bytes that were read ahead."""
        self._index = index
        self._element_bytes = 0
        self._element_values = 0

    def stop(self, problem: str) -> None:
        """End the file because of a problem of the current element."""
        if self._problem is None:
            self._problem = ConfigError(f"{self._path}[{self._index}]: the record {problem}")

    def raise_problem(self) -> None:
        """Raise ConfigError if the file was ended because of a problem."""
        if self._problem is not None:
            raise self._problem

    def read(self, count: int) -> bytes:
        """Return the next bytes; none after a problem."""
        if self._problem is not None:
            return b""
        content = self._stream.read(count)
        self._element_bytes += len(content)
        self._element_values += sum(content.count(mark) for mark in (b"[", b"{", b","))
        if self._element_bytes > MAX_RECORD_BYTES:
            self._problem = _long_record_error(f"{self._path}[{self._index}]")
        elif self._element_values > MAX_JSON_VALUES:
            self.stop(f"has up to {self._element_values} values, allowed: {MAX_JSON_VALUES}")
        elif isinstance(self._stream, gzip.GzipFile):
            try:
                _check_expansion(self._path, self._stream.tell(), _get_position(self._stream))
            except ConfigError as error:
                self._problem = error
        return b"" if self._problem else content


@dataclass(frozen=True)
class _ParquetChunk(RecordChunk):
    """Consecutive rows of a row group of a Parquet file."""

    path: Path
    stamp: _FileStamp
    row_group: int
    start: int
    """Index of the first row in the row group."""
    first: int
    """Index of the first row in the file."""

    def read(self) -> Iterator[RawRecord]:
        from pyarrow import ArrowException

        try:
            rows = _read_row_group(self.path, self.stamp, self.row_group)
            records = rows.slice(self.start, self.size).to_pylist()
            is_unchanged = _FileStamp.read(self.path) == self.stamp
        except (OSError, ValueError, ArrowException) as error:
            raise ConfigError(f"{self.path} cannot be read: {error}") from error
        if not is_unchanged:
            raise _changed_file_error(self.path)
        for index, values in enumerate(records, start=self.first):
            yield _without_nulls(values, f"{self.path}[{index}]")


@lru_cache(maxsize=1)
def _read_row_group(path: Path, stamp: _FileStamp, row_group: int) -> Any:
    """Return a row group as an Arrow table. Many writers make few and large row groups, of which
    several chunks are read."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        return file.read_row_group(row_group)


@dataclass(frozen=True)
class _ParquetSource(RecordSource):
    """A Parquet file with a column per field."""

    path: Path
    key: str
    counts_records = True

    @property
    def size(self) -> int:
        from pyarrow import ArrowException, parquet

        try:
            return int(parquet.read_metadata(self.path).num_rows)
        except (OSError, ValueError, ArrowException):  # reading the file reports the error
            return 0

    def scan(self) -> Iterator[RecordChunk]:
        from pyarrow import ArrowException, parquet

        first = 0
        try:
            stamp = _FileStamp.read(self.path)
            with parquet.ParquetFile(self.path) as file:
                metadata = file.metadata
            for group in range(metadata.num_row_groups):
                rows = metadata.row_group(group).num_rows
                self._check_row_group(metadata, group)
                for start in range(0, rows, _CHUNK_RECORDS):
                    size = min(_CHUNK_RECORDS, rows - start)
                    yield _ParquetChunk(size, self.path, stamp, group, start, first + start)
                first += rows
        except (OSError, ValueError, ArrowException) as error:
            raise ConfigError(f"{self.key}{self.path} cannot be read: {error}") from error
        if first == 0:
            raise ConfigError(f"{self.key}{self.path}: the file is empty")

    def _check_row_group(self, metadata: Any, index: int) -> None:
        """Raise ConfigError if a row group needs too much memory: it is read as a whole."""
        size = metadata.row_group(index).total_byte_size
        # An empty row has at least one bit in memory.
        size = max(size, metadata.row_group(index).num_rows * metadata.num_columns // 8)
        if size > MAX_ROW_GROUP_BYTES:
            raise ConfigError(
                f"{self.key}{self.path}: row group {index} has {size} bytes, allowed:"
                f" {MAX_ROW_GROUP_BYTES}; write the file with smaller row groups"
            )


@dataclass(frozen=True)
class _DatasetChunk(RecordChunk):
    """Rows of a Hugging Face dataset."""

    path: Path
    stamps: tuple[_FileStamp, ...]
    first: int

    def read(self) -> Iterator[RawRecord]:
        rows = range(self.first, self.first + self.size)
        for index, values in zip(rows, _load_dataset(self.path).select(rows), strict=True):
            yield _without_nulls(values, f"{self.path}[{index}]")
        if _stamp_dataset(self.path) != self.stamps:
            raise _changed_file_error(self.path)


@dataclass(frozen=True)
class _DatasetSource(RecordSource):
    """A Hugging Face dataset that `Dataset.save_to_disk` has written."""

    path: Path
    key: str
    counts_records = True

    @property
    def size(self) -> int:
        try:
            return len(_load_dataset(self.path))
        except (ImportError, OSError, ValueError):  # reading the dataset reports the error
            return 0

    def scan(self) -> Iterator[RecordChunk]:
        if not is_dataset(self.path):
            raise ConfigError(
                f"{self.key}{self.path}: the directory is not a Hugging Face dataset; expected a"
                " single split saved with Dataset.save_to_disk"
            )
        try:
            stamps = _stamp_dataset(self.path)
            count = len(_load_dataset(self.path))
        except ImportError as error:
            raise ConfigError(
                f"{self.key}{self.path}: a Hugging Face dataset requires the datasets package;"
                f" install it with pip install 'aligner[datasets]': {error}"
            ) from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.key}{self.path} cannot be read: {error}") from error
        if not count:
            raise ConfigError(f"{self.key}{self.path}: the dataset is empty")
        for first in range(0, count, _CHUNK_RECORDS):
            yield _DatasetChunk(min(_CHUNK_RECORDS, count - first), self.path, stamps, first)


@lru_cache(maxsize=1)
def _load_dataset(path: Path) -> Any:
    import datasets

    return datasets.load_from_disk(str(path))


def _stamp_dataset(path: Path) -> tuple[_FileStamp, ...]:
    return tuple(_FileStamp.read(file) for file in sorted(path.iterdir()) if file.is_file())


@dataclass(frozen=True)
class _ListChunk(RecordChunk):
    """Records in memory."""

    records: tuple[RawRecord, ...]

    def read(self) -> Iterator[RawRecord]:
        return iter(self.records)


class ListSource(RecordSource):
    """Records in memory."""

    counts_records = True

    def __init__(self, records: Iterable[RawRecord]) -> None:
        self._records = tuple(records)

    @property
    def size(self) -> int:
        """Number of records."""
        return len(self._records)

    def scan(self) -> Iterator[RecordChunk]:
        """Divide the records into chunks."""
        for first in range(0, len(self._records), _CHUNK_RECORDS):
            records = self._records[first : first + _CHUNK_RECORDS]
            yield _ListChunk(len(records), records)

    def compute_content_checksum(self) -> str:
        """Return the checksum of the records."""
        digest = xxhash.xxh3_64()
        for record in self._records:
            digest.update(hash_raw_record(record).to_bytes(8, "little"))
        return digest.hexdigest()


class _StandardInput(ListSource):
    """The lines of standard input."""

    def __init__(self, key: str, *, is_json: bool) -> None:
        try:
            content = sys.stdin.buffer.read()
        except OSError as error:
            raise ConfigError(f"{key}- cannot be read: {error}") from error
        if not content.removeprefix(codecs.BOM_UTF8).strip(b"\r\n"):
            raise ConfigError(f"{key}-: the file is empty")
        super().__init__(_split_lines(content, "standard input", 1, is_json=is_json))


class _FunctionSource(ListSource):
    """The records that a user's function yields in a child process."""

    def __init__(
        self, path: Path, key: str, timeout_s: float | None, arguments: Mapping[str, Any]
    ) -> None:
        super().__init__(_call_function(path, key, timeout_s, arguments))


def _call_function(
    path: Path, key: str, timeout_s: float | None, arguments: Mapping[str, Any]
) -> Iterator[RawRecord]:
    """Yield the records of a user's function, which runs in a child process."""
    module, _, name = str(path).removeprefix(FUNCTION).partition(":")
    function = ChildFunction(
        module, name, wrapper=f"{__name__}:collect_records", deadline_s=timeout_s
    )
    try:
        records = function(dict(arguments))
    except ChildRaised as error:
        raise ConfigError(f"{key}{path}: the function raised {error}") from error
    except ChildLost as error:
        raise ConfigError(f"{key}{path}: the function {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{key}{path}: {error}; expected {FUNCTION}MODULE:CALLABLE") from error
    finally:
        function.close()
    if not records:
        raise ConfigError(f"{key}{path}: the function yielded no records")
    for index, (values, kind) in enumerate(records):
        if values is None:
            raise ConfigError(
                f"{key}{path}[{index}]: expected a mapping of field names to values, got {kind}"
            )
        yield RawRecord(values, f"{path}[{index}]")


def collect_records(
    function: Callable[..., Iterable[Any]], arguments: Mapping[str, Any]
) -> list[tuple[dict[str, Any] | None, str]]:
    """Call a function and return the records that it yields; the child process calls this.

    Returns:
        The fields of each record, None if it is not a mapping, and the name of its type.
    """
    return [
        (dict(values) if isinstance(values, Mapping) else None, type(values).__name__)
        for values in function(**arguments)
    ]


def _without_nulls(values: Mapping[str, Any], origin: str) -> RawRecord:
    """Return the record of a table's row: fields that the record lacks are null there."""
    return RawRecord({name: value for name, value in values.items() if value is not None}, origin)
