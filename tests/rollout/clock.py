"""A simulated clock: threads take turns, so that schedules of hours are run in milliseconds and
always alike."""

from __future__ import annotations

import functools
import heapq
import itertools
import threading
from collections import deque
from concurrent.futures import Executor, Future


class Deadlock(Exception):
    """Every thread waits for another one."""


class Clock:
    """One thread runs until it sleeps or waits; then the one whose time is next does."""

    def __init__(self):
        self.now = 0.0
        self._order = itertools.count()
        self._due: list[tuple[float, int, _Turn]] = []
        self._first = self._turn = _Turn()
        self._deadlocked = False

    def sleep(self, seconds):
        """Let so much time pass."""
        self.wake(self._turn, seconds)
        self.wait()

    def wake(self, turn, seconds=0.0):
        """Have a thread go on in so many seconds."""
        heapq.heappush(self._due, (self.now + seconds, next(self._order), turn))

    def wait(self):
        """Let others run until this thread is woken. Raises Deadlock on the first thread when no
        one could."""
        mine = self._turn
        self.pass_on()
        mine.acquire()
        if self._deadlocked and mine is self._first:
            self._deadlocked = False
            raise Deadlock

    def pass_on(self):
        """The next thread runs."""
        if self._due:
            self.now, _, self._turn = heapq.heappop(self._due)
        else:
            self._deadlocked, self._turn = True, self._first
        self._turn.release()

    @property
    def turn(self):
        """Whose turn it is."""
        return self._turn

    def worker(self, name):
        """What does one thing after another in a thread of its own."""
        return _Worker(self)


class _Turn(threading.Semaphore):
    def __init__(self):
        super().__init__(0)


class _Pending(Future):
    """Waits by the clock."""

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
        self._go_on()
        return pending

    def shutdown(self, wait=True, *, cancel_futures=False):
        self._open = False
        if cancel_futures:
            self._tasks.clear()
        self._go_on()
        self._ended.result()
        self._thread.join()

    def _go_on(self):
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
