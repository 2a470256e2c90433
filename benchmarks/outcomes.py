"""Print hashes of the results of several runs, to verify that a code change does not change them.

One hash covers the metrics of a run, except times; further hashes cover the policy and the critic
in its last checkpoint. The runs are:

- PPO with one rank
- PPO with TP2 x PP2 and a critic with TP2
- PPO that is killed and resumed
- SFT, and DPO on pairs sampled from the SFT model
- a multi-turn environment (`experiment=calculator`), and an agent on the same task
- four algorithms on `experiment=arithmetic`, each synchronous and asynchronous

`--tree DIR` runs the code of another checkout of this project. `--expect FILE` compares with
earlier output of `--json`; the exit code is 1 if a hash differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
_TIMED = ("time/", "throughput/", "episode/environment_s", "episode/retries/")
_BESIDE = ("engine.placement=server", "rollout.max_staleness=1")
_SUMS = ("experiment=arithmetic", "run.steps=20", "evaluation.every=20")
_PPO = ("experiment=tiny_ppo", "run.steps=20")
_SPLIT = (
    "actor.parallel.tensor=2",
    "actor.parallel.pipeline=2",
    "engine.parallel.tensor=2",
    "engine.parallel.data=2",
)
# Without `engine.exact`, log-probs depend on which environments answer at the same time.
_CALCULATOR = (
    "experiment=calculator",
    "run.steps=10",
    "evaluation.every=10",
    "engine.exact=true",
)
_KILLED = "killed_and_resumed"
RUNS: Mapping[str, Sequence[str]] = {
    "tiny_ppo": _PPO,
    "tiny_ppo_tp2_pp2": (*_PPO, *_SPLIT, "critic.parallel.tensor=2"),
    _KILLED: (*_PPO, "checkpoint.every=5"),
    "arithmetic_sft": ("experiment=arithmetic_sft",),
    "arithmetic_iterated_dpo": ("experiment=arithmetic_iterated_dpo", "run.steps=20"),
    "calculator": _CALCULATOR,
    "agent": (
        *_CALCULATOR,
        "algorithm=grpo",
        "environment.target=null",
        "environment.agent=benchmarks.calculator_agent:run",
    ),
    **{
        f"arithmetic_{name}": (*_SUMS, f"algorithm={name}")
        for name in ("grpo", "dapo", "online_dpo", "ppo_decoupled")
    },
    **{
        f"arithmetic_{name}_beside": (*_SUMS, f"algorithm={name}", *_BESIDE)
        for name in ("dapo", "online_dpo", "ppo_decoupled")
    },
    "arithmetic_grpo_beside": (
        *_SUMS,
        "algorithm=grpo",
        *_BESIDE,
        "algorithm.uncorrected_staleness=true",
    ),
}


def outcome(directory: Path) -> dict[str, str]:
    """Return hashes of a run's metrics and of the parts of its last checkpoint."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    kept = [
        {key: line[key] for key in sorted(line) if not key.startswith(_TIMED)} for line in lines
    ]
    found = {"metrics": _hash([json.dumps(kept).encode()])}
    last = max(
        (directory / "checkpoints").glob("step_*"),
        key=lambda step: int(step.name.removeprefix("step_")),
    )
    for part in ("policy", "critic"):
        files = sorted(
            file
            for file in (last / part).rglob("*")
            if file.is_file() and file.name != "manifest.json"
        )
        if files:
            found[part] = _hash(
                piece
                for file in files
                for piece in (str(file.relative_to(last)).encode(), file.read_bytes())
            )
    return found


def _hash(pieces: Iterator[bytes] | Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()[:16]


def run(tree: Path, directory: Path, overrides: Sequence[str], *, is_killed: bool) -> None:
    """Run an experiment to its end; with `is_killed`, kill its launcher after 12 steps and resume
    the run.

    The ranks of a killed launcher exit by themselves. Raises RuntimeError if the run fails.
    """
    command = [
        sys.executable,
        "-m",
        "aligner",
        "launch",
        *overrides,
        f"run.dir={directory}",
        "run.name=outcome",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "ALIGNER_CACHE": str(directory.parent / "cache"),
    }
    for attempt in (("run.resume=false",), ("run.resume=true",)) if is_killed else ((),):
        with (directory.parent / f"{directory.name}.log").open("a") as log:
            launch = subprocess.Popen(
                [*command, *attempt], cwd=directory.parent, env=environment, stdout=log, stderr=log
            )
        if is_killed and attempt == ("run.resume=false",):
            _wait_for_steps(directory / "metrics.jsonl", 12, launch)
            launch.send_signal(signal.SIGKILL)  # its ranks exit by themselves
            launch.wait()
            time.sleep(5)
        elif launch.wait():
            raise RuntimeError(
                f"{' '.join(command)} exited with code {launch.returncode}; {_end_of(directory)}"
            )


def _wait_for_steps(metrics: Path, steps: int, launch: subprocess.Popen[bytes]) -> None:
    while not metrics.exists() or metrics.read_text().count("\n") < steps:
        if launch.poll() is not None:
            raise RuntimeError(f"the run exited before step {steps}; {_end_of(metrics.parent)}")
        time.sleep(0.05)


def _end_of(directory: Path) -> str:
    """Return the last lines of a run's output, for an error that outlives the run directory."""
    return "last lines of its output:\n" + "\n".join(
        (directory.parent / f"{directory.name}.log").read_text().splitlines()[-20:]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tree", type=Path, default=REPOSITORY, help="checkout whose code the runs use (this one)"
    )
    parser.add_argument(
        "--runs", nargs="+", choices=sorted(RUNS), default=list(RUNS), help="runs (all)"
    )
    parser.add_argument(
        "--expect", type=Path, help="file with earlier output of --json to compare with"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    args = parser.parse_args()
    expected = {}
    if args.expect:
        expected = {
            line["run"]: line for line in map(json.loads, args.expect.read_text().splitlines())
        }
    differ = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.runs:
            directory = Path(temporary) / name
            run(args.tree.resolve(), directory, RUNS[name], is_killed=name == _KILLED)
            found = {"benchmark": "outcomes", "run": name, **outcome(directory)}
            if name in expected and found != expected[name]:
                differ.append(name)
            if args.json:
                print(json.dumps(found), flush=True)
            else:
                shown = "  ".join(
                    f"{key} {found[key]}" for key in ("metrics", "policy", "critic") if key in found
                )
                print(f"{name:32} {shown}{'  DIFFERS' if name in differ else ''}", flush=True)
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
