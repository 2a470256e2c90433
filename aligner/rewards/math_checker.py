"""Mathematical expressions compared by math-verify, in a process of its own.

An expression may take sympy any time and memory, and math-verify's time limits are signals, which only a main thread can
have and which do not end long arithmetic. So a child process compares, under the system's own limits: one that uses too
much processor time is ended by the kernel, and another takes its place.
"""

import importlib.util
import json
import logging
import resource
import signal
import subprocess
import sys
import threading

from aligner.errors import AlignerError, ConfigError

_MEMORY_BYTES = 4 << 30


def require_math_verify(key: str) -> None:
    """Raise ConfigError naming `key`, its place in the configuration, where math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(f"{key}=math needs the math-verify package; install the verify extra: pip install 'aligner[verify]'")


class MathChecker:
    """Compares a response with an answer; threads take turns."""

    def __init__(self, seconds: float = 2.0) -> None:
        """`seconds` of processor time are the most that a comparison may take."""
        self._seconds = seconds
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def equal(self, answer: str, response: str) -> bool | None:
        """Whether a response's last expression equals the answer's; False when that takes too long to tell.

        None where the answer has no expression. Raises AlignerError when the child process fails.
        """
        with self._lock:
            child = self._child = self._child or self._start()
            if child.stdin is None or child.stdout is None:
                raise AssertionError  # both are pipes
            try:
                child.stdin.write(json.dumps([answer, response]) + "\n")
                child.stdin.flush()
                line = child.stdout.readline()
            except BrokenPipeError:
                line = ""
            if line:
                return json.loads(line)
            self.close()
        if child.returncode == -signal.SIGPROF:
            return False
        raise AlignerError(f"the process that runs math-verify ended with code {child.returncode}; its error output says why")

    def close(self) -> None:
        """End the child process, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.communicate()

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", __name__, str(self._seconds)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def main(seconds: float) -> None:
    """Answer lines of `[answer, response]` with true, false or null, until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to every process; the end of the input ends this one
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, resource.RLIM_INFINITY))
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
    for line in sys.stdin:
        answer, response = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        latex = any(mark in answer for mark in ("$", "\\boxed", "\\(", "\\["))
        expected = math_verify.parse(answer if latex else f"${answer}$", parsing_timeout=None)
        equal = None
        if expected:
            equal = math_verify.verify(expected, math_verify.parse(response, parsing_timeout=None), timeout_seconds=None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(equal), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
