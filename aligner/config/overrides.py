"""The overrides of a command line: which keys there are, and whether the composed run reads those
that are given."""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from aligner.config.conf_files import chosen_options, flat_keys, option_values, report_old_key
from aligner.errors import ConfigError
from aligner.schema import Config
from aligner.schema.conditions import Term, value_text
from aligner.schema.keys import check_key, known_key, schema_keys, unmet, value_at
from aligner.schema.renamed import RENAMED_KEYS


def parse_override(text: str, options: Mapping[str, list[str]]) -> Override:
    """One override, its key known to exist."""
    key = text.partition("=")[0].lstrip("+~")
    if key in RENAMED_KEYS:
        report_old_key(key)
        text = text.replace(key, RENAMED_KEYS[key], 1)
        key = RENAMED_KEYS[key]
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
        elif value is None:
            continue  # a key without effect may be null
        elif known_key(key) is not None:
            idle = {str(override.input_line).lstrip("+"): _unmet_by(config, key)}
        else:
            keys = flat_keys(f"{key}.", value) if isinstance(value, dict) else {}
            idle = {
                f"{name}={value_text(entry)}": _unmet_by(config, name)
                for name, entry in keys.items()
                if entry is not None
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
    chosen = chosen_options(directories, experiment)
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
