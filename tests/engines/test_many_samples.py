"""The cost of an engine step does not grow with the number of samples that wait."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from aligner.engines.embedded.decoded_response import DecodedResponse
from aligner.engines.embedded.scheduler import Scheduler
from aligner.engines.embedded.waiting_queue import WaitingQueue
from aligner.engines.engine_loop import EngineLoop
from aligner.engines.engine_protocol import EngineRequest, RequestKey, SamplingOptions
from tests.agents.scripted import Scripted
from tests.engines.engines import engine_of, publish, save_tiny

OPTIONS = SamplingOptions(4)
INPUT = torch.tensor([3, 5, 7])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("many"), 0)


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> Counter[str]:
    """Return a counter of the calls of a method from now on."""
    calls = Counter[str]()
    method = getattr(owner, name)

    def counted(*arguments: Any) -> Any:
        calls[name] += 1
        return method(*arguments)

    monkeypatch.setattr(owner, name, counted)
    return calls


class OneAtATime(Scripted):
    """An engine that completes one request per step."""

    def __init__(self) -> None:
        super().__init__(lambda turn, tokens: [3])

    def step(self) -> None:
        waiting = self._take_arrivals()
        self._arrivals = waiting[:1]
        super().step()
        self._arrivals = waiting[1:]


class CountedTask(asyncio.Task):  # type: ignore[type-arg]
    """A task that counts how often its state is read."""

    reads = 0

    def done(self) -> bool:
        CountedTask.reads += 1
        return super().done()


class CountedFuture(Future):  # type: ignore[type-arg]
    """A future that counts how often its state is read."""

    reads = 0

    def done(self) -> bool:
        CountedFuture.reads += 1
        return super().done()


@pytest.mark.parametrize("count", [4, 64])
def test_step_does_not_poll_waiting_coroutines(count: int) -> None:
    engine = OneAtATime()
    loop = EngineLoop(engine)
    loop._loop.set_task_factory(lambda of, coroutine: CountedTask(coroutine, loop=of))
    for index in range(count):
        key = RequestKey(index, 0, len(INPUT))
        loop.spawn(index, loop.generate(INPUT, OPTIONS, key=key))
    CountedTask.reads = 0
    for index in range(count):
        assert [number for number, _ in loop.step()] == [index]
    # The event loop reads the state of its own tasks only.
    assert CountedTask.reads <= 8 * count
    loop.close()


@pytest.mark.parametrize("count", [4, 64])
def test_step_does_not_poll_awaited_answers(count: int) -> None:
    engine = OneAtATime()
    loop = EngineLoop(engine)
    answers = [CountedFuture() for _ in range(count)]
    for index, answer in enumerate(answers):
        loop.spawn(index, loop.wait_for_answer(answer, index))
    loop.run_coroutines()
    CountedFuture.reads = 0
    for index, answer in enumerate(answers):
        answer.set_result(index)
        assert loop.step() == [(index, index)]
    assert CountedFuture.reads <= 2 * count
    loop.close()


def test_requests_for_next_batch_are_checked_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of("embedded-in_place", directory) as engine:
        publish(engine, directory, 1)
        first = engine.submit(INPUT, SamplingOptions(6), RequestKey(0, 0, len(INPUT)))
        others = [
            engine.submit(
                INPUT, SamplingOptions(6, temperature=0.5), RequestKey(index, 0, len(INPUT))
            )
            for index in range(1, 5)
        ]
        engine.step()
        checks = count_calls(monkeypatch, SamplingOptions, "is_batchable_with")
        for _ in range(4):
            engine.step()
        assert not checks and not first.future.done()
        while engine.has_work:
            engine.step()
        assert all(len(request.future.result().tokens) == 6 for request in (first, *others))


def test_cached_sequences_are_not_compared_with_other_samples(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparisons = count_calls(monkeypatch, Scheduler, "_find_cached_prefix")
    with engine_of("embedded-in_place", directory, batch_size=2) as engine:
        publish(engine, directory, 1)
        engine.reserve(6, 20)
        requests = [
            engine.submit(INPUT, OPTIONS, RequestKey(index, 0, len(INPUT)), is_continued=True)
            for index in range(6)
        ]
        while engine.has_work:
            engine.step()
        assert not comparisons and all(request.future.done() for request in requests)

        # The last sample is still cached.
        tokens = torch.cat([INPUT, requests[-1].future.result().tokens, INPUT])
        engine.submit(tokens, OPTIONS, RequestKey(5, 0, len(INPUT)))
        engine.step()
        assert comparisons.total() == 1


def test_waiting_queue_keeps_order_of_samples() -> None:
    one, two, three, four = (
        DecodedResponse.from_request(
            EngineRequest(INPUT, OPTIONS, RequestKey(prompt, 0, len(INPUT))), seed=0
        )
        for prompt in (0, 1, 0, 0)
    )
    queue = WaitingQueue()
    queue.extend([one, two])
    queue.extend_front([three, four])
    assert [*queue] == [three, four, one, two]
    assert queue.find_sample(0, 0) == [three, four, one]
    queue.remove(four)
    assert [*queue] == [three, one, two] and queue.first is three
    queue.remove(three)
    queue.remove(one)
    assert queue.find_sample(0, 0) == [] and len(queue) == 1
