"""Validation of the values of keys."""

from __future__ import annotations

import math
from typing import Any

import pytest

from aligner.schema.key_validation import InvalidKeys, validate_config
from aligner.schema.keys import get_schema_keys

FLOAT_KEYS = [name for name, key in get_schema_keys().items() if "float" in key.type_name]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_every_float_key_refuses_nan_and_infinity(value):
    assert "environment.failure_reward" in FLOAT_KEYS
    for name in FLOAT_KEYS:
        is_list = get_schema_keys()[name].type_name.startswith("list")
        values: Any = [value] if is_list else value
        for part in reversed(name.split(".")):
            values = {part: values}
        with pytest.raises(InvalidKeys) as caught:
            validate_config(values)
        assert name in [problem.key for problem in caught.value.problems]
