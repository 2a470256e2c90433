"""The reward client bypasses a silent replica, and waits for a busy one."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch
from tritonclient.grpc import service_pb2, service_pb2_grpc

from aligner.placement.addresses import Access, Endpoint
from aligner.servers.remote_client import RemoteError, RewardClient
from aligner.servers.wire_protocol import REQUEST_NUMBER
from tests.rounds import bounds_seconds


class Replica(service_pb2_grpc.GRPCInferenceServiceServicer):
    """A server that answers `score` for each row after `work_s` seconds, while `runs` is set."""

    def __init__(self, score: float, work_s: float = 0.0) -> None:
        self._score, self._work_s = score, work_s
        self.runs, self.asked = threading.Event(), list[str]()
        self.runs.set()
        self._server = grpc.server(ThreadPoolExecutor(8))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.endpoint = Endpoint("127.0.0.1", 0, self._server.add_insecure_port("127.0.0.1:0"), 0)
        self._server.start()

    def ModelInfer(self, request, context):
        self.asked.append(request.model_name)
        self.runs.wait(30)
        if request.model_name == "control":
            answer, kind, shape = b'{"status": "ok"}', "BYTES", [1]
            content, name = struct.pack("<I", len(answer)) + answer, "response"
        else:
            time.sleep(self._work_s)
            shape = [request.inputs[0].shape[0], 1]
            content, kind, name = struct.pack("<f", self._score) * shape[0], "FP32", "rewards"
        output = service_pb2.ModelInferResponse.InferOutputTensor(
            name=name, datatype=kind, shape=shape
        )
        place = [sent.name for sent in request.inputs].index(REQUEST_NUMBER)
        number = service_pb2.ModelInferResponse.InferOutputTensor(
            name=REQUEST_NUMBER, datatype="INT64", shape=request.inputs[place].shape
        )
        contents = [content, request.raw_input_contents[place]]
        return service_pb2.ModelInferResponse(
            model_name=request.model_name, outputs=[output, number], raw_output_contents=contents
        )

    def stop(self) -> None:
        self.runs.set()
        self._server.stop(0)


@pytest.fixture
def replicas() -> Iterator[list[Replica]]:
    both = [Replica(1.0), Replica(2.0)]
    yield both
    for replica in both:
        replica.stop()


def score(client: RewardClient) -> list[float]:
    return (
        client.score(
            torch.ones(2, 3, dtype=torch.int64), torch.tensor([3, 3]), torch.tensor([1, 1])
        )
        .result()
        .tolist()
    )


@pytest.fixture
def client(replicas: list[Replica]) -> Iterator[RewardClient]:
    client = RewardClient([replica.endpoint for replica in replicas], Access(), timeout_s=20)
    yield client
    client.close()


@pytest.mark.promise("silent-replica-is-bypassed")
@bounds_seconds
def test_request_to_silent_replica_is_rerouted_before_deadline(replicas, client) -> None:
    replicas[0].runs.clear()
    begun = time.monotonic()
    assert score(client) == [2.0, 2.0]
    assert 2.0 <= time.monotonic() - begun < 6
    again = time.monotonic()
    assert score(client) == [2.0, 2.0], "the silent one is not asked first for a while"
    assert time.monotonic() - again < 0.5
    assert replicas[0].asked == ["reward_model", "control"]


@bounds_seconds
def test_busy_replica_is_not_bypassed(replicas, client) -> None:
    replicas[0]._work_s = 2.0
    assert score(client) == [1.0, 1.0]
    assert (
        replicas[0].asked[:2] == ["reward_model", "control"]
        and replicas[0].asked.count("reward_model") == 1
    )
    assert replicas[1].asked == []


def test_all_replicas_silent_raises_error_at_deadline(replicas) -> None:
    for replica in replicas:
        replica.runs.clear()
    client = RewardClient([replica.endpoint for replica in replicas], Access(), timeout_s=3)
    with pytest.raises(RemoteError, match=r"gave up after 3 s|no answer to reward_model within"):
        score(client)
    client.close()
