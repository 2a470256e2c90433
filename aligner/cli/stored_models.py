"""The commands of stored models: `generate`, `evaluate`, `serve-model` and `convert`.

A stored model is a checkpoint or a Hugging Face directory.
"""

import argparse
import contextlib
import ipaddress
import json
import math
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from aligner.agents.generate import Progress as GenerationProgress
from aligner.agents.generate import generate, plan_job
from aligner.checks.environment import find_agent_key_problems
from aligner.config.compose import compose_config, load_config
from aligner.data.export import (
    Source,
    export,
    find_source,
    find_torch_dist_checkpoint,
    parse_size,
)
from aligner.data.hub_datasets import resolve_hub_path
from aligner.data.prompts import read_prompts, read_suite
from aligner.data.records import Record
from aligner.errors import ConfigError
from aligner.extras import describe_missing_modules
from aligner.launcher.processes import terminate_with_launcher
from aligner.observability.console import build_metrics_table, print_table
from aligner.paths import RunPaths
from aligner.rewards.scorers import resolve_scorer
from aligner.rewards.sources import TextSource
from aligner.schema import Config, DataConfig, EngineConfig, EvaluationConfig
from aligner.schema.data import AUTO_LAYOUT
from aligner.schema.data_sources import parse_data_sources
from aligner.schema.derived import is_greedy
from aligner.schema.environment import EnvironmentConfig
from aligner.schema.evaluation_suites import Suite, parse_evaluation_suites
from aligner.schema.keys import get_value, with_values
from aligner.schema.reward_sources import (
    FunctionSource,
    JudgeSource,
    parse_evaluation_judge,
    parse_reward_sources,
)
from aligner.schema.scoring_functions import ENVIRONMENT
from aligner.terminal import print_note, print_text

MODEL_KEY = "ALIGNER_MODEL_KEY"
"""Environment variable with the key that clients of `aligner serve-model` must send."""
# Experiment without an environment, to which the keys of the command line are added.
_BASE_EXPERIMENT = "tiny_ppo"
# Keys of `data` that the commands accept: boundaries and maximum length of the prompts.
_PROMPT_KEYS = (
    "data.prompt_after",
    "data.prompt_before",
    "data.max_prompt_tokens",
    "data.long_prompts",
)
_NO_LIMIT = 2**30
# Name of --suite for the prompts of the section `evaluation` itself.
_UNNAMED_SUITE = "evaluation"
# Options that select or describe prompts, which --suite replaces.
_PROMPT_OPTIONS = ("prompts", "prompts_format", "fields", "format")
# Defaults of the options without a suite. The parser leaves None for an option that is not set, so
# that the settings of a suite can replace its default.
_DEFAULTS: Mapping[str, Any] = {
    "template": "auto",
    "samples": 1,
    "max_new_tokens": 128,
    "min_new_tokens": 0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "stop_at_eos": True,
    "stop": (),
    "seed": 1,
}


@dataclass(frozen=True)
class _OverrideKind:
    """Keys that a command accepts, and their description for error messages."""

    prefixes: tuple[str, ...]
    description: str


_OVERRIDE_KINDS = {
    "environment": _OverrideKind(
        ("environment.", "experiment"),
        "environment.KEY=VALUE, experiment=NAME to use the experiment's environment or agent",
    ),
    "judge": _OverrideKind(
        ("evaluation.judge.",),
        "evaluation.judge.judge_url=URL and the other judge_… keys",
    ),
}


def generate_samples(parsed: argparse.Namespace) -> None:
    """Generate responses into a file, and print the path of the file."""
    _apply_generation_defaults(parsed)
    (environment_overrides,) = _select_overrides(parsed, "generate", "environment")
    environment = _parse_environment(environment_overrides)
    if environment is None and (parsed.min_score is not None or parsed.as_messages):
        raise ConfigError(
            "--min-score and --as-messages: require an environment or an agent; set"
            " environment.target=module:Class, environment.agent=module:function or"
            " environment.agent_command=[PROGRAM]"
        )
    run = _find_run(parsed.source)
    job = plan_job(
        find_source(parsed.source),
        _read_prompts(parsed, run),
        environment=environment,
        template=parsed.template,
        run=run,
        data=_find_prompt_settings(parsed, run),
        **_sampling_arguments(parsed),
    )
    _print_notices(job.notices)
    output_options = {"min_score": parsed.min_score, "as_messages": parsed.as_messages}
    with _show_progress(len(job.requests)) as show:
        totals = generate(
            job,
            _build_engine_config(parsed),
            parsed.output,
            overwrite=parsed.overwrite,
            progress=show,
            **output_options,
        )
    print_text(
        f"{totals.samples} samples, {totals.tokens} tokens at {totals.tokens_per_s:.0f} tokens/s",
        sys.stderr,
    )
    if scores := [score for score in totals.rewards if not math.isnan(score)]:
        print_text(
            f"mean score {sum(scores) / len(scores):.4g}; episodes that failed:"
            f" {len(totals.rewards) - len(scores)}",
            sys.stderr,
        )
    print(parsed.output)


def evaluate_samples(parsed: argparse.Namespace) -> None:
    """Generate and score responses, and print the metrics."""
    # This module imports megatron-core, which the other commands do not need.
    from aligner.training.stored_evaluation import evaluate, plan_evaluation

    environment_overrides, judge_overrides = _select_overrides(
        parsed, "evaluate", "environment", "judge"
    )
    judge = _parse_judge(judge_overrides)
    run = _find_run(parsed.source)
    suite = _find_suite(parsed, run)
    _apply_evaluation_defaults(parsed, run, suite)
    if run is not None and suite is not None:
        environment = _get_suite_environment(suite, environment_overrides)
        prompts = read_suite(suite, run.data, lambda record: record)
        scorer = _build_suite_scorer(parsed, run, suite)
    else:
        environment = _parse_environment(environment_overrides)
        prompts = _read_prompts(parsed, run)
        scorer = _build_scorer(parsed.function, "--function")
    data = _find_prompt_settings(parsed, run)
    sampling = {
        **_sampling_arguments(parsed),
        "environment": environment,
        "template": parsed.template,
        "run": run,
        "data": data,
        "first_prompt_id": 0 if suite is None else suite.first_prompt_id,
    }
    initial = None
    with contextlib.ExitStack() as stack:
        # Errors about the environment of a suite must name the keys of the suite.
        if suite is not None:
            stack.enter_context(suite.renaming_environment_keys())
        answers = plan_job(find_source(parsed.source), prompts, **sampling)
        _print_notices(answers.notices)
        if parsed.reference is not None:
            reference = find_source(parsed.reference, "--reference")
            used_prompts = [prompts[position] for position in answers.positions]
            if data is not None and data.long_prompts == "drop":
                # Both models must answer the same prompts.
                sampling["data"] = replace(data, long_prompts="error")
            initial = plan_job(reference, used_prompts, **sampling | {"samples": 1, "greedy": True})
        job = plan_evaluation(answers, initial, scorer, parsed.pass_threshold, judge)
        with _show_progress(len(answers.requests)) as show:
            metrics = evaluate(
                job,
                _build_engine_config(parsed, None if suite is None else run),
                parsed.output,
                overwrite=parsed.overwrite,
                progress=show,
            )
    if parsed.json:
        counts = {"prompts": len(answers.prompts), "samples": answers.samples_per_prompt}
        print(json.dumps({**counts, **metrics}))
    else:
        title = f"{len(answers.prompts)} prompts, {len(answers.requests)} responses"
        print_table(Console(), build_metrics_table(metrics, title))


def _find_suite(parsed: argparse.Namespace, run: Config | None) -> Suite | None:
    """Return the run's evaluation suite that the command line selects; None without --suite.

    Raises:
        ConfigError: The suite does not exist, or the command line selects no prompts or other
            prompts.
    """
    name = parsed.suite
    if name is None:
        if parsed.prompts is None:
            raise ConfigError(
                "--prompts: is required; set --prompts FILE, or --suite NAME for the prompts of an"
                " evaluation suite of the run"
            )
        return None
    for option in _PROMPT_OPTIONS:
        if getattr(parsed, option) is not None:
            raise ConfigError(
                f"--{option.replace('_', '-')}: is not supported with --suite, whose prompts are"
                " those of the run; remove one of the two options"
            )
    if run is None:
        raise ConfigError(
            f"--suite {name}: {parsed.source} is not the directory or a checkpoint of a run; set"
            " --prompts FILE"
        )
    suites = {suite.name or _UNNAMED_SUITE: suite for suite in parse_evaluation_suites(run)}
    if name not in suites:
        raise ConfigError(
            f"--suite {name}: the run has no such evaluation suite; allowed: {', '.join(suites)}"
        )
    suite = suites[name]
    if parsed.limit is not None:
        suite = replace(suite, settings=replace(suite.settings, count=parsed.limit))
    return suite


def _apply_defaults(parsed: argparse.Namespace, values: Mapping[str, Any]) -> None:
    """Set the options that the command line does not set."""
    for name, value in values.items():
        if getattr(parsed, name) is None:
            setattr(parsed, name, value)


def _apply_generation_defaults(parsed: argparse.Namespace) -> None:
    """Set the options of `aligner generate` that the command line does not set."""
    _apply_defaults(parsed, {**_DEFAULTS, "greedy": False})


def _apply_evaluation_defaults(
    parsed: argparse.Namespace, run: Config | None, suite: Suite | None
) -> None:
    """Set the options of `aligner evaluate` that the command line does not set, to those of the
    run's evaluation with --suite."""
    settings = EvaluationConfig()
    values = dict(_DEFAULTS)
    if run is not None and suite is not None:
        settings = suite.settings
        rollout = run.rollout
        values = {
            "template": settings.template,
            "samples": settings.samples,
            "max_new_tokens": rollout.max_response_tokens,
            "min_new_tokens": rollout.min_response_tokens,
            "top_k": rollout.top_k,
            "top_p": rollout.top_p,
            "min_p": rollout.min_p,
            "stop_at_eos": rollout.stop_at_eos,
            "stop": tuple(rollout.stop),
            "seed": run.seed,
        }
    _apply_defaults(parsed, values)
    # A temperature of the command line turns off greedy decoding.
    is_default_greedy = is_greedy(replace(settings, samples=parsed.samples))
    _apply_defaults(parsed, {"greedy": parsed.temperature is None and is_default_greedy})
    _apply_defaults(
        parsed, {"temperature": settings.temperature, "pass_threshold": settings.pass_threshold}
    )


def _get_suite_environment(suite: Suite, overrides: Sequence[str]) -> EnvironmentConfig | None:
    """Return the environment or agent of a suite; None for single responses.

    Raises:
        ConfigError: The command line sets another environment, or the agent of the suite cannot
            run here.
    """
    if overrides:
        raise ConfigError(
            f"{overrides[0]}: is not supported with --suite, whose environment is that of the run;"
            " set --prompts instead of --suite"
        )
    environment = suite.environment
    if problems := list(find_agent_key_problems(environment)):
        raise ConfigError(suite.rename_environment_keys("\n".join(problems)))
    return environment if environment.has_episodes else None


def _build_suite_scorer(parsed: argparse.Namespace, run: Config, suite: Suite) -> TextSource | None:
    """Return the scorer of a suite: --function, or the function of the suite or of the run's
    reward. None if only the rewards of episodes are scores.

    Raises:
        ConfigError: The run's reward, which scores the suite, is not a function.
    """
    if parsed.function is not None:
        return _build_scorer(parsed.function, "--function")
    settings = suite.settings
    if settings.function is not None:
        key = f"{suite.key}.function"
        return _build_scorer(settings.function, key, settings.function_timeout_s)
    sources = parse_reward_sources(run.reward)
    source = sources[0]
    if (
        len(sources) > 1
        or not isinstance(source, FunctionSource)
        or source.step_rewards
        or source.task_weights
        or (source.weight, source.gain, source.bias) != (1, 1, 0)
    ):
        raise ConfigError(
            "--function: is required, because the reward of the run scores this suite and is not a"
            " single function; set --function NAME"
        )
    if source.function == ENVIRONMENT:
        return None
    return _build_scorer(source.function, f"{source.key}.function", source.function_timeout_s)


def _build_scorer(name: str | None, key: str, timeout_s: float | None = None) -> TextSource | None:
    """Return a scorer from its name; None for None."""
    return None if name is None else TextSource(name, resolve_scorer(name, key, timeout_s))


def serve_model(parsed: argparse.Namespace) -> None:
    """Print the address of an OpenAI-compatible endpoint, and serve a model there until Ctrl-C.

    Clients need the key in the environment variable ALIGNER_MODEL_KEY. Without this variable, the
    command generates a key and prints it.
    """
    if lack := describe_missing_modules("agents"):
        raise ConfigError(f"aligner serve-model: {lack}")
    # these modules require the extra `agents`
    from starlette.requests import Request
    from starlette.routing import Route

    from aligner.agents.model_server import ModelServer, has_key
    from aligner.agents.protocols.requests import RequestError
    from aligner.agents.served_model import ServedModel, discard_metrics, discard_reward

    given_key = os.environ.get(MODEL_KEY)
    key = None if parsed.no_key else given_key or secrets.token_urlsafe(32)
    model = ServedModel(
        find_source(parsed.source), _build_engine_config(parsed), run=_find_run(parsed.source)
    )

    def find_model(request: Request) -> ServedModel:
        if key is not None and not has_key(request, key):
            raise RequestError(
                401,
                "the API key is missing or wrong; it is the value of the environment variable"
                f" {MODEL_KEY} of `aligner serve-model`, or the key that the command has printed",
                "invalid_api_key",
            )
        return model

    server = ModelServer(
        parsed.host,
        parsed.port,
        model.max_characters,
        "--host",
        find_model,
        other_routes=[
            Route("/v1/reward", discard_reward, methods=["POST"]),
            Route("/v1/metrics", discard_metrics, methods=["POST"]),
        ],
        allows_browsers=True,
    )
    server.start()
    if model.notice is not None:
        print_note(model.notice)
    if key is None and not _is_loopback(parsed.host):
        print_note(
            f"--no-key: everyone who can connect to {server.url} can use the model; omit --no-key"
            " to require a key"
        )
    print(f"{server.url}/v1", flush=True)
    if key is not None and not given_key:
        print(f"key: {key}", flush=True)
    try:
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends the server
            model.run_engine()
    finally:
        server.close()


def _is_loopback(host: str) -> bool:
    """Return whether only processes of this machine can connect to an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _parse_environment(overrides: Sequence[str]) -> EnvironmentConfig | None:
    """Return the environment or agent of the episodes; None for single responses.

    Args:
        overrides: Overrides of the command line: the keys of `environment`, and `experiment`.

    Raises:
        ConfigError: An override is invalid, or selects neither an environment nor an agent.
    """
    if not overrides:
        return None
    has_experiment = "experiment" in map(_get_key, overrides)
    base = [] if has_experiment else [f"experiment={_BASE_EXPERIMENT}"]
    environment = compose_config([*base, *overrides]).environment
    if problems := list(find_agent_key_problems(environment)):
        raise ConfigError("\n".join(problems))
    if not environment.has_episodes:
        raise ConfigError(
            f"{overrides[0]}: requires an environment or an agent; set"
            " environment.target=module:Class, environment.agent=module:function or"
            " environment.agent_command=[PROGRAM]"
        )
    return environment


def _parse_judge(overrides: Sequence[str]) -> JudgeSource | None:
    """Return the judge that compares responses with references; None without overrides.

    Raises:
        ConfigError: An override is invalid.
    """
    if not overrides:
        return None
    # Hydra requires a plus sign to add an entry to a mapping.
    added = [f"+{text.lstrip('+')}" for text in overrides]
    config = compose_config([f"experiment={_BASE_EXPERIMENT}", "evaluation.every=1", *added])
    return parse_evaluation_judge(config.evaluation)


def _select_overrides(
    parsed: argparse.Namespace, command: str, *allowed: str
) -> tuple[list[str], ...]:
    """Return the overrides of the command line by their kind.

    The keys of `data` are not returned; `_find_prompt_settings` uses them.

    Args:
        parsed: The command line.
        command: The command, for error messages.
        *allowed: The kinds of keys that the command accepts, of `_OVERRIDE_KINDS`.

    Returns:
        A list of overrides for each of `allowed`.

    Raises:
        ConfigError: The command does not accept a key.
    """
    selected: dict[str, list[str]] = {kind: [] for kind in allowed}
    for text in parsed.overrides:
        key = _get_key(text)
        if key in _PROMPT_KEYS:
            continue
        kinds = [
            kind for kind in allowed if any(map(key.startswith, _OVERRIDE_KINDS[kind].prefixes))
        ]
        if not kinds:
            descriptions = ", ".join(_OVERRIDE_KINDS[kind].description for kind in allowed)
            raise ConfigError(
                f"{key}: is not supported by `aligner {command}`; allowed: {descriptions}, and"
                f" {', '.join(_PROMPT_KEYS)}"
            )
        selected[kinds[0]].append(text)
    return tuple(selected.values())


def _find_run(source: Path) -> Config | None:
    """Return the configuration of the run that a source of the command line belongs to; None for
    a model without a run."""
    source = source.absolute()
    directories = [source, *source.parents]
    for directory in directories:
        paths = RunPaths(directory)
        belongs_to_run = directory == source or paths.checkpoints in directories
        if belongs_to_run and paths.config.is_file():
            return load_config(paths.config)
    return None


def _read_prompts(parsed: argparse.Namespace, run: Config | None) -> list[Record]:
    """Read the prompts of the command line.

    The fields and the layout of the run's own data are those of the run, unless --fields and
    --format set others. Bad records of the run's own training data are skipped if the run skips
    them.
    """
    path = resolve_hub_path(str(parsed.prompts), "--prompts ")
    forms = {} if run is None else _list_record_forms(run)
    form = forms.get(path.absolute(), RecordForm())
    fields = _parse_fields(parsed.fields)
    return read_prompts(
        path,
        "--prompts ",
        parsed.prompts_format,
        fields=form.fields if fields is None else fields,
        layout=parsed.format or form.layout,
        limit=parsed.limit,
        skip=form.should_skip_bad_records,
        report=print_note,
    )


def _find_prompt_settings(parsed: argparse.Namespace, run: Config | None) -> DataConfig | None:
    """Return the boundaries and the maximum length of the prompts of the command line.

    They are those of the run for its own data, unless the command line sets others. The result is
    None if neither applies.
    """
    overrides = [text for text in parsed.overrides if _get_key(text) in _PROMPT_KEYS]
    is_own = run is not None and (
        parsed.prompts is None or parsed.prompts.absolute() in _list_record_forms(run)
    )
    if not overrides and not is_own:
        return None
    base = compose_config([f"experiment={_BASE_EXPERIMENT}"])
    unlimited = with_values(base, {"data.max_prompt_tokens": _NO_LIMIT})
    settings = run if run is not None and is_own else unlimited
    given = compose_config([f"experiment={_BASE_EXPERIMENT}", *overrides])
    values = {key: get_value(given, key) for key in map(_get_key, overrides)}
    return with_values(settings, values).data


def _get_key(override: str) -> str:
    """Return the key of an override of the command line."""
    return override.lstrip("+").partition("=")[0]


@dataclass(frozen=True)
class RecordForm:
    """Fields and layout of the records of a source."""

    fields: Mapping[str, str] = field(default_factory=dict)
    """The data's field names or templates, by aligner's field names."""
    layout: str = AUTO_LAYOUT
    """Layout of the records: the value of `data.format`."""
    should_skip_bad_records: bool = False
    """Whether bad records are skipped."""


def _list_record_forms(run: Config) -> dict[Path, RecordForm]:
    """Return the form of a run's own training and evaluation records, by path."""
    forms = {
        Path(suite.settings.path).absolute(): RecordForm(
            suite.settings.fields, suite.settings.format
        )
        for suite in parse_evaluation_suites(run)
        if suite.settings.path is not None
    }
    forms |= {
        source.path.absolute(): RecordForm(source.fields, source.layout, run.data.skip_bad_records)
        for source in parse_data_sources(run.data)
        if not source.is_function
    }
    return forms


def _parse_fields(text: str | None) -> Mapping[str, str] | None:
    """Return the value of --fields; None without one.

    Raises:
        ConfigError: The value is not a mapping of names.
    """
    if text is None:
        return None
    try:
        fields = yaml.safe_load(text)
    except yaml.YAMLError:
        fields = None
    if not isinstance(fields, dict) or not all(
        isinstance(item, str) for pair in fields.items() for item in pair
    ):
        raise ConfigError(
            f"--fields {text}: must map aligner's field names to those of the data, such as"
            " '{prompt: question}'"
        )
    return fields


def _print_notices(notices: Sequence[str]) -> None:
    """Print notices on standard error."""
    for notice in notices:
        print_note(notice)


def _sampling_arguments(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling options of the command line by name."""
    distribution_options = ("temperature", "top_k", "top_p", "min_p", "greedy")
    names = (
        "max_new_tokens",
        "min_new_tokens",
        *distribution_options,
        "stop_at_eos",
        "seed",
        "samples",
    )
    return {name: getattr(parsed, name) for name in names} | {"stop": tuple(parsed.stop)}


def _build_engine_config(parsed: argparse.Namespace, run: Config | None = None) -> EngineConfig:
    """Return the configuration of an engine with the options of the command line.

    Args:
        parsed: The command line.
        run: The run whose evaluation is repeated, with its precision and its exact computation;
            None if there is none.
    """
    options = {name: getattr(parsed, name) for name in ("precision", "batch_size", "kv_cache_mib")}
    kind = getattr(parsed, "engine", "embedded")
    if run is not None and kind == "embedded":
        options["exact"] = run.engine.exact
        if parsed.precision == "auto":
            options["precision"] = run.engine.precision
    return EngineConfig(kind=kind, update="in_place", **options)


def _make_progress(count: MofNCompleteColumn | DownloadColumn) -> Progress:
    """Return a progress bar, which is visible only on a terminal, with a column for the count."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def _show_progress(samples: int) -> Iterator[Callable[[GenerationProgress], None]]:
    """Show a progress bar for the generation of `samples` samples.

    Yields:
        A function that updates the bar.
    """
    with _make_progress(MofNCompleteColumn()) as progress:
        task = progress.add_task("loading the model", total=samples)

        def show(current: GenerationProgress) -> None:
            progress.update(
                task,
                completed=current.samples,
                description=f"generating, {current.tokens_per_s:.0f} tokens/s",
            )

        yield show


def convert(parsed: argparse.Namespace) -> None:
    """Write a model as a Hugging Face directory or a torch_dist checkpoint, and print the path."""
    terminate_with_launcher()
    max_shard_bytes = parse_size(parsed.max_shard_size)
    source = _find_conversion_source(parsed.source, parsed.config)
    notices: list[str] = []
    with _make_progress(DownloadColumn()) as progress:
        task = progress.add_task("writing", total=None)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        if parsed.format == "torch_dist":
            from aligner.megatron.torch_dist import write_checkpoint

            write_checkpoint(source, parsed.output, dtype=parsed.dtype, progress=show)
        else:
            notices = export(
                source,
                parsed.output,
                dtype=parsed.dtype,
                max_shard_bytes=max_shard_bytes,
                progress=show,
            )
    for notice in notices:
        print_note(notice)
    print(parsed.output)


def _find_conversion_source(path: Path, config_directory: Path | None) -> Source:
    """Return the model at a path.

    Args:
        path: A run, a checkpoint, a Hugging Face directory, or a Megatron-LM checkpoint.
        config_directory: The argument `--config`.

    Raises:
        ConfigError: There is no model at the path, or `--config` is missing or has no effect.
    """
    checkpoint = find_torch_dist_checkpoint(path)
    if checkpoint is None:
        if config_directory is not None:
            raise ConfigError(
                f"--config {config_directory}: has no effect, because {path} is not a torch_dist"
                " checkpoint of Megatron-LM; leave it out"
            )
        return find_source(path)
    if config_directory is None:
        raise ConfigError(
            f"{path}: a torch_dist checkpoint contains no config.json and no tokenizer; add"
            " --config with the Hugging Face directory of a model of the same shape"
        )
    from aligner.megatron.torch_dist import read_checkpoint

    return read_checkpoint(checkpoint, config_directory)
