"""A simulated clock: one thread runs at a time, so that schedules of hours take milliseconds and
are deterministic."""

from __future__ import annotations

import functools
import heapq
import itertools
import threading
from collections import deque
from concurrent.futures import Executor, Future


class Deadlock(Exception):
    """All threads wait for each other."""


class Clock:
    """Runs one thread until it sleeps or waits, then the thread with the next due time."""

    def __init__(self):
        self.now = 0.0
        self._order = itertools.count()
        self._due: list[tuple[float, int, _Turn]] = []
        self._first = self._turn = _Turn()
        self._deadlocked = False

    def sleep(self, seconds):
        """Advance this thread's time by `seconds`."""
        self.wake(self._turn, seconds)
        self.wait()

    def wake(self, turn, seconds=0.0):
        """Schedule a thread to continue after `seconds`."""
        heapq.heappush(self._due, (self.now + seconds, next(self._order), turn))

    def wait(self):
        """Let other threads run until this thread is woken.

        Raises Deadlock on the first thread if no thread can run.
        """
        mine = self._turn
        self.pass_on()
        mine.acquire()
        if self._deadlocked and mine is self._first:
            self._deadlocked = False
            raise Deadlock

    def pass_on(self):
        """Let the next due thread run."""
        if self._due:
            self.now, _, self._turn = heapq.heappop(self._due)
        else:
            self._deadlocked, self._turn = True, self._first
        self._turn.release()

    @property
    def turn(self):
        """Turn of the running thread."""
        return self._turn

    def worker(self, name):
        """Return an executor that runs its tasks in order, in a separate thread."""
        return _Worker(self)


class _Turn(threading.Semaphore):
    def __init__(self):
        super().__init__(0)


class _Pending(Future):
    """A future whose `result` waits on the simulated clock."""

    def __init__(self, clock):
        super().__init__()
        self._clock = clock

    def result(self, timeout=None):
        while not self.done():
            self.add_done_callback(functools.partial(self._wake, self._clock.turn))
            self._clock.wait()
        return super().result(0)

    def _wake(self, turn, _):
        self._clock.wake(turn)


class _Worker(Executor):
    def __init__(self, clock):
        self._clock, self._turn, self._tasks = clock, _Turn(), deque()
        self._idle = self._open = True
        self._ended = _Pending(clock)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, function, /, *arguments):
        pending = _Pending(self._clock)
        self._tasks.append((pending, function, arguments))
        self._wake_if_idle()
        return pending

    def shutdown(self, wait=True, *, cancel_futures=False):
        self._open = False
        if cancel_futures:
            self._tasks.clear()
        self._wake_if_idle()
        self._ended.result()
        self._thread.join()

    def _wake_if_idle(self):
        if self._idle:
            self._idle = False
            self._clock.wake(self._turn)

    def _run(self):
        self._turn.acquire()
        while self._open or self._tasks:
            if not self._tasks:
                self._idle = True
                self._clock.wait()
                continue
            pending, function, arguments = self._tasks.popleft()
            try:
                pending.set_result(function(*arguments))
            except Exception as error:
                pending.set_exception(error)
        self._ended.set_result(None)
        self._clock.pass_on()
