"""Divide samples between the replicas of an engine.

A replica is a group of `engine.parallel.tensor` ranks that hold one copy of the weights.
`generate_in_parts` generates each replica's share of the samples and collects all samples on every
rank. `EarlyStopCondition` is the condition under which generation stops before all samples are
complete.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.data.collectives import gather_json, gather_samples, is_distributed
from aligner.data.types import Prompt, Sample
from aligner.engines.engine_loop import SamplesInFlight, SampleStarter, run_steps
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.errors import AlignerError
from aligner.schema import EngineParallelConfig

STEPS_PER_PART = 8
"""Number of engine steps between two pauses at which the replicas agree on whether to continue.

A weight sync that waits for the next pause waits for a fraction of a second at most. The one or two
messages of a few bytes per pause cost little compared with the forward passes.
"""

GenerationParts = Generator[None, None, list[Sample]]
"""A generator that pauses during generation, and returns the samples."""


@dataclass(frozen=True)
class EarlyStopCondition:
    """Condition under which generation stops before every response is complete.

    Both attributes must be satisfied.
    """

    min_prompts: int
    """Minimum number of prompts whose samples are all complete."""
    required_prompts: tuple[int, ...] = ()
    """Indices of prompts whose samples must all be complete."""

    def is_met(self, incomplete: Tensor) -> bool:
        """Return whether generation may stop. This is always the case if all samples are complete.

        Args:
            incomplete: int64 [B], greater than 0 for each prompt with an incomplete sample.
        """
        is_complete = incomplete == 0
        if is_complete.all():
            return True
        has_required_prompts = bool(is_complete[list(self.required_prompts)].all())
        return int(is_complete.sum()) >= self.min_prompts and has_required_prompts


def create_replica_group(
    layout: EngineParallelConfig, rank: int, timeout: timedelta
) -> dist.ProcessGroup | None:
    """Return the process group of this rank's replica; None if each rank is its own replica.
    Collective."""
    if layout.tensor == 1:
        return None
    # `new_group` is collective over all ranks, including the ranks outside the new group, so every
    # rank creates the groups of all replicas.
    groups = []
    for first in range(0, layout.ranks, layout.tensor):
        ranks = list(range(first, first + layout.tensor))
        groups.append(dist.new_group(ranks, timeout=timeout))
    return groups[rank // layout.tensor]


def generate_in_parts(
    starter: SampleStarter,
    layout: EngineParallelConfig,
    rank: int,
    samples: Sequence[Sample],
    samples_per_prompt: int,
    options: SamplingOptions,
    *,
    steps: int | None = None,
    early_stop: EarlyStopCondition | None = None,
) -> GenerationParts:
    """Continue the unfinished samples until all are complete, or until `early_stop` is met.
    Collective.

    Each replica generates its share of the samples. After every `steps` engine steps the replicas
    check `early_stop`; if it is not met, the generator pauses, and the weights may change. All
    ranks pause equally often.

    Args:
        starter: Starts the generation on this replica.
        layout: Parallel sizes of the engine.
        rank: Rank of this process in the engine.
        samples: Complete and unfinished samples; the samples of a prompt are adjacent.
        samples_per_prompt: Number of samples of each prompt.
        options: Sampling parameters.
        steps: Number of engine steps between two checks; None: run until the replica's share is
            complete.
        early_stop: Condition for an early stop; None: generate until all samples are complete.

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
    early_stop = early_stop or EarlyStopCondition(len(incomplete))

    # All replicas generate equally many samples. If the division leaves a remainder, the last
    # replicas generate the last sample again; the duplicates are dropped below.
    share = -(-len(unfinished) // layout.data)  # rounded up
    padding = unfinished[-1:] * (share * layout.data - len(unfinished))
    first = rank // layout.tensor * share
    assigned = [*unfinished, *padding][first : first + share]

    # Keys are positions in `assigned`, which can contain a sample twice.
    generated: dict[int, Sample] = {}
    generation: SamplesInFlight | None = None
    try:
        while not early_stop.is_met(incomplete):
            if generation is not None:
                yield

            # An error must not skip the collective in `_share_progress`, because the other ranks
            # wait there.
            error: AlignerError | None = None
            try:
                if generation is None:
                    requests = [_build_request(samples[index]) for index in assigned]
                    generation = starter.start(requests, options)
                generated |= run_steps(generation, steps)
            except AlignerError as raised_error:
                error = raised_error

            # Each rank marks the prompts of its own samples, and the sum marks those of all ranks.
            incomplete_prompts = [
                index // samples_per_prompt
                for position, index in enumerate(assigned)
                if position not in generated
            ]
            incomplete.zero_()
            incomplete[incomplete_prompts] = 1
            _share_progress(layout, incomplete, error)

        if generation is None:
            return list(samples)
        if len(generated) < share:
            generated |= generation.interrupt()
    finally:
        if generation is not None:
            generation.cancel()

    # Only rank 0 of a replica has the samples.
    leaders = [replica * layout.tensor for replica in range(layout.data)]
    replica_samples = [generated[position] for position in range(share)]
    collected = gather_samples(replica_samples, leaders)[: len(unfinished)]

    # `gather_samples` does not send metadata.
    result = list(samples)
    for index, sample in zip(unfinished, collected, strict=True):
        result[index] = replace(sample, metadata=samples[index].metadata)
    return result


def run_to_completion(parts: GenerationParts) -> list[Sample]:
    """Run a generator of `generate_in_parts` to its end without using its pauses, and return the
    samples."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value


def _build_request(sample: Sample) -> GenerationRequest:
    """Return the request that begins or continues an unfinished sample."""
    prompt = Prompt(sample.prompt_id, "", sample.initial_prompt, sample.metadata)
    # A sample that was not started is generated from its prompt, like any other request.
    partial_sample = sample if len(sample.response) or sample.branches else None
    return GenerationRequest(prompt, sample.sample_index, partial_sample=partial_sample)


def _share_progress(
    layout: EngineParallelConfig, incomplete: Tensor, error: AlignerError | None
) -> None:
    """Sum `incomplete` over all ranks in place, and share an error. Collective.

    The ranks of one replica always have the same result, so a single replica needs no
    communication.

    Raises:
        AlignerError: The error of one rank; raised on every rank.
    """
    if layout.data > 1 and is_distributed():
        # One all-reduce for the prompts and, in the last entry, the number of errors.
        counts = torch.cat([incomplete, torch.tensor([int(error is not None)])])
        dist.all_reduce(counts)
        incomplete.copy_(counts[:-1])
        if counts[-1]:
            messages = gather_json(None if error is None else str(error))
            error = error or AlignerError(next(text for text in messages if text is not None))
    if error is not None:
        raise error
