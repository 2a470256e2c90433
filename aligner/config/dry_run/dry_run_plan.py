"""Plan of a dry run, which is derived from the plan of a run.

The plan contains the configuration of the dry run, the differences from the run, and replacements
for data that is not on this machine.
"""

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

# Kind of records by trainer: functions of stand_in_records.
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
# Maximum number of characters of a value in the table of changes.
_LONGEST_SHOWN = 200
# Keys that are not in the table, because other rows and notes describe their changes.
_TOLD_OTHERWISE = ("run.inputs", "model.config", "dry_run.models")


@dataclass(frozen=True)
class Change:
    """A key or a model whose value in the dry run differs from the run."""

    key: str
    """Dotted key, `policy`, or the key of a reward source."""
    given: Any
    """Value in the run."""
    runs_with: Any
    """Value in the dry run."""


@dataclass(frozen=True)
class DryRun:
    """The dry run of a configuration that has passed its own checks."""

    plan: RunPlan
    """Plan without prerequisites, because random models and generated records replace their
    results."""
    changes: tuple[Change, ...]
    """Differences from the run."""
    notes: tuple[str, ...]
    """Lines for the user about replaced components."""


def plan_dry_run(plan: RunPlan, is_reachable: Callable[[str], bool]) -> DryRun:
    """Check a run, and return the plan of its dry run.

    The run must pass all its own checks, except for the check of its run directory.

    Args:
        plan: Plan of the run.
        is_reachable: Returns whether the host of an HTTP scorer or judge answers, given its URL.

    Raises:
        ConfigError: The run or a prerequisite has problems, see `RunPlan.check`.
    """
    expected = plan.expected_inputs(absent_inputs(plan.config))
    run_config, notes = with_present_data(plan.config, expected)
    policy = check(run_config, expected)
    rewards = {source.key: shape for source, shape in reward_shapes(run_config, expected).items()}
    critic_path = run_config.critic.path if run_config.algorithm.has_critic else None
    critic = (
        None if critic_path is None else directory_shape(Path(critic_path), "critic.path", expected)
    )
    models = Models(policy, rewards, critic)

    sources = reward_sources(run_config.reward) if run_config.algorithm.generates else ()
    addresses = [address for source in sources if (address := asked_address(source)) is not None]
    unreachable = [address for address in addresses if not is_reachable(address)]

    tiny_config, tiny = tiny_run(run_config, models, unreachable)
    notes = (*notes, *_exchanges(run_config, tiny_config, unreachable))
    shapes = {
        "policy": (policy, tiny.policy),
        **{key: (shape, tiny.rewards[key]) for key, shape in models.rewards.items()},
    }
    changes = [
        Change(name, _dimensions(run_shape), _dimensions(tiny_shape))
        for name, (run_shape, tiny_shape) in shapes.items()
    ]
    return DryRun(
        RunPlan(tiny_config, ()), (*changes, *_key_changes(plan.config, tiny_config)), notes
    )


def tiny_run(
    given: Config, models: Models, unreachable: Collection[str] = ()
) -> tuple[Config, Models]:
    """Return the configuration of the dry run and the shapes of its tiny models.

    Args:
        given: Configuration of the run, which has passed its checks.
        models: Shapes of the models of the run.
        unreachable: Addresses of HTTP scorers and judges that do not answer.
    """
    # The order matters: later settings depend on the layouts, lengths and batches before them.
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
    """Yield notes about components of the run that are replaced in the dry run."""
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
    """Return the dimensions of a model, in words."""
    experts = f", {shape.num_experts} experts" if shape.num_experts else ""
    return (
        f"{shape.num_layers} layers, hidden size {shape.hidden_size}, {shape.num_heads} heads,"
        f" {shape.num_kv_heads} key-value heads, feed-forward size"
        f" {shape.ffn_hidden_size}{experts}, vocabulary size {shape.vocab_size}"
    )


def _key_changes(given: Config, tiny: Config) -> Iterator[Change]:
    """Yield the differences of the keys that the run or the dry run reads."""
    given = only_read(given)
    tiny = only_read(tiny)
    for name in schema_keys():
        run_value = value_at(given, name)
        dry_run_value = value_at(tiny, name)
        if run_value != dry_run_value and name not in _TOLD_OTHERWISE:
            yield Change(name, run_value, dry_run_value)


def with_present_data(config: Config, expected: ExpectedInputs) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration with generated records in place of missing data, and notes.

    Each note is a line about data that was replaced.
    """
    notes: list[str] = []
    for values, note in (*_records(config, expected), *_evaluation(config, expected)):
        config = with_values(config, values)
        notes.append(note)
    return config, tuple(notes)


def _is_absent(path: Path | str, expected: ExpectedInputs) -> bool:
    """Return whether the records of a path are not on this machine; functions never are absent."""
    return is_expected(path, expected) or not (
        str(path).startswith(FUNCTION) or Path(path).exists()
    )


def _stand_in(name: str) -> str:
    """Return the value of `data.path` that selects a function of `stand_in_records`."""
    return f"{FUNCTION}aligner.config.dry_run.stand_in_records:{name}"


def _records(config: Config, expected: ExpectedInputs) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield replacements of missing training records: new values of keys, and a note."""
    try:
        sources = data_sources(config.data)
    except ConfigError:
        return  # the checks report the problem
    absent = [source for source in sources if _is_absent(source.path, expected)]
    if absent:
        # All sources are replaced, because data.prompt_after and data.prompt_before would not fit
        # a mixture of the run's own records and the generated ones.
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
        if config.algorithm.generates:  # the generated records belong to no task of the run
            values["reward.sources"] = without_tasks(config.reward)
        absent_paths = ", ".join(source.given_as for source in absent)
        note = (
            f"{absent_paths}: not found on this machine; all data is replaced by additions of"
            " two numbers"
        )
        yield values, note
    elif (samples := config.data.pass_rate_samples) is not None and _is_absent(samples, expected):
        yield (
            dict(_ANY_DIFFICULTY),
            f"data.pass_rate_samples={samples}: not found on this machine; data.pass_rate and"
            " data.sort_by are ignored",
        )
    normalization = config.data.normalization
    if normalization is not None and _is_absent(normalization, expected):
        yield (
            {"data.normalization": None},
            f"data.normalization={normalization}: not found on this machine; ignored",
        )


def _evaluation(config: Config, expected: ExpectedInputs) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield replacements of missing evaluation records: new values of keys, and a note."""
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
    """Return a table of the differences between the run and the dry run."""
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
    """Return a value as text for the table, shortened if it is long."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    text = f"{value:g}" if isinstance(value, float) else str(value)
    text = text if text.isprintable() else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 1]}…"
