"""Coroutines that generate samples, run in one thread together with the steps of an engine.

`EngineLoop` runs one coroutine per sample. A coroutine awaits `GenerationEngine.generate`, or
`EngineLoop.answer` for what another process computes, such as an environment. Between two engine
steps all coroutines run until each of them awaits one of the two, so that the requests of a step do
not depend on timing.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from aligner.data.types import Completion, FinishReason, KeptTokens, Sample, create_empty_samples
from aligner.engines.engine_protocol import (
    GenerationEngine,
    GenerationRequest,
    RequestKey,
    SamplingOptions,
    SpanListener,
)
from aligner.errors import AlignerError, EngineGone

T = TypeVar("T")

_WAIT_S = 0.1
"""Longest wait for answers if the engine has no work: the caller shows that it is alive, and
receives new weights."""


class Interrupted(Exception):
    """Raised by `EngineLoop.answer` when the sample is wanted as it is (partial rollout)."""


class SamplesInFlight(Protocol):
    """The samples of one call, in progress on this replica.

    Every rank of the replica has such an object, and calls its methods in the same order.
    """

    @property
    def done(self) -> bool:
        """Whether every sample is complete and was returned."""

    def step(self, count: int | None = 1) -> list[tuple[int, Sample]]:
        """Run `count` engine steps, or as many as there are.

        Returns the samples that are complete, each with its index among the requests; the ranks
        other than the replica's first return the indices alone, with samples of no meaning. Raises
        AlignerError on every rank of the replica.
        """

    def interrupt(self) -> list[tuple[int, Sample]]:
        """Stop generation, and return the samples that are not complete as they are."""

    def cancel(self) -> None:
        """Drop the samples that are not complete."""


class StartsSamples(Protocol):
    """Starts the generation of samples: single responses, or episodes."""

    def start(
        self, requests: Sequence[GenerationRequest], options: SamplingOptions
    ) -> SamplesInFlight:
        """Start one sample per request.

        Raises AlignerError, before anything is generated, with the problem of every request that
        cannot be served.
        """


class SampleSource(StartsSamples, Protocol):
    """Starts episodes, and owns the processes that they need."""

    def forget(self, first: int) -> None:
        """Drop the journal of the prompts before `first` in the stream. Raises OSError."""

    def take_waits(self) -> float | None:
        """Return the mean time in seconds that an episode waited for its environment since the last
        call; None if there was none, or if it is unknown."""

    def close(self) -> None:
        """Stop the processes."""


@dataclass(eq=False)
class _Answer:
    """An answer that a coroutine awaits."""

    order: int
    source: Future[Any]
    delivered: "asyncio.Future[Any]"
    due: int
    """Engine step at which it is delivered, if answers are delivered by steps."""


class EngineLoop:
    """Runs coroutines, one per sample, and the steps of an engine."""

    def __init__(
        self,
        engine: GenerationEngine,
        *,
        steps_per_answer: int | None = None,
        listener: SpanListener | None = None,
    ) -> None:
        """
        Args:
            engine: The engine whose steps are run.
            steps_per_answer: Deliver an answer this many engine steps after the call of `answer`,
                and wait for it then, so that the engine's batches do not depend on how fast
                environments are; None: as soon as it has arrived.
            listener: Called with the times at which the loop waited for answers (`wait`).
        """
        self._engine = engine
        self._steps_per_answer = steps_per_answer
        self._listener = listener
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[asyncio.Task[Any], int] = {}
        self._answers: list[_Answer] = []
        self._generating = 0
        """Requests of the coroutines that the engine has not completed."""
        self._steps = 0
        self._results: list[tuple[int, Any]] = []

    @property
    def done(self) -> bool:
        """Whether every coroutine has returned and its result was taken."""
        return not self._tasks and not self._results

    def spawn(self, index: int, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Add a coroutine; `index` identifies its result."""
        self._tasks[self._loop.create_task(coroutine)] = index

    async def generate(
        self,
        tokens: torch.Tensor,
        sampling: SamplingOptions,
        *,
        key: RequestKey,
        is_continued: bool = False,
    ) -> Completion:
        """Call `GenerationEngine.generate` for a coroutine of this loop."""
        request = self._engine.submit(tokens, sampling, key, is_continued)
        if not request.future.done():
            self._generating += 1
            request.future.add_done_callback(self._count_completion)
        return await asyncio.wrap_future(request.future)

    def _count_completion(self, future: "Future[Completion]") -> None:
        self._generating -= 1

    async def answer(self, source: "Future[T]", order: int, *, is_replayed: bool = False) -> T:
        """Await what another process computes.

        Args:
            source: The answer.
            order: Answers that are delivered together are delivered in this order.
            is_replayed: Deliver it at once, because its content is known.

        Raises:
            Interrupted: The sample is wanted as it is.
        """
        delay = 0 if is_replayed else self._steps_per_answer or 0
        delivered: asyncio.Future[T] = self._loop.create_future()
        self._answers.append(_Answer(order, source, delivered, self._steps + delay))
        source.add_done_callback(lambda _: self._engine.wake_up.set())
        return await delivered

    def step(self) -> list[tuple[int, Any]]:
        """Deliver answers, run one engine step, and return the results of the coroutines that have
        ended."""
        if self._loop.is_closed():
            return []
        self.settle()
        self._deliver_answers()
        if self._engine.has_work:
            self._engine.step()
            self._steps += 1
            self.settle()
        return self._take_results()

    def interrupt(self) -> list[tuple[int, Any]]:
        """Have every coroutine return what it has, and return the results."""
        if self._loop.is_closed():
            return []
        self.settle()
        while self._tasks:
            answers = self._answers
            self._answers = []
            for answer in answers:
                answer.delivered.set_exception(Interrupted())
            self._engine.interrupt()
            self.settle()
        return self._take_results()

    def close(self) -> None:
        """Cancel the coroutines that have not returned."""
        if self._loop.is_closed():
            return
        self._answers = []
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks))
        self._tasks.clear()
        self._results.clear()
        if self._engine.has_work:
            self._engine.interrupt()
        self._loop.close()

    def _take_results(self) -> list[tuple[int, Any]]:
        results = self._results
        self._results = []
        return results

    def settle(self) -> None:
        """Run the coroutines until each has returned, or awaits the engine or an answer."""
        if self._is_runnable:  # most engine steps complete no request
            self._loop.run_until_complete(self._run_ready())

    @property
    def _is_runnable(self) -> bool:
        return len(self._tasks) > self._generating + len(self._answers)

    async def _run_ready(self) -> None:
        while self._is_runnable:
            await asyncio.sleep(0)
            ended = [task for task in self._tasks if task.done()]
            for task in sorted(ended, key=lambda each: self._tasks[each]):
                index = self._tasks.pop(task)
                self._results.append((index, task.result()))

    def _deliver_answers(self) -> None:
        is_idle = not self._engine.has_work and not self._results
        if self._steps_per_answer is None:
            if is_idle and self._answers:
                self._wait_for_answers()
            self._deliver([each for each in self._answers if each.source.done()])
            return

        if is_idle and self._answers:
            self._steps = max(self._steps, min(each.due for each in self._answers))
        while due := [each for each in self._answers if each.due <= self._steps]:
            begin = time.perf_counter()
            for answer in due:
                answer.source.exception()  # waits for it
            self._report_wait(begin)
            self._deliver(due)

    def _deliver(self, answers: Sequence[_Answer]) -> None:
        for answer in sorted(answers, key=lambda each: each.order):
            self._answers.remove(answer)
            error = answer.source.exception()
            if error is not None:
                answer.delivered.set_exception(error)
            else:
                answer.delivered.set_result(answer.source.result())
        self.settle()

    def _wait_for_answers(self) -> None:
        """Wait until an answer or a request arrives, or a moment has passed."""
        begin = time.perf_counter()
        self._engine.wake_up.clear()
        if not any(each.source.done() for each in self._answers) and not self._engine.has_work:
            self._engine.wake_up.wait(_WAIT_S)
        self._report_wait(begin)

    def _report_wait(self, begin: float) -> None:
        if self._listener is not None:
            self._listener("wait", begin, time.perf_counter())


class LoopSamples:
    """`SamplesInFlight` of a replica's first rank: the results of an `EngineLoop`."""

    def __init__(self, engine: GenerationEngine, start: Callable[[], EngineLoop]) -> None:
        """Start the loop. Raises AlignerError on every rank of the replica if `start` does."""
        self._engine = engine
        self._started: EngineLoop | None = None

        def begin() -> list[tuple[int, Sample]]:
            self._started = start()
            try:
                self._started.settle()
            except BaseException:
                self._started.close()  # while the other ranks still execute the engine's steps
                raise
            return []

        self._report(begin)

    @property
    def _loop(self) -> EngineLoop:
        assert self._started is not None, "an instance exists only if its loop has started"
        return self._started

    @property
    def done(self) -> bool:
        """See `SamplesInFlight.done`."""
        return self._started is None or self._started.done

    def step(self, count: int | None = 1) -> list[tuple[int, Sample]]:
        """See `SamplesInFlight.step`."""
        return self._report(lambda: self._run_steps(count))

    def _run_steps(self, count: int | None) -> list[tuple[int, Sample]]:
        complete: list[tuple[int, Sample]] = []
        taken = 0
        while not self._loop.done and (count is None or taken < count):
            complete += self._loop.step()
            taken += 1
        return complete

    def interrupt(self) -> list[tuple[int, Sample]]:
        """See `SamplesInFlight.interrupt`."""
        return self._report(self._loop.interrupt)

    def cancel(self) -> None:
        """See `SamplesInFlight.cancel`."""
        self._report(self._close)

    def _close(self) -> list[tuple[int, Sample]]:
        self._loop.close()
        return []

    def _report(self, act: Callable[[], list[tuple[int, Sample]]]) -> list[tuple[int, Sample]]:
        """Act, and let the other ranks return with the outcome."""
        try:
            samples = act()
        except (AlignerError, EngineGone) as error:
            self._engine.end_turn({"error": str(error), "done": self.done, "indices": []})
            raise
        indices = [index for index, _ in samples]
        self._engine.end_turn({"error": None, "done": self.done, "indices": indices})
        return samples


class FollowedSamples:
    """`SamplesInFlight` of the other ranks of a replica: they execute the first rank's steps."""

    def __init__(self, engine: GenerationEngine, requests: Sequence[GenerationRequest]) -> None:
        """Start as the first rank does. Raises AlignerError if the first rank does."""
        self._engine = engine
        self._requests = requests
        self.done = False
        self.step()

    def step(self, count: int | None = 1) -> list[tuple[int, Sample]]:
        """See `SamplesInFlight.step`."""
        self._engine.follow()
        message = self._engine.end_turn()
        self.done = message["done"]
        if message["error"] is not None:
            raise AlignerError(message["error"])
        return [(index, unfinished_sample(self._requests[index])) for index in message["indices"]]

    def interrupt(self) -> list[tuple[int, Sample]]:
        """See `SamplesInFlight.interrupt`."""
        return self.step()

    def cancel(self) -> None:
        """See `SamplesInFlight.cancel`."""
        self.step()


def start_on_replica(
    engine: GenerationEngine,
    requests: Sequence[GenerationRequest],
    start: Callable[[], EngineLoop],
) -> SamplesInFlight:
    """Start samples on every rank of a replica; `start` is called on the first rank only.

    Raises AlignerError on every rank if `start` does.
    """
    if engine.leads:
        return LoopSamples(engine, start)
    return FollowedSamples(engine, requests)


def reserve_longest(
    engine: GenerationEngine, requests: Sequence[GenerationRequest], options: SamplingOptions
) -> None:
    """Have the engine prepare its KV cache for the longest prompts and responses of requests."""
    if requests:
        longest = max(len(each.prompt.tokens) + each.limit(options) for each in requests)
        engine.reserve(len(requests), longest)


@dataclass(frozen=True)
class SingleResponses:
    """Starts samples of one response each."""

    engine: GenerationEngine

    def start(
        self, requests: Sequence[GenerationRequest], options: SamplingOptions
    ) -> SamplesInFlight:
        """See `StartsSamples.start`."""

        def start() -> EngineLoop:
            self.engine.check(requests, options)
            reserve_longest(self.engine, requests, options)
            loop = EngineLoop(self.engine)
            for index, request in enumerate(requests):
                loop.spawn(index, complete_response(loop, request, options))
            return loop

        return start_on_replica(self.engine, requests, start)


@dataclass(frozen=True)
class FollowsEpisodes:
    """`SampleSource` of the ranks of a replica other than the first."""

    engine: GenerationEngine

    def start(
        self, requests: Sequence[GenerationRequest], options: SamplingOptions
    ) -> SamplesInFlight:
        """See `StartsSamples.start`."""
        return FollowedSamples(self.engine, requests)

    def forget(self, first: int) -> None:
        """Do nothing: the first rank has the journal."""

    def take_waits(self) -> float | None:
        """Return None: the first rank has the environments."""
        return None

    def close(self) -> None:
        """Do nothing: there are no processes."""


async def complete_response(
    loop: EngineLoop, request: GenerationRequest, options: SamplingOptions
) -> Sample:
    """Generate the response of a sample, or continue its partial response."""
    sample = unfinished_sample(request)
    used = len(sample.response)
    sampling = replace(
        options,
        max_new_tokens=request.limit(options) - used,
        min_new_tokens=max(0, options.min_new_tokens - used),
    )
    key = RequestKey(request.prompt.id, request.sample_index, sample.prompt_length)
    return with_completion(sample, await loop.generate(sample.tokens, sampling, key=key))


def unfinished_sample(request: GenerationRequest) -> Sample:
    """Return the sample that a request continues; one without response tokens if it is new."""
    if request.begun is not None:
        return request.begun
    return replace(create_empty_samples([request.prompt], 1)[0], sample_index=request.sample_index)


def with_completion(sample: Sample, completion: Completion) -> Sample:
    """Return a sample with a completion of its tokens appended."""
    generated = torch.ones(len(completion.tokens), dtype=torch.bool)
    routes = sample.routes
    if completion.routes is not None:
        # the routing that was recorded first stays: it led to the tokens that follow
        known = 0 if routes is None else len(routes)
        new = completion.routes[known:]
        routes = new if routes is None else torch.cat((routes, new))
    finish_reason: FinishReason = (
        "unfinished" if completion.finish_reason == "interrupted" else completion.finish_reason
    )
    return replace(
        sample,
        tokens=torch.cat((sample.tokens.cpu(), completion.tokens)),
        engine_logprobs=torch.cat((sample.engine_logprobs, completion.logprobs)),
        weight_versions=torch.cat((sample.weight_versions, completion.weight_versions)),
        finish_reason=finish_reason,
        kept=_joined_support(sample, completion.kept, len(completion.tokens)),
        routes=routes,
        drawn=None if sample.drawn is None else torch.cat((sample.drawn, generated)),
    )


def with_observation(sample: Sample, tokens: Sequence[int], limit: int) -> Sample:
    """Return a sample with observation tokens appended, which the model did not generate.

    Raises AlignerError if they leave no room for a generated token within `limit` response tokens.
    """
    used = len(sample.response)
    count = len(tokens)
    if used + count >= limit:
        raise AlignerError(
            f"prompt {sample.prompt_id}, sample {sample.sample_index}:"
            f" {used} response tokens and {count} observation tokens leave no"
            f" room for a generated token; the limit is {limit} tokens"
        )
    if not count:
        return replace(sample, finish_reason="unfinished")
    generated = torch.ones(used, dtype=torch.bool) if sample.drawn is None else sample.drawn
    return replace(
        sample,
        tokens=torch.cat((sample.tokens.cpu(), torch.tensor(tokens, dtype=torch.int64))),
        engine_logprobs=torch.cat((sample.engine_logprobs, torch.zeros(count))),
        weight_versions=torch.cat((sample.weight_versions, torch.zeros(count, dtype=torch.int64))),
        finish_reason="unfinished",
        kept=_joined_support(sample, None, count),
        drawn=torch.cat((generated, torch.zeros(count, dtype=torch.bool))),
    )


def _joined_support(sample: Sample, support: KeptTokens | None, count: int) -> KeptTokens | None:
    """Return the sampling support of a sample's response tokens and of `count` further ones."""
    if sample.kept is None and support is None:
        return None
    parts = [
        sample.kept or KeptTokens.unrestricted(len(sample.response)),
        support or KeptTokens.unrestricted(count),
    ]
    counts = torch.cat([part.counts for part in parts])
    ids = torch.cat([ids for part in parts for ids in part.split_ids()])
    return KeptTokens.from_counts(counts, ids)


def finish(samples: SamplesInFlight, steps: int | None = None) -> dict[int, Sample]:
    """Run `steps` engine steps, or until all samples are complete; return the completed samples by
    their index."""
    return {} if samples.done else dict(samples.step(steps))
