"""An engine's replicas: which process belongs to which, and how they share requests."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from aligner.config.schema import EngineParallel
from aligner.data.collectives import gather_json, gather_samples, is_distributed
from aligner.data.types import Prompt, Sample
from aligner.engines.protocol import Generation, GenerationEngine, GenerationRequest, SamplingOptions, advance
from aligner.errors import AlignerError

SamplesInParts = Generator[None, None, list[Sample]]
"""Samples in the making, with pauses."""


def replica_group(layout: EngineParallel, rank: int, timeout: timedelta) -> dist.ProcessGroup | None:
    """The ranks of this rank's replica; None where each is one of its own. Collective."""
    if layout.tensor == 1:
        return None
    members = [list(range(first, first + layout.tensor)) for first in range(0, layout.ranks, layout.tensor)]
    groups = [dist.new_group(ranks, timeout=timeout) for ranks in members]  # every rank takes part in making every group
    return groups[rank // layout.tensor]


def generate_shared(
    engine: GenerationEngine,
    layout: EngineParallel,
    rank: int,
    prompts: Sequence[Prompt],
    samples_per_prompt: int,
    options: SamplingOptions,
) -> list[Sample]:
    """Each prompt's samples in a row, on every rank; each replica generates its share. Collective.

    Raises AlignerError on every rank when one cannot go on.
    """
    return run_through(generate_in_parts(engine, layout, rank, prompts, samples_per_prompt, options))


def generate_in_parts(
    engine: GenerationEngine,
    layout: EngineParallel,
    rank: int,
    prompts: Sequence[Prompt],
    samples_per_prompt: int,
    options: SamplingOptions,
    steps: int | None = None,
) -> SamplesInParts:
    """As `generate_shared`, with a pause after every `steps` of the engine, at which its weights may change.

    Every rank pauses equally often.
    """
    requests = [GenerationRequest(prompt, index) for prompt in prompts for index in range(samples_per_prompt)]
    share = -(-len(requests) // layout.data)
    # Every replica takes equally many: the last ones draw the last sample again.
    shared = [*requests, *[requests[-1]] * (share * layout.data - len(requests))]
    replica = rank // layout.tensor
    drawn: dict[int, Sample] = {}
    generation: Generation | None = None
    try:
        while True:
            error: AlignerError | None = None
            try:
                if generation is None:
                    generation = engine.start(shared[replica * share : (replica + 1) * share], options)
                drawn |= advance(generation, steps)
            except AlignerError as raised:
                error = raised
            if not _go_on(layout, generation is not None and not generation.done, error):
                break
            yield
    finally:
        if generation is not None:
            generation.cancel()
    speakers = [first * layout.tensor for first in range(layout.data)]
    return gather_samples([drawn[place] for place in range(share)], speakers)[: len(requests)]


def run_through(parts: SamplesInParts) -> list[Sample]:
    """The samples, with nothing done at the pauses."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value


def _go_on(layout: EngineParallel, is_under_way: bool, error: AlignerError | None) -> bool:
    """Whether any replica has responses under way. Raises AlignerError on every rank when one has an error.

    The ranks of a replica do the same, so that one alone need not ask.
    """
    if layout.data > 1 and is_distributed():
        counts = torch.tensor([is_under_way, error is not None], dtype=torch.int64)
        dist.all_reduce(counts)
        is_under_way = bool(counts[0])
        if counts[1]:
            told = gather_json(None if error is None else str(error))
            error = error or AlignerError(next(text for text in told if text is not None))
    if error is not None:
        raise error
    return is_under_way
