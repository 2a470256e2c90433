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
    """Compares a response with an answer; threads take turns."""

    def __init__(self, seconds: float = 2.0) -> None:
        """`seconds` of processor time are the most that a comparison may take."""
        module = "aligner.rewards.math_comparison"
        self.child = ChildFunction(module, "equal", processor_s=seconds, memory_bytes=_MEMORY_BYTES)

    def equal(self, answer: str, response: str) -> bool | None:
        """Whether a response's last expression equals the answer's; False when that takes too long
        to tell.

        None where the answer has no expression. Raises AlignerError when the child process fails.
        """
        try:
            return self.child(answer, response)
        except ChildTooSlow:
            return False
        except ChildLost as error:
            raise AlignerError(f"math-verify {error}; see its error output") from error
