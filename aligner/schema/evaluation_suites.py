"""Evaluation suites: the prompts of the section `evaluation`, and the named `evaluation.suites`."""

import re
import typing
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import create_model

from aligner.errors import ConfigError
from aligner.schema import Config, EvaluationConfig
from aligner.schema.entries import Entries, make_section_field, parse_entries
from aligner.schema.reward_sources import FunctionSource, parse_reward_sources
from aligner.values import split_callable_name

# Keys of the section that apply to all suites.
_SHARED_KEYS = ("every", "asynchronous", "suites")
# Keys that a suite does not inherit from the section.
_NOT_INHERITED_KEYS = ("path", "fields", "format", "prompts", "questions", "group_by", "judge")
_SUITE_FIELDS: dict[str, Any] = {
    name: (hint, make_section_field(EvaluationConfig, name))
    for name, hint in typing.get_type_hints(EvaluationConfig).items()
    if name not in _SHARED_KEYS
}
# Entries of a suite: the keys of `evaluation` that apply to a single suite.
_SuiteEntries = create_model("_SuiteEntries", __base__=Entries, **_SUITE_FIELDS)
_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Suite:
    """Evaluation prompts, with the settings for sampling and scoring their responses."""

    name: str | None
    """Name of the suite; None for the prompts of the section `evaluation`."""
    settings: EvaluationConfig
    """Settings of this suite, including inherited ones."""

    @property
    def key(self) -> str:
        """Dotted key of the suite."""
        return "evaluation" if self.name is None else f"evaluation.suites.{self.name}"

    @property
    def prefix(self) -> str:
        """Prefix of the names of the suite's metrics."""
        return "eval/" if self.name is None else f"eval/{self.name}/"

    @property
    def first_prompt_id(self) -> int:
        """Id of the first prompt of the suite.

        The id depends only on the name of the suite. It is above the ids of all training prompts,
        and differs from the ids of other suites, so that prompts do not share random streams.
        """
        # A CRC of 32 bits, shifted by 20, leaves room for 2**20 prompts per suite.
        return 2**40 + (0 if self.name is None else zlib.crc32(self.name.encode()) << 20)


def needs_prompt_messages(config: Config) -> bool:
    """Return whether scorers or environments may read the chat messages of a prompt.

    Custom functions in TRL's form receive messages instead of the rendered text.
    """
    functions = [
        source.function
        for source in parse_reward_sources(config.reward)
        if isinstance(source, FunctionSource)
    ]
    functions += [suite.settings.function or "" for suite in parse_evaluation_suites(config)]
    return config.environment.has_episodes or any(map(split_callable_name, functions))


def parse_evaluation_suites(config: Config) -> tuple[Suite, ...]:
    """Return the evaluation suites of a configuration.

    The section `evaluation` itself comes first, if it has prompts or if there are no named suites.
    The named suites follow in the configuration's order. A suite inherits the keys of the section,
    except for its prompts, fields, groups and judge.

    Raises:
        ConfigError: One line for each problem of the entries of a suite.
    """
    section = config.evaluation
    if problems := list(find_suite_problems(section)):
        raise ConfigError("\n".join(problems))
    unnamed_suites = [Suite(None, section)] if _has_prompts(config) or not section.suites else []
    # These keys get the default of the schema unless the suite sets them.
    default_values = {
        name: getattr(EvaluationConfig(), name) for name in (*_NOT_INHERITED_KEYS, "suites")
    }
    return (
        *unnamed_suites,
        *(
            Suite(name, replace(section, **(default_values | dict(entries))))
            for name, entries in section.suites.items()
        ),
    )


def get_active_suites(config: Config) -> tuple[Suite, ...]:
    """Return the evaluation suites of a run that evaluates responses, and none for other runs.

    Raises:
        ConfigError: See `parse_evaluation_suites`.
    """
    return (
        parse_evaluation_suites(config)
        if config.algorithm.trainer == "online" and config.evaluation.every
        else ()
    )


def find_suite_problems(section: EvaluationConfig) -> Iterator[str]:
    """Yield the problems of the entries of each suite."""
    for name, entries in section.suites.items():
        yield from _find_problems(name, entries)


def _has_prompts(config: Config) -> bool:
    """Return whether the section `evaluation` itself has prompts."""
    settings = config.evaluation
    return (
        settings.path is not None
        or bool(settings.prompts)
        or bool(config.data.tasks and settings.questions)
    )


def _find_problems(name: str, entries: Any) -> Iterator[str]:
    """Yield the problems of the name and the entries of a suite."""
    key = f"evaluation.suites.{name}"
    # The metrics eval/score/… belong to groups of prompts.
    if not _NAME.fullmatch(name) or name == "score":
        yield (
            f"{key}: the name of a suite is part of metric names; it must consist of letters,"
            " digits, _ and -, and must not be score"
        )
    suite_entries = entries
    if isinstance(entries, Mapping):
        for entry in _SHARED_KEYS:
            if entry in entries:
                yield f"{key}.{entry}: applies to all suites; set evaluation.{entry}"
        suite_entries = {
            entry: value for entry, value in entries.items() if entry not in _SHARED_KEYS
        }
    try:
        parse_entries(_SuiteEntries, key, suite_entries, expected="path or prompts")
    except ConfigError as error:
        yield str(error)
