"""A function that runs in a process of its own, under a deadline: what hangs or is killed there
costs that process alone.

Arguments and results are JSON. Python cannot end a thread, nor a regular expression or a long
multiplication from another thread; a process it can. The child writes what it prints where this
process writes its errors.
"""

import contextlib
import inspect
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import IO, Any

from aligner.errors import AlignerError, ConfigError
from aligner.user_code import imported

_IMPORT_S = 180.0
"""For the child to start and import the function."""


class ChildRaised(AlignerError):
    """The function raised: the exception's type and message. Its traceback is in this process's
    error output."""


class ChildLost(AlignerError):
    """The process hung, or ended in the middle: what it did, as the end of a sentence. Another
    takes its place."""


class ChildTooSlow(ChildLost):
    """The process took too long, and was ended."""


class ChildFunction:
    """A function of a module, called in a child process that goes on from call to call; threads
    take turns."""

    def __init__(
        self,
        module: str,
        name: str,
        *,
        through: str | None = None,
        takes: int | None = None,
        deadline_s: float | None = None,
        processor_s: float = 0.0,
        memory_bytes: int | None = None,
    ) -> None:
        """A call takes at most `deadline_s`, and `processor_s` of processor time where that is not
        0.

        `through` is a `module:function` that is called with the function and the arguments, instead
        of the function. `takes` is how many arguments the function must take; None: it is not
        looked at.
        """
        self._settings = json.dumps(
            [module, name, through, takes, processor_s, memory_bytes, sys.path]
        )
        self._deadline_s, self._processor_s = deadline_s, processor_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Have the process ready. Raises ConfigError, with the reason alone, where there is no such
        function."""
        with self._lock:
            self._started()

    def __call__(self, *arguments: Any) -> Any:
        """The function's result. Raises ChildRaised, ChildLost and what `start` does."""
        with self._lock:
            process = self._started()
            try:
                _pipe(process.stdin).write(json.dumps(arguments).encode() + b"\n")
                _pipe(process.stdin).flush()
            except BrokenPipeError:
                raise self._lost(process) from None
            answer = self._answer(process, self._deadline_s)
        if "raised" in answer:
            raise ChildRaised(answer["raised"])
        return answer["result"]

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            command = [sys.executable, "-m", __name__]
            # One hash of texts in all of them, so that what hangs on the order of a set is the same
            # on every rank.
            environment = {"PYTHONHASHSEED": "0", **os.environ}
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=-1, env=environment
            )
            _pipe(self._process.stdin).write(self._settings.encode() + b"\n")
            _pipe(self._process.stdin).flush()
            answer = self._answer(self._process, _IMPORT_S)
            if "refused" in answer:
                self._end()
                raise ConfigError(answer["refused"])
        return self._process

    def _answer(self, process: subprocess.Popen[bytes], deadline_s: float | None) -> dict[str, Any]:
        end, descriptor, line = (
            time.monotonic() + (deadline_s or 0),
            _pipe(process.stdout).fileno(),
            bytearray(),
        )
        readable = select.poll()
        readable.register(descriptor, select.POLLIN)
        while not line.endswith(b"\n"):
            if not readable.poll(
                None if deadline_s is None else max(0.0, end - time.monotonic()) * 1000
            ):
                self._end()
                raise ChildTooSlow(f"returned no result within {deadline_s:g} s and was killed")
            if not (more := os.read(descriptor, 1 << 16)):
                raise self._lost(process)
            line += more
        return json.loads(line, object_hook=_as_foreign)

    def _lost(self, process: subprocess.Popen[bytes]) -> ChildLost:
        code = process.wait()
        self._end()
        if code == -signal.SIGPROF:
            return ChildTooSlow(
                f"used more than {self._processor_s:g} s of CPU time and was killed"
            )
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else "exited during a call"
        return ChildLost(f"{how}: exit code {code}")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            _pipe(process.stdout).close()
            with contextlib.suppress(BrokenPipeError):
                _pipe(process.stdin).close()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise AssertionError  # both are pipes
    return stream


def serve() -> None:
    """The child: a line of settings, an answer, and from then on a line of arguments and one of a
    result each."""
    # a terminal sends it to every process; the end of the input ends this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the function prints is no answer

    def answer(content: Mapping[str, Any]) -> None:
        answers.write(json.dumps(content, default=_foreign) + "\n")
        answers.flush()

    module, name, through, takes, processor_s, memory_bytes, sys.path = json.loads(
        requests.readline()
    )
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, resource.RLIM_INFINITY))
    try:
        function, called = (
            imported(module, name),
            (None if through is None else imported(*through.split(":"))),
        )
        if not callable(function):
            raise ConfigError(f"{name!r} must be callable, got {type(function).__name__}")
        if takes is not None:
            _require_arguments(name, function, takes)
    except ConfigError as error:
        answer({"refused": str(error)})
        return
    answer({})
    for line in requests:
        arguments = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, processor_s)
        try:
            content = {
                "result": function(*arguments) if called is None else called(function, *arguments)
            }
            signal.setitimer(signal.ITIMER_PROF, 0)
            answer(content)
        # the function may be the user's, and fails in its own ways
        except (Exception, SystemExit) as error:
            signal.setitimer(signal.ITIMER_PROF, 0)
            traceback.print_exc()
            answer({"raised": f"{type(error).__name__}: {error}"})


def _require_arguments(name: str, function: Callable[..., Any], count: int) -> None:
    """Refuse what cannot be called with so many, before a run has drawn samples for it."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some of those that are not written in Python
        return
    try:
        signature.bind(*[None] * count)
    except TypeError:
        raise ConfigError(
            f"{name}{signature} must take {count} argument{'' if count == 1 else 's'}"
        ) from None


_FOREIGN = "aligner: of a type that JSON does not have"


def _foreign(value: Any) -> Any:
    """Numbers and texts of NumPy as Python's own; of anything else the type's name goes over."""
    return (
        value.item()
        if hasattr(value, "item") and getattr(value, "ndim", 1) == 0
        else {_FOREIGN: type(value).__name__}
    )


def _as_foreign(value: dict[str, Any]) -> Any:
    """For what JSON does not have, something of a type that is called as its own."""
    return type(value[_FOREIGN], (), {})() if _FOREIGN in value else value


if __name__ == "__main__":
    serve()
