"""All that a run of an offline trainer reads: what it learns from, what it evaluates on, what it normalizes by."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from aligner.data.examples import Demonstration, LabeledSteps
from aligner.data.offline import has_steps, open_demonstrations, open_labeled_steps, open_preferences
from aligner.data.streams import ExampleStream
from aligner.data.tokenizer import Tokenizer
from aligner.errors import ConfigError
from aligner.schema import Config


@dataclass(frozen=True)
class RunData:
    """Examples of the kind that the trainer learns from."""

    examples: ExampleStream[Any]
    held_out: list[Any]
    """Those that are evaluated on and never trained on."""
    samples: list[Demonstration] | None
    """The initial policy's, where a file of them is given."""
    notices: tuple[str, ...]
    """What a person should know about them, a line each."""


def open_run_data(config: Config, tokenizer: Tokenizer) -> RunData:
    """Read, check and tokenize all of it.

    Raises ConfigError as `aligner.data.offline` does, and where a source has no more rows than are to be held out.
    """
    data, trainer = config.data, config.algorithm.trainer
    examples: ExampleStream[Any]
    if trainer == "sft":
        examples = open_demonstrations(data, tokenizer, config.seed)
    elif trainer == "reward_model" and has_steps(data):
        examples = open_labeled_steps(data, tokenizer, config.seed)
    else:
        examples = open_preferences(data, tokenizer, config.seed)
    if data.normalization is not None and isinstance(examples.take(0, 1)[0], LabeledSteps):
        raise ConfigError(f"data.normalization={data.normalization}: a step's reward is a logit, which is not normalized")
    notices = examples.notices
    examples, held_out = examples.hold_out(data.held_out)
    if trainer != "reward_model" or data.normalization is None:
        return RunData(examples, held_out, None, notices)
    given = replace(data, path=data.normalization, sources={}, fields={}, shuffle=False)
    samples = open_demonstrations(given, tokenizer, config.seed)
    taken = samples.take(0, min(len(samples), data.normalization_samples))
    return RunData(examples, held_out, taken, (*notices, *samples.notices))
