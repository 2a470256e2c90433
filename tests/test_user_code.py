"""Imports of user code that a configuration names."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from aligner.agents.tool_environment import ToolEnvironment
from aligner.errors import ConfigError
from aligner.user_code import describe_user_error, format_user_traceback, import_object


def test_moved_environment_is_imported_with_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = import_object("aligner.environments.tool_environment", "ToolEnvironment")
    assert found is ToolEnvironment
    assert "has moved to aligner.agents.tool_environment" in caplog.text


def test_missing_package_of_a_module_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_package.py").write_text("import json\nimport no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    message = (
        r"importing needs_package failed with ModuleNotFoundError in needs_package\.py:2: No module"
        r" named 'no_such_package'"
    )
    with pytest.raises(ConfigError, match=message):
        import_object("needs_package", "score")
    with pytest.raises(ConfigError, match=r"^No module named 'no_such_module'"):
        import_object("no_such_module", "score")


def test_long_message_of_user_code_is_shortened() -> None:
    try:
        raise ValueError("y" * 10_000_000)
    except ValueError as error:
        description, trace = describe_user_error(error), format_user_traceback(error)
    for text in (description, trace):
        assert len(text) < 21_000 and "characters omitted" in text
    assert description.startswith("ValueError in test_user_code.py:")
    assert trace.startswith("Traceback (most recent call last):")
