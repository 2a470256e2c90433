"""Cache of tokenized examples: each data set is parsed once, by all processor cores.

`open_examples` returns the examples of all sources of the data. With an `ExampleCache`, the
examples of a source are a table (`aligner.data.example_table`) in `$ALIGNER_CACHE/data/`, which
`aligner prepare` builds and all ranks map into memory. Without a cache, they are lists in memory.

The name of a table contains a checksum of everything that determines its rows: the contents of the
files, the tokenizer and chat template, the settings of the section `data`, and aligner's code. A
changed file therefore gets another table, and no table is ever changed.

The run directory contains an index with the checksum of each file that `prepare` has read
(`data_files.json`). The other processes use these checksums, so they do not read the files at all.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import jinja2
import numpy as np
import pyarrow as pa
import tokenizers
import torch

from aligner.cache_entries import record_use
from aligner.data.checksums import DamagedError, FileRecord, compute_file_record, read_sealed, seal
from aligner.data.example_table import (
    ExampleFormat,
    ExampleTable,
    delete_table,
    encode_batches,
    write_table,
)
from aligner.data.record_sources import (
    RawRecord,
    RecordChunk,
    RecordSource,
    hash_raw_record,
    is_blank,
)
from aligner.data.records import (
    Record,
    RecordCounts,
    iterate_examples,
    open_source,
    parse_records,
)
from aligner.data.run_inputs import list_input_files
from aligner.errors import AlignerError, ConfigError
from aligner.files import NO_LOCKS, LockHolder, create_directory, write_file
from aligner.paths import RunPaths, get_cache_directory, get_run_paths
from aligner.schema import Config, DataConfig
from aligner.schema.data import NO_LAYOUT
from aligner.schema.data_sources import DataSource, parse_data_sources

Example = TypeVar("Example")
_log = logging.getLogger(__name__)

# Sources up to this size (bytes, or records of a source without bytes) are parsed by this process:
# starting others takes longer.
_SMALL_SOURCE = 4 << 20
_SMALL_COUNT = 4096
# Chunks per process that are being parsed or wait to be written, which bounds the memory.
_CHUNKS_PER_PROCESS = 3
# Seconds between two progress reports, and between two attempts to lock a table.
_REPORT_S = 1.0
_LOCK_RETRY_S = 0.2
# Nanoseconds after which a file's times identify its content.
_SETTLED_NS = 2_000_000_000
# Errors that mean that the disk or the user's quota is full.
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_PR_SET_PDEATHSIG = 1  # constant of prctl(2)
# Settings that do not change the examples of a source.
_UNUSED_SETTINGS = frozenset(
    (
        "path",
        "sources",
        "tasks",
        "prompts",
        "function_timeout_s",
        "fields",  # each source has its own
        "pass_rate_samples",  # the parser contains the rates
        "shuffle",
        "pass_threshold",
        "curriculum",
        "batch_size",
        "held_out",
        "normalization",
        "normalization_samples",
    )
)


class RecordParser(Protocol[Example]):
    """Function that returns the example of a record. It can be sent to another process."""

    @property
    def format(self) -> ExampleFormat[Example]:
        """Format of the examples in a table."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """JSON object that, with the settings of `data`, determines the example of a record."""

    def __call__(self, record: Record) -> Example:
        """Return the example; raise BadRecord if the record is invalid."""

    def summarize(self, examples: Sequence[Example], origins: Sequence[str]) -> Mapping[str, Any]:
        """Return facts about examples and their records, a JSON object."""

    def combine(self, summaries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the facts about the examples of all summaries."""


@dataclass(frozen=True)
class OpenExamples(Generic[Example]):
    """The examples of all sources of the data."""

    sources: list[Sequence[Example]]
    weights: list[float]
    summaries: list[Mapping[str, Any]]
    """Facts about the examples of each source, see `RecordParser.summarize`."""
    notices: list[str]
    """Notices for the user, one line each."""


def open_examples(
    data: DataConfig, parser: RecordParser[Example], cache: "ExampleCache | None" = None
) -> OpenExamples[Example]:
    """Return the examples of all sources.

    Args:
        data: The configuration of the data.
        parser: Returns the example of a record. A bad record is an error, or it is skipped with a
            notice if `data.skip_bad_records` is set.
        cache: The cache of tables; None keeps the examples in memory.

    Raises:
        ConfigError: A source cannot be read, or has no usable record.
    """
    sources = parse_data_sources(data)
    result = OpenExamples[Example]([], [source.weight for source in sources] or [1.0], [], [])
    for source in sources:
        if cache is not None:
            table, notices = cache.open(source, data, parser)
            result.sources.append(table)
            result.summaries.append(table.description["summary"])
        else:
            notices = _add_in_memory(
                result,
                open_source(source).read(),
                parser,
                source.setting_text,
                skip=data.skip_bad_records,
                fields=source.fields,
                layout=source.layout,
            )
        result.notices.extend(notices)
    if not sources:
        prompts = list_inline_prompts(data.prompts, "data.prompts")
        result.notices.extend(
            _add_in_memory(
                result,
                prompts,
                parser,
                "data.prompts",
                skip=data.skip_bad_records,
                fields={},
                layout=NO_LAYOUT,
            )
        )
    return result


def _add_in_memory(
    result: OpenExamples[Example],
    raw_records: Iterable[RawRecord],
    parser: RecordParser[Example],
    source_name: str,
    *,
    skip: bool,
    fields: Mapping[str, str],
    layout: str,
) -> list[str]:
    """Parse the records of a source, add its examples to the result, and return notices."""
    origins: list[str] = []
    examples, notices = parse_records(
        raw_records,
        partial(_parse_and_note_origin, parser, origins),
        source_name,
        skip=skip,
        fields=fields,
        layout=layout,
    )
    result.sources.append(examples)
    result.summaries.append(parser.summarize(examples, origins))
    return notices


def _parse_and_note_origin(
    parser: RecordParser[Example], origins: list[str], record: Record
) -> Example:
    example = parser(record)
    origins.append(record.origin)
    return example


def list_inline_prompts(prompts: Sequence[str], key: str) -> list[RawRecord]:
    """Return the records of the prompts in the configuration's `key`."""
    return [RawRecord({"prompt": text}, f"{key}[{index}]") for index, text in enumerate(prompts)]


def remember_result(
    name: str,
    sources: Sequence[DataSource],
    identity: Mapping[str, Any],
    compute: Callable[[], Any],
) -> Any:
    """Return a result that depends only on the contents of files. It is computed once, and then
    read from the cache directory.

    Args:
        name: The name of the result, for its directory.
        sources: The sources of the data, none of them a function.
        identity: JSON object that determines the result for given files.
        compute: Returns the result, a JSON value.

    Raises:
        ConfigError: A file cannot be read.
    """
    root = get_cache_directory()
    contents = [_read_contents(source.path, root) for source in sources]
    digest = _hash_json(
        {"code": _compute_code_checksum(), "contents": contents, "identity": identity}
    )
    return _remember(root / name / f"{digest}.json", compute)


def _remember(path: Path, compute: Callable[[], Any]) -> Any:
    """Return the result in a file, or compute it and write the file."""
    with contextlib.suppress(DamagedError):
        return read_sealed(path)["result"]
    result = compute()
    with contextlib.suppress(OSError):  # without the file, the next caller computes it again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, seal(json.dumps({"result": result})))
    return result


def _read_contents(path: Path, root: Path) -> Mapping[str, FileRecord]:
    """Return the size and checksum of a file, or of each file of a directory."""
    return {
        name: _compute_record(file, root / "checksums")
        for name, file in list_input_files(path).items()
    }


class ExampleCache:
    """Tables of tokenized examples in `$ALIGNER_CACHE/data/`."""

    def __init__(
        self,
        root: Path,
        run: RunPaths,
        *,
        is_prepared: bool,
        processes: int = 1,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Describe the cache.

        Args:
            root: The cache directory of aligner.
            run: The paths of the run, whose `data_files` is the index.
            is_prepared: Whether the index exists. Otherwise the files are read, and `write_index`
                writes it.
            processes: The number of processes that parse records.
            report: Function that is called with the progress while a table is built.

        Raises:
            ConfigError: The index cannot be read.
        """
        self._root = root
        self._run = run
        self._processes = processes
        self._report = report
        self._is_prepared = is_prepared
        self._contents: dict[str, Mapping[str, FileRecord]] = {}
        self.tables: list[ExampleTable[Any]] = []
        """The tables that were opened."""
        if is_prepared:
            try:
                stored = read_sealed(run.data_files)["files"]
            except DamagedError as error:
                raise ConfigError(f"{error}; start the run again") from error
            self._contents = {key: _to_records(files) for key, files in stored.items()}

    @staticmethod
    def for_run(
        config: Config, report: Callable[[str], None], *, is_prepared: bool
    ) -> "ExampleCache":
        """Return the cache of a run, which builds missing tables with all processor cores.

        Args:
            config: The run's configuration.
            report: Function that is called with the progress.
            is_prepared: False for `aligner prepare`, which reads the data. True for a rank of the
                trainer, which builds a table only if it was damaged or deleted since then.

        Raises:
            ConfigError: The index in the run directory cannot be read.
        """
        return ExampleCache(
            get_cache_directory(),
            get_run_paths(config),
            is_prepared=is_prepared,
            processes=len(os.sched_getaffinity(0)),
            report=report,
        )

    def write_index(self) -> None:
        """Write the index of the data that were opened."""
        write_file(self._run.data_files, seal(json.dumps({"files": self._contents})))

    def get_file_records(self) -> Mapping[str, Mapping[str, FileRecord]]:
        """Return the size and checksum of each file of the data, by the path in the configuration
        and the file's name; see `compute_input_checksums`."""
        return self._contents

    def remember(self, identity: Mapping[str, Any], check: Callable[[], list[str]]) -> list[str]:
        """Return the notices of a check of all examples that were opened. The check runs only once
        for the same tables.

        Args:
            identity: JSON object that determines the result for given examples.
            check: Returns the notices; an error is not stored.
        """
        if not self.tables:
            return check()
        tables = [table.directory.name for table in self.tables]
        digest = _hash_json({"tables": tables, "check": identity})
        return list(_remember(self.tables[0].directory / f"check-{digest}.json", check))

    def open(
        self, source: DataSource, data: DataConfig, parser: RecordParser[Example]
    ) -> tuple[ExampleTable[Example], list[str]]:
        """Return the table of a source, and notices. The table is built if it does not exist.

        Raises:
            ConfigError: The source cannot be read, has no usable record, or changed while it was
                read; or the table cannot be written.
        """
        key = _get_content_key(source)
        records: RecordSource | None = None
        if key not in self._contents:
            records = open_source(source) if source.is_function else None
            self._contents[key] = self._read_contents(source, records)
        directory = self._locate(source, data, parser, self._contents[key])

        # Before the table is opened, so that `aligner cache prune` does not delete it.
        record_use(directory, self._run.root)
        table = _open_table(directory, parser.format)
        if table is None:
            try:
                table = self._build(directory, source, data, parser, records)
            except OSError as error:
                remedy = (
                    "Free disk space, for example with `aligner cache prune`"
                    if error.errno in _FULL_DISK
                    else "Make the directory writable"
                )
                raise ConfigError(
                    f"{source.setting_text}: the tokenized data set cannot be written to"
                    f" {directory}: {error.strerror or error}. {remedy}, or set the environment"
                    " variable ALIGNER_CACHE to another directory"
                ) from error
        self.tables.append(table)
        if not self._is_prepared:
            for level, message in table.description["log"]:
                _log.log(level, message)
        # Another key may have named the same file when the table was built.
        notices = [f"{source.setting_text}: {notice}" for notice in table.description["notices"]]
        return table, notices

    def _read_contents(
        self, source: DataSource, records: RecordSource | None
    ) -> Mapping[str, FileRecord]:
        """Return the size and checksum of each file of a source, or of a function's records."""
        if records is not None:
            return {"": FileRecord(records.size, records.compute_content_checksum() or "")}
        self._report(f"computing the checksum of {source.setting_text}")
        return _read_contents(source.path, self._root)

    def _locate(
        self,
        source: DataSource,
        data: DataConfig,
        parser: RecordParser[Any],
        contents: Mapping[str, FileRecord],
    ) -> Path:
        """Return the directory of a source's table."""
        settings = {
            name: value for name, value in asdict(data).items() if name not in _UNUSED_SETTINGS
        }
        identity = {
            "code": _compute_code_checksum(),
            "contents": contents,
            # The examples name the path in messages.
            "path": str(source.path),
            "fields": source.fields,
            "settings": settings,
            "format": parser.format.name,
            "parser": parser.identity,
        }
        stem = "".join(character if character.isalnum() else "-" for character in source.path.stem)
        return self._root / "data" / f"{stem[-40:]}-{_hash_json(identity)}"

    def _build(
        self,
        directory: Path,
        source: DataSource,
        data: DataConfig,
        parser: RecordParser[Example],
        records: RecordSource | None,
    ) -> ExampleTable[Example]:
        """Build a table, or wait for another process that builds it."""
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _lock_table(directory, self._report) as is_locked:
            if (table := _open_table(directory, parser.format)) is not None:
                return table
            # While the lock is held, temporary directories are those of killed processes.
            leftovers = directory.parent.glob(f".{directory.name}.*") if is_locked else ()
            for leftover in leftovers:
                shutil.rmtree(leftover, ignore_errors=True)
            delete_table(directory)

            # The files may have changed since their checksums were computed.
            records = records or open_source(source)
            build = _TableBuild(source, parser, skip=data.skip_bad_records)
            results = self._parse_chunks(build, records)
            try:
                # Another process may have built the table if the filesystem has no locks.
                with (
                    contextlib.suppress(FileExistsError),
                    create_directory(directory) as temporary,
                ):
                    write_table(
                        temporary, parser.format.schema, build.collect(results), build.describe
                    )
                    self._require_unchanged(source, records)
            finally:
                results.close()
        return ExampleTable(directory, parser.format)

    def _require_unchanged(self, source: DataSource, records: RecordSource) -> None:
        """Raise ConfigError if the data are not those whose checksums are known."""
        expected = self._contents[_get_content_key(source)]
        actual = self._read_contents(source, records if source.is_function else None)
        if actual != expected:
            raise ConfigError(
                f"{source.setting_text}: the data changed while they were read; start the run again"
                " when they are complete"
            )

    def _parse_chunks(
        self, build: "_TableBuild[Any]", records: RecordSource
    ) -> "Generator[_ChunkResult]":
        """Parse the chunks of a source, in several processes if it is large; yield the results in
        the order of the records."""
        progress = _Progress(build.source.setting_text, records.size, self._report)
        is_small = records.size <= (_SMALL_COUNT if records.counts_records else _SMALL_SOURCE)
        if is_small or self._processes < 2:
            for chunk in records.scan():
                result = build.parse(chunk)
                progress.add(chunk, result)
                yield result
            return

        executor = ProcessPoolExecutor(
            self._processes,
            # Threads of this process could hold locks that a fork would copy.
            multiprocessing.get_context("spawn"),
            _start_worker,
            (build, os.getpid()),
        )
        pending: deque[tuple[RecordChunk, Future[_ChunkResult]]] = deque()
        try:
            for chunk in records.scan():
                pending.append((chunk, executor.submit(_parse_chunk, chunk)))
                while len(pending) >= _CHUNKS_PER_PROCESS * self._processes:
                    yield progress.wait(*pending.popleft())
            while pending:
                yield progress.wait(*pending.popleft())
        except BrokenProcessPool as error:
            raise AlignerError(
                f"{build.source.setting_text}: a process that parses records was killed, possibly"
                " because the memory was exhausted"
            ) from error
        finally:
            executor.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class _ChunkResult:
    """The examples of a chunk."""

    batches: Sequence[bytes]
    """Serialized Arrow batches."""
    counts: RecordCounts
    summary: Mapping[str, Any]
    hashes: np.ndarray
    """Hash of each record's content, uint64 [N]."""
    log: Sequence[tuple[int, str]]
    """Level and text of the messages that parsing logged."""
    error: str = ""
    """Message of the error that ended parsing; "" without one."""


class _TableBuild(Generic[Example]):
    """Parses the chunks of a source, and collects what the table's description contains."""

    def __init__(self, source: DataSource, parser: RecordParser[Example], *, skip: bool) -> None:
        self.source = source
        self._parser = parser
        self._skip = skip
        self._counts = RecordCounts()
        self._summaries: list[Mapping[str, Any]] = []
        self._hashes: list[np.ndarray] = []
        self._log: dict[tuple[int, str], None] = {}  # in the order of the first occurrence

    def parse(self, chunk: RecordChunk) -> _ChunkResult:
        """Parse a chunk; processes call this side by side."""
        counts = RecordCounts()
        origins: list[str] = []
        hashes: list[int] = []

        def read() -> Iterator[RawRecord]:
            for raw_record in chunk.read():
                if not is_blank(raw_record):
                    hashes.append(hash_raw_record(raw_record))
                yield raw_record

        error = ""
        examples: list[Example] = []
        with _collect_log() as log:
            try:
                examples += iterate_examples(
                    read(),
                    partial(_parse_and_note_origin, self._parser, origins),
                    counts,
                    skip=self._skip,
                    fields=self.source.fields,
                    layout=self.source.layout,
                )
            except ConfigError as caught:
                error = str(caught)
        return _ChunkResult(
            [
                batch.serialize().to_pybytes()
                for batch in encode_batches(self._parser.format, examples)
            ],
            counts,
            self._parser.summarize(examples, origins),
            np.array(hashes, dtype=np.uint64),
            log,
            error,
        )

    def collect(self, results: Iterable[_ChunkResult]) -> Iterator[pa.RecordBatch]:
        """Yield the batches of the chunks' results.

        Raises:
            ConfigError: A record is bad, or all records were skipped.
        """
        for result in results:
            if result.error:
                raise ConfigError(result.error)
            self._counts.add(result.counts)
            self._summaries.append(result.summary)
            self._hashes.append(result.hashes)
            self._log.update(dict.fromkeys(result.log))
            for content in result.batches:
                yield pa.ipc.read_record_batch(pa.py_buffer(content), self._parser.format.schema)
        self._counts.require_examples(self.source.setting_text)

    def describe(self) -> Mapping[str, Any]:
        """Return the table's description, after all results have been collected."""
        notices = self._counts.describe()
        hashes = np.concatenate(self._hashes)
        if duplicates := len(hashes) - len(np.unique(hashes)):
            notices.append(
                f"{duplicates} of {self._counts.records} records are exact copies of earlier"
                " records"
            )
        return {
            "source": str(self.source.path),
            "summary": self._parser.combine(self._summaries),
            "notices": notices,
            "log": list(self._log),
        }


class _Progress:
    """Reports the progress of parsing."""

    def __init__(self, name: str, size: int, report: Callable[[str], None]) -> None:
        self._name = name
        self._size = size
        self._report = report
        self._began = time.monotonic()
        self._reported_at = self._began
        self._records = 0
        self._parsed_size = 0

    def wait(self, chunk: RecordChunk, future: "Future[_ChunkResult]") -> _ChunkResult:
        """Return the result of a chunk that is being parsed, and report the progress."""
        result = future.result()
        self.add(chunk, result)
        return result

    def add(self, chunk: RecordChunk, result: _ChunkResult) -> None:
        """Count a chunk that was parsed, and report the progress."""
        self._records += result.counts.records
        self._parsed_size += chunk.size
        now = time.monotonic()
        if now - self._reported_at >= _REPORT_S:
            self._reported_at = now
            elapsed = now - self._began
            remaining = elapsed * (self._size / max(1, self._parsed_size) - 1)
            self._report(
                f"tokenizing {self._name}: {self._records:,} records"
                f" ({100 * self._parsed_size / max(1, self._size):.0f}%),"
                f" {self._records / elapsed:,.0f} records/s, {remaining:.0f} s left"
            )


# The build whose chunks this process parses, in the processes of `_parse_chunks`.
_build: _TableBuild[Any] | None = None


def _start_worker(build: _TableBuild[Any], parent: int) -> None:
    """Prepare a process that parses chunks."""
    global _build
    # The parent may be killed at any time; its children must not wait for it forever.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    torch.set_num_threads(1)
    _build = build


def _parse_chunk(chunk: RecordChunk) -> _ChunkResult:
    assert _build is not None
    return _build.parse(chunk)


@contextlib.contextmanager
def _collect_log() -> Iterator[list[tuple[int, str]]]:
    """Yield a list to which the messages are added that aligner logs inside the block. They are
    stored with the table, so that later runs report them, too."""
    messages: list[tuple[int, str]] = []
    logger = logging.getLogger("aligner")

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append((record.levelno, record.getMessage()))

    handler = Handler()
    logger.addHandler(handler)
    propagates, logger.propagate = logger.propagate, False
    try:
        yield messages
    finally:
        logger.propagate = propagates
        logger.removeHandler(handler)


@contextlib.contextmanager
def _lock_table(directory: Path, report: Callable[[str], None]) -> Iterator[bool]:
    """Hold the lock of a table, so that only one process builds it.

    Yields:
        Whether the lock is held; False on a filesystem without locks.
    """
    path = directory.with_name(f"{directory.name}.lock")
    began = time.monotonic()
    with path.open("a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                file.seek(0)
                report(
                    f"waiting until {file.read() or 'another process'} has built {directory}:"
                    f" {time.monotonic() - began:.0f} s"
                )
                time.sleep(_LOCK_RETRY_S)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                yield False  # each process builds the table; the first one wins
                return
        file.truncate(0)
        file.write(str(LockHolder.for_this_process()))
        file.flush()
        yield True


def _open_table(
    directory: Path, example_format: ExampleFormat[Example]
) -> ExampleTable[Example] | None:
    """Return a table; None if it does not exist or is damaged."""
    if not directory.is_dir():
        return None
    try:
        return ExampleTable(directory, example_format)
    except DamagedError as error:
        _log.warning("%s; the table is built again", error)
        return None


def _hash_json(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _get_content_key(source: DataSource) -> str:
    arguments = json.dumps(source.arguments, sort_keys=True, default=str)
    return f"{source.path} {arguments}" if source.arguments else str(source.path)


def _to_records(files: Mapping[str, Sequence[Any]]) -> Mapping[str, FileRecord]:
    return {name: FileRecord(*record) for name, record in files.items()}


def _compute_record(file: Path, known: Path) -> FileRecord:
    """Return the size and checksum of a file.

    Args:
        file: The file.
        known: Directory with the results for files whose size, times and inode are unchanged.
    """
    try:
        status = file.stat()
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        name = hashlib.sha256(os.fsencode(file.absolute())).hexdigest()[:32]
        entry = known / f"{name}.json"
        with contextlib.suppress(DamagedError):
            stored = read_sealed(entry)
            if stored["stamp"] == stamp:
                return FileRecord(*stored["record"])
        record = compute_file_record(file)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    # A file that was just written may be written again within the resolution of its times.
    if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS:
        with contextlib.suppress(OSError):
            known.mkdir(parents=True, exist_ok=True)
            write_file(entry, seal(json.dumps({"stamp": stamp, "record": record})))
    return record


@lru_cache(maxsize=1)
def _compute_code_checksum() -> str:
    """Return a checksum of the code that turns records into examples."""
    digest = hashlib.sha256(f"{tokenizers.__version__} {jinja2.__version__}".encode())
    package = Path(__file__).parents[1]
    for file in sorted(
        [*package.glob("*.py"), *package.glob("data/*.py"), *package.glob("schema/*.py")]
    ):
        digest.update(file.read_bytes())
    return digest.hexdigest()
