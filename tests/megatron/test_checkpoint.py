from __future__ import annotations

import math

import pytest
import torch

from tests.megatron import jobs


@pytest.mark.parametrize("layout", [{}, {"tensor": 2, "pipeline": 2}], ids=["single", "tp2pp2"])
def test_a_resumed_policy_goes_on_bit_for_bit(pool, untied_llama, tmp_path, layout):
    for result in pool.run(jobs.resume_step, math.prod(layout.values()), str(untied_llama), layout, str(tmp_path)):
        assert result["straight"] == result["stopped"]
        for name, (_, tensor) in result["final"].items():
            assert torch.equal(tensor, result["resumed"][name][1]), name


def test_a_checkpoint_of_another_layout_or_none_is_refused_by_name(pool, untied_llama, tmp_path):
    assert "no checkpoint here" in pool.run(jobs.load_checkpoint, 1, str(untied_llama), {}, str(tmp_path))[0]
    pool.run(jobs.resume_step, 2, str(untied_llama), {"tensor": 2}, str(tmp_path))
    for message in pool.run(jobs.load_checkpoint, 2, str(untied_llama), {"pipeline": 2}, str(tmp_path / "policy")):
        assert "saved at layout {'tensor': 2, 'pipeline': 1, 'data': 1}" in message
