"""Generate samples on the replicas of an engine.

A replica is a group of ranks that hold one copy of the weights: one for each tensor-parallel rank
of each pipeline stage of the engine. `generate_in_parts` generates each replica's share of the
samples and collects all samples on every rank. `EarlyStopCondition` is the condition under which
generation stops before all samples are complete.
"""

import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.data.collectives import gather_json, gather_samples, is_distributed
from aligner.data.types import Prompt, Sample
from aligner.engines.engine_loop import SamplesInFlight, SampleStarter, run_steps
from aligner.engines.engine_protocol import GenerationEngine, GenerationRequest, SamplingOptions
from aligner.engines.router import Router
from aligner.errors import AlignerError, EngineExited
from aligner.schema import EngineConfig, EngineParallelConfig

_log = logging.getLogger(__name__)

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
    if layout.replica_ranks == 1:
        return None
    # `new_group` is collective over all ranks, including the ranks outside the new group, so every
    # rank creates the groups of all replicas.
    groups = []
    for first in range(0, layout.ranks, layout.replica_ranks):
        ranks = list(range(first, first + layout.replica_ranks))
        groups.append(dist.new_group(ranks, timeout=timeout))
    return groups[rank // layout.replica_ranks]


def generate_in_parts(
    engine: GenerationEngine,
    starter: SampleStarter,
    settings: EngineConfig,
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

    A `Router` assigns the samples to the replicas. After every `steps` engine steps, the replicas
    share which samples are complete, and check `early_stop`. If the generation continues, the
    generator pauses, the weights may change, and replicas with room get further samples. All ranks
    pause equally often.

    A replica whose engine exits is left out, if the engine can restart: the other replicas generate
    its incomplete samples anew, and it gets samples again after a weight sync. Episodes depend on
    processes of their replica; there, the error is raised.

    Args:
        engine: The engine of this rank.
        starter: Starts the generation on this replica.
        settings: Section `engine` of the configuration.
        rank: Rank of this process in the engine.
        samples: Complete and unfinished samples; the samples of a prompt are adjacent.
        samples_per_prompt: Number of samples of each prompt.
        options: Sampling parameters.
        steps: Number of engine steps between two pauses. None: no pauses, except while samples wait
            for a replica, and with several replicas that can restart.
        early_stop: Condition for an early stop; None: generate until all samples are complete.

    Yields:
        None at each pause.

    Returns:
        All samples in the given order, on every rank.

    Raises:
        AlignerError: Generation failed on one rank; all ranks raise the error.
        EngineExited: The engine of this rank has exited, and no other replica can generate its
            samples.
    """
    unfinished = [
        index for index, sample in enumerate(samples) if sample.finish_reason == "unfinished"
    ]
    prompts = [index // samples_per_prompt for index in unfinished]
    prompt_count = len(samples) // samples_per_prompt
    early_stop = early_stop or EarlyStopCondition(prompt_count)

    layout = settings.parallel
    replica = rank // layout.replica_ranks
    can_move_samples = layout.data > 1 and not starter.uses_local_state
    can_lose_replica = can_move_samples and engine.can_restart
    # The journal of an episode is on the replica that has begun it, also if the request is repeated
    # after a restart. So the assignment of episodes must not depend on their speed.
    router = Router(prompts, layout.data, settings.batch_size if can_move_samples else None)
    progress = _Progress(len(unfinished), layout.data)
    if can_lose_replica:
        # An engine that has exited in an earlier generation may have no weights yet.
        progress.has_weights[replica] = engine.version is not None
        progress.share()

    share = _ReplicaShare(
        engine, starter, options, [_build_request(samples[index]) for index in unfinished]
    )
    is_first_part = True
    try:
        while not early_stop.is_met(progress.count_incomplete(prompts, prompt_count)):
            if not is_first_part:
                yield
            is_first_part = False

            assigned = router.assign(progress.find_available())[replica]
            needs_pauses = can_lose_replica or router.waiting
            part_steps = steps or (STEPS_PER_PART if needs_pauses else None)
            # An error must not skip the collective in `progress.share`, because the other ranks
            # wait there.
            error: AlignerError | EngineExited | None = None
            try:
                share.add(assigned, router.waiting)
                share.run(part_steps)
            except AlignerError as raised_error:
                error = raised_error
            except EngineExited as exit_error:
                if not can_lose_replica:
                    raise
                _log.warning("replica %d of the engine starts again: %s", replica, exit_error)
                share.restart()
                error = exit_error

            progress.reset()
            progress.is_complete[[*share.generated]] = 1
            progress.has_weights[replica] = engine.version is not None
            progress.has_exited[replica] = isinstance(error, EngineExited)
            progress.share(error)
            router.complete(_find_indices(progress.is_complete))
            for exited_replica in _find_indices(progress.has_exited):
                moved = router.withdraw(exited_replica)
                if rank == 0:
                    _log.warning(
                        "replica %d of the engine has exited; other replicas generate its %d"
                        " incomplete samples",
                        exited_replica,
                        moved,
                    )

        share.interrupt()
    finally:
        share.cancel()

    # Only rank 0 of a replica has the samples. Those that no replica got stay unfinished.
    leaders = [each * layout.replica_ranks for each in range(layout.data)]
    collected = gather_samples(
        [share.generated[index] for index in router.get_assigned(replica)], leaders
    )
    order = [index for each in range(layout.data) for index in router.get_assigned(each)]

    # `gather_samples` does not send metadata.
    result = list(samples)
    for index, sample in zip(order, collected, strict=True):
        original = samples[unfinished[index]]
        result[unfinished[index]] = replace(sample, metadata=original.metadata)
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


class _ReplicaShare:
    """The samples that this rank's replica generates in one call of `generate_in_parts`."""

    def __init__(
        self,
        engine: GenerationEngine,
        starter: SampleStarter,
        options: SamplingOptions,
        requests: Sequence[GenerationRequest],
    ) -> None:
        self._engine = engine
        self._starter = starter
        self._options = options
        self._requests = requests
        """The requests of all replicas."""
        self._in_flight: SamplesInFlight | None = None
        """The started samples; None before the first one, and after the engine has exited."""
        self._started: list[int] = []
        """Index in `_requests` of each sample of `_in_flight`."""
        self.generated: dict[int, Sample] = {}
        """Samples by the index of their request; all of them are complete until `interrupt`."""

    def add(self, indices: Sequence[int], waiting: Sequence[int]) -> None:
        """Start samples. Raises AlignerError if some requests cannot be served.

        Args:
            indices: Indices of the requests.
            waiting: Indices of further requests, of which this replica may get some later.
        """
        if not indices:
            return
        requests = [self._requests[index] for index in indices]
        if self._in_flight is None:
            later = [self._requests[index] for index in waiting]
            self._in_flight = self._starter.start(requests, self._options, later)
        else:
            self._in_flight.add(requests)
        self._started += indices

    def run(self, steps: int | None) -> None:
        """Run at most `steps` engine steps; None runs until all started samples are complete.

        Raises:
            AlignerError: Generation failed.
            EngineExited: The engine's process has exited.
        """
        if self._in_flight is not None:
            self._keep(run_steps(self._in_flight, steps))

    def restart(self) -> None:
        """Restart the engine after `EngineExited`, and drop the incomplete samples."""
        self._engine.restart()
        self.cancel()
        self._started = []

    def interrupt(self) -> None:
        """Stop generation; the incomplete samples become partial samples."""
        if self._in_flight is not None and not self._in_flight.is_done:
            self._keep(dict(self._in_flight.interrupt()))

    def cancel(self) -> None:
        """Stop generation, and drop the incomplete samples."""
        if self._in_flight is not None:
            self._in_flight.cancel()
            self._in_flight = None

    def _keep(self, samples: Mapping[int, Sample]) -> None:
        self.generated |= {self._started[index]: sample for index, sample in samples.items()}


class _Progress:
    """What the ranks share at a pause.

    Between `reset` and `share`, each rank sets the values of its own replica.
    """

    def __init__(self, samples: int, replicas: int) -> None:
        """Begin with no complete sample and no weights."""
        # One tensor, so that one all-reduce shares everything.
        self._values = torch.zeros(samples + 2 * replicas + 1, dtype=torch.int64)
        parts = self._values.split([samples, replicas, replicas, 1])
        self.is_complete, self.has_weights, self.has_exited, self._has_failed = parts
        self._replicas = replicas

    def reset(self) -> None:
        """Set all values to 0."""
        self._values.zero_()

    def share(self, error: AlignerError | EngineExited | None = None) -> None:
        """Combine the values of all ranks, and share an error. Collective.

        The ranks of one replica always have the same result, so a single replica needs no
        communication.

        Args:
            error: The error of this rank.

        Raises:
            AlignerError: The error of one rank, or all replicas have exited; raised on every rank.
            EngineExited: All replicas have exited, and this rank's replica is the last one.
        """
        if self._replicas == 1 or not is_distributed():
            if error is not None:
                raise error
            return
        self._has_failed[0] = isinstance(error, AlignerError)
        dist.all_reduce(self._values, op=dist.ReduceOp.MAX)
        if self._has_failed:
            messages = gather_json(str(error) if isinstance(error, AlignerError) else None)
            if isinstance(error, AlignerError):
                raise error
            raise AlignerError(next(text for text in messages if text is not None)) from error
        if self.has_exited.any() and not self.has_weights.any():
            raise error or AlignerError("every replica of the engine has exited")

    def find_available(self) -> list[bool]:
        """Return whether each replica may get samples.

        If no replica has weights, all are available: their engines raise an error with the reason.
        """
        has_weights = self.has_weights.bool()
        return (has_weights if has_weights.any() else ~has_weights).tolist()

    def count_incomplete(self, prompts: Sequence[int], prompt_count: int) -> Tensor:
        """Return the number of incomplete samples of each prompt, int64 [B].

        Args:
            prompts: Index of the prompt of each sample.
            prompt_count: Number of prompts.
        """
        counts = torch.zeros(prompt_count, dtype=torch.int64)
        return counts.index_add_(0, torch.tensor(prompts, dtype=torch.int64), 1 - self.is_complete)


def _find_indices(flags: Tensor) -> list[int]:
    """Return the indices of the values other than 0."""
    return flags.nonzero().flatten().tolist()
