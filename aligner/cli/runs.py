"""The commands of a run: check it, start it or queue it, tell what comes of it."""

import argparse
import contextlib
import json
import sys
import time
from dataclasses import asdict

from rich.console import Console

from aligner.cli.compositions import composed
from aligner.config.compose import unread_notes
from aligner.config.prerequisites import RunPlan, plan_run
from aligner.errors import ConfigError
from aligner.launcher.forks import ForkServer
from aligner.launcher.local import launch as launch_here
from aligner.launcher.local import launch_dry_run, start_fork_server, validate_dry_run
from aligner.launcher.slurm.job import supervise as supervise_job
from aligner.launcher.slurm.submit import checked_script, submit
from aligner.launcher.status import OVER, describe_status, read_status
from aligner.models.model_source import (
    ExpectedInputs,
    absent_inputs,
    is_expected,
    model_directory,
    stored_model_notes,
)
from aligner.models.shape import ModelShape
from aligner.placement.memory.role_memory import memory_needs, memory_table
from aligner.placement.placement_table import layer_notes, placement_table
from aligner.placement.roles import describe_model, has_gpu
from aligner.schema import Config

_WATCH_S = 5.0


def launch(parsed: argparse.Namespace) -> None:
    """Start every role of a run and wait for its end, or queue it as a Slurm job."""
    if parsed.dry_run or has_gpu():
        _launch(_plan(parsed), is_dry=parsed.dry_run)
        return
    # It imports on another core while this process composes the configuration.
    with contextlib.closing(start_fork_server()) as forks:
        _launch(_plan(parsed), is_dry=False, forks=forks)


def _launch(plan: RunPlan, *, is_dry: bool, forks: ForkServer | None = None) -> None:
    if plan.config.dry_run.scale != "none":
        if is_dry:
            raise ConfigError(
                "--dry-run: is not supported with dry_run.scale=tiny; --dry-run prints the Slurm"
                " job script, and dry_run.scale=tiny runs a tiny model on this machine"
            )
        launch_dry_run(plan, forks)
    elif plan.config.cluster.kind == "slurm":
        if is_dry:
            print(checked_script(plan, _described(plan)), end="")
        else:
            submit(plan)
    elif is_dry:
        raise ConfigError(
            "--dry-run: requires cluster=slurm, because it prints the Slurm job script; to check a"
            " configuration, use `aligner validate`"
        )
    else:
        launch_here(plan, forks=forks)


def validate(parsed: argparse.Namespace) -> None:
    """Check a configuration and print where its roles run and what memory they take; start
    nothing."""
    plan = _plan(parsed, weights=False)
    if plan.config.dry_run.scale != "none":
        validate_dry_run(plan)
        return
    results, described = plan.results(), _described(plan)
    shape = plan.check(described)
    for first in plan.prerequisites:
        done = (
            f"complete, result: {first.result}"
            if first.is_complete
            else f"will run first, in {first.entry}"
        )
        print(f"prerequisite experiment {first.name} ({first.gives}): {done}")
    if plan.config.environment.has_tools:
        from aligner.agents.tool_catalogue import describe_tools  # imports torch

        for line in describe_tools(plan.config.environment):
            print(line)
    console = Console()
    console.print(placement_table(plan.config))
    expected = {**described, **results}
    console.print(memory_table(plan.config, memory_needs(plan.config, shape, expected)))
    print(describe_model(plan.config, shape, expected))
    for line in _end_token_lines(plan.config, shape):
        print(line)
    for line in layer_notes(plan.config):
        print(line)
    for line in stored_model_notes(plan.config, expected):
        print(line)


def _end_token_lines(config: Config, shape: ModelShape) -> list[str]:
    """Return the EOS tokens of a policy that is stored with its tokenizer, and warnings."""
    if config.model.source != "directory" or not (config.model.path or ""):
        return []
    # They import tokenizers and jinja2: for those who validate a stored model.
    from aligner.data.tokenizer import report_end_tokens
    from aligner.data.tokenizer_files import tokenizer_problem

    directory = model_directory(config)
    if not directory.is_dir() or tokenizer_problem(directory) is not None:
        return []
    return report_end_tokens(directory, shape.eos_token_ids)


def supervise(parsed: argparse.Namespace) -> None:
    """Run a run directory's configuration inside its Slurm job."""
    supervise_job(parsed.run_directory)


def status(parsed: argparse.Namespace) -> None:
    """Print how a run is, once or until it has ended."""
    with contextlib.suppress(KeyboardInterrupt):  # the way to end --watch
        while True:
            now = read_status(parsed.run_directory)
            print(json.dumps(asdict(now)) if parsed.json else describe_status(now), flush=True)
            if not parsed.watch or now.state in OVER:
                return
            time.sleep(_WATCH_S)


def _plan(parsed: argparse.Namespace, *, weights: bool = True) -> RunPlan:
    """What a command line asks for, and the experiments that it needs; a person is told of keys
    that the run does not read."""
    config = composed(parsed, weights=weights)
    for note in unread_notes(config, parsed.config_dir):
        print(f"aligner: note: {note}", file=sys.stderr)
    return plan_run(config, parsed.config_dir)


def _described(plan: RunPlan) -> ExpectedInputs:
    """What is not there yet and goes by the configuration; a person is told of each."""
    results = plan.results()
    described = {
        path: shape
        for path, shape in absent_inputs(plan.config).items()
        if not is_expected(path, results)
    }
    for path, shape in described.items():
        how = (
            "its records cannot be checked"
            if shape is None
            else "its shape is read from the configuration"
        )
        print(f"aligner: note: {path} does not exist yet; {how}", file=sys.stderr)
    return described
