"""The commands of stored models, those of a checkpoint or a Hugging Face directory: sample, score,
convert."""

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from aligner.agents.generate import Progress as Generated
from aligner.agents.generate import generate, plan_job
from aligner.config.compose import compose_config
from aligner.data.export import export, find_source, parse_size
from aligner.data.prompts import read_prompts
from aligner.data.records import Record
from aligner.errors import ConfigError
from aligner.extras import lacking
from aligner.launcher.processes import end_with_launcher
from aligner.observability.console import metrics_table
from aligner.rewards.scorers import resolve_scorer
from aligner.rewards.sources import TextSource
from aligner.schema import EngineConfig
from aligner.schema.environment import EnvironmentConfig
from aligner.schema.reward_sources import JudgeSource, evaluation_judge

_PLAIN = "tiny_ppo"
"""An experiment without an environment, which one is added to."""


def generate_samples(parsed: argparse.Namespace) -> None:
    """Draw responses into a file, and print where it is."""
    environment = _environment(parsed)
    prompts = read_prompts(
        parsed.prompts, "--prompts ", parsed.prompts_format, messages=environment is not None
    )
    job = plan_job(
        find_source(parsed.source), prompts, environment=environment, **_sampling(parsed)
    )
    asked = {"min_score": parsed.min_score, "as_messages": parsed.as_messages}
    with _shown_progress(len(job.requests)) as show:
        done = generate(
            job, _engine(parsed), parsed.output, overwrite=parsed.overwrite, progress=show, **asked
        )
    print(
        f"{done.samples} samples, {done.tokens} tokens at {done.tokens_per_s:.0f} tokens/s",
        file=sys.stderr,
    )
    if scores := [score for score in done.rewards if not math.isnan(score)]:
        print(
            f"mean score {sum(scores) / len(scores):.4g}; episodes that failed:"
            f" {len(done.rewards) - len(scores)}",
            file=sys.stderr,
        )
    print(parsed.output)


def evaluate_samples(parsed: argparse.Namespace) -> None:
    """Score responses, and print what they come to."""
    # the other commands need no megatron-core
    from aligner.training.stored_evaluation import evaluate, plan_evaluation

    parsed.greedy = parsed.greedy or (parsed.samples == 1 and parsed.temperature is None)
    parsed.temperature = 1.0 if parsed.temperature is None else parsed.temperature
    scorer = TextSource(parsed.function, resolve_scorer(parsed.function, "--function"))
    prompts, sampling, initial = _prompts(parsed), _sampling(parsed), None
    answers = plan_job(find_source(parsed.source), prompts, **sampling)
    if parsed.reference is not None:
        reference = find_source(parsed.reference, "--reference")
        initial = plan_job(reference, prompts, **sampling | {"samples": 1, "greedy": True})
    job = plan_evaluation(answers, initial, scorer, parsed.pass_threshold, _judge(parsed))
    with _shown_progress(len(answers.requests)) as show:
        metrics = evaluate(
            job, _engine(parsed), parsed.output, overwrite=parsed.overwrite, progress=show
        )
    if parsed.json:
        print(json.dumps({"prompts": len(answers.prompts), "samples": answers.samples, **metrics}))
    else:
        Console().print(
            metrics_table(
                metrics, f"{len(answers.prompts)} prompts, {len(answers.requests)} responses"
            )
        )


def serve_model(parsed: argparse.Namespace) -> None:
    """Serve a model, and print where, until interrupted."""
    if lack := lacking("agents"):
        raise ConfigError(f"aligner serve-model: {lack}")
    from aligner.agents.model_endpoint import ModelEndpoint  # what the agents extra brings

    endpoint = ModelEndpoint(find_source(parsed.source), _engine(parsed), parsed.host, parsed.port)
    endpoint.start()
    if endpoint.notice is not None:
        print(f"aligner: note: {endpoint.notice}", file=sys.stderr)
    print(f"{endpoint.address}/v1", flush=True)
    try:
        with contextlib.suppress(KeyboardInterrupt):  # which is how it ends
            endpoint.work()
    finally:
        endpoint.close()


def _environment(parsed: argparse.Namespace) -> EnvironmentConfig | None:
    """What episodes are drawn in. Raises ConfigError for anything else among the overrides, and
    where none is chosen."""
    keys = [text.lstrip("+").partition("=")[0] for text in parsed.overrides]
    if wrong := [key for key in keys if key != "experiment" and not key.startswith("environment.")]:
        raise ConfigError(
            f"{wrong[0]}: is not supported by `aligner generate`; allowed: environment.KEY=VALUE,"
            " and experiment=NAME to use the experiment's environment"
        )
    chosen = None
    if keys:
        base = [] if "experiment" in keys else [f"experiment={_PLAIN}"]
        chosen = compose_config([*base, *parsed.overrides]).environment
    if (chosen is None or chosen.target is None) and (
        keys or parsed.min_score is not None or parsed.as_messages
    ):
        raise ConfigError(
            "--min-score, --as-messages and environment.KEY require an environment; set"
            " environment.target=module:Class"
        )
    return chosen


def _judge(parsed: argparse.Namespace) -> JudgeSource | None:
    """What compares responses with references. Raises ConfigError for anything else among the
    overrides."""
    keys = [text.lstrip("+").partition("=")[0] for text in parsed.overrides]
    if wrong := [key for key in keys if not key.startswith("evaluation.judge.")]:
        raise ConfigError(
            f"{wrong[0]}: is not supported by `aligner evaluate`; allowed:"
            " evaluation.judge.judge_url=URL and the other judge_… keys"
        )
    # which is how Hydra takes an entry of a mapping
    added = [f"+{text.lstrip('+')}" for text in parsed.overrides]
    return (
        evaluation_judge(
            compose_config([f"experiment={_PLAIN}", "evaluation.every=1", *added]).evaluation
        )
        if keys
        else None
    )


def _prompts(parsed: argparse.Namespace) -> list[Record]:
    return read_prompts(parsed.prompts, "--prompts ", parsed.prompts_format)


def _sampling(parsed: argparse.Namespace) -> dict[str, Any]:
    drawing = ("temperature", "top_k", "top_p", "min_p", "greedy")
    names = ("max_new_tokens", "min_new_tokens", *drawing, "stop_at_eos", "seed", "samples")
    return {name: getattr(parsed, name) for name in names}


def _engine(parsed: argparse.Namespace) -> EngineConfig:
    chosen = {name: getattr(parsed, name) for name in ("precision", "batch_size", "kv_cache_mib")}
    return EngineConfig(kind=getattr(parsed, "engine", "embedded"), update="in_place", **chosen)


def _progress(count: MofNCompleteColumn | DownloadColumn) -> Progress:
    """A bar on a terminal while something goes on, with `count` for how far it is."""
    console, columns = (
        Console(stderr=True),
        (
            TextColumn("{task.description}"),
            BarColumn(),
            count,
            TimeRemainingColumn(),
        ),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def _shown_progress(samples: int) -> Iterator[Callable[[Generated], None]]:
    """Shows how far a job of so many samples is."""
    with _progress(MofNCompleteColumn()) as progress:
        task = progress.add_task("loading the model", total=samples)

        def show(now: Generated) -> None:
            progress.update(
                task,
                completed=now.samples,
                description=f"generating, {now.tokens_per_s:.0f} tokens/s",
            )

        yield show


def convert(parsed: argparse.Namespace) -> None:
    """Write a model as a Hugging Face directory, and print where it is."""
    end_with_launcher()
    max_shard_bytes, source = parse_size(parsed.max_shard_size), find_source(parsed.source)
    with _progress(DownloadColumn()) as progress:
        task = progress.add_task("writing", total=None)
        notices = export(
            source,
            parsed.output,
            dtype=parsed.dtype,
            max_shard_bytes=max_shard_bytes,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    for notice in notices:
        print(f"aligner: note: {notice}", file=sys.stderr)
    print(parsed.output)
