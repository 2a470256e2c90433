"""Triton's side of every endpoint: a Python backend model that serves all requests in one process.

`triton_host` copies this file and `tensor_payload.py` into Triton's model repository, next to
PyTriton's own files. Only Triton's Python stub imports it.

The `execute` of PyTriton's own model blocks its stub until the request is answered. Concurrent
requests would therefore need one stub each, and every stub costs a third of a second of CPU time at
its start, and 100 MiB. The `execute` of this model returns as soon as the request is sent to the
server process. The answer is sent later, through Triton's response sender.
"""

import asyncio
import os
from typing import Any

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

from . import pytriton_model  # type: ignore[attr-defined]
from .tensor_payload import create_serializer_class

# PyTriton's own serializer stores tensors in shared memory, and starts two more processes per model
# for this purpose.
pytriton_model.TensorStoreSerializerDeserializer = create_serializer_class(pytriton_model)


class _ResponseSender(pytriton_model.BatchResponsesHandler):  # type: ignore[misc]
    """Sends the responses of the server process to Triton."""

    async def handle_responses(
        self, scope: dict[str, Any], responses_queue: asyncio.Queue[Any], responses_future: Any
    ) -> None:
        """Receive the responses of the server process, and send each of them to Triton."""
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
    """PyTriton's model, changed in two points.

    `execute` does not wait for answers, and request numbers start at a random number. PyTriton's
    numbers start at 1 in every stub. If Triton replaces a stub, PyTriton would deliver an answer to
    a request of the old stub as the answer to the new stub's request with the same number. With
    random numbers, the new stub does not know the number of such an answer, and drops it.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Initialize PyTriton's model, and choose the first request number."""
        super().initialize(args)
        self._id_counter = int.from_bytes(os.urandom(4), "big")

    def execute(self, requests: list[Any]) -> None:
        """Send the requests to the server process. `_ResponseSender` sends the answers later."""
        self._id_counter = (self._id_counter + 1) % 2**32
        requests_id = self._id_counter.to_bytes(4, "big")
        self._requests[requests_id] = requests
        self._requests_server.push(requests_id, requests).result()
