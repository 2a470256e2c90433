"""Tasks of reasoning_gym that prompts are made of, as the configuration says: `data.tasks`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from aligner.errors import ConfigError
from aligner.schema.options import is_finite_number, key_hint

LARGEST_SEED, MOST_QUESTIONS = 2**10 - 1, 2**16
TASK = "task"
"""The field of a prompt's record that names its task, by which rewards weigh and teachers are
chosen."""


@dataclass(frozen=True)
class ReasoningTask:
    """A task, and which of its questions."""

    name: str
    weight: float = 1.0
    questions: int = 1000
    """So many are learned from, pass by pass."""
    seed: int = 0
    difficulty: tuple[int, int] | None = None
    """The level of its curriculum at the first question and at the last; None: the task's own
    defaults."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The task's own settings."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Our name of a record's field to that of `reasoning_questions.questions`; none: `data.fields`.
    """


_ENTRIES = tuple(entry.name for entry in fields(ReasoningTask))


def reasoning_tasks(tasks: Sequence[Any]) -> tuple[ReasoningTask, ...]:
    """The tasks of `data.tasks`, each a name or a mapping. Raises ConfigError with one line for
    each thing that is wrong."""
    entries = [{"name": task} if isinstance(task, str) else task for task in tasks]
    if problems := [
        problem
        for place, entry in enumerate(entries)
        for problem in _problems(f"data.tasks[{place}]", entry)
    ]:
        raise ConfigError("\n".join(problems))
    return tuple(
        ReasoningTask(**(entry | {"difficulty": _levels(entry.get("difficulty"))}))
        for entry in entries
    )


def _levels(difficulty: Any) -> tuple[int, int] | None:
    if difficulty is None:
        return None
    return (
        (difficulty, difficulty) if isinstance(difficulty, int) else (difficulty[0], difficulty[1])
    )


def _problems(key: str, entry: Any) -> Iterator[str]:
    if not isinstance(entry, Mapping):
        yield (
            f"{key}={entry}: expected the name of a task, or a mapping with name, got"
            f" {type(entry).__name__}"
        )
        return
    if "name" not in entry:
        yield f"{key}.name: missing"
    for name, value in entry.items():
        if name not in _ENTRIES:
            hint = key_hint(
                key,
                name,
                _ENTRIES,
                f"allowed: {', '.join(_ENTRIES)}; put the task's settings in config",
            )
            yield f"{key}.{name}: unknown key; {hint}"
        elif wanted := _wanted(name, value):
            yield f"{key}.{name}={value}: must be {wanted}"


def _wanted(name: str, value: Any) -> str | None:
    """What an entry must be, where it is not."""
    if name == "name":
        return None if isinstance(value, str) and value else "the name of a task"
    if name == "weight":
        return (
            None
            if is_finite_number(value) and value > 0
            else "a finite number above 0; remove the task if it should not be used"
        )
    if name == "questions":
        return (
            None
            if _is_level(value) and 0 < value <= MOST_QUESTIONS
            else f"an integer from 1 to {MOST_QUESTIONS}"
        )
    if name == "seed":
        return (
            None
            if _is_level(value) and value <= LARGEST_SEED
            else f"an integer from 0 to {LARGEST_SEED}"
        )
    if name == "fields":
        good = isinstance(value, Mapping) and all(
            isinstance(theirs, str) for theirs in value.values()
        )
        return None if good else "a mapping from aligner's field names to the record's"
    if name == "config":
        return None if isinstance(value, Mapping) else "a mapping of the task's settings"
    levels = [value] if not isinstance(value, list) else value
    good = value is None or (
        len(levels) in (1, 2)
        and all(map(_is_level, levels))
        and (value is not levels or len(levels) == 2)
    )
    return None if good else "a level (an integer, at least 0), or two levels, [FIRST, LAST]"


def _is_level(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
