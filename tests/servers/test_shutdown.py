"""Servers stop on signals, requests and failures without losing answers or leaving processes."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import tritonclient.grpc

from aligner.errors import AlignerError
from aligner.placement.addresses import KEY_HEADER
from aligner.schema import PortsConfig
from aligner.servers.critic_client import CriticClient, RunId, UpdateJournal
from aligner.servers.remote_client import Connection, RemoteError, RewardClient, TransportError
from aligner.servers.triton_host import TritonHost
from aligner.servers.wire_protocol import (
    CONTROL,
    CRITIC_INFER,
    CRITIC_TRAIN,
    decode_text,
    encode_text,
)
from aligner.triton_cleanup import kill_processes, remove_triton_files
from tests.servers.bad_requests import good
from tests.servers.roles import RunningRole, stop_all
from tests.servers.tiny_model import TinyValueModel

pytestmark = pytest.mark.slow

TOKENS = torch.arange(24).reshape(3, 8)
LENGTHS = torch.tensor([8, 3, 5])
UPDATE = good(CRITIC_TRAIN)
TARGETS = (
    torch.zeros(3, 8, dtype=torch.int64),
    torch.ones(3, 7),
    torch.zeros(3, 7),
    torch.ones(3, 7).bool(),
)


@pytest.fixture(scope="module")
def roles(tmp_path_factory):
    """Roles that start concurrently; each is stopped by its own tests."""
    directory = tmp_path_factory.mktemp("shutdown")
    roles = {
        "terminated": RunningRole("critic", directory, ranks=2, SLOW="1"),
        "killed": RunningRole("critic", directory, ranks=2),
        "robbed": RunningRole("reward", directory, COLLECTIVE_TIMEOUT_S="2"),
        "asked": RunningRole("reward_model", directory),
    }
    try:
        for role in roles.values():
            role.wait_ready()
        yield roles
    finally:
        stop_all(roles.values())


def wait_for_exit(role: RunningRole, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while role.survivors() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not role.survivors()


def connection(role: RunningRole) -> Connection:
    return Connection("critic", role.endpoint, role.access)


def ask(server: Connection, op: str) -> dict[str, object]:
    return json.loads(
        decode_text(
            server.infer(CONTROL, {"request": encode_text(json.dumps({"op": op}))}, 20)["response"]
        )
    )


def test_health_answers_during_long_request_but_version_waits(roles):
    role = roles["terminated"]
    pinging = [
        ("grpc.keepalive_time_ms", 100),  # gRPC sends at most one ping a second
        ("grpc.http2.max_pings_without_data", 0),
        # Without this, the client may share another client's connection and settings.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    tokens, lengths = np.zeros((16, 8), dtype=np.int64), np.full((16, 1), 8)
    inputs = [
        tritonclient.grpc.InferInput(name, array.shape, "INT64").set_data_from_numpy(array)
        for name, array in (("tokens", tokens), ("sequence_lengths", lengths))
    ]
    headers = {f"triton-grpc-protocol-{KEY_HEADER}": role.access.key}
    address = f"127.0.0.1:{role.endpoint.grpc}"
    with (
        tritonclient.grpc.InferenceServerClient(address, channel_args=pinging) as client,
        contextlib.closing(connection(role)) as server,
        ThreadPoolExecutor(2) as callers,
    ):
        values = callers.submit(
            client.infer, "critic_infer", inputs, headers=headers, client_timeout=20
        )
        time.sleep(0.3)
        version = callers.submit(ask, server, "version")
        deadline = time.monotonic() + 10
        while (
            ask(server, "health")["queue_depth"] != 1 and time.monotonic() < deadline
        ):  # Triton is ready before the ranks are
            time.sleep(0.05)
        assert ask(server, "health")["queue_depth"] == 1
        assert not version.done() and not values.done()
        assert version.result(20)["version"] == 0
        assert values.result(20).as_numpy("values").shape == (16, 8)


def test_closing_client_waits_for_no_answer(roles, tmp_path):
    """A failing trainer must report its error before the timeout of its other ranks, whatever
    requests are pending."""
    role = roles["terminated"]
    client = CriticClient(
        role.endpoint,
        role.access,
        60,
        RunId("run-a"),
        UpdateJournal(tmp_path / "journal"),
        max_batch_size=16,
    )
    client.start()
    tokens, lengths = torch.zeros(16, 8, dtype=torch.int64), torch.full((16,), 8)
    answers = [client.values(tokens, lengths)]  # eight rows per rank, 0.25 s per row
    time.sleep(0.5)
    answers += [client.train(*TARGETS) for _ in range(2)] + [
        client.values(tokens, lengths) for _ in range(8)
    ]
    start = time.monotonic()
    with pytest.warns(ResourceWarning, match="11 answers of the critic server were never consumed"):
        client.close()
    assert time.monotonic() - start < 1
    for answer in answers:
        with pytest.raises(RemoteError, match=r"closing|closed"):
            answer.result(0)
    with contextlib.closing(connection(role)) as server:
        assert ask(server, "version")["sequence_number"] == -1  # after the abandoned requests


def test_sigterm_drains_requests_and_ends_all_processes(roles):
    role = roles["terminated"]
    arrays = [
        {"tokens": TOKENS.numpy() + shift, "sequence_lengths": LENGTHS[:, None].numpy()}
        for shift in (0, 1)
    ]
    with contextlib.closing(connection(role)) as server, ThreadPoolExecutor(3) as callers:
        taken = []
        for number, each in zip((-1, None), arrays, strict=True):  # not joined
            numbered = (
                each if number is None else each | {"sequence_number": np.full((3, 1), number)}
            )
            taken.append(callers.submit(server.infer, CRITIC_INFER, numbered, 20))
            time.sleep(0.1)
        role.note_processes()
        role.ranks[1].send_signal(signal.SIGTERM)  # only rank 0 stops the server
        role.ranks[0].send_signal(signal.SIGTERM)
        time.sleep(0.1)
        with pytest.raises(TransportError, match="ServerStopping"):
            server.infer(CRITIC_TRAIN, UPDATE, 20)
        assert ask(server, "health")["status"] == "stopping"
        assert [repr(future.exception(20)) for future in taken] == ["None"] * len(taken)
        for each, future in zip(arrays, taken, strict=True):
            expected = TinyValueModel().values(torch.tensor(each["tokens"]), LENGTHS)
            torch.testing.assert_close(torch.tensor(future.result()["values"]), expected)
    assert role.ranks[0].wait(15) == 0 and role.stop() == 0 and role.ranks[1].returncode == 0
    assert wait_for_exit(role, 2), role.survivors()


def test_unnumbered_update_is_refused_by_default(roles):
    unnumbered = pytest.raises(RemoteError, match="sequence_number: missing")
    with contextlib.closing(connection(roles["killed"])) as server, unnumbered:
        server.infer(CRITIC_TRAIN, UPDATE, 20)


def is_triton(process: psutil.Process) -> bool:
    try:
        return process.name() == "tritonserver"
    except psutil.NoSuchProcess:  # exited in the meantime
        return False


def test_sigterm_during_triton_start_ends_all_ranks(tmp_path):
    role = RunningRole("critic", tmp_path, ranks=2)
    try:
        deadline = time.monotonic() + 60
        while not any(is_triton(process) for process in role.seen) and time.monotonic() < deadline:
            time.sleep(0.1)
            role.note_processes()
    finally:
        code = role.stop()
    assert code == 0 and role.ranks[1].returncode == 0, role.log.read_text()[-3000:]
    assert "ready at" not in role.log.read_text()
    assert wait_for_exit(role, 2), role.survivors()


def test_triton_killed_during_start_raises_transient_error(tmp_path):
    role = RunningRole("reward", tmp_path)
    try:
        deadline = time.monotonic() + 60
        while (
            not (servers := [process for process in role.seen if is_triton(process)])
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
            role.note_processes()
        servers[0].kill()  # PyTriton would now wait for two minutes for the server to become ready
        assert role.ranks[0].wait(20) == 1
    finally:
        role.stop()
    assert "TransientError: Triton did not start (" in role.log.read_text()
    assert wait_for_exit(role, 2), role.survivors()


def test_killed_rank_ends_role_and_leaves_no_process(roles):
    role = roles["killed"]
    try:
        role.ranks[1].kill()
        arrays = {"tokens": TOKENS.numpy(), "sequence_lengths": LENGTHS[:, None].numpy()}
        with (
            contextlib.closing(connection(role)) as server,
            pytest.raises(TransportError) as caught,
        ):
            server.infer(CRITIC_INFER, arrays, 20)
        # The kind depends on how far the shutdown has progressed.
        assert caught.value.kind in ("ServerFailed", "ServerStopping", "Unreachable")
        assert role.ranks[0].wait(20) != 0
    finally:
        role.stop()
    assert wait_for_exit(role, 2), role.survivors()


def test_killed_stub_restarts_triton_and_leaves_no_process(roles):
    role = roles["robbed"]
    try:
        (triton,) = filter(is_triton, role.seen)
        next(stub for stub in triton.children(recursive=True)).kill()
        deadline = time.monotonic() + 60
        while "Triton is ready again" not in role.log.read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not triton.is_running() and role.ranks[0].poll() is None
        client = RewardClient([role.endpoint], role.access, 20)
        tokens, lengths = torch.full((1, 4), 3), torch.tensor([4])
        assert client.score(tokens, lengths, torch.tensor([1])).result().tolist() == [103.0]
        client.close()
        reason = "the Triton server or one of its helper processes exited unexpectedly"
        assert f"{reason}; restarting Triton (1 of 60 in the last hour)" in role.log.read_text()
    finally:
        role.stop()
    assert wait_for_exit(role, 2), role.survivors()


def test_reward_model_scores_last_token_and_stops_on_request(roles):
    role = roles["asked"]
    try:
        client = RewardClient([role.endpoint], role.access, 20)
        expected = TinyValueModel().values(TOKENS, LENGTHS).gather(1, LENGTHS[:, None] - 1)[:, 0]
        torch.testing.assert_close(
            client.score(TOKENS, LENGTHS, torch.ones(3, dtype=torch.int64)).result(), expected
        )
        assert client.control("shutdown")["status"] == "stopping"
        client.close()
        assert role.ranks[0].wait(15) == 0
        assert "reward: received a shutdown request" in role.log.read_text()
    finally:
        role.stop()
    assert wait_for_exit(role, 2), role.survivors()


_STARTS_AND_STOPS = """
import os
from pathlib import Path
from aligner.schema import PortsConfig
from aligner.servers.triton_host import TritonHost
from aligner.servers.wire_protocol import CONTROL
host = TritonHost("127.0.0.1", PortsConfig(), 16)
host.start({CONTROL: lambda request: request})
(claim,) = Path("/dev/shm").glob(f"aligner-server-*-{os.getpid()}-*")
directories = (claim / "paths").read_text().splitlines()
directories += [str(file.parent) for file in Path(directories[0]).glob("model-store/*/config.pbtxt")]
assert all(Path(directory).is_dir() for directory in directories)
host.stop()
print(*directories, flush=True)
os._exit(0)
"""


@pytest.mark.flaky(reruns=2)
def test_stopped_triton_removes_its_directories():
    """Flaky: a concurrent server that exits earlier may remove the empty directory of this server's
    Python environment."""
    done = subprocess.run(
        [sys.executable, "-c", _STARTS_AND_STOPS],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    directories = [Path(directory) for directory in done.stdout.splitlines()[-1].split()]
    kinds = ("aligner-triton-", "control", "python_env_")
    assert all(
        any(directory.name.startswith(kind) for directory in directories) for kind in kinds
    ), directories
    assert not any(directory.exists() for directory in directories)


_STARTS = """
from aligner.schema import PortsConfig
from aligner.servers.triton_host import TritonHost
from aligner.servers.wire_protocol import CONTROL
TritonHost("127.0.0.1", PortsConfig(), 16).start({CONTROL: lambda request: request})
"""


@pytest.mark.parametrize("which", ["triton", "all of them"])
def test_triton_killed_while_loading_leaves_no_model_copies(which: str) -> None:
    """This holds even if the server had no time to record the copies."""
    with subprocess.Popen([sys.executable, "-c", _STARTS]) as host:
        own = psutil.Process(host.pid)
        copies: list[Path] = []
        while not copies and host.poll() is None:
            workspaces = [
                line for file in claim_files(host.pid) for line in file.read_text().splitlines()[:1]
            ]
            if any(is_triton(child) for child in own.children()):
                models = "model-store/*/config.pbtxt"
                copies = [
                    file.parent for workspace in workspaces for file in Path(workspace).glob(models)
                ]
            time.sleep(0.01)
        processes = [own, *own.children(recursive=True)]
        try:
            kill_processes(
                [process for process in processes if which != "triton" or is_triton(process)]
            )
            assert host.wait(20) != 0
            if which != "triton":  # otherwise the server removed them when it exited
                assert all(copy.is_dir() for copy in copies)
        finally:
            kill_processes(processes)
            remove_triton_files(host.pid)
    assert copies and not any(copy.exists() for copy in copies)


_STARTS_IN_TIME = """
from aligner.errors import TransientError
from aligner.schema import PortsConfig
from aligner.servers.triton_host import TritonHost
from aligner.servers.wire_protocol import CONTROL
host = TritonHost("127.0.0.1", PortsConfig(), 16, start_timeout_s=2)
try:
    host.start({CONTROL: lambda request: request})
except TransientError as error:
    print(error, flush=True)
host.stop()
"""


def test_triton_that_hangs_at_start_is_killed_after_timeout() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _STARTS_IN_TIME], stdout=subprocess.PIPE, text=True
    ) as host:
        own = psutil.Process(host.pid)
        found: list[psutil.Process] = []
        while not found and host.poll() is None:
            found = [child for child in own.children() if is_triton(child)]
            time.sleep(0.01)
        try:
            found[0].suspend()
            out, _ = host.communicate(timeout=30)
        finally:
            kill_processes([*found, own])
            remove_triton_files(host.pid)
        assert "Triton did not start (it did not load its models within 2 s)" in out
        assert not found[0].is_running() and not claim_files(host.pid)


def claim_files(pid: int) -> list[Path]:
    """Return the files in which a process records the directories that Triton created for it."""
    return [*Path("/dev/shm").glob(f"aligner-server-*-{pid}-*/paths")]


def test_port_in_use_is_reported_before_start():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            AlignerError,
            match=rf"ports.grpc={port}: cannot listen on 127.0.0.1:{port}: Address already in use",
        ):
            TritonHost("127.0.0.1", PortsConfig(grpc=port), 16)
