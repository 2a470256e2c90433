"""The batch script of a run: what it asks Slurm for, and the supervisor that it starts."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from aligner.paths import cache_directory, run_paths
from aligner.placement.slurm_layout import Component, slurm_layout, slurm_role
from aligner.schema import Config
from aligner.signals import STOP_SIGNAL


def render_script(config: Config) -> str:
    """A script for `sbatch`; a heterogeneous job where the roles have several components.

    Raises ConfigError where the roles cannot be placed.
    """
    first, *others = slurm_layout(config).components
    lines = ["#!/usr/bin/env bash", f"# aligner: run {config.run.name}, experiment {config.run.experiment}."]
    lines += [_directive(flag) for flag in (*_job_flags(config), *_component_flags(config, first))]
    for component in others:
        lines += ["#SBATCH hetjob", *map(_directive, _component_flags(config, component))]
    # What tells a job to stop may come before the supervisor can take it, and would end the script.
    lines += ["set -eo pipefail", f"trap '' {STOP_SIGNAL.name.removeprefix('SIG')}"]
    # One cache for all, wherever `sbatch` is called: in a container the home is another, and so would be the cache.
    lines += [f"export ALIGNER_CACHE={shlex.quote(str(cache_directory().absolute()))}"]
    return "\n".join([*lines, *config.cluster.slurm.setup, _supervise(config), ""])


def _job_flags(config: Config) -> Iterator[str]:
    """Of the job as a whole; Slurm reads them with the first component."""
    slurm, paths = config.cluster.slurm, run_paths(config)
    yield f"--job-name={config.run.name}"
    yield f"--chdir={Path.cwd()}"  # paths of the configuration may be relative
    yield f"--output={paths.job_log('%j')}"
    yield "--open-mode=append"  # a job that is queued again goes on with its log
    yield f"--signal=B:{STOP_SIGNAL.name.removeprefix('SIG')}@{slurm.grace_s}"
    yield "--requeue" if slurm.requeue else "--no-requeue"


def _component_flags(config: Config, component: Component) -> Iterator[str]:
    slurm, role = config.cluster.slurm, slurm_role(config, component.role)
    yield f"--nodes={component.nodes}"
    yield f"--ntasks-per-node={component.ranks_per_node}"
    if config.cluster.threads_per_rank is not None:
        yield f"--cpus-per-task={config.cluster.threads_per_rank}"
    if component.devices_per_node:
        device = "--gres=gpu:" if slurm.gpus == "gres" else "--gpus-per-node="
        yield f"{device}{component.devices_per_node}"
    named = {
        "account": slurm.account,
        "partition": role.partition or slurm.partition,
        "qos": slurm.qos,
        "reservation": slurm.reservation,
        "constraint": role.constraint or slurm.constraint,
        "time": slurm.time,
    }
    yield from (f"--{name}={value}" for name, value in named.items() if value is not None)
    yield from slurm.sbatch
    yield from role.sbatch


def _directive(flag: str) -> str:
    name, equals, value = flag.partition("=")
    return f"#SBATCH {name}{equals}{shlex.quote(value) if value else ''}"


def _supervise(config: Config) -> str:
    """The shell becomes the supervisor: Slurm's signal to the script is a signal to it."""
    command = (sys.executable, "-m", "aligner", "supervise", str(run_paths(config).root))
    return "exec " + shlex.join(command)
