"""OpenAI's text completions: `/v1/completions`."""

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field

from aligner.agents.protocols.openai_completions import (
    CompletionBody,
    build_common_arguments,
    build_common_fields,
    build_usage,
)
from aligner.agents.protocols.requests import Answer, TextRequest
from aligner.agents.protocols.wire_format import (
    ParsedRequest,
    WireFormat,
    format_event,
    format_openai_error,
    parse_body,
)


class _TextBody(CompletionBody):
    """The body of a request for a text completion."""

    prompt: str | list[int]
    # number of alternatives per token
    logprobs: int | None = Field(None, ge=0, le=20)


class _TextCompletion(ParsedRequest[TextRequest]):
    """A parsed request for a text completion."""

    def format_response(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """See `ParsedRequest.format_response`."""
        choices = [
            {
                "index": index,
                "text": answer.text,
                "finish_reason": answer.finish_reason,
                "logprobs": self._build_logprobs(answer),
            }
            for index, answer in enumerate(answers)
        ]
        return {
            **build_common_fields(self._request, "text_completion"),
            "choices": choices,
            "usage": build_usage(answers),
        }

    def format_events(self, answers: Sequence[Answer]) -> Iterator[str]:
        """See `ParsedRequest.format_events`.

        Each complete answer is one event, and its finish reason is a second one.
        """
        common_fields = build_common_fields(self._request, "text_completion")
        for index, answer in enumerate(answers):
            choice = {
                "index": index,
                "text": answer.text,
                "finish_reason": None,
                "logprobs": self._build_logprobs(answer),
            }
            yield format_event({**common_fields, "choices": [choice]})

            last_choice = {
                "index": index,
                "text": "",
                "finish_reason": answer.finish_reason,
                "logprobs": None,
            }
            yield format_event({**common_fields, "choices": [last_choice]})

        if self._request.include_usage:
            yield format_event({**common_fields, "choices": [], "usage": build_usage(answers)})
        yield "data: [DONE]\n\n"

    def _build_logprobs(self, answer: Answer) -> dict[str, Any] | None:
        """Return the log-probs of an answer; None if the request does not ask for them."""
        if not self._request.logprobs:
            return None
        texts = [token.text for token in answer.tokens]
        # number of characters before each token
        offsets = [len("".join(texts[:index])) for index in range(len(texts))]
        top_logprobs = None
        if self._request.top_logprobs:
            top_logprobs = [
                {other.text: other.logprob for other in token.top_logprobs}
                for token in answer.tokens
            ]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in answer.tokens],
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }


def _parse(content: bytes, response_id: str) -> _TextCompletion:
    """Parse a body; see `WireFormat.parse`."""
    body = parse_body(_TextBody, content)
    return _TextCompletion(
        TextRequest(
            **build_common_arguments(body, response_id),
            prompt=body.prompt if isinstance(body.prompt, str) else tuple(body.prompt),
            logprobs=body.logprobs is not None,
            top_logprobs=body.logprobs or 0,
        )
    )


TEXT_COMPLETIONS = WireFormat("completions", "cmpl", _parse, format_openai_error)
