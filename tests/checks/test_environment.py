"""Whether episodes are refused where they can not be drawn."""

from __future__ import annotations

import pytest

from aligner.checks.check import check
from aligner.config.compose import compose_config
from aligner.errors import ConfigError

EPISODES = ["experiment=tiny_ppo", "environment.target=aligner.environments.calculator:Calculator", "environment.turn_end=."]


def test_episodes_are_drawn_on_the_trainers_ranks():
    check(compose_config(EPISODES))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["environment.target=Calculator"], "environment.target=Calculator: must be module:Class, or null"),
        (["engine.placement=server"], "give engine.placement=colocated"),
        (["engine.parallel.tensor=2", "engine.parallel.data=1"], "engine.parallel.tensor=2: must be 1"),
        (
            ["actor.parallel.data=2", "engine.parallel.data=2", "environment.deadline_s=90"],
            "an episode may wait 720 s for its environment, and other ranks wait cluster.collective_timeout_s=600 for it",
        ),
        (["rollout.spare_prompts=1"], "rollout.spare_prompts=1: episodes are not left behind"),
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
