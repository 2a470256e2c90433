"""What judges have said, on disk, so that nothing is asked twice; and what it came to, for a run's
metrics."""

import contextlib
import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from aligner.paths import PRIVATE, RunPaths
from aligner.rewards.judge_answers import JudgeAnswer
from aligner.rewards.scorers import ScoringError
from aligner.schema.reward_sources import JudgeSource

COUNTS = ("questions", "from_cache", "asked_again", "unreadable", "tokens_in", "tokens_out", "cost")
"""Questions that were asked; those of a scoring request whose answers were known; how often one was
asked again, for its answer could not be read; questions that were given up for that; tokens, and
what they cost at the configuration's prices."""
_FILE = "answers.sqlite"
_WAIT_S = 60.0  # for another process that writes: it takes milliseconds
_TABLES = (
    (
        "CREATE TABLE IF NOT EXISTS answers (question TEXT PRIMARY KEY, tries INTEGER NOT NULL,"
        " answer TEXT NOT NULL)"
    ),
    (
        "CREATE TABLE IF NOT EXISTS counts (run TEXT, name TEXT, amount REAL NOT NULL, PRIMARY KEY"
        " (run, name))"
    ),
)


def judge_directory(source: JudgeSource, paths: RunPaths) -> Path:
    """Where a judge's answers are kept."""
    return paths.judge if source.judge_cache is None else Path(source.judge_cache)


def judge_run(paths: RunPaths) -> str:
    """What a run is called in ledgers."""
    return str(paths.root.absolute())


class JudgeLedger:
    """The newest answer to each question, with how often it was asked, and the counts of each run
    that asks.

    Threads, replicas and runs may share one. An answer and what it counts are there together or not
    at all, also where the process is killed.
    """

    def __init__(self, directory: Path, run: str) -> None:
        """Of a directory, which is made; `run` is who asks. Raises ScoringError where it cannot be
        used."""
        self._path, self._run = directory / _FILE, run
        self._lock = threading.Lock()
        with self._telling():
            directory.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
            self._database = sqlite3.connect(self._path, timeout=_WAIT_S, check_same_thread=False)
            for table in _TABLES:
                self._database.execute(table)

    def answer(self, question: str) -> tuple[int, JudgeAnswer] | None:
        """How often a question was asked, and the last answer; None for one that never was. Raises
        ScoringError."""
        with self._telling(), self._lock:
            row = self._database.execute(
                "SELECT tries, answer FROM answers WHERE question = ?", (question,)
            ).fetchone()
        if row is None:
            return None
        fields = json.loads(row[1])
        fields["first_token"] = tuple((token, logprob) for token, logprob in fields["first_token"])
        return row[0], JudgeAnswer(**fields)

    def keep(
        self, question: str, tries: int, answer: JudgeAnswer, counts: Mapping[str, float]
    ) -> None:
        """Note the answer to a question that was asked so often, and what to count of it. Raises
        ScoringError."""
        with self._telling(), self._lock, self._database:
            values = question, tries, json.dumps(asdict(answer))
            self._database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", values)
            self._count(counts)

    def count(self, counts: Mapping[str, float]) -> None:
        """Count some more. Raises ScoringError."""
        with self._telling(), self._lock, self._database:
            self._count(counts)

    def close(self) -> None:
        """Nothing more is asked of it."""
        self._database.close()

    def _count(self, counts: Mapping[str, float]) -> None:
        self._database.executemany(
            "INSERT INTO counts VALUES (?, ?, ?) ON CONFLICT (run, name) DO UPDATE SET amount ="
            " amount + excluded.amount",
            [(self._run, name, amount) for name, amount in counts.items()],
        )

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise ScoringError(
                f"{self._path}: cannot read or write the judge's answers: {error}; the directory"
                " (reward.judge_cache) requires free space and a file system with POSIX locks"
            ) from error


class JudgeMeter:
    """What a run's judges have counted, step by step, as another process than theirs reads it."""

    def __init__(self, directories: Sequence[Path], run: str) -> None:
        """Of the ledgers in these directories, each named once; what they have counted by now is
        left out of the steps."""
        self._directories, self._run = directories, run
        self._before = self._totals()

    def metrics(self) -> dict[str, float]:
        """`judge/…` for each of COUNTS, since the call before, and `judge/cost_total`, of all of
        the run.

        Raises ScoringError where a ledger cannot be read.
        """
        totals = self._totals()
        counted = {f"judge/{name}": totals[name] - self._before[name] for name in COUNTS}
        self._before = totals
        return counted | {"judge/cost_total": totals["cost"]}

    def _totals(self) -> dict[str, float]:
        totals = dict.fromkeys(COUNTS, 0.0)
        for directory in self._directories:
            for name, amount in self._counts(directory / _FILE):
                totals[name] += amount
        return totals

    def _counts(self, path: Path) -> list[tuple[str, float]]:
        if not path.exists():
            return []
        try:
            with contextlib.closing(sqlite3.connect(path, timeout=_WAIT_S)) as database:
                return database.execute(
                    "SELECT name, amount FROM counts WHERE run = ?", (self._run,)
                ).fetchall()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):  # it is being made
                return []
            raise ScoringError(f"{path}: cannot read the judge's metrics: {error}") from error
