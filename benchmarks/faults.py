"""Roles killed at random moments of training: does the run end as if nothing had happened, and what does it cost?

An undisturbed run of `tiny_ppo`, then, for each seed, the same run with SIGKILL to a random rank of the role, at a random
moment between the first and the last step. Trainer and critic have two ranks; a generator draws the samples while older ones
are learned from (`rollout.max_staleness=1`). `--role reward` runs two replicas and kills both, at moments of their own;
`servers` kills the critic as well, `all` one of each role. A server is started again by the launcher; a trainer that is
killed ends the run, which is launched again with `run.resume=true`. A run counts as identical when every kill came before
the last step was done, and its metrics, but for times, and every file of the last checkpoint are the undisturbed run's bit for
bit. Exits 1 unless all are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.runs import Finished, Launch, checkpoint_differences, repeatable, run_to_end

GROUPS = {
    "critic": ("critic",),
    "reward": ("reward", "reward.1"),
    "servers": ("critic", "reward", "reward.1"),
    "generator": ("generator",),
    "trainer": ("trainer",),
    "all": ("generator", "reward", "critic", "trainer"),
}
"""What is killed for each --role."""
RANKS = {"trainer": 2, "critic": 2}
"""Of the groups that have more than one."""
CHECKPOINT_EVERY = 2
_RESUMABLE = CHECKPOINT_EVERY + 2
"""After so many steps there is a checkpoint that a new launch can resume from: it is complete while the next step trains."""
BESIDE = ("algorithm=ppo_decoupled", "engine.placement=server", "rollout.max_staleness=1", "engine.parallel.data=1")
"""Samples are drawn beside training."""
_COMPARED = ("metrics", "policy", "critic", "checkpoint")
_TIMEOUT_S = 300


@dataclass(frozen=True)
class Fault:
    """SIGKILL to a rank of the trainer or of a server group."""

    group: str
    rank: int
    step: int
    """After so many steps."""
    delay_s: float
    """And so many seconds."""


def random_faults(seed: int, groups: Sequence[str], steps: int, step_s: float, ranks: Mapping[str, int]) -> list[Fault]:
    """One fault a group, in the order in which they come, before the last of `steps` steps of about `step_s` seconds."""
    draw = random.Random(seed)
    moments = [
        (group, draw.randrange(_RESUMABLE if group == "trainer" else 1, steps - 1), draw.uniform(0, step_s))
        for group in groups
    ]
    faults = [Fault(group, draw.randrange(ranks.get(group, 1)), step, delay_s) for group, step, delay_s in moments]
    return sorted(faults, key=lambda fault: (fault.step, fault.delay_s))


@dataclass(frozen=True)
class Disturbed:
    """A run of which ranks were killed."""

    run: Finished
    restarts: int
    """Servers that the launcher has started again, and launches after the first."""
    killed: tuple[tuple[str, int, int, float], ...]
    """Group, rank, steps done by then, and seconds since the launch."""
    faults: Sequence[Fault]
    """What was to be killed."""

    @property
    def in_time(self) -> bool:
        """Whether every fault came while there were steps to train: a server that ends later is not missed."""
        steps = len(self.run.metrics)
        return len(self.killed) == len(self.faults) and all(at_step < steps for _, _, at_step, _ in self.killed)


def run_disturbed(directory: Path, faults: Sequence[Fault], *overrides: str) -> Disturbed:
    """A run with these faults, to its end. Only processes of this run are killed."""
    started, killed, waiting, restarts, done = time.monotonic(), [], deque(faults), 0, 0
    while True:
        ends = False
        with Launch(directory, *overrides) as launch:
            while waiting and not ends:
                fault = waiting.popleft()
                launch.wait_for_step_or_end(max(fault.step, done))
                time.sleep(fault.delay_s)
                with contextlib.suppress(psutil.NoSuchProcess):  # it is too late
                    launch.rank(fault.group, fault.rank).kill()
                    killed.append((fault.group, fault.rank, launch.steps, time.monotonic() - started))
                    ends = fault.group == "trainer"
            run = launch.finish(_TIMEOUT_S)
        done = launch.steps + 1  # a resumed run has begun to train when it is past what was done before
        restarts += run.out.count("; starting ") + (ends and run.code == 1)
        if not ends or run.code != 1:
            return Disturbed(run, restarts, tuple(killed), faults)
        overrides = (*overrides, "run.resume=true")


def training_s(run: Finished) -> float:
    """Seconds that the steps took; those before the first one vary with the machine's other work."""
    return sum(step["time/step"] for step in run.metrics)


def measure(role: str, seeds: range, steps: int, directory: Path, show: Any) -> bool:
    """Whether every run was identical to the undisturbed one; `show` is given each seed's figures."""
    common = (f"run.stop_after={steps}", f"checkpoint.every={CHECKPOINT_EVERY}", "logging.tensorboard=false", "run.name=run")
    groups = GROUPS[role]
    beside = BESIDE if {"trainer", "generator"} & {*groups} else ()
    ranks = RANKS if beside else {"critic": RANKS["critic"]}
    layout = (
        *beside,
        f"critic.parallel.data={ranks['critic']}",
        f"actor.parallel.data={ranks.get('trainer', 1)}",
        f"reward.replicas={1 + ('reward.1' in groups)}",
    )
    expected = run_to_end(directory / "undisturbed", *common, *layout)
    step_s = expected.metrics[-1]["time/step"]
    identical = True
    for seed in seeds:
        faults = random_faults(seed, groups, steps, step_s, ranks)
        disturbed = run_disturbed(directory / f"seed_{seed}", faults, *common, *layout)
        run = disturbed.run
        figures = {
            "seed": seed,
            "killed": [dict(zip(("group", "rank", "at_step", "after_s"), kill, strict=True)) for kill in disturbed.killed],
            "restarts": disturbed.restarts,
            "in_time": disturbed.in_time,
            "exit_code": run.code,
            "seconds_added": training_s(run) - training_s(expected),
            "metrics_identical": repeatable(run.metrics) == repeatable(expected.metrics),
            **{
                f"{part or 'checkpoint'}_identical": not checkpoint_differences(expected.paths, run.paths, steps, part)
                for part in ("policy", "critic", "")
            },
        }
        if run.code:
            print(run.report(), file=sys.stderr)
        identical &= run.code == 0 and disturbed.in_time and all(figures[f"{name}_identical"] for name in _COMPARED)
        show(figures)
    return identical


def table_row(figures: dict[str, Any]) -> list[str]:
    """A seed's figures as a table shows them."""
    kills = [f"{kill['group']} rank {kill['rank']} at step {kill['at_step']}" for kill in figures["killed"]]
    restarts = f"{figures['restarts']}{'' if figures['in_time'] else ', too late'}"
    same = ["yes" if figures[f"{name}_identical"] else "NO" for name in _COMPARED]
    return [
        *(str(figures["seed"]), "\n".join(kills), restarts, str(figures["exit_code"])),
        *(f"{figures['seconds_added']:.1f}", *same),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=sorted(GROUPS), default="critic", help="what to kill")
    parser.add_argument("--seeds", type=int, default=3, help="disturbed runs")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12, help="training steps of each run")
    parser.add_argument("--directory", type=Path, help="where to keep the runs; they are deleted if not given")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    table = Table(title=f"{args.role} killed; what is identical to the undisturbed run", title_justify="left")
    for column in ("seed", "killed", "restarts", "exit", "s added", *_COMPARED):
        table.add_column(column, no_wrap=column == "killed")

    def show(figures: dict[str, Any]) -> None:
        if args.json:
            print(json.dumps({"benchmark": "faults", "role": args.role, **figures}), flush=True)
        else:
            table.add_row(*table_row(figures))

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C does, it ends the run under way
    try:
        with tempfile.TemporaryDirectory() as temporary:
            seeds = range(args.first_seed, args.first_seed + args.seeds)
            identical = measure(args.role, seeds, args.steps, args.directory or Path(temporary), show)
    finally:
        if not args.json:
            Console(width=None if sys.stdout.isatty() else 120).print(table)
    sys.exit(0 if identical else 1)


if __name__ == "__main__":
    main()
