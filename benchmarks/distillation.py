"""Compare three ways to train a student of two layers: on-policy distillation, SFT on the teacher's
responses, and GRPO without a teacher.

The teacher is the model of `experiment=arithmetic`. For each way the output has the steps and
seconds until the student reaches `--target` greedy pass@1 on 512 held-out sums.

All ways start from the same student (`experiment=arithmetic_student_sft`) and use the same number
of samples per step. pass@1 is measured every `--every` steps. Seconds are the times of the steps,
without start-up and evaluations. SFT uses each response of the teacher once; the time to generate
these responses is reported separately (`drawing_s`). The exit code is 1 unless on-policy
distillation reaches the target.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aligner
from aligner_examples.arithmetic import held_out
from benchmarks.runs import run_to_end

STUDENT = "model.path=experiment:arithmetic_student_sft"
_SAMPLES = 256
"""Number of samples per step; `experiment=arithmetic` has 64 prompts with 4 samples each."""
_TIMEOUT_S = 3600.0

Curve = list[dict[str, float]]
"""Points of a curve: the step, the time of all steps up to it in seconds, and pass@1 after it."""


def online(experiment: str, directory: Path, steps: int, every: int, *overrides: str) -> Curve:
    """Run an online experiment with evaluations, and return its curve."""
    lengths = (f"run.steps={steps}", f"evaluation.every={every}")
    run = run_to_end(directory, *lengths, *overrides, experiment=experiment, timeout_s=_TIMEOUT_S)
    curve, seconds = [], 0.0
    for step in run.metrics:
        if "time/step" in step:  # the evaluation before training has no step
            seconds += step["time/step"] - step.get("time/evaluate", 0.0)
        if "eval/pass@1" in step:
            curve.append({"step": step["step"], "seconds": seconds, "pass@1": step["eval/pass@1"]})
    return curve


def imitation(
    directory: Path, steps: int, every: int, seed: int, *overrides: str
) -> tuple[Curve, float]:
    """Train a student with SFT on the teacher's responses, each of which it sees once.

    Returns:
        The student's curve, and the time to generate the responses in seconds.
    """
    drawn = run_to_end(
        *(
            directory / "answers",
            "algorithm=preferences",
            "model.path=experiment:arithmetic",
            f"run.steps={steps}",
        ),
        *(f"seed={seed}", "evaluation.every=0"),
        experiment="arithmetic",
        timeout_s=_TIMEOUT_S,
    )
    run = run_to_end(
        *(
            directory / "imitation",
            "model.source=directory",
            STUDENT,
            f"data.path={drawn.paths.root / 'responses.jsonl'}",
        ),
        "data.max_response_tokens=5",
        *(
            f"data.batch_size={_SAMPLES}",
            f"run.steps={steps}",
            f"checkpoint.every={every}",
            f"checkpoint.keep={steps}",
        ),
        *(f"seed={seed}", *overrides),
        experiment="arithmetic_student_sft",
        timeout_s=_TIMEOUT_S,
    )
    seconds = [step["time/step"] for step in run.metrics if "time/step" in step]
    curve = [
        {
            "step": step,
            "seconds": sum(seconds[:step]),
            "pass@1": pass_at_1(run.paths.checkpoints / f"step_{step}", list(held_out())),
        }
        for step in range(every, steps + 1, every)
    ]
    return curve, sum(step["time/step"] for step in drawn.metrics if "time/step" in step)


def pass_at_1(model: Path, asked: Sequence[dict[str, str]]) -> float:
    """Return the share of the records in `asked` that a stored policy answers correctly with greedy
    decoding."""
    answers = aligner.generate(model, asked, greedy=True, max_new_tokens=5)
    return sum(
        answer["response"] == one["answer"] for answer, one in zip(answers, asked, strict=True)
    ) / len(asked)


def ways(directory: Path, steps: int, every: int, seed: int) -> Iterator[dict[str, Any]]:
    """Train the student in each way, and yield the name of the way and its curve."""
    same, rate = f"seed={seed}", "actor.optimizer.learning_rate=1e-3"
    taught = online("arithmetic_distillation", directory / "taught", steps, every, same)
    yield {"way": "on-policy distillation", "curve": taught}
    curve, drawing = imitation(
        directory, steps, every, seed, rate, "actor.optimizer.warmup_steps=10"
    )
    yield {"way": "SFT on the teacher's responses", "curve": curve, "drawing_s": drawing}
    for more in ((), (rate,)):
        told = "GRPO" + (" at the learning rate of distillation" if more else "")
        name = "rewarded" + ("_fast" if more else "")
        yield {
            "way": told,
            "curve": online(
                "arithmetic", directory / name, steps, every, same, STUDENT, "algorithm=grpo", *more
            ),
        }


def reached(curve: Curve, target: float) -> dict[str, float] | None:
    """Return the first point of a curve that reaches the target; None if no point does."""
    return next((point for point in curve if point["pass@1"] >= target), None)


def shown(way: dict[str, Any], target: float) -> str:
    """Return one line that summarizes the result of a way."""
    found, best = reached(way["curve"], target), max(point["pass@1"] for point in way["curve"])
    told = "not reached" if found is None else f"step {found['step']:.0f}, {found['seconds']:.1f} s"
    drawing = (
        f" (and {way['drawing_s']:.1f} s to generate the responses)" if "drawing_s" in way else ""
    )
    return f"{way['way']}: pass@1 {target:g}: {told}{drawing}; best {best:.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=float, default=0.6, help="pass@1 to reach (0.6)")
    parser.add_argument("--steps", type=int, default=100, help="steps of each run (100)")
    parser.add_argument(
        "--every", type=int, default=10, help="steps between measurements of pass@1 (10)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of all runs (1)")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per way, with its whole curve"
    )
    parsed = parser.parse_args(arguments)
    first = None
    with tempfile.TemporaryDirectory(prefix="aligner-distillation-") as place:
        for way in ways(Path(place), parsed.steps, parsed.every, parsed.seed):
            first = first or way
            print(json.dumps(way) if parsed.json else shown(way, parsed.target), flush=True)
    assert first is not None
    return 0 if reached(first["curve"], parsed.target) else 1


if __name__ == "__main__":
    sys.exit(main())
