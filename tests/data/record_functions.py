"""Record functions for `data.path=function:…`.

Each function is called in a separate process, so the module imports little.
"""

from __future__ import annotations

import os
import signal
import threading


def good():
    return [{"prompt": "a", "answer": 1}]


def nothing():
    return iter(())


def failing():
    yield {"prompt": "a"}
    raise KeyError("answers.csv")


def leaving():
    raise SystemExit(3)


def bare():
    return ["a"]


def binary():
    return [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": b"2"}]


def hangs():
    yield {"prompt": "a"}
    threading.Event().wait()


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)
