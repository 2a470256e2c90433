"""The commands of stored models, those of a checkpoint or a Hugging Face directory: sample, score, convert."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aligner.cli.errors import print_error
from aligner.launch.kernel import end_with_launcher

if TYPE_CHECKING:
    from aligner.data.prompts import PromptText
    from aligner.engines.generate import Progress as Generated
    from aligner.schema import EngineConfig

_SOURCE = "a run directory (the policy of its last checkpoint), checkpoints/step_N, its policy{}, or a Hugging Face directory"


def add_generate(commands: Any) -> None:
    """Add `aligner generate` to a parser's subcommands."""
    what = "draw responses to prompts from a checkpoint's policy, or a Hugging Face directory's model, into a JSONL file"
    command = commands.add_parser("generate", help=what, description=what, allow_abbrev=False)
    add = command.add_argument
    _add_sampling(add)
    add("--output", type=Path, required=True, metavar="FILE.jsonl", help="one JSON object a sample, in the prompts' order")
    add("--temperature", type=float, default=1.0, help="sampling temperature (1)")
    command.set_defaults(run=_generate)


def add_evaluate(commands: Any) -> None:
    """Add `aligner evaluate` to a parser's subcommands."""
    what = "score a stored model's responses to prompts, and compare them with references"
    command = commands.add_parser("evaluate", help=what, description=what, allow_abbrev=False)
    add = command.add_argument
    _add_sampling(add)
    add("--function", required=True, metavar="NAME", help="scorer: a built-in one's name, or module:callable")
    add("--pass-threshold", type=float, default=1.0, metavar="SCORE", help="a response passes with this score or above (1)")
    add(
        "--reference",
        type=Path,
        metavar="SOURCE",
        help="the initial model: its perplexity on the responses, and its own ones where a prompt has no `reference`",
    )
    add("--temperature", type=float, help="sampling temperature; greedy if not given, or 1 with several samples a prompt")
    add("--output", type=Path, metavar="FILE.jsonl", help="one JSON object a sample, with its score")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    command.set_defaults(run=_evaluate)


def add_convert(commands: Any) -> None:
    """Add `aligner convert` to a parser's subcommands."""
    what = "write a checkpoint's model, or a Hugging Face directory's, as a Hugging Face directory"
    command = commands.add_parser("convert", help=what, description=what, allow_abbrev=False)
    command.add_argument("source", type=Path, metavar="SOURCE", help=_SOURCE.format(", reward_model or critic"))
    command.add_argument("output", type=Path, metavar="OUTPUT", help="a directory that does not exist yet")
    command.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights; as stored if not given")
    command.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="largest file, such as 5GB or 500MiB")
    command.set_defaults(run=_convert)


def _add_sampling(add: Callable[..., Any]) -> None:
    """What is asked of which model, and how responses are drawn."""
    add("source", type=Path, metavar="SOURCE", help=_SOURCE.format(""))
    add(
        "--prompts",
        type=Path,
        required=True,
        metavar="FILE",
        help=".jsonl with a `prompt` key a line, or .txt with a prompt a line; - reads standard input",
    )
    add(
        "--prompts-format",
        choices=("jsonl", "txt"),
        help="where the name does not say it; txt for standard input if not given",
    )
    add("--overwrite", action="store_true", help="replace the output where it exists")
    add("--samples", type=_at_least(1), default=1, metavar="K", help="responses a prompt (1)")
    add("--max-new-tokens", type=_at_least(1), default=128, metavar="N", help="longest response, in tokens (128)")
    add("--min-new-tokens", type=int, default=0, metavar="N", help="no end-of-sequence token before so many tokens (0)")
    add("--top-k", type=int, default=0, metavar="K", help="draw among the K most probable tokens; 0: among all (0)")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw among the fewest tokens whose probabilities reach P (1)")
    add("--greedy", action="store_true", help="take the most probable token instead of drawing")
    add("--stop-at-eos", action=argparse.BooleanOptionalAction, default=True, help="end at an end-of-sequence token")
    add("--seed", type=_at_least(0), default=1, help="a sample depends on it, the prompt's place and the sample's index (1)")
    add("--engine", choices=("embedded", "tensorrt_llm"), default="embedded", help="generation backend (embedded)")
    add("--precision", choices=("auto", "fp32", "bf16"), default="auto", help="auto: bf16 on GPUs, fp32 on CPUs (auto)")
    add("--batch-size", type=_at_least(1), default=64, metavar="N", help="responses under way at a time, at most (64)")
    add("--kv-cache-mib", type=_at_least(1), metavar="N", help="memory for keys and values; no limit if not given")


def _at_least(smallest: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        if not text.isdecimal() or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least {smallest}")
        return int(text)

    return whole_number


def _generate(parsed: argparse.Namespace) -> int:
    return _interruptible(lambda: _generate_samples(parsed), f"; {parsed.output} was not written")


def _evaluate(parsed: argparse.Namespace) -> int:
    left_out = "" if parsed.output is None else f"; {parsed.output} was not written"
    return _interruptible(lambda: _evaluate_samples(parsed), left_out)


def _interruptible(work: Callable[[], None], interrupted: str) -> int:
    # Threads that spin while they wait cost a factor of ten where cores are shared; it counts only before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C does, it leaves no unfinished file behind
    try:
        work()
    except KeyboardInterrupt:
        print_error(f"interrupted{interrupted}")
        return 128 + signal.SIGINT
    return 0


def _generate_samples(parsed: argparse.Namespace) -> None:
    from aligner.data.export import find_source
    from aligner.engines import generate

    job = generate.plan_job(find_source(parsed.source), _prompts(parsed), **_sampling(parsed))
    with _shown_progress(len(job.requests)) as show:
        done = generate.generate(job, _engine(parsed), parsed.output, overwrite=parsed.overwrite, progress=show)
    print(f"{done.samples} samples, {done.tokens} tokens at {done.tokens_per_s:.0f} tokens/s", file=sys.stderr)
    print(parsed.output)


def _evaluate_samples(parsed: argparse.Namespace) -> None:
    from rich.console import Console

    from aligner.data.export import find_source
    from aligner.engines.generate import plan_job
    from aligner.observability.summary import metrics_table
    from aligner.rewards.scorers import resolve_scorer
    from aligner.rewards.sources import TextSource
    from aligner.training.stored_evaluation import evaluate, plan_evaluation

    parsed.greedy = parsed.greedy or (parsed.samples == 1 and parsed.temperature is None)
    parsed.temperature = 1.0 if parsed.temperature is None else parsed.temperature
    scorer = TextSource(parsed.function, resolve_scorer(parsed.function, "--function"))
    prompts, sampling, initial = _prompts(parsed), _sampling(parsed), None
    answers = plan_job(find_source(parsed.source), prompts, **sampling)
    if parsed.reference is not None:
        reference = find_source(parsed.reference, "--reference")
        initial = plan_job(reference, prompts, **sampling | {"samples": 1, "greedy": True})
    job = plan_evaluation(answers, initial, scorer, parsed.pass_threshold)
    with _shown_progress(len(answers.requests)) as show:
        metrics = evaluate(job, _engine(parsed), parsed.output, overwrite=parsed.overwrite, progress=show)
    if parsed.json:
        print(json.dumps({"prompts": len(answers.prompts), "samples": answers.samples, **metrics}))
    else:
        Console().print(metrics_table(metrics, f"{len(answers.prompts)} prompts, {len(answers.requests)} responses"))


def _prompts(parsed: argparse.Namespace) -> list[PromptText]:
    from aligner.data.prompts import read_prompts

    return read_prompts(parsed.prompts, "--prompts ", parsed.prompts_format)


def _sampling(parsed: argparse.Namespace) -> dict[str, Any]:
    names = ("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "greedy", "stop_at_eos", "seed", "samples")
    return {name: getattr(parsed, name) for name in names}


def _engine(parsed: argparse.Namespace) -> EngineConfig:
    from aligner.schema import EngineConfig

    chosen = {name: getattr(parsed, name) for name in ("precision", "batch_size", "kv_cache_mib")}
    return EngineConfig(kind=parsed.engine, update="in_place", **chosen)


@contextmanager
def _shown_progress(samples: int) -> Iterator[Callable[[Generated], None]]:
    """Shows on a terminal how far a job of so many samples is."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading the model", total=samples)

        def show(now: Generated) -> None:
            progress.update(task, completed=now.samples, description=f"generating, {now.tokens_per_s:.0f} tokens/s")

        yield show


def _convert(parsed: argparse.Namespace) -> None:
    end_with_launcher()
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from aligner.data.export import export, find_source, parse_size

    max_shard_bytes, source = parse_size(parsed.max_shard_size), find_source(parsed.source)
    console = Console(stderr=True)
    columns = (TextColumn("writing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
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
