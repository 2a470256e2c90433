"""Client of `aligner serve-sandboxes`: a sandbox on another machine."""

import asyncio
import base64
import contextlib
import http.client
import json
import os
import urllib.parse
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from aligner.agents.failures import InfrastructureError
from aligner.agents.sandboxes.sandbox import ExecResult, Sandbox, SandboxSettings
from aligner.file_limits import parse_json

API_KEY_VARIABLE = "ALIGNER_SANDBOX_KEY"
"""Environment variable with the API key, of the server and of its clients."""
# The start of a sandbox is repeated if the server cannot be reached or is full.
_START_ATTEMPTS = 6
_FIRST_WAIT_S = 0.5
_START_TIMEOUT_S = 300.0
# time in seconds that a request may take in addition to its command
_REQUEST_TIMEOUT_S = 120.0
_BUSY = 503
# Requests block a thread each; asyncio's own pool has too few threads for all sandboxes.
_threads = ThreadPoolExecutor(256, thread_name_prefix="sandbox")
_T = TypeVar("_T")


class RemoteSandbox(Sandbox):
    """Sandbox on a server; it lives as long as the connection that has started it.

    If this process is killed, the system closes the connection, and the server ends the sandbox.
    Only the start is repeated after a failure, because nothing has run in the sandbox yet. A failed
    command may have run; it raises InfrastructureError, and the episode starts again.
    """

    def __init__(self, settings: SandboxSettings) -> None:
        super().__init__()
        self._settings = settings
        self._url = urllib.parse.urlsplit(settings.url or "")
        self._id = ""
        # connection and response whose end is the end of the sandbox
        self._connection: http.client.HTTPConnection | None = None
        self._response: http.client.HTTPResponse | None = None

    async def close(self) -> None:
        """End the sandbox by closing its connection."""
        response, connection = self._response, self._connection
        self._response = None
        self._connection = None
        if response is not None:
            response.close()
        if connection is not None:
            connection.close()

    async def _start(self) -> None:
        fields = self._settings.to_json()
        del fields["url"], fields["isolation"]
        wait_s = _FIRST_WAIT_S
        for attempt in range(1, _START_ATTEMPTS + 1):
            try:
                await self._run_in_thread(lambda: self._connect(fields))
                return
            except _RepeatableError as error:
                if attempt == _START_ATTEMPTS:
                    raise InfrastructureError(str(error)) from error
            await asyncio.sleep(wait_s)
            wait_s *= 2

    async def _exec(
        self, command: list[str], stdin: bytes, timeout_s: float, max_output_bytes: int
    ) -> ExecResult:
        answer = await self._post(
            "exec",
            {
                "command": command,
                "stdin": base64.b64encode(stdin).decode(),
                "timeout_s": timeout_s,
                "max_output_bytes": max_output_bytes,
            },
            timeout_s,
        )
        return ExecResult(
            answer["exit_code"],
            base64.b64decode(answer["stdout"]),
            base64.b64decode(answer["stderr"]),
            answer["timed_out"],
            answer["is_truncated"],
        )

    async def _snapshot(self) -> str:
        return str((await self._post("snapshot", {}))["snapshot"])

    async def _reset(self, snapshot: str | None) -> None:
        answer = await self._post("reset", {"snapshot": snapshot})
        if "unknown_snapshot" in answer:
            raise KeyError(snapshot)

    async def _post(
        self, action: str, content: Mapping[str, Any], timeout_s: float = 0.0
    ) -> dict[str, Any]:
        """Send a request about this sandbox, and return the answer.

        Raises InfrastructureError if the sandbox is lost.
        """
        return await self._run_in_thread(
            lambda: self._send_action(action, content, timeout_s + _REQUEST_TIMEOUT_S)
        )

    async def _run_in_thread(self, function: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(_threads, function)

    def _connect(self, fields: Mapping[str, Any]) -> None:
        """Start the sandbox, and keep its connection."""
        connection = self._open(_START_TIMEOUT_S)
        try:
            response = self._send(connection, "", fields)
            self._id = parse_json(response.readline())["id"]
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        self._response = response

    def _send_action(
        self, action: str, content: Mapping[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        with contextlib.closing(self._open(timeout_s)) as connection:
            response = self._send(connection, f"/{self._id}/{action}", content)
            try:
                answer: dict[str, Any] = parse_json(response.read())
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise InfrastructureError(self._describe(f"the answer is lost: {error}")) from error
            return answer

    def _open(self, timeout_s: float) -> http.client.HTTPConnection:
        """Return a connection to the server."""
        kind = (
            http.client.HTTPSConnection
            if self._url.scheme == "https"
            else http.client.HTTPConnection
        )
        connection = kind(self._url.hostname or "", self._url.port, timeout=timeout_s)
        try:
            connection.connect()
        except OSError as error:
            raise _RepeatableError(self._describe(f"cannot be reached: {error}")) from error
        return connection

    def _send(
        self, connection: http.client.HTTPConnection, path: str, content: Mapping[str, Any]
    ) -> http.client.HTTPResponse:
        """Send a request, and return the response.

        Raises:
            InfrastructureError: The connection is lost, or the server reports an error.
        """
        headers = {
            "Authorization": f"Bearer {os.environ.get(API_KEY_VARIABLE, '')}",
            "Content-Type": "application/json",
        }
        full_path = f"{self._url.path.rstrip('/')}/v1/sandboxes{path}"
        try:
            connection.request("POST", full_path, json.dumps(content), headers)
            response = connection.getresponse()
            if response.status == 200:
                return response
            message = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise InfrastructureError(self._describe(f"the connection is lost: {error}")) from error
        with contextlib.suppress(ValueError, TypeError, KeyError):
            message = parse_json(message)["error"]
        if response.status == _BUSY:
            raise _RepeatableError(self._describe(message))
        if response.status == 401:
            message = f"{message}; set the environment variable {API_KEY_VARIABLE}"
        raise InfrastructureError(self._describe(message))

    def _describe(self, problem: str) -> str:
        return f"environment.sandbox_url={self._settings.url}: {problem}"


class _RepeatableError(InfrastructureError):
    """The server has not started to process a request."""
