"""Changed files and messages are parsed, or refused with an error of aligner.

`python -m benchmarks.fuzz` searches each parser for minutes; these tests repeat a few examples that
are the same in every run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from aligner.config.compose import load_config
from aligner.errors import ConfigError
from benchmarks.fuzz import PARSERS, Files, run_parser

EXAMPLES = 25


@pytest.mark.parametrize("name", PARSERS)
def test_changed_files_are_parsed_or_refused(name: str, tmp_path: Path) -> None:
    parser = PARSERS[name]

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(parser.files())
    def check(files: Files) -> None:
        run_parser(parser, tmp_path, files)

    check()


def test_configuration_with_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text('{"": [true], "a\\udad9": 1, "b": {"\\ud980": 2}}')
    with pytest.raises(ConfigError, match=r"config\.yaml: "):
        load_config(tmp_path / "config.yaml")
