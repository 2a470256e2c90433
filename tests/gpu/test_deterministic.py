"""`cluster.deterministic` on one device: two training runs are bitwise equal."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import needs_device
from tests.megatron import families

pytestmark = needs_device


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama2", "mixtral"])
def test_deterministic_training_is_bitwise_repeatable(one_rank, tmp_path, family, precision):
    directory = str(families.save(family, tmp_path))
    first, second = (
        families.deterministic_steps(directory, {}, precision=precision) for _ in range(2)
    )
    families.assert_same_bits(first, second)
