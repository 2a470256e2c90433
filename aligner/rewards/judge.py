"""A language model as a judge, behind any OpenAI-compatible endpoint: what it answers about samples
are scores, or wins."""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

from aligner.checks.reward import judge_key_problem
from aligner.errors import ConfigError
from aligner.paths import RunPaths
from aligner.rewards.http_endpoint import HttpEndpoint, Pace
from aligner.rewards.judge_answers import (
    JudgeAnswer,
    by_prompt,
    different_texts,
    mean_wins,
    parsed_answer,
    question,
    read_ranking,
    read_score,
    read_verdict,
    read_yes,
)
from aligner.rewards.judge_ledger import JudgeLedger, judge_directory, judge_run
from aligner.rewards.scorers import ScorerUnavailable, ScoringError, ScoringRequest
from aligner.schema.reward_sources import JudgeSource

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
