"""Functions that score, by their names: what a configuration may call one, known before any of them
is imported."""

from collections.abc import Mapping

from aligner.values import callable_place

FUNCTIONS: Mapping[str, str] = {
    "digit_fraction": "aligner.rewards.scorers:digit_fraction",
    "environment": "aligner.rewards.scorers:left_to_environment",
    "reasoning_gym": "aligner.rewards.scorers:reasoning_scores",
    "sentiment": "aligner.rewards.scorers:sentiment",
}
"""The built-in scorers, and where they are."""
RULES: Mapping[str, str] = {
    "exact_match": "aligner.rewards.verifiers:exact_match",
    "format": "aligner.rewards.verifiers:format_matches",
    "gsm8k": "aligner.rewards.verifiers:gsm8k",
    "length": "aligner.rewards.verifiers:length",
    "math": "aligner.rewards.verifiers:math",
}
"""The same of the rules that tell whether a response is right."""
_BUILT_IN = {**FUNCTIONS, **RULES}


def function_place(name: str) -> tuple[str, str] | None:
    """The module of a built-in scorer or a `module:callable`, and what it is called there; None for
    any other name."""
    return callable_place(_BUILT_IN.get(name, name))


def function_problem(name: str) -> str | None:
    """What is wrong with the name of a scorer; nothing is imported, so that it may still not be
    there."""
    return (
        None
        if function_place(name)
        else f"must be one of {', '.join(sorted(_BUILT_IN))}, or module:callable"
    )
