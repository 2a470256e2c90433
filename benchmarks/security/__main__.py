"""Attack aligner with the techniques of a security campaign, and print a table of the outcomes.

    python -m benchmarks.security                  # all groups
    python -m benchmarks.security sandbox secrets  # some groups
    python -m benchmarks.security --list           # the probes, without running them
    python -m benchmarks.security --json

Outcomes:

- held: the attempt failed, as expected
- not enforceable: this host lacks a prerequisite, which the table names; aligner refuses or reports
  this by itself, for example with `aligner validate`
- finding: the attempt succeeded

The exit code is 1 if there is any finding.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.security.registry import Probe, list_groups, load_probes

_STYLES = {"held": "green", "not enforceable": "yellow", "finding": "red"}


def main(arguments: Sequence[str] | None = None) -> int:
    groups = list_groups()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.security",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"any of {', '.join(groups)}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--list", action="store_true", help="print the probes without running them")
    parser.add_argument("--only", metavar="NAME", help="run only the probe of this name")
    parsed = parser.parse_args(arguments)
    if unknown := [group for group in parsed.groups if group not in groups]:
        parser.error(f"{', '.join(unknown)}: no such group; allowed: {', '.join(groups)}")
    probes = load_probes(parsed.groups or groups)
    if parsed.only is not None:
        probes = [each for each in probes if each.name == parsed.only]
        if not probes:
            parser.error(f"--only={parsed.only}: no such probe; --list prints all")

    if parsed.list:
        _print_list(probes)
        return 0
    results: list[dict[str, Any]] = []
    for each in probes:
        print(f"{each.group}: {each.name}", file=sys.stderr, flush=True)
        with _print_to_standard_error():
            results.append(each.run())
    findings = sum(result["state"] == "finding" for result in results)
    if parsed.json:
        print(json.dumps({"findings": findings, "probes": results}, indent=1))
    else:
        _print_results(results)
    return 1 if findings else 0


@contextlib.contextmanager
def _print_to_standard_error() -> Iterator[None]:
    """Redirect what this process and its child processes print, so that `--json` prints JSON
    alone."""
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(output, 1)
        os.close(output)


def _print_list(probes: Sequence[Probe]) -> None:
    table = Table("group", "probe", "attempt", "expected", "component")
    for each in probes:
        fields = (each.group, each.name, each.attempt, each.expected, each.component)
        table.add_row(*map(escape, fields))
    Console().print(table)


def _print_results(results: Sequence[dict[str, Any]]) -> None:
    table = Table("group", "probe", "attempt", "outcome", "detail")
    for result in results:
        state = result["state"]
        fields = [escape(result[name]) for name in ("group", "name", "attempt")]
        detail = escape(result["detail"])
        table.add_row(*fields, f"[{_STYLES[state]}]{state}[/]", detail)
    Console().print(table)
    counts = {state: sum(result["state"] == state for result in results) for state in _STYLES}
    print(", ".join(f"{count} {state}" for state, count in counts.items()))


if __name__ == "__main__":
    sys.exit(main())
