from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import markupsafe
import pytest

from aligner.cli import main
from aligner.config.compose import compose_config, save_config
from aligner.errors import ConfigError
from aligner.observability.figures import PANELS, metric_plots, thinned, timeline_plots
from aligner.observability.metrics import MetricsWriter, RecordWriter, read_metrics
from aligner.observability.report import write_report
from aligner.observability.timeline import Timeline
from aligner.observability.trace import read_spans
from aligner.paths import RunPaths
from tests.observability.browser import show
from tests.observability.traces import checked_trace

STEPS = 30
HOSTILE = "</td><script>alert('sample')</script><img src=x onerror=alert(1)>\x1b[2J\u202e"
PHASES = {"generate": 0.5, "logprobs": 0.2, "server_wait": 0.1, "train": 0.6, "reshard": 0.05}
SHARES = ({"staleness/share_0": 1.0}, {"staleness/share_0": 0.25, "staleness/share_1": 0.5, "staleness/share_10": 0.25})
LENGTHS = ({"response/drawn_to_2": 3.0, "response/learned_to_2": 3.0}, {"response/drawn_to_8": 2.0})
"""By turns, so that what a step lacks is none."""


def begin(root: Path, *overrides: str) -> RunPaths:
    """A run directory with its configuration."""
    paths = RunPaths(root)
    root.mkdir(parents=True)
    save_config(compose_config([*overrides, f"run.dir={root}", f"run.steps={STEPS}"]), paths.config)
    return paths


def write_metrics(paths: RunPaths, keys: list[str], steps: int = STEPS) -> None:
    writer = MetricsWriter(paths)
    for step in range(1, steps + 1):
        stats = {key: 0.5 + 0.4 * math.sin(step / 5 + place) for place, key in enumerate(keys)}
        stats |= {f"time/{phase}": seconds for phase, seconds in PHASES.items()} | {"time/step": 1.5}
        writer.write(step, stats | ({**SHARES[step % 2], **LENGTHS[step % 2]} if "staleness/max" in keys else {}))


def write_timeline(paths: RunPaths, steps: int) -> None:
    """Two trainers; a critic that begins a step's values while they wait for samples; a generator beside their training."""
    times = iter(range(10_000))
    files = [paths.timeline / f"{rank}.jsonl" for rank in ("trainer-0", "trainer-1", "critic-0", "generator-0")]
    first, second, critic, generator = (Timeline(file, clock=lambda: 0.0, wall_clock=lambda: 1.7e9) for file in files)
    for step in range(1, steps + 1):
        for trainer in (first, second):
            trainer.begin_step(step)
        for name in ("generate", "logprobs", "wait", "train", "publish"):
            now = next(times)
            for trainer in (first, second):
                trainer.add(name, now, now + 1)
            if name in ("generate", "train"):
                critic.add({"generate": "values", "train": "critic_train"}[name], now + 0.5, now + 1, rows=8)
            if name in ("train", "publish"):
                generator.add({"train": "generate", "publish": "receive"}[name], now, now + 1, rows=8)
    for timeline in (first, second, critic, generator):
        timeline.flush()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A run that has measured everything, with texts that would be scripts."""
    paths = begin(
        tmp_path_factory.mktemp("report") / "run",
        "experiment=tiny_ppo",
        "model.source=directory",
        f"model.path={json.dumps(HOSTILE[:40])}",
    )
    bounds = [f"eval/score{end}" for end in ("_low", "_high")]
    write_metrics(paths, [*dict.fromkeys(key for panel in PANELS for key in panel.metrics), "reward/std", *bounds])
    samples = RecordWriter(paths.samples)
    for step in (1, 5, 30):
        samples.write(step, [{"prompt": f"{step} {HOSTILE}", "response": HOSTILE * 100, "reward": 0.25}] * 4)
    write_timeline(paths, STEPS)
    write_report(paths.root)
    return paths


def plots(paths: RunPaths) -> dict[str, int]:
    """The plots of a page, with the traces that each should have."""
    drawn = [*timeline_plots(read_spans(paths)), *metric_plots(read_metrics(paths.metrics))]
    return {f"plot-{plot.key}": len(plot.figure.data) for plot in drawn}


def written(paths: RunPaths) -> str:
    """A run's page without the library that every page holds."""
    from plotly.offline import get_plotlyjs

    return paths.report.read_text().replace(get_plotlyjs(), "")


def plots_of(page: str) -> set[str]:
    return set(re.findall(r'<div id="(plot-\w+)"', page))


@pytest.mark.slow
def test_a_browser_draws_every_plot_and_has_nothing_to_complain_of(run: RunPaths, tmp_path: Path) -> None:
    shown, expected = show(run.report, tmp_path), plots(run)
    assert expected.keys() == {
        f"plot-{key}"
        for key in ("utilization", "timeline", "staleness_shares", "lengths", "step_time", *(p.key for p in PANELS))
    }
    assert shown.console == []
    assert shown.traces() == expected
    assert min(shown.colored_pixels().values()) > 100, shown.colored_pixels()
    assert "<script>alert" not in shown.dom and "<img src=x" not in shown.dom


def test_what_a_model_writes_is_text_on_the_page(run: RunPaths) -> None:
    page = written(run)
    assert "<script>alert" not in page and "<img" not in page
    assert markupsafe.escape(HOSTILE[:20]) in page
    assert "\x1b" not in page and "\u202e" not in page and r"\x1b[2J\u202e" in page
    assert f"{len(HOSTILE) * 100 - 1500} characters more" in page


def test_the_page_asks_for_nothing_from_elsewhere(run: RunPaths) -> None:
    page = written(run)
    assert "default-src 'none'" in page
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)


def test_the_trace_is_written_with_the_page(run: RunPaths) -> None:
    trace = checked_trace(run.trace)
    assert {role: len(events) for role, events in trace.items()} == {
        "trainer": 2 * 5 * STEPS,
        "generator": 2 * STEPS,
        "critic": 2 * STEPS,
    }
    assert {event["args"]["step"] for event in trace["critic"]} == set(range(1, STEPS + 1))


def test_busy_shares_are_shown_without_what_is_waited(run: RunPaths) -> None:
    utilization = next(iter(timeline_plots(read_spans(run)))).figure
    assert [note.text.strip() for note in utilization.layout.annotations] == ["<b>20 %</b>", "<b>40 %</b>", "<b>80 %</b>"]
    assert [bar.name for bar in utilization.data] == [
        *("generate", "logprobs", "values", "train", "critic_train", "publish", "receive")
    ]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (1, {"0": [25, 100] * 15, "1": [50, 0] * 15, "10": [25, 0] * 15}),
        (10, {"0": [62.5] * 150, "1": [25] * 150, "10": [12.5] * 150}),  # each bar is the mean of two steps
    ],
)
def test_the_tokens_of_every_step_add_up_whichever_staleness_it_lacks(
    run: RunPaths, times: int, expected: dict[str, list[float]]
) -> None:
    shares = next(plot for plot in metric_plots(read_metrics(run.metrics) * times) if plot.key == "staleness_shares")
    assert {bar.name: list(bar.y) for bar in shares.figure.data} == expected


def test_a_length_at_which_responses_are_lost_is_seen(run: RunPaths) -> None:
    (figure,) = [plot.figure for plot in metric_plots(read_metrics(run.metrics)) if plot.key == "lengths"]
    drawn, learned = figure.data
    assert (drawn.name, list(drawn.x), list(drawn.y)) == ("drawn", ["2", "5-8"], [45, 30])
    assert (learned.name, list(learned.x), list(learned.y)) == ("learned from", ["2", "5-8"], [45, 0])


def test_an_offline_run_has_the_plots_of_what_it_measured(tmp_path: Path) -> None:
    data = f"data.path={tmp_path / 'pairs.jsonl'}"
    paths = begin(tmp_path / "run", "experiment=tiny_ppo", "algorithm=dpo", data, "data.max_response_tokens=8")
    write_metrics(paths, ["dpo/loss", "dpo/accuracy", "eval/loss"])
    write_report(paths.root)
    page = written(paths)
    assert plots_of(page) == {"plot-loss", "plot-accuracy", "plot-step_time"}
    assert plots(paths) == {"plot-loss": 2, "plot-accuracy": 1, "plot-step_time": len(PHASES) + 1}
    assert not paths.trace.exists() and "Samples" not in page and "30 of 30 steps<" in page


def test_a_run_that_was_killed_before_its_first_step_has_a_page(tmp_path: Path) -> None:
    paths = begin(tmp_path / "run", "experiment=tiny_ppo")
    write_report(paths.root)
    page = written(paths)
    assert "No step has been recorded yet" in page and "0 of 30 steps so far" in page
    assert "digit_fraction" in page and plots_of(page) == set()


def test_a_run_that_goes_on_has_the_steps_so_far(tmp_path: Path) -> None:
    paths = begin(tmp_path / "run", "experiment=tiny_ppo")
    write_metrics(paths, ["reward/mean"], steps=1)
    write_timeline(paths, 1)
    for file in (paths.metrics, paths.timeline / "trainer-0.jsonl"):
        with file.open("a") as unfinished:
            unfinished.write('{"step": 2, "rew')
    write_report(paths.root, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert not paths.report.exists()
    assert "1 of 30 steps so far" in page
    assert plots_of(page) == {f"plot-{key}" for key in ("utilization", "timeline", "reward", "step_time")}


def test_many_steps_are_drawn_as_means_of_steps_in_a_row() -> None:
    metrics = [{"step": step, "reward/mean": step, **({"eval/score": 1.0} if step == 4 else {})} for step in range(1, 8)]
    assert thinned(metrics, 7) == (metrics, 1)
    assert thinned(metrics, 3) == (
        [{"step": 3, "reward/mean": 2.0}, {"step": 6, "reward/mean": 5.0, "eval/score": 1.0}, {"step": 7, "reward/mean": 7.0}],
        3,
    )


def test_what_is_no_run_or_has_no_place_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="nowhere: no such directory"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.yaml: no such configuration file"):
        write_report(tmp_path)
    paths = begin(tmp_path / "run", "experiment=tiny_ppo")
    with pytest.raises(ConfigError, match=r"--output .*: there is no directory"):
        write_report(paths.root, tmp_path / "missing" / "page.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"folder: cannot be written: Is a directory"):
        write_report(paths.root, tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "run"]
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ConfigError, match=r"pip install 'aligner\[report\]'"):
        write_report(paths.root)
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(paths.root)])
    assert "aligner: error: aligner report needs the plotly package" in capsys.readouterr().err
