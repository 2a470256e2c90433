"""Requests and responses between a server process and its Triton's helper processes, as bytes.

Also a part of Triton's model repository, where PyTriton's modules have other names: it imports
nothing but the standard library, and takes PyTriton's classes as an argument.
"""

import pickle
from typing import Any


def serializer_of(pytriton: Any) -> type[Any]:
    """Return a serializer for the module that has PyTriton's classes `Request` and `Response`.

    Tensors are copied into the message. The two processes belong to one user and meet at a socket
    that only this user can open, so neither takes pickles from others.
    """

    class PickleSerializer:
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
            """Nothing: the message holds the tensors."""

        free_responses_resources = free_requests_resources

        def start(self, url: Any, authkey: bytes | None = None) -> None:
            """Nothing: there is no store of tensors."""

        connect = start

        def close(self) -> None:
            """Nothing: there is no store of tensors."""

    return PickleSerializer
