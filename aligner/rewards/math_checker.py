"""Mathematical expressions compared by math-verify, in a process of its own.

An expression may take sympy any time and memory, and math-verify's time limits are signals, which
only a main thread can have and which do not end long arithmetic. So a child process compares, under
the system's own limits.
"""

import importlib.util

from aligner.child_function import ChildFunction, ChildLost, ChildTooSlow
from aligner.errors import AlignerError, ConfigError

_MEMORY_BYTES = 4 << 30


def require_math_verify(key: str) -> None:
    """Raise ConfigError naming `key`, its place in the configuration, where math-verify is not
    installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            f"{key}=math: requires the math-verify package; install it with pip install"
            " 'aligner[verify]'"
        )


class MathChecker:
    """Compares responses with answers in a child process; threads take turns."""

    def __init__(self, seconds: float = 2.0) -> None:
        """Limit each comparison to `seconds` of processor time."""
        module = "aligner.rewards.math_comparison"
        self.child = ChildFunction(module, "equal", processor_s=seconds, memory_bytes=_MEMORY_BYTES)
        self._parser = ChildFunction(
            module, "is_parsable", processor_s=seconds, memory_bytes=_MEMORY_BYTES
        )

    def equal(self, answer: str, response: str) -> bool | None:
        """Return whether the answer of a response equals the record's answer.

        Returns False if the comparison takes too long, and None if the record's answer is empty or
        has unclosed braces. Raises AlignerError if the child process fails.
        """
        try:
            return self.child(answer, response)
        except ChildTooSlow:
            return False
        except ChildLost as error:
            raise AlignerError(f"math-verify {error}; see its error output") from error

    def is_parsable(self, answer: str) -> bool:
        """Return whether a record's answer can be parsed within the time limit."""
        try:
            return self._parser(answer)
        except ChildTooSlow:
            return False
        except ChildLost as error:
            raise AlignerError(f"math-verify {error}; see its error output") from error

    def close(self) -> None:
        """End the child processes."""
        self.child.close()
        self._parser.close()
