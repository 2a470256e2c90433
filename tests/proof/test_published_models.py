"""Small models with the quirks of published configurations equal transformers at a layout."""

from __future__ import annotations

import pytest

from aligner.models.hugging_face import read_config
from aligner.models.layouts import layout_problems
from aligner.proof.run_proof import parse_layout, prove
from tests.model_parts import describe_parts
from tests.models.published_configs import SUPPORTED
from tests.rounds import covering

LAYOUTS = ("tensor=2", "pipeline=2", "data=2", "context=2")
MIXTURE_LAYOUTS = (
    "tensor=2,sequence=true,data=2,expert=2",
    "pipeline=2",
    "data=2,expert=2",
    "data=2,expert_tensor=2",
)
FIRST = ("Qwen3 8B with YaRN, as its README recommends", "GLM-4.5")
"""Models that the first round of tests proves."""


def choose_layout(name: str) -> str:
    """Return a layout at which a model runs; consecutive models have different ones."""
    shape = read_config(SUPPORTED[name], name)
    layouts = MIXTURE_LAYOUTS if shape.num_experts else LAYOUTS
    first = list(SUPPORTED).index(name)
    for index in range(len(layouts)):
        text = layouts[(first + index) % len(layouts)]
        if not list(layout_problems("layout", parse_layout(text), shape)):
            return text
    return ""


def describe_model(name: str) -> frozenset[str]:
    """Return the kinds of parts of a published model."""
    return describe_parts(read_config(SUPPORTED[name], name))


@pytest.mark.promise("training-equals-transformers")
@pytest.mark.parametrize("name", covering(SUPPORTED, FIRST, describe_model))
def test_published_model_equals_transformers(pool, tmp_path, name):
    proof = prove(
        SUPPORTED[name], name, [parse_layout(choose_layout(name))], tmp_path, ranks=pool.run
    )
    failed = [check for check in proof.layouts[0].checks if not check.passed]
    assert not failed, (proof.layouts[0], proof.small_config)
