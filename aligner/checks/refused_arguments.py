"""Arguments of vLLM and TensorRT-LLM that a configuration must not pass on, with the reasons."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """Arguments or environment variables that are refused for the same reason."""

    names: str
    """Names, separated by spaces; a name that ends in `*` stands for all names that begin so."""
    reason: str
    """Reason, as a clause after "because"."""
    advice: str = ""
    """Keys of aligner for the same purpose, as an imperative; empty if there are none."""

    def matches(self, name: str) -> bool:
        """Return whether the refusal is about an argument."""
        return any(
            name.startswith(each[:-1]) if each.endswith("*") else name == each
            for each in self.names.split()
        )


def find_refusals(
    section: str,
    arguments: Mapping[str, object],
    keys: Mapping[str, str],
    refusals: Sequence[Refusal],
) -> dict[str, str]:
    """Return a line for each refused argument, by the argument's name.

    Args:
        section: Dotted key of the arguments.
        arguments: Arguments by name.
        keys: Keys of aligner by the names of the arguments that aligner sets from them.
        refusals: Other refused arguments.
    """
    lines = {}
    for name in arguments:
        if name in keys:
            lines[name] = f"{section}.{name}: is refused, because aligner sets it; set {keys[name]}"
        elif refusal := next((each for each in refusals if each.matches(name)), None):
            advice = f"; {refusal.advice}" if refusal.advice else ""
            lines[name] = f"{section}.{name}: is refused, because {refusal.reason}{advice}"
    return lines
