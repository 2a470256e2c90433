"""Keys of multi-turn episodes, tools and agents: section `environment`."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.options import option, section

MATCHING_CHOICES = ("arguments", "reasoning", "whitespace")
"""Allowed values of `environment.matching`: changes that an agent may make to the messages of a
conversation without starting a new branch."""
TOOLS = "tools"
"""Value of `environment.target` for the environment that runs tools."""
PYTHON = "python"
"""Name of the tool that runs Python programs, each in a sandbox of its own."""
BASH = "bash"
"""Name of the tool that runs shell commands in the sandbox of the episode."""
# Evaluation suites inherit the keys of the section, and may have an environment that it has not.
_HAS_SUITES = "evaluation.suites!={}"
_HAS_TARGET = f".target!=null or {_HAS_SUITES}"
_HAS_AGENT = f".agent!=null or .agent_command!=null or {_HAS_SUITES}"
_HAS_EPISODES = f".target!=null or {_HAS_AGENT}"


@dataclass
class PythonToolConfig:
    """Resource limits of a sandbox, in which the tools `python` and `bash` run programs."""

    cpu_s: int = option(10, "Maximum CPU time of each process in seconds.", minimum=1)
    memory_mib: int = option(
        1024,
        "Maximum address space of each process in MiB; in a container, and where aligner can create"
        " control groups, also the memory of all processes together.",
        minimum=128,
    )
    processes: int = option(
        16, "Maximum number of processes and threads at the same time.", minimum=2
    )
    scratch_mib: int = option(
        64,
        "Maximum size in MiB of the sandbox's files, and of a program's output. There may be 1024"
        " files per MiB. In a container, only the output is limited.",
        minimum=1,
    )


@dataclass
class EnvironmentConfig:
    """Environment or agent of multi-turn episodes. Without an environment or agent, each
    response is a single turn."""

    target: str | None = option(
        None,
        "`tools` for the built-in environment with tools, or `module:Class` for your own"
        " environment; null means no environment.",
    )
    arguments: dict[str, Any] = option(
        {}, "Keyword arguments of the environment class.", read_if=_HAS_TARGET
    )
    agent: str | None = option(
        None,
        "Agent function `module:function` that uses an OpenAI client; may be async. The"
        " function is called with the task, `base_url` and `api_key` for each episode. Null"
        " means no agent function.",
    )
    agent_command: list[str] | None = option(
        None,
        "Command that runs an agent. The agent reads the task as JSON from its standard input,"
        " and the endpoint from the environment variables `OPENAI_BASE_URL` and"
        " `OPENAI_API_KEY`. Null means no agent command.",
    )
    matching: list[str] = option(
        ["arguments"],
        "Changes to earlier messages that an agent may make without starting a new branch."
        " `arguments`: different JSON formatting of tool-call arguments; `reasoning`: omitted"
        " reasoning; `whitespace`: different spaces and line endings.",
        read_if=_HAS_AGENT,
    )
    endpoint_host: str = option(
        "127.0.0.1", "Host address of the endpoint that agents connect to.", read_if=_HAS_AGENT
    )
    max_turns: int = option(
        8,
        "Maximum number of policy turns per episode; a longer episode is truncated.",
        minimum=1,
        read_if=_HAS_EPISODES,
    )
    max_untrained_requests: int = option(
        1000,
        "Maximum number of answers per episode of an agent to requests with the header"
        " `X-Aligner-Train: false`; an episode that requests more is truncated.",
        minimum=0,
        read_if=_HAS_AGENT,
    )
    max_turn_tokens: int = option(
        64,
        "Maximum length of a policy turn in tokens; a longer turn truncates the episode."
        " `rollout.max_response_tokens` limits the total length of all turns and observations.",
        minimum=1,
        read_if=_HAS_EPISODES,
    )
    turn_end: str | None = option(
        None,
        "Text of a single token that ends a turn, in addition to the end-of-sequence token;"
        " null means no additional token.",
        read_if=_HAS_TARGET,
    )
    workers: int = option(
        1,
        "Number of processes per engine replica that run environments.",
        minimum=1,
        read_if=_HAS_EPISODES,
    )
    episodes_per_worker: int = option(
        64,
        "Maximum number of concurrent episodes per process; further episodes wait.",
        minimum=1,
        read_if=_HAS_EPISODES,
    )
    deadline_s: float = option(
        60.0,
        "Timeout in seconds of one environment call, or of the whole episode of an agent.",
        above=0,
        read_if=_HAS_EPISODES,
    )
    memory_mib: int | None = option(
        None,
        "Maximum address space of a process in MiB; null means no limit.",
        minimum=64,
        read_if=_HAS_EPISODES,
    )
    retries: int = option(
        1,
        "Number of retries of an episode whose environment or agent failed. A new environment"
        " replays the earlier calls of the episode, and the episode continues; an agent starts"
        " again. If all retries fail, the prompt is skipped and counted in `rollout/skipped`.",
        minimum=0,
        read_if=_HAS_EPISODES,
    )
    failure_reward: float | None = option(
        None,
        "Reward of a failure that the policy may have caused: an exception, an invalid answer, a"
        " nonzero exit code or a timeout after a turn of the policy. The episode then ends with"
        " its turns, without a retry. An agent that has rewarded the episode keeps that reward"
        " instead. Null means that the episode is retried and then left out.",
        read_if=_HAS_EPISODES,
    )
    max_characters: int = option(
        100_000,
        "Maximum length in characters of an environment's answer, or of one request from an agent.",
        minimum=1,
        read_if=_HAS_EPISODES,
    )
    tools: list[str] = option(
        [],
        "Tools that the policy may call: your own functions as `module:function`; `python`, which"
        " runs each program in a new sandbox; and `bash`, which runs commands in the sandbox of the"
        " episode.",
        read_if=_HAS_TARGET,
    )
    mcp: list[str] = option(
        [],
        "MCP servers (Model Context Protocol) whose tools the policy may call. Each entry is a"
        " command that starts a server, or the URL of a server.",
        read_if=_HAS_TARGET,
    )
    tool_timeout_s: float = option(
        20.0,
        "Timeout of a tool call in seconds. After a timeout, the policy gets an error as the"
        " tool's answer.",
        above=0,
        read_if=_HAS_TARGET,
    )
    tool_characters: int = option(
        8_000,
        "Maximum length of a tool's answer in characters. The middle of a longer answer is cut"
        " out.",
        minimum=100,
        read_if=_HAS_TARGET,
    )
    tool_calls: int = option(
        8,
        "Maximum number of tool calls per turn. The calls run in parallel; further calls are"
        " rejected.",
        minimum=1,
        read_if=_HAS_TARGET,
    )
    sandbox: str = option(
        "required",
        "Requirement for sandboxes under bubblewrap. `required`: an error if the machine cannot"
        " enforce the whole sandbox; `best_effort`: programs run with the protection that the"
        " machine can enforce.",
        choices=("required", "best_effort"),
        read_if=_HAS_EPISODES,
    )
    sandbox_image: str | None = option(
        None,
        "Container image of the sandboxes, which podman or docker starts; null means sandboxes"
        " under bubblewrap, with the programs of this machine.",
        read_if=_HAS_EPISODES,
    )
    sandbox_url: str | None = option(
        None,
        "URL of a server that `aligner serve-sandboxes` has started on another machine; null means"
        " sandboxes on this machine.",
        read_if=_HAS_EPISODES,
    )
    python: PythonToolConfig = section(
        PythonToolConfig,
        read_if=(
            "environment.target!=null or environment.agent!=null"
            f" or environment.agent_command!=null or {_HAS_SUITES}"
        ),
    )

    @property
    def has_tools(self) -> bool:
        """Whether the policy can call tools."""
        return self.target is not None and bool(self.tools or self.mcp)

    @property
    def has_episodes(self) -> bool:
        """Whether responses are multi-turn episodes."""
        return self.target is not None or self.has_agent

    @property
    def has_agent(self) -> bool:
        """Whether an agent requests the turns of an episode through an endpoint."""
        return self.agent is not None or self.agent_command is not None
