"""Limits of JSON files that someone else wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aligner import file_limits
from aligner.errors import ConfigError
from aligner.file_limits import (
    MAX_JSON_DEPTH,
    check_depth,
    parse_json,
    read_json,
    read_limited_bytes,
)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("depth", [MAX_JSON_DEPTH + 1, 1000, 500_000])
def test_deep_json_is_refused(depth: int) -> None:
    with pytest.raises(ValueError, match=f"nested more than {MAX_JSON_DEPTH} levels"):
        parse_json(nested(depth))
    with pytest.raises(ValueError, match="nested"):
        parse_json('{"a":' * depth + "1" + "}" * depth)


def test_json_within_the_depth_is_parsed() -> None:
    assert json.dumps(parse_json(nested(MAX_JSON_DEPTH))) == nested(MAX_JSON_DEPTH)
    # many brackets that are not nested
    assert parse_json(json.dumps([[[]]] * 500)) == [[[]]] * 500


def test_depth_of_parsed_values_is_checked() -> None:
    value: Any = 1
    for _ in range(MAX_JSON_DEPTH):
        value = {"a": value}
    check_depth(value)
    with pytest.raises(ValueError, match="nested"):
        check_depth([value])


@pytest.mark.parametrize("text", ["1" * 5000, b"\xff", "", "{", "nul"])
def test_invalid_json_raises_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


def test_number_of_json_values_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_limits, "MAX_JSON_VALUES", 1000)
    assert parse_json(json.dumps([0] * 900)) == [0] * 900
    with pytest.raises(ValueError, match="has up to 1201 values, allowed: 1000"):
        parse_json(json.dumps([{}] * 600))


def test_error_names_file_size_and_limit(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("[" + "1," * 100 + "1]")
    assert read_json(file) == [1] * 101
    with pytest.raises(ConfigError, match=r"config\.json: has more than 100 bytes"):
        read_limited_bytes(file, 100)
    with pytest.raises(ConfigError, match=r"config\.json: has more than 100 bytes"):
        read_json(file, 100)


def test_endless_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="has more than 1000 bytes"):
        read_limited_bytes(Path("/dev/zero"), 1000)
