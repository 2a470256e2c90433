"""Sections have the same names and order in the schema, the checks and docs/configuration.md."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

from aligner import checks, schema
from aligner.checks.check import SECTION_CHECKS
from aligner.schema import Config

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
FITS_ALONE = {"model", "dry_run"}
"""Sections without a checks file. `model` is checked when its shape is read."""
SHARED = {"trained_model"}
"""Files that several sections share."""
OF_CHECKS = {
    "check",
    "pod_jobs",
    "refused_arguments",
    "source_types",
    "tensorrt_llm_arguments",
    "vllm_arguments",
}
"""Checks files that do not belong to a single section."""
OF_SCHEMA = {
    "conditions",
    "data_sources",
    "derived",
    "entries",
    "environment_text",
    "job_roles",
    "keys",
    "kubernetes",
    "options",
    "reasoning_tasks",
    "references",
    "foreign_names",
    "key_texts",
    "renamed",
    "reward_sources",
    "skypilot",
}
OF_SCHEMA |= {
    "evaluation_suites",
    "judge_questions",
    "scoring_functions",
    "teacher_sources",
    "templates",
    "key_validation",
}
"""Schema files that do not belong to a single section."""


def files(room: object) -> set[str]:
    (path,) = room.__path__  # type: ignore[attr-defined]
    return {file.stem for file in Path(path).glob("*.py")} - {"__init__"}


def sections() -> list[str]:
    return [field.name for field in dataclasses.fields(Config) if field.name != "seed"]


def test_each_section_has_a_schema_file() -> None:
    assert files(schema) == {*sections(), *SHARED, *OF_SCHEMA}


def test_each_constrained_section_has_a_checks_file() -> None:
    assert files(checks) == {*sections(), *SHARED, *OF_CHECKS} - FITS_ALONE


def test_sections_are_checked_in_schema_order() -> None:
    checked = [
        importlib.import_module(f"aligner.checks.{name}").find_problems
        for name in sections()
        if name not in FITS_ALONE
    ]
    assert list(SECTION_CHECKS) == checked


def test_configuration_page_follows_schema_order() -> None:
    titles = [
        line.removeprefix("### ")
        for line in PAGE.read_text().splitlines()
        if line.startswith("### ")
    ]
    tables = dict.fromkeys(title.partition(".")[0] for title in titles)
    assert [title for title in tables if title in sections()] == sections()
    for name in sections():
        kind = type(getattr(Config(), name))
        own = getattr(importlib.import_module(f"aligner.schema.{name}"), kind.__name__)
        assert own is kind and own.__module__ == f"aligner.schema.{name}"
