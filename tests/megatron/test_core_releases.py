"""Layer specs of all supported releases of megatron-core have parts and classes to replace."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec

from aligner.megatron.core_releases import get_submodules, replace_module


class _Experts(SequentialMLP):
    """Another class of experts."""


PARTS = SimpleNamespace(linear_fc1="first", linear_fc2="second")


@pytest.mark.parametrize(
    "spec",
    [
        ModuleSpec(SequentialMLP, submodules=PARTS, params={"number": 3}),
        functools.partial(SequentialMLP, submodules=PARTS, number=3),
    ],
    ids=["release 0.16", "release 0.17"],
)
def test_parts_and_class_of_spec_are_replaced(spec: Any) -> None:
    assert get_submodules(spec) is PARTS

    replaced = replace_module(spec, _Experts)

    assert get_submodules(replaced) is PARTS
    if isinstance(replaced, functools.partial):
        assert replaced.func is _Experts and replaced.keywords["number"] == 3
    else:
        assert replaced.module is _Experts and replaced.params == {"number": 3}


def test_parts_of_feed_forward_spec_of_release_0_18_are_found() -> None:
    builder = getattr(MLP, "as_mlp_submodule", MLP)

    assert get_submodules(functools.partial(builder, submodules=PARTS)) is PARTS
