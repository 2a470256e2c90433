"""The numbers that identify an episode, and the ways in which an agent receives them.

Worker processes import this module, so it imports nothing else.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

_PARAMETER_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class EpisodeIdentity:
    """Seed, prompt and sample index of an episode."""

    seed: int
    """Seed of the episode; all samples of a prompt have the same seed."""
    prompt_id: int
    """Id of the prompt; prompts of evaluations have other ids than prompts of training."""
    sample_index: int
    """Index of the episode among the samples of its prompt."""

    def build_environment_variables(self) -> dict[str, str]:
        """Return the environment variables of an agent command, such as `ALIGNER_SEED`."""
        return {f"ALIGNER_{name.upper()}": str(value) for name, value in asdict(self).items()}

    def build_headers(self) -> dict[str, str]:
        """Return the headers of the endpoint's responses, such as `X-Aligner-Seed`."""
        return {
            f"X-Aligner-{name.replace('_', '-').title()}": str(value)
            for name, value in asdict(self).items()
        }

    def select_arguments(self, function: Callable[..., Any]) -> Mapping[str, int]:
        """Return the keyword arguments for those parameters of an agent's function that have the
        name of a field, such as `seed`."""
        parameters = inspect.signature(function).parameters
        return {
            name: value
            for name, value in asdict(self).items()
            if name in parameters and parameters[name].kind in _PARAMETER_KINDS
        }
