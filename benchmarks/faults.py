"""Inject faults into training runs and compare their results with an undisturbed run.

The benchmark runs `tiny_ppo` without faults and then, for each seed, with faults at random times
between the first and the last step. The critic has two ranks. If both reward replicas are disturbed
(servers, mixed), the reward model has two replicas. If the trainer or the generator is disturbed,
the trainer has two ranks and training is asynchronous (`rollout.max_staleness=1`).

`--campaign` selects the faults:

- kill: SIGKILL to one rank of each group of `--role`
- stop: SIGSTOP to one rank of each group of `--role`; the rank is never resumed
- mixed: two random faults per seed, in any role:
    - kill, stop: a rank, or the gateway or Triton of a server
    - pause: SIGSTOP to one of these processes for some seconds, like a delay or a network partition
    - write: a rank of the trainer or the critic cannot write more than 64 KiB to a file, so its
      next checkpoint fails; if the run exits with that error, it is launched again
    - launcher: SIGKILL to the launcher; the run is launched again with `run.resume=auto`
    - flip: the run is stopped, one bit of its newest checkpoint or its journal is flipped, and the
      run is launched again
- flips: a run is stopped, and one bit of one file of its newest checkpoint or its journal is
  flipped before it is launched again; once for the beginning, the middle and the end of every file
- pauses: the whole run is suspended 25 times for 5 s, the helper processes of its Tritons 10 times
  for 1.5 s, and its clock is set by 2 s 10 times, forward and back in turn (`benchmarks.pauses`).
  Any restart of a role is a failure. Ignores `--role`, `--seeds`, `--steps` and `--episodes`

- start: every role is suspended at ten moments while it starts, before and after its first
  heartbeat, at its first start and after restarts (`benchmarks.start_faults`). Each suspended
  process must be replaced within two heartbeat timeouts of 10 s. `--roles` selects the roles.
  Ignores `--role`, `--seeds`, `--steps` and `--episodes`

`--role` selects the groups: `servers` is the critic and both reward replicas; `all` is one rank of
each role; `environment` is a process of the generator that runs environments (requires
`--episodes`); `endpoint` is the generator of a run with agents that use the OpenAI client.

With `--episodes` the run is `experiment=calculator` with a random model. Its responses are
episodes, some of which are carried over to later steps, so checkpoints contain partial rollouts.

Outcomes:

- identical: the metrics, except times, and every file of the last checkpoint equal those of the
  undisturbed run bit for bit
- refused: the run exited with an error that names the file with the flipped bit
- missed: the run ended before all faults were injected, in each of four attempts with other times
- FAILED: anything else, or the run left processes, shared memory or temporary files behind

The exit code is 1 if any run FAILED.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from aligner.errors import RESUMABLE
from aligner.paths import RunPaths, find_complete_steps
from benchmarks import pauses, start_faults
from benchmarks.fault_draws import GROUPS, RANKS, Fault, mixed_faults, random_faults
from benchmarks.leftovers import Leftovers
from benchmarks.runs import Finished, Launch, checkpoint_differences, repeatable, run_to_end

CHECKPOINT_EVERY = 2
BESIDE = (
    *(
        "algorithm=ppo_decoupled",
        "engine.placement=server",
        "rollout.max_staleness=1",
        "engine.parallel.data=1",
    ),
    "rollout.top_p=0.95",
)
"""Overrides of a run that is asynchronous and records the sampling support of each token."""
EPISODES = (
    *("algorithm=ppo_decoupled", "model.source=random", "engine.exact=true", "evaluation.every=0"),
    *("environment.target=tests.agents.teller:Teller", "+environment.arguments.turns=3"),
    *("+environment.arguments.delay_s=0.05", "environment.workers=2", "environment.retries=9"),
    *("rollout.max_staleness=2", "rollout.spare_prompts=4", "rollout.prompts_per_step=16"),
    *("rollout.max_response_tokens=40", "rollout.top_p=1.0"),
)
"""Further overrides, after `BESIDE`, of a run with episodes of an environment."""
AGENTS = (
    *("algorithm=ppo_decoupled", "model.source=random", "engine.exact=true", "evaluation.every=0"),
    *(
        "environment.target=null",
        "environment.agent=tests.agents.openai_agents:calculates_slowly",
        "environment.workers=2",
    ),
    *(
        "environment.retries=9",
        "rollout.prompts_per_step=8",
        "reward.function=digit_fraction",
        "rollout.top_p=1.0",
    ),
)
"""Further overrides, after `BESIDE`, of a run with agents."""
_ENVIRONMENT = "aligner.agents.environment_worker"
_PATIENCE = (
    *("run.max_restarts=9", "server.max_restarts=9", "cluster.stop_timeout_s=5"),
    *("server.start_timeout_s=600", "server.request_timeout_s=900"),
)
_WATCH = ("server.health_timeout_s=15", "cluster.heartbeat_timeout_s=15")
"""Short timeouts for runs with stopped processes. On a busy machine, a process that is only slow
may be restarted too, which costs little."""
_PAUSES_S = (1.0, 6.0)
_LONGEST_FILE = 2**16
"""Size in bytes up to which a rank with a write fault can write a file: enough for its log, but not
for a checkpoint."""
_WRITE_ERROR = os.strerror(errno.EFBIG)
_TIMEOUT_S = 300.0
_LONGEST_S = 3600.0
"""Timeout in seconds of an undisturbed run, sufficient on a busy machine."""
_TIMES_LONGER = 10
"""Timeout of a run with faults, as a multiple of the time of an undisturbed run; at least
`_TIMEOUT_S`."""
_DRAWS = 4
"""Number of attempts per seed, with other random times, if faults come too late."""
_NEXT_DRAW = 1_000_000
_LOOK_S = 0.05
_ORPHANS_S = 15.0
"""Time in seconds in which the processes of a killed launcher must exit."""
_COLUMNS = ("seed", "faults", "restarts", "exit code", "added s", "outcome")


@dataclass(frozen=True)
class Disturbed:
    """A completed run with faults."""

    run: Finished
    restarts: int
    """Number of restarts of groups by the launcher, plus the number of launches after the first."""
    done: tuple[tuple[Fault, int], ...]
    """Injected faults, each with the number of completed steps at its time."""
    flipped: tuple[str, ...]
    """Names of the files in which a bit was flipped."""
    faults: Sequence[Fault]
    """Planned faults."""

    @property
    def in_time(self) -> bool:
        """Whether all faults were injected before the last step: a server that is killed later is
        not missed."""
        steps = len(self.run.metrics)
        return len(self.done) == len(self.faults) and all(
            at_step < steps for _, at_step in self.done
        )


def run_disturbed(
    directory: Path,
    faults: Sequence[Fault],
    *overrides: str,
    experiment: str = "tiny_ppo",
    timeout_s: float = _TIMEOUT_S,
) -> Disturbed:
    """Run an experiment with faults to its end, and launch it again where a fault ends it.

    Each launch has the timeout `timeout_s`. Only processes of this run are disturbed.
    """
    done: list[tuple[Fault, int]] = []
    waiting, restarts, flipped, least = deque(faults), 0, list[str](), 0
    while True:
        ends: Fault | None = None
        with Launch(directory, *overrides, experiment=experiment) as launch:
            while waiting and ends is None:
                launch.wait_for_step_or_end(max(waiting[0].step, least), timeout_s)
                if launch.has_ended:
                    break
                fault = waiting.popleft()
                time.sleep(fault.delay_s)
                if _inject(launch, fault):
                    done.append((fault, launch.steps))
                    ends = fault if fault.group == "launcher" else None
            run = launch.finish(timeout_s, _ORPHANS_S)
        restarts += run.out.count("; restarting ")
        wrote = next((fault for fault, _ in reversed(done) if fault.action == "write"), None)
        if (
            ends is None
            and run.code == 1
            and _WRITE_ERROR in run.error
            and "Traceback" not in run.error
        ):
            ends = wrote
        if ends is None or run.code == 0:
            return Disturbed(run, restarts, tuple(done), tuple(flipped), faults)
        if ends.action == "flip":
            flipped.append(_flip(run.paths, ends.draw))
        # Inject the next fault only after the resumed run has passed the step of the last one.
        restarts, least = restarts + 1, launch.steps + 1
        overrides = (*overrides, "run.resume=auto")


def _inject(launch: Launch, fault: Fault) -> bool:
    """Inject a fault as soon as its process exists. Return False if the run ends first."""
    while not launch.has_ended:
        # The process may just be restarted after an earlier fault.
        with contextlib.suppress(psutil.NoSuchProcess):
            _do(launch, fault)
            return True
        time.sleep(_LOOK_S)
    return False


def _do(launch: Launch, fault: Fault) -> None:
    """Inject a fault now. Raises psutil.NoSuchProcess if its process does not exist."""
    if fault.group == "launcher":
        launch.interrupt(signal.SIGKILL if fault.action == "kill" else signal.SIGUSR1)
        return
    process = launch.rank(fault.group, fault.rank)
    if fault.helper:
        helpers = [
            child
            for child in process.children(recursive=True)
            if fault.helper in " ".join(child.cmdline())
        ]
        if not helpers:
            raise psutil.NoSuchProcess(-1, f"{fault.helper} of {fault.group}")
        process = helpers[0]
    if fault.action == "kill":
        process.kill()
        return
    if fault.action == "write":
        process.rlimit(psutil.RLIMIT_FSIZE, (_LONGEST_FILE, psutil.RLIM_INFINITY))
        return
    process.suspend()
    if fault.action == "pause":
        shortest, longest = _PAUSES_S
        time.sleep(shortest + fault.draw * (longest - shortest))
        process.resume()


def _flip(paths: RunPaths, draw: float) -> str:
    """Flip a bit of the newest checkpoint or of the journal, and return the name of the file."""
    files = _saved_files(paths)
    place = draw * len(files)
    file = files[int(place)]
    flip_bit(file, place % 1, int(draw * 1e6) % 8)
    return file.name


def _saved_files(paths: RunPaths) -> list[Path]:
    """Return the non-empty files of the newest checkpoint and of the journal."""
    newest = paths.checkpoints / f"step_{find_complete_steps(paths.checkpoints)[-1]}"
    return sorted(
        file
        for file in (*newest.rglob("*"), *paths.journal.glob("*"))
        if file.is_file() and file.stat().st_size
    )


def flip_bit(file: Path, place: float, bit: int) -> None:
    """Flip one bit of a file; `place`, from 0 to 1, selects the byte."""
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    file.write_bytes(content)


def training_s(run: Finished) -> float:
    """Return the time of all steps in seconds, without start-up, whose time varies with the load of
    the machine."""
    return sum(step["time/step"] for step in run.metrics)


def outcome(
    run: Finished, expected: Finished, steps: int, flipped: Sequence[str], left: Sequence[str]
) -> str:
    """Return the outcome of a run: identical, refused or FAILED."""
    if left:
        return "FAILED"
    if run.code == 0 and repeatable(run.metrics) == repeatable(expected.metrics):
        return "FAILED" if checkpoint_differences(expected.paths, run.paths, steps) else "identical"
    told = (
        run.code == 1
        and "Traceback" not in run.error
        and any(name in run.error for name in flipped)
    )
    return "refused" if told else "FAILED"


def measure_flips(
    expected: Finished,
    steps: int,
    directory: Path,
    given: Sequence[str],
    show: Any,
    experiment: str,
) -> bool:
    """Resume a stopped run with one flipped bit after another, and return whether no run failed."""
    with Launch(directory / "stopped", *given, experiment=experiment) as launch:
        launch.wait_for_step(steps // 2, _LONGEST_S)
        launch.interrupt(signal.SIGUSR1)
        stopped = launch.finish(_LONGEST_S)
    assert stopped.code == RESUMABLE, stopped.report()
    well = True
    for file in _saved_files(stopped.paths):
        name = file.relative_to(stopped.paths.root)
        for place in (0.0, 0.5, 1 - 1e-9):
            copy = directory / f"{name.name}_{place:.1f}"
            shutil.copytree(stopped.paths.root, copy)
            flip_bit(copy / name, place, 2)
            with (
                Leftovers(copy) as leftovers,
                Launch(copy, *given, "run.resume=auto", experiment=experiment) as launch,
            ):
                run = launch.finish(_LONGEST_S)
            left = leftovers.left()
            figures = {
                "file": str(name),
                "place": place,
                "exit_code": run.code,
                "left": left,
                "outcome": outcome(run, expected, steps, [name.name], left),
            }
            if figures["outcome"] == "FAILED":
                print(run.report(), file=sys.stderr)
                well = False
            show(figures)
            shutil.rmtree(copy)
    return well


@dataclass(frozen=True)
class Campaign:
    """Faults to inject, and configuration of the runs into which they are injected."""

    action: str
    role: str
    steps: int
    episodes: bool

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups of processes to disturb."""
        return GROUPS["all"] if self.action in ("mixed", "flips") else GROUPS[self.role]

    @property
    def experiment(self) -> str:
        """Name of the experiment of the runs."""
        return "calculator" if self.episodes or self.role == "endpoint" else "tiny_ppo"

    @property
    def beside(self) -> tuple[str, ...]:
        """Overrides of an asynchronous run; none if the run is synchronous."""
        if self.role == "endpoint":
            return BESIDE + AGENTS
        if self.episodes:
            return BESIDE + EPISODES
        return BESIDE if {"trainer", "generator"} & {*self.groups} else ()

    @property
    def ranks(self) -> dict[str, int]:
        """Number of ranks of the groups that have more than one."""
        return RANKS if self.beside else {"critic": RANKS["critic"]}

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides of the runs."""
        return (
            *(
                f"run.stop_after={self.steps}",
                f"checkpoint.every={CHECKPOINT_EVERY}",
                "logging.tensorboard=false",
            ),
            *(
                "run.name=run",
                *self.beside,
                *_PATIENCE,
                *(_WATCH if self.action in ("stop", "mixed") else ()),
            ),
            f"critic.parallel.data={self.ranks['critic']}",
            f"actor.parallel.data={self.ranks.get('trainer', 1)}",
            f"reward.replicas={2 if self.action == 'mixed' else 1 + ('reward.1' in self.groups)}",
        )

    def faults(self, draw: int, step_s: float) -> list[Fault]:
        """Return the faults of a random draw; `step_s` is the approximate time of a step in
        seconds."""
        if self.action == "mixed":
            return mixed_faults(draw, self.steps, step_s)
        faults = random_faults(draw, self.groups, self.steps, step_s, self.ranks, self.action)
        return (
            [replace(fault, helper=_ENVIRONMENT) for fault in faults]
            if self.role == "environment"
            else faults
        )


def measure(campaign: Campaign, seeds: range, directory: Path, show: Any) -> bool:
    """Run a campaign, call `show` with the figures of each seed, and return whether no run
    failed."""
    directory.mkdir(exist_ok=True)
    given, experiment, started = campaign.overrides, campaign.experiment, time.monotonic()
    expected = run_to_end(
        directory / "undisturbed", *given, experiment=experiment, timeout_s=_LONGEST_S
    )
    if campaign.action == "flips":
        return measure_flips(expected, campaign.steps, directory, given, show, experiment)
    longest_s = max(_TIMEOUT_S, _TIMES_LONGER * (time.monotonic() - started))
    well = True
    for seed in seeds:
        for number in range(_DRAWS):
            figures = measured(
                campaign,
                seed + number * _NEXT_DRAW,
                expected,
                directory / f"seed_{seed}.{number}",
                longest_s,
            )
            figures |= {"seed": seed, "draws": number + 1}
            if figures["outcome"] != "missed":
                break
        well &= figures["outcome"] != "FAILED"
        show(figures)
    return well


def measured(
    campaign: Campaign, draw: int, expected: Finished, directory: Path, longest_s: float
) -> dict[str, Any]:
    """Run an experiment with the faults of one random draw, and return its figures."""
    faults, started = campaign.faults(draw, expected.metrics[-1]["time/step"]), time.monotonic()
    with Leftovers(directory) as leftovers:
        disturbed = run_disturbed(
            directory,
            faults,
            *campaign.overrides,
            experiment=campaign.experiment,
            timeout_s=longest_s,
        )
    run, left = disturbed.run, leftovers.left()
    found = outcome(run, expected, campaign.steps, disturbed.flipped, left)
    if found == "FAILED":
        print(run.report(), file=sys.stderr)
    return {
        "faults": [f"{fault} at step {at_step}" for fault, at_step in disturbed.done],
        "flipped": disturbed.flipped,
        "restarts": disturbed.restarts,
        "exit_code": run.code,
        "seconds": time.monotonic() - started,
        "seconds_added": training_s(run) - training_s(expected),
        "left": left,
        "outcome": "missed" if found == "identical" and not disturbed.in_time else found,
    }


def _measure_pauses(directory: Path, seed: int) -> bool:
    """Run the campaign of `benchmarks.pauses`, and return whether it passed.

    The function prints the progress to standard error, and the figures as JSON to standard output.
    """
    steps = 3 * sum(pauses.COUNTS.values())  # some steps pass between faults
    return pauses.measure_pauses(
        directory,
        pause_overrides(steps),
        steps,
        lambda figures: print(json.dumps({"benchmark": "faults", "campaign": "pauses", **figures})),
        lambda text: print(text, file=sys.stderr, flush=True),
        seed=seed,
    )


def _measure_starts(directory: Path, roles: Sequence[str], show: Any) -> bool:
    """Run the campaign of `benchmarks.start_faults`, and return whether it passed.

    The function prints the progress to standard error.
    """
    return start_faults.measure_starts(
        directory,
        [*BESIDE, *start_faults.start_overrides()],
        show,
        lambda text: print(text, file=sys.stderr, flush=True),
        roles,
    )


def pause_overrides(steps: int) -> list[str]:
    """Return the overrides of a run with all roles for the campaign of pauses."""
    return [
        *("run.name=run", f"run.steps={steps}", f"checkpoint.every={steps}"),
        *BESIDE,
        "logging.tensorboard=false",
    ]


def table_row(figures: dict[str, Any]) -> list[str]:
    """Return the cells of a run's row in the table of results."""
    if "stops" in figures:
        return [
            str(figures["run"]),
            "\n".join([*figures["stops"], *figures["problems"]]),
            f"{figures['slowest_s']:.1f}",
            str(figures["restarts"]),
            f"{figures['seconds']:.0f}",
            figures["outcome"],
        ]
    if "file" in figures:
        return [
            figures["file"],
            f"{figures['place']:.1f}",
            str(figures["exit_code"]),
            figures["outcome"],
        ]
    return [
        *(
            str(figures["seed"]),
            "\n".join(figures["faults"]),
            str(figures["restarts"]),
            str(figures["exit_code"]),
        ),
        *(f"{figures['seconds_added']:.1f}", figures["outcome"]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--campaign",
        choices=("kill", "stop", "mixed", "flips", "pauses", "start"),
        default="kill",
        help="faults to inject (kill)",
    )
    parser.add_argument(
        "--role",
        choices=sorted(GROUPS),
        default="critic",
        help="role to disturb (critic); mixed and flips disturb all roles",
    )
    parser.add_argument(
        "--episodes",
        action="store_true",
        help="use a run whose responses are episodes in environments",
    )
    parser.add_argument(
        "--roles",
        default=",".join(start_faults.ROLES),
        help="roles of the campaign start, separated by commas (all)",
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of disturbed runs (3)")
    parser.add_argument("--first-seed", type=int, default=0, help="first seed (0)")
    parser.add_argument("--steps", type=int, default=12, help="training steps of each run (12)")
    parser.add_argument(
        "--directory", type=Path, help="directory that keeps the runs (by default they are deleted)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    args = parser.parse_args()
    if args.role == "environment" and not args.episodes:
        parser.error("--role environment requires --episodes")
    if unknown := {*args.roles.split(",")} - {*start_faults.ROLES}:
        parser.error(f"--roles: unknown roles {', '.join(sorted(unknown))}")
    columns = {
        "flips": ("file", "place", "exit code", "outcome"),
        "start": ("run", "suspended", "slowest s", "restarts", "seconds", "outcome"),
    }.get(args.campaign, _COLUMNS)
    disturbed = args.roles if args.campaign == "start" else args.role
    table = Table(
        title=f"Faults: {args.campaign} {disturbed}, compared with the undisturbed run",
        title_justify="left",
    )
    for column in columns:
        table.add_column(column, no_wrap=column == "faults")

    def show(figures: dict[str, Any]) -> None:
        if args.json:
            print(
                json.dumps(
                    {"benchmark": "faults", "campaign": args.campaign, "role": args.role, **figures}
                ),
                flush=True,
            )
        else:
            table.add_row(*table_row(figures))

    # SIGTERM ends the current run as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            if args.campaign == "pauses":
                directory = args.directory or Path(temporary)
                sys.exit(0 if _measure_pauses(directory, args.first_seed) else 1)
            if args.campaign == "start":
                directory = args.directory or Path(temporary)
                sys.exit(0 if _measure_starts(directory, args.roles.split(","), show) else 1)
            seeds = range(args.first_seed, args.first_seed + args.seeds)
            campaign = Campaign(args.campaign, args.role, args.steps, args.episodes)
            well = measure(campaign, seeds, args.directory or Path(temporary), show)
    finally:
        if not args.json and args.campaign != "pauses":
            Console(width=None if sys.stdout.isatty() else 120).print(table)
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
