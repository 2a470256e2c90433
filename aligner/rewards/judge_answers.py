"""What a judge says, read: scores, probabilities of yes, verdicts and rankings. None is what cannot
be read."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from aligner.rewards.scorers import ScoringError, ScoringRequest
from aligner.schema.templates import filled
from aligner.values import is_finite_number

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
