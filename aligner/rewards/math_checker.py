"""Comparison of mathematical expressions with math-verify, in child processes.

sympy may need any amount of time and memory for an expression. math-verify's time limits are
signals, which only a main thread can receive and which do not interrupt long arithmetic. Therefore
a child process compares, within limits of the operating system. This module does not import
math-verify: it is an optional dependency, and its import takes a second.
"""

import importlib.util

from aligner.child_function import ChildFunction, ChildLost, ChildTooSlow
from aligner.errors import AlignerError, ConfigError

# Memory limit of a child process.
_MEMORY_BYTES = 4 << 30


def require_math_verify(key: str) -> None:
    """Raise ConfigError with the configuration key `key` if math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            f"{key}=math: requires the math-verify package; install it with pip install"
            " 'aligner[verify]'"
        )


class MathChecker:
    """Compares responses with answers in child processes; threads take turns."""

    def __init__(self, cpu_limit_s: float = 2.0, python: str | None = None) -> None:
        """Prepare the child processes; they start with the first call.

        Args:
            cpu_limit_s: Processor time of each comparison, in seconds.
            python: Python interpreter of an environment with math-verify; None means the
                interpreter of this process.
        """
        module = "aligner.rewards.math_comparison"
        self.child = ChildFunction(
            module,
            "is_equal",
            cpu_limit_s=cpu_limit_s,
            memory_bytes=_MEMORY_BYTES,
            python=python,
        )
        self._parser = ChildFunction(
            module,
            "is_parsable",
            cpu_limit_s=cpu_limit_s,
            memory_bytes=_MEMORY_BYTES,
            python=python,
        )

    def is_equal(self, answer: str, response: str) -> bool | None:
        """Return whether the answer of a response equals the answer of a record.

        Returns:
            The result; False if the comparison exceeds its time limit; None if the record's answer
            is empty or has unclosed braces.

        Raises:
            AlignerError: The child process failed.
        """
        try:
            return self.child(answer, response)
        except ChildTooSlow:
            return False
        except ChildLost as error:
            raise AlignerError(f"math-verify {error}; see its error output") from error

    def is_parsable(self, answer: str) -> bool:
        """Return whether a record's answer can be parsed within the time limit.

        Raises:
            AlignerError: The child process failed.
        """
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
