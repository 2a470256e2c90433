"""Queries of a run's samples: a page of samples or prompts, one prompt over time, one sample and
its tokens.

DuckDB reads the step files (`samples/step_*.parquet`): a few columns of all rows, and all columns
of the few displayed rows. If a run has no step files, DuckDB reads the few samples of
`samples.jsonl`. Values are passed as bound parameters, and DuckDB may open only the run's files.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aligner.errors import AlignerError
from aligner.paths import RunPaths
from aligner.view.prompt_turns import find_question

PAGE_SIZE = 50
"""Number of samples or prompts on a page."""
SORTS = ("step", "score", "advantage", "response_tokens")
"""Columns by which samples can be sorted."""
PROMPT_SORTS = ("mean", "spread", "samples", "last_step")
"""Columns by which prompts can be sorted."""

# Maximum length of a question or response in a table, in characters.
_MAX_CELL_LENGTH = 400
# Maximum length of a response that is compared with others, in characters.
_MAX_COMPARED_LENGTH = 20_000
# Maximum number of displayed samples of a prompt and step.
_MAX_SAMPLES_PER_STEP = 8
_NUMBER_COLUMNS = (
    'step, row, "group", sample, branch, score, score_parts, advantage, response_tokens, cut'
)
# Columns of a row in a table of samples; `_add_question` replaces the prompt and the messages.
_TABLE_COLUMNS = (
    f"{_NUMBER_COLUMNS}, prompt, messages, left(response, {_MAX_CELL_LENGTH}) AS response"
)
# Subqueries that return all samples, from `samples.jsonl` and from step files.
_FROM_LINES = """(SELECT step, row_number() OVER () - 1 AS row, NULL AS "group", NULL AS sample,
    0 AS branch, prompt, response, NULL AS messages, reward AS score, NULL AS score_parts,
    NULL::FLOAT AS advantage, NULL::INTEGER AS response_tokens, NULL::BOOLEAN AS cut
    FROM read_json(?, format='newline_delimited', ignore_errors=true, maximum_object_size=67108864,
    columns={step: 'INTEGER', prompt: 'VARCHAR', response: 'VARCHAR', reward: 'FLOAT'}))"""
_FROM_FILES = "(SELECT *, file_row_number AS row FROM read_parquet(?, file_row_number=true))"
Row = dict[str, Any]


@dataclass(frozen=True)
class SampleFilter:
    """Selection of samples; a field that is None or an empty text selects all samples."""

    text: str = ""
    """Text that the prompt, the response or the transcript contains; case-insensitive."""
    least: float | None = None
    """Minimum score."""
    most: float | None = None
    """Maximum score."""
    first: int | None = None
    """First step."""
    last: int | None = None
    """Last step."""
    shortest: float | None = None
    """Minimum number of response tokens."""
    longest: float | None = None
    """Maximum number of response tokens."""
    is_truncated: bool | None = None
    """Whether the response was truncated at the length limit."""

    def condition(self) -> tuple[str, list[Any]]:
        """Return the SQL condition and its parameters."""
        texts = " OR ".join(
            f"contains(lower({column}), lower(?))" for column in ("prompt", "response", "messages")
        )
        terms = [
            (f"({texts})", [self.text] * 3 if self.text else None),
            ("score >= ?", self.least),
            ("score <= ?", self.most),
            ("step >= ?", self.first),
            ("step <= ?", self.last),
            ("response_tokens >= ?", self.shortest),
            ("response_tokens <= ?", self.longest),
            ("cut = ?", self.is_truncated),
        ]
        active_terms = [
            (term, value if isinstance(value, list) else [value])
            for term, value in terms
            if value is not None
        ]
        return " AND ".join(term for term, _ in active_terms) or "true", [
            value for _, values in active_terms for value in values
        ]


@dataclass(frozen=True)
class ListPosition:
    """Position of a sample in a list of selected samples."""

    number: int
    """Number of the sample, from 0."""
    total: int
    """Number of samples in the list."""
    previous: tuple[int, int] | None = None
    """Step and row of the sample before; None for the first sample."""
    next: tuple[int, int] | None = None
    """Step and row of the sample after; None for the last sample."""


class SampleTable:
    """A run's samples.

    The methods raise AlignerError if a file is damaged, or is deleted while it is read.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._root = paths.root
        self._lines_file = paths.samples
        self._directory = paths.root / "samples"
        self.files = _files_by_step(self._directory, "step")
        """The step files by step, in ascending order."""

    @property
    def has_all(self) -> bool:
        """Whether all samples are stored, not only the few samples in samples.jsonl."""
        return bool(self.files)

    def page(self, sample_filter: SampleFilter, sort: str, number: int) -> tuple[list[Row], int]:
        """Return a page of the selected samples.

        Args:
            sample_filter: The selection of samples.
            sort: Column to sort by; the prefix `-` sorts in descending order.
            number: Number of the page, from 0.

        Returns:
            The rows of the page, and the number of all selected samples.
        """
        if (steps := self._find_file_order(sample_filter, sort)) is not None:
            return self._page_in_file_order(steps, number)
        condition, values = sample_filter.condition()
        column = sort.removeprefix("-")
        order = _order_by(sort)
        hits = self._query(
            f"WITH hits AS MATERIALIZED (SELECT step, row, {column} FROM {{}} WHERE {condition})"
            f" SELECT step, row, (SELECT count(*) FROM hits) AS total FROM hits ORDER BY {order}"
            f" LIMIT {PAGE_SIZE} OFFSET ?",
            [*values, PAGE_SIZE * number],
            self._steps_between(sample_filter.first, sample_filter.last),
        )
        keys = [(hit["step"], hit["row"]) for hit in hits]
        rows_by_key = {(row["step"], row["row"]): row for row in self._read_rows(keys)}
        return (
            [rows_by_key[key] for key in keys if key in rows_by_key],
            hits[0]["total"] if hits else 0,
        )

    def find_position(
        self, sample_filter: SampleFilter, sort: str, step: int, row: int
    ) -> ListPosition | None:
        """Return the position of a sample in the list of `page`; None if the filter excludes it.

        Args:
            sample_filter: The selection of samples.
            sort: See `page`.
            step: Step of the sample.
            row: Row of the sample in the step.
        """
        if (steps := self._find_file_order(sample_filter, sort)) is not None:
            return self._find_position_in_file_order(steps, step, row)
        condition, values = sample_filter.condition()
        hits = self._query(
            "WITH hits AS (SELECT step, row, row_number() OVER list - 1 AS number,"
            " count(*) OVER () AS total, lag([step, row]) OVER list AS previous,"
            " lead([step, row]) OVER list AS next"
            f" FROM {{}} WHERE {condition} WINDOW list AS (ORDER BY {_order_by(sort)}))"
            " SELECT number, total, previous, next FROM hits WHERE step = ? AND row = ?",
            [*values, step, row],
            self._steps_between(sample_filter.first, sample_filter.last),
        )
        if not hits:
            return None
        hit = hits[0]
        return ListPosition(
            hit["number"],
            hit["total"],
            None if hit["previous"] is None else tuple(hit["previous"]),
            None if hit["next"] is None else tuple(hit["next"]),
        )

    def prompts(self, sample_filter: SampleFilter, sort: str, number: int) -> tuple[list[Row], int]:
        """Return a page of the prompts of the selected samples: the question, statistics of the
        scores, and the position of the newest sample.

        See `page` for the arguments and results.
        """
        if sort.removeprefix("-") not in PROMPT_SORTS:
            raise AlignerError(
                f"sort={sort}: must be one of {', '.join(PROMPT_SORTS)}, optionally with the prefix"
                " -"
            )
        condition, values = sample_filter.condition()
        order = (
            f"{sort.removeprefix('-')} {'DESC' if sort.startswith('-') else 'ASC'} NULLS LAST,"
            " prompt"
        )
        rows = self._query(
            "WITH groups AS MATERIALIZED (SELECT prompt, count(*) AS samples, avg(score) AS mean,"
            " stddev_pop(score) AS spread, min(score) AS least, max(score) AS most, min(step) AS"
            " first_step, max(step) AS last_step, arg_max(row, step) AS row FROM {} WHERE"
            f" {condition} GROUP BY prompt) SELECT * EXCLUDE (prompt), (SELECT count(*) FROM"
            f" groups) AS total FROM groups ORDER BY {order} LIMIT {PAGE_SIZE} OFFSET ?",
            [*values, PAGE_SIZE * number],
            self._steps_between(sample_filter.first, sample_filter.last),
        )
        newest = self._read_rows([(row["last_step"], row["row"]) for row in rows])
        questions = {(row["step"], row["row"]): row["question"] for row in newest}
        for row in rows:
            row["question"] = questions.get((row["last_step"], row["row"]), "")
        return rows, rows[0]["total"] if rows else 0

    def sample(self, step: int, row: int) -> Row | None:
        """Return all columns of one sample; None if it is missing."""
        rows = self._query("SELECT * FROM {} WHERE step = ? AND row = ?", [step, row], [step])
        return rows[0] if rows else None

    def group(self, step: int, group: int) -> list[Row]:
        """Return the samples of one prompt of a step, with the beginnings of the responses."""
        return self._query(
            f"SELECT {_NUMBER_COLUMNS}, left(response, {_MAX_COMPARED_LENGTH}) AS response"
            ' FROM {} WHERE "group" = ? AND step = ? ORDER BY row',
            [group, step],
            [step],
        )

    def over_time(
        self, prompt: str, steps: Sequence[int]
    ) -> tuple[list[Row], dict[int, list[Row]]]:
        """Return statistics and samples of a prompt by step.

        Args:
            prompt: The prompt.
            steps: Steps whose samples are returned. If the prompt was sampled in none of these
                steps, samples of the first, the middle and the last step with the prompt are
                returned.

        Returns:
            The mean score and the number of samples of each step, and the first samples by step.
        """
        means = self._query(
            "SELECT step, avg(score) AS mean, count(*) AS samples FROM {} WHERE prompt = ? GROUP BY"
            " step ORDER BY step",
            [prompt],
        )
        sampled_steps = [row["step"] for row in means]
        selected_steps = [step for step in steps if step in sampled_steps] or pick_steps(
            sampled_steps
        )
        sql = (
            f"SELECT {_NUMBER_COLUMNS}, left(response, {_MAX_COMPARED_LENGTH}) AS response"
            f" FROM {{}} WHERE prompt = ? AND step = ? ORDER BY row LIMIT {_MAX_SAMPLES_PER_STEP}"
        )
        return means, {step: self._query(sql, [prompt, step], [step]) for step in selected_steps}

    def tokens(self, step: int, row: int) -> Row | None:
        """Return the per-token values of a response; None if the step's token file was deleted at
        the size limit."""
        file = _files_by_step(self._directory, "tokens").get(step)
        if file is None:
            return None
        rows = self._execute(
            "SELECT * FROM read_parquet(?, file_row_number=true) WHERE file_row_number = ?",
            [[str(file)], row],
        )
        return rows[0] if rows else None

    def _page_in_file_order(self, steps: Sequence[int], number: int) -> tuple[list[Row], int]:
        """Return a page of all samples of the steps, in this order, and the number of samples.

        The row counts in the files' metadata determine the rows of the page, so that only the files
        of the page are read.
        """
        counts = self._count_rows(steps)
        keys: list[tuple[int, int]] = []
        skipped = PAGE_SIZE * number
        for step in steps:
            keys += [
                (step, row)
                for row in range(skipped, min(counts[step], skipped + PAGE_SIZE - len(keys)))
            ]
            skipped = max(0, skipped - counts[step])
            if len(keys) == PAGE_SIZE:
                break
        rows_by_key = {(row["step"], row["row"]): row for row in self._read_rows(keys)}
        return [rows_by_key[key] for key in keys if key in rows_by_key], sum(counts.values())

    def _find_file_order(self, sample_filter: SampleFilter, sort: str) -> list[int] | None:
        """Return the steps of the selected samples if the files already have the order of the list,
        so that there is no need to read all of them; otherwise None."""
        column = sort.removeprefix("-")
        if column not in SORTS:
            raise AlignerError(
                f"sort={sort}: must be one of {', '.join(SORTS)}, optionally with the prefix -"
            )
        only_steps = replace(SampleFilter(), first=sample_filter.first, last=sample_filter.last)
        if not self.has_all or column != "step" or sample_filter != only_steps:
            return None
        steps = self._steps_between(sample_filter.first, sample_filter.last)
        return steps[::-1] if sort.startswith("-") else steps

    def _find_position_in_file_order(
        self, steps: Sequence[int], step: int, row: int
    ) -> ListPosition | None:
        """Return the position of a sample in the list of all samples of the steps."""
        counts = self._count_rows(steps)
        if row >= counts.get(step, 0):
            return None
        place = steps.index(step)
        nonempty_before = [each for each in steps[:place] if counts[each]]
        nonempty_after = [each for each in steps[place + 1 :] if counts[each]]
        previous = next_key = None
        if row > 0:
            previous = (step, row - 1)
        elif nonempty_before:
            previous = (nonempty_before[-1], counts[nonempty_before[-1]] - 1)
        if row + 1 < counts[step]:
            next_key = (step, row + 1)
        elif nonempty_after:
            next_key = (nonempty_after[0], 0)
        number = sum(counts[each] for each in steps[:place]) + row
        return ListPosition(number, sum(counts.values()), previous, next_key)

    def _count_rows(self, steps: Sequence[int]) -> dict[int, int]:
        """Return the number of samples of each step, from the metadata of the files."""
        if not steps:
            return {}
        files = [str(self.files[step]) for step in steps]
        metadata = self._execute(
            "SELECT file_name, num_rows FROM parquet_file_metadata(?)", [files]
        )
        counts = {row["file_name"]: row["num_rows"] for row in metadata}
        return {step: counts[file] for step, file in zip(steps, files, strict=True)}

    def _read_rows(self, keys: Sequence[tuple[int, int]]) -> list[Row]:
        """Return the table columns of the samples with the given steps and rows, with the
        question."""
        steps = [step for step, _ in keys]
        rows = [row for _, row in keys]
        pairs = "SELECT unnest(?::INTEGER[]) AS s, unnest(?::BIGINT[]) AS r"
        sql = f"SELECT {_TABLE_COLUMNS} FROM {{}} JOIN ({pairs}) ON s = step AND r = row"
        if not keys:
            return []
        return [_add_question(row) for row in self._query(sql, [steps, rows], sorted(set(steps)))]

    def _steps_between(self, first: int | None, last: int | None) -> list[int]:
        return [
            step
            for step in self.files
            if (first is None or step >= first) and (last is None or step <= last)
        ]

    def _query(
        self, sql: str, values: Sequence[Any], steps: Sequence[int] | None = None
    ) -> list[Row]:
        """Return the rows of a query.

        Args:
            sql: The query, with `{}` in place of the samples.
            values: The parameters of the query.
            steps: Steps whose files are read; None reads all.
        """
        if not self.files:
            return (
                self._execute(sql.format(_FROM_LINES), [str(self._lines_file), *values])
                if self._lines_file.is_file()
                else []
            )
        selected_steps = self.files.keys() if steps is None else set(steps)
        files = [str(file) for step, file in self.files.items() if step in selected_steps]
        return self._execute(sql.format(_FROM_FILES), [files, *values]) if files else []

    def _execute(self, sql: str, values: Sequence[Any]) -> list[Row]:
        import duckdb

        settings: Any = {
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "memory_limit": "2GB",
        }
        try:
            # SQL can read any file: restrict DuckDB to the run's files, and lock the restriction.
            with duckdb.connect(config=settings) as connection:
                connection.execute("SET allowed_directories = $1", [[str(self._root)]])
                connection.execute("SET enable_external_access = false")
                connection.execute("SET lock_configuration = true")
                cursor = connection.execute(sql, values)
                names = [column[0] for column in cursor.description or ()]
                return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
        except duckdb.Error as error:
            raise AlignerError(
                f"{self._root}: cannot read the samples: {str(error).splitlines()[0]}"
            ) from error


def _order_by(sort: str) -> str:
    """Return the SQL order of a list of samples; samples without a value are last."""
    direction = "DESC" if sort.startswith("-") else "ASC"
    return f"{sort.removeprefix('-')} {direction} NULLS LAST, step, row"


def _add_question(row: Row) -> Row:
    """Return a row with the last message of the user in place of the prompt and the messages."""
    columns = {name: value for name, value in row.items() if name not in ("prompt", "messages")}
    question = find_question(row["prompt"] or "", row["messages"], _MAX_CELL_LENGTH)
    return {**columns, "question": question}


def pick_steps(steps: Sequence[int]) -> list[int]:
    """Return the first, the middle and the last of the steps."""
    return sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []


def _files_by_step(directory: Path, kind: str) -> Mapping[int, Path]:
    """Return the sample files of a kind, `step` or `tokens`, by step in ascending order."""
    matches = (
        (re.fullmatch(rf"{kind}_([0-9]+)\.parquet", file.name), file)
        for file in directory.glob(f"{kind}_*.parquet")
    )
    return dict(sorted((int(match[1]), file) for match, file in matches if match is not None))
