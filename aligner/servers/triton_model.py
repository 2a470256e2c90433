"""Triton's side of every endpoint: PyTriton's Python-backend model, which serves any number of
requests with one helper process.

`triton_host` copies this file and `tensor_payload.py` beside PyTriton's own files into Triton's
model repository; only Triton's Python stub imports it. PyTriton's `execute` blocks its stub until
the request is answered, so that requests at a time take as many stubs, and each costs a third of a
second of a processor at the start and 100 MiB. Here `execute` returns when the request is sent to
the server process, and the answer follows through Triton's response sender.
"""

import asyncio
import os
from typing import Any

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

from . import pytriton_model  # type: ignore[attr-defined]
from .tensor_payload import serializer_of

# PyTriton's own serializer keeps tensors in shared memory, for which it starts two more processes
# per model.
pytriton_model.TensorStoreSerializerDeserializer = serializer_of(pytriton_model)


class _ResponseSender(pytriton_model.BatchResponsesHandler):  # type: ignore[misc]
    """Sends the responses that the server process returns to Triton."""

    async def handle_responses(
        self, scope: dict[str, Any], responses_queue: asyncio.Queue[Any], responses_future: Any
    ) -> None:
        """See PyTriton's class."""
        requests = self._requests_map[scope["requests_id"]]
        result = await super().handle_responses(scope, responses_queue, responses_future)
        if isinstance(result, Exception):
            error = pb_utils.TritonError(str(result))
            result = [pb_utils.InferenceResponse(error=error) for _ in requests]

        for request, response in zip(requests, result, strict=True):
            sender = request.get_response_sender()
            sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


pytriton_model.BatchResponsesHandler = _ResponseSender


class TritonPythonModel(pytriton_model.TritonPythonModel):  # type: ignore[misc]
    """PyTriton's model, which does not wait for answers, and whose request numbers begin at random.

    PyTriton's numbers begin at 1 in every stub. If Triton replaces a stub, an answer to a request
    of the old stub would be taken for the answer to the new stub's request of the same number. With
    this model the new stub does not know the number, and drops the answer.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """See PyTriton's class."""
        super().initialize(args)
        self._id_counter = int.from_bytes(os.urandom(4), "big")

    def execute(self, requests: list[Any]) -> None:
        """Send the requests to the server process; `_ResponseSender` answers them."""
        self._id_counter = (self._id_counter + 1) % 2**32
        requests_id = self._id_counter.to_bytes(4, "big")
        self._requests[requests_id] = requests
        self._requests_server.push(requests_id, requests).result()
