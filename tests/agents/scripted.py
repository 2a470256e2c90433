"""A policy whose turns are scripted by the test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aligner.data.types import Completion
from aligner.engines.engine_protocol import (
    EngineRequest,
    GenerationEngine,
    GenerationRequest,
    SamplingOptions,
)


class Scripted(GenerationEngine):
    """An engine that returns scripted turns.

    `says` maps the number of a turn in its episode, and all tokens of the episode so far, to the
    turn's tokens.
    """

    version = 0

    def __init__(self, says: Callable[[int, Tensor], list[int]]) -> None:
        super().__init__(None, None, None)  # type: ignore[arg-type]
        self._says = says
        self._turns = Counter[tuple[int, int]]()

    def check(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> None:
        """Accept every request."""

    def _check_length(self, request: EngineRequest) -> None:
        """Accept every length: there is no model."""

    @property
    def has_work(self) -> bool:
        return bool(self._arrivals)

    def step(self) -> None:
        for request in self._take_arrivals():
            episode = request.key.prompt_id, request.key.sample_index
            tokens = self._says(self._turns[episode], request.tokens)
            self._turns[episode] += 1
            count = len(tokens)
            versions = torch.zeros(count, dtype=torch.int64)
            request.resolve(Completion(torch.tensor(tokens), torch.zeros(count), versions, "stop"))

    def interrupt(self) -> None:
        none = torch.empty(0)
        for request in self._take_arrivals():
            request.resolve(Completion(none.long(), none, none.long(), "interrupted"))

    def release(self, prompt_id: int, sample_index: int) -> None:
        """Nothing is resident."""

    def begin_update(self, version: int) -> Any:
        raise NotImplementedError

    def sleep(self) -> None:
        raise NotImplementedError

    def wake(self) -> None:
        raise NotImplementedError

    def shutdown(self) -> None:
        """There are no processes."""
