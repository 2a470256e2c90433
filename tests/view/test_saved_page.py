"""Saved reports (`aligner report`): plots, escaped texts, traces, and refused paths."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import markupsafe
import pytest

from aligner.cli import main
from aligner.errors import ConfigError
from aligner.observability.metrics import RecordWriter, read_metrics
from aligner.observability.trace import read_spans
from aligner.paths import RunPaths
from aligner.view.figures import (
    PANELS,
    Plot,
    average_bins,
    build_metric_plots,
    build_timeline_plots,
)
from aligner.view.rendering import find_plotly_script
from aligner.view.run_notes import RunNotes, write_notes
from aligner.view.saved_page import write_report
from tests.observability.traces import checked_trace
from tests.view.test_failed_run import CAUSE, REASON, TRACEBACK
from tests.view.written_runs import (
    HOSTILE,
    PHASES,
    STEPS,
    begin,
    end,
    write_metrics,
    write_timeline,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A run with all metrics, and texts that contain scripts."""
    paths = begin(
        tmp_path_factory.mktemp("report") / "run",
        "experiment=tiny_ppo",
        "model.source=directory",
        f"model.path={json.dumps(HOSTILE[:40])}",
    )
    bounds = [f"eval/score{end}" for end in ("_low", "_high")]
    write_metrics(
        paths,
        [*dict.fromkeys(key for panel in PANELS for key in panel.metrics), "reward/std", *bounds],
    )
    samples = RecordWriter(paths.samples)
    for step in (1, 5, 30):
        samples.write(
            step, [{"prompt": f"{step} {HOSTILE}", "response": HOSTILE * 100, "reward": 0.25}] * 4
        )
    write_timeline(paths, STEPS)
    write_report(paths.root)
    return paths


def plots(paths: RunPaths) -> dict[str, int]:
    """Return the expected number of traces of each plot on a run's page."""
    drawn = [
        *build_timeline_plots(read_spans(paths)),
        *build_metric_plots(read_metrics(paths.metrics)),
    ]
    return {plot.key: len(plot.traces) for plot in drawn}


def page_without_plotly(page: Path) -> str:
    """Return the page without the plotting library."""
    return page.read_text().replace(find_plotly_script().read_text(), "")


def plots_of(page: str) -> set[str]:
    """Return the keys of the plots whose data the page contains."""
    return {
        plot["key"]
        for data in re.findall(r'<script type="application/json".*?>(.*?)</script>', page)
        for plot in json.loads(data)
    }


def find_plot(plots: Any, key: str) -> Plot:
    return next(plot for plot in plots if plot.key == key)


def test_model_texts_are_escaped_in_report(run: RunPaths) -> None:
    page = page_without_plotly(run.report)
    assert "<script>alert" not in page and "<img" not in page
    assert markupsafe.escape(HOSTILE[:20]) in page
    assert "\x1b" not in page and "\u202e" not in page and r"\x1b[2J\u202e\x00" in page


def test_report_loads_nothing_from_network(run: RunPaths) -> None:
    page = page_without_plotly(run.report)
    assert "default-src &#39;none&#39;; script-src &#39;sha256-" in page
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)


def test_trace_is_written_with_report(run: RunPaths) -> None:
    trace = checked_trace(run.trace)
    assert {role: len(events) for role, events in trace.items()} == {
        "trainer": 2 * 5 * STEPS,
        "generator": 2 * STEPS,
        "critic": 2 * STEPS,
    }
    assert {event["args"]["step"] for event in trace["critic"]} == set(range(1, STEPS + 1))


def test_utilization_excludes_waiting_time(run: RunPaths) -> None:
    utilization = find_plot(build_timeline_plots(read_spans(run)), "utilization")
    assert [note["text"] for note in utilization.layout["annotations"]] == [
        "<b>20 %</b>",
        "<b>40 %</b>",
        "<b>80 %</b>",
    ]
    assert [bar["name"] for bar in utilization.traces] == [
        *("generate", "logprobs", "values", "train", "critic_train", "publish", "receive")
    ]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (1, {"0": [25, 100] * 15, "1": [50, 0] * 15, "10": [25, 0] * 15}),
        # Each bar is the mean of two steps.
        (10, {"0": [62.5] * 150, "1": [25] * 150, "10": [12.5] * 150}),
    ],
)
def test_staleness_shares_add_up_in_every_step(
    run: RunPaths, times: int, expected: dict[str, list[float]]
) -> None:
    shares = find_plot(build_metric_plots(read_metrics(run.metrics) * times), "staleness_shares")
    assert {bar["name"]: bar["y"] for bar in shares.traces} == expected


def test_length_plot_shows_lengths_excluded_from_training(run: RunPaths) -> None:
    drawn, learned = find_plot(build_metric_plots(read_metrics(run.metrics)), "lengths").traces
    assert (drawn["name"], drawn["x"], drawn["y"]) == ("generated", ["2", "5-8"], [45, 30])
    assert (learned["name"], learned["x"], learned["y"]) == ("trained on", ["2", "5-8"], [45, 0])


def test_report_of_offline_run_has_only_measured_plots(tmp_path: Path) -> None:
    data = f"data.path={tmp_path / 'pairs.jsonl'}"
    paths = begin(
        tmp_path / "run", "experiment=tiny_ppo", "algorithm=dpo", data, "data.max_response_tokens=8"
    )
    write_metrics(paths, ["dpo/loss", "dpo/accuracy", "eval/loss"])
    write_report(paths.root)
    page = page_without_plotly(paths.report)
    times = {f"time/{phase}" for phase in (*PHASES, "step")}
    assert plots_of(page) == {"loss", "accuracy", "step_time"} | times
    assert plots(paths) == {"loss": 2, "accuracy": 1, "step_time": len(PHASES) + 1} | dict.fromkeys(
        times, 1
    )
    assert not paths.trace.exists() and "<h2>Samples" not in page and "30 of 30 steps<" in page


def test_report_of_run_without_steps_is_written(tmp_path: Path) -> None:
    paths = begin(tmp_path / "run", "experiment=tiny_ppo")
    write_report(paths.root)
    page = page_without_plotly(paths.report)
    assert "No step has been recorded yet" in page and "0 of 30 steps so far" in page
    assert "digit_fraction" in page and plots_of(page) == set()


def test_report_of_running_run_has_recorded_steps(tmp_path: Path) -> None:
    paths = begin(tmp_path / "run", "experiment=tiny_ppo")
    write_metrics(paths, ["reward/mean"], steps=1)
    write_timeline(paths, 1)
    for file in (paths.metrics, paths.timeline / "trainer-0.jsonl"):
        with file.open("a") as unfinished:
            unfinished.write('{"step": 2, "rew')
    write_report(paths.root, tmp_path / "page.html")
    page = page_without_plotly(tmp_path / "page.html")
    assert not paths.report.exists()
    assert "1 of 30 steps so far" in page
    assert plots_of(page) == {"utilization", "timeline", "reward", "step_time"} | {
        f"time/{phase}" for phase in (*PHASES, "step")
    }


def test_many_steps_are_plotted_as_means() -> None:
    metrics = [
        {"step": step, "reward/mean": step, **({"eval/score": 1.0} if step == 4 else {})}
        for step in range(1, 8)
    ]
    assert average_bins(metrics, 7) == (metrics, 1)
    assert average_bins(metrics, 3) == (
        [
            {"step": 3, "reward/mean": 2.0},
            {"step": 6, "reward/mean": 5.0, "eval/score": 1.0},
            {"step": 7, "reward/mean": 7.0},
        ],
        3,
    )


def test_report_of_missing_run_or_to_bad_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="nowhere: no such directory"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.yaml: no such configuration file"):
        write_report(tmp_path)
    paths = begin(tmp_path / "run", "experiment=tiny_ppo")
    with pytest.raises(ConfigError, match=r"--output .*page\.html: no such directory: .*missing"):
        write_report(paths.root, tmp_path / "missing" / "page.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"folder: cannot be written: Is a directory"):
        write_report(paths.root, tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "run"]
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(ConfigError, match=r"pip install 'aligner\[view\]'"):
        write_report(paths.root)
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(paths.root)])
    assert (
        "aligner: error: aligner report: duckdb is not installed; install the view extra"
        in capsys.readouterr().err
    )


def test_report_shows_failure_and_notes(tmp_path: Path) -> None:
    paths = begin(tmp_path / "run", "experiment=tiny_ppo", name="run")
    paths.log("reward", 0).write_text(TRACEBACK)
    end(paths, exit_code=1, reason=REASON)
    write_notes(paths.notes, RunNotes("A larger batch", ("baseline",)))
    write_report(paths.root)
    page = page_without_plotly(paths.report)
    assert f"<h2>{markupsafe.escape(CAUSE)}</h2>" in page and "my_reward.py:12 in score" in page
    assert "A larger batch" in page and ">baseline<" in page
    assert 'href="/' not in page
