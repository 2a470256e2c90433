"""Names of the built-in scoring functions.

The checks of a configuration use these names without importing the functions.
"""

import difflib
from collections.abc import Mapping

from aligner.values import split_callable_name

ENVIRONMENT = "environment"
"""Name of the scorer that leaves the score of an episode to its environment."""
FUNCTIONS: Mapping[str, str] = {
    "digit_fraction": "aligner.rewards.scorers:digit_fraction",
    ENVIRONMENT: "aligner.rewards.scorers:left_to_environment",
    "reasoning_gym": "aligner.rewards.scorers:reasoning_scores",
    "sentiment": "aligner.rewards.scorers:sentiment",
}
"""Built-in scorers: `module:callable` by name."""
RULES: Mapping[str, str] = {
    "exact_match": "aligner.rewards.verifiers:exact_match",
    "format": "aligner.rewards.verifiers:format_matches",
    "gsm8k": "aligner.rewards.verifiers:gsm8k",
    "length": "aligner.rewards.verifiers:length",
    "math": "aligner.rewards.verifiers:math",
}
"""Built-in verifiers, which decide whether a response is correct: `module:callable` by name."""
_BUILT_IN = {**FUNCTIONS, **RULES}
EXTRAS_OF_FUNCTIONS: Mapping[str, str] = {
    "math": "verify",
    "reasoning_gym": "reasoning_gym",
    "sentiment": "sentiment",
}
"""Extra that each built-in function requires; the other functions require none."""


def is_built_in_function(name: str) -> bool:
    """Return whether a scoring function is one of aligner's own."""
    return name in _BUILT_IN


def resolve_function_name(name: str) -> tuple[str, str] | None:
    """Return the module and the attribute of a scoring function; None for an invalid name.

    Args:
        name: Name of a built-in function, or `module:callable`.
    """
    return split_callable_name(_BUILT_IN.get(name, name))


def find_function_problem(name: str) -> str | None:
    """Return the problem of the name of a scoring function; None if there is no problem.

    The function is not imported, so that a valid name may still not exist.
    """
    if resolve_function_name(name):
        return None
    close_names = difflib.get_close_matches(name, _BUILT_IN, n=1)
    hint = f"did you mean {close_names[0]}? " if close_names else ""
    return f"{hint}must be one of {', '.join(sorted(_BUILT_IN))}, or module:callable"
