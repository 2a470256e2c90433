"""The reward role: whatever scores, behind Triton."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aligner.errors import ConfigError
from aligner.schema import Config
from aligner.schema.reward_sources import has_reward_model
from aligner.servers.backend import ValueModel
from aligner.servers.protocol import PROTOCOL_VERSION
from aligner.servers.scoring import Scoring, build_scoring
from aligner.servers.serving import serve_role


def serve_reward(config: Config, group: str = "reward") -> None:
    """One rank of the reward server, or of the replica that `group` names, until it is told to stop."""
    if has_reward_model(config.reward):
        from aligner.megatron.value_model import build_reward_model
        from aligner.megatron.world import initialize, shutdown

        world = initialize(config.reward.parallel, config.seed, config.cluster.collective_timeout_s)
        run_reward(config, build_scoring(config, lambda directory: build_reward_model(config, directory, world)), group)
        shutdown()  # the groups' threads would abort an interpreter that ends under them
    elif config.reward.parallel.ranks == 1:
        run_reward(config, build_scoring(config, _no_model), group)
    else:
        raise ConfigError(f"reward.parallel: {config.reward.parallel.ranks} ranks, must be 1 without a reward model")


def run_reward(config: Config, scoring: Scoring, group: str = "reward") -> None:
    """Serve the scores; every rank of their world calls this."""
    serve_role(group, config, {**scoring.handlers, "version": _version}, scoring.endpoints, ("version",), scoring.limits)


def _no_model(directory: Path) -> ValueModel:
    raise AssertionError(f"no source of the reward is a model, but one is in {directory}")


def _version() -> dict[str, Any]:
    return {"protocol": PROTOCOL_VERSION, "version": 0}
