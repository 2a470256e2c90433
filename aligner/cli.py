"""The `aligner` command. Nothing heavy is imported before it is known to be needed."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from aligner.errors import RESUMABLE, AlignerError, ConfigError
from aligner.files import full_disk
from aligner.launch.kernel import end_with_launcher
from aligner.launch.status import add_status
from aligner.launch.task import adopt_task
from aligner.observability.logs import REPORTED, configure_logs, log_failure
from aligner.planner.command import add_plan

if TYPE_CHECKING:
    from aligner.config.model_source import Coming
    from aligner.config.prerequisites import RunPlan
    from aligner.config.schema import Config, Engine
    from aligner.data.prompts import PromptText
    from aligner.data.tokenizer import Tokenizer
    from aligner.engines.generate import Progress as Generated

_SOURCE = "a run directory (the policy of its last checkpoint), checkpoints/step_N, its policy{}, or a Hugging Face directory"


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    adopt_task()
    parser = _parser()
    parsed, rest = parser.parse_known_args(arguments)
    # argparse gives up on positionals that follow an option.
    if flags := [text for text in rest if text.startswith("-")]:
        parser.error(f"unknown option {flags[0]}")
    if rest and not hasattr(parsed, "overrides"):
        parser.error(f"unexpected argument {rest[0]}")
    if rest:
        parsed.overrides += rest
    code = 0
    try:
        code = parsed.run(parsed) or 0
    except AlignerError as error:
        if not log_failure(error, str(error)):
            _print_error(str(error))
        code = error.exit_code
    except Exception as error:
        code, told = 1, full_disk(error)
        if not log_failure(error, told):
            if told is None:
                traceback.print_exc()
            else:
                _print_error(told)
    if code and "RANK" in os.environ:
        # A failed rank must be seen to fail: interpreter shutdown can wait forever for a peer or a server's threads.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # the log's disk may be full
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="aligner", description="A Megatron-native alignment pipeline (RLHF and RLVR).")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str, run: Callable[[argparse.Namespace], int | None], help: str, *, rank: bool = False
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        command.add_argument("overrides", nargs="*", metavar="key=value", help="experiment=NAME, and keys that differ from it")
        command.add_argument("--config-dir", type=Path, metavar="DIR", help="your own conf groups, such as DIR/experiment/")
        if rank:
            command.add_argument("--config", type=Path, metavar="FILE", help="a run's config.yaml, instead of overrides")
        command.set_defaults(run=run, config=None)
        return command

    launch = add("launch", _launch, "start every role of a run and wait for its end; with cluster=slurm queue it as a job")
    launch.add_argument("--dry-run", action="store_true", help="print the job's script and submit nothing (cluster=slurm)")
    add("validate", _validate, "check a configuration and print the placement of its roles; start nothing")
    add("train", _train, "one trainer rank; the launcher calls it", rank=True)
    add(
        "serve",
        _serve,
        "one server rank, role=generator, critic, reward, or a replica such as reward.1; the launcher calls it",
        rank=True,
    )
    add(
        "prepare",
        _prepare,
        "make the model's directory; check it, the data and the scorer; the launcher calls it",
        rank=True,
    )
    _add_supervise(commands)
    _add_convert(commands)
    _add_generate(commands)
    _add_evaluate(commands)
    add_status(commands)
    _add_report(commands)
    add_plan(commands)
    return parser


def _add_supervise(commands: Any) -> None:
    what = "run a run directory's configuration inside its Slurm job; the job's script calls it"
    command = commands.add_parser("supervise", help=what, description=what, allow_abbrev=False)
    command.add_argument("run_directory", type=Path, metavar="RUN", help="a run directory, as `aligner launch` prints it")
    command.set_defaults(run=_supervise)


def _add_convert(commands: Any) -> None:
    what = "write a checkpoint's model, or a Hugging Face directory's, as a Hugging Face directory"
    command = commands.add_parser("convert", help=what, description=what, allow_abbrev=False)
    command.add_argument("source", type=Path, metavar="SOURCE", help=_SOURCE.format(", reward_model or critic"))
    command.add_argument("output", type=Path, metavar="OUTPUT", help="a directory that does not exist yet")
    command.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights; as stored if not given")
    command.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="largest file, such as 5GB or 500MiB")
    command.set_defaults(run=_convert)


def _add_generate(commands: Any) -> None:
    what = "draw responses to prompts from a checkpoint's policy, or a Hugging Face directory's model, into a JSONL file"
    command = commands.add_parser("generate", help=what, description=what, allow_abbrev=False)
    add = command.add_argument
    _add_sampling(add)
    add("--output", type=Path, required=True, metavar="FILE.jsonl", help="one JSON object a sample, in the prompts' order")
    add("--temperature", type=float, default=1.0, help="sampling temperature (1)")
    command.set_defaults(run=_generate)


def _add_evaluate(commands: Any) -> None:
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


def _add_report(commands: Any) -> None:
    what = "draw a run's metrics, timeline and samples, finished or not, as one HTML page that opens without a network"
    command = commands.add_parser("report", help=what, description=what, allow_abbrev=False)
    command.add_argument("run_directory", type=Path, metavar="RUN", help="a run directory, as `aligner launch` prints it")
    command.add_argument("--output", type=Path, metavar="FILE.html", help="RUN/report.html if not given")
    command.set_defaults(run=_report)


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


def _run_plan(parsed: argparse.Namespace) -> RunPlan:
    from aligner.config.compose import compose_config
    from aligner.config.prerequisites import plan_run

    return plan_run(compose_config(parsed.overrides, parsed.config_dir), parsed.config_dir)


def _config(parsed: argparse.Namespace) -> Config:
    """A configuration for one rank, which runs nothing first."""
    from aligner.config.compose import load_config

    if parsed.config is None:
        plan = _run_plan(parsed)
        if plan.config.dry_run.scale != "none":
            raise ConfigError(f"dry_run.scale={plan.config.dry_run.scale}: for `aligner launch` and `aligner validate` alone")
        if missing := ", ".join(first.name for first in plan.missing):
            raise ConfigError(
                f"{missing}: an experiment whose result is needed has not run yet; `aligner launch` runs it first"
            )
        return plan.config
    if parsed.overrides or parsed.config_dir:
        raise ConfigError("--config FILE is a whole configuration; give either it, or overrides")
    return load_config(parsed.config)


def _launch(parsed: argparse.Namespace) -> int:
    plan = _run_plan(parsed)
    if plan.config.dry_run.scale != "none":
        if parsed.dry_run:
            raise ConfigError("--dry-run prints a Slurm job's script, dry_run.scale=tiny runs here; give one of both")
        from aligner.launch.dry_run import launch_dry_run

        return launch_dry_run(plan)
    if plan.config.cluster.kind == "slurm":
        return _submit(plan, is_dry=parsed.dry_run)
    if parsed.dry_run:
        raise ConfigError("--dry-run prints a Slurm job's script; give cluster=slurm, or see `aligner validate`")
    from aligner.launch.local import launch

    return launch(plan)


def _submit(plan: RunPlan, *, is_dry: bool) -> int:
    from aligner.launch.slurm.submit import checked_script, submit

    if is_dry:
        print(checked_script(plan, _described(plan)), end="")
    else:
        submit(plan)
    return 0


def _supervise(parsed: argparse.Namespace) -> int:
    from aligner.launch.slurm.job import supervise

    return supervise(parsed.run_directory)


def _validate(parsed: argparse.Namespace) -> None:
    plan = _run_plan(parsed)
    if plan.config.dry_run.scale != "none":
        from aligner.launch.dry_run import validate_dry_run

        validate_dry_run(plan)
        return
    from rich.console import Console

    from aligner.config.memory import memory_needs, memory_table
    from aligner.config.placement import describe_model, placement_table

    results, described = plan.results(), _described(plan)
    shape = plan.check(described)
    for first in plan.prerequisites:
        done = f"done, {first.result}" if first.is_complete else f"to be run first, in {first.entry}"
        print(f"experiment {first.name}: {first.gives}; {done}")
    console = Console()
    console.print(placement_table(plan.config))
    console.print(memory_table(plan.config, memory_needs(plan.config, shape, {**described, **results})))
    print(describe_model(plan.config, shape))


def _described(plan: RunPlan) -> Coming:
    """The shapes of models that are not there yet, from the configuration; a person is told of each."""
    from aligner.config.model_source import described_models

    results = plan.results()
    described = {path: shape for path, shape in described_models(plan.config).items() if path not in results}
    for path in described:
        print(f"aligner: note: {path} is not there yet: its shape is taken from the configuration", file=sys.stderr)
    return described


def _train(parsed: argparse.Namespace) -> int:
    end_with_launcher()
    config = _config(parsed)
    configure_logs(config.logging.format, "trainer")
    from aligner.algorithms.trainer_setup import train

    return 0 if train(config) else RESUMABLE


def _serve(parsed: argparse.Namespace) -> None:
    end_with_launcher()
    roles = [text.partition("=")[2] for text in parsed.overrides if text.startswith("role=")]
    parsed.overrides = [text for text in parsed.overrides if not text.startswith("role=")]
    config = _config(parsed)
    from aligner.config.placement import server_ranks

    if len(roles) != 1 or roles[0] not in server_ranks(config):
        raise ConfigError(f"role={','.join(roles)}: give one role; allowed: {', '.join(server_ranks(config))}")
    configure_logs(config.logging.format, roles[0])
    if roles[0] == "generator":
        from aligner.servers.generator import serve_generator

        serve_generator(config)
    elif roles[0] == "critic":
        from aligner.servers.critic import serve_critic

        serve_critic(config)
    else:
        from aligner.servers.reward import serve_reward

        serve_reward(config, roles[0])


def _prepare(parsed: argparse.Namespace) -> None:
    end_with_launcher()
    config = _config(parsed)
    configure_logs(config.logging.format, "prepare")
    from aligner.config.reward_sources import FunctionSource, reward_sources
    from aligner.data.model_directory import prepare_model
    from aligner.data.tokenizer import Tokenizer
    from aligner.rewards.scorers import resolve_scorer

    directory = prepare_model(config)
    for notice in _check_data(config, Tokenizer(directory)):
        print(f"aligner: note: {notice}", file=sys.stderr)
    for source in reward_sources(config.reward):
        if isinstance(source, FunctionSource):
            resolve_scorer(source.function, f"{source.key}.function")
    if config.evaluation.function is not None:
        resolve_scorer(config.evaluation.function, "evaluation.function")


def _check_data(config: Config, tokenizer: Tokenizer) -> Sequence[str]:
    """Read and tokenize all that the run learns from and is evaluated on; returns what a person should know about it."""
    from aligner.data.prompts import open_evaluation_prompts, open_prompts
    from aligner.data.run_data import open_run_data

    if config.algorithm.trainer == "online" and config.evaluation.every:
        open_evaluation_prompts(config.evaluation, tokenizer, config.data.max_prompt_tokens)
    if config.algorithm.generates:
        tokenizer.single_token(config.rollout.truncate_token, "rollout.truncate_token")
        return open_prompts(config.data, tokenizer, config.seed).notices
    return open_run_data(config, tokenizer).notices


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


def _report(parsed: argparse.Namespace) -> None:
    from aligner.observability.report import write_report

    print(write_report(parsed.run_directory, parsed.output))


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
        _print_error(f"interrupted{interrupted}")
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

    from aligner.algorithms.stored_evaluation import evaluate, plan_evaluation
    from aligner.data.export import find_source
    from aligner.engines.generate import plan_job
    from aligner.observability.summary import metrics_table
    from aligner.rewards.scorers import resolve_scorer
    from aligner.rewards.sources import TextSource

    parsed.greedy = parsed.greedy or (parsed.samples == 1 and parsed.temperature is None)
    parsed.temperature = 1.0 if parsed.temperature is None else parsed.temperature
    scorer = TextSource(parsed.function, resolve_scorer(parsed.function, "--function"))
    prompts, sampling, initial = _prompts(parsed), _sampling(parsed), None
    answers = plan_job(find_source(parsed.source), prompts, **sampling)
    if parsed.reference is not None:
        initial = plan_job(find_source(parsed.reference), prompts, **sampling | {"samples": 1, "greedy": True})
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


def _engine(parsed: argparse.Namespace) -> Engine:
    from aligner.config.schema import Engine

    chosen = {name: getattr(parsed, name) for name in ("precision", "batch_size", "kv_cache_mib")}
    return Engine(kind=parsed.engine, update="in_place", **chosen)


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


def _print_error(message: str) -> None:
    colored = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    before, after = ("\033[31m", "\033[0m") if colored else ("", "")
    with suppress(OSError):  # the log's disk may be full; the exit code says the rest
        print(f"{before}{REPORTED} {message}{after}", file=sys.stderr, flush=True)
