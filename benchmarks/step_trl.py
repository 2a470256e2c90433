"""The TRL side of benchmarks.step: runs and times GRPO steps. It runs with the interpreter of the
separate TRL environment and imports only the reward from this project.

Phases: `generate` is the time in `_generate`; `logprobs` is the time of log-probs without gradients
(only those of the reference model: with one update per step TRL uses the log-probs of the update as
old log-probs); `train` is the rest of the step.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import step_reward


class Stopwatch:
    """Measures the time of each phase since the last call of `take`, in seconds."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._since = time.perf_counter()

    def timed(
        self, phase: str, function: Callable[..., Any], when: Callable[[], bool] = lambda: True
    ) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts, begin = when(), time.perf_counter()
            result = function(*args, **kwargs)
            if counts:
                self._seconds[phase] += time.perf_counter() - begin
            return result

        return call

    def take(self) -> dict[str, float]:
        now = time.perf_counter()
        seconds = {"step": now - self._since, **self._seconds}
        seconds["train"] = seconds["step"] - sum(self._seconds.values())
        self._seconds.clear()
        self._since = now
        return seconds


def run(work: Mapping[str, Any]) -> list[dict[str, float]]:
    """Run TRL's GRPOTrainer, and return the times of each step; `work` is the JSON of
    benchmarks.step."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback, logging
    from trl import GRPOConfig, GRPOTrainer

    logging.disable_progress_bar()
    watch, steps, lengths = Stopwatch(), [], set()

    class EachStep(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps.append(watch.take())
            lengths.update(trainer._metrics["train"]["completions/min_length"])

    torch.set_num_threads(work["threads"])
    bf16 = work["precision"] == "bf16"
    settings = GRPOConfig(
        output_dir=work["output"],
        beta=work["kl_coefficient"],
        loss_type="grpo",
        num_generations=work["samples"],
        num_iterations=1,
        temperature=1.0,
        max_completion_length=work["new_tokens"],
        # No EOS token ends a response early.
        generation_kwargs={"min_new_tokens": work["new_tokens"]},
        per_device_train_batch_size=work["rows"],
        gradient_accumulation_steps=len(work["prompts"])
        * work["samples"]
        // (work["rows"] * work["processes"]),
        max_steps=work["steps"],
        learning_rate=work["learning_rate"],
        model_init_kwargs={"dtype": "bfloat16" if bf16 else "float32"},
        bf16=bf16,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        use_cpu=True,
        # There are no unused parameters, and the search would take a pass over the graph.
        ddp_find_unused_parameters=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=work["directory"],
        reward_funcs=step_reward.trl,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": [*work["prompts"]] * work["steps"]}),
        callbacks=[EachStep()],
    )
    trainer._generate = watch.timed("generate", trainer._generate)
    logprobs = "_get_per_token_logps_and_entropies"
    setattr(
        trainer,
        logprobs,
        watch.timed("logprobs", getattr(trainer, logprobs), lambda: not torch.is_grad_enabled()),
    )
    trainer.train()
    assert lengths == {work["new_tokens"]}, f"responses of {lengths} tokens"
    return steps


if __name__ == "__main__":
    given, told = map(Path, sys.argv[1:])
    told.write_text(json.dumps(run(json.loads(given.read_text()))))
