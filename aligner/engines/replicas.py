"""An engine's replicas: which process belongs to which, and how they share requests."""

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
"""Engine steps between two moments at which replicas agree on how to go on. What waits for one,
such as new weights, waits for a fraction of a second at most; and the message or two of a few bytes
is lost among so many passes through the model."""

SamplesInParts = Generator[None, None, list[Sample]]
"""Samples in the making, with pauses."""


@dataclass(frozen=True)
class Enough:
    """When generation ends before every response is complete."""

    prompts: int
    """So many have all their samples complete, at least,"""
    due: tuple[int, ...] = ()
    """and these, by their places."""

    def is_met(self, lacking: Tensor) -> bool:
        """lacking: int64 [B], above 0 for a prompt of which a sample is not complete. Met at any
        rate when there is none."""
        complete = lacking == 0
        return bool(complete.all()) or (
            int(complete.sum()) >= self.prompts and bool(complete[list(self.due)].all())
        )


def replica_group(
    layout: EngineParallelConfig, rank: int, timeout: timedelta
) -> dist.ProcessGroup | None:
    """The ranks of this rank's replica; None where each is one of its own. Collective."""
    if layout.tensor == 1:
        return None
    members = [
        list(range(first, first + layout.tensor)) for first in range(0, layout.ranks, layout.tensor)
    ]
    # every rank takes part in making every group
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
    """The samples, each prompt's in a row, taken further: those that are unfinished go on, until
    all are complete or `enough`.

    After every `steps` of the engine, None for all that there are, it is seen whether they are
    `enough`, and there is a pause at which weights may change: equally often on every rank. Each
    replica generates its share. Collective; raises AlignerError on every rank when one cannot go
    on.
    """
    places = [place for place, sample in enumerate(samples) if sample.finish_reason == "unfinished"]
    lacking = torch.zeros(len(samples) // samples_per_prompt, dtype=torch.int64)
    lacking[[place // samples_per_prompt for place in places]] = 1
    enough = enough or Enough(len(lacking))
    share = -(-len(places) // layout.data)
    first = rank // layout.tensor * share
    # Every replica takes equally many: the last ones draw the last sample again.
    mine = [*places, *places[-1:] * (share * layout.data - len(places))][first : first + share]
    drawn: dict[int, Sample] = {}
    generation: SamplesInFlight | None = None
    try:
        while not enough.is_met(lacking):
            if generation is not None:
                yield
            error: AlignerError | None = None
            try:
                generation = generation or engine.start(
                    [_request(samples[place]) for place in mine], options
                )
                drawn |= finish(generation, steps)
            except AlignerError as raised:
                error = raised
            lacking.zero_()
            lacking[
                [place // samples_per_prompt for at, place in enumerate(mine) if at not in drawn]
            ] = 1
            _agree(layout, lacking, error)
        if generation is None:
            return list(samples)
        if len(drawn) < share:
            drawn |= generation.interrupt()
    finally:
        if generation is not None:
            generation.cancel()
    speakers = [replica * layout.tensor for replica in range(layout.data)]
    taken = gather_samples([drawn[at] for at in range(share)], speakers)[: len(places)]
    further = dict(zip(places, taken, strict=True))
    return [
        replace(further[place], metadata=sample.metadata) if place in further else sample
        for place, sample in enumerate(samples)
    ]


def run_through(parts: SamplesInParts) -> list[Sample]:
    """The samples, with nothing done at the pauses."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value


def _request(sample: Sample) -> GenerationRequest:
    prompt = Prompt(sample.prompt_id, "", sample.initial_prompt, sample.metadata)
    begun = sample if len(sample.response) or sample.branches else None
    return GenerationRequest(prompt, sample.sample_index, begun=begun)


def _agree(layout: EngineParallelConfig, lacking: Tensor, error: AlignerError | None) -> None:
    """Sum `lacking` over all replicas, in place. Raises AlignerError on every rank when one has an
    error.

    The ranks of a replica do the same, so that one alone need not ask.
    """
    if layout.data > 1 and is_distributed():
        counts = torch.cat([lacking, torch.tensor([int(error is not None)])])
        dist.all_reduce(counts)
        lacking.copy_(counts[:-1])
        if counts[-1]:
            told = gather_json(None if error is None else str(error))
            error = error or AlignerError(next(text for text in told if text is not None))
    if error is not None:
        raise error
