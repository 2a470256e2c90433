"""Calls of a function in a child process, with a deadline. If the function hangs or is killed, only
the child process is lost.

Arguments and results are JSON. Python can kill a process, but it cannot stop a thread that
executes, for example, a slow regular expression or a long multiplication. Output that the function
prints is written to the standard error of this process.

Each request has a number, and its response repeats the number. A response with another number is
dropped, so a process that the function has forked cannot respond in place of the function. In
forked processes, both pipes are also replaced by /dev/null (`_disconnect_forks`).
"""

import contextlib
import faulthandler
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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from aligner.errors import AlignerError, ConfigError
from aligner.masking import mask_standard_streams
from aligner.user_code import (
    describe_user_error,
    format_user_traceback,
    import_object,
    is_connection_error,
    report_user_error,
)

# Timeout for the child's start and its import of the function, in seconds.
_IMPORT_TIMEOUT_S = 180.0
# Seconds between two liveness checks of the child. The checks are needed because a process that the
# function has forked may keep the pipe open after the child's exit.
_POLL_INTERVAL_S = 0.5
# Signal at which the child writes its Python stacks. User code rarely uses this signal.
_STACK_SIGNAL = signal.SIGRTMAX
# Maximum seconds to wait for the stacks, and seconds between two checks of their size.
_STACK_TIMEOUT_S = 2.0
_STACK_POLL_INTERVAL_S = 0.1
_MAX_STACK_LINES = 60
# Key of the JSON object that replaces a value of a type that JSON does not support.
_PLACEHOLDER_KEY = "aligner: of a type that JSON does not have"


class ChildRaised(AlignerError):
    """The function raised an exception.

    The message contains the exception's type, place and message. The traceback is also on the
    standard error of this process.
    """

    def __init__(
        self, message: str, traceback: str = "", *, is_connection_error: bool = False
    ) -> None:
        """Create the error.

        Args:
            message: The message.
            traceback: Traceback of the exception, without the frames that called the function.
            is_connection_error: Whether the function could not reach a service.
        """
        super().__init__(message)
        self.traceback = traceback
        self.is_connection_error = is_connection_error


class ChildLost(AlignerError):
    """The process hung or exited during a call. The message is the end of a sentence that begins
    with the function's name. The next call starts another process."""


class ChildTooSlow(ChildLost):
    """The process exceeded its time limit and was killed."""

    def __init__(self, message: str, stack: str = "") -> None:
        """Create the error.

        Args:
            message: The message.
            stack: Python stack of the process, without the frames of this module; empty if the
                process did not write it.
        """
        super().__init__(message)
        self.stack = stack


class ChildFunction:
    """A function of a module that is called in a child process.

    The process persists between calls. Calls from several threads are executed one after another.
    """

    def __init__(
        self,
        module: str,
        name: str,
        *,
        wrapper: str | None = None,
        check: str | None = None,
        deadline_s: float | None = None,
        cpu_limit_s: float = 0.0,
        memory_bytes: int | None = None,
        python: str | None = None,
    ) -> None:
        """Describe the function; `start` or the first call starts the process.

        Args:
            module: Module that defines the function.
            name: Name of the function in the module.
            wrapper: Function, as `module:function`, that is called instead of the function. Its
                arguments are the function and the function's arguments.
            check: Function, as `module:function`, that raises ConfigError if the function cannot be
                called. It is called once in the process, with the name and the function, and
                returns a JSON value for `start`.
            deadline_s: Maximum duration of a call in seconds; None means no limit.
            cpu_limit_s: Maximum CPU time of a call in seconds; 0 means no limit.
            memory_bytes: Maximum address space of the process in bytes; None means no limit.
            python: Python interpreter of another environment in which the process runs. It finds
                modules in its working directory, in PYTHONPATH and in its environment. None means
                this process's interpreter and module search path.
        """
        self._python = python or sys.executable
        self._settings = [
            module,
            name,
            wrapper,
            check,
            cpu_limit_s,
            memory_bytes,
            sys.path if python is None else None,
        ]
        self._deadline_s = deadline_s
        self._cpu_limit_s = cpu_limit_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        # Result of `check` in the process.
        self._check_result: Any = None
        # Bytes that the process has written after its last complete line.
        self._received = bytearray()
        # File descriptor of the memory file to which the process writes its stacks.
        self._stacks_fd = -1
        # Number of the last request.
        self._number = 0

    def start(self) -> Any:
        """Start the process, and let it import the function.

        Returns:
            The result of `check`; None without a check.

        Raises:
            ConfigError: If the function does not exist or cannot be imported. The message contains
                only the reason.
            ChildLost: If the process hangs or exits.
        """
        with self._lock:
            self._ensure_started()
            return self._check_result

    def __call__(self, *arguments: Any) -> Any:
        """Return the function's result.

        Raises:
            ChildRaised: If the function raised an exception.
            ChildLost: If the process hung or exited.
            ConfigError: If the process was not running, and `start` failed.
        """
        with self._lock:
            process = self._ensure_started()
            self._number += 1
            try:
                request = json.dumps([self._number, arguments])
                _require_pipe(process.stdin).write(request.encode() + b"\n")
                _require_pipe(process.stdin).flush()
            except BrokenPipeError:
                raise self._build_exit_error(process) from None
            response = self._wait_for_response(process, self._deadline_s)
        if "raised" in response:
            raise ChildRaised(
                response["raised"],
                response["traceback"],
                is_connection_error=response["is_connection_error"],
            )
        return response["result"]

    def close(self) -> None:
        """Kill the process, if it is running."""
        with self._lock:
            self._kill()

    def _ensure_started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            command = [self._python, "-m", __name__]
            # The hash seed is the same in all child processes, so that results that depend on the
            # order of a set are the same on every rank.
            environment = {"PYTHONHASHSEED": "0", **os.environ}
            self._stacks_fd = os.memfd_create("stacks")
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=-1,
                env=environment,
                pass_fds=(self._stacks_fd,),
            )
            self._number = 0
            self._received = bytearray()
            settings = json.dumps([self._stacks_fd, *self._settings])
            with contextlib.suppress(BrokenPipeError):  # `_wait_for_response` reports the cause
                _require_pipe(self._process.stdin).write(settings.encode() + b"\n")
                _require_pipe(self._process.stdin).flush()
            try:
                response = self._wait_for_response(self._process, _IMPORT_TIMEOUT_S)
            except ChildTooSlow as error:
                raise ChildTooSlow(
                    f"did not start and import its module within {_IMPORT_TIMEOUT_S:g} s; Python"
                    f" stack:\n{error.stack}",
                    error.stack,
                ) from None
            if "refused" in response:
                self._kill()
                raise ConfigError(response["refused"])
            self._check_result = response["checked"]
        return self._process

    def _wait_for_response(
        self, process: subprocess.Popen[bytes], deadline_s: float | None
    ) -> dict[str, Any]:
        """Return the response to the last request."""
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        while True:
            line = self._wait_for_line(process, deadline, deadline_s)
            response = json.loads(line, object_hook=_decode_placeholder)
            if response["number"] == self._number:
                return response

    def _wait_for_line(
        self, process: subprocess.Popen[bytes], deadline: float | None, deadline_s: float | None
    ) -> bytes:
        """Return the next line that the process writes.

        Args:
            process: The child process.
            deadline: End of the wait on the monotonic clock; None means no limit.
            deadline_s: Maximum duration in the error message, in seconds.
        """
        descriptor = _require_pipe(process.stdout).fileno()
        readable = select.poll()
        readable.register(descriptor, select.POLLIN)
        while b"\n" not in self._received:
            wait_s = _POLL_INTERVAL_S
            if deadline is not None:
                wait_s = min(wait_s, deadline - time.monotonic())
            if wait_s <= 0:
                stack = self._read_stack(process)
                self._kill()
                raise ChildTooSlow(
                    f"returned no result within {deadline_s:g} s and was killed", stack
                )
            if readable.poll(wait_s * 1000):
                block = os.read(descriptor, 1 << 16)
                if not block:  # the end of the file
                    raise self._build_exit_error(process)
                self._received += block
            elif process.poll() is not None:
                raise self._build_exit_error(process)
        line, _, self._received = self._received.partition(b"\n")
        return bytes(line)

    def _read_stack(self, process: subprocess.Popen[bytes]) -> str:
        """Let the process write the stacks of its threads and asyncio tasks, and return them."""
        process.send_signal(_STACK_SIGNAL)
        last_size = 0
        deadline = time.monotonic() + _STACK_TIMEOUT_S
        while time.monotonic() < deadline:
            time.sleep(_STACK_POLL_INTERVAL_S)
            size = os.fstat(self._stacks_fd).st_size
            if size and size == last_size:
                break  # the process has written all stacks
            last_size = size
        stacks = os.pread(self._stacks_fd, 1 << 20, 0).decode(errors="replace")
        return _select_function_frames(stacks)

    def _build_exit_error(self, process: subprocess.Popen[bytes]) -> ChildLost:
        """Wait until the process exits, and return the error that describes its exit."""
        code = process.wait()
        self._kill()
        # SIGPROF is the signal of the CPU timer, which `serve` sets.
        if code == -signal.SIGPROF:
            return ChildTooSlow(
                f"used more than {self._cpu_limit_s:g} s of CPU time and was killed"
            )
        if code >= 0:
            return ChildLost(f"exited during a call: exit code {code}")
        memory = " (perhaps out of memory)" if code == -signal.SIGKILL else ""
        return ChildLost(f"was killed by {signal.Signals(-code).name}: exit code {code}{memory}")

    def _kill(self) -> None:
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            process.wait()
            _require_pipe(process.stdout).close()
            with contextlib.suppress(BrokenPipeError):
                _require_pipe(process.stdin).close()
            os.close(self._stacks_fd)


def _require_pipe(stream: IO[bytes] | None) -> IO[bytes]:
    """Return a stream of the process, which is always a pipe; the check is for the type checker."""
    if stream is None:
        raise AssertionError
    return stream


def _select_function_frames(stacks: str) -> str:
    """Return the stacks of asyncio tasks, of the main thread and of the other threads, in this
    order, without the frames of this package that called the function."""
    package = f'"{Path(__file__).parent}{os.sep}'
    sections: dict[str, list[str]] = {"task": [], "main": [], "other": []}
    for section in stacks.strip().split("\n\n"):
        lines = section.splitlines()
        own_frame_indices = [index for index, line in enumerate(lines) if f'"{__file__}"' in line]
        # Only the stack of the main thread contains `serve`.
        thread_kind = "main" if own_frame_indices else "other"
        kind = "task" if section.startswith("Task ") else thread_kind
        # The innermost frame is first: this module's frame and its callers are at the end.
        if own_frame_indices:
            del lines[own_frame_indices[0] :]
        while lines and package in lines[-1]:
            del lines[-1]
        sections[kind] += lines
    all_lines = [line for lines in sections.values() for line in lines]
    if len(all_lines) > _MAX_STACK_LINES:
        hidden_count = len(all_lines) - _MAX_STACK_LINES
        all_lines = [*all_lines[:_MAX_STACK_LINES], f"  ... {hidden_count} more lines"]
    return "\n".join(all_lines)


def serve() -> None:
    """Run the child process: respond to a line of settings, and then to each request."""
    # A terminal sends SIGINT to every process of its group. This process exits at the end of its
    # input instead.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Move the pipes to other descriptors: the function must not read requests from standard input,
    # and its output must not be mixed with responses.
    requests = os.fdopen(os.dup(0))
    responses = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    mask_standard_streams()
    own_pid = os.getpid()
    number = 0

    def respond(content: Mapping[str, Any]) -> None:
        if os.getpid() != own_pid:
            # The function has forked, and the forked process has returned from the function too.
            sys.stderr.flush()
            os._exit(0)
        line = json.dumps({"number": number, **content}, default=_encode_placeholder)
        responses.write(line + "\n")
        responses.flush()

    stacks_fd, module, name, wrapper_name, check_name, cpu_limit_s, memory_bytes, search_path = (
        json.loads(requests.readline())
    )
    if search_path is not None:
        sys.path = search_path
    _disconnect_forks(requests.fileno(), responses.fileno())
    _install_stack_handlers(stacks_fd)
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, resource.RLIM_INFINITY))
    try:
        function = import_object(module, name)
        wrapper = None if wrapper_name is None else import_object(*wrapper_name.split(":"))
        if not callable(function):
            raise ConfigError(f"{name!r} must be callable, got {type(function).__name__}")
        checked = None
        if check_name is not None:
            checked = import_object(*check_name.split(":"))(name, function)
    except ConfigError as error:
        respond({"refused": str(error)})
        return
    respond({"checked": checked})

    for line in requests:
        number, arguments = json.loads(line)
        os.ftruncate(stacks_fd, 0)
        os.lseek(stacks_fd, 0, os.SEEK_SET)
        # At the end of this CPU time, SIGPROF kills the process.
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
        try:
            result = function(*arguments) if wrapper is None else wrapper(function, *arguments)
            # The CPU time of the response does not count toward the limit.
            signal.setitimer(signal.ITIMER_PROF, 0)
            respond({"result": result})
        # User code may raise any exception, and may call sys.exit.
        except (Exception, SystemExit) as error:
            signal.setitimer(signal.ITIMER_PROF, 0)
            traceback.print_exc()
            report_user_error(error)
            respond(
                {
                    "raised": describe_user_error(error),
                    "traceback": format_user_traceback(error),
                    "is_connection_error": is_connection_error(error),
                }
            )


def _disconnect_forks(requests_fd: int, responses_fd: int) -> None:
    """Prevent forked processes from reading requests and writing responses."""

    def disconnect() -> None:
        null_fd = os.open(os.devnull, os.O_RDWR)
        for descriptor in (requests_fd, responses_fd):
            os.dup2(null_fd, descriptor, inheritable=False)
        os.close(null_fd)

    os.register_at_fork(after_in_child=disconnect)


def _install_stack_handlers(descriptor: int) -> None:
    """Write the stacks of all threads and asyncio tasks to a file at `_STACK_SIGNAL`, and the
    exceptions of threads when they occur."""
    os.set_inheritable(descriptor, False)

    def write_tasks(*_: object) -> None:
        os.write(descriptor, "".join(_task_stacks()).encode(errors="replace"))

    def write_exception(exception: threading.ExceptHookArgs) -> None:
        threading.__excepthook__(exception)
        thread = "?" if exception.thread is None else exception.thread.name
        report = f"{thread} raised {exception.exc_type.__name__}: {exception.exc_value}"
        os.write(descriptor, f"Thread {report}\n\n".encode(errors="replace"))

    signal.signal(_STACK_SIGNAL, write_tasks)
    # faulthandler's handler is in C, and writes the stacks even while the interpreter executes
    # other C code. Then it calls the Python handler.
    faulthandler.register(_STACK_SIGNAL, file=descriptor, all_threads=True, chain=True)
    threading.excepthook = write_exception


def _task_stacks() -> Iterator[str]:
    """Yield the stack of each task of the running event loop, in the format of faulthandler.

    The stack of the event loop's thread does not contain these frames.
    """
    asyncio = sys.modules.get("asyncio")
    if asyncio is None:
        return
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no event loop is running
        return
    for task in tasks:
        frames = []
        coroutine = task.get_coro()
        while (frame := getattr(coroutine, "cr_frame", None)) is not None:
            code = frame.f_code
            frames.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}\n')
            coroutine = coroutine.cr_await
        yield f"\nTask {task.get_name()} (most recent call first):\n{''.join(reversed(frames))}"


def _encode_placeholder(value: Any) -> Any:
    """Return a NumPy scalar as a Python value, and any other value as a placeholder with the name
    of its type."""
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return value.item()
    return {_PLACEHOLDER_KEY: type(value).__name__}


def _decode_placeholder(value: dict[str, Any]) -> Any:
    """Return an object in place of a placeholder. The object's type has the name of the original
    type, so that error messages about the value contain this name."""
    if _PLACEHOLDER_KEY not in value:
        return value
    return type(value[_PLACEHOLDER_KEY], (), {})()


if __name__ == "__main__":
    serve()
