"""A language model as a judge, behind any OpenAI-compatible endpoint: what it answers about samples
are scores, or wins."""

import contextlib
import hashlib
import json
import math
import os
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

from aligner.checks.reward import judge_key_problem
from aligner.errors import ConfigError
from aligner.paths import PRIVATE, RunPaths
from aligner.rewards.remote import HttpEndpoint, Pace
from aligner.rewards.scorers import ScorerUnavailable, ScoringError, ScoringRequest
from aligner.schema.options import is_finite_number
from aligner.schema.reward_sources import JudgeSource
from aligner.schema.templates import filled

_VERDICT = re.compile(r"VERDICT:\W*(A|B|TIE)\b", re.IGNORECASE)
_ONLY_VERDICT = re.compile(r"\W*(A|B|TIE)\W*", re.IGNORECASE)
_NUMBERS = r"(\[?\d{1,9}\]?(?:\s*>\s*\[?\d{1,9}\]?)*)"
_RANKING = re.compile(rf"RANKING:[\s*]*{_NUMBERS}", re.IGNORECASE)
_ONLY_RANKING = re.compile(rf"\s*{_NUMBERS}\s*")
_WINS = {"A": 1.0, "B": 0.0, "TIE": 0.5}


@dataclass(frozen=True)
class JudgeAnswer:
    """What the judge said once."""

    content: str | None
    """None: it was not an answer of the protocol's."""
    first_token: tuple[tuple[str, float], ...] = ()
    """The most probable first tokens, with their log-probs, where they were asked for."""
    tokens_in: int = 0
    tokens_out: int = 0


def parsed_answer(body: Any) -> JudgeAnswer:
    """That of a decoded `/v1/chat/completions` answer, whatever it is."""
    try:
        choice = body["choices"][0]
        content = choice["message"]["content"]
    except (KeyError, IndexError, TypeError):
        return JudgeAnswer(None)
    tokens_in, tokens_out = (
        _counted(body.get("usage"), name) for name in ("prompt_tokens", "completion_tokens")
    )
    return JudgeAnswer(
        content if isinstance(content, str) else None, _first_token(choice), tokens_in, tokens_out
    )


def _counted(usage: Any, name: str) -> int:
    count = usage.get(name) if isinstance(usage, Mapping) else None
    return count if type(count) is int and count > 0 else 0


def _first_token(choice: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    try:
        return tuple(
            (str(each["token"]), float(each["logprob"]))
            for each in choice["logprobs"]["content"][0]["top_logprobs"]
        )
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        return ()


def read_score(text: str, pattern: str, lowest: float, highest: float) -> float | None:
    """The number in the first group of the pattern's last match, where it is one within the
    bounds."""
    found = None
    for match in re.finditer(pattern, text):
        found = match
    try:
        score = math.nan if found is None else float(found[1])
    except (TypeError, ValueError):
        return None
    return score if lowest <= score <= highest else None


def read_yes(first_token: Sequence[tuple[str, float]]) -> float | None:
    """The probability of yes among yes and no, in any spelling of theirs; None where neither is
    among the tokens."""
    sums = {"yes": 0.0, "no": 0.0}
    for token, logprob in first_token:
        word = token.strip().lower()
        if word in sums and is_finite_number(logprob):
            sums[word] += math.exp(min(logprob, 0.0))
    both = sum(sums.values())
    return sums["yes"] / both if both > 0 else None


def read_verdict(text: str) -> float | None:
    """What A has won: 1, 0, or 0.5 for a tie. Of several verdicts the last counts; or the text is
    one, and nothing else."""
    if verdicts := _VERDICT.findall(text):
        return _WINS[verdicts[-1].upper()]
    only = _ONLY_VERDICT.fullmatch(text)
    return None if only is None else _WINS[only[1].upper()]


def read_ranking(text: str, count: int) -> list[float] | None:
    """What each of `count` responses is worth, in their order: 1 for the best to 0 for the worst,
    evenly apart.

    Of several rankings the last counts; or the text is one, and nothing else. All numbers 1 to
    `count` must be in it once.
    """
    rankings = _RANKING.findall(text)
    only = _ONLY_RANKING.fullmatch(text)
    if not rankings and only is None:
        return None
    numbers = [
        int(number)
        for number in re.findall(r"\d+", rankings[-1] if rankings else only[1] if only else "")
    ]
    if sorted(numbers) != list(range(1, count + 1)):
        return None
    worth = {
        number: (count - 1 - place) / (count - 1) if count > 1 else 0.5
        for place, number in enumerate(numbers)
    }
    return [worth[number] for number in range(1, count + 1)]


def question(template: str, request: ScoringRequest, **ours: object) -> str:
    """The template with the record's fields, and ours, which come first. What is no text is JSON.

    Raises ScoringError, which names the field, for one that the record does not have.
    """
    values = {
        name: _text(value)
        for name, value in {**request.metadata, "prompt": request.prompt, **ours}.items()
    }
    try:
        return filled(template, values)
    except KeyError as missing:
        has = ", ".join(sorted(request.metadata)) or "none"
        raise ScoringError(
            f"the judge template uses {{{missing.args[0]}}}, but the record of prompt"
            f" {request.prompt!r} lacks this field; fields of the record: {has}"
        ) from None


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def by_prompt(requests: Sequence[ScoringRequest]) -> list[list[int]]:
    """The places of each prompt's samples: those of the same prompt and the same record."""
    groups: dict[str, list[int]] = {}
    for place, request in enumerate(requests):
        groups.setdefault(_text([request.prompt, dict(request.metadata)]), []).append(place)
    return list(groups.values())


def different_texts(requests: Sequence[ScoringRequest], places: Sequence[int]) -> list[str]:
    """The responses at these places, which are those of one prompt, each once.

    Raises ScoringError where there is one place, and nothing to compare it with, and where the
    prompt is not known: texts that came without theirs may be of any.
    """
    first = requests[places[0]]
    if len(places) < 2 or not first.prompt:
        raise ScoringError(
            "a judge that compares samples requires the prompt and at least two samples of the"
            f" prompt, got {len(places)} for prompt {first.prompt!r} and response"
            f" {first.response!r}. Send all samples of a prompt in one request, with prompt_lengths"
        )
    return list(dict.fromkeys(requests[place].response for place in places))


def mean_wins(texts: Sequence[str], wins: Mapping[tuple[str, str], float]) -> list[float]:
    """Of each of a prompt's samples the mean of what it has won against the others; those of one
    text tie.

    `wins` is what the first of two different texts has won against the second, 0 to 1, by either
    order in which they were asked about.
    """
    sums = [0.0] * len(texts)
    for one, other in combinations(range(len(texts)), 2):
        pair = texts[one], texts[other]
        won = 0.5 if pair[0] == pair[1] else (wins[pair] + 1 - wins[pair[::-1]]) / 2
        sums[one] += won
        sums[other] += 1 - won
    return [total / (len(texts) - 1) for total in sums]


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


_CHAT = "/chat/completions"
_LIKELY_TOKENS = 20
"""Of the first token so many are told, the most that endpoints allow."""
_MILLION = 1_000_000
_SHOWN = 200  # characters of an answer


class _Unreadable(ScoringError):
    """What the judge said cannot be read."""


@dataclass(frozen=True)
class _Question:
    text: str
    read: Callable[[JudgeAnswer], Any]
    """What an answer says; None where it cannot be read."""
    about: str
    """What it is about, for an error."""


class Judge:
    """A scorer; what it asks, and how often, its source says.

    A question is asked up to `judge_tries` times, until its answer can be read. An answer is kept
    in the ledger, with what it cost, before it is used: neither a resumed run nor another replica
    asks again, also what could not be read.
    """

    def __init__(self, source: JudgeSource, ledger: JudgeLedger) -> None:
        """Raises ConfigError where the endpoint's key is not in the environment."""
        if problem := judge_key_problem(source):
            raise ConfigError(problem)
        key = (
            None
            if source.judge_key_variable is None
            else os.environ[source.judge_key_variable].strip()
        )
        pace = (
            None
            if source.judge_requests_per_minute is None
            else Pace(source.judge_requests_per_minute)
        )
        url = source.judge_url.rstrip("/")
        self._endpoint = HttpEndpoint(
            url if url.endswith(_CHAT) else url + _CHAT, source.judge_timeout_s, key, pace
        )
        self._source, self._ledger = source, ledger
        self._ways = {
            "score": self._scores,
            "yes_no": self._probabilities,
            "pairwise": self._wins,
            "ranking": self._ranks,
        }

    def __call__(self, requests: Sequence[ScoringRequest]) -> list[float]:
        """One score a request. All that is asked about others is asked, and kept, before an error
        is raised.

        Raises ScoringError for a question whose answers could not be read and for one that the
        endpoint refuses, and ScorerUnavailable, which ends the asking, where it does not answer.
        """
        return self._ways[self._source.judge_asks](requests)

    def compare(
        self, requests: Sequence[ScoringRequest], others: Sequence[str]
    ) -> list[tuple[float, float] | None]:
        """What each response has won, 0 to 1, against the other to its prompt: where it was shown
        first, and where second.

        None where either answer could not be read. Equal texts tie, and nothing is asked about
        them. The source asks for comparisons (`pairwise`). Raises as a call does, but for answers
        that could not be read.
        """
        questions = []
        for request, other in zip(requests, others, strict=True):
            if request.response != other:
                questions += [
                    self._pair(request, *order) for order in permutations((request.response, other))
                ]
        answers = iter(self._answers(questions, leaves_out=True))
        found: list[tuple[float, float] | None] = []
        for request, other in zip(requests, others, strict=True):
            first, second = (
                (0.5, 0.5) if request.response == other else (next(answers), next(answers))
            )
            found.append(None if first is None or second is None else (first, 1 - second))
        return found

    def _scores(self, requests: Sequence[ScoringRequest]) -> list[float]:
        source = self._source
        lowest, highest = source.judge_lowest, source.judge_highest

        def read(answer: JudgeAnswer) -> float | None:
            return read_score(answer.content or "", source.judge_pattern, lowest, highest)

        bounds = {"lowest": f"{lowest:g}", "highest": f"{highest:g}"}
        return self._answers(
            [
                self._question(request, read, response=request.response, **bounds)
                for request in requests
            ]
        )

    def _probabilities(self, requests: Sequence[ScoringRequest]) -> list[float]:
        def read(answer: JudgeAnswer) -> float | None:
            return read_yes(answer.first_token)

        return self._answers(
            [self._question(request, read, response=request.response) for request in requests]
        )

    def _wins(self, requests: Sequence[ScoringRequest]) -> list[float]:
        groups = by_prompt(requests)
        pairs = [list(permutations(different_texts(requests, places), 2)) for places in groups]
        questions = [
            self._pair(requests[places[0]], first, second)
            for places, of_prompt in zip(groups, pairs, strict=True)
            for first, second in of_prompt
        ]
        answers = iter(self._answers(questions))
        scores = [0.0] * len(requests)
        for places, of_prompt in zip(groups, pairs, strict=True):
            wins = {pair: next(answers) for pair in of_prompt}
            texts = [requests[place].response for place in places]
            for place, score in zip(places, mean_wins(texts, wins), strict=True):
                scores[place] = score
        return scores

    def _ranks(self, requests: Sequence[ScoringRequest]) -> list[float]:
        def reader(count: int) -> Callable[[JudgeAnswer], list[float] | None]:
            return lambda answer: read_ranking(answer.content or "", count)

        groups = by_prompt(requests)
        different = [different_texts(requests, places) for places in groups]
        asked = [number for number, texts in enumerate(different) if len(texts) > 1]
        questions = []
        for number in asked:
            texts = different[number]
            shown = "\n\n".join(
                f"<response_{place}>\n{text}\n</response_{place}>"
                for place, text in enumerate(texts, start=1)
            )
            request = requests[groups[number][0]]
            questions.append(
                self._question(request, reader(len(texts)), responses=shown, count=str(len(texts)))
            )
        found = dict(zip(asked, self._answers(questions), strict=True))
        scores = [0.5] * len(requests)  # of samples that all say the same
        for number, worths in found.items():
            worth = dict(zip(different[number], worths, strict=True))
            for place in groups[number]:
                scores[place] = worth[requests[place].response]
        return scores

    def _pair(self, request: ScoringRequest, first: str, second: str) -> _Question:
        def read(answer: JudgeAnswer) -> float | None:
            return read_verdict(answer.content or "")

        return self._question(request, read, response_a=first, response_b=second)

    def _question(
        self, request: ScoringRequest, read: Callable[[JudgeAnswer], Any], **ours: str
    ) -> _Question:
        text = question(self._source.template, request, **ours)
        return _Question(text, read, f"prompt {request.prompt!r} and response {request.response!r}")

    def _answers(self, questions: Sequence[_Question], *, leaves_out: bool = False) -> list[Any]:
        """What the judge says to each, from the ledger where it is known; equal ones are asked
        once.

        An answer that cannot be read is an error, or None where it `leaves_out` such ones.
        """
        bodies = [self._body(each.text) for each in questions]
        names = [hashlib.sha256(body).hexdigest() for body in bodies]
        different = {
            name: (body, each) for name, body, each in zip(names, bodies, questions, strict=True)
        }
        known = {
            name: kept for name in different if (kept := self._ledger.answer(name)) is not None
        }
        found: dict[str, Any] = {}
        errors: dict[str, ScoringError] = {}
        for name, (tried, answer) in known.items():
            if (reading := different[name][1].read(answer)) is not None:
                found[name] = reading
            elif tried >= self._source.judge_tries:
                errors[name] = self._unreadable(tried, answer, different[name][1])
        if found or errors:
            self._ledger.count({"from_cache": len(found) + len(errors)})
        gone = threading.Event()

        def ask(name: str) -> None:
            tried = known[name][0] if name in known else 0
            try:
                if not gone.is_set():
                    found[name] = self._asked(name, *different[name], tried)
            except ScorerUnavailable as error:
                gone.set()
                errors[name] = error
            except ScoringError as error:
                errors[name] = error

        with ThreadPoolExecutor(
            self._source.judge_concurrency, thread_name_prefix="judge"
        ) as threads:
            left = [name for name in different if name not in found and name not in errors]
            list(threads.map(ask, left))  # what is not foreseen is raised here
        for kind in (ScorerUnavailable, ScoringError):
            for error in errors.values():
                if isinstance(error, kind) and not (leaves_out and isinstance(error, _Unreadable)):
                    raise error
        return [found.get(name) for name in names]

    def _asked(self, name: str, body: bytes, each: _Question, tried: int) -> Any:
        """What the judge says, asked for as often as it takes and may, `tried` times before. Raises
        ScoringError."""
        tries = self._source.judge_tries
        while True:
            answer = _told(self._endpoint.post(body))
            tried += 1
            reading = each.read(answer)
            counts: dict[str, float] = {"questions" if tried == 1 else "asked_again": 1}
            if reading is None and tried >= tries:
                counts["unreadable"] = 1
            self._ledger.keep(name, tried, answer, counts | self._cost(answer))
            if reading is not None:
                return reading
            if tried >= tries:
                raise self._unreadable(tried, answer, each)

    def _unreadable(self, tried: int, answer: JudgeAnswer, each: _Question) -> _Unreadable:
        source = self._source
        shown = (
            "not a chat completion response"
            if answer.content is None
            else repr(answer.content[-_SHOWN:])
        )
        return _Unreadable(
            f"judge {source.judge_model} at {self._endpoint.url}: no answer could be parsed in"
            f" {tried} attempts (judge_tries) for {each.about}; last answer: {shown}"
        )

    def _body(self, text: str) -> bytes:
        """The request, which is also what tells a question from others: model, message and how to
        draw the answer."""
        source = self._source
        asked: dict[str, Any] = {
            "model": source.judge_model,
            "messages": [{"role": "user", "content": text}],
        }
        asked |= {"temperature": source.judge_temperature, "max_tokens": source.judge_max_tokens}
        if source.judge_asks == "yes_no":
            asked |= {"max_tokens": 1, "logprobs": True, "top_logprobs": _LIKELY_TOKENS}
        return json.dumps(asked).encode()

    def _cost(self, answer: JudgeAnswer) -> dict[str, float]:
        prices = self._source.judge_input_price, self._source.judge_output_price
        cost = (answer.tokens_in * prices[0] + answer.tokens_out * prices[1]) / _MILLION
        return {"tokens_in": answer.tokens_in, "tokens_out": answer.tokens_out, "cost": cost}


def _told(answer: bytes) -> JudgeAnswer:
    try:
        return parsed_answer(json.loads(answer))
    except (ValueError, RecursionError):
        return JudgeAnswer(None)


def build_judge(source: JudgeSource, paths: RunPaths) -> Judge:
    """The judge of a run. Raises ConfigError for what its environment or its directory lacks."""
    return opened_judge(source, judge_directory(source, paths), judge_run(paths))


def opened_judge(source: JudgeSource, directory: Path, run: str) -> Judge:
    """One whose answers are kept in a directory, and counted as those of `run`. Raises as
    `build_judge`."""
    try:
        return Judge(source, JudgeLedger(directory, run))
    except ScoringError as error:
        raise ConfigError(str(error)) from error
