"""Sweeps: overrides with several values, in the grammar of Hydra's `--multirun`."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from aligner.config.compose import compose_config
from aligner.config.conf_files import find_config_sources, list_group_options
from aligner.errors import ConfigError

SWEEP_KEYS = ("run.dir", "run.name", "run.resume")
"""Keys whose overrides apply to the sweep as a whole."""


@dataclass(frozen=True)
class SweepPoint:
    """One run of a sweep."""

    overrides: tuple[str, ...]
    """All overrides of the run, except `run.dir`, `run.name` and `run.resume`."""
    swept: tuple[str, ...]
    """The overrides that have several values in the sweep, for messages."""

    @property
    def description(self) -> str:
        """The swept overrides in one line."""
        return " ".join(self.swept)


def expand_sweep(
    overrides: Sequence[str],
    config_directory: Path | None = None,
    config_file: Path | None = None,
) -> list[SweepPoint]:
    """Return the runs of a sweep: all combinations of the values, each once.

    The values of the last override change fastest. The configuration of each run is composed, so
    that an error in one of them is found before the first run.

    Args:
        overrides: Overrides of the command line, some of which may have several values.
        config_directory: Directory of the user's own groups.
        config_file: File of the experiment.

    Raises:
        ConfigError: An override has no finite list of values, or sets `run.dir`, `run.name` or
            `run.resume` to several values; or the configuration of a run is invalid.

    Example:
        `expand_sweep(["experiment=tiny_ppo", "seed=1,2"])` returns two runs.
    """
    options = list_group_options(find_config_sources(config_directory, config_file))
    texts = [text for text in overrides if text.partition("=")[0] not in SWEEP_KEYS]
    for text in overrides:
        if text not in texts and _is_sweep(text):
            raise ConfigError(
                f"{text}: expected one value; it applies to the whole sweep, in which each run has"
                " its own directory"
            )
    values = [_list_values(text, options) for text in texts]
    all_points = (
        SweepPoint(
            overrides=combination,
            swept=tuple(
                _without_escapes(value)
                for value, text in zip(combination, texts, strict=True)
                if _is_sweep(text)
            ),
        )
        for combination in itertools.product(*values)
    )
    points = list(dict.fromkeys(all_points))
    for point in points:
        try:
            compose_config(point.overrides, config_directory, config_file)
        except ConfigError as error:
            if not point.swept:
                raise
            raise ConfigError(f"{error} (in the run with {point.description})") from error
    return points


def _is_sweep(text: str) -> bool:
    """Return whether an override has several values in Hydra's grammar."""
    override = _parse(text)
    return override is not None and override.is_sweep_override()


def _without_escapes(text: str) -> str:
    """Return an override with a text value as the user wrote the value.

    Hydra escapes characters of swept values: `mine:score` becomes `mine\\:score`.
    """
    override = _parse(text)
    if override is None or not isinstance(override.value(), str):
        return text
    return f"{override.get_key_element()}={override.value()}"


def _parse(text: str) -> Override | None:
    """Return the parsed override; None if Hydra cannot parse it.

    `aligner.config.overrides.parse_override` accepts some of these texts, such as unquoted paths,
    and reports the others.
    """
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        return None


def _list_values(text: str, options: dict[str, list[str]]) -> list[str]:
    """Return an override with each of its values as `KEY=VALUE`.

    Args:
        text: Override of the command line.
        options: Options of each group, from which `glob()` selects.

    Raises:
        ConfigError: The override has no finite list of values.
    """
    override = _parse(text)
    if override is None or not override.is_sweep_override():
        return [text]
    key = override.get_key_element()
    values: Any = override.value()
    if isinstance(values, Glob):
        names = values.filter(options.get(override.key_or_group, []))
        if not names:
            raise ConfigError(
                f"{text}: matches no option; glob() selects options of one of the groups"
                f" {', '.join(options)}"
            )
        return [f"{key}={name}" for name in names]
    if not override.is_discrete_sweep():
        raise ConfigError(
            f"{text}: has no finite list of values; use choice(…), range(…) or values separated by"
            " commas"
        )
    return [f"{key}={value}" for value in override.sweep_string_iterator()]
