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
from aligner.config.dry_run import tiny_settings
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
from aligner.schema.data import AUTO_LAYOUT
from aligner.schema.data_sources import FUNCTION, parse_data_sources
from aligner.schema.derived import get_max_sequence_length
from aligner.schema.evaluation_suites import parse_evaluation_suites
from aligner.schema.keys import get_schema_keys, get_value, with_unread_defaults, with_values
from aligner.schema.reward_sources import (
    get_request_url,
    parse_reward_sources,
    without_task_weights,
)
from aligner.schema.teacher_sources import parse_teacher_sources

# Kind of records by trainer: functions of stand_in_records.
_STAND_INS = {
    "online": "prompts",
    "preferences": "prompts",
    "sft": "demonstrations",
    "teacher_scores": "demonstrations",
    "dpo": "preferences",
    "reward_model": "preferences",
}
_NO_DIFFICULTY_SELECTION: dict[str, Any] = {
    "data.pass_rate": [],
    "data.pass_rate_samples": None,
    "data.sort_by": None,
}
# Maximum number of characters of a value in the table of changes.
_MAX_VALUE_LENGTH = 200
# Keys that are not in the table, because other rows and notes describe their changes.
_OMITTED_KEYS = ("run.inputs", "model.config", "dry_run.models")


@dataclass(frozen=True)
class Change:
    """A key or a model whose value in the dry run differs from the run."""

    key: str
    """Dotted key, `policy`, or the key of a reward source."""
    run_value: Any
    """Value in the run."""
    dry_run_value: Any
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
    expected = plan.check_prerequisites(absent_inputs(plan.config))
    # The run itself is checked first, with its own models and layouts.
    run_config, notes = with_present_data(plan.config, expected)
    policy = check(run_config, expected)
    rewards = {source.key: shape for source, shape in reward_shapes(run_config, expected).items()}
    critic_path = run_config.critic.path if run_config.algorithm.has_critic else None
    critic = (
        None if critic_path is None else directory_shape(Path(critic_path), "critic.path", expected)
    )
    models = Models(policy, rewards, critic)

    sources = (
        parse_reward_sources(run_config.reward) if run_config.algorithm.generates_samples else ()
    )
    addresses = [address for source in sources if (address := get_request_url(source)) is not None]
    unreachable = [address for address in addresses if not is_reachable(address)]

    tiny_config, tiny = build_tiny_run(run_config, models, unreachable)
    notes = (*notes, *_describe_replacements(run_config, tiny_config, unreachable))
    shapes = {
        "policy": (policy, tiny.policy),
        **{key: (shape, tiny.rewards[key]) for key, shape in models.rewards.items()},
    }
    changes = [
        Change(name, _describe_shape(run_shape), _describe_shape(tiny_shape))
        for name, (run_shape, tiny_shape) in shapes.items()
    ]
    return DryRun(
        RunPlan(tiny_config, ()), (*changes, *_find_key_changes(plan.config, tiny_config)), notes
    )


def build_tiny_run(
    run_config: Config, models: Models, unreachable: Collection[str] = ()
) -> tuple[Config, Models]:
    """Return the configuration of the dry run and the shapes of its tiny models.

    Args:
        run_config: Configuration of the run, which has passed its checks.
        models: Shapes of the models of the run.
        unreachable: Addresses of HTTP scorers and judges that do not answer.
    """
    # The teacher gets one rank, the critic starts from the policy, and the engine has no pipeline
    # stages, before layouts are reduced.
    # The order matters: later settings depend on the layouts, lengths and batches before them.
    run_config = with_values(
        run_config,
        tiny_settings.build_critic_settings(run_config, models)
        | tiny_settings.build_teacher_settings(run_config)
        | tiny_settings.build_engine_layout(run_config),
    )
    config = with_fitting_layouts(run_config)
    config, tiny = with_tiny_models(config, run_config, models)
    config = with_values(
        config, tiny_settings.build_frozen_settings(config, run_config, tiny, models)
    )
    config = with_values(config, tiny_settings.build_local_settings(config))
    config = with_values(config, tiny_settings.build_length_settings(config))
    tiny = with_positions(
        tiny, get_max_sequence_length(config), get_max_sequence_length(run_config)
    )
    config = with_values(config, tiny_settings.build_score_settings(config, unreachable))
    config = with_values(config, tiny_settings.build_model_settings(config, tiny))
    config = with_values(config, tiny_settings.build_batch_settings(config))
    return with_values(config, tiny_settings.build_schedule_settings(config)), tiny


def _describe_replacements(
    run_config: Config, tiny_config: Config, unreachable: Collection[str]
) -> Iterator[str]:
    """Yield notes about components of the run that are replaced in the dry run."""
    if run_config.algorithm.generates_samples and run_config.engine.kind != tiny_config.engine.kind:
        yield (
            f"engine.kind={run_config.engine.kind}: requires GPUs; replaced by the"
            f" {tiny_config.engine.kind} engine"
        )
    if run_config.has_teacher:
        for source in parse_teacher_sources(run_config.teacher):
            yield f"{source.key}.path={source.path}: replaced by the tiny policy on one rank"
    for url in unreachable:
        yield (
            f"{url}: cannot be reached; the score is the fraction of digits in a response instead"
        )
    if "dry_run" in tiny_config.reward.sources:
        yield (
            "the fraction of digits in a response is added to the score, because all samples of a"
            " random model would otherwise have the same score and be dropped"
        )


def _describe_shape(shape: ModelShape) -> str:
    """Return the dimensions of a model, in words."""
    experts = ""
    if shape.experts is not None:
        experts = f", {shape.experts.count} experts of size {shape.experts.ffn_hidden_size}"
    return (
        f"{shape.num_layers} layers, hidden size {shape.hidden_size}, {shape.num_heads} heads,"
        f" {shape.num_kv_heads} key-value heads, feed-forward size"
        f" {shape.ffn_hidden_size}{experts}, vocabulary size {shape.vocab_size}"
    )


def _find_key_changes(run_config: Config, tiny_config: Config) -> Iterator[Change]:
    """Yield the differences of the keys that the run or the dry run reads."""
    run_config = with_unread_defaults(run_config)
    tiny_config = with_unread_defaults(tiny_config)
    for name in get_schema_keys():
        run_value = get_value(run_config, name)
        dry_run_value = get_value(tiny_config, name)
        if run_value != dry_run_value and name not in _OMITTED_KEYS:
            yield Change(name, run_value, dry_run_value)


def with_present_data(config: Config, expected: ExpectedInputs) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration with generated records in place of missing data, and notes.

    Each note is a line about data that was replaced.
    """
    notes: list[str] = []
    for values, note in (
        *_replace_records(config, expected),
        *_replace_evaluation_records(config, expected),
    ):
        config = with_values(config, values)
        notes.append(note)
    return config, tuple(notes)


def _is_absent(path: Path | str, expected: ExpectedInputs) -> bool:
    """Return whether the records of a path are not on this machine; functions never are absent."""
    return is_expected(path, expected) or not (
        str(path).startswith(FUNCTION) or Path(path).exists()
    )


def _format_stand_in_path(name: str) -> str:
    """Return the value of `data.path` that selects a function of `stand_in_records`."""
    return f"{FUNCTION}aligner.config.dry_run.stand_in_records:{name}"


def _replace_records(
    config: Config, expected: ExpectedInputs
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield replacements of missing training records: new values of keys, and a note."""
    try:
        sources = parse_data_sources(config.data)
    except ConfigError:
        return  # the checks report the problem
    absent_sources = [source for source in sources if _is_absent(source.path, expected)]
    if absent_sources:
        # All sources are replaced, because data.prompt_after and data.prompt_before would not fit
        # a mixture of the run's own records and the generated ones.
        algorithm = config.algorithm
        if algorithm.has_labels:
            path = _format_stand_in_path("labeled_answers")
        elif algorithm.has_demonstrations:
            path = _format_stand_in_path("demonstrations")
        else:
            path = _format_stand_in_path(_STAND_INS[algorithm.trainer])
        values: dict[str, Any] = {
            "data.fields": {},
            "data.format": AUTO_LAYOUT,
            "data.prompt_after": None,
            "data.prompt_before": None,
            **_NO_DIFFICULTY_SELECTION,
        }
        if config.data.path is not None:
            values["data.path"] = path
        for source in sources if config.data.path is None else ():
            values[source.key] = {"path": path, "weight": source.weight}
        if config.algorithm.generates_samples:  # the generated records belong to no task of the run
            values["reward.sources"] = without_task_weights(config.reward)
        absent_paths = ", ".join(source.setting_text for source in absent_sources)
        note = (
            f"{absent_paths}: not found on this machine; all data is replaced by additions of"
            " two numbers"
        )
        yield values, note
    elif (samples := config.data.pass_rate_samples) is not None and _is_absent(samples, expected):
        yield (
            dict(_NO_DIFFICULTY_SELECTION),
            f"data.pass_rate_samples={samples}: not found on this machine; data.pass_rate and"
            " data.sort_by are ignored",
        )
    normalization = config.data.normalization
    if normalization is not None and _is_absent(normalization, expected):
        yield (
            {"data.normalization": None},
            f"data.normalization={normalization}: not found on this machine; ignored",
        )


def _replace_evaluation_records(
    config: Config, expected: ExpectedInputs
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield replacements of missing evaluation records: new values of keys, and a note."""
    for suite in parse_evaluation_suites(config) if config.algorithm.trainer == "online" else ():
        path = suite.settings.path
        if path is not None and _is_absent(path, expected):
            values: dict[str, Any] = {
                f"{suite.key}.path": _format_stand_in_path("prompts"),
                f"{suite.key}.fields": {},
            }
            # The affixes of prompts belong to the run's own records.
            values |= {"data.prompt_after": None, "data.prompt_before": None}
            note = (
                f"{suite.key}.path={path}: not found on this machine; replaced by additions of"
                " two numbers"
            )
            yield values, note


def build_changes_table(dry_run: DryRun) -> Table:
    """Return a table of the differences between the run and the dry run."""
    table = Table(
        title=f"dry run of {dry_run.plan.config.run.experiment}: changed values",
        title_justify="left",
    )
    table.add_column("key", no_wrap=True)
    for column in ("run", "dry run"):
        table.add_column(column, overflow="fold")
    for change in dry_run.changes:
        table.add_row(
            change.key, _format_value(change.run_value), _format_value(change.dry_run_value)
        )
    return table


def _format_value(value: Any) -> str:
    """Return a value as text for the table, shortened if it is long."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = f"{value:g}" if isinstance(value, float) else str(value)
    # A line break or a control character would break the row of the table.
    text = text if text.isprintable() else repr(value)
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[: _MAX_VALUE_LENGTH - 1]}…"
