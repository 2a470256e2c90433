"""Which rank's failure is the cause, and how it is told."""

import os
import re
import shlex
import shutil
import signal
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from aligner.config.compose import AUTOMATIC
from aligner.errors import AlignerError
from aligner.launcher.exhausted_resources import count_oom_kills, exhausted_resources
from aligner.launcher.ranks import Rank
from aligner.observability.logs import REPORTED, text_lines
from aligner.paths import can_resume, early_end, run_paths
from aligner.schema import Config

TAIL_LINES = 15
_TAIL_BYTES = 64 * 1024
_SPARE_BYTES = 64 * 1024
_SEARCHED_LINES = 500
_LONGEST_ERROR = 300
_TRACEBACK = "Traceback (most recent call last):"
_CONSEQUENCES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "distbackenderror",
    "distnetworkerror",
    "diststoreerror",
    "broken pipe",
    "statuscode.unavailable",
)
_LATE = (
    "timed out waiting",
    "collective operation timeout",
    "wait timeout after",
    "waiting for clients",
)
"""Words of gloo, NCCL and torch's store for another rank that did not come."""


def log_tail(log: Path, lines: int = TAIL_LINES, start: int = 0) -> list[str]:
    """The last lines of a log, from its byte `start` on, as text whatever `logging.format` is."""
    with log.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        end = file.read().decode(errors="replace").rstrip().splitlines()
    return text_lines(end[-lines:])[-lines:]


def rank_error(message: str, rank: Rank) -> AlignerError:
    """The error of a rank: the message with the last lines of its log and its path; in short, with
    the error in that log."""
    error = _error_line(rank)
    exhausted = exhausted_by(rank)
    short = [
        *([textwrap.shorten(error, _LONGEST_ERROR, placeholder=" …")] if error else []),
        *exhausted,
    ]
    summary = ": ".join([message, *(["; ".join(short)] if short else [])])
    messages = _quoted(rank.starter_messages.splitlines()[-TAIL_LINES:])
    before = f"srun reported:\n{messages}\n" if messages else ""
    lines = _quoted(log_tail(rank.log, start=rank.log_start)) or "  (its log is empty)"
    told = (
        f"{'; '.join([message, *exhausted])}; {before}last lines of its log:\n{lines}\nlog:"
        f" {rank.log}{stacks_note(rank)}{_full_disk(rank.log)}"
    )
    return AlignerError(told, summary=summary)


def _error_line(rank: Rank) -> str | None:
    """The error that a rank has ended with, as it reported it or at the end of a traceback; else
    what started it says."""
    lines = log_tail(rank.log, _SEARCHED_LINES, rank.log_start)
    for number in reversed(range(len(lines))):
        if lines[number].startswith(REPORTED):
            return lines[number].removeprefix(REPORTED)
        if lines[number] == _TRACEBACK:
            return next(
                (line for line in lines[number + 1 :] if line and not line.startswith(" ")), None
            )
    return next(iter(rank.starter_messages.splitlines()), None)


def _quoted(lines: Sequence[str]) -> str:
    return "\n".join(f"  | {line}" for line in lines)


def _full_disk(log: Path) -> str:
    """That there is no space left for the log itself, which may so lack the reason."""
    usage = shutil.disk_usage(log.parent)
    told = (
        f"\nno space left on device for {log.parent.parent}: {usage.free} bytes of {usage.total}"
        " are free"
    )
    return told if usage.free < _SPARE_BYTES else ""


def reported_error(rank: Rank) -> str:
    """The last error that the command line reported in a log, without its prefix; the log's end
    where there is none."""
    lines = log_tail(rank.log, start=rank.log_start)
    starts = [number for number, line in enumerate(lines) if line.startswith(REPORTED)]
    return "\n".join(lines[starts[-1] :] if starts else lines).removeprefix(REPORTED).strip()


def describe_end(rank: Rank, missing: Sequence[Rank] = ()) -> str:
    """Role, rank, and its exit code or the signal's name, or why it was killed; and which ranks it
    missed."""
    code = rank.exit_code
    if rank.killed_for is not None:
        return f"{rank.role} rank {rank.rank} {rank.killed_for} and was killed"
    how = (
        f"was killed by {signal.Signals(-code).name}"
        if code is not None and code < 0
        else f"exited with code {code}"
    )
    names = " and ".join(f"{each.role} rank {each.rank}" for each in missing)
    late = (
        f": {names} did not join a collective within cluster.collective_timeout_s"
        if missing
        else ""
    )
    return f"{rank.role} rank {rank.rank} {how}{late}"


def exhausted_by(rank: Rank) -> list[str]:
    """Return a sentence for each resource of the machine that a failed rank has exhausted, as far
    as its log, the log of its Triton and the kernel report."""
    lines = log_tail(rank.log, _SEARCHED_LINES, rank.log_start)
    lines += rank.starter_messages.splitlines()
    triton = rank.log.with_name(f"{rank.role}-triton.log")
    if rank.rank == 0 and triton.is_file():
        lines += log_tail(triton)
    if not rank.is_local:
        return exhausted_resources(lines, is_local=False)
    # The launcher's own SIGKILL says nothing about memory.
    kills = 0 if rank.killed_for else count_oom_kills() - rank.oom_kills_before
    return exhausted_resources(lines, rank.exit_code, kills)


def stacks_note(rank: Rank) -> str:
    """Return where the Python stacks of a silent rank and the other ranks are; empty for a rank
    that ended otherwise."""
    if not rank.has_stacks:
        return ""
    return f" Python stacks of all ranks that responded: {rank.log.parent}/*.log"


def root_failure(failed: Sequence[Rank]) -> Rank:
    """The rank to blame: the first to fail, but not one that only complains of a lost peer while
    another has more to say."""

    def order(rank: Rank) -> tuple[bool, float, bool]:
        end = "\n".join(log_tail(rank.log, start=rank.log_start)).lower()
        reported = REPORTED in end
        consequence = not reported and any(text in end for text in _CONSEQUENCES)
        return consequence, rank.ended_at or 0.0, not reported

    return min(failed, key=order)


def missed_others(rank: Rank) -> bool:
    """Whether it has ended because another rank did not come to a collective in time, as far as its
    log says."""
    end = "\n".join(log_tail(rank.log, start=rank.log_start)).lower()
    return any(words in end for words in _LATE)


def failure_error(
    failed: Sequence[Rank], fatal: Sequence[Rank] = (), missing: Sequence[Rank] = ()
) -> AlignerError:
    """The error that ends the run. The `fatal` ranks are to blame, where some are: the run would
    have outlived the others.

    The `missing` ones were waited for in vain.
    """
    root = root_failure(fatal or failed)
    others = ", ".join(f"{rank.role} rank {rank.rank}" for rank in failed if rank is not root)
    restarts = f" after {root.restarts} restart{'s' * (root.restarts > 1)}" if root.restarts else ""
    also = f" (then {others} failed)" if others else ""
    return rank_error(f"{describe_end(root, missing)}{restarts}{also}", root)


def resume_command(config: Config, *more: str) -> str:
    """What has a run go on that is no Slurm job."""
    experiment = config.run.experiment
    launched = (
        config.run.command
        or f"aligner launch {'' if experiment == AUTOMATIC else f'experiment={experiment}'}".strip()
    )
    for text in more:  # in the place of what was given before
        launched = re.sub(rf" {re.escape(text.partition('=')[0])}=\S+", "", launched)
    return " ".join(
        [
            launched,
            *map(shlex.quote, (*more, f"run.dir={run_paths(config).root}")),
            "run.resume=auto",
        ]
    )


def next_steps(config: Config, step: int) -> list[str]:
    """A line a command, with what it does, for a run that has ended after so many steps."""
    return ["next steps:", *(f"  {command}  # {does}" for command, does in _commands(config, step))]


def _commands(config: Config, step: int) -> Iterator[tuple[str, str]]:
    run, algorithm = shlex.quote(str(run_paths(config).root)), config.algorithm
    yield f"aligner view {run}", "view metrics, timeline and samples in a browser"
    has_model = algorithm.learns and can_resume(config)
    if has_model and algorithm.trainer != "reward_model" and not config.environment.draws_episodes:
        prompts = f"--prompts {shlex.quote(_prompts(config))}"
        yield f"aligner generate {run} {prompts} --output samples.jsonl", "generate responses"
        # evaluations read a number a response
        function = None if config.reward.step_rewards else config.reward.function
        if algorithm.generates and config.reward.kind == "function" and function is not None:
            yield (
                f"aligner evaluate {run} {prompts} --function {shlex.quote(function)}",
                "score greedy responses",
            )
    if has_model:
        yield f"aligner convert {run} MODEL", "export the model as a Hugging Face directory"
    if config.cluster.kind == "local":
        if early_end(run_paths(config)) is not None:
            without = [f"{key}=null" for key in config.run.ends]
            yield (
                resume_command(config, *without, f"run.changes=[{','.join(config.run.ends)}]"),
                "continue to the last step",
            )
        elif step < config.run.steps:
            yield resume_command(config), "resume the run"
        elif has_model:
            yield (
                resume_command(config, f"run.steps={2 * config.run.steps}"),
                f"train {config.run.steps} more steps",
            )


def _prompts(config: Config) -> str:
    """The run's own prompts where they are a file as the commands read it."""
    path = config.data.path
    is_file = (
        path is not None
        and Path(path).suffix in (".jsonl", ".txt")
        and Path(path).is_file()
        and not config.data.fields
    )
    return path if path is not None and is_file else "PROMPTS.jsonl"
