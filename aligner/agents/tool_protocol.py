"""Data types of tools, and the interface through which an environment calls them."""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

ToolKind = Literal["function", "python", "bash", "server"]


@dataclass(frozen=True)
class ListedTool:
    """A tool that the policy may call."""

    kind: ToolKind
    place: str
    """Location of the tool: `module:function`, `python`, `bash`, or the command or URL of its
    server."""
    schema: dict[str, Any]
    """Schema for the chat template: `{"type": "function", "function": {"name", "description",
    "parameters"}}`."""

    @property
    def name(self) -> str:
        """Name by which the model calls the tool."""
        return str(self.schema["function"]["name"])


class ToolFailed(Exception):
    """A tool call failed; the message is for the model.

    It is part of the training data, so it is not an `AlignerError`, which would mask its text.
    """


class Tool(Protocol):
    """A tool in one episode."""

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """Execute a call within `timeout_s` seconds, and return the answer.

        Raises ToolFailed if the call fails. Any other exception is a failure of the environment.
        """
