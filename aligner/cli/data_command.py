"""`aligner data`: the first records of a file as the model sees them, and a summary of the file.

The records are read, converted and tokenized by the code that a launch uses.
"""

import argparse
import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from aligner.cli.compositions import (
    choose_values,
    open_tokenizer_directory,
    print_data_notices,
)
from aligner.config.compose import compose_config, find_user_keys, quote
from aligner.config.defaults import DATA_RULES
from aligner.data.data_statistics import choose_record_fields, sample_records
from aligner.data.examples import ExampleParser, build_run_parser
from aligner.data.prompts import PromptParser, build_prompt_parser
from aligner.data.record_layouts import LAYOUTS, find_layout
from aligner.data.record_preview import (
    OUTCOMES,
    LengthSummary,
    MaskedText,
    Outcome,
    RecordPreview,
    preview_record,
    preview_text,
    summarize_lengths,
)
from aligner.data.record_sources import RawRecord, RecordSource, is_blank, open_record_source
from aligner.data.records import BadRecord, open_source, to_record
from aligner.data.tokenizer import Tokenizer, build_run_tokenizer
from aligner.errors import ConfigError
from aligner.models.model_source import resolve_hub_models
from aligner.schema import Config
from aligner.schema.data import AUTO_LAYOUT, NO_LAYOUT
from aligner.schema.data_sources import FUNCTION, parse_data_sources
from aligner.schema.keys import get_value, with_values
from aligner.terminal import format_json

_MAX_WIDTH = 100
_LABEL_WIDTH = 10
# Characters of a part of a text that are shown at its start and at its end without `--full`.
_SHOWN_START = 600
_SHOWN_END = 300
# Characters of a field that are shown.
_SHOWN_FIELD = 160
_ASSISTANT = "assistant"
# Fields of published formats that contain a response, in records without an `answer`.
_RESPONSE_FIELDS = ("response", "completion", "output", "generation", "generated_solution")
_LOSS_STYLE = "bold green"
_OTHER_STYLE = "dim"
# Text around the parts with a loss, on a console without colours.
_LOSS_MARKS = ("⟦", "⟧")


@dataclass(frozen=True)
class _View:
    """The records of a file under a configuration."""

    file: str
    """Path of the file."""
    config: Config
    """Configuration with the values that a launch would choose."""
    use_text: str
    """Algorithm that reads the records, and the reason if the command chose it."""
    layout_text: str
    """Names of the recognised layouts."""
    tokenizer: Path | None
    """Directory of the tokenizer; None without a model."""
    first: Sequence[RecordPreview]
    """The first records."""
    read: Sequence[RecordPreview]
    """The records that the summary describes."""
    records: int
    """Number of records of the file."""
    blank_lines: int

    @property
    def unit(self) -> str:
        """Unit of the lengths."""
        return "characters" if self.tokenizer is None else "tokens"

    @property
    def is_prompts(self) -> bool:
        """Whether the records are prompts."""
        return self.config.algorithm.generates_samples


def show_data(parsed: argparse.Namespace) -> None:
    """Print the first records of a file as the model sees them, and a summary of the file.

    Raises:
        ConfigError: The file or the configuration is invalid, or a launch would stop at an invalid
            record.
    """
    view = _read_view(parsed)
    if parsed.json:
        print(format_json(_describe(view)))
    else:
        console = Console(highlight=False)
        console = Console(highlight=False, width=min(console.width, _MAX_WIDTH))
        _print_view(view, console, is_full=parsed.full)
    _require_valid(view)


def _read_view(parsed: argparse.Namespace) -> _View:
    """Read the records of the command line."""
    if parsed.file.startswith("-"):
        raise ConfigError(f"{parsed.file}: must be a file or a directory")
    overrides, reason = _add_algorithm(parsed.overrides, parsed.file)
    # The path must be known to the composition: without it, a run does not read `data.format`.
    path_override = f"data.path={quote(parsed.file)}"
    config = compose_config([*overrides, path_override], parsed.config_dir, is_partial=True)
    config = with_values(config, {"data.sources": {}, "data.tasks": [], "data.prompts": []})
    config = resolve_hub_models(config, weights=False)
    has_model = config.model.source != "directory" or config.model.path is not None
    if not has_model:
        config = _choose_form(config)
    elif config.run.automatic:
        given_keys = find_user_keys(overrides, config, parsed.config_dir)
        config, _, statistics = choose_values(config, given_keys, DATA_RULES)
        if statistics is not None:
            print_data_notices(statistics)

    [source] = parse_data_sources(config.data)
    records = _NonBlankRecords(open_source(source))
    sampled_records, count = sample_records(records)
    first_records = list(itertools.islice(records, parsed.limit))
    layout_text = _describe_layouts(sampled_records, config)
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(open_tokenizer_directory(config)) if has_model else None
        parser = (
            None
            if directory is None
            else _build_parser(config, build_run_tokenizer(config, directory))
        )

        def preview(raw_record: RawRecord) -> RecordPreview:
            if parser is None:
                return preview_text(raw_record, source, config)
            return preview_record(raw_record, source, parser)

        return _View(
            parsed.file,
            config,
            reason or f"algorithm.trainer={config.algorithm.trainer}",
            layout_text,
            directory,
            [preview(record) for record in first_records],
            [preview(record) for record in sampled_records],
            count,
            records.blank_lines,
        )


class _NonBlankRecords:
    """The records of a source without empty lines, which are read anew in each iteration."""

    def __init__(self, source: RecordSource) -> None:
        self._source = source
        self.blank_lines = 0
        """Number of empty lines before the last record that was read."""

    def __iter__(self) -> Iterator[RawRecord]:
        blank_lines = 0
        for record in self._source.read():
            if is_blank(record):
                blank_lines += 1
                self.blank_lines = max(self.blank_lines, blank_lines)
            else:
                yield record


def _build_parser(config: Config, tokenizer: Tokenizer) -> PromptParser | ExampleParser[Any]:
    """Return the parser of the run's records."""
    if not config.algorithm.generates_samples:
        return build_run_parser(config, tokenizer)
    tools = None
    if config.environment.has_tools:
        from aligner.agents.tool_catalogue import list_tools, tool_schemas

        tools = tool_schemas(list_tools(config.environment))
    return build_prompt_parser(config, tokenizer, tools)


def _choose_form(config: Config) -> Config:
    """Return the configuration with the fields that a launch chooses; without a tokenizer, it
    chooses no lengths."""
    [source] = parse_data_sources(config.data)
    if not config.run.automatic or source.fields:
        return config
    records = _NonBlankRecords(open_source(source))
    sampled_records, _ = sample_records(records)
    choice = choose_record_fields(sampled_records, records, config)
    return with_values(config, {"data.fields": dict(choice.fields)}) if choice.fields else config


def _add_algorithm(overrides: Sequence[str], file: str) -> tuple[list[str], str]:
    """Return the overrides with an algorithm, and a description of the choice; the description is
    empty if the overrides contain the algorithm."""
    keys = {text.lstrip("+").partition("=")[0] for text in overrides}
    if keys & {"experiment", "algorithm", "algorithm.trainer"}:
        return [*overrides], ""
    records = _NonBlankRecords(open_record_source(Path(file), ""))
    if not file.startswith(FUNCTION) and not Path(file).exists():
        raise ConfigError(f"{file}: no such file or directory")
    values: Mapping[str, Any] = {}
    for raw_record in records:
        with contextlib.suppress(BadRecord):
            values = to_record(raw_record, {}).values
            break
    algorithm, reason = _find_algorithm(values)
    description = f"algorithm={algorithm}, because {reason}; set algorithm=NAME for another one"
    return [f"algorithm={algorithm}", *overrides], description


def _find_algorithm(values: Mapping[str, Any]) -> tuple[str, str]:
    """Return the algorithm that suits the fields of a record, and the reason."""
    if "steps" in values and "labels" in values:
        return "reward_model", "the records have `steps`"
    if "chosen" in values and "rejected" in values:
        return "dpo", "the records have `chosen` and `rejected`"
    if "answer" not in values:
        response = next((name for name in _RESPONSE_FIELDS if name in values), None)
        if response is not None:
            return "sft", f"the records have `{response}`"
        messages = values.get("messages")
        if isinstance(messages, list) and messages and _is_answer(messages[-1]):
            return "sft", "the conversations end with an answer"
    return "grpo", "the records have prompts"


def _is_answer(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == _ASSISTANT


def _describe_layouts(records: Sequence[RawRecord], config: Config) -> str:
    """Return the names of the layouts of records, most frequent first."""
    if config.data.format != AUTO_LAYOUT:
        name = config.data.format
        return f"{name}: {LAYOUTS[name].description}" if name in LAYOUTS else name
    counts: Counter[str | None] = Counter()
    for raw_record in records:
        with contextlib.suppress(BadRecord):
            counts[find_layout(to_record(raw_record, {}, NO_LAYOUT).values)] += 1
    if set(counts) <= {None}:
        return "no published layout; the records are not converted"
    if len(counts) == 1:
        [name] = filter(None, counts)
        return f"{name}: {LAYOUTS[name].description}"
    return ", ".join(
        f"{name or 'no published layout'} ({count} records)" for name, count in counts.most_common()
    )


def _print_view(view: _View, console: Console, *, is_full: bool) -> None:
    has_colors = console.color_system is not None
    _print_row(console, "file", view.file)
    _print_row(console, "layout", view.layout_text)
    if view.config.data.fields:
        fields = ", ".join(
            f"{name} = {json.dumps(source, ensure_ascii=False) if '{' in source else source}"
            for name, source in view.config.data.fields.items()
        )
        _print_row(console, "fields", fields)
    _print_row(console, "read for", view.use_text)
    if view.tokenizer is None:
        _print_row(
            console,
            "tokens",
            "no model, so only texts are shown, without a chat template, and lengths are in"
            " characters; add model.path=MODEL for tokens",
        )
    if not view.is_prompts:
        mark = "green, bold text" if has_colors else f"text in {' '.join(_LOSS_MARKS)}"
        _print_row(console, "loss", f"{mark} {_describe_loss(view)}")
    for number, record in enumerate(view.first, start=1):
        console.print()
        _print_record(console, view, record, number, is_full=is_full)
    console.print()
    for label, text in _summarize(view):
        _print_row(console, label, text)


def _print_row(console: Console, label: str, text: str) -> None:
    """Print a label, and a text in a column next to it."""
    margin = Text(f"{label:<{_LABEL_WIDTH}}", style="bold")
    for line in _wrap(console, Text(_escape(text)), _LABEL_WIDTH):
        console.print(margin + line, soft_wrap=True)
        margin = Text(" " * _LABEL_WIDTH)


def _print_indented(console: Console, text: Text, indent: int) -> None:
    """Print a text with `indent` spaces before each line."""
    for line in _wrap(console, text, indent):
        console.print(Text(" " * indent) + line, soft_wrap=True)


def _wrap(console: Console, text: Text, indent: int) -> Iterator[Text]:
    """Yield the lines of a text that leaves room for `indent` columns."""
    for line in text.wrap(console, max(20, console.width - indent)):
        line.rstrip()
        yield line


def _print_record(
    console: Console, view: _View, record: RecordPreview, number: int, *, is_full: bool
) -> None:
    """Print the texts and fields of a record."""
    roles = f"; roles: {', '.join(record.roles)}" if record.roles else ""
    outcome = "" if record.outcome == "used" else f" ({record.outcome})"
    title = f"record {number}{outcome}, {record.origin}{roles}"
    _print_indented(console, Text(_escape(title), style="bold"), 0)
    if record.problem:
        style = "red" if record.outcome == "invalid" else "yellow"
        _print_indented(console, Text(_escape(record.problem), style=style), 2)

    for text in record.texts:
        header = f"{text.name}, {_describe_length(view, text)}"
        _print_indented(console, Text(header, style="underline"), 2)
        body = _render_text(text, has_marks=console.color_system is None, is_full=is_full)
        _print_indented(console, body, 4)
    for name, value in record.fields.items():
        receiver = "to the reward: " if view.is_prompts else ""
        content = json.dumps(value, ensure_ascii=False, default=str)
        if len(content) > _SHOWN_FIELD and not is_full:
            content = content[:_SHOWN_FIELD] + "…"
        _print_indented(console, Text(_escape(f"{receiver}{name} = {content}")), 2)


def _describe_length(view: _View, text: MaskedText) -> str:
    if view.is_prompts:
        return f"{text.length} {view.unit}"
    return (
        f"{text.length} {view.unit}: {text.prompt_length} of the prompt,"
        f" {text.loss_length} with a loss"
    )


def _render_text(text: MaskedText, *, has_marks: bool, is_full: bool) -> Text:
    """Return a text whose parts with a loss are coloured, or marked by brackets."""
    result = Text()
    # A text without any loss, such as a prompt, is not dimmed.
    other_style = _OTHER_STYLE if text.loss_length else ""
    for segment in text.segments:
        content = segment.text
        hidden = len(content) - _SHOWN_START - _SHOWN_END
        if hidden > 0 and not is_full:
            content = (
                f"{content[:_SHOWN_START]}… {hidden} characters (--full shows them)"
                f" …{content[-_SHOWN_END:]}"
            )
        content = _escape(content)
        if segment.has_loss and has_marks:
            content = content.join(_LOSS_MARKS)
        if segment.label:
            line_break = "\n" if result.plain else ""
            result.append(f"{line_break}{_escape(segment.label)}: ", "bold")
        result.append(content, _LOSS_STYLE if segment.has_loss else other_style)
    result.rstrip()
    return result


def _escape(text: str) -> str:
    """Return a text whose control characters, other than line breaks, are visible: they could
    change the terminal."""
    return "".join(
        character
        if character.isprintable() or character == "\n"
        else character.encode("unicode_escape").decode()
        for character in text
    )


def _describe_loss(view: _View) -> str:
    trainer = view.config.algorithm.trainer
    if trainer == "reward_model":
        return "is the part that is scored"
    if trainer == "dpo":
        return "is the part whose log-probs are trained on"
    return "is trained on"


def _summarize(view: _View) -> Iterator[tuple[str, str]]:
    """Yield the rows of the summary."""
    outcomes = Counter(record.outcome for record in view.read)
    parts = [f"{outcomes[name]} {name}" for name in OUTCOMES if outcomes[name]]
    is_sample = len(view.read) < view.records
    read_text = (
        f"{view.records}; of {len(view.read)} that were read, including the longest: "
        if is_sample
        else f"{view.records}: "
    )
    blank_text = f"; {view.blank_lines} empty lines" if view.blank_lines else ""
    yield "records", read_text + ", ".join(parts) + blank_text
    for label, summary, key in _list_lengths(view):
        limit_text = ""
        if summary.limit is not None:
            consequence = f", which {_describe_consequence(view, key)}" if summary.longer else ""
            limit_text = f"; {summary.longer} exceed {key}={summary.limit}{consequence}"
        yield (
            label,
            f"{summary.minimum} / {summary.median:g} / {summary.maximum} {view.unit}"
            f" (min / median / max){limit_text}",
        )
    for outcome in ("dropped", "invalid"):
        problem = _find_problem(view, outcome)
        if problem:
            yield outcome, f"first: {problem}"


def _list_lengths(view: _View) -> Iterator[tuple[str, LengthSummary, str]]:
    """Yield label, lengths and the key of the limit, of prompts and of responses."""
    parsed = [record for record in view.read if record.texts]
    rows = [
        ("prompts", [record.prompt_length for record in parsed], "data.max_prompt_tokens"),
        (
            "responses",
            [record.response_length for record in parsed if record.response_length is not None],
            "data.max_response_tokens",
        ),
    ]
    for label, lengths, key in rows:
        limit = None if view.tokenizer is None else get_value(view.config, key)
        summary = summarize_lengths(lengths, limit)
        if summary is not None:
            yield label, summary, key


def _describe_consequence(view: _View, key: str) -> str:
    """Return what happens to records above a limit."""
    data = view.config.data
    if key == "data.max_prompt_tokens" and data.long_prompts != "error":
        action = {
            "drop": "are skipped",
            "cut_start": "lose the start of the prompt",
            "cut_end": "lose the end of the prompt",
        }[data.long_prompts]
        return f"{action} (data.long_prompts={data.long_prompts})"
    if data.skip_bad_records:
        return "are skipped (data.skip_bad_records=true)"
    return "stop the launch"


def _find_problem(view: _View, outcome: Outcome) -> str:
    """Return the problem of the first record with an outcome; empty without one."""
    records = itertools.chain(view.first, view.read)
    return next((record.problem for record in records if record.outcome == outcome), "")


def _require_valid(view: _View) -> None:
    """Raise ConfigError if a launch would stop at a record."""
    invalid = sum(record.outcome == "invalid" for record in view.read)
    if invalid and not view.config.data.skip_bad_records:
        raise ConfigError(
            f"{_find_problem(view, 'invalid')}; {invalid} of {len(view.read)} records are invalid,"
            " and a launch stops at the first one; correct them, or set"
            " data.skip_bad_records=true to skip them"
        )


def _describe(view: _View) -> dict[str, Any]:
    """Return the JSON object of the records."""
    data = view.config.data
    outcomes = Counter(record.outcome for record in view.read)
    return {
        "file": view.file,
        "layout": view.layout_text,
        "format": data.format,
        "fields": dict(data.fields),
        "trainer": view.config.algorithm.trainer,
        "unit": view.unit,
        "records": view.records,
        "read": len(view.read),
        "empty_lines": view.blank_lines,
        "outcomes": {name: outcomes[name] for name in OUTCOMES},
        "lengths": {
            label: {**asdict(summary), "key": key} for label, summary, key in _list_lengths(view)
        },
        "first": [asdict(record) for record in view.first],
    }
