"""A conversation with a model as the tokens that it was given and drew: they only ever grow, none
is made again from text.

What is appended behind a turn that the model drew is tokenized alone, from the turn's end-of-turn
token on. That is the same as wording and tokenizing the whole conversation where the chat template
leaves all that came before as it was, the turn included, and where that token keeps what is before
it from what is behind it. Both are looked at every time, in the very texts: no template and no
tokenizer is trusted to do for one turn what it did for another. Where either fails there is a
reason, and the whole conversation worded anew for a new branch to begin with.

Of a turn with tool calls the template may word the calls otherwise than the model did, with other
spaces for example: it is as it was where what the template wrote is read as the same calls. The
model's own tokens stay in any case.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aligner.data.tokenizer import Messages, Tokenizer, Tools
from aligner.data.tool_calls import THINK, AssistantTurn, ToolFormat, format_of, parse_turn
from aligner.errors import AlignerError


@dataclass(frozen=True)
class Conversation:
    """What a model is to answer."""

    messages: tuple[Mapping[str, Any], ...]
    tools: Tools | None
    text: str
    """As the chat template words it, up to where the assistant is to answer."""
    tokens: Tensor
    """int64 [T]: the text's, but for the turns that the model drew, which are as they were drawn.
    """
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template for this conversation (`chat_template_kwargs`)."""


@dataclass(frozen=True)
class Unsafe:
    """Why nothing can be appended, and the whole conversation worded and tokenized anew, for a new
    branch."""

    reason: str
    anew: Conversation


class ChatTurns:
    """Words a model's conversations turn by turn, by its chat template and with tool calls in its
    format."""

    def __init__(self, tokenizer: Tokenizer, form: ToolFormat | None) -> None:
        """`form` None: turns are text alone. Raises ConfigError for a model without a chat
        template."""
        self._tokenizer, self._template, self._form = tokenizer, tokenizer.chat_template, form

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ChatTurns":
        """With tool calls as the model's template writes them, if it does. Raises ConfigError as
        `ChatTurns`."""
        return cls(tokenizer, format_of(tokenizer))

    def begin(
        self,
        messages: Messages,
        tools: Tools | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Conversation:
        """Return a conversation that the assistant is to answer; `variables` are the template's
        `chat_template_kwargs`. Raises AlignerError if the template refuses the messages."""
        return self._conversation(messages, tools, variables or {})

    def said(self, conversation: Conversation, drawn: Tensor) -> AssistantTurn:
        """What a turn that was drawn, int64 [R] with its end-of-turn token last, says and calls.

        Raises AlignerError for one without that token: it was cut by its length, and no
        conversation goes on behind it.
        """
        if not drawn.numel() or not bool(self._tokenizer.ends(drawn[-1:])):
            last = self._text(drawn[-1:])
            raise AlignerError(
                f"the assistant turn of {drawn.numel()} tokens ends with {last!r}, which is not an"
                " end-of-turn token; a truncated turn must be the last turn of its episode"
            )
        return self._parsed(
            self._tokenizer.decode_after(
                conversation.tokens, drawn[:-1], skip_special_tokens=False
            ),
            conversation,
        )

    def go_on(
        self, conversation: Conversation, drawn: Tensor, new: Messages
    ) -> Conversation | Unsafe:
        """The conversation with a turn that was drawn, and the messages, one or more, that came
        behind it.

        Its tokens are the conversation's, the turn's, and those of what the template adds. Raises
        AlignerError as `said`, and where the template refuses the messages.
        """
        turn = self.said(conversation, drawn)
        refused: list[AlignerError] = []
        unsafe: list[Unsafe] = []
        for message in turn.messages:
            try:
                found = self._with(
                    conversation, turn, drawn, (*conversation.messages, message, *new)
                )
            except AlignerError as error:
                refused.append(error)
                continue
            if isinstance(found, Conversation):
                return found
            unsafe.append(found)
        if not unsafe:
            raise refused[0]
        return unsafe[0]

    def _with(
        self,
        conversation: Conversation,
        turn: AssistantTurn,
        drawn: Tensor,
        messages: tuple[Mapping[str, Any], ...],
    ) -> Conversation | Unsafe:
        variables = conversation.variables
        text = self._worded(messages, conversation.tools, variables)
        added = self._added(conversation, turn, int(drawn[-1]), text)
        if isinstance(added, str):
            return Unsafe(
                added,
                self._conversation(messages, conversation.tools, variables),
            )
        tokens = torch.cat([conversation.tokens, drawn, added])
        return Conversation(messages, conversation.tools, text, tokens, variables)

    def _conversation(
        self, messages: Messages, tools: Tools | None, variables: Mapping[str, Any]
    ) -> Conversation:
        text = self._worded(messages, tools, variables)
        return Conversation(tuple(messages), tools, text, self._tokenizer.encode(text), variables)

    def _added(
        self, conversation: Conversation, turn: AssistantTurn, end: int, text: str
    ) -> Tensor | str:
        """The tokens of what `text` has behind a turn and its end-of-turn token, int64 [A], or why
        they cannot be told."""
        before = conversation.text
        if not text.startswith(before):
            return (
                "the chat template renders earlier turns differently when messages follow:"
                f" {_apart(before, text)}"
            )
        after, ending = text[len(before) :], self._text(torch.tensor([end]))
        if self._tokenizer.decode([end]) or not ending:
            return (
                f"the model ended its turn with {ending!r}, which is not a special token: the"
                f" tokenizer could merge {ending!r} with the text that follows"
            )
        start = self._end_of(turn, after, ending, conversation)
        if start is None:
            if not after.startswith(turn.text):
                return (
                    "the chat template renders the turn differently from the model's output:"
                    f" {_apart(turn.text, after)}"
                )
            follows = _begin(after[len(turn.text) :])
            return (
                f"the model ended its turn with {ending!r}, but the chat template continues after"
                f" the turn with {follows}"
            )
        tail, whole = self._tokenizer.encode(after[start:]), self._tokenizer.encode(after)
        if int(tail[0]) != end or not torch.equal(whole[-len(tail) :], tail):
            return (
                f"the tokens after the end-of-turn token {ending!r} depend on the text of the turn"
            )
        return tail[1:]

    def _end_of(
        self, turn: AssistantTurn, after: str, ending: str, conversation: Conversation
    ) -> int | None:
        """Where the turn's end-of-turn token is in the text that begins with the turn; None where
        that is another turn."""
        if after.startswith(turn.text + ending):
            return len(turn.text)
        start = after.find(ending) if turn.calls else -1
        while start >= 0:
            worded = self._parsed(after[:start], conversation)
            if (worded.content, worded.calls) == (turn.content, turn.calls):
                return start
            start = after.find(ending, start + 1)
        return None

    def _parsed(self, text: str, conversation: Conversation) -> AssistantTurn:
        reasons = conversation.text.rstrip().endswith(THINK)
        return parse_turn(text, self._form, len(conversation.messages), reasons=reasons)

    def _worded(self, messages: Messages, tools: Tools | None, variables: Mapping[str, Any]) -> str:
        return self._template.render(
            messages, tools, add_generation_prompt=True, variables=variables
        )

    def _text(self, tokens: Tensor) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def _apart(was: str, now: str) -> str:
    """Where two texts part."""
    place = len(os.path.commonprefix([was, now]))  # noqa: RUF071  (of characters)
    return f"{_begin(was[max(0, place - 20) :])} became {_begin(now[max(0, place - 20) :])}"


def _begin(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
