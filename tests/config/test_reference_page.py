"""docs/configuration.md: it is current, and each key has a short help text."""

from __future__ import annotations

from pathlib import Path

import pytest

from aligner.config.reference_page import build_reference, update_page
from aligner.schema.conditions import format_condition, parse_condition
from aligner.schema.keys import get_schema_keys, get_schema_sections

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
LONGEST_HELP = 60
"""Maximum number of words in a help text."""


def test_configuration_page_is_current() -> None:
    page = PAGE.read_text()
    assert update_page(page) == page, (
        "run `python -m aligner.config.reference_page docs/configuration.md`"
    )


def test_every_key_has_an_entry_with_its_help() -> None:
    entries = build_reference().partition("### What a resumed run")[0]
    names = [line for line in entries.splitlines() if line.startswith("- **`")]
    assert len(names) == len(get_schema_keys()) > 80
    assert all(key.help for key in get_schema_keys().values())


def test_help_texts_are_short_sentences() -> None:
    texts = {name: key.help for name, key in get_schema_keys().items()}
    texts |= {section.name: section.help for section in get_schema_sections() if section.keys}
    for name, text in texts.items():
        assert text.startswith(("`", "gRPC")) or text[0].isupper(), name
        assert text.endswith("."), name
        assert "|" not in text, name
        assert len(text.split()) <= LONGEST_HELP, name


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("engine.kind=embedded", "`engine.kind=embedded`"),
        (
            "algorithm.loss=clip|cispo|*:*",
            "`algorithm.loss` is `clip`, `cispo` or `module:callable`",
        ),
        ("data.path!=null", "`data.path` is set"),
        ("algorithm.trainer!=sft|dpo", "`algorithm.trainer` is not `sft` or `dpo`"),
        ("rollout.top_k>0", "`rollout.top_k` is above 0"),
        (
            ("cluster.kind=slurm", "seed>1 or seed=0 and run.steps>2"),
            "`cluster.kind=slurm`; and `seed` is above 1, or `seed=0` and `run.steps` is above 2",
        ),
        (
            "engine.kind=vllm|embedded or data.path=null",
            "`engine.kind` is `vllm` or `embedded`, or `data.path=null`",
        ),
        (("engine.kind=vllm", "seed>1"), "`engine.kind=vllm` and `seed` is above 1"),
        ("always", ""),
    ],
)
def test_condition_is_rendered_as_text(written: str | tuple[str, ...], shown: str) -> None:
    assert format_condition(parse_condition(written, "")) == shown
