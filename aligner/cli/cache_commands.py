"""`aligner cache`: list the entries of the cache, and delete old entries."""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from aligner.cache_entries import KINDS, CacheEntry, list_entries, prune
from aligner.errors import ConfigError
from aligner.launcher.status import read_active_state
from aligner.observability.console import print_table
from aligner.paths import get_cache_directory
from aligner.terminal import print_text

# Maximum number of runs that the table shows for an entry.
_SHOWN_RUNS = 5


def manage_cache(parsed: argparse.Namespace) -> None:
    """List the entries of the cache, or delete entries.

    Raises:
        ConfigError: An option does not belong to the action, or no condition for the deletion is
            given.
    """
    kinds = KINDS if parsed.kind is None else (parsed.kind,)
    has_condition = parsed.older_than is not None or parsed.max_size is not None
    if parsed.action == "list":
        if has_condition or parsed.dry_run:
            raise ConfigError(
                "--older-than, --max-size and --dry-run: are options of `aligner cache prune`, not"
                " of `aligner cache list`"
            )
        _print_entries(list_entries(kinds), as_json=parsed.json)
        return

    if parsed.json:
        raise ConfigError("--json: is an option of `aligner cache list`, not of `prune`")
    if not has_condition:
        raise ConfigError(
            "aligner cache prune: set --older-than (such as 30d), --max-size (such as 50GiB), or"
            " both, to select the entries to delete"
        )
    _prune(parsed, kinds)


def _print_entries(entries: list[CacheEntry], *, as_json: bool) -> None:
    """Print a table of the entries, or one JSON array."""
    states = {run: read_active_state(run) for entry in entries for run in entry.runs}
    if as_json:
        print(json.dumps([_build_json(entry, states) for entry in entries]))
        return

    cache = get_cache_directory().absolute()
    if not entries:
        print_text(f"{cache}: no entries")
        return
    table = Table("kind")
    table.add_column("name", overflow="fold")
    table.add_column("size", justify="right")
    table.add_column("last use", justify="right")
    table.add_column("used by runs", overflow="fold")
    for entry in entries:
        table.add_row(
            entry.kind,
            Text(entry.name),
            _format_size(entry.size),
            f"{_format_age(entry)} ago",
            Text(_format_runs(entry, states)),
        )
    print_table(Console(), table)
    total = _format_size(sum(entry.size for entry in entries))
    print_text(f"{cache}: {len(entries)} {'entry' if len(entries) == 1 else 'entries'}, {total}")


def _build_json(entry: CacheEntry, states: Mapping[Path, str | None]) -> dict[str, Any]:
    return {
        "kind": entry.kind,
        "name": entry.name,
        "path": str(entry.path),
        "size_bytes": entry.size,
        "last_use": entry.last_use,
        "runs": [{"directory": str(run), "active_state": states[run]} for run in entry.runs],
    }


def _format_runs(entry: CacheEntry, states: Mapping[Path, str | None]) -> str:
    """Return one line per run, with the state of an active run; active runs come first."""
    runs = sorted(entry.runs, key=lambda run: states[run] is None)
    lines = [
        str(run) if states[run] is None else f"{run} ({states[run]})" for run in runs[:_SHOWN_RUNS]
    ]
    if len(runs) > _SHOWN_RUNS:
        lines.append(f"and {len(runs) - _SHOWN_RUNS} more")
    return "\n".join(lines)


def _prune(parsed: argparse.Namespace, kinds: tuple[str, ...]) -> None:
    """Delete entries, and print each of them and the freed space."""
    report = prune(
        read_active_state,
        older_than_s=parsed.older_than,
        max_bytes=parsed.max_size,
        kinds=kinds,
        dry_run=parsed.dry_run,
    )
    if parsed.dry_run:
        deleted, freed, remain = "would delete", "would free", "would remain"
    else:
        deleted, freed, remain = "deleted", "freed", "remain"
    for leftover in report.leftovers:
        print_text(f"{deleted} {leftover}, the leftover of a killed process")
    for entry in report.deleted:
        print_text(
            f"{deleted} {entry.kind}/{entry.name}: {_format_size(entry.size)}, last used"
            f" {_format_age(entry)} ago"
        )
    for entry, reason in report.kept:
        print_text(f"kept {entry.kind}/{entry.name}: {reason}")
    place = get_cache_directory().absolute() / (parsed.kind or "")
    print_text(
        f"{freed} {_format_size(report.freed_bytes)};"
        f" {_format_size(report.remaining_bytes)} {remain} in {place}"
    )
    if parsed.max_size is not None and report.remaining_bytes > parsed.max_size:
        print_text(
            f"--max-size {_format_size(parsed.max_size)} is not reached, because the kept entries"
            " cannot be deleted now"
        )


def _format_size(size: float) -> str:
    """Return a number of bytes in the largest unit in which it is at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _format_age(entry: CacheEntry) -> str:
    """Return the time since the last use of an entry, such as `3 days`."""
    minutes = int(max(0.0, time.time() - entry.last_use) // 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h"
    return f"{minutes // (24 * 60)} days"
