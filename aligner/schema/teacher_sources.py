"""The models that teach, as the configuration says: one, or several with weights and tasks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aligner.errors import ConfigError
from aligner.schema import TeacherConfig
from aligner.schema.options import is_finite_number, key_hint
from aligner.schema.reasoning_tasks import TASK

_ENTRIES = ("path", "weight", "tasks")


@dataclass(frozen=True)
class TeacherSource:
    """A model that teaches."""

    key: str
    """Where the configuration has it: `teacher`, or `teacher.sources.NAME`."""
    path: str
    weight: float = 1.0
    """Its share beside a sample's other teachers."""
    tasks: tuple[str, ...] = ()
    """Of the prompts that it is for; empty: of all."""


def teacher_sources(teacher: TeacherConfig) -> tuple[TeacherSource, ...]:
    """The teachers, in the configuration's order. Raises ConfigError with one line for each thing
    that is wrong."""
    problems = [
        problem
        for name, entries in teacher.sources.items()
        for problem in _problems(_key(name), entries)
    ]
    if teacher.path is not None and teacher.sources:
        problems.append(
            "teacher.sources: is not supported with teacher.path; list all teachers in"
            " teacher.sources, or set only teacher.path"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    if teacher.path is not None:
        return (TeacherSource("teacher", teacher.path),)
    return tuple(
        TeacherSource(
            _key(name),
            entries["path"],
            float(entries.get("weight", 1.0)),
            tuple(entries.get("tasks", ())),
        )
        for name, entries in teacher.sources.items()
    )


def teacher_shares(sources: Sequence[TeacherSource], metadata: Mapping[str, Any]) -> list[float]:
    """What part each teacher has in a prompt's samples, 1 in all, by what its record says about it.

    Raises ConfigError where none is for its task.
    """
    task = metadata.get(TASK)
    weights = [
        source.weight if not source.tasks or task in source.tasks else 0.0 for source in sources
    ]
    if not any(weights):
        known = sorted({one for source in sources for one in source.tasks})
        raise ConfigError(
            f"teacher.sources: no teacher for a prompt with {TASK}={task!r}; the teachers are for"
            f" the tasks {', '.join(known)}"
        )
    return [weight / sum(weights) for weight in weights]


def _key(name: str) -> str:
    return f"teacher.sources.{name}"


def _problems(key: str, entries: Any) -> Iterator[str]:
    if not isinstance(entries, Mapping):
        yield (
            f"{key}={entries}: expected a mapping with path and optionally weight and tasks, got"
            f" {type(entries).__name__}"
        )
        return
    for entry, value in entries.items():
        if entry not in _ENTRIES:
            hint = key_hint(key, entry, _ENTRIES, f"allowed in {key}: {', '.join(_ENTRIES)}")
            yield f"{key}.{entry}: unknown key; {hint}"
        elif entry == "path" and (not isinstance(value, str) or not value):
            yield f"{key}.path={value}: expected a string, got {type(value).__name__}"
        elif entry == "weight" and not (is_finite_number(value) and value > 0):
            yield (
                f"{key}.weight={value}: must be a finite number above 0; remove the teacher if it"
                " should not be used"
            )
        elif entry == "tasks" and not (
            isinstance(value, list) and value and all(isinstance(one, str) for one in value)
        ):
            yield (
                f"{key}.tasks={value}: expected a list of task names; remove this key for a"
                " teacher of all tasks"
            )
    if "path" not in entries:
        yield f"{key}.path: missing"
