"""A run's timeline as a whole: read from its processes' files, written as `trace.json`, and summed
up."""

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
from aligner.files import write_file
from aligner.observability.timeline import CUT
from aligner.paths import RunPaths

WAIT = "wait"
"""The name of spans in which a rank waits for others; of all others it is busy."""

NEWEST_BYTES = 16 << 20
"""How much of a run's timeline is read, at most: a trace of more is more than a browser takes."""
_OWN = ("name", "start", "us", "step", "thread")
_ROLES = ("trainer", "generator", "critic", "reward", "teacher")


@dataclass(frozen=True)
class Span:
    """What a thread of a rank did for a while. Times are microseconds since the epoch."""

    role: str
    """Or server group, such as reward.1"""
    rank: int
    name: str
    start: int
    end: int
    step: int | None = None
    """The training step that it belongs to; of a server's, the one that the trainer was at when it
    began"""
    thread: str = ""
    """Empty for the main thread"""
    about: Mapping[str, Any] | None = None


def read_spans(paths: RunPaths, newest_bytes: int = NEWEST_BYTES) -> list[Span]:
    """The spans of a run by their start, those left out that a resumed run has done again; none
    without a timeline.

    Of a timeline of more than `newest_bytes` the newest part. Raises AlignerError for a file that
    is none of ours.
    """
    files = sorted(paths.timeline.glob("*-*.jsonl"))
    read = {file: _records(file, newest_bytes // len(files)) for file in files}
    undone = _undone(read.get(paths.timeline / "trainer-0.jsonl", ([], False))[0])
    spans = [span for file, (records, _) in read.items() for span in _spans(file, records)]
    # Where a part was left out, all processes begin where the one does whose part begins last.
    begins = max(
        (records[0]["start"] for records, cut in read.values() if cut and records), default=0
    )
    kept = [
        span
        for span in spans
        if span.start >= begins and not any(a <= span.start < b for a, b in undone)
    ]
    return sorted(_with_steps(kept), key=lambda span: (span.start, -span.end))


def write_trace(paths: RunPaths) -> list[Span]:
    """Write `trace.json` anew, in Chrome's trace event format; returns its spans, none and no file
    without a timeline.

    Roles are its processes, ranks their threads, and times count from the first span. Raises
    AlignerError and OSError.
    """
    spans = read_spans(paths)
    if not spans:
        return spans
    began = datetime.fromtimestamp(spans[0].start / 1e6, timezone.utc).isoformat()
    about = {"run": paths.root.name, "began": began, "clock": "CLOCK_REALTIME"}
    content = {"traceEvents": trace_events(spans), "displayTimeUnit": "ms", "otherData": about}
    write_file(paths.trace, json.dumps(content, separators=(",", ":")) + "\n")
    return spans


def trace_events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Complete events (`ph` X) of spans in order of their start, and metadata events that name
    roles and ranks."""
    events: list[dict[str, Any]] = []
    tracks: dict[tuple[str, int, str], tuple[int, int]] = {}
    for pid, role in enumerate(roles_of(spans), 1):
        events += _metadata("process", pid, None, role, pid)
        lanes = sorted({(span.rank, span.thread) for span in spans if span.role == role})
        ranks = max(rank for rank, _ in lanes) + 1
        for place, (rank, thread) in enumerate(lanes):
            # A rank's number is its main thread's; other threads come after all ranks, but are
            # shown below theirs.
            tid = ranks + place if thread else rank
            tracks[role, rank, thread] = pid, tid
            events += _metadata("thread", pid, tid, f"rank {rank} {thread}".rstrip(), place)
    for span in spans:
        pid, tid = tracks[span.role, span.rank, span.thread]
        arguments = dict(span.about or {}) | ({} if span.step is None else {"step": span.step})
        times = {"ts": span.start - spans[0].start, "dur": span.end - span.start}
        events.append(
            {"name": span.name, "ph": "X", **times, "pid": pid, "tid": tid, "args": arguments}
        )
    return events


def roles_of(spans: Iterable[Span]) -> list[str]:
    """The roles that have spans, the trainer first."""

    def place(role: str) -> tuple[int, str]:
        kind = role.partition(".")[0]
        return _ROLES.index(kind) if kind in _ROLES else len(_ROLES), role

    return sorted({span.role for span in spans}, key=place)


def innermost(spans: Iterable[Span]) -> list[Span]:
    """The spans of a thread cut so that none covers another: each moment belongs to the one that
    began last."""
    ordered = sorted(spans, key=lambda span: (span.start, -span.end))
    cut: list[Span] = []
    under_way: list[Span] = []
    at, last = 0, max((span.end for span in ordered), default=0)
    for until, following in [*((span.start, span) for span in ordered), (last, None)]:
        while under_way and under_way[-1].end <= until:
            ended = under_way.pop()
            if ended.end > at:
                cut.append(replace(ended, start=at))
                at = ended.end
        if under_way and until > at:
            cut.append(replace(under_way[-1], start=at, end=until))
        at = max(at, until)
        if following is not None:
            under_way.append(following)
    return cut


def steps_window(spans: Iterable[Span], steps: int) -> tuple[int, int]:
    """From the start of the trainer's last `steps` whole steps to the end of the last; (0, 0)
    without a training step."""
    bounds = step_bounds(spans)
    last = sorted(step for step in bounds if step > 0)[-steps:]
    return (bounds[last[0]][0], bounds[last[-1]][1]) if last else (0, 0)


def step_bounds(spans: Iterable[Span]) -> dict[int, tuple[int, int]]:
    """When the trainer's rank 0 began each step, and when it ended it."""
    bounds: dict[int, tuple[int, int]] = {}
    for span in spans:
        if span.role == "trainer" and span.rank == 0 and span.step is not None:
            start, end = bounds.get(span.step, (span.start, span.end))
            bounds[span.step] = min(start, span.start), max(end, span.end)
    return bounds


def busy_shares(spans: Iterable[Span], window: tuple[int, int]) -> dict[str, dict[str, float]]:
    """By role, the trainer first, which share of the window its ranks spent on what, waiting left
    out; a mean over ranks."""
    begin, end = window
    during = [span for span in spans if span.end > begin and span.start < end]
    threads: dict[tuple[str, int, str], list[Span]] = {}
    for span in during:
        threads.setdefault((span.role, span.rank, span.thread), []).append(span)
    ranks: dict[tuple[str, int], list[Span]] = {}
    for (role, rank, _), own in threads.items():
        ranks.setdefault((role, rank), []).extend(
            span for span in innermost(own) if span.name != WAIT
        )
    counts = {role: sum(1 for known, _ in ranks if known == role) for role in roles_of(during)}
    shares: dict[str, dict[str, float]] = {role: {} for role in counts}
    for (role, _), own in ranks.items():
        for span in innermost(own):
            inside = max(0, min(span.end, end) - max(span.start, begin))
            shares[role][span.name] = (
                shares[role].get(span.name, 0.0) + inside / (end - begin) / counts[role]
            )
    return shares


def _records(file: Path, limit: int) -> tuple[list[dict[str, Any]], bool]:
    """The whole lines among a file's last `limit` bytes, and whether there were others before
    them."""
    with file.open("rb") as content:
        size = content.seek(0, os.SEEK_END)
        content.seek(max(0, size - limit))
        block = content.read(limit)
    whole = block[: block.rfind(b"\n") + 1].splitlines()
    cut = size > limit or whole[:1] == [CUT]
    try:
        records = [json.loads(line) for line in (whole[1:] if cut else whole)]
    except ValueError as error:
        raise AlignerError(
            f"{file}: not a valid timeline, because a line is not JSON ({error}); remove the file"
        ) from error
    if cut:
        records = list(itertools.dropwhile(lambda record: "start" not in record, records))
    return records, cut


def _undone(records: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """From when to when what was done was lost: it came after the checkpoint from which the trainer
    was resumed."""
    lost: list[tuple[int, int]] = []
    counting: list[Mapping[str, Any]] = []
    opened = 0
    for record in records:
        if "opened" in record:
            opened = record["opened"]
        elif "steps_done" not in record:
            counting.append(record)
        elif counting:
            done = record["steps_done"]
            counting = [span for span in counting if done > 0 and span["step"] <= done]
            lost.append((max((span["start"] + span["us"] for span in counting), default=0), opened))
    return lost


def _spans(file: Path, records: Iterable[Mapping[str, Any]]) -> list[Span]:
    role, _, rank = file.stem.rpartition("-")
    offset, spans = 0, []
    for record in records:
        if "opened" in record:
            offset = record["clock_offset_us"]
        elif "start" in record:
            start = record["start"] + offset
            about = {key: value for key, value in record.items() if key not in _OWN}
            end, step, thread = start + record["us"], record.get("step"), record.get("thread", "")
            spans.append(Span(role, int(rank), record["name"], start, end, step, thread, about))
    return spans


def _with_steps(spans: Sequence[Span]) -> list[Span]:
    """The servers' spans get the step that the trainer was at when they began."""
    begins = sorted((start, step) for step, (start, _) in step_bounds(spans).items())
    found = []
    for span in spans:
        place = bisect.bisect_right(begins, span.start, key=itemgetter(0)) - 1
        found.append(
            span if span.step is not None or place < 0 else replace(span, step=begins[place][1])
        )
    return found


def _metadata(kind: str, pid: int, tid: int | None, name: str, place: int) -> list[dict[str, Any]]:
    where = {"ph": "M", "pid": pid, **({} if tid is None else {"tid": tid})}
    return [
        {"name": f"{kind}_name", **where, "args": {"name": name}},
        {"name": f"{kind}_sort_index", **where, "args": {"sort_index": place}},
    ]
