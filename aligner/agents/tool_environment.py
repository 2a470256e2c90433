"""An environment that runs the tools which the policy calls, in its own model's format, and tells
it what they answer."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aligner.agents.episode_environment import Observation
from aligner.agents.function_tools import FunctionTool, tool_function
from aligner.agents.mcp_servers import McpServer
from aligner.agents.python_sandbox import Isolation, PythonSandbox
from aligner.agents.tool_protocol import ListedTool, Tool, ToolFailed
from aligner.data.tool_calls import THINK_START, MalformedCall, ToolCall, ToolFormat, parse_turn
from aligner.schema.environment import PythonToolConfig

_CUT = "\n[… {left_out} characters left out …]\n"


class ToolEnvironment:
    """Answers a turn's tool calls, all at once, with a message each; a turn without any ends the
    episode.

    What is wrong with a call is told in its message. Where a call cannot be read none of its turn
    is carried out. The reward is 0: what the episode is worth a reward function says of its last
    turn. A class of the user's own may go on from this one, and give rewards.
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
    ) -> None:
        """`tools` are `ListedTool` as JSON, `python` is PythonToolConfig, with the isolation that
        this machine has.

        An answer of a tool has `tool_characters` at most, and all those to a turn together
        `most_characters`.
        """
        self._form, self._timeout_s, self._most_calls = form, timeout_s, most_calls
        self._tool_characters, self._most_characters = tool_characters, most_characters
        self._servers: dict[str, McpServer] = {}
        self._sandbox = PythonSandbox(PythonToolConfig(**python), isolation)
        listed = [ListedTool(**tool) for tool in tools]
        self._tools = {tool.name: self._tool(tool) for tool in listed}
        self._messages, self._reasons = 0, False

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        """Nothing but the prompt's messages."""
        self._messages = len(task.get("messages", ()))
        self._reasons = str(task.get("prompt", "")).rstrip().endswith(THINK_START)
        return []

    async def step(self, action: str) -> tuple[Observation, float, bool]:
        """The answers to the turn's calls, or the end."""
        calls = parse_turn(action, self._form, self._messages, is_reasoning=self._reasons).calls
        if not calls:
            return [], 0.0, True
        problems = [call.problem for call in calls if isinstance(call, MalformedCall)]
        if problems:  # of such a turn no template makes calls that tool messages could answer
            told = "\n".join([*dict.fromkeys(problems), "No call of the turn was carried out."])
            answers = [{"role": "user", "content": told}]
        else:
            wanted = [call for call in calls if isinstance(call, ToolCall)]
            contents = await asyncio.gather(*map(self._answer, wanted[: self._most_calls]))
            refused = _error(f"the call was not carried out, a turn may have {self._most_calls}")
            contents += [refused] * (len(wanted) - len(contents))
            answers = [
                call.to_message(content) for call, content in zip(wanted, contents, strict=True)
            ]
        self._messages += 1 + len(answers)
        return self._within_bounds(answers), 0.0, False

    async def close(self) -> None:
        """End what servers the episode has."""
        await asyncio.gather(*(server.close() for server in self._servers.values()))

    def _tool(self, listed: ListedTool) -> Tool:
        if listed.kind == "python":
            return _PythonTool(self._sandbox, self._tool_characters)
        if listed.kind == "function":
            return FunctionTool(
                tool_function(listed.place), listed.schema["function"]["parameters"]
            )
        server = self._servers.setdefault(listed.place, McpServer(listed.place))
        return _ServerTool(server, listed.name)

    async def _answer(self, call: ToolCall) -> str:
        tool = self._tools.get(call.name)
        if tool is None:
            return _error(
                f"there is no tool {call.name[:100]!r}; there are {', '.join(self._tools)}"
            )
        try:
            return await tool.call(call.arguments, self._timeout_s)
        except ToolFailed as error:
            return _error(str(error))

    def _within_bounds(self, answers: list[dict[str, str]]) -> list[dict[str, str]]:
        """The messages, their contents cut where they are too long."""
        others = sum(
            len(text) for answer in answers for key, text in answer.items() if key != "content"
        )
        share = max(self._most_characters - others, 0) // len(answers)
        most = min(share, self._tool_characters)
        return [answer | {"content": _shortened(answer["content"], most)} for answer in answers]


@dataclass(frozen=True)
class _PythonTool:
    """Programs in the sandbox."""

    sandbox: PythonSandbox
    most_characters: int

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """What the program `code` prints."""
        if {*arguments} != {"code"} or not isinstance(arguments["code"], str):
            raise ToolFailed("wrong arguments: it takes `code`, a text, alone")
        return await self.sandbox.run(arguments["code"], timeout_s, self.most_characters)


@dataclass(frozen=True)
class _ServerTool:
    """A tool of a server's."""

    server: McpServer
    name: str

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """What the server answers."""
        return await self.server.call(self.name, arguments, timeout_s)


def _error(what: str) -> str:
    return f"Error: {what}"


def _shortened(text: str, most: int) -> str:
    """A text of so many characters at most, of a longer one the ends; all of them are such as UTF-8
    can hold."""
    text = text.encode(errors="replace").decode()
    if len(text) <= most:
        return text
    cut = _CUT.format(left_out=len(text) - most)
    kept = max(most - len(cut), 0)
    return (text[: kept - kept // 2] + cut + text[len(text) - kept // 2 :])[:most]
