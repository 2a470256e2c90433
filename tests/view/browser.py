"""A headless browser that reaches only this machine, and the problems that it reports."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDTH, HEIGHT = 1400, 900
_READY_MS = 120_000


@dataclass
class Tab:
    """A page, its console messages and its requests."""

    page: Page
    console: list[str] = field(default_factory=list)
    """Console messages, errors, dialogs and failed requests."""
    requests: list[str] = field(default_factory=list)

    def open(self, address: str) -> None:
        """Open an address, and wait until all visible plots are rendered."""
        self.page.goto(address)
        self.page.wait_for_selector("html[data-ready=true]", state="attached", timeout=_READY_MS)

    def wait_for_value(self, expression: str, expected: object, timeout_s: float = 30) -> None:
        """Wait until a JavaScript expression has a value; fail with its last value.

        Plots are drawn when an IntersectionObserver reports them as visible, which the browser does
        at a time of its own. Playwright's `wait_for_function` cannot be used: the content security
        policy of the viewer's pages forbids evaluating an expression inside the page.
        """
        deadline_s = time.monotonic() + timeout_s
        while (value := self.page.evaluate(expression)) != expected:
            assert time.monotonic() < deadline_s, f"{expression} is {value}, not {expected}"
            self.page.wait_for_timeout(50)

    def photograph(self, file: Path) -> None:
        """Save a screenshot of the whole page."""
        self.page.screenshot(path=file, full_page=True)

    def violations(self) -> list[str]:
        """Return the accessibility violations that axe reports: labels, contrast, order, roles."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page).response["violations"]
        return [f"{rule['id']}: {rule['nodes'][0]['html'][:200]}" for rule in found]


@contextmanager
def browsing() -> Iterator[Browser]:
    """Start Chromium for the block; skip the test if Chromium is not installed."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium on PATH (Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    rules = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu", rules]
        )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def tab(
    browser: Browser, scheme: str = "light", height: int = HEIGHT, width: int = WIDTH
) -> Iterator[Tab]:
    """Open a tab with separate cookies."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    context.set_default_timeout(_READY_MS)
    found = Tab(context.new_page())
    found.page.on("console", lambda message: found.console.append(message.text))
    found.page.on("pageerror", lambda error: found.console.append(str(error)))
    found.page.on(
        "dialog",
        lambda dialog: (found.console.append(f"dialog: {dialog.message}"), dialog.dismiss()),
    )
    found.page.on("request", lambda request: found.requests.append(request.url))
    try:
        yield found
    finally:
        context.close()
