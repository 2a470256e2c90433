"""The commands of a run: check it, start it or queue it, draw what came of it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aligner.cli.configured import add_configured, run_plan
from aligner.errors import ConfigError

if TYPE_CHECKING:
    from aligner.config.prerequisites import RunPlan
    from aligner.models.model_source import ExpectedInputs


def add_launch(commands: Any) -> None:
    """Add `aligner launch` to a parser's subcommands."""
    what = "start every role of a run and wait for its end; with cluster=slurm queue it as a job"
    command = add_configured(commands, "launch", _launch, what)
    command.add_argument("--dry-run", action="store_true", help="print the job's script and submit nothing (cluster=slurm)")


def add_validate(commands: Any) -> None:
    """Add `aligner validate` to a parser's subcommands."""
    add_configured(
        commands, "validate", _validate, "check a configuration and print the placement of its roles; start nothing"
    )


def add_supervise(commands: Any) -> None:
    """Add `aligner supervise` to a parser's subcommands."""
    what = "run a run directory's configuration inside its Slurm job; the job's script calls it"
    _add_of_run(commands, "supervise", what).set_defaults(run=_supervise)


def add_report(commands: Any) -> None:
    """Add `aligner report` to a parser's subcommands."""
    what = "draw a run's metrics, timeline and samples, finished or not, as one HTML page that opens without a network"
    command = _add_of_run(commands, "report", what)
    command.add_argument("--output", type=Path, metavar="FILE.html", help="RUN/report.html if not given")
    command.set_defaults(run=_report)


def _add_of_run(commands: Any, name: str, what: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=what, description=what, allow_abbrev=False)
    command.add_argument("run_directory", type=Path, metavar="RUN", help="a run directory, as `aligner launch` prints it")
    return command


def _launch(parsed: argparse.Namespace) -> int:
    plan = run_plan(parsed)
    if plan.config.dry_run.scale != "none":
        if parsed.dry_run:
            raise ConfigError("--dry-run prints a Slurm job's script, dry_run.scale=tiny runs here; give one of both")
        from aligner.launch.dry_run import launch_dry_run

        return launch_dry_run(plan)
    if plan.config.cluster.kind == "slurm":
        return _submit(plan, is_dry=parsed.dry_run)
    if parsed.dry_run:
        raise ConfigError("--dry-run prints a Slurm job's script; give cluster=slurm, or see `aligner validate`")
    from aligner.launch.local import launch

    return launch(plan)


def _submit(plan: RunPlan, *, is_dry: bool) -> int:
    from aligner.launch.slurm.submit import checked_script, submit

    if is_dry:
        print(checked_script(plan, _described(plan)), end="")
    else:
        submit(plan)
    return 0


def _supervise(parsed: argparse.Namespace) -> int:
    from aligner.launch.slurm.job import supervise

    return supervise(parsed.run_directory)


def _validate(parsed: argparse.Namespace) -> None:
    plan = run_plan(parsed)
    if plan.config.dry_run.scale != "none":
        from aligner.launch.dry_run import validate_dry_run

        validate_dry_run(plan)
        return
    from rich.console import Console

    from aligner.placement.memory.role_memory import memory_needs, memory_table
    from aligner.placement.roles import describe_model, placement_table

    results, described = plan.results(), _described(plan)
    shape = plan.check(described)
    for first in plan.prerequisites:
        done = f"done, {first.result}" if first.is_complete else f"to be run first, in {first.entry}"
        print(f"experiment {first.name}: {first.gives}; {done}")
    console = Console()
    console.print(placement_table(plan.config))
    console.print(memory_table(plan.config, memory_needs(plan.config, shape, {**described, **results})))
    print(describe_model(plan.config, shape))


def _described(plan: RunPlan) -> ExpectedInputs:
    """What is not there yet and goes by the configuration; a person is told of each."""
    from aligner.models.model_source import absent_inputs, is_expected

    results = plan.results()
    described = {path: shape for path, shape in absent_inputs(plan.config).items() if not is_expected(path, results)}
    for path, shape in described.items():
        how = "its records are not checked" if shape is None else "its shape is taken from the configuration"
        print(f"aligner: note: {path} is not there yet: {how}", file=sys.stderr)
    return described


def _report(parsed: argparse.Namespace) -> None:
    from aligner.observability.report import write_report

    print(write_report(parsed.run_directory, parsed.output))
