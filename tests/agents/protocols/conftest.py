"""A scripted model for the tests of the wire formats."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.agents.protocols.scripted_model import ScriptedModel, serve_scripted


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    with serve_scripted() as model:
        yield model
