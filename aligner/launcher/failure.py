"""Errors of failed ranks, and the commands that are useful after a run.

The module finds the rank that caused a failure, and builds the error message from that rank's log.
"""

import itertools
import os
import re
import shlex
import shutil
import signal
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from aligner.config.compose import AUTOMATIC
from aligner.errors import AlignerError
from aligner.launcher.exhausted_resources import count_oom_kills, exhausted_resources
from aligner.launcher.ranks import Rank
from aligner.observability.log_files import find_output_position
from aligner.observability.logs import ERROR_PREFIX, NOTE_PREFIX, extract_text_lines
from aligner.observability.user_errors import UserError, find_user_error
from aligner.paths import can_resume, get_run_paths, read_early_end
from aligner.schema import Config
from aligner.schema.data_sources import parse_data_sources

SKIPPED_PROMPTS_KEY = "rollout.max_skipped_prompts="
"""Beginning of the error of a run that skipped too many prompts."""
# Number of lines of a log that an error message quotes.
TAIL_LINES = 15
_TAIL_BYTES = 64 * 1024
# Below this free space, a full disk is reported as a possible reason for a truncated log.
_MIN_FREE_BYTES = 64 * 1024
# Number of lines at the end of a log that are searched for the cause of a failure.
_SEARCHED_LINES = 500
_MAX_ERROR_CHARACTERS = 300
_MAX_LINE_CHARACTERS = 2000
# Number of prompts in the printed commands: a run may have millions.
_SAMPLED_PROMPTS = 100
_NUMBERS = re.compile(r"\d+")
# A full disk or quota, with the file before the reason (aligner) or after it (Python).
_DISK_FULL = re.compile(
    r"(?:(?P<before>[^:\]]+): )?(?P<reason>No space left on device|Disk quota exceeded)"
    r"(?:: '(?P<after>[^']*)')?",
    re.IGNORECASE,
)
_TRACEBACK = "Traceback (most recent call last):"
# Errors of gloo, NCCL, torch's store and gRPC after another process exited, in lower case.
_LOST_PEER_ERRORS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "distbackenderror",
    "distnetworkerror",
    "diststoreerror",
    "broken pipe",
    "statuscode.unavailable",
)
# Errors of gloo, NCCL and torch's store about a rank that did not join in time, in lower case.
_COLLECTIVE_TIMEOUTS = (
    "timed out waiting",
    "collective operation timeout",
    "wait timeout after",
    "waiting for clients",
)


def read_log_tail(log: Path, lines: int = TAIL_LINES, start: int = 0) -> list[str]:
    """Return the last lines of a log as plain text, independent of `logging.format`.

    Args:
        log: Path of the log.
        lines: Maximum number of lines.
        start: Number of bytes of earlier output that is ignored, including dropped output.
    """
    with log.open("rb") as file:
        first = find_output_position(file, start)
        file.seek(max(first, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        end = file.read().decode(errors="replace").rstrip().splitlines()
    return extract_text_lines(end[-lines:])[-lines:]


def build_rank_error(message: str, rank: Rank) -> AlignerError:
    """Return an error that describes the failure of a rank.

    Args:
        message: What failed.
        rank: The failed rank.

    Returns:
        An error whose text contains the message, the exhausted resources, the messages of srun, the
        last lines of the rank's log and its path. Its `summary` contains the message and the error
        line of the log.
    """
    error_line = _find_error_line(rank)
    exhausted = find_exhausted_resources(rank)
    full_disk = _describe_full_disk(rank.log, error_line) if not exhausted else None
    causes = [*exhausted, *([full_disk] if full_disk else [])]
    details = [
        *(
            [textwrap.shorten(error_line, _MAX_ERROR_CHARACTERS, placeholder=" …")]
            if error_line
            else []
        ),
        *exhausted,
    ]
    summary = ": ".join([message, *(["; ".join(details)] if details else [])])
    srun_lines = _quote_lines(rank.starter_messages.splitlines()[-TAIL_LINES:])
    srun_text = f"srun reported:\n{srun_lines}\n" if srun_lines else ""
    log_tail = read_log_tail(rank.log, _SEARCHED_LINES, rank.log_start)
    log_lines = _quote_lines(_merge_repeated_lines(log_tail)[-TAIL_LINES:])
    text = (
        f"{'; '.join([message, *causes])}; {srun_text}last lines of its log:\n"
        f"{log_lines or '  (its log is empty)'}\nlog: {rank.log}{describe_stacks(rank)}"
        f"{_describe_kill(rank, exhausted)}"
    )
    return AlignerError(text, summary=summary)


def _find_error_line(rank: Rank) -> str | None:
    """Return the error message that a failed rank left in its log.

    The message is an error of the `aligner` command, or the last line of a traceback. If the log
    has neither, return the first message of the program that started the rank (srun), or None.
    """
    lines = []
    # After a SIGKILL, the rank's log contains only errors of its helper processes, which lost it.
    if rank.exit_code != -signal.SIGKILL:
        lines = read_log_tail(rank.log, _SEARCHED_LINES, rank.log_start)
    for number in reversed(range(len(lines))):
        if lines[number].startswith(ERROR_PREFIX):
            return lines[number].removeprefix(ERROR_PREFIX)
        if lines[number] == _TRACEBACK:
            return next(
                (line for line in lines[number + 1 :] if line and not line.startswith(" ")), None
            )
    return next(iter(rank.starter_messages.splitlines()), None)


def _merge_repeated_lines(lines: Sequence[str]) -> list[str]:
    """Return the lines of a log, in which consecutive lines that differ only in their numbers, such
    as the time, are one line with their count. The last one of them is returned."""
    merged: list[str] = []
    for _, group in itertools.groupby(lines, key=lambda line: _NUMBERS.sub("", line)):
        *earlier, last = group
        merged.append(f"{last} ({len(earlier) + 1} times)" if len(earlier) > 1 else last)
        if len(earlier) == 1:
            merged.insert(-1, earlier[0])
    return merged


def _describe_kill(rank: Rank, exhausted: Sequence[str]) -> str:
    """Return a hint for a rank that was killed by another process for an unknown reason."""
    is_unexplained = rank.exit_code == -signal.SIGKILL and rank.kill_reason is None
    if not is_unexplained or exhausted:
        return ""
    return (
        "\nSIGKILL was not sent by the launcher, but by a person, the cluster or the kernel (out of"
        " memory); see the output of dmesg"
    )


def _quote_lines(lines: Sequence[str]) -> str:
    """Return lines of a log as a quotation; of a very long line, only the beginning."""
    return "\n".join(
        f"  | {line if len(line) <= _MAX_LINE_CHARACTERS else line[:_MAX_LINE_CHARACTERS] + ' …'}"
        for line in lines
    )


def _describe_full_disk(log: Path, error_line: str | None) -> str | None:
    """Return a sentence about a full disk; None if no disk is full.

    Args:
        log: Log of the failed rank. If its disk is full, it may lack the reason of the failure.
        error_line: Error message of the rank, which may name the file that could not be written.
    """
    match = _DISK_FULL.search(error_line or "")
    if match is not None:
        file = match["before"] or match["after"]
        return ": ".join(["the disk is full", *([file.strip()] if file else []), match["reason"]])
    usage = shutil.disk_usage(log.parent)
    if usage.free >= _MIN_FREE_BYTES:
        return None
    return (
        f"the disk is full: no space left on device for {log.parent.parent}: {usage.free} bytes of"
        f" {usage.total} are free"
    )


def read_reported_error(rank: Rank) -> str:
    """Return the last error of the `aligner` command in a rank's log, without the error prefix.

    If the log has no such error, return the last lines of the log.
    """
    lines = read_log_tail(rank.log, _SEARCHED_LINES, rank.log_start)
    starts = [number for number, line in enumerate(lines) if line.startswith(ERROR_PREFIX)]
    # The traceback of a user's function may follow the first line of the error.
    error_lines = lines[starts[-1] :] if starts else lines[-TAIL_LINES:]
    return "\n".join(error_lines).removeprefix(ERROR_PREFIX).strip()


def read_notes(rank: Rank) -> list[str]:
    """Return the notes in a rank's log, without their prefix; a note may have several lines."""
    notes: list[str] = []
    is_note = False
    for line in read_log_tail(rank.log, _SEARCHED_LINES, rank.log_start):
        if line.startswith(NOTE_PREFIX):
            notes.append(line.removeprefix(NOTE_PREFIX).strip())
            is_note = True
        elif is_note and line.startswith("  "):
            notes[-1] += f"\n{line}"
        else:
            is_note = False
    return notes


def describe_exit(rank: Rank, missing: Sequence[Rank] = ()) -> str:
    """Return a text with the role, the rank, and the exit code, signal or reason of its end.

    Args:
        rank: A rank that exited, was ended by a signal, or was killed by the launcher.
        missing: Ranks that did not join a collective. The text names these ranks.
    """
    code = rank.exit_code
    if rank.kill_reason is not None:
        return f"{rank.role} rank {rank.rank} {rank.kill_reason} and was killed"
    exit_text = (
        f"was killed by {signal.Signals(-code).name}"
        if code is not None and code < 0
        else f"exited with code {code}"
    )
    names = " and ".join(f"{other.role} rank {other.rank}" for other in missing)
    timeout_text = (
        f": {names} did not join a collective within cluster.collective_timeout_s"
        if missing
        else ""
    )
    return f"{rank.role} rank {rank.rank} {exit_text}{timeout_text}"


def find_exhausted_resources(rank: Rank) -> list[str]:
    """Return a sentence for each machine resource that a failed rank has exhausted.

    The sources are the rank's log, the log of its Triton server, the messages of srun, and the
    kernel's counters.
    """
    lines = read_log_tail(rank.log, _SEARCHED_LINES, rank.log_start)
    lines += rank.starter_messages.splitlines()
    triton = rank.log.with_name(f"{rank.role}-triton.log")
    if rank.rank == 0 and triton.is_file():
        lines += read_log_tail(triton)
    if not rank.is_local:
        return exhausted_resources(lines, is_local=False)
    # A SIGKILL from the launcher is no sign of exhausted memory.
    kills = 0 if rank.kill_reason else count_oom_kills() - rank.oom_kills_before
    return exhausted_resources(lines, rank.exit_code, kills)


def describe_stacks(rank: Rank) -> str:
    """Return a text with the location of the Python stacks of all ranks.

    The text is empty if no stacks were requested, because the rank has sent its heartbeats.
    """
    if not rank.has_stacks:
        return ""
    return f" Python stacks of all ranks that responded: {rank.log.parent}/*.log"


def find_root_failure(failed: Sequence[Rank]) -> Rank:
    """Return the rank that is the likely cause of several failures.

    The cause is the rank that failed first. Ranks whose logs contain only a lost connection to a
    peer are considered last. Of two ranks that failed at the same time, the one that reported an
    error is the cause.
    """

    def sort_key(rank: Rank) -> tuple[bool, float, bool]:
        text = "\n".join(read_log_tail(rank.log, start=rank.log_start)).lower()
        is_reported = ERROR_PREFIX in text
        is_consequence = not is_reported and any(error in text for error in _LOST_PEER_ERRORS)
        return is_consequence, rank.ended_at or 0.0, not is_reported

    return min(failed, key=sort_key)


def has_collective_timeout(rank: Rank) -> bool:
    """Return whether a rank's log reports that another rank did not join a collective in time."""
    text = "\n".join(read_log_tail(rank.log, start=rank.log_start)).lower()
    return any(message in text for message in _COLLECTIVE_TIMEOUTS)


def build_failure_error(
    failed: Sequence[Rank], fatal: Sequence[Rank] = (), missing: Sequence[Rank] = ()
) -> AlignerError:
    """Return the error that ends the run.

    Args:
        failed: All ranks that failed.
        fatal: Ranks whose failure ends the run. If there are any, one of them is the cause.
        missing: Ranks that did not join a collective.
    """
    root = find_root_failure(fatal or failed)
    others = ", ".join(f"{rank.role} rank {rank.rank}" for rank in failed if rank is not root)
    restarts = f" after {root.restarts} restart{'s' * (root.restarts > 1)}" if root.restarts else ""
    also = f" (then {others} failed)" if others else ""
    return build_rank_error(f"{describe_exit(root, missing)}{restarts}{also}", root)


def add_first_cause(
    error: AlignerError,
    log: Path,
    user_errors: Sequence[UserError],
    skip_reasons: Sequence[str] = (),
) -> AlignerError:
    """Return the error that ends a run, preceded by its first cause.

    The first cause is an exception of the user's code that the error names; or, if too many prompts
    were skipped, the most frequent reason of the skipped prompts. The error is unchanged if it has
    neither.

    Args:
        error: The error that ends the run.
        log: Log of the rank that failed.
        user_errors: Exceptions of the user's code in this launch, in order.
        skip_reasons: Reasons of the prompts that were skipped since the last completed step.
    """
    reason = str(error)
    if SKIPPED_PROMPTS_KEY in error.summary and skip_reasons:
        [(reason, _)] = Counter(skip_reasons).most_common(1)
    elif SKIPPED_PROMPTS_KEY in error.summary:
        return error
    consequence = f"consequence: {error.summary}"

    user_error = find_user_error(reason, user_errors)
    if user_error is not None:
        # The terminal already shows the traceback.
        rank_log = f"\nlog: {log}" if log != user_error.log else ""
        return AlignerError(
            f"{user_error.summary}\ntraceback: {user_error.log}\n{consequence}{rank_log}",
            summary=f"{user_error.summary}; then {error.summary}",
        )
    if reason != str(error):
        return AlignerError(
            f"{reason}\n{consequence}\nlog: {log}", summary=f"{reason}; then {error.summary}"
        )
    return error


def add_resume_command(error: AlignerError, config: Config) -> AlignerError:
    """Return the error that ends a run, followed by the command that resumes the run; unchanged if
    there is nothing to resume or the run is a Slurm job."""
    if config.cluster.kind != "local" or not can_resume(config):
        return error
    command = resume_command(config)
    return AlignerError(
        f"{error}\nwhen the cause is fixed, resume the run with: {command}", summary=error.summary
    )


def resume_command(config: Config, *overrides: str) -> str:
    """Return the command that resumes a run on a local machine.

    Args:
        config: The run's configuration.
        overrides: Overrides to add, `key=value`. They replace overrides of the same keys.
    """
    experiment = config.run.experiment
    command = (
        config.run.command
        or f"aligner launch {'' if experiment == AUTOMATIC else f'experiment={experiment}'}".strip()
    )
    for override in overrides:  # replace earlier values of the same keys
        command = re.sub(rf" {re.escape(override.partition('=')[0])}=\S+", "", command)
    return " ".join(
        [
            command,
            *map(shlex.quote, (*overrides, f"run.dir={get_run_paths(config).root}")),
            "run.resume=auto",
        ]
    )


def describe_next_steps(config: Config, step: int) -> list[str]:
    """Return lines with commands that are useful after a run, each with its purpose.

    Args:
        config: The run's configuration.
        step: Last completed step.
    """
    return [
        "next steps:",
        *(f"  {command}  # {purpose}" for command, purpose in _next_commands(config, step)),
    ]


def _next_commands(config: Config, step: int) -> Iterator[tuple[str, str]]:
    """Yield each command with its purpose."""
    run = shlex.quote(str(get_run_paths(config).root))
    algorithm = config.algorithm
    yield f"aligner view {run}", "view metrics, timeline and samples in a browser"
    has_model = algorithm.trains_model and can_resume(config)
    if has_model and algorithm.trainer != "reward_model" and not config.environment.has_episodes:
        prompts = (
            f"--prompts {shlex.quote(_prompt_file(config))} --limit {_SAMPLED_PROMPTS}"
            f" --max-new-tokens {_response_limit(config)}"
        )
        # At other temperatures the responses are not those that the run trains on.
        temperature = ""
        if algorithm.generates_samples and config.rollout.temperature != 1:
            temperature = f" --temperature {config.rollout.temperature}"
        if algorithm.generates_samples:
            # With `=`, because a stop string may begin with a hyphen.
            prompts += "".join(f" --stop={shlex.quote(string)}" for string in config.rollout.stop)
        yield (
            f"aligner generate {run} {prompts}{temperature} --output samples.jsonl",
            "generate responses",
        )
        # `aligner evaluate` expects one score per response, not one per step.
        function = None if config.reward.step_rewards else config.reward.function
        if (
            algorithm.generates_samples
            and config.reward.kind == "function"
            and function is not None
        ):
            yield (
                f"aligner evaluate {run} {prompts} --function {shlex.quote(function)}",
                "score greedy responses",
            )
    if has_model:
        yield f"aligner convert {run} MODEL", "export the model as a Hugging Face directory"
    if config.cluster.kind == "local":
        if read_early_end(get_run_paths(config)) is not None:
            overrides = [f"{key}=null" for key in config.run.end_conditions]
            yield (
                resume_command(
                    config, *overrides, f"run.changes=[{','.join(config.run.end_conditions)}]"
                ),
                "continue to the last step",
            )
        elif step < config.run.steps:
            yield resume_command(config), "resume the run"
        elif has_model:
            yield (
                resume_command(config, f"run.steps={2 * config.run.steps}"),
                f"train {config.run.steps} more steps",
            )


def _prompt_file(config: Config) -> str:
    """Return the first data source of the run that other commands can read, otherwise a
    placeholder."""
    for source in parse_data_sources(config.data):
        if not source.is_function and source.path.exists():
            return str(source.path)
    return "PROMPTS.jsonl"


def _response_limit(config: Config) -> int:
    """Return the maximum number of tokens of a response in the run."""
    if config.algorithm.generates_samples:
        return config.rollout.max_response_tokens
    return config.data.max_response_tokens
