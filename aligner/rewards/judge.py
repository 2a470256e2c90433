"""A language model as a judge, behind any OpenAI-compatible endpoint.

A judge scores samples, or compares them. The module contains the parsers of the judge's answers
(scores, probabilities of yes, verdicts and rankings), the ledger that stores answers on disk so
that no question is sent twice, the meter that reads the ledger for the metrics of a run, and the
scorer `Judge`. Parsers return None for an answer that cannot be parsed.
"""

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

from aligner.checks.reward import find_judge_key_problem
from aligner.errors import ConfigError
from aligner.file_limits import parse_json
from aligner.paths import PRIVATE_MODE, RunPaths
from aligner.rewards.function_forms import ScoringRequest
from aligner.rewards.remote import HttpEndpoint, RateLimiter
from aligner.rewards.scorers import ScorerUnavailable, ScoringError
from aligner.schema.reward_sources import JudgeSource
from aligner.schema.templates import fill_template
from aligner.values import is_finite_number

_VERDICT = re.compile(r"VERDICT:\W*(A|B|TIE)\b", re.IGNORECASE)
_ONLY_VERDICT = re.compile(r"\W*(A|B|TIE)\W*", re.IGNORECASE)
_NUMBERS = r"(\[?\d{1,9}\]?(?:\s*>\s*\[?\d{1,9}\]?)*)"
_RANKING = re.compile(rf"RANKING:[\s*]*{_NUMBERS}", re.IGNORECASE)
_ONLY_RANKING = re.compile(rf"\s*{_NUMBERS}\s*")
_WINS = {"A": 1.0, "B": 0.0, "TIE": 0.5}


@dataclass(frozen=True)
class JudgeAnswer:
    """One answer of the judge. The ledger stores its fields as JSON."""

    content: str | None
    """Text of the answer; None if the response does not follow the protocol."""
    first_token: tuple[tuple[str, float], ...] = ()
    """Most probable first tokens with their log-probs; empty if they were not requested."""
    tokens_in: int = 0
    """Number of prompt tokens."""
    tokens_out: int = 0
    """Number of generated tokens."""


def parse_completion(body: Any) -> JudgeAnswer:
    """Return the answer in a decoded `/v1/chat/completions` response.

    Any JSON value is accepted; the content is None if the value does not follow the protocol.
    """
    try:
        choice = body["choices"][0]
        content = choice["message"]["content"]
    except (KeyError, IndexError, TypeError):
        return JudgeAnswer(None)
    tokens_in, tokens_out = (
        _parse_token_count(body.get("usage"), name)
        for name in ("prompt_tokens", "completion_tokens")
    )
    return JudgeAnswer(
        content if isinstance(content, str) else None,
        _parse_first_token(choice),
        tokens_in,
        tokens_out,
    )


def _parse_token_count(usage: Any, name: str) -> int:
    count = usage.get(name) if isinstance(usage, Mapping) else None
    return count if type(count) is int and count > 0 else 0


def _parse_first_token(choice: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    try:
        return tuple(
            (str(candidate["token"]), float(candidate["logprob"]))
            for candidate in choice["logprobs"]["content"][0]["top_logprobs"]
        )
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        return ()


def parse_score(text: str, pattern: str, lowest: float, highest: float) -> float | None:
    """Return the score in the first group of the pattern's last match.

    Returns:
        The score; None without a match, or if the group is no number in [lowest, highest].
    """
    last_match = None
    for match in re.finditer(pattern, text):
        last_match = match
    try:
        score = math.nan if last_match is None else float(last_match[1])
    except (TypeError, ValueError):
        return None
    return score if lowest <= score <= highest else None


def parse_yes_probability(first_token: Sequence[tuple[str, float]]) -> float | None:
    """Return P(yes) / (P(yes) + P(no)) of the first token.

    Upper and lower case and surrounding whitespace of the tokens do not matter.

    Args:
        first_token: Most probable first tokens with their log-probs.

    Returns:
        The probability; None if neither yes nor no is among the tokens.
    """
    probabilities = {"yes": 0.0, "no": 0.0}
    for token, logprob in first_token:
        # Tokens differ in case and in a leading space: "Yes", " yes".
        word = token.strip().lower()
        if word in probabilities and is_finite_number(logprob):
            probabilities[word] += math.exp(min(logprob, 0.0))
    total = sum(probabilities.values())
    return probabilities["yes"] / total if total > 0 else None


def parse_verdict(text: str) -> float | None:
    """Return the result of response A in a comparison: 1 for a win, 0 for a loss, 0.5 for a tie.

    The last `VERDICT: …` of the text counts. Without one, the whole text must be a verdict;
    otherwise the function returns None.
    """
    if verdicts := _VERDICT.findall(text):
        return _WINS[verdicts[-1].upper()]
    bare_verdict = _ONLY_VERDICT.fullmatch(text)
    return None if bare_verdict is None else _WINS[bare_verdict[1].upper()]


def parse_ranking(text: str, count: int) -> list[float] | None:
    """Return the scores of `count` ranked responses, in the order of their numbers.

    The best response scores 1 and the worst 0; the others are evenly spaced. The last `RANKING: …`
    of the text counts. Without one, the whole text must be a ranking. The function returns None
    unless the ranking contains each of the numbers 1 to `count` once.
    """
    rankings = _RANKING.findall(text)
    # Some judges answer with nothing but the ranking.
    bare_ranking = _ONLY_RANKING.fullmatch(text)
    if not rankings and bare_ranking is None:
        return None
    numbers = [
        int(number)
        for number in re.findall(
            r"\d+", rankings[-1] if rankings else bare_ranking[1] if bare_ranking else ""
        )
    ]
    if sorted(numbers) != list(range(1, count + 1)):
        return None
    scores = {
        number: (count - 1 - rank) / (count - 1) if count > 1 else 0.5
        for rank, number in enumerate(numbers)
    }
    return [scores[number] for number in range(1, count + 1)]


def build_question(template: str, request: ScoringRequest, **variables: object) -> str:
    """Return the judge template with its placeholders filled.

    Args:
        template: Template with placeholders `{name}`.
        request: Request whose prompt and metadata fill placeholders. Values that are no text are
            written as JSON.
        variables: Values of further placeholders; they override fields of the metadata.

    Raises:
        ScoringError: The template uses a field that the record lacks.
    """
    values = {
        name: _to_text(value)
        for name, value in {**request.metadata, "prompt": request.prompt, **variables}.items()
    }
    try:
        return fill_template(template, values)
    except KeyError as missing:
        fields = ", ".join(sorted(request.metadata)) or "none"
        raise ScoringError(
            f"the judge template uses {{{missing.args[0]}}}, but the record of prompt"
            f" {request.prompt!r} lacks this field; fields of the record: {fields}"
        ) from None


def _to_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def group_by_prompt(requests: Sequence[ScoringRequest]) -> list[list[int]]:
    """Return the indices of the requests, grouped by prompt.

    Requests belong to the same group if their prompts and their records are equal.
    """
    groups: dict[str, list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(_to_text([request.prompt, dict(request.metadata)]), []).append(index)
    return list(groups.values())


def distinct_responses(requests: Sequence[ScoringRequest], indices: Sequence[int]) -> list[str]:
    """Return the different responses to one prompt, each once.

    Args:
        requests: All requests.
        indices: Indices of the requests of the prompt.

    Raises:
        ScoringError: The prompt has only one response, so there is nothing to compare; or the
            prompt is empty, because texts without their prompts may belong to different prompts.
    """
    first = requests[indices[0]]
    if len(indices) < 2 or not first.prompt:
        raise ScoringError(
            "a judge that compares samples requires the prompt and at least two samples of the"
            f" prompt, got {len(indices)} for prompt {first.prompt!r} and response"
            f" {first.response!r}. Send all samples of a prompt in one request, with prompt_lengths"
        )
    return list(dict.fromkeys(requests[index].response for index in indices))


def mean_wins(texts: Sequence[str], wins: Mapping[tuple[str, str], float]) -> list[float]:
    """Return for each sample of a prompt its mean result against the other samples.

    Samples with equal texts tie. The result of a pair is the mean of both orders of the pair.

    Args:
        texts: Texts of the samples.
        wins: Result of the first text against the second text, in [0, 1], for each ordered pair of
            different texts.
    """
    sums = [0.0] * len(texts)
    for first, second in combinations(range(len(texts)), 2):
        pair = texts[first], texts[second]
        result = 0.5 if pair[0] == pair[1] else (wins[pair] + 1 - wins[pair[::-1]]) / 2
        sums[first] += result
        sums[second] += 1 - result
    return [total / (len(texts) - 1) for total in sums]


COUNTS = ("questions", "from_cache", "asked_again", "unreadable", "tokens_in", "tokens_out", "cost")
"""Names of a judge's counts, which become the metrics `judge/NAME`.

`questions` counts the questions that were sent; `from_cache` the questions whose answers the ledger
contained; `asked_again` the repeated attempts for unreadable answers; `unreadable` the questions
without a readable answer after all attempts; `tokens_in` and `tokens_out` the tokens; `cost` is
their cost at the configured prices.
"""
_FILE = "answers.sqlite"
# Timeout for the lock of another process that writes, which takes milliseconds.
_LOCK_TIMEOUT_S = 60.0
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
    """Return the directory of a judge's ledger: `judge_cache`, or a directory of the run."""
    return paths.judge if source.judge_cache is None else Path(source.judge_cache)


def judge_run_name(paths: RunPaths) -> str:
    """Return the name of a run in ledgers, the absolute path of its directory."""
    return str(paths.root.absolute())


class JudgeLedger:
    """SQLite database of the judge's answers, and of the counts of each run.

    It stores the newest answer to each question and the number of attempts. Threads, replicas and
    runs may share a ledger. An answer and its counts are written in one transaction, also if the
    process is killed.
    """

    def __init__(self, directory: Path, run: str) -> None:
        """Open or create the ledger.

        Args:
            directory: Directory of the database; it is created if it does not exist.
            run: Name of the run whose counts this ledger updates. See `judge_run_name`.

        Raises:
            ScoringError: The directory or the database cannot be used.
        """
        self._path = directory / _FILE
        self._run = run
        self._lock = threading.Lock()
        with self._translate_errors():
            directory.mkdir(mode=PRIVATE_MODE, parents=True, exist_ok=True)
            self._database = sqlite3.connect(
                self._path, timeout=_LOCK_TIMEOUT_S, check_same_thread=False
            )
            for table in _TABLES:
                self._database.execute(table)

    def find_answer(self, question: str) -> tuple[int, JudgeAnswer] | None:
        """Return the number of attempts for a question and its last answer; None if unknown.

        Raises:
            ScoringError: The database cannot be read.
        """
        with self._translate_errors(), self._lock:
            row = self._database.execute(
                "SELECT tries, answer FROM answers WHERE question = ?", (question,)
            ).fetchone()
        if row is None:
            return None
        fields = json.loads(row[1])
        # JSON has no tuples.
        fields["first_token"] = tuple((token, logprob) for token, logprob in fields["first_token"])
        return row[0], JudgeAnswer(**fields)

    def store_answer(
        self, question: str, tries: int, answer: JudgeAnswer, counts: Mapping[str, float]
    ) -> None:
        """Store an answer, and add to the counts of the run, in one transaction.

        Args:
            question: Key of the question.
            tries: Number of attempts for the question so far.
            answer: Last answer.
            counts: Amounts to add, by their names in COUNTS.

        Raises:
            ScoringError: The database cannot be written.
        """
        with self._translate_errors(), self._lock, self._database:
            values = question, tries, json.dumps(asdict(answer))
            self._database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", values)
            self._add_counts(counts)

    def add_counts(self, counts: Mapping[str, float]) -> None:
        """Add to the counts of the run.

        Raises:
            ScoringError: The database cannot be written.
        """
        with self._translate_errors(), self._lock, self._database:
            self._add_counts(counts)

    def close(self) -> None:
        """Close the database; the ledger cannot be used afterwards."""
        self._database.close()

    def _add_counts(self, counts: Mapping[str, float]) -> None:
        self._database.executemany(
            "INSERT INTO counts VALUES (?, ?, ?) ON CONFLICT (run, name) DO UPDATE SET amount ="
            " amount + excluded.amount",
            [(self._run, name, amount) for name, amount in counts.items()],
        )

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise ScoringError for an error of the file system or of SQLite within the block."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise ScoringError(
                f"{self._path}: cannot read or write the judge's answers: {error}; the directory"
                " (reward.judge_cache) requires free space and a file system with POSIX locks"
            ) from error


class JudgeMeter:
    """Reads the counts of a run's judges from their ledgers, step by step.

    It runs in another process than the judges.
    """

    def __init__(self, directories: Sequence[Path], run: str) -> None:
        """Start with the current counts, which belong to no step.

        Args:
            directories: Directories of the ledgers, each once.
            run: Name of the run. See `judge_run_name`.
        """
        self._directories = directories
        self._run = run
        self._last_totals = self._read_totals()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step since the previous call.

        These are `judge/NAME` for each name in COUNTS, and `judge/cost_total`, the cost of the
        whole run.

        Raises:
            ScoringError: A ledger cannot be read.
        """
        totals = self._read_totals()
        new_counts = {f"judge/{name}": totals[name] - self._last_totals[name] for name in COUNTS}
        self._last_totals = totals
        return new_counts | {"judge/cost_total": totals["cost"]}

    def _read_totals(self) -> dict[str, float]:
        totals = dict.fromkeys(COUNTS, 0.0)
        for directory in self._directories:
            for name, amount in self._read_counts(directory / _FILE):
                totals[name] += amount
        return totals

    def _read_counts(self, path: Path) -> list[tuple[str, float]]:
        if not path.exists():
            return []
        try:
            with contextlib.closing(sqlite3.connect(path, timeout=_LOCK_TIMEOUT_S)) as database:
                return database.execute(
                    "SELECT name, amount FROM counts WHERE run = ?", (self._run,)
                ).fetchall()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):  # a judge is just creating the ledger
                return []
            raise ScoringError(f"{path}: cannot read the judge's metrics: {error}") from error


_CHAT_PATH = "/chat/completions"
# Number of top log-probs of the first token; endpoints allow at most this many.
_TOP_LOGPROBS = 20
_MILLION = 1_000_000
# Characters at the end of an answer that an error message contains.
_SHOWN_CHARACTERS = 200


class _UnreadableAnswer(ScoringError):
    """The judge gave no answer that can be parsed."""


@dataclass(frozen=True)
class _Question:
    text: str
    """Message to the judge."""
    parse: Callable[[JudgeAnswer], Any]
    """Function that returns the result in an answer; None if the answer cannot be parsed."""
    description: str
    """Prompt and response of the question, for error messages."""


class Judge:
    """A scorer that asks a language model, as its source configures.

    A question is sent up to `judge_tries` times, until its answer can be parsed. Each answer is
    stored in the ledger, with its cost, before it is used. Therefore neither a resumed run nor
    another replica sends the question again, even if its answers could not be parsed.
    """

    def __init__(self, source: JudgeSource, ledger: JudgeLedger) -> None:
        """Create a judge; no request is sent yet.

        Raises:
            ConfigError: The environment lacks the variable with the endpoint's API key.
        """
        if problem := find_judge_key_problem(source):
            raise ConfigError(problem)
        key = (
            None
            if source.judge_key_variable is None
            else os.environ[source.judge_key_variable].strip()
        )
        rate_limiter = (
            None
            if source.judge_requests_per_minute is None
            else RateLimiter(source.judge_requests_per_minute)
        )
        url = source.judge_url.rstrip("/")
        self._endpoint = HttpEndpoint(
            url if url.endswith(_CHAT_PATH) else url + _CHAT_PATH,
            source.judge_timeout_s,
            key,
            rate_limiter,
        )
        self._source = source
        self._ledger = ledger
        self._score_functions = {
            "score": self._score_by_number,
            "yes_no": self._score_by_yes_probability,
            "pairwise": self._score_by_comparisons,
            "ranking": self._score_by_ranking,
        }
        """Scoring methods by `judge_asks`."""

    def __call__(self, requests: Sequence[ScoringRequest]) -> list[float]:
        """Return one score for each request.

        If a question fails, all other questions are still sent, and their answers stored, before
        the error is raised.

        Raises:
            ScoringError: The answers to a question cannot be parsed, or the endpoint refuses it.
            ScorerUnavailable: The endpoint does not answer. No further questions are sent.
        """
        return self._score_functions[self._source.judge_asks](requests)

    def compare(
        self, requests: Sequence[ScoringRequest], others: Sequence[str]
    ) -> list[tuple[float, float] | None]:
        """Return the result of each response against another response to the same prompt.

        The source must be configured for comparisons (`pairwise`). Equal texts tie, without a
        question to the judge. The exceptions are those of a call, except that answers that cannot
        be parsed are no error.

        Args:
            requests: Prompts with their first responses.
            others: Second response of each request.

        Returns:
            For each request the results of its response, in [0, 1]: with the response in the first
            position, and in the second position. None if one of the two answers cannot be parsed.
        """
        questions = []
        for request, other in zip(requests, others, strict=True):
            if request.response != other:
                questions += [
                    self._build_pair_question(request, *order)
                    for order in permutations((request.response, other))
                ]
        answers = iter(self._answer_questions(questions, skip_unreadable=True))

        results: list[tuple[float, float] | None] = []
        for request, other in zip(requests, others, strict=True):
            first, second = (
                (0.5, 0.5) if request.response == other else (next(answers), next(answers))
            )
            # In the second order the response is B, whose result is 1 - A's result.
            results.append(None if first is None or second is None else (first, 1 - second))
        return results

    def _score_by_number(self, requests: Sequence[ScoringRequest]) -> list[float]:
        source = self._source
        lowest = source.judge_lowest
        highest = source.judge_highest

        def parse(answer: JudgeAnswer) -> float | None:
            return parse_score(answer.content or "", source.judge_pattern, lowest, highest)

        bounds = {"lowest": f"{lowest:g}", "highest": f"{highest:g}"}
        return self._answer_questions(
            [
                self._build_question(request, parse, response=request.response, **bounds)
                for request in requests
            ]
        )

    def _score_by_yes_probability(self, requests: Sequence[ScoringRequest]) -> list[float]:
        def parse(answer: JudgeAnswer) -> float | None:
            return parse_yes_probability(answer.first_token)

        return self._answer_questions(
            [
                self._build_question(request, parse, response=request.response)
                for request in requests
            ]
        )

    def _score_by_comparisons(self, requests: Sequence[ScoringRequest]) -> list[float]:
        """Compare all pairs of a prompt's different responses, each pair in both orders."""
        groups = group_by_prompt(requests)
        pairs = [list(permutations(distinct_responses(requests, indices), 2)) for indices in groups]
        questions = [
            self._build_pair_question(requests[indices[0]], first, second)
            for indices, prompt_pairs in zip(groups, pairs, strict=True)
            for first, second in prompt_pairs
        ]
        answers = iter(self._answer_questions(questions))

        scores = [0.0] * len(requests)
        for indices, prompt_pairs in zip(groups, pairs, strict=True):
            wins = {pair: next(answers) for pair in prompt_pairs}
            texts = [requests[index].response for index in indices]
            for index, score in zip(indices, mean_wins(texts, wins), strict=True):
                scores[index] = score
        return scores

    def _score_by_ranking(self, requests: Sequence[ScoringRequest]) -> list[float]:
        """Rank the different responses to each prompt with one question."""

        def build_parser(count: int) -> Callable[[JudgeAnswer], list[float] | None]:
            return lambda answer: parse_ranking(answer.content or "", count)

        groups = group_by_prompt(requests)
        distinct_texts = [distinct_responses(requests, indices) for indices in groups]
        ranked_groups = [number for number, texts in enumerate(distinct_texts) if len(texts) > 1]
        questions = []
        for number in ranked_groups:
            texts = distinct_texts[number]
            responses = "\n\n".join(
                f"<response_{position}>\n{text}\n</response_{position}>"
                for position, text in enumerate(texts, start=1)
            )
            request = requests[groups[number][0]]
            questions.append(
                self._build_question(
                    request, build_parser(len(texts)), responses=responses, count=str(len(texts))
                )
            )
        rankings = dict(zip(ranked_groups, self._answer_questions(questions), strict=True))

        # 0.5 is the score of samples that all have the same text.
        scores = [0.5] * len(requests)
        for number, ranked_scores in rankings.items():
            score_by_text = dict(zip(distinct_texts[number], ranked_scores, strict=True))
            for index in groups[number]:
                scores[index] = score_by_text[requests[index].response]
        return scores

    def _build_pair_question(self, request: ScoringRequest, first: str, second: str) -> _Question:
        def parse(answer: JudgeAnswer) -> float | None:
            return parse_verdict(answer.content or "")

        return self._build_question(request, parse, response_a=first, response_b=second)

    def _build_question(
        self, request: ScoringRequest, parse: Callable[[JudgeAnswer], Any], **variables: str
    ) -> _Question:
        text = build_question(self._source.template, request, **variables)
        return _Question(
            text, parse, f"prompt {request.prompt!r} and response {request.response!r}"
        )

    def _answer_questions(
        self, questions: Sequence[_Question], *, skip_unreadable: bool = False
    ) -> list[Any]:
        """Return the judge's results for the questions, in order.

        Known answers come from the ledger. Equal questions are sent once.

        Args:
            questions: Questions to answer.
            skip_unreadable: Whether the result of a question without a readable answer is None
                instead of an error.

        Raises:
            ScorerUnavailable: The endpoint does not answer.
            ScoringError: A question failed.
        """
        # The hash of the request body is the key of a question.
        bodies = [self._build_body(question.text) for question in questions]
        keys = [hashlib.sha256(body).hexdigest() for body in bodies]
        distinct = {
            key: (body, question)
            for key, body, question in zip(keys, bodies, questions, strict=True)
        }
        known = {
            key: stored for key in distinct if (stored := self._ledger.find_answer(key)) is not None
        }

        results: dict[str, Any] = {}
        errors: dict[str, ScoringError] = {}
        for key, (tries, answer) in known.items():
            if (result := distinct[key][1].parse(answer)) is not None:
                results[key] = result
            elif tries >= self._source.judge_tries:
                errors[key] = self._unreadable_error(tries, answer, distinct[key][1])
        if results or errors:
            self._ledger.add_counts({"from_cache": len(results) + len(errors)})

        # Set when the endpoint does not answer: the remaining questions would only time out too.
        is_unavailable = threading.Event()

        def ask(key: str) -> None:
            """Ask one question, and store its answer or its error."""
            tries = known[key][0] if key in known else 0
            try:
                if not is_unavailable.is_set():
                    results[key] = self._ask_until_readable(key, *distinct[key], tries)
            except ScorerUnavailable as error:
                is_unavailable.set()
                errors[key] = error
            except ScoringError as error:
                errors[key] = error

        with ThreadPoolExecutor(
            self._source.judge_concurrency, thread_name_prefix="judge"
        ) as threads:
            remaining = [key for key in distinct if key not in results and key not in errors]
            list(threads.map(ask, remaining))  # list() raises the unexpected errors of the threads

        # ScorerUnavailable first: it explains the missing results of other questions.
        for kind in (ScorerUnavailable, ScoringError):
            for error in errors.values():
                if isinstance(error, kind) and not (
                    skip_unreadable and isinstance(error, _UnreadableAnswer)
                ):
                    raise error
        return [results.get(key) for key in keys]

    def _ask_until_readable(self, key: str, body: bytes, question: _Question, tries: int) -> Any:
        """Send a question until its answer can be parsed; return the parsed result.

        Args:
            key: Key of the question in the ledger.
            body: Request body.
            question: The question.
            tries: Number of earlier attempts, which count towards `judge_tries`.

        Raises:
            ScoringError: The attempts are used up, or a request failed.
        """
        max_tries = self._source.judge_tries
        while True:
            answer = _decode_answer(self._endpoint.post(body))
            tries += 1
            result = question.parse(answer)
            counts: dict[str, float] = {"questions" if tries == 1 else "asked_again": 1}
            if result is None and tries >= max_tries:
                counts["unreadable"] = 1
            # The answer is stored before it is used, so that a later crash does not lose it.
            self._ledger.store_answer(key, tries, answer, counts | self._compute_cost(answer))
            if result is not None:
                return result
            if tries >= max_tries:
                raise self._unreadable_error(tries, answer, question)

    def _unreadable_error(
        self, tries: int, answer: JudgeAnswer, question: _Question
    ) -> _UnreadableAnswer:
        source = self._source
        shown = (
            "not a chat completion response"
            if answer.content is None
            else repr(answer.content[-_SHOWN_CHARACTERS:])
        )
        return _UnreadableAnswer(
            f"judge {source.judge_model} at {self._endpoint.url}: no answer could be parsed in"
            f" {tries} attempts (judge_tries) for {question.description}; last answer: {shown}"
        )

    def _build_body(self, text: str) -> bytes:
        """Return the request body, which also identifies the question in the ledger.

        It contains the model, the message and the sampling parameters.
        """
        source = self._source
        body: dict[str, Any] = {
            "model": source.judge_model,
            "messages": [{"role": "user", "content": text}],
        }
        body |= {"temperature": source.judge_temperature, "max_tokens": source.judge_max_tokens}
        if source.judge_asks == "yes_no":
            body |= {"max_tokens": 1, "logprobs": True, "top_logprobs": _TOP_LOGPROBS}
        return json.dumps(body).encode()

    def _compute_cost(self, answer: JudgeAnswer) -> dict[str, float]:
        """Return the counts `tokens_in`, `tokens_out` and `cost` of an answer."""
        prices = self._source.judge_input_price, self._source.judge_output_price
        # Prices are per million tokens.
        cost = (answer.tokens_in * prices[0] + answer.tokens_out * prices[1]) / _MILLION
        return {"tokens_in": answer.tokens_in, "tokens_out": answer.tokens_out, "cost": cost}


def _decode_answer(response_body: bytes) -> JudgeAnswer:
    try:
        return parse_completion(parse_json(response_body))
    except (ValueError, RecursionError):
        return JudgeAnswer(None)


def build_judge(source: JudgeSource, paths: RunPaths) -> Judge:
    """Return the judge of a run.

    Raises:
        ConfigError: The environment lacks the API key, or the ledger cannot be opened.
    """
    return open_judge(source, judge_directory(source, paths), judge_run_name(paths))


def open_judge(source: JudgeSource, directory: Path, run: str) -> Judge:
    """Return a judge whose ledger is in a directory, and whose counts belong to `run`.

    Raises:
        ConfigError: The environment lacks the API key, or the ledger cannot be opened.
    """
    try:
        return Judge(source, JudgeLedger(directory, run))
    except ScoringError as error:
        raise ConfigError(str(error)) from error
