"""The commands of runs: `launch`, `validate`, `supervise` and `status`."""

import argparse
import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console

from aligner.cli.compositions import compose_command
from aligner.config.compose import (
    compose_config,
    describe_unread_keys,
    find_user_keys,
    format_config,
    list_config_options,
)
from aligner.config.prerequisites import RunPlan, plan_run
from aligner.config.sweeps import SWEEP_KEYS, expand_sweep
from aligner.errors import FINISHED, ConfigError, get_exit_code
from aligner.gpu_libraries import find_library_notes
from aligner.launcher.forks import ForkServer
from aligner.launcher.job_submission import render_preview, submit
from aligner.launcher.job_supervisor import supervise as supervise_job
from aligner.launcher.local import launch as launch_here
from aligner.launcher.local import launch_dry_run, start_fork_server, validate_dry_run
from aligner.launcher.run_directory import reserve_run_directory
from aligner.launcher.status import ENDED_STATES, describe_status, read_status
from aligner.launcher.sweep import Sweep, launch_sweep
from aligner.models.model_source import (
    ExpectedInputs,
    absent_inputs,
    is_expected,
    model_directory,
    stored_model_notes,
)
from aligner.models.shape import ModelShape
from aligner.observability.console import OutputMode, RunConsole, print_table
from aligner.paths import get_run_paths
from aligner.placement.job_layout import compute_job_layout
from aligner.placement.memory.role_memory import build_memory_table, compute_role_memory
from aligner.placement.placement_table import (
    build_placement_table,
    find_layer_notes,
    find_stage_notes,
)
from aligner.placement.roles import GPU_COUNT_VARIABLE, describe_model, has_gpu
from aligner.rewards.input_checks import check_inputs
from aligner.schema import Config
from aligner.schema.evaluation_suites import get_active_suites
from aligner.schema.keys import get_masked_values, with_values
from aligner.terminal import format_json, print_note, print_text

_WATCH_S = 5.0
_NAMING_KEYS = {"run.name", "run.dir"}


def launch(parsed: argparse.Namespace) -> None:
    """Run all roles until the run ends, or submit the run as a job to a cluster.

    With `--show-config`, print the configuration and start nothing. With `--multirun`, launch the
    runs of a sweep.
    """
    if parsed.multirun and (parsed.show_config is not None or parsed.dry_run):
        option = "--dry-run" if parsed.dry_run else "--show-config"
        raise ConfigError(f"{option}: cannot be combined with --multirun; use it for a single run")
    if parsed.show_config is not None:
        _print_config(parsed)
        return
    console = RunConsole(_get_output_mode(parsed))
    with _reporting_end(console), contextlib.ExitStack() as stack:
        if parsed.multirun:
            _launch_sweep(parsed, console, stack)
            return
        if parsed.dry_run:
            _launch(_plan_run(parsed), console, is_dry=True)
            return
        # The fork server imports modules on another core while this process composes the
        # configuration.
        fork_server = (
            None if has_gpu() else stack.enter_context(contextlib.closing(start_fork_server()))
        )
        plan = _plan_run(parsed)
        if not _has_user_name(parsed, plan.config):
            config = stack.enter_context(reserve_run_directory(plan.config))
            plan = dataclasses.replace(plan, config=config)
        _launch(plan, console, is_dry=False, fork_server=fork_server)


def _launch_sweep(
    parsed: argparse.Namespace, console: RunConsole, stack: contextlib.ExitStack
) -> None:
    """Launch the runs of a sweep.

    Args:
        parsed: The parsed command line.
        console: Console for the output of the launches.
        stack: Holds the reserved directory of the sweep until the end of the command.
    """
    points = expand_sweep(parsed.overrides, parsed.config_dir, parsed.config)
    # `run.dir`, `run.name` and `run.resume` of the command line apply to the sweep. The keys of the
    # first run complete them to a valid command line.
    naming = [text for text in parsed.overrides if text.partition("=")[0] in SWEEP_KEYS]
    overrides = [*points[0].overrides, *naming]
    config = compose_config(overrides, parsed.config_dir, parsed.config)
    user_keys = find_user_keys(overrides, config, parsed.config_dir, parsed.config)
    if user_keys.isdisjoint(_NAMING_KEYS):
        config = stack.enter_context(reserve_run_directory(config))
    sweep = Sweep(
        options=tuple(list_config_options(parsed.config_dir, parsed.config)),
        overrides=tuple(parsed.overrides),
        name=str(config.run.name),
        directory=get_run_paths(config).root,
        is_resumed=config.run.should_resume,
    )
    launch_sweep(sweep, points, console)


def _print_config(parsed: argparse.Namespace) -> None:
    """Print the configuration of a command line as YAML or JSON, with masked secrets."""
    config = compose_command(parsed, weights=False)
    if not _has_user_name(parsed, config):
        # The launch derives the name and the directory from its own time.
        config = with_values(config, {"run.name": None, "run.dir": None})
    values = get_masked_values(config)
    if parsed.show_config == "json":
        print(format_json(values, indent=2))
    else:
        print(format_config(values), end="")


def _has_user_name(parsed: argparse.Namespace, config: Config) -> bool:
    """Return whether the command line or the experiment sets the name or directory of the run."""
    keys = find_user_keys(parsed.overrides, config, parsed.config_dir, parsed.config)
    return not keys.isdisjoint(_NAMING_KEYS)


def _get_output_mode(parsed: argparse.Namespace) -> OutputMode:
    """Return the output mode of the options `--quiet`, `--verbose` and `--json`.

    Raises:
        ConfigError: More than one of the options is given.
    """
    modes: tuple[OutputMode, ...] = ("quiet", "verbose", "json")
    chosen = [mode for mode in modes if getattr(parsed, mode)]
    if len(chosen) > 1:
        options = " and ".join(f"--{mode}" for mode in chosen)
        raise ConfigError(f"{options}: cannot be combined; use one of them")
    return chosen[0] if chosen else "normal"


@contextlib.contextmanager
def _reporting_end(console: RunConsole) -> Iterator[None]:
    """With `json`, print the last event, `end`, with the exit code of the command and its error."""
    try:
        yield
    except BaseException as error:
        console.print_event("end", exit_code=get_exit_code(error), error=str(error))
        raise
    console.print_event("end", exit_code=FINISHED, error=None)


def _launch(
    plan: RunPlan, console: RunConsole, *, is_dry: bool, fork_server: ForkServer | None = None
) -> None:
    """Launch a run as a dry run, as a job on a cluster, or on this machine, as configured.

    Args:
        plan: The run and its prerequisite experiments.
        console: Console for the output.
        is_dry: Whether to print the file of the job instead of submitting the job (`--dry-run`).
        fork_server: See `aligner.launcher.local.launch`.
    """
    is_elsewhere = plan.config.cluster.kind != "local" or plan.config.dry_run.scale != "none"
    if console.mode != "normal" and is_elsewhere:
        raise ConfigError(
            f"--{console.mode}: is not supported with a job on a cluster (cluster=slurm) or with"
            " dry_run.scale=tiny; the output of a job is in its log"
        )
    if plan.config.dry_run.scale != "none":
        if is_dry:
            raise ConfigError(
                "--dry-run: is not supported with dry_run.scale=tiny; --dry-run prints the job of a"
                " run on a cluster, and dry_run.scale=tiny runs a tiny model on this machine"
            )
        launch_dry_run(plan, fork_server)
    elif plan.config.cluster.kind != "local":
        if is_dry:
            print(render_preview(plan, _absent_inputs(plan)), end="")
        else:
            submit(plan)
    elif is_dry:
        raise ConfigError(
            "--dry-run: requires cluster=slurm, cluster=kubernetes or cluster=skypilot, because it"
            " prints the job; to check a configuration, use `aligner validate`"
        )
    else:
        launch_here(plan, console=console, fork_server=fork_server)


def validate(parsed: argparse.Namespace) -> None:
    """Check a configuration, and print the placement and memory of its roles; start nothing."""
    plan = _plan_run(parsed, weights=False)
    if plan.config.dry_run.scale != "none":
        validate_dry_run(plan)
        return
    results = plan.get_result_shapes()
    absent = _absent_inputs(plan)
    shape = plan.check(absent)
    # The libraries of a machine whose GPUs are only assumed, or of a job, cannot be checked here.
    is_local = plan.config.cluster.kind == "local"
    has_real_gpu = has_gpu() and not os.environ.get(GPU_COUNT_VARIABLE)
    library_notes = find_library_notes(on_gpus=has_real_gpu) if is_local else []
    for line in check_inputs(plan.config, {**absent, **results}):
        print_note(line)
    for prerequisite in plan.prerequisites:
        state = (
            f"complete, result: {prerequisite.result}"
            if prerequisite.is_complete
            else f"will run first, in {prerequisite.entry}"
        )
        print_text(
            f"prerequisite experiment {prerequisite.name} ({prerequisite.result_kind}): {state}"
        )
    _print_tools(plan.config)
    console = Console()
    print_table(console, build_placement_table(plan.config))
    kind = plan.config.cluster.kind
    if kind != "local":
        print_text(compute_job_layout(plan.config).describe(kind))
    expected = {**absent, **results}
    memory = compute_role_memory(plan.config, shape, expected)
    print_table(console, build_memory_table(plan.config, memory))
    for line in (
        describe_model(plan.config, shape, expected),
        *_end_token_lines(plan.config, shape),
        *find_stage_notes(plan.config, shape, expected),
        *find_layer_notes(plan.config),
        *library_notes,
        *stored_model_notes(plan.config, expected),
    ):
        print_text(line)


def _print_tools(config: Config) -> None:
    """Print the tools of training, and those of evaluation suites with their own environment."""
    suites = [
        suite for suite in get_active_suites(config) if suite.environment != config.environment
    ]
    environments = [config.environment, *(suite.environment for suite in suites)]
    if not any(environment.has_tools for environment in environments):
        return
    from aligner.agents.tool_catalogue import describe_tools  # imports torch

    for line in describe_tools(config.environment):
        print_text(line)
    for suite in suites:
        with suite.renaming_environment_keys():
            for line in describe_tools(suite.environment):
                print_text(f"{suite.key}: {suite.rename_environment_keys(line)}")


def _end_token_lines(config: Config, shape: ModelShape) -> list[str]:
    """Return the EOS tokens of a policy with a stored tokenizer, and warnings about them."""
    if config.model.source != "directory" or not (config.model.path or ""):
        return []
    # These modules import tokenizers and jinja2, which only the validation of a stored model needs.
    from aligner.data.tokenizer import report_end_tokens
    from aligner.data.tokenizer_files import find_tokenizer_problem

    directory = model_directory(config)
    if not directory.is_dir() or find_tokenizer_problem(directory) is not None:
        return []
    return report_end_tokens(directory, shape.eos_token_ids)


def supervise(parsed: argparse.Namespace) -> None:
    """Run the configuration of a run directory inside its job on a cluster."""
    supervise_job(parsed.run_directory, is_agent=parsed.agent)


def status(parsed: argparse.Namespace) -> None:
    """Print the status of a run once, or with `--watch` until the run has ended."""
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends --watch
        while True:
            run_status = read_status(parsed.run_directory)
            if parsed.json:
                print(json.dumps(asdict(run_status)), flush=True)
            else:
                print_text(describe_status(run_status))
            if not parsed.watch or run_status.state in ENDED_STATES:
                return
            time.sleep(_WATCH_S)


def _plan_run(parsed: argparse.Namespace, *, weights: bool = True) -> RunPlan:
    """Return the run of a command line with its prerequisite experiments.

    Keys that have no effect in this run are reported on standard error.

    Args:
        parsed: The parsed command line.
        weights: Whether to download the weights of a model of the Hugging Face Hub.
    """
    config = compose_command(parsed, weights=weights)
    for note in describe_unread_keys(config, parsed.config_dir, parsed.config):
        print_note(note)
    return plan_run(config, parsed.config_dir)


def _absent_inputs(plan: RunPlan) -> ExpectedInputs:
    """Return the inputs that do not exist yet, and report each of them on standard error.

    The configuration describes their shapes. Results of prerequisite experiments are excluded.
    """
    results = plan.get_result_shapes()
    absent = {
        path: shape
        for path, shape in absent_inputs(plan.config).items()
        if not is_expected(path, results)
    }
    for path, shape in absent.items():
        consequence = (
            "its records cannot be checked"
            if shape is None
            else "its shape is read from the configuration"
        )
        print_note(f"{path} does not exist yet; {consequence}")
    return absent
