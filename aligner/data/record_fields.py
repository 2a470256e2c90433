"""The fields of records that trainers read, before a tokenizer renders them.

`require_trainer_fields` checks a record for a trainer. The module does not import torch, so that
`aligner validate` can use it.
"""

import math
from typing import Any

from aligner.data.chat_template import normalize_messages
from aligner.data.records import BadRecord, Record
from aligner.errors import AlignerError
from aligner.schema import Config, DataConfig

ASSISTANT = "assistant"
"""Role of the messages that the model writes."""


def require_trainer_fields(record: Record, config: Config, *, has_labeled_steps: bool) -> None:
    """Raise BadRecord if a record lacks a field that the run's trainer reads, or if its value has
    the wrong type.

    Args:
        record: The record.
        config: The run's configuration.
        has_labeled_steps: Whether the records are labeled steps; see `has_steps` in
            `aligner.data.records`.
    """
    trainer = config.algorithm.trainer
    if config.algorithm.generates_samples:
        require_prompt(record)
        if config.algorithm.has_demonstrations:
            require_exchange(record, "response")
    elif trainer in ("sft", "teacher_scores"):
        require_exchange(record, "response")
    elif trainer == "reward_model" and has_labeled_steps:
        require_prompt(record)
        read_steps(record)
    elif config.algorithm.has_labels:
        require_exchange(record, "response")
        read_label(record)
    else:
        require_exchange(record, "chosen")
        require_exchange(record, "rejected")
        read_margin(record, config.data, describe_margin_setting(config))


def require_prompt(record: Record) -> None:
    """Raise BadRecord if a record has neither a text nor messages as its prompt."""
    name, messages = find_prompt(record)
    if messages is None:
        record.get_text(name)


def require_exchange(record: Record, answer: str) -> None:
    """Raise BadRecord if a record has no prompt or no response.

    Args:
        record: The record.
        answer: The field of the response, such as `response` or `chosen`.
    """
    name, messages = find_conversation(record, answer)
    if messages is None:
        record.get_text("prompt")
        record.get_text(name)


def find_prompt(record: Record) -> tuple[str, list[dict[str, Any]] | None]:
    """Return the field of a record's prompt, and its messages.

    The messages do not include a final message of the assistant; None for a plain text. A pair of
    conversations contains its prompt in the chosen conversation.
    """
    if not record.has_messages:
        return "prompt", None
    name = next(name for name in ("prompt", "messages", "chosen") if name in record.values)
    messages = _get_messages(record, name)
    return name, messages[:-1] if messages[-1]["role"] == ASSISTANT else messages


def find_conversation(record: Record, answer: str) -> tuple[str, list[dict[str, Any]] | None]:
    """Return the field of the response, and the messages of the whole conversation.

    The last message is the assistant's. The messages are None if prompt and response are texts.

    Raises:
        BadRecord: A message is invalid, or the last message is not the assistant's or is empty.
    """
    name = (
        "messages"
        if answer == "response" and answer not in record.values and "messages" in record.values
        else answer
    )
    prompt, response = record.values.get("prompt"), record.values.get(name)
    if not isinstance(prompt, list) and not isinstance(response, list):
        return name, None
    prompt_messages = _get_messages(record, "prompt") if isinstance(prompt, list) else []
    response_messages = (
        _get_messages(record, name)
        if isinstance(response, list)
        else [{"role": ASSISTANT, "content": record.get_text(name)}]
    )
    # Some preference datasets repeat the prompt at the start of each response.
    repeats_prompt = (
        bool(prompt_messages) and response_messages[: len(prompt_messages)] == prompt_messages
    )
    messages = response_messages if repeats_prompt else [*prompt_messages, *response_messages]
    if messages[-1]["role"] != ASSISTANT:
        raise BadRecord(
            f"{record.origin}: {name}: the last message has role {messages[-1]['role']!r}, must"
            f" have role {ASSISTANT!r}"
        )
    if not (messages[-1].get("content") or "").strip() and not messages[-1].get("tool_calls"):
        raise BadRecord(f"{record.origin}: {name}: the last message is empty")
    return name, messages


def _get_messages(record: Record, name: str) -> list[dict[str, Any]]:
    """Return the messages in a field; raise BadRecord if one is invalid."""
    messages = record.get_list(name)
    for index, message in enumerate(messages):
        if not (
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and _has_content(message)
        ):
            raise BadRecord(
                f"{record.origin}: {name}[{index}]: a message must have `role` and `content`, both"
                " strings, or `role` and `tool_calls`, a non-empty list"
            )
    try:
        return normalize_messages(messages)
    except AlignerError as error:
        raise BadRecord(f"{record.origin}: {name}: {error}") from error


def _has_content(message: dict[str, Any]) -> bool:
    content, calls = message.get("content"), message.get("tool_calls")
    return isinstance(content, str) or (content is None and isinstance(calls, list) and bool(calls))


def read_label(record: Record) -> bool:
    """Return the label of a response, for KTO; raise BadRecord if it is not true or false."""
    label = record.values.get("label")
    if label not in (0, 1):
        raise BadRecord(f"{record.origin}: field `label` is {label!r}, must be true or false")
    return bool(label)


def read_steps(record: Record) -> tuple[list[str], list[int]]:
    """Return the steps of a response and their labels, 0 or 1; raise BadRecord if they are
    invalid."""
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
    return steps, labels


def describe_margin_setting(config: Config) -> str | None:
    """Return the setting that requires a margin in every record; None if margins are optional."""
    preference = config.algorithm.preference
    if config.algorithm.trainer == "dpo" and preference.has_margin:
        return f"algorithm.preference.kind={preference.kind}"
    return None


def read_margin(record: Record, data: DataConfig, margin_for: str | None) -> float | None:
    """Return the margin of a pair of responses; None if it has none or `data.margin` is false.

    Args:
        record: The record.
        data: The configuration of the data.
        margin_for: The setting that requires a margin, for the error message; None if the margin
            is optional.

    Raises:
        BadRecord: The margin is invalid, or is required and missing.
    """
    margin = record.values.get("margin") if data.margin else None
    if margin is None:
        if margin_for is not None:
            problem = (
                "record lacks field `margin`"
                if data.margin
                else "field `margin` is ignored because data.margin=false"
            )
            raise BadRecord(f"{record.origin}: {problem}; {margin_for} requires it")
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
