"""Questions of reasoning_gym, and what an answer to one is worth: what runs in child processes,
which alone import it.

A question is a pure function of its task, settings and seed: it is made with the global random
state set for it, and `child_function` has all children hash texts alike.
"""

import json
import random
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from aligner.errors import AlignerError, ConfigError
from aligner.schema.data import MOST_QUESTIONS

_HELD_OUT_SHARE = 8
_MOST_TRIES = 64
_SEEDS_APART = MOST_QUESTIONS * _MOST_TRIES
"""From one seed's first question to the next one's."""
_TOGETHER = 64
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def questions(
    *,
    name: str,
    questions: int,
    seed: int,
    difficulty: Sequence[int] | None,
    config: Mapping[str, Any],
    prompt: str,
    messages: bool,
    held_out: bool,
) -> Iterator[dict[str, Any]]:
    """So many records of a task, `held_out` or to learn from: by its text one question in eight is
    held out, of any seed.

    A record has a `prompt`, the text `prompt` with the question for `{question}`, or that as
    `messages` of one turn; the task's own `answer`, which some tasks do not have; `task`; and what
    `score` needs. Raises what the library does for wrong settings, and ConfigError for a task with
    no question to hold out.
    """
    found = 0
    for index in range(questions * _MOST_TRIES):
        if found == questions:
            return
        level = (
            None
            if difficulty is None
            else difficulty[0] + (difficulty[1] + 1 - difficulty[0]) * found // questions
        )
        made = json.dumps([name, seed * _SEEDS_APART + index, level, dict(config)])
        _, entry = _question(made)
        checksum = zlib.crc32(entry["question"].encode())
        if (checksum % _HELD_OUT_SHARE == 0) != held_out:
            continue
        found += 1
        text = prompt.replace("{question}", entry["question"])
        asked = {"messages": [{"role": "user", "content": text}]} if messages else {"prompt": text}
        yield asked | {
            "answer": entry["answer"],
            "task": name,
            "question": {"made_of": made, "checksum": checksum},
        }
    if not found:
        raise ConfigError(
            f"{name}: the task has too few different questions: no question is available for"
            f" {'evaluation' if held_out else 'training'}"
        )


def score(response: str, question: Mapping[str, Any]) -> float:
    """What the task's own `score_answer` says of a response: of what is in its last `<answer>`
    tags, or else of all of it.

    Where that raises, but not for the task's own answer, the response cannot be read: it is worth
    0, and the error output says so. Raises AlignerError where the question is not the one that was
    asked.
    """
    dataset, entry = _question(question["made_of"])
    if zlib.crc32(entry["question"].encode()) != question["checksum"]:
        raise AlignerError(
            f"reasoning_gym generates a different question for {question['made_of']} here than for"
            " the data; use the same versions of reasoning_gym and Python for both"
        )
    tagged = _ANSWER.findall(response)
    answer = (tagged[-1] if tagged else response).strip()
    try:
        return float(dataset.score_answer(answer, entry))
    except Exception as error:  # the library's tasks read answers each in its own way
        dataset.score_answer(entry["answer"], entry)
        shown = answer if len(answer) <= 80 else answer[:77] + "..."
        print(
            f"reasoning_gym: scored 0 for the answer {shown!r} to {question['made_of']}:"
            f" {type(error).__name__}: {error}",
            file=sys.stderr,
        )
        return 0.0


@lru_cache(maxsize=512)
def _question(task: str) -> tuple[Any, dict[str, Any]]:
    """The data set that has a question, and that, with `question`, `answer` and `metadata`; of a
    task's name, seed, level and config as JSON.
    """
    name, seed, level, config = json.loads(task)
    first, place = seed - seed % _TOGETHER, seed % _TOGETHER
    dataset = _dataset(name, first, level, json.dumps(config))
    _draw_from(seed)
    return dataset, dataset[place]


@lru_cache(maxsize=32)
def _dataset(name: str, seed: int, level: int | None, config: str) -> Any:
    """A few questions together: to make a data set may take longer than to make a question."""
    from reasoning_gym.factory import CURRICULA, DATASETS

    _draw_from(seed)
    kind, settings = DATASETS[name]
    if level is None:
        return kind(config=settings(**json.loads(config), seed=seed, size=_TOGETHER))
    curriculum = CURRICULA[name]()
    curriculum.set_global_level(level)
    chosen = curriculum.generate_configuration({"seed": seed, "size": _TOGETHER})
    return kind(config=replace(chosen, **json.loads(config)))


def _draw_from(seed: int) -> None:
    """Set the global random state, which some tasks draw from."""
    random.seed(seed)
    np.random.seed(seed)
