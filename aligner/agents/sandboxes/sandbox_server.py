"""HTTP server of sandboxes for clients on other machines (`aligner serve-sandboxes`).

A sandbox starts with a request whose response does not end. When the client closes this connection,
or is killed, the server ends the sandbox.
"""

import asyncio
import base64
import hmac
import json
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from aligner.agents.client_connection import admit_client, make_connection_class
from aligner.agents.failures import InfrastructureError
from aligner.agents.sandboxes.creation import create_sandbox
from aligner.agents.sandboxes.sandbox import Sandbox, SandboxSettings
from aligner.errors import AlignerError
from aligner.file_limits import parse_json
from aligner.open_files import StrangerConnections

_log = logging.getLogger(__name__)

# Interval in seconds of the empty lines in the response of a sandbox. They reveal a client whose
# machine has failed without closing the connection.
_HEARTBEAT_S = 10.0
_MAX_BODY_BYTES = 64 << 20


class _RefusedRequest(AlignerError):
    """A request that the server does not process."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class _ServedSandbox:
    """A sandbox and its requests in flight."""

    sandbox: Sandbox
    tasks: set["asyncio.Task[dict[str, Any]]"] = field(default_factory=set)


class SandboxServer:
    """Server of sandboxes on this machine, local ones and containers."""

    def __init__(self, host: str, port: int, api_key: str, max_sandboxes: int) -> None:
        """Open the port; `run` serves requests.

        Args:
            host: Address of this machine.
            port: TCP port; 0 selects a free one.
            api_key: Key that clients must send.
            max_sandboxes: Maximum number of sandboxes at the same time.

        Raises:
            AlignerError: The host is not an address of this machine, or the port is in use.
        """
        self._api_key = api_key
        self._max_sandboxes = max_sandboxes
        self._sandboxes: dict[str, _ServedSandbox] = {}
        # sandboxes that are starting
        self._starting = 0
        self._closings = set[asyncio.Task[None]]()
        try:
            self._socket = socket.create_server((host, port), backlog=2048)
        except OSError as error:
            raise AlignerError(
                f"--host={host}: cannot listen on port {port}: {error}; must be an address of this"
                " machine, with a free port"
            ) from error
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"

    def run(self) -> None:
        """Serve requests until SIGINT or SIGTERM, then end all sandboxes."""
        routes = [
            Route("/v1/sandboxes", self._start_sandbox, methods=["POST"]),
            Route("/v1/sandboxes/{id}/exec", self._exec, methods=["POST"]),
            Route("/v1/sandboxes/{id}/snapshot", self._snapshot, methods=["POST"]),
            Route("/v1/sandboxes/{id}/reset", self._reset, methods=["POST"]),
        ]
        app = Starlette(
            routes=routes,
            exception_handlers={
                _RefusedRequest: _respond_to_refused_request,
                InfrastructureError: _respond_to_failure,
            },
        )
        config = uvicorn.Config(
            app,
            log_config=None,
            http=make_connection_class(StrangerConnections()),
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        uvicorn.Server(config).run([self._socket])

    async def _start_sandbox(self, request: Request) -> Response:
        """Start a sandbox, and respond with its id; the response ends with the sandbox."""
        fields = await self._read(request)
        if len(self._sandboxes) + self._starting >= self._max_sandboxes:
            raise _RefusedRequest(
                503, f"{self._max_sandboxes} sandboxes are running, the limit of --max-sandboxes"
            )
        try:
            settings = SandboxSettings.from_json(fields)
        except (KeyError, TypeError) as error:
            raise _RefusedRequest(400, f"invalid settings: {error}") from error
        self._starting += 1
        try:
            sandbox = await create_sandbox(settings=settings)
        finally:
            self._starting -= 1
        sandbox_id = secrets.token_hex(16)
        self._sandboxes[sandbox_id] = _ServedSandbox(sandbox)
        return StreamingResponse(self._hold(sandbox_id), media_type="application/x-ndjson")

    async def _hold(self, sandbox_id: str) -> AsyncIterator[str]:
        """Yield the id of a sandbox, then empty lines; end the sandbox with the connection."""
        try:
            yield json.dumps({"id": sandbox_id}) + "\n"
            while True:
                await asyncio.sleep(_HEARTBEAT_S)
                yield "\n"
        finally:
            # a task, because this coroutine has been cancelled and cannot wait any more
            closing = asyncio.get_running_loop().create_task(self._end(sandbox_id))
            self._closings.add(closing)
            closing.add_done_callback(self._closings.discard)

    async def _end(self, sandbox_id: str) -> None:
        """End a sandbox and its requests in flight."""
        served = self._sandboxes.pop(sandbox_id)
        for task in served.tasks:
            task.cancel()
        await asyncio.gather(*served.tasks, return_exceptions=True)
        try:
            await served.sandbox.close()
        except InfrastructureError as error:
            _log.warning("a sandbox could not be closed: %s", error)

    async def _exec(self, request: Request) -> Response:
        """Run a command."""
        fields = await self._read(request)
        return await self._respond(request, self._run_command(self._find(request), fields))

    async def _run_command(self, sandbox: Sandbox, fields: dict[str, Any]) -> dict[str, Any]:
        result = await sandbox.exec(
            fields["command"],
            stdin=base64.b64decode(fields["stdin"]),
            timeout_s=float(fields["timeout_s"]),
            max_output_bytes=int(fields["max_output_bytes"]),
        )
        return {
            "exit_code": result.exit_code,
            "stdout": base64.b64encode(result.stdout_bytes).decode(),
            "stderr": base64.b64encode(result.stderr_bytes).decode(),
            "timed_out": result.timed_out,
            "is_truncated": result.is_truncated,
        }

    async def _snapshot(self, request: Request) -> Response:
        """Save the files of a sandbox."""
        await self._read(request)
        sandbox = self._find(request)

        async def save() -> dict[str, Any]:
            return {"snapshot": await sandbox.snapshot()}

        return await self._respond(request, save())

    async def _reset(self, request: Request) -> Response:
        """Restore the files of a sandbox."""
        fields = await self._read(request)
        sandbox = self._find(request)

        async def restore() -> dict[str, Any]:
            try:
                await sandbox.reset(fields["snapshot"])
            except KeyError:
                return {"unknown_snapshot": fields["snapshot"]}
            return {}

        return await self._respond(request, restore())

    async def _respond(self, request: Request, answer: Awaitable[dict[str, Any]]) -> Response:
        """Return the response with an answer, unless the sandbox ends before."""
        served = self._sandboxes[request.path_params["id"]]
        task = asyncio.ensure_future(answer)
        served.tasks.add(task)  # type: ignore[arg-type]
        try:
            return JSONResponse(await task)
        except asyncio.CancelledError:
            raise _RefusedRequest(404, "the sandbox has ended") from None
        except (KeyError, TypeError, ValueError) as error:
            raise _RefusedRequest(400, f"invalid request: {error}") from error
        finally:
            served.tasks.discard(task)  # type: ignore[arg-type]

    def _find(self, request: Request) -> Sandbox:
        """Return the sandbox of a request. Raises _RefusedRequest if it has ended."""
        served = self._sandboxes.get(request.path_params["id"])
        if served is None:
            raise _RefusedRequest(404, "the sandbox has ended")
        return served.sandbox

    async def _read(self, request: Request) -> dict[str, Any]:
        """Check the key of a request, and return its JSON object.

        Raises:
            _RefusedRequest: The key is wrong, or the body is too large or not a JSON object.
        """
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(
            key.encode(), self._api_key.encode()
        ):
            raise _RefusedRequest(401, "the API key is missing or wrong")
        admit_client(request)
        content = bytearray()
        async for part in request.stream():
            content += part
            if len(content) > _MAX_BODY_BYTES:
                raise _RefusedRequest(413, f"the body has more than {_MAX_BODY_BYTES} bytes")
        try:
            fields = parse_json(content)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            raise _RefusedRequest(400, "the body must be a JSON object")
        return fields


async def _respond_to_refused_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, _RefusedRequest)
    # Otherwise, a client without a key could keep its connection.
    headers = {"Connection": "close"} if error.status == 401 else None
    return JSONResponse({"error": str(error)}, error.status, headers)


async def _respond_to_failure(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 500)
