"""Page of `aligner report`: one self-contained file about a run, which needs no network."""

import os
from base64 import b64encode
from collections.abc import Sequence
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path

from markupsafe import Markup

from aligner.config.compose import load_config
from aligner.errors import ConfigError
from aligner.files import convert_write_errors, write_file
from aligner.observability.metrics import read_metrics
from aligner.observability.trace import Span, read_spans, write_trace
from aligner.paths import RunPaths
from aligner.schema import Config
from aligner.view.figures import build_metric_plots, build_timeline_plots
from aligner.view.prompt_turns import build_sample_turns
from aligner.view.rendering import (
    STATIC,
    find_plotly_script,
    render,
    require_packages,
    summarize_configuration,
)
from aligner.view.run_index import ViewedRun, compute_key_figures
from aligner.view.sample_table import Row, SampleFilter, SampleTable
from aligner.view.shown_text import Turn

# Numbers of displayed samples of the first and of the last recorded step.
_FIRST_STEP_SAMPLES = 3
_LAST_STEP_SAMPLES = 6


def write_report(run: Path, output: Path | None = None) -> Path:
    """Write the page of a finished, killed or running run.

    `trace.json` is written again too, unless the run directory is not writable.

    Args:
        run: The run directory.
        output: File to write; default is `report.html` in the run directory.

    Returns:
        The path of the written page.

    Raises:
        ConfigError: If `run` is not a run directory, the page cannot be written, or a package is
            not installed.
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
    with convert_write_errors(target):
        spans = write_trace(paths) if os.access(run, os.W_OK) else read_spans(paths)
        write_file(target, render_report(config, paths, spans))
    return target


def render_report(config: Config, paths: RunPaths, spans: Sequence[Span]) -> str:
    """Return the page of a run with these spans."""
    metrics = read_metrics(paths.metrics)
    files = (STATIC / "theme.js", find_plotly_script(), STATIC / "view.js")
    scripts = [_read_script(file) for file in files]
    # The content security policy allows only these scripts, by their hashes.
    hashes = " ".join(
        f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    plots_by_source = {
        "timeline": build_timeline_plots(spans),
        "curves": build_metric_plots(metrics),
    }
    return render(
        "saved.html",
        policy=f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:",
        style=Markup((STATIC / "view.css").read_text(encoding="utf-8")),
        scripts=scripts,
        run=ViewedRun(paths.root).overview(),
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
        done=int(metrics[-1]["step"]) if metrics else 0,
        config=config,
        figures=compute_key_figures(metrics),
        data={
            source: [plot.to_json() for plot in plots] for source, plots in plots_by_source.items()
        },
        samples=_select_samples(SampleTable(paths)),
        summary=summarize_configuration(config),
    )


def _read_script(file: Path) -> Markup:
    return Markup(file.read_text(encoding="utf-8"))


def _select_samples(table: SampleTable) -> list[tuple[Row, list[Turn]]]:
    """Return a few samples of the first and of the last recorded step, and their turns."""
    newest = table.page(SampleFilter(), "-step", 0)[0]
    oldest = table.page(SampleFilter(), "step", 0)[0]
    selected = oldest
    if newest and newest[0]["step"] != oldest[0]["step"]:
        last_step = newest[0]["step"]
        of_last_step = [row for row in newest if row["step"] == last_step]
        selected = [*oldest[:_FIRST_STEP_SAMPLES], *of_last_step]

    samples = []
    for row in selected[: _FIRST_STEP_SAMPLES + _LAST_STEP_SAMPLES]:
        sample = table.sample(row["step"], row["row"])
        # A running run may have deleted the sample at its size limit.
        if sample is not None:
            turns = build_sample_turns(
                sample["prompt"] or "", sample["response"] or "", sample["messages"]
            )
            samples.append((row, turns))
    return samples
