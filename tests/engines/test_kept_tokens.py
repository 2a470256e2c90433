"""Sampling support (kept token ids): the trainer renormalizes over the engine's, so a step's first
ratio is 1."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from aligner.algorithms.kl import KLController
from aligner.algorithms.online_algorithm import build_online_algorithm
from aligner.config.compose import compose_config
from aligner.data.types import Prompt, Sample, SampleBatch, collate, create_empty_samples
from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.engine_loop import SingleResponses
from aligner.engines.engine_protocol import SamplingOptions
from aligner.engines.replicas import create_replica_group, generate_in_parts, run_to_completion
from aligner.megatron import world as worlds
from aligner.megatron.policy import Policy
from aligner.models.model_source import directory_shape
from aligner.observability.timeline import PhaseTimer
from aligner.schema import EngineConfig, EngineParallelConfig
from aligner.training.online import OnlineTrainer
from aligner.training.rollout_builder import RolloutBatch
from aligner.training.services import PendingRows, Services
from tests.engines.engines import load_directory
from tests.engines.test_embedded import load_transformers, make_engine, save_llama
from tests.engines.test_generation import begin, mixed_requests
from tests.engines.test_sampling import exact_distribution
from tests.megatron import families, jobs
from tests.rounds import typical

LENGTHS = (3, 9, 1, 8)
OPTIONS = {
    "top-p": {"top_p": 0.95},
    "top-k": {"top_k": 20},
    "both": {"top_p": 0.95, "top_k": 20},
    "min-p": {"min_p": 0.05},
}
LAYOUTS = {
    "tp2-pp2": ({"tensor": 2, "pipeline": 2}, 2),
    "tp2-sp": ({"tensor": 2, "sequence": True}, 1),
    "dp2-cp2": ({"data": 2, "context": 2}, 1),
}
"""The trainer's layout, and the number of tensor-parallel ranks of an engine replica."""


def options_of(name: str, *, renormalize: bool = True) -> SamplingOptions:
    return SamplingOptions(
        12, temperature=jobs.TEMPERATURE, renormalize=renormalize, **OPTIONS[name]
    )


def draw(directory: str, tensor: int, names: list[tuple[str, bool]]) -> list[list[Sample]]:
    """Generate two samples per prompt on all ranks of the world, for each of the options."""
    shape, rank, size = (
        directory_shape(Path(directory), "model.path"),
        dist.get_rank(),
        dist.get_world_size(),
    )
    generator = torch.Generator().manual_seed(5)
    prompts = [
        Prompt(at, "", torch.randint(2, 72, (length,), generator=generator))
        for at, length in enumerate(LENGTHS)
    ]
    layout = EngineParallelConfig(tensor=tensor, data=size // tensor)
    group = create_replica_group(layout, rank, timedelta(seconds=60))
    settings = EngineConfig(parallel=layout, batch_size=3)
    engine = EmbeddedEngine(shape, settings, rank, 2, group)
    load_directory(engine, Path(directory))
    return [
        run_to_completion(
            generate_in_parts(
                engine,
                SingleResponses(engine),
                settings,
                rank,
                create_empty_samples(prompts, 2),
                2,
                options_of(name, renormalize=renormalize),
            )
        )
        for name, renormalize in names
    ]


def error(batch: SampleBatch, scored: Tensor) -> float:
    """Return the largest deviation of a token's trainer-to-engine probability ratio from 1."""
    return float(torch.where(batch.mask, (scored - batch.engine_logprobs).expm1(), 0.0).abs().max())


def ratios(directory: str, layout: dict[str, Any], tensor: int) -> dict[str, Any]:
    """Return the largest errors of policy and reference for each of OPTIONS, and the metrics of a
    training step."""
    samples_by_option = draw(directory, tensor, [(name, True) for name in OPTIONS])
    actor = jobs.policy(directory, layout)
    found: dict[str, Any] = {}
    for name, samples in zip(OPTIONS, samples_by_option, strict=True):
        batch = collate(samples, pad_token_id=0)
        assert (
            batch.sampling_support is not None
            and (batch.sampling_support.counts[batch.mask] > 0).all()
        )
        both = [
            scorer(batch.tokens, batch.lengths, sampling_support=batch.sampling_support)
            for scorer in (actor.logprobs, actor.reference_logprobs)
        ]
        found[name] = [
            *(error(batch, scored) for scored in both),
            error(batch, actor.logprobs(batch.tokens, batch.lengths)),
        ]
    found["step"] = trained_step(
        actor, samples_by_option[0], LENGTHS, asks_before_update="pipeline" in layout
    )
    worlds.shutdown()
    return found


def trained_step(
    actor: Policy, samples: list[Sample], prompts: tuple[int, ...], *, asks_before_update: bool
) -> dict[str, float]:
    """Return the online trainer's metrics of a step on these samples.

    `asks_before_update` selects whether the log-probs are computed before the update or by it.
    """
    config = compose_config(
        [
            *(
                "experiment=arithmetic",
                "algorithm=grpo",
                "algorithm.epochs=1",
                "algorithm.minibatches=1",
            ),
            *(
                f"rollout.prompts_per_step={len(prompts)}",
                "rollout.samples_per_prompt=2",
                "rollout.top_p=0.95",
            ),
        ]
    )
    scores = Future[Tensor]()
    scores.set_result(torch.arange(float(len(samples))).sin())
    unused: Any = None
    trainer = OnlineTrainer(
        config=config,
        checkpoints=None,
        recorder=None,
        timeline=unused,
        stop_condition=unused,
        policy=actor,
        pipeline=unused,
        services=Services(None, None),
        algorithm=dataclasses.replace(
            build_online_algorithm(config), needs_old_logprobs=asks_before_update
        ),
        prompts=unused,
        pass_rates=unused,
        kl_controller=KLController(0.1),
        evaluations=None,
    )
    pending = PendingRows((scores,) if dist.get_rank() == 0 else ())
    rollout = RolloutBatch(
        [unused] * len(samples), samples, collate(samples, 0), pending, PendingRows(())
    )
    return trainer._train_on_rollout(0, rollout, PhaseTimer())[0]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(families.save("llama3", tmp_path_factory.mktemp("llama3")))


@pytest.mark.promise("truncated-sampling-first-ratio-is-one")
@pytest.mark.parametrize("layout", typical(LAYOUTS, ["tp2-sp"]))
def test_first_ratio_is_one_with_truncated_sampling(pool, llama, layout):
    layout, tensor = LAYOUTS[layout]
    for found in pool.run(ratios, 2 if "sequence" in layout else 4, llama, layout, tensor):
        step = found.pop("step")
        for name, (policy, reference, whole) in found.items():
            assert policy < 1e-5 and reference < 1e-5, name
            assert whole > 0.01, f"{name}: nothing was left out"
        assert step["mismatch/logprob_abs"] < 1e-5
        assert step["policy/ratio_max"] == pytest.approx(1, abs=1e-5)
        assert step["kl/reference"] == pytest.approx(0, abs=1e-4)
        assert step["policy/grad_norm"] > 0


def test_logprobs_without_renormalize_lack_kept_mass(pool, llama):
    names = [(name, renormalize) for name in OPTIONS for renormalize in (True, False)]
    (samples_by_option,) = pool.run(draw, 1, llama, 1, names)
    for name, exact, whole in zip(
        OPTIONS, samples_by_option[::2], samples_by_option[1::2], strict=True
    ):
        assert [one.tokens.tolist() for one in exact] == [one.tokens.tolist() for one in whole]
        assert all(one.sampling_support is None for one in whole)
        shares = torch.cat(
            [
                (w.engine_logprobs - e.engine_logprobs).exp()
                for e, w in zip(exact, whole, strict=True)
            ]
        )
        # Without renormalization, the log-probs are too small by the log of the kept probability
        # mass.
        assert float(shares.max()) < 1 + 1e-5 and float(shares.min()) < 0.98, name
        if OPTIONS[name] == {"top_p": 0.95}:
            assert float(shares.min()) > 0.95 - 1e-5


def test_replica_kept_token_ids_equal_one_rank(pool, llama):
    names = [(name, True) for name in OPTIONS]
    (alone,) = pool.run(draw, 1, llama, 1, names)
    for samples_by_option in pool.run(draw, 2, llama, 2, names):
        for samples, expected in zip(samples_by_option, alone, strict=True):
            assert [sets(sample) for sample in samples] == [sets(sample) for sample in expected]


def sets(sample: Sample) -> list[list[int]]:
    assert sample.sampling_support is not None
    return [ids.tolist() for ids in sample.sampling_support.split_ids()]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of the same shape."""
    paths = [
        save_llama(tmp_path_factory.mktemp(name), tied=tied)
        for name, tied in (("first", True), ("second", True))
    ]
    from safetensors.torch import load_file, save_file

    file = paths[1] / "model.safetensors"
    save_file(
        {name: tensor.flip(-1).contiguous() for name, tensor in load_file(file).items()}, file
    )
    return paths[0], paths[1]


TRUNCATED = SamplingOptions(12, top_p=0.9, top_k=60, renormalize=True)


def assert_support_of_models(models: list[Any], samples: list[Sample]) -> None:
    """Check each token's support and renormalized log-prob under the weights of its version."""
    for sample in samples:
        with torch.no_grad():
            logits = torch.stack(
                [
                    model(sample.tokens[None]).logits[0, sample.prompt_length - 1 : -1]
                    for model in models
                ]
            )
        generated = zip(
            sample.response.tolist(), sample.weight_versions.tolist(), sets(sample), strict=True
        )
        for place, (token, version, kept) in enumerate(generated):
            exact = exact_distribution(logits[version, place], TRUNCATED)
            assert sorted(kept) == exact.nonzero()[:, 0].tolist()
            assert float(sample.engine_logprobs[place]) == pytest.approx(
                float(exact[token].log()), abs=1e-4
            )


@pytest.mark.promise("support-of-interrupted-responses")
@pytest.mark.parametrize("rows", [64, 3])
def test_transferred_response_keeps_its_support(directories, rows):
    requests = mixed_requests()
    engine = make_engine(directories[0], batch_size=rows)
    generation = SingleResponses(engine).start(requests, TRUNCATED)
    samples = dict(pair for _ in range(5) for pair in generation.step())
    begun = dict(generation.interrupt())
    generation.cancel()
    wanted = [
        dataclasses.replace(requests[place], partial_sample=sample)
        for place, sample in begun.items()
    ]
    going_on = SingleResponses(engine).start(wanted, TRUNCATED)
    places = list(begun)
    while not going_on.is_done:
        samples |= {places[at]: sample for at, sample in going_on.step()}
    assert any(
        0 < len(sample.response) < len(samples[place].response) for place, sample in begun.items()
    )
    assert_support_of_models([load_transformers(directories[0])], list(samples.values()))


@pytest.mark.promise("support-of-interrupted-responses")
def test_interrupted_response_keeps_support_of_each_version(directories):
    engine, samples = make_engine(directories[0], batch_size=7), {}
    generation = SingleResponses(engine).start(mixed_requests(), TRUNCATED)
    for _ in range(4):
        samples |= generation.step()
    begin(engine, directories[1], 1, "interrupt").commit()
    while not generation.is_done:
        samples |= generation.step()
    assert any(len(sample.weight_versions.unique()) == 2 for sample in samples.values())
    assert_support_of_models(
        [load_transformers(path) for path in directories], list(samples.values())
    )
