"""What a run sampled, all of it: two columnar files a step in its directory `samples/`, written,
bounded, and read.

`step_000012.parquet` has a row a sample, and one a branch of it; `tokens_000012.parquet` the same
rows in the same order, with a list over the response's tokens for each quantity of a token.
docs/observing.md has the columns. A file gets its name when it is whole: whoever reads while the
run goes on sees all of a step or nothing. pyarrow is imported where a file is made or read.
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

from aligner.data.claim import writing
from aligner.files import write_file
from aligner.paths import RunPaths

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger(__name__)
_MIB = 2**20
_KINDS = ("tokens", "step")
"""What files are called, in the order in which the budget drops them."""
Column = NDArray | Sequence[Any]


def sample_schema() -> pa.Schema:
    """The columns of `step_…` files."""
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
    """The columns of `tokens_…` files."""
    import pyarrow as pa

    numbers = (
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
    quantities |= dict.fromkeys(numbers, pa.float32())
    rows = dict.fromkeys(("step", "group", "sample", "branch"), pa.int32())
    return pa.schema(
        [*rows.items(), *((name, pa.list_(kind)) for name, kind in quantities.items())]
    )


class SampleFiles:
    """A run's sample files, as the one process that writes them has them."""

    def __init__(self, directory: Path, limit_mib: int) -> None:
        """The files together have `limit_mib` MiB at most."""
        self._directory, self._limit = directory, limit_mib * _MIB
        self._is_over = False
        self._sizes: dict[tuple[int, int], int] | None = None
        """Bytes of each file by its place among the kinds and its step, which order them as the
        budget drops them; None: not looked yet. To look at each step costs more the longer the run
        is."""

    @writing()
    def write(self, step: int, samples: Mapping[str, Column], tokens: Mapping[str, Column]) -> None:
        """Write a step's, in the place of what there is of it, and drop the oldest files where the
        budget asks for it.

        `samples` are columns of `sample_schema` [N], and `tokens` the quantities of `token_schema`
        [sum of `response_tokens`], a row's behind those of the row before it; what is missing, not
        a number, or masked is null.
        """
        import pyarrow as pa

        lengths = np.asarray(samples["response_tokens"])
        offsets = pa.array(np.append(0, np.cumsum(lengths)), pa.int32())
        samples = {**samples, "step": np.full(len(lengths), step)}
        columns = {
            field.name: _array(samples.get(field.name), field.type, len(lengths))
            for field in sample_schema()
        }
        lists = {}
        for field in token_schema():
            if not pa.types.is_list(field.type):
                lists[field.name] = columns[field.name]
            elif field.name in tokens:
                values = _array(tokens[field.name], field.type.value_type)
                lists[field.name] = pa.ListArray.from_arrays(offsets, values)
            else:
                lists[field.name] = pa.nulls(len(lengths), field.type)
        self._directory.mkdir(exist_ok=True)
        self._write_table("tokens", step, pa.table(lists, token_schema()))
        # last: who sees it finds the tokens
        self._write_table("step", step, pa.table(columns, sample_schema()))
        self._keep_to_budget()

    @writing()
    def truncate_after(self, step: int) -> None:
        """Drop the files of steps after `step`, and what a killed writer left unfinished."""
        self._sizes = None
        for kind in _KINDS:
            for later in [each for each in _steps(self._directory, kind) if each > step]:
                _file(self._directory, kind, later).unlink()
        for unfinished in self._directory.glob("*.tmp"):
            unfinished.unlink()

    def _write_table(self, kind: str, step: int, table: pa.Table) -> None:
        content = _parquet(table)
        write_file(_file(self._directory, kind, step), content)
        if self._sizes is not None:
            self._sizes[_KINDS.index(kind), step] = len(content)

    def _keep_to_budget(self) -> None:
        if self._sizes is None:
            self._sizes = {
                (place, step): _file(self._directory, kind, step).stat().st_size
                for place, kind in enumerate(_KINDS)
                for step in _steps(self._directory, kind)
            }
        excess = sum(self._sizes.values()) - self._limit
        if excess <= 0:
            return
        if not self._is_over:
            self._is_over = True
            _log.info(
                "%s: reached logging.samples_mib=%d; deleting the oldest samples",
                self._directory,
                self._limit // _MIB,
            )
        for place, step in sorted(self._sizes):
            if excess <= 0:
                return
            _file(self._directory, _KINDS[place], step).unlink()
            excess -= self._sizes.pop((place, step))


def sample_steps(run_dir: str | Path) -> list[int]:
    """Steps of a run whose samples are there, in order."""
    return _steps(RunPaths(Path(run_dir)).sample_files, "step")


def read_samples(
    run_dir: str | Path,
    *,
    tokens: bool = False,
    steps: Collection[int] | None = None,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """The samples of a run, also of one that goes on: a row each, in the order of steps, groups,
    samples and branches.

    With `tokens` the lists over response tokens, of the steps whose token files the budget has
    left. `steps` and `columns` are those that are wanted, all where None; a step that is not there
    has no rows. Raises KeyError for an unknown column.
    """
    import pyarrow as pa

    schema = token_schema() if tokens else sample_schema()
    if columns is not None:
        schema = pa.schema([schema.field(name) for name in columns])
    return pa.concat_tables(
        [schema.empty_table(), *_tables(Path(run_dir), _KINDS[not tokens], steps, schema.names)]
    )


def _tables(
    run_dir: Path, kind: str, steps: Collection[int] | None, columns: Sequence[str]
) -> Iterator[pa.Table]:
    import pyarrow.parquet as pq

    directory = RunPaths(run_dir).sample_files
    for step in _steps(directory, kind):
        if steps is None or step in steps:
            try:
                content = _file(directory, kind, step).read_bytes()
            except FileNotFoundError:  # the run that goes on has dropped it
                continue
            yield pq.read_table(io.BytesIO(content), columns=list(columns))


def _file(directory: Path, kind: str, step: int) -> Path:
    return directory / f"{kind}_{step:06d}.parquet"


def _array(values: Column | None, kind: pa.DataType, count: int = 0) -> pa.Array:
    """Values of this kind, or so many nulls."""
    import pyarrow as pa

    return pa.nulls(count, kind) if values is None else pa.array(values, kind, from_pandas=True)


def _steps(directory: Path, kind: str) -> list[int]:
    names = (
        re.fullmatch(rf"{kind}_([0-9]+)\.parquet", file.name)
        for file in directory.glob(f"{kind}_*")
    )
    return sorted(int(name[1]) for name in names if name is not None)


def _parquet(table: pa.Table) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Lists of numbers hardly repeat: their bytes compress better by place than through a
    # dictionary.
    numbers = [
        f"{field.name}.list.element"
        for field in table.schema
        if field.type == pa.list_(pa.float32())
    ]
    others = [
        f"{field.name}.list.element" for field in table.schema if pa.types.is_list(field.type)
    ]
    chosen: Any = [name for name in others if name not in numbers] or True
    content = io.BytesIO()
    pq.write_table(
        table, content, compression="zstd", use_dictionary=chosen, use_byte_stream_split=numbers
    )
    return content.getvalue()
