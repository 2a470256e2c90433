"""Prompts, responses and episodes as texts and as chat messages.

Records: `render_prompt`, `render_exchange` and `render_turns` return the texts of a record. Plain
texts are not changed. Messages are a list of `{"role": …, "content": …}`; an assistant's message
may have `tool_calls` instead of a content. The model's chat template renders the messages, with the
record's `tools`. The text of a response, with its end-of-turn token, is what the template adds to
the prompt when the response follows.

Episodes: `build_transcript`, `build_messages` and `build_conversation` return the turns of a
generated sample.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from aligner.data.chat_template import (
    LearnedTurns,
    normalize_tools,
    normalize_variables,
)
from aligner.data.chat_turns import ChatTurns, Conversation
from aligner.data.record_fields import ASSISTANT, find_conversation, find_prompt
from aligner.data.records import BadRecord, Record
from aligner.data.tokenizer import ChatTemplate, Messages, Tokenizer, Tools
from aligner.data.tool_calls import ToolFormat, parse_turn
from aligner.data.types import Prompt, Sample
from aligner.errors import AlignerError, ConfigError

_VARIABLES = "chat_template_kwargs"
Rendered = TypeVar("Rendered")


@dataclass(frozen=True)
class PromptText:
    """The text of a record's prompt."""

    text: str
    is_rendered: bool
    """Whether a chat template rendered the text. Such a text contains the special tokens at its
    beginning, and must not be truncated."""


@dataclass(frozen=True)
class Segment:
    """A part of the text after a conversation's first prompt."""

    text: str
    is_answer: bool
    """Whether the text is an answer of the assistant."""


def decode_response(sample: Sample, tokenizer: Tokenizer) -> str:
    """Return the text of a sample's response as it follows the prompt."""
    return tokenizer.decode_after(sample.tokens[: sample.prompt_length], sample.response)


def split_turns_with_context(sample: Sample) -> list[tuple[Tensor, Tensor]]:
    """Split the response of a sample into turns.

    Returns:
        For each turn of `Sample.split_turns`, all tokens before it, int64 [T], and its own tokens,
        int64 [R]. The turns alternate between the policy and the environment; the policy's turn is
        the first.
    """
    turns = sample.split_turns()
    ends = itertools.accumulate(map(len, turns), initial=sample.prompt_length)
    return [(sample.tokens[:end], turn) for end, turn in zip(ends, turns, strict=False)]


def build_transcript(sample: Sample, tokenizer: Tokenizer) -> list[dict[str, str]]:
    """Return the texts of a sample's turns, each under its speaker, `policy` or `environment`."""
    turns = [
        tokenizer.decode_after(before, turn) for before, turn in split_turns_with_context(sample)
    ]
    return [
        {("policy", "environment")[index % 2]: text} for index, text in enumerate(turns) if text
    ]


def decode_branches(sample: Sample, tokenizer: Tokenizer) -> list[dict[str, str]]:
    """Return the texts of a sample's branches: all tokens that a branch starts from as `prompt`,
    and its response as `response`."""
    return [
        {
            "prompt": tokenizer.decode(branch.tokens[: branch.prompt_length]),
            "response": decode_response(branch, tokenizer),
        }
        for branch in sample.branches
    ]


def build_messages(
    sample: Sample, prompt: Prompt, tool_format: ToolFormat | None, tokenizer: Tokenizer
) -> list[Mapping[str, Any]]:
    """Return an episode as messages: the prompt's messages, and a message for each turn.

    The policy's messages contain its tool calls. The environment's messages contain the text that
    the policy received, including the text of the chat template.

    Args:
        sample: The episode.
        prompt: The prompt of the episode.
        tool_format: The format of the policy's tool calls; None parses no calls.
        tokenizer: The policy's tokenizer.
    """
    messages: list[Mapping[str, Any]] = [
        *prompt.metadata.get("messages", [{"role": "user", "content": prompt.text}])
    ]
    for index, (before, turn) in enumerate(split_turns_with_context(sample)):
        # Turns with even indices are the policy's; a turn may be empty.
        if index % 2 == 0 and len(turn):
            # A truncated turn has no end-of-turn token.
            turn_ids = turn[:-1] if bool(tokenizer.is_eos(turn[-1:])) else turn
            text = tokenizer.decode_after(before, turn_ids, skip_special_tokens=False)
            messages.append(parse_turn(text, tool_format, len(messages)).messages[0])
        elif len(turn):
            text = tokenizer.decode_after(before, turn)
            messages.append({"role": "environment", "content": text})
    return messages


def build_conversation(
    sample: Sample,
    prompt: Prompt,
    answers: Sequence[str | list[dict[str, str]]],
    tokenizer: Tokenizer,
    get_chat_turns: Callable[[], ChatTurns],
) -> dict[str, Any]:
    """Return an episode as the record of a demonstration: `messages`, and `tools` if there are any.

    If the environment's answers are messages, the prompt is also messages, and tool calls of the
    policy are parsed. If they are texts, they have the role of the user, like the prompt. The turns
    of branches are included in their order.

    Args:
        sample: The episode.
        prompt: The prompt of the episode.
        answers: The environment's answers, before the first turn and after each turn.
        tokenizer: The policy's tokenizer.
        get_chat_turns: Returns the policy's chat format. It is called only if the answers are
            messages.
    """
    if any(isinstance(answer, list) and answer for answer in answers):
        return _build_chat_conversation(
            sample,
            prompt.metadata,
            # An empty text, which `reset` may return, keeps its place: answers belong to turns.
            [answer if isinstance(answer, list) else [] for answer in answers],
            tokenizer,
            get_chat_turns(),
        )
    turns = [("user", prompt.text)]
    for turn in build_transcript(sample, tokenizer):
        [(speaker, text)] = turn.items()
        role = {"policy": "assistant", "environment": "user"}[speaker]
        # Consecutive texts of one role are one message.
        turns[-1:] = (
            [(role, turns[-1][1] + text)] if turns[-1][0] == role else [turns[-1], (role, text)]
        )
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def _build_chat_conversation(
    sample: Sample,
    metadata: Mapping[str, Any],
    answers: Sequence[Messages],
    tokenizer: Tokenizer,
    chat_turns: ChatTurns,
) -> dict[str, Any]:
    """Return the record of an episode whose answers are messages; see `build_conversation`."""
    messages = [*metadata["messages"]]
    tools = metadata.get("tools")
    variables = metadata.get("chat_template_kwargs")
    # The policy's turns of all sequences of the episode, the branches first.
    turns = [
        (before, turn)
        for sequence in sample.sequences
        for before, turn in split_turns_with_context(sequence)[::2]
        if len(turn)
    ]
    for index, (before, turn) in enumerate(turns):
        messages.append(
            _parse_message(chat_turns, messages, tools, variables, before, turn, tokenizer)
        )
        # Answer 0 is the answer to `reset`, which contains no messages in a chat episode.
        if index < len(turns) - 1:
            messages += answers[index + 1]
    return _build_chat_record(messages, tools, variables)


def build_turn_conversation(
    conversation: Conversation, turn: Tensor, tokenizer: Tokenizer, chat_turns: ChatTurns
) -> dict[str, Any]:
    """Return a conversation and the generated turn that answers it, int64 [R], as a record:
    `messages`, and `tools` and `chat_template_kwargs` if there are any."""
    message = _parse_message(
        chat_turns,
        conversation.messages,
        conversation.tools,
        conversation.variables,
        conversation.tokens,
        turn,
        tokenizer,
    )
    return _build_chat_record(
        [*conversation.messages, message], conversation.tools, conversation.variables
    )


def _build_chat_record(messages: Messages, tools: Any, variables: Any) -> dict[str, Any]:
    """Return a record of messages; tools and variables are left out if there are none."""
    return {
        "messages": messages,
        **({} if tools is None else {"tools": tools}),
        **({_VARIABLES: variables} if variables else {}),
    }


def _parse_message(
    chat_turns: ChatTurns,
    messages: Messages,
    tools: Any,
    variables: Any,
    before: Tensor,
    turn: Tensor,
    tokenizer: Tokenizer,
) -> Mapping[str, Any]:
    """Return the message of a generated turn, int64 [R], after the tokens `before`, int64 [T]."""
    try:
        conversation = chat_turns.begin(messages, tools, variables)
        return chat_turns.parse_turn(conversation, turn).messages[0]
    except AlignerError:  # the turn was truncated
        return {"role": "assistant", "content": tokenizer.decode_after(before, turn)}


def render_prompt(record: Record, tokenizer: Tokenizer) -> PromptText:
    """Return the text of a record's prompt.

    The prompt is the field `prompt`, a text or messages, or otherwise the field `messages`. A final
    message of the assistant is not a part of the prompt.

    Raises:
        BadRecord: The record has no prompt, or an empty or invalid one.
        ConfigError: The prompt is messages, and the model has no chat template.
    """
    name, messages = find_prompt(record)
    if messages is None:
        return PromptText(record.get_text(name), is_rendered=False)
    return PromptText(_render_question(record, name, messages, tokenizer), is_rendered=True)


def get_prompt_messages(record: Record) -> dict[str, Any]:
    """Return the `messages` of a record's prompt, and its `tools` and `chat_template_kwargs` if it
    has any; an empty dict for a plain text.

    Raises:
        BadRecord: The messages, tools or variables are invalid.
    """
    _, messages = find_prompt(record)
    if messages is None:
        return {}
    return _build_chat_record(messages, _get_tools(record), _get_variables(record))


def add_tools(record: Record, tools: Tools | None) -> Record:
    """Return a record of messages with tools for the model; tools of the record take precedence.

    Raises:
        BadRecord: There are tools, and the prompt is a plain text.
    """
    if not tools:
        return record
    if find_prompt(record)[1] is None:
        raise BadRecord(
            f"{record.origin}: tools require a prompt of chat messages, such as"
            ' [{"role": "user", "content": …}], got plain text'
        )
    return (
        record
        if record.values.get("tools") is not None
        else replace(record, values={**record.values, "tools": tools})
    )


def render_exchange(record: Record, answer: str, tokenizer: Tokenizer) -> tuple[PromptText, str]:
    """Return the text of a record's prompt, and the text of the response.

    The response is a text or one message of the assistant that answers the `prompt`, or the end of
    a whole conversation. A whole conversation may also be in the field `messages` in place of
    `response`.

    Args:
        record: The record.
        answer: The field of the response, such as `response` or `chosen`.
        tokenizer: The policy's tokenizer.

    Raises:
        BadRecord: A field is missing or invalid, or the template renders the prompt differently
            when the response follows.
        ConfigError: The record has messages, and the model has no chat template.
    """
    name, messages = find_conversation(record, answer)
    if messages is None:
        return PromptText(record.get_text("prompt"), is_rendered=False), record.get_text(name)
    prompt_text, full_text = _render_last_turn(record, name, messages, tokenizer)
    return PromptText(prompt_text, is_rendered=True), full_text[len(prompt_text) :]


def render_turns(
    record: Record, answer: str, tokenizer: Tokenizer
) -> tuple[PromptText, list[Segment]]:
    """Return the text of a conversation, split at the assistant's answers.

    The answers are the parts that `{% generation %}` marks in the template. If the template marks
    nothing, an answer is the text that it adds to the prompt before it; every such prompt must then
    begin with the text of all earlier turns. An answer with no message before it belongs to the
    prompt.

    Args:
        record: The record.
        answer: The field of the response; see `render_exchange`.
        tokenizer: The policy's tokenizer.

    Returns:
        The prompt up to the first answer of the assistant, and the parts after it, each either an
        answer or the text between two answers.

    Raises:
        BadRecord: See `render_exchange`; or the answers cannot be located in the text.
        ConfigError: See `render_exchange`.
    """
    name, messages = find_conversation(record, answer)
    if messages is None:
        prompt, response = render_exchange(record, answer, tokenizer)
        return prompt, [Segment(response, is_answer=True)]
    parts = _call_template(
        record,
        name,
        tokenizer,
        lambda template, tools: template.render_parts(
            messages, tools, variables=_get_variables(record), learned_turns="all"
        ),
    )
    if len(parts) == 1:  # the template marks nothing
        parts = _split_answers(record, name, messages, tokenizer)
    first, *rest = parts
    return PromptText(first, is_rendered=True), [
        Segment(text, index % 2 == 0) for index, text in enumerate(rest)
    ]


def _split_answers(
    record: Record, name: str, messages: Messages, tokenizer: Tokenizer
) -> list[str]:
    """Return the conversation's text in parts; the parts with odd indices are the answers."""
    parts = list[str]()
    before = ""
    for end, message in enumerate(messages[1:], start=2):
        if message["role"] != ASSISTANT:
            continue
        prompt_text, full_text = _render_last_turn(record, name, messages[:end], tokenizer)

        # Some templates put an EOS token at the end of a conversation, and not after earlier turns.
        if not prompt_text.startswith(before):
            eos_texts = [
                tokenizer.decode([token], skip_special_tokens=False)
                for token in tokenizer.eos_token_ids
            ]
            candidates = [
                before.removesuffix(eos_text)
                for eos_text in eos_texts
                if prompt_text.startswith(before.removesuffix(eos_text))
            ]
            if candidates:
                # Remove the EOS token from the last answer as well.
                parts[-1] = parts[-1][: len(candidates[0]) - len(before)]
                before = candidates[0]
        if not prompt_text.startswith(before):
            raise BadRecord(
                f"{record.origin}: {name}: the assistant's turns cannot be located, because the"
                " model's chat template renders earlier turns differently when messages follow (for"
                " example, without their reasoning). Set data.learned_turns=last, or use a template"
                " that marks the assistant's turns with {% generation %}"
            )
        parts += [prompt_text[len(before) :], full_text[len(prompt_text) :]]
        before = full_text
    return parts


def _render_last_turn(
    record: Record, name: str, messages: Messages, tokenizer: Tokenizer
) -> tuple[str, str]:
    """Return the text before the last message, and the text with the last message.

    The second text begins with the first.

    Raises:
        BadRecord: The template renders the earlier messages differently when the last one follows,
            or drops a tool call of the last message.
    """
    prompt_text = _render_question(record, name, messages[:-1], tokenizer)
    full_text = _render(
        record, name, messages, tokenizer, add_generation_prompt=False, learned_turns="last"
    )
    if not full_text.startswith(prompt_text):
        raise BadRecord(
            f"{record.origin}: {name}: the response cannot be located, because the model's chat"
            " template renders the prompt differently when a response follows; use plain-text"
            " records"
        )
    # A template may drop tool calls without an error.
    tool_names = [
        call.get("function", {}).get("name") for call in messages[-1].get("tool_calls") or []
    ]
    if dropped_tools := [
        tool for tool in tool_names if str(tool) not in full_text[len(prompt_text) :]
    ]:
        raise BadRecord(
            f"{record.origin}: {name}: the model's chat template does not render the call of tool"
            f" {dropped_tools[0]!r}"
        )
    return prompt_text, full_text


def _get_tools(record: Record) -> Tools | None:
    try:
        return normalize_tools(record.values.get("tools"))
    except AlignerError as error:
        raise BadRecord(f"{record.origin}: field {error}") from error


def _get_variables(record: Record) -> dict[str, Any]:
    try:
        return normalize_variables(record.values.get(_VARIABLES))
    except AlignerError as error:
        raise BadRecord(f"{record.origin}: field {error}") from error


def _render_question(record: Record, name: str, messages: Messages, tokenizer: Tokenizer) -> str:
    """Return the text of messages with the generation prompt after them."""
    if not messages or messages[-1]["role"] == ASSISTANT:
        raise BadRecord(
            f"{record.origin}: {name}: the {ASSISTANT}'s last message must follow a message with"
            " another role"
        )
    return _render(record, name, messages, tokenizer, add_generation_prompt=True)


def _render(
    record: Record,
    name: str,
    messages: Messages,
    tokenizer: Tokenizer,
    *,
    add_generation_prompt: bool,
    learned_turns: LearnedTurns = "none",
) -> str:
    def render(template: ChatTemplate, tools: Tools | None) -> str:
        return template.render(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            variables=_get_variables(record),
            learned_turns=learned_turns,
        )

    return _call_template(record, name, tokenizer, render)


def _call_template(
    record: Record,
    name: str,
    tokenizer: Tokenizer,
    render: Callable[[ChatTemplate, Tools | None], Rendered],
) -> Rendered:
    """Call `render` with the model's template and the record's tools.

    Raises:
        BadRecord: The template rejects the messages of the field `name`.
        ConfigError: The model has no chat template.
    """
    tools = _get_tools(record)
    try:
        return render(tokenizer.chat_template, tools)
    except ConfigError:
        raise
    except AlignerError as error:
        raise BadRecord(f"{record.origin}: {name}: {error}") from error
