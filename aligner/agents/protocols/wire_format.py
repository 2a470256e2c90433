"""The interface of the wire formats, and helpers that several of them use."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from aligner.agents.protocols.requests import Answer, ModelRequest, RequestError
from aligner.agents.protocols.response_store import ResponseStore

BodyT = TypeVar("BodyT", bound=BaseModel)
RequestT = TypeVar("RequestT", bound=ModelRequest, covariant=True)

# number of characters of an invalid value in an error message, because a value may be a whole
# conversation
_SHOWN_CHARACTERS = 100


class ParsedRequest(ABC, Generic[RequestT]):
    """A request in a wire format, which formats its own answers."""

    def __init__(self, request: RequestT) -> None:
        """Create a parsed request from the request, independent of the wire format."""
        self._request = request

    @property
    def request(self) -> RequestT:
        """The request, independent of the wire format."""
        return self._request

    def record(self, answers: Sequence[Answer]) -> None:
        """Store the answers if later requests may refer to them; called once."""

    @abstractmethod
    def format_response(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the JSON object that answers the request."""

    @abstractmethod
    def format_events(self, answers: Sequence[Answer]) -> Iterator[str]:
        """Yield the server-sent events that answer the request."""


@dataclass(frozen=True)
class RequestContext:
    """Values that a body is parsed with."""

    response_id: str
    stored_responses: ResponseStore
    """Earlier responses of the same session or model."""


@dataclass(frozen=True)
class WireFormat:
    """A wire format of requests to a model."""

    path: str
    """Path of its requests below the base URL."""
    id_prefix: str
    """Prefix of the ids of its responses."""
    parse: Callable[[bytes, RequestContext], ParsedRequest[ModelRequest]]
    """Function that parses the body of a request. Raises RequestError if the body is invalid."""


def parse_body(body_type: type[BodyT], content: bytes) -> BodyT:
    """Validate the body of a request, and return it as an object of type `body_type`.

    Raises RequestError, with the name of the first invalid field, if the body is invalid.
    """
    try:
        return body_type.model_validate_json(content)
    except ValidationError as error:
        first_error = error.errors(include_url=False, include_context=False)[0]
        # errors of the body itself, such as invalid JSON, have no location
        field = ".".join(map(str, first_error["loc"]))
        value = repr(first_error["input"])
        if len(value) > _SHOWN_CHARACTERS:
            value = value[:_SHOWN_CHARACTERS] + "…"
        raise RequestError(
            400,
            f"{field or 'the request body'}: {first_error['msg']}; got {value}",
            param=field or None,
        ) from None


def format_event(content: Mapping[str, Any]) -> str:
    """Format an object as a server-sent event without a name."""
    return f"data: {json.dumps(content)}\n\n"


def format_named_event(content: Mapping[str, Any]) -> str:
    """Format an object as a server-sent event whose name is the field `type` of the object."""
    return f"event: {content['type']}\n{format_event(content)}"


def format_openai_error(error: RequestError) -> dict[str, Any]:
    """Return an error as a JSON object in OpenAI's format."""
    error_type = "invalid_request_error"
    if error.status == 401:
        error_type = "authentication_error"
    elif error.status == 429:
        error_type = "rate_limit_error"
    elif error.status >= 500:
        error_type = "server_error"
    return {
        "error": {
            "message": str(error),
            "type": error_type,
            "param": error.param,
            "code": error.code,
        }
    }
