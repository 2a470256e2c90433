"""Access control of servers: the run's key, mutual TLS, size limits, and other users."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import psutil
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from aligner.errors import ConfigError
from aligner.placement.addresses import (
    GRPC_KEY_HEADER,
    KEY_HEADER,
    Access,
    create_access_key,
    get_interface_address,
    load_access,
)
from aligner.schema import Config
from aligner.servers.remote_client import Connection, RemoteError
from aligner.servers.triton_host import Guard
from aligner.servers.wire_protocol import (
    CONTROL,
    CRITIC_INFER,
    CRITIC_SAVE,
    CRITIC_TRAIN,
    REWARD_MODEL,
    encode_text,
)
from tests import other_user
from tests.certificates import make_certificates
from tests.servers.bad_requests import good
from tests.servers.roles import RunningRole


def http(role, path, key=None, data=None):
    """Send a request over HTTP; return (status, body)."""
    headers = {} if key is None else {KEY_HEADER: key}
    request = urllib.request.Request(f"{role.http}{path}", data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20, context=role.tls) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def infer_body(*inputs):
    return json.dumps(
        {
            "inputs": [
                dict(zip(("name", "shape", "datatype", "data"), fields, strict=True))
                for fields in inputs
            ]
        }
    ).encode()


GUARDED = [
    ("/v2", None),
    ("/v2/models/critic_infer", None),
    ("/v2/models/critic_infer/config", None),
    ("/v2/models/critic_infer/versions/1/config", None),
    ("/v2/models/critic_infer/stats", None),
    (
        "/v2/models/critic_infer/infer",
        infer_body(
            ("tokens", [1, 2], "INT64", [12, 13]), ("sequence_lengths", [1, 1], "INT64", [2])
        ),
    ),
    ("/v2/models/control/generate", json.dumps({"request": '{"op": "health"}'}).encode()),
]
CLOSED = [
    ("/v2/repository/index", b""),
    ("/v2/repository/models/critic_infer/unload", b"{}"),
    ("/v2/models/../repository/index", b""),
    ("/v2/models/%2e%2e/repository/index", b""),
    ("/v2/models/critic_infer/ready?a=b", None),
    ("/v2/systemsharedmemory/status", None),
    ("/v2/models/critic_infer/trace/setting", None),
    ("/v2/trace/setting", None),
    ("/v2/logging", None),
    ("/", None),
]


@pytest.mark.parametrize("key", [None, "", "wrong", "\u00e4"])
def test_http_without_key_serves_only_health(critic, key):
    for path, data in GUARDED:
        status, body = http(critic, path, key, data)
        assert status == 401 and "the run's access key is missing or wrong" in body, (
            path,
            status,
            body,
        )
    assert [
        http(critic, path)[0]
        for path in ("/v2/health/ready", "/v2/health/live", "/v2/models/control/ready")
    ] == [200] * 3


def test_http_key_opens_endpoints_but_not_management(critic):
    for path, data in GUARDED:
        assert http(critic, path, critic.access.key, data)[0] == 200, path
    for path, data in CLOSED:
        for key in (None, critic.access.key):
            status, body = http(critic, path, key, data)
            assert status == 403 and "this method or path is not served" in body, (
                path,
                status,
                body,
            )


@pytest.mark.parametrize("key", [None, "", "wrong"])
def test_grpc_without_key_serves_only_readiness(critic, key):
    with contextlib.closing(Connection("critic", critic.endpoint, Access(key))) as stranger:
        for spec in (CRITIC_INFER, CRITIC_TRAIN, CRITIC_SAVE):
            with pytest.raises(
                RemoteError, match="AccessError: the run's access key is missing or wrong"
            ):
                stranger.infer(spec, good(spec), 20)
        with pytest.raises(RemoteError, match="AccessError"):
            stranger.infer(CONTROL, {"request": encode_text('{"op": "shutdown"}')}, 20)
        stranger.check_ready(20)
    headers = {} if key is None else {GRPC_KEY_HEADER: key}
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{critic.endpoint.grpc}") as client:
        answers: queue.Queue = queue.Queue()
        client.start_stream(lambda result, error: answers.put((result, error)), headers=headers)
        shutdown = tritonclient.grpc.InferInput("request", [1], "BYTES")
        shutdown.set_data_from_numpy(encode_text('{"op": "shutdown"}'))
        # The client may have received the refusal already.
        with contextlib.suppress(InferenceServerException):
            client.async_stream_infer("control", [shutdown])
        result, error = answers.get(timeout=20)
        assert result is None and "the run's access key is missing or wrong" in str(error)
        client.stop_stream()
        with pytest.raises(
            InferenceServerException, match="the run's access key is missing or wrong"
        ):
            client.get_server_metadata(headers=headers)


def test_grpc_key_does_not_open_management(critic):
    headers = {GRPC_KEY_HEADER: critic.access.key}
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{critic.endpoint.grpc}") as client:
        assert (
            client.get_model_config("critic_infer", headers=headers).config.name == "critic_infer"
        )
        for ask in (
            client.get_model_repository_index,
            client.get_log_settings,
            client.get_trace_settings,
            client.get_system_shared_memory_status,
            lambda headers: client.load_model("critic_infer", headers=headers),
            lambda headers: client.unload_model("critic_infer", headers=headers),
        ):
            with pytest.raises(InferenceServerException, match="this method or path is not served"):
                ask(headers=headers)


def memory_mib(role):
    """Return the memory of rank 0 and its child processes in MiB, including shared memory."""
    first = psutil.Process(role.ranks[0].pid)
    processes = [first, *first.children(recursive=True)]
    own = sum(process.memory_info().rss - process.memory_info().shared for process in processes)
    shared = sum(
        file.stat().st_blocks * 512 for file in Path("/dev/shm").glob(f"pytrtion{first.pid}-*")
    )
    return (own + shared) / 2**20


@pytest.mark.promise("requests-without-key-use-no-memory")
@pytest.mark.slow
def test_requests_without_key_use_no_memory(critic):
    before, most, refusals = memory_mib(critic), 0.0, []
    piece = b"[" + b"0," * 2**19

    def flood_http():
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", critic.endpoint.http), 20) as connection,
        ):
            head = (
                "POST /v2/models/critic_infer/infer HTTP/1.1\r\nHost: h\r\nContent-Length:"
                " 419430400\r\n\r\n"
            )
            connection.sendall(head.encode())
            for _ in range(400):
                connection.sendall(piece)

    def flood_grpc():
        message = b"\0" * 2**27
        with grpc.insecure_channel(
            f"127.0.0.1:{critic.endpoint.grpc}", [("grpc.max_send_message_length", -1)]
        ) as channel:
            for _ in range(3):
                try:
                    channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(
                        message, timeout=20
                    )
                except grpc.RpcError as error:
                    refusals.append(error.details())

    floods = [threading.Thread(target=flood) for flood in (flood_http, flood_grpc) * 4]
    for flood in floods:
        flood.start()
    while any(flood.is_alive() for flood in floods):
        most = max(most, memory_mib(critic) - before)
        time.sleep(0.1)
    assert refusals == ["the run's access key is missing or wrong"] * 12
    print(f"{most:.1f} MiB more at most, {memory_mib(critic) - before:.1f} after")
    assert most < 30 and memory_mib(critic) - before < 30
    with contextlib.closing(Connection("critic", critic.endpoint, critic.access)) as owner:
        assert owner.infer(CRITIC_INFER, good(CRITIC_INFER), 20)["values"].shape == (3, 8)


def test_oversized_or_chunked_http_request_is_refused(critic):
    line = (
        f"POST /v2/models/critic_infer/infer HTTP/1.1\r\nHost: h\r\n{KEY_HEADER}:"
        f" {critic.access.key}\r\n"
    )
    for header, value, code in (
        ("Content-Length", str(2**40), 413),
        ("Transfer-Encoding", "chunked", 411),
    ):
        with socket.create_connection(("127.0.0.1", critic.endpoint.http), 20) as connection:
            connection.sendall(f"{line}{header}: {value}\r\n\r\n".encode())
            assert connection.recv(4096).startswith(f"HTTP/1.1 {code} ".encode())


def test_access_key_appears_in_no_log_or_repr(critic, reward):
    assert len(critic.access.key) > 30
    logs = {*critic.log.parent.glob("*.log"), *(critic.log.parent / "logs").iterdir()}
    assert {"critic-triton.log", "reward-triton.log", critic.log.name, reward.log.name} <= {
        log.name for log in logs
    }
    assert all(critic.access.key not in log.read_text() for log in logs)
    assert critic.access.key not in repr(critic.access) + repr(Guard(critic.access.key))


def test_metrics_report_pending_requests(critic):
    with urllib.request.urlopen(
        f"http://127.0.0.1:{critic.endpoint.metrics}/metrics", timeout=20
    ) as response:
        text = response.read().decode()
    for name in (
        "nv_inference_pending_request_count",
        "nv_inference_request_failure",
        "nv_inference_queue_duration_us",
    ):
        assert f'{name}{{model="critic_infer"' in text, name


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """The server's certificates, and those of another authority."""
    return make_certificates(tmp_path_factory.mktemp("tls")), make_certificates(
        tmp_path_factory.mktemp("stranger")
    )


@pytest.fixture(scope="module")
def secure(certificates, tmp_path_factory):
    """A server with mutual TLS and the run's key."""
    role = RunningRole("reward", tmp_path_factory.mktemp("secure"), tls=certificates[0])
    try:
        yield role.wait_ready()
    finally:
        role.stop()


def rewards_shape(role, access):
    with contextlib.closing(Connection("reward", role.endpoint, access)) as connection:
        return connection.infer(REWARD_MODEL, good(REWARD_MODEL), 5)["rewards"].shape


@pytest.mark.promise("mutual-tls-needs-key-and-certificate")
@pytest.mark.slow
def test_mutual_tls_requires_key_and_certificate(secure, certificates):
    own, stranger = certificates
    trusted = Access(secure.access.key, own.authorities, own.certificate, own.key)
    assert rewards_shape(secure, trusted) == (3, 1)
    refused = {
        "plaintext": secure.access,
        "no certificate": Access(secure.access.key, own.authorities),
        "another authority's": dataclasses.replace(
            trusted, certificate=stranger.certificate, certificate_key=stranger.key
        ),
        "no trust in the server": dataclasses.replace(trusted, authorities=stranger.authorities),
        "no key": dataclasses.replace(trusted, key=None),
        "wrong key": dataclasses.replace(trusted, key="wrong"),
    }
    for what, access in refused.items():
        with pytest.raises(RemoteError):
            rewards_shape(secure, access)
            pytest.fail(what)
    assert rewards_shape(secure, trusted) == (3, 1)


@pytest.mark.slow
def test_https_requires_certificate_and_key(secure, certificates):
    own, stranger = certificates
    guarded = [
        (path.replace("critic_infer", "reward_model"), data)
        for path, data in GUARDED
        if data is None
    ]
    for path, _ in guarded:
        assert [http(secure, path, key)[0] for key in (secure.access.key, "wrong", None)] == [
            200,
            401,
            401,
        ]
    for path, data in CLOSED:
        assert http(secure, path, secure.access.key, data)[0] == 403
    for context in (
        None,
        ssl.create_default_context(cafile=own.authorities),
        stranger_context(own, stranger),
    ):
        for port in (secure.endpoint.http, secure.endpoint.grpc):
            scheme = "http" if context is None else "https"
            with pytest.raises((ssl.SSLError, OSError)):
                urllib.request.urlopen(
                    f"{scheme}://127.0.0.1:{port}/v2/health/ready", timeout=5, context=context
                ).close()
    assert http(secure, "/v2/health/ready") == (200, "")


def stranger_context(own, stranger):
    """Return the TLS context of a client that trusts the server, with another authority's
    certificate."""
    context = ssl.create_default_context(cafile=own.authorities)
    context.load_cert_chain(stranger.certificate, stranger.key)
    return context


@pytest.mark.promise("key-and-triton-hidden-from-other-users")
@pytest.mark.slow
@other_user.needs_root
@pytest.mark.parametrize("name", ["critic", "open"])
def test_other_user_finds_no_key_and_no_triton(servers, name):
    role = servers[name]
    role.note_processes()
    pids = [str(process.pid) for process in role.seen if process.is_running()]
    ports = [str(role.endpoint.http), str(role.endpoint.grpc)]
    command = [
        sys.executable,
        "-m",
        "tests.servers.stranger",
        *ports,
        "guarded" if name == "critic" else "open",
        *pids,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["uid"] == other_user.UID and len(seen["values"]) > 20
    assert role.access.key not in seen["values"]
    assert len(seen["sockets"]) == 3 and seen["answered"] == []


def test_run_has_one_access_key_readable_only_by_owner(tmp_path):
    config = Config()
    config.run.dir = str(tmp_path)
    with pytest.raises(ConfigError, match="cannot read the access key of the run"):
        load_access(config)
    create_access_key(config)
    key = load_access(config).key
    create_access_key(config)
    assert load_access(config).key == key and [path.name for path in tmp_path.iterdir()] == [
        "access_key"
    ]
    assert (tmp_path / "access_key").stat().st_mode & 0o777 == 0o600
    config.server.guard = "none"
    assert load_access(config).key is None


def test_unknown_interface_is_refused_with_available_ones():
    assert (
        get_interface_address("lo") == "127.0.0.1"
        and get_interface_address("10.1.2.3") == "10.1.2.3"
    )
    with pytest.raises(
        ConfigError, match=r"server.interface=nothere0: .* of this machine: .*lo \(127.0.0.1\)"
    ):
        get_interface_address("nothere0")
