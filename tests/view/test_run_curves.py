"""Curves of all runs on the landing page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from aligner.view.figures import LINE_COLORS
from aligner.view.run_curves import MAX_POINTS, Curve, read_curves
from aligner.view.run_index import ViewedRun, assign_colors
from aligner.view.sparklines import build_sparkline
from tests.view.served import serving
from tests.view.test_view import paths_of
from tests.view.written_runs import begin, end, write_metrics


def test_list_shows_reward_curve_of_every_run(tmp_path: Path) -> None:
    for name, steps in (("long", 30), ("short", 3), ("new", 0)):
        paths = begin(tmp_path / name, "experiment=tiny_ppo", name=name)
        write_metrics(paths, ["reward/mean"], steps)
        end(paths)
    with serving(tmp_path) as viewer:
        viewer.open()
        page = viewer.get("/").text
    points = re.findall(r'<polyline points="([^"]*)"', page)
    assert sorted(len(line.split()) for line in points) == [3, 30]
    assert 'aria-label="reward by step: from ' in page


def test_landing_page_plots_listed_runs_in_their_colors(tmp_path: Path) -> None:
    metrics = {
        "first": ["reward/mean", "policy/loss", "kl/reference", "response/length"],
        "second": ["reward/mean", "policy/loss"],
        "offline": ["dpo/loss"],
    }
    for name, names in metrics.items():
        paths = begin(tmp_path / name, "experiment=tiny_ppo", name=name)
        write_metrics(paths, names, steps=5)
        end(paths)
    begin(tmp_path / "damaged", "experiment=tiny_ppo").config.write_text("run: [")
    with serving(tmp_path) as viewer:
        viewer.open()
        page = viewer.get("/")
        keys = {name: path.rpartition("/")[2] for name, path in paths_of(page).items()}
        answer = viewer.get("/curves.json?q=&sort=name")
        plots = {plot["key"]: plot for plot in answer.json()}
        assert {
            key: [trace["name"] for trace in plot["traces"]] for key, plot in plots.items()
        } == {
            "reward": ["first", "second"],
            "loss": ["first", "offline", "second"],
            "kl": ["first"],
            "length": ["first"],
        }
        line = plots["reward"]["traces"][1]
        assert line["run"] == keys["second"] and line["x"] == [1, 2, 3, 4, 5]
        assert line["seconds"] == [1.5, 3, 4.5, 6, 7.5]
        row = page.text[page.text.index(f'id="s{keys["second"]}"') :]
        assert f'fill="{line["line"]["color"]}"' in row[: row.index("</button>")]

        only_second = viewer.get("/curves.json?q=second").json()
        assert [len(plot["traces"]) for plot in only_second] == [1, 1]
        selected = viewer.get("/curves.json?metric=time/train").json()
        assert [(plot["title"], len(plot["traces"])) for plot in selected] == [
            ("Time of policy updates (seconds)", 3)
        ]
        assert 'value="time/train"' in page.text
        etag = answer.headers["etag"]
        assert viewer.get("/curves.json?q=&sort=name", If_None_Match=etag).status == 304


def test_colors_of_runs_stay_when_runs_are_added(tmp_path: Path) -> None:
    runs = []
    colors: dict[str, str] = {}
    for number in range(2 * len(LINE_COLORS)):
        paths = begin(
            tmp_path / str(number),
            "experiment=tiny_ppo",
            f"run.date=2026-01-{number + 1:02d}T00:00:00",
        )
        runs.append(ViewedRun(paths.root))
        new_colors = assign_colors(runs[::-1])
        assert colors.items() <= new_colors.items()
        colors = dict(new_colors)
        first_colors = [colors[run.key] for run in runs[: len(LINE_COLORS)]]
        assert len({*first_colors}) == len(first_colors)
    assert sorted(colors.values()) == sorted(2 * LINE_COLORS)


def test_curve_of_long_run_covers_all_steps(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [
        json.dumps({"step": step, "reward/mean": step / 10, "time/step": 2.0, "x/y": 1e-10})
        for step in range(20_000)
    ]
    file.write_text("\n".join(lines) + '\n{"step": 20000, "rew')
    result = read_curves(file, ["reward/mean", "odd/metric"])
    assert result.names == {"reward/mean", "time/step", "x/y"}
    assert list(result.curves) == ["reward/mean"]
    curve = result.curves["reward/mean"]
    assert 100 < len(curve.steps) <= MAX_POINTS
    assert list(curve.steps) == sorted(curve.steps)
    assert curve.steps[0] < 300 and curve.steps[-1] > 19_500
    assert list(curve.values) == [step / 10 for step in curve.steps]
    # Every step takes 2 s, also the steps that are not read.
    assert list(curve.seconds) == pytest.approx([2 * step for step in curve.steps])


def test_curve_ends_with_newest_step(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    for steps in (1, MAX_POINTS - 1, MAX_POINTS, MAX_POINTS + 1, 3 * MAX_POINTS - 1):
        lines = [json.dumps({"step": step + 1, "a/b": 1.0}) for step in range(steps)]
        file.write_text("\n".join(lines) + "\n")
        curve = read_curves(file, ["a/b"]).curves["a/b"]
        assert len(curve.steps) <= MAX_POINTS and curve.steps[-1] == steps
    assert read_curves(tmp_path / "missing.jsonl", ["a/b"]).curves == {}


def test_curve_fills_the_image() -> None:
    sparkline = build_sparkline(Curve((1, 2, 3), (1, 2, 3), (0.5, 1.5, 1.0)))
    assert sparkline is not None and sparkline.points == "2.0,26.0 60.0,2.0 118.0,14.0"
    assert (sparkline.first, sparkline.last, sparkline.lowest, sparkline.highest) == (
        0.5,
        1,
        0.5,
        1.5,
    )
    assert build_sparkline(Curve((1,), (1,), (0.5,))) is None
    assert build_sparkline(None) is None
