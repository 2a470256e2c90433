"""Where the records that a run learns from lie, as the configuration says: one source, or several
with weights."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aligner.errors import ConfigError
from aligner.schema import DataConfig
from aligner.schema.options import is_finite_number, key_hint
from aligner.schema.reasoning_tasks import reasoning_tasks

_ENTRIES = ("path", "weight", "fields")


@dataclass(frozen=True)
class DataSource:
    """One file or directory of records."""

    key: str
    """Where the configuration has it: `data`, or `data.sources.NAME`."""
    path: Path
    weight: float = 1.0
    fields: Mapping[str, str] = field(default_factory=dict)
    """Our name of a field to the data's own."""
    timeout_s: float = DataConfig.function_timeout_s
    """For a function to yield its records."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """What a function is called with."""

    @property
    def given_as(self) -> str:
        """The key and value that name it, for messages."""
        return f"{self.key}.path={self.path}"


def data_sources(data: DataConfig) -> tuple[DataSource, ...]:
    """The sources, in the configuration's order; none where the prompts are given in place.

    Raises ConfigError with one line for each thing that is wrong.
    """
    if data.tasks and data.path is None and not data.sources:
        return task_sources(data, None)
    problems = list(_misplaced(data))
    problems += [
        problem for key, entries in _entries(data) for problem in _source_problems(key, entries)
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(
        DataSource(
            key,
            Path(entries["path"]),
            float(entries.get("weight", 1.0)),
            entries.get("fields", data.fields),
            data.function_timeout_s,
        )
        for key, entries in _entries(data)
    )


def task_sources(data: DataConfig, held_out: int | None) -> tuple[DataSource, ...]:
    """A source for each of `data.tasks`: what is learned from, or so many held-out questions of
    each.

    Raises ConfigError with one line for each thing that is wrong.
    """
    tasks = reasoning_tasks(data.tasks)
    if "{question}" not in data.task_prompt:
        raise ConfigError(
            f"data.task_prompt={data.task_prompt!r}: must contain {{question}}, the placeholder"
            " for the question of a task"
        )
    shared = {
        "prompt": data.task_prompt,
        "messages": data.task_messages,
        "held_out": held_out is not None,
    }
    sources = []
    for place, task in enumerate(tasks):
        arguments = asdict(task) | shared | {"questions": held_out or task.questions}
        del arguments["weight"], arguments["fields"]
        names = task.fields or data.fields
        key = f"data.tasks[{place}]"
        sources.append(
            DataSource(key, _QUESTIONS, task.weight, names, data.function_timeout_s, arguments)
        )
    return tuple(sources)


FUNCTION = "function:"
"""What a path begins with that is a Python function: `function:MODULE:CALLABLE`."""


_QUESTIONS = Path(f"{FUNCTION}aligner.data.reasoning_questions:questions")


def is_dataset(path: Path) -> bool:
    """Whether a path is a directory that Hugging Face datasets saved: one split, not several."""
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def _misplaced(data: DataConfig) -> Iterator[str]:
    if data.path is not None and data.sources:
        yield (
            "data.sources: is not supported with data.path; list all sources in data.sources, or"
            " set only data.path"
        )
    if data.tasks:
        given = "data.path" if data.path is not None else "data.sources"
        yield f"data.tasks: is not supported with {given}; set only one of them"
    if data.path is None and not data.sources and not data.prompts:
        yield (
            "data: no prompts or other records; set data.path=FILE, data.sources, data.tasks=[…]"
            " or data.prompts=[…]"
        )
    yield from fields_problems("data.fields", data.fields)


def _entries(data: DataConfig) -> Iterator[tuple[str, Any]]:
    if data.path is not None:
        yield "data", {"path": data.path}
    for name, entries in data.sources.items():
        yield f"data.sources.{name}", entries


def _source_problems(key: str, entries: Any) -> Iterator[str]:
    if not isinstance(entries, Mapping):
        yield (
            f"{key}={entries}: expected a mapping with path and optionally weight and fields, got"
            f" {type(entries).__name__}"
        )
        return
    for entry, value in entries.items():
        if entry not in _ENTRIES:
            hint = key_hint(key, entry, _ENTRIES, f"allowed in {key}: {', '.join(_ENTRIES)}")
            yield f"{key}.{entry}: unknown key; {hint}"
        elif entry == "fields":
            yield from fields_problems(f"{key}.fields", value)
        elif entry == "path" and (not isinstance(value, str) or not value):
            yield f"{key}.path={value}: expected a string, got {type(value).__name__}"
        elif entry == "weight" and not (is_finite_number(value) and value > 0):
            yield (
                f"{key}.weight={value}: must be a finite number above 0; remove the source if it"
                " should not be used"
            )
    if "path" not in entries:
        yield f"{key}.path: missing"


def fields_problems(key: str, fields: Any) -> Iterator[str]:
    """One line for each thing that is wrong with the names of a source's fields."""
    if not isinstance(fields, Mapping):
        yield (
            f"{key}={fields}: expected a mapping from aligner's field names to the data's, got"
            f" {type(fields).__name__}"
        )
        return
    for ours, theirs in fields.items():
        if not isinstance(theirs, str) or not theirs:
            yield (
                f"{key}.{ours}={theirs}: expected the name of a field, got {type(theirs).__name__}"
            )
