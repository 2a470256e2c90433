"""Where the records that a run learns from lie, as the configuration says: one source, or several with weights."""

from __future__ import annotations

import difflib
import importlib.util
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aligner.config.model_source import NOTHING, Coming, is_coming
from aligner.config.schema import Config, Data
from aligner.errors import ConfigError

_ENTRIES = ("path", "weight", "fields")
_RECORDS = {
    "online": "prompt",
    "preferences": "prompt",
    "sft": "demonstration",
    "dpo": "preference",
    "reward_model": "preference",
}


@dataclass(frozen=True)
class DataSource:
    """One file or directory of records."""

    key: str
    """Where the configuration has it: `data`, or `data.sources.NAME`."""
    path: Path
    weight: float = 1.0
    fields: Mapping[str, str] = field(default_factory=dict)
    """Our name of a field to the data's own."""

    @property
    def given_as(self) -> str:
        """The key and value that name it, for messages."""
        return f"{self.key}.path={self.path}"


def data_sources(data: Data) -> tuple[DataSource, ...]:
    """The sources, in the configuration's order; none where the prompts are given in place.

    Raises ConfigError with one line for each thing that is wrong.
    """
    problems = list(_misplaced(data))
    problems += [problem for key, entries in _entries(data) for problem in _source_problems(key, entries)]
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(
        DataSource(key, Path(entries["path"]), float(entries.get("weight", 1.0)), entries.get("fields", data.fields))
        for key, entries in _entries(data)
    )


FUNCTION = "function:"
"""What a path begins with that is a Python function: `function:MODULE:CALLABLE`."""


def is_dataset(path: Path) -> bool:
    """Whether a path is a directory that Hugging Face datasets saved: one split, not several."""
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def data_problems(config: Config, coming: Coming = NOTHING) -> Iterator[str]:
    """One line for each thing that is wrong with what is learned from, but for the records' content."""
    data, trainer = config.data, config.algorithm.trainer
    try:
        sources = data_sources(data)
    except ConfigError as error:
        yield str(error)
        return
    if not sources and not config.algorithm.generates:
        yield f"data.prompts: prompts alone are nothing for algorithm.trainer={trainer} to learn from; give data.path=FILE"
    if not sources and any(not prompt.strip() for prompt in data.prompts):
        yield "data.prompts: a prompt is empty"
    for source in sources:
        if not is_coming(source.path, coming) and (problem := path_problem(source.path, trainer)):
            yield f"{source.given_as}: {problem}"


def _misplaced(data: Data) -> Iterator[str]:
    if data.path is not None and data.sources:
        yield "data.sources: data.path is given as well; give all of them as sources, or data.path alone"
    if data.path is None and not data.sources and not data.prompts:
        yield "data: no prompts or other records; give data.path=FILE, data.sources or data.prompts=[…]"
    yield from fields_problems("data.fields", data.fields)


def _entries(data: Data) -> Iterator[tuple[str, Any]]:
    if data.path is not None:
        yield "data", {"path": data.path}
    for name, entries in data.sources.items():
        yield f"data.sources.{name}", entries


def _source_problems(key: str, entries: Any) -> Iterator[str]:
    if not isinstance(entries, Mapping):
        yield f"{key}={entries}: expected a mapping with path and, if wanted, weight and fields, got {type(entries).__name__}"
        return
    for entry, value in entries.items():
        if entry not in _ENTRIES:
            close = difflib.get_close_matches(str(entry), _ENTRIES, n=1)
            hint = f"did you mean {key}.{close[0]}?" if close else f"allowed in {key}: {', '.join(_ENTRIES)}"
            yield f"{key}.{entry}: unknown key; {hint}"
        elif entry == "fields":
            yield from fields_problems(f"{key}.fields", value)
        elif entry == "path" and (not isinstance(value, str) or not value):
            yield f"{key}.path={value}: expected text, got {type(value).__name__}"
        elif entry == "weight" and not _is_share(value):
            yield f"{key}.weight={value}: must be a finite number above 0; leave the source out if it is to have no share"
    if "path" not in entries:
        yield f"{key}.path: missing"


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def fields_problems(key: str, fields: Any) -> Iterator[str]:
    """One line for each thing that is wrong with the names of a source's fields."""
    if not isinstance(fields, Mapping):
        yield f"{key}={fields}: expected a mapping of our names to the data's, got {type(fields).__name__}"
        return
    for ours, theirs in fields.items():
        if not isinstance(theirs, str) or not theirs:
            yield f"{key}.{ours}={theirs}: expected the name of a field, got {type(theirs).__name__}"


def path_problem(path: Path, trainer: str) -> str | None:
    """What is wrong with a path of what a trainer learns from, if anything; the records are not read."""
    if str(path).startswith(FUNCTION):
        named = re.fullmatch(r"[\w.]+:\w+", str(path).removeprefix(FUNCTION))
        return None if named else f"must be {FUNCTION}MODULE:CALLABLE"
    if path.is_dir():
        return _directory_problem(path)
    allowed = (".jsonl", ".txt") if _RECORDS[trainer] == "prompt" else (".jsonl",)
    if path.suffix not in allowed:
        saved = "directories that Hugging Face datasets saved"
        return f"allowed are {' and '.join(allowed)} files, and {saved} (algorithm.trainer={trainer})"
    if not path.is_file():
        return "no such file"
    with path.open("rb") as lines:
        return None if any(line.strip() for line in lines) else f"the {_RECORDS[trainer]} file is empty"


def _directory_problem(path: Path) -> str | None:
    if (path / "dataset_dict.json").is_file():
        splits = sorted(split.name for split in path.iterdir() if is_dataset(split))
        return f"several splits; give one of them: {', '.join(str(path / split) for split in splits)}"
    if not is_dataset(path):
        return "a directory, but not one that Hugging Face datasets saved: state.json and dataset_info.json are missing"
    if importlib.util.find_spec("datasets") is None:
        return "reading it needs the datasets package; install the datasets extra: pip install 'aligner[datasets]'"
    return None
