"""Servers of the Model Context Protocol: processes of a command, which talk over its input and
output, or URLs."""

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

_LISTING_S = 60.0


class McpServer:
    """An episode's own session with a server; a command's server is a process of its own to it.

    It begins with the first call. One that ends, or is late with an answer, is begun anew for the
    call after that.
    """

    def __init__(self, server: str) -> None:
        """`server` is a command line, or a URL of http or https."""
        self._server = server
        self._session: _Session | None = None
        self._begins = asyncio.Lock()
        self._endings: list[asyncio.Task[None]] = []

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> str:
        """What a tool of the server's answers. Raises ToolFailed, and AlignerError where the server
        does not start."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

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
            why = "its server has ended"
        except ToolFailed as error:
            why = str(error)
        except Exception as error:  # of the connection, by several libraries
            why = f"its server's answer cannot be read, {type(error).__name__}"
        if self._session is session:
            self._session = None
            self._endings.append(asyncio.ensure_future(session.end()))
        raise ToolFailed(
            f"{why}; the server is started again for the next call, without what it had kept"
        )

    async def close(self) -> None:
        """End all sessions, and the server's processes where it has some."""
        session, self._session = self._session, None
        if session is not None:
            self._endings.append(asyncio.ensure_future(session.end()))
        await asyncio.gather(*self._endings)


class _ToldSo(ToolFailed):
    """The tool itself says that it has failed."""


class _Session:
    """A connection that is open, in a task of its own, as the library has to open and close it in
    one."""

    def __init__(self, client: "Client", task: "asyncio.Task[None]", over: asyncio.Event) -> None:
        self.client, self._task, self._over = client, task, over

    @staticmethod
    async def begun(server: str) -> "_Session":
        """A session with a server that has answered. Raises AlignerError where it does not get so
        far."""
        from mcp import Client

        over, client = asyncio.Event(), Client(_transport(server))
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
        """Close it; whatever the other side does, that takes a few seconds at most."""
        self._over.set()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.exception()  # the connection's end, which has been told of or is wanted


def listed_tools(server: str) -> list[ListedTool]:
    """What a server offers; it is started for that, and ended. Raises ConfigError, with the reason
    alone."""
    try:
        return asyncio.run(_listed(server))
    except ImportError as error:
        raise ConfigError(
            f"requires the mcp package; install it with pip install 'aligner[mcp]': {error}"
        ) from error
    except Exception as error:  # of the connection, by several libraries
        raise ConfigError(f"listing the server's tools failed: {_reason(error)}") from error


async def _listed(server: str) -> list[ListedTool]:
    from mcp import Client

    found: list[ListedTool] = []
    async with Client(_transport(server), read_timeout_seconds=_LISTING_S) as client:
        page = await client.list_tools()
        while True:
            for tool in page.tools:
                described = {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                }
                found.append(
                    ListedTool("server", server, {"type": "function", "function": described})
                )
            if page.next_cursor is None:
                return found
            page = await client.list_tools(cursor=page.next_cursor)


def _transport(server: str) -> "str | StdioServerParameters":
    from mcp import StdioServerParameters

    if server.startswith(("http://", "https://")):
        return server
    command, *arguments = shlex.split(server) or [""]
    if shutil.which(command) is None:
        raise AlignerError(f"command {command!r} not found")
    # a server that hangs must not outlive who started it
    if (leash := shutil.which("setpriv")) is not None:
        return StdioServerParameters(
            command=leash, args=["--pdeathsig", "KILL", "--", command, *arguments]
        )
    return StdioServerParameters(command=command, args=arguments)


def _text(result: "CallToolResult") -> str:
    """What a model can be told of an answer. Raises ToolFailed where the tool says that it has
    failed."""
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
    """What went wrong, of what task groups put together the first."""
    while isinstance(inner := getattr(error, "exceptions", None), tuple) and inner:
        error = inner[0]
    return f"{type(error).__name__}: {error}"
