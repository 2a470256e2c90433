"""`aligner report`: a run's directory as one HTML page that needs nothing else, no network either."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from aligner.config.compose import config_text, load_config
from aligner.errors import ConfigError
from aligner.files import asked_for, write_file
from aligner.observability.console import WINDOW, window_mean
from aligner.observability.metrics import read_metrics, read_records
from aligner.observability.trace import Span, read_spans, write_trace
from aligner.paths import RunPaths
from aligner.placement.roles import placements
from aligner.schema import Config
from aligner.schema.keys import shown
from aligner.schema.reward_sources import describe_sources, reward_sources

_TEMPLATE = Path(__file__).with_name("report.html")
_SAMPLES_OF_FIRST, _SAMPLES_OF_LAST = 3, 6
_LONGEST_TEXT = 1500
_BEFORE_AND_AFTER = {
    "reward/mean": ("reward", "{:.3f}"),
    **{f"{trainer}/loss": ("loss", "{:.3f}") for trainer in ("sft", "dpo", "reward_model")},
    **{f"{trainer}/accuracy": ("accuracy", "{:.3f}") for trainer in ("dpo", "reward_model")},
    "kl/reference": ("KL to the reference", "{:.3f}"),
    "response/length": ("response length", "{:.1f}"),
}
_EVALUATED = {
    "eval/pass@1": "pass@1",
    "eval/win_rate": "win rate",
    "eval/score": "evaluation score",
    "eval/loss": "held-out loss",
}


def write_report(run: Path, output: Path | None = None) -> Path:
    """Write the page of a run that has ended, was killed or goes on; returns its path.

    `trace.json` is written anew too, but for a run directory that is not ours to write to. Raises ConfigError where `run` is
    no run directory, the page cannot be written, or plotly is not installed.
    """
    if importlib.util.find_spec("plotly") is None:
        raise ConfigError("aligner report needs the plotly package; install the report extra: pip install 'aligner[report]'")
    if not run.is_dir():
        raise ConfigError(f"{run}: no such directory; give a run directory, as `aligner launch` prints it first")
    paths = RunPaths(run)
    config = load_config(paths.config)
    target = paths.report if output is None else output
    if not target.parent.is_dir():
        raise ConfigError(f"--output {target}: there is no directory {target.parent}")
    with asked_for(target):
        spans = write_trace(paths) if os.access(run, os.W_OK) else read_spans(paths)
        write_file(target, render(config, paths, spans))
    return target


def render(config: Config, paths: RunPaths, spans: Sequence[Span]) -> str:
    """The page of a run with these spans."""
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    from aligner.observability.figures import metric_plots, timeline_plots

    metrics = read_metrics(paths.metrics)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        name=config.run.name or paths.root.name,
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
        done=int(metrics[-1]["step"]) if metrics else 0,
        key_figures=key_figures(metrics),
        plots=[*timeline_plots(spans), *metric_plots(metrics)],
        samples=_samples(read_records(paths.samples)),
        config=config,
        reward=describe_sources(reward_sources(config.reward)),
        roles=placements(config),
        configuration=config_text(shown(config)),
        plotly=get_plotlyjs(),
    )


def key_figures(metrics: Sequence[Mapping[str, float]]) -> list[tuple[str, str, str]]:
    """What the run comes to so far: a label, a value and what is to be said beside it."""
    steps = [record for record in metrics if record["step"] > 0]
    first, last = steps[:WINDOW], steps[-WINDOW:]
    found = []
    for key, (label, form) in _BEFORE_AND_AFTER.items():
        before, after = window_mean(first, key), window_mean(last, key)
        if before is not None and after is not None:
            found.append((label, form.format(after), f"from {form.format(before)}"))
    for key, label in _EVALUATED.items():
        if evaluated := [record for record in metrics if key in record]:
            then, now = evaluated[0], evaluated[-1]
            found.append((label, f"{now[key]:.3f}", f"from {then[key]:.3f}"))
    if (seconds := window_mean(last, "time/step")) is not None:
        total = sum(record.get("time/step", 0.0) for record in steps)
        found.append(("seconds a step", f"{seconds:.2f}", f"{total:.0f} s in all"))
    if (rate := window_mean(last, "throughput/tokens_per_s")) is not None:
        found.append(("tokens a second", f"{rate:,.0f}", f"last {len(last)} steps"))
    if mismatches := [record["mismatch/logprob_abs"] for record in steps if "mismatch/logprob_abs" in record]:
        found.append(("largest mismatch", f"{max(mismatches):.1e}", "log-probs, engine and trainer"))
    return found


def _samples(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A few of the first recorded step's and of the last's."""
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for record in records:
        by_step.setdefault(record["step"], []).append(record)
    steps = list(by_step)
    chosen = [*by_step[steps[0]][:_SAMPLES_OF_FIRST], *by_step[steps[-1]][:_SAMPLES_OF_LAST]] if len(steps) > 1 else records
    texts = ("prompt", "response")
    return [
        {"step": record["step"], "reward": f"{record['reward']:.3f}", **{text: _printable(record[text]) for text in texts}}
        for record in chosen[: _SAMPLES_OF_FIRST + _SAMPLES_OF_LAST]
    ]


def _printable(text: str) -> str:
    """Control characters escaped, and no longer than a table bears."""
    shown = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text[:_LONGEST_TEXT])
    return shown + f" … {len(text) - _LONGEST_TEXT} characters more" * (len(text) > _LONGEST_TEXT)
