"""What a tool is to the environment that calls it."""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from aligner.errors import AlignerError

ToolKind = Literal["function", "python", "server"]


@dataclass(frozen=True)
class ListedTool:
    """A tool that the policy may call."""

    kind: ToolKind
    place: str
    """Where it is: `module:function`, or the server's command or URL."""
    schema: dict[str, Any]
    """As chat templates take it: `{"type": "function", "function": {"name", "description",
    "parameters"}}`."""

    @property
    def name(self) -> str:
        """What the model calls it."""
        return str(self.schema["function"]["name"])


class ToolFailed(AlignerError):
    """A call that came to nothing: what to tell the model."""


class Tool(Protocol):
    """A tool of one episode."""

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """What it answers, within the time. Raises ToolFailed; anything else that is raised is the
        environment's failure."""
