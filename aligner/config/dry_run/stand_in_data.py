"""What a dry run learns from: the run's own data where it is on this machine, else sums that every machine has."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aligner.errors import ConfigError
from aligner.models.model_source import ExpectedInputs, is_expected
from aligner.schema import Config
from aligner.schema.data_sources import FUNCTION, data_sources
from aligner.schema.keys import with_values

_SUMS = {
    "online": "prompts",
    "preferences": "prompts",
    "sft": "demonstrations",
    "dpo": "preferences",
    "reward_model": "preferences",
}


def with_present_data(config: Config, expected: ExpectedInputs) -> tuple[Config, tuple[str, ...]]:
    """The configuration with sums instead of records that are not here, and a line about each exchange."""
    notes: list[str] = []
    for values, note in (*_records(config, expected), *_evaluation(config, expected)):
        config = with_values(config, values)
        notes.append(note)
    return config, tuple(notes)


def _is_absent(path: Path | str, expected: ExpectedInputs) -> bool:
    return is_expected(path, expected) or not (str(path).startswith(FUNCTION) or Path(path).exists())


def _sums(name: str) -> str:
    return f"{FUNCTION}aligner.data.arithmetic:{name}"


def _records(config: Config, expected: ExpectedInputs) -> Iterator[tuple[dict[str, Any], str]]:
    try:
        sources = data_sources(config.data)
    except ConfigError:
        return  # the checks tell
    absent = [source for source in sources if _is_absent(source.path, expected)]
    if absent:
        # All of them: data.prompt_after and data.prompt_before speak of the run's own records.
        path = _sums(_SUMS[config.algorithm.trainer])
        values: dict[str, Any] = {"data.fields": {}, "data.prompt_after": None, "data.prompt_before": None}
        if config.data.path is not None:
            values["data.path"] = path
        for source in sources if config.data.path is None else ():
            values[source.key] = {"path": path, "weight": source.weight}
        named = ", ".join(source.given_as for source in absent)
        yield values, f"{named}: not on this machine; sums take the place of all data"
    given = config.data.normalization
    if given is not None and _is_absent(given, expected):
        yield {"data.normalization": None}, f"data.normalization={given}: not on this machine; left out"


def _evaluation(config: Config, expected: ExpectedInputs) -> Iterator[tuple[dict[str, Any], str]]:
    path = config.evaluation.path
    if config.algorithm.trainer == "online" and path is not None and _is_absent(path, expected):
        values = {"evaluation.path": _sums("held_out"), "evaluation.fields": {}}
        yield values, f"evaluation.path={path}: not on this machine; sums take its place"
