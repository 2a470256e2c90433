"""Pool of worker processes that host the environments of many concurrent episodes.

If an environment hangs, crashes or returns an invalid answer, the pool starts a fresh one and
replays the calls of the episode.
"""

import asyncio
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from concurrent.futures import ALL_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aligner.agents.agent_run import AgentRun
from aligner.agents.episode_environment import EpisodeLost, Outcome
from aligner.agents.episode_journal import EpisodeJournal, compute_call_digest
from aligner.agents.sandboxes import SandboxSettings
from aligner.agents.worker_process import (
    EnvironmentFailed,
    WorkerLost,
    WorkerProcess,
    WorkerSettings,
)
from aligner.data.episode_reports import FailureKind
from aligner.errors import AlignerError, ConfigError
from aligner.schema.environment import EnvironmentConfig

_log = logging.getLogger(__name__)
_MIB = 2**20
# maximum number of characters of an answer in an error message
_MAX_SHOWN_CHARACTERS = 300
_Result = TypeVar("_Result")


class _Worker:
    """A slot of the pool for one worker process, which is restarted after it has been lost."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._is_closing = False
        # latest process that was started; `close` kills it if it is not ready yet
        self._current: WorkerProcess | None = None
        self.starting = asyncio.create_task(self._start(None))
        """Task that returns the process when it is ready."""

    async def get_process(self) -> WorkerProcess:
        """Return the process when it is ready; start a new one if the previous one was lost.

        Raises EnvironmentFailed if the process does not become ready.
        """
        if self.starting.done() and (
            self.starting.exception() is not None or self.starting.result().is_lost
        ):
            previous = None if self.starting.exception() else self.starting.result()
            self.starting = asyncio.create_task(self._start(previous))
        try:
            # Several episodes may await this task; cancelling one of them must not cancel it.
            return await asyncio.shield(self.starting)
        except ConfigError as error:  # the pool's first process could import the environment
            raise EnvironmentFailed(
                f"the environment could not be imported: {error}", FailureKind.INFRASTRUCTURE
            ) from error

    async def close(self) -> None:
        """End the process, also if it is still starting."""
        self._is_closing = True
        # A process that imports its environment may take minutes until it is ready.
        if self._current is not None and not self.starting.done():
            self._current.kill()
        await asyncio.wait([self.starting])
        if self.starting.exception() is None:
            await self.starting.result().close()

    async def _start(self, previous: WorkerProcess | None) -> WorkerProcess:
        """Close the process `previous`, start a new one, and return it when it is ready."""
        if previous is not None:
            self._current = None
            await previous.close()

        process = await WorkerProcess.start(self._settings)
        self._current = process
        # `close` may have run during the start, when there was no process to kill yet.
        if self._is_closing:
            process.kill()
        await process.wait_until_ready()
        return process


@dataclass
class _Environment:
    """An environment in a worker process."""

    process: WorkerProcess
    number: int
    """Number of the environment, unique in the pool."""
    calls: int = 0
    """Number of calls of the episode that this environment has answered."""


@dataclass
class _Episode:
    """An open episode: its calls so far, and its environment."""

    name: str
    calls: list[list[Any]]
    """The reset, then the steps, each as the `request` argument of `call_environment`."""
    digests: list[str]
    """Journal keys of the calls; the key of the reset covers the target and its arguments."""
    should_retry: Callable[[FailureKind], bool]
    """Function that returns whether a failure may be retried. It runs in the pool's thread."""
    answer: "Future[Outcome]" = field(default_factory=Future)
    """Answer to the last call."""
    retries: list[FailureKind] = field(default_factory=list)
    """Failures after which the episode has continued in a fresh environment."""
    slot: _Worker | None = None
    """Worker slot that the episode holds from its reset to its end."""
    environment: _Environment | None = None
    """The episode's current environment; None before its first call and after a failure."""


class EnvironmentPool:
    """Environments of one class in worker processes, one environment per episode name.

    Calls return futures. The pool runs its own asyncio loop in a thread; its methods must be called
    from one thread only.

    If an environment fails, its episode continues in a fresh one. The pool replays all calls of the
    episode there when it needs the next answer, and the answers must equal the earlier ones. A
    failure is a call that takes longer than `deadline_s`, an exception, the exit of the process, or
    an invalid answer: a wrong type, a reward that is not finite, or an observation of more than
    `max_characters` characters. The episode is lost after more than `retries` failures, or if an
    answer differs on replay. With `failure_reward`, a failed step that the policy may have caused
    is not retried: the answer to this step is the end of the episode with that reward. If the pool
    has to kill a process, the other episodes in the process are replayed too, but this does not
    count as a failure of those episodes.

    `deadline_s` is wall-clock time, which starts when the call is sent to the process. A process
    runs the code of one environment at a time. Environments that await their input can share a
    process in large numbers. Environments that compute delay each other: keep
    `episodes_per_worker` times the longest call well below `deadline_s`, ideally with
    `episodes_per_worker=1` and one worker per core.

    Answers that `journal` contains are returned from the journal. An environment is started only
    when the episode makes a call that the journal does not contain.
    """

    def __init__(
        self,
        target: str,
        arguments: Mapping[str, Any],
        settings: EnvironmentConfig,
        journal: EpisodeJournal | None = None,
    ) -> None:
        """Create a pool without processes; `start` starts them.

        Args:
            target: Class of the environments, as `module:Class`.
            arguments: Keyword arguments of the class, as JSON values.
            settings: Limits and numbers of workers; `target` and `arguments` in it are ignored.
            journal: Journal of the answers, which may contain answers of earlier attempts of the
                run. Without a journal, the pool keeps the answers of an episode in memory until the
                episode is finished.
        """
        module, _, name = target.partition(":")
        memory_bytes = None if settings.memory_mib is None else settings.memory_mib * _MIB
        self._limits = settings
        self._settings = WorkerSettings(
            module,
            name,
            dict(arguments),
            settings.max_characters,
            memory_bytes,
            SandboxSettings.from_config(settings),
        )
        self._journal = journal or EpisodeJournal()
        self._keeps_journal = journal is not None
        self._episodes: dict[str, _Episode] = {}
        # starts at 1, because 0 means that no environment runs (`environment_worker.NOTE`)
        self._environment_numbers = itertools.count(1)
        # free slots: each worker is in the queue once per episode that it can still accept
        self._free_slots: asyncio.Queue[_Worker] = asyncio.Queue()
        self._workers: list[_Worker] = []
        self._tasks = set[asyncio.Task[Any]]()
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self.listener: Callable[[str, float, float], None] | None = None
        """Callback for time spans, with a name, the begin and the end in seconds of
        `time.perf_counter`. The span `environments` covers a period in which calls are in flight;
        the callback gets it in the pool's thread. The span `wait` covers a call of `wait`."""
        # number of calls in flight, and the time at which this number last rose from 0
        self._calls_in_flight = 0
        self._in_flight_since_s = 0.0
        # episodes started, and seconds that each call has waited, since the last call of
        # `take_environment_wait_s`
        self._episodes_started = 0
        self._wait_times_s = list[float]()

    @classmethod
    def from_config(
        cls, settings: EnvironmentConfig, journal: EpisodeJournal | None = None
    ) -> "EnvironmentPool":
        """Return the pool for the target and arguments of a configuration."""
        if settings.target is None:
            raise AssertionError  # callers create a pool only if there is a target
        return cls(settings.target, settings.arguments, settings, journal)

    @classmethod
    def for_agents(cls, settings: EnvironmentConfig) -> "EnvironmentPool":
        """Return a pool in which the `reset` of an episode runs the agent of a configuration."""
        arguments = {"agent": settings.agent, "command": settings.agent_command}
        return cls(f"{AgentRun.__module__}:{AgentRun.__name__}", arguments, settings)

    def start(self) -> None:
        """Start the processes, and return when the first one is ready.

        The other processes continue to start in the background.

        Raises:
            ConfigError: The class does not exist, does not accept the arguments, or cannot be
                imported. The message contains only the reason, no configuration key.
        """
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="environments", daemon=True
        )
        self._thread.start()
        try:
            self._run(self._start_workers()).result()
        except EnvironmentFailed as error:
            self.close()
            raise ConfigError(str(error)) from error
        except BaseException:
            self.close()
            raise

    def reset(
        self,
        episode: str,
        task: Mapping[str, Any],
        seed: int,
        should_retry: Callable[[FailureKind], bool] = lambda kind: True,
    ) -> "Future[Outcome]":
        """Start an episode; the future returns the first observation.

        If all worker slots are in use, the episode waits, in the order of the resets, until another
        episode ends. The future raises EpisodeLost if the episode cannot be completed.

        Args:
            episode: Name of the episode, unique among the open episodes.
            task: Input of the environment, as JSON values.
            seed: Seed of the environment's random choices.
            should_retry: Function that returns whether a failure may be retried. It runs in the
                pool's thread.

        Raises:
            AlignerError: The episode is already open, the task is not JSON, or the pool is not
                running.
        """
        if self._thread is None:
            raise AlignerError("the environment pool was not started, or is already closed")
        if episode in self._episodes:
            raise AlignerError(
                f"episode {episode} is already open; finish the episode before the next reset"
            )
        call = ["reset", dict(task), seed]
        try:
            json.dumps(call, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise AlignerError(f"episode {episode}: its task must be JSON: {error}") from error

        # answers of another environment class or of other arguments must not be reused
        target = [self._settings.module, self._settings.name, self._settings.arguments]
        state = _Episode(episode, [call], [compute_call_digest([*call, *target])], should_retry)
        self._episodes[episode] = state
        self._episodes_started += 1
        state.answer = self._run(self._run_call(state))
        return state.answer

    def step(self, episode: str, action: str) -> "Future[Outcome]":
        """Send an action to the environment of an episode; the future returns its answer.

        The future raises EpisodeLost if the episode cannot be completed. Raises AlignerError if the
        episode is unknown, done or lost, or if its previous call is still in flight.
        """
        state = None if self._thread is None else self._episodes.get(episode)
        if state is None:
            raise AlignerError(f"episode {episode} is unknown; reset it before a step")
        if not state.answer.done():
            raise AlignerError(
                f"episode {episode} is still waiting for the answer to its previous step; call step"
                " again after the answer has arrived"
            )
        # `exception` would raise CancelledError for a cancelled call.
        if state.answer.cancelled() or state.answer.exception() is not None:
            reason = "it was cancelled" if state.answer.cancelled() else state.answer.exception()
            raise AlignerError(f"episode {episode} is lost and accepts no more steps: {reason}")
        if state.answer.result().done:
            raise AlignerError(f"episode {episode} is done and accepts no more steps")

        state.calls.append(["step", action])
        state.digests.append(compute_call_digest(state.calls[-1]))
        state.answer = self._run(self._run_call(state))
        return state.answer

    def wait(
        self,
        answers: Collection["Future[Outcome]"],
        timeout_s: float | None = None,
        return_when: str = ALL_COMPLETED,
    ) -> None:
        """Wait like `concurrent.futures.wait`, and report the time span to the listener."""
        begin = time.perf_counter()
        wait(answers, timeout_s, return_when)
        if self.listener is not None:
            self.listener("wait", begin, time.perf_counter())

    def take_environment_wait_s(self) -> float | None:
        """Return the mean time that an episode waited for answers, in seconds.

        The time includes the wait for a worker slot. It covers the calls that ended since the
        previous call of this method, divided by the number of episodes started since then. Returns
        None if no episode was started.
        """
        episodes = self._episodes_started
        waits = self._wait_times_s
        self._episodes_started = 0
        self._wait_times_s = []
        return sum(waits) / episodes if episodes else None

    def get_retries(self, episode: str) -> tuple[FailureKind, ...]:
        """Return the failures of an open episode after which its environment was started again."""
        return tuple(self._episodes[episode].retries)

    def finish(self, episode: str) -> None:
        """End an episode, and close its environment in the background.

        The future of a call in flight is cancelled. The answers stay in the journal that was given
        to the pool. Raises AlignerError if the episode is unknown.
        """
        if episode not in self._episodes:
            raise AlignerError(f"episode {episode} is unknown or already finished")
        state = self._episodes.pop(episode)
        state.answer.cancel()
        # A cancelled call frees the slot itself; this call frees it if no call is in flight.
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._end_episode, state)
        if not self._keeps_journal:
            self._journal.forget([episode])

    def forget(self, is_over: Callable[[str], bool]) -> None:
        """Remove from the journal each episode for whose name `is_over` returns True.

        None of these episodes may continue. Raises OSError if the journal cannot be written.
        """
        self._journal.forget(filter(is_over, self._journal.episodes))

    def close(self) -> None:
        """Cancel the calls in flight, close all environments, and end all processes.

        May be called repeatedly.
        """
        thread = self._thread
        self._thread = None
        if thread is not None:
            self._run(self._close_workers()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, _Result]) -> "Future[_Result]":
        """Run a coroutine in the thread of the pool."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _start_workers(self) -> None:
        """Start all workers, and wait for the first one that is ready or has failed."""
        self._workers = [_Worker(self._settings) for _ in range(self._limits.workers)]
        # the slots alternate between the workers, so that few episodes spread over all of them
        for _ in range(self._limits.episodes_per_worker):
            for worker in self._workers:
                self._free_slots.put_nowait(worker)
        # if the first process cannot import the class, no process can; `result` raises the error
        completed, _ = await asyncio.wait(
            [worker.starting for worker in self._workers], return_when=asyncio.FIRST_COMPLETED
        )
        completed.pop().result()

    async def _close_workers(self) -> None:
        """Cancel all tasks of the pool, then close the workers."""
        # a cancelled call creates a task that closes its environment, so one pass is not enough
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait({*self._tasks})
        await asyncio.gather(*(worker.close() for worker in self._workers))

    def _track(self, task: "asyncio.Task[Any] | None") -> None:
        """Keep a reference to a task until it is done; `close` cancels the remaining ones."""
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run_call(self, episode: _Episode) -> Outcome:
        """Return the answer to the episode's last call; give its slot back if it is over."""
        self._track(asyncio.current_task())
        call = len(episode.calls) - 1
        try:
            with self._measure_call():
                outcome = await self._answer_call(episode, call)
        except BaseException:  # the episode is lost, or `finish` has cancelled the call
            self._end_episode(episode)
            raise
        if outcome.done:
            self._end_episode(episode)
        return outcome

    async def _answer_call(self, episode: _Episode, call: int) -> Outcome:
        """Return the answer to a call from the journal, else from an environment."""
        # An episode takes a slot even if its calls are replayed from the journal, so that a resumed
        # run has the same limit on concurrent episodes.
        if episode.slot is None:
            episode.slot = await self._free_slots.get()
        outcome = self._journal.find(episode.name, call, episode.digests[call])
        if outcome is None:
            outcome = await self._answer_with_retries(episode)
            # Record the answer before the policy reads it: a resumed run reads the same answer.
            self._journal.record(episode.name, call, episode.digests[call], outcome)
        return outcome

    @contextmanager
    def _measure_call(self) -> Iterator[None]:
        """Measure the time of a call, and report the span in which any calls are in flight."""
        begin = time.perf_counter()
        if not self._calls_in_flight:
            self._in_flight_since_s = begin
        self._calls_in_flight += 1
        try:
            yield
        finally:
            now = time.perf_counter()
            self._calls_in_flight -= 1
            self._wait_times_s.append(now - begin)
            if not self._calls_in_flight and self.listener is not None:
                self.listener("environments", self._in_flight_since_s, now)

    async def _answer_with_retries(self, episode: _Episode) -> Outcome:
        """Return the answer to the episode's last call, with retries in fresh environments.

        Raises EpisodeLost after more than `retries` failures, or if a failure must not be retried.
        """
        while True:
            try:
                return await self._send_calls(episode)
            except WorkerLost:
                # this environment did not cause the exit, so the episode has no failure
                episode.environment = None
            except EnvironmentFailed as error:
                # The environment may be in an inconsistent state, so the retry starts a fresh one.
                environment = episode.environment
                episode.environment = None
                call = 0 if environment is None else environment.calls
                if environment is not None:
                    await self._close_environment(episode.name, environment, has_failed=True)
                _log.warning(
                    "episode %s: %s failed (failure %d, %s): %s",
                    episode.name,
                    _get_call_name(call),
                    len(episode.retries) + 1,
                    error.kind.value,
                    error,
                )
                failure_reward = self._limits.failure_reward
                # the policy may have caused the failure of its last action, and learns from it
                is_action = 0 < call == len(episode.calls) - 1
                if is_action and failure_reward is not None and error.kind.is_attributable:
                    return Outcome("", failure_reward, done=True, failure=error.kind)
                if len(episode.retries) >= self._limits.retries or not episode.should_retry(
                    error.kind
                ):
                    message = (
                        f"episode {episode.name}: {_get_call_name(call)} failed: {error}; gave up"
                        f" after {len(episode.retries)} retries"
                    )
                    raise EpisodeLost(message, error.kind) from error
                episode.retries.append(error.kind)

    async def _send_calls(self, episode: _Episode) -> Outcome:
        """Send the calls that the environment has not answered yet; return the last answer.

        A fresh environment gets all calls of the episode. Raises EpisodeLost if it answers one of
        them differently from the journal.
        """
        if episode.slot is None:
            raise AssertionError  # an open episode holds a slot
        environment = episode.environment
        if environment is None:
            process = await episode.slot.get_process()
            environment = _Environment(process, next(self._environment_numbers))
            episode.environment = environment

        unanswered_calls = episode.calls[environment.calls :]
        for call, request in enumerate(unanswered_calls, start=environment.calls):
            answer = await environment.process.call(
                environment.number, request, self._limits.deadline_s
            )
            outcome = Outcome(**answer)
            # The policy has already seen the recorded answers, so a replay has to repeat them.
            recorded = self._journal.find(episode.name, call, episode.digests[call])
            if recorded is not None and recorded != outcome:
                raise EpisodeLost(
                    f"episode {episode.name}: {_get_call_name(call)} returned a different answer on"
                    f" replay: first {_format_outcome(recorded)}, then {_format_outcome(outcome)}."
                    " The answers of an environment must depend only on task, seed and actions"
                )
            environment.calls += 1
        return outcome

    def _end_episode(self, episode: _Episode) -> None:
        """Close the episode's environment in the background, then free the slot."""
        # May be called twice, after the last answer and by `finish`; the slot is freed only once.
        worker = episode.slot
        episode.slot = None
        environment = episode.environment
        episode.environment = None
        if worker is not None:
            task = self._loop.create_task(self._free_slot(episode.name, worker, environment))
            self._track(task)

    async def _free_slot(
        self, episode: str, slot: _Worker, environment: _Environment | None
    ) -> None:
        """Close an environment, and put its slot back into the queue."""
        try:
            if environment is not None:
                await self._close_environment(episode, environment, has_failed=False)
        finally:
            self._free_slots.put_nowait(slot)

    async def _close_environment(
        self, episode: str, environment: _Environment, *, has_failed: bool
    ) -> None:
        """Close an environment; log a failure."""
        try:
            await environment.process.close_environment(
                environment.number, self._limits.deadline_s, has_failed=has_failed
            )
        except EnvironmentFailed as error:
            _log.warning("episode %s: closing its environment failed: %s", episode, error)


def _get_call_name(call: int) -> str:
    """Return the name of a call for messages."""
    return "reset" if call == 0 else f"step {call}"


def _format_outcome(outcome: Outcome) -> str:
    """Return an answer as a text of limited length for messages."""
    text = str(outcome)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}…"
