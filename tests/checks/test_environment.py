"""Whether episodes are refused where they can not be drawn."""

from __future__ import annotations

import pytest

from aligner.checks.check import check
from aligner.config.compose import compose_config
from aligner.errors import ConfigError

EPISODES = ["experiment=tiny_ppo", "environment.target=aligner.environments.calculator:Calculator", "environment.turn_end=."]


BESIDE = ["engine.placement=server", "rollout.max_staleness=2", "algorithm.truncated_importance=token"]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["actor.parallel.data=2", "engine.parallel.tensor=2", "engine.parallel.data=1"],
        [*BESIDE, "rollout.spare_prompts=1", "engine.parallel.tensor=2", "engine.parallel.data=1"],
    ],
    ids=["colocated", "tensor-parallel", "beside training"],
)
def test_episodes_are_drawn_wherever_samples_are(overrides):
    check(compose_config([*EPISODES, "environment.deadline_s=20", *overrides]))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["environment.target=Calculator"], "environment.target=Calculator: must be module:Class, or null"),
        (
            ["engine.placement=server"],
            "server.request_timeout_s=300: the trainer waits so long for its samples, and an episode may wait 480 s for its",
        ),
        (
            ["actor.parallel.data=2", "engine.parallel.data=2", "environment.deadline_s=90"],
            "an episode may wait 720 s for its environment, and other ranks wait cluster.collective_timeout_s=600 for it",
        ),
        (["environment.turn_end=null"], "a turn would have no end; give rollout.stop_at_eos=true or environment.turn_end"),
        (["rollout.truncate_token=."], "would cut episodes; give null"),
        (["algorithm.trainer=preferences"], "environment.target"),
        (["environment.target=null"], "environment.turn_end"),
    ],
    ids=lambda each: each[-1] if isinstance(each, list) else "",
)
def test_what_episodes_cannot_be_drawn_with_is_refused_by_name(overrides, told):
    with pytest.raises(ConfigError) as caught:
        check(compose_config([*EPISODES, *overrides]))
    assert told in str(caught.value)
