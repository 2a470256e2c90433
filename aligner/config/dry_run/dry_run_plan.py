"""From a run's plan to its dry run's, with what differs between the two, and data for it where the
run's is not here."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from aligner.checks.check import check
from aligner.config.dry_run import tiny_settings as settings
from aligner.config.dry_run.tiny_models import (
    Models,
    with_fitting_layouts,
    with_positions,
    with_tiny_models,
)
from aligner.config.prerequisites import RunPlan
from aligner.errors import ConfigError
from aligner.models.model_source import (
    ExpectedInputs,
    absent_inputs,
    directory_shape,
    is_expected,
    reward_shapes,
)
from aligner.models.shape import ModelShape
from aligner.schema import Config
from aligner.schema.data_sources import FUNCTION, data_sources
from aligner.schema.derived import longest_sequence
from aligner.schema.evaluation_suites import evaluation_suites
from aligner.schema.keys import only_read, schema_keys, value_at, with_values
from aligner.schema.reward_sources import asked_address, reward_sources, without_tasks
from aligner.schema.teacher_sources import teacher_sources

_STAND_INS = {
    "online": "prompts",
    "preferences": "prompts",
    "sft": "demonstrations",
    "teacher_scores": "demonstrations",
    "dpo": "preferences",
    "reward_model": "preferences",
}
_ANY_DIFFICULTY: dict[str, Any] = {
    "data.pass_rate": [],
    "data.pass_rate_samples": None,
    "data.sort_by": None,
}
_LONGEST_SHOWN = 200
_TOLD_OTHERWISE = ("run.inputs", "model.config", "dry_run.models")


@dataclass(frozen=True)
class Change:
    """A key, or a model's dimension, that a dry run has otherwise."""

    key: str
    given: Any
    runs_with: Any


@dataclass(frozen=True)
class DryRun:
    """The dry run of a configuration whose own checks passed."""

    plan: RunPlan
    """Without prerequisites: what they would give is random, or sums."""
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    """What a person should know, a line each."""


def plan_dry_run(plan: RunPlan, is_reachable: Callable[[str], bool]) -> DryRun:
    """The dry run of a plan, after all of the checks that the run itself would have to pass, but
    for its directory's.

    `is_reachable` tells whether the host of an HTTP scorer or a judge answers. Raises ConfigError
    as `RunPlan.check` does.
    """
    expected = plan.expected_inputs(absent_inputs(plan.config))
    given, notes = with_present_data(plan.config, expected)
    policy = check(given, expected)
    rewards = {source.key: shape for source, shape in reward_shapes(given, expected).items()}
    begun_from = given.critic.path if given.algorithm.has_critic else None
    critic = (
        None if begun_from is None else directory_shape(Path(begun_from), "critic.path", expected)
    )
    models = Models(policy, rewards, critic)
    sources = reward_sources(given.reward) if given.algorithm.generates else ()
    asked = [address for source in sources if (address := asked_address(source)) is not None]
    unreachable = [address for address in asked if not is_reachable(address)]
    tiny_config, tiny = tiny_run(given, models, unreachable)
    notes = (*notes, *_exchanges(given, tiny_config, unreachable))
    shapes = {
        "policy": (policy, tiny.policy),
        **{key: (shape, tiny.rewards[key]) for key, shape in models.rewards.items()},
    }
    changes = [
        Change(name, _dimensions(whole), _dimensions(small))
        for name, (whole, small) in shapes.items()
    ]
    return DryRun(
        RunPlan(tiny_config, ()), (*changes, *_key_changes(plan.config, tiny_config)), notes
    )


def tiny_run(
    given: Config, models: Models, unreachable: Collection[str] = ()
) -> tuple[Config, Models]:
    """A checked configuration's dry run, and its models; `unreachable` are HTTP scorers and judges
    that do not answer."""
    given = with_values(given, settings.critic(given, models) | settings.teacher(given))
    config = with_fitting_layouts(given)
    config, tiny = with_tiny_models(config, given, models)
    config = with_values(config, settings.frozen(config, given, tiny, models))
    config = with_values(config, settings.place(config))
    config = with_values(config, settings.lengths(config))
    tiny = with_positions(tiny, longest_sequence(config), longest_sequence(given))
    config = with_values(config, settings.scores(config, unreachable))
    config = with_values(config, settings.models(config, tiny))
    config = with_values(config, settings.batches(config))
    return with_values(config, settings.schedules(config)), tiny


def _exchanges(given: Config, tiny: Config, unreachable: Collection[str]) -> Iterator[str]:
    """What does not run here, and what does instead."""
    if given.algorithm.generates and given.engine.kind != tiny.engine.kind:
        yield (
            f"engine.kind={given.engine.kind}: requires GPUs; replaced by the {tiny.engine.kind}"
            " engine"
        )
    if given.has_teacher:
        for source in teacher_sources(given.teacher):
            yield f"{source.key}.path={source.path}: replaced by the tiny policy on one rank"
    for url in unreachable:
        yield (
            f"{url}: cannot be reached; the score is the fraction of digits in a response instead"
        )
    if "dry_run" in tiny.reward.sources:
        yield (
            "the fraction of digits in a response is added to the score, because all samples of a"
            " random model would otherwise have the same score and be dropped"
        )


def _dimensions(shape: ModelShape) -> str:
    experts = f", {shape.num_experts} experts" if shape.num_experts else ""
    return (
        f"{shape.num_layers} layers, hidden size {shape.hidden_size}, {shape.num_heads} heads,"
        f" {shape.num_kv_heads} key-value heads, feed-forward size"
        f" {shape.ffn_hidden_size}{experts}, vocabulary size {shape.vocab_size}"
    )


def _key_changes(given: Config, tiny: Config) -> Iterator[Change]:
    """Of the keys that the one or the other reads."""
    given, tiny = only_read(given), only_read(tiny)
    for name in schema_keys():
        one, other = value_at(given, name), value_at(tiny, name)
        if one != other and name not in _TOLD_OTHERWISE:
            yield Change(name, one, other)


def with_present_data(config: Config, expected: ExpectedInputs) -> tuple[Config, tuple[str, ...]]:
    """The configuration with sums instead of records that are not here, and a line about each
    exchange."""
    notes: list[str] = []
    for values, note in (*_records(config, expected), *_evaluation(config, expected)):
        config = with_values(config, values)
        notes.append(note)
    return config, tuple(notes)


def _is_absent(path: Path | str, expected: ExpectedInputs) -> bool:
    return is_expected(path, expected) or not (
        str(path).startswith(FUNCTION) or Path(path).exists()
    )


def _stand_in(name: str) -> str:
    """Return the `data.path` of a function of stand_in_records."""
    return f"{FUNCTION}aligner.config.dry_run.stand_in_records:{name}"


def _records(config: Config, expected: ExpectedInputs) -> Iterator[tuple[dict[str, Any], str]]:
    try:
        sources = data_sources(config.data)
    except ConfigError:
        return  # the checks tell
    absent = [source for source in sources if _is_absent(source.path, expected)]
    if absent:
        # All of them: data.prompt_after and data.prompt_before speak of the run's own records.
        algorithm = config.algorithm
        if algorithm.has_labels:
            path = _stand_in("labeled_answers")
        elif algorithm.has_demonstrations:
            path = _stand_in("demonstrations")
        else:
            path = _stand_in(_STAND_INS[algorithm.trainer])
        values: dict[str, Any] = {
            "data.fields": {},
            "data.prompt_after": None,
            "data.prompt_before": None,
            **_ANY_DIFFICULTY,
        }
        if config.data.path is not None:
            values["data.path"] = path
        for source in sources if config.data.path is None else ():
            values[source.key] = {"path": path, "weight": source.weight}
        if config.algorithm.generates:  # sums are of none of the run's tasks
            values["reward.sources"] = without_tasks(config.reward)
        named = ", ".join(source.given_as for source in absent)
        note = (
            f"{named}: not found on this machine; all data is replaced by additions of two numbers"
        )
        yield values, note
    elif (rated := config.data.pass_rate_samples) is not None and _is_absent(rated, expected):
        yield (
            dict(_ANY_DIFFICULTY),
            f"data.pass_rate_samples={rated}: not found on this machine; data.pass_rate and"
            " data.sort_by are ignored",
        )
    given = config.data.normalization
    if given is not None and _is_absent(given, expected):
        yield (
            {"data.normalization": None},
            f"data.normalization={given}: not found on this machine; ignored",
        )


def _evaluation(config: Config, expected: ExpectedInputs) -> Iterator[tuple[dict[str, Any], str]]:
    for suite in evaluation_suites(config) if config.algorithm.trainer == "online" else ():
        path = suite.settings.path
        if path is not None and _is_absent(path, expected):
            values: dict[str, Any] = {
                f"{suite.key}.path": _stand_in("prompts"),
                f"{suite.key}.fields": {},
            }
            values |= {"data.prompt_after": None, "data.prompt_before": None}
            note = (
                f"{suite.key}.path={path}: not found on this machine; replaced by additions of"
                " two numbers"
            )
            yield values, note


def changes_table(dry_run: DryRun) -> Table:
    """What the dry run has otherwise than the run, as a table."""
    table = Table(
        title=f"dry run of {dry_run.plan.config.run.experiment}: changed values",
        title_justify="left",
    )
    table.add_column("key", no_wrap=True)
    for column in ("run", "dry run"):
        table.add_column(column, overflow="fold")
    for change in dry_run.changes:
        table.add_row(change.key, _shown(change.given), _shown(change.runs_with))
    return table


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    text = f"{value:g}" if isinstance(value, float) else str(value)
    text = text if text.isprintable() else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 1]}…"
