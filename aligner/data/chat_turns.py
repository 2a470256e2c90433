"""Conversations with a model as tokens that only grow: no token is computed again from text.

`ChatTurns` appends the model's turn as the tokens that were generated, and the messages that follow
as the tokens of what the chat template adds. It tokenizes this addition alone, from the turn's
end-of-turn token on. The result is the same as rendering and tokenizing the whole conversation if
two conditions hold:

1. The chat template leaves the text before the addition as it was, including the turn.
2. The end-of-turn token separates the tokens before it from the tokens after it.

Both conditions are checked for every turn, in the texts of this turn: a template or a tokenizer may
satisfy them for one turn and not for another. If a condition does not hold, the result is a
`NewBranch`: the reason, and the whole conversation rendered anew, with which a new branch begins.

A chat template may write tool calls differently from the model, for example with other spaces. The
first condition therefore also holds if the template's text is parsed as the same calls. The model's
own tokens are kept in any case.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from aligner.data.tokenizer import Messages, Tokenizer, Tools
from aligner.data.tool_calls import (
    THINK_START,
    AssistantTurn,
    ToolFormat,
    detect_tool_format,
    parse_turn,
    renders_call_ids,
)
from aligner.errors import AlignerError


@dataclass(frozen=True)
class Conversation:
    """A conversation in which the assistant's turn is next."""

    messages: tuple[Mapping[str, Any], ...]
    tools: Tools | None
    text: str
    """Conversation as the chat template renders it, with the generation prompt."""
    tokens: Tensor
    """Tokens of the text, int64 [T], except that generated turns have the generated tokens."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template for this conversation (`chat_template_kwargs`)."""
    call_id_key: str = ""
    """Text that distinguishes the ids of tool calls in the next turn from those in other
    conversations; see the argument `id_key` of `aligner.data.tool_calls.parse_turn`."""
    turn_start: str = ""
    """Beginning of the assistant's turn, which the model continues. `text` and `tokens` end with
    it."""

    @property
    def text_before_turn(self) -> str:
        """The text without the beginning of the assistant's turn."""
        return self.text.removesuffix(self.turn_start)


@dataclass(frozen=True)
class NewBranch:
    """The result of a turn that cannot be appended to the tokens of its conversation."""

    reason: str
    """Explanation why the turn cannot be appended."""
    conversation: Conversation
    """The whole conversation, rendered and tokenized anew."""


class ChatTurns:
    """Renders a model's conversations turn by turn with its chat template.

    Environments and agents use it to continue an episode. Tool calls are parsed in the model's
    format.
    """

    def __init__(self, tokenizer: Tokenizer, tool_format: ToolFormat | None) -> None:
        """Use the chat template of a model.

        Args:
            tokenizer: The model's tokenizer.
            tool_format: The format of the model's tool calls; None parses no calls.

        Raises:
            ConfigError: The model has no chat template.
        """
        self._tokenizer = tokenizer
        self._template = tokenizer.chat_template
        self.tool_format = tool_format
        """Format in which the model writes tool calls; None: calls are not parsed."""

    @classmethod
    def for_tokenizer(cls, tokenizer: Tokenizer) -> "ChatTurns":
        """Return an instance with the tool format of the model's template, if it writes calls.

        Raises:
            ConfigError: The model has no chat template.
        """
        return cls(tokenizer, detect_tool_format(tokenizer))

    @cached_property
    def renders_call_ids(self) -> bool:
        """Whether the model reads the ids of tool calls; see
        `aligner.data.tool_calls.renders_call_ids`."""
        return renders_call_ids(self._tokenizer)

    def begin(
        self,
        messages: Messages,
        tools: Tools | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Conversation:
        """Return a conversation for the assistant to answer.

        Args:
            messages: The messages of the conversation.
            tools: Schemas of the tools that the assistant may call.
            variables: Variables of the template (`chat_template_kwargs`).

        Raises:
            AlignerError: The template rejects the messages.
        """
        return self._start(messages, tools, variables or {})

    def begin_turn(self, conversation: Conversation, turn_start: str) -> Conversation:
        """Add a text with which the assistant's turn begins, for the model to continue.

        Raises:
            AlignerError: The text cannot be tokenized.
        """
        tokens = self._tokenizer.encode_observation(conversation.tokens, turn_start)
        return _extend_turn(conversation, turn_start, tokens)

    def continue_turn(self, conversation: Conversation, turn_ids: Tensor) -> Conversation:
        """Add the generated tokens of a truncated turn, int64 [R], for the model to continue."""
        text = self._tokenizer.decode_after(
            conversation.tokens, turn_ids, skip_special_tokens=False
        )
        return _extend_turn(conversation, text, turn_ids)

    def parse_turn(self, conversation: Conversation, turn_ids: Tensor) -> AssistantTurn:
        """Return the text and the tool calls of a generated turn, with the text with which the
        conversation begins the turn.

        Args:
            conversation: The conversation that the turn answers.
            turn_ids: The generated tokens, int64 [R]; the last one is the end-of-turn token.

        Raises:
            AlignerError: The turn does not end with an end-of-turn token. It was truncated at its
                maximum length, and a conversation cannot continue after it.
        """
        if not turn_ids.numel() or not bool(self._tokenizer.is_eos(turn_ids[-1:])):
            last_text = self._decode(turn_ids[-1:])
            raise AlignerError(
                f"the assistant turn of {turn_ids.numel()} tokens ends with {last_text!r}, which is"
                " not an end-of-turn token; a truncated turn must be the last turn of its episode"
            )
        text = self._tokenizer.decode_after(
            conversation.tokens, turn_ids[:-1], skip_special_tokens=False
        )
        return self._parse_text(conversation.turn_start + text, conversation)

    def append_turn(
        self, conversation: Conversation, turn_ids: Tensor, new_messages: Messages
    ) -> Conversation | NewBranch:
        """Append a generated turn and the messages that follow it.

        The new tokens are the conversation's tokens, the generated tokens, and the tokens of the
        text that the template adds.

        Args:
            conversation: The conversation that the turn answers.
            turn_ids: The generated tokens, int64 [R]; the last one is the end-of-turn token.
            new_messages: The messages after the turn, at least one.

        Returns:
            The longer conversation, or a `NewBranch` if the turn cannot be appended.

        Raises:
            AlignerError: The turn was truncated (see `parse_turn`), or the template rejects the
                messages.
        """
        turn = self.parse_turn(conversation, turn_ids)
        errors: list[AlignerError] = []
        branches: list[NewBranch] = []
        # Try each message that can represent the turn until the template preserves its text.
        for message in turn.messages:
            try:
                result = self._append(
                    conversation, turn, turn_ids, (*conversation.messages, message, *new_messages)
                )
            except AlignerError as error:
                errors.append(error)
                continue
            if isinstance(result, Conversation):
                return result
            branches.append(result)
        if not branches:
            raise errors[0]
        return branches[0]

    def _append(
        self,
        conversation: Conversation,
        turn: AssistantTurn,
        turn_ids: Tensor,
        messages: tuple[Mapping[str, Any], ...],
    ) -> Conversation | NewBranch:
        """Append a turn, where `messages` are all messages up to the next turn of the assistant."""
        variables = conversation.variables
        text = self._render(messages, conversation.tools, variables)
        added_ids = self._encode_addition(conversation, turn, int(turn_ids[-1]), text)
        if isinstance(added_ids, str):
            return NewBranch(
                added_ids,
                self._start(messages, conversation.tools, variables),
            )
        tokens = torch.cat([conversation.tokens, turn_ids, added_ids])
        return Conversation(messages, conversation.tools, text, tokens, variables)

    def _start(
        self, messages: Messages, tools: Tools | None, variables: Mapping[str, Any]
    ) -> Conversation:
        text = self._render(messages, tools, variables)
        return Conversation(tuple(messages), tools, text, self._tokenizer.encode(text), variables)

    def _encode_addition(
        self, conversation: Conversation, turn: AssistantTurn, end_token: int, text: str
    ) -> Tensor | str:
        """Return the tokens of the text that the template adds after a turn.

        Args:
            conversation: The conversation before the turn.
            turn: The turn.
            end_token: The end-of-turn token that the model generated.
            text: The whole conversation, as the template renders it.

        Returns:
            The tokens after the end-of-turn token, int64 [A], or the reason why these tokens cannot
            be determined.
        """
        # Condition 1: the text before the turn is unchanged.
        before = conversation.text_before_turn
        if not text.startswith(before):
            return (
                "the chat template renders earlier turns differently when messages follow:"
                f" {_describe_difference(before, text)}"
            )

        after = text[len(before) :]
        end_text = self._decode(torch.tensor([end_token]))
        if self._tokenizer.decode([end_token]) or not end_text:
            return (
                f"the model ended its turn with {end_text!r}, which is not a special token: the"
                f" tokenizer could merge {end_text!r} with the text that follows"
            )

        # Condition 1: the text of the turn is unchanged, and its end-of-turn token follows.
        start = self._find_end(turn, after, end_text, conversation)
        if start is None:
            if not after.startswith(turn.text):
                return (
                    "the chat template renders the turn differently from the model's output:"
                    f" {_describe_difference(turn.text, after)}"
                )
            continuation = _shorten(after[len(turn.text) :])
            return (
                f"the model ended its turn with {end_text!r}, but the chat template continues after"
                f" the turn with {continuation}"
            )

        # Condition 2: the tokens from the end-of-turn token on are the same without the turn.
        tail_ids = self._tokenizer.encode(after[start:])
        full_ids = self._tokenizer.encode(after)
        if int(tail_ids[0]) != end_token or not torch.equal(full_ids[-len(tail_ids) :], tail_ids):
            return (
                f"the tokens after the end-of-turn token {end_text!r} depend on the text of the"
                " turn"
            )
        return tail_ids[1:]

    def _find_end(
        self, turn: AssistantTurn, after: str, end_text: str, conversation: Conversation
    ) -> int | None:
        """Return the position of the turn's end-of-turn token in a text that begins with the turn.

        The result is None if the text begins with another turn.
        """
        if after.startswith(turn.text + end_text):
            return len(turn.text)
        # The template may write calls differently: compare the parsed turns at each end token.
        start = after.find(end_text) if turn.calls else -1
        while start >= 0:
            rendered_turn = self._parse_text(after[:start], conversation)
            if (rendered_turn.content, rendered_turn.calls) == (turn.content, turn.calls):
                return start
            start = after.find(end_text, start + 1)
        return None

    def _parse_text(self, text: str, conversation: Conversation) -> AssistantTurn:
        # Some templates begin the reasoning in the generation prompt.
        is_reasoning = conversation.text_before_turn.rstrip().endswith(THINK_START)
        return parse_turn(
            text,
            self.tool_format,
            len(conversation.messages),
            is_reasoning=is_reasoning,
            id_key=conversation.call_id_key,
        )

    def _render(self, messages: Messages, tools: Tools | None, variables: Mapping[str, Any]) -> str:
        return self._template.render(
            messages, tools, add_generation_prompt=True, variables=variables
        )

    def _decode(self, tokens: Tensor) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def _extend_turn(conversation: Conversation, text: str, tokens: Tensor) -> Conversation:
    """Return a conversation whose last turn has more text, with the tokens of it, int64 [R]."""
    return replace(
        conversation,
        text=conversation.text + text,
        tokens=torch.cat([conversation.tokens, tokens]),
        turn_start=conversation.turn_start + text,
    )


def _describe_difference(old: str, new: str) -> str:
    """Return excerpts of two texts from shortly before the position where they first differ."""
    position = len(os.path.commonprefix([old, new]))  # noqa: RUF071  (of characters)
    start = max(0, position - 20)
    return f"{_shorten(old[start:])} became {_shorten(new[start:])}"


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
