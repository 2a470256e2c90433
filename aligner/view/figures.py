"""The plots of a run's pages, as plotly.js takes them; text and grid have the page's colours.

What was not measured has no plot.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import accumulate
from typing import Any

from aligner.observability.timeline import PHASES
from aligner.observability.trace import (
    Span,
    busy_shares,
    innermost,
    roles_of,
    step_bounds,
    steps_window,
)
from aligner.view.metric_descriptions import describe_metric
from aligner.view.shown_text import printable

Metrics = Sequence[Mapping[str, float]]
Trace = dict[str, Any]

OVERVIEW = "overview"
"""The group of the plots that say most of a run; any other metric is in that of its name's first
part."""

_LINES = ("#4786c6", "#d9822b", "#3f9d68", "#b85f9b", "#8a78cf", "#8a929c")
_DASHES = ("solid", "dash", "dot", "dashdot")
_ACTIVITIES = {
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
    "evaluate": "#8c6d5a",
    "checkpoint": "#7f8790",
    "environments": "#c9a66b",
    "wait": "rgba(138, 146, 156, 0.3)",
}
_OTHER = "#b4bac2"
_FRESH, _STALE = (156, 195, 230), (176, 86, 143)
_SHARE = "staleness/share_"
_LENGTHS = {"response/generated_to_": "generated", "response/trained_to_": "trained on"}
_OWN_PLOTS = (*_LENGTHS, _SHARE)
_SECONDS = "seconds"  # no metric: those have a / in their names
_POINTS, _BARS = 1000, 200
_LONGEST_NAME = 120
_BARS_LAYOUT = {"barmode": "stack", "bargap": 0.15, "showlegend": True}
_ROWS_AXIS = {"showgrid": False, "ticksuffix": "  "}
_UTILIZATION_STEPS, _TIMELINE_STEPS, _TIMELINE_ROWS = 10, 3, 24


@dataclass(frozen=True)
class Plot:
    """A figure with its place on the page."""

    key: str
    title: str
    traces: Sequence[Trace]
    layout: Mapping[str, Any]
    note: str = ""
    wide: bool = False
    group: str = OVERVIEW
    about: str = ""
    """The names of its metrics, which a search finds."""
    description: str = ""
    """One sentence that explains what the plot shows."""

    def content(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Panel:
    """Metrics that are drawn together, each with what it is called there."""

    key: str
    title: str
    metrics: Mapping[str, str]
    logarithmic: bool = False
    is_share: bool = False
    """Whether its values are parts of a whole, from 0 to 1."""
    description: str = ""
    """One sentence that explains the plot; empty: the description of its first metric."""


def _held_out(metric: str, *prefixes: str) -> dict[str, str]:
    """A metric of training under any of the prefixes, and what it is on held-out data."""
    return {
        **{f"{prefix}/{metric}": "training" for prefix in prefixes},
        f"eval/{metric}": "held out",
    }


_CLIPPED = {f"{kind}/clip_fraction": kind for kind in ("policy", "value")}
_CLIPPED |= {"policy/importance_truncated": "importance weights"}
PANELS = (
    Panel("reward", "Reward", {"reward/mean": "mean"}),
    Panel(
        "reward_quantiles",
        "Reward quantiles",
        {f"reward/p{share}": f"{share} %" for share in (10, 50, 90)},
        description="10th, 50th and 90th percentile of the scores of a step.",
    ),
    Panel(
        "kl",
        "KL to the reference (nats per response)",
        {"kl/reference": "training", "eval/reference_kl": "evaluation"},
    ),
    Panel("length", "Response length (tokens)", {"response/length": "mean"}),
    Panel(
        "responses",
        "Complete and kept responses (fraction)",
        {"response/ended_fraction": "complete", "rollout/kept_fraction": "kept"},
        is_share=True,
        description=(
            "Complete responses ended before the length limit. Kept responses have a score and"
            " passed dynamic sampling."
        ),
    ),
    Panel(
        "pairs",
        "Preference pairs per step",
        {"preferences/pairs": "pairs", "preferences/without_pair": "prompts without a pair"},
    ),
    Panel("policy_loss", "Policy loss", {"policy/loss": "loss"}),
    Panel("value_loss", "Value loss", {"value/loss": "loss"}),
    Panel("loss", "Loss", _held_out("loss", "sft", "dpo", "reward_model")),
    Panel(
        "accuracy", "Accuracy (fraction)", _held_out("accuracy", "dpo", "reward_model", "policy")
    ),
    Panel(
        "margin",
        "Reward margin, chosen minus rejected",
        _held_out("margin", "dpo", "reward_model", "policy"),
    ),
    Panel("score", "Evaluation: score", {"eval/score": "score"}),
    Panel(
        "pass",
        "Evaluation: pass rate and win rate (fraction)",
        {f"eval/pass@{2**power}": f"pass@{2**power}" for power in range(11)}
        | {"eval/win_rate": "win rate", "eval/judge_win_rate": "judged win rate"},
        description=(
            "pass@k: probability that at least one of k responses passes. Win rate: fraction of"
            " responses that score above the reference."
        ),
    ),
    Panel(
        "perplexity",
        "Evaluation: perplexity under the initial model",
        {"eval/reference_perplexity": "perplexity"},
    ),
    Panel("entropy", "Entropy of the policy (nats per token)", {"policy/entropy": "entropy"}),
    Panel(
        "approx_kl", "KL of the updates (nats per token)", {"policy/approx_kl": "old to new policy"}
    ),
    Panel(
        "clipped",
        "Clipped tokens (fraction)",
        _CLIPPED,
        is_share=True,
        description="Tokens whose policy ratio, value or importance weight is clipped.",
    ),
    Panel("grad_norm", "Gradient norm", {"policy/grad_norm": "policy", "value/grad_norm": "value"}),
    Panel("explained", "Explained variance of the critic", {"value/explained_variance": "values"}),
    Panel(
        "mismatch",
        "Mismatch of engine and trainer (nats per token)",
        {"mismatch/logprob_abs": "|log-prob difference|", "mismatch/kl": "KL"},
        logarithmic=True,
        description=(
            "Absolute difference of the engine's and the trainer's log-probs, and the KL"
            " divergence."
        ),
    ),
    Panel(
        "staleness",
        "Staleness (weight versions)",
        {"staleness/mean": "mean", "staleness/max": "maximum"},
    ),
    Panel("throughput", "Throughput (tokens per second)", {"throughput/tokens_per_s": "tokens/s"}),
)


def curves(runs: Mapping[str, Metrics]) -> Iterator[Plot]:
    """Every metric of some runs by step, several runs over each other: first the panels, then what
    is in none of them.

    A trace has beside its steps the `seconds` that the run had taken by then, as far as steps were
    timed.
    """
    thin = {name: thinned(_timed(metrics), _POINTS) for name, metrics in runs.items()}
    shown = {name: records for name, (records, _) in thin.items()}
    together = max((steps for _, steps in thin.values()), default=1)
    note = f"each point is the mean of {together} steps" if together > 1 else ""
    keys = dict.fromkeys(key for records in shown.values() for record in records for key in record)
    in_panels = {key for panel in PANELS for key in panel.metrics} | {"step", _SECONDS}
    left = [key for key in sorted(keys) if key not in in_panels and not key.startswith(_OWN_PLOTS)]
    alone = [Panel(key, printable(key, _LONGEST_NAME), {key: key}) for key in left]
    for panel in (*PANELS, *alone):
        drawn = {
            (run, key)
            for run, records in shown.items()
            for key in panel.metrics
            if _points(records, key, panel.logarithmic)
        }
        if drawn:
            group = OVERVIEW if panel in PANELS else panel.title.partition("/")[0]
            yield Plot(
                panel.key,
                panel.title,
                *_lines(shown, panel, drawn),
                note,
                group=group,
                about=" ".join(panel.metrics),
                description=panel.description or describe_metric(next(iter(panel.metrics))),
            )


def metric_plots(metrics: Metrics) -> Iterator[Plot]:
    """A run's curves, staleness, lengths, and where the steps' time went."""
    yield from curves({"": metrics})
    for key, title, description, whole, prefix, draw in (
        (
            "staleness_shares",
            "Tokens by staleness (weight versions)",
            "Percentage of the trained tokens by the age of the weights that generated them.",
            "staleness/max",
            _SHARE,
            _staleness_shares,
        ),
        (
            "step_time",
            "Step time by phase (seconds)",
            "Phases of trainer rank 0.",
            "time/step",
            "time/",
            _step_times,
        ),
    ):
        shown, together = thinned(
            _with_every(prefix, [record for record in metrics if whole in record]), _BARS
        )
        note = f"each bar is the mean of {together} steps" if together > 1 else ""
        if shown:
            yield Plot(key, title, *draw(shown), note, about=prefix, description=description)
    if any(key.startswith(tuple(_LENGTHS)) for record in metrics for key in record):
        yield Plot(
            "lengths",
            "Response lengths over the whole run",
            *_length_counts(metrics),
            about="response/length",
            description=(
                "A smaller count of trained responses means that some responses were not trained"
                " on."
            ),
        )


def timeline_plots(spans: Sequence[Span]) -> Iterator[Plot]:
    """How busy each role was in the last steps, and what every rank did in the last few; nothing
    without a whole step."""
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
        *_utilization(busy_shares(spans, (begin, end))),
        note,
        wide=True,
    )
    yield _timeline(spans, steps_window(spans, _TIMELINE_STEPS))


def _timed(metrics: Metrics) -> Metrics:
    """With the seconds from the first step's start to each one's end."""
    seconds = accumulate(record.get("time/step", 0.0) for record in metrics)
    return [{**record, _SECONDS: spent} for record, spent in zip(metrics, seconds, strict=True)]


def thinned(metrics: Metrics, limit: int) -> tuple[Metrics, int]:
    """At most `limit` records, each the mean of as many steps in a row as the second result says;
    steps are their last."""
    together = math.ceil(len(metrics) / limit)
    if together <= 1:
        return metrics, 1
    bins = [metrics[start : start + together] for start in range(0, len(metrics), together)]
    return [_mean(records) for records in bins], together


def _mean(records: Metrics) -> dict[str, float]:
    keys = dict.fromkeys(key for record in records for key in record)
    values = {key: [record[key] for record in records if key in record] for key in keys}
    return {key: sum(found) / len(found) for key, found in values.items()} | {
        "step": records[-1]["step"]
    }


def _with_every(prefix: str, metrics: Metrics) -> Metrics:
    """The metrics of a prefix, parts of a whole: what a record lacks of what another has is 0
    there."""
    keys = dict.fromkeys(key for record in metrics for key in record if key.startswith(prefix))
    return [
        {"step": record["step"], **{key: record.get(key, 0.0) for key in keys}}
        for record in metrics
    ]


def _points(metrics: Metrics, key: str, logarithmic: bool) -> list[tuple[float, float, float]]:
    """Steps, seconds and values; a logarithmic axis has no place for those that are not
    positive."""
    return [
        (each["step"], each[_SECONDS], each[key])
        for each in metrics
        if key in each and not (logarithmic and each[key] <= 0)
    ]


def _lines(
    runs: Mapping[str, Metrics], panel: Panel, drawn: set[tuple[str, str]]
) -> tuple[list[Trace], dict[str, Any]]:
    """A line a run and metric: of one run each metric has a colour, of several each run, and
    metrics are told by dashes."""
    traces: list[Trace] = []
    layout = {
        "showlegend": len(drawn) > 1,
        "yaxis": {"type": "log", "exponentformat": "e"} if panel.logarithmic else {},
    }
    for place, (run, records) in enumerate(runs.items()):
        for number, key in enumerate(key for key in panel.metrics if (run, key) in drawn):
            color = _LINES[(place if len(runs) > 1 else number) % len(_LINES)]
            if len(runs) == 1:
                traces += _band(records, key, color)
            points = _points(records, key, panel.logarithmic)
            dash = _DASHES[number % len(_DASHES)] if len(runs) > 1 else "solid"
            metric = panel.metrics[key] if len(panel.metrics) > 1 or not run else ""
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
    # all of them 1 would have an axis to 2
    if panel.is_share and max(max(trace["y"]) for trace in traces) > 0.5:
        layout["yaxis"] = {"range": [0, 1.05]}
    elif not panel.logarithmic and min(min(trace["y"]) for trace in traces) >= 0:
        layout["yaxis"] = {"rangemode": "nonnegative"}
    return traces, layout


def _band(metrics: Metrics, key: str, color: str) -> list[Trace]:
    """The interval of a metric that has one, or a standard deviation to either side of the mean."""
    low, high, spread = f"{key}_low", f"{key}_high", f"{key.removesuffix('/mean')}/std"
    bounds = []
    for each in metrics:
        if key.endswith("/mean") and key in each and spread in each:
            bounds.append(
                (each["step"], each[_SECONDS], each[key] - each[spread], each[key] + each[spread])
            )
        elif not key.endswith("/mean") and low in each and high in each:
            bounds.append((each["step"], each[_SECONDS], each[low], each[high]))
    if not bounds:
        return []
    steps, seconds, lower, upper = (list(column) for column in zip(*bounds, strict=True))
    area = {
        "fill": "toself",
        "fillcolor": "rgba({}, {}, {}, 0.15)".format(*bytes.fromhex(color[1:])),
    }
    places = {
        "x": steps + steps[::-1],
        "seconds": seconds + seconds[::-1],
        "y": upper + lower[::-1],
    }
    return [
        {
            "type": "scatter",
            **places,
            **area,
            "mode": "none",
            "hoverinfo": "skip",
            "showlegend": False,
        }
    ]


def _step_times(metrics: Metrics) -> tuple[list[Trace], dict[str, Any]]:
    phases = [key for key in metrics[0] if key.startswith("time/") and key != "time/step"]
    seconds = {
        phase.removeprefix("time/"): [record[phase] for record in metrics] for phase in phases
    }
    rest = [
        max(0.0, record["time/step"] - sum(record[phase] for phase in phases)) for record in metrics
    ]
    named = {
        PHASES.get(phase, phase): values for phase, values in {**seconds, "other": rest}.items()
    }
    return _stacked(metrics, named, [_ACTIVITIES.get(name, _OTHER) for name in named]), _BARS_LAYOUT


def _staleness_shares(metrics: Metrics) -> tuple[list[Trace], dict[str, Any]]:
    lags = sorted(int(key.removeprefix(_SHARE)) for key in metrics[0] if key.startswith(_SHARE))
    percent = {str(lag): [100 * record[f"{_SHARE}{lag}"] for record in metrics] for lag in lags}
    places = [place / max(1, len(lags) - 1) for place in range(len(lags))]
    mixed = [
        [round(a + place * (b - a)) for a, b in zip(_FRESH, _STALE, strict=True)]
        for place in places
    ]
    colors = ["rgb({}, {}, {})".format(*color) for color in mixed]
    return _stacked(metrics, percent, colors), {
        **_BARS_LAYOUT,
        "yaxis": {"range": [0, 100], "ticksuffix": " %"},
    }


def _length_counts(metrics: Metrics) -> tuple[list[Trace], dict[str, Any]]:
    """What was drawn beside what was learned from: a length at which they differ is one that is
    lost."""
    traces = []
    whole = _with_every("response/", metrics)
    edges = sorted(
        {int(key.split("_to_")[1]) for key in whole[0] if key.startswith(tuple(_LENGTHS))}
    )
    for color, (prefix, name) in zip(_LINES, _LENGTHS.items(), strict=False):
        counts = [sum(record.get(f"{prefix}{edge}", 0.0) for record in whole) for edge in edges]
        labels = [str(edge) if edge < 3 else f"{edge // 2 + 1}-{edge}" for edge in edges]
        traces.append(
            {"type": "bar", "x": labels, "y": counts, "name": name, "marker": {"color": color}}
        )
    axes = {
        "xaxis": {"title": _axis_title("response length (tokens)"), "type": "category"},
        "yaxis": {"title": _axis_title("responses")},
    }
    return traces, {"barmode": "group", "bargap": 0.2, "showlegend": True, **axes}


def _stacked(
    metrics: Metrics, parts: Mapping[str, Sequence[float]], colors: Sequence[str]
) -> list[Trace]:
    """A bar a record, of what its parts add up to."""
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


def _utilization(shares: Mapping[str, Mapping[str, float]]) -> tuple[list[Trace], dict[str, Any]]:
    roles = list(shares)[::-1]
    traces = []
    for name in _activities(name for own in shares.values() for name in own):
        percent = [100 * shares[role].get(name, 0.0) for role in roles]
        traces.append(_row_bar(name, " %{x:.1f} %", x=percent, y=roles))
    beside = {"x": 1, "xref": "paper", "xanchor": "left", "showarrow": False}
    sums = [
        {"text": f"<b>{100 * sum(shares[role].values()):.0f} %</b>", "y": role, **beside}
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


def _timeline(spans: Sequence[Span], window: tuple[int, int]) -> Plot:
    begin, end = window
    inside = [span for span in spans if span.end > begin and span.start < end]
    rows, left_out = _rows(inside)
    traces, lines, labels = [], [], []
    cut = [span for row in rows for span in innermost(span for span in inside if _row(span) == row)]
    for name in _activities(span.name for span in cut):
        own = [span for span in cut if span.name == name]
        bars = {
            "base": [(span.start - begin) / 1e6 for span in own],
            "x": [(span.end - span.start) / 1e6 for span in own],
        }
        about = [[span.step, (span.about or {}).get("rows", "-")] for span in own]
        hover = "<br>%{x:.4f} s, step %{customdata[0]}, rows %{customdata[1]}"
        traces.append(
            _row_bar(name, hover, y=[_row(span) for span in own], customdata=about, **bars)
        )
    for step, (start, _) in step_bounds(inside).items():
        at = (start - begin) / 1e6
        stroke = {"color": _OTHER, "width": 0.8, "dash": "dot"}
        lines.append(
            {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper", "line": stroke}
        )
        above = {
            "x": at,
            "y": 1,
            "yref": "paper",
            "yanchor": "bottom",
            "xanchor": "left",
            "showarrow": False,
        }
        labels.append({"text": f"step {step}", "font": {"size": 11}, **above})
    layout = {
        "barmode": "overlay",
        "bargap": 0.25,
        "height": 26 * len(rows) + 120,
        "showlegend": True,
        "margin": {"t": 54},
        "legend": {"yref": "container", "yanchor": "top", "y": 1},  # above the steps' numbers
        "shapes": lines,
        "annotations": labels,
        "xaxis": {"range": [0, (end - begin) / 1e6], "title": _axis_title("seconds")},
        "yaxis": {**_ROWS_AXIS, "categoryorder": "array", "categoryarray": rows[::-1]},
    }
    note = f"{left_out} more ranks are not shown" if left_out else ""
    return Plot("timeline", "Timeline of the last steps", traces, layout, note, wide=True)


def _row_bar(activity: str, hover: str, **data: Any) -> Trace:
    name = _label(activity)
    marker = {"color": _ACTIVITIES.get(activity, _OTHER), "line": {"width": 0}}
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
    """As plotly shows it, which takes some elements of HTML."""
    return escape(printable(text, _LONGEST_NAME), quote=False)


def _row(span: Span) -> str:
    return _label(f"{span.role} {span.rank} {span.thread}".rstrip())


def _rows(spans: Sequence[Span]) -> tuple[list[str], int]:
    """A row a thread, and how many have none: as many of every role as there is room for."""
    roles = roles_of(spans)
    each = max(1, _TIMELINE_ROWS // len(roles))
    threads = {
        role: {(span.rank, span.thread): _row(span) for span in spans if span.role == role}
        for role in roles
    }
    shown = [own[thread] for own in threads.values() for thread in sorted(own)[:each]]
    return shown, sum(map(len, threads.values())) - len(shown)


def _activities(names: Iterable[str]) -> list[str]:
    """Each name once, those that are known first and in their order."""
    found = set(names)
    return [*(name for name in _ACTIVITIES if name in found), *sorted(found - _ACTIVITIES.keys())]
