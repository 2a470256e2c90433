"""Viewer and reports in a real browser: accessibility, keyboard, live curves, and speed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aligner.observability.metrics import MetricsWriter, read_metrics
from aligner.observability.trace import read_spans
from aligner.view.figures import PANELS, build_metric_plots, build_timeline_plots
from aligner.view.saved_page import write_report
from tests.view.browser import browsing, tab
from tests.view.served import Viewer, serving
from tests.view.test_view import paths_of, runs
from tests.view.written_runs import HOSTILE, begin, write_metrics, write_samples, write_timeline

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow
__all__ = ["runs"]
"""The fixture of `test_view.py`."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


def list_page_paths(viewer: Viewer) -> dict[str, str]:
    """Return the paths of pages of finished, failed and hostile runs, and of two compared runs, by
    name."""
    pages = paths_of(viewer.get("/"))
    hostile = next(path for name, path in pages.items() if "script" in name)
    finished, failed = pages["finished"], pages["failed"]
    below = (
        "",
        "/timeline",
        "/configuration",
        "/logs",
        "/health",
        "/samples",
        "/samples?by=prompt",
    )
    of_samples = (
        "/samples/4/0",
        "/samples/3/0",
        "/samples/3/0/group",
        "/samples?q=one",
        "/samples/20/0/over-time",
        "/samples/20/0/over-time?differences=1",
    )
    paths = {
        "runs": "/",
        "compare": f"/compare?run={finished[6:]}&run={failed[6:]}",
        "samples_none": f"{finished}/samples?q=none",
    }
    paths |= {f"finished{path}": finished + path for path in (*below, *of_samples)}
    paths |= {
        f"hostile{path}": hostile + path
        for path in (*below, "/samples/1/0", "/samples/2/0", "/samples/1/0/over-time")
    }
    paths |= {f"failed{path}": failed + path for path in ("", "/logs", "/health", "/samples")}
    return paths


@pytest.mark.promise("viewer-pages-are-usable")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_accessible_without_console_messages(
    browser: Browser, runs: Path, tmp_path: Path, scheme: str
) -> None:
    """Pages of finished, failed and hostile runs, of two compared runs, and without any run."""
    (tmp_path / "empty").mkdir()
    found = {}
    with serving(runs) as viewer, serving(tmp_path / "empty") as empty:
        viewer.open()
        paths = list_page_paths(viewer)
        with tab(browser, scheme) as opened:
            opened.open(empty.link)
            opened.photograph(tmp_path / "empty.png")
            found["empty"] = [*opened.console, *opened.violations()]
            for name, path in {"link": viewer.link[viewer.link.index("/?") :], **paths}.items():
                opened.console.clear()
                opened.open(f"http://{viewer.host}{path}")
                opened.photograph(tmp_path / f"{name.replace('/', '_')}.png")
                found[name] = [*opened.console, *opened.violations()]
            assert all(url.startswith(("http://127.0.0.1:", "data:")) for url in opened.requests)
    assert not {name: problems for name, problems in found.items() if problems}


@pytest.mark.promise("viewer-fits-phones")
def test_no_page_scrolls_horizontally_at_390_pixels(
    browser: Browser, runs: Path, tmp_path: Path
) -> None:
    report = write_report(runs / "finished", tmp_path / "report.html")
    widths = {}
    with serving(runs) as viewer, tab(browser, width=390) as opened:
        viewer.open()
        opened.open(viewer.link)
        addresses = {
            name: f"http://{viewer.host}{path}" for name, path in list_page_paths(viewer).items()
        }
        for name, address in {**addresses, "report": report.as_uri()}.items():
            opened.open(address)
            opened.page.evaluate(
                "document.querySelectorAll('details').forEach((d) => d.open = true)"
            )
            widths[name] = opened.page.evaluate("document.documentElement.scrollWidth")
    assert {name: width for name, width in widths.items() if width != 390} == {}


def test_keys_open_next_and_previous_sample(browser: Browser, runs: Path) -> None:
    with serving(runs) as viewer, tab(browser) as opened:
        viewer.open()
        opened.open(viewer.link)
        samples = f"{paths_of(viewer.get('/'))['finished']}/samples"
        opened.open(f"http://{viewer.host}{samples}/20/1")
        for key, target in (("j", "20/2"), ("ArrowRight", "20/3"), ("j", "4/0"), ("k", "20/3")):
            opened.page.keyboard.press(key)
            opened.page.wait_for_url(f"http://{viewer.host}{samples}/{target}")
            opened.page.wait_for_selector("html[data-ready=true]", state="attached")
        opened.page.focus(".tokens select")
        opened.page.keyboard.press("j")
        opened.page.wait_for_timeout(300)
        assert opened.page.url.endswith("20/3")  # a key in a control is not a shortcut


def test_notes_are_saved_from_the_page(browser: Browser, tmp_path: Path) -> None:
    write_metrics(begin(tmp_path / "run", "experiment=tiny_ppo"), ["reward/mean"], steps=2)
    with serving(tmp_path) as viewer, tab(browser) as opened:
        viewer.open()
        opened.open(viewer.link)
        opened.open(f"http://{viewer.host}{paths_of(viewer.get('/'))['run']}")
        opened.page.click("text=Add a note or tags")
        opened.page.fill("[name=tags]", "math, baseline")
        opened.page.fill("[name=note]", "A larger batch")
        opened.page.click("button:has-text('Save')")
        opened.page.wait_for_selector("summary:has-text('A larger batch')")
        assert (tmp_path / "run" / "notes.json").is_file()
        opened.open(f"http://{viewer.host}/?q=baseline")
        assert opened.page.inner_text("a.tag >> nth=0") == "math"
        assert opened.console == []


def test_list_of_runs_hides_and_shows_curves(browser: Browser, tmp_path: Path) -> None:
    for name in ("first", "second"):
        paths = begin(tmp_path / name, "experiment=tiny_ppo", name=name)
        write_metrics(paths, ["reward/mean"], steps=5)
    visible = "document.getElementById('plot-reward').data.map((trace) => trace.visible !== false)"
    with serving(tmp_path) as viewer, tab(browser) as opened:
        page = opened.page
        opened.open(viewer.link)
        page.click("[aria-label='curves of first']")
        names = page.evaluate(
            "document.getElementById('plot-reward').data.map((line) => line.name)"
        )
        opened.wait_for_value(visible, [name != "first" for name in names])
        # The choices last when the page is loaded again, and when the list is refreshed.
        page.fill("[name=smoothing]", "0.9")
        page.select_option("select[name=metric]", "time/train")
        page.wait_for_url("**metric=time%2Ftrain**")
        page.wait_for_selector("html[data-ready=true]", state="attached")
        assert page.input_value("[name=smoothing]") == "0.9"
        shown = page.locator("[data-run][aria-pressed=true]")
        assert shown.get_attribute("aria-label") == "curves of second"
        page.click("text=Hide all")
        assert shown.count() == 0
        page.click("text=Show all curves")
        assert shown.count() == 2
        assert opened.console == []


def test_theme_button_switches_colors_and_lasts(browser: Browser, tmp_path: Path) -> None:
    write_metrics(begin(tmp_path / "run", "experiment=tiny_ppo"), ["reward/mean"], steps=3)
    background = "getComputedStyle(document.body).backgroundColor"
    ink = "document.getElementById('plot-reward').layout.font.color"
    with serving(tmp_path) as viewer, tab(browser, "dark") as opened:
        opened.open(viewer.link)
        dark = opened.page.evaluate(f"[{background}, {ink}]")
        opened.page.click("[data-theme-button]")
        opened.wait_for_value(f"{background} === {json.dumps(dark[0])}", False)
        opened.wait_for_value(f"{ink} === {json.dumps(dark[1])}", False)
        light = opened.page.evaluate(background)
        opened.open(f"http://{viewer.host}{paths_of(viewer.open() and viewer.get('/'))['run']}")
        assert opened.page.evaluate(background) == light
        opened.page.click("[data-theme-button]")
        opened.wait_for_value(background, dark[0])
        assert opened.console == []


def test_legend_hides_curves(browser: Browser, tmp_path: Path) -> None:
    paths = begin(tmp_path / "run", "experiment=tiny_ppo")
    write_metrics(paths, ["reward/p10", "reward/p50", "policy/ratio_max"], steps=5)
    with serving(tmp_path) as viewer, tab(browser) as opened:
        viewer.open()
        opened.open(viewer.link)
        opened.open(f"http://{viewer.host}{paths_of(viewer.get('/'))['run']}")
        legend = "[data-key=reward_quantiles] .curves button"
        assert opened.page.locator(legend).all_inner_texts() == ["10 %", "50 %"]
        visible = (
            "document.getElementById('plot-reward_quantiles').data.map((trace) => trace.visible)"
        )
        opened.page.click(f"{legend} >> nth=0")
        opened.wait_for_value(visible, [False, None])
        opened.page.click(f"{legend} >> nth=0")
        opened.wait_for_value(visible, [None, None])
        title = "[data-key='policy/ratio_max'] h3"
        assert opened.page.inner_text(title).strip() == "Largest policy ratio"
        assert opened.page.get_attribute(title, "title") == "policy/ratio_max"
        assert "policy/ratio_max" in opened.page.inner_text("[data-key='policy/ratio_max'] .about")


@pytest.mark.promise("viewer-pages-are-usable")
def test_keyboard_reaches_controls_with_visible_focus(browser: Browser, runs: Path) -> None:
    with serving(runs) as viewer, tab(browser) as opened:
        page = opened.page
        opened.open(viewer.link)
        order = []
        for _ in range(30):
            page.keyboard.press("Tab")
            style, place = page.evaluate(
                "[getComputedStyle(document.activeElement).outlineStyle,"
                " document.activeElement.name || document.activeElement.textContent.trim()]"
            )
            assert style == "solid", place
            order.append(place)
        assert order[:3] == ["Skip to the content", "aligner", "◐Light or dark theme"]
        assert order[3:9] == ["q", "state", "Filter", "metric", "smoothing", "x"]
        assert {"run", "failed"} <= {*order}
        viewer.open()
        opened.open(f"http://{viewer.host}{paths_of(viewer.get('/'))['finished']}/samples/4/0")
        page.focus(".tokens-text")
        for _ in range(2):
            page.keyboard.press("ArrowRight")
        assert "3 of 5" in page.inner_text("[data-inspector]") and '"one"' in page.inner_text(
            "[data-inspector]"
        )
        assert page.inner_text(".legend").split() == ["-2", "0"]  # the largest of five values
        page.select_option(".tokens select", label="from environment")
        assert page.inner_text(".legend").split() == ["0", "1"]


def test_curves_are_searchable_smoothed_and_updated_live(browser: Browser, tmp_path: Path) -> None:
    paths = begin(tmp_path / "run", "experiment=tiny_ppo")
    write_metrics(paths, ["reward/mean", "odd/metric"], steps=5)
    with serving(tmp_path) as viewer, tab(browser) as opened:
        page = opened.page
        viewer.open()
        opened.open(viewer.link)
        opened.open(f"http://{viewer.host}{paths_of(viewer.get('/'))['run']}")
        drawn = "document.getElementById('plot-reward').data"
        opened.wait_for_value(f"{drawn}.map((trace) => trace.x.length)", [5])
        page.fill("[name=search]", "ODD/")
        assert [
            each.inner_text() for each in page.query_selector_all("figure h3") if each.is_visible()
        ] == ["odd/metric"]
        page.fill("[name=search]", "")
        page.fill("[name=smoothing]", "0.9")
        opened.wait_for_value(f"{drawn}.length", 2)
        page.select_option("[name=x]", "time")
        opened.wait_for_value(f"{drawn}[1].x", [1.5, 3, 4.5, 6, 7.5])
        MetricsWriter(paths).write(6, {"reward/mean": 0.5, "time/step": 1.5})
        page.wait_for_selector("text=6 / 30")
        opened.wait_for_value(f"{drawn}[1].x.length", 6)
        assert opened.console == []


@pytest.mark.promise("report-draws-every-plot")
def test_report_draws_every_plot_without_network(browser: Browser, tmp_path: Path) -> None:
    paths = begin(tmp_path / "run", "experiment=tiny_ppo", name=HOSTILE)
    bounds = [f"eval/score{end}" for end in ("_low", "_high")]
    write_metrics(
        paths,
        [*dict.fromkeys(key for panel in PANELS for key in panel.metrics), "reward/std", *bounds],
    )
    write_timeline(paths, 30)
    write_samples(paths, 1, [{"prompt": HOSTILE, "response": HOSTILE, "score": 0.5}])
    write_report(paths.root)
    expected = {
        plot.key: len(plot.traces)
        for plot in [
            *build_timeline_plots(read_spans(paths)),
            *build_metric_plots(read_metrics(paths.metrics)),
        ]
    }
    with tab(browser, height=8_000) as opened:
        opened.open(paths.report.as_uri())
        opened.page.wait_for_timeout(1000)
        counts = (
            "[...document.querySelectorAll('.plot')].map((plot) => [plot.id.slice(5), (plot.data ||"
            " []).length])"
        )
        assert dict(opened.page.evaluate(counts)) == expected
        assert len(opened.page.query_selector_all(".plot .main-svg")) >= len(expected)
        opened.photograph(tmp_path / "report.png")
        assert opened.console == [] and opened.violations() == []
        assert all(url.startswith(("file:", "data:")) for url in opened.requests)


@pytest.mark.promise("viewer-handles-a-million-samples")
def test_page_of_a_million_samples_loads_within_a_second(tmp_path: Path) -> None:
    paths = begin(tmp_path / "run", "experiment=tiny_ppo")
    rows = [
        {"prompt": f"what is {n % 50}, and why", "response": f"it is {n} " * 20, "score": n / 500}
        for n in range(500)
    ]
    write_samples(paths, 1, rows, tokens=False)
    table = pq.read_table(paths.root / "samples" / "step_000001.parquet")
    for step in range(2, 2001):
        steps = pa.array([step] * len(rows), pa.int32())
        pq.write_table(
            table.set_column(0, "step", steps), paths.root / "samples" / f"step_{step:06d}.parquet"
        )
    with serving(tmp_path) as viewer:
        viewer.open()
        samples = f"{paths_of(viewer.get('/'))['run']}/samples"
        assert min(cpu_seconds(viewer, samples) for _ in range(3)) < 1
        assert min(cpu_seconds(viewer, f"{samples}?sort=-score&page=100") for _ in range(3)) < 2


def cpu_seconds(viewer: Viewer, path: str) -> float:
    """Return the server's CPU seconds for a page; wall time would depend on the machine's load."""
    server = psutil.Process(viewer.pid)
    began = sum(server.cpu_times()[:2])
    assert "of 1,000,000 samples" in viewer.get(path).text
    return sum(server.cpu_times()[:2]) - began
