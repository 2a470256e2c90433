"""Gymnasium environments as episodes: actions, observations, seeds and set-up errors."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import gymnasium
import pytest

from aligner.agents.environment_pool import EnvironmentPool
from aligner.agents.gymnasium_environment import GymnasiumEnvironment
from aligner.errors import ConfigError
from aligner.schema.environment import EnvironmentConfig

LAKE = {
    "id": "FrozenLake-v1",
    "arguments": {"render_mode": "ansi", "is_slippery": False},
    "actions": ["left", "down", "right", "up"],
    "bad_action_reward": -0.5,
}
WAY = ("down", "DOWN", "I think that\nright\n", "2", "down", "right")


class Echo(gymnasium.Env[str, str]):
    """Returns the action as observation; terminated by `end`, truncated after three steps."""

    def __init__(self) -> None:
        self.action_space = gymnasium.spaces.Text(8, charset="abcdenxy ")
        self.observation_space = gymnasium.spaces.Text(8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.had = 0
        return f"{(options or {}).get('first', 'go')} {self.np_random.integers(1000)}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.had += 1
        return action, len(action), action == "end", self.had == 3, {}


gymnasium.register("tests/Echo-v0", entry_point=Echo, disable_env_checker=True)


def parsed(text: str) -> str:
    if "!" not in text:
        raise ValueError("put an exclamation mark behind it")
    return text.partition("!")[0]


def play_episode(
    environment: GymnasiumEnvironment, *said: str, seed: int = 1, **task: Any
) -> list[Any]:
    async def play() -> list[Any]:
        answers = [await environment.reset(task, seed)]
        for action in said:
            answers.append(await environment.step(action))
        await environment.close()
        return answers

    return asyncio.run(play())


def test_actions_are_accepted_by_name_or_index() -> None:
    first, *answers = play_episode(GymnasiumEnvironment(**LAKE), *WAY)
    assert first == "\nSFFF\nFHFH\nFFFH\nHFFG\n"
    assert [reward for _, reward, _ in answers] == [0, 0, 0, 0, 0, 1]
    assert [done for _, _, done in answers] == [False] * 5 + [True]
    assert "(Down)" in answers[0][0] and "\x1b" not in answers[0][0]


@pytest.mark.parametrize(
    "said", ["", "jump", "4", "-1", "٣", "²", "9" * 5000, "down right", "left\x00"]
)
def test_invalid_action_changes_nothing(said: str) -> None:
    answers = play_episode(GymnasiumEnvironment(**LAKE), said, *WAY)
    text, reward, done = answers[1]
    assert "is no action; actions are left, down, right, up" in text and len(text) < 200
    assert (reward, done) == (-0.5, False)
    assert answers[-1][1:] == (1.0, True)


def test_truncation_ends_episode_with_text_actions() -> None:
    environment = GymnasiumEnvironment(id="tests/Echo-v0", wording="<{observation}>")
    first, *answers = play_episode(environment, "ab", " b\n", "Q", "c", options={"first": "start"})
    assert first.startswith("<start ")
    assert answers[:2] == [("<ab>", 2.0, False), ("<b>", 1.0, False)]
    assert "'Q' is no action; actions are Text(" in answers[2][0] and answers[2][1:] == (0.0, False)
    assert answers[3] == ("<c>", 1.0, True)
    assert play_episode(GymnasiumEnvironment(id="tests/Echo-v0"), "end")[1] == (
        "\nend\n",
        3.0,
        True,
    )


def test_custom_parser_makes_or_refuses_actions() -> None:
    environment = GymnasiumEnvironment(id="tests/Echo-v0", parser=f"{__name__}:parsed")
    _, refused, taken = play_episode(environment, "end", "end! I said")
    assert refused == ("\nput an exclamation mark behind it\n", 0.0, False)
    assert taken[2]


def test_environment_is_reset_with_episode_seed() -> None:
    firsts = [
        play_episode(GymnasiumEnvironment(id="tests/Echo-v0"), seed=seed)[0] for seed in (1, 2, 1)
    ]
    assert firsts[0] == firsts[2] != firsts[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"id": "FrozenLak-v1"}, r"id=FrozenLak-v1: .*FrozenLake"),
        ({"id": "no_such_module_here:Thing-v0"}, r"no_such_module_here"),
        ({"id": "Pendulum-v1"}, r"the action space is Box\(.*set parser=module:callable"),
        (LAKE | {"actions": ["left", "right"]}, r"must name each action of Discrete\(4\)"),
    ],
)
def test_unusable_gymnasium_environment_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GymnasiumEnvironment(**arguments)


def test_gymnasium_environment_runs_in_pool_workers() -> None:
    target = "aligner.agents.gymnasium_environment:GymnasiumEnvironment"
    pool = EnvironmentPool(target, LAKE, EnvironmentConfig(retries=0))
    with contextlib.closing(pool):
        pool.start()
        assert pool.reset("a", {}, 3).result().observation.startswith("\nSFFF")
        assert [pool.step("a", action).result().reward for action in WAY][-1] == 1.0
