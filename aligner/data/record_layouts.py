"""Layouts of records in published data sets, and their conversion to aligner's fields.

A layout is recognised by the fields of a record, and its conversion is a pure function of the
record. Layouts that `data.format=auto` does not recognise are selected by their names only.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aligner.schema.data import AUTO_LAYOUT, NO_LAYOUT

Values = Mapping[str, Any]

# Roles of messages by the names of speakers in lower case.
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
# Start of a turn in the dialogues of HH-RLHF.
_HH_TURN = re.compile(r"\n\n(Human|Assistant):[ ]?")
_DIFFERENT_DIALOGUES = (
    "`chosen` and `rejected` differ before the last turn of Assistant; they must have the same"
    " dialogue before it"
)


class LayoutError(ValueError):
    """A record is not in its layout; the message names the field."""


@dataclass(frozen=True)
class Layout:
    """A layout of records."""

    description: str
    """Description of the records, for messages."""
    fields: tuple[str, ...]
    """Fields of the layout that the conversion reads."""
    matches: Callable[[Values], bool]
    """Returns whether a record has the layout, by its fields and their types."""
    convert: Callable[[Values], dict[str, Any]]
    """Returns the record with aligner's fields; raises LayoutError."""
    is_automatic: bool = True
    """Whether `data.format=auto` recognises the layout; otherwise it is selected by name only."""


def find_layout(values: Values) -> str | None:
    """Return the name of a record's layout with `data.format=auto`; None if it has none."""
    return next(
        (
            name
            for name, layout in LAYOUTS.items()
            if layout.is_automatic and layout.matches(values)
        ),
        None,
    )


def find_named_layout(values: Values) -> str | None:
    """Return the name of the layout of a record that `data.format=auto` does not recognise."""
    if find_layout(values) is not None:
        return None
    return next((name for name, layout in LAYOUTS.items() if layout.matches(values)), None)


def convert_record(values: Values, name: str, used_fields: Mapping[str, str]) -> Values:
    """Return a record with aligner's fields.

    Args:
        values: The fields of the record.
        name: A name in LAYOUTS, `auto` to recognise the record's layout, or `none`.
        used_fields: Value of `data.fields`. `auto` does not convert a record if these name a field
            that the conversion reads.

    Raises:
        LayoutError: The record is not in the layout.
    """
    if name == NO_LAYOUT:
        return values
    if name != AUTO_LAYOUT:
        layout = LAYOUTS[name]
        if not layout.matches(values):
            raise LayoutError(
                f"the record does not have the layout data.format={name} ({layout.description})"
            )
        return layout.convert(values)

    found = find_layout(values)
    if found is None or _uses_any(used_fields, LAYOUTS[found].fields):
        return values
    return LAYOUTS[found].convert(values)


def _uses_any(used_fields: Mapping[str, str], names: tuple[str, ...]) -> bool:
    """Return whether a field name or template of `data.fields` contains one of the names."""
    words = {word for source in used_fields.values() for word in re.findall(r"\w+", str(source))}
    return not words.isdisjoint(names)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_messages(value: Any) -> bool:
    """Return whether a value is a list of messages with roles."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, Mapping) and "role" in message for message in value)
    )


def _without(values: Values, *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _get_key(turn: Mapping[str, Any]) -> str | None:
    """Return the key of a turn's speaker: `from`, or `From` as NeMo-Aligner writes it."""
    return next((key for key in ("from", "From") if key in turn), None)


def _is_conversation(values: Values) -> bool:
    turns = values.get("conversations")
    return (
        "messages" not in values
        and "prompt" not in values
        and isinstance(turns, list)
        and bool(turns)
        and all(isinstance(turn, Mapping) and _get_key(turn) and "value" in turn for turn in turns)
    )


def _is_sharegpt(values: Values) -> bool:
    return _is_conversation(values) and "mask" not in values


def _convert_conversation(values: Values) -> dict[str, Any]:
    """Return the record with `messages`.

    NeMo-Aligner names the speaker that is not trained on in `mask`: the user.
    """
    masked_speaker = str(values.get("mask", "User")).lower()
    messages = []
    if _is_text(values.get("system")) and values["system"].strip():
        messages.append({"role": "system", "content": values["system"]})
    for index, turn in enumerate(values["conversations"]):
        speaker = str(turn[_get_key(turn) or "from"]).lower()
        role = "user" if speaker == masked_speaker else _ROLES.get(speaker)
        if role is None:
            raise LayoutError(
                f"conversations[{index}]: unknown speaker {speaker!r}; allowed: {', '.join(_ROLES)}"
            )
        messages.append({"role": role, "content": turn["value"]})
    return {**_without(values, "conversations", "system", "mask"), "messages": messages}


def _is_hh(values: Values) -> bool:
    return "prompt" not in values and all(
        _is_text(values.get(name)) and values[name].startswith("\n\nHuman:")
        for name in ("chosen", "rejected")
    )


def _parse_dialogue(text: str, name: str) -> list[dict[str, str]]:
    """Return the messages of a dialogue that ends with a turn of the assistant."""
    _, *parts = _HH_TURN.split(text)
    messages = [
        {"role": _ROLES[speaker.lower()], "content": content.strip()}
        for speaker, content in zip(parts[::2], parts[1::2], strict=True)
    ]
    if not messages or messages[-1]["role"] != "assistant":
        raise LayoutError(f"field `{name}`: the dialogue does not end with a turn of Assistant")
    return messages


def _convert_hh(values: Values) -> dict[str, Any]:
    chosen = _parse_dialogue(values["chosen"], "chosen")
    rejected = _parse_dialogue(values["rejected"], "rejected")
    if chosen[:-1] != rejected[:-1]:
        raise LayoutError(_DIFFERENT_DIALOGUES)
    return {
        **values,
        "prompt": chosen[:-1],
        "chosen": chosen[-1]["content"],
        "rejected": rejected[-1]["content"],
    }


def _convert_hh_to_text(values: Values) -> dict[str, Any]:
    """Return the record with the common beginning of both dialogues as a plain-text prompt.

    As in the original implementation of DPO (eric-mitchell/direct-preference-optimization on
    GitHub), the prompt ends with `\\n\\nAssistant:`, and the responses begin with a space.
    """
    prompt, chosen = _split_last_turn(values["chosen"], "chosen")
    rejected_prompt, rejected = _split_last_turn(values["rejected"], "rejected")
    if prompt != rejected_prompt:
        raise LayoutError(_DIFFERENT_DIALOGUES)
    return {**values, "prompt": prompt, "chosen": chosen, "rejected": rejected}


def _split_last_turn(text: str, name: str) -> tuple[str, str]:
    """Return a dialogue up to its last `Assistant:`, and the text after it."""
    *_, last_turn = _HH_TURN.finditer(text)
    if last_turn[1] != "Assistant":
        raise LayoutError(f"field `{name}`: the dialogue does not end with a turn of Assistant")
    end = last_turn.end(1) + len(":")
    return text[:end], text[end:]


def _is_ultrafeedback(values: Values) -> bool:
    return (
        _is_text(values.get("prompt"))
        and _is_messages(values.get("chosen"))
        and _is_messages(values.get("rejected"))
    )


def _convert_ultrafeedback(values: Values) -> dict[str, Any]:
    """Return the record with the messages before the last one of `chosen` as the prompt."""
    chosen, rejected = values["chosen"], values["rejected"]
    if chosen[:-1] != rejected[:-1]:
        raise LayoutError("`chosen` and `rejected` differ before the last message")
    # Some data have only the answers in the lists.
    prompt = chosen[:-1] or [{"role": "user", "content": values["prompt"]}]
    # `messages` repeats the chosen conversation.
    return {
        **_without(values, "messages"),
        "prompt": prompt,
        "chosen": chosen[-1:],
        "rejected": rejected[-1:],
        "messages": [*prompt, chosen[-1]],
    }


def _is_conversational_completion(values: Values) -> bool:
    return _is_messages(values.get("prompt")) and _is_messages(values.get("completion"))


def _convert_completion(values: Values) -> dict[str, Any]:
    return {
        **_without(values, "prompt", "completion"),
        "messages": [*values["prompt"], *values["completion"]],
    }


def _is_openrlhf(values: Values) -> bool:
    return (
        "prompt" not in values
        and "messages" not in values
        and _is_messages(values.get("context_messages"))
    )


def _convert_openrlhf(values: Values) -> dict[str, Any]:
    return {**_without(values, "context_messages"), "prompt": values["context_messages"]}


def _is_nemo_pair(values: Values) -> bool:
    return all(
        _is_text(values.get(name)) for name in ("prompt", "chosen_response", "rejected_response")
    )


def _convert_nemo_pair(values: Values) -> dict[str, Any]:
    return {
        **_without(values, "chosen_response", "rejected_response"),
        "chosen": values["chosen_response"],
        "rejected": values["rejected_response"],
    }


def _is_slime(values: Values) -> bool:
    return (
        "prompt" in values
        and _is_text(values.get("label"))
        and not {"answer", "response", "completion", "chosen"} & values.keys()
    )


def _convert_slime(values: Values) -> dict[str, Any]:
    # `label` is kept for reward functions that read it.
    return {**values, "answer": values["label"]}


_ALPACA_FIELDS = {"instruction", "input", "output", "text"}


def _is_alpaca(values: Values) -> bool:
    return (
        _is_text(values.get("instruction"))
        and _is_text(values.get("output"))
        and _is_text(values.get("input", ""))
        and values.keys() <= _ALPACA_FIELDS
    )


def _convert_alpaca(values: Values) -> dict[str, Any]:
    texts = [values["instruction"], values.get("input", "")]
    return {
        **values,
        "prompt": "\n\n".join(text for text in texts if text.strip()),
        "response": values["output"],
    }


def _is_verl(values: Values) -> bool:
    reward_model = values.get("reward_model")
    return (
        "prompt" in values
        and "answer" not in values
        and isinstance(reward_model, Mapping)
        and isinstance(reward_model.get("ground_truth"), str | int | float)
    )


def _convert_verl(values: Values) -> dict[str, Any]:
    # `reward_model` is kept for reward functions that read it.
    return {**values, "answer": values["reward_model"]["ground_truth"]}


LAYOUTS = {
    "sharegpt": Layout(
        "`conversations` is a list of turns with `from` and `value`",
        ("conversations", "system"),
        _is_sharegpt,
        _convert_conversation,
    ),
    "nemo_aligner": Layout(
        "`conversations` with `From`, `value` and the record's `mask`",
        ("conversations", "system", "mask"),
        lambda values: _is_conversation(values) and "mask" in values,
        _convert_conversation,
    ),
    "nemo_aligner_pairs": Layout(
        "texts `prompt`, `chosen_response` and `rejected_response`",
        ("chosen_response", "rejected_response"),
        _is_nemo_pair,
        _convert_nemo_pair,
    ),
    "hh_rlhf": Layout(
        "`chosen` and `rejected` are dialogues of Human and Assistant in one text",
        ("chosen", "rejected"),
        _is_hh,
        _convert_hh,
    ),
    "hh_rlhf_text": Layout(
        "`chosen` and `rejected` are dialogues of Human and Assistant in one text",
        ("chosen", "rejected"),
        _is_hh,
        _convert_hh_to_text,
        is_automatic=False,
    ),
    "ultrafeedback": Layout(
        "`prompt` is a text, and `chosen` and `rejected` are lists of messages",
        ("prompt", "chosen", "rejected"),
        _is_ultrafeedback,
        _convert_ultrafeedback,
    ),
    "trl_completion": Layout(
        "`prompt` and `completion` are lists of messages",
        ("prompt", "completion"),
        _is_conversational_completion,
        _convert_completion,
    ),
    "openrlhf": Layout(
        "`context_messages` is the list of the prompt's messages",
        ("context_messages",),
        _is_openrlhf,
        _convert_openrlhf,
    ),
    "slime": Layout(
        "`prompt`, and the answer as a text in `label`",
        ("label",),
        _is_slime,
        _convert_slime,
    ),
    "verl": Layout(
        "`prompt`, and the answer in `reward_model.ground_truth`",
        ("reward_model",),
        _is_verl,
        _convert_verl,
    ),
    # aligner chooses `data.fields` for these records, which other parts of the prompt may precede.
    "alpaca": Layout(
        "texts `instruction` and `output`, optionally `input` and `text`, and no other fields",
        ("instruction", "input", "output"),
        _is_alpaca,
        _convert_alpaca,
        is_automatic=False,
    ),
}
"""Layouts by their names in `data.format`."""

TEXT_LAYOUTS = {"hh_rlhf": "hh_rlhf_text"}
"""Layouts whose prompts are plain texts, by the layout that makes messages of the same records."""
