"""Checks of the run directory before a run starts or resumes.

A resumed run must keep its configuration, except for keys that do not change what the run learns
(`CHANGEABLE_KEYS`) and for keys that the user lists in `run.changes`.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

from aligner.config.compose import load_config
from aligner.errors import ConfigError
from aligner.paths import LOCK, RECORDS, RunPaths, can_resume, get_run_paths
from aligner.schema import Config
from aligner.schema.environment_text import with_references
from aligner.schema.keys import get_schema_keys, get_schema_sections, get_value
from aligner.schema.renamed import get_current_key

CHANGEABLE_KEYS: tuple[tuple[str, str], ...] = (
    ("run.steps", "may only increase; the learning-rate schedule then ends at the new last step"),
    (
        "run.stop_after run.max_restarts run.resume run.changes run.command run.chosen",
        "apply to one launch only",
    ),
    (
        "run.dir run.experiment",
        "the directory may be moved; the name of the experiment has no effect by itself",
    ),
    (
        "actor.parallel.* critic.parallel.* reward.parallel.* teacher.parallel.* engine.parallel.*",
        "checkpoints do not depend on the layout; results are equal up to rounding",
    ),
    (
        (
            "actor.micro_batch_tokens critic.micro_batch_tokens reward.micro_batch_tokens"
            " teacher.micro_batch_tokens *.logprob_chunk_tokens actor.recompute critic.recompute"
            " *.optimizer.distributed *.optimizer.offload_fraction *.optimizer.overlap_grad_reduce"
            " *.optimizer.overlap_param_gather"
        ),
        "trade memory for time; results are equal up to rounding",
    ),
    (
        "*.optimizer.max_skipped_steps rollout.max_skipped_prompts rollout.max_skipped_fraction",
        "limits at which the run fails",
    ),
    (
        "algorithm.uncorrected_staleness",
        "only permits training on stale samples without a correction",
    ),
    (
        (
            "engine.placement engine.update engine.batch_size engine.kv_cache_mib"
            " engine.cuda_graphs engine.packed_weights engine.steps_per_sync engine.sleep"
            " engine.update_timeout_s engine.verify engine.bucket_mib engine.tensorrt_llm.*"
            " engine.vllm.* engine.speculation.* rollout.micro_batches"
        ),
        "affect how samples are generated, but not the samples; with rollout.spare_prompts,"
        " however, other prompts may finish first",
    ),
    (
        (
            "*.ports.* *.replicas reward.url reward.timeout_s reward.sources.*.url"
            " reward.sources.*.timeout_s reward.function_timeout_s"
            " reward.sources.*.function_timeout_s data.function_timeout_s reward.judge_url"
            " reward.judge_timeout_s reward.sources.*.judge_url reward.sources.*.judge_timeout_s"
        ),
        "addresses and timeouts",
    ),
    (
        (
            "*.judge_tries *.judge_concurrency *.judge_requests_per_minute *.judge_key_variable"
            " *.judge_input_price *.judge_output_price *.judge_cache"
        ),
        (
            "affect how requests are sent to the judge, but not their content; judgments that are"
            " missing in another judge_cache are requested again"
        ),
    ),
    ("server.* cluster.*", "where and how the roles run"),
    ("checkpoint.* logging.* profile.* evaluation.*", "checkpoints, logs, profiles and evaluation"),
)
"""Patterns of the keys that a resumed run may change, with the reason."""

# Keys that define the weights of the initial models. A run creates these weights only once, so that
# a later change of the keys would have no effect.
_INITIAL_MODEL_KEYS = (
    "model.source model.package model.config.* model.initializer_std dry_run.scale dry_run.models.*"
)
# Maximum number of changed keys in an error message.
_MAX_LISTED_KEYS = 30


def find_resume_problems(config: Config) -> Iterator[str]:
    """Yield the reasons why the run cannot start or resume in its run directory.

    `run.resume` says whether the run must start (`false`), must resume (`true`), or resumes if it
    can (`auto`).
    """
    paths = get_run_paths(config)
    resume = config.run.resume
    try:
        is_new = is_unused(paths)
    except OSError as error:
        yield f"run.dir={paths.root}: cannot be read: {error.strerror}; set another run.dir"
        return
    if is_new:
        if resume == "true":
            yield (
                f"run.resume=true: no run found in {paths.root}; set run.dir to an existing run,"
                " or leave run.resume out to start a new run"
            )
    elif not paths.config.is_file():
        problem = "exists, but is not the directory of a run (no config.yaml)"
        yield f"run.dir={paths.root}: {problem}; set another run.dir or run.name"
    elif resume == "false":
        advice = (
            "resume it with run.resume=true"
            if can_resume(config)
            else "restart it with run.resume=auto"
        )
        yield f"run.dir={paths.root}: already exists; {advice}, or set another run.dir or run.name"
    elif resume == "true" and not can_resume(config):
        missing_part = "complete checkpoint" if config.algorithm.trains_model else "completed steps"
        yield (
            f"run.resume=true: no {missing_part} in {paths.root}; set run.resume=auto to start the"
            " run from the beginning"
        )
    else:
        yield from _find_changes(config, load_config(paths.config))


def check_directory(config: Config) -> None:
    """Check the run directory again after this process has locked it.

    Another process could still write to the directory during the first check.

    Raises:
        ConfigError: `find_resume_problems` finds a problem; the message contains all problems.
    """
    if problems := list(find_resume_problems(config)):
        raise ConfigError("\n".join(problems))


def with_decided_resume(config: Config) -> Config:
    """Return the configuration with `run.resume=auto` replaced by `true` or `false`.

    The value is `true` if the run directory contains a run that can be resumed.
    """
    if config.run.resume != "auto":
        return config
    resume = "true" if can_resume(config) else "false"
    return dataclasses.replace(config, run=dataclasses.replace(config.run, resume=resume))


def with_date(config: Config) -> Config:
    """Return the configuration with the date of the run, `run.date`.

    A date in the configuration takes precedence. Otherwise, a resumed run keeps its date, and a new
    run gets the current time. A resumed run whose `config.yaml` is older than this key has no date.
    """
    if config.run.date is not None:
        return config
    config_file = get_run_paths(config).config
    if config.run.should_resume and config_file.is_file():
        date = load_config(config_file).run.date
    else:
        date = datetime.now().isoformat(timespec="seconds")
    return dataclasses.replace(config, run=dataclasses.replace(config.run, date=date))


def is_unused(paths: RunPaths) -> bool:
    """Return whether the run directory does not exist or is empty.

    A directory that contains only the lock and its records counts as empty.
    """
    if not paths.root.is_dir():
        return not paths.root.exists()
    return all(file.name in (LOCK, RECORDS) for file in paths.root.iterdir())


def _find_changes(config: Config, started_config: Config) -> Iterator[str]:
    """Yield the problems of a resumed run whose configuration has changed.

    Args:
        config: Configuration of this launch.
        started_config: Configuration with which the run was started.
    """
    # The user may list a key under its old name.
    allowed_keys = [get_current_key(name) for name in config.run.changes]
    if unknown_keys := [name for name in allowed_keys if not _is_key(name)]:
        yield (
            f"run.changes: unknown keys: {', '.join(unknown_keys)}; docs/configuration.md lists all"
            " keys"
        )
    # Compare the union of the keys: an entry of a mapping may exist in only one configuration.
    old_values = _flatten(started_config)
    new_values = _flatten(config)
    changed_keys = [
        key
        for key in sorted(old_values.keys() | new_values.keys())
        if not _is_equal(old_values.get(key), new_values.get(key))
    ]
    fixed_keys = [key for key in changed_keys if _defines_initial_model(key, started_config)]
    change_lines = [
        f"  {key}: {_format_value(old_values, key)} -> {_format_value(new_values, key)}"
        for key in changed_keys
        if key in fixed_keys
        or not _may_change(key, old_values.get(key), new_values.get(key), allowed_keys)
    ]
    if not change_lines:
        return

    omission_note = []
    if len(change_lines) > _MAX_LISTED_KEYS:
        omission_note = [f"  and {len(change_lines) - _MAX_LISTED_KEYS} more"]
    model_note = []
    if fixed_keys:
        model_note = [
            f"  the initial model was created with {', '.join(fixed_keys)}: these keys cannot"
            " change, even if run.changes contains them"
        ]
    # run.changes helps only for keys that do not define the initial model.
    advice = (
        " list the keys that you want to change in run.changes=[KEY,...],"
        if len(change_lines) > len(fixed_keys)
        else ""
    )
    config_file = get_run_paths(config).config
    yield "\n".join(
        [
            (
                f"run.resume={config.run.resume}: the run was started with other values. Changed"
                f" keys ({config_file} -> this launch):"
            ),
            *change_lines[:_MAX_LISTED_KEYS],
            *omission_note,
            *model_note,
            f"  restore the original values,{advice} or start another run",
        ]
    )


def _is_equal(started_value: Any, new_value: Any) -> bool:
    """Return whether two values are equal, or contain the same environment variables.

    The value with which the run was started is stored only as an interpolation.
    """
    return started_value == new_value or started_value == with_references(new_value)


def _defines_initial_model(key: str, started_config: Config) -> bool:
    """Return whether a key defines the weights of the initial models."""
    if key == "seed":  # the seed of random initial weights
        return started_config.model.source == "random"
    return any(fnmatchcase(key, pattern) for pattern in _INITIAL_MODEL_KEYS.split())


def _may_change(key: str, started_value: Any, new_value: Any, listed_keys: list[str]) -> bool:
    """Return whether a resumed run may change a key from `started_value` to `new_value`.

    Args:
        key: Dotted key.
        started_value: Value with which the run was started.
        new_value: Value of this launch.
        listed_keys: Keys and sections in `run.changes`.
    """
    if any(key == name or key.startswith(f"{name}.") for name in listed_keys):
        return True
    if key == "run.date" and new_value is None:  # the run keeps its date
        return True
    if key == "run.steps":
        return bool(new_value > started_value)
    return any(
        fnmatchcase(key, pattern) for patterns, _ in CHANGEABLE_KEYS for pattern in patterns.split()
    )


def _is_key(name: str) -> bool:
    """Return whether a name is a key, a section, or an entry of a mapping key."""
    names = {
        *get_schema_keys(),
        *(section.name for section in get_schema_sections() if section.name),
    }
    mappings = [key.name for key in get_schema_keys().values() if key.is_mapping]
    return name in names or any(name.startswith(f"{mapping}.") for mapping in mappings)


def _flatten(config: Config) -> dict[str, Any]:
    """Return all values by dotted key; the entries of mappings have keys of their own."""
    values: dict[str, Any] = {}

    def add(key: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for name, entry in value.items():
                add(f"{key}.{name}", entry)
        elif value != {}:
            values[key] = value

    for name in get_schema_keys():
        add(name, get_value(config, name))
    return values


def _format_value(values: Mapping[str, Any], key: str) -> str:
    """Return the value of a key as JSON, for a message."""
    if key not in values:
        return "not set"
    return json.dumps(with_references(values[key]), ensure_ascii=False, default=str)
