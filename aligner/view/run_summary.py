"""What a run comes to, is set to and says: key figures, its configuration and how others differ,
its logs."""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aligner.observability.console import WINDOW, suite_metrics, window_mean
from aligner.observability.logs import REPORTED, text_lines
from aligner.schema import Config
from aligner.schema.conditions import value_text
from aligner.schema.keys import shown
from aligner.view.shown_text import LONGEST_LINE, printable

_BEFORE_AND_AFTER = {
    "reward/mean": ("reward", "{:.3f}"),
    **{f"{trainer}/loss": ("loss", "{:.3f}") for trainer in ("sft", "dpo", "reward_model")},
    **{f"{trainer}/accuracy": ("accuracy", "{:.3f}") for trainer in ("dpo", "reward_model")},
    "kl/reference": ("KL to reference (nats)", "{:.3f}"),
    "response/length": ("response tokens", "{:.1f}"),
}
_EVALUATED = {
    "eval/pass@1": "pass@1",
    "eval/win_rate": "win rate",
    "eval/score": "evaluation score",
    "eval/loss": "held-out loss",
}
NONE = "\N{EN DASH}"
"""Where there is no value."""
_LEFT_OUT = ("skipped", "lost", "failed")
_OWN = ("run.dir", "run.name", "run.date", "run.command", "run.resume", "run.chosen")
"""Keys that differ between any two runs, and the list of those that were chosen."""
_LOG_BYTES = 200_000
_SIGNS = {
    REPORTED: "error",
    "Traceback (most recent": "error",
    "ERROR": "error",
    "WARNING": "warning",
    "Warning:": "warning",
}
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_NO_SIGNS = ("resource_tracker", "--strict-model-config")
"""Parts of lines that Triton's processes print in every run that is well."""


def key_figures(metrics: Sequence[Mapping[str, float]]) -> list[tuple[str, str, str]]:
    """What the run comes to so far: a label, a value and what is to be said beside it."""
    steps = [record for record in metrics if record["step"] > 0]
    first, last = steps[:WINDOW], steps[-WINDOW:]
    found = []
    for key, (label, form) in _BEFORE_AND_AFTER.items():
        before, after = window_mean(first, key), window_mean(last, key)
        if before is not None and after is not None:
            found.append((label, form.format(after), f"from {form.format(before)}"))
    of_suites = {
        key.replace("/", f"/{name}/", 1): f"{name}: {_EVALUATED[key]}"
        for record in metrics
        for name, key, _ in suite_metrics(record)
        if key in _EVALUATED
    }
    for key, label in {**_EVALUATED, **of_suites}.items():
        if evaluated := [record for record in metrics if key in record]:
            then, now = evaluated[0], evaluated[-1]
            found.append((label, f"{now[key]:.3f}", f"from {then[key]:.3f}"))
    if (seconds := window_mean(last, "time/step")) is not None:
        total = sum(record.get("time/step", 0.0) for record in steps)
        found.append(("seconds per step", f"{seconds:.2f}", f"{total:,.0f} s in total"))
    if (rate := window_mean(last, "throughput/tokens_per_s")) is not None:
        found.append(("tokens per second", f"{rate:,.0f}", f"last {len(last)} steps"))
    if mismatches := [
        record["mismatch/logprob_abs"] for record in steps if "mismatch/logprob_abs" in record
    ]:
        found.append(
            ("largest mismatch", f"{max(mismatches):.1e}", "nats, engine vs. trainer log-probs")
        )
    return found


def left_out(metrics: Sequence[Mapping[str, float]]) -> list[tuple[str, float]]:
    """What was skipped, lost or failed over the whole run: metrics and their sums, but for those
    that are sums or shares."""
    names = dict.fromkeys(
        key for record in metrics for key in record if any(sign in key for sign in _LEFT_OUT)
    )
    counted = [name for name in names if not name.endswith(("_total", "_fraction"))]
    return [(name, sum(record.get(name, 0.0) for record in metrics)) for name in counted]


def differences(configs: Mapping[str, Config]) -> list[tuple[str, list[str]]]:
    """Keys in which some configurations differ, and the value of each; what differs between any two
    runs is left out."""
    flat = [_flat(shown(config)) for config in configs.values()]
    keys = [
        key for key in dict.fromkeys(key for values in flat for key in values) if key not in _OWN
    ]
    rows = [(key, [values.get(key, NONE) for values in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def log_files(directory: Path) -> list[Path]:
    """What the run's processes print, the trainer's first; links are not followed."""
    if not directory.is_dir():
        return []
    files = [
        file
        for file in directory.iterdir()
        if file.suffix == ".log" and file.is_file() and not file.is_symlink()
    ]
    return sorted(files, key=lambda file: (not file.name.startswith("trainer"), file.name))


def log_end(file: Path) -> tuple[list[tuple[str, str]], int]:
    """The last lines of a log, each with error, warning or nothing for its kind, and how many bytes
    come before them."""
    with file.open("rb") as content:
        size = content.seek(0, os.SEEK_END)
        content.seek(max(0, size - _LOG_BYTES))
        before, text = content.tell(), content.read(_LOG_BYTES).decode(errors="replace")
    text = _COLORS.sub("", text)
    # Progress is drawn over itself: of such a line the last state.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    return [
        (_kind(line), printable(line, LONGEST_LINE))
        for line in text_lines(lines[1:] if before else lines)
    ], before


def log_trouble(directory: Path) -> list[tuple[str, str, str, int]]:
    """What the ends of a run's logs complain of, errors first: a file's name, the kind, the line
    and how often it is there.

    Of a traceback the line is its last, which says what was raised.
    """
    counts: Counter[tuple[str, str, str]] = Counter()
    for file in log_files(directory):
        lines = log_end(file)[0]
        for place, (kind, line) in enumerate(lines):
            if "Traceback (most recent" in line:
                line = next(
                    (text for _, text in lines[place + 1 :] if text and not text.startswith(" ")),
                    line,
                )
            if kind:
                counts[file.name, kind, line] += 1
    return sorted(
        ((*what, count) for what, count in counts.items()), key=lambda entry: entry[1] != "error"
    )


def _kind(line: str) -> str:
    return (
        ""
        if any(sign in line for sign in _NO_SIGNS)
        else next((kind for sign, kind in _SIGNS.items() if sign in line), "")
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = printable(value_text(value), 500)
    return found
