"""The commands that the launcher starts for each rank: `prepare`, `train` and `serve`."""

import argparse
import functools
import gc
import signal
import sys
from pathlib import Path
from typing import Any

from aligner.cli.command_table import load
from aligner.cli.compositions import compose_command
from aligner.config.compose import load_own_config
from aligner.config.prerequisites import plan_run
from aligner.errors import STOP_SIGNAL, ConfigError, Stopped
from aligner.extras import describe_missing_modules, describe_numpy_conflict
from aligner.launcher.heartbeats import require_triton_for_heartbeat
from aligner.launcher.rank_environment import adopt_environment
from aligner.observability.logs import configure_logs
from aligner.observability.timeline import report_stage
from aligner.placement.roles import count_server_ranks
from aligner.schema import Config

# Function of each role as `module:function`. The modules import torch, so they are imported after
# the rank has set up its devices, its log and its heartbeat.
ROLES = {
    "prepare": "aligner.training.prepare:prepare_run",
    "trainer": "aligner.training.setup:train",
    "generator": "aligner.servers.generator_server:serve_generator",
    "critic": "aligner.servers.critic_server:serve_critic",
    "reward": "aligner.servers.reward_server:serve_reward",
    "teacher": "aligner.servers.teacher_server:serve_teacher",
}

# Each sample of a step has dozens of objects, which are in use until its generation ends. With
# Python's first threshold, 700, the garbage collector visits these objects again and again.
_GC_THRESHOLDS = (10_000, 10, 10)


def prepare(parsed: argparse.Namespace) -> None:
    """Create the model directory, and check the model, the data and the reward function."""
    config = _read_rank_config(parsed)
    configure_logs(config.logging.format, "prepare")
    _run_role("prepare", config)


def train(parsed: argparse.Namespace) -> None:
    """Train until the end of the run.

    Raises:
        Stopped: The run saved a checkpoint after a stop request.
    """
    config = _read_rank_config(parsed)
    configure_logs(config.logging.format, "trainer")
    report_stage(config, "trainer", "importing libraries")
    is_finished = _run_role("trainer", config)
    # The launcher repeats the stop signal, which would kill this process during its shutdown.
    signal.signal(STOP_SIGNAL, signal.SIG_IGN)
    if not is_finished:
        raise Stopped("stopped on request after saving a checkpoint")


def serve(parsed: argparse.Namespace) -> None:
    """Serve a role, or a replica of it, until SIGTERM."""
    groups = [text.partition("=")[2] for text in parsed.overrides if text.startswith("role=")]
    parsed.overrides = [text for text in parsed.overrides if not text.startswith("role=")]
    config = _read_rank_config(parsed)
    if len(groups) != 1 or groups[0] not in count_server_ranks(config):
        raise ConfigError(
            f"role={','.join(groups)}: expected exactly one role; allowed:"
            f" {', '.join(count_server_ranks(config))}"
        )
    configure_logs(config.logging.format, groups[0])
    # In a job on a cluster, the launcher cannot check the environments of all nodes.
    if problem := describe_missing_modules("server") or describe_numpy_conflict():
        raise ConfigError(f"{groups[0]}: {sys.executable}: {problem}")
    require_triton_for_heartbeat(config, groups[0])
    report_stage(config, groups[0], "importing libraries and loading the model")
    role = groups[0].partition(".")[0]
    replica = groups if role in ("reward", "teacher") else ()
    _run_role(role, config, *replica)


def _run_role(role: str, config: Config, *replica: str) -> Any:
    """Call the function of a role, and return its result."""
    function = load(ROLES[role])
    if config.cluster.deterministic:
        load("aligner.megatron.world:enable_deterministic_kernels")()
    gc.set_threshold(*_GC_THRESHOLDS)
    return function(config, *replica)


def _read_rank_config(parsed: argparse.Namespace) -> Config:
    """Set up the rank's environment, and return its configuration.

    A rank that a user starts by hand, with overrides, requires that all prerequisite experiments
    have finished.

    Raises:
        ConfigError: The arguments or the configuration are invalid.
    """
    adopt_environment()
    if parsed.config is None:
        plan = plan_run(compose_command(parsed), parsed.config_dir)
        if plan.config.dry_run.scale != "none":
            raise ConfigError(
                f"dry_run.scale={plan.config.dry_run.scale}: is supported only by `aligner launch`"
                " and `aligner validate`"
            )
        if missing := ", ".join(prerequisite.name for prerequisite in plan.missing_prerequisites):
            raise ConfigError(
                f"{missing}: the run needs the result of this experiment, which has not run yet;"
                " `aligner launch` runs prerequisite experiments first"
            )
        return plan.config
    if parsed.overrides or parsed.config_dir:
        raise ConfigError("--config: cannot be combined with overrides or --config-dir")
    return load_cached_config(parsed.config)


def load_cached_config(file: Path) -> Config:
    """Return the configuration in a file, which is parsed only once per version of the file.

    Parsing takes a tenth of a second. The fork server parses the file once for all of its forks.
    The launcher writes the file anew before it restarts the trainer, so that the trainer resumes
    from its checkpoint.
    """
    file_version = file.stat() if file.is_file() else None
    return _load_file_version(
        file, None if file_version is None else (file_version.st_ino, file_version.st_mtime_ns)
    )


@functools.lru_cache(1)
def _load_file_version(file: Path, file_version: tuple[int, int] | None) -> Config:
    """Load a configuration. `file_version` makes the cache distinguish versions of the file."""
    return load_own_config(file)
