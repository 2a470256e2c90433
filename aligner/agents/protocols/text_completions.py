"""OpenAI's text completions: `/v1/completions`."""

import itertools
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from aligner.agents.protocols.openai_completions import (
    CompletionBody,
    CompletionResponse,
    build_common_arguments,
)
from aligner.agents.protocols.requests import Answer, AnswerToken, RequestError, TextRequest
from aligner.agents.protocols.wire_format import (
    RequestContext,
    WireFormat,
    parse_body,
)


class _TextBody(CompletionBody):
    """The body of a request for a text completion."""

    # `_parse_prompts` checks its type
    prompt: Any
    max_tokens: int | None = Field(None, ge=0)
    echo: bool | None = None
    # number of alternatives per token
    logprobs: int | None = Field(None, ge=0, le=20)


class _TextCompletion(CompletionResponse[TextRequest]):
    """A parsed request for a text completion."""

    object_type = "text_completion"
    event_type = "text_completion"
    empty_content: Mapping[str, Any] = {"text": ""}

    def build_content(self, answer: Answer) -> dict[str, Any]:
        """See `CompletionResponse.build_content`."""
        return {"text": answer.text}

    def build_event_content(self, answer: Answer) -> dict[str, Any]:
        """See `CompletionResponse.build_event_content`."""
        return self.build_content(answer)

    def build_logprobs(self, answer: Answer) -> dict[str, Any] | None:
        """Return the log-probs of an answer; None if the request does not ask for them."""
        if not self._request.logprobs:
            return None
        texts = [token.text for token in answer.tokens]
        # number of characters before each token
        offsets = [*itertools.accumulate(map(len, texts), initial=0)][:-1]
        top_logprobs = None
        if self._request.top_logprobs:
            top_logprobs = [_build_top_logprobs(token) for token in answer.tokens]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in answer.tokens],
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }


def _build_top_logprobs(token: AnswerToken) -> dict[str, float | None] | None:
    """Return the log-probs of the most probable tokens at a position, and of the token itself.

    The result is None for a token without a log-prob.
    """
    if token.logprob is None:
        return None
    logprobs: dict[str, float | None] = {}
    for other in (*token.top_logprobs, token):
        # several tokens may have the same text; the first one is the most probable
        logprobs.setdefault(other.text, other.logprob)
    return logprobs


def _parse_prompts(prompt: Any) -> tuple[str | tuple[int, ...], ...]:
    """Return the prompts of the field `prompt`. Raises RequestError if it is invalid."""
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt, list) and prompt:
        if _is_token_list(prompt):
            return (tuple(prompt),)
        if all(isinstance(item, str) for item in prompt):
            return tuple(prompt)
        if all(_is_token_list(item) for item in prompt):
            return tuple(map(tuple, prompt))
    raise RequestError(
        400,
        "prompt: must be a text, a list of token ids, or a list of texts or of lists of token ids,"
        " which is not empty",
        param="prompt",
    )


def _is_token_list(value: Any) -> bool:
    """Return whether a JSON value is a list of integers."""
    # `bool` is a subclass of `int`
    return isinstance(value, list) and all(type(item) is int for item in value)


def _parse(content: bytes, context: RequestContext) -> _TextCompletion:
    """Parse a body; see `WireFormat.parse`."""
    body = parse_body(_TextBody, content)
    if body.max_tokens == 0 and not body.echo:
        raise RequestError(400, "max_tokens=0: must be at least 1 without echo", param="max_tokens")
    return _TextCompletion(
        TextRequest(
            **build_common_arguments(body, context.response_id),
            prompts=_parse_prompts(body.prompt),
            echo=bool(body.echo),
            logprobs=body.logprobs is not None,
            top_logprobs=body.logprobs or 0,
        )
    )


TEXT_COMPLETIONS = WireFormat("completions", "cmpl", _parse)
