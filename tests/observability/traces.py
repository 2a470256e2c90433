"""Check the format of a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def checked_trace(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the complete events of a `trace.json` by the name of their process.

    Asserts that every process and thread has a name, and that the spans of a thread are nested or
    disjoint.
    """
    events = json.loads(path.read_text())["traceEvents"]
    named = {
        (event["name"], event["pid"], event.get("tid")): event["args"]
        for event in events
        if event["ph"] == "M"
    }
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    by_process: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        assert event["ph"] in ("M", "X"), event
        if event["ph"] == "M":
            continue
        assert event["name"] and isinstance(event["ts"], int) and isinstance(event["dur"], int), (
            event
        )
        assert event["ts"] >= 0 and event["dur"] >= 0, event
        assert ("thread_name", event["pid"], event["tid"]) in named, event
        threads.setdefault((event["pid"], event["tid"]), []).append(
            (event["ts"], event["ts"] + event["dur"])
        )
        by_process.setdefault(named["process_name", event["pid"], None]["name"], []).append(event)
    for spans in threads.values():
        open_until: list[int] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], (
                f"({start}, {end}) overlaps a span that ends at {open_until[-1]}"
            )
            open_until.append(end)
    return by_process
