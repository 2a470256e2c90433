"""What a step leaves, and what rank 0 writes down of it."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from aligner.data.tokenizer import Tokenizer
from aligner.data.transcripts import branch_texts, response_text, transcript
from aligner.observability.metrics import MetricsWriter, RecordWriter
from aligner.rewards.judge_ledger import JudgeMeter
from aligner.rollout.rollout_builder import RolloutBatch
from aligner.training.step_samples import SampleRecorder, StepSamples


@dataclass(frozen=True)
class StepResult:
    """What a step leaves."""

    metrics: dict[str, float]
    processed: Mapping[str, int]
    """How many `samples` and `tokens` it went through; its throughput is measured in these."""
    rollout: RolloutBatch | None = None
    scores: Tensor | None = None
    """float32 [B]: those of the rollout's samples"""
    sampled: StepSamples | None = None
    """All that was drawn, for it to be kept."""


@dataclass(frozen=True)
class Recorder:
    """What rank 0 writes down; the other ranks have none."""

    metrics: MetricsWriter
    samples: RecordWriter
    tokenizer: Tokenizer
    sampled: SampleRecorder | None = None
    """None: of all that is sampled `samples` alone are kept."""
    judges: JudgeMeter | None = None
    """None: no judge scores."""

    def truncate_after(self, step: int, *, amends: bool) -> None:
        """Forget what a resumed run is about to do again; see `MetricsWriter.truncate_after`."""
        self.metrics.truncate_after(step, amends=amends)
        self.samples.truncate_after(step)
        if self.sampled is not None:
            self.sampled.truncate_after(step)

    def keep(self, step: int, result: StepResult) -> None:
        """Begin to write all that the step has sampled, if anything; whoever needs it complete
        calls `settle`."""
        if self.sampled is not None and result.sampled is not None:
            self.sampled.write(step, result.sampled)

    def settle(self, step: int) -> None:
        """Return once all that was sampled up to this step is written."""
        if self.sampled is not None:
            self.sampled.settle(step)

    def write_samples(self, step: int, result: StepResult, count: int) -> None:
        """Write so many samples, evenly spread over the step's, if it has any."""
        if result.rollout is None or result.scores is None:
            return
        prompts, samples = result.rollout.prompts, result.rollout.samples
        apart = max(1, -(-len(samples) // count))
        chosen = [(index, samples[index]) for index in range(0, len(samples), apart)]
        records = [
            {
                "prompt": prompts[index].text,
                "response": response_text(sample, self.tokenizer),
                "reward": float(result.scores[index]),
                # A sample that came over the wire among episodes may be marked as drawn throughout.
                **(
                    {"turns": transcript(sample, self.tokenizer)}
                    if sample.drawn_count < len(sample.response)
                    else {}
                ),
                **({"branches": branch_texts(sample, self.tokenizer)} if sample.branches else {}),
            }
            for index, sample in chosen
        ]
        self.samples.write(step, records)
