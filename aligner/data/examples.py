"""Examples of the offline trainers as tokens: demonstrations, preferences, labeled answers and
labeled steps, and the streams of them that a run trains on."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from aligner.data.conversations import PromptText, render_exchange, render_prompt, render_turns
from aligner.data.prompts import (
    ExampleStream,
    check_length,
    extract_prompt,
    read_token_ids,
    tokenize_exchange,
    tokenize_prompt,
)
from aligner.data.records import BadRecord, Record, has_steps, read_examples
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


def open_run_data(config: Config, tokenizer: Tokenizer) -> RunData:
    """Read, check and tokenize the data of an offline run.

    Raises:
        ConfigError: See `open_demonstrations`; or a source has too few records for
            `data.held_out`; or `data.normalization` is set for labeled steps.
    """
    data = config.data
    trainer = config.algorithm.trainer
    examples: ExampleStream[Any]
    if trainer in ("sft", "teacher_scores"):
        scores = open_teacher_scores(config) if trainer == "sft" else None
        examples = open_demonstrations(data, tokenizer, config.seed, scores)
    elif trainer == "reward_model" and has_steps(data):
        examples = open_labeled_steps(data, tokenizer, config.seed)
    elif config.algorithm.has_labels:
        examples = open_labeled_answers(data, tokenizer, config.seed)
    else:
        preference = config.algorithm.preference
        margin_setting = (
            f"algorithm.preference.kind={preference.kind}"
            if trainer == "dpo" and preference.has_margin
            else None
        )
        examples = open_preferences(data, tokenizer, config.seed, margin_for=margin_setting)

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
    sample_stream = open_demonstrations(sample_data, tokenizer, config.seed)
    samples = sample_stream.take(0, min(len(sample_stream), data.normalization_samples))
    return RunData(examples, held_out, samples, (*notices, *sample_stream.notices))


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
    data: DataConfig, tokenizer: Tokenizer, seed: int, scores: TeacherScores | None = None
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

    Raises:
        ConfigError: A source cannot be read; or a record is invalid, too long or without scores,
            and is not to be skipped. The message names the record.
    """
    read = _read_conversation if data.learned_turns == "all" else _read_demonstration

    def parse(record: Record) -> Demonstration:
        demonstration = read(record, "response", tokenizer, data)
        return (
            demonstration if scores is None else _add_scores(demonstration, scores, record.origin)
        )

    return _open_stream(data, seed, parse)


def open_preferences(
    data: DataConfig, tokenizer: Tokenizer, seed: int, margin_for: str | None = None
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

    Raises:
        ConfigError: See `open_demonstrations`. A record with two equal responses is invalid, and so
            is a record without a required margin.
    """

    def parse(record: Record) -> Preference:
        pair = _read_preference(record, tokenizer, data)
        if margin_for is not None and pair.margin is None:
            problem = (
                "record lacks field `margin`"
                if data.margin
                else "field `margin` is ignored because data.margin=false"
            )
            raise BadRecord(f"{record.origin}: {problem}; {margin_for} requires it")
        return pair

    return _open_stream(data, seed, parse)


def open_labeled_answers(
    data: DataConfig, tokenizer: Tokenizer, seed: int
) -> ExampleStream[LabeledAnswer]:
    """Read, check and tokenize all labeled answers.

    A record has a `prompt` and a `response`, or the `messages` of a conversation, and a `label`,
    true or false.

    Raises:
        ConfigError: See `open_demonstrations`.
    """
    return _open_stream(data, seed, lambda record: _read_labeled_answer(record, tokenizer, data))


def open_labeled_steps(
    data: DataConfig, tokenizer: Tokenizer, seed: int
) -> ExampleStream[LabeledSteps]:
    """Read, check and tokenize all labeled steps.

    A record has a `prompt` or `messages`, `steps` (texts that are joined without a separator), and
    the `labels` of the steps, 0 or 1.

    Raises:
        ConfigError: See `open_demonstrations`.
    """
    return _open_stream(data, seed, lambda record: _read_labeled_steps(record, tokenizer, data))


def _open_stream(
    data: DataConfig, seed: int, parse: Callable[[Record], Example]
) -> ExampleStream[Example]:
    """Return a stream of all examples, with a notice about merged tokens if there are any."""
    merge_origins: list[str] = []

    def parse_and_check(record: Record) -> Example:
        example = parse(record)
        if _has_merge(example):
            merge_origins.append(record.origin)
        return example

    sources, weights, notices = read_examples(data, parse_and_check)
    if merge_origins:
        total = sum(map(len, sources))
        notices.append(
            f"{merge_origins[0]}: tokens merge across the boundary of prompt and response (in"
            f" {len(merge_origins)} of {total} records); these tokens are trained on as part of the"
            " response, while generation starts from the prompt's own tokens. Move space from the"
            " end of the prompt to the start of the response"
        )
    return ExampleStream(sources, weights, seed=seed, shuffle=data.shuffle, notices=notices)


def _has_merge(example: object) -> bool:
    """Return whether tokens merge across the boundary of prompt and response in an example."""
    if isinstance(example, LabeledAnswer):
        return example.answer.prompt is not None
    if isinstance(example, Preference):
        return example.chosen.prompt is not None or example.rejected.prompt is not None
    return isinstance(example, Demonstration) and example.prompt is not None


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


def _read_preference(record: Record, tokenizer: Tokenizer, data: DataConfig) -> Preference:
    """Return the preference of a record; raise BadRecord if the two responses are equal."""
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
    return Preference(chosen, rejected, _read_margin(record) if data.margin else None)


def _get_prompt_ids(demonstration: Demonstration) -> Tensor:
    """Return the tokens of the prompt alone, int64 [P]."""
    if demonstration.prompt is not None:
        return demonstration.prompt
    return demonstration.tokens[: demonstration.prompt_length]


def _read_margin(record: Record) -> float | None:
    margin = record.values.get("margin")
    if margin is None:
        return None
    if (
        isinstance(margin, bool)
        or not isinstance(margin, (int, float))
        or not 0 <= margin < math.inf
    ):
        raise BadRecord(
            f"{record.origin}: field `margin` is {margin!r}, must be a finite number >= 0"
        )
    return float(margin)


def _read_labeled_answer(record: Record, tokenizer: Tokenizer, data: DataConfig) -> LabeledAnswer:
    label = record.values.get("label")
    if label not in (0, 1):
        raise BadRecord(f"{record.origin}: field `label` is {label!r}, must be true or false")
    return LabeledAnswer(_read_demonstration(record, "response", tokenizer, data), bool(label))


def _read_labeled_steps(record: Record, tokenizer: Tokenizer, data: DataConfig) -> LabeledSteps:
    steps = record.get_list("steps")
    labels = record.get_list("labels")
    if len(steps) != len(labels):
        raise BadRecord(
            f"{record.origin}: got {len(steps)} `steps` but {len(labels)} `labels`; every step"
            " needs one label"
        )
    for index, (step, label) in enumerate(zip(steps, labels, strict=True)):
        if not isinstance(step, str) or not step.strip():
            raise BadRecord(
                f"{record.origin}: steps[{index}] is {step!r}, must be a non-empty string"
            )
        if label not in (0, 1):
            raise BadRecord(f"{record.origin}: labels[{index}] is {label!r}, must be 0 or 1")

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
