"""Colors of the pages: every color has a value for both themes, and texts are readable in both."""

from __future__ import annotations

import re

import pytest

from aligner.view.figures import LINE_COLORS
from aligner.view.rendering import STATIC

STYLES = (STATIC / "view.css").read_text(encoding="utf-8")
COLORS = {
    name: {"light": light, "dark": dark}
    for name, light, dark in re.findall(
        r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);", STYLES
    )
}
# Colors of texts by the color of the background.
TEXTS = {
    "paper": ("ink", "soft", "accent", "good", "bad", "warn"),
    "ground": ("ink", "soft", "accent", "bad"),
    "plain-bg": ("ink", "soft"),
    "accent-bg": ("ink", "accent"),
    "good-bg": ("ink", "good"),
    "bad-bg": ("ink", "bad", "accent"),
    "warn-bg": ("ink", "warn"),
}


def compute_contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two colors as WCAG 2 defines it, from 1 to 21."""
    luminances = sorted(map(compute_luminance, (first, second)))
    return (luminances[1] + 0.05) / (luminances[0] + 0.05)


def compute_luminance(color: str) -> float:
    channels = [value / 255 for value in bytes.fromhex(color[1:])]
    red, green, blue = (
        channel / 12.92 if channel <= 0.03928 else ((channel + 0.055) / 1.055) ** 2.4
        for channel in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_every_used_color_has_both_themes() -> None:
    scripts = (STATIC / "view.js").read_text(encoding="utf-8")
    used = {*re.findall(r"var\(--([\w-]+)\)", STYLES), *re.findall(r'color\("--([\w-]+)"', scripts)}
    assert len(used) > 10 and used - COLORS.keys() == set()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_have_readable_contrast(theme: str) -> None:
    contrasts = {
        (background, text): compute_contrast(COLORS[background][theme], COLORS[text][theme])
        for background, texts in TEXTS.items()
        for text in texts
    }
    assert {pair: ratio for pair, ratio in contrasts.items() if ratio < 4.5} == {}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_curves_have_visible_contrast(theme: str) -> None:
    contrasts = {color: compute_contrast(color, COLORS["paper"][theme]) for color in LINE_COLORS}
    assert {color: ratio for color, ratio in contrasts.items() if ratio < 3} == {}
