"""`aligner report`: a run's pages as one file that needs nothing else, no network either."""

import os
from base64 import b64encode
from collections.abc import Sequence
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import Any

from markupsafe import Markup

from aligner.config.compose import load_config
from aligner.errors import ConfigError
from aligner.files import asked_for, write_file
from aligner.launcher.status import status_of
from aligner.observability.metrics import read_metrics
from aligner.observability.trace import Span, read_spans, write_trace
from aligner.paths import RunPaths
from aligner.schema import Config
from aligner.view.figures import metric_plots, timeline_plots
from aligner.view.rendering import STATIC, configuration, plotly_script, render, require_packages
from aligner.view.run_index import key_figures
from aligner.view.sample_table import SampleFilter, SampleTable

_SAMPLES_OF_FIRST, _SAMPLES_OF_LAST = 3, 6


def write_report(run: Path, output: Path | None = None) -> Path:
    """Write the page of a run that has ended, was killed or goes on; returns its path.

    `trace.json` is written anew too, but for a run directory that is not ours to write to. Raises
    ConfigError where `run` is no run directory, the page cannot be written, or a package is not
    installed.
    """
    require_packages("aligner report")
    if not run.is_dir():
        raise ConfigError(
            f"{run}: no such directory; give a run directory, whose path `aligner launch` prints"
        )
    paths = RunPaths(run.absolute())
    config = load_config(paths.config)
    target = run / paths.report.name if output is None else output
    if not target.parent.is_dir():
        raise ConfigError(f"--output {target}: no such directory: {target.parent}")
    with asked_for(target):
        spans = write_trace(paths) if os.access(run, os.W_OK) else read_spans(paths)
        write_file(target, page(config, paths, spans))
    return target


def page(config: Config, paths: RunPaths, spans: Sequence[Span]) -> str:
    """The page of a run with these spans."""
    metrics = read_metrics(paths.metrics)
    scripts = [_script(plotly_script()), _script(STATIC / "view.js")]
    hashes = " ".join(
        f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    plots = {"timeline": timeline_plots(spans), "curves": metric_plots(metrics)}
    return render(
        "saved.html",
        policy=f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:",
        style=Markup((STATIC / "view.css").read_text(encoding="utf-8")),
        scripts=scripts,
        name=config.run.name or paths.root.name,
        state=status_of(paths, config, metrics, asking=False).state,
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
        done=int(metrics[-1]["step"]) if metrics else 0,
        config=config,
        figures=key_figures(metrics),
        data={source: [plot.content() for plot in found] for source, found in plots.items()},
        samples=_samples(SampleTable(paths)),
        about=configuration(config),
    )


def _script(file: Path) -> Markup:
    return Markup(file.read_text(encoding="utf-8"))


def _samples(table: SampleTable) -> list[dict[str, Any]]:
    """A few of the first recorded step's and of the last's."""
    newest = table.page(SampleFilter(), "-step", 0)[0]
    oldest = table.page(SampleFilter(), "step", 0)[0]
    if not newest or newest[0]["step"] == oldest[0]["step"]:
        return oldest[: _SAMPLES_OF_FIRST + _SAMPLES_OF_LAST]
    last = newest[0]["step"]
    return [*oldest[:_SAMPLES_OF_FIRST], *(row for row in newest if row["step"] == last)][
        : _SAMPLES_OF_FIRST + _SAMPLES_OF_LAST
    ]
