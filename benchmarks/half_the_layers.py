"""Distill SmolLM2-135M into a student that consists of its first layers: on-policy distillation on
the student's samples with a loss over the teacher's whole distribution (`teacher.loss`).

The output is KL(teacher ‖ student) before and after training, computed with transformers over the
whole vocabulary: the mean per token of the teacher's own responses to held-out prompts. The exit
code is 1 unless the KL falls to at most `--share` of its value before training.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import aligner
from aligner.config.compose import compose_config
from aligner.data.model_directory import prepare_model
from benchmarks.runs import run_to_end

_TIMEOUT_S = 3600.0
_TOKENS = 24


def first_layers(teacher: Path, directory: Path, layers: int) -> Path:
    """Write a model directory with a teacher's first layers, embeddings and output layer, and
    return it."""
    directory.mkdir()
    for file in teacher.iterdir():
        if file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copy(file, directory)
    config = json.loads((teacher / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    weights = load_file(teacher / "model.safetensors")
    own = {
        name: weight
        for name, weight in weights.items()
        if "layers." not in name or int(name.split(".")[2]) < layers
    }
    save_file(own, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def held_out(teacher: Path) -> list[list[int]]:
    """Return token ids of prompts that are not used for training, each with the teacher's
    response."""
    from transformers import AutoTokenizer

    openings = compose_config(["experiment=smollm2_rlhf"]).evaluation.prompts[:16]
    written = aligner.generate(teacher, openings, samples=2, max_new_tokens=_TOKENS, seed=5)
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    texts = [record["prompt"] + record["response"] for record in written]
    return [ids[:_TOKENS] for ids in tokenizer(texts).input_ids if len(ids) >= _TOKENS]


@torch.no_grad()
def forward_kl(teacher: Path, student: Path, rows: Sequence[Sequence[int]]) -> float:
    """Return KL(teacher ‖ student) in nats, as the mean over all tokens of `rows`."""
    from transformers import AutoModelForCausalLM

    tokens = torch.tensor(rows)

    def logprobs(directory: Path) -> Tensor:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        return torch.cat([model(part).logits.log_softmax(-1) for part in tokens.split(8)])

    its, own = logprobs(teacher), logprobs(student)
    return float((its.exp() * (its - own)).sum(-1).mean())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--layers", type=int, default=15, help="layers of the student; the teacher has 30 (15)"
    )
    parser.add_argument("--steps", type=int, default=20, help="training steps of 32 samples (20)")
    parser.add_argument("--loss", default="forward_kl", help="value of teacher.loss (forward_kl)")
    parser.add_argument(
        "--share",
        type=float,
        default=0.5,
        help="required KL after training, as a share of the KL before (0.5)",
    )
    parser.add_argument("overrides", nargs="*", help="further overrides of the run, key=value")
    parsed = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="aligner-half-the-layers-") as place:
        root = Path(place)
        teacher = prepare_model(
            compose_config(["experiment=smollm2_sentiment", f"run.dir={root / 'prepared'}"])
        )
        student = first_layers(teacher, root / "student", parsed.layers)
        rows = held_out(teacher)
        before = forward_kl(teacher, student, rows)
        print(json.dumps({"kl": before, "tokens": sum(map(len, rows))}), flush=True)
        run = run_to_end(
            root / "run",
            *(
                "model.source=directory",
                f"model.path={student}",
                "data=openings",
                "algorithm=on_policy_distillation",
            ),
            *(
                f"teacher.path={teacher}",
                f"teacher.loss={parsed.loss}",
                "rollout.prompts_per_step=8",
            ),
            "algorithm.kl_coefficient=0",
            *(
                "rollout.samples_per_prompt=4",
                "rollout.micro_batches=1",
                "algorithm.minibatches=1",
                f"run.steps={parsed.steps}",
            ),
            *("actor.parallel.last_stage_layers=4", "actor.micro_batch_tokens=512"),
            *(
                "actor.optimizer.learning_rate=1e-3",
                "actor.optimizer.warmup_steps=2",
                *parsed.overrides,
            ),
            experiment="smollm2_sentiment",
            timeout_s=_TIMEOUT_S,
        )
        subprocess.run(
            [sys.executable, "-m", "aligner", "convert", str(run.paths.root), str(root / "taught")],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        after = forward_kl(teacher, root / "taught", rows)
        steps = [step for step in run.metrics if "time/step" in step]
    seen = {
        name: [step[name] for step in (steps[0], steps[-1])]
        for name in ("policy/teacher_divergence", "distill/reverse_kl")
    }
    seconds = sum(step["time/step"] for step in steps)
    print(
        json.dumps(
            {
                "kl": after,
                "of_before": after / before,
                "steps": len(steps),
                "seconds": seconds,
                **seen,
            }
        )
    )
    return 0 if after <= parsed.share * before else 1


if __name__ == "__main__":
    sys.exit(main())
