"""Fuzzed requests, sent concurrently with valid ones, leave the critic unchanged."""

from __future__ import annotations

import contextlib
import random
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2_grpc

from aligner.servers.remote_client import Connection
from aligner.servers.wire_protocol import CRITIC_INFER, CRITIC_TRAIN, encode_text
from tests.servers import fuzz
from tests.servers.bad_requests import good

pytestmark = pytest.mark.slow

REQUESTS, CALLERS = 1000, 8


@pytest.fixture
def connection(critic):
    with contextlib.closing(Connection("critic", critic.endpoint, critic.access)) as connection:
        yield connection


def name_the_run(connection):
    """Assign the critic to a run; return the run, and the number of its next update."""
    state = connection.control(20, "version")
    run = state["run_id"] or "run-a@0"
    order = {
        "sequence_number": np.array([state["sequence_number"] + 1]),
        "run_id": encode_text(run),
    }
    connection.infer(CRITIC_TRAIN, good(CRITIC_TRAIN) | order, 20)
    return run, state["sequence_number"] + 2


def send_bad(choose, critic, stub, run):
    """Send one bad request of a random kind, and check that the server refuses it."""
    key, endpoint, kind = critic.access.key, critic.endpoint, choose.random()
    if kind < 0.75:
        request = fuzz.spoil(choose, run)
        error_text = choose.choice(
            [
                lambda: fuzz.over_grpc(stub, key, request),
                lambda: fuzz.over_http(endpoint, key, request),
            ]
        )()
        assert fuzz.is_known(error_text), (error_text, request)
    elif kind < 0.82:
        request, wrong = (
            fuzz.wire(CRITIC_TRAIN, good(CRITIC_TRAIN)),
            choose.choice([None, "", "wrong", key[:-1], key + "x"]),
        )
        error_text = choose.choice(
            [
                lambda: fuzz.over_grpc(stub, wrong, request),
                lambda: fuzz.over_http(endpoint, wrong, request),
            ]
        )()
        assert "the run's access key is missing or wrong" in (error_text or ""), wrong
    elif kind < 0.93:
        body, length = (
            choose.randbytes(choose.randint(0, 3000)),
            str(choose.choice([0, 1, 10, 10**6, -1, "many"])),
        )
        model = choose.choice(["critic_infer", "critic_train", "critic_save", "control", "nothing"])
        headers = choose.choice([{}, {"Inference-Header-Content-Length": length}])
        assert fuzz.post(endpoint, key, f"/v2/models/{model}/infer", body, headers) is not None, (
            model,
            headers,
            body,
        )
    else:
        beginning = choose.choice(
            [
                b"",
                b"POST /v2/models/critic_train/infer HTTP/1.1\r\n",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            ]
        )
        port = choose.choice([endpoint.http, endpoint.grpc])
        fuzz.raw_garbage(port, beginning + choose.randbytes(choose.randint(1, 3000)))


@pytest.mark.promise("bad-requests-disturb-nothing")
def test_fuzzed_requests_are_refused_and_change_nothing(critic, connection):
    run, number = name_the_run(connection)
    arrays = good(CRITIC_INFER)
    before, values = (
        connection.control(20, "version"),
        connection.infer(CRITIC_INFER, arrays, 20)["values"].tobytes(),
    )

    def call(caller):
        """Send this caller's share of requests; return the longest duration of a request."""
        choose, slowest = random.Random(caller), 0.0
        with grpc.insecure_channel(f"127.0.0.1:{critic.endpoint.grpc}") as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            for place in range(REQUESTS // CALLERS):
                start = time.monotonic()
                send_bad(choose, critic, stub, run)
                slowest = max(slowest, time.monotonic() - start)
                if place % 10 == 0:
                    assert (
                        connection.infer(CRITIC_INFER, arrays, fuzz.TIMEOUT_S)["values"].tobytes()
                        == values
                    )
        return slowest

    with ThreadPoolExecutor(CALLERS) as callers:
        slowest = max(callers.map(call, range(CALLERS)))
    assert slowest < fuzz.TIMEOUT_S
    assert all(rank.poll() is None for rank in critic.ranks)
    assert connection.control(20, "version") == before
    assert connection.infer(CRITIC_INFER, arrays, 20)["values"].tobytes() == values
    order = {"sequence_number": np.array([number]), "run_id": encode_text(run)}
    connection.infer(CRITIC_TRAIN, good(CRITIC_TRAIN) | order, 20)
    assert connection.control(20, "version")["version"] == before["version"] + 1
