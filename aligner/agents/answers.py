"""Conversion of prompts to tokens and of generated tokens to answers, for every back end."""

import asyncio
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from aligner.agents.message_matching import get_continued_text, to_template_messages
from aligner.agents.protocols.requests import (
    Answer,
    AnswerToken,
    ChatRequest,
    ModelRequest,
    RequestError,
    TextRequest,
)
from aligner.data.chat_turns import ChatTurns, Conversation
from aligner.data.stop_strings import cut_before_stop
from aligner.data.tokenizer import Tokenizer
from aligner.data.tool_calls import ToolCall

# Maximum number of characters that are tokenized on the server's loop, which takes some 20 ms; the
# tokens of longer prompts are computed in a thread.
_MAX_CHARACTERS_ON_LOOP = 10_000
_T = TypeVar("_T")


async def prepare(request: ModelRequest, function: Callable[[], _T]) -> _T:
    """Call a function that computes the tokens and the grammar of a request.

    The function runs in a thread if it may take long, so that the loop can serve other requests.
    """
    # the tokens of a megabyte take seconds, and so does the compilation of a large JSON schema
    is_constrained = isinstance(request, ChatRequest) and request.is_constrained
    if is_constrained or _count_characters(request) > _MAX_CHARACTERS_ON_LOOP:
        return await asyncio.to_thread(function)
    return function()


def begin_conversation(request: ChatRequest, chat: ChatTurns) -> Conversation:
    """Return a chat as the chat template renders it.

    Raises:
        AlignerError: A message is invalid, or the template rejects the messages.
    """
    messages = to_template_messages(request.context_messages)
    tools = [dict(tool) for tool in request.tools] or None
    conversation = chat.begin(messages, tools, request.chat_template_kwargs)
    if request.continue_final_message:
        return chat.begin_turn(conversation, get_continued_text(request))
    return conversation


@dataclass(frozen=True)
class AnswerBuilder:
    """Builds answers from generated tokens."""

    tokenizer: Tokenizer
    get_chat: Callable[[], ChatTurns]
    """Function that returns the chat template. Raises ConfigError if the model has none."""

    def build_tokens(self, tokens: Tensor, logprobs: Tensor) -> list[AnswerToken]:
        """Return generated tokens, int64 [R], and their log-probs, [R], as tokens of an answer."""
        texts = map(self.tokenizer.decode_token, tokens.tolist())
        return list(map(AnswerToken, texts, logprobs.tolist()))

    def build(
        self,
        request: ModelRequest,
        conversation: Conversation | None,
        input_tokens: Tensor,
        generated_tokens: Tensor,
        answer_tokens: Sequence[AnswerToken],
        *,
        is_truncated: bool,
    ) -> Answer:
        """Return generated tokens as an answer, which ends before the first stop string.

        Tool calls become part of the answer only if the turn is complete and all of its calls can
        be parsed; otherwise the answer is the plain text.

        Args:
            request: The request.
            conversation: The rendered chat of the request; None if it has none.
            input_tokens: Input tokens, int64 [T].
            generated_tokens: Generated tokens, int64 [R].
            answer_tokens: The generated tokens with their log-probs, [R].
            is_truncated: Whether the maximum number of tokens ended the answer.
        """
        has_ended = bool(self.tokenizer.is_eos(generated_tokens[-1:]))
        text_tokens = generated_tokens[:-1] if has_ended else generated_tokens
        full_text = self.decode_after(input_tokens, text_tokens)
        text = cut_before_stop(full_text, request.stop)
        stop_string = None
        if text != full_text:
            stop_string = next(
                string for string in request.stop if full_text.startswith(string, len(text))
            )
        answer = Answer(
            text,
            "length" if is_truncated and stop_string is None else "stop",
            len(input_tokens),
            tuple(answer_tokens),
            stop_string=stop_string,
        )
        if (
            stop_string is not None
            or not has_ended
            or conversation is None
            or not isinstance(request, ChatRequest)
            or not request.should_parse_tool_calls
        ):
            return answer

        turn = self.get_chat().parse_turn(conversation, generated_tokens)
        # `calls` also contains the calls that cannot be parsed, as `MalformedCall`
        tool_calls = tuple(call for call in turn.calls if isinstance(call, ToolCall))
        if not tool_calls or len(tool_calls) != len(turn.calls):
            return answer
        # the client has the beginning of the turn already
        texts = [turn.content, conversation.turn_start.strip()]
        start = os.path.commonprefix(texts)  # noqa: RUF071  (of characters)
        content = turn.content.removeprefix(start).lstrip() if start else turn.content
        return replace(answer, finish_reason="tool_calls", content=content, tool_calls=tool_calls)

    def decode_after(self, input_tokens: Tensor, generated_tokens: Tensor) -> str:
        """Return the text of generated tokens that follow the input tokens."""
        return self.tokenizer.decode_after(
            input_tokens, generated_tokens, skip_special_tokens=False
        )


def with_call_id_key(
    conversation: Conversation, input_tokens: Tensor, generated_tokens: Tensor, repeats: int
) -> Conversation:
    """Return a conversation whose answer has ids of tool calls that no other answer has.

    Args:
        conversation: The rendered chat of a request.
        input_tokens: Its input tokens, int64 [T].
        generated_tokens: Tokens of the answer, int64 [R].
        repeats: Number of earlier requests with the same input.
    """
    digest = hashlib.sha256(input_tokens.numpy().tobytes())
    digest.update(generated_tokens.numpy().tobytes())
    return replace(conversation, call_id_key=f"{digest.hexdigest()} {repeats}")


def find_prompt_problem(request: ModelRequest) -> str | None:
    """Return why a request is only for a stored model: it needs log-probs of tokens that are not
    generated, or has several prompts. None if it is not."""
    if request.top_logprobs:
        return f"top_logprobs={request.top_logprobs}: must be 0"
    if isinstance(request, TextRequest) and request.echo:
        return "echo=true: must be false"
    if isinstance(request, TextRequest) and len(request.prompts) > 1:
        return "prompt: must be one text or one list of token ids"
    return None


def check_prompt_tokens(prompt: Sequence[int], vocab_size: int) -> Tensor:
    """Return the token ids of a text request, int64 [T].

    Raises RequestError if there are none, or if one is not in the vocabulary.
    """
    if not prompt or not all(0 <= token < vocab_size for token in prompt):
        raise RequestError(
            400,
            f"prompt: must have at least one token id, each between 0 and {vocab_size - 1}",
            param="prompt",
        )
    return torch.tensor(prompt, dtype=torch.int64)


def _count_characters(request: ModelRequest) -> int:
    """Return about how many characters the prompts of a request have."""
    if isinstance(request, ChatRequest):
        return sum(len(str(message)) for message in request.messages)
    return sum(map(len, request.prompts)) if isinstance(request, TextRequest) else 0


def build_length_error(request: ModelRequest, length: int, limit: int) -> RequestError:
    """Return the error of a prompt that leaves no room for a token.

    Agent frameworks recognize OpenAI's message, and shorten the conversation.

    Args:
        request: The request.
        length: Number of tokens of the prompt.
        limit: Maximum number of tokens of prompt and answer together.
    """
    field = "messages" if isinstance(request, ChatRequest) else "prompt"
    return RequestError(
        400,
        f"This model's maximum context length is {limit} tokens. However, your {field} resulted in"
        f" {length} tokens. Please reduce the length of the {field} to at most {limit - 1} tokens.",
        "context_length_exceeded",
        field,
    )
