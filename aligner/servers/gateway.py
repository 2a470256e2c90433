"""The gateway process, the only way to a Triton server.

Triton itself listens on Unix sockets in a private directory. It reads the whole body of a request,
of any size, before it checks a key, and offers its management operations on the same ports.
Therefore clients connect to the gateway, over HTTP or gRPC. The gateway forwards the requests that
clients need, and nothing else. It checks the run's key before it reads the body of a request, and
limits the size of the body. It closes connections whose clients present no key in time. The
server's own health checks use a Unix socket, so that other users cannot delay them.

`python -m aligner.servers.gateway` reads its settings as one line of JSON from standard input, and
prints `ready` when it listens. At the end of its standard input, it exits after it has forwarded
the answers in flight.

The process that starts Triton and the gateway uses this module, too: for the gateway's settings
(`GatewaySettings`), for the addresses of Triton's sockets, and for `private_children`, which starts
processes whose files and shared memory no other user can open.
"""

import asyncio
import contextlib
import ctypes
import functools
import hmac
import json
import os
import platform
import re
import struct
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
from aiohttp import ClientError, ClientSession, ClientTimeout, UnixConnector, web
from yarl import URL

from aligner.open_files import KEY_TIMEOUT_S, StrangerConnections, share_open_files
from aligner.placement.addresses import GRPC_KEY_HEADER, KEY_HEADER
from aligner.placement.tls import TLSFiles
from aligner.triton_cleanup import HEALTH_SOCKET

READY = "ready"
"""Line that the gateway prints when it listens."""


@dataclass(frozen=True)
class GatewaySettings:
    """Addresses, access control and limits of the gateway."""

    address: str
    """IP address on which the gateway listens."""
    http: int
    """HTTP port."""
    grpc: int
    """gRPC port."""
    metrics: int
    """Port of Triton's Prometheus metrics."""
    sockets: str
    """Directory of Triton's sockets, see `list_triton_sockets`."""
    max_request_bytes: int
    """Maximum size of a request in bytes."""
    key: str | None
    """The run's access key; None accepts requests without a key."""
    tls: TLSFiles | None = None
    """Certificate files for the gRPC and HTTP ports; None disables TLS."""

    def to_json(self) -> str:
        """Return the settings as a line of JSON."""
        return json.dumps(asdict(self), default=str) + "\n"

    @staticmethod
    def from_json(line: str) -> "GatewaySettings":
        """Parse the line that `to_json` returned."""
        fields = json.loads(line)
        if (tls := fields.pop("tls")) is not None:
            mutual = tls.pop("mutual")
            tls = TLSFiles(**{name: Path(file) for name, file in tls.items()}, mutual=mutual)
        return GatewaySettings(**fields, tls=tls)


def build_triton_addresses(directory: Path) -> dict[str, Any]:
    """Return fields of PyTriton's TritonConfig for a Triton that listens only on Unix sockets.

    Args:
        directory: Directory of the sockets.
    """
    protocols = ("http", "grpc", "metrics")
    return {f"{name}_address": f"unix:{directory}/{name}" for name in protocols} | {
        f"{name}_port": 1 for name in protocols
    }


def list_triton_sockets(directory: Path) -> dict[str, str]:
    """Return the paths of Triton's Unix sockets in a directory.

    Triton appends the port to the path of the gRPC socket.

    Args:
        directory: Directory of the sockets.
    """
    return {
        "http": f"{directory}/http",
        "grpc": f"{directory}/grpc:1",
        "metrics": f"{directory}/metrics",
    }


# AUDIT_ARCH constant of the architecture, and the numbers of the system calls fchmod and
# setsockopt.
_SYSTEM_CALLS = {"x86_64": (0xC000003E, 91, 54), "aarch64": (0xC00000B7, 52, 208)}
_IPPROTO_TCP = 6
_TCP_NODELAY = 1
# Decisions of a seccomp filter: execute the system call, or return 0 without executing it.
_SECCOMP_RET_ALLOW = 0x7FFF0000
_SECCOMP_RET_ERRNO_0 = 0x00050000
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_PR_SET_NO_NEW_PRIVS = 38
_LIBC = ctypes.CDLL(None, use_errno=True)
_should_restrict_forks = False


@contextmanager
def private_children() -> Iterator[None]:
    """Make files and shared memory of processes that are forked in the context private to the user.

    The restriction is permanent for these processes and their own child processes.
    """
    global _should_restrict_forks
    _should_restrict_forks = True
    try:
        yield
    finally:
        _should_restrict_forks = False


def _after_fork() -> None:
    """Restrict a forked child process; see `private_children`."""
    if not _should_restrict_forks:
        return
    os.umask(0o077)

    # A seccomp filter turns two system calls into no-ops:
    # - Boost, which provides Triton's shared memory, calls fchmod to open the memory to all users
    #   in spite of the umask.
    # - Triton's HTTP server sets TCP_NODELAY also on a Unix socket, which does not have this
    #   option, and would warn about the failure.
    # The filter is a classic BPF program of (opcode, jump if true, jump if false, constant).
    architecture, fchmod, setsockopt = _SYSTEM_CALLS.get(platform.machine(), (0, 0, 0))
    load, jump_if_equal, return_value = 0x20, 0x15, 0x06
    instructions = [
        (load, 0, 0, 4),  # architecture
        (jump_if_equal, 0, 8, architecture),  # allow calls of other architectures
        (load, 0, 0, 0),  # number of the system call
        (jump_if_equal, 5, 0, fchmod),
        (jump_if_equal, 0, 5, setsockopt),  # allow other system calls
        (load, 0, 0, 24),  # second argument of the system call
        (jump_if_equal, 0, 3, _IPPROTO_TCP),
        (load, 0, 0, 32),  # third argument of the system call
        (jump_if_equal, 0, 1, _TCP_NODELAY),
        (return_value, 0, 0, _SECCOMP_RET_ERRNO_0),
        (return_value, 0, 0, _SECCOMP_RET_ALLOW),
    ]
    filters = ctypes.create_string_buffer(
        b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
    )
    program = ctypes.create_string_buffer(
        struct.pack("HL", len(instructions), ctypes.addressof(filters))
    )
    # Without privileges, the kernel accepts a filter only after this flag is set.
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program)


os.register_at_fork(after_in_child=_after_fork)


_SERVICE_PREFIX = "/inference.GRPCInferenceService/"
# Health checks reveal nothing, and launchers poll them without a key.
_PUBLIC_METHODS = frozenset({"ServerLive", "ServerReady", "ModelReady"})
_PROTECTED_METHODS = frozenset(
    {
        "ModelInfer",
        "ModelStreamInfer",
        "ServerMetadata",
        "ModelMetadata",
        "ModelConfig",
        "ModelStatistics",
    }
)
_MODEL_PATH = r"/v2/models/\w+(/versions/[0-9]+)?"
_PUBLIC_PATHS = re.compile(rf"/v2/health/(live|ready)|{_MODEL_PATH}/ready")
_PROTECTED_PATHS = re.compile(
    rf"/v2/?|{_MODEL_PATH}(/(config|stats|infer|generate|generate_stream))?"
)
# Headers that are not forwarded: they belong to one connection (RFC 9110, section 7.6.1), or
# contain the key.
_HOP_BY_HOP_HEADERS = frozenset(
    {"connection", "expect", "host", "keep-alive", "te", "transfer-encoding", "upgrade", KEY_HEADER}
)
# Maximum number of HTTP connections to Triton, which logs a line for each.
_MAX_CONNECTIONS = 64
# Maximum time for the requests in flight at the end of the input. The parent process may kill the
# gateway earlier.
_DRAIN_S = 5.0
_READ_AHEAD_BYTES = 2**20
# Connections that wait to be accepted. The gateway accepts as many at once before it closes any.
_BACKLOG = 128
# gRPC connections without a call are closed after this time; their clients connect again.
_GRPC_IDLE_S = 600.0
_INVALID_KEY = "the run's access key is missing or wrong"
_NOT_SERVED = "this method or path is not served"


def _is_valid_key(request_key: str | bytes | None, key: str | None) -> bool:
    """Return whether a request's key is the run's key; without a key, all requests are accepted."""
    if key is None:
        return True
    request_bytes = (
        request_key.encode(errors="replace") if isinstance(request_key, str) else request_key or b""
    )
    return hmac.compare_digest(request_bytes, key.encode())


class GrpcGateway(grpc.GenericRpcHandler):
    """Forwards gRPC calls to Triton without decoding them.

    The gateway checks a call before its message is read.
    """

    def __init__(self, channel: grpc.aio.Channel, key: str | None) -> None:
        self._channel = channel
        self._key = key

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """Return the handler of a call: forwarding, or refusal."""
        method = str(handler_call_details.method)
        name = method.removeprefix(_SERVICE_PREFIX)
        request_key = dict(handler_call_details.invocation_metadata or ()).get(GRPC_KEY_HEADER)
        if name not in _PUBLIC_METHODS | _PROTECTED_METHODS:
            return grpc.stream_stream_rpc_method_handler(
                _create_refusal(grpc.StatusCode.PERMISSION_DENIED, _NOT_SERVED)
            )
        if name in _PROTECTED_METHODS and not _is_valid_key(request_key, self._key):
            return grpc.stream_stream_rpc_method_handler(
                _create_refusal(grpc.StatusCode.UNAUTHENTICATED, _INVALID_KEY)
            )
        return grpc.stream_stream_rpc_method_handler(self._create_forwarder(method))

    def _create_forwarder(self, method: str) -> Callable[..., AsyncIterator[bytes]]:
        """Return a handler that forwards the messages of a call in both directions."""
        call_triton = self._channel.stream_stream(method)

        async def forward(
            requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
        ) -> AsyncIterator[bytes]:
            """Forward a call to Triton, and yield its answers."""
            call = call_triton(requests)
            try:
                async for answer in call:
                    yield answer
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "")
            finally:
                call.cancel()

        return forward


def _create_refusal(
    code: grpc.StatusCode, message: str
) -> Callable[..., Coroutine[Any, Any, None]]:
    """Return a handler that aborts a call with a status and a message."""

    async def refuse(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await context.abort(code, message)

    return refuse


class HttpGateway:
    """Forwards HTTP requests to Triton, and streams its answers back."""

    def __init__(
        self, settings: GatewaySettings, triton: ClientSession, strangers: StrangerConnections
    ) -> None:
        self._settings = settings
        self._triton = triton
        self._strangers = strangers

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request to the HTTP port: forward or refuse it."""
        settings = self._settings
        path = request.raw_path
        if _PUBLIC_PATHS.fullmatch(path):
            return await self._forward(request)
        if not _PROTECTED_PATHS.fullmatch(path) or request.method not in ("GET", "POST"):
            return _create_error_response(403, _NOT_SERVED)
        if not _is_valid_key(request.headers.get(KEY_HEADER), settings.key):
            answer = _create_error_response(401, _INVALID_KEY)
            # Otherwise, a client without a key could keep its connection.
            answer.force_close()
            return answer
        self._strangers.remove(request.protocol)
        if request.body_exists and request.content_length is None:
            return _create_error_response(
                411, "Content-Length is missing; a request must declare its length"
            )
        if (request.content_length or 0) > settings.max_request_bytes:
            return _create_error_response(
                413,
                f"got a request of {request.content_length} bytes, must be at most"
                f" {settings.max_request_bytes}",
            )
        return await self._forward(request)

    async def health(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request to the Unix socket of health checks."""
        if not _PUBLIC_PATHS.fullmatch(request.raw_path):
            return _create_error_response(404, "only health checks are served here")
        return await self._forward(request)

    async def metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request to the metrics port, which does not require a key."""
        if (request.method, request.raw_path) != ("GET", "/metrics"):
            return _create_error_response(404, "only GET /metrics is served here")
        return await self._forward(request, "metrics")

    async def _forward(self, request: web.BaseRequest, host: str = "triton") -> web.StreamResponse:
        """Forward a request to Triton's socket, and stream the answer."""
        body = request.content if request.method == "POST" and request.content_length else None
        url = URL(f"http://{host}{request.raw_path}", encoded=True)
        try:
            triton_request = self._triton.request(
                request.method,
                url,
                data=body,
                headers=_remove_connection_headers(request.headers),
                allow_redirects=False,
            )
            async with triton_request as triton_answer:
                answer = web.StreamResponse(
                    status=triton_answer.status,
                    headers=_remove_connection_headers(triton_answer.headers),
                )
                await answer.prepare(request)
                async for chunk in triton_answer.content.iter_any():
                    await answer.write(chunk)
                await answer.write_eof()
                return answer
        except (ClientError, OSError) as error:
            return _create_error_response(503, f"Triton does not respond: {error}")


def _remove_connection_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers without those of the connection."""
    return {
        name: value for name, value in headers.items() if name.lower() not in _HOP_BY_HOP_HEADERS
    }


def _create_error_response(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


class _HttpServer(web.Server):
    """HTTP server that closes the connections of clients without a key."""

    def __init__(self, handler: Any, strangers: StrangerConnections) -> None:
        super().__init__(handler, access_log=None, auto_decompress=False, handler_cancellation=True)
        self._strangers = strangers

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        """See the base class."""
        super().connection_made(handler, transport)
        self._strangers.add(handler, transport.abort)

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        """See the base class."""
        self._strangers.remove(handler)
        super().connection_lost(handler, exc)


async def _run_http(
    server: web.Server,
    make_site: Callable[[web.ServerRunner], web.BaseSite],
    exit_stack: contextlib.AsyncExitStack,
) -> None:
    """Run an HTTP server until the exit stack is closed.

    Args:
        server: The server.
        make_site: Function that returns the address on which the server listens.
        exit_stack: See above.
    """
    runner = web.ServerRunner(server, shutdown_timeout=_DRAIN_S)
    await runner.setup()
    exit_stack.push_async_callback(runner.cleanup)
    await make_site(runner).start()


async def _serve(settings: GatewaySettings) -> None:
    """Listen on all ports, and forward requests to Triton until the end of standard input."""
    triton = list_triton_sockets(Path(settings.sockets))
    tls = settings.tls
    channel_options: list[tuple[str, int]] = [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        # Reconnect soon after a restart of Triton.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
    ]
    strangers = StrangerConnections()
    async with contextlib.AsyncExitStack() as exit_stack:

        async def open_gateway(socket: str) -> HttpGateway:
            connector = UnixConnector(path=socket, limit=_MAX_CONNECTIONS)
            client = ClientSession(
                connector=connector, auto_decompress=False, timeout=ClientTimeout(total=None)
            )
            return HttpGateway(settings, await exit_stack.enter_async_context(client), strangers)

        # The gRPC port.
        channel = await exit_stack.enter_async_context(
            grpc.aio.insecure_channel(f"unix:{triton['grpc']}", channel_options)
        )
        server = grpc.aio.server(
            options=[
                ("grpc.max_send_message_length", -1),
                ("grpc.max_receive_message_length", settings.max_request_bytes),
                ("grpc.so_reuseport", 0),
                # By default, gRPC reads many MiB ahead on a fast connection, even of calls that the
                # gateway refuses.
                ("grpc.http2.bdp_probe", 0),
                ("grpc.http2.lookahead_bytes", _READ_AHEAD_BYTES),
                # Allow clients to send pings every few seconds during a request. By default, gRPC
                # closes the connection of such a client.
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", 0),
                # Other users must not take all open files of this process.
                ("grpc.max_allowed_incoming_connections", share_open_files(4)),
                ("grpc.server_handshake_timeout_ms", round(KEY_TIMEOUT_S * 1_000)),
                ("grpc.max_connection_idle_ms", round(_GRPC_IDLE_S * 1_000)),
            ]
        )
        server.add_generic_rpc_handlers((GrpcGateway(channel, settings.key),))
        grpc_address = f"{settings.address}:{settings.grpc}"
        if tls is None:
            server.add_insecure_port(grpc_address)
        else:
            server.add_secure_port(grpc_address, _create_credentials(tls))
        await server.start()
        exit_stack.push_async_callback(server.stop, _DRAIN_S)

        # The HTTP ports.
        http = await open_gateway(triton["http"])
        tls_context = None if tls is None else tls.server_context()
        metrics = await open_gateway(triton["metrics"])
        ports = (
            (http.handle, settings.http, tls_context),
            (metrics.metrics, settings.metrics, None),
        )
        for handler, port, port_tls in ports:
            await _run_http(
                _HttpServer(handler, strangers),
                functools.partial(
                    web.TCPSite,
                    host=settings.address,
                    port=port,
                    ssl_context=port_tls,
                    backlog=_BACKLOG,
                ),
                exit_stack,
            )

        # The server's own health checks, which no other user can delay.
        health_socket = Path(settings.sockets) / HEALTH_SOCKET
        await _run_http(
            web.Server(http.health, access_log=None),
            functools.partial(web.UnixSite, path=health_socket),
            exit_stack,
        )

        print(READY, flush=True)
        await asyncio.to_thread(sys.stdin.read)


def _create_credentials(tls: TLSFiles) -> grpc.ServerCredentials:
    """Return gRPC's credentials; with mutual TLS, clients must present a certificate."""
    authorities = tls.authorities.read_bytes() if tls.mutual else None
    return grpc.ssl_server_credentials(
        [(tls.key.read_bytes(), tls.certificate.read_bytes())], authorities, tls.mutual
    )


if __name__ == "__main__":
    # The server process sends the settings when Triton is ready. If it exits before, the input is
    # empty.
    os.umask(0o077)
    if line := sys.stdin.readline():
        asyncio.run(_serve(GatewaySettings.from_json(line)))
    os._exit(0)
