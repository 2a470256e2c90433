"""The table of commands: what carries each one out, its help and its arguments."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aligner.planner.command import add_plan_arguments

_SOURCE = "a run directory (the policy of its last checkpoint), checkpoints/step_N, its policy{}, or a Hugging Face directory"
_ROLES = "role=generator, critic, reward, or a replica such as reward.1"


def load(function: str) -> Any:
    """The function that `module:function` names; its module, with all that this one needs, is imported now."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True)
class Command:
    """A command."""

    function: str
    """`module:function` that carries it out: it takes the parsed arguments, and raises what ends it early."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    help: str
    draws_samples: bool = False

    def run(self, parsed: argparse.Namespace) -> None:
        """Carry it out."""
        if self.draws_samples:
            # Threads that spin while they wait cost a factor of ten where cores are shared; this counts only before torch
            # is imported.
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C does, it leaves no unfinished file behind
        load(self.function)(parsed)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """A command line's arguments, `command` among them; what is wrong with them exits with code 2."""
    parser = argparse.ArgumentParser(prog="aligner", description="A Megatron-native alignment pipeline (RLHF and RLVR).")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.help, description=command.help, allow_abbrev=False))
    parsed, rest = parser.parse_known_args(arguments)
    # argparse gives up on positionals that follow an option.
    if flags := [text for text in rest if text.startswith("-")]:
        parser.error(f"unknown option {flags[0]}")
    if rest and not hasattr(parsed, "overrides"):
        parser.error(f"unexpected argument {rest[0]}")
    if rest:
        parsed.overrides += rest
    return parsed


def _add_overrides(command: argparse.ArgumentParser) -> None:
    command.add_argument("overrides", nargs="*", metavar="key=value", help="experiment=NAME, and keys that differ from it")
    command.add_argument("--config-dir", type=Path, metavar="DIR", help="your own conf groups, such as DIR/experiment/")


def _add_launch_arguments(command: argparse.ArgumentParser) -> None:
    _add_overrides(command)
    command.add_argument("--dry-run", action="store_true", help="print the job's script and submit nothing (cluster=slurm)")


def _add_rank_arguments(command: argparse.ArgumentParser) -> None:
    _add_overrides(command)
    command.add_argument("--config", type=Path, metavar="FILE", help="a run's config.yaml, instead of overrides")


def _add_run_directory(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_directory", type=Path, metavar="RUN", help="a run directory, as `aligner launch` prints it")


def _add_status_arguments(command: argparse.ArgumentParser) -> None:
    _add_run_directory(command)
    command.add_argument("--json", action="store_true", help="print one JSON object instead of a line")
    command.add_argument("--watch", action="store_true", help="tell again every 5 s until the run has ended")


def _add_report_arguments(command: argparse.ArgumentParser) -> None:
    _add_run_directory(command)
    command.add_argument("--output", type=Path, metavar="FILE.html", help="RUN/report.html if not given")


def _add_generate_arguments(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    _add_sampling_arguments(add)
    add("--output", type=Path, required=True, metavar="FILE.jsonl", help="one JSON object a sample, in the prompts' order")
    add("--temperature", type=float, default=1.0, help="sampling temperature (1)")


def _add_evaluate_arguments(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    _add_sampling_arguments(add)
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


def _add_sampling_arguments(add: Callable[..., Any]) -> None:
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


def _add_convert_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", type=Path, metavar="SOURCE", help=_SOURCE.format(", reward_model or critic"))
    command.add_argument("output", type=Path, metavar="OUTPUT", help="a directory that does not exist yet")
    command.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights; as stored if not given")
    command.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="largest file, such as 5GB or 500MiB")


COMMANDS = {
    "launch": Command(
        "aligner.cli.runs:launch",
        _add_launch_arguments,
        "start every role of a run and wait for its end; with cluster=slurm queue it as a job",
    ),
    "validate": Command(
        "aligner.cli.runs:validate",
        _add_overrides,
        "check a configuration and print the placement of its roles; start nothing",
    ),
    "status": Command(
        "aligner.cli.runs:status",
        _add_status_arguments,
        "tell what a run does: its step, reward, pace, time left, and the health of its roles",
    ),
    "report": Command(
        "aligner.cli.runs:report",
        _add_report_arguments,
        "draw a run's metrics, timeline and samples, finished or not, as one HTML page that opens without a network",
    ),
    "plan": Command(
        "aligner.planner.command:print_prediction",
        add_plan_arguments,
        "predict step time and utilization of the pipeline, and the best split of devices between roles",
    ),
    "generate": Command(
        "aligner.cli.stored_models:generate_samples",
        _add_generate_arguments,
        "draw responses to prompts from a checkpoint's policy, or a Hugging Face directory's model, into a JSONL file",
        draws_samples=True,
    ),
    "evaluate": Command(
        "aligner.cli.stored_models:evaluate_samples",
        _add_evaluate_arguments,
        "score a stored model's responses to prompts, and compare them with references",
        draws_samples=True,
    ),
    "convert": Command(
        "aligner.cli.stored_models:convert",
        _add_convert_arguments,
        "write a checkpoint's model, or a Hugging Face directory's, as a Hugging Face directory",
    ),
    "supervise": Command(
        "aligner.cli.runs:supervise",
        _add_run_directory,
        "run a run directory's configuration inside its Slurm job; the job's script calls it",
    ),
    "train": Command("aligner.cli.rank_processes:train", _add_rank_arguments, "one trainer rank; the launcher calls it"),
    "serve": Command(
        "aligner.cli.rank_processes:serve", _add_rank_arguments, f"one server rank, {_ROLES}; the launcher calls it"
    ),
    "prepare": Command(
        "aligner.cli.rank_processes:prepare",
        _add_rank_arguments,
        "make the model's directory; check it, the data and the scorer; the launcher calls it",
    ),
}
