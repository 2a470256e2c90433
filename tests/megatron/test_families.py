"""Every family at every layout gives the results of transformers and torch in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from aligner.proof.comparison import (
    TOLERANCE,
    choose_tolerance,
    may_be_rounding,
    relative_error,
)
from aligner.schema import ParallelConfig
from tests.megatron import families
from tests.megatron.families import BIASED_EXPERTS, CONFIGS, MIXTURES
from tests.model_parts import describe_layout, pair
from tests.rounds import covering, slow

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "single": {},
    "TP2": {"tensor": 2},
    "PP2": {"pipeline": 2},
    "VPP2": {"pipeline": 2, "virtual_pipeline": 2},
    "DP2": {"data": 2},
    "TP2+SP": {"tensor": 2, "sequence": True},
    "CP2": {"context": 2},
    "TP2xPP2": {"tensor": 2, "pipeline": 2},
    "distributed": {"data": 2},
}
# megatron-core supports experts under tensor parallelism only with sequence parallelism; ETP is the
# tensor parallelism inside an expert.
MIXTURE_LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    **{name: layout for name, layout in LAYOUTS.items() if name not in ("TP2", "TP2xPP2")},
    "TP2+SPxPP2": {"tensor": 2, "sequence": True, "pipeline": 2},
    "EP2": {"data": 2, "expert": 2},
    "EP2 distributed": {"data": 2, "expert": 2},
    "TP2+SPxEP2": {"tensor": 2, "sequence": True, "data": 2, "expert": 2},
    "EP2 over TP2": {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1},
    "CP2xEP2": {"context": 2, "expert": 2},
    "ETP1 over TP2": {"tensor": 2, "sequence": True, "expert_tensor": 1},
    "ETP2 over DP2": {"data": 2, "expert_tensor": 2},
}
# Layouts with more tensor ranks than the two KV heads.
COPY_LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "TP4": {"tensor": 4},
    "TP4+SP": {"tensor": 4, "sequence": True},
    "TP4+SPxPP2": {"tensor": 4, "sequence": True, "pipeline": 2},
    "TP4+SPxDP2 distributed": {"tensor": 4, "sequence": True, "data": 2},
    "EP4 over TP4": {"tensor": 4, "sequence": True, "expert": 4, "expert_tensor": 1},
}
# Families that have between them all parts of attention which depend on KV heads: biases, norms of
# heads and of projections, fused tensors in files.
COPY_CELLS = [
    ("llama3", "TP4"),
    ("qwen2", "TP4+SP"),
    ("qwen3", "TP4"),
    ("qwen3", "TP4+SPxPP2"),
    ("qwen3", "TP4+SPxDP2 distributed"),
    ("olmo2", "TP4"),
    ("olmo3", "TP4+SP"),
    ("phi3", "TP4+SP"),
    ("gemma3", "TP4"),
    ("glm4", "TP4+SP"),
    ("mixtral", "TP4+SP"),
    ("qwen3_moe", "EP4 over TP4"),
    ("gpt-oss", "EP4 over TP4"),
]
# Layouts whose pipeline stages or chunks have different numbers of layers.
UNEVEN_LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "PP3": {"pipeline": 3},
    "PP2 1+3": {"pipeline": 2, "stage_layers": [1, 3]},
    "VPP2 of 6": {"pipeline": 2, "virtual_pipeline": 2},
    "VPP2 1+2+1+2": {"pipeline": 2, "virtual_pipeline": 2, "stage_layers": [1, 2, 1, 2]},
    "PP3xTP2+SPxEP2": {"pipeline": 3, "tensor": 2, "sequence": True, "expert": 2}
    | {"expert_tensor": 1},
}
# Families with a tied embedding, with layers of several kinds, and with experts.
UNEVEN_CELLS = [
    ("llama3", "PP3"),
    ("smollm3", "PP2 1+3"),
    ("gemma3", "PP3"),
    ("glm4_moe", "PP3"),
    ("qwen3_moe", "PP3xTP2+SPxEP2"),
    ("qwen3_5", "PP3"),
]
ALL_LAYOUTS = {**LAYOUTS, **MIXTURE_LAYOUTS, **COPY_LAYOUTS, **UNEVEN_LAYOUTS}
# These variants of a family differ only in parts that no layout splits, so layouts that split
# tokens in the most ways are sufficient.
VARIANTS = {
    "llama-linear": ("single", "CP2"),
    "llama-yarn": ("single", "CP2"),
    "phi3-longrope": ("single", "CP2"),
    "llama-bias": ("single", "TP2+SP", "TP2xPP2", "CP2"),
    "qwen3-bias": ("single", "TP2xPP2"),
    "granite-bias": ("single", "TP2xPP2"),
    "gemma3-softcap": ("single", "TP2xPP2"),
    "olmo2-bias": ("single", "TP2+SP", "TP2xPP2"),
    "pythia-no-bias": ("single", "TP2xPP2"),
    "gpt-oss": (
        "single",
        "PP2",
        "VPP2",
        "DP2",
        "CP2",
        "distributed",
        "EP2",
        "EP2 distributed",
        "EP2 over TP2",
        "CP2xEP2",
        "ETP1 over TP2",
    ),
    "qwen3_moe-bias": ("single", "TP2+SPxEP2", "ETP2 over DP2"),
    "deepseek_v3-dense": ("single", "TP2", "TP2+SP", "TP2xPP2", "CP2"),
    "deepseek_v3-halves": ("single",),
    "moonlight": ("single", "TP2+SPxEP2"),
    "deepseek_v2-lite": ("single", "TP2+SPxEP2"),
    "qwen3_moe-raw": ("single", "EP2", "TP2+SPxEP2"),
    # A single KV head, of which both tensor ranks have a copy.
    "olmo2-multi-query": ("single", "TP2", "TP2+SP"),
    # Six layers, which four chunks do not divide.
    "smollm3-six": ("single", "VPP2 of 6", "VPP2 1+2+1+2"),
}


# States of delta nets pass through all tokens in order, so these models have no CP.
RECURRENT = ("qwen3_5", "qwen3_next", "qwen3_5_moe")


def layouts(family: str) -> Iterable[str]:
    names = VARIANTS.get(family, MIXTURE_LAYOUTS if family in MIXTURES else LAYOUTS)
    return [name for name in names if family not in RECURRENT or "CP2" not in name]


Errors = dict[tuple[str, str], float]
FIRST = [
    ("gpt-oss", "CP2xEP2"),
    *((family, "TP2xPP2") for family in ("llama3", "gpt2", "pythia", "gemma3", "glm4", "phi3")),
    ("qwen3_5", "TP2xPP2"),
    *((family, "TP2+SPxEP2") for family in ("qwen3_moe", "deepseek_v3", "glm4_moe")),
]
"""Families and layouts that the first round of tests runs."""
ALL_CELLS = [
    *((family, name) for family in CONFIGS for name in layouts(family)),
    *COPY_CELLS,
    *UNEVEN_CELLS,
]


def describe_cell(cell: tuple[str, ...]) -> frozenset[str]:
    """Return the family, and each pair of a dimension of the layout and a part of the model.

    Values after the names of family and layout are dimensions, too.
    """
    family, name, *dimensions = cell
    dimensions += describe_layout(ALL_LAYOUTS[name])
    if "distributed" in name:
        dimensions.append("distributed optimizer")
    return pair(dimensions, families.parts(family)) | {family}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A function that returns a family's directory, transformers' results, and a function that
    returns their rounding errors; each is computed once."""

    @functools.cache
    def make(family):
        directory = families.save(family, tmp_path_factory.mktemp(family))
        rounding = functools.cache(functools.partial(families.measure_rounding, directory))
        return directory, families.reference_steps(directory), rounding

    return make


@pytest.fixture(scope="module")
def table(request) -> Iterator[Errors]:
    """Largest relative error by family and layout, printed after the last test of the module."""
    errors: Errors = {}
    yield errors
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        for mixtures in (False, True):
            print_table(
                {cell: error for cell, error in errors.items() if (cell[0] in MIXTURES) is mixtures}
            )


def print_table(errors: Errors) -> None:
    names = list(dict.fromkeys(name for _, name in errors))
    rows = [["largest relative error", *names]]
    for family in dict.fromkeys(family for family, _ in errors):
        rows.append(
            [
                family,
                *(
                    f"{errors[family, name]:.0e}" if (family, name) in errors else "-"
                    for name in names
                ),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def run(pool, directory, name, **settings):
    layout = dict(ALL_LAYOUTS[name])
    settings["optimizer"] = {"distributed": "distributed" in name}
    return pool.run(
        families.family_steps, ParallelConfig(**layout).ranks, str(directory), layout, **settings
    )


def too_large(
    errors: Mapping[str, float], measure_rounding: Callable[[], Mapping[str, float]]
) -> dict[str, tuple[float, float]]:
    """Return the errors above their tolerance, with the tolerance.

    It is 1e-5, or twice the rounding error of transformers if that is larger.

    Args:
        errors: Relative errors by their names.
        measure_rounding: Returns the rounding errors; called only if an error is above 1e-5.
    """
    tolerances = dict.fromkeys(errors, TOLERANCE)
    if may_be_rounding(errors.values()):
        rounding = measure_rounding()
        tolerances = {what: choose_tolerance(rounding[what]) for what in errors}
    return {
        what: (error, tolerances[what])
        for what, error in errors.items()
        if not error <= tolerances[what]
    }


def largest_errors(directory, results, expected) -> dict[str, float]:
    """Return relative errors of loss, gradient norm, logits, and every gradient and trained
    weight."""
    errors = {}
    for key in ("loss", "grad_norm"):
        errors[key] = max(abs(result["stats"][key] / expected[key] - 1) for result in results)
    logits = expected["logits"]
    errors["logits"] = max(
        relative_error(torch.from_numpy(result["logits"]), logits, logits) for result in results
    )
    for kind in ("gradients", "weights"):
        parts = families.slice_errors(
            directory, [result[kind] for result in results], expected[kind]
        )
        errors |= {f"{kind}: {name}": error for name, error in parts.items()}
    return errors


@pytest.mark.promise("training-equals-transformers")
@pytest.mark.parametrize(("family", "name"), covering(ALL_CELLS, FIRST, describe_cell))
def test_training_equals_transformers(pool, model, table, family, name):
    directory, expected, rounding = model(family)
    errors = largest_errors(directory, run(pool, directory, name), expected)
    table[family, name] = max(errors.values())
    assert too_large(errors, rounding) == {}


@pytest.mark.parametrize("family", covering(CONFIGS, dict(FIRST), families.parts))
def test_rank_slices_equal_model_files_bit_for_bit(pool, model, family):
    directory, *_ = model(family)
    name = "TP2+SPxPP2" if family in MIXTURES else "TP2xPP2"
    layout = dict(ALL_LAYOUTS[name])
    if family in BIASED_EXPERTS:
        layout["expert_tensor"] = 1
    parts = pool.run(families.read_slices, 4, str(directory), layout)
    errors = families.slice_errors(directory, parts, load_file(directory / "model.safetensors"))
    assert set(errors.values()) == {0.0}


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("pythia", "TP2+SP"),
        ("pythia", "PP2"),
        ("mixtral", "EP2"),
        ("deepseek_v3", "TP2+SP"),
        slow("deepseek_v2", "CP2xEP2"),
    ],
)
def test_recompute_training_equals_transformers(pool, model, family, name, recompute):
    directory, expected, rounding = model(family)
    errors = largest_errors(directory, run(pool, directory, name, recompute=recompute), expected)
    assert too_large(errors, rounding) == {}


@pytest.mark.parametrize(
    ("family", "layout", "optimizer", "tokens"),
    [
        slow("llama2", {"data": 2}, {}, 24),
        # some ranks have no rows in their last micro-batch
        ("llama2", {"data": 4}, {"distributed": True}, 14),
        slow("gpt2", {"data": 4}, {}, 14),
        slow("gpt2", {"data": 2, "tensor": 2}, {"distributed": True}, 24),
        ("mixtral", {"data": 2, "expert": 2}, {}, 24),
        slow("qwen3_moe", {"data": 2}, {"distributed": True}, 24),
    ],
)
def test_overlapped_gradient_reduce_equals_plain_reduce(
    pool, tmp_path, family, layout, optimizer, tokens
):
    directory, ranks = str(families.save(family, tmp_path)), ParallelConfig(**layout).ranks
    settings = {"optimizer": optimizer, "micro_batch_tokens": tokens}
    expected = pool.run(families.family_steps, ranks, directory, layout, **settings)
    found = pool.run(families.overlapped_steps, ranks, directory, layout, **settings)
    for one, other in zip(found, expected, strict=True):
        # the first update only counts the gradients of each bucket
        assert one["early"] > families.STEPS
        for kind in ("gradients", "weights"):
            for name, (_, array) in one[kind].items():
                torch.testing.assert_close(
                    array, other[kind][name][1], rtol=1e-6, atol=1e-6, msg=f"{kind} of {name}"
                )


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        slow("llama2", {"data": 2}),
        ("gpt2", {"data": 2, "tensor": 2}),  # tied embeddings
        ("qwen3_moe", {"data": 2, "expert": 2}),
        slow("pythia", {"data": 2, "pipeline": 2}),
    ],
)
def test_overlapped_param_gather_is_bit_identical(pool, tmp_path, family, layout):
    directory, ranks = str(families.save(family, tmp_path)), ParallelConfig(**layout).ranks
    steps = families.overlapped_grouped_steps if "expert" in layout else families.overlapped_steps
    expected, found = (
        pool.run(
            steps,
            ranks,
            directory,
            layout,
            optimizer={"distributed": True} | more,
            micro_batch_tokens=24,
        )
        for more in ({}, {"overlap_param_gather": True})
    )
    for one, other in zip(found, expected, strict=True):
        # one wait per forward pass, and one when the weights are read at the end
        assert other["waits"] == 0 and one["waits"] >= families.STEPS
        families.assert_same_bits(one, other)
