"""Checks of `environment`: settings that are incompatible with episodes or agents."""

from __future__ import annotations

import pytest

from aligner.checks.check import check
from aligner.checks.environment import find_problems
from aligner.config.compose import compose_config
from aligner.errors import ConfigError
from aligner.models.model_source import NOTHING_EXPECTED

EPISODES = [
    "experiment=tiny_ppo",
    "environment.target=aligner_examples.calculator:Calculator",
    "environment.turn_end=.",
]


ASYNCHRONOUS = [
    "engine.placement=server",
    "rollout.max_staleness=2",
    "algorithm.truncated_importance=token",
]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["actor.parallel.data=2", "engine.parallel.tensor=2", "engine.parallel.data=1"],
        [
            *ASYNCHRONOUS,
            "rollout.spare_prompts=1",
            "engine.parallel.tensor=2",
            "engine.parallel.data=1",
        ],
    ],
    ids=["colocated", "tensor-parallel", "beside training"],
)
def test_episodes_are_accepted_in_every_placement(overrides):
    check(compose_config([*EPISODES, "environment.deadline_s=20", *overrides]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["environment.target=Calculator"],
            "environment.target=Calculator: must be tools, module:Class, or null",
        ),
        (
            ["engine.placement=server"],
            (
                "server.request_timeout_s=300: must be above 480, because an episode may wait 480"
                " s for its"
            ),
        ),
        (
            ["actor.parallel.data=2", "engine.parallel.data=2", "environment.deadline_s=90"],
            (
                "an episode may wait 720 s for its environment (environment.deadline_s=90 x"
                " environment.max_turns=8), but the other ranks wait only"
                " cluster.collective_timeout_s=600 s for an episode"
            ),
        ),
        (
            ["environment.turn_end=null"],
            (
                "with rollout.stop_at_eos=false no token ends a turn; set"
                " rollout.stop_at_eos=true, rollout.stop or environment.turn_end"
            ),
        ),
        (["rollout.truncate_token=."], "would cut episodes short; set rollout.truncate_token=null"),
        (["algorithm.trainer=preferences"], "environment.target"),
        (["environment.target=null"], "environment.turn_end"),
        (
            ["environment.target=tools"],
            "environment.target=tools: no tools are set; set environment.tools",
        ),
        (
            ["environment.tools=[calculator]"],
            "environment.tools: 'calculator': must be python, bash, or module:function",
        ),
        (
            ["environment.sandbox_url='host:8100'"],
            "environment.sandbox_url=host:8100: must be a URL such as http://HOST:8100",
        ),
        (
            ["environment.tools=[python]"],
            (
                "must be null with tools, because a conversation continues only after the model's"
                " own end-of-turn token"
            ),
        ),
        (
            ["environment.mcp=[server]", "environment.tool_timeout_s=60"],
            "environment.tool_timeout_s=60: must be below environment.deadline_s=60",
        ),
        (
            ["environment.target=null", "environment.turn_end=null", "environment.python.cpu_s=3"],
            "environment.python.cpu_s",
        ),
    ],
    ids=lambda each: each[-1] if isinstance(each, list) else "",
)
def test_key_incompatible_with_episodes_is_refused(overrides, message):
    with pytest.raises(ConfigError) as caught:
        check(compose_config([*EPISODES, *overrides]))
    assert message in str(caught.value)


AGENTS = [
    "experiment=tiny_ppo",
    "rollout.stop_at_eos=true",
    "environment.agent=tests.agents.openai_agents:calculates",
]


def test_agents_are_accepted_with_every_engine():
    for engine in ("vllm", "tensorrt_llm"):
        problems = find_problems(
            compose_config([*AGENTS, f"engine={engine}"]), None, NOTHING_EXPECTED
        )
        assert [*problems] == []
    check(compose_config(AGENTS))
    check(compose_config([*AGENTS, *ASYNCHRONOUS]))
    check(
        compose_config(
            [
                *AGENTS,
                "actor.parallel.tensor=2",
                "engine.parallel.tensor=2",
                "engine.parallel.data=1",
            ]
        )
    )
    check(
        compose_config(
            [
                *AGENTS[:2],
                "environment.agent_command=[true]",
                "environment.matching=[whitespace,reasoning]",
            ]
        )
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["environment.agent=calculates"],
            "environment.agent=calculates: must be module:function, or null",
        ),
        (
            ["environment.agent_command=[true]"],
            "environment.agent and environment.agent_command: only one of these keys can be set",
        ),
        (
            ["environment.agent=null", "environment.agent_command=[]"],
            "environment.agent_command=[]: must contain a program",
        ),
        (
            ["environment.matching=[case]"],
            "environment.matching=['case']: allowed: arguments, reasoning, whitespace",
        ),
        (
            ["engine.placement=server", "environment.deadline_s=150"],
            "because an episode may take 300 s (environment.deadline_s",
        ),
        (
            ["rollout.stop_at_eos=false"],
            "rollout.stop_at_eos=false: no token would end a turn; set rollout.stop_at_eos=true",
        ),
        (
            ["rollout.min_response_tokens=2"],
            (
                "rollout.min_response_tokens=2: a turn may end at any token; set"
                " rollout.min_response_tokens=0"
            ),
        ),
        (
            ["actor.parallel.data=2", "engine.parallel.data=2", "environment.deadline_s=301"],
            (
                "an episode may take 602 s (environment.deadline_s=301 x (1 +"
                " environment.retries=1)), but the other ranks wait only"
                " cluster.collective_timeout_s=600 s for an episode"
            ),
        ),
    ],
    ids=lambda each: each[-1] if isinstance(each, list) else "",
)
def test_key_incompatible_with_agents_is_refused(overrides, message):
    with pytest.raises(ConfigError) as caught:
        check(compose_config([*AGENTS, *overrides]))
    assert message in str(caught.value)
