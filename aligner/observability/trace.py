"""Timeline of a whole run: read the files of its processes, write `trace.json`, and sum up the time
of each role."""

import bisect
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from operator import itemgetter
from pathlib import Path
from typing import Any

from aligner.errors import AlignerError
from aligner.file_limits import parse_json
from aligner.files import write_file
from aligner.observability.timeline import TRUNCATION_MARK
from aligner.paths import RunPaths

WAIT = "wait"
"""Name of the spans in which a rank waits for other ranks; in all other spans, the rank is busy."""

NEWEST_BYTES = 16 << 20
"""Maximum size of the part of a run's timeline that is read, in bytes: a browser cannot display a
larger trace."""
# Keys of a record that are fields of `Span`; all other keys become `Span.attributes`.
_SPAN_KEYS = ("name", "start", "us", "step", "thread")
_ROLES = ("trainer", "generator", "critic", "reward", "teacher")


@dataclass(frozen=True)
class Span:
    """An activity of a thread of a rank."""

    role: str
    """Role or server group, such as reward.1."""
    rank: int
    name: str
    start: int
    """Start in microseconds since the epoch."""
    end: int
    """End in microseconds since the epoch."""
    step: int | None = None
    """Training step of the span; for a server's span, the step of the trainer when the span
    began."""
    thread: str = ""
    """Name of the thread; empty for the main thread."""
    attributes: Mapping[str, Any] | None = None
    """Further properties of the span."""


def read_spans(paths: RunPaths, newest_bytes: int = NEWEST_BYTES) -> list[Span]:
    """Return the spans of a run in the order of their start; an empty list without a timeline.

    Spans of steps that a resumed run has trained again are omitted.

    Args:
        paths: The run's paths.
        newest_bytes: Maximum number of bytes to read. If the timeline is larger, only its newest
            part is read.

    Raises:
        AlignerError: If a file is not a timeline.
    """
    try:
        return _read_spans(paths, newest_bytes)
    except (TypeError, LookupError, ValueError, AttributeError, ArithmeticError) as error:
        raise AlignerError(
            f"{paths.timeline}: not a valid timeline, because a record has wrong entries ({error});"
            " remove the directory"
        ) from error


def _read_spans(paths: RunPaths, newest_bytes: int) -> list[Span]:
    files = sorted(paths.timeline.glob("*-*.jsonl"))
    records_by_file = {file: _read_records(file, newest_bytes // len(files)) for file in files}
    discarded = _find_discarded_times(
        records_by_file.get(paths.timeline / "trainer-0.jsonl", ([], False))[0]
    )
    spans = [
        span for file, (records, _) in records_by_file.items() for span in _to_spans(file, records)
    ]
    # Truncated files begin at different times. Ignore all spans before the latest of these times;
    # otherwise, some processes would seem to be idle at the beginning.
    first_start = max(
        (
            records[0]["start"]
            for records, is_truncated in records_by_file.values()
            if is_truncated and records
        ),
        default=0,
    )
    valid_spans = [
        span
        for span in spans
        if span.start >= first_start
        and not any(begin <= span.start < end for begin, end in discarded)
    ]
    return sorted(_add_steps(valid_spans), key=lambda span: (span.start, -span.end))


def write_trace(paths: RunPaths) -> list[Span]:
    """Write `trace.json` in Chrome's trace event format, replacing an existing file.

    Roles are the processes of the trace, and ranks their threads. Times count from the first span.

    Returns:
        The spans of the trace. Without a timeline, the list is empty, and no file is written.

    Raises:
        AlignerError: If a file of the timeline is invalid.
        OSError: If the trace cannot be written.
    """
    spans = read_spans(paths)
    if not spans:
        return spans
    began = datetime.fromtimestamp(spans[0].start / 1e6, timezone.utc).isoformat()
    metadata = {"run": paths.root.name, "began": began, "clock": "CLOCK_REALTIME"}
    content = {
        "traceEvents": build_trace_events(spans),
        "displayTimeUnit": "ms",
        "otherData": metadata,
    }
    write_file(paths.trace, json.dumps(content, separators=(",", ":")) + "\n")
    return spans


def build_trace_events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return the events of a Chrome trace: metadata events with the names of roles and ranks, and a
    complete event (`ph` X) for each span.

    Args:
        spans: The spans in the order of their start.
    """
    events: list[dict[str, Any]] = []
    tracks: dict[tuple[str, int, str], tuple[int, int]] = {}
    for pid, role in enumerate(list_roles(spans), 1):
        events += _metadata_events("process", pid, None, role, pid)
        lanes = sorted({(span.rank, span.thread) for span in spans if span.role == role})
        ranks = max(rank for rank, _ in lanes) + 1
        for index, (rank, thread) in enumerate(lanes):
            # The id of a main thread is its rank. Ids of other threads follow those of all ranks;
            # the sort index displays these threads below their rank.
            tid = ranks + index if thread else rank
            tracks[role, rank, thread] = pid, tid
            events += _metadata_events("thread", pid, tid, f"rank {rank} {thread}".rstrip(), index)
    for span in spans:
        pid, tid = tracks[span.role, span.rank, span.thread]
        arguments = dict(span.attributes or {}) | ({} if span.step is None else {"step": span.step})
        times = {"ts": span.start - spans[0].start, "dur": span.end - span.start}
        events.append(
            {"name": span.name, "ph": "X", **times, "pid": pid, "tid": tid, "args": arguments}
        )
    return events


def list_roles(spans: Iterable[Span]) -> list[str]:
    """Return the roles that have spans, the trainer first."""

    def sort_key(role: str) -> tuple[int, str]:
        kind = role.partition(".")[0]
        return _ROLES.index(kind) if kind in _ROLES else len(_ROLES), role

    return sorted({span.role for span in spans}, key=sort_key)


def flatten_spans(spans: Iterable[Span]) -> list[Span]:
    """Split the nested spans of a thread so that no spans overlap: each moment belongs to the span
    that began last."""
    ordered = sorted(spans, key=lambda span: (span.start, -span.end))
    flat: list[Span] = []
    # Stack of the spans that are open at `time`; the innermost span is the last.
    open_spans: list[Span] = []
    time = 0
    last_end = max((span.end for span in ordered), default=0)
    for next_start, next_span in [*((span.start, span) for span in ordered), (last_end, None)]:
        while open_spans and open_spans[-1].end <= next_start:
            ended = open_spans.pop()
            if ended.end > time:
                flat.append(replace(ended, start=time))
                time = ended.end
        if open_spans and next_start > time:
            flat.append(replace(open_spans[-1], start=time, end=next_start))
        time = max(time, next_start)
        if next_span is not None:
            open_spans.append(next_span)
    return flat


def steps_window(spans: Iterable[Span], steps: int) -> tuple[int, int]:
    """Return the start and the end of the period of the trainer's last `steps` steps, in
    microseconds since the epoch; (0, 0) without a training step."""
    bounds = step_bounds(spans)
    last_steps = sorted(step for step in bounds if step > 0)[-steps:]
    return (bounds[last_steps[0]][0], bounds[last_steps[-1]][1]) if last_steps else (0, 0)


def step_bounds(spans: Iterable[Span]) -> dict[int, tuple[int, int]]:
    """Return the start and end of each step on the trainer's rank 0, in microseconds since the
    epoch."""
    bounds: dict[int, tuple[int, int]] = {}
    for span in spans:
        if span.role == "trainer" and span.rank == 0 and span.step is not None:
            start, end = bounds.get(span.step, (span.start, span.end))
            bounds[span.step] = min(start, span.start), max(end, span.end)
    return bounds


def compute_busy_shares(
    spans: Iterable[Span], window: tuple[int, int]
) -> dict[str, dict[str, float]]:
    """Return the fraction of a time window that each role spends in each activity except waiting.

    Args:
        spans: The spans of a run.
        window: Start and end in microseconds since the epoch.

    Returns:
        For each role, the fractions by span name, averaged over the ranks of the role. The trainer
        comes first.
    """
    begin, end = window
    in_window = [span for span in spans if span.end > begin and span.start < end]
    spans_by_thread: dict[tuple[str, int, str], list[Span]] = {}
    for span in in_window:
        spans_by_thread.setdefault((span.role, span.rank, span.thread), []).append(span)

    # Flatten twice: within each thread, so that a wait inside a span does not count as busy, and
    # then over the threads of a rank, so that parallel threads do not count the same time twice.
    busy_by_rank: dict[tuple[str, int], list[Span]] = {}
    for (role, rank, _), thread_spans in spans_by_thread.items():
        busy_by_rank.setdefault((role, rank), []).extend(
            span for span in flatten_spans(thread_spans) if span.name != WAIT
        )
    rank_counts = {
        role: sum(1 for rank_role, _ in busy_by_rank if rank_role == role)
        for role in list_roles(in_window)
    }
    shares: dict[str, dict[str, float]] = {role: {} for role in rank_counts}
    for (role, _), busy_spans in busy_by_rank.items():
        for span in flatten_spans(busy_spans):
            duration = max(0, min(span.end, end) - max(span.start, begin))
            shares[role][span.name] = (
                shares[role].get(span.name, 0.0) + duration / (end - begin) / rank_counts[role]
            )
    return shares


def _read_records(file: Path, limit: int) -> tuple[list[dict[str, Any]], bool]:
    """Return the records of the complete lines in a file's last `limit` bytes, and whether earlier
    records are missing."""
    with file.open("rb") as content:
        size = content.seek(0, os.SEEK_END)
        content.seek(max(0, size - limit))
        block = content.read(limit)
    lines = block[: block.rfind(b"\n") + 1].splitlines()
    is_truncated = size > limit or lines[:1] == [TRUNCATION_MARK]
    try:
        # The first line of a truncated file is the truncation mark, or is incomplete.
        records = [parse_json(line) for line in (lines[1:] if is_truncated else lines)]
    except ValueError as error:
        raise AlignerError(
            f"{file}: not a valid timeline, because a line is not JSON ({error}); remove the file"
        ) from error
    if is_truncated:
        records = list(itertools.dropwhile(lambda record: "start" not in record, records))
    return records, is_truncated


def _find_discarded_times(records: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Return the time intervals of discarded steps. A step is discarded if the trainer resumes from
    an earlier checkpoint.

    Args:
        records: The records of the trainer's rank 0.
    """
    discarded: list[tuple[int, int]] = []
    valid: list[Mapping[str, Any]] = []
    opened = 0
    for record in records:
        if "opened" in record:
            opened = record["opened"]
        elif "steps_done" not in record:
            valid.append(record)
        elif valid:
            done = record["steps_done"]
            valid = [span for span in valid if done > 0 and span["step"] <= done]
            last_valid_end = max((span["start"] + span["us"] for span in valid), default=0)
            discarded.append((last_valid_end, opened))
    return discarded


def _to_spans(file: Path, records: Iterable[Mapping[str, Any]]) -> list[Span]:
    """Return the spans of a file's records. The file's name contains the role and the rank."""
    role, _, rank = file.stem.rpartition("-")
    offset = 0
    spans = []
    for record in records:
        if "opened" in record:
            offset = record["clock_offset_us"]
        elif "start" in record:
            start = record["start"] + offset
            attributes = {key: value for key, value in record.items() if key not in _SPAN_KEYS}
            end = start + record["us"]
            step = record.get("step")
            thread = record.get("thread", "")
            spans.append(
                Span(role, int(rank), record["name"], start, end, step, thread, attributes)
            )
    return spans


def _add_steps(spans: Sequence[Span]) -> list[Span]:
    """Return the spans with steps: each span of a server gets the step of the trainer at the time
    when the span began."""
    step_starts = sorted((start, step) for step, (start, _) in step_bounds(spans).items())
    result = []
    for span in spans:
        index = bisect.bisect_right(step_starts, span.start, key=itemgetter(0)) - 1
        result.append(
            span
            if span.step is not None or index < 0
            else replace(span, step=step_starts[index][1])
        )
    return result


def _metadata_events(
    kind: str, pid: int, tid: int | None, name: str, sort_index: int
) -> list[dict[str, Any]]:
    """Return the metadata events that name a process or thread and set its position."""
    common = {"ph": "M", "pid": pid, **({} if tid is None else {"tid": tid})}
    return [
        {"name": f"{kind}_name", **common, "args": {"name": name}},
        {"name": f"{kind}_sort_index", **common, "args": {"sort_index": sort_index}},
    ]
