"""Attempts of other users of the machine to stop or to use servers without a key."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from aligner.placement.addresses import KEY_HEADER
from benchmarks.security.registry import HELD, Outcome, finding, probe

_IDLE_COUNT = 2_000
_OPEN_FILES = 512
"""Limit of open files of the attacked server."""
_KEY = "the-key-of-the-run"
# A small HTTP server in Triton's place, and the gateway in front of it.
_SERVER = """
import asyncio, json, os, subprocess, sys
from pathlib import Path
from aiohttp import web
from aligner.servers.gateway import GatewaySettings

async def answer(request):
    return web.Response(text="ready")

async def main(directory, http, grpc, metrics, key):
    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.UnixSite(runner, f"{directory}/http").start()
    settings = GatewaySettings("127.0.0.1", http, grpc, metrics, directory, 2**20, key)
    gateway = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "aligner.servers.gateway", stdin=subprocess.PIPE
    )
    gateway.stdin.write(settings.to_json().encode())
    await gateway.stdin.drain()
    await gateway.wait()

asyncio.run(main(*json.loads(sys.argv[1])))
"""


def _find_free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        listeners = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [listener.getsockname()[1] for listener in listeners]


@contextlib.contextmanager
def _open_idle_connections(port: int) -> Iterator[None]:
    """Hold connections that send nothing."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    with contextlib.ExitStack() as stack:
        for number in range(_IDLE_COUNT):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                connection.connect(("127.0.0.1", port))
            if number % 100 == 0:
                time.sleep(0.02)
        yield


def _measure_answer(port: int, path: str, key: str | None, timeout_s: float = 30.0) -> float | None:
    """Return the seconds until a request is answered with the status 200; None if it is not."""
    started = time.monotonic()
    while time.monotonic() - started < timeout_s:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with (
            contextlib.closing(connection),
            contextlib.suppress(OSError, http.client.HTTPException),
        ):
            connection.request("GET", path, headers={KEY_HEADER: key} if key else {})
            if connection.getresponse().status == 200:
                return time.monotonic() - started
        time.sleep(0.2)
    return None


def _attack(kind: str) -> Outcome:
    """Hold idle connections to a port of a gateway, and ask for its health and with its key."""
    http_port, grpc_port, metrics_port = _find_free_ports(3)
    with tempfile.TemporaryDirectory() as directory:
        arguments = json.dumps([directory, http_port, grpc_port, metrics_port, _KEY])
        server = subprocess.Popen(
            [sys.executable, "-c", _SERVER, arguments],
            stdout=subprocess.DEVNULL,
            preexec_fn=lambda: resource.setrlimit(
                resource.RLIMIT_NOFILE, (_OPEN_FILES // 2, _OPEN_FILES)
            ),
            start_new_session=True,
        )
        try:
            if _measure_answer(http_port, "/v2", _KEY, 60) is None:
                return finding("the probe failed: the server did not start")
            ports = {"http": http_port, "grpc": grpc_port, "metrics": metrics_port}
            with _open_idle_connections(ports[kind]):
                for path, key in (("/v2/health/ready", None), ("/v2", _KEY)):
                    if _measure_answer(http_port, path, key) is None:
                        return finding(f"{path} is not answered within 30 s")
                if _measure_answer(http_port, "/v2", None, 1) is not None:
                    return finding("a request without a key is answered")
            return HELD
        finally:
            # The gateway ends at the end of its input.
            server.kill()
            server.wait()


@probe(
    "other_users",
    attempt="hold 2,000 connections without a key to the HTTP port of a server with 512 open files",
    expected="health checks and requests with the key are answered",
    component="aligner/servers/gateway.py",
)
def idle_http_connections() -> Outcome:
    return _attack("http")


@probe(
    "other_users",
    attempt="hold 2,000 connections without a key to the gRPC port of a server with 512 open files",
    expected="health checks and requests with the key are answered",
    component="aligner/servers/gateway.py",
)
def idle_grpc_connections() -> Outcome:
    return _attack("grpc")


@probe(
    "other_users",
    attempt="hold 2,000 connections to the metrics port of a server with 512 open files",
    expected="health checks and requests with the key are answered",
    component="aligner/servers/gateway.py",
)
def idle_metrics_connections() -> Outcome:
    return _attack("metrics")


@probe(
    "other_users",
    attempt="send the key of `aligner view` in a link to an address such as //evil.example",
    expected="the redirect leads to a page of the viewer",
    component="aligner view",
)
def redirect_of_the_viewer() -> Outcome:
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "aligner", "view", directory]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as viewer:
            try:
                assert viewer.stdout is not None
                match = re.match(r"http://127.0.0.1:(\d+)/\?key=(\S+)", viewer.stdout.readline())
                if match is None:
                    return finding("the probe failed: `aligner view` did not start")
                for path in (
                    "//evil.example",
                    "///evil.example",
                    "/\\evil.example",
                    "//evil.example/%2e",
                ):
                    target = _request_redirect(int(match[1]), f"{path}?key={match[2]}")
                    if target is not None and re.match(r"/[/\\]|\w+:", target):
                        return finding(f"{path} redirects to {target}")
                return HELD
            finally:
                viewer.terminate()


def _request_redirect(port: int, path: str) -> str | None:
    """Return the address to which the viewer redirects a request; None without a redirect."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n"
        connection.sendall(request.encode())
        with connection.makefile("rb") as answer:
            head = answer.read().decode(errors="replace")
    match = re.search(r"^location: (\S+)", head, re.MULTILINE | re.IGNORECASE)
    return match[1] if match else None


@probe(
    "other_users",
    attempt="list the models of `aligner serve-model` without its key",
    expected="the status is 401",
    component="aligner serve-model",
)
def served_model_without_key() -> Outcome:
    from tests.agents.calling_model import saved

    with tempfile.TemporaryDirectory() as name:
        model = saved(Path(name), "chatml")
        command = [sys.executable, "-m", "aligner", "serve-model", str(model)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                match = re.match(r"http://127.0.0.1:(\d+)/v1", server.stdout.readline())
                if match is None:
                    return finding("the probe failed: `aligner serve-model` did not start")
                if _measure_answer(int(match[1]), "/v1/models", None, 1) is not None:
                    return finding("a request without a key is answered")
                return HELD
            finally:
                server.terminate()
