"""What a run sampled, queried: a page of samples, of prompts, one prompt over time, one sample and
its tokens.

DuckDB reads the step files (`samples/step_*.parquet`), a few columns of all rows and all columns of
the few that are shown; of runs that have none the few samples of `samples.jsonl`. Values reach it
as bound parameters; it may open the run's files alone.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aligner.errors import AlignerError
from aligner.paths import RunPaths

PAGE = 50
SORTS = ("step", "score", "advantage", "response_tokens")
"""What samples are sorted by."""
PROMPT_SORTS = ("mean", "spread", "samples", "last_step")
"""What prompts are sorted by."""

_CLIP = 400
_MOST_OF_A_STEP = 8
_SHORT = (
    f'step, row, "group", sample, branch, left(prompt, {_CLIP}) AS prompt, left(response, {_CLIP})'
    " AS response, score, advantage, response_tokens, cut"
)
_FROM_LINES = """(SELECT step, row_number() OVER () - 1 AS row, NULL AS "group", NULL AS sample,
    0 AS branch, prompt, response, NULL AS messages, reward AS score, NULL::FLOAT AS advantage,
    NULL::INTEGER AS response_tokens, NULL::BOOLEAN AS cut
    FROM read_json(?, format='newline_delimited', ignore_errors=true, maximum_object_size=67108864,
    columns={step: 'INTEGER', prompt: 'VARCHAR', response: 'VARCHAR', reward: 'FLOAT'}))"""
_FROM_FILES = "(SELECT *, file_row_number AS row FROM read_parquet(?, file_row_number=true))"
Row = dict[str, Any]


@dataclass(frozen=True)
class SampleFilter:
    """Which samples; None or an empty text keeps all."""

    text: str = ""
    """In the prompt, the response or a transcript, in any case."""
    least: float | None = None
    """Score."""
    most: float | None = None
    first: int | None = None
    """Step."""
    last: int | None = None

    def condition(self) -> tuple[str, list[Any]]:
        """As SQL, and its parameters."""
        texts = " OR ".join(
            f"contains(lower({column}), lower(?))" for column in ("prompt", "response", "messages")
        )
        terms = [
            (f"({texts})", [self.text] * 3 if self.text else None),
            ("score >= ?", self.least),
            ("score <= ?", self.most),
            ("step >= ?", self.first),
            ("step <= ?", self.last),
        ]
        chosen = [
            (term, value if isinstance(value, list) else [value])
            for term, value in terms
            if value is not None
        ]
        return " AND ".join(term for term, _ in chosen) or "true", [
            value for _, values in chosen for value in values
        ]


class SampleTable:
    """A run's samples. Methods raise AlignerError where a file is damaged or goes while it is
    read."""

    def __init__(self, paths: RunPaths) -> None:
        self._root, self._lines = paths.root, paths.samples
        self._directory = paths.root / "samples"
        self.files = _by_step(self._directory, "step")
        """The step files by step, in order."""

    @property
    def has_all(self) -> bool:
        """Whether all samples are kept, not only the few of samples.jsonl."""
        return bool(self.files)

    def page(self, wanted: SampleFilter, sort: str, number: int) -> tuple[list[Row], int]:
        """The `number`-th page, from 0, of those that are wanted, and how many there are in all.
        `-score`: largest first."""
        column = sort.removeprefix("-")
        if column not in SORTS:
            raise AlignerError(
                f"sort={sort}: must be one of {', '.join(SORTS)}, optionally with the prefix -"
            )
        if (
            self.has_all
            and column == "step"
            and wanted == replace(SampleFilter(), first=wanted.first, last=wanted.last)
        ):
            return self._by_step(
                self._between(wanted.first, wanted.last)[:: -1 if sort.startswith("-") else 1],
                number,
            )
        condition, values = wanted.condition()
        order = f"{column} {'DESC' if sort.startswith('-') else 'ASC'} NULLS LAST, step, row"
        hits = self._query(
            f"WITH hits AS MATERIALIZED (SELECT step, row, {column} FROM {{}} WHERE {condition})"
            f" SELECT step, row, (SELECT count(*) FROM hits) AS total FROM hits ORDER BY {order}"
            f" LIMIT {PAGE} OFFSET ?",
            [*values, PAGE * number],
            self._between(wanted.first, wanted.last),
        )
        places = [(hit["step"], hit["row"]) for hit in hits]
        found = {(row["step"], row["row"]): row for row in self._rows(places)}
        return [found[place] for place in places if place in found], hits[0]["total"] if hits else 0

    def prompts(self, wanted: SampleFilter, sort: str, number: int) -> tuple[list[Row], int]:
        """The same of prompts: what was scored of each, and the place of its newest sample."""
        if sort.removeprefix("-") not in PROMPT_SORTS:
            raise AlignerError(
                f"sort={sort}: must be one of {', '.join(PROMPT_SORTS)}, optionally with the prefix"
                " -"
            )
        condition, values = wanted.condition()
        order = (
            f"{sort.removeprefix('-')} {'DESC' if sort.startswith('-') else 'ASC'} NULLS LAST,"
            " prompt"
        )
        rows = self._query(
            "WITH groups AS MATERIALIZED (SELECT prompt, count(*) AS samples, avg(score) AS mean,"
            " stddev_pop(score) AS spread, min(score) AS least, max(score) AS most, min(step) AS"
            " first_step, max(step) AS last_step, arg_max(row, step) AS row FROM {} WHERE"
            f" {condition} GROUP BY prompt) SELECT * REPLACE (left(prompt, {_CLIP}) AS prompt),"
            f" (SELECT count(*) FROM groups) AS total FROM groups ORDER BY {order} LIMIT {PAGE}"
            " OFFSET ?",
            [*values, PAGE * number],
            self._between(wanted.first, wanted.last),
        )
        return rows, rows[0]["total"] if rows else 0

    def sample(self, step: int, row: int) -> Row | None:
        """All columns of one; None where it is not there."""
        found = self._query("SELECT * FROM {} WHERE step = ? AND row = ?", [step, row], [step])
        return found[0] if found else None

    def group(self, step: int, group: int) -> list[Row]:
        """The samples that were drawn for one prompt of a step."""
        return self._query(
            f'SELECT {_SHORT} FROM {{}} WHERE "group" = ? AND step = ? ORDER BY row',
            [group, step],
            [step],
        )

    def over_time(
        self, prompt: str, steps: Sequence[int]
    ) -> tuple[list[Row], dict[int, list[Row]]]:
        """A prompt's mean score and number of samples by step, and the first samples of some
        steps."""
        means = self._query(
            "SELECT step, avg(score) AS mean, count(*) AS samples FROM {} WHERE prompt = ? GROUP BY"
            " step ORDER BY step",
            [prompt],
        )
        known = [row["step"] for row in means]
        chosen = [step for step in steps if step in known] or spread(known)
        sql = (
            f"SELECT {_SHORT} FROM {{}} WHERE prompt = ? AND step = ? ORDER BY row LIMIT"
            f" {_MOST_OF_A_STEP}"
        )
        return means, {step: self._query(sql, [prompt, step], [step]) for step in chosen}

    def tokens(self, step: int, row: int) -> Row | None:
        """The lists over the response's tokens; None where the budget has dropped the step's."""
        file = _by_step(self._directory, "tokens").get(step)
        if file is None:
            return None
        found = self._run(
            "SELECT * FROM read_parquet(?, file_row_number=true) WHERE file_row_number = ?",
            [[str(file)], row],
        )
        return found[0] if found else None

    def _by_step(self, steps: Sequence[int], number: int) -> tuple[list[Row], int]:
        """A page of all samples of some steps, by the files' counts of rows alone: no file is read
        that is not on it."""
        files = [str(self.files[step]) for step in steps]
        found = (
            self._run("SELECT file_name, num_rows FROM parquet_file_metadata(?)", [files])
            if files
            else []
        )
        counts = {row["file_name"]: row["num_rows"] for row in found}
        places: list[tuple[int, int]] = []
        skipped = PAGE * number
        for step, file in zip(steps, files, strict=True):
            places += [
                (step, row)
                for row in range(skipped, min(counts[file], skipped + PAGE - len(places)))
            ]
            skipped = max(0, skipped - counts[file])
            if len(places) == PAGE:
                break
        rows = {(row["step"], row["row"]): row for row in self._rows(places)}
        return [rows[place] for place in places if place in rows], sum(counts.values())

    def _rows(self, places: Sequence[tuple[int, int]]) -> list[Row]:
        steps, rows = [step for step, _ in places], [row for _, row in places]
        pairs = "SELECT unnest(?::INTEGER[]) AS s, unnest(?::BIGINT[]) AS r"
        sql = f"SELECT {_SHORT} FROM {{}} JOIN ({pairs}) ON s = step AND r = row"
        return self._query(sql, [steps, rows], sorted(set(steps))) if places else []

    def _between(self, first: int | None, last: int | None) -> list[int]:
        return [
            step
            for step in self.files
            if (first is None or step >= first) and (last is None or step <= last)
        ]

    def _query(
        self, sql: str, values: Sequence[Any], steps: Sequence[int] | None = None
    ) -> list[Row]:
        """A query with `{}` for where samples come from; of step files those of some steps."""
        if not self.files:
            return (
                self._run(sql.format(_FROM_LINES), [str(self._lines), *values])
                if self._lines.is_file()
                else []
            )
        wanted = self.files.keys() if steps is None else set(steps)
        files = [str(file) for step, file in self.files.items() if step in wanted]
        return self._run(sql.format(_FROM_FILES), [files, *values]) if files else []

    def _run(self, sql: str, values: Sequence[Any]) -> list[Row]:
        import duckdb

        settings: Any = {
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "memory_limit": "2GB",
        }
        try:
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


def spread(steps: Sequence[int]) -> list[int]:
    """The first, the middle and the last of some steps."""
    return sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []


def _by_step(directory: Path, kind: str) -> Mapping[int, Path]:
    names = (
        (re.fullmatch(rf"{kind}_([0-9]+)\.parquet", file.name), file)
        for file in directory.glob(f"{kind}_*.parquet")
    )
    return dict(sorted((int(name[1]), file) for name, file in names if name is not None))
