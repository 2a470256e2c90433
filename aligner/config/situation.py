"""Inputs of the automatic values of a configuration, and the record of one automatic value."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aligner.models.model_source import NOTHING_EXPECTED, ExpectedInputs
from aligner.models.shape import ModelShape
from aligner.placement.machine import Machine
from aligner.placement.roles import count_parameters, format_parameter_count


def format_count(number: int, noun: str) -> str:
    """Return a number with a noun, which has an "s" unless the number is 1: `2 cores`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class DataStatistics:
    """Statistics of the training records; lengths are in tokens of the model's tokenizer."""

    records: int
    """Number of records."""
    read_records_text: str
    """Description of the records that were read, for messages."""
    is_complete: bool
    """Whether all records were read."""
    longest_prompt: int
    """Length of the longest prompt in tokens."""
    prompt_length_p99: int
    """99th percentile of the prompt lengths in tokens."""
    longest_answer: int
    """Length of the longest response, or of the longest `answer` of a prompt; 0 without any."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Field name or template of the records, by aligner's name of a field that they lack."""
    layout: str = ""
    """Published layout that all records have, a value of `data.format`; "" for none."""
    layout_text: str = ""
    """Description of the layout."""
    example: str = ""
    """Fields of the first record under aligner's names, one per line; empty without `fields` and
    `layout`."""
    notices: tuple[str, ...] = ()
    """Lines about unused record fields that are probably part of the prompt."""
    bypasses_template: bool = False
    """Whether the prompts are plain texts although the model has a chat template."""


@dataclass(frozen=True)
class Situation:
    """Model, data, machine and user settings on which automatic values depend."""

    shape: ModelShape
    """Shape of the policy."""
    data: DataStatistics | None
    """Statistics of the records; None if they cannot be read. The trainer reports the problem when
    it reads the records."""
    machine: Machine
    """Cores, GPUs and memory."""
    user_keys: frozenset[str] = frozenset()
    """Keys that the user set."""
    expected: ExpectedInputs = field(default_factory=lambda: NOTHING_EXPECTED)
    """Inputs that need not exist yet."""

    @property
    def parameters(self) -> int:
        """Number of parameters of the policy."""
        return count_parameters(self.shape)

    @property
    def parameters_text(self) -> str:
        """Number of parameters of the policy, in words."""
        return format_parameter_count(self.parameters)


@dataclass(frozen=True)
class Choice:
    """An automatic value of a key."""

    key: str
    """Dotted key."""
    value: Any
    """Chosen value of the key."""
    reason: str
    """Reason of the choice, for the user."""
