"""Tools for tests: functions, and an MCP server if this file is run as a script."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from aligner.agents.episode_environment import Observation
from aligner.agents.tool_environment import ToolEnvironment


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: The one.
        b: The other.
    """
    return a * b


def look(at: str) -> str:
    """Looks.

    Args:
        at: The place.
    """
    return f"saw {at}"


async def wait(seconds: float) -> str:
    """Waits.

    Args:
        seconds: For so long.
    """
    await asyncio.sleep(seconds)
    return f"waited {seconds:g} s"


def hang(seconds: float) -> str:
    """Keeps its thread.

    Args:
        seconds: For so long.
    """
    time.sleep(seconds)
    return "done"


def fail(how: str) -> str:
    """Fails.

    Args:
        how: In this way.
    """
    if how == "exit":
        raise SystemExit(3)
    raise ValueError(how)


def flood(characters: int) -> str:
    """Says a lot.

    Args:
        characters: So much.
    """
    return "x" * characters


def broken() -> str:
    """Returns what no text can hold."""
    return "half of a character: \ud800"


def undocumented(a: int) -> int:
    return a


class Rewarding(ToolEnvironment):
    """Adds a reward of 0.25 for each turn that calls tools."""

    async def step(self, action: str) -> tuple[Observation, float, bool]:
        observation, reward, done = await super().step(action)
        return observation, reward + 0.25 * (not done), done


class Tested(ToolEnvironment):
    """Gives the reward 1 if a test in the episode's sandbox succeeds."""

    async def step(self, action: str) -> tuple[Observation, float, bool]:
        observation, reward, done = await super().step(action)
        if done:
            sandbox = await self.get_sandbox()
            test = await sandbox.exec(["grep", "-q", "42", "result"])
            reward = float(test.exit_code == 0)
        return observation, reward, done


def serve() -> None:
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    server, kept = MCPServer("samples", log_level="CRITICAL"), {"count": 0}

    @server.tool()
    def count(by: int) -> int:
        """Counts on, by so many."""
        kept["count"] += by
        return kept["count"]

    @server.tool()
    def process() -> int:
        """The server's process id."""
        return os.getpid()

    @server.tool()
    def refuse(why: str) -> str:
        """Fails."""
        raise ToolError(why)

    @server.tool()
    def die() -> str:
        """Ends the server."""
        os._exit(3)

    @server.tool()
    def stall() -> str:
        """Keeps the server busy for a long time."""
        time.sleep(600)
        return ""

    @server.tool()
    def megabytes(count: int) -> str:
        """Says a lot."""
        return "y" * (count << 20)

    settings: dict[str, Any] = {"transport": "stdio"}
    if (port := os.environ.get("PORT")) is not None:
        settings = {"transport": "streamable-http", "host": "127.0.0.1", "port": int(port)}
    server.run(**settings)


if __name__ == "__main__":
    serve()
