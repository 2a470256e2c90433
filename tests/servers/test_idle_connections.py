"""Connections of other users without a key do not prevent a server from answering."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from aligner.launcher.rank_environment import FreePorts, _UnixConnection
from aligner.open_files import StrangerConnections, share_open_files
from aligner.placement.addresses import KEY_HEADER
from aligner.servers.gateway import READY, GatewaySettings
from aligner.triton_cleanup import HEALTH_SOCKET, remove_triton_files

KEY = "the-key-of-the-run"
IDLE_COUNT = 2_000
_OPEN_FILES = 512
"""Limit of open files of the gateway, far below the number of idle connections."""


class Gateway:
    """A running gateway in front of a small HTTP server in Triton's place."""

    def __init__(self, directory: Path, http_port: int, grpc_port: int) -> None:
        self.directory = directory
        self.http_port = http_port
        self.grpc_port = grpc_port

    def ask_health(self) -> float:
        """Ask for the health over the Unix socket; return the duration in seconds."""
        started = time.monotonic()
        connection = _UnixConnection(self.directory / HEALTH_SOCKET, 20)
        with contextlib.closing(connection):
            connection.request("GET", "/v2/health/ready")
            assert connection.getresponse().status == 200
        return time.monotonic() - started

    def ask(self, key: str | None, path: str = "/v2") -> int:
        """Send a request to the HTTP port, and return the status of the answer.

        Like aligner's clients, it sends the request again if its connection is lost: in a burst of
        connections, the gateway may close it before it has read the key.
        """
        headers = {} if key is None else {KEY_HEADER: key}
        deadline = time.monotonic() + 30
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=20)
            with contextlib.closing(connection):
                try:
                    connection.request("GET", path, headers=headers)
                    return connection.getresponse().status
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.2)


@contextlib.contextmanager
def _stand_in(directory: Path) -> Iterator[None]:
    """Answer every HTTP request to Triton's Unix socket with the status 200."""
    loop = asyncio.new_event_loop()

    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(text="ready")

    async def start() -> web.ServerRunner:
        runner = web.ServerRunner(web.Server(answer))
        await runner.setup()
        await web.UnixSite(runner, directory / "http").start()
        return runner

    runner = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    """Run a gateway whose limit of open files is low."""
    with tempfile.TemporaryDirectory() as name, FreePorts() as ports, _stand_in(Path(name)):
        http_port, grpc_port, metrics_port = (next(ports) for _ in range(3))
        settings = GatewaySettings(
            "127.0.0.1", http_port, grpc_port, metrics_port, name, 2**20, KEY
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "aligner.servers.gateway"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: resource.setrlimit(
                resource.RLIMIT_NOFILE, (_OPEN_FILES // 2, _OPEN_FILES)
            ),
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(settings.to_json())
            process.stdin.flush()
            assert process.stdout.readline().strip() == READY
            yield Gateway(Path(name), http_port, grpc_port)
        finally:
            process.stdin.close()
            process.wait(30)


_SERVES = """
import sys
import time
from pathlib import Path
from aligner.config.compose import compose_config
from aligner.launcher.rank_environment import is_own_server_healthy
from aligner.schema import PortsConfig
from aligner.servers.triton_host import Guard, TritonHost
from aligner.servers.wire_protocol import CRITIC_INFER

config = compose_config(["experiment=tiny_ppo"])
host = TritonHost("127.0.0.1", PortsConfig(), 16, guard=Guard("key"), log=Path(sys.argv[1]))
host.start({CRITIC_INFER: lambda request: request})
print("port", host.endpoint.http, flush=True)
for line in sys.stdin:
    started = time.monotonic()
    is_healthy = is_own_server_healthy(config, "critic", host.endpoint, timeout_s=10)
    print(is_healthy, time.monotonic() - started, flush=True)
host.stop()
"""


@contextlib.contextmanager
def open_idle(port: int, count: int, first_bytes: bytes = b"") -> Iterator[list[socket.socket]]:
    """Open connections that send nothing, or an incomplete request."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(count):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                connection.connect(("127.0.0.1", port))
            connections.append(connection)
            if len(connections) % 100 == 0:
                time.sleep(0.02)
        if first_bytes:
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.send(first_bytes)
        yield connections


@pytest.mark.parametrize(
    ("protocol", "first_bytes"),
    [
        ("http", b""),
        ("http", b"POST /v2/models/x/infer HTTP/1.1\r\nHost: h\r\n"),
        ("grpc", b""),
        ("grpc", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"),
    ],
)
def test_gateway_is_healthy_with_thousands_of_idle_connections(
    gateway: Gateway, protocol: str, first_bytes: bytes
) -> None:
    port = gateway.http_port if protocol == "http" else gateway.grpc_port
    with open_idle(port, IDLE_COUNT, first_bytes):
        for _ in range(5):
            assert gateway.ask_health() < 10
            assert gateway.ask(KEY) == 200
            assert gateway.ask(None) == 401
            time.sleep(0.2)


def test_health_socket_serves_only_health(gateway: Gateway) -> None:
    assert (gateway.directory / HEALTH_SOCKET).stat().st_mode & 0o077 == 0
    with contextlib.closing(_UnixConnection(gateway.directory / HEALTH_SOCKET, 5)) as connection:
        connection.request("GET", "/v2/models/control/config", headers={KEY_HEADER: KEY})
        assert connection.getresponse().status == 404


def test_refused_client_cannot_keep_its_connection(gateway: Gateway) -> None:
    with socket.create_connection(("127.0.0.1", gateway.http_port), timeout=10) as connection:
        connection.sendall(b"GET /v2 HTTP/1.1\r\nHost: h\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 401 ")


def test_stranger_connections_are_limited_in_time_and_number() -> None:
    closed: list[int] = []

    async def check() -> None:
        strangers = StrangerConnections(limit=3, timeout_s=0.2)
        for number in range(4):
            strangers.add(number, lambda number=number: closed.append(number))  # type: ignore[misc]
        assert closed == [0], "the oldest connection is closed"
        strangers.remove(2)
        await asyncio.sleep(0.4)
        assert closed == [0, 1, 3]

    asyncio.run(check())


def test_busy_connections_may_exceed_the_limit() -> None:
    async def check() -> None:
        strangers = StrangerConnections(limit=4)
        open_numbers: set[int] = set()
        is_busy = True

        def add(number: int) -> None:
            def close() -> None:
                if is_busy:
                    strangers.keep(number, close)
                else:
                    open_numbers.remove(number)

            open_numbers.add(number)
            strangers.add(number, close)

        for number in range(2000):
            add(number)
        assert len(open_numbers) == 2000

        is_busy = False
        for number in range(2000, 4000):
            add(number)
        assert open_numbers == set(range(3996, 4000))

    asyncio.run(check())


def test_limit_of_open_files_is_raised_and_shared() -> None:
    program = (
        "import resource; from aligner.open_files import share_open_files;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, {}));"
        "print(share_open_files(8), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    for hard_limit, share in ((256, 16), (4096, 480)):
        command = [sys.executable, "-c", program.format(hard_limit)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [str(share), str(hard_limit)]
    assert 1 <= share_open_files(8) <= 1024


@pytest.mark.promise("idle-connections-do-not-stop-a-server")
@pytest.mark.slow
def test_triton_server_is_healthy_with_thousands_of_idle_connections(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVES, str(tmp_path / "log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(
            resource.RLIMIT_NOFILE, (_OPEN_FILES // 2, _OPEN_FILES)
        ),
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        port = next(line.split()[1] for line in process.stdout if line.startswith("port "))
        with open_idle(int(port), IDLE_COUNT):
            for _ in range(3):
                process.stdin.write("check\n")
                process.stdin.flush()
                assert process.stdout.readline().split()[0] == "True"
    finally:
        process.stdin.close()
        try:
            process.wait(60)
        finally:
            process.kill()
            remove_triton_files(process.pid)
