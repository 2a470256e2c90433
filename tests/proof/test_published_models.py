"""Small models with the quirks of published configurations equal transformers at a layout."""

from __future__ import annotations

import pytest

from aligner.models.hugging_face import read_config
from aligner.models.layouts import layout_problems
from aligner.proof.run_proof import parse_layout, prove
from aligner.proof.shrink import shrink_config
from tests.models.published_configs import SUPPORTED
from tests.rounds import typical

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
    config = SUPPORTED[name]
    is_mixture = read_config(config, name).num_experts > 0
    layouts = MIXTURE_LAYOUTS if is_mixture else LAYOUTS
    first = list(SUPPORTED).index(name)
    for index in range(len(layouts)):
        text = layouts[(first + index) % len(layouts)]
        layout = parse_layout(text)
        small = read_config(shrink_config(config, [layout], name), name)
        if not list(layout_problems("layout", layout, small)):
            return text
    return ""


@pytest.mark.promise("training-equals-transformers")
@pytest.mark.parametrize(
    "name",
    typical(SUPPORTED, FIRST, every=12),
)
def test_published_model_equals_transformers(pool, tmp_path, name):
    proof = prove(
        SUPPORTED[name], name, [parse_layout(choose_layout(name))], tmp_path, ranks=pool.run
    )
    failed = [check for check in proof.layouts[0].checks if not check.passed]
    assert not failed, (proof.layouts[0], proof.small_config)
