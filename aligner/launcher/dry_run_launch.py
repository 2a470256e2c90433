"""`aligner launch … dry_run.scale=tiny`: the run's roles with a tiny model on this machine's CPU,
and what that has shown."""

import os
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from urllib.parse import urlsplit

from rich.console import Console

from aligner.config.dry_run.dry_run_plan import DryRun, changes_table, plan_dry_run
from aligner.config.prerequisites import RunPlan
from aligner.launcher.forks import ForkServer
from aligner.launcher.local import launch
from aligner.observability.console import print_line
from aligner.observability.metrics import read_metrics
from aligner.paths import run_paths
from aligner.placement.placement_table import placement_table, placements
from aligner.placement.roles import describe_model, has_generator
from aligner.schema import Config

_CONNECT_S = 2.0


def launch_dry_run(plan: RunPlan, forks: ForkServer | None = None) -> None:
    """Plan the dry run, print its changes, run it, and print what it has exercised.

    Takes `forks` and raises errors as `launch` does.
    """
    dry_run = _plan_here(plan)
    launch(dry_run.plan, tell=partial(_show, dry_run), forks=forks)
    config = dry_run.plan.config
    print(_exercised(config, read_metrics(run_paths(config).metrics)), flush=True)


def validate_dry_run(plan: RunPlan) -> None:
    """Check the configuration as it was given, and say what its dry run would be; start nothing."""
    dry_run, console = _plan_here(plan), Console()
    shape = dry_run.plan.check()
    _show(dry_run, console)
    console.print(placement_table(dry_run.plan.config))
    print(describe_model(dry_run.plan.config, shape))


def _plan_here(plan: RunPlan) -> DryRun:
    """The dry run on this machine, of which it will use the CPU alone, in this process and those it
    starts."""
    dry_run = plan_dry_run(plan, _is_reachable)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return dry_run


def _show(dry_run: DryRun, console: Console) -> None:
    """What is otherwise than in the run, and what a person should know about it."""
    console.print(changes_table(dry_run))
    for note in dry_run.notes:
        print_line(console, f"note: {note}")


def _exercised(config: Config, metrics: Sequence[Mapping[str, float]]) -> str:
    """One line: the layouts that ran, that weights reached the engine, and how far its log-probs
    are from the trainer's."""
    roles = ", ".join(
        f"{place.role} {place.layout}" for place in placements(config) if place.layout != "-"
    )
    steps = [record for record in metrics if record["step"] > 0]
    parts = [f"dry run passed: {len(steps)} steps with {roles}"]
    if config.algorithm.generates and any(
        "time/reshard" in step or "time/snapshot" in step for step in steps
    ):
        where = "the generator's" if has_generator(config) else "the engine's"
        parts.append(f"weights resharded into {where} layout, verified by checksum")
    # Of samples that older weights drew it would measure the training between.
    fresh = [step for step in steps if not step.get("staleness/max")]
    if mismatches := [
        step["mismatch/logprob_abs"] for step in fresh if "mismatch/logprob_abs" in step
    ]:
        parts.append(f"engine and trainer log-probs differ by at most {max(mismatches):.1e}")
    return "; ".join(parts)


def _is_reachable(url: str) -> bool:
    """Whether something listens where an HTTP scorer or a judge should be."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname, port), timeout=_CONNECT_S):
            return True
    except OSError:
        return False
