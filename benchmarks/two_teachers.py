"""Distill two teachers into one student; each teacher has learned one task: sums or differences of
two numbers below 100.

Each teacher is trained with SFT on correct answers to its own task. The student is trained with SFT
on answers to both tasks in which carries and borrows are often missing. Then on-policy distillation
trains the student with the teacher of each prompt's task (`teacher.sources`). The output has greedy
pass@1 of teachers and student on 512 held-out prompts per task, and pass@1 of the student after
distillation as a share of each teacher's. The exit code is 1 unless both shares reach `--share`.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from aligner_examples import arithmetic
from benchmarks.distillation import pass_at_1
from benchmarks.runs import run_to_end

TASKS = ("sums", "differences")
_HELD_OUT = 512
_FORGETS = 0.6
_TIMEOUT_S = 3600.0


def differences() -> Iterator[dict[str, str]]:
    """Return the training differences with their answers; none of them is in `held_out`."""
    return (_difference(one, other) for one, other in _pairs()[_HELD_OUT:])


def demonstrations() -> Iterator[dict[str, str]]:
    """Yield the answers on which the student is trained first: both tasks, mostly without carries
    and borrows."""
    draw = random.Random(3)
    theirs = (
        record
        | {
            "response": (
                str(_without_borrowing(record["prompt"]))
                if draw.random() < _FORGETS
                else record["answer"]
            )
        }
        for _ in range(4)
        for record in differences()
    )
    for sums, difference in zip(arithmetic.demonstrations(), theirs, strict=False):
        yield sums
        yield difference


def prompts() -> Iterator[dict[str, str]]:
    """Yield the training prompts of both tasks alternately, each with its `task`."""
    for one, other in zip(arithmetic.prompts(), differences(), strict=False):
        yield one | {"task": "sums"}
        yield other | {"task": "differences"}


def held_out() -> Iterator[dict[str, str]]:
    """Yield the evaluation prompts of both tasks, each with its `task`."""
    yield from (record | {"task": "sums"} for record in arithmetic.held_out())
    yield from (
        _difference(one, other) | {"task": "differences"} for one, other in _pairs()[:_HELD_OUT]
    )


def _pairs() -> list[tuple[int, int]]:
    pairs = [(one, other) for one in range(100) for other in range(one + 1)]
    random.Random(4).shuffle(pairs)
    return pairs


def _difference(one: int, other: int) -> dict[str, str]:
    answer = str(one - other)
    return {"prompt": f"{one}-{other}=", "response": answer, "answer": answer}


def _without_borrowing(prompt: str) -> int:
    """Return the difference of two numbers digit by digit, each digit modulo 10."""
    one, other = map(int, prompt.rstrip("=").split("-"))
    return (one // 10 - other // 10) % 10 * 10 + (one - other) % 10


def imitator(directory: Path, answers: str, layers: int, steps: int, seed: int) -> Path:
    """Train a model with SFT on the records of `answers` (`module:function`), and return its model
    directory."""
    directory.mkdir()
    run = run_to_end(
        directory / "run",
        *(
            f"model.config.num_hidden_layers={layers}",
            f"data.path=function:{answers}",
            f"run.steps={steps}",
            f"seed={seed}",
        ),
        "data.max_prompt_tokens=6",
        experiment="arithmetic_sft",
        timeout_s=_TIMEOUT_S,
    )
    command = [
        sys.executable,
        "-m",
        "aligner",
        "convert",
        str(run.paths.root),
        str(directory / "model"),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return directory / "model"


def passes(policy: Path) -> dict[str, float]:
    """Return the policy's pass@1 on the held-out prompts, by task."""
    return {
        task: pass_at_1(policy, [record for record in held_out() if record["task"] == task])
        for task in TASKS
    }


def taught(
    directory: Path, student: Path, teachers: dict[str, Path], steps: int, seed: int
) -> list[dict[str, float]]:
    """Distill the teachers into the student on the student's samples, and return the metrics of the
    run."""
    sources = ", ".join(
        f"{task}: {{path: {path}, tasks: [{task}]}}" for task, path in teachers.items()
    )
    run = run_to_end(
        directory,
        *(
            f"model.path={student}",
            "teacher.path=null",
            f"+teacher.sources={{{sources}}}",
            f"run.steps={steps}",
            f"seed={seed}",
        ),
        *(
            "data.path=function:benchmarks.two_teachers:prompts",
            "evaluation.path=function:benchmarks.two_teachers:held_out",
        ),
        *("evaluation.group_by=task", f"evaluation.every={steps}"),
        experiment="arithmetic_distillation",
        timeout_s=_TIMEOUT_S,
    )
    return run.metrics


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--share",
        type=float,
        default=0.9,
        help="required pass@1 of the student, as a share of each teacher's (0.9)",
    )
    parser.add_argument("--imitate", type=int, default=1200, help="steps of each SFT run (1200)")
    parser.add_argument(
        "--steps", type=int, default=400, help="steps of on-policy distillation (400)"
    )
    parser.add_argument(
        "--layers", type=int, default=3, help="layers of the student; the teachers have 3 (3)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of all runs (1)")
    parsed = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="aligner-two-teachers-") as place:
        root = Path(place)
        answers = {
            "sums": "aligner_examples.arithmetic:solutions",
            "differences": "benchmarks.two_teachers:differences",
        }
        teachers = {
            task: imitator(root / task, answers[task], 3, parsed.imitate, parsed.seed)
            for task in TASKS
        }
        known = {task: passes(teachers[task]) for task in TASKS}
        print(json.dumps({"teachers": known}), flush=True)
        student = imitator(
            root / "student",
            "benchmarks.two_teachers:demonstrations",
            parsed.layers,
            parsed.imitate,
            parsed.seed,
        )
        before = passes(student)
        print(json.dumps({"student": before}), flush=True)
        metrics = taught(root / "taught", student, teachers, parsed.steps, parsed.seed)
    seconds = sum(step.get("time/step", 0.0) - step.get("time/evaluate", 0.0) for step in metrics)
    after = {task: metrics[-1][f"eval/pass@1/{task}"] for task in TASKS}
    shares = {task: after[task] / known[task][task] for task in TASKS}
    print(
        json.dumps(
            {"taught": after, "steps": parsed.steps, "seconds": seconds, "of_each_teacher": shares}
        )
    )
    return 0 if min(shares.values()) >= parsed.share else 1


if __name__ == "__main__":
    sys.exit(main())
