"""Sources of the training records in the configuration: one source, or several with weights."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aligner.errors import ConfigError, collect_problems
from aligner.schema import DataConfig
from aligner.schema.data import AUTO_LAYOUT
from aligner.schema.entries import Entries, Text, Weight, parse_entries
from aligner.schema.reasoning_tasks import parse_reasoning_tasks


class DataEntries(Entries):
    """Entries of `data.sources.NAME`."""

    path: Text
    weight: Weight = 1.0
    fields: dict[str, Any] | None = None
    """aligner's field names to the data's own; None means `data.fields`."""


@dataclass(frozen=True)
class DataSource:
    """A file, a directory or a function with records."""

    key: str
    """Dotted key of the source: `data`, `data.sources.NAME` or `data.tasks[INDEX]`."""
    path: Path
    """Path of the file or directory, or `function:MODULE:CALLABLE`."""
    weight: float = 1.0
    """Weight relative to the other sources."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """The data's field names or templates, by aligner's field names."""
    layout: str = AUTO_LAYOUT
    """Layout of the records: the value of `data.format`."""
    timeout_s: float = DataConfig.function_timeout_s
    """Timeout in seconds of a function that yields records."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function."""

    @property
    def is_function(self) -> bool:
        """Whether a Python function yields the records."""
        return str(self.path).startswith(FUNCTION)

    @property
    def setting_text(self) -> str:
        """Key with the path, for messages."""
        return f"{self.key}.path={self.path}"


def parse_data_sources(data: DataConfig) -> tuple[DataSource, ...]:
    """Return the sources, in the configuration's order; none if the prompts are in `data.prompts`.

    Raises:
        ConfigError: One line for each problem of the sources.
    """
    if data.tasks and data.path is None and not data.sources:
        return parse_task_sources(data, None)

    # The problems of all sources are collected, so that one launch reports all of them.
    problems = list(_find_source_problems(data))
    sources = []
    if data.path is not None:
        sources.append(
            DataSource(
                "data", Path(data.path), 1.0, data.fields, data.format, data.function_timeout_s
            )
        )
    for name, entries in data.sources.items():
        with collect_problems(problems):
            sources.append(_parse_source(f"data.sources.{name}", entries, data))
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(sources)


def _parse_source(key: str, entries: Any, data: DataConfig) -> DataSource:
    """Return the source of an entry of `data.sources`.

    Raises:
        ConfigError: One line for each problem of the entry.
    """
    source_entries: DataEntries = parse_entries(
        DataEntries, key, entries, expected="path and optionally weight and fields"
    )
    # An empty mapping is different from None: the source then uses aligner's own field names.
    fields = data.fields if source_entries.fields is None else source_entries.fields
    if problems := list(find_fields_problems(f"{key}.fields", fields)):
        raise ConfigError("\n".join(problems))
    return DataSource(
        key,
        Path(source_entries.path),
        source_entries.weight,
        fields,
        data.format,
        data.function_timeout_s,
    )


def parse_task_sources(data: DataConfig, held_out: int | None) -> tuple[DataSource, ...]:
    """Return a source for each of `data.tasks`.

    Args:
        data: Section `data`.
        held_out: Number of held-out questions per task for evaluation; None for the questions that
            are trained on.

    Raises:
        ConfigError: One line for each problem of the tasks.
    """
    tasks = parse_reasoning_tasks(data.tasks)
    if "{question}" not in data.task_prompt:
        raise ConfigError(
            f"data.task_prompt={data.task_prompt!r}: must contain {{question}}, the placeholder"
            " for the question of a task"
        )
    # The same function generates both sets; `held_out` selects disjoint questions.
    shared_arguments = {
        "prompt": data.task_prompt,
        "messages": data.task_messages,
        "held_out": held_out is not None,
    }
    sources = []
    for index, task in enumerate(tasks):
        arguments = task.model_dump(exclude={"weight", "fields"}) | shared_arguments
        arguments["questions"] = held_out or task.questions
        fields = task.fields or data.fields
        key = f"data.tasks[{index}]"
        sources.append(
            DataSource(
                key,
                _QUESTIONS_PATH,
                task.weight,
                fields,
                data.format,
                data.function_timeout_s,
                arguments,
            )
        )
    return tuple(sources)


FUNCTION = "function:"
"""Prefix of a path that stands for a Python function: `function:MODULE:CALLABLE`."""


_QUESTIONS_PATH = Path(f"{FUNCTION}aligner.data.reasoning_questions:questions")


FILE_SUFFIXES = ("jsonl", "json", "jsonl.gz", "json.gz", "csv", "parquet", "txt")
"""Suffixes of the files that contain records."""


def get_file_kind(path: Path) -> str:
    """Return the suffix of a file without its first dot, such as `jsonl` or `jsonl.gz`."""
    suffixes = path.suffixes[-2:] if path.suffix == ".gz" else path.suffixes[-1:]
    return "".join(suffixes).removeprefix(".")


def is_dataset(path: Path) -> bool:
    """Return whether a path is a split that Hugging Face datasets saved (`save_to_disk`)."""
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def _find_source_problems(data: DataConfig) -> Iterator[str]:
    """Yield the keys of sources that exclude each other, and the problems of `data.fields`."""
    if data.path is not None and data.sources:
        yield (
            "data.sources: is not supported with data.path; list all sources in data.sources, or"
            " set only data.path"
        )
    if data.tasks:
        other_key = "data.path" if data.path is not None else "data.sources"
        yield f"data.tasks: is not supported with {other_key}; set only one of them"
    if data.path is None and not data.sources and not data.prompts:
        yield (
            "data: no prompts or other records; set data.path=FILE, data.sources, data.tasks=[…]"
            " or data.prompts=[…]"
        )
    yield from find_fields_problems("data.fields", data.fields)


def find_fields_problems(key: str, fields: Any) -> Iterator[str]:
    """Yield a line for each problem of a mapping of field names.

    Args:
        key: Dotted key of the mapping.
        fields: Value of the key.
    """
    if not isinstance(fields, Mapping):
        yield (
            f"{key}={fields}: expected a mapping from aligner's field names to the data's, got"
            f" {type(fields).__name__}"
        )
        return
    for name, data_name in fields.items():
        if not isinstance(data_name, str) or not data_name:
            yield (
                f"{key}.{name}={data_name}: expected the name of a field, got"
                f" {type(data_name).__name__}"
            )
