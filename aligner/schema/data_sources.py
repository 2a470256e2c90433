"""Where the records that a run learns from lie, as the configuration says: one source, or several
with weights."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aligner.errors import ConfigError
from aligner.schema import DataConfig
from aligner.schema.entries import Entries, Text, Weight, parse_entries
from aligner.schema.reasoning_tasks import reasoning_tasks


class DataEntries(Entries):
    """Entries of `data.sources.NAME`."""

    path: Text
    weight: Weight = 1.0
    fields: dict[str, Any] | None = None
    """aligner's field names to the data's own; None means `data.fields`."""


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
    """Return the sources, in the configuration's order; none if the prompts are in `data.prompts`.

    Raises:
        ConfigError: One line for each problem of the sources.
    """
    if data.tasks and data.path is None and not data.sources:
        return task_sources(data, None)

    problems = list(_misplaced(data))
    sources = []
    if data.path is not None:
        sources.append(
            DataSource("data", Path(data.path), 1.0, data.fields, data.function_timeout_s)
        )
    for name, entries in data.sources.items():
        try:
            sources.append(_source(f"data.sources.{name}", entries, data))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(sources)


def _source(key: str, entries: Any, data: DataConfig) -> DataSource:
    parsed: DataEntries = parse_entries(
        DataEntries, key, entries, expected="path and optionally weight and fields"
    )
    fields = data.fields if parsed.fields is None else parsed.fields
    if problems := list(fields_problems(f"{key}.fields", fields)):
        raise ConfigError("\n".join(problems))
    return DataSource(key, Path(parsed.path), parsed.weight, fields, data.function_timeout_s)


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
        arguments = task.model_dump(exclude={"weight", "fields"}) | shared
        arguments["questions"] = held_out or task.questions
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
