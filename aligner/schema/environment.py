"""What answers a policy between the turns of an episode."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.options import option, section

MATCHING = ("arguments", "reasoning", "whitespace")
"""What an agent may change in the messages that it sends back."""
TOOLS = "tools"
"""The environment that runs tools."""
PYTHON = "python"
"""The tool that runs programs in a sandbox."""
_TARGET = ".target!=null"
_AGENT = ".agent!=null or .agent_command!=null"
_SET = f"{_TARGET} or {_AGENT}"


@dataclass
class PythonToolConfig:
    """What a program of the tool `python` may use."""

    cpu_s: int = option(10, "seconds of a processor, each process", minimum=1)
    memory_mib: int = option(1024, "address space of each process", minimum=128)
    processes: int = option(16, "processes and threads at a time", minimum=2)
    scratch_mib: int = option(64, "files in its directory, and what it prints", minimum=1)


@dataclass
class EnvironmentConfig:
    """What answers a policy between the turns of an episode; without one a response is all that
    there is."""

    target: str | None = option(
        None,
        "tools, or module:Class of an environment of yours; null: none, every response is a single"
        " turn",
    )
    arguments: dict[str, Any] = option({}, "keyword arguments of its class", read=_TARGET)
    agent: str | None = option(
        None,
        "module:function of an agent with an OpenAI client, called with the task, the base_url and"
        " the api_key of an episode, async or not; null: none",
    )
    agent_command: list[str] | None = option(
        None,
        "or its command, with the task as JSON on its standard input, and OPENAI_BASE_URL and"
        " OPENAI_API_KEY; null: none",
    )
    matching: list[str] = option(
        ["arguments"],
        "what an agent may change in the messages that it sends back, and still go on from what was"
        " drawn: `arguments` of tool calls written otherwise, `reasoning` left out, `whitespace`",
        read=_AGENT,
    )
    endpoint_host: str = option(
        "127.0.0.1", "address that agents reach their endpoint at", read=_AGENT
    )
    max_turns: int = option(
        8, "an episode is cut after so many turns of the policy's", minimum=1, read=_SET
    )
    max_turn_tokens: int = option(
        64,
        "and where a turn of its has so many tokens; rollout.max_response_tokens bounds all turns"
        " and answers together",
        minimum=1,
        read=_SET,
    )
    turn_end: str | None = option(
        None, "text of one token that ends a turn, beside the end of sequence", read=_TARGET
    )
    workers: int = option(
        1, "processes that environments run in, of each replica of the engine", minimum=1, read=_SET
    )
    episodes_per_worker: int = option(
        64, "episodes of a process at a time; others wait", minimum=1, read=_SET
    )
    deadline_s: float = option(
        60.0, "an answer takes so long at most; all that an agent does", above=0, read=_SET
    )
    memory_mib: int | None = option(
        None, "address space of a process; null: as much as there is", minimum=64, read=_SET
    )
    retries: int = option(
        1,
        "an episode whose environment failed is taken up in a fresh one so often; then it is left"
        " out with its prompt, and counted (rollout/skipped)",
        minimum=0,
        read=_SET,
    )
    most_characters: int = option(
        100_000, "longest answer; of an agent what it sends at once", minimum=1, read=_SET
    )
    tools: list[str] = option(
        [],
        "what the policy may call: module:function of yours, and python, which runs programs in a"
        " sandbox",
        read=_TARGET,
    )
    mcp: list[str] = option(
        [],
        "and the tools of these servers of the Model Context Protocol: commands that start them, or"
        " URLs",
        read=_TARGET,
    )
    tool_timeout_s: float = option(
        20.0, "the model is told that a tool is late after so long", above=0, read=_TARGET
    )
    tool_characters: int = option(
        8_000,
        "longest answer of a tool; the ends of a longer one are told",
        minimum=100,
        read=_TARGET,
    )
    tool_calls: int = option(
        8, "calls of a turn, side by side; further ones are refused", minimum=1, read=_TARGET
    )
    sandbox: str = option(
        "required",
        "whether the tool python is refused where the machine does not enforce all of its sandbox",
        choices=("required", "best_effort"),
        read=_TARGET,
    )
    python: PythonToolConfig = section(PythonToolConfig, read="environment.target!=null")

    @property
    def has_tools(self) -> bool:
        """Whether the policy is given tools."""
        return self.target is not None and bool(self.tools or self.mcp)

    @property
    def draws_episodes(self) -> bool:
        """Whether responses are episodes."""
        return self.target is not None or self.has_agent

    @property
    def has_agent(self) -> bool:
        """Whether an agent asks for them through an endpoint."""
        return self.agent is not None or self.agent_command is not None
