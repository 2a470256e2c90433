"""Plots of a run's pages, in the form that plotly.js expects; the page sets the colors of text and
grid.

There are no plots of metrics that the run did not measure.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import accumulate
from typing import Any

from aligner.observability.timeline import PHASE_SPAN_NAMES
from aligner.observability.trace import (
    Span,
    compute_busy_shares,
    flatten_spans,
    list_roles,
    step_bounds,
    steps_window,
)
from aligner.view.metric_descriptions import describe_metric, name_metric
from aligner.view.run_curves import Curve
from aligner.view.shown_text import printable

Metrics = Sequence[Mapping[str, float]]
Trace = dict[str, Any]

OVERVIEW = "overview"
"""Group of the most important plots. All other plots are in groups that are named after the first
part of the metric's name."""

LINE_COLORS = (
    "#4786c6",
    "#d0751a",
    "#3a9463",
    "#b85f9b",
    "#8271cb",
    "#7d8590",
    "#c65b4e",
    "#a3861a",
    "#1f9aa8",
    "#9a6b45",
    "#6a9330",
    "#d9608a",
)
"""Colors of curves; their contrast is above 3:1 on the light and on the dark background."""
_DASHES = ("solid", "dash", "dot", "dashdot")
# Colors of the activities in the timeline, in the order of the legend.
_ACTIVITY_COLORS = {
    "batch": "#86aad0",
    "generate": "#4786c6",
    "prefill": "#86aad0",
    "logprobs": "#58a6a6",
    "score": "#d8b52d",
    "values": "#a77fb8",
    "teacher_logprobs": "#7d9c3e",
    "train": "#d9822b",
    "critic_train": "#c65b4e",
    "snapshot": "#2f7a52",
    "publish": "#4a9b6e",
    "receive": "#9bcbb0",
    "verify": "#6fbf95",
    "probe": "#c3a3c9",
    "evaluate": "#8c6d5a",
    "checkpoint": "#7f8790",
    "environments": "#c9a66b",
    "wait": "rgba(138, 146, 156, 0.3)",
}
_OTHER_COLOR = "#b4bac2"
# RGB colors of the smallest and the largest staleness.
_FRESH_COLOR = (156, 195, 230)
_STALE_COLOR = (176, 86, 143)
_STALENESS_PREFIX = "staleness/share_"
# Prefixes of the metrics that count response lengths, with the names of their bars.
_LENGTH_PREFIXES = {"response/generated_to_": "generated", "response/trained_to_": "trained on"}
# Prefixes of metrics that have special plots instead of curves.
_SPECIAL_PREFIXES = (*_LENGTH_PREFIXES, _STALENESS_PREFIX)
_SECONDS = "seconds"  # not a metric's name: metric names contain a /
# Maximum number of points of a curve and of bars of a plot.
_MAX_POINTS = 1000
_MAX_BARS = 200
_MAX_NAME_LENGTH = 120
_BARS_LAYOUT = {"barmode": "stack", "bargap": 0.15, "showlegend": True}
_ROWS_AXIS = {"showgrid": False, "ticksuffix": "  "}
_UTILIZATION_STEPS = 10
_TIMELINE_STEPS = 3
_MAX_TIMELINE_ROWS = 24
# Width of a step's label in the timeline on a narrow screen, as a fraction of the plot's width.
_STEP_LABEL_WIDTH = 0.2


@dataclass(frozen=True)
class Plot:
    """A figure and its properties on the page."""

    key: str
    title: str
    traces: Sequence[Trace]
    layout: Mapping[str, Any]
    note: str = ""
    wide: bool = False
    group: str = OVERVIEW
    about: str = ""
    """Names of the metrics in the plot, for the page's search and as the title's tooltip."""
    description: str = ""
    """One sentence that explains what the plot shows."""

    def to_json(self) -> dict[str, Any]:
        """Return the plot as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Panel:
    """Metrics that share a plot."""

    key: str
    metrics: Mapping[str, str]
    """Names of the curves by metric name."""
    title: str = ""
    """Title of the plot; if empty, the plot has the plain name of its first metric."""
    logarithmic: bool = False
    is_share: bool = False
    """Whether the values are fractions, from 0 to 1."""
    description: str = ""
    """One sentence that explains the plot; if empty, the plot has the description of its first
    metric."""


def _train_and_held_out(metric: str, *prefixes: str) -> dict[str, str]:
    """Return the names of curves by metric name: a training metric with each of the prefixes, and
    the same metric on held-out data."""
    return {
        **{f"{prefix}/{metric}": "training" for prefix in prefixes},
        f"eval/{metric}": "held out",
    }


_CLIP_METRICS = {f"{kind}/clip_fraction": kind for kind in ("policy", "value")}
_CLIP_METRICS |= {"policy/importance_truncated": "importance weights"}
PANELS = (
    Panel("reward", {"reward/mean": "mean"}),
    Panel(
        "reward_quantiles",
        {f"reward/p{share}": f"{share} %" for share in (10, 50, 90)},
        title="Reward quantiles",
        description="10th, 50th and 90th percentile of the scores of a step.",
    ),
    Panel("kl", {"kl/reference": "training", "eval/reference_kl": "evaluation"}),
    Panel("length", {"response/length": "mean"}),
    Panel(
        "responses",
        {"response/ended_fraction": "complete", "rollout/kept_fraction": "kept"},
        title="Complete and kept responses (fraction)",
        is_share=True,
        description=(
            "Complete responses ended before the length limit. Kept responses have a score and"
            " passed dynamic sampling."
        ),
    ),
    Panel(
        "pairs",
        {"preferences/pairs": "pairs", "preferences/without_pair": "prompts without a pair"},
    ),
    Panel("policy_loss", {"policy/loss": "loss"}),
    Panel("value_loss", {"value/loss": "loss"}),
    Panel("loss", _train_and_held_out("loss", "sft", "dpo", "reward_model")),
    Panel("accuracy", _train_and_held_out("accuracy", "dpo", "reward_model", "policy")),
    Panel("margin", _train_and_held_out("margin", "dpo", "reward_model", "policy")),
    Panel("score", {"eval/score": "score"}),
    Panel(
        "pass",
        {f"eval/pass@{2**power}": f"pass@{2**power}" for power in range(11)}
        | {"eval/win_rate": "win rate", "eval/judge_win_rate": "judged win rate"},
        title="Evaluation: pass rate and win rate (fraction)",
        description=(
            "pass@k: probability that at least one of k responses passes. Win rate: fraction of"
            " responses that score above the reference."
        ),
    ),
    Panel("perplexity", {"eval/reference_perplexity": "perplexity"}),
    Panel("entropy", {"policy/entropy": "entropy"}),
    Panel("approx_kl", {"policy/approx_kl": "old to new policy"}),
    Panel(
        "clipped",
        _CLIP_METRICS,
        is_share=True,
        description="Tokens whose policy ratio, value or importance weight is clipped.",
    ),
    Panel("grad_norm", {"policy/grad_norm": "policy", "value/grad_norm": "value"}),
    Panel("explained", {"value/explained_variance": "values"}),
    Panel(
        "mismatch",
        {"mismatch/logprob_abs": "|log-prob difference|", "mismatch/kl": "KL"},
        title="Mismatch of engine and trainer (nats per token)",
        logarithmic=True,
        description=(
            "Absolute difference of the engine's and the trainer's log-probs, and the KL"
            " divergence."
        ),
    ),
    Panel(
        "staleness",
        {"staleness/mean": "mean", "staleness/max": "maximum"},
        title="Staleness (weight versions)",
    ),
    Panel("throughput", {"throughput/tokens_per_s": "tokens/s"}),
)


def build_curves(
    runs: Mapping[str, Metrics], colors: Mapping[str, str] | None = None
) -> Iterator[Plot]:
    """Yield a plot of every metric over the steps of runs: first the panels, then other metrics.

    Each plot contains the curves of all runs. Each point of a curve has a step and `seconds`: the
    total duration of all timed steps up to this step.

    Args:
        runs: The metrics by run name.
        colors: The colors of several runs by run name. If None, each metric of a plot has its own
            color.
    """
    reduced = {
        name: average_bins(_add_seconds(metrics), _MAX_POINTS) for name, metrics in runs.items()
    }
    records_by_run = {name: records for name, (records, _) in reduced.items()}
    bin_size = max((steps for _, steps in reduced.values()), default=1)
    note = f"each point is the mean of {bin_size} steps" if bin_size > 1 else ""

    keys = dict.fromkeys(
        key for records in records_by_run.values() for record in records for key in record
    )
    panel_keys = {key for panel in PANELS for key in panel.metrics} | {"step", _SECONDS}
    other_keys = [
        key
        for key in sorted(keys)
        if key not in panel_keys and not key.startswith(_SPECIAL_PREFIXES)
    ]
    other_panels = [Panel(key, {key: key}) for key in other_keys]
    for panel in (*PANELS, *other_panels):
        curves = {
            (run, key)
            for run, records in records_by_run.items()
            for key in panel.metrics
            if _points(records, key, panel.logarithmic)
        }
        if curves:
            group = OVERVIEW if panel in PANELS else printable(panel.key.partition("/")[0])
            first_metric = next(iter(panel.metrics))
            yield Plot(
                panel.key,
                panel.title or printable(name_metric(first_metric), _MAX_NAME_LENGTH),
                *_build_lines(records_by_run, panel, curves, colors),
                note,
                group=group,
                about=printable(" ".join(panel.metrics)),
                description=panel.description or describe_metric(first_metric),
            )


# Plots of the list of runs by their keys: the metrics of which each run's first one is plotted.
_RUN_PLOTS = {
    "reward": ("reward/mean",),
    "loss": ("sft/loss", "dpo/loss", "reward_model/loss", "policy/loss"),
    "kl": ("kl/reference",),
    "length": ("response/length",),
}


@dataclass(frozen=True)
class PlottedRun:
    """A run whose curves are plotted with those of other runs."""

    key: str
    name: str
    color: str
    curves: Mapping[str, Curve]


def list_run_plot_metrics(metric: str = "") -> list[str]:
    """Return the metrics that `build_run_plots` plots."""
    return [metric] if metric else [name for names in _RUN_PLOTS.values() for name in names]


def build_run_plots(runs: Sequence[PlottedRun], metric: str = "", note: str = "") -> Iterator[Plot]:
    """Yield plots with one curve per run.

    Args:
        runs: The runs.
        metric: The metric of the only plot; if empty, there are plots of the reward, the loss, the
            KL to the reference and the response length, as far as a run measured them.
        note: A remark after the titles.
    """
    plots = {metric: (metric,)} if metric else _RUN_PLOTS
    for key, metrics in plots.items():
        traces = []
        for run in runs:
            measured = [run.curves[name] for name in metrics if name in run.curves]
            if measured:
                traces.append(_build_run_line(run, measured[0]))
        if traces:
            yield Plot(
                key,
                printable(name_metric(metrics[0]), _MAX_NAME_LENGTH),
                traces,
                {"showlegend": False},
                note,
                wide=bool(metric),
                about=printable(" ".join(metrics)),
                description=describe_metric(metric) if metric else "",
            )


def _build_run_line(run: PlottedRun, curve: Curve) -> Trace:
    return {
        "type": "scatter",
        "name": _label(run.name),
        "run": run.key,
        "mode": "lines" if len(curve.steps) > 40 else "lines+markers",
        "x": list(curve.steps),
        "seconds": list(curve.seconds),
        "y": list(curve.values),
        "line": {"color": run.color, "width": 1.6},
        "marker": {"color": run.color, "size": 4},
    }


def build_metric_plots(metrics: Metrics) -> Iterator[Plot]:
    """Yield the plots of a run's metrics: curves, staleness, step time by phase, and response
    lengths."""
    yield from build_curves({"": metrics})
    for key, title, description, total_metric, prefix, build in (
        (
            "staleness_shares",
            "Tokens by staleness (weight versions)",
            "Percentage of the trained tokens by the age of the weights that generated them.",
            "staleness/max",
            _STALENESS_PREFIX,
            _build_staleness_bars,
        ),
        (
            "step_time",
            "Step time by phase (seconds)",
            "Phases of trainer rank 0.",
            "time/step",
            "time/",
            _build_step_time_bars,
        ),
    ):
        records, bin_size = average_bins(
            _fill_missing(prefix, [record for record in metrics if total_metric in record]),
            _MAX_BARS,
        )
        note = f"each bar is the mean of {bin_size} steps" if bin_size > 1 else ""
        if records:
            yield Plot(key, title, *build(records), note, about=prefix, description=description)
    if any(key.startswith(tuple(_LENGTH_PREFIXES)) for record in metrics for key in record):
        yield Plot(
            "lengths",
            "Response lengths over the whole run",
            *_build_length_bars(metrics),
            about="response/length",
            description=(
                "A smaller count of trained responses means that some responses were not trained"
                " on."
            ),
        )


def build_timeline_plots(spans: Sequence[Span]) -> Iterator[Plot]:
    """Yield the utilization of each role and the timeline of each rank in the last steps; nothing
    without a training step."""
    begin, end = steps_window(spans, _UTILIZATION_STEPS)
    if begin == end:
        return
    steps = len(
        [step for step, (start, _) in step_bounds(spans).items() if step > 0 and start >= begin]
    )
    note = (
        f"busy time in the last {steps} steps, mean over the ranks of each role; waiting is not"
        " counted"
    )
    yield Plot(
        "utilization",
        "Utilization",
        *_build_utilization(compute_busy_shares(spans, (begin, end))),
        note,
        wide=True,
    )
    yield _build_timeline(spans, steps_window(spans, _TIMELINE_STEPS))


def _add_seconds(metrics: Metrics) -> Metrics:
    """Return the records with the seconds from the start of the first step to the end of each
    step."""
    seconds = accumulate(record.get("time/step", 0.0) for record in metrics)
    return [{**record, _SECONDS: total} for record, total in zip(metrics, seconds, strict=True)]


def average_bins(metrics: Metrics, limit: int) -> tuple[Metrics, int]:
    """Average consecutive records, so that at most `limit` records remain.

    Returns:
        The averaged records, each with the step of the last record of its bin, and the number of
        records per bin.
    """
    bin_size = math.ceil(len(metrics) / limit)
    if bin_size <= 1:
        return metrics, 1
    bins = [metrics[start : start + bin_size] for start in range(0, len(metrics), bin_size)]
    return [_average(records) for records in bins], bin_size


def _average(records: Metrics) -> dict[str, float]:
    """Return the mean of each metric over the records that contain it, and the last step."""
    keys = dict.fromkeys(key for record in records for key in record)
    values_by_key = {key: [record[key] for record in records if key in record] for key in keys}
    return {key: sum(values) / len(values) for key, values in values_by_key.items()} | {
        "step": records[-1]["step"]
    }


def _fill_missing(prefix: str, metrics: Metrics) -> Metrics:
    """Return the metrics with a prefix, which are parts of a total. A metric that a record lacks is
    0 if another record contains it."""
    keys = dict.fromkeys(key for record in metrics for key in record if key.startswith(prefix))
    return [
        {"step": record["step"], **{key: record.get(key, 0.0) for key in keys}}
        for record in metrics
    ]


def _points(metrics: Metrics, key: str, logarithmic: bool) -> list[tuple[float, float, float]]:
    """Return the steps, seconds and values of a metric, without nonpositive values on a logarithmic
    axis."""
    return [
        (record["step"], record[_SECONDS], record[key])
        for record in metrics
        if key in record and not (logarithmic and record[key] <= 0)
    ]


def _build_lines(
    runs: Mapping[str, Metrics],
    panel: Panel,
    curves: set[tuple[str, str]],
    colors: Mapping[str, str] | None,
) -> tuple[list[Trace], dict[str, Any]]:
    """Return one line per run and metric, and the layout.

    If the runs have colors, each metric has its own dash pattern. Otherwise, each metric has its
    own color.

    Args:
        runs: The records by run name.
        panel: The metrics of the plot.
        curves: The pairs of run and metric that have points.
        colors: See `build_curves`.
    """
    traces: list[Trace] = []
    layout = {
        "showlegend": len(curves) > 1,
        "yaxis": {"type": "log", "exponentformat": "e"} if panel.logarithmic else {},
    }
    has_several_metrics = len({key for _, key in curves}) > 1
    for run, records in runs.items():
        for metric_index, key in enumerate(key for key in panel.metrics if (run, key) in curves):
            color = LINE_COLORS[metric_index % len(LINE_COLORS)] if colors is None else colors[run]
            if colors is None:
                traces += _build_band(records, key, color)
            points = _points(records, key, panel.logarithmic)
            dash = "solid" if colors is None else _DASHES[metric_index % len(_DASHES)]
            metric = panel.metrics[key] if has_several_metrics or not run else ""
            name = _label(" ".join(part for part in (run, metric) if part))
            line = {"color": color, "width": 1.6, "dash": dash}
            mode = "lines" if len(points) > 40 else "lines+markers"
            x, seconds, y = (list(column) for column in zip(*points, strict=True))
            traces.append(
                {
                    "type": "scatter",
                    "name": name,
                    "mode": mode,
                    "x": x,
                    "seconds": seconds,
                    "y": y,
                    "line": line,
                }
            )
            traces[-1]["marker"] = {"color": color, "size": 4}
    # Set the range of the axis. By default, the axis of a curve with the constant value 1 would end
    # at 2.
    if panel.is_share and max(max(trace["y"]) for trace in traces) > 0.5:
        layout["yaxis"] = {"range": [0, 1.05]}
    elif not panel.logarithmic and min(min(trace["y"]) for trace in traces) >= 0:
        layout["yaxis"] = {"rangemode": "nonnegative"}
    return traces, layout


def _build_band(metrics: Metrics, key: str, color: str) -> list[Trace]:
    """Return the area of a metric's interval, or of one standard deviation around a mean; an empty
    list if neither was measured."""
    low = f"{key}_low"
    high = f"{key}_high"
    std = f"{key.removesuffix('/mean')}/std"
    bounds = []
    for record in metrics:
        if key.endswith("/mean") and key in record and std in record:
            bounds.append(
                (
                    record["step"],
                    record[_SECONDS],
                    record[key] - record[std],
                    record[key] + record[std],
                )
            )
        elif not key.endswith("/mean") and low in record and high in record:
            bounds.append((record["step"], record[_SECONDS], record[low], record[high]))
    if not bounds:
        return []
    steps, seconds, lower, upper = (list(column) for column in zip(*bounds, strict=True))
    area = {
        "fill": "toself",
        "fillcolor": "rgba({}, {}, {}, 0.15)".format(*bytes.fromhex(color[1:])),
    }
    # The outline follows the upper bounds forward and the lower bounds backward.
    outline = {
        "x": steps + steps[::-1],
        "seconds": seconds + seconds[::-1],
        "y": upper + lower[::-1],
    }
    return [
        {
            "type": "scatter",
            **outline,
            **area,
            "mode": "none",
            "hoverinfo": "skip",
            "showlegend": False,
        }
    ]


def _build_step_time_bars(metrics: Metrics) -> tuple[list[Trace], dict[str, Any]]:
    phases = [key for key in metrics[0] if key.startswith("time/") and key != "time/step"]
    seconds = {
        phase.removeprefix("time/"): [record[phase] for record in metrics] for phase in phases
    }
    other_seconds = [
        max(0.0, record["time/step"] - sum(record[phase] for phase in phases)) for record in metrics
    ]
    values_by_name = {
        PHASE_SPAN_NAMES.get(phase, phase): values
        for phase, values in {**seconds, "other": other_seconds}.items()
    }
    colors = [_ACTIVITY_COLORS.get(name, _OTHER_COLOR) for name in values_by_name]
    return _stack_bars(metrics, values_by_name, colors), _BARS_LAYOUT


def _build_staleness_bars(metrics: Metrics) -> tuple[list[Trace], dict[str, Any]]:
    lags = sorted(
        int(key.removeprefix(_STALENESS_PREFIX))
        for key in metrics[0]
        if key.startswith(_STALENESS_PREFIX)
    )
    percent = {
        str(lag): [100 * record[f"{_STALENESS_PREFIX}{lag}"] for record in metrics] for lag in lags
    }
    # Interpolate the colors linearly between fresh and stale.
    fractions = [index / max(1, len(lags) - 1) for index in range(len(lags))]
    interpolated = [
        [
            round(fresh + fraction * (stale - fresh))
            for fresh, stale in zip(_FRESH_COLOR, _STALE_COLOR, strict=True)
        ]
        for fraction in fractions
    ]
    colors = ["rgb({}, {}, {})".format(*color) for color in interpolated]
    return _stack_bars(metrics, percent, colors), {
        **_BARS_LAYOUT,
        "yaxis": {"range": [0, 100], "ticksuffix": " %"},
    }


def _build_length_bars(metrics: Metrics) -> tuple[list[Trace], dict[str, Any]]:
    """Return bars of the generated and of the trained responses by length.

    If the two bars of a length differ, some responses of this length were not used for training.
    """
    traces = []
    records = _fill_missing("response/", metrics)
    edges = sorted(
        {int(key.split("_to_")[1]) for key in records[0] if key.startswith(tuple(_LENGTH_PREFIXES))}
    )
    for color, (prefix, name) in zip(LINE_COLORS, _LENGTH_PREFIXES.items(), strict=False):
        counts = [sum(record.get(f"{prefix}{edge}", 0.0) for record in records) for edge in edges]
        labels = [str(edge) if edge < 3 else f"{edge // 2 + 1}-{edge}" for edge in edges]
        traces.append(
            {"type": "bar", "x": labels, "y": counts, "name": name, "marker": {"color": color}}
        )
    axes = {
        "xaxis": {"title": _axis_title("response length (tokens)"), "type": "category"},
        "yaxis": {"title": _axis_title("responses")},
    }
    return traces, {"barmode": "group", "bargap": 0.2, "showlegend": True, **axes}


def _stack_bars(
    metrics: Metrics, parts: Mapping[str, Sequence[float]], colors: Sequence[str]
) -> list[Trace]:
    """Return one stacked bar per record.

    Args:
        metrics: The records.
        parts: The values of each part by its name, one per record.
        colors: The color of each part.
    """
    steps = [record["step"] for record in metrics]
    return [
        {
            "type": "bar",
            "x": steps,
            "y": list(values),
            "name": _label(name),
            "marker": {"color": color},
        }
        for (name, values), color in zip(parts.items(), colors, strict=True)
    ]


def _build_utilization(
    shares: Mapping[str, Mapping[str, float]],
) -> tuple[list[Trace], dict[str, Any]]:
    roles = list(shares)[::-1]  # plotly draws rows from the bottom
    traces = []
    for name in _sort_activities(name for role_shares in shares.values() for name in role_shares):
        percent = [100 * shares[role].get(name, 0.0) for role in roles]
        traces.append(_build_row_bars(name, " %{x:.1f} %", x=percent, y=roles))
    right_of_plot = {"x": 1, "xref": "paper", "xanchor": "left", "showarrow": False}
    sums = [
        {"text": f"<b>{100 * sum(shares[role].values()):.0f} %</b>", "y": role, **right_of_plot}
        for role in roles
    ]
    layout = {
        "barmode": "stack",
        "bargap": 0.35,
        "height": 34 * len(roles) + 80,
        "showlegend": True,
        "annotations": sums,
    }
    axes = {
        "xaxis": {"range": [0, 100], "ticksuffix": " %", "title": {"text": ""}},
        "yaxis": _ROWS_AXIS,
    }
    return traces, {**layout, **axes, "margin": {"r": 52}}


def _build_timeline(spans: Sequence[Span], window: tuple[int, int]) -> Plot:
    """Return a plot with one row per thread, and a vertical line at the start of each step."""
    begin, end = window
    in_window = [span for span in spans if span.end > begin and span.start < end]
    rows, hidden_count = _select_rows(in_window)
    traces = []
    lines = []
    labels = []
    flat_spans = [
        span
        for row in rows
        for span in flatten_spans(span for span in in_window if _row_label(span) == row)
    ]
    for name in _sort_activities(span.name for span in flat_spans):
        activity_spans = [span for span in flat_spans if span.name == name]
        bars = {
            "base": [(span.start - begin) / 1e6 for span in activity_spans],
            "x": [(span.end - span.start) / 1e6 for span in activity_spans],
        }
        hover_data = [
            [span.step, (span.attributes or {}).get("rows", "-")] for span in activity_spans
        ]
        hover = "<br>%{x:.4f} s, step %{customdata[0]}, rows %{customdata[1]}"
        traces.append(
            _build_row_bars(
                name,
                hover,
                y=[_row_label(span) for span in activity_spans],
                customdata=hover_data,
                **bars,
            )
        )
    next_label_x = 0.0
    for step, (start, _) in step_bounds(in_window).items():
        x = (start - begin) / 1e6
        stroke = {"color": _OTHER_COLOR, "width": 0.8, "dash": "dot"}
        lines.append(
            {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": stroke}
        )
        # Labels must not overlap, also on a narrow screen.
        if x < next_label_x:
            continue
        next_label_x = x + _STEP_LABEL_WIDTH * (end - begin) / 1e6
        above_plot = {
            "x": x,
            "y": 1,
            "yref": "paper",
            "yanchor": "bottom",
            "xanchor": "left",
            "showarrow": False,
        }
        labels.append({"text": f"step {step}", "font": {"size": 11}, **above_plot})
    layout = {
        "barmode": "overlay",
        "bargap": 0.25,
        "height": 26 * len(rows) + 120,
        "showlegend": True,
        "margin": {"t": 28},  # above the steps' numbers
        "shapes": lines,
        "annotations": labels,
        "xaxis": {"range": [0, (end - begin) / 1e6], "title": _axis_title("seconds")},
        "yaxis": {**_ROWS_AXIS, "categoryorder": "array", "categoryarray": rows[::-1]},
    }
    note = f"{hidden_count} more ranks are not shown" if hidden_count else ""
    return Plot("timeline", "Timeline of the last steps", traces, layout, note, wide=True)


def _build_row_bars(activity: str, hover: str, **data: Any) -> Trace:
    """Return the horizontal bars of an activity; `data` are further properties of the trace."""
    name = _label(activity)
    marker = {"color": _ACTIVITY_COLORS.get(activity, _OTHER_COLOR), "line": {"width": 0}}
    hover = "%{y}: " + name + hover + "<extra></extra>"
    return {
        "type": "bar",
        "name": name,
        "orientation": "h",
        "marker": marker,
        "hovertemplate": hover,
        **data,
    }


def _axis_title(text: str) -> dict[str, Any]:
    return {"text": text, "font": {"size": 12}}


def _label(text: str) -> str:
    """Return a text with escaped HTML: plotly renders some HTML elements in labels."""
    return escape(printable(text, _MAX_NAME_LENGTH), quote=False)


def _row_label(span: Span) -> str:
    return _label(f"{span.role} {span.rank} {span.thread}".rstrip())


def _select_rows(spans: Sequence[Span]) -> tuple[list[str], int]:
    """Return the labels of the displayed threads, at most the same number for each role, and the
    number of hidden threads."""
    roles = list_roles(spans)
    rows_per_role = max(1, _MAX_TIMELINE_ROWS // len(roles))
    labels_by_role = {
        role: {(span.rank, span.thread): _row_label(span) for span in spans if span.role == role}
        for role in roles
    }
    rows = [
        labels[thread]
        for labels in labels_by_role.values()
        for thread in sorted(labels)[:rows_per_role]
    ]
    return rows, sum(map(len, labels_by_role.values())) - len(rows)


def _sort_activities(names: Iterable[str]) -> list[str]:
    """Return the distinct names: known activities in the order of the legend, then all others."""
    name_set = set(names)
    return [
        *(name for name in _ACTIVITY_COLORS if name in name_set),
        *sorted(name_set - _ACTIVITY_COLORS.keys()),
    ]
