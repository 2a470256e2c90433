"""The tools of a configuration: what there is, as the model is told of it, and the environment that
runs them."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from aligner.agents.function_tools import tool_function
from aligner.agents.mcp_servers import listed_tools
from aligner.agents.python_sandbox import PythonSandbox
from aligner.agents.tool_environment import ToolEnvironment
from aligner.agents.tool_protocol import ListedTool
from aligner.data.tokenizer import Tokenizer
from aligner.data.tool_calls import build_tool_schema, detect_tool_format
from aligner.errors import ConfigError
from aligner.schema.environment import PYTHON, TOOLS, EnvironmentConfig

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
    """All tools, in the order in which they are named; servers are started for that, and ended.

    Raises ConfigError for one that is not there or cannot be told to a model, and for two of one
    name.
    """
    found: list[ListedTool] = []
    for place in settings.tools:
        try:
            if place == PYTHON:
                found.append(ListedTool("python", place, _PYTHON_SCHEMA))
            else:
                found.append(ListedTool("function", place, build_tool_schema(tool_function(place))))
        except ConfigError as error:
            raise ConfigError(f"environment.tools: {place}: {error}") from error
    for server in settings.mcp:
        try:
            found += listed_tools(server)
        except ConfigError as error:
            raise ConfigError(f"environment.mcp: {server}: {error}") from error
    names = [tool.name for tool in found]
    for name in names:
        if names.count(name) > 1:
            places = " and ".join(tool.place for tool in found if tool.name == name)
            raise ConfigError(
                f"environment.tools, environment.mcp: several tools are named {name!r}: {places};"
                " names must be unique"
            )
    return found


def tool_schemas(tools: Sequence[ListedTool]) -> list[dict[str, Any]] | None:
    """The tools as prompts tell the model of them; None without any."""
    return [tool.schema for tool in tools] or None


def sandbox_here(settings: EnvironmentConfig) -> tuple[PythonSandbox, list[str]]:
    """The sandbox of the tool `python` on this machine, and what of it the machine does not
    enforce.

    Raises ConfigError where that is anything and `environment.sandbox` does not accept it.
    """
    sandbox = PythonSandbox.here(settings.python)
    gaps = sandbox.gaps()
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
    """The environment with the tools that `list_tools` has found in its arguments, as an
    `EnvironmentPool` takes it.

    As it is without any. Raises ConfigError as `sandbox_here`, and for a model whose chat template
    writes no tool calls.
    """
    if not settings.has_tools:
        return settings
    form = detect_tool_format(tokenizer)
    if form is None:
        raise ConfigError(
            "environment.tools: the model's chat template does not write tool calls in a supported"
            " format"
        )
    isolation = sandbox_here(settings)[0].isolation if PYTHON in settings.tools else "none"
    given = {
        "form": form,
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
    return replace(settings, target=target, arguments={**settings.arguments, **given})


def describe_tools(settings: EnvironmentConfig) -> list[str]:
    """What `aligner validate` says of the tools, a line each, with what the machine does not
    enforce of the sandbox.

    Raises ConfigError as `list_tools` and `sandbox_here`.
    """
    lines = [f"tool {tool.name}: {tool.place}" for tool in list_tools(settings)]
    if PYTHON in settings.tools:
        _, gaps = sandbox_here(settings)
        lines += [
            f"note: environment.sandbox={settings.sandbox}: not enforced on this machine: {gap}"
            for gap in gaps
        ]
    return lines
