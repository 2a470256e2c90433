"""Routing replay: the trainer uses the engine's expert routing, at every layout."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from aligner.models.model_source import directory_shape
from aligner.proof.comparison import relative_error
from aligner.schema import ParallelConfig
from tests.megatron import families, jobs, route_jobs
from tests.megatron.families import MIXTURES
from tests.megatron.test_families import (
    MIXTURE_LAYOUTS,
    describe_cell,
    largest_errors,
    layouts,
    too_large,
)
from tests.rounds import covering, typical

EXPERIENCE = jobs.make_experience(72)
ROUTES = route_jobs.random_routes(len(EXPERIENCE.tokens), EXPERIENCE.tokens.shape[1] - 1)
"""Routing of a model with four layers of four experts, two of which a token has."""
LAYOUTS = ("single", "TP2+SPxEP2", "CP2xEP2", "PP2", "VPP2", "TP2+SPxPP2")
FIRST = ("mixtral", "glm4_moe")
"""Families that the first round of tests runs."""
TYPICAL = [(LAYOUTS[0], "none"), *((name, "full") for name in LAYOUTS[1:3])]


def make_routes(directory):
    """Return random routing for the layers with experts of a model."""
    shape = directory_shape(directory, "model.path")
    assert shape.experts is not None
    return route_jobs.random_routes(
        len(EXPERIENCE.tokens),
        EXPERIENCE.tokens.shape[1] - 1,
        layers=len(shape.expert_layers),
        experts=shape.experts.count,
        chosen=shape.experts.per_token,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A function that returns a family's directory, transformers' results with the forced routing,
    and a function that returns their rounding errors; each is computed once."""

    @functools.cache
    def make(family):
        directory = families.save(family, tmp_path_factory.mktemp(family))
        routes = make_routes(directory)
        rounding = functools.cache(functools.partial(families.measure_rounding, directory, routes))
        return directory, families.reference_steps(directory, routes), rounding

    return make


@pytest.mark.promise("routing-replay")
@pytest.mark.parametrize(
    ("family", "name", "recompute"),
    covering(
        [
            (family, name, recompute)
            for family in MIXTURES
            for name in LAYOUTS
            if name in layouts(family)
            for recompute in ("none", "selective", "full")
        ],
        [(family, *cell) for family in FIRST for cell in TYPICAL],
        describe_cell,
    ),
)
def test_replayed_routing_trains_like_transformers(pool, model, family, name, recompute):
    """Micro-batches are packed and split, and several are in flight; each must use its own routing,
    also when its activations are recomputed."""
    directory, expected, rounding = model(family)
    layout = dict(MIXTURE_LAYOUTS[name])
    ranks = ParallelConfig(**layout).ranks
    results = pool.run(
        families.family_steps,
        ranks,
        str(directory),
        layout,
        routes=make_routes(directory),
        recompute=recompute,
    )
    errors = largest_errors(directory, results, expected)
    assert too_large(errors, rounding) == {}


def test_forced_routing_differs_from_router_choice(model):
    directory, forced, _ = model("mixtral")
    own = families.reference_steps(directory)
    assert relative_error(forced["logits"], own["logits"], own["logits"]) > 0.1


@pytest.mark.parametrize("name", typical(["TP2+SPxEP2", "CP2xEP2", "PP2"], ["TP2+SPxEP2"]))
def test_routing_difference_does_not_depend_on_layout(pool, model, name):
    directory, *_ = model("qwen3_moe")
    layout = dict(MIXTURE_LAYOUTS[name])
    ((shares, logprobs, reference),) = pool.run(
        route_jobs.differing_share_and_logprobs, 1, str(directory), {}, ROUTES
    )
    assert shares == [shares[0]] * 3
    assert 0.5 < shares[0] < 1, "of six pairs of four experts the router's is one"
    torch.testing.assert_close(reference, logprobs, rtol=0, atol=0)
    for result in pool.run(
        route_jobs.differing_share_and_logprobs,
        ParallelConfig(**layout).ranks,
        str(directory),
        layout,
        ROUTES,
    ):
        assert result[0] == pytest.approx(shares, abs=1e-9)
        torch.testing.assert_close(result[1], logprobs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(result[2], logprobs, rtol=1e-4, atol=1e-4)


@pytest.mark.promise("routing-replay")
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", covering(MIXTURES, FIRST, families.parts))
def test_replaying_own_routing_changes_nothing(pool, model, family, recompute):
    directory, settings = str(model(family)[0]), {"recompute": recompute}
    (own,) = pool.run(route_jobs.replay_own, 1, directory, settings, replayed=False)
    (replayed,) = pool.run(route_jobs.replay_own, 1, directory, settings, replayed=True)
    assert math.isnan(own["differing"])
    assert replayed["differing"] == replayed["updating"] == 0
    assert torch.equal(own["logprobs"], replayed["logprobs"])
    assert own["stats"] == replayed["stats"]
    for kind in ("gradients", "after"):
        for name, (_, tensor) in own[kind].items():
            assert torch.equal(tensor, replayed[kind][name][1]), name


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_replaying_bf16_engine_routing_reduces_mismatch(pool, model, family):
    (seen,) = pool.run(route_jobs.bf16_engine_and_fp32_trainer, 1, str(model(family)[0]))
    assert seen["own"]["differing"] > 0 == seen["replayed"]["differing"]
    assert 0 < seen["differing_share"] < 1
    assert seen["replayed"]["mismatch"] < seen["own"]["mismatch"]


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (
            ROUTES[:, :, :3],
            (
                "expert routing replay: the recorded routing has (layers with experts, experts"
                " per token)=(3, 2) and expert ids up to 3; the model has (layers with"
                " experts, experts per token)=(4, 2) and 4 experts"
            ),
        ),
        (
            ROUTES + 1,
            (
                "expert routing replay: the recorded routing has (layers with experts, experts"
                " per token)=(4, 2) and expert ids up to 4; the model has (layers with"
                " experts, experts per token)=(4, 2) and 4 experts"
            ),
        ),
    ],
)
def test_routing_of_another_model_is_refused(pool, model, routes, message):
    (error,) = pool.run(route_jobs.refused_routes, 1, str(model("mixtral")[0]), routes)
    assert error == f"AlignerError: {message}"
