"""The commands that the launcher calls: one rank of a role each."""

import argparse
import functools
import signal
from pathlib import Path
from typing import Any

from aligner.cli.command_table import load
from aligner.cli.compositions import composed
from aligner.config.compose import load_config
from aligner.config.prerequisites import plan_run
from aligner.errors import STOP_SIGNAL, ConfigError, Stopped
from aligner.launcher.heartbeats import require_triton
from aligner.launcher.rank_environment import adopt_environment
from aligner.observability.logs import configure_logs
from aligner.observability.timeline import tell_stage
from aligner.placement.roles import server_ranks
from aligner.schema import Config

ROLES = {
    "prepare": "aligner.training.prepare:prepare_run",
    "trainer": "aligner.training.setup:train",
    "generator": "aligner.servers.generator_server:serve_generator",
    "critic": "aligner.servers.critic_server:serve_critic",
    "reward": "aligner.servers.reward_server:serve_reward",
    "teacher": "aligner.servers.teacher_server:serve_teacher",
}
"""`module:function` of what a rank of each role runs. They import torch: after the rank has its
devices, logs and launcher."""


def prepare(parsed: argparse.Namespace) -> None:
    """Make the model's directory; check it, the data and the scorer."""
    config = _start(parsed)
    configure_logs(config.logging.format, "prepare")
    _run("prepare", config)


def train(parsed: argparse.Namespace) -> None:
    """Train to the run's end. Raises Stopped where it was told to stop before that."""
    config = _start(parsed)
    configure_logs(config.logging.format, "trainer")
    tell_stage(config, "trainer", "importing libraries")
    is_finished = _run("trainer", config)
    # the launcher may tell it again, and Python's own end would let it die of that
    signal.signal(STOP_SIGNAL, signal.SIG_IGN)
    if not is_finished:
        raise Stopped("stopped on request after saving a checkpoint")


def serve(parsed: argparse.Namespace) -> None:
    """Serve a role until told to end."""
    groups = [text.partition("=")[2] for text in parsed.overrides if text.startswith("role=")]
    parsed.overrides = [text for text in parsed.overrides if not text.startswith("role=")]
    config = _start(parsed)
    if len(groups) != 1 or groups[0] not in server_ranks(config):
        raise ConfigError(
            f"role={','.join(groups)}: expected exactly one role; allowed:"
            f" {', '.join(server_ranks(config))}"
        )
    configure_logs(config.logging.format, groups[0])
    require_triton(config, groups[0])
    tell_stage(config, groups[0], "importing libraries and loading the model")
    role = groups[0].partition(".")[0]
    replica = groups if role in ("reward", "teacher") else ()
    _run(role, config, *replica)


def _run(role: str, config: Config, *replica: str) -> Any:
    function = load(ROLES[role])
    if config.cluster.deterministic:
        load("aligner.megatron.world:compute_deterministically")()
    return function(config, *replica)


def _start(parsed: argparse.Namespace) -> Config:
    """Take what the launcher or Slurm has set for the rank; returns its configuration, for which
    nothing is run first."""
    adopt_environment()
    if parsed.config is None:
        plan = plan_run(composed(parsed), parsed.config_dir)
        if plan.config.dry_run.scale != "none":
            raise ConfigError(
                f"dry_run.scale={plan.config.dry_run.scale}: is supported only by `aligner launch`"
                " and `aligner validate`"
            )
        if missing := ", ".join(first.name for first in plan.missing):
            raise ConfigError(
                f"{missing}: the run needs the result of this experiment, which has not run yet;"
                " `aligner launch` runs prerequisite experiments first"
            )
        return plan.config
    if parsed.overrides or parsed.config_dir:
        raise ConfigError("--config: cannot be combined with overrides or --config-dir")
    return stored_config(parsed.config)


def stored_config(file: Path) -> Config:
    """`load_config`, which takes a tenth of a second: once for a process and its forks, until the
    file is written anew.

    A launch does so before it starts the trainer again, which is then to go on from a checkpoint.
    """
    written = file.stat() if file.is_file() else None
    return _loaded(file, None if written is None else (written.st_ino, written.st_mtime_ns))


@functools.lru_cache(1)
def _loaded(file: Path, written: tuple[int, int] | None) -> Config:
    return load_config(file)
