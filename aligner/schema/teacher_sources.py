"""Teachers in the configuration: one model, or several with weights and tasks."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from aligner.errors import ConfigError, collect_problems
from aligner.schema import TeacherConfig
from aligner.schema.data import TASK
from aligner.schema.entries import Entries, Text, Weight, make_field_with_message, parse_entries


class TeacherSource(Entries):
    """A frozen language model from which the policy is distilled."""

    key: str = Field(exclude=True)
    """Dotted key of the source: `teacher`, or `teacher.sources.NAME`."""
    path: Text
    """Hugging Face model directory."""
    weight: Weight = 1.0
    """Weight relative to the other teachers that score a sample."""
    tasks: tuple[str, ...] = make_field_with_message(
        "expected a list of task names; remove this key for a teacher of all tasks",
        default=(),
        min_length=1,
        strict=False,
    )
    """Tasks of the prompts that the teacher scores; empty means all prompts."""


def parse_teacher_sources(teacher: TeacherConfig) -> tuple[TeacherSource, ...]:
    """Return the teachers, in the configuration's order.

    Raises:
        ConfigError: One line for each problem of the teachers.
    """
    problems: list[str] = []
    sources = []
    for name, entries in teacher.sources.items():
        key = f"teacher.sources.{name}"
        with collect_problems(problems):
            sources.append(
                parse_entries(
                    TeacherSource,
                    key,
                    entries,
                    expected="path and optionally weight and tasks",
                    identity={"key": key},
                )
            )
    if teacher.path is not None and teacher.sources:
        problems.append(
            "teacher.sources: is not supported with teacher.path; list all teachers in"
            " teacher.sources, or set only teacher.path"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    if teacher.path is not None:
        return (TeacherSource(key="teacher", path=teacher.path),)
    return tuple(sources)


def compute_teacher_shares(
    sources: Sequence[TeacherSource], metadata: Mapping[str, Any]
) -> list[float]:
    """Return the share of each teacher in the samples of a prompt; the shares add up to 1.

    Args:
        sources: All teachers.
        metadata: Fields of the prompt's record.

    Raises:
        ConfigError: No teacher scores prompts of this task.
    """
    task = metadata.get(TASK)
    # The weights are normalized over the teachers of this task only.
    weights = [
        source.weight if not source.tasks or task in source.tasks else 0.0 for source in sources
    ]
    if not any(weights):
        known_tasks = sorted({name for source in sources for name in source.tasks})
        raise ConfigError(
            f"teacher.sources: no teacher for a prompt with {TASK}={task!r}; the teachers are for"
            f" the tasks {', '.join(known_tasks)}"
        )
    return [weight / sum(weights) for weight in weights]
