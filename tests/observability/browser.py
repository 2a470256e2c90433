"""A page as a real headless browser shows it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

TIMEOUT_S = 120
WIDTH, HEIGHT = 1300, 3600
_LOADED = "the page is loaded"
_PROBE = """
<script>
addEventListener("load", () => {
  const places = {};
  for (const plot of document.querySelectorAll(".plotly-graph-div")) {
    const {x, y, width, height} = plot.getBoundingClientRect();
    places[plot.id] = [x, y, x + width, y + height].map(Math.round);
  }
  const places_element = document.createElement("pre");
  places_element.id = "places";
  places_element.textContent = JSON.stringify(places);
  document.body.append(places_element);
  console.info("the page is loaded");
});
</script>
"""


@dataclass(frozen=True)
class Shown:
    """What became of a page."""

    dom: str
    console: list[str]
    """What was written to the console."""
    screenshot: Path
    places: dict[str, tuple[int, int, int, int]]
    """Left, top, right and bottom of every plot, by its element's id."""

    def traces(self) -> dict[str, int]:
        """How many traces of every plot were drawn."""
        parts = re.split(r'<div id="(plot-\w+)"', self.dom)[1:]
        return {key: part.count('<g class="trace ') for key, part in zip(parts[::2], parts[1::2], strict=True)}

    def colored_pixels(self) -> dict[str, int]:
        """How many pixels of every plot have a color: lines and bars do, axes and text do not."""
        with Image.open(self.screenshot) as image:
            whole = image.convert("HSV")
            assert max(bottom for *_, bottom in self.places.values()) <= image.height, "a plot is below what was photographed"
            found = {}
            for key, place in self.places.items():
                counts = whole.crop(place).split()[1].histogram()
                found[key] = sum(counts[80:])
        return found


def show(page: Path, scratch: Path) -> Shown:
    """Open a page without a network; skips the test where there is no chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium on PATH (Debian: apt-get install chromium)")
    probed, screenshot = scratch / "page.html", scratch / "page.png"
    probed.write_text(page.read_text().replace("</body>", f"{_PROBE}</body>"))
    flags = ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking")
    flags += ("disable-component-update", "disable-sync", "hide-scrollbars", "dump-dom")
    flags += (f"user-data-dir={scratch / 'profile'}", f"window-size={WIDTH},{HEIGHT}", f"screenshot={screenshot}")
    flags += ("enable-logging=stderr", "host-resolver-rules=MAP * ~NOTFOUND")
    command = [chromium, *(f"--{flag}" for flag in flags), probed.as_uri()]
    browser = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        dom, log = browser.communicate(timeout=TIMEOUT_S)
    finally:
        if browser.poll() is None:
            os.killpg(browser.pid, signal.SIGKILL)
    assert browser.returncode == 0, log
    console = [line for line in log.splitlines() if "CONSOLE" in line]
    assert any(_LOADED in line for line in console), log
    places = re.search(r'<pre id="places">(.*?)</pre>', dom)
    assert places is not None, dom[-2000:]
    return Shown(dom, [line for line in console if _LOADED not in line], screenshot, json.loads(places[1]))
