"""Responses under way on a replica; every rank of it has one of these and sees the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aligner.data.types import Sample
from aligner.engines.protocol import GenerationRequest, SamplingOptions, response_limit
from aligner.engines.tensorrt_llm.client import Client
from aligner.engines.tensorrt_llm.replica import Replica
from aligner.engines.tensorrt_llm.responses import Response
from aligner.errors import AlignerError


class ReplicaGeneration:
    """A `Generation`."""

    def __init__(
        self,
        replica: Replica,
        client: Client | None,
        check_weights: Callable[[], None],
        requests: Sequence[GenerationRequest],
        options: SamplingOptions,
    ) -> None:
        """`client`: on the rank that drives; `check_weights` raises when there are none. Collective over the replica."""
        self._replica, self._client, self._check_weights = replica, client, check_weights
        self._open = {place: Response(request, response_limit(request, options)) for place, request in enumerate(requests)}
        self._tasks: dict[int, Any] = {}

        def start() -> None:
            assert self._client is not None
            tasks = self._client.start(list(self._open.values()), options)
            self._tasks = dict(zip(self._open, tasks, strict=True))

        replica.lead("starting responses", start)

    @property
    def done(self) -> bool:
        """Whether every response is complete, and given out."""
        return not self._open

    def step(self) -> list[tuple[int, Sample]]:
        """Wait for responses. Raises AlignerError when none is complete and the engine has no weights to go on with."""
        if self.done:
            return []
        samples = []
        for place, *drawn in self._replica.lead("generating", self._wait):
            response = self._open.pop(place)
            response.tokens, response.logprobs, response.versions, response.finish_reason = drawn
            samples.append((place, response.sample()))
        return samples

    def unfinished(self) -> list[tuple[int, Sample]]:
        """Not told: nothing could go on from them."""
        raise AlignerError("engine.kind=tensorrt_llm: responses under way cannot be handed over; allowed: embedded")

    def cancel(self) -> None:
        """Drop what is not complete."""

        def cancel() -> None:
            assert self._client is not None
            self._client.cancel({task: self._open[place] for place, task in self._tasks.items()})

        if not self.done:
            self._replica.lead("cancelling responses", cancel)
        self._tasks.clear()
        self._open.clear()

    def _wait(self) -> list[list[Any]]:
        assert self._client is not None
        if not any(task.done() for task in self._tasks.values()):
            self._check_weights()
            self._client.wait(list(self._tasks.values()))
        complete = [place for place, task in self._tasks.items() if task.done()]
        answers = []
        for place in complete:
            self._tasks.pop(place).result()
            response = self._open[place]
            answers.append([place, response.tokens, response.logprobs, response.versions, response.finish_reason])
        return answers
