"""Prompts and responses of records as tokens, and endless streams of examples.

`ExampleStream` mixes and shuffles examples of several sources; `PromptStream` is such a stream of
prompts. A stream has no state except a position, so a run resumes exactly. `open_prompts` and
`open_evaluation_prompts` read the prompts of a run; the remaining functions tokenize prompts and
responses of records.

A plain prompt begins with the special tokens that the model's tokenizer puts before a text, such
as a beginning-of-sequence (BOS) token; a chat template renders its own special tokens.

Prompt and response are tokenized together, as in TRL: many tokenizers put a space before a text
that is tokenized alone, or merge the end of a prompt with the start of a response.
"""

import functools
import heapq
import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from aligner.data.checksums import combine_crc32
from aligner.data.control_tokens import unescape
from aligner.data.conversations import (
    PromptText,
    add_tools,
    get_prompt_messages,
    render_exchange,
    render_prompt,
)
from aligner.data.example_cache import (
    ExampleCache,
    list_inline_prompts,
    open_examples,
)
from aligner.data.example_table import (
    TOKENS,
    ExampleFormat,
    ExampleTable,
    Row,
    SelectedExamples,
)
from aligner.data.pass_rates import PassRates, PromptSelector, compute_pass_fractions
from aligner.data.record_sources import is_blank, open_record_source
from aligner.data.records import (
    BadRecord,
    ExcludedRecord,
    Record,
    parse_records,
    read_source,
)
from aligner.data.tokenizer import Tokenizer, Tools
from aligner.data.types import Prompt
from aligner.errors import AlignerError, ConfigError
from aligner.schema import Config, DataConfig
from aligner.schema.data import AUTO_LAYOUT
from aligner.schema.data_sources import DataSource, parse_task_sources
from aligner.schema.evaluation_suites import Suite, needs_prompt_messages

Example = TypeVar("Example")

# `json.dumps` with this option would create an encoder for each call.
_encode_json = json.JSONEncoder(ensure_ascii=False).encode

# Number of stream positions that are located per batch when the caller's need is unknown.
_LOCATION_BATCH = 1024


class ExampleStream(Generic[Example]):
    """An endless stream of the examples of one or more sources.

    The stream passes over each source again and again. With `shuffle`, every epoch of a source has
    its own random order. The result of each method is a pure function of the examples, the weights,
    the seed and the position, so that a checkpoint needs to store only a position.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[Example]],
        weights: Sequence[float] | None = None,
        *,
        seed: int,
        shuffle: bool,
        notices: Sequence[str] = (),
    ) -> None:
        """Create a stream.

        Args:
            sources: The examples of each source, at least one per source.
            weights: The share of each source; above 0, and the sum need not be 1. None gives all
                sources the same share.
            seed: The seed of all orders and of the held-out selection.
            shuffle: Whether the examples of a source are shuffled in each epoch.
            notices: Notices about the examples for the user, one line each.

        Raises:
            ConfigError: There is no source, or a source has no example.
        """
        if not sources or not all(sources):
            raise ConfigError("every data source must have at least one record")
        self._sources = sources
        # Exact fractions: rounding errors must not change the order of the sources.
        self._weights = [Fraction(str(weight)) for weight in weights or [1] * len(sources)]
        self._seed = seed
        self._shuffle = shuffle
        # Each source needs the order of one epoch, or of two at an epoch's end.
        self._order = lru_cache(maxsize=2 * len(sources))(self._compute_epoch_order)
        self.notices = tuple(notices)

    def __len__(self) -> int:
        """Return the number of examples of all sources."""
        return sum(map(len, self._sources))

    def iterate_examples(self) -> Iterator[Example]:
        """Return an iterator over every example of every source, in the sources' own order."""
        return itertools.chain.from_iterable(self._sources)

    def get_range(self, start: int, stop: int) -> list[Example]:
        """Return the examples from index `start` up to `stop`, counted over all sources in their
        own order."""
        examples: list[Example] = []
        first_index = 0
        for source in self._sources:
            first = max(0, start - first_index)
            last = max(0, stop - first_index)
            examples += source[first:last]
            first_index += len(source)
        return examples

    def hold_out(self, count: int) -> "tuple[ExampleStream[Example], list[Example]]":
        """Split off examples for evaluation.

        With `shuffle`, the held-out examples are a random selection that depends only on the seed
        and the source's size; the selection for a smaller count is a subset of the selection for a
        larger one. Without `shuffle`, they are the last examples of each source.

        Args:
            count: The number of examples of each source to hold out.

        Returns:
            A stream without the held-out examples, and the held-out examples.

        Raises:
            ConfigError: A source has no more than `count` examples.
        """
        if count == 0:
            return self, []
        for number, source in enumerate(self._sources, start=1):
            if len(source) <= count:
                subject = (
                    f"source {number} of {len(self._sources)} has"
                    if len(self._sources) > 1
                    else "the data has"
                )
                raise ConfigError(
                    f"data.held_out={count}: {subject} only {len(source)} records; hold out fewer"
                    " records, so that at least one record remains for training"
                )

        train_sources: list[Sequence[Example]] = []
        held_out: list[Example] = []
        for number, source in enumerate(self._sources):
            indices = np.sort(self._compute_hold_out_order(number)[:count])
            remaining_indices = np.delete(np.arange(len(source)), indices)
            train_sources.append(SelectedExamples(source, remaining_indices))
            held_out += SelectedExamples(source, indices)

        weights = [float(weight) for weight in self._weights]
        stream = ExampleStream(
            train_sources, weights, seed=self._seed, shuffle=self._shuffle, notices=self.notices
        )
        return stream, held_out

    def _compute_hold_out_order(self, source: int) -> np.ndarray:
        """Return the indices of a source's examples in the order in which they are held out, int64
        [N]."""
        size = len(self._sources[source])
        if not self._shuffle:
            return np.arange(size)[::-1]
        # The spawn key makes this random stream independent of the orders of the epochs.
        bits = np.random.Philox(np.random.SeedSequence([self._seed, source], spawn_key=(1,)))
        return np.random.Generator(bits).permutation(size)

    def take(self, start: int, count: int) -> list[Example]:
        """Return the `count` examples at the positions from `start` on."""
        return [
            self._sources[source][index] for source, index, _ in self._locate_range(start, count)
        ]

    def locate(self, position: int) -> tuple[int, int]:
        """Return which example is at a position, and in which epoch.

        Returns:
            The index of the example, counted over all sources in their order, and the number of
            the epoch of its source, from 0.
        """
        [(source, index, epoch)] = self._locate_range(position, 1)
        return sum(map(len, self._sources[:source])) + index, epoch

    def _locate_range(self, start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Yield source, index in the source and epoch of the source at `count` positions."""
        for source, offset in _interleave(self._weights, start, count):
            epoch, rank = divmod(offset, len(self._sources[source]))
            yield source, int(self._order(source, epoch)[rank]), epoch

    def _locate_from(self, start: int) -> Iterator[tuple[int, int, int]]:
        """Yield position, example index and epoch (see `locate`) from `start` on, without end."""
        first_indices = [0, *itertools.accumulate(map(len, self._sources))]
        for batch_start in itertools.count(start, _LOCATION_BATCH):
            locations = enumerate(
                self._locate_range(batch_start, _LOCATION_BATCH), start=batch_start
            )
            yield from (
                (position, first_indices[source] + index, epoch)
                for position, (source, index, epoch) in locations
            )

    def _compute_epoch_order(self, source: int, epoch: int) -> np.ndarray:
        """Return the order of a source's examples in one epoch, indices int64 [N]."""
        size = len(self._sources[source])
        if not self._shuffle:
            return np.arange(size)
        bits = np.random.Philox(np.random.SeedSequence([self._seed, epoch, source]))
        return np.random.Generator(bits).permutation(size)


def _interleave(weights: Sequence[Fraction], start: int, count: int) -> Iterator[tuple[int, int]]:
    """Interleave sources without end, and yield the positions `start` to `start + count`.

    This is Sainte-Laguë's divisor method: item k of a source is due at (k + 1/2) / share, and items
    are yielded in the order in which they are due. The shares are exact in the long run, and in
    every interval as close as whole numbers allow, so that also small steps have the same mixture.
    An independent random choice at each position would not have this property.

    Yields:
        The source at each position, and the number of earlier items of this source.
    """
    total = sum(weights)
    shares = [weight / total for weight in weights]

    # Before time t, ceil(share * t - 1/2) items of a source are due: of all sources together fewer
    # than t + len(shares) / 2 and at least t - len(shares) / 2. At this early time, the position is
    # therefore not yet past `start`, and the loop below discards at most len(shares) items.
    time = max(Fraction(0), start - Fraction(len(shares), 2))
    counts = [max(0, math.ceil(share * time - Fraction(1, 2))) for share in shares]
    due_items = [
        ((earlier_items + Fraction(1, 2)) / share, source)
        for source, (earlier_items, share) in enumerate(zip(counts, shares, strict=True))
    ]
    heapq.heapify(due_items)

    for position in range(sum(counts), start + count):
        _, source = due_items[0]
        if position >= start:
            yield source, counts[source]
        counts[source] += 1
        heapq.heapreplace(due_items, ((counts[source] + Fraction(1, 2)) / shares[source], source))


@dataclass(frozen=True)
class PromptFields:
    """A prompt without its tokens."""

    text: str
    metadata: Mapping[str, Any]
    origin: str
    """See `Prompt.origin`."""


class PromptStream(ExampleStream[Prompt]):
    """An endless stream of prompts, from which a curriculum may select."""

    selector: PromptSelector | None = None
    """The curriculum's selection rule; None selects every prompt."""
    text_checksum: int | None = None
    """CRC-32 of the texts of all prompts, if it is known; see `compute_checksum`."""

    def take(self, start: int, count: int) -> list[Prompt]:
        """Return the `count` prompts from position `start` on; a prompt's id is its position."""
        return [
            replace(prompt, id=start + index)
            for index, prompt in enumerate(super().take(start, count))
        ]

    def compute_checksum(self) -> int:
        """Return the CRC-32 of the texts of all prompts, in the sources' own order."""
        if self.text_checksum is None:
            texts = (prompt.text for prompt in self.iterate_examples())
            self.text_checksum, _ = _compute_text_checksum(texts)
        return self.text_checksum

    def iterate_fields(self) -> Iterator[PromptFields]:
        """Yield the text, metadata and origin of every prompt, in the sources' own order. This is
        faster than `iterate_examples`."""
        for source in self._sources:
            if isinstance(source, ExampleTable):
                for text, metadata, origin in source.iterate_values("text", "metadata", "origin"):
                    yield PromptFields(text, json.loads(metadata), origin)
            else:
                for prompt in source:
                    yield PromptFields(prompt.text, prompt.metadata, prompt.origin)

    def select(self, start: int, count: int, rates: PassRates | None) -> tuple[list[Prompt], int]:
        """Return the first prompts from a position on that the curriculum selects.

        Args:
            start: The first position.
            count: The number of prompts.
            rates: The pass rates that the selection depends on; None selects every prompt.

        Returns:
            The prompts, and the position after the last one.

        Raises:
            AlignerError: The curriculum excludes so many prompts that too few remain.
        """
        if self.selector is None or rates is None or count < 1:
            return self.take(start, count), start + count
        positions = self.selector.select(self._locate_from(start), count, rates)
        return [self.take(position, 1)[0] for position in positions], positions[-1] + 1


def open_prompts(
    data: DataConfig,
    tokenizer: Tokenizer,
    seed: int,
    *,
    include_messages: bool = False,
    include_responses: bool = False,
    tools: Tools | None = None,
    cache: ExampleCache | None = None,
) -> PromptStream:
    """Read and tokenize the prompts of all sources, or the prompts in the configuration.

    All other fields of a record become the prompt's metadata.

    Args:
        data: The configuration of the data.
        tokenizer: The policy's tokenizer.
        seed: The seed of the stream.
        include_messages: Whether the metadata contains the chat messages that a prompt was
            rendered from.
        include_responses: Whether the metadata contains the record's response, or the last answer
            of its conversation, as `response` and `response_tokens`.
        tools: Schemas of the tools that the prompts describe to the model. Records with a field
            `tools` use their own tools. All prompts must be chat messages if there are tools.
        cache: The cache of tokenized examples; None keeps the prompts in memory.

    Raises:
        ConfigError: There is no prompt; a source cannot be read; or a record has no usable prompt
            and is not to be skipped. The message names the record. `data.long_prompts` determines
            the handling of prompts of more than `data.max_prompt_tokens` tokens.
    """
    parser = PromptParser(
        data,
        tokenizer,
        include_messages=include_messages,
        include_responses=include_responses,
        tools=tools,
        pass_rates=_read_pass_rates(data),
    )
    return open_prompt_stream(parser, seed, cache)


def build_prompt_parser(
    config: Config, tokenizer: Tokenizer, tools: Tools | None = None
) -> "PromptParser":
    """Return the parser of the prompts of a run that generates samples; see `open_prompts`."""
    return PromptParser(
        config.data,
        tokenizer,
        # The files of all samples contain the messages of the prompts.
        include_messages=needs_prompt_messages(config) or config.logging.samples_mib > 0,
        include_responses=config.algorithm.has_demonstrations,
        tools=tools,
        pass_rates=_read_pass_rates(config.data),
    )


def open_prompt_stream(
    parser: "PromptParser", seed: int, cache: ExampleCache | None = None
) -> PromptStream:
    """Return a stream of the prompts that a parser reads; see `open_prompts`."""
    data = parser.data
    opened = open_examples(data, parser, cache)
    sources = [_sort(source, data.sort_by) for source in opened.sources]
    stream = PromptStream(
        sources, opened.weights, seed=seed, shuffle=data.shuffle, notices=opened.notices
    )
    if data.sort_by is None:  # the checksum of sorted prompts depends on their order
        stream.text_checksum, _ = _combine_text_checksums(
            [summary["texts"] for summary in opened.summaries]
        )
    # Without a selection criterion, the stream does not need the pass rates.
    stream.selector = (
        PromptSelector(data.curriculum, seed) if data.curriculum.selects_prompts else None
    )
    return stream


@dataclass(frozen=True)
class PromptParser:
    """Parser of the records of prompts; see `open_prompts` for the attributes."""

    data: DataConfig
    tokenizer: Tokenizer
    include_messages: bool
    include_responses: bool
    tools: Tools | None
    pass_rates: Mapping[str, float] | None
    """See `_read_pass_rates`."""

    @property
    def format(self) -> ExampleFormat[Prompt]:
        """Format of the prompts in a table."""
        to_row = functools.partial(_encode_prompt, self.data.sort_by)
        return ExampleFormat("prompt", _PROMPT_SCHEMA, to_row, _decode_prompt)

    @property
    def identity(self) -> Mapping[str, Any]:
        """JSON object that determines the prompt of a record."""
        return {
            "tokenizer": self.tokenizer.identity,
            "include_messages": self.include_messages,
            "include_responses": self.include_responses,
            "tools": self.tools,
            "pass_rates": self.pass_rates,
        }

    def __call__(self, record: Record) -> Prompt:
        """Return the prompt of a record."""
        record = _add_pass_rate(record, self.data, self.tokenizer, self.pass_rates)
        prompt = _parse_prompt(
            add_tools(record, self.tools), self.tokenizer, self.data, self.include_messages
        )
        if not self.include_responses:
            return prompt
        response_fields = _get_response_fields(record, self.tokenizer, self.data)
        return replace(prompt, metadata={**prompt.metadata, **response_fields})

    def summarize(self, examples: Sequence[Prompt], origins: Sequence[str]) -> Mapping[str, Any]:
        """Return the checksum of the prompts' texts."""
        return {"texts": _compute_text_checksum(prompt.text for prompt in examples)}

    def combine(self, summaries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the checksum of the texts of all summaries."""
        return {"texts": _combine_text_checksums([summary["texts"] for summary in summaries])}


_PROMPT_SCHEMA = pa.schema(
    [
        pa.field("text", pa.string()),
        pa.field("tokens", TOKENS),
        pa.field("metadata", pa.string()),  # JSON: each record may have other fields
        pa.field("origin", pa.string()),
        pa.field("sort_key", pa.float64()),  # null without data.sort_by
    ]
)


def _encode_prompt(sort_by: str | None, prompt: Prompt) -> Mapping[str, Any]:
    return {
        "text": prompt.text,
        "tokens": prompt.tokens,
        "metadata": _encode_json(prompt.metadata),
        "origin": prompt.origin,
        "sort_key": None if sort_by is None else _sort_key(sort_by, prompt),
    }


def _decode_prompt(row: Row) -> Prompt:
    return Prompt(
        0,
        row.get("text"),
        row.get_tokens("tokens"),
        json.loads(row.get("metadata")),
        row.get("origin"),
    )


def _compute_text_checksum(texts: Iterable[str]) -> tuple[int, int]:
    """Return the CRC-32 of texts, each with a zero byte after it, and their length in bytes."""
    checksum = 0
    length = 0
    for text in texts:
        content = text.encode() + b"\0"
        checksum = zlib.crc32(content, checksum)
        length += len(content)
    return checksum, length


def _combine_text_checksums(parts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the checksum and length of all texts from those of consecutive parts."""
    checksum = 0
    for part_checksum, length in parts:
        checksum = combine_crc32(checksum, part_checksum, length)
    return checksum, sum(length for _, length in parts)


def _sort(source: Sequence[Prompt], sort_by: str | None) -> Sequence[Prompt]:
    """Return the prompts of a source in the order of `data.sort_by`."""
    if sort_by is None:
        return source
    keys = (
        source.read_numbers("sort_key")
        if isinstance(source, ExampleTable)
        else np.array([_sort_key(sort_by, prompt) for prompt in source])
    )
    return SelectedExamples(source, np.argsort(keys, kind="stable"))


def open_evaluation_prompts(
    suite: Suite,
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    include_messages: bool = False,
    tools: Tools | None = None,
) -> list[Prompt]:
    """Read and tokenize the prompts of an evaluation suite, in their order.

    Args:
        suite: The evaluation suite. Its records may have a text `reference`.
        data: The configuration of the training data. Its limits and prompt boundaries also apply to
            evaluation prompts.
        tokenizer: The policy's tokenizer.
        include_messages: See `open_prompts`.
        tools: See `open_prompts`.

    Raises:
        ConfigError: See `open_prompts`.
    """
    settings = suite.settings

    def parse(record: Record) -> Prompt:
        """Return the prompt of a record of the evaluation data."""
        # Check the reference response here: later users rely on a text and valid token ids.
        if "reference" in record.values:
            record.get_text("reference")
        if not data.generated_tokens:
            values = {
                name: value for name, value in record.values.items() if name != "reference_tokens"
            }
            record = replace(record, values=values)
        read_token_ids(record.values, "reference", record.origin, tokenizer)
        record = apply_template_use(record, settings.template)
        return _parse_prompt(add_tools(record, tools), tokenizer, data, include_messages)

    return [
        replace(prompt, id=suite.first_prompt_id + index)
        for index, prompt in enumerate(read_suite(suite, data, parse))
    ]


def read_suite(suite: Suite, data: DataConfig, parse: Callable[[Record], Example]) -> list[Example]:
    """Return the examples that `parse` makes of the records of an evaluation suite, in their order.

    Raises:
        ConfigError: The records cannot be read, or `parse` raises it.
    """
    settings = suite.settings
    if settings.questions and data.tasks:
        prompts_per_task = [
            read_source(source, parse)[0] for source in parse_task_sources(data, settings.questions)
        ]
        # One prompt of each task in turn, so that `count` below keeps all tasks.
        prompts = [prompt for group in zip(*prompts_per_task, strict=False) for prompt in group]
    elif settings.path is None:
        key = f"{suite.key}.prompts"
        prompts, _ = parse_records(list_inline_prompts(settings.prompts, key), parse, key)
    else:
        source = DataSource(
            suite.key,
            Path(settings.path),
            fields=settings.fields,
            layout=settings.format,
            timeout_s=data.function_timeout_s,
        )
        prompts, _ = read_source(source, parse)
    return prompts[: settings.count]


def _parse_prompt(
    record: Record, tokenizer: Tokenizer, data: DataConfig, include_messages: bool
) -> Prompt:
    text, tokens = tokenize_prompt(record, render_prompt(record, tokenizer), tokenizer, data)
    metadata = _collect_metadata(record)
    if include_messages:
        metadata |= get_prompt_messages(record)
        if (error := _find_json_error(metadata)) is not None:
            raise BadRecord(f"{record.origin}: the messages cannot be encoded as JSON: {error}")
    return Prompt(0, unescape(text), tokens, metadata, record.origin)


def _read_pass_rates(data: DataConfig) -> Mapping[str, float] | None:
    """Read the pass rate of each prompt from the samples in `data.pass_rate_samples`.

    Returns:
        The share of the samples of a prompt that pass, by the prompt's text; NaN for a prompt
        without a scored sample. None if `data.pass_rate_samples` is not set.
    """
    if data.pass_rate_samples is None:
        return None

    def parse_sample(record: Record) -> tuple[str, float]:
        # `aligner evaluate` writes null where the reward function abstained.
        has_abstained = "score" in record.values and record.values["score"] is None
        return record.get_text("prompt"), math.nan if has_abstained else record.get_number("score")

    key = "data.pass_rate_samples="
    scores = dict[str, list[float]]()
    for text, score in parse_records(
        open_record_source(Path(data.pass_rate_samples), key).read(),
        parse_sample,
        f"{key}{data.pass_rate_samples}",
    )[0]:
        scores.setdefault(text, []).append(score)

    threshold = data.pass_threshold
    return {
        text: float(compute_pass_fractions(torch.tensor(prompt_scores), threshold).nanmean())
        for text, prompt_scores in scores.items()
    }


def _add_pass_rate(
    record: Record,
    data: DataConfig,
    tokenizer: Tokenizer,
    pass_rates: Mapping[str, float] | None,
) -> Record:
    """Return the record with its pass rate, and check the fields that select and sort prompts.

    If `pass_rates` is not None, the field `pass_rate` is set to the value of the prompt's text. The
    checked fields are those of `data.sort_by` and `data.pass_rate`.

    Raises:
        BadRecord: `pass_rates` lacks the prompt, or a field that the configuration reads is
            missing or no number.
        ExcludedRecord: The prompt has no scored sample, or its pass rate is outside
            `data.pass_rate`.
    """
    if pass_rates is not None:
        text = unescape(render_prompt(record, tokenizer).text)
        if text not in pass_rates:
            raise BadRecord(
                f"{record.origin}: data.pass_rate_samples={data.pass_rate_samples} has no sample of"
                " this record's prompt"
            )
        if math.isnan(pass_rates[text]):
            raise ExcludedRecord(
                f"{record.origin}: data.pass_rate_samples={data.pass_rate_samples} has no sample of"
                " this record's prompt with a score"
            )
        record = replace(record, values={**record.values, "pass_rate": pass_rates[text]})
    if data.sort_by is not None:
        record.get_number(data.sort_by.removeprefix("-"))  # raises if the field is no number
    if data.pass_rate:
        low, high = data.pass_rate
        rate = record.get_number("pass_rate")
        if not 0 <= rate <= 1:
            raise BadRecord(f"{record.origin}: field `pass_rate` is {rate:g}, must be in [0, 1]")
        if not low <= rate <= high:
            raise ExcludedRecord(
                f"{record.origin}: `pass_rate` {rate:g} is outside data.pass_rate=[{low:g},"
                f" {high:g}]"
            )
    return record


def _sort_key(sort_by: str, prompt: Prompt) -> float:
    value = float(prompt.metadata[sort_by.removeprefix("-")])
    return -value if sort_by.startswith("-") else value


def _get_response_fields(record: Record, tokenizer: Tokenizer, data: DataConfig) -> dict[str, Any]:
    """Return the record's response as `response` and `response_tokens`.

    The tokens are the stored token ids; without them, they are the tokens of the response's text
    after the prompt, with an end-of-sequence token.

    Raises:
        BadRecord: The record has no response, or it cannot be tokenized.
    """
    tokens = read_token_ids(record.values, "response", record.origin, tokenizer)
    if tokens is not None:
        return {"response": record.values["response"], "response_tokens": tokens.tolist()}

    prompt, response = render_exchange(record, "response", tokenizer)
    text = extract_prompt(prompt.text, data, record.origin)
    prompt_ids = encode_text(text, record.origin, tokenizer, add_bos=not prompt.is_rendered)
    tokens = tokenizer.append_end_token(
        _encode_after(record, tokenizer, text, prompt_ids, response)
    )
    return {
        "response": tokenizer.decode_after(prompt_ids, tokens),
        "response_tokens": tokens.tolist(),
    }


def tokenize_prompt(
    record: Record,
    prompt: PromptText,
    tokenizer: Tokenizer,
    data: DataConfig,
    allowed: str | None = None,
) -> tuple[str, Tensor]:
    """Tokenize the prompt that the model receives.

    Args:
        record: The record.
        prompt: The text of the record's prompt.
        tokenizer: The policy's tokenizer.
        data: The configuration of the data.
        allowed: The description of the maximum length in error messages; None describes it by
            `data.max_prompt_tokens`.

    Returns:
        The text of the prompt after `data.prompt_after`, `data.prompt_before` and truncation, and
        its tokens, int64 [P].

    Raises:
        BadRecord: The prompt cannot be tokenized, is empty, or has more than
            `data.max_prompt_tokens` tokens and `data.long_prompts` does not truncate it.
        ExcludedRecord: The prompt is too long, and data.long_prompts=drop.
    """
    text = extract_prompt(prompt.text, data, record.origin)
    limit = data.max_prompt_tokens
    origin = record.origin
    # A rendered prompt contains its BOS token as text.
    tokens = encode_text(text, origin, tokenizer, add_bos=not prompt.is_rendered)
    # Truncation would remove parts of the chat template from a rendered prompt.
    if tokens.numel() > limit and data.long_prompts.startswith("cut") and not prompt.is_rendered:
        text, tokens = _truncate(
            text, tokens, limit, tokenizer, keep_end=data.long_prompts == "cut_start"
        )
    try:
        return text, check_length(
            tokens, text, "prompt", origin, limit, allowed or f"data.max_prompt_tokens={limit}"
        )
    except BadRecord as error:
        if data.long_prompts == "drop" and tokens.numel():
            raise ExcludedRecord(str(error)) from error
        if data.long_prompts != "error" and prompt.is_rendered:
            raise BadRecord(
                f"{error}; data.long_prompts={data.long_prompts} is not supported with chat"
                " messages; use data.long_prompts=drop to skip such records"
            ) from error
        raise


def _truncate(
    text: str, tokens: Tensor, limit: int, tokenizer: Tokenizer, *, keep_end: bool
) -> tuple[str, Tensor]:
    """Truncate a text to `limit` tokens, its leading special tokens included.

    Args:
        text: The text.
        tokens: The tokens of the text, with the special tokens before it, int64 [P].
        limit: The maximum number of tokens.
        tokenizer: The tokenizer of `tokens`.
        keep_end: Whether the end of the text is kept; otherwise its beginning.

    Returns:
        The remaining text, and its tokens after the special tokens. Both are unchanged if `limit`
        has no room for any token of the text.
    """
    prefix_length = tokens.numel() - tokenizer.encode(text).numel()
    room = limit - prefix_length
    text_tokens = tokens[prefix_length:]
    if room < 1:
        return text, tokens
    text_tokens = text_tokens[-room:] if keep_end else text_tokens[:room]
    return (
        tokenizer.decode(text_tokens, skip_special_tokens=False),
        torch.cat([tokens[:prefix_length], text_tokens]),
    )


def extract_prompt(text: str, data: DataConfig, origin: str) -> str:
    """Return the part of a prompt's text between two configured strings.

    The part begins after the first `data.prompt_after` and ends before the last
    `data.prompt_before`. See Huang et al. 2023, "The N Implementation Details of RLHF with PPO",
    detail 2.

    Raises:
        BadRecord: The text lacks one of the strings, or there is no text between them.
    """
    after, before = data.prompt_after, data.prompt_before
    if after is not None:
        _, separator, text = text.partition(after)
        if not separator:
            raise BadRecord(f"{origin}: the prompt does not contain data.prompt_after={after!r}")
    if before is not None:
        text, separator, _ = text.rpartition(before)
        if not separator:
            position = "" if after is None else f" after data.prompt_after={after!r}"
            raise BadRecord(
                f"{origin}: the prompt does not contain data.prompt_before={before!r}{position}"
            )
    if not text.strip():
        raise BadRecord(
            f"{origin}: the prompt is empty between data.prompt_after={after!r} and"
            f" data.prompt_before={before!r}"
        )
    return text


def read_prompts(
    path: Path,
    key: str,
    kind: str | None = None,
    *,
    fields: Mapping[str, str] | None = None,
    layout: str = AUTO_LAYOUT,
    limit: int | None = None,
    skip: bool = False,
    report: Callable[[str], None] = lambda notice: None,
) -> list[Record]:
    """Read the records of a source of prompts, in their order.

    Args:
        path: See `open_record_source`.
        key: See `open_record_source`.
        kind: See `open_record_source`.
        fields: The data's field names, or templates of them, by aligner's field names.
        layout: The layout of the records, see `data.format`.
        limit: Number of records to read; None reads all of them.
        skip: Whether records without a prompt are skipped.
        report: Function that is called with notices about skipped records.

    Raises:
        ConfigError: The source cannot be read or is empty, or a record has no prompt, which is a
            plain text or chat messages. The message names the file and the line.
    """

    def check(record: Record) -> Record:
        if not record.has_messages:
            record.get_text("prompt")
        _collect_metadata(record)
        return record

    raw_records = (
        raw_record
        for raw_record in open_record_source(path, key, kind).read()
        if not is_blank(raw_record)
    )
    records, notices = parse_records(
        itertools.islice(raw_records, limit),
        check,
        f"{key}{path}",
        skip=skip,
        fields=fields,
        layout=layout,
    )
    for notice in notices:
        report(notice)
    return records


def to_prompt(
    record: Record, tokenizer: Tokenizer, data: DataConfig, allowed: str, id: int = 0
) -> Prompt:
    """Return the prompt of a record, which is a plain text or chat messages.

    The metadata contains the record's other fields, and the chat messages if there are any.

    Args:
        record: The record.
        tokenizer: The policy's tokenizer.
        data: Boundaries and maximum length of the prompt, and the handling of longer prompts.
        allowed: The description of the maximum length in error messages.
        id: The prompt's id.

    Raises:
        BadRecord: See `tokenize_prompt`.
        ConfigError: The prompt is messages, and the model has no chat template.
    """
    prompt = render_prompt(record, tokenizer)
    text, tokens = tokenize_prompt(record, prompt, tokenizer, data, allowed)
    return Prompt(
        id,
        unescape(text),
        tokens,
        {**_collect_metadata(record), **get_prompt_messages(record)},
    )


def apply_template_use(record: Record, use: str) -> Record:
    """Return a record whose prompt a chat template renders as `evaluation.template` says.

    Args:
        record: The record.
        use: `auto` renders only messages, `chat` also plain texts as the message of a user, and
            `raw` nothing.

    Raises:
        BadRecord: See `unwrap_message`.
    """
    if use == "chat":
        return wrap_in_message(record)
    return unwrap_message(record) if use == "raw" else record


def wrap_in_message(record: Record) -> Record:
    """Return a record whose plain prompt is the message of a user; records with messages are
    unchanged."""
    if record.has_messages:
        return record
    messages = [{"role": "user", "content": record.get_text("prompt")}]
    return replace(record, values={**record.values, "prompt": messages})


def unwrap_message(record: Record) -> Record:
    """Return a record whose prompt is the plain text of its only message; records with a plain
    prompt are unchanged.

    Raises:
        BadRecord: The prompt has several messages, or its message is not text of a user.
    """
    if not record.has_messages:
        return record
    messages = get_prompt_messages(record)["messages"]
    is_text = len(messages) == 1 and messages[0]["role"] == "user"
    if not is_text or not isinstance(messages[0].get("content"), str):
        roles = ", ".join(message["role"] for message in messages)
        raise BadRecord(
            f"{record.origin}: the prompt must be one message of a user to be used without the chat"
            f" template, got messages of these roles: {roles}"
        )
    values = {name: value for name, value in record.values.items() if name != "messages"}
    return replace(record, values={**values, "prompt": messages[0]["content"]})


def _collect_metadata(record: Record) -> dict[str, Any]:
    """Return the fields that are sent to the reward with each sample of the prompt.

    Raises:
        BadRecord: A field cannot be encoded as JSON in UTF-8, for example because it is `bytes`.
    """
    metadata = {
        name: value for name, value in record.values.items() if name not in ("prompt", "messages")
    }
    # Usually all fields are valid, which one call finds out.
    if _find_json_error(metadata) is None:
        return metadata
    for name, value in metadata.items():
        if (error := _find_json_error({name: value})) is not None:
            raise BadRecord(
                f"{record.origin}: field `{name}` cannot be sent to the reward as JSON: {error}"
            ) from error
    return metadata


def _find_json_error(value: Any) -> Exception | None:
    """Return the error of encoding a value as JSON in UTF-8; None if it can be encoded."""
    try:
        _encode_json(value).encode()
    except (TypeError, ValueError) as error:
        return error
    return None


@dataclass(frozen=True)
class ExchangeTokens:
    """A prompt and a response, tokenized together."""

    prompt: Tensor
    """Tokens of the prompt alone, from which a response is generated; int64 [P]."""
    prompt_part: Tensor
    """Beginning of the prompt's tokens that the whole sequence shares, int64 [Q]; all of the
    prompt's tokens unless tokens merge across the boundary."""
    response_part: Tensor
    """Rest of the sequence, int64 [R]."""

    @property
    def has_merge(self) -> bool:
        """Whether tokens merge across the boundary, so that the prompt's last tokens are not in
        the sequence."""
        return self.prompt_part.numel() < self.prompt.numel()


def tokenize_exchange(
    record: Record, prompt: PromptText, response: str, tokenizer: Tokenizer, data: DataConfig
) -> ExchangeTokens:
    """Tokenize a prompt and a response together.

    The response begins where the tokens of the prompt alone and of the whole text differ, as in
    TRL's SFT and DPO trainers, but not before the second token: no token predicts the first one.

    Raises:
        BadRecord: The texts cannot be tokenized, or `tokenize_prompt` rejects the prompt.
            `tokenize_prompt` may also truncate the prompt.
    """
    text = extract_prompt(prompt.text, data, record.origin)
    truncated_text, prompt_ids = tokenize_prompt(record, prompt, tokenizer, data)
    add_bos = not prompt.is_rendered

    if truncated_text != text:  # data.long_prompts truncated the prompt
        full_prompt_ids = encode_text(text, record.origin, tokenizer, add_bos=add_bos)
        return ExchangeTokens(
            prompt_ids,
            prompt_ids,
            _encode_after(record, tokenizer, text, full_prompt_ids, response),
        )

    try:
        sequence = encode_text(text + response, record.origin, tokenizer, add_bos=add_bos)
    except BadRecord:
        # The prompt alone was tokenized above, so this raises an error that shows the response
        # without the prompt.
        encode_text(response, record.origin, tokenizer)
        raise
    start = max(1, common_prefix_length(prompt_ids, sequence))
    return ExchangeTokens(prompt_ids, sequence[:start], sequence[start:])


def _encode_after(
    record: Record, tokenizer: Tokenizer, prompt: str, tokens: Tensor, response: str
) -> Tensor:
    """Call `Tokenizer.encode_after`; raise BadRecord if the text cannot be tokenized."""
    try:
        return tokenizer.encode_after(prompt, tokens, response)
    except AlignerError as error:
        raise BadRecord(f"{record.origin}: {error}") from error


def common_prefix_length(first: Tensor, second: Tensor) -> int:
    """Return the length of the common prefix of two token sequences, int64 [A] and [B]."""
    length = min(first.numel(), second.numel())
    differs = (first[:length] != second[:length]).nonzero()
    return int(differs[0]) if differs.numel() else length


def encode_text(text: str, origin: str, tokenizer: Tokenizer, *, add_bos: bool = False) -> Tensor:
    """Call `Tokenizer.encode`; raise BadRecord if the text cannot be tokenized."""
    try:
        return tokenizer.encode(text, add_bos=add_bos)
    except AlignerError as error:
        raise BadRecord(f"{origin}: {error}") from error


def check_length(
    tokens: Tensor, text: str, name: str, origin: str, limit: int, allowed: str
) -> Tensor:
    """Return the tokens of a record's field if their number is allowed.

    Args:
        tokens: The tokens, int64 [T].
        text: The text of the tokens, for the error message.
        name: The name of the field, for the error message.
        origin: The origin of the record, for the error message.
        limit: The maximum number of tokens.
        allowed: The name of the limit in the error message.

    Raises:
        BadRecord: There is no token, or there are more than `limit`.
    """
    if not 1 <= tokens.numel() <= limit:
        excerpt = text if len(text) <= 80 else text[:77] + "..."
        raise BadRecord(
            f"{origin}: the {name} has {tokens.numel()} tokens, allowed: 1 to {allowed}:"
            f" {excerpt!r}"
        )
    return tokens


def read_token_ids(
    values: Mapping[str, Any], name: str, origin: str, tokenizer: Tokenizer
) -> Tensor | None:
    """Return the stored token ids of a response or a prompt.

    The field of the token ids is `NAME_tokens`. For a response it may also be `tokens`, if the
    record has a `finish_reason`, as in the output of `aligner generate`. The ids of a response
    include its EOS token if it has one; the ids of a prompt include the special tokens of the
    chat template and of the tokenizer.

    Args:
        values: The fields of the record.
        name: The field of the text: `prompt`, `response`, `reference` or another response.
        origin: The origin of the record, for error messages.
        tokenizer: The policy's tokenizer.

    Returns:
        The token ids, int64 [R]; None if the record has only the text.

    Raises:
        BadRecord: The field is not a list of token ids, or its text differs from the text field.
    """
    field = f"{name}_tokens"
    if field not in values and name == "response" and "finish_reason" in values:
        field = "tokens" if isinstance(values.get("tokens"), list) else field
    tokens = values.get(field)
    if tokens is None:
        return None

    is_list = isinstance(tokens, list) and bool(tokens)
    if not is_list or not all(
        type(token) is int and 0 <= token < tokenizer.vocab_size for token in tokens
    ):
        raise BadRecord(
            f"{origin}: field `{field}` must be a non-empty list of token ids from 0 to"
            f" {tokenizer.vocab_size - 1}"
        )

    text = values.get(name)
    if name == "prompt" and isinstance(text, str):
        # Encode and decode the text: decoding the ids removes special tokens, which a rendered
        # prompt contains as text.
        text = tokenizer.decode(encode_text(text, origin, tokenizer))
    decoded_text = tokenizer.decode(tokens)
    # The text of a response after its prompt may begin with a space that decoding alone removes.
    # It is the same after any prompt, therefore also after the response itself.
    if text not in (decoded_text, tokenizer.decode_after(tokens, tokens)):
        raise BadRecord(
            f"{origin}: `{field}` and `{name}` differ: this model's tokenizer decodes the tokens to"
            f" {decoded_text!r}. If another model generated the tokens, set"
            f" data.generated_tokens=false or remove field `{field}`"
        )
    return torch.tensor(tokens, dtype=torch.int64)
