"""Matmuls with packed weights equal plain ones, and always use the current weights."""

from __future__ import annotations

import pytest
import torch

from aligner.engines.embedded.matmuls import Matmuls
from aligner.engines.embedded.tensor_parallel import TensorParallelRanks
from aligner.engines.engine_protocol import SamplingOptions
from tests.engines.engines import generate
from tests.engines.test_embedded import make_engine, make_requests, save_llama
from tests.engines.test_generation import assert_same, begin

ONE_RANK = TensorParallelRanks(1, 0, None)


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 64, 300])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_matmul_equals_plain_for_any_row_count(rows, biased):
    draw = torch.Generator().manual_seed(1)
    weight, x = torch.randn(49, 33, generator=draw), torch.randn(rows, 33, generator=draw)
    weights = {"layer.weight": weight} | (
        {"layer.bias": torch.randn(49, generator=draw)} if biased else {}
    )
    packed, plain = (
        Matmuls(weights, ONE_RANK, exact=False, packed=packs) for packs in (True, False)
    )
    with torch.inference_mode():
        torch.testing.assert_close(
            packed.linear(x, "layer"), plain.linear(x, "layer"), atol=1e-5, rtol=0
        )
        torch.testing.assert_close(
            packed.linear(x, "layer", with_bias=False), x @ weight.T, atol=1e-5, rtol=0
        )
        weight.mul_(2)
        packed.discard_packed_weights()
        torch.testing.assert_close(
            packed.linear(x, "layer"), plain.linear(x, "layer"), atol=1e-5, rtol=0
        )


def test_matmul_with_packed_bf16_weights_equals_rounded_fp32():
    draw = torch.Generator().manual_seed(1)
    weight, x = (torch.randn(size, 64, generator=draw).bfloat16() for size in (49, 32))
    packed = Matmuls({"layer.weight": weight}, ONE_RANK, exact=False, packed=True)
    with torch.inference_mode():
        product = packed.linear(x, "layer")
    assert product.dtype == torch.bfloat16
    torch.testing.assert_close(product.float(), x.float() @ weight.float().T, atol=1e-6, rtol=2**-8)


@pytest.mark.parametrize("update", ["atomic", "in_place"])
def test_weights_are_packed_again_for_each_version(tmp_path, update):
    directory, options = save_llama(tmp_path, tied=True), SamplingOptions(6)
    packed, plain = (
        make_engine(directory, update=update, packed_weights=packs) for packs in (True, False)
    )
    before = generate(packed, make_requests(2), options)
    for version in (1, 2):
        for engine in (packed, plain):
            change = begin(engine, directory, version)
            for view in change.views(list(engine._weights.views)).values():
                view.mul_(1 + version / 2)
            change.commit()
        assert_same(
            generate(packed, make_requests(2), options), generate(plain, make_requests(2), options)
        )
    assert [one.tokens.tolist() for one in before] != [
        one.tokens.tolist() for one in generate(packed, make_requests(2), options)
    ]
    assert (
        packed._state.decoder._matmuls._packed_weights
        and not plain._state.decoder._matmuls._packed_weights
    )
    packed.sleep()
    assert not packed._state.decoder._matmuls._packed_weights
