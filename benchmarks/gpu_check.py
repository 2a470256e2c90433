"""Check which parts of aligner work on the GPU of this machine, and print a table: pass, fail or
absent for each check, with the reason.

    make gpu-check                                     # or, without make:
    python -m benchmarks.gpu_check
    ALIGNER_DEVICE=cpu python -m benchmarks.gpu_check  # the same checks on the CPU

Each check runs in a separate process, and its result is appended to --output. Checks that have
passed according to that file are skipped, so repeat the command after an interruption. After
--limit-s no further check starts. A check whose device or package is missing (a GPU,
transformer-engine, PyTriton, TensorRT-LLM) is absent, which is not a failure. The exit code is 1 if
any check failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from aligner.extras import describe_numpy_conflict
from benchmarks.runs import REPOSITORY, python_path

DEVICE = os.environ.get("ALIGNER_DEVICE", "cuda")
GPU, CUDA = "GPU", "CUDA"
"""Devices that a check may need: the device of this run (`GPU`), or CUDA, which a CPU cannot
replace. A check that needs several GPUs names their number, such as `8 GPUs`."""
_MANY = " GPUs"
PACKAGES = (
    "torch",
    "megatron-core",
    "transformers",
    "numpy",
    "transformer-engine",
    "nvidia-pytriton",
    "tensorrt-llm",
    "apex",
)
TIMEOUT_S = 540
_TAIL = 400
"""Number of characters of a failed check's output that are reported."""


@dataclass(frozen=True)
class Check:
    """A check: a command that succeeds if the part of aligner that `name` describes works."""

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()
    """Modules and devices (`GPU`, `CUDA`, `8 GPUs`) without which the check is absent."""
    tells: bool = False
    """Whether the output of the command consists of figures to record, one JSON object per line."""


@dataclass(frozen=True)
class Outcome:
    """Result of a check."""

    name: str
    device: str
    result: str
    """One of pass, fail and absent."""
    why: str = ""
    seconds: float = 0.0
    figures: tuple[dict[str, Any], ...] = ()
    """Figures that the check has measured."""


def _tests(name: str, *arguments: str, needs: Sequence[str] = ()) -> Check:
    return Check(
        name,
        (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments),
        (GPU, *needs),
    )


def _run(name: str, *overrides: str, needs: Sequence[str] = ()) -> Check:
    """Return a check that launches a short run; `{place}` stands for a temporary directory."""
    return Check(
        name,
        (sys.executable, "-m", "aligner", "launch", *overrides, "run.dir={place}/run"),
        (GPU, *needs),
    )


def _measured(part: str, needs: Sequence[str] = ()) -> Check:
    """Return a check that runs a part of `benchmarks.device`.

    On a CPU it uses a tiny model, and the figures only show that the benchmark works.
    """
    small: tuple[str, ...] = (
        "--model",
        "tiny",
        "--repeats",
        "1",
        "--rows",
        "2",
        "--tokens",
        "32",
        "--batches",
        "2",
    )
    small += ("--new-tokens", "4", "--precision", "bf16")
    return Check(
        f"speed: {part}",
        (
            sys.executable,
            "-m",
            "benchmarks.device",
            "--json",
            "--parts",
            part,
            *(small if DEVICE == "cpu" else ()),
        ),
        (GPU, *needs),
        tells=True,
    )


# Writing samples to files would require pyarrow.
_SERVED = ("experiment=tiny_ppo", "algorithm=grpo", "logging.samples_mib=0")
_LAYOUT = tuple(f"actor.parallel.{way}=2" for way in ("tensor", "pipeline", "data"))
_GENERATOR = (
    *(
        "engine.placement=server",
        "rollout.max_staleness=1",
        "actor.parallel.data=2",
        "engine.parallel.data=2",
    ),
    "algorithm.truncated_importance=token",
)
_SHORT = ("rollout.prompts_per_step=8", "rollout.max_response_tokens=8", "run.steps=2")
CHECKS = (
    _tests("model families against transformers", "tests/gpu/test_parity.py"),
    _tests("optimizers", "tests/gpu/test_optimizer.py"),
    _tests("deterministic training (cluster.deterministic)", "tests/gpu/test_deterministic.py"),
    _tests("embedded engine", "tests/gpu/test_engine.py"),
    _tests("weight sync over NCCL and CUDA IPC", "tests/gpu/test_resharding.py", needs=[CUDA]),
    _run(
        "run without servers (SFT)",
        "experiment=arithmetic_sft",
        "run.steps=5",
        "actor.optimizer.warmup_steps=0",
    ),
    _run("run with a reward server (GRPO)", *_SERVED, *_SHORT, needs=["pytriton"]),
    _run("run with TP2, PP2 and DP2", *_SERVED, *_SHORT, *_LAYOUT, needs=["pytriton", "8 GPUs"]),
    _run(
        "weight sync to a separate generator",
        *_SERVED,
        *_SHORT,
        *_GENERATOR,
        needs=["pytriton", "4 GPUs"],
    ),
    _tests(
        "interfaces of TensorRT-LLM",
        "tests/engines/tensorrt_llm/test_contract.py",
        needs=[CUDA, "tensorrt_llm"],
    ),
    *map(_measured, ("train", "decode", "publish")),
    _measured("grpo", needs=["pytriton"]),
)


def lacking(check: Check) -> list[str]:
    """Return the modules and devices that a check needs and this machine lacks."""
    modules = [need for need in check.needs if need not in (GPU, CUDA) and not need.endswith(_MANY)]
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    many = [
        need
        for need in check.needs
        if need.endswith(_MANY) and gpus() < int(need.removesuffix(_MANY))
    ]
    if "pytriton" in check.needs and (unfit := describe_numpy_conflict()):
        missing.append(f"numpy < 2 ({unfit})")
    wants_cuda = CUDA in check.needs or (GPU in check.needs and DEVICE == "cuda")
    return [
        *([CUDA if DEVICE == "cpu" else GPU] if wants_cuda and not gpus() else []),
        *many,
        *missing,
    ]


def gpus() -> int:
    """Return the number of GPUs that torch finds; 0 without torch."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()


def carry_out(check: Check) -> Outcome:
    """Run a check, or report it as absent if this machine lacks something that it needs."""
    if missing := lacking(check):
        return Outcome(check.name, DEVICE, "absent", f"missing: {', '.join(missing)}")
    environment = {**os.environ, "PYTHONPATH": python_path(), "ALIGNER_DEVICE": DEVICE}
    if DEVICE == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        command = [argument.replace("{place}", place) for argument in check.command]
        try:
            done = subprocess.run(
                command,
                cwd=REPOSITORY,
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                errors="replace",
            )
            said, failed = f"{done.stdout}\n{done.stderr}", done.returncode != 0
        except subprocess.TimeoutExpired as late:
            # The output of `TimeoutExpired` is bytes even with `text=True`.
            before = [(part or b"").decode(errors="replace") for part in (late.stdout, late.stderr)]
            said, failed = "\n".join([*before, f"timed out after {TIMEOUT_S} s"]), True
    seconds = round(time.perf_counter() - begin, 1)
    if failed:
        print(said, file=sys.stderr)
        return Outcome(check.name, DEVICE, "fail", said.strip()[-_TAIL:], seconds)
    figures = tuple(json.loads(line) for line in done.stdout.splitlines()) if check.tells else ()
    return Outcome(check.name, DEVICE, "pass", "; ".join(map(_shown, figures)), seconds, figures)


def _shown(figures: dict[str, Any]) -> str:
    """Return the most important figures of a line of output as text."""
    names = (
        "batch",
        "tokens_per_s",
        "flops_share",
        "bandwidth_share",
        "peak_gib",
        "expected_gib",
        "gb_per_s",
        "step_s",
    )
    told = (f"{name} {figures[name]:.3g}" for name in names if figures.get(name) is not None)
    return f"{figures['model']}: {', '.join(told)}"


def versions() -> str:
    """Return the name of the device and the versions of the relevant packages."""
    name = "CPU"
    if DEVICE == "cuda" and gpus():
        import torch

        name = torch.cuda.get_device_name()
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"{package} not installed")
    return f"{name}; {', '.join(found)}"


def passed_before(output: Path) -> dict[str, Outcome]:
    """Return the checks that have passed on this device according to a file of results, by name."""
    lines = output.read_text().splitlines() if output.exists() else []
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    return {each.name: each for each in outcomes if each.result == "pass" and each.device == DEVICE}


def table(outcomes: Sequence[Outcome]) -> Table:
    """Return a table of the results, with one row per check."""
    shown = Table("check", "result", "seconds", "why", title=versions(), title_justify="left")
    for each in outcomes:
        shown.add_row(each.name, each.result, f"{each.seconds:g}" if each.seconds else "", each.why)
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("gpu_check.jsonl"),
        help="file of results, one JSON object per check (gpu_check.jsonl)",
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=540.0,
        help="seconds after which no further check starts (540)",
    )
    args = parser.parse_args(arguments)
    before, outcomes, begin = passed_before(args.output), [], time.monotonic()
    for check in CHECKS:
        if check.name in before:
            outcomes.append(before[check.name])
            continue
        if time.monotonic() - begin > args.limit_s:
            outcomes.append(
                Outcome(check.name, DEVICE, "not run", "--limit-s was reached; repeat the command")
            )
            continue
        print(f"{check.name} …", file=sys.stderr, flush=True)
        outcomes.append(carry_out(check))
        with args.output.open("a") as file:
            file.write(json.dumps(asdict(outcomes[-1])) + "\n")
    Console().print(table(outcomes))
    sys.exit(any(each.result == "fail" for each in outcomes))


if __name__ == "__main__":
    main()
