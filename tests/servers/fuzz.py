"""Generates bad requests: valid requests with one fault in a tensor, and random bytes."""

from __future__ import annotations

import http.client
import json
import random
import socket
import string
from collections.abc import Callable
from dataclasses import dataclass, replace

import grpc
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc

from aligner.placement.addresses import KEY_HEADER, Endpoint
from aligner.servers.wire_protocol import (
    CONTROL,
    CRITIC_INFER,
    CRITIC_TRAIN,
    EndpointSpec,
    encode_text,
    parse_error,
)
from tests.servers.bad_requests import good

DATATYPES = {
    "l": "INT64",
    "i": "INT32",
    "f": "FP32",
    "d": "FP64",
    "S": "BYTES",
    "O": "BYTES",
    "?": "BOOL",
}
TIMEOUT_S = 10.0
# Triton's errors for names, dtypes, shapes and bytes that do not match the model configuration.
# Such requests never reach our code.
_TRITONS_WORDS = (
    "unexpected inference input",
    "expected number of inputs",
    "data-type is",
    "unexpected shape for input",
    "batch size does not match other inputs",
    "All input dimensions should be specified",
    "Unable to parse 'shape'",
    "input byte size mismatch",
    "incomplete string length indicator",
    "incomplete string data",
    "cannot cast view with zeros",  # PyTriton's error for a tensor without elements
)


@dataclass(frozen=True)
class Wire:
    """A request in wire format: (name, shape, datatype, bytes) of each tensor."""

    model: str
    tensors: tuple[tuple[str, tuple[int, ...], str, bytes], ...]


def wire(spec: EndpointSpec, arrays: dict[str, NDArray]) -> Wire:
    return Wire(
        spec.name,
        tuple(
            (name, array.shape, DATATYPES[array.dtype.char], _bytes(array))
            for name, array in arrays.items()
        ),
    )


def _bytes(array: NDArray) -> bytes:
    if array.dtype.kind not in "SO":
        return array.tobytes()
    return b"".join(len(item).to_bytes(4, "little") + item for item in array.ravel().tolist())


def spoil(choose: random.Random, run: str) -> Wire:
    """Return a request that must be refused, regardless of earlier requests."""
    spec = choose.choice([CRITIC_INFER, CRITIC_INFER, CRITIC_TRAIN, CRITIC_TRAIN, CONTROL])
    if spec is CONTROL:
        return wire(spec, {"request": encode_text(_bad_control(choose))})
    rows, width = choose.randint(1, 5), choose.randint(2, 12)
    arrays = good(spec, rows, width)
    if spec is CRITIC_TRAIN and choose.random() < 0.5:
        # Out of order for every run: the number is far beyond the last update.
        arrays |= {"sequence_number": np.array([10**9]), "run_id": encode_text(run)}
    return choose.choice([_content, _content, _content, _tensors, _bytes_missing, _order])(
        choose, spec, arrays
    )


def _bad_control(choose: random.Random) -> str:
    return choose.choice(
        [
            "",
            "[]",
            "{",
            "null",
            '{"op": null}',
            '{"op": "restore"}',
            '{"op": "restore", "step": true}',
            '{"op": "restore", "step": 1e99}',
            f'{{"op": "restore", "step": {"9" * 300}}}',
            f'{{"op": "restore", "step": {"9" * 5000}}}',
            f'{{"op": "checkpoint", "step": {"9" * 300}}}',
            f'{{"op": "begin_checkpoint", "step": {"9" * 300}}}',
            f'{{"op": "restore", "step": 987654321, "run_id": "x@{"9" * 5000}"}}',
            f'{{"op": {"9" * 5000}}}',
            '{"op": "\\ud800"}',
            '{"op": "restore", "step": 987654321}',
            '{"op": "checkpoint", "step": -1}',
            '{"op": "version", "step": 1}',
            '{"op": "health", "instance": 5}',
            '{"op": "version", "instance": "another"}',
            "".join(choose.choices(string.printable, k=choose.randint(1, 200))),
            "[" * 5000,
            '{"op": ' * 50_000,
        ]
    )


def _content(choose: random.Random, spec: EndpointSpec, arrays: dict[str, NDArray]) -> Wire:
    """Put an invalid value into one of the tensors."""
    bad_values: dict[str, list[float]] = {
        "tokens": [-1, 64, 2**31, 2**62, -(2**63)],
        "sequence_lengths": [0, -1, arrays["tokens"].shape[1] + 1, 2**62],
        "returns": [float("nan"), float("inf"), -float("inf")],
        "prev_values": [float("nan"), float("inf")],
        "mask": [0.5, -1, float("nan")],
    }
    name = choose.choice([name for name in arrays if name in bad_values])
    array = arrays[name].copy()
    array.flat[choose.randrange(array.size)] = choose.choice(bad_values[name])
    return wire(spec, {**arrays, name: array})


def _tensors(choose: random.Random, spec: EndpointSpec, arrays: dict[str, NDArray]) -> Wire:
    """Change dtype, rank, shape or name of a required tensor."""
    name = choose.choice([tensor.name for tensor in spec.inputs if not tensor.optional])
    array, rest = arrays[name], {other: array for other, array in arrays.items() if other != name}
    changes: list[Callable[[], dict[str, NDArray]]] = [
        lambda: rest,
        lambda: rest | {name.upper(): array},
        lambda: rest | {name: array, "extra": array},
        lambda: rest | {name: array.astype(choose.choice([np.int32, np.float64, bool]))},
        lambda: rest | {name: array.astype("S")},
        lambda: rest | {name: array[None]},
        lambda: rest | {name: array.reshape(-1)},
        lambda: rest | {name: np.concatenate([array, array[:1]])},
        lambda: rest | {name: array[:0]},
        lambda: rest | {name: np.repeat(array, 99, axis=1)},
        lambda: {other: each[:0] for other, each in arrays.items()},
        lambda: (
            {other: np.repeat(each, 99, axis=0) for other, each in arrays.items() if each.ndim == 2}
            | {"extra": array}
        ),
    ]
    return wire(spec, choose.choice(changes)())


def _bytes_missing(choose: random.Random, spec: EndpointSpec, arrays: dict[str, NDArray]) -> Wire:
    """Make shape, datatype and bytes of a tensor inconsistent."""
    request = wire(spec, arrays)
    place = choose.randrange(len(request.tensors))
    name, shape, datatype, data = request.tensors[place]
    changed = choose.choice(
        [
            (name, shape, datatype, data[:-1]),
            (name, shape, datatype, data + b"\0"),
            (name, shape, "NONSENSE", data),
            (name, (*shape[:-1], 2**40), datatype, data),
            (name, (-1,) * len(shape), datatype, data),
        ]
    )
    return replace(
        request, tensors=(*request.tensors[:place], changed, *request.tensors[place + 1 :])
    )


def _order(choose: random.Random, spec: EndpointSpec, arrays: dict[str, NDArray]) -> Wire:
    """Address another instance of the server, another run, or another sequence number."""
    rows = len(arrays["tokens"])

    def everywhere(value: object) -> NDArray:
        return np.full(
            (rows, 1) if spec.batching else (1,),
            value,
            dtype=object if isinstance(value, bytes) else np.int64,
        )

    changes: list[dict[str, NDArray]] = [
        {"instance": everywhere(b"0123456789abcdef")},
        {"instance": everywhere(b"\xff\xfe")},
        {"sequence_number": everywhere(choose.choice([-2, 10**9, 2**63 - 1, -(2**63)]))},
    ]
    if spec is CRITIC_TRAIN:
        changes.append({"run_id": encode_text("another"), "sequence_number": everywhere(0)})
        changes.append(
            {"run_id": encode_text(f"x@{'9' * 5000}"), "sequence_number": everywhere(10**9)}
        )
    trace = {"trace_id": everywhere(choose.randbytes(8))} if choose.random() < 0.5 else {}
    return wire(spec, arrays | choose.choice(changes) | trace)


def over_grpc(
    stub: service_pb2_grpc.GRPCInferenceServiceStub, key: str | None, request: Wire
) -> str | None:
    """Send a request; return the server's error, or None if the server answered."""
    message = service_pb2.ModelInferRequest(model_name=request.model)
    for name, shape, datatype, data in request.tensors:
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(data)
    metadata = [] if key is None else [(f"triton-grpc-protocol-{KEY_HEADER}", key)]
    try:
        stub.ModelInfer(message, timeout=TIMEOUT_S, metadata=metadata)
    except grpc.RpcError as error:
        assert error.code() not in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.DEADLINE_EXCEEDED,
        ), (error.details(), request)
        return error.details()
    return None


def over_http(endpoint: Endpoint, key: str | None, request: Wire) -> str | None:
    """Send a request; return the server's error, or None if the server answered."""
    inputs = [
        {
            "name": name,
            "shape": shape,
            "datatype": datatype,
            "parameters": {"binary_data_size": len(data)},
        }
        for name, shape, datatype, data in request.tensors
    ]
    header = json.dumps({"inputs": inputs}).encode()
    headers = {"Inference-Header-Content-Length": str(len(header))}
    body = header + b"".join(data for *_, data in request.tensors)
    error_text = post(endpoint, key, f"/v2/models/{request.model}/infer", body, headers)
    return None if error_text is None else json.loads(error_text)["error"]


def post(
    endpoint: Endpoint, key: str | None, path: str, body: bytes, headers: dict[str, str]
) -> str | None:
    """Send a POST; return Triton's error text, or None for status 200."""
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.http, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, body, headers | ({} if key is None else {KEY_HEADER: key}))
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
        return None if response.status == 200 else text or str(response.status)
    finally:
        connection.close()


def is_known(error_text: str | None) -> bool:
    """Return whether the text is a typed error of our code, or an error of Triton's own checks."""
    return error_text is not None and (
        parse_error(error_text)[0] != "Triton"
        or any(words in error_text for words in _TRITONS_WORDS)
    )


def raw_garbage(port: int, data: bytes) -> None:
    """Send bytes of no protocol, then wait until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
        except (ConnectionResetError, BrokenPipeError):
            pass
