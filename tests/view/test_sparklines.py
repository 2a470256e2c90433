"""Small curves in the list of runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

from aligner.view.sparklines import build_sparkline, read_curve
from tests.view.served import serving
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


def test_curve_of_long_run_covers_all_steps(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [
        json.dumps({"step": step, "reward/mean": step / 10, "x": "y" * 100})
        for step in range(20_000)
    ]
    file.write_text("\n".join(lines) + '\n{"step": 20000, "rew')
    curve = read_curve(file, "reward/mean")
    steps = [step for step, _ in curve]
    assert 50 < len(curve) <= 101 and steps == sorted(steps)
    assert steps[0] < 300 and steps[-1] > 19_500
    assert all(value == step / 10 for step, value in curve)


def test_curve_fills_the_image(tmp_path: Path) -> None:
    sparkline = build_sparkline([(1, 0.5), (2, 1.5), (3, 1.0)])
    assert sparkline is not None and sparkline.points == "2.0,26.0 60.0,2.0 118.0,14.0"
    assert (sparkline.first, sparkline.last, sparkline.lowest, sparkline.highest) == (
        0.5,
        1,
        0.5,
        1.5,
    )
    assert build_sparkline([(1, 0.5)]) is None
    assert read_curve(tmp_path / "missing.jsonl", "reward/mean") == []
