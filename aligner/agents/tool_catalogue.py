"""The tools of a configuration: their list, their schemas for the model, and their environment."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from aligner.agents.failures import InfrastructureError
from aligner.agents.function_tools import import_tool_function
from aligner.agents.mcp_servers import list_server_tools
from aligner.agents.sandboxes import SandboxSettings, create_sandbox
from aligner.agents.sandboxes.bubblewrap import Bubblewrap
from aligner.agents.sandboxes.sandbox import Isolation
from aligner.agents.sandboxes.sandbox_limits import Gap, describe_missing_groups, list_remedies
from aligner.agents.tool_environment import ToolEnvironment
from aligner.agents.tool_protocol import ListedTool
from aligner.data.tokenizer import Tokenizer
from aligner.data.tool_calls import build_tool_schema, detect_tool_format
from aligner.errors import ConfigError
from aligner.schema import Config
from aligner.schema.environment import BASH, PYTHON, TOOLS, EnvironmentConfig
from aligner.schema.evaluation_suites import Suite

_PYTHON_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": PYTHON,
        "description": (
            "Runs a Python program and returns what it prints. Each call is a program of its own:"
            " variables and files of earlier ones are gone. There is no network."
        ),
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program."}},
            "required": ["code"],
        },
    },
}
_BASH_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": BASH,
        "description": (
            "Runs a bash command and returns what it prints. Files of earlier commands are kept;"
            " variables, the working directory and processes are not. There is no network."
        ),
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command."}},
            "required": ["command"],
        },
    },
}


def list_tools(settings: EnvironmentConfig) -> list[ListedTool]:
    """Return all configured tools, in the order of the configuration.

    MCP servers are started to list their tools, and stopped again.

    Raises:
        ConfigError: A tool does not exist or has no schema for a model, a server does not start, or
            two tools have the same name.
    """
    tools: list[ListedTool] = []
    for source in settings.tools:
        try:
            if source == PYTHON:
                tools.append(ListedTool("python", source, _PYTHON_SCHEMA))
            elif source == BASH:
                tools.append(ListedTool("bash", source, _BASH_SCHEMA))
            else:
                schema = build_tool_schema(import_tool_function(source))
                tools.append(ListedTool("function", source, schema))
        except ConfigError as error:
            raise ConfigError(f"environment.tools: {source}: {error}") from error
    for server in settings.mcp:
        try:
            tools += list_server_tools(server)
        except ConfigError as error:
            raise ConfigError(f"environment.mcp: {server}: {error}") from error

    # the model calls a tool by its name alone
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            sources = " and ".join(tool.place for tool in tools if tool.name == name)
            raise ConfigError(
                f"environment.tools, environment.mcp: several tools are named {name!r}: {sources};"
                " names must be unique"
            )
    return tools


def list_suite_tools(
    config: Config, suite: Suite, training_tools: Sequence[ListedTool]
) -> Sequence[ListedTool]:
    """Return the tools of an evaluation suite.

    Args:
        config: Configuration of the run.
        suite: The evaluation suite.
        training_tools: The tools of the section `environment`, which a suite may inherit.

    Raises:
        ConfigError: See `list_tools`.
    """
    if suite.environment == config.environment:
        return training_tools
    with suite.renaming_environment_keys():
        return list_tools(suite.environment)


def tool_schemas(tools: Sequence[ListedTool]) -> list[dict[str, Any]] | None:
    """Return the tools' schemas for the chat template; None if there are no tools."""
    # Some chat templates write a header of tools even for an empty list.
    return [tool.schema for tool in tools] or None


def detect_isolation(settings: EnvironmentConfig) -> tuple[Isolation, list[Gap]]:
    """Return the isolation of sandboxes on this machine, and the gaps that have been found in it.

    Raises ConfigError if the isolation is incomplete and `environment.sandbox=required`.
    """
    bubblewrap = Bubblewrap.detect(settings.python)
    gaps = bubblewrap.find_gaps()
    if gaps and settings.sandbox == "required":
        lines = "".join(f"  {gap}\n" for gap in gaps)
        raise ConfigError(
            f"environment.tools: {', '.join(_find_sandbox_tools(settings))}: this machine does not"
            f" enforce these limits of the sandbox:\n{lines}To enforce them, {list_remedies(gaps)};"
            " or set environment.sandbox=best_effort to run without these limits"
        )
    return bubblewrap.isolation, gaps


def _find_sandbox_tools(settings: EnvironmentConfig) -> list[str]:
    """Return the tools of the configuration that run programs in a sandbox."""
    return [tool for tool in settings.tools if tool in (PYTHON, BASH)]


def _is_local(settings: EnvironmentConfig) -> bool:
    """Return whether sandboxes run under bubblewrap on this machine."""
    return settings.sandbox_image is None and settings.sandbox_url is None


def with_tool_arguments(
    settings: EnvironmentConfig, tools: Sequence[ListedTool], tokenizer: Tokenizer
) -> EnvironmentConfig:
    """Return the settings for an `EnvironmentPool`, with the tools in the class's arguments.

    Args:
        settings: The section `environment` of the configuration; returned unchanged if it has no
            tools.
        tools: The tools that `list_tools` has returned.
        tokenizer: Tokenizer of the policy, whose chat template determines the tool call format.

    Raises:
        ConfigError: The chat template supports no tool calls, or `detect_isolation` raises
            it.
    """
    if not settings.has_tools:
        return settings
    tool_format = detect_tool_format(tokenizer)
    if tool_format is None:
        raise ConfigError(
            "environment.tools: the model's chat template does not write tool calls in a supported"
            " format"
        )

    # Detected here, not in each environment, because the detection starts several processes.
    isolation: Isolation = "none"
    if _find_sandbox_tools(settings) and _is_local(settings):
        isolation, _ = detect_isolation(settings)
    # Keyword arguments of `ToolEnvironment`, as JSON values. The episode journal identifies the
    # environment by them, so their names must not change between versions.
    tool_arguments: dict[str, Any] = {
        "form": tool_format,
        "tools": [asdict(tool) for tool in tools],
        "timeout_s": settings.tool_timeout_s,
        "most_calls": settings.tool_calls,
        "tool_characters": settings.tool_characters,
        "most_characters": settings.max_characters,
        "isolation": isolation,
        "python": asdict(settings.python),
    }
    if not _is_local(settings):
        tool_arguments["sandbox_image"] = settings.sandbox_image
        tool_arguments["sandbox_url"] = settings.sandbox_url
    target = settings.target
    if target == TOOLS:
        target = f"{ToolEnvironment.__module__}:{ToolEnvironment.__qualname__}"
    return replace(settings, target=target, arguments={**settings.arguments, **tool_arguments})


def describe_tools(settings: EnvironmentConfig) -> list[str]:
    """Return the lines of `aligner validate` about the tools and about gaps of the sandbox.

    Raises ConfigError like `list_tools` and `detect_isolation`, or if a sandbox in a container or
    on a server does not start.
    """
    lines = [f"tool {tool.name}: {tool.place}" for tool in list_tools(settings)]
    if not _find_sandbox_tools(settings):
        return lines
    if not _is_local(settings):
        try:
            asyncio.run(_try_sandbox(SandboxSettings.from_config(settings)))
        except InfrastructureError as error:
            raise ConfigError(str(error)) from error
        return lines
    _, gaps = detect_isolation(settings)
    lines += [
        f"note: environment.sandbox={settings.sandbox}: not enforced on this machine: {gap}"
        for gap in gaps
    ]
    if gaps:
        lines.append(f"note: to enforce these limits, {list_remedies(gaps)}")
    if missing_group := describe_missing_groups(settings.python):
        lines.append(f"note: environment.python: {missing_group}")
    return lines


async def _try_sandbox(settings: SandboxSettings) -> None:
    """Start and close a sandbox. Raises InfrastructureError if it does not start."""
    sandbox = await create_sandbox(settings=settings)
    await sandbox.close()
