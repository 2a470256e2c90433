"""Environment that executes the policy's tool calls and returns the tools' answers as messages."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aligner.agents.episode_environment import Observation
from aligner.agents.function_tools import FunctionTool, import_tool_function
from aligner.agents.mcp_servers import McpServer
from aligner.agents.sandboxes import Sandbox, SandboxSettings, create_sandbox
from aligner.agents.sandboxes.sandbox import Isolation
from aligner.agents.sandboxes.sandbox_tools import BashTool, PythonTool
from aligner.agents.tool_protocol import ListedTool, Tool, ToolFailed
from aligner.data.tool_calls import THINK_START, MalformedCall, ToolCall, ToolFormat, parse_turn
from aligner.schema.environment import PythonToolConfig

# text that replaces the middle of an answer that is too long
_OMISSION_TEXT = "\n[… {left_out} characters left out …]\n"


class ToolEnvironment:
    """Environment that answers each tool call of a turn with one message.

    The calls of a turn run concurrently. A turn without calls ends the episode. The message of a
    failed call describes the error. If a call of a turn cannot be parsed, no call of the turn is
    executed. The reward is always 0: a reward function scores the last turn of the episode. User
    classes may inherit from this class and return rewards.
    """

    def __init__(
        self,
        *,
        form: ToolFormat,
        tools: Sequence[Mapping[str, Any]],
        timeout_s: float,
        most_calls: int,
        tool_characters: int,
        most_characters: int,
        isolation: Isolation,
        python: Mapping[str, int],
        sandbox_image: str | None = None,
        sandbox_url: str | None = None,
    ) -> None:
        """Create the environment of one episode; `with_tool_arguments` computes the arguments.

        Args:
            form: Tool call format of the policy's chat template.
            tools: The tools, `ListedTool` objects as JSON.
            timeout_s: Timeout of one tool call in seconds.
            most_calls: Maximum number of calls that are executed per turn.
            tool_characters: Maximum number of characters of one answer.
            most_characters: Maximum number of characters of all answers to a turn.
            isolation: Isolation of sandboxes on this machine.
            python: Fields of `PythonToolConfig`.
            sandbox_image: Container image of the sandboxes; None for no container.
            sandbox_url: URL of a server of sandboxes; None for sandboxes on this machine.
        """
        self._tool_format = form
        self._timeout_s = timeout_s
        self._max_calls = most_calls
        self._tool_characters = tool_characters
        self._max_characters = most_characters
        self._servers: dict[str, McpServer] = {}
        self._sandbox_settings = SandboxSettings(
            PythonToolConfig(**python), "best_effort", sandbox_image, sandbox_url, isolation
        )
        # sandbox of the episode, and its initial files; it starts when it is first needed
        self._sandbox: Sandbox | None = None
        self._sandbox_files: Mapping[str, str] = {}
        self._sandbox_lock = asyncio.Lock()
        listed_tools = [ListedTool(**tool) for tool in tools]
        self._tools = {tool.name: self._build_tool(tool) for tool in listed_tools}
        # number of messages of the chat so far, and whether the prompt ends inside reasoning
        self._message_count = 0
        self._is_reasoning = False

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        """Start the episode; there is no observation besides the prompt.

        The field `sandbox_files` of the task contains the initial files of the episode's sandbox,
        as texts by path.
        """
        self._sandbox_files = task.get("sandbox_files") or {}
        self._message_count = len(task.get("messages", ()))
        self._is_reasoning = str(task.get("prompt", "")).rstrip().endswith(THINK_START)
        return []

    async def step(self, action: str) -> tuple[Observation, float, bool]:
        """Execute a turn's tool calls, and return the answers; without calls, end the episode."""
        calls = parse_turn(
            action, self._tool_format, self._message_count, is_reasoning=self._is_reasoning
        ).calls
        if not calls:
            return [], 0.0, True

        problems = [call.problem for call in calls if isinstance(call, MalformedCall)]
        if problems:
            # chat templates cannot render a malformed call, so no tool message can answer it; a
            # user message describes the problems
            text = "\n".join([*dict.fromkeys(problems), "No call of the turn was carried out."])
            answers = [{"role": "user", "content": text}]
        else:
            tool_calls = [call for call in calls if isinstance(call, ToolCall)]
            contents = await asyncio.gather(*map(self._execute_call, tool_calls[: self._max_calls]))
            # Chat templates and models expect one answer per call, so excess calls get an answer.
            refusal = _format_error(
                f"the call was not carried out, a turn may have {self._max_calls}"
            )
            contents += [refusal] * (len(tool_calls) - len(contents))
            answers = [
                call.to_message(content) for call, content in zip(tool_calls, contents, strict=True)
            ]
        # the assistant's message of this turn, and the answers
        self._message_count += 1 + len(answers)
        return self._limit_lengths(answers), 0.0, False

    async def close(self) -> None:
        """Close the episode's sandbox and its sessions with MCP servers."""
        closings = [server.close() for server in self._servers.values()]
        if self._sandbox is not None:
            closings.append(self._sandbox.close())
        await asyncio.gather(*closings)

    async def get_sandbox(self) -> Sandbox:
        """Return the sandbox in which the tool `bash` runs the episode's commands.

        The first call starts it. A subclass may run programs in it, for example tests that
        determine the reward.

        Raises:
            InfrastructureError: The sandbox does not start.
        """
        async with self._sandbox_lock:
            if self._sandbox is None:
                self._sandbox = await create_sandbox(self._sandbox_files, self._sandbox_settings)
        return self._sandbox

    def _build_tool(self, listed_tool: ListedTool) -> Tool:
        """Return the object that executes calls of a tool; tools of a server share a session."""
        if listed_tool.kind == "python":
            return PythonTool(self._sandbox_settings, self._tool_characters)
        if listed_tool.kind == "bash":
            cpu_s = self._sandbox_settings.limits.cpu_s
            return BashTool(self.get_sandbox, cpu_s, self._tool_characters)
        if listed_tool.kind == "function":
            return FunctionTool(
                import_tool_function(listed_tool.place),
                listed_tool.schema["function"]["parameters"],
            )
        server = self._servers.setdefault(listed_tool.place, McpServer(listed_tool.place))
        return _ServerTool(server, listed_tool.name)

    async def _execute_call(self, call: ToolCall) -> str:
        """Execute a call, and return the tool's answer, or an error message for the model."""
        tool = self._tools.get(call.name)
        if tool is None:
            return _format_error(
                f"there is no tool {call.name[:100]!r}; there are {', '.join(self._tools)}"
            )
        try:
            return await tool.call(call.arguments, self._timeout_s)
        except ToolFailed as error:
            return _format_error(str(error))

    def _limit_lengths(self, answers: list[dict[str, str]]) -> list[dict[str, str]]:
        """Return the messages with contents that are shortened to the limits.

        Roles, names and call ids count towards the limit of all messages; the remaining characters
        are divided equally among the contents.
        """
        other_characters = sum(
            len(text) for answer in answers for key, text in answer.items() if key != "content"
        )
        share = max(self._max_characters - other_characters, 0) // len(answers)
        limit = min(share, self._tool_characters)
        return [answer | {"content": _shorten(answer["content"], limit)} for answer in answers]


@dataclass(frozen=True)
class _ServerTool:
    """A tool of an MCP server."""

    server: McpServer
    name: str

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """Call the tool, and return the server's answer."""
        return await self.server.call(self.name, arguments, timeout_s)


def _format_error(message: str) -> str:
    """Return an error message for the model."""
    return f"Error: {message}"


def _shorten(text: str, max_characters: int) -> str:
    """Return a text of at most `max_characters` characters that UTF-8 can encode.

    A longer text keeps its beginning and its end.
    """
    # replaces lone surrogates
    text = text.encode(errors="replace").decode()
    if len(text) <= max_characters:
        return text
    omission = _OMISSION_TEXT.format(left_out=len(text) - max_characters)
    remaining = max(max_characters - len(omission), 0)
    beginning = text[: remaining - remaining // 2]
    end = text[len(text) - remaining // 2 :]
    # the slice is needed if the omission text alone is longer than the limit
    return (beginning + omission + end)[:max_characters]
