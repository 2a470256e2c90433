"""Coroutines that generate samples, run in one thread together with the steps of an engine.

`EngineLoop` runs one coroutine per sample. A coroutine awaits `EngineLoop.generate` for a
completion, or `EngineLoop.wait_for_answer` for the answer of another process, such as an
environment. Between two engine steps all coroutines run until each one waits for a completion or an
answer. With `steps_per_answer`, the requests of a step do not depend on timing.
"""

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from aligner.data.types import (
    Completion,
    FinishReason,
    GrammarSpan,
    Sample,
    SamplingSupport,
    create_empty_samples,
)
from aligner.engines.engine_protocol import (
    GenerationEngine,
    GenerationRequest,
    RequestKey,
    SamplingOptions,
    SpanListener,
)
from aligner.errors import AlignerError, EngineExited

T = TypeVar("T")

_MAX_WAIT_S = 0.1
"""Maximum duration of one wait for an answer while the engine is idle, in seconds. The caller needs
control back to send heartbeats and to receive weights."""


class Interrupted(Exception):
    """Raised by `EngineLoop.wait_for_answer` to make a coroutine return its partial sample."""


class SamplesInFlight(Protocol):
    """The samples of one call of `SampleStarter.start`, in progress on this replica.

    Every rank of the replica has such an object, and calls its methods in the same order.
    """

    @property
    def is_done(self) -> bool:
        """Whether every sample is complete and was returned."""

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Start more samples; their indices follow those of the earlier requests.

        Raises AlignerError as `SampleStarter.start` does.
        """

    def step(self, count: int | None = 1) -> list[tuple[int, Sample]]:
        """Run at most `count` engine steps; None runs until all samples are complete.

        Returns:
            The samples that are complete and were not returned before, each with its index among
            the requests. Only the replica's first rank returns the samples; on the other ranks
            they are placeholders, and only the indices are valid.

        Raises:
            AlignerError: Generation failed; raised on every rank of the replica.
        """

    def interrupt(self) -> list[tuple[int, Sample]]:
        """Stop generation, and return the samples that were not returned before, complete or
        partial."""

    def cancel(self) -> None:
        """Stop generation, and drop the samples that were not returned before."""


CreateSample = Callable[[int, GenerationRequest], Coroutine[Any, Any, Sample]]
"""Function that returns the coroutine of a sample, from the index of its request and the
request."""


class SampleStarter(Protocol):
    """Starts the generation of samples: single responses, or episodes."""

    @property
    def uses_local_state(self) -> bool:
        """Whether a sample depends on processes or files of this replica, so that no other replica
        can continue it."""

    def start(
        self,
        requests: Sequence[GenerationRequest],
        options: SamplingOptions,
        later: Sequence[GenerationRequest] = (),
    ) -> SamplesInFlight:
        """Start one sample per request.

        Args:
            requests: The requests.
            options: Sampling parameters.
            later: Requests that may follow with `SamplesInFlight.add`.

        Raises:
            AlignerError: Some requests cannot be served; the message has the problem of each of
                them. Nothing was generated.
        """


class EpisodeSource(SampleStarter, Protocol):
    """Starts episodes, and owns the processes that they need."""

    def drop_journal_before(self, first_prompt: int) -> None:
        """Drop the journal of the prompts before `first_prompt` in the stream. Raises OSError."""

    def take_environment_wait_s(self) -> float | None:
        """Return the mean time in seconds that an episode waited for its environment since the last
        call; None if there was none, or if it is unknown."""

    def close(self) -> None:
        """Stop the processes."""


@dataclass(eq=False)
class _Answer:
    """An answer that a coroutine awaits."""

    order: int
    """Answers that are delivered together are delivered in this order."""
    future: Future[Any]
    """The pending answer of the other process."""
    coroutine_future: "asyncio.Future[Any]"
    """Future that the coroutine awaits."""


class EngineLoop:
    """Runs coroutines, one per sample, and the steps of an engine.

    The cost of a step depends on the coroutines that run in it, not on those that wait: a batch of
    many samples has many waiting coroutines.
    """

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
            steps_per_answer: Number of engine steps from the call of `wait_for_answer` to the
                delivery of the answer. The loop waits for a late answer, so that the engine's
                batches do not depend on how fast environments are. None delivers an answer between
                two steps, once it has arrived.
            listener: Called after each wait for answers, with the span name `wait`, its start and
                its end.
        """
        self._engine = engine
        self._steps_per_answer = steps_per_answer
        self._listener = listener
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[asyncio.Task[Any], int] = {}
        """Tasks of the coroutines whose results were not collected, with the indices of their
        results."""
        self._finished_tasks: list[asyncio.Task[Any]] = []
        """Tasks whose coroutines have returned, and whose results were not collected."""
        self._answers: dict[_Answer, None] = {}
        """Answers that coroutines await, in the order of the calls."""
        self._arrived_answers: deque[_Answer] = deque()
        """Answers that have arrived; unused with `steps_per_answer`. Other threads append to it."""
        self._answer_schedule: list[tuple[int, int, _Answer]] = []
        """Heap of the engine step at which an answer is due, a number that breaks ties, and the
        answer; unused without `steps_per_answer`."""
        self._answer_count = 0
        """Number of answers so far."""
        self._pending_requests = 0
        """Number of requests of the coroutines that the engine has not completed."""
        self._steps = 0
        """Number of engine steps so far, plus the steps that `_deliver_answers` skipped while the
        engine was idle; `_answer_schedule` refers to this count."""
        self._results: list[tuple[int, Any]] = []
        """Results that were not taken yet, with the indices of their coroutines."""

    @property
    def is_done(self) -> bool:
        """Whether every coroutine has returned and its result was taken."""
        return not self._tasks and not self._results

    def spawn(self, index: int, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Add a coroutine; `index` identifies its result."""
        task = self._loop.create_task(coroutine)
        task.add_done_callback(self._finished_tasks.append)
        self._tasks[task] = index

    async def generate(
        self,
        tokens: torch.Tensor,
        sampling: SamplingOptions,
        *,
        key: RequestKey,
        is_continued: bool = False,
        stop_search_start: int | None = None,
        grammar_start: int | None = None,
    ) -> Completion:
        """Submit a request to the engine, and await its completion.

        The arguments are those of `GenerationEngine.generate`.
        """
        request = self._engine.submit(
            tokens, sampling, key, is_continued, stop_search_start, grammar_start
        )
        # A request that the engine refuses is complete already, and its coroutine can run on.
        if not request.future.done():
            self._pending_requests += 1
            request.future.add_done_callback(self._on_completion)
        return await asyncio.wrap_future(request.future)

    def _on_completion(self, future: "Future[Completion]") -> None:
        self._pending_requests -= 1

    async def wait_for_answer(
        self, answer: "Future[T]", order: int, *, is_replayed: bool = False
    ) -> T:
        """Await the answer of another process.

        Args:
            answer: The pending answer.
            order: Answers that are delivered together are delivered in this order.
            is_replayed: Whether the answer repeats one that a partial sample contains. Then
                `steps_per_answer` does not delay it.

        Raises:
            Interrupted: The coroutine must return its partial sample.
        """
        coroutine_future: asyncio.Future[T] = self._loop.create_future()
        awaited = _Answer(order, answer, coroutine_future)
        self._answers[awaited] = None
        self._answer_count += 1
        if self._steps_per_answer is None:
            # The callback runs in the thread that completes the answer.
            answer.add_done_callback(lambda _: self._on_arrival(awaited))
        else:
            delay = 0 if is_replayed else self._steps_per_answer
            heapq.heappush(
                self._answer_schedule, (self._steps + delay, self._answer_count, awaited)
            )
        return await coroutine_future

    def _on_arrival(self, answer: _Answer) -> None:
        self._arrived_answers.append(answer)
        # `_wait_for_answers` may be waiting for the event.
        self._engine.wake_up.set()

    def step(self) -> list[tuple[int, Any]]:
        """Deliver answers, run one engine step, and return the results of the coroutines that have
        ended."""
        if self._loop.is_closed():
            return []
        self.run_coroutines()
        self._deliver_answers()
        if self._engine.has_work:
            self._engine.step()
            self._steps += 1
            self.run_coroutines()
        return self._take_results()

    def interrupt(self) -> list[tuple[int, Any]]:
        """Interrupt every coroutine, and return the complete and the partial results."""
        if self._loop.is_closed():
            return []
        self.run_coroutines()
        # An interrupted coroutine may still request something else before it returns.
        while self._tasks:
            for answer in self._take_all_answers():
                answer.coroutine_future.set_exception(Interrupted())
            self._engine.interrupt()
            self.run_coroutines()
        return self._take_results()

    def close(self) -> None:
        """Cancel the coroutines that have not returned."""
        if self._loop.is_closed():
            return
        self._take_all_answers()
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        # `cancel` takes effect when the loop runs: the coroutines then execute their `finally`.
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks))
        self._tasks.clear()
        self._finished_tasks.clear()
        self._results.clear()

        # Their requests are still in flight, although nobody awaits them.
        try:
            if self._engine.has_work:
                self._engine.interrupt()
        finally:
            self._loop.close()

    def _take_results(self) -> list[tuple[int, Any]]:
        results = self._results
        self._results = []
        return results

    def run_coroutines(self) -> None:
        """Run the coroutines until each has returned, or awaits the engine or an answer."""
        # Most engine steps complete no request, and starting the event loop would cost time.
        if self._is_runnable:
            self._loop.run_until_complete(self._run_ready())

    @property
    def _is_runnable(self) -> bool:
        """Whether a coroutine can run: the others await one request or one answer each."""
        return len(self._tasks) > self._pending_requests + len(self._answers)

    async def _run_ready(self) -> None:
        while self._is_runnable:
            # Each ready task runs until its next `await`.
            await asyncio.sleep(0)
            # The event loop has called the callbacks of the tasks that ended before.
            finished = [*self._finished_tasks]
            self._finished_tasks.clear()
            # Sort by index, so that the order of the results does not depend on the event loop.
            for task in sorted(finished, key=lambda task: self._tasks[task]):
                index = self._tasks.pop(task)
                self._results.append((index, task.result()))

    def _deliver_answers(self) -> None:
        """Deliver the answers that have arrived, or those that are due at this step."""
        is_idle = not self._engine.has_work and not self._results
        if self._steps_per_answer is None:
            if is_idle and self._answers:
                self._wait_for_answers()
            self._deliver(self._take_arrived_answers())
            return

        # An idle engine takes no steps, so the count jumps to the step of the next answer.
        if is_idle and self._answer_schedule:
            self._steps = max(self._steps, self._answer_schedule[0][0])
        while due := self._take_due_answers():
            start_s = time.perf_counter()
            for answer in due:
                # `exception` waits for the answer, and unlike `result` does not raise its error.
                answer.future.exception()
            self._report_wait(start_s)
            self._deliver(due)

    def _take_all_answers(self) -> list[_Answer]:
        """Return all answers that coroutines await, and forget them."""
        answers = [*self._answers]
        self._answers.clear()
        self._arrived_answers.clear()
        self._answer_schedule.clear()
        return answers

    def _take_arrived_answers(self) -> list[_Answer]:
        """Return the answers that have arrived since the last call."""
        answers = []
        while self._arrived_answers:
            answer = self._arrived_answers.popleft()
            # An answer of an interrupted coroutine may still arrive.
            if answer in self._answers:
                answers.append(answer)
        return answers

    def _take_due_answers(self) -> list[_Answer]:
        """Return the answers that are due at this step, and remove them from the schedule."""
        answers = []
        while self._answer_schedule and self._answer_schedule[0][0] <= self._steps:
            _, _, answer = heapq.heappop(self._answer_schedule)
            answers.append(answer)
        return answers

    def _deliver(self, answers: Sequence[_Answer]) -> None:
        for answer in sorted(answers, key=lambda answer: answer.order):
            del self._answers[answer]
            error = answer.future.exception()
            if error is not None:
                answer.coroutine_future.set_exception(error)
            else:
                answer.coroutine_future.set_result(answer.future.result())
        self.run_coroutines()

    def _wait_for_answers(self) -> None:
        """Wait until an answer or a request arrives, for at most `_MAX_WAIT_S`."""
        start_s = time.perf_counter()
        # The event is cleared before the check: what arrives after the check sets it again.
        self._engine.wake_up.clear()
        if not self._arrived_answers and not self._engine.has_work:
            self._engine.wake_up.wait(_MAX_WAIT_S)
        self._report_wait(start_s)

    def _report_wait(self, start_s: float) -> None:
        if self._listener is not None:
            self._listener("wait", start_s, time.perf_counter())


class LeaderSamples:
    """`SamplesInFlight` of a replica's first rank: the results of an `EngineLoop`."""

    def __init__(
        self,
        engine: GenerationEngine,
        requests: Sequence[GenerationRequest],
        start: Callable[[Sequence[GenerationRequest]], tuple[EngineLoop, CreateSample]],
    ) -> None:
        """Start the samples.

        Args:
            engine: The engine.
            requests: The first requests.
            start: Function that checks requests, and returns an empty loop for them.

        Raises:
            AlignerError: `start` raised it; raised on every rank of the replica.
        """
        self._engine = engine
        self._start = start
        self._started_loop: EngineLoop | None = None
        self._create: CreateSample
        """Creates the coroutines of the loop; set when the loop starts."""
        self._request_count = 0
        """Number of requests so far."""
        # If `start` raises, the loop stays None, and the constructor raises.
        self._run_and_share_outcome(lambda: self._spawn(requests))

    @property
    def _loop(self) -> EngineLoop:
        assert self._started_loop is not None, "an instance exists only if its loop has started"
        return self._started_loop

    @property
    def is_done(self) -> bool:
        """See `SamplesInFlight.is_done`."""
        return self._started_loop is None or self._started_loop.is_done

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """See `SamplesInFlight.add`."""
        self._run_and_share_outcome(lambda: self._spawn(requests))

    def _spawn(self, requests: Sequence[GenerationRequest]) -> list[tuple[int, Sample]]:
        """Start the coroutines of requests, and run them until they wait."""
        # The loop is closed when its samples are complete.
        if self.is_done:
            self._started_loop, self._create = self._start(requests)
        try:
            for index, request in enumerate(requests, self._request_count):
                self._loop.spawn(index, self._create(index, request))
            self._loop.run_coroutines()
        except BaseException:
            # Close the loop before the outcome is shared: `close` may call the engine, and the
            # other ranks follow engine calls only until then.
            self._loop.close()
            raise
        self._request_count += len(requests)
        return []

    def step(self, count: int | None = 1) -> list[tuple[int, Sample]]:
        """See `SamplesInFlight.step`."""
        return self._run_and_share_outcome(lambda: self._run_steps(count))

    def _run_steps(self, count: int | None) -> list[tuple[int, Sample]]:
        complete: list[tuple[int, Sample]] = []
        # The loop's own count also contains skipped steps, so the steps are counted here.
        step_count = 0
        while not self._loop.is_done and (count is None or step_count < count):
            complete += self._loop.step()
            step_count += 1
        # An agent may end while its requests are in flight; nobody awaits their completions.
        if self._loop.is_done:
            self._loop.close()
        return complete

    def interrupt(self) -> list[tuple[int, Sample]]:
        """See `SamplesInFlight.interrupt`."""
        return self._run_and_share_outcome(self._loop.interrupt)

    def cancel(self) -> None:
        """See `SamplesInFlight.cancel`."""
        self._run_and_share_outcome(self._close)

    def _close(self) -> list[tuple[int, Sample]]:
        self._loop.close()
        return []

    def _run_and_share_outcome(
        self, action: Callable[[], list[tuple[int, Sample]]]
    ) -> list[tuple[int, Sample]]:
        """Run `action`, and share its outcome, with which the other ranks return from the same
        call."""
        try:
            samples = action()
        except (AlignerError, EngineExited) as error:
            outcome = {"error": str(error), "exited": isinstance(error, EngineExited)}
            self._engine.end_turn({**outcome, "done": self.is_done, "indices": []})
            raise
        # The other ranks need only the indices: the samples are read on the replica's first rank.
        indices = [index for index, _ in samples]
        self._engine.end_turn({"error": None, "done": self.is_done, "indices": indices})
        return samples


class FollowerSamples:
    """`SamplesInFlight` of the other ranks of a replica: they execute the engine calls of the first
    rank."""

    def __init__(self, engine: GenerationEngine, requests: Sequence[GenerationRequest]) -> None:
        """Start as the first rank does. Raises AlignerError if the first rank does."""
        self._engine = engine
        self._requests: list[GenerationRequest] = []
        self.is_done = False
        # The first rank shares one outcome at the start, and one for each call of a method.
        self.add(requests)

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """See `SamplesInFlight.add`."""
        self._requests += requests
        self.step()

    def step(self, count: int | None = 1) -> list[tuple[int, Sample]]:
        """See `SamplesInFlight.step`."""
        self._engine.follow()
        message = self._engine.end_turn()
        self.is_done = message["done"]
        if message["error"] is not None:
            raise (EngineExited if message["exited"] else AlignerError)(message["error"])
        # The samples are placeholders, see `SamplesInFlight.step`.
        return [
            (index, create_unfinished_sample(self._requests[index])) for index in message["indices"]
        ]

    def interrupt(self) -> list[tuple[int, Sample]]:
        """See `SamplesInFlight.interrupt`."""
        return self.step()

    def cancel(self) -> None:
        """See `SamplesInFlight.cancel`."""
        self.step()


def start_on_replica(
    engine: GenerationEngine,
    requests: Sequence[GenerationRequest],
    start: Callable[[Sequence[GenerationRequest]], tuple[EngineLoop, CreateSample]],
) -> SamplesInFlight:
    """Start samples on every rank of a replica; `start` is called on the first rank only.

    Raises AlignerError on every rank if `start` does.
    """
    if engine.is_leader:
        return LeaderSamples(engine, requests, start)
    return FollowerSamples(engine, requests)


def reserve_cache(
    engine: GenerationEngine, requests: Sequence[GenerationRequest], options: SamplingOptions
) -> None:
    """Reserve KV cache for all requests, each as long as the longest prompt and response can be."""
    if requests:
        longest = max(
            len(request.prompt.tokens) + request.get_token_limit(options) for request in requests
        )
        engine.reserve(len(requests), longest)


@dataclass(frozen=True)
class SingleResponses:
    """Starts single-turn samples: each consists of one response."""

    engine: GenerationEngine
    uses_local_state = False
    """See `SampleStarter.uses_local_state`."""

    def start(
        self,
        requests: Sequence[GenerationRequest],
        options: SamplingOptions,
        later: Sequence[GenerationRequest] = (),
    ) -> SamplesInFlight:
        """See `SampleStarter.start`."""

        def start_loop(
            first_requests: Sequence[GenerationRequest],
        ) -> tuple[EngineLoop, CreateSample]:
            all_requests = [*first_requests, *later]
            self.engine.check(all_requests, options)
            reserve_cache(self.engine, all_requests, options)
            loop = EngineLoop(self.engine)
            return loop, lambda index, request: complete_response(loop, request, options)

        return start_on_replica(self.engine, requests, start_loop)


@dataclass(frozen=True)
class EpisodeFollower:
    """`EpisodeSource` of the ranks of a replica other than the first."""

    engine: GenerationEngine
    uses_local_state = True
    """See `SampleStarter.uses_local_state`."""

    def start(
        self,
        requests: Sequence[GenerationRequest],
        options: SamplingOptions,
        later: Sequence[GenerationRequest] = (),
    ) -> SamplesInFlight:
        """See `SampleStarter.start`."""
        return FollowerSamples(self.engine, requests)

    def drop_journal_before(self, first_prompt: int) -> None:
        """Do nothing: the first rank has the journal."""

    def take_environment_wait_s(self) -> float | None:
        """Return None: the first rank has the environments."""
        return None

    def close(self) -> None:
        """Do nothing: there are no processes."""


async def complete_response(
    loop: EngineLoop, request: GenerationRequest, options: SamplingOptions
) -> Sample:
    """Generate the response of a sample, or continue its partial response."""
    sample = create_unfinished_sample(request)
    response_length = len(sample.response)
    # The limits apply to the whole response, of which a part may exist already.
    sampling = replace(
        options,
        max_new_tokens=request.get_token_limit(options) - response_length,
        min_new_tokens=max(0, options.min_new_tokens - response_length),
    )
    # The random stream of a sample is indexed from the end of its prompt, so a continued response
    # uses the next random numbers.
    key = RequestKey(request.prompt.id, request.sample_index, sample.prompt_length)
    completion = await loop.generate(
        sample.tokens,
        sampling,
        key=key,
        stop_search_start=sample.prompt_length + options.min_new_tokens,
        grammar_start=sample.prompt_length,
    )
    return append_completion(sample, completion)


def create_unfinished_sample(request: GenerationRequest) -> Sample:
    """Return the sample that a request continues; one without response tokens if it is new."""
    if request.partial_sample is not None:
        return request.partial_sample
    (sample,) = create_empty_samples([request.prompt], 1)
    return replace(sample, sample_index=request.sample_index)


def append_completion(sample: Sample, completion: Completion) -> Sample:
    """Return the sample with a completion appended, which continues the sample's tokens."""
    token_count = len(completion.tokens)

    # A sample without a mask has no observation tokens.
    generated_mask = sample.generated_mask
    if generated_mask is not None:
        new_mask = torch.ones(token_count, dtype=torch.bool)
        generated_mask = torch.cat((generated_mask, new_mask))

    routes = sample.expert_routing
    if completion.expert_routing is not None:
        # The completion contains the routing of all tokens before it, too. The routing that was
        # recorded first stays, because it led to the tokens that follow.
        known_length = 0 if routes is None else len(routes)
        new_routes = completion.expert_routing[known_length:]
        routes = new_routes if routes is None else torch.cat((routes, new_routes))

    finish_reason: FinishReason = (
        "unfinished" if completion.finish_reason == "interrupted" else completion.finish_reason
    )
    return replace(
        sample,
        tokens=torch.cat((sample.tokens.cpu(), completion.tokens)),
        engine_logprobs=torch.cat((sample.engine_logprobs, completion.logprobs)),
        weight_versions=torch.cat((sample.weight_versions, completion.weight_versions)),
        finish_reason=finish_reason,
        sampling_support=_extend_support(sample, completion.sampling_support, token_count),
        expert_routing=routes,
        generated_mask=generated_mask,
        grammar_spans=_extend_grammar_spans(sample, completion),
    )


def append_observation(sample: Sample, tokens: Sequence[int], limit: int) -> Sample:
    """Return the sample with an observation's tokens appended, which the model did not generate.

    Raises AlignerError if they leave no room for a generated token within `limit` response tokens.
    """
    response_length = len(sample.response)
    count = len(tokens)
    # One more token must fit, because the observation is the input of another turn.
    if response_length + count >= limit:
        raise AlignerError(
            f"prompt {sample.prompt_id}, sample {sample.sample_index}:"
            f" {response_length} response tokens and {count} observation tokens leave no"
            f" room for a generated token; the limit is {limit} tokens"
        )
    if not count:
        return replace(sample, finish_reason="unfinished")

    generated_mask = sample.generated_mask
    if generated_mask is None:
        generated_mask = torch.ones(response_length, dtype=torch.bool)
    # The zeros are placeholders: nothing reads log-probs and versions outside `generated_mask`.
    return replace(
        sample,
        tokens=torch.cat((sample.tokens.cpu(), torch.tensor(tokens, dtype=torch.int64))),
        engine_logprobs=torch.cat((sample.engine_logprobs, torch.zeros(count))),
        weight_versions=torch.cat((sample.weight_versions, torch.zeros(count, dtype=torch.int64))),
        finish_reason="unfinished",
        sampling_support=_extend_support(sample, None, count),
        generated_mask=torch.cat((generated_mask, torch.zeros(count, dtype=torch.bool))),
    )


def _extend_grammar_spans(sample: Sample, completion: Completion) -> tuple[GrammarSpan, ...]:
    """Return the grammar spans of a sample's response, followed by that of a completion."""
    spans = sample.grammar_spans
    end = len(sample.response) + len(completion.tokens)
    start = completion.grammar_start - sample.prompt_length
    if completion.grammar is None or start == end:
        return spans
    # The completion of an interrupted text makes the span of its first part longer.
    if spans and spans[-1].start == start:
        spans = spans[:-1]
    return (*spans, GrammarSpan(start, end, completion.grammar))


def _extend_support(
    sample: Sample, support: SamplingSupport | None, count: int
) -> SamplingSupport | None:
    """Return the sampling support of a sample's response, followed by that of `count` more tokens.

    A `support` of None means that these tokens were not restricted. Returns None if no token was
    restricted.
    """
    if sample.sampling_support is None and support is None:
        return None
    parts = [
        sample.sampling_support or SamplingSupport.unrestricted(len(sample.response)),
        support or SamplingSupport.unrestricted(count),
    ]
    counts = torch.cat([part.counts for part in parts])
    ids = torch.cat([*parts[0].split_ids(), *parts[1].split_ids()])
    return SamplingSupport.from_counts(counts, ids)


def run_steps(samples: SamplesInFlight, steps: int | None = None) -> dict[int, Sample]:
    """Run at most `steps` engine steps, and return the samples that are complete, by their index.

    None runs until all samples are complete.
    """
    return {} if samples.is_done else dict(samples.step(steps))
