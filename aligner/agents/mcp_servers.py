"""Clients of Model Context Protocol (MCP) servers.

A server is either a command, whose process communicates over stdin and stdout, or a URL.
"""

import asyncio
import json
import shlex
import shutil
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from aligner.agents.function_tools import run_with_timeout
from aligner.agents.tool_protocol import ListedTool, ToolFailed
from aligner.errors import AlignerError, ConfigError

if TYPE_CHECKING:
    from mcp import Client, StdioServerParameters
    from mcp.types import CallToolResult

# timeout in seconds of a request for a server's tools
_LISTING_TIMEOUT_S = 60.0
# maximum number of pages of a server's list of tools
_MAX_PAGES = 100


class McpServer:
    """The session of one episode with an MCP server.

    The session starts with the first call. If the server is a command, the session has its own
    server process. If the connection ends or an answer is late, the next call starts a new session.
    """

    def __init__(self, server: str) -> None:
        """Create a client without a session; `server` is a command line or an HTTP(S) URL."""
        self._server = server
        self._session: _Session | None = None
        self._start_lock = asyncio.Lock()
        self._closing_tasks: list[asyncio.Task[None]] = []

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> str:
        """Call a tool of the server, and return its answer.

        Raises:
            ToolFailed: The tool reported an error, or gave no readable answer in time.
            AlignerError: The server did not start.
        """
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        # concurrent calls must not start two sessions
        async with self._start_lock:
            if self._session is None:
                self._session = await _Session.connect(self._server)
            session = self._session
        try:
            result = await run_with_timeout(session.client.call_tool(tool, arguments), timeout_s)
            return _convert_to_text(result)
        except _ToolError:
            raise
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise ToolFailed(error.message) from error
            reason = "its server has ended"
        except ToolFailed as error:
            reason = str(error)
        except Exception as error:  # connection errors of several libraries
            reason = f"its server's answer cannot be read, {type(error).__name__}"

        # a concurrent call may already have replaced the session
        if self._session is session:
            self._session = None
            self._closing_tasks.append(asyncio.ensure_future(session.close()))
        raise ToolFailed(
            f"{reason}; the server is started again for the next call, without what it had kept"
        )

    async def close(self) -> None:
        """Close all sessions, and end the server's processes."""
        session = self._session
        self._session = None
        if session is not None:
            self._closing_tasks.append(asyncio.ensure_future(session.close()))
        await asyncio.gather(*self._closing_tasks)


class _ToolError(ToolFailed):
    """The server's answer reports an error of the tool; the session is still usable."""


class _Session:
    """An open connection to a server.

    It has a task of its own, because the library must open and close a connection in the same task.
    """

    def __init__(
        self, client: "Client", task: "asyncio.Task[None]", close_event: asyncio.Event
    ) -> None:
        self.client = client
        self._task = task
        self._close_event = close_event

    @staticmethod
    async def connect(server: str) -> "_Session":
        """Connect to a server, and return the session when the server has answered.

        Raises AlignerError if the server does not start.
        """
        from mcp import Client

        close_event = asyncio.Event()
        client = Client(_build_transport(server))
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def run_connection() -> None:
            async with client:
                ready.set_result(None)
                await close_event.wait()

        task = asyncio.ensure_future(run_connection())
        try:
            await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise AlignerError(
                    f"the MCP server {server!r} did not start: {_describe_error(task.exception())}"
                )
        except asyncio.CancelledError:
            # otherwise the server's process would run until the worker process ends
            task.cancel()
            raise
        return _Session(client, task, close_event)

    async def close(self) -> None:
        """Close the connection within a few seconds, even if the server does not respond."""
        self._close_event.set()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            # mark the exception as retrieved: it was already reported, or closing caused it
            self._task.exception()


def list_server_tools(server: str) -> list[ListedTool]:
    """Start a server, and return its tools; the server is stopped again.

    Raises:
        ConfigError: The server does not start, its list is invalid or does not end, or it lists a
            tool twice. The message contains only the reason.
    """
    try:
        return asyncio.run(_list_tools(server))
    except ConfigError:
        raise
    except ImportError as error:
        raise ConfigError(
            f"requires the mcp package; install it with pip install 'aligner[mcp]': {error}"
        ) from error
    except Exception as error:  # connection errors of several libraries
        raise ConfigError(f"listing the server's tools failed: {_describe_error(error)}") from error


async def _list_tools(server: str) -> list[ListedTool]:
    """Return the tools of a server from all pages of its list; see `list_server_tools`."""
    from mcp import Client

    tools: dict[str, ListedTool] = {}
    cursors: set[str] = set()
    async with Client(_build_transport(server), read_timeout_seconds=_LISTING_TIMEOUT_S) as client:
        page = await client.list_tools()
        while True:
            for tool in page.tools:
                if tool.name in tools:
                    raise ConfigError(f"the server lists the tool {tool.name!r} twice")
                function = {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                }
                tools[tool.name] = ListedTool(
                    "server", server, {"type": "function", "function": function}
                )

            cursor = page.next_cursor
            if cursor is None:
                return [*tools.values()]
            # a faulty server sends a next page without end
            if cursor in cursors:
                raise ConfigError(
                    f"the server's list of tools does not end: nextCursor is {cursor!r} twice"
                )
            cursors.add(cursor)
            if len(cursors) == _MAX_PAGES:
                raise ConfigError(
                    f"the server's list of tools has more than {_MAX_PAGES} pages; the last"
                    f" nextCursor is {cursor!r}"
                )
            page = await client.list_tools(cursor=cursor)


def _build_transport(server: str) -> "str | StdioServerParameters":
    """Return the transport of a server. Raises AlignerError if its command does not exist."""
    from mcp import StdioServerParameters

    if server.startswith(("http://", "https://")):
        return server
    # each client starts its own server process, and communicates over stdin and stdout
    command, *arguments = shlex.split(server) or [""]
    if shutil.which(command) is None:
        raise AlignerError(f"command {command!r} not found")
    # a server that hangs must not outlive the process that started it
    setpriv = shutil.which("setpriv")
    if setpriv is not None:
        return StdioServerParameters(
            command=setpriv, args=["--pdeathsig", "KILL", "--", command, *arguments]
        )
    return StdioServerParameters(command=command, args=arguments)


def _convert_to_text(result: "CallToolResult") -> str:
    """Return an answer as text for the model; other content becomes its type in brackets.

    Raises ToolFailed if the answer reports an error of the tool.
    """
    parts = []
    for block in result.content:
        text = getattr(block, "text", None) or getattr(
            getattr(block, "resource", None), "text", None
        )
        parts.append(text if isinstance(text, str) else f"[{block.type}]")
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    if result.is_error:
        raise _ToolError("\n".join(parts) or "it says no more")
    return "\n".join(parts)


def _describe_error(error: BaseException | None) -> str:
    """Return the type and message of an error, or of the first error of an exception group."""
    # anyio's task groups wrap the error in one exception group per level
    while isinstance(inner := getattr(error, "exceptions", None), tuple) and inner:
        error = inner[0]
    if isinstance(error, ValidationError):  # a message that the protocol does not allow
        first = error.errors(include_url=False, include_context=False)[0]
        location = ".".join(map(str, first["loc"]))
        return f"its answer is invalid: {location}: {first['msg']}; got {str(first['input'])[:100]}"
    return f"{type(error).__name__}: {error}"
