"""The overrides of a command line: which keys there are, and whether the composed run reads those
that are given."""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from aligner.errors import ConfigError
from aligner.schema import Config
from aligner.schema.conditions import Term, value_text
from aligner.schema.keys import schema_keys, schema_sections, unmet, value_at


def parse_override(text: str, options: Mapping[str, list[str]]) -> Override:
    """One override, its key known to exist."""
    key = text.partition("=")[0].lstrip("+~")
    if "=" not in text and not text.startswith("~"):
        hint = f"; did you mean experiment={text}?" if text in options["experiment"] else ""
        raise ConfigError(f"{text}: expected an override key=value{hint}")
    if key not in options:
        check_key(key, options)
    if text.startswith("~"):
        raise ConfigError(
            f"{text}: keys cannot be deleted; set another value, or null where the key allows it"
        )
    try:
        override = OverridesParser.create().parse_override(quote_text(text))
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{text}: {reason}; quote values that contain special characters: '{key}=\"VALUE\"'"
        ) from error
    if override.is_sweep_override():
        raise ConfigError(f"{text}: expected one value; write a list as {key}=[a,b]")
    if (
        key in options
        and not isinstance(override.value(), dict)
        and override.value() not in options[key]
    ):
        close = difflib.get_close_matches(str(override.value()), options[key], n=1)
        hint = f"did you mean {key}={close[0]}? " if close else ""
        raise ConfigError(
            f"{key}={override.value()}: no such {key}; {hint}allowed: {', '.join(options[key])}"
        )
    return override


def quote_text(override: str) -> str:
    """Return an override whose value Hydra reads as one text, with quotes where they are missing.

    Hydra requires quotes around paths with characters such as `#` or `,`. They are added only if
    the key takes a text, the value is a path, and Hydra cannot read it as it is.

    Example: `run.dir=/data/it's` becomes `run.dir="/data/it's"`.
    """
    name, _, value = override.partition("=")
    key = known_key(name.lstrip("+"))
    takes_text = key is not None and schema_keys()[key].type_name.removesuffix(" | None") == "str"
    is_path = name.endswith((".dir", ".path")) or "/" in value
    if not (takes_text and is_path) or value[:1] in ("'", '"'):
        return override
    try:
        if not OverridesParser.create().parse_override(override).is_sweep_override():
            return override
    except HydraException:
        pass
    # A backslash is doubled only before a quotation mark, which the end of the value is, too.
    escaped = re.sub(
        r'(\\*)("|$)', lambda found: found[1] * 2 + found[2].replace('"', '\\"'), value
    )
    return f'{name}="{escaped}"'


def check_key(key: str, groups: Iterable[str] = ()) -> None:
    """Raise ConfigError, with the nearest key, unless `key` is a key, a section or an entry of a
    mapping."""
    sections = {section.name for section in schema_sections() if section.name}
    if key in sections or known_key(key) is not None:
        return
    raise ConfigError(
        f"{key}: unknown key; {_suggestion(key, [*schema_keys(), *sections, *groups])}"
    )


def _suggestion(key: str, candidates: Sequence[str]) -> str:
    parent, _, last = key.rpartition(".")
    if parent in candidates:
        siblings = sorted(
            name.rpartition(".")[2] for name in candidates if name.rpartition(".")[0] == parent
        )
        close = difflib.get_close_matches(last, siblings, n=1)
        return (
            f"did you mean {parent}.{close[0]}?"
            if close
            else f"allowed in {parent}: {', '.join(siblings)}"
        )
    same = [name for name in candidates if name.rpartition(".")[2] == last]
    close = same if same and not parent else difflib.get_close_matches(key, candidates, n=1)
    return f"did you mean {' or '.join(close)}?" if close else "see docs/configuration.md"


def check_read(
    config: Config,
    overrides: Iterable[Override],
    groups: Mapping[str, Sequence[str]],
    directories: Sequence[Path],
) -> None:
    """Raise ConfigError with a line for each override that the run does not read, which says what
    would make it count."""
    problems = []
    given = {override.key_or_group: override for override in overrides}
    for key, override in given.items():
        value = override.value()
        if key in groups and not isinstance(value, dict):
            values = {} if key == "experiment" else option_values(directories, key, str(value))
            idle = {str(override.input_line): _unmet_by_option(config, values, given)}
        elif known_key(key) is not None:
            idle = {str(override.input_line).lstrip("+"): _unmet_by(config, key)}
        else:
            keys = flat_keys(f"{key}.", value) if isinstance(value, dict) else {}
            idle = {
                f"{name}={value_text(entry)}": _unmet_by(config, name)
                for name, entry in keys.items()
            }
        for shown, terms in idle.items():
            if terms:
                required = " and ".join(map(str, terms))
                problems.append(
                    f"{shown}: has no effect with {current_values(config, terms)}; requires"
                    f" {required}"
                )
    if problems:
        raise ConfigError("\n".join(problems))


def current_values(config: Config, terms: Iterable[Term]) -> str:
    """The values of these terms' keys, which make another one idle."""
    return " and ".join(
        dict.fromkeys(f"{term.key}={value_text(value_at(config, term.key))}" for term in terms)
    )


def option_values(directories: Sequence[Path], group: str, name: str) -> dict[str, Any]:
    """The keys that a group's option sets in its file, and in those of the same group that it
    begins with."""
    files = [directory / group / f"{name}.yaml" for directory in directories]
    text = next((file.read_text(encoding="utf-8") for file in files if file.is_file()), "")
    content = yaml.safe_load(text) or {}
    defaults = [
        default
        for default in content.pop("defaults", [])
        if isinstance(default, str) and default != "_self_"
    ]
    first = {
        key: value
        for default in defaults
        for key, value in option_values(directories, group, default).items()
    }
    return first | flat_keys("" if text.startswith("# @package _global_") else f"{group}.", content)


def given_keys(
    overrides: Iterable[Override],
    groups: Collection[str],
    directories: Sequence[Path],
    experiment: str,
) -> frozenset[str]:
    """The keys that get values from overrides, from options of groups that these choose, and from
    the experiment's file.

    Options that the experiment's file chooses with `override /GROUP: NAME` count as its own.
    """
    chosen = _chosen_options(directories, experiment)
    given = set(option_values(directories, "experiment", experiment))
    for override in overrides:
        key, value = override.key_or_group, override.value()
        if key in groups and not isinstance(value, dict):
            chosen[key] = str(value)
        else:
            given |= (
                set(flat_keys(f"{key}.", value))
                if isinstance(value, dict) and known_key(key) is None
                else {known_key(key) or key}
            )
    for group, name in chosen.items():
        given |= set(option_values(directories, group, name))
    return frozenset(given)


def _chosen_options(directories: Sequence[Path], experiment: str) -> dict[str, str]:
    """The options that an experiment's file, and those that it begins with, choose of other
    groups."""
    files = [directory / "experiment" / f"{experiment}.yaml" for directory in directories]
    text = next((file.read_text(encoding="utf-8") for file in files if file.is_file()), "")
    found: dict[str, str] = {}
    for default in (yaml.safe_load(text) or {}).get("defaults", []):
        if isinstance(default, str):
            found |= _chosen_options(directories, default) if default != "_self_" else {}
        else:
            found |= {
                str(group).rpartition("/")[2]: str(name)
                for group, name in default.items()
                if name is not None
            }
    return found


def flat_keys(prefix: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of nested sections with their values; a mapping of the user's own entries is one
    value."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        key = f"{prefix}{name}"
        found |= (
            flat_keys(f"{key}.", value)
            if isinstance(value, dict) and known_key(key) is None
            else {key: value}
        )
    return found


def known_key(name: str) -> str | None:
    """The key of the schema that a name is, or an entry of; None for any other."""
    keys = schema_keys()
    if name in keys:
        return name
    return next(
        (key for key, known in keys.items() if known.is_mapping and name.startswith(f"{key}.")),
        None,
    )


def _unmet_by(config: Config, name: str) -> tuple[Term, ...]:
    """What would make a key, or an entry of one, count."""
    return unmet(config, schema_keys()[known_key(name) or name].read)


def _unmet_by_option(
    config: Config, values: Mapping[str, Any], given: Collection[str]
) -> tuple[Term, ...]:
    """What would make any key of a group's option count: that it is read and, if the experiment has
    another value, its own.

    Values that are `given` on the command line are meant to take the option's place.
    """
    others = tuple(
        Term(key, "=", (value_text(value),))
        for key, value in values.items()
        if not schema_keys()[key].is_mapping
        and value_at(config, key) != value
        and not _unmet_by(config, key)
    )
    idle = [_unmet_by(config, key) for key in values]
    if (
        not values
        or any(key in given for key in values)
        or len(others) + sum(map(bool, idle)) < len(values)
    ):
        return ()
    return others or min(idle, key=len)
