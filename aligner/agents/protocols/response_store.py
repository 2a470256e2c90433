"""Responses that later requests of the Responses API continue by their id."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aligner.agents.protocols.requests import RequestError

Items = Sequence[Mapping[str, Any]]
"""Items of the Responses API: messages, function calls, and outputs of function calls."""

# number of responses that are kept for each session or model
_MAX_RESPONSES = 1000


@dataclass(frozen=True)
class _StoredResponse:
    """A response and its input."""

    input_items: Items
    """Items of the conversation before the response, without instructions."""
    output_items: Items
    response: Mapping[str, Any]
    """The response object."""


class ResponseStore:
    """The latest responses of a session, or of a stored model, in memory."""

    def __init__(self) -> None:
        """Create an empty store."""
        self._responses: OrderedDict[str, _StoredResponse] = OrderedDict()
        # output items of the responses by their ids
        self._items: dict[str, Mapping[str, Any]] = {}

    def add(self, response: Mapping[str, Any], input_items: Items) -> None:
        """Store a response, and drop the oldest one if there are too many.

        Args:
            response: The response object.
            input_items: Items of the conversation before the response, without instructions.
        """
        output_items = response["output"]
        self._responses[response["id"]] = _StoredResponse(input_items, output_items, response)
        self._items |= {item["id"]: item for item in output_items}
        if len(self._responses) > _MAX_RESPONSES:
            self.delete(next(iter(self._responses)))

    def get(self, response_id: str) -> Mapping[str, Any]:
        """Return a response object. Raises RequestError if the response does not exist."""
        if response_id not in self._responses:
            raise RequestError(404, f"Response with id '{response_id}' not found.")
        return self._responses[response_id].response

    def delete(self, response_id: str) -> None:
        """Delete a response. Raises RequestError if the response does not exist."""
        for item in self.get(response_id)["output"]:
            del self._items[item["id"]]
        del self._responses[response_id]

    def get_items(self, response_id: str) -> Items:
        """Return the items of a conversation up to and including a response.

        Raises RequestError if the response does not exist.
        """
        response = self._responses.get(response_id)
        if response is None:
            raise RequestError(
                404,
                f"Previous response with id '{response_id}' not found.",
                "previous_response_not_found",
                "previous_response_id",
            )
        return [*response.input_items, *response.output_items]

    def get_item(self, item_id: str) -> Mapping[str, Any]:
        """Return an output item of a response. Raises RequestError if it does not exist."""
        if item_id not in self._items:
            raise RequestError(404, f"Item with id '{item_id}' not found.", param="input")
        return self._items[item_id]
