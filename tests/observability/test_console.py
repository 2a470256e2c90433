"""Progress of a run on the console, and the summary at its end."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from aligner.observability.console import (
    LiveProgress,
    PlainProgress,
    RunConsole,
    build_summary_table,
    format_totals,
    make_progress,
    print_summary,
)
from aligner.paths import RunPaths


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def console(*, terminal: bool = False) -> RunConsole:
    file = Terminal() if terminal else io.StringIO()
    return RunConsole(file=file, width=110, force_terminal=terminal, color_system=None)


def output_of(where: Console) -> str:
    assert isinstance(where.file, io.StringIO)
    return where.file.getvalue()


def test_plain_progress_prints_one_line_per_step() -> None:
    where = console()
    view = make_progress(10, where)
    assert isinstance(view, PlainProgress)
    view.show_step({"step": 1, "reward/mean": 0.25, "kl/reference": 0.0125, "time/step": 2.0})
    view.show_step({"step": 2, "reward/mean": 0.5, "time/step": 4.0})
    assert output_of(where).splitlines() == [
        "step 1/10  reward 0.250  KL 0.0125  2.00 s/step  ETA 0:00:18",
        "step 2/10  reward 0.500  3.00 s/step  ETA 0:00:24",
    ]


def test_evaluation_suites_are_shown_by_name(tmp_path: Path) -> None:
    where = console()
    suite = {
        "eval/math/score": 0.5,
        "eval/math/score_low": 0.25,
        "eval/math/score_high": 0.75,
        "eval/math/length": 3.0,
    }
    make_progress(10, where).show_step({"step": 2, **suite, "eval/score/gcd": 0.125})
    assert output_of(where).splitlines() == ["step 2/10  math held-out score 0.500"]
    print_summary(
        [{"step": 0, **suite}, {"step": 2, **suite, "eval/math/score": 0.75}],
        RunPaths(tmp_path),
        where,
    )
    rows = {
        line.split("│")[1].strip(): line.split("│")[2:5]
        for line in output_of(where).splitlines()
        if line.startswith("│")
    }
    assert [cell.split()[0] for cell in rows["math/score"]] == ["0.500", "0.750", "+0.250"]


def test_live_progress_shows_metrics_and_samples() -> None:
    where = console(terminal=True)
    view = make_progress(10, where)
    assert isinstance(view, LiveProgress)
    view.show_status("waiting for critic")
    view.show_step({"step": 4, "reward/mean": 0.25, "kl/reference": 0.0125, "time/step": 2.0})
    view.show_samples([{"step": 4, "prompt": "a[b]", "response": "c\x1b[2Jd", "reward": 1}])
    view.close()
    text = output_of(where)
    assert "4/10" in text and "reward 0.250  KL 0.0125  2.00 s/step  ETA 0:00:12" in text
    assert "Samples at step 4" in text and r"c\x1b[2Jd" in text and "a[b]" in text


def test_live_progress_keeps_a_line_per_step() -> None:
    where = console(terminal=True)
    view = make_progress(3, where)
    for step in (1, 2):
        view.show_step({"step": step, "reward/mean": step / 4, "time/step": 2.0})
    view.close()
    lines = output_of(where).splitlines()
    assert any("step 1/3  reward 0.250  2.00 s/step" in line for line in lines)
    assert any("step 2/3  reward 0.500  2.00 s/step" in line for line in lines)


def test_live_progress_fits_into_60_columns() -> None:
    file = Terminal()
    view = make_progress(10000, RunConsole(file=file, width=60, force_terminal=True))
    view.show_step({"step": 1234, "time/step": 35.0})
    view.close()
    bar = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()).splitlines()[-1].strip("\r")
    assert "1234/10000" in bar and "ETA 3 days, 13:13:30" in bar and len(bar) <= 60, bar


def test_forced_colors_draw_no_bar_in_a_pipe() -> None:
    where = RunConsole(file=io.StringIO(), force_terminal=True)
    view = make_progress(3, where)
    view.show_step({"step": 1, "time/step": 2.0})
    view.close()
    assert output_of(where) == "step 1/3  2.00 s/step  ETA 0:00:04\n"


def test_step_line_ends_with_its_problem() -> None:
    where = console()
    make_progress(3, where).show_step({"step": 1, "reward/mean": 0.25}, "2 of 4 prompts skipped")
    assert output_of(where) == "step 1/3  reward 0.250  2 of 4 prompts skipped\n"


def test_summary_compares_first_and_last_five_steps(tmp_path: Path) -> None:
    metrics = [
        {
            "step": n,
            "reward/mean": n / 10,
            "time/step": 2.0,
            "time/train": 1.5,
            "mismatch/logprob_abs": 1e-5 * (n == 3),
        }
        for n in range(1, 13)
    ]
    (tmp_path / "metrics.jsonl").touch()
    where = console()
    print_summary(metrics, RunPaths(tmp_path), where)
    rows = {
        line.split("│")[1].strip(): line.split("│")[2:5]
        for line in output_of(where).splitlines()
        if line.startswith("│")
    }
    assert [cell.strip() for cell in rows["reward"]] == ["0.3000", "1.0000", "+0.7000"]
    assert [cell.strip() for cell in rows["train (s)"]] == ["1.5000", "1.5000", "+0.0000"]
    assert "response tokens" not in rows  # not measured, so not shown
    assert (
        "largest engine-trainer log-prob difference (mismatch/logprob_abs): 1.00e-05 at step 3"
        in output_of(where)
    )
    assert "total: 12 steps, 24.0 s" in output_of(where)
    assert f"metrics: {tmp_path / 'metrics.jsonl'}" in output_of(
        where
    ) and "checkpoints:" not in output_of(where)


def test_initial_evaluation_is_not_counted_as_step(
    tmp_path: Path,
) -> None:
    measured = {
        "eval/score": 0.25,
        "eval/score_low": 0.125,
        "eval/score_high": 0.5,
        "eval/length": 8.0,
        "time/evaluate": 1.0,
    }
    last = {
        **measured,
        "eval/score": 0.75,
        "eval/score_low": 0.5,
        "eval/score_high": 0.875,
        "reward/mean": 0.5,
        "time/step": 2.0,
    }
    metrics = [
        {"step": 0, **measured},
        {"step": 1, "reward/mean": 0.25, "time/step": 2.0},
        {"step": 2, **last},
    ]
    where = console()
    print_summary(metrics, RunPaths(tmp_path), where)
    rows = {
        line.split("│")[1].strip(): line.split("│")[2:5]
        for line in output_of(where).splitlines()
        if line.startswith("│")
    }
    assert [cell.strip() for cell in rows["score"]] == [
        "0.250 [0.125, 0.500]",
        "0.750 [0.500, 0.875]",
        "+0.500",
    ]
    assert "score_low" not in rows and rows["length"][2].strip() == "+0.000"
    assert "Summary of 2 steps" in output_of(where) and "total: 2 steps, 4.0 s" in output_of(where)


def test_run_of_one_step_has_a_summary() -> None:
    table = build_summary_table([{"step": 1, "reward/mean": 0.5}])
    headers = [column.header for column in table.columns]
    assert headers == ["mean of steps", "first 1", "last 1", "change"]
    assert format_totals([{"step": 1, "reward/mean": 0.5}]) == "total: 1 steps, 0.0 s"
