"""Checks of the section `environment`: environments, tools and agents.

The checks compare these settings with the engine, the sampling settings and the timeouts.
"""

from collections.abc import Iterator

from aligner.extras import describe_missing_modules
from aligner.models.model_source import ExpectedInputs
from aligner.models.shape import ModelShape
from aligner.schema import Config
from aligner.schema.conditions import format_value
from aligner.schema.environment import (
    BASH,
    MATCHING_CHOICES,
    PYTHON,
    TOOLS,
    EnvironmentConfig,
)
from aligner.values import split_callable_name


def find_problems(
    config: Config, model: ModelShape | None, expected: ExpectedInputs
) -> Iterator[str]:
    """Yield a line for each reason why the run cannot generate episodes."""
    settings = config.environment
    yield from _find_agent_problems(config)
    if settings.target is None:
        return
    key = f"environment.target={settings.target}"
    yield from _find_tool_problems(settings)
    if split_callable_name(settings.target) is None and settings.target != TOOLS:
        yield f"{key}: must be {TOOLS}, module:Class, or null"
    # The deadline applies to each call of the environment, and each turn is one call.
    formula = (
        f"environment.deadline_s={settings.deadline_s:g} x"
        f" environment.max_turns={settings.max_turns}"
    )
    max_duration_s = settings.deadline_s * settings.max_turns
    yield from _find_timeout_problems(
        config, key, max_duration_s, f"may wait {max_duration_s:g} s for its environment", formula
    )
    rollout = config.rollout
    if not (rollout.stop_at_eos or rollout.stop or settings.turn_end is not None):
        yield (
            f"{key}: with rollout.stop_at_eos=false no token ends a turn; set"
            " rollout.stop_at_eos=true, rollout.stop or environment.turn_end"
        )
    if config.rollout.truncate_token is not None:
        yield (
            f"{key}: is not supported with"
            f" rollout.truncate_token={config.rollout.truncate_token!r}, which would cut episodes"
            " short; set rollout.truncate_token=null"
        )


def _find_agent_problems(config: Config) -> Iterator[str]:
    """Yield settings with which agents cannot be trained."""
    settings = config.environment
    rollout = config.rollout
    if not settings.has_agent:
        return
    key = _get_agent_key(settings)
    yield from find_agent_key_problems(settings)
    # The deadline applies to a whole episode of an agent, and a failed episode is retried.
    formula = (
        f"environment.deadline_s={settings.deadline_s:g} x (1 +"
        f" environment.retries={settings.retries})"
    )
    max_duration_s = settings.deadline_s * (1 + settings.retries)
    yield from _find_timeout_problems(
        config, key, max_duration_s, f"may take {max_duration_s:g} s", formula
    )

    # For each key: its value, the value that agents require, and the reason.
    requirements = {
        "rollout.min_response_tokens": (
            rollout.min_response_tokens,
            0,
            "a turn may end at any token",
        ),
        "rollout.stop_at_eos": (rollout.stop_at_eos, True, "no token would end a turn"),
        "algorithm.routing_replay": (
            config.algorithm.routing_replay,
            False,
            "branches do not record expert routing",
        ),
        "rollout.truncate_token": (
            rollout.truncate_token,
            None,
            "the token would cut episodes short",
        ),
    }
    for name, (value, allowed, reason) in requirements.items():
        if value != allowed:
            yield (
                f"{key}: is not supported with {name}={format_value(value)}: {reason}; set"
                f" {name}={format_value(allowed)}"
            )


def find_agent_key_problems(settings: EnvironmentConfig) -> Iterator[str]:
    """Yield problems of the keys of an agent that do not depend on other sections."""
    if not settings.has_agent:
        return
    if missing_extra := describe_missing_modules("agents"):
        yield f"{_get_agent_key(settings)}: {missing_extra}"
    names = [
        name for name in ("target", "agent", "agent_command") if getattr(settings, name) is not None
    ]
    if len(names) > 1:
        yield (
            f"environment.{' and environment.'.join(names)}: only one of these keys can be set;"
            " set the other keys to null"
        )
    if settings.agent is not None and split_callable_name(settings.agent) is None:
        yield f"environment.agent={settings.agent}: must be module:function, or null"
    if settings.agent_command == []:
        yield "environment.agent_command=[]: must contain a program, or be null"
    if unknown_values := sorted({*settings.matching} - {*MATCHING_CHOICES}):
        yield f"environment.matching={unknown_values}: allowed: {', '.join(MATCHING_CHOICES)}"


def _get_agent_key(settings: EnvironmentConfig) -> str:
    """Return the key that selects the agent."""
    return "environment.agent" if settings.agent is not None else "environment.agent_command"


def _find_timeout_problems(
    config: Config, key: str, max_duration_s: float, description: str, formula: str
) -> Iterator[str]:
    """Yield problems if an episode may last longer than the other ranks or the trainer wait.

    Args:
        config: Configuration of the run.
        key: Key that selects the environment or the agent, with its value.
        max_duration_s: Maximum duration of an episode in seconds.
        description: Description of the duration, for the messages.
        formula: Keys from which `max_duration_s` is computed, for the messages.
    """
    collective_s = config.cluster.collective_timeout_s
    request_s = config.server.request_timeout_s
    if config.engine.parallel.ranks > 1 and max_duration_s > collective_s:
        yield (
            f"{key}: an episode {description} ({formula}), but the other ranks wait only"
            f" cluster.collective_timeout_s={collective_s:g} s for an episode; set"
            f" cluster.collective_timeout_s to at least {max_duration_s:g}"
        )
    if config.engine.placement == "server" and max_duration_s >= request_s:
        yield (
            f"server.request_timeout_s={request_s:g}: must be above {max_duration_s:g}, because an"
            f" episode {description} ({formula})"
        )


def _find_tool_problems(settings: EnvironmentConfig) -> Iterator[str]:
    """Yield problems of the tools of an environment."""
    if settings.target == TOOLS and not settings.has_tools:
        yield (
            f"environment.target={TOOLS}: no tools are set; set environment.tools or"
            " environment.mcp"
        )
    url = settings.sandbox_url
    if url is not None and not url.startswith(("http://", "https://")):
        yield f"environment.sandbox_url={url}: must be a URL such as http://HOST:8100"
    if not settings.has_tools:
        return
    for tool in settings.tools:
        if tool not in (PYTHON, BASH) and split_callable_name(tool) is None:
            yield f"environment.tools: {tool!r}: must be {PYTHON}, {BASH}, or module:function"
    if settings.tool_timeout_s >= settings.deadline_s:
        yield (
            f"environment.tool_timeout_s={settings.tool_timeout_s:g}: must be below"
            f" environment.deadline_s={settings.deadline_s:g}, so that the timeout of a tool can"
            " be reported to the model"
        )
    if settings.turn_end is not None:
        yield (
            f"environment.turn_end={settings.turn_end}: must be null with tools, because a"
            " conversation continues only after the model's own end-of-turn token"
        )
