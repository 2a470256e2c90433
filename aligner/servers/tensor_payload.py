"""Serialization of requests and responses between a server and its Triton's helper processes.

This file is also copied into Triton's model repository, where PyTriton's modules have other names.
Therefore it imports only the standard library, and receives PyTriton's classes as an argument.
"""

import pickle
from typing import Any


def create_serializer_class(pytriton: Any) -> type[Any]:
    """Return a serializer class for PyTriton's classes `Request` and `Response`.

    Tensors are copied into the message. Both processes belong to the same user, and communicate
    through a socket that only this user can open. Therefore neither process unpickles data of
    another user.

    Args:
        pytriton: Module that has the two classes.
    """

    class PickleSerializer:
        """Replacement for PyTriton's serializer, with the same methods."""

        def serialize_requests(self, requests: list[Any]) -> bytes:
            return pickle.dumps([(request.data, request.parameters) for request in requests], 5)

        def deserialize_requests(self, payload: bytes) -> list[Any]:
            return [
                pytriton.Request(data=data, parameters=parameters)
                for data, parameters in pickle.loads(payload)
            ]

        def serialize_responses(self, responses: list[dict[str, Any]]) -> bytes:
            return pickle.dumps(responses, 5)

        def deserialize_responses(self, payload: bytes) -> list[Any]:
            return [pytriton.Response(data=data) for data in pickle.loads(payload)]

        def free_requests_resources(self, payload: bytes) -> None:
            """Do nothing: the message contains the tensors."""

        free_responses_resources = free_requests_resources

        def start(self, url: Any, authkey: bytes | None = None) -> None:
            """Do nothing: there is no tensor store."""

        connect = start

        def close(self) -> None:
            """Do nothing: there is no tensor store."""

    return PickleSerializer
