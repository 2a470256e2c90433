"""Tasks of reasoning_gym in the configuration, `data.tasks`, from which prompts are generated."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from aligner.errors import ConfigError, collect_problems
from aligner.schema.data import MAX_QUESTIONS, MAX_SEED
from aligner.schema.entries import (
    Entries,
    Text,
    Weight,
    list_allowed_entries,
    make_field_with_message,
    parse_entries,
)


def _to_pair(difficulty: Any) -> Any:
    """Return (level, level) for a single level."""
    return (difficulty, difficulty) if isinstance(difficulty, int) else difficulty


_Level = Annotated[int, Field(ge=0, strict=True)]


class ReasoningTask(Entries):
    """A task of reasoning_gym, and the selection of its questions."""

    name: Text = make_field_with_message("must be the name of a task")
    """Name of the task in reasoning_gym."""
    weight: Weight = 1.0
    """Weight relative to the other tasks."""
    questions: int = make_field_with_message(
        f"must be an integer from 1 to {MAX_QUESTIONS}", default=1000, ge=1, le=MAX_QUESTIONS
    )
    """Number of different questions that are trained on."""
    seed: int = make_field_with_message(
        f"must be an integer from 0 to {MAX_SEED}", default=0, ge=0, le=MAX_SEED
    )
    difficulty: Annotated[tuple[_Level, _Level] | None, BeforeValidator(_to_pair)] = (
        make_field_with_message(
            "must be a level (an integer, at least 0), or two levels, [FIRST, LAST]",
            default=None,
            strict=False,
        )
    )
    """Levels of the task's curriculum at the first and the last question; None means the task's
    own defaults."""
    config: dict[str, Any] = make_field_with_message(
        "must be a mapping of the task's settings", default_factory=dict
    )
    """Settings of the task in reasoning_gym."""
    fields: dict[str, str] = make_field_with_message(
        "must be a mapping from aligner's field names to the record's", default_factory=dict
    )
    """Field names of `reasoning_questions.questions`, by aligner's field names; empty means
    `data.fields`."""


ReasoningTask.unknown_hint = (
    f"allowed: {', '.join(list_allowed_entries(ReasoningTask))}; put the task's settings in config"
)


def parse_reasoning_tasks(tasks: Sequence[Any]) -> tuple[ReasoningTask, ...]:
    """Parse the value of `data.tasks`.

    Args:
        tasks: List whose items are names of tasks or mappings with the fields of `ReasoningTask`.

    Raises:
        ConfigError: One line for each problem of the tasks.
    """
    problems: list[str] = []
    parsed_tasks = []
    for index, task in enumerate(tasks):
        key = f"data.tasks[{index}]"
        # A bare name is short for a mapping with only the name.
        entries = {"name": task} if isinstance(task, str) else task
        if not isinstance(entries, Mapping):
            problems.append(
                f"{key}={task}: expected the name of a task, or a mapping with name, got"
                f" {type(task).__name__}"
            )
            continue
        with collect_problems(problems):
            parsed_tasks.append(parse_entries(ReasoningTask, key, entries, expected="name"))
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(parsed_tasks)
