"""What records ask and answer, as texts: plain ones, or chat messages as the model's chat template
puts them into words.

Plain texts are taken as they are. Messages are a list of `{"role": …, "content": …}`, of which an
assistant's may have `tool_calls` instead of a content; a record's `tools` go to the template with
them. What a response is then, its end-of-turn marker included, is what the template adds to the
prompt once it is answered.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from aligner.data.chat_template import (
    Learned,
    normalized_messages,
    normalized_tools,
    normalized_variables,
)
from aligner.data.chat_turns import ChatTurns
from aligner.data.records import BadRecord, Record
from aligner.data.tokenizer import ChatTemplate, Messages, Tokenizer, Tools
from aligner.data.tool_calls import ToolFormat, parse_turn
from aligner.data.types import Prompt, Sample
from aligner.errors import AlignerError, ConfigError


def response_text(sample: Sample, tokenizer: Tokenizer) -> str:
    """Return the text of a sample's response as it stands behind the prompt."""
    return tokenizer.decode_after(sample.tokens[: sample.prompt_length], sample.response)


def turns_with_context(sample: Sample) -> list[tuple[Tensor, Tensor]]:
    """Return the turns of `Sample.turns`, each after all tokens before it, int64 [T] and [R]."""
    turns = sample.turns()
    ends = itertools.accumulate(map(len, turns), initial=sample.prompt_length)
    return [(sample.tokens[:end], turn) for end, turn in zip(ends, turns, strict=False)]


def transcript(sample: Sample, tokenizer: Tokenizer) -> list[dict[str, str]]:
    """Its turns, each under who said it, `policy` or `environment`."""
    turns = [tokenizer.decode_after(before, turn) for before, turn in turns_with_context(sample)]
    return [{("policy", "environment")[at % 2]: text} for at, text in enumerate(turns) if text]


def branch_texts(sample: Sample, tokenizer: Tokenizer) -> list[dict[str, str]]:
    """What was said in each of its branches, behind all that it read."""
    return [
        {
            "prompt": tokenizer.decode(branch.tokens[: branch.prompt_length]),
            "response": response_text(branch, tokenizer),
        }
        for branch in sample.branches
    ]


def spoken_messages(
    sample: Sample, prompt: Prompt, form: ToolFormat | None, tokenizer: Tokenizer
) -> list[Mapping[str, Any]]:
    """The prompt's messages and what its tokens say of the episode: the policy's turns with the
    tool calls in them, as `form` has these; and of the environment's the text that the policy was
    given, a chat template's words included.
    """
    said: list[Mapping[str, Any]] = [
        *prompt.metadata.get("messages", [{"role": "user", "content": prompt.text}])
    ]
    for at, (before, turn) in enumerate(turns_with_context(sample)):
        if at % 2 == 0 and len(turn):
            own = turn[:-1] if bool(tokenizer.ends(turn[-1:])) else turn
            text = tokenizer.decode_after(before, own, skip_special_tokens=False)
            said.append(parse_turn(text, form, len(said)).messages[0])
        elif len(turn):
            text = tokenizer.decode_after(before, turn)
            said.append({"role": "environment", "content": text})
    return said


def conversation(
    sample: Sample,
    prompt: Prompt,
    answers: Sequence[str | list[dict[str, str]]],
    tokenizer: Tokenizer,
    chat: Callable[[], ChatTurns],
) -> dict[str, Any]:
    """The `messages` of an episode, and the prompt's `tools` where it has any, as demonstrations
    are given.

    `answers` are what the environment said, before the first turn and after each. Where they are
    messages, so is the prompt, and a turn's tool calls are told apart by the model's `chat`; where
    they are texts the environment is the user, as who wrote the prompt is. What was said in
    branches comes in its place.
    """
    if any(isinstance(answer, list) and answer for answer in answers):
        return _of_chat(
            sample,
            prompt.metadata,
            [answer for answer in answers if isinstance(answer, list)],
            tokenizer,
            chat(),
        )
    said = [("user", prompt.text)]
    for turn in transcript(sample, tokenizer):
        [(who, text)] = turn.items()
        role = {"policy": "assistant", "environment": "user"}[who]
        said[-1:] = (
            [(role, said[-1][1] + text)] if said[-1][0] == role else [said[-1], (role, text)]
        )
    return {"messages": [{"role": role, "content": text} for role, text in said]}


def _of_chat(
    sample: Sample,
    asked: Mapping[str, Any],
    answers: Sequence[Messages],
    tokenizer: Tokenizer,
    chat: ChatTurns,
) -> dict[str, Any]:
    said, tools = [*asked["messages"]], asked.get("tools")
    variables = asked.get("chat_template_kwargs")
    turns = [
        (before, turn)
        for sequence in sample.sequences
        for before, turn in turns_with_context(sequence)[::2]
        if len(turn)
    ]
    for place, (before, turn) in enumerate(turns):
        said.append(_said(chat, said, tools, variables, before, turn, tokenizer))
        if place < len(turns) - 1:
            said += answers[place + 1]
    return {
        "messages": said,
        **({} if tools is None else {"tools": tools}),
        **({"chat_template_kwargs": variables} if variables else {}),
    }


def _said(
    chat: ChatTurns,
    messages: Messages,
    tools: Any,
    variables: Any,
    before: Tensor,
    turn: Tensor,
    tokenizer: Tokenizer,
) -> Mapping[str, Any]:
    try:
        return chat.said(chat.begin(messages, tools, variables), turn).messages[0]
    except AlignerError:  # it was cut
        return {"role": "assistant", "content": tokenizer.decode_after(before, turn)}


_VARIABLES = "chat_template_kwargs"
_ASSISTANT = "assistant"
Worded = TypeVar("Worded")


@dataclass(frozen=True)
class PromptText:
    """What a record asks."""

    text: str
    is_worded: bool
    """By a chat template, which puts the special tokens where they belong and would be broken by a
    cut."""


@dataclass(frozen=True)
class Segment:
    """A part of what follows a conversation's first prompt."""

    text: str
    is_answer: bool
    """Whether it is what the assistant says."""


def prompt_text(record: Record, tokenizer: Tokenizer) -> PromptText:
    """A record's `prompt`, a text or messages, or else its `messages`; an assistant's message at
    the end is left out.

    Raises BadRecord for a record that has none or an empty one, ConfigError for messages where the
    model has no template.
    """
    name, messages = _asked(record)
    if messages is None:
        return PromptText(record.text(name), is_worded=False)
    return PromptText(_prompt(record, name, messages, tokenizer), is_worded=True)


def asked_messages(record: Record) -> dict[str, Any]:
    """Return the `messages` of a record's prompt, and its `tools` and `chat_template_kwargs` if it
    has any; nothing for a plain text. Raises as `prompt_text`."""
    _, messages = _asked(record)
    if messages is None:
        return {}
    tools, variables = _tools(record), _variables(record)
    return {
        "messages": messages,
        **({} if tools is None else {"tools": tools}),
        **({_VARIABLES: variables} if variables else {}),
    }


def with_tools(record: Record, tools: Tools | None) -> Record:
    """A record of messages with the tools that its model may call, where it has none of its own.

    Raises BadRecord for a plain text, which has no place for them.
    """
    if not tools:
        return record
    if _asked(record)[1] is None:
        raise BadRecord(
            f"{record.origin}: tools require a prompt of chat messages, such as"
            ' [{"role": "user", "content": …}], got plain text'
        )
    return (
        record
        if record.values.get("tools") is not None
        else replace(record, values={**record.values, "tools": tools})
    )


def _asked(record: Record) -> tuple[str, list[dict[str, Any]] | None]:
    """The field that asks, and its messages, without an assistant's at the end; None for a plain
    text."""
    name = "messages" if "prompt" not in record.values and "messages" in record.values else "prompt"
    if name == "prompt" and not isinstance(record.values.get(name), list):
        return name, None
    messages = _messages(record, name)
    return name, messages[:-1] if messages[-1]["role"] == _ASSISTANT else messages


def exchange(record: Record, answer: str, tokenizer: Tokenizer) -> tuple[PromptText, str]:
    """The prompt and the response's text; `answer` is the response's field.

    The response is a text or one assistant's message to the `prompt`, or the end of a whole
    conversation, for which `messages` is another name of `response`. Raises as `prompt_text` does.
    """
    name, said = _conversation(record, answer)
    if said is None:
        return PromptText(record.text("prompt"), is_worded=False), record.text(name)
    asked, answered = _turn(record, name, said, tokenizer)
    return PromptText(asked, is_worded=True), answered[len(asked) :]


def all_turns(
    record: Record, answer: str, tokenizer: Tokenizer
) -> tuple[PromptText, list[Segment]]:
    """The prompt, up to the first answer of the assistant's, and all that follows, each of its
    answers by itself.

    They are what `{% generation %}` marks in the template's text. Where the template marks nothing
    they are what each answer adds to the prompt before it, and every such prompt must begin with
    all that came before, or it is a BadRecord. An answer that nothing comes before is a part of the
    prompt. Otherwise as `exchange`.
    """
    name, said = _conversation(record, answer)
    if said is None:
        prompt, response = exchange(record, answer, tokenizer)
        return prompt, [Segment(response, is_answer=True)]
    parts = _worded(
        record,
        name,
        tokenizer,
        lambda template, tools: template.marked(
            said, tools, variables=_variables(record), learned="all"
        ),
    )
    if len(parts) == 1:
        parts = _turns_apart(record, name, said, tokenizer)
    first, *rest = parts
    return PromptText(first, is_worded=True), [
        Segment(text, place % 2 == 0) for place, text in enumerate(rest)
    ]


def _turns_apart(record: Record, name: str, said: Messages, tokenizer: Tokenizer) -> list[str]:
    """The conversation's text in parts, of which every second, from the second on, is an answer."""
    parts, before = list[str](), ""
    for place, message in enumerate(said[1:], start=2):
        if message["role"] != _ASSISTANT:
            continue
        asked, answered = _turn(record, name, said[:place], tokenizer)
        # some templates put an end-of-sequence token behind a conversation
        if not asked.startswith(before):
            ends = [
                tokenizer.decode([token], skip_special_tokens=False)
                for token in tokenizer.eos_token_ids
            ]
            shorter = [
                before.removesuffix(end)
                for end in ends
                if asked.startswith(before.removesuffix(end))
            ]
            if shorter:
                parts[-1], before = parts[-1][: len(shorter[0]) - len(before)], shorter[0]
        if not asked.startswith(before):
            raise BadRecord(
                f"{record.origin}: {name}: the assistant's turns cannot be located, because the"
                " model's chat template renders earlier turns differently when messages follow (for"
                " example, without their reasoning). Set data.learned_turns=last, or use a template"
                " that marks the assistant's turns with {% generation %}"
            )
        parts += [asked[len(before) :], answered[len(asked) :]]
        before = answered
    return parts


def _conversation(record: Record, answer: str) -> tuple[str, list[dict[str, Any]] | None]:
    """The field that the response is in, and the whole conversation, which the assistant ends; None
    for plain texts."""
    name = (
        "messages"
        if answer == "response" and answer not in record.values and "messages" in record.values
        else answer
    )
    prompt, response = record.values.get("prompt"), record.values.get(name)
    if not isinstance(prompt, list) and not isinstance(response, list):
        return name, None
    asked_first = _messages(record, "prompt") if isinstance(prompt, list) else []
    last = (
        _messages(record, name)
        if isinstance(response, list)
        else [{"role": _ASSISTANT, "content": record.text(name)}]
    )
    # Some data sets repeat the prompt at the start of each response.
    repeats_prompt = bool(asked_first) and last[: len(asked_first)] == asked_first
    said = last if repeats_prompt else [*asked_first, *last]
    if said[-1]["role"] != _ASSISTANT:
        raise BadRecord(
            f"{record.origin}: {name}: the last message has role {said[-1]['role']!r}, must have"
            f" role {_ASSISTANT!r}"
        )
    if not (said[-1].get("content") or "").strip() and not said[-1].get("tool_calls"):
        raise BadRecord(f"{record.origin}: {name}: the last message is empty")
    return name, said


def _turn(record: Record, name: str, said: Messages, tokenizer: Tokenizer) -> tuple[str, str]:
    """The text before the last message and with it; the second begins with the first."""
    asked = _prompt(record, name, said[:-1], tokenizer)
    answered = _rendered(record, name, said, tokenizer, add_generation_prompt=False, learned="last")
    if not answered.startswith(asked):
        raise BadRecord(
            f"{record.origin}: {name}: the response cannot be located, because the model's chat"
            " template renders the prompt differently when a response follows; use plain-text"
            " records"
        )
    names = [call.get("function", {}).get("name") for call in said[-1].get("tool_calls") or []]
    if lost := [tool for tool in names if str(tool) not in answered[len(asked) :]]:
        raise BadRecord(
            f"{record.origin}: {name}: the model's chat template does not render the call of tool"
            f" {lost[0]!r}"
        )
    return asked, answered


def _messages(record: Record, name: str) -> list[dict[str, Any]]:
    given = record.items(name)
    for index, message in enumerate(given):
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
        return normalized_messages(given)
    except AlignerError as error:
        raise BadRecord(f"{record.origin}: {name}: {error}") from error


def _tools(record: Record) -> Tools | None:
    try:
        return normalized_tools(record.values.get("tools"))
    except AlignerError as error:
        raise BadRecord(f"{record.origin}: field {error}") from error


def _variables(record: Record) -> dict[str, Any]:
    try:
        return normalized_variables(record.values.get(_VARIABLES))
    except AlignerError as error:
        raise BadRecord(f"{record.origin}: field {error}") from error


def _has_content(message: dict[str, Any]) -> bool:
    content, calls = message.get("content"), message.get("tool_calls")
    return isinstance(content, str) or (content is None and isinstance(calls, list) and bool(calls))


def _prompt(record: Record, name: str, messages: Messages, tokenizer: Tokenizer) -> str:
    if not messages or messages[-1]["role"] == _ASSISTANT:
        raise BadRecord(
            f"{record.origin}: {name}: the {_ASSISTANT}'s last message must follow a message with"
            " another role"
        )
    return _rendered(record, name, messages, tokenizer, add_generation_prompt=True)


def _rendered(
    record: Record,
    name: str,
    messages: Messages,
    tokenizer: Tokenizer,
    *,
    add_generation_prompt: bool,
    learned: Learned = "none",
) -> str:
    def render(template: ChatTemplate, tools: Tools | None) -> str:
        return template.render(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            variables=_variables(record),
            learned=learned,
        )

    return _worded(record, name, tokenizer, render)


def _worded(
    record: Record,
    name: str,
    tokenizer: Tokenizer,
    render: Callable[[ChatTemplate, Tools | None], Worded],
) -> Worded:
    """What `render` makes of the model's template and the record's tools."""
    tools = _tools(record)
    try:
        return render(tokenizer.chat_template, tools)
    except ConfigError:
        raise
    except AlignerError as error:
        raise BadRecord(f"{record.origin}: {name}: {error}") from error
