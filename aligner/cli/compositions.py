"""Compose the complete configuration of a run from the command line.

Models of the Hugging Face Hub are resolved by name, and aligner chooses the values that are not
set.
"""

import argparse
import contextlib
import itertools
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from aligner.checks.data import find_problems as find_data_problems
from aligner.config.compose import compose_config, find_user_keys, load_config
from aligner.config.defaults import Rule, choose
from aligner.config.situation import Choice, DataStatistics, Situation
from aligner.data.hub_datasets import resolve_hub_datasets
from aligner.errors import ConfigError
from aligner.models.model_source import (
    absent_inputs,
    model_directory,
    read_shape,
    resolve_hub_models,
)
from aligner.paths import get_run_paths
from aligner.placement.machine import measure_machine
from aligner.schema import Config
from aligner.schema.conditions import format_value
from aligner.schema.keys import get_value, with_values
from aligner.schema.references import parse_reference
from aligner.terminal import print_note, print_text


def compose_command(parsed: argparse.Namespace, *, weights: bool = True) -> Config:
    """Return the configuration of a command line, with automatically chosen values.

    The chosen values are printed on standard error. A resumed run keeps the values that were chosen
    when the run started.

    Args:
        parsed: The parsed command line.
        weights: Whether to download the weights of a model of the Hugging Face Hub.

    Raises:
        ConfigError: The configuration or the data is invalid.
    """
    config = resolve_hub_models(
        compose_config(parsed.overrides, parsed.config_dir, parsed.config), weights=weights
    )
    config = resolve_hub_datasets(config)
    if not config.run.automatic:
        return config
    given_keys = find_user_keys(parsed.overrides, config, parsed.config_dir, parsed.config)
    started_file = get_run_paths(config).config
    if config.run.should_resume and started_file.is_file():
        return _restore_choices(config, load_config(started_file), given_keys)

    config, choices, data = choose_values(config, given_keys)
    print_choices(choices)
    if (
        data is not None
        and data.example
        and any(choice.key in ("data.fields", "data.format") for choice in choices)
    ):
        print_text(f"  first record:\n{textwrap.indent(data.example, '      ')}", sys.stderr)
    if data is not None:
        print_data_notices(data)
    return _record_choices(config, [choice.key for choice in choices])


def print_data_notices(data: DataStatistics) -> None:
    """Print notices about the data on standard error."""
    for notice in data.notices:
        print_note(notice)
    if data.bypasses_template:
        print_note(
            "the model has a chat template, but the template is not applied to the plain-text"
            " prompts of the data; for chats, use `messages` instead of `prompt` (docs/data.md)"
        )


def choose_values(
    config: Config, given_keys: frozenset[str], rules: Sequence[Rule] | None = None
) -> tuple[Config, tuple[Choice, ...], DataStatistics | None]:
    """Choose the values that the user did not set.

    Args:
        config: The composed configuration.
        given_keys: Keys that the user set.
        rules: See `choose`.

    Returns:
        The configuration with the chosen values, the choices, and the statistics of the data if
        the records can be read.

    Raises:
        ConfigError: The data is invalid.
    """
    absent = absent_inputs(config)
    if problems := list(find_data_problems(config, None, absent)):
        raise ConfigError("\n".join(problems))
    data = _measure_data(config)
    situation = Situation(
        read_shape(config, absent), data, measure_machine(config), given_keys, absent
    )
    config, choices = choose(config, situation, rules)
    return config, choices, data


def _measure_data(config: Config) -> DataStatistics | None:
    """Return statistics of the data with the model's tokenizer; None if the model or the data does
    not exist yet."""
    model = config.model
    if model.path is not None and parse_reference("model.path", model.path):
        return None
    # This module imports torch, which takes seconds and is only needed for automatic values.
    from aligner.data.data_statistics import measure_data

    with open_tokenizer_directory(config) as directory:
        return measure_data(config, directory)


@contextlib.contextmanager
def open_tokenizer_directory(config: Config) -> Iterator[Path]:
    """Yield a directory with the tokenizer of the policy.

    The tokenizer of a randomly initialized model is created in a temporary directory.
    """
    if config.model.source == "directory":
        yield model_directory(config)
        return
    from aligner.data.model_directory import prepare_model  # imports torch

    with TemporaryDirectory() as scratch:
        scratch_config = replace(config, run=replace(config.run, dir=str(Path(scratch) / "run")))
        yield prepare_model(scratch_config)


def _restore_choices(config: Config, started: Config, given_keys: frozenset[str]) -> Config:
    """Return the configuration with the values that were chosen when the run started."""
    keys = [key for key in started.run.chosen if key not in given_keys]
    return _record_choices(
        with_values(config, {key: get_value(started, key) for key in keys}), keys
    )


def _record_choices(config: Config, keys: list[str]) -> Config:
    """Return the configuration with the names of the chosen keys in `run.chosen`."""
    return replace(config, run=replace(config.run, chosen=keys))


def print_choices(choices: tuple[Choice, ...]) -> None:
    """Print the chosen values, with one line for all values that have the same reason."""
    print_text("aligner: chosen automatically; override any of these with key=value:", sys.stderr)
    for reason, group in itertools.groupby(choices, key=lambda choice: choice.reason):
        pairs = " ".join(f"{choice.key}={_format_value(choice.value)}" for choice in group)
        print_text(f"  {pairs}\n      {reason}", sys.stderr)


def _format_value(value: Any) -> str:
    """Return a value in the syntax of the command line."""
    if isinstance(value, dict):
        # A template for a field contains braces and line breaks.
        entries = {
            key: json.dumps(entry, ensure_ascii=False) if "{" in str(entry) else entry
            for key, entry in value.items()
        }
        return "{" + ", ".join(f"{key}: {entry}" for key, entry in entries.items()) + "}"
    return format_value(value)
