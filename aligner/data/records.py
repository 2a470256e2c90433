"""Records as files have them, and what becomes of the bad ones."""

import codecs
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from aligner.child_function import ChildFunction, ChildLost, ChildRaised
from aligner.data.field_names import field_value
from aligner.errors import ConfigError
from aligner.schema import DataConfig
from aligner.schema.data_sources import FUNCTION, DataSource, data_sources, is_dataset
from aligner.schema.templates import (
    filled,
    optional_fields,
    template_fields,
    without_empty,
)
from aligner.values import is_finite_number

Example = TypeVar("Example")
_SUFFIXES = ("jsonl", "txt")


class BadRecord(ConfigError):
    """A record is not as it must be; says where it was read, and which field is wrong."""


class LeftOut(BadRecord):
    """A prompt is not among those that are wanted, such as too long; its record is left out
    whatever becomes of bad ones."""


@dataclass(frozen=True)
class Line:
    """A record before it is parsed."""

    content: bytes | Mapping[str, Any]
    """A line of a file, or the fields themselves."""
    origin: str
    """Where it was read, for messages: FILE:LINE, or DIRECTORY[INDEX]."""
    is_json: bool = True
    """Whether a line of a file is a JSON object; otherwise it is a prompt."""


@dataclass(frozen=True)
class Record:
    """Fields by their names, which are ours."""

    values: Mapping[str, Any]
    origin: str

    def text(self, name: str) -> str:
        """A field that must be a text, and not an empty one."""
        value = self._value(name, str, "a string")
        if not value.strip():
            raise BadRecord(f"{self.origin}: field `{name}` is empty")
        return value

    def items(self, name: str) -> list[Any]:
        """A field that must be a list, and not an empty one."""
        value = self._value(name, list, "a list")
        if not value:
            raise BadRecord(f"{self.origin}: field `{name}` is an empty list")
        return value

    def number(self, name: str) -> float:
        """A field that must be a finite number."""
        value = self._value(name, (int, float), "a number")
        if not is_finite_number(value):
            raise BadRecord(f"{self.origin}: field `{name}` is {value}, must be a finite number")
        return float(value)

    def _value(self, name: str, kind: type | tuple[type, ...], wanted: str) -> Any:
        if name not in self.values:
            raise missing(self.origin, name, f" ({wanted})", self.values)
        value = self.values[name]
        if not isinstance(value, kind):
            raise BadRecord(
                f"{self.origin}: field `{name}` must be {wanted}, got {type(value).__name__}"
            )
        return value


def missing(origin: str, name: str, wanted: str, values: Mapping[str, Any]) -> BadRecord:
    """That a record has no field of a name."""
    return BadRecord(
        f"{origin}: record lacks field `{name}`{wanted}; fields of the record:"
        f" {', '.join(values) or 'none'}"
    )


def read_examples(
    data: DataConfig, parse: Callable[[Record], Example]
) -> tuple[list[list[Example]], list[float], list[str]]:
    """Each source's examples, the sources' weights, and notices for a person, a line each.

    `parse` raises BadRecord for a record that it cannot use: an error, or left out and noticed with
    `data.skip_bad_records`. Raises ConfigError for a source that cannot be read or has nothing to
    use.
    """
    sources, skip = data_sources(data), data.skip_bad_records
    loaded = [source_examples(source, parse, skip=skip) for source in sources]
    if not sources:
        loaded = [given_examples(data.prompts, "data.prompts", parse, skip=skip)]
    notices = [notice for _, noticed in loaded for notice in noticed]
    return (
        [examples for examples, _ in loaded],
        [source.weight for source in sources] or [1.0],
        notices,
    )


def source_examples(
    source: DataSource, parse: Callable[[Record], Example], *, skip: bool = False
) -> tuple[list[Example], list[str]]:
    """One source's examples and notices, as `read_examples`."""
    lines = read_lines(
        source.path, f"{source.key}.path=", timeout_s=source.timeout_s, arguments=source.arguments
    )
    return convert(lines, parse, source.given_as, skip=skip, fields=source.fields)


def given_examples(
    prompts: Sequence[str], key: str, parse: Callable[[Record], Example], *, skip: bool = False
) -> tuple[list[Example], list[str]]:
    """Those of prompts that are given in place as the configuration's `key`, as `read_examples`."""
    lines = [Line({"prompt": text}, f"{key}[{index}]") for index, text in enumerate(prompts)]
    return convert(lines, parse, key, skip=skip)


def has_steps(data: DataConfig) -> bool:
    """Whether the records are labeled steps: whether the first JSON object has `steps`. Raises as
    `read_examples` does."""
    source = data_sources(data)[0]
    for line in read_lines(
        source.path, f"{source.key}.path=", timeout_s=source.timeout_s, arguments=source.arguments
    ):
        try:
            return "steps" in _record(line, source.fields).values
        except BadRecord:
            if not data.skip_bad_records:
                raise
    raise ConfigError(
        f"{source.given_as}: no record can be parsed; all were skipped (data.skip_bad_records=true)"
    )


def convert(
    lines: Iterable[Line],
    parse: Callable[[Record], Example],
    what: str,
    *,
    skip: bool = False,
    fields: Mapping[str, str] | None = None,
) -> tuple[list[Example], list[str]]:
    """What becomes of the lines, and a notice if any was left out; `fields` are our names of fields
    to the data's own.

    A line that `parse` raises BadRecord for ends it with that, or is left out with `skip`, as one
    always is for LeftOut. Raises ConfigError where all were; `what` is where the lines are from.
    """
    kept: list[Example] = []
    bad: list[BadRecord] = []
    for line in lines:
        try:
            kept.append(parse(_record(line, fields or {})))
        except BadRecord as error:
            if not (skip or isinstance(error, LeftOut)):
                raise
            bad.append(error)
    if not bad:
        return kept, []
    if not kept:
        raise ConfigError(
            f"{what}: none of the {len(bad)} records can be used; first problem: {bad[0]}"
        )
    total = len(bad) + len(kept)
    return kept, [f"{what}: skipped {len(bad)} of {total} records; first problem: {bad[0]}"]


def read_lines(
    path: Path,
    key: str,
    kind: str | None = None,
    timeout_s: float | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> list[Line]:
    """The lines of a file, of standard input where the path is `-`, or the records of a data set's
    directory or a function.

    `kind` is jsonl or txt; where None, what the file's suffix says, and txt on standard input.
    `key` is what the path was given with, for messages; `timeout_s` is a function's deadline,
    `arguments` what it is called with. Raises ConfigError for what cannot be read or is empty.
    """
    if str(path).startswith(FUNCTION):
        return list(_function_lines(path, key, timeout_s, arguments or {}))
    if path.is_dir():
        return list(_dataset_lines(path, key))
    standard_input = str(path) == "-"
    kind = kind or ("txt" if standard_input else path.suffix.removeprefix("."))
    if kind not in _SUFFIXES:
        allowed = ", ".join(f".{suffix}" for suffix in _SUFFIXES)
        raise ConfigError(f"{key}{path}: unsupported file type {path.suffix!r}; allowed: {allowed}")
    try:
        content = sys.stdin.buffer.read() if standard_input else path.read_bytes()
        lines = (
            content.removeprefix(codecs.BOM_UTF8)
            .replace(b"\r\n", b"\n")
            .removesuffix(b"\n")
            .split(b"\n")
        )
    except OSError as error:
        raise ConfigError(f"{key}{path} cannot be read: {error}") from error
    if lines == [b""]:
        raise ConfigError(f"{key}{path}: the file is empty")
    name = "standard input" if standard_input else str(path)
    return [
        Line(line, f"{name}:{number}", is_json=kind == "jsonl")
        for number, line in enumerate(lines, start=1)
    ]


def _function_lines(
    path: Path, key: str, timeout_s: float | None, arguments: Mapping[str, Any]
) -> Iterator[Line]:
    module, _, name = str(path).removeprefix(FUNCTION).partition(":")
    function = ChildFunction(module, name, through=f"{__name__}:yielded", deadline_s=timeout_s)
    try:
        records = function(dict(arguments))
    except ChildRaised as error:
        raise ConfigError(f"{key}{path}: the function raised {error}") from error
    except ChildLost as error:
        raise ConfigError(f"{key}{path}: the function {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{key}{path}: {error}; expected {FUNCTION}MODULE:CALLABLE") from error
    finally:
        function.close()
    if not records:
        raise ConfigError(f"{key}{path}: the function yielded no records")
    for index, (values, kind) in enumerate(records):
        if values is None:
            raise ConfigError(
                f"{key}{path}[{index}]: expected a mapping of field names to values, got {kind}"
            )
        yield Line(values, f"{path}[{index}]")


def yielded(
    function: Callable[..., Iterable[Any]], arguments: Mapping[str, Any]
) -> list[tuple[dict[str, Any] | None, str]]:
    """The records that a function yields, None for what is no mapping, and their types: how a child
    process calls one."""
    return [
        (dict(values) if isinstance(values, Mapping) else None, type(values).__name__)
        for values in function(**arguments)
    ]


def _dataset_lines(path: Path, key: str) -> Iterator[Line]:
    if not is_dataset(path):
        raise ConfigError(
            f"{key}{path}: the directory is not a Hugging Face dataset; expected a single split"
            " saved with Dataset.save_to_disk"
        )
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{key}{path}: a Hugging Face dataset requires the datasets package; install it with"
            f" pip install 'aligner[datasets]': {error}"
        ) from error
    try:
        dataset = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}{path} cannot be read: {error}") from error
    if not len(dataset):
        raise ConfigError(f"{key}{path}: the dataset is empty")
    for index, values in enumerate(dataset):
        # Every record of a data set has every field; those that one lacks are null.
        yield Line(
            {name: value for name, value in values.items() if value is not None}, f"{path}[{index}]"
        )


def _record(line: Line, names: Mapping[str, str]) -> Record:
    """A line's fields under our names, `names` being ours to the data's, or to templates of these.

    Raises BadRecord where it has none, or lacks one.
    """
    theirs = _fields(line)
    values = {name: value for name, value in theirs.items() if name not in names.values()}
    for ours, name in names.items():
        values[ours] = _mapped(line.origin, theirs, ours, name)
        # the tokens that the record has are those of the field in whose place it comes
        if name != ours and ours in theirs:
            for drawn in (f"{ours}_tokens", *(("tokens", "drawn") if ours == "response" else ())):
                values.pop(drawn, None)
    return Record(values, line.origin)


def _mapped(origin: str, theirs: Mapping[str, Any], ours: str, name: str) -> Any:
    """Return what `fields` maps to one of our fields: the value of a field, of an entry of a field
    (`reward_model.ground_truth`), or a filled template.

    Raises BadRecord for a field that the record lacks, unless the template has it as `{name?}`.
    """
    optional = {
        field: _text(theirs[field])
        for field in optional_fields(name)
        if theirs.get(field) is not None
    }
    template = without_empty(name, optional)
    placed = template_fields(template)
    if not placed:
        value = field_value(theirs, name)
        if value is None and name not in theirs:
            raise missing(origin, name, f", which `fields` maps to `{ours}`", theirs)
        # RLVR data store the one right answer as a list.
        is_single = ours == "answer" and isinstance(value, list) and len(value) == 1
        return value[0] if is_single else value

    for field in placed:
        if field not in theirs:
            raise missing(origin, field, f", which `fields` maps to `{ours}`", theirs)
    return filled(template, {field: _text(theirs[field]) for field in placed})


def _text(value: Any) -> str:
    """A field's value in a text; what is none as JSON has it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _fields(line: Line) -> Mapping[str, Any]:
    if not isinstance(line.content, bytes):
        return line.content
    try:
        text = line.content.decode()
    except UnicodeDecodeError as error:
        raise BadRecord(f"{line.origin}: not valid UTF-8: {error}") from error
    if not line.is_json:
        return {"prompt": text}
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"{line.origin}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise BadRecord(f"{line.origin}: expected a JSON object, got {type(values).__name__}")
    return values
