"""Examples of the offline trainers as tokens: demonstrations, preferences, labeled answers and
labeled steps, and the streams of them that a run trains on."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import pyarrow as pa
import torch
from torch import Tensor

from aligner.data.conversations import PromptText, render_exchange, render_prompt, render_turns
from aligner.data.example_cache import ExampleCache, open_examples
from aligner.data.example_table import MASK, TOKENS, ExampleFormat, Row
from aligner.data.prompts import (
    ExampleStream,
    check_length,
    extract_prompt,
    read_token_ids,
    tokenize_exchange,
    tokenize_prompt,
)
from aligner.data.record_fields import (
    describe_margin_setting,
    read_label,
    read_margin,
    read_steps,
)
from aligner.data.records import BadRecord, Record, has_steps
from aligner.data.teacher_scores import TeacherScores, TeacherScoresRow
from aligner.data.tokenizer import Tokenizer
from aligner.errors import ConfigError
from aligner.models.model_source import directory_shape, model_directory
from aligner.models.vocabulary import require_same_vocabulary
from aligner.schema import Config, DataConfig

Example = TypeVar("Example")


@dataclass(frozen=True)
class Demonstration:
    """A prompt and the response to imitate, tokenized together.

    The tokens of a response with stored token ids are these ids. Any other response ends with an
    end token unless data.end_of_sequence=false.
    """

    tokens: Tensor
    """Tokens of prompt and response, int64 [T]."""
    prompt_length: int
    """Number of tokens before the response, at least 1."""
    response_mask: Tensor | None = None
    """Response tokens that are trained on, bool [T]; None for all of them. Values before the
    response are ignored."""
    teacher_row: TeacherScoresRow | None = None
    """Location of a teacher's scores of this demonstration; None without a teacher."""
    prompt: Tensor | None = None
    """Tokens of the prompt alone, int64 [P], if tokens of prompt and response merge; None if they
    are the first `prompt_length` tokens."""

    @property
    def loss_mask(self) -> Tensor:
        """Tokens that are trained on, bool [T]."""
        is_response = torch.arange(self.tokens.numel()) >= self.prompt_length
        return is_response if self.response_mask is None else is_response & self.response_mask


@dataclass(frozen=True)
class Preference:
    """Two responses to one prompt, of which one is better."""

    chosen: Demonstration
    rejected: Demonstration
    margin: float | None
    """Difference in quality between the two responses, at least 0; None if the data has none."""


@dataclass(frozen=True)
class LabeledAnswer:
    """A response and its label, for KTO."""

    answer: Demonstration
    is_desirable: bool
    """Whether training increases the response's probability; otherwise training decreases it."""


@dataclass(frozen=True)
class LabeledSteps:
    """A response in steps, each with a label, for process reward models.

    No end token is added.
    """

    tokens: Tensor
    """Tokens of prompt and steps, int64 [T]."""
    prompt_length: int
    """Number of tokens before the first step."""
    positions: Tensor
    """Index in `tokens` of each step's last token, int64 [K], ascending."""
    labels: Tensor
    """Label of each step, float32 [K]: 1 for a correct step, 0 for a wrong one."""

    def __post_init__(self) -> None:
        if self.positions.shape != self.labels.shape or self.labels.dtype != torch.float32:
            raise ValueError(
                f"labels: got {self.labels.dtype} {tuple(self.labels.shape)}, must be float32"
                f" {tuple(self.positions.shape)}"
            )


@dataclass(frozen=True)
class RunData:
    """The data of an offline run."""

    examples: ExampleStream[Any]
    held_out: list[Any]
    """Examples for evaluation, which are never trained on."""
    normalization_samples: list[Demonstration] | None
    """Samples of the initial policy, whose scores determine the normalization of a reward model;
    None without `data.normalization`."""
    notices: tuple[str, ...]
    """Notices about the data for the user, one line each."""


def open_run_data(
    config: Config, tokenizer: Tokenizer, cache: ExampleCache | None = None
) -> RunData:
    """Read, check and tokenize the data of an offline run.

    Args:
        config: The run's configuration.
        tokenizer: The policy's tokenizer.
        cache: The cache of tokenized examples; None keeps the examples in memory.

    Raises:
        ConfigError: See `open_demonstrations`; or a source has too few records for
            `data.held_out`; or `data.normalization` is set for labeled steps.
    """
    data = config.data
    trainer = config.algorithm.trainer
    examples = _open_stream(build_run_parser(config, tokenizer), config.seed, cache)

    if data.normalization is not None and isinstance(examples.take(0, 1)[0], LabeledSteps):
        raise ConfigError(
            f"data.normalization={data.normalization}: is not supported for records with `steps`: a"
            " process reward model returns logits, which are not normalized; remove"
            " data.normalization"
        )

    notices = examples.notices
    examples, held_out = examples.hold_out(data.held_out if config.algorithm.trains_model else 0)
    if held_out:
        selection = (
            f"selected at random with seed={config.seed}"
            if data.shuffle
            else "the last records, because data.shuffle=false"
        )
        notices = (
            *notices,
            f"data.held_out={data.held_out}: records of each source held out for evaluation,"
            f" {selection}",
        )
    if trainer != "reward_model" or data.normalization is None:
        return RunData(examples, held_out, None, notices)

    # The samples contain the prompts that the policy received, which were already extracted from
    # the data's prompts.
    no_extraction: dict[str, Any] = {"prompt_after": None, "prompt_before": None}
    sample_data = replace(
        data, path=data.normalization, sources={}, fields={}, shuffle=False, **no_extraction
    )
    sample_stream = open_demonstrations(sample_data, tokenizer, config.seed, cache=cache)
    samples = sample_stream.take(0, min(len(sample_stream), data.normalization_samples))
    return RunData(examples, held_out, samples, (*notices, *sample_stream.notices))


def build_run_parser(config: Config, tokenizer: Tokenizer) -> "ExampleParser[Any]":
    """Return the parser of the records of an offline run.

    Raises:
        ConfigError: The data or the teacher's scores cannot be read.
    """
    data = config.data
    trainer = config.algorithm.trainer
    if trainer in ("sft", "teacher_scores"):
        scores = open_teacher_scores(config) if trainer == "sft" else None
        return _build_demonstration_parser(data, tokenizer, scores)
    if trainer == "reward_model" and has_steps(data):
        return ExampleParser(LABELED_STEPS, _read_labeled_steps, tokenizer, data)
    if config.algorithm.has_labels:
        return ExampleParser(LABELED_ANSWERS, _read_labeled_answer, tokenizer, data)
    return _build_preference_parser(data, tokenizer, describe_margin_setting(config))


def open_teacher_scores(config: Config) -> TeacherScores | None:
    """Return the teacher's scores in `teacher.scores`; None if the key is not set.

    Raises:
        ConfigError: The scores cannot be read, or the teacher's tokens differ from the policy's.
    """
    if config.teacher.scores is None:
        return None
    policy = model_directory(config)
    scores = TeacherScores(Path(config.teacher.scores))
    # The scores contain token ids, so both tokenizers must assign the same ids.
    require_same_vocabulary("teacher.scores", scores.directory, policy)
    vocab_size = directory_shape(policy, "model.path").vocab_size
    if scores.vocabulary > vocab_size:
        raise ConfigError(
            f"teacher.scores={scores.directory}: contains token ids up to {scores.vocabulary - 1},"
            f" but the policy's vocab_size is {vocab_size}; use scores of a teacher with the"
            " policy's vocabulary"
        )
    return scores


def open_demonstrations(
    data: DataConfig,
    tokenizer: Tokenizer,
    seed: int,
    scores: TeacherScores | None = None,
    cache: ExampleCache | None = None,
) -> ExampleStream[Demonstration]:
    """Read, check and tokenize all demonstrations.

    A record has a `prompt` and a `response`, or the `messages` of a conversation, whose last answer
    is the response. With data.learned_turns=all, the response of a conversation begins with the
    assistant's first answer, and only the answers are trained on.

    Args:
        data: The configuration of the data.
        tokenizer: The policy's tokenizer.
        seed: The seed of the stream.
        scores: The teacher's scores, which must contain every demonstration; None without a
            teacher.
        cache: See `open_run_data`.

    Raises:
        ConfigError: A source cannot be read; or a record is invalid, too long or without scores,
            and is not to be skipped. The message names the record.
    """
    return _open_stream(_build_demonstration_parser(data, tokenizer, scores), seed, cache)


def open_preferences(
    data: DataConfig,
    tokenizer: Tokenizer,
    seed: int,
    margin_for: str | None = None,
    cache: ExampleCache | None = None,
) -> ExampleStream[Preference]:
    """Read, check and tokenize all preferences.

    A record has a `prompt`, a `chosen` and a `rejected` response, or two conversations that differ
    in their last answer. It may have a `margin`, which is ignored if data.margin=false.

    Args:
        data: The configuration of the data.
        tokenizer: The policy's tokenizer.
        seed: The seed of the stream.
        margin_for: The setting that requires a margin in every record, for the error message; None
            if the margin is optional.
        cache: See `open_run_data`.

    Raises:
        ConfigError: See `open_demonstrations`. A record with two equal responses is invalid, and so
            is a record without a required margin.
    """
    return _open_stream(_build_preference_parser(data, tokenizer, margin_for), seed, cache)


def open_labeled_answers(
    data: DataConfig, tokenizer: Tokenizer, seed: int, cache: ExampleCache | None = None
) -> ExampleStream[LabeledAnswer]:
    """Read, check and tokenize all labeled answers.

    A record has a `prompt` and a `response`, or the `messages` of a conversation, and a `label`,
    true or false.

    Raises:
        ConfigError: See `open_demonstrations`.
    """
    parser = ExampleParser(LABELED_ANSWERS, _read_labeled_answer, tokenizer, data)
    return _open_stream(parser, seed, cache)


def open_labeled_steps(
    data: DataConfig, tokenizer: Tokenizer, seed: int, cache: ExampleCache | None = None
) -> ExampleStream[LabeledSteps]:
    """Read, check and tokenize all labeled steps.

    A record has a `prompt` or `messages`, `steps` (texts that are joined without a separator), and
    the `labels` of the steps, 0 or 1.

    Raises:
        ConfigError: See `open_demonstrations`.
    """
    parser = ExampleParser(LABELED_STEPS, _read_labeled_steps, tokenizer, data)
    return _open_stream(parser, seed, cache)


@dataclass(frozen=True)
class ExampleParser(Generic[Example]):
    """Parser of the records of an offline trainer."""

    format: ExampleFormat[Example]
    read: Callable[[Record, Tokenizer, DataConfig], Example]
    """Function that returns the example of a record; it can be sent to another process."""
    tokenizer: Tokenizer
    data: DataConfig
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further values that determine the examples, as JSON."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """JSON object that determines the example of a record."""
        return {"tokenizer": self.tokenizer.identity, **self.arguments}

    def __call__(self, record: Record) -> Example:
        """Return the example of a record."""
        return self.read(record, self.tokenizer, self.data)

    def summarize(self, examples: Sequence[Example], origins: Sequence[str]) -> Mapping[str, Any]:
        """Return the number of examples whose tokens merge, and the origin of the first one."""
        merge_origins = [
            origin for example, origin in zip(examples, origins, strict=True) if _has_merge(example)
        ]
        return {"merges": len(merge_origins), "first_merge": next(iter(merge_origins), "")}

    def combine(self, summaries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the numbers of all summaries."""
        first_merges = (summary["first_merge"] for summary in summaries if summary["merges"])
        return {
            "merges": sum(summary["merges"] for summary in summaries),
            "first_merge": next(first_merges, ""),
        }


def _build_demonstration_parser(
    data: DataConfig, tokenizer: Tokenizer, scores: TeacherScores | None
) -> ExampleParser[Demonstration]:
    """Return the parser of `open_demonstrations`."""
    return ExampleParser(
        DEMONSTRATIONS,
        partial(_read_scored_demonstration, scores),
        tokenizer,
        data,
        {"scores": None if scores is None else scores.identity},
    )


def _build_preference_parser(
    data: DataConfig, tokenizer: Tokenizer, margin_for: str | None
) -> ExampleParser[Preference]:
    """Return the parser of `open_preferences`."""
    return ExampleParser(
        PREFERENCES,
        partial(_read_preference_with_margin, margin_for),
        tokenizer,
        data,
        {"margin_for": margin_for},
    )


def _open_stream(
    parser: ExampleParser[Example], seed: int, cache: ExampleCache | None
) -> ExampleStream[Example]:
    """Return a stream of all examples, with a notice about merged tokens if there are any."""
    opened = open_examples(parser.data, parser, cache)
    notices = [*opened.notices]
    summary = parser.combine(opened.summaries)
    if summary["merges"]:
        total = sum(map(len, opened.sources))
        notices.append(
            f"{summary['first_merge']}: tokens merge across the boundary of prompt and response (in"
            f" {summary['merges']} of {total} records); these tokens are trained on as part of the"
            " response, while generation starts from the prompt's own tokens. Move space from the"
            " end of the prompt to the start of the response"
        )
    return ExampleStream(
        opened.sources, opened.weights, seed=seed, shuffle=parser.data.shuffle, notices=notices
    )


def _has_merge(example: object) -> bool:
    """Return whether tokens merge across the boundary of prompt and response in an example."""
    if isinstance(example, LabeledAnswer):
        return example.answer.prompt is not None
    if isinstance(example, Preference):
        return example.chosen.prompt is not None or example.rejected.prompt is not None
    return isinstance(example, Demonstration) and example.prompt is not None


def _read_scored_demonstration(
    scores: TeacherScores | None, record: Record, tokenizer: Tokenizer, data: DataConfig
) -> Demonstration:
    """Return the demonstration of a record, with its teacher's scores if there is a teacher."""
    read = _read_conversation if data.learned_turns == "all" else _read_demonstration
    demonstration = read(record, "response", tokenizer, data)
    return demonstration if scores is None else _add_scores(demonstration, scores, record.origin)


def _read_demonstration(
    record: Record, answer: str, tokenizer: Tokenizer, data: DataConfig
) -> Demonstration:
    """Return the demonstration of a record.

    Args:
        record: The record.
        answer: The field of the response, such as `response` or `chosen`.
        tokenizer: The policy's tokenizer.
        data: The configuration of the data.
    """
    limit = data.max_response_tokens
    allowed = f"data.max_response_tokens={limit}"
    if data.generated_tokens:
        stored_ids = read_token_ids(record.values, answer, record.origin, tokenizer)
        if stored_ids is not None:
            check_length(stored_ids, record.get_text(answer), answer, record.origin, limit, allowed)
            return _build_from_stored_ids(record, answer, stored_ids, tokenizer, data)

    prompt, response = render_exchange(record, answer, tokenizer)
    parts = tokenize_exchange(record, prompt, response, tokenizer, data)
    response_ids = (
        tokenizer.append_end_token(parts.response_part)
        if data.end_of_sequence
        else parts.response_part
    )
    check_length(response_ids, response, answer, record.origin, limit, allowed)

    return Demonstration(
        torch.cat([parts.prompt_part, response_ids]),
        parts.prompt_part.numel(),
        prompt=parts.prompt if parts.has_merge else None,
    )


def _build_from_stored_ids(
    record: Record, answer: str, response_ids: Tensor, tokenizer: Tokenizer, data: DataConfig
) -> Demonstration:
    """Return a demonstration of a response's stored token ids, int64 [R].

    If the response is an episode, only the tokens that the policy generated are trained on.
    """
    prompt_ids = _read_prompt_ids(record, tokenizer, data)
    mask = None
    if answer == "response" and record.values.get("drawn") is not None:
        prompt_mask = torch.zeros(prompt_ids.numel(), dtype=torch.bool)
        mask = torch.cat([prompt_mask, _read_generated_mask(record, response_ids)])

    return Demonstration(torch.cat([prompt_ids, response_ids]), prompt_ids.numel(), mask)


def _add_scores(demonstration: Demonstration, scores: TeacherScores, origin: str) -> Demonstration:
    """Return the demonstration with its teacher's scores; raise BadRecord if there are none."""
    row = scores.find(demonstration.tokens, demonstration.loss_mask)
    if row is None:
        raise BadRecord(
            f"{origin}: teacher.scores={scores.directory} has no scores for this record; compute"
            " them from the same data with the same tokenizer, chat template and limits (data.…)"
        )
    return replace(demonstration, teacher_row=row)


def _read_generated_mask(record: Record, tokens: Tensor) -> Tensor:
    """Return which tokens of an episode's response the policy generated, bool [R].

    Args:
        record: The record, with the field `drawn`.
        tokens: The tokens of the response, int64 [R].

    Raises:
        BadRecord: The field `drawn` is not a list of R zeros and ones, or contains no 1.
    """
    values = record.values["drawn"]
    if (
        not isinstance(values, list)
        or len(values) != len(tokens)
        or not {*values} <= {0, 1}
        or not any(values)
    ):
        raise BadRecord(
            f"{record.origin}: field `drawn` must be a list of {len(tokens)} zeros and ones (one"
            " value per token of `tokens`) and contain at least one 1"
        )
    return torch.tensor(values, dtype=torch.bool)


def _read_prompt_ids(record: Record, tokenizer: Tokenizer, data: DataConfig) -> Tensor:
    """Return the stored token ids of a record's prompt, or the tokens of its text; int64 [P]."""
    stored_ids = read_token_ids(record.values, "prompt", record.origin, tokenizer)
    limit = data.max_prompt_tokens
    if stored_ids is None:
        return tokenize_prompt(record, render_prompt(record, tokenizer), tokenizer, data)[1]
    return check_length(
        stored_ids,
        record.get_text("prompt"),
        "prompt",
        record.origin,
        limit,
        f"data.max_prompt_tokens={limit}",
    )


def _read_conversation(
    record: Record, answer: str, tokenizer: Tokenizer, data: DataConfig
) -> Demonstration:
    """Return a demonstration with all answers of a conversation (data.learned_turns=all).

    Every answer is trained on, with its end-of-turn token. If the response has stored token ids,
    only the response is trained on. See `_read_demonstration` for the arguments.
    """
    if (
        data.generated_tokens
        and read_token_ids(record.values, answer, record.origin, tokenizer) is not None
    ):
        return _read_demonstration(record, answer, tokenizer, data)
    prompt, segments = render_turns(record, answer, tokenizer)
    if not prompt.is_rendered:
        return _read_demonstration(record, answer, tokenizer, data)

    texts = [segment.text for segment in segments]
    prompt_ids, parts = _tokenize_parts(record, prompt, texts, tokenizer, data)
    masks = [torch.zeros(part.numel(), dtype=torch.bool) for part in parts]
    for segment, part, mask in zip(segments, parts, masks, strict=True):
        # Text after an answer's end-of-turn token, such as a line break, is not trained on.
        mask[: tokenizer.find_end(part)] = segment.is_answer
    tokens = torch.cat(parts)
    mask = torch.cat(masks)

    # The end-of-turn token may follow the text that the template marks as the answer, or be the
    # first token of the next turn.
    is_eos = tokenizer.is_eos(tokens)
    mask[1:] |= is_eos[1:] & mask[:-1] & ~is_eos[:-1]
    if data.end_of_sequence:
        # The end token may be new, or the last tokens may be removed: adapt the mask's length.
        tokens = tokenizer.append_end_token(tokens)
        mask = torch.cat([mask, mask.new_ones(1)])[: tokens.numel()]
        mask[-1] = True
    limit = data.max_response_tokens
    allowed = f"data.max_response_tokens={limit}, shared by all turns after the first prompt"
    check_length(tokens, segments[0].text, answer, record.origin, limit, allowed)
    mask = torch.cat([torch.zeros(prompt_ids.numel(), dtype=torch.bool), mask])
    return Demonstration(torch.cat([prompt_ids, tokens]), prompt_ids.numel(), mask)


def _read_preference_with_margin(
    margin_for: str | None, record: Record, tokenizer: Tokenizer, data: DataConfig
) -> Preference:
    """Return the preference of a record; raise BadRecord if it lacks a required margin."""
    pair = _read_preference(record, tokenizer, data)
    return replace(pair, margin=read_margin(record, data, margin_for))


def _read_preference(record: Record, tokenizer: Tokenizer, data: DataConfig) -> Preference:
    """Return the preference of a record without its margin; raise BadRecord if the two responses
    are equal."""
    chosen = _read_demonstration(record, "chosen", tokenizer, data)
    rejected = _read_demonstration(record, "rejected", tokenizer, data)
    if not torch.equal(_get_prompt_ids(chosen), _get_prompt_ids(rejected)):
        raise BadRecord(f"{record.origin}: `chosen` and `rejected` must have the same prompt")

    # If tokens merge across the boundary in only one of the two sequences, both responses begin at
    # the earlier boundary, so that their log-probs are of the same text (as in TRL's DPOTrainer).
    shared_length = min(chosen.prompt_length, rejected.prompt_length)
    chosen = replace(chosen, prompt_length=shared_length)
    rejected = replace(rejected, prompt_length=shared_length)
    if torch.equal(chosen.tokens, rejected.tokens):
        raise BadRecord(
            f"{record.origin}: `chosen` and `rejected` are identical; a pair needs two different"
            " responses"
        )
    return Preference(chosen, rejected, None)


def _get_prompt_ids(demonstration: Demonstration) -> Tensor:
    """Return the tokens of the prompt alone, int64 [P]."""
    if demonstration.prompt is not None:
        return demonstration.prompt
    return demonstration.tokens[: demonstration.prompt_length]


def _read_labeled_answer(record: Record, tokenizer: Tokenizer, data: DataConfig) -> LabeledAnswer:
    label = read_label(record)
    return LabeledAnswer(_read_demonstration(record, "response", tokenizer, data), label)


def _read_labeled_steps(record: Record, tokenizer: Tokenizer, data: DataConfig) -> LabeledSteps:
    steps, labels = read_steps(record)

    prompt = render_prompt(record, tokenizer)
    prompt_ids, parts = _tokenize_parts(record, prompt, steps, tokenizer, data)
    # Each error message shows the step at which the common limit is exceeded.
    limit = data.max_response_tokens
    allowed = f"data.max_response_tokens={limit}, shared by all steps"
    for index, (step, part) in enumerate(zip(steps, parts, strict=True)):
        check_length(part, step, f"text of steps[{index}]", record.origin, limit, allowed)
        limit -= part.numel()

    # Positions of the steps' last tokens: the cumulative lengths minus 1, without the prompt's.
    lengths = torch.tensor([part.numel() for part in [prompt_ids, *parts]])
    return LabeledSteps(
        torch.cat([prompt_ids, *parts]),
        int(lengths[0]),
        lengths.cumsum(0)[1:] - 1,
        torch.tensor(labels, dtype=torch.float32),
    )


def _tokenize_parts(
    record: Record,
    prompt: PromptText,
    texts: Sequence[str],
    tokenizer: Tokenizer,
    data: DataConfig,
) -> tuple[Tensor, list[Tensor]]:
    """Tokenize a prompt and the texts that follow it together.

    Returns:
        The prompt's tokens int64 [P], and the tokens of each text. A token that merges the end of
        one text with the start of the next belongs to the next text.
    """
    response = "".join(texts)
    parts = tokenize_exchange(record, prompt, response, tokenizer, data)
    tokens = parts.response_part

    # The first token of a text is the first one that ends after the boundary before the text.
    full_text = extract_prompt(prompt.text, data, record.origin) + response
    all_ends = tokenizer.compute_token_ends(full_text, add_bos=not prompt.is_rendered)
    ends = all_ends[-tokens.numel() :]
    lengths = [len(text) for text in texts[:-1]]
    boundaries = itertools.accumulate(lengths, initial=len(full_text) - len(response))
    starts = torch.searchsorted(ends, torch.tensor([*boundaries]), right=True).tolist()
    # The first text begins with the response part, also if its first token is partly the prompt's.
    starts[0] = 0

    bounds = itertools.pairwise([*starts, tokens.numel()])
    return parts.prompt_part, [tokens[start:end] for start, end in bounds]


def _list_demonstration_columns(prefix: str = "") -> list[pa.Field]:
    """Return the columns of a demonstration."""
    return [
        pa.field(f"{prefix}tokens", TOKENS),
        pa.field(f"{prefix}prompt_length", pa.int32()),
        pa.field(f"{prefix}response_mask", MASK),
        pa.field(f"{prefix}prompt", TOKENS),
    ]


def _encode_demonstration(demonstration: Demonstration, prefix: str = "") -> dict[str, Any]:
    """Return the columns of a demonstration without its teacher's scores."""
    return {
        f"{prefix}tokens": demonstration.tokens,
        f"{prefix}prompt_length": demonstration.prompt_length,
        f"{prefix}response_mask": demonstration.response_mask,
        f"{prefix}prompt": demonstration.prompt,
    }


def _decode_demonstration(row: Row, prefix: str = "") -> Demonstration:
    return Demonstration(
        row.get_tokens(f"{prefix}tokens"),
        row.get(f"{prefix}prompt_length"),
        row.get_mask(f"{prefix}response_mask"),
        prompt=row.get_optional_tokens(f"{prefix}prompt"),
    )


def _encode_scored_demonstration(demonstration: Demonstration) -> Mapping[str, Any]:
    scores = demonstration.teacher_row
    return {
        **_encode_demonstration(demonstration),
        "teacher_file": None if scores is None else str(scores.file),
        "teacher_first": None if scores is None else scores.first,
        "teacher_count": None if scores is None else scores.count,
    }


def _decode_scored_demonstration(row: Row) -> Demonstration:
    demonstration = _decode_demonstration(row)
    file = row.get("teacher_file")
    if file is None:
        return demonstration
    scores = TeacherScoresRow(Path(file), row.get("teacher_first"), row.get("teacher_count"))
    return replace(demonstration, teacher_row=scores)


def _encode_preference(preference: Preference) -> Mapping[str, Any]:
    return {
        **_encode_demonstration(preference.chosen, "chosen_"),
        **_encode_demonstration(preference.rejected, "rejected_"),
        "margin": preference.margin,
    }


def _decode_preference(row: Row) -> Preference:
    return Preference(
        _decode_demonstration(row, "chosen_"),
        _decode_demonstration(row, "rejected_"),
        row.get("margin"),
    )


def _encode_labeled_answer(example: LabeledAnswer) -> Mapping[str, Any]:
    return {**_encode_demonstration(example.answer), "is_desirable": example.is_desirable}


def _decode_labeled_answer(row: Row) -> LabeledAnswer:
    return LabeledAnswer(_decode_demonstration(row), row.get("is_desirable"))


def _encode_labeled_steps(example: LabeledSteps) -> Mapping[str, Any]:
    return {
        "tokens": example.tokens,
        "prompt_length": example.prompt_length,
        "positions": example.positions,
        "labels": example.labels,
    }


def _decode_labeled_steps(row: Row) -> LabeledSteps:
    return LabeledSteps(
        row.get_tokens("tokens"),
        row.get("prompt_length"),
        row.get_tokens("positions"),
        torch.tensor(row.get("labels"), dtype=torch.float32),
    )


DEMONSTRATIONS = ExampleFormat(
    "demonstration",
    pa.schema(
        [
            *_list_demonstration_columns(),
            pa.field("teacher_file", pa.string()),
            pa.field("teacher_first", pa.int64()),
            pa.field("teacher_count", pa.int32()),
        ]
    ),
    _encode_scored_demonstration,
    _decode_scored_demonstration,
)
"""Format of demonstrations in a table."""
PREFERENCES = ExampleFormat(
    "preference",
    pa.schema(
        [
            *_list_demonstration_columns("chosen_"),
            *_list_demonstration_columns("rejected_"),
            pa.field("margin", pa.float64()),
        ]
    ),
    _encode_preference,
    _decode_preference,
)
"""Format of preferences in a table."""
LABELED_ANSWERS = ExampleFormat(
    "labeled_answer",
    pa.schema([*_list_demonstration_columns(), pa.field("is_desirable", pa.bool_())]),
    _encode_labeled_answer,
    _decode_labeled_answer,
)
"""Format of labeled answers in a table."""
LABELED_STEPS = ExampleFormat(
    "labeled_steps",
    pa.schema(
        [
            pa.field("tokens", TOKENS),
            pa.field("prompt_length", pa.int32()),
            pa.field("positions", TOKENS),
            pa.field("labels", pa.list_(pa.float32())),
        ]
    ),
    _encode_labeled_steps,
    _decode_labeled_steps,
)
"""Format of labeled steps in a table."""
