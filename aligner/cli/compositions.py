"""From a command line to a run's whole configuration: models found by name, and what nobody gave
chosen and told."""

import argparse
import itertools
import json
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from aligner.checks.data import problems as data_problems
from aligner.config.compose import compose_config, keys_given, load_config
from aligner.config.defaults import choose
from aligner.config.situation import Choice, DataStatistics, Situation
from aligner.errors import ConfigError
from aligner.models.model_source import (
    absent_inputs,
    model_directory,
    read_shape,
    with_found_models,
)
from aligner.paths import run_paths
from aligner.placement.machine import machine_of
from aligner.schema import Config
from aligner.schema.conditions import value_text
from aligner.schema.keys import value_at, with_values
from aligner.schema.references import parse_reference


def composed(parsed: argparse.Namespace, *, weights: bool = True) -> Config:
    """The configuration that a command line asks for; a person is told what was chosen, on standard
    error.

    Without `weights` a named model's are not downloaded. A run that goes on keeps what was chosen
    when it began. Raises ConfigError.
    """
    config = with_found_models(compose_config(parsed.overrides, parsed.config_dir), weights=weights)
    if not config.run.automatic:
        return config
    given = keys_given(parsed.overrides, config, parsed.config_dir)
    started = run_paths(config).config
    if config.run.resumes and started.is_file():
        return _as_started(config, load_config(started), given)
    absent = absent_inputs(config)
    if problems := list(data_problems(config, None, absent)):
        raise ConfigError("\n".join(problems))
    data = _measured(config)
    situation = Situation(read_shape(config, absent), data, machine_of(config), given, absent)
    config, choices = choose(config, situation)
    _tell(choices)
    if data is not None and data.example and any(c.key == "data.fields" for c in choices):
        print(f"  first record:\n{textwrap.indent(data.example, '      ')}", file=sys.stderr)
    for notice in data.notices if data is not None else ():
        print(f"aligner: note: {notice}", file=sys.stderr)
    if data is not None and data.bypasses_template:
        print(
            "aligner: note: the model has a chat template, but the template is not applied to the"
            " plain-text prompts of the data; for chats, use `messages` instead of `prompt`"
            " (docs/data.md)",
            file=sys.stderr,
        )
    return _with_chosen(config, [choice.key for choice in choices])


def _measured(config: Config) -> DataStatistics | None:
    """Of the data; a random model's tokenizer is made for it. None where model or data are not
    there yet."""
    model = config.model
    if model.path is not None and parse_reference("model.path", model.path):
        return None
    # They import torch, which takes seconds: for those who leave values to be chosen.
    from aligner.data.data_statistics import measure_data
    from aligner.data.model_directory import prepare_model

    if model.source == "directory":
        return measure_data(config, model_directory(config))
    with TemporaryDirectory() as scratch:
        made = replace(config, run=replace(config.run, dir=str(Path(scratch) / "run")))
        return measure_data(config, prepare_model(made))


def _as_started(config: Config, started: Config, given: frozenset[str]) -> Config:
    """With what was chosen when the run began."""
    keys = [key for key in started.run.chosen if key not in given]
    return _with_chosen(with_values(config, {key: value_at(started, key) for key in keys}), keys)


def _with_chosen(config: Config, keys: list[str]) -> Config:
    return replace(config, run=replace(config.run, chosen=keys))


def _tell(choices: tuple[Choice, ...]) -> None:
    """Those with one reason in one line."""
    print("aligner: chosen automatically; override any of these with key=value:", file=sys.stderr)
    for reason, same in itertools.groupby(choices, key=lambda choice: choice.reason):
        pairs = " ".join(f"{choice.key}={_shown(choice.value)}" for choice in same)
        print(f"  {pairs}\n      {reason}", file=sys.stderr)


def _shown(value: Any) -> str:
    """As the command line takes it."""
    if isinstance(value, dict):
        # A template for a field contains braces and line breaks.
        entries = {
            key: json.dumps(entry, ensure_ascii=False) if "{" in str(entry) else entry
            for key, entry in value.items()
        }
        return "{" + ", ".join(f"{key}: {entry}" for key, entry in entries.items()) + "}"
    return value_text(value)
