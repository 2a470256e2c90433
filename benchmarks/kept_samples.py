"""Measure the cost of writing all samples of a step to Parquet files: CPU time, the time for which
training waits, and file size.

    python -m benchmarks.kept_samples MODEL_DIRECTORY PROMPTS SAMPLES TOKENS

The samples consist of random tokens and random training data; the benchmark writes the same step
five times.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Experience, Prompt, Sample, collate
from aligner.observability.sample_files import SampleFiles
from aligner.training.rollout_builder import RolloutBatch
from aligner.training.services import PendingRows
from aligner.training.step_samples import SampleRecorder, StepSamples

_REPEATS = 5


def step_samples(tokenizer: Tokenizer, prompts: int, each: int, tokens: int) -> StepSamples:
    """Return the samples of a step: `each` responses of `tokens` random tokens per prompt, with
    random training data."""
    chance = torch.Generator().manual_seed(0)

    def drawn(count: int) -> torch.Tensor:
        return torch.randint(tokenizer.vocab_size, (count,), generator=chance)

    asked = [
        Prompt(place, tokenizer.decode(drawn(20)), drawn(20), {"answer": place})
        for place in range(prompts)
    ]
    samples = [
        Sample(
            prompt.id,
            index,
            torch.cat([prompt.tokens, drawn(tokens)]),
            prompt.tokens.numel(),
            -torch.empty(tokens).exponential_(generator=chance),
            torch.full((tokens,), 7),
            "stop",
            prompt.metadata,
        )
        for prompt in asked
        for index in range(each)
    ]
    batch = collate(samples, tokenizer.pad_token_id)
    names = (
        "scores",
        "rewards",
        "values",
        "old_logprobs",
        "reference_logprobs",
        "advantages",
        "returns",
        "entropies",
    )
    tables = {name: -torch.empty(batch.mask.shape).exponential_(generator=chance) for name in names}
    experience = Experience(
        **{**vars(batch), "row_ids": torch.arange(len(samples))},
        **{**tables, "scores": tables["scores"][:, 0]},
    )
    rollout = RolloutBatch(
        [asked[place // each] for place in range(len(samples))],
        samples,
        batch,
        *[PendingRows(())] * 2,
    )
    return StepSamples(rollout, experience.scores, experience=experience)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="model directory, whose tokenizer is used")
    parser.add_argument("prompts", type=int, help="prompts of the step")
    parser.add_argument("samples", type=int, help="samples per prompt")
    parser.add_argument("tokens", type=int, help="tokens of each response")
    asked = parser.parse_args()
    tokenizer = Tokenizer(asked.model)
    samples = step_samples(tokenizer, asked.prompts, asked.samples, asked.tokens)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        recorder = SampleRecorder(
            SampleFiles(Path(directory), 10**6), tokenizer, lambda prompt: (prompt, 0), ["reward"]
        )
        for step in range(1, _REPEATS + 1):
            begun, wall = time.process_time(), time.perf_counter()
            recorder.write(step, samples)
            handed = time.perf_counter() - wall
            recorder.wait_until_written(step)
            cpu, wall = time.process_time() - begun, time.perf_counter() - wall
            print(
                f"step {step}: {cpu:.3f} s CPU time, {wall:.3f} s elapsed; training waited for"
                f" {handed * 1e6:.0f} us"
            )
        size = sum(
            file.stat().st_size for file in Path(directory).glob(f"*_{_REPEATS:06d}.parquet")
        )
    count = asked.prompts * asked.samples * asked.tokens
    print(
        f"{count} response tokens: {cpu / count * 1e6:.2f} us CPU time and"
        f" {size / count:.1f} bytes per token"
    )


if __name__ == "__main__":
    main()
