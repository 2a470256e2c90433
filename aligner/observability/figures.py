"""The plots of a run's report, as plotly figures. What a run has not measured has no plot."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plotly import graph_objects as go
from plotly.colors import sample_colorscale

from aligner.observability.timeline import PHASES
from aligner.observability.trace import Span, busy_shares, innermost, roles_of, step_bounds, steps_window

Metrics = Sequence[Mapping[str, float]]

_INK, _GRID = "#4a5059", "#e6e8eb"
_LINES = ("#35618f", "#d9822b", "#4a9b6e", "#b0568f", "#8a6fb5", "#7f8790")
_ACTIVITIES = {
    "batch": "#86aad0",
    "generate": "#35618f",
    "prefill": "#86aad0",
    "logprobs": "#58a6a6",
    "score": "#d8b52d",
    "values": "#a77fb8",
    "train": "#d9822b",
    "critic_train": "#c65b4e",
    "snapshot": "#2f7a52",
    "publish": "#4a9b6e",
    "receive": "#9bcbb0",
    "evaluate": "#8c6d5a",
    "checkpoint": "#7f8790",
    "environments": "#c9a66b",
    "wait": "#dfe2e6",
}
_OTHER = "#b4bac2"
_FRESH, _STALE = "#9cc3e6", "#b0568f"
_SHARE = "staleness/share_"
_LENGTHS = {"response/drawn_to_": "drawn", "response/learned_to_": "learned from"}
_POINTS, _BARS = 1000, 200
_UTILIZATION_STEPS, _TIMELINE_STEPS, _TIMELINE_ROWS = 10, 3, 24


@dataclass(frozen=True)
class Plot:
    """A figure with its place on the page."""

    key: str
    title: str
    figure: go.Figure
    note: str = ""
    wide: bool = False

    def html(self) -> str:
        """The figure for a page that has plotly's script."""
        how = {"displayModeBar": False, "responsive": True}
        return str(self.figure.to_html(full_html=False, include_plotlyjs=False, div_id=f"plot-{self.key}", config=how))


@dataclass(frozen=True)
class Panel:
    """Metrics that are drawn together, each with what it is called there."""

    key: str
    title: str
    metrics: Mapping[str, str]
    logarithmic: bool = False


def _held_out(metric: str, *prefixes: str) -> dict[str, str]:
    """A metric of training under any of the prefixes, and what it is on held-out data."""
    return {**{f"{prefix}/{metric}": "training" for prefix in prefixes}, f"eval/{metric}": "held out"}


_CLIPPED = {f"{kind}/clip_fraction": kind for kind in ("policy", "value")}
_CLIPPED |= {"policy/importance_truncated": "importance weights"}
PANELS = (
    Panel("reward", "Reward", {"reward/mean": "mean"}),
    Panel("kl", "KL to the reference, nats a response", {"kl/reference": "KL"}),
    Panel("length", "Response length, tokens", {"response/length": "mean"}),
    Panel("responses", "Responses", {"response/ended_fraction": "ended", "rollout/kept_fraction": "kept"}),
    Panel("pairs", "Pairs a step", {"preferences/pairs": "pairs", "preferences/without_pair": "prompts without"}),
    Panel("policy_loss", "Policy loss", {"policy/loss": "loss"}),
    Panel("value_loss", "Value loss", {"value/loss": "loss"}),
    Panel("loss", "Loss", _held_out("loss", "sft", "dpo", "reward_model")),
    Panel("accuracy", "Accuracy on pairs", _held_out("accuracy", "dpo", "reward_model", "policy")),
    Panel("margin", "Margin of the chosen over the rejected", _held_out("margin", "dpo", "reward_model", "policy")),
    Panel("score", "Evaluation: score", {"eval/score": "score"}),
    Panel(
        "pass",
        "Evaluation: pass rate and win rate",
        {**{f"eval/pass@{2**power}": f"pass@{2**power}" for power in range(11)}, "eval/win_rate": "win rate"},
    ),
    Panel("perplexity", "Evaluation: the initial model's perplexity", {"eval/reference_perplexity": "perplexity"}),
    Panel("entropy", "Entropy of the policy, nats a token", {"policy/entropy": "entropy"}),
    Panel("approx_kl", "KL of an update", {"policy/approx_kl": "old to new policy"}),
    Panel("clipped", "Clipped share", _CLIPPED),
    Panel("grad_norm", "Gradient norm", {"policy/grad_norm": "policy", "value/grad_norm": "value"}),
    Panel("explained", "Explained variance of returns", {"value/explained_variance": "values"}),
    Panel(
        "mismatch",
        "Mismatch of engine and trainer",
        {"mismatch/logprob_abs": "|log-prob difference|", "mismatch/kl": "behavior KL"},
        logarithmic=True,
    ),
    Panel("staleness", "Staleness, weight versions", {"staleness/mean": "mean", "staleness/max": "maximum"}),
    Panel("throughput", "Tokens a second", {"throughput/tokens_per_s": "tokens/s"}),
)


def metric_plots(metrics: Metrics) -> Iterator[Plot]:
    """A plot of every panel of which something was measured, of staleness, lengths, and where the steps' time went."""
    shown, together = thinned(metrics, _POINTS)
    note = f"each point is the mean of {together} steps" if together > 1 else ""
    for panel in PANELS:
        if any(_points(shown, key, panel.logarithmic) for key in panel.metrics):
            yield Plot(panel.key, panel.title, _lines(shown, panel), note)
    for key, title, whole, prefix, draw in (
        ("staleness_shares", "Tokens by staleness, weight versions", "staleness/max", _SHARE, _staleness_shares),
        ("step_time", "Seconds a step", "time/step", "time/", _step_times),
    ):
        shown, together = thinned(_with_every(prefix, [record for record in metrics if whole in record]), _BARS)
        note = f"each bar is the mean of {together} steps" if together > 1 else ""
        if shown:
            yield Plot(key, title, draw(shown), note)
    if any(key.startswith(tuple(_LENGTHS)) for record in metrics for key in record):
        yield Plot("lengths", "Responses of the whole run by length, tokens", _length_counts(metrics))


def timeline_plots(spans: Sequence[Span]) -> Iterator[Plot]:
    """How busy each role was in the last steps, and what every rank did in the last few; nothing without a whole step."""
    begin, end = steps_window(spans, _UTILIZATION_STEPS)
    if begin == end:
        return
    steps = len([step for step, (start, _) in step_bounds(spans).items() if step > 0 and start >= begin])
    note = f"busy share of the last {steps} steps, a mean over each role's ranks; waiting is not busy"
    yield Plot("utilization", "Utilization", _utilization(busy_shares(spans, (begin, end))), note, wide=True)
    yield _timeline(spans, steps_window(spans, _TIMELINE_STEPS))


def thinned(metrics: Metrics, limit: int) -> tuple[Metrics, int]:
    """At most `limit` records, each the mean of as many steps in a row as the second result says; steps are their last."""
    together = math.ceil(len(metrics) / limit)
    if together <= 1:
        return metrics, 1
    bins = [metrics[start : start + together] for start in range(0, len(metrics), together)]
    return [_mean(records) for records in bins], together


def _mean(records: Metrics) -> dict[str, float]:
    keys = dict.fromkeys(key for record in records for key in record)
    values = {key: [record[key] for record in records if key in record] for key in keys}
    return {key: sum(found) / len(found) for key, found in values.items()} | {"step": records[-1]["step"]}


def _with_every(prefix: str, metrics: Metrics) -> Metrics:
    """The metrics of a prefix, parts of a whole: what a record lacks of what another has is 0 there."""
    keys = dict.fromkeys(key for record in metrics for key in record if key.startswith(prefix))
    return [{"step": record["step"], **{key: record.get(key, 0.0) for key in keys}} for record in metrics]


def _points(metrics: Metrics, key: str, logarithmic: bool) -> list[tuple[float, float]]:
    """Steps and values; a logarithmic axis has no place for those that are not positive."""
    return [(each["step"], each[key]) for each in metrics if key in each and not (logarithmic and each[key] <= 0)]


def _lines(metrics: Metrics, panel: Panel) -> go.Figure:
    drawn = [key for key in panel.metrics if _points(metrics, key, panel.logarithmic)]
    figure = _figure(showlegend=len(drawn) > 1)
    for color, key in zip(_LINES * 3, drawn, strict=False):
        _add_band(figure, metrics, key, color)
        steps, values = zip(*_points(metrics, key, panel.logarithmic), strict=True)
        mode = "lines" if len(steps) > 40 else "lines+markers"
        line, marker = {"color": color, "width": 1.6}, {"color": color, "size": 4}
        figure.add_trace(go.Scatter(x=steps, y=values, name=panel.metrics[key], mode=mode, line=line, marker=marker))
    if panel.logarithmic:
        figure.update_yaxes(type="log", exponentformat="e")
    elif min(min(trace.y) for trace in figure.data) >= 0:
        figure.update_yaxes(rangemode="nonnegative")
    return figure


def _add_band(figure: go.Figure, metrics: Metrics, key: str, color: str) -> None:
    """The interval of a metric that has one, or a standard deviation to either side of the mean."""
    low, high, spread = f"{key}_low", f"{key}_high", f"{key.removesuffix('/mean')}/std"
    bounds = []
    for each in metrics:
        if key.endswith("/mean") and key in each and spread in each:
            bounds.append((each["step"], each[key] - each[spread], each[key] + each[spread]))
        elif not key.endswith("/mean") and low in each and high in each:
            bounds.append((each["step"], each[low], each[high]))
    if bounds:
        steps, lower, upper = (list(column) for column in zip(*bounds, strict=True))
        area = {"fill": "toself", "fillcolor": "rgba({}, {}, {}, 0.15)".format(*bytes.fromhex(color[1:]))}
        hidden = {"mode": "none", "hoverinfo": "skip", "showlegend": False}
        figure.add_trace(go.Scatter(x=steps + steps[::-1], y=upper + lower[::-1], **area, **hidden))


def _step_times(metrics: Metrics) -> go.Figure:
    phases = [key for key in metrics[0] if key.startswith("time/") and key != "time/step"]
    seconds = {phase.removeprefix("time/"): [record[phase] for record in metrics] for phase in phases}
    rest = [max(0.0, record["time/step"] - sum(record[phase] for phase in phases)) for record in metrics]
    named = {PHASES.get(phase, phase): values for phase, values in {**seconds, "other": rest}.items()}
    return _stacked(metrics, named, {name: _ACTIVITIES.get(name, _OTHER) for name in named})


def _staleness_shares(metrics: Metrics) -> go.Figure:
    lags = sorted(int(key.removeprefix(_SHARE)) for key in metrics[0] if key.startswith(_SHARE))
    percent = {str(lag): [100 * record[f"{_SHARE}{lag}"] for record in metrics] for lag in lags}
    colors = sample_colorscale([_FRESH, _STALE], [place / max(1, len(lags) - 1) for place in range(len(lags))])
    figure = _stacked(metrics, percent, dict(zip(percent, colors, strict=True)))
    return figure.update_yaxes(range=[0, 100], ticksuffix=" %")


def _length_counts(metrics: Metrics) -> go.Figure:
    """What was drawn beside what was learned from: a length at which they differ is one that is lost."""
    figure = _figure(barmode="group", bargap=0.2, showlegend=True)
    whole = _with_every("response/", metrics)
    edges = sorted({int(key.split("_to_")[1]) for key in whole[0] if key.startswith(tuple(_LENGTHS))})
    for color, (prefix, name) in zip(_LINES, _LENGTHS.items(), strict=False):
        counts = [sum(record.get(f"{prefix}{edge}", 0.0) for record in whole) for edge in edges]
        labels = [str(edge) if edge < 3 else f"{edge // 2 + 1}-{edge}" for edge in edges]
        figure.add_trace(go.Bar(x=labels, y=counts, name=name, marker={"color": color, "line": {"width": 0}}))
    return figure.update_xaxes(title="tokens", type="category")


def _stacked(metrics: Metrics, parts: Mapping[str, Sequence[float]], colors: Mapping[str, str]) -> go.Figure:
    """A bar a record, of what its parts add up to."""
    figure = _figure(barmode="stack", bargap=0.15, showlegend=True)
    steps = [record["step"] for record in metrics]
    for name, values in parts.items():
        figure.add_trace(go.Bar(x=steps, y=values, name=name, marker={"color": colors[name], "line": {"width": 0}}))
    return figure


def _utilization(shares: Mapping[str, Mapping[str, float]]) -> go.Figure:
    roles = list(shares)[::-1]
    figure = _figure(barmode="stack", bargap=0.35, height=34 * len(roles) + 80, showlegend=True)
    for name in _activities(name for own in shares.values() for name in own):
        percent = [100 * shares[role].get(name, 0.0) for role in roles]
        figure.add_trace(_row_bar(name, " %{x:.1f} %", x=percent, y=roles))
    for role in roles:
        where = {"x": 1, "xref": "paper", "xanchor": "left", "y": role, "showarrow": False}
        figure.add_annotation(text=f"<b>{100 * sum(shares[role].values()):.0f} %</b>", **where)
    figure.update_layout(margin_r=52)
    figure.update_xaxes(range=[0, 100], ticksuffix=" %", title=None)
    figure.update_yaxes(showgrid=False, ticksuffix="  ")
    return figure


def _timeline(spans: Sequence[Span], window: tuple[int, int]) -> Plot:
    begin, end = window
    inside = [span for span in spans if span.end > begin and span.start < end]
    rows, left_out = _rows(inside)
    figure = _figure(barmode="overlay", bargap=0.25, height=26 * len(rows) + 120, showlegend=True)
    figure.update_layout(margin_t=54, legend={"yref": "container", "yanchor": "top", "y": 1})  # above the steps' numbers
    cut = [span for row in rows for span in innermost(span for span in inside if _row(span) == row)]
    for name in _activities(span.name for span in cut):
        own = [span for span in cut if span.name == name]
        bars = {"base": [(span.start - begin) / 1e6 for span in own], "x": [(span.end - span.start) / 1e6 for span in own]}
        about = [[span.step, (span.about or {}).get("rows", "-")] for span in own]
        hover = "<br>%{x:.4f} s, step %{customdata[0]}, rows %{customdata[1]}"
        figure.add_trace(_row_bar(name, hover, y=[_row(span) for span in own], customdata=about, **bars))
    for step, (start, _) in step_bounds(inside).items():
        at = (start - begin) / 1e6
        figure.add_vline(at, line={"color": _INK, "width": 0.8, "dash": "dot"})
        above = {"x": at, "y": 1, "yref": "paper", "yanchor": "bottom", "xanchor": "left", "showarrow": False}
        figure.add_annotation(text=f"step {step}", font={"size": 11}, **above)
    figure.update_xaxes(range=[0, (end - begin) / 1e6], title="seconds")
    figure.update_yaxes(showgrid=False, ticksuffix="  ", categoryorder="array", categoryarray=rows[::-1])
    note = f"{left_out} more ranks are left out" if left_out else ""
    return Plot("timeline", "Timeline of the last steps", figure, note, wide=True)


def _row_bar(activity: str, hover: str, **data: Any) -> go.Bar:
    marker = {"color": _ACTIVITIES.get(activity, _OTHER), "line": {"width": 0}}
    hover = "%{y}: " + activity + hover + "<extra></extra>"
    return go.Bar(name=activity, orientation="h", marker=marker, hovertemplate=hover, **data)


def _row(span: Span) -> str:
    return f"{span.role} {span.rank} {span.thread}".rstrip()


def _rows(spans: Sequence[Span]) -> tuple[list[str], int]:
    """A row a thread, and how many have none: as many of every role as there is room for."""
    roles = roles_of(spans)
    each = max(1, _TIMELINE_ROWS // len(roles))
    threads = {role: {(span.rank, span.thread): _row(span) for span in spans if span.role == role} for role in roles}
    shown = [own[thread] for own in threads.values() for thread in sorted(own)[:each]]
    return shown, sum(map(len, threads.values())) - len(shown)


def _activities(names: Iterator[str]) -> list[str]:
    """Each name once, those that are known first and in their order."""
    found = set(names)
    return [*(name for name in _ACTIVITIES if name in found), *sorted(found - _ACTIVITIES.keys())]


def _figure(**layout: Any) -> go.Figure:
    figure = go.Figure()
    axis = {"gridcolor": _GRID, "zerolinecolor": _GRID, "linecolor": _GRID, "automargin": True}
    figure.update_layout(
        template="none",
        font={"family": "system-ui, sans-serif", "size": 12, "color": _INK},
        margin={"l": 8, "r": 12, "t": 32 if layout.get("showlegend") else 12, "b": 8},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0, "traceorder": "normal"},
        xaxis={**axis, "title": "step"},
        yaxis={**axis},
        hovermode="closest",
        **{"height": 250, "showlegend": False, **layout},
    )
    return figure
