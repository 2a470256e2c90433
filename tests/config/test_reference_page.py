from __future__ import annotations

from pathlib import Path

from aligner.config.reference_page import reference, updated
from aligner.schema.keys import schema_keys

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_of_keys_is_current() -> None:
    page = PAGE.read_text()
    assert updated(page) == page, (
        "run `python -m aligner.config.reference_page docs/configuration.md`"
    )


def test_every_key_has_a_row_with_its_help() -> None:
    tables = reference().partition("### What a resumed run")[0]
    rows = [line for line in tables.splitlines() if line.startswith("| `")]
    assert len(rows) == len(schema_keys()) > 80
    assert all(key.help for key in schema_keys().values())
