"""What `math` calls in its child process: math-verify, which no other process imports."""

import logging

import math_verify

# it warns that its own time limits are off
logging.getLogger("math_verify").setLevel(logging.ERROR)


def equal(answer: str, response: str) -> bool | None:
    """Whether a response's last expression equals the answer's; None where the answer has none."""
    latex = any(mark in answer for mark in ("$", "\\boxed", "\\(", "\\["))
    expected = math_verify.parse(answer if latex else f"${answer}$", parsing_timeout=None)
    if not expected:
        return None
    return math_verify.verify(
        expected, math_verify.parse(response, parsing_timeout=None), timeout_seconds=None
    )
