"""Parses the raw records of data sources, and chooses the fields that aligner uses.

`parse_records` turns the raw records of `aligner.data.record_sources` into examples, and raises or
skips the bad ones. `choose_fields` selects the record fields of published data formats for
`prompt`, `response` and `answer`, without losing a part of the prompt.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aligner.data.record_layouts import LayoutError, convert_record, find_named_layout
from aligner.data.record_sources import RawRecord, RecordSource, is_blank, open_record_source
from aligner.errors import ConfigError
from aligner.file_limits import check_depth, parse_json
from aligner.schema import DataConfig
from aligner.schema.data import AUTO_LAYOUT
from aligner.schema.data_sources import DataSource, parse_data_sources
from aligner.schema.templates import (
    drop_empty_fields,
    fill_template,
    find_optional_fields,
    find_required_fields,
)
from aligner.values import is_finite_number

Example = TypeVar("Example")


class BadRecord(ConfigError):
    """A record is not valid; the message names the record's origin and the field."""


class ExcludedRecord(BadRecord):
    """A record is valid, but the configuration excludes it, for example because its prompt is too
    long. It is skipped even if bad records are errors."""


@dataclass(frozen=True)
class Record:
    """The fields of a parsed record, by aligner's field names."""

    values: Mapping[str, Any]
    origin: str
    """Origin of the record for messages: FILE:LINE, or DIRECTORY[INDEX]."""

    def get_text(self, name: str) -> str:
        """Return a field; raise BadRecord if it is not a string or only whitespace."""
        value = self._get(name, str, "a string")
        if not value.strip():
            raise BadRecord(f"{self.origin}: field `{name}` is empty")
        return value

    def get_list(self, name: str) -> list[Any]:
        """Return a field; raise BadRecord if it is not a list or an empty list."""
        value = self._get(name, list, "a list")
        if not value:
            raise BadRecord(f"{self.origin}: field `{name}` is an empty list")
        return value

    @property
    def has_messages(self) -> bool:
        """Whether the prompt is chat messages; they may be invalid.

        Without a field for the prompt, the prompt is the beginning of the chosen conversation.
        """
        if "prompt" in self.values:
            return isinstance(self.values["prompt"], list)
        return "messages" in self.values or isinstance(self.values.get("chosen"), list)

    def get_number(self, name: str) -> float:
        """Return a field; raise BadRecord if it is not a finite number."""
        value = self._get(name, (int, float), "a number")
        if not is_finite_number(value):
            raise BadRecord(f"{self.origin}: field `{name}` is {value}, must be a finite number")
        return float(value)

    def _get(self, name: str, kind: type | tuple[type, ...], description: str) -> Any:
        if name not in self.values:
            raise missing_field_error(self.origin, name, f" ({description})", self.values)
        value = self.values[name]
        if not isinstance(value, kind):
            raise BadRecord(
                f"{self.origin}: field `{name}` must be {description}, got {type(value).__name__}"
            )
        return value


def missing_field_error(
    origin: str, name: str, explanation: str, values: Mapping[str, Any]
) -> BadRecord:
    """Return the error for a record without a field.

    Args:
        origin: The origin of the record.
        name: The name of the missing field.
        explanation: A text that follows the name in the message.
        values: The fields of the record.
    """
    layout = find_named_layout(values)
    hint = f"; the records have the layout data.format={layout}" if layout else ""
    return BadRecord(
        f"{origin}: record lacks field `{name}`{explanation}; fields of the record:"
        f" {', '.join(values) or 'none'}{hint}"
    )


@dataclass
class RecordCounts:
    """Numbers of records that were read, and of those that became no example."""

    records: int = 0
    """Number of records, without blank lines."""
    skipped: int = 0
    first_problem: str = ""
    """Message about the first skipped record."""
    blank_lines: int = 0

    def add(self, other: "RecordCounts") -> None:
        """Add the counts of the records that follow."""
        self.records += other.records
        self.skipped += other.skipped
        self.first_problem = self.first_problem or other.first_problem
        self.blank_lines += other.blank_lines

    def require_examples(self, source_name: str) -> None:
        """Raise ConfigError if all records were skipped.

        Args:
            source_name: The source of the records, for the message.
        """
        if self.records == self.skipped:
            problem = (
                f"none of the {self.skipped} records can be used; first problem:"
                f" {self.first_problem}"
                if self.records
                else "all lines are empty"
            )
            raise ConfigError(f"{source_name}: {problem}")

    def describe(self) -> list[str]:
        """Return notices about the records that became no example, without the source's name."""
        notices = []
        if self.skipped:
            notices.append(
                f"skipped {self.skipped} of {self.records} records; first problem:"
                f" {self.first_problem}"
            )
        if self.blank_lines:
            notices.append(f"skipped {self.blank_lines} empty lines")
        return notices


def open_source(source: DataSource) -> RecordSource:
    """Return the raw records of a source; see `open_record_source`."""
    return open_record_source(
        source.path, f"{source.key}.path=", timeout_s=source.timeout_s, arguments=source.arguments
    )


def read_source(
    source: DataSource, parse: Callable[[Record], Example], *, skip: bool = False
) -> tuple[list[Example], list[str]]:
    """Return the examples of one source, and notices; see `parse_records`."""
    return parse_records(
        open_source(source).read(),
        parse,
        source.setting_text,
        skip=skip,
        fields=source.fields,
        layout=source.layout,
    )


def has_steps(data: DataConfig) -> bool:
    """Return whether the records are labeled steps: whether the first JSON object has `steps`.

    Raises:
        ConfigError: The source cannot be read, or has no usable record.
    """
    source = parse_data_sources(data)[0]
    for raw_record in open_source(source).read():
        try:
            return "steps" in to_record(raw_record, source.fields, source.layout).values
        except BadRecord:
            if not data.skip_bad_records:
                raise
    raise ConfigError(
        f"{source.setting_text}: no record can be parsed; all were skipped"
        " (data.skip_bad_records=true)"
    )


def parse_records(
    raw_records: Iterable[RawRecord],
    parse: Callable[[Record], Example],
    source_name: str,
    *,
    skip: bool = False,
    fields: Mapping[str, str] | None = None,
    layout: str = AUTO_LAYOUT,
) -> tuple[list[Example], list[str]]:
    """Parse records.

    Args:
        raw_records: The records of one source.
        parse: Returns the example of a record, or raises BadRecord.
        source_name: The source of the records, for messages.
        skip: See `iterate_examples`.
        fields: The data's field names, or templates of them, by aligner's field names.
        layout: The layout of the records, see `data.format`.

    Returns:
        The examples, and notices for the user, one line each.

    Raises:
        ConfigError: A record is bad, or all records were skipped.
    """
    counts = RecordCounts()
    examples = list(
        iterate_examples(raw_records, parse, counts, skip=skip, fields=fields or {}, layout=layout)
    )
    if counts.records or counts.blank_lines:
        counts.require_examples(source_name)
    return examples, [f"{source_name}: {notice}" for notice in counts.describe()]


def iterate_examples(
    raw_records: Iterable[RawRecord],
    parse: Callable[[Record], Example],
    counts: RecordCounts,
    *,
    skip: bool,
    fields: Mapping[str, str],
    layout: str = AUTO_LAYOUT,
) -> Iterator[Example]:
    """Yield the examples of records, and count the records.

    Args:
        raw_records: The records.
        parse: Returns the example of a record, or raises BadRecord.
        counts: The counts, to which the records are added.
        skip: Whether bad records are skipped; otherwise the first one raises its error. Excluded
            records (ExcludedRecord) are always skipped.
        fields: The data's field names, or templates of them, by aligner's field names.
        layout: The layout of the records, see `data.format`.

    Raises:
        BadRecord: A record is bad.
    """
    for raw_record in raw_records:
        if is_blank(raw_record):
            counts.blank_lines += 1
            continue
        counts.records += 1
        try:
            example = parse(to_record(raw_record, fields, layout))
        except BadRecord as error:
            if not (skip or isinstance(error, ExcludedRecord)):
                raise
            counts.skipped += 1
            counts.first_problem = counts.first_problem or str(error)
            continue
        yield example


def to_record(
    raw_record: RawRecord, fields: Mapping[str, str], layout: str = AUTO_LAYOUT
) -> Record:
    """Return a record with aligner's field names.

    Args:
        raw_record: The raw record.
        fields: The data's field names, or templates of them, by aligner's field names. The
            conversion of the layout precedes it.
        layout: The layout of the record, see `data.format`.

    Raises:
        BadRecord: The raw record has no fields, is not in the layout, or lacks a field that
            `fields` names.
    """
    try:
        data_values = convert_record(_read_fields(raw_record), layout, fields)
    except LayoutError as error:
        raise BadRecord(f"{raw_record.origin}: {error}") from error
    if not fields:
        return Record(data_values, raw_record.origin)
    values = {name: value for name, value in data_values.items() if name not in fields.values()}
    for name, source in fields.items():
        values[name] = _map_field(raw_record.origin, data_values, name, source)
        # Stored token ids belong to the field that was replaced, not to its replacement.
        if source != name and name in data_values:
            for stale_field in (
                f"{name}_tokens",
                *(("tokens", "drawn") if name == "response" else ()),
            ):
                values.pop(stale_field, None)
    return Record(values, raw_record.origin)


def _map_field(origin: str, data_values: Mapping[str, Any], name: str, source: str) -> Any:
    """Return the value that `fields` maps to one of aligner's fields.

    Args:
        origin: The origin of the record, for error messages.
        data_values: The fields of the data.
        name: aligner's field name.
        source: A field name of the data, an entry of a field (`reward_model.ground_truth`), or a
            template.

    Raises:
        BadRecord: The record lacks a field of `source`, unless it is `{name?}` in a template.
    """
    optional_values = {
        field: _to_text(data_values[field])
        for field in find_optional_fields(source)
        if data_values.get(field) is not None
    }
    template = drop_empty_fields(source, optional_values)
    required_fields = find_required_fields(template)
    if not required_fields:
        value = get_field(data_values, source)
        if value is None and source not in data_values:
            raise missing_field_error(
                origin, source, f", which `fields` maps to `{name}`", data_values
            )
        # RLVR data store the one right answer as a list.
        is_single = name == "answer" and isinstance(value, list) and len(value) == 1
        return value[0] if is_single else value

    for field_name in required_fields:
        if field_name not in data_values:
            raise missing_field_error(
                origin, field_name, f", which `fields` maps to `{name}`", data_values
            )
    return fill_template(
        template, {field_name: _to_text(data_values[field_name]) for field_name in required_fields}
    )


def _to_text(value: Any) -> str:
    """Return the text of a field in a template; values other than texts become JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _read_fields(raw_record: RawRecord) -> Mapping[str, Any]:
    if not isinstance(raw_record.content, bytes):
        try:
            check_depth(raw_record.content)
        except ValueError as error:
            raise BadRecord(f"{raw_record.origin}: the record {error}") from error
        return raw_record.content
    try:
        text = raw_record.content.decode()
    except UnicodeDecodeError as error:
        raise BadRecord(f"{raw_record.origin}: not valid UTF-8: {error}") from error
    if not raw_record.is_json:
        return {"prompt": text}
    try:
        values = parse_json(text)
    except ValueError as error:
        raise BadRecord(f"{raw_record.origin}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise BadRecord(f"{raw_record.origin}: expected a JSON object, got {type(values).__name__}")
    return values


# Fields for `prompt`, most preferred first.
_PROMPTS = ("question", "query", "instruction", "problem", "input", "text")
# Fields for `response`: a full solution comes before a short answer.
_SOLUTIONS = (
    "solution",
    "output",
    "completion",
    "generation",
    "generated_solution",
    "long_answer",
    "answer",
)
# Fields for `answer`: a short answer comes before a full solution.
_ANSWERS = (
    "reward_model.ground_truth",
    "ground_truth",
    "expected_answer",
    "final_answer",
    "solution",
    "output",
)
# Texts that belong to the prompt, and that a blank line joins to it.
_COMPANIONS = ("input", "context", "passage", "document", "article", "paragraph")
# Fields that belong to the prompt, and that no template can join to it in the right form.
_UNJOINABLE = (
    "system",
    "system_prompt",
    "system_message",
    "choices",
    "options",
    "endings",
    "candidates",
    "history",
    "contexts",
    "ctxs",
    "documents",
    "passages",
    "paragraphs",
    "evidence",
    "hint",
    "premise",
    "story",
    "schema",
    "table",
    "starter_code",
    "examples",
    "few_shot",
)
# Fields with one choice each of a multiple-choice question, such as `A`, `option_a` or `opa`.
_CHOICE_FIELD = re.compile(
    r"[A-E]|(?:op|opt|option|choice|ending|sol|distractor)[ _]?(?:[A-Ea-e]|\d)"
)
_MEDIA = ("image", "images", "audio", "video", "videos")
# Fields that contain the prompt under aligner's own names.
_PROMPT_FIELDS = ("prompt", "messages", "chosen", "rejected")
# Entries of a message that describe its content; a prompt does not contain them as text.
_MESSAGE_LABELS = ("role", "type")
_TRAINERS_WITH_RESPONSE = ("sft", "teacher_scores")


class FieldChoiceError(ConfigError):
    """The record fields cannot be chosen without losing a part of the prompt."""


@dataclass(frozen=True)
class FieldChoice:
    """The fields chosen for a file of records."""

    fields: Mapping[str, str] = field(default_factory=dict)
    """Field names of the data, or templates of these, by aligner's field names."""
    notices: tuple[str, ...] = ()
    """Warnings about unused fields that look like a part of the prompt, one line each."""


def choose_fields(
    records: Sequence[Mapping[str, Any]],
    trainer: str,
    *,
    generates: bool,
    reads_answer: bool = True,
) -> FieldChoice:
    """Choose the fields of records without `data.fields`.

    Args:
        records: Some records of the data, at least one. The first record determines the names.
        trainer: `algorithm.trainer`.
        generates: Whether the run generates responses.
        reads_answer: Whether the reward is a function that compares with `answer`. Other rewards
            may read a field under its own name.

    Raises:
        FieldChoiceError: A field that looks like a part of the prompt cannot be joined to it.
    """
    first = records[0]
    learns_response = trainer in _TRAINERS_WITH_RESPONSE
    fields: dict[str, str] = {}
    prompt = None

    if "prompt" not in first and "messages" not in first and (generates or learns_response):
        prompt = _find_first_present(first, _PROMPTS)
        if prompt is not None:
            companions = _find_companions(records, prompt)
            fields["prompt"] = _join_fields([prompt, *companions]) if companions else prompt
            _require_joined(records, [prompt, *companions], fields["prompt"])

    if learns_response and "response" not in first and "messages" not in first:
        # Some records may have only a short answer; the parser reports them.
        response = next(
            (
                name
                for name in _SOLUTIONS
                if any(has_content(record.get(name)) for record in records)
            ),
            None,
        )
        if response is not None:
            fields["response"] = response

    if generates and reads_answer:
        answer = "answer" if "answer" in first else _find_first_present(first, _ANSWERS)
        if answer is not None:
            _require_single_answer(records, answer)
            is_list = any(isinstance(record.get(answer), list) for record in records)
            # The mapping of a field to itself unpacks lists of one answer (see `_map_field`).
            if answer != "answer" or is_list:
                fields["answer"] = answer

    notices = () if prompt is not None else tuple(_describe_unused_fields(records))
    return FieldChoice(fields, notices)


def _find_first_present(record: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if get_field(record, name) is not None), None)


def get_field(record: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field, or of an entry of an object field; None if there is none.

    The name of an entry is a path, such as `reward_model.ground_truth`.
    """
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def _join_fields(names: Sequence[str]) -> str:
    """Return a template of fields with blank lines between them; only the first is required."""
    first, *rest = names
    return "".join([f"{{{first}}}", *(f"\n\n{{{name}?}}" for name in rest)])


def _find_companions(records: Sequence[Mapping[str, Any]], prompt: str) -> list[str]:
    """Return the names of text fields that belong to the prompt in any of the records."""
    return [
        name
        for name in _COMPANIONS
        if name != prompt
        and any(isinstance(record.get(name), str) and record[name].strip() for record in records)
    ]


_PROMPT_PARTS = (*_UNJOINABLE, *_COMPANIONS, *_MEDIA, *_PROMPTS)


def is_prompt_part(name: str) -> bool:
    """Return whether a field looks like a part of the prompt by its name."""
    return _CHOICE_FIELD.fullmatch(name) is not None or name in _PROMPT_PARTS


def compile_prompt_part_pattern(known_names: Collection[str]) -> re.Pattern[bytes]:
    """Return a pattern that finds fields with a value in a line of JSON that look like a part of
    the prompt, except those with known names. A field that only a choice's name describes may be
    known."""
    names = [name for name in _PROMPT_PARTS if name not in known_names]
    alternatives = "|".join([*names, _CHOICE_FIELD.pattern])
    return re.compile(rf'"(?:{alternatives})"\s*:\s*(?!""|null|\[\]|\{{\}})'.encode())


def has_content(value: Any) -> bool:
    """Return whether a field's value contains any text or number."""
    return next(_iterate_texts(value), None) is not None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or not has_content(value)


def _find_lost_fields(
    records: Sequence[Mapping[str, Any]], used_fields: Sequence[str]
) -> Iterator[str]:
    """Yield the names of fields that look like a part of the prompt, and whose text the used
    fields do not contain."""
    names = dict.fromkeys(name for record in records for name in record if is_prompt_part(name))
    for name in names:
        if name not in used_fields and any(
            _is_lost(record, name, used_fields) for record in records
        ):
            yield name


def _is_lost(record: Mapping[str, Any], name: str, used_fields: Sequence[str]) -> bool:
    texts = list(_iterate_texts(record.get(name)))
    prompt = [text for key in used_fields for text in _iterate_texts(record.get(key))]
    if all(_contains("\n".join(prompt), text) for text in texts):
        return False
    # Alpaca's `text` repeats the whole record.
    repeats_prompt = name in _PROMPTS and all(_contains("\n".join(texts), text) for text in prompt)
    return not repeats_prompt


def _contains(prompt: str, text: str) -> bool:
    """Return whether a prompt contains a text, not as a part of another word or number."""
    return re.search(rf"(?<!\w){re.escape(text.strip())}(?!\w)", prompt) is not None


def _iterate_texts(value: Any) -> Iterator[str]:
    """Yield all non-empty texts and the numbers in a field's value."""
    if isinstance(value, str) and value.strip():
        yield value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield str(value)
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            if name not in _MESSAGE_LABELS:
                yield from _iterate_texts(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _iterate_texts(entry)


def _require_joined(
    records: Sequence[Mapping[str, Any]], used_fields: Sequence[str], template: str
) -> None:
    """Raise FieldChoiceError if the template of the prompt loses a part of the prompt."""
    non_text_fields = [
        name
        for name in used_fields[1:]
        if not all(_is_text(record.get(name)) for record in records)
    ]
    for name in (*non_text_fields, *_find_lost_fields(records, used_fields)):
        if name in _MEDIA:
            raise FieldChoiceError(
                f"data.fields: the record field `{name}` looks like a part of the prompt, but only"
                " text is supported; remove the field if the prompt is complete without it"
            )
        if name in non_text_fields or (name in _COMPANIONS and name not in _PROMPTS):
            # Companions that are not texts, such as lists of passages, cannot be joined.
            raise FieldChoiceError(
                f"data.fields: the record field `{name}` looks like a part of the prompt, but is"
                " not a text in every record; set data.fields with a template for the prompt, or"
                f" remove field `{name}`"
            )
        raise FieldChoiceError(
            f"data.fields: the record field `{name}` looks like a part of the prompt, and is"
            " not joined to it automatically; set the prompt yourself, for example"
            f" data.fields={{prompt: '{_format_template(template)}\\n\\n{{{name}}}'}}, or use"
            f" `messages`, or remove field `{name}`"
        )


def _require_single_answer(records: Sequence[Mapping[str, Any]], name: str) -> None:
    for record in records:
        value = get_field(record, name)
        if isinstance(value, list) and len(value) != 1:
            raise FieldChoiceError(
                f"data.fields: the record field `{name}` is a list of {len(value)} answers, but the"
                " reward compares with one answer; store one answer, or set data.fields yourself"
                " for a reward function that reads the list"
            )


def _format_template(template: str) -> str:
    """Return a template as the user writes it in a configuration."""
    return template.replace("\n", "\\n") if "{" in template else f"{{{template}}}"


def _describe_unused_fields(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for name in _find_lost_fields(records, _PROMPT_FIELDS):
        yield (
            f"the record field `{name}` looks like a part of the prompt, but the prompt does not"
            " contain it; set data.fields with a template for the prompt if it belongs there"
        )
