"""What a run is evaluated on: prompts of `evaluation` itself, and suites that have names."""

import re
import typing
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import create_model

from aligner.errors import ConfigError
from aligner.schema import Config, EvaluationConfig
from aligner.schema.entries import Entries, parse_entries, section_field

_SHARED = ("every", "asynchronous", "suites")
"""Keys of the section that are about all suites."""
_OWN = ("path", "fields", "prompts", "questions", "group_by", "judge")
"""Those that a suite does not take from the section."""
_FIELDS: dict[str, Any] = {
    name: (hint, section_field(EvaluationConfig, name))
    for name, hint in typing.get_type_hints(EvaluationConfig).items()
    if name not in _SHARED
}
_SuiteEntries = create_model("_SuiteEntries", __base__=Entries, **_FIELDS)
"""Entries of a suite: the keys of `evaluation` that are about one suite."""
_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Suite:
    """Prompts with how their responses are drawn and scored."""

    name: str | None
    """None for those of `evaluation` itself."""
    settings: EvaluationConfig
    """Of this suite alone."""

    @property
    def key(self) -> str:
        """Where the configuration has it."""
        return "evaluation" if self.name is None else f"evaluation.suites.{self.name}"

    @property
    def prefix(self) -> str:
        """What the names of its metrics begin with."""
        return "eval/" if self.name is None else f"eval/{self.name}/"

    @property
    def first_id(self) -> int:
        """Where its prompts' ids begin: beyond those of any training step, and of other suites, so
        that no random stream is shared, whatever suites there are beside it.
        """
        return 2**40 + (0 if self.name is None else zlib.crc32(self.name.encode()) << 20)


def evaluation_suites(config: Config) -> tuple[Suite, ...]:
    """Those of `evaluation` itself, where it has prompts or nothing else does, and then the suites
    in their order.

    A suite has what the section says unless it says otherwise, but for prompts, groups and a judge.
    Raises ConfigError with one line for each thing that is wrong with a suite's entries.
    """
    section = config.evaluation
    if problems := list(suite_problems(section)):
        raise ConfigError("\n".join(problems))
    unnamed = [Suite(None, section)] if _has_prompts(config) or not section.suites else []
    of_none = {name: getattr(EvaluationConfig(), name) for name in (*_OWN, "suites")}
    return (
        *unnamed,
        *(
            Suite(name, replace(section, **(of_none | dict(entries))))
            for name, entries in section.suites.items()
        ),
    )


def evaluated_suites(config: Config) -> tuple[Suite, ...]:
    """`evaluation_suites` of a run that is evaluated on responses; none of any other. Raises
    ConfigError as that does."""
    return (
        evaluation_suites(config)
        if config.algorithm.trainer == "online" and config.evaluation.every
        else ()
    )


def suite_problems(section: EvaluationConfig) -> Iterator[str]:
    """One line for each thing that is wrong with a suite's entries, each by itself."""
    for name, entries in section.suites.items():
        yield from _problems(name, entries)


def _has_prompts(config: Config) -> bool:
    settings = config.evaluation
    return (
        settings.path is not None
        or bool(settings.prompts)
        or bool(config.data.tasks and settings.questions)
    )


def _problems(name: str, entries: Any) -> Iterator[str]:
    key = f"evaluation.suites.{name}"
    if not _NAME.fullmatch(name) or name == "score":  # eval/score/… is of groups
        yield (
            f"{key}: the name of a suite is part of metric names; it must consist of letters,"
            " digits, _ and -, and must not be score"
        )
    own = entries
    if isinstance(entries, Mapping):
        for entry in _SHARED:
            if entry in entries:
                yield f"{key}.{entry}: applies to all suites; set evaluation.{entry}"
        own = {entry: value for entry, value in entries.items() if entry not in _SHARED}
    try:
        parse_entries(_SuiteEntries, key, own, expected="path or prompts")
    except ConfigError as error:
        yield str(error)
