"""Evaluation suites: the prompts of the section `evaluation`, and the named `evaluation.suites`."""

import re
import typing
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import create_model

from aligner.errors import ConfigError
from aligner.schema import Config, EvaluationConfig
from aligner.schema.entries import Entries, make_section_field, parse_entries
from aligner.schema.environment import EnvironmentConfig
from aligner.schema.key_validation import validate_config
from aligner.schema.reward_sources import FunctionSource, parse_reward_sources
from aligner.values import split_callable_name

# Keys of the section that apply to all suites.
_SHARED_KEYS = ("every", "asynchronous", "suites")
# Keys that a suite does not inherit from the section.
_NOT_INHERITED_KEYS = ("path", "fields", "format", "prompts", "questions", "group_by", "judge")
# Entry of a suite with keys of another section.
_ENVIRONMENT = "environment"
_SUITE_FIELDS: dict[str, Any] = {
    name: (hint, make_section_field(EvaluationConfig, name))
    for name, hint in typing.get_type_hints(EvaluationConfig).items()
    if name not in _SHARED_KEYS
}
# Entries of a suite: the keys of `evaluation` that apply to a single suite.
_SuiteEntries = create_model("_SuiteEntries", __base__=Entries, **_SUITE_FIELDS)
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_MAX_PROMPTS = 2**20
# The section `environment` at the beginning of a key, such as environment.target.
_ENVIRONMENT_KEY = re.compile(r"(?<![\w.])environment(?=[.=])")


@dataclass(frozen=True)
class Suite:
    """Evaluation prompts, with the settings for sampling and scoring their responses."""

    name: str | None
    """Name of the suite; None for the prompts of the section `evaluation`."""
    settings: EvaluationConfig
    """Settings of this suite, including inherited ones."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """Environment or agent of the episodes, including inherited settings."""
    environment_key: str = _ENVIRONMENT
    """Dotted key of the environment: `environment` if the suite inherits all its keys."""

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
        # A CRC of 32 bits leaves room for `_MAX_PROMPTS` prompts per suite.
        number = 0 if self.name is None else zlib.crc32(self.name.encode())
        return 2**40 + number * _MAX_PROMPTS

    def has_prompt(self, prompt_id: int) -> bool:
        """Return whether a prompt belongs to this suite; a training prompt belongs to none."""
        return self.first_prompt_id <= prompt_id < self.first_prompt_id + _MAX_PROMPTS

    def rename_environment_keys(self, message: str) -> str:
        """Return a message about the section `environment` with the keys of this suite.

        All code that checks or uses an environment reports problems of the section.
        """
        return _ENVIRONMENT_KEY.sub(self.environment_key, message)

    @contextmanager
    def renaming_environment_keys(self) -> Iterator[None]:
        """Apply `rename_environment_keys` to the ConfigErrors of the block."""
        try:
            yield
        except ConfigError as error:
            message = self.rename_environment_keys(str(error))
            # Other errors keep their type.
            if message == str(error):
                raise
            raise ConfigError(message) from error


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
    return has_any_episodes(config) or any(map(split_callable_name, functions))


def has_any_episodes(config: Config) -> bool:
    """Return whether the responses of training or of an evaluation suite are episodes."""
    environments = [suite.environment for suite in get_active_suites(config)]
    return any(each.has_episodes for each in (config.environment, *environments))


def parse_evaluation_suites(config: Config) -> tuple[Suite, ...]:
    """Return the evaluation suites of a configuration.

    The section `evaluation` itself comes first, if it has prompts or if there are no named suites.
    The named suites follow in the configuration's order. A suite inherits the keys of the section,
    except for its prompts, fields, groups and judge. It also inherits the keys of the section
    `environment`.

    Raises:
        ConfigError: One line for each problem of the entries of a suite.
    """
    section = config.evaluation
    if problems := list(find_suite_problems(config)):
        raise ConfigError("\n".join(problems))
    unnamed_suites = []
    if _has_prompts(config) or not section.suites:
        unnamed_suites = [Suite(None, section, config.environment)]
    # These keys get the default of the schema unless the suite sets them.
    default_values = {
        name: getattr(EvaluationConfig(), name) for name in (*_NOT_INHERITED_KEYS, "suites")
    }
    suites = []
    for name, entries in section.suites.items():
        values = default_values | dict(entries)
        entries_of_environment = values.pop(_ENVIRONMENT, {})
        environment = _build_environment(config, entries_of_environment)
        environment_key = _ENVIRONMENT
        if entries_of_environment:
            environment_key = f"evaluation.suites.{name}.environment"
        suites.append(Suite(name, replace(section, **values), environment, environment_key))
    return (*unnamed_suites, *suites)


def _build_environment(config: Config, entries: Mapping[str, Any]) -> EnvironmentConfig:
    """Return the section `environment` with the entries of a suite.

    Raises:
        InvalidKeys: An entry is unknown or has an invalid value; the messages begin with
            `environment`.
    """
    if not entries:
        return config.environment
    values = asdict(config.environment)
    # `python` is a subsection, whose other keys stay.
    python = entries.get("python")
    if isinstance(python, Mapping):
        entries = {**entries, "python": {**values["python"], **python}}
    return validate_config({"environment": {**values, **entries}}).environment


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


def find_suite_problems(config: Config) -> Iterator[str]:
    """Yield the problems of the entries of each suite."""
    for name, entries in config.evaluation.suites.items():
        yield from _find_problems(config, name, entries)


def _has_prompts(config: Config) -> bool:
    """Return whether the section `evaluation` itself has prompts."""
    settings = config.evaluation
    return (
        settings.path is not None
        or bool(settings.prompts)
        or bool(config.data.tasks and settings.questions)
    )


def _find_problems(config: Config, name: str, entries: Any) -> Iterator[str]:
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
        environment = suite_entries.pop(_ENVIRONMENT, {})
        yield from _find_environment_problems(config, name, environment)
    try:
        parse_entries(_SuiteEntries, key, suite_entries, expected="path or prompts")
    except ConfigError as error:
        yield str(error)


def _find_environment_problems(config: Config, name: str, entries: Any) -> Iterator[str]:
    """Yield the problems of the entries of a suite's environment."""
    key = f"evaluation.suites.{name}.environment"
    if not isinstance(entries, Mapping):
        yield (
            f"{key}={entries}: expected a mapping with keys of the section environment, got"
            f" {type(entries).__name__}"
        )
        return
    suite = Suite(name, config.evaluation, environment_key=key)
    try:
        _build_environment(config, entries)
    except ConfigError as error:
        yield suite.rename_environment_keys(str(error))
