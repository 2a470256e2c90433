"""Environments for many episodes at once, in worker processes; what hangs, dies or answers wrongly
there is begun again."""

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
from aligner.agents.episode_journal import EpisodeJournal, digest
from aligner.agents.worker_process import (
    EnvironmentFailed,
    WorkerLost,
    WorkerProcess,
    WorkerSettings,
)
from aligner.errors import AlignerError, ConfigError
from aligner.schema.environment import EnvironmentConfig

_log = logging.getLogger(__name__)
_MIB = 2**20
_SHOWN_CHARACTERS = 300
_Result = TypeVar("_Result")


class _Worker:
    """A place in the pool for a process, which is started anew once it is lost."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings, self._closes = settings, False
        self._newest: WorkerProcess | None = None
        self.starting = asyncio.create_task(self._started(None))

    async def process(self) -> WorkerProcess:
        """The process, once it is ready. Raises EnvironmentFailed where it does not get so."""
        if self.starting.done() and (
            self.starting.exception() is not None or self.starting.result().is_lost
        ):
            self.starting = asyncio.create_task(
                self._started(None if self.starting.exception() else self.starting.result())
            )
        try:
            return await asyncio.shield(self.starting)
        except ConfigError as error:  # another process had found it
            raise EnvironmentFailed(f"the environment could not be imported: {error}") from error

    async def close(self) -> None:
        """End the process, whether it is ready or not."""
        self._closes = True
        if self._newest is not None and not self.starting.done():
            self._newest.kill()
        await asyncio.wait([self.starting])
        if self.starting.exception() is None:
            await self.starting.result().close()

    async def _started(self, before: WorkerProcess | None) -> WorkerProcess:
        if before is not None:
            self._newest = None
            await before.close()
        self._newest = process = await WorkerProcess.start(self._settings)
        if self._closes:
            process.kill()
        await process.ready()
        return process


@dataclass
class _Environment:
    """One that lives in a process."""

    process: WorkerProcess
    number: int
    calls: int = 0
    """That it has answered."""


@dataclass
class _Episode:
    name: str
    calls: list[list[Any]]
    """What it has asked: its reset, then its steps."""
    digests: list[str]
    """The same for the journal: the reset with what environments are made of."""
    answer: "Future[Outcome]" = field(default_factory=Future)
    """To the last of them."""
    failures: int = 0
    place: _Worker | None = None
    """Its own from its reset until it is over."""
    environment: _Environment | None = None


class EnvironmentPool:
    """Environments of one class, each asked by the name of its episode; for one thread, which gets
    futures.

    An episode whose environment fails goes on in a fresh one: that is asked all that the episode
    has asked, when the next answer is wanted, and must answer as the first one did. Failures are a
    call that takes more than `deadline_s`, an exception, the end of its process, and what is no
    answer: a wrong type, a reward that is not finite, an observation of more than
    `most_characters`. After more than `retries` of them, and where the answers differ, the episode
    is lost. A process that has to be ended costs the other episodes on it nothing but their replay.

    `deadline_s` is wall-clock time from when a call is sent to a process, which runs the code of
    one environment at a time. Environments that await what they wait for may be many to a process.
    Those that compute wait for each other: have `episodes_per_worker` times the longest call well
    below `deadline_s`, 1 at best, and as many workers as cores.

    What `journal` has of an episode is told from there: no environment is started until the episode
    goes beyond it.
    """

    def __init__(
        self,
        target: str,
        arguments: Mapping[str, Any],
        settings: EnvironmentConfig,
        journal: EpisodeJournal | None = None,
    ) -> None:
        """`target` is `module:Class`, made with `arguments`, which are JSON, whatever `settings`
        say of that."""
        module, _, name = target.partition(":")
        memory_bytes = None if settings.memory_mib is None else settings.memory_mib * _MIB
        self._limits = settings
        self._settings = WorkerSettings(
            module, name, dict(arguments), settings.max_characters, memory_bytes
        )
        self._journal, self._keeps = journal or EpisodeJournal(), journal is not None
        self._episodes: dict[str, _Episode] = {}
        self._numbers = itertools.count(1)
        self._places: asyncio.Queue[_Worker] = asyncio.Queue()
        self._all: list[_Worker] = []
        self._tasks = set[asyncio.Task[Any]]()
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self.listener: Callable[[str, float, float], None] | None = None
        """Told, in seconds of `time.perf_counter`, from when to when environments were asked
        (`environments`, in the pool's own thread), and was waited for their answers (`wait`)."""
        self._under_way, self._since = 0, 0.0
        self._begun, self._waits = 0, list[float]()

    @classmethod
    def of(
        cls, settings: EnvironmentConfig, journal: EpisodeJournal | None = None
    ) -> "EnvironmentPool":
        """The pool that a configuration asks for; it has a `target`."""
        if settings.target is None:
            raise AssertionError  # who has none makes no pool
        return cls(settings.target, settings.arguments, settings, journal)

    @classmethod
    def of_agents(cls, settings: EnvironmentConfig) -> "EnvironmentPool":
        """A pool in which an episode's `reset` is all that the configuration's agent does."""
        arguments = {"agent": settings.agent, "command": settings.agent_command}
        return cls(f"{AgentRun.__module__}:{AgentRun.__name__}", arguments, settings)

    def start(self) -> None:
        """Start the processes; returns when the first one is ready, the others get so meanwhile.

        Raises ConfigError, with the reason alone, where there is no such class or it does not take
        the arguments.
        """
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="environments", daemon=True
        )
        self._thread.start()
        try:
            self._run(self._begin()).result()
        except EnvironmentFailed as error:
            self.close()
            raise ConfigError(str(error)) from error
        except BaseException:
            self.close()
            raise

    def reset(self, episode: str, task: Mapping[str, Any], seed: int) -> "Future[Outcome]":
        """Begin an episode; `task` is JSON. Once more are open than there are places, it waits in
        turn for one to be over.

        The future raises EpisodeLost. Raises AlignerError for an episode that is open, and a task
        that is not JSON.
        """
        if self._thread is None:
            raise AlignerError("the environment pool was not started, or is already closed")
        if episode in self._episodes:
            raise AlignerError(
                f"episode {episode} is already open; finish the episode before the next reset"
            )
        asked = ["reset", dict(task), seed]
        try:
            json.dumps(asked, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise AlignerError(f"episode {episode}: its task must be JSON: {error}") from error
        made_of = [self._settings.module, self._settings.name, self._settings.arguments]
        opened = self._episodes[episode] = _Episode(episode, [asked], [digest([*asked, *made_of])])
        self._begun += 1
        opened.answer = self._run(self._answered(opened))
        return opened.answer

    def step(self, episode: str, action: str) -> "Future[Outcome]":
        """Act. The future raises EpisodeLost. Raises AlignerError for an episode that is unknown,
        done, lost or in a call."""
        opened = None if self._thread is None else self._episodes.get(episode)
        if opened is None:
            raise AlignerError(f"episode {episode} is unknown; reset it before a step")
        if not opened.answer.done():
            raise AlignerError(
                f"episode {episode} is still waiting for the answer to its previous step; call step"
                " again after the answer has arrived"
            )
        if opened.answer.cancelled() or opened.answer.exception() is not None:
            why = "it was cancelled" if opened.answer.cancelled() else opened.answer.exception()
            raise AlignerError(f"episode {episode} is lost and accepts no more steps: {why}")
        if opened.answer.result().done:
            raise AlignerError(f"episode {episode} is done and accepts no more steps")
        opened.calls.append(["step", action])
        opened.digests.append(digest(opened.calls[-1]))
        opened.answer = self._run(self._answered(opened))
        return opened.answer

    def wait(
        self,
        answers: Collection["Future[Outcome]"],
        timeout_s: float | None = None,
        return_when: str = ALL_COMPLETED,
    ) -> None:
        """As `concurrent.futures.wait`; the listener is told of it."""
        begin = time.perf_counter()
        wait(answers, timeout_s, return_when)
        if self.listener is not None:
            self.listener("wait", begin, time.perf_counter())

    def take_waits(self) -> float | None:
        """Seconds that an episode waited for answers, the mean of those begun since the call
        before; None without any."""
        begun, waits, self._begun, self._waits = self._begun, self._waits, 0, []
        return sum(waits) / begun if begun else None

    def finish(self, episode: str) -> None:
        """End an episode, also in the middle of a call, whose future is cancelled; its environment
        is closed meanwhile.

        The journal keeps it. Raises AlignerError for an unknown one.
        """
        if episode not in self._episodes:
            raise AlignerError(f"episode {episode} is unknown or already finished")
        finished = self._episodes.pop(episode)
        finished.answer.cancel()
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._leave, finished)
        if not self._keeps:
            self._journal.forget([episode])

    def forget(self, is_over: Callable[[str], bool]) -> None:
        """Drop what the journal has of such episodes, by their names: none of them goes on. Raises
        OSError."""
        self._journal.forget(filter(is_over, self._journal.episodes))

    def close(self) -> None:
        """End all processes, which close their environments; the futures of calls under way are
        cancelled. May be repeated."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._run(self._end()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, _Result]) -> "Future[_Result]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _begin(self) -> None:
        self._all = [_Worker(self._settings) for _ in range(self._limits.workers)]
        for _ in range(self._limits.episodes_per_worker):
            for worker in self._all:
                self._places.put_nowait(worker)
        first, _ = await asyncio.wait(
            [worker.starting for worker in self._all], return_when=asyncio.FIRST_COMPLETED
        )
        first.pop().result()

    async def _end(self) -> None:
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait({*self._tasks})
        await asyncio.gather(*(worker.close() for worker in self._all))

    def _hold(self, task: "asyncio.Task[Any] | None") -> None:
        """Have a task that lives until it is done, or the pool is closed."""
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answered(self, episode: _Episode) -> Outcome:
        """What the episode is answered to the last of its calls."""
        self._hold(asyncio.current_task())
        call = len(episode.calls) - 1
        try:
            with self._timed():
                outcome = await self._told(episode, call)
        except BaseException:  # lost, or finished in the middle
            self._leave(episode)
            raise
        if outcome.done:
            self._leave(episode)
        return outcome

    async def _told(self, episode: _Episode, call: int) -> Outcome:
        if episode.place is None:
            episode.place = await self._places.get()
        outcome = self._journal.told(episode.name, call, episode.digests[call])
        if outcome is None:
            outcome = await self._outcome(episode)
            self._journal.record(episode.name, call, episode.digests[call], outcome)
        return outcome

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        if not self._under_way:
            self._since = begin
        self._under_way += 1
        try:
            yield
        finally:
            now = time.perf_counter()
            self._under_way -= 1
            self._waits.append(now - begin)
            if not self._under_way and self.listener is not None:
                self.listener("environments", self._since, now)

    async def _outcome(self, episode: _Episode) -> Outcome:
        while True:
            try:
                return await self._asked(episode)
            except WorkerLost:
                episode.environment = None
            except EnvironmentFailed as error:
                environment, episode.environment = episode.environment, None
                call = 0 if environment is None else environment.calls
                if environment is not None:
                    await self._close_environment(episode.name, environment)
                episode.failures += 1
                _log.warning(
                    "episode %s: %s failed (failure %d): %s",
                    episode.name,
                    _named(call),
                    episode.failures,
                    error,
                )
                if episode.failures > (retries := self._limits.retries):
                    told = (
                        f"episode {episode.name}: {_named(call)} failed: {error}; gave up after"
                        f" {retries} retries"
                    )
                    raise EpisodeLost(told) from error

    async def _asked(self, episode: _Episode) -> Outcome:
        """Ask an environment of this episode's all that it was not asked before."""
        if episode.place is None:
            raise AssertionError  # it has one until it is over
        environment = episode.environment
        if environment is None:
            environment = _Environment(await episode.place.process(), next(self._numbers))
            episode.environment = environment
        for call, asked in enumerate(episode.calls[environment.calls :], start=environment.calls):
            outcome = Outcome(
                **await environment.process.ask(environment.number, asked, self._limits.deadline_s)
            )
            before = self._journal.told(episode.name, call, episode.digests[call])
            if before is not None and before != outcome:
                raise EpisodeLost(
                    f"episode {episode.name}: {_named(call)} returned a different answer on replay:"
                    f" first {_shown(before)}, then {_shown(outcome)}. The answers of an"
                    " environment must depend only on task, seed and actions"
                )
            environment.calls += 1
        return outcome

    def _leave(self, episode: _Episode) -> None:
        """Have the episode's environment closed, and its place be another's then."""
        place, episode.place = episode.place, None
        environment, episode.environment = episode.environment, None
        if place is not None:
            self._hold(self._loop.create_task(self._vacate(episode.name, place, environment)))

    async def _vacate(self, episode: str, place: _Worker, environment: _Environment | None) -> None:
        try:
            if environment is not None:
                await self._close_environment(episode, environment)
        finally:
            self._places.put_nowait(place)

    async def _close_environment(self, episode: str, environment: _Environment) -> None:
        try:
            await environment.process.close_environment(environment.number, self._limits.deadline_s)
        except EnvironmentFailed as error:
            _log.warning("episode %s: closing its environment failed: %s", episode, error)


def _named(call: int) -> str:
    return "reset" if call == 0 else f"step {call}"


def _shown(outcome: Outcome) -> str:
    text = str(outcome)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
