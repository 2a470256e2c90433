"""The loop of coroutines and engine steps: how failures end a call on every rank of a replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from aligner.data.types import Prompt
from aligner.engines.engine_loop import (
    CreateSample,
    EngineLoop,
    LeaderSamples,
    SingleResponses,
    complete_response,
    run_steps,
)
from aligner.engines.engine_protocol import GenerationRequest, RequestKey, SamplingOptions
from aligner.errors import AlignerError, EngineExited
from tests.agents.scripted import Scripted

OPTIONS = SamplingOptions(4)


class Reporting(Scripted):
    """An engine that records the messages for the other ranks; its steps raise `error`."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(lambda turn, tokens: [3])
        self.messages: list[dict[str, Any]] = []
        self._error = error

    def step(self) -> None:
        if self._error is not None:
            raise self._error
        super().step()

    def end_turn(self, message: Any = None) -> Any:
        self.messages.append(message)
        return message


def requests(count: int) -> list[GenerationRequest]:
    return [GenerationRequest(Prompt(at, "", torch.tensor([1, 2])), 0) for at in range(count)]


@pytest.mark.parametrize("error", [AlignerError("no weights"), EngineExited("vLLM was killed")])
def test_failed_step_is_reported_to_other_ranks(error: Exception) -> None:
    engine = Reporting(error)
    samples = SingleResponses(engine).start(requests(2), OPTIONS)
    with pytest.raises(type(error), match=str(error)):
        run_steps(samples)
    assert [message["error"] for message in engine.messages] == [None, str(error)]
    samples.cancel()
    assert samples.is_done and not engine.has_work


def test_failed_start_leaves_engine_without_work() -> None:
    engine = Reporting()

    async def fail() -> None:
        raise AlignerError("no such environment")

    def start(_: Sequence[GenerationRequest]) -> tuple[EngineLoop, CreateSample]:
        loop = EngineLoop(engine)
        loop.spawn(0, loop.generate(torch.tensor([1]), OPTIONS, key=RequestKey(0, 0, 1)))
        loop.spawn(1, fail())
        return loop, lambda index, request: complete_response(loop, request, OPTIONS)

    with pytest.raises(AlignerError, match="no such environment"):
        LeaderSamples(engine, [], start)
    assert [message["error"] for message in engine.messages] == ["no such environment"]
    assert not engine.has_work
