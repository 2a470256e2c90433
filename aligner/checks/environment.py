"""Episodes against the engine, and against what draws them."""

from collections.abc import Iterator

from aligner.extras import lacking
from aligner.models.model_source import ExpectedInputs
from aligner.models.shape import ModelShape
from aligner.schema import Config
from aligner.schema.conditions import value_text
from aligner.schema.environment import MATCHING, PYTHON, TOOLS, EnvironmentConfig
from aligner.schema.options import callable_place


def problems(config: Config, model: ModelShape | None, expected: ExpectedInputs) -> Iterator[str]:
    """What no episodes can be drawn with."""
    settings = config.environment
    yield from _agent_problems(config)
    if settings.target is None:
        return
    key = f"environment.target={settings.target}"
    yield from _tool_problems(settings)
    if callable_place(settings.target) is None and settings.target != TOOLS:
        yield f"{key}: must be {TOOLS}, module:Class, or null"
    each = (
        f"environment.deadline_s={settings.deadline_s:g} x"
        f" environment.max_turns={settings.max_turns}"
    )
    longest = settings.deadline_s * settings.max_turns
    yield from _patience_problems(
        config, key, longest, f"may wait {longest:g} s for its environment", each
    )
    if not config.rollout.stop_at_eos and settings.turn_end is None:
        yield (
            f"{key}: a turn would have no end; give rollout.stop_at_eos=true or"
            " environment.turn_end"
        )
    if config.rollout.truncate_token is not None:
        yield (
            f"{key}: rollout.truncate_token={config.rollout.truncate_token!r} would cut episodes;"
            " give null"
        )


def _agent_problems(config: Config) -> Iterator[str]:
    """What agents cannot be trained with."""
    settings, engine, rollout = config.environment, config.engine, config.rollout
    if not settings.has_agent:
        return
    key = "environment.agent" if settings.agent is not None else "environment.agent_command"
    if lack := lacking("agents"):
        yield f"{key}: the endpoint that answers agents: {lack}"
    given = [
        name for name in ("target", "agent", "agent_command") if getattr(settings, name) is not None
    ]
    if len(given) > 1:
        yield (
            f"environment.{' and environment.'.join(given)}: one of them answers the policy; give"
            " null for the others"
        )
    if settings.agent is not None and callable_place(settings.agent) is None:
        yield f"environment.agent={settings.agent}: must be module:function, or null"
    if settings.agent_command == []:
        yield "environment.agent_command=[]: must have a program, or be null"
    if unknown := sorted({*settings.matching} - {*MATCHING}):
        yield f"environment.matching={unknown}: allowed: {', '.join(MATCHING)}"
    if engine.kind != "embedded":
        yield (
            f"{key}: engine.kind={engine.kind}: agents branch, which the embedded engine alone can;"
            " give embedded"
        )
    each = (
        f"environment.deadline_s={settings.deadline_s:g} x (1 +"
        f" environment.retries={settings.retries})"
    )
    longest = settings.deadline_s * (1 + settings.retries)
    yield from _patience_problems(config, key, longest, f"may take {longest:g} s", each)
    refused = {
        "rollout.spare_prompts": (rollout.spare_prompts, 0, "agents are not left behind"),
        "rollout.min_response_tokens": (
            rollout.min_response_tokens,
            0,
            "a turn may end at any token",
        ),
        "rollout.stop_at_eos": (rollout.stop_at_eos, True, "a turn would have no end"),
        "algorithm.replay_routes": (
            config.algorithm.replay_routes,
            False,
            "branches do not tell the experts of their tokens",
        ),
        "rollout.truncate_token": (rollout.truncate_token, None, "it would cut episodes"),
    }
    for name, (value, allowed, why) in refused.items():
        if value != allowed:
            yield f"{key}: {name}={value_text(value)}: {why}; give {value_text(allowed)}"


def _patience_problems(
    config: Config, key: str, longest_s: float, what: str, each: str
) -> Iterator[str]:
    """An episode may last longer than those wait that it keeps waiting; `each` is of what keys its
    seconds are made."""
    patience_s, asked_s = config.cluster.collective_timeout_s, config.server.request_timeout_s
    if config.engine.parallel.ranks > 1 and longest_s > patience_s:
        yield (
            f"{key}: {each}: an episode {what}, and other ranks wait"
            f" cluster.collective_timeout_s={patience_s:g} for it"
        )
    if config.engine.placement == "server" and longest_s >= asked_s:
        yield (
            f"server.request_timeout_s={asked_s:g}: the trainer waits so long for its samples, and"
            f" an episode {what} ({each}); give more"
        )


def _tool_problems(settings: EnvironmentConfig) -> Iterator[str]:
    if settings.target == TOOLS and not settings.has_tools:
        yield (
            f"environment.target={TOOLS}: there are none; name some in environment.tools or"
            " environment.mcp"
        )
    if not settings.has_tools:
        return
    for place in settings.tools:
        if place != PYTHON and callable_place(place) is None:
            yield f"environment.tools: {place!r}: must be {PYTHON}, or module:function"
    if settings.tool_timeout_s >= settings.deadline_s:
        yield (
            f"environment.tool_timeout_s={settings.tool_timeout_s:g}: must be below"
            f" environment.deadline_s={settings.deadline_s:g}, so that the model is told of a tool"
            " that is late"
        )
    if settings.turn_end is not None:
        yield (
            "environment.turn_end: messages go on behind the model's own end-of-turn token alone;"
            " give null with tools"
        )
