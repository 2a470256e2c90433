"""Writer and readers of all samples of a run: two Parquet files per step in the directory
`samples/`, of limited total size.

`step_000012.parquet` has one row per sample, or per branch of a sample. `tokens_000012.parquet` has
the same rows in the same order, with a list for each per-token quantity, which has one value per
response token. docs/observing.md describes the columns. A file gets its name only when it is
complete, so a reader of a running run sees either all samples of a step or none. pyarrow is
imported only in the functions that write or read a file.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aligner.data.fencing import fenced_write
from aligner.files import write_file
from aligner.paths import RunPaths

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger(__name__)
_MIB = 2**20
# Prefixes of the file names, in the order in which files are deleted at the size limit.
_KINDS = ("tokens", "step")
Column = NDArray | Sequence[Any]
"""Values of a column or of a per-token quantity."""


def sample_schema() -> pa.Schema:
    """Return the Arrow schema of `step_…` files."""
    import pyarrow as pa

    fields = {
        "step": pa.int32(),
        "prompt_index": pa.int64(),
        "epoch": pa.int32(),
        "group": pa.int32(),
        "sample": pa.int32(),
        "branch": pa.int32(),
        "prompt": pa.string(),
        "response": pa.string(),
        "messages": pa.string(),
        "score": pa.float32(),
        "score_parts": pa.map_(pa.string(), pa.float32()),
        "advantage": pa.float32(),
        "prompt_tokens": pa.int32(),
        "response_tokens": pa.int32(),
        "drawn_tokens": pa.int32(),
        "cut": pa.bool_(),
        "version_first": pa.int32(),
        "version_last": pa.int32(),
        "metadata": pa.string(),
    }
    return pa.schema(fields)


def token_schema() -> pa.Schema:
    """Return the Arrow schema of `tokens_…` files."""
    import pyarrow as pa

    float_quantities = (
        "engine_logprob",
        "trainer_logprob",
        "reference_logprob",
        "advantage",
        "entropy",
        "value",
        "return",
    )
    quantities = {
        "token_id": pa.int32(),
        "text": pa.string(),
        "drawn": pa.bool_(),
        "version": pa.int32(),
    }
    quantities |= dict.fromkeys(float_quantities, pa.float32())
    rows = dict.fromkeys(("step", "group", "sample", "branch"), pa.int32())
    return pa.schema(
        [*rows.items(), *((name, pa.list_(kind)) for name, kind in quantities.items())]
    )


class SampleFiles:
    """Writer of a run's sample files; only one process writes them."""

    def __init__(self, directory: Path, limit_mib: int) -> None:
        """Create the writer.

        Args:
            directory: Directory of the files.
            limit_mib: Maximum total size of the files in MiB.
        """
        self._directory = directory
        self._limit = limit_mib * _MIB
        self._is_limit_reported = False
        # Size of each file in bytes, by the index of its kind and its step. Files are deleted in
        # the order of the sorted keys. The value is None until the directory is scanned. The sizes
        # are cached, because a scan at every step would take longer the longer the run is.
        self._sizes: dict[tuple[int, int], int] | None = None

    @fenced_write()
    def write(self, step: int, samples: Mapping[str, Column], tokens: Mapping[str, Column]) -> None:
        """Write the files of a step, replacing existing ones, and delete the oldest files above the
        size limit.

        Values that are missing, NaN or masked become null.

        Args:
            step: The training step.
            samples: Columns of `sample_schema`, [N].
            tokens: Per-token quantities of `token_schema`, [sum of `response_tokens`], concatenated
                over the rows.
        """
        import pyarrow as pa

        lengths = np.asarray(samples["response_tokens"])
        offsets = pa.array(np.append(0, np.cumsum(lengths)), pa.int32())
        samples = {**samples, "step": np.full(len(lengths), step)}
        columns = {
            field.name: _to_array(samples.get(field.name), field.type, len(lengths))
            for field in sample_schema()
        }
        lists = {}
        for field in token_schema():
            if not pa.types.is_list(field.type):
                lists[field.name] = columns[field.name]
            elif field.name in tokens:
                values = _to_array(tokens[field.name], field.type.value_type)
                lists[field.name] = pa.ListArray.from_arrays(offsets, values)
            else:
                lists[field.name] = pa.nulls(len(lengths), field.type)
        self._directory.mkdir(exist_ok=True)
        self._write_table("tokens", step, pa.table(lists, token_schema()))
        # Written last: a reader that sees this file also finds the step's tokens.
        self._write_table("step", step, pa.table(columns, sample_schema()))
        self._delete_above_limit()

    @fenced_write()
    def truncate_after(self, step: int) -> None:
        """Delete the files of steps after `step`, and unfinished files of a killed writer."""
        self._sizes = None
        for kind in _KINDS:
            for later in [number for number in _find_steps(self._directory, kind) if number > step]:
                _file_path(self._directory, kind, later).unlink()
        for unfinished in self._directory.glob("*.tmp"):
            unfinished.unlink()

    def _write_table(self, kind: str, step: int, table: pa.Table) -> None:
        content = _encode_parquet(table)
        write_file(_file_path(self._directory, kind, step), content)
        if self._sizes is not None:
            self._sizes[_KINDS.index(kind), step] = len(content)

    def _delete_above_limit(self) -> None:
        if self._sizes is None:
            self._sizes = {
                (kind_index, step): _file_path(self._directory, kind, step).stat().st_size
                for kind_index, kind in enumerate(_KINDS)
                for step in _find_steps(self._directory, kind)
            }
        excess = sum(self._sizes.values()) - self._limit
        if excess <= 0:
            return
        if not self._is_limit_reported:
            self._is_limit_reported = True
            _log.info(
                "%s: reached logging.samples_mib=%d; deleting the oldest samples",
                self._directory,
                self._limit // _MIB,
            )
        for kind_index, step in sorted(self._sizes):
            if excess <= 0:
                return
            _file_path(self._directory, _KINDS[kind_index], step).unlink()
            excess -= self._sizes.pop((kind_index, step))


def sample_steps(run_dir: str | Path) -> list[int]:
    """Return the steps of a run whose samples are stored, in ascending order."""
    return _find_steps(RunPaths(Path(run_dir)).sample_files, "step")


def read_samples(
    run_dir: str | Path,
    *,
    tokens: bool = False,
    steps: Collection[int] | None = None,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """Return the samples of a finished or running run, one row per sample or branch.

    The rows are in the order of steps, groups, samples and branches.

    Args:
        run_dir: The run directory.
        tokens: Whether to read the lists of per-token values instead of the samples' columns. Steps
            whose token files were deleted at the size limit have no rows.
        steps: Steps to read; None reads all. A step without files has no rows.
        columns: Columns to read; None reads all.

    Raises:
        KeyError: If a column is unknown.
    """
    import pyarrow as pa

    schema = token_schema() if tokens else sample_schema()
    if columns is not None:
        schema = pa.schema([schema.field(name) for name in columns])
    return pa.concat_tables(
        [
            schema.empty_table(),
            *_read_tables(Path(run_dir), _KINDS[not tokens], steps, schema.names),
        ]
    )


def _read_tables(
    run_dir: Path, kind: str, steps: Collection[int] | None, columns: Sequence[str]
) -> Iterator[pa.Table]:
    """Yield the table of each stored step from the files of this kind."""
    import pyarrow.parquet as pq

    directory = RunPaths(run_dir).sample_files
    for step in _find_steps(directory, kind):
        if steps is None or step in steps:
            try:
                content = _file_path(directory, kind, step).read_bytes()
            except FileNotFoundError:  # deleted by the running run at its size limit
                continue
            yield pq.read_table(io.BytesIO(content), columns=list(columns))


def _file_path(directory: Path, kind: str, step: int) -> Path:
    return directory / f"{kind}_{step:06d}.parquet"


def _to_array(values: Column | None, dtype: pa.DataType, count: int = 0) -> pa.Array:
    """Return values as an array of this data type; `count` nulls if there are no values."""
    import pyarrow as pa

    return pa.nulls(count, dtype) if values is None else pa.array(values, dtype, from_pandas=True)


def _find_steps(directory: Path, kind: str) -> list[int]:
    """Return the steps that have a file of this kind, in ascending order."""
    matches = (
        re.fullmatch(rf"{kind}_([0-9]+)\.parquet", file.name)
        for file in directory.glob(f"{kind}_*")
    )
    return sorted(int(match[1]) for match in matches if match is not None)


def _encode_parquet(table: pa.Table) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # The values of float lists hardly repeat: byte-stream-split encoding, which groups bytes by
    # their position in the value, compresses them better than a dictionary.
    float_columns = [
        f"{field.name}.list.element"
        for field in table.schema
        if field.type == pa.list_(pa.float32())
    ]
    list_columns = [
        f"{field.name}.list.element" for field in table.schema if pa.types.is_list(field.type)
    ]
    dictionary_columns: Any = [name for name in list_columns if name not in float_columns] or True
    content = io.BytesIO()
    pq.write_table(
        table,
        content,
        compression="zstd",
        use_dictionary=dictionary_columns,
        use_byte_stream_split=float_columns,
    )
    return content.getvalue()
