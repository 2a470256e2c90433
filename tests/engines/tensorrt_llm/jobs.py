"""Functions that the tests' ranks run: Megatron, and the engine on the same ranks."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from aligner.engines.engine_protocol import SamplingOptions, compute_weight_format
from aligner.engines.tensorrt_llm.tensorrt_llm_engine import TensorRTLLMEngine
from aligner.errors import AlignerError
from aligner.megatron import world as worlds
from aligner.megatron.policy import Policy
from aligner.resharding.publisher import Publisher
from aligner.resharding.transfer_plan import plan_resharding
from aligner.resharding.transport import Link
from aligner.schema import EngineParallelConfig
from tests.engines import engines
from tests.engines.engines import generate
from tests.engines.tensorrt_llm.fake import FakeLLM, installed
from tests.megatron import jobs


def _replica(size: int) -> dist.ProcessGroup | None:
    starts = range(0, dist.get_world_size(), size)
    groups = [dist.new_group(list(range(start, start + size))) for start in starts]
    return None if size == 1 else groups[dist.get_rank() // size]


def _engine(directory: Any, layout: EngineParallelConfig) -> TensorRTLLMEngine:
    settings = dataclasses.replace(engines.SETTINGS, parallel=layout)
    rank, group = dist.get_rank(), _replica(layout.tensor)
    return TensorRTLLMEngine(
        directory,
        engines.shape_of(directory),
        settings,
        rank,
        7,
        group,
        device="cpu",
        dtype=torch.float32,
    )


def _publisher(
    actor: Policy, engine: TensorRTLLMEngine, shape: Any, generation: int = 0
) -> Publisher:
    plan = plan_resharding(shape, actor.world.layout, engine.weight_format.layout)
    labels = [f"rank {rank}" for rank in range(actor.world.size)]
    link = Link.from_default_group(labels, timeout=timedelta(seconds=30), generation=generation)
    return Publisher(
        plan,
        link,
        read=actor.runner.weights.read,
        begin_update=engine.begin_update,
        bucket_bytes=1 << 14,
        held_weights=engine,
        verify="sync",
        group_bytes=16 << 10,
    )


def publish_and_generate(
    directory: Any, trainer: dict[str, Any], tensor: int, data: int
) -> dict[str, Any]:
    """Train one step, sync weights, and generate.

    Returns this rank's slices and samples, the engine's weights on a rank that drives an engine,
    and the engine's layout and group bytes next to those that `weight_format` predicts.
    """
    actor = jobs.policy(str(directory), trainer)
    shape = engines.shape_of(directory)
    actor.train(jobs.make_experience(shape.vocab_size), jobs.loss)
    with installed():
        layout = EngineParallelConfig(tensor=tensor, data=data)
        engine = _engine(directory, layout)
        _publisher(actor, engine, shape).publish(1)
        known = compute_weight_format(
            dataclasses.replace(engines.SETTINGS, kind="tensorrt_llm", parallel=layout),
            "cpu",
            shape.family,
        )
        samples = generate(engine, engines.requests(2), SamplingOptions(6, temperature=0.9))
        greedy = generate(engine, engines.requests(), SamplingOptions(6, greedy=True))
        result = {
            "slices": {
                name: (cut, part.numpy())
                for name, (cut, part) in jobs.slices(actor.runner.weights).items()
            },
            "leads": engine.is_leader,
            "samples": [
                (engines.response(sample), sample.engine_logprobs.tolist()) for sample in samples
            ],
            "greedy": [engines.response(sample) for sample in greedy],
            "versions": {
                version for sample in samples for version in sample.weight_versions.tolist()
            },
            "takes": [
                (engine.weight_format.layout, engine.weight_format.group_bytes),
                (known.layout, known.group_bytes),
            ],
            "whole": [
                {name: whole.numpy() for name, whole in llm.whole_weights().items()}
                for llm in FakeLLM.made
            ],
        }
        engine.shutdown()
    worlds.shutdown()
    return result


def load_where_one_rank_fails(directory: Any, tensor: int) -> str:
    """Return each rank's error when a rank that does not drive the engine fails to collect its
    tensors."""
    with installed():
        engine = _engine(directory, EngineParallelConfig(tensor=tensor, data=1))
        update = engine.begin_update(1)
        name = "model.norm.weight"
        if dist.get_rank() == 0:
            update.views([name])
        try:
            update.load([name])
            message = "nothing"
        except AlignerError as error:
            message = str(error)
        update.abort()
        engine.shutdown()
    return message


def publish_to_a_broken_worker(
    directory: Any, trainer: dict[str, Any], tensor: int, version: str, state: str
) -> dict[str, Any]:
    """Run a weight sync that fails on one worker, and then a successful one; return the errors and
    versions."""
    actor = jobs.policy(str(directory), trainer)
    shape, outcome = engines.shape_of(directory), {}
    with installed(version, state):
        engine = _engine(directory, EngineParallelConfig(tensor=tensor, data=1))
        _publisher(actor, engine, shape).publish(1)
        for llm in FakeLLM.made:
            llm.broken_worker = 1
        broken = _publisher(actor, engine, shape, 1)
        for what, action in (
            ("publish", lambda: broken.publish(2)),
            ("generate", lambda: generate(engine, engines.requests(), SamplingOptions(2))),
        ):
            try:
                action()
            except AlignerError as error:
                outcome[what] = str(error)
        outcome["version"] = engine.version
        for llm in FakeLLM.made:
            llm.broken_worker = None
        _publisher(actor, engine, shape, 2).publish(3)
        outcome["again"] = generate(engine, engines.requests(), SamplingOptions(2))[
            0
        ].weight_versions.tolist()
        engine.shutdown()
    worlds.shutdown()
    return outcome
