"""Whether a run may go on in its directory: under the configuration that it has, but for what
changes nothing it learns."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

from aligner.config.compose import load_config
from aligner.errors import ConfigError
from aligner.paths import LOCK, RECORDS, RunPaths, can_resume, run_paths
from aligner.schema import Config
from aligner.schema.keys import schema_keys, schema_sections, value_at
from aligner.schema.renamed import current_key

MAY_CHANGE: tuple[tuple[str, str], ...] = (
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
            " engine.update_timeout_s engine.verify_every engine.bucket_mib engine.tensorrt_llm.*"
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
    ("checkpoint.* logging.* evaluation.*", "checkpoints, logs and evaluation"),
)
"""Keys that a resumed run may have otherwise than it was started with, as patterns, and why."""

_OF_THE_MODEL = (
    "model.source model.package model.config.* model.initializer_std dry_run.scale dry_run.models.*"
)
"""What the run's models were made by. They are made once, so that another value would be accepted
and not be heeded."""
_SHOWN = 30


def resume_problems(config: Config) -> Iterator[str]:
    """What is in the way of a start in the run directory, or of going on there, as `run.resume`
    says."""
    paths, resume = run_paths(config), config.run.resume
    try:
        unused = is_unused(paths)
    except OSError as error:
        yield f"run.dir={paths.root}: cannot be read: {error.strerror}; set another run.dir"
        return
    if unused:
        if resume == "true":
            yield (
                f"run.resume=true: no run found in {paths.root}; set run.dir to an existing run,"
                " or leave run.resume out to start a new run"
            )
    elif not paths.config.is_file():
        not_a_run = "exists, but is not the directory of a run (no config.yaml)"
        yield f"run.dir={paths.root}: {not_a_run}; set another run.dir or run.name"
    elif resume == "false":
        how = (
            "resume it with run.resume=true"
            if can_resume(config)
            else "restart it with run.resume=auto"
        )
        yield f"run.dir={paths.root}: already exists; {how}, or set another run.dir or run.name"
    elif resume == "true" and not can_resume(config):
        what = "complete checkpoint" if config.algorithm.learns else "completed steps"
        yield (
            f"run.resume=true: no {what} in {paths.root}; set run.resume=auto to start the run"
            " from the beginning"
        )
    else:
        yield from _changes(config, load_config(paths.config))


def check_directory(config: Config) -> None:
    """For whoever has the run directory for itself by now: others could still come to it when it
    was looked into before.

    Raises ConfigError with all that `resume_problems` finds.
    """
    if problems := list(resume_problems(config)):
        raise ConfigError("\n".join(problems))


def settled(config: Config) -> Config:
    """With run.resume=true or false instead of auto, as what is in the run directory allows."""
    if config.run.resume != "auto":
        return config
    resume = "true" if can_resume(config) else "false"
    return dataclasses.replace(config, run=dataclasses.replace(config.run, resume=resume))


def dated(config: Config) -> Config:
    """With the date that the run keeps for good: what is given, else that of the run that goes on,
    else the moment's.

    A run of before there was such a key has none, and goes on without.
    """
    if config.run.date is not None:
        return config
    started = run_paths(config).config
    if config.run.resumes and started.is_file():
        date = load_config(started).run.date
    else:
        date = datetime.now().isoformat(timespec="seconds")
    return dataclasses.replace(config, run=dataclasses.replace(config.run, date=date))


def is_unused(paths: RunPaths) -> bool:
    """Whether there is nothing in the run directory yet, if there is one; a lock and its records do
    not count."""
    if not paths.root.is_dir():
        return not paths.root.exists()
    return all(file.name in (LOCK, RECORDS) for file in paths.root.iterdir())


def _changes(config: Config, started: Config) -> Iterator[str]:
    intended = [current_key(name) for name in config.run.changes]
    if unknown := [name for name in intended if not _is_key(name)]:
        yield (
            f"run.changes: unknown keys: {', '.join(unknown)}; docs/configuration.md lists all keys"
        )
    own, given = _flat(started), _flat(config)
    changed = [key for key in sorted(own.keys() | given.keys()) if own.get(key) != given.get(key)]
    fixed = [key for key in changed if _makes_the_model(key, started)]
    found = [
        f"  {key}: {_shown(own, key)} -> {_shown(given, key)}"
        for key in changed
        if key in fixed or not _may_change(key, own.get(key), given.get(key), intended)
    ]
    if not found:
        return
    more = [f"  and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    made = (
        [
            f"  the initial model was created with {', '.join(fixed)}: these keys cannot change,"
            " even if run.changes contains them"
        ]
        if fixed
        else []
    )
    way = (
        " list the keys that you want to change in run.changes=[KEY,...],"
        if len(found) > len(fixed)
        else ""
    )
    where = run_paths(config).config
    yield "\n".join(
        [
            (
                f"run.resume={config.run.resume}: the run was started with other values. Changed"
                f" keys ({where} -> this launch):"
            ),
            *found[:_SHOWN],
            *more,
            *made,
            f"  restore the original values,{way} or start another run",
        ]
    )


def _makes_the_model(key: str, started: Config) -> bool:
    if key == "seed":  # which draws a random model's weights
        return started.model.source == "random"
    return any(fnmatchcase(key, pattern) for pattern in _OF_THE_MODEL.split())


def _may_change(key: str, own: Any, given: Any, meant: list[str]) -> bool:
    if any(key == name or key.startswith(f"{name}.") for name in meant):
        return True
    if key == "run.date" and given is None:  # the run keeps its own
        return True
    if key == "run.steps":
        return bool(given > own)
    return any(
        fnmatchcase(key, pattern) for patterns, _ in MAY_CHANGE for pattern in patterns.split()
    )


def _is_key(name: str) -> bool:
    names = {*schema_keys(), *(section.name for section in schema_sections() if section.name)}
    mappings = [key.name for key in schema_keys().values() if key.is_mapping]
    return name in names or any(name.startswith(f"{mapping}.") for mapping in mappings)


def _flat(config: Config) -> dict[str, Any]:
    """Every value by its dotted key, those inside mappings too."""
    found: dict[str, Any] = {}

    def add(key: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for name, entry in value.items():
                add(f"{key}.{name}", entry)
        elif value != {}:
            found[key] = value

    for name in schema_keys():
        add(name, value_at(config, name))
    return found


def _shown(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return "not set"
    return json.dumps(values[key], ensure_ascii=False, default=str)
