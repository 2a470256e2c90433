"""The tools of a configuration: their list, their schemas for the model, and their environment."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from aligner.agents.function_tools import import_tool_function
from aligner.agents.mcp_servers import list_server_tools
from aligner.agents.python_sandbox import PythonSandbox
from aligner.agents.tool_environment import ToolEnvironment
from aligner.agents.tool_protocol import ListedTool
from aligner.data.tokenizer import Tokenizer
from aligner.data.tool_calls import build_tool_schema, detect_tool_format
from aligner.errors import ConfigError
from aligner.schema import Config
from aligner.schema.environment import PYTHON, TOOLS, EnvironmentConfig
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


def detect_sandbox(settings: EnvironmentConfig) -> tuple[PythonSandbox, list[str]]:
    """Return the sandbox of the tool `python`, and the gaps that `find_gaps` has found in it.

    Raises ConfigError if the sandbox is incomplete and `environment.sandbox=required`.
    """
    sandbox = PythonSandbox.detect(settings.python)
    gaps = sandbox.find_gaps()
    if gaps and settings.sandbox == "required":
        raise ConfigError(
            f"environment.tools: {PYTHON}: this machine does not enforce the sandbox:"
            f" {'; '.join(gaps)}. Install bubblewrap (pip install 'aligner[sandbox]') on a machine"
            " that allows user namespaces, or set environment.sandbox=best_effort to run without"
            " full isolation"
        )
    return sandbox, gaps


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
        ConfigError: The chat template supports no tool calls, or `detect_sandbox` raises it.
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
    isolation = detect_sandbox(settings)[0].isolation if PYTHON in settings.tools else "none"
    # Keyword arguments of `ToolEnvironment`, as JSON values. The episode journal identifies the
    # environment by them, so their names must not change between versions.
    tool_arguments = {
        "form": tool_format,
        "tools": [asdict(tool) for tool in tools],
        "timeout_s": settings.tool_timeout_s,
        "most_calls": settings.tool_calls,
        "tool_characters": settings.tool_characters,
        "most_characters": settings.max_characters,
        "isolation": isolation,
        "python": asdict(settings.python),
    }
    target = settings.target
    if target == TOOLS:
        target = f"{ToolEnvironment.__module__}:{ToolEnvironment.__qualname__}"
    return replace(settings, target=target, arguments={**settings.arguments, **tool_arguments})


def describe_tools(settings: EnvironmentConfig) -> list[str]:
    """Return the lines of `aligner validate` about the tools and about gaps of the sandbox.

    Raises ConfigError like `list_tools` and `detect_sandbox`.
    """
    lines = [f"tool {tool.name}: {tool.place}" for tool in list_tools(settings)]
    if PYTHON in settings.tools:
        _, gaps = detect_sandbox(settings)
        lines += [
            f"note: environment.sandbox={settings.sandbox}: not enforced on this machine: {gap}"
            for gap in gaps
        ]
    return lines
