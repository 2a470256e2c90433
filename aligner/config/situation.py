"""What the values that a run is left to choose depend on, and a value that was chosen."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aligner.models.model_source import NOTHING_EXPECTED, ExpectedInputs
from aligner.models.shape import ModelShape
from aligner.placement.machine import Machine
from aligner.placement.roles import parameter_count, parameters_text


def counted(number: int, what: str) -> str:
    """So many of something, in words."""
    return f"{number} {what}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class DataStatistics:
    """What records look like, in tokens of the model's tokenizer."""

    records: int
    looked_at: str
    """Which of them, for a person."""
    is_whole: bool
    """Whether that is all of them."""
    longest_prompt: int
    most_prompts: int
    """99 of 100 are no longer."""
    longest_answer: int
    """Of responses, or of prompts' `answer`; 0 where there are none."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Our names of fields that records lack to those that stand for them."""
    example: str = ""
    """The first record's fields under our names, one per line; empty without chosen `fields`."""
    notices: tuple[str, ...] = ()
    """Record fields that look like a part of the prompt and are not used, one line each."""
    bypasses_template: bool = False
    """Whether prompts are plain texts though the model has a chat template."""


@dataclass(frozen=True)
class Situation:
    """All that is known when values are chosen."""

    shape: ModelShape
    """The policy's."""
    data: DataStatistics | None
    """None where records cannot be read; what is wrong with them is told by those who learn from
    them."""
    machine: Machine
    given: frozenset[str] = frozenset()
    """Keys that have values of the user's."""
    expected: ExpectedInputs = field(default_factory=lambda: NOTHING_EXPECTED)

    @property
    def parameters(self) -> int:
        """Of the policy."""
        return parameter_count(self.shape)

    @property
    def billions(self) -> str:
        """How many parameters, in words."""
        return parameters_text(self.parameters)


@dataclass(frozen=True)
class Choice:
    """A value that was chosen."""

    key: str
    value: Any
    reason: str
