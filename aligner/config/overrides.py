"""Overrides of the command line.

This module parses overrides, and reports overrides that have no effect because the composed run
does not read their keys.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from aligner.config.conf_files import (
    flatten_keys,
    read_chosen_options,
    read_option_values,
    report_old_key,
)
from aligner.errors import ConfigError
from aligner.schema import Config
from aligner.schema.conditions import Term, format_value
from aligner.schema.keys import (
    check_key,
    find_schema_key,
    find_unmet_terms,
    get_schema_keys,
    get_value,
)
from aligner.schema.renamed import RENAMED_KEYS


def parse_override(text: str, options: Mapping[str, list[str]]) -> Override:
    """Parse an override and check that its key or group, and its group option, exist.

    Args:
        text: Override such as `run.steps=10`, with a current or an old name of a key.
        options: Options of each group.

    Raises:
        ConfigError: The override is malformed, deletes a key or has several values; or its key or
            option is unknown.
    """
    key = text.partition("=")[0].lstrip("+~")
    if key in RENAMED_KEYS:
        report_old_key(key)
        text = text.replace(key, RENAMED_KEYS[key], 1)
        key = RENAMED_KEYS[key]
    if "=" not in text and not text.startswith("~"):
        hint = f"; did you mean experiment={text}?" if text in options["experiment"] else ""
        raise ConfigError(f"{text}: expected an override key=value{hint}")
    # An unknown name is reported before the syntax of its value.
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
        raise ConfigError(
            f"{text}: expected one value; write a list as {key}=[a,b], or launch a run for each"
            " value with `aligner launch --multirun`"
        )
    if (
        key in options
        and not isinstance(override.value(), dict)
        and override.value() not in options[key]
    ):
        close_names = difflib.get_close_matches(str(override.value()), options[key], n=1)
        hint = f"did you mean {key}={close_names[0]}? " if close_names else ""
        raise ConfigError(
            f"{key}={override.value()}: no such {key}; {hint}allowed: {', '.join(options[key])}"
        )
    return override


def quote_text(override: str) -> str:
    """Return an override with quotes around a path that Hydra could not parse without them.

    Hydra requires quotes around values with characters such as `#` or `,`. This function adds
    quotes only if the key takes a string, the value is a path, and Hydra cannot parse the value as
    it is.

    Example:
        `run.dir=/data/it's` becomes `run.dir="/data/it's"`.
    """
    name, _, value = override.partition("=")
    key = find_schema_key(name.lstrip("+"))
    takes_text = (
        key is not None and get_schema_keys()[key].type_name.removesuffix(" | None") == "str"
    )
    is_path = name.endswith((".dir", ".path")) or "/" in value
    if not (takes_text and is_path) or value[:1] in ("'", '"'):
        return override
    try:
        if not OverridesParser.create().parse_override(override).is_sweep_override():
            return override
    except HydraException:
        pass
    # Hydra reads a backslash as an escape only before a quotation mark. The closing quotation mark
    # follows the value, so backslashes at the end of the value are doubled, too.
    escaped = re.sub(
        r'(\\*)("|$)', lambda match: match[1] * 2 + match[2].replace('"', '\\"'), value
    )
    return f'{name}="{escaped}"'


def check_read(
    config: Config,
    overrides: Iterable[Override],
    groups: Mapping[str, Sequence[str]],
    sources: Sequence[Path],
) -> None:
    """Raise ConfigError if the run does not read a key that an override sets.

    The error has a line for each such override, with the values that it requires.

    Args:
        config: Composed configuration.
        overrides: Parsed overrides of the command line.
        groups: Options of each group.
        sources: Sources of the configuration.
    """
    problems = []
    # Only the last override of a key has an effect.
    overrides_by_key = {override.key_or_group: override for override in overrides}
    for key, override in overrides_by_key.items():
        value = override.value()
        if key in groups and not isinstance(value, dict):
            # describe_unread_keys in compose.py reports the unread keys of an experiment.
            values = {} if key == "experiment" else read_option_values(sources, key, str(value))
            unmet_terms = {
                str(override.input_line): _find_unmet_terms_of_option(
                    config, values, overrides_by_key
                )
            }
        elif value is None:
            continue  # a key without effect may be null
        elif find_schema_key(key) is not None:
            unmet_terms = {
                str(override.input_line).lstrip("+"): _find_unmet_terms_of_key(config, key)
            }
        else:  # a section with a mapping of values, such as rollout={top_k: 5}
            keys = flatten_keys(f"{key}.", value) if isinstance(value, dict) else {}
            unmet_terms = {
                f"{name}={format_value(entry)}": _find_unmet_terms_of_key(config, name)
                for name, entry in keys.items()
                if entry is not None
            }
        for setting, terms in unmet_terms.items():
            if terms:
                required = " and ".join(map(str, terms))
                problems.append(
                    f"{setting}: has no effect with {format_current_values(config, terms)};"
                    f" requires {required}"
                )
    if problems:
        raise ConfigError("\n".join(problems))


def format_current_values(config: Config, terms: Iterable[Term]) -> str:
    """Return the current values of the keys of unmet terms, for a message."""
    return " and ".join(
        dict.fromkeys(f"{term.key}={format_value(get_value(config, term.key))}" for term in terms)
    )


def collect_user_keys(
    overrides: Iterable[Override],
    groups: Collection[str],
    sources: Sequence[Path],
    experiment: str,
) -> frozenset[str]:
    """Return the keys that the user sets: with overrides, group options or the experiment's file.

    The options that the experiment's file chooses with `override /GROUP: NAME` count as part of
    the file.

    Args:
        overrides: Parsed overrides of the command line.
        groups: Names of all groups.
        sources: Sources of the configuration.
        experiment: Name of the experiment.
    """
    # An option on the command line replaces the experiment's option of the same group.
    options = read_chosen_options(sources, experiment)
    keys = set(read_option_values(sources, "experiment", experiment))
    for override in overrides:
        key = override.key_or_group
        value = override.value()
        if key in groups and not isinstance(value, dict):
            options[key] = str(value)
        else:
            keys |= (
                set(flatten_keys(f"{key}.", value))
                if isinstance(value, dict) and find_schema_key(key) is None
                else {find_schema_key(key) or key}
            )
    for group, name in options.items():
        keys |= set(read_option_values(sources, group, name))
    return frozenset(keys)


def _find_unmet_terms_of_key(config: Config, name: str) -> tuple[Term, ...]:
    """Return the unmet terms of the condition under which the run reads a key or mapping entry."""
    return find_unmet_terms(config, get_schema_keys()[find_schema_key(name) or name].condition)


def _find_unmet_terms_of_option(
    config: Config, values: Mapping[str, Any], command_line_keys: Collection[str]
) -> tuple[Term, ...]:
    """Return the terms that a group option lacks to have an effect; empty if it has an effect.

    An option has an effect if the run reads one of its keys with the option's value. The terms are
    the option's values that the experiment replaces or, if the run reads none of the keys, the
    shortest list of unmet conditions.

    Args:
        config: Composed configuration.
        values: Values of the option by key.
        command_line_keys: Keys that the command line sets, which may replace values of the option.
    """
    replaced_values = tuple(
        Term(key, "=", (format_value(value),))
        for key, value in values.items()
        if not get_schema_keys()[key].is_mapping
        and get_value(config, key) != value
        and not _find_unmet_terms_of_key(config, key)
    )
    unmet_terms = [_find_unmet_terms_of_key(config, key) for key in values]
    if (
        not values
        or any(key in command_line_keys for key in values)
        # At least one key is read and has the value of the option.
        or len(replaced_values) + sum(map(bool, unmet_terms)) < len(values)
    ):
        return ()
    return replaced_values or min(unmet_terms, key=len)
