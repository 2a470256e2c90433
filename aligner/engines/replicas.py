"""Divide samples between the replicas of an engine.

A replica is a group of `engine.parallel.tensor` ranks that hold one copy of the weights.
`generate_in_parts` generates each replica's share of the samples and collects all samples on every
rank. `Enough` is the condition under which generation stops before all samples are complete.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.data.collectives import gather_json, gather_samples, is_distributed
from aligner.data.types import Prompt, Sample
from aligner.engines.engine_loop import SamplesInFlight, StartsSamples, finish
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.errors import AlignerError
from aligner.schema import EngineParallelConfig

STEPS_A_PART = 8
"""Number of engine steps between two pauses at which the replicas agree on whether to continue.

A weight sync that waits for the next pause waits for a fraction of a second at most. The one or two
messages of a few bytes per pause cost little compared with the forward passes.
"""

SamplesInParts = Generator[None, None, list[Sample]]
"""A generator that pauses during generation, and returns the samples."""


@dataclass(frozen=True)
class Enough:
    """Condition under which generation stops before every response is complete.

    Both attributes must be satisfied.
    """

    prompts: int
    """Minimum number of prompts whose samples are all complete."""
    due: tuple[int, ...] = ()
    """Indices of prompts whose samples must all be complete."""

    def is_met(self, lacking: Tensor) -> bool:
        """Return whether generation may stop. This is always the case if all samples are complete.

        Args:
            lacking: int64 [B], greater than 0 for each prompt with an incomplete sample.
        """
        complete = lacking == 0
        return bool(complete.all()) or (
            int(complete.sum()) >= self.prompts and bool(complete[list(self.due)].all())
        )


def replica_group(
    layout: EngineParallelConfig, rank: int, timeout: timedelta
) -> dist.ProcessGroup | None:
    """Return the process group of this rank's replica; None if each rank is its own replica.
    Collective."""
    if layout.tensor == 1:
        return None
    members = [
        list(range(first, first + layout.tensor)) for first in range(0, layout.ranks, layout.tensor)
    ]
    # `new_group` is collective over all ranks, including the ranks outside the new group.
    groups = [dist.new_group(ranks, timeout=timeout) for ranks in members]
    return groups[rank // layout.tensor]


def generate_in_parts(
    engine: StartsSamples,
    layout: EngineParallelConfig,
    rank: int,
    samples: Sequence[Sample],
    samples_per_prompt: int,
    options: SamplingOptions,
    *,
    steps: int | None = None,
    enough: Enough | None = None,
) -> SamplesInParts:
    """Continue the unfinished samples until all are complete, or until `enough` is met. Collective.

    Each replica generates its share of the samples. After every `steps` engine steps the replicas
    check `enough`; if it is not met, the generator pauses, and the weights may change. All ranks
    pause equally often.

    Args:
        engine: Starts the generation on this replica.
        layout: Parallel sizes of the engine.
        rank: Rank of this process in the engine.
        samples: Complete and unfinished samples; the samples of a prompt are adjacent.
        samples_per_prompt: Number of samples of each prompt.
        options: Sampling parameters.
        steps: Number of engine steps between two checks; None: run until the replica's share is
            complete.
        enough: Condition for an early stop; None: generate until all samples are complete.

    Yields:
        None at each pause.

    Returns:
        All samples in the given order, on every rank.

    Raises:
        AlignerError: Generation failed on one rank; all ranks raise the error.
    """
    unfinished = [
        index for index, sample in enumerate(samples) if sample.finish_reason == "unfinished"
    ]
    incomplete = torch.zeros(len(samples) // samples_per_prompt, dtype=torch.int64)
    incomplete[[index // samples_per_prompt for index in unfinished]] = 1
    enough = enough or Enough(len(incomplete))

    share = -(-len(unfinished) // layout.data)
    first = rank // layout.tensor * share
    # All replicas generate equally many samples. If the division leaves a remainder, the last
    # replicas generate the last sample again; `gather_samples` below drops the duplicates.
    assigned = [*unfinished, *unfinished[-1:] * (share * layout.data - len(unfinished))][
        first : first + share
    ]

    generated: dict[int, Sample] = {}  # keys are positions in `assigned`
    generation: SamplesInFlight | None = None
    try:
        while not enough.is_met(incomplete):
            if generation is not None:
                yield

            # An error must not skip the collective in `_agree`, because the other ranks wait there.
            error: AlignerError | None = None
            try:
                generation = generation or engine.start(
                    [_request(samples[index]) for index in assigned], options
                )
                generated |= finish(generation, steps)
            except AlignerError as raised:
                error = raised

            incomplete.zero_()
            incomplete[
                [
                    index // samples_per_prompt
                    for position, index in enumerate(assigned)
                    if position not in generated
                ]
            ] = 1
            _agree(layout, incomplete, error)

        if generation is None:
            return list(samples)
        if len(generated) < share:
            generated |= generation.interrupt()
    finally:
        if generation is not None:
            generation.cancel()

    # Only rank 0 of a replica has the samples.
    leaders = [replica * layout.tensor for replica in range(layout.data)]
    collected = gather_samples([generated[position] for position in range(share)], leaders)[
        : len(unfinished)
    ]
    # `gather_samples` does not send metadata.
    continued = dict(zip(unfinished, collected, strict=True))
    return [
        replace(continued[index], metadata=sample.metadata) if index in continued else sample
        for index, sample in enumerate(samples)
    ]


def run_through(parts: SamplesInParts) -> list[Sample]:
    """Run a generator of `generate_in_parts` to its end without using its pauses, and return the
    samples."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value


def _request(sample: Sample) -> GenerationRequest:
    """Return the request that begins or continues an unfinished sample."""
    prompt = Prompt(sample.prompt_id, "", sample.initial_prompt, sample.metadata)
    begun = sample if len(sample.response) or sample.branches else None
    return GenerationRequest(prompt, sample.sample_index, begun=begun)


def _agree(layout: EngineParallelConfig, lacking: Tensor, error: AlignerError | None) -> None:
    """Sum `lacking` over all ranks in place, and raise AlignerError on every rank if one rank has
    an error.

    The ranks of one replica always have the same result, so a single replica needs no
    communication.
    """
    if layout.data > 1 and is_distributed():
        counts = torch.cat([lacking, torch.tensor([int(error is not None)])])
        dist.all_reduce(counts)
        lacking.copy_(counts[:-1])
        if counts[-1]:
            messages = gather_json(None if error is None else str(error))
            error = error or AlignerError(next(text for text in messages if text is not None))
    if error is not None:
        raise error
