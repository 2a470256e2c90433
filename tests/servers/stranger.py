"""Attacks a server as another user of the machine; arguments: HTTP GRPC guarded|open PID...

The script collects possible keys from the server's processes, sends requests with them, and prints
the results as JSON. It starts as root, because the other user may not be able to run this Python,
and then changes to that user.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  # a later import would have to be readable by the other user
import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from aligner.placement.addresses import GRPC_KEY_HEADER, KEY_HEADER
from tests.other_user import UID

REFUSALS = ("the run's access key is missing or wrong", "this method or path is not served")
GUARDED = {
    "/v2/models/control/infer": {
        "inputs": [
            {"name": "request", "shape": [1], "datatype": "BYTES", "data": ['{"op": "health"}']}
        ]
    },
    "/v2": None,
    "/v2/models/control": None,
    "/v2/models/control/stats": None,
}
CLOSED = {
    "/v2/repository/models/stolen/load": {
        "parameters": {"config": '{"backend": "python", "max_batch_size": 0}'}
    },
    "/v2/repository/models/stolen/unload": {},
    "/v2/repository/index": {},
    "/v2/systemsharedmemory/region/stolen/register": {
        "key": "/stolen",
        "offset": 0,
        "byte_size": 8,
    },
    "/v2/systemsharedmemory/status": None,
    "/v2/trace/setting": {"trace_file": "/tmp/stolen"},
    "/v2/logging": {"log_file": "/tmp/stolen"},
}


def possible_keys(pids: list[str]) -> list[str]:
    """Return every possible key in the processes' arguments and readable environments."""
    found: dict[str, None] = {}
    for pid in pids:
        for file in ("cmdline", "environ"):
            try:
                content = Path(f"/proc/{pid}/{file}").read_bytes().decode()
            except PermissionError:
                continue
            for separators in (r"\0", r"\0|=", r"[\0:=,]"):
                found.update(dict.fromkeys(re.split(separators, content)))
    return [value for value in found if value]


def http(port: int, path: str, value: str, body: object) -> str:
    """Send a request with this value as the key; return the complete answer."""
    data = b"" if body is None else json.dumps(body).encode()
    lines = [
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.1",
        "Host: h",
        "Connection: close",
        f"{KEY_HEADER}: {value}",
    ]
    head = "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(head.encode() + data)
        with connection.makefile("rb") as answer:
            return answer.read().decode(errors="replace")


def grpc_calls(client: tritonclient.grpc.InferenceServerClient, scope: str) -> Iterator[tuple]:
    request = tritonclient.grpc.InferInput("request", [1], "BYTES")
    request.set_data_from_numpy(np.array([b'{"op": "health"}'], dtype=object))
    if scope == "guarded":
        yield client.infer, "control", [request]
        yield (client.get_inference_statistics,)
        yield (client.get_server_metadata,)
        yield client.get_model_metadata, "control"
    yield client.load_model, "stolen"
    yield client.unload_model, "stolen"
    yield (client.get_model_repository_index,)
    yield client.register_system_shared_memory, "stolen", "/stolen", 8
    yield (client.get_system_shared_memory_status,)
    yield client.update_trace_settings, None, {"trace_rate": "1"}
    yield client.update_log_settings, {"log_verbose_level": 1}


def grpc_answers(target: str, value: str, scope: str) -> Iterator[str]:
    """Yield the calls that the server did not refuse."""
    with tritonclient.grpc.InferenceServerClient(target) as client:
        for call, *arguments in grpc_calls(client, scope):
            try:
                call(*arguments, headers={GRPC_KEY_HEADER: value}, client_timeout=20)
            except InferenceServerException as error:
                # "Invalid metadata": the client cannot send such a value.
                if not any(words in str(error) for words in (*REFUSALS, "Invalid metadata")):
                    yield f"{call.__name__}: {error}"
            else:
                yield call.__name__


def can_connect(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(path)
        except OSError:
            return False
    return True


def main(http_port: int, grpc_port: int, scope: str, *pids: str) -> None:
    sockets = [
        path
        for line in Path("/proc/net/unix").read_text().splitlines()
        if (path := line.split()[-1]).startswith("/dev/shm/aligner-server-")
    ]
    assert all(map(can_connect, sockets)), sockets  # the owner can connect
    os.setgroups([])
    os.setresgid(UID, UID, UID)
    os.setresuid(UID, UID, UID)
    values = possible_keys([*pids])
    answered = [f"socket {path}" for path in sockets if can_connect(path)]
    for value in ["", *values]:
        for path, body in ({**GUARDED, **CLOSED} if scope == "guarded" else CLOSED).items():
            answer = http(http_port, path, value, body)
            if "\n" not in value and not any(words in answer for words in REFUSALS):
                answered.append(f"{path} with {value!r}: {answer}")
        answers = grpc_answers(f"127.0.0.1:{grpc_port}", value, scope)
        answered += [f"gRPC with {value!r}: {answer}" for answer in answers]
    print(
        json.dumps(
            {
                "uid": os.getuid(),
                "values": values,
                "sockets": sorted({*sockets})[:3],
                "answered": answered,
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
