"""An engine's replicas: which process belongs to which, and how they share requests."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from aligner.config.schema import EngineParallel
from aligner.data.collectives import gather_samples
from aligner.data.types import Prompt, Sample
from aligner.engines.protocol import GenerationEngine, GenerationRequest, SamplingOptions


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
    """Each prompt's samples in a row, on every rank; each replica generates its share. Collective."""
    requests = [GenerationRequest(prompt, index) for prompt in prompts for index in range(samples_per_prompt)]
    share = -(-len(requests) // layout.data)
    # Every replica takes equally many: the last ones draw the last sample again.
    shared = [*requests, *[requests[-1]] * (share * layout.data - len(requests))]
    replica = rank // layout.tensor
    speakers = [first * layout.tensor for first in range(layout.data)]
    mine = shared[replica * share : (replica + 1) * share]
    return gather_samples(engine.generate(mine, options), speakers)[: len(requests)]
