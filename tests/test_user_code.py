"""Imports of user code that a configuration names."""

from __future__ import annotations

import logging

import pytest

from aligner.agents.tool_environment import ToolEnvironment
from aligner.user_code import import_object


def test_moved_environment_is_imported_with_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = import_object("aligner.environments.tool_environment", "ToolEnvironment")
    assert found is ToolEnvironment
    assert "has moved to aligner.agents.tool_environment" in caplog.text
