"""A policy whose turns are scripted by the test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aligner.data.types import Sample
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.engines.partial_response import PartialResponse


class Scripted:
    """An engine that returns scripted turns.

    `says` maps the number of a turn in its episode, and all tokens of the episode so far, to the
    turn's tokens.
    """

    def __init__(self, says: Callable[[int, Tensor], list[int]]) -> None:
        self._says, self._said = says, Counter[tuple[int, int]]()
        self._responses: list[PartialResponse] = []
        self._open: list[int] = []

    @property
    def done(self) -> bool:
        return not self._open

    def start(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> Scripted:
        self._options, self._responses = options, []
        for request in requests:
            self.add(request)
        self._open = [place for place, request in enumerate(requests) if not request.waits]
        return self

    def add(self, request: GenerationRequest) -> int:
        self._responses.append(PartialResponse(request, request.limit(self._options)))
        self._open.append(len(self._responses) - 1)
        return self._open[-1]

    def go_on(self, place: int, tokens: Sequence[int]) -> None:
        self._responses[place].give(tokens)
        self._open.append(place)

    def leave(self, place: int) -> None:
        assert place not in self._open

    def step(self) -> list[tuple[int, Sample]]:
        complete, self._open = self._open, []
        for place in complete:
            response = self._responses[place]
            episode = response.request.prompt.id, response.request.sample_index
            turn_tokens = self._says(
                self._said[episode],
                torch.tensor([*response.request.prompt.tokens.tolist(), *response.tokens]),
            )
            self._said[episode] += 1
            response.tokens += turn_tokens
            response.logprobs += [0.0] * len(turn_tokens)
            response.versions += [0] * len(turn_tokens)
            response.finish_reason = "stop"
        return [(place, self._responses[place].sample()) for place in complete]

    def cancel(self) -> None:
        self._open.clear()
