"""Scoring functions as users write them, each with a fault or of a special form."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from decimal import Decimal

calls = 0


def length(requests):
    return [float(len(request.response)) for request in requests]


def forks_at_the_second_call(requests):
    """Return the number of the call; the forked process returns too, during a later call."""
    global calls
    calls += 1
    if calls == 2 and os.fork() == 0:
        time.sleep(0.15)
    elif calls > 2:
        time.sleep(0.1)
    return [calls] * len(requests)


def forks_and_raises(requests):
    if os.fork() == 0:
        raise KeyError("the forked process")
    return length(requests)


def leaves_a_forked_process(requests):
    """The forked process outlives the call and holds all files that it inherited."""
    if os.fork() == 0:
        threading.Event().wait(5)
        os._exit(0)
    os._exit(3)


def abstains_without_response(requests):
    return [len(request.response) or None for request in requests]


def gives_steps_or_abstains(requests):
    return [[(1, 2.0)] if request.response else None for request in requests]


def one_score_too_few(requests):
    return [1.0] * (len(requests) - 1)


def numpy_scores(requests):
    import numpy as np

    return np.array([len(request.response) for request in requests], dtype=np.float32)


def numpy_scalars(requests):
    import numpy as np

    return [np.int64(len(request.response)) for request in requests]


def tensor_scores(requests):
    import torch  # not above, because it takes a second in each process

    return torch.tensor([[float(len(request.response))] for request in requests])


def yields_scores(requests):
    yield from length(requests)


def other_numbers(requests):
    return tuple(Decimal(len(request.response)) for request in requests)


def text_scores(requests):
    return ["1.5" for _ in requests]


def list_scores(requests):
    return [[1.0, 2.0] for _ in requests]


def one_text(requests):
    return "1" * len(requests)


def nothing(requests):
    length(requests)


def mapping(requests):
    return dict.fromkeys(requests[0].response, 1.0)


async def is_async(requests):
    await asyncio.sleep(0)
    return length(requests)


async def is_async_generator(requests):
    for score in length(requests):
        await asyncio.sleep(0)
        yield score


def returns_awaitables(requests):
    async def score(request):
        await asyncio.sleep(0)
        return float(len(request.response))

    return [score(request) for request in requests]


loops = set()


async def uses_one_loop(requests):
    loops.add(asyncio.get_running_loop())
    return [len(loops)] * len(requests)


class _AsyncCallable:
    async def __call__(self, requests):
        return length(requests)


async_callable = _AsyncCallable()


async def async_steps(requests):
    return [[(1, 2.0)] for _ in requests]


async def async_raises(requests):
    raise KeyError("gold")


def _acquire_twice():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def deadlocks(requests):
    _acquire_twice()


def deadlocks_on_seven(requests):
    """Deadlock if a response contains a 7."""
    if any("7" in request.response for request in requests):
        _acquire_twice()
    return length(requests)


def deadlocks_at_every_third_call(requests):
    """Deadlock at the third call of each process."""
    global calls
    calls += 1
    if calls == 3:
        _acquire_twice()
    return length(requests)


async def _waits_forever():
    await asyncio.Event().wait()


async def async_deadlocks(requests):
    await _waits_forever()


def waits_for_a_thread_that_raised(requests):
    done = threading.Event()

    def work():
        raise KeyError("gold")

    threading.Thread(target=work, name="worker").start()
    done.wait()


def is_stuck_in_c(requests):
    return [7 ** (10**9)]


def exits(requests):
    os._exit(3)
