"""What the offline trainers learn from: streams of demonstrations, preferences, labeled answers and
steps, as tokens."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from aligner.data.conversations import PromptText, all_turns, exchange, prompt_text
from aligner.data.prompts import (
    asked_part,
    drawn_tokens,
    exchange_tokens,
    prompt_tokens,
    within,
)
from aligner.data.records import BadRecord, Record, has_steps, read_examples
from aligner.data.streams import ExampleStream
from aligner.data.teacher_scores import TaughtRow, TeacherScores
from aligner.data.tokenizer import Tokenizer
from aligner.errors import ConfigError
from aligner.models.model_source import directory_shape, model_directory
from aligner.models.vocabulary import require_policys_tokens
from aligner.schema import Config, DataConfig

Example = TypeVar("Example")


@dataclass(frozen=True)
class Demonstration:
    """A prompt and the response to imitate, tokenized together.

    A response with stored token ids consists of these. Any other response ends with an
    end-of-sequence token unless data.end_of_sequence=false.
    """

    tokens: Tensor
    """int64 [T]: prompt and response"""
    prompt_length: int
    """Number of tokens before the response, at least 1."""
    learned: Tensor | None = None
    """bool [T]: which tokens are learned from, behind the prompt; None for all there."""
    taught: TaughtRow | None = None
    """Where a teacher's word on it is; None without a teacher."""
    prompt: Tensor | None = None
    """int64 [P]: the prompt's own tokens, if tokens of prompt and response merge; otherwise the
    first `prompt_length` tokens."""

    @property
    def is_learned(self) -> Tensor:
        """bool [T]: which tokens are learned from."""
        behind = torch.arange(self.tokens.numel()) >= self.prompt_length
        return behind if self.learned is None else behind & self.learned


@dataclass(frozen=True)
class Preference:
    """Two responses to one prompt, of which one is better."""

    chosen: Demonstration
    rejected: Demonstration
    margin: float | None
    """By how much the chosen one is better, at least 0; None where the data does not say."""


@dataclass(frozen=True)
class LabeledAnswer:
    """A response, and whether it is one to come nearer to or to leave."""

    answer: Demonstration
    is_desirable: bool


@dataclass(frozen=True)
class LabeledSteps:
    """A response in steps, each with a label; no end-of-sequence token is added."""

    tokens: Tensor
    """int64 [T]: prompt and steps"""
    prompt_length: int
    positions: Tensor
    """int64 [K]: the place in `tokens` of each step's last token, ascending"""
    labels: Tensor
    """float32 [K]: 1 for a step that is right, 0 for one that is not"""

    def __post_init__(self) -> None:
        if self.positions.shape != self.labels.shape or self.labels.dtype != torch.float32:
            raise ValueError(
                f"labels: got {self.labels.dtype} {tuple(self.labels.shape)}, must be float32"
                f" {tuple(self.positions.shape)}"
            )


@dataclass(frozen=True)
class RunData:
    """All that a run of an offline trainer reads."""

    examples: ExampleStream[Any]
    held_out: list[Any]
    """Those that are evaluated on and never trained on."""
    samples: list[Demonstration] | None
    """The initial policy's, where a file of them is given."""
    notices: tuple[str, ...]
    """What a person should know about them, a line each."""


def open_run_data(config: Config, tokenizer: Tokenizer) -> RunData:
    """Read, check and tokenize all of it.

    Raises ConfigError as `open_demonstrations` does, and where a source has no more rows than are
    to be held out.
    """
    data, trainer = config.data, config.algorithm.trainer
    examples: ExampleStream[Any]
    if trainer in ("sft", "teacher_scores"):
        scores = open_scores(config) if trainer == "sft" else None
        examples = open_demonstrations(data, tokenizer, config.seed, scores)
    elif trainer == "reward_model" and has_steps(data):
        examples = open_labeled_steps(data, tokenizer, config.seed)
    elif config.algorithm.has_labels:
        examples = open_labeled_answers(data, tokenizer, config.seed)
    else:
        preference = config.algorithm.preference
        wanted_by = (
            f"algorithm.preference.kind={preference.kind}"
            if trainer == "dpo" and preference.has_margin
            else None
        )
        examples = open_preferences(data, tokenizer, config.seed, margin_for=wanted_by)
    if data.normalization is not None and isinstance(examples.take(0, 1)[0], LabeledSteps):
        raise ConfigError(
            f"data.normalization={data.normalization}: is not supported for records with `steps`: a"
            " process reward model returns logits, which are not normalized; remove"
            " data.normalization"
        )
    notices = examples.notices
    examples, held_out = examples.hold_out(data.held_out if config.algorithm.learns else 0)
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
    # Samples have the prompts that the policy was given, cut by then.
    uncut: dict[str, Any] = {"prompt_after": None, "prompt_before": None}
    given = replace(data, path=data.normalization, sources={}, fields={}, shuffle=False, **uncut)
    samples = open_demonstrations(given, tokenizer, config.seed)
    taken = samples.take(0, min(len(samples), data.normalization_samples))
    return RunData(examples, held_out, taken, (*notices, *samples.notices))


def open_scores(config: Config) -> TeacherScores | None:
    """What `teacher.scores` names, if it does.

    Raises ConfigError where it cannot be read, or is of a teacher to whom the policy's tokens are
    others.
    """
    if config.teacher.scores is None:
        return None
    policy, scores = model_directory(config), TeacherScores(Path(config.teacher.scores))
    require_policys_tokens("teacher.scores", scores.directory, policy)
    known = directory_shape(policy, "model.path").vocab_size
    if scores.vocabulary > known:
        raise ConfigError(
            f"teacher.scores={scores.directory}: contains token ids up to {scores.vocabulary - 1},"
            f" but the policy's vocab_size is {known}; use scores of a teacher with the policy's"
            " vocabulary"
        )
    return scores


def open_demonstrations(
    data: DataConfig, tokenizer: Tokenizer, seed: int, scores: TeacherScores | None = None
) -> ExampleStream[Demonstration]:
    """Demonstrations: `prompt` and `response`, or the `messages` of a conversation, whose last
    answer is the response.

    With `data.learned_turns` of all a conversation's response begins with its first answer, and
    only answers are learned from.

    All are read, checked and tokenized at once. Raises ConfigError for a source that cannot be
    read, or, unless they are to be skipped, a record that is not as it must be or too long, or,
    where `scores` are given, has none, with its place.
    """
    read = _conversation if data.learned_turns == "all" else _demonstration

    def parse(record: Record) -> Demonstration:
        demonstration = read(record, "response", tokenizer, data)
        return demonstration if scores is None else _taught(demonstration, scores, record.origin)

    return _open(data, seed, parse)


def open_preferences(
    data: DataConfig, tokenizer: Tokenizer, seed: int, margin_for: str | None = None
) -> ExampleStream[Preference]:
    """Preferences: `prompt`, `chosen` and `rejected`, or two conversations that differ in their
    last answer, and `margin`, which is not looked at where `data.margin` is false.

    Raises as `open_demonstrations` does; a record whose two answers are equal is not as it must be,
    nor is one without the margin that `margin_for`, as a message calls it, asks for.
    """

    def parse(record: Record) -> Preference:
        pair = _preference(record, tokenizer, data)
        if margin_for is not None and pair.margin is None:
            problem = (
                "record lacks field `margin`"
                if data.margin
                else "field `margin` is ignored because data.margin=false"
            )
            raise BadRecord(f"{record.origin}: {problem}; {margin_for} requires it")
        return pair

    return _open(data, seed, parse)


def open_labeled_answers(
    data: DataConfig, tokenizer: Tokenizer, seed: int
) -> ExampleStream[LabeledAnswer]:
    """Labeled answers: `prompt` and `response`, or the `messages` of a conversation, and `label`,
    true or false.

    Raises as `open_demonstrations` does.
    """
    return _open(data, seed, lambda record: _labeled_answer(record, tokenizer, data))


def open_labeled_steps(
    data: DataConfig, tokenizer: Tokenizer, seed: int
) -> ExampleStream[LabeledSteps]:
    """Labeled steps: `prompt` or `messages`, `steps` (texts, joined with nothing between them) and
    their `labels`, 0 or 1.

    Raises as `open_demonstrations` does.
    """
    return _open(data, seed, lambda record: _labeled_steps(record, tokenizer, data))


def _open(
    data: DataConfig, seed: int, parse: Callable[[Record], Example]
) -> ExampleStream[Example]:
    merged: list[str] = []

    def parse_and_note(record: Record) -> Example:
        example = parse(record)
        if _has_merge(example):
            merged.append(record.origin)
        return example

    sources, weights, notices = read_examples(data, parse_and_note)
    if merged:
        total = sum(map(len, sources))
        notices.append(
            f"{merged[0]}: tokens merge across the boundary of prompt and response (in"
            f" {len(merged)} of {total} records); these tokens are trained on as part of the"
            " response, while generation starts from the prompt's own tokens. Move space from the"
            " end of the prompt to the start of the response"
        )
    return ExampleStream(sources, weights, seed=seed, shuffle=data.shuffle, notices=notices)


def _has_merge(example: object) -> bool:
    """Whether tokens merge across the boundary of a prompt and a response of the example."""
    if isinstance(example, LabeledAnswer):
        return example.answer.prompt is not None
    if isinstance(example, Preference):
        return example.chosen.prompt is not None or example.rejected.prompt is not None
    return isinstance(example, Demonstration) and example.prompt is not None


def _demonstration(
    record: Record, answer: str, tokenizer: Tokenizer, data: DataConfig
) -> Demonstration:
    limit = data.max_response_tokens
    allowed = f"data.max_response_tokens={limit}"
    if data.generated_tokens:
        drawn = drawn_tokens(record.values, answer, record.origin, tokenizer)
        if drawn is not None:
            within(drawn, record.text(answer), answer, record.origin, limit, allowed)
            return _with_stored_tokens(record, answer, drawn, tokenizer, data)

    prompt, response = exchange(record, answer, tokenizer)
    parts = exchange_tokens(record, prompt, response, tokenizer, data)
    answered = tokenizer.ended(parts.response_part) if data.end_of_sequence else parts.response_part
    within(answered, response, answer, record.origin, limit, allowed)

    return Demonstration(
        torch.cat([parts.prompt_part, answered]),
        parts.prompt_part.numel(),
        prompt=parts.prompt if parts.has_merge else None,
    )


def _with_stored_tokens(
    record: Record, answer: str, drawn: Tensor, tokenizer: Tokenizer, data: DataConfig
) -> Demonstration:
    """Return a demonstration of a response's stored token ids, int64 [R]; of an episode, only the
    tokens that the policy generated are learned."""
    asked = _given_prompt(record, tokenizer, data)
    learned = None
    if answer == "response" and record.values.get("drawn") is not None:
        not_learned = torch.zeros(asked.numel(), dtype=torch.bool)
        learned = torch.cat([not_learned, _drawn(record, drawn)])

    return Demonstration(torch.cat([asked, drawn]), asked.numel(), learned)


def _taught(demonstration: Demonstration, scores: TeacherScores, origin: str) -> Demonstration:
    found = scores.find(demonstration.tokens, demonstration.is_learned)
    if found is None:
        raise BadRecord(
            f"{origin}: teacher.scores={scores.directory} has no scores for this record; compute"
            " them from the same data with the same tokenizer, chat template and limits (data.…)"
        )
    return replace(demonstration, taught=found)


def _drawn(record: Record, tokens: Tensor) -> Tensor:
    """bool [R]: which tokens of an episode's response the policy drew. Raises BadRecord where they
    are not told so."""
    drawn = record.values["drawn"]
    if (
        not isinstance(drawn, list)
        or len(drawn) != len(tokens)
        or not {*drawn} <= {0, 1}
        or not any(drawn)
    ):
        raise BadRecord(
            f"{record.origin}: field `drawn` must be a list of {len(tokens)} zeros and ones (one"
            " value per token of `tokens`) and contain at least one 1"
        )
    return torch.tensor(drawn, dtype=torch.bool)


def _given_prompt(record: Record, tokenizer: Tokenizer, data: DataConfig) -> Tensor:
    """The prompt of a response that was drawn: the tokens that the record says it was given as,
    else as any other."""
    given, limit = (
        drawn_tokens(record.values, "prompt", record.origin, tokenizer),
        data.max_prompt_tokens,
    )
    if given is None:
        return prompt_tokens(record, prompt_text(record, tokenizer), tokenizer, data)[1]
    return within(
        given,
        record.text("prompt"),
        "prompt",
        record.origin,
        limit,
        f"data.max_prompt_tokens={limit}",
    )


def _conversation(
    record: Record, answer: str, tokenizer: Tokenizer, data: DataConfig
) -> Demonstration:
    """Return a demonstration that learns all answers of a conversation, each with its end-of-turn
    token; of a response with stored token ids, only these are learned."""
    if (
        data.generated_tokens
        and drawn_tokens(record.values, answer, record.origin, tokenizer) is not None
    ):
        return _demonstration(record, answer, tokenizer, data)
    prompt, segments = all_turns(record, answer, tokenizer)
    if not prompt.is_worded:
        return _demonstration(record, answer, tokenizer, data)

    texts = [segment.text for segment in segments]
    asked, parts = _tokens_of_parts(record, prompt, texts, tokenizer, data)
    learned = [torch.zeros(part.numel(), dtype=torch.bool) for part in parts]
    for segment, part, mask in zip(segments, parts, learned, strict=True):
        mask[: tokenizer.end_of(part)] = segment.is_answer
    tokens, mask = torch.cat(parts), torch.cat(learned)

    # The end-of-turn token may follow the text that the template marks as the answer, or be the
    # first token of the next turn.
    ends = tokenizer.ends(tokens)
    mask[1:] |= ends[1:] & mask[:-1] & ~ends[:-1]
    if data.end_of_sequence:
        tokens = tokenizer.ended(tokens)
        mask = torch.cat([mask, mask.new_ones(1)])[: tokens.numel()]
        mask[-1] = True
    limit = data.max_response_tokens
    allowed = f"data.max_response_tokens={limit}, shared by all turns after the first prompt"
    within(tokens, segments[0].text, answer, record.origin, limit, allowed)
    mask = torch.cat([torch.zeros(asked.numel(), dtype=torch.bool), mask])
    return Demonstration(torch.cat([asked, tokens]), asked.numel(), mask)


def _preference(record: Record, tokenizer: Tokenizer, data: DataConfig) -> Preference:
    chosen = _demonstration(record, "chosen", tokenizer, data)
    rejected = _demonstration(record, "rejected", tokenizer, data)
    if not torch.equal(_prompt_of(chosen), _prompt_of(rejected)):
        raise BadRecord(f"{record.origin}: `chosen` and `rejected` must have the same prompt")

    # If tokens merge across the boundary in only one of the two, both responses begin with the
    # earlier boundary, so that their log-probs are of the same text (as in TRL's DPOTrainer).
    shared = min(chosen.prompt_length, rejected.prompt_length)
    chosen = replace(chosen, prompt_length=shared)
    rejected = replace(rejected, prompt_length=shared)
    if torch.equal(chosen.tokens, rejected.tokens):
        raise BadRecord(
            f"{record.origin}: `chosen` and `rejected` are identical; a pair needs two different"
            " responses"
        )
    return Preference(chosen, rejected, _margin(record) if data.margin else None)


def _prompt_of(demonstration: Demonstration) -> Tensor:
    """Return the tokens of the prompt alone, int64 [P]."""
    if demonstration.prompt is not None:
        return demonstration.prompt
    return demonstration.tokens[: demonstration.prompt_length]


def _margin(record: Record) -> float | None:
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


def _labeled_answer(record: Record, tokenizer: Tokenizer, data: DataConfig) -> LabeledAnswer:
    label = record.values.get("label")
    if label not in (0, 1):
        raise BadRecord(f"{record.origin}: field `label` is {label!r}, must be true or false")
    return LabeledAnswer(_demonstration(record, "response", tokenizer, data), bool(label))


def _labeled_steps(record: Record, tokenizer: Tokenizer, data: DataConfig) -> LabeledSteps:
    steps, labels = record.items("steps"), record.items("labels")
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
    prompt = prompt_text(record, tokenizer)
    asked, parts = _tokens_of_parts(record, prompt, steps, tokenizer, data)
    limit = data.max_response_tokens
    allowed = f"data.max_response_tokens={limit}, shared by all steps"
    for index, (step, part) in enumerate(zip(steps, parts, strict=True)):
        within(part, step, f"text of steps[{index}]", record.origin, limit, allowed)
        limit -= part.numel()

    lengths = torch.tensor([part.numel() for part in [asked, *parts]])
    return LabeledSteps(
        torch.cat([asked, *parts]),
        int(lengths[0]),
        lengths.cumsum(0)[1:] - 1,
        torch.tensor(labels, dtype=torch.float32),
    )


def _tokens_of_parts(
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
    parts = exchange_tokens(record, prompt, response, tokenizer, data)
    tokens = parts.response_part

    whole = asked_part(prompt.text, data, record.origin) + response
    ends = tokenizer.token_ends(whole, begins=not prompt.is_worded)[-tokens.numel() :]
    lengths = [len(text) for text in texts[:-1]]
    boundaries = itertools.accumulate(lengths, initial=len(whole) - len(response))
    starts = torch.searchsorted(ends, torch.tensor([*boundaries]), right=True).tolist()
    # The first text begins with the response part, also if its first token is partly the prompt's.
    starts[0] = 0

    bounds = itertools.pairwise([*starts, tokens.numel()])
    return parts.prompt_part, [tokens[start:end] for start, end in bounds]
