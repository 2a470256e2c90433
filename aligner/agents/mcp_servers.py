"""Clients of Model Context Protocol (MCP) servers.

A server is either a command, whose process communicates over stdin and stdout, or a URL.
"""

import asyncio
import json
import shlex
import shutil
from typing import TYPE_CHECKING, Any

from aligner.agents.function_tools import within
from aligner.agents.tool_protocol import ListedTool, ToolFailed
from aligner.errors import AlignerError, ConfigError

if TYPE_CHECKING:
    from mcp import Client, StdioServerParameters
    from mcp.types import CallToolResult

# timeout in seconds of a request for a server's tools
_LISTING_S = 60.0


class McpServer:
    """The session of one episode with an MCP server.

    The session starts with the first call. For a command, it has its own server process. If the
    connection ends or an answer is late, the next call starts a new session.
    """

    def __init__(self, server: str) -> None:
        """Create a client without a session; `server` is a command line or an HTTP(S) URL."""
        self._server = server
        self._session: _Session | None = None
        self._begins = asyncio.Lock()
        self._endings: list[asyncio.Task[None]] = []

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> str:
        """Call a tool of the server, and return its answer.

        Raises:
            ToolFailed: The tool reported an error, or gave no readable answer in time.
            AlignerError: The server did not start.
        """
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        # concurrent calls must not start two sessions
        async with self._begins:
            if self._session is None:
                self._session = await _Session.begun(self._server)
            session = self._session
        try:
            return _text(await within(session.client.call_tool(tool, arguments), timeout_s))
        except _ToldSo:
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
            self._endings.append(asyncio.ensure_future(session.end()))
        raise ToolFailed(
            f"{reason}; the server is started again for the next call, without what it had kept"
        )

    async def close(self) -> None:
        """Close all sessions, and end the server's processes."""
        session = self._session
        self._session = None
        if session is not None:
            self._endings.append(asyncio.ensure_future(session.end()))
        await asyncio.gather(*self._endings)


class _ToldSo(ToolFailed):
    """The server's answer reports an error of the tool; the session is still usable."""


class _Session:
    """An open connection to a server.

    It has a task of its own, because the library must open and close a connection in the same task.
    """

    def __init__(self, client: "Client", task: "asyncio.Task[None]", over: asyncio.Event) -> None:
        self.client = client
        self._task = task
        self._over = over

    @staticmethod
    async def begun(server: str) -> "_Session":
        """Connect to a server, and return the session when the server has answered.

        Raises AlignerError if the server does not start.
        """
        from mcp import Client

        over = asyncio.Event()
        client = Client(_transport(server))
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def live() -> None:
            async with client:
                ready.set_result(None)
                await over.wait()

        task = asyncio.ensure_future(live())
        try:
            await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise AlignerError(
                    f"the MCP server {server!r} did not start: {_reason(task.exception())}"
                )
        except asyncio.CancelledError:
            task.cancel()
            raise
        return _Session(client, task, over)

    async def end(self) -> None:
        """Close the connection, which takes a few seconds at most, whatever the server does."""
        self._over.set()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            # mark the exception as retrieved: it has been reported, or results from closing
            self._task.exception()


def listed_tools(server: str) -> list[ListedTool]:
    """Start a server, and return its tools; the server is stopped again.

    Raises ConfigError, with a message that contains only the reason, if that fails.
    """
    try:
        return asyncio.run(_listed(server))
    except ImportError as error:
        raise ConfigError(
            f"requires the mcp package; install it with pip install 'aligner[mcp]': {error}"
        ) from error
    except Exception as error:  # connection errors of several libraries
        raise ConfigError(f"listing the server's tools failed: {_reason(error)}") from error


async def _listed(server: str) -> list[ListedTool]:
    """Return the tools of a server from all pages of its list."""
    from mcp import Client

    tools: list[ListedTool] = []
    async with Client(_transport(server), read_timeout_seconds=_LISTING_S) as client:
        page = await client.list_tools()
        while True:
            for tool in page.tools:
                function = {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                }
                tools.append(
                    ListedTool("server", server, {"type": "function", "function": function})
                )
            if page.next_cursor is None:
                return tools
            page = await client.list_tools(cursor=page.next_cursor)


def _transport(server: str) -> "str | StdioServerParameters":
    """Return the transport of a server. Raises AlignerError if its command does not exist."""
    from mcp import StdioServerParameters

    if server.startswith(("http://", "https://")):
        return server
    command, *arguments = shlex.split(server) or [""]
    if shutil.which(command) is None:
        raise AlignerError(f"command {command!r} not found")
    # a server that hangs must not outlive the process that started it
    if (setpriv := shutil.which("setpriv")) is not None:
        return StdioServerParameters(
            command=setpriv, args=["--pdeathsig", "KILL", "--", command, *arguments]
        )
    return StdioServerParameters(command=command, args=arguments)


def _text(result: "CallToolResult") -> str:
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
        raise _ToldSo("\n".join(parts) or "it says no more")
    return "\n".join(parts)


def _reason(error: BaseException | None) -> str:
    """Return the type and message of an error; of an exception group, those of its first error."""
    while isinstance(inner := getattr(error, "exceptions", None), tuple) and inner:
        error = inner[0]
    return f"{type(error).__name__}: {error}"
