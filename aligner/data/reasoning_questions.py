"""Questions of reasoning_gym, and the scores of answers to them.

The functions run in child processes; only these import reasoning_gym. A question is a pure function
of its task, settings and seed: the global random state is set before it is generated, and
`child_function` gives all child processes the same hash seed for texts.
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
from aligner.schema.data import MAX_QUESTIONS

# One question in eight is held out for evaluation.
_HELD_OUT_DIVISOR = 8
# Maximum number of generated questions per returned question; the others are of the other split.
_MAX_ATTEMPTS = 64
# Distance between the first generator seeds of two consecutive seeds, so that they never overlap.
_SEED_STRIDE = MAX_QUESTIONS * _MAX_ATTEMPTS
# Number of questions per reasoning_gym dataset: constructing a dataset can take longer than
# generating a question.
_DATASET_SIZE = 64
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
    """Yield records of a task, for training or for evaluation.

    The checksum of a question's text determines whether the question is held out for evaluation, so
    that no seed can generate a held-out question for training.

    Args:
        name: The name of the task in reasoning_gym.
        questions: The number of records; fewer if the task has too few distinct questions.
        seed: The seed of the questions.
        difficulty: The first and the last level of the task's curriculum; the records increase in
            difficulty. None uses the task's default settings.
        config: Settings of the task.
        prompt: The text of the prompt, in which `{question}` stands for the question.
        messages: Whether a record has `messages` of one turn instead of a plain `prompt`.
        held_out: Whether the records are for evaluation.

    Yields:
        Records with `prompt` or `messages`; the task's own `answer`, which is null for some tasks;
        `task`; and `question`, the data that `score` needs.

    Raises:
        ConfigError: The task has no question for this purpose. Wrong settings raise the errors of
            reasoning_gym.
    """
    count = 0
    for index in range(questions * _MAX_ATTEMPTS):
        if count == questions:
            return
        level = (
            None
            if difficulty is None
            else difficulty[0] + (difficulty[1] + 1 - difficulty[0]) * count // questions
        )
        specification = json.dumps([name, seed * _SEED_STRIDE + index, level, dict(config)])
        _, entry = _build_question(specification)
        checksum = zlib.crc32(entry["question"].encode())
        if (checksum % _HELD_OUT_DIVISOR == 0) != held_out:
            continue

        count += 1
        text = prompt.replace("{question}", entry["question"])
        fields = {"messages": [{"role": "user", "content": text}]} if messages else {"prompt": text}
        yield fields | {
            "answer": entry["answer"],
            "task": name,
            "question": {"made_of": specification, "checksum": checksum},
        }
    if not count:
        raise ConfigError(
            f"{name}: the task has too few different questions: no question is available for"
            f" {'evaluation' if held_out else 'training'}"
        )


def score(response: str, question: Mapping[str, Any]) -> float:
    """Return the score of the task's own `score_answer` for a response.

    The answer is the content of the last `<answer>` tags, or the whole response without tags. If
    `score_answer` raises for this answer but not for the task's own answer, then the answer is
    malformed: its score is 0, and the error is written to stderr.

    Args:
        response: The response of the policy.
        question: The field `question` of the record.

    Raises:
        AlignerError: reasoning_gym generates another question than for the data.
    """
    dataset, entry = _build_question(question["made_of"])
    if zlib.crc32(entry["question"].encode()) != question["checksum"]:
        raise AlignerError(
            f"reasoning_gym generates a different question for {question['made_of']} here than for"
            " the data; use the same versions of reasoning_gym and Python for both"
        )
    tagged_answers = _ANSWER.findall(response)
    answer = (tagged_answers[-1] if tagged_answers else response).strip()
    try:
        return float(dataset.score_answer(answer, entry))
    except Exception as error:  # each task of the library parses answers in its own way
        # If the task's own answer fails as well, the task is broken: let the error pass.
        dataset.score_answer(entry["answer"], entry)
        excerpt = answer if len(answer) <= 80 else answer[:77] + "..."
        print(
            f"reasoning_gym: scored 0 for the answer {excerpt!r} to {question['made_of']}:"
            f" {type(error).__name__}: {error}",
            file=sys.stderr,
        )
        return 0.0


@lru_cache(maxsize=512)
def _build_question(specification: str) -> tuple[Any, dict[str, Any]]:
    """Return the dataset of a question, and its entry (`question`, `answer` and `metadata`).

    The specification is a JSON list of the task's name, the seed, the level and the config.
    """
    name, seed, level, config = json.loads(specification)
    first_seed = seed - seed % _DATASET_SIZE
    index = seed % _DATASET_SIZE
    dataset = _build_dataset(name, first_seed, level, json.dumps(config))
    _set_random_state(seed)
    return dataset, dataset[index]


@lru_cache(maxsize=32)
def _build_dataset(name: str, seed: int, level: int | None, config: str) -> Any:
    """Return the dataset of the `_DATASET_SIZE` questions from a seed on."""
    from reasoning_gym.factory import CURRICULA, DATASETS

    _set_random_state(seed)
    dataset_class, config_class = DATASETS[name]
    if level is None:
        return dataset_class(
            config=config_class(**json.loads(config), seed=seed, size=_DATASET_SIZE)
        )
    curriculum = CURRICULA[name]()
    curriculum.set_global_level(level)
    level_config = curriculum.generate_configuration({"seed": seed, "size": _DATASET_SIZE})
    return dataset_class(config=replace(level_config, **json.loads(config)))


def _set_random_state(seed: int) -> None:
    """Set the global random state, which some tasks use."""
    random.seed(seed)
    np.random.seed(seed)
