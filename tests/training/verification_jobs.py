"""Functions that a rank runs in the tests of verified weight syncs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aligner.data.model_directory import read_shape
from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.embedded.engine_weights import EmbeddedUpdate
from aligner.errors import AlignerError
from aligner.megatron import world as worlds
from aligner.megatron.policy import Policy
from aligner.resharding.weight_update import PublishStats
from aligner.schema import (
    ActorConfig,
    Config,
    DataConfig,
    EngineConfig,
    EngineParallelConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
)
from aligner.training.engine_setup import build_sampler_and_publisher
from aligner.training.samplers import ColocatedSampler
from aligner.training.weight_verification import VerifyingPublisher

RANKS = 2


class Colocated:
    """A policy and its engine on this rank, and the publisher between them."""

    def __init__(
        self, directory: str, engine: dict[str, Any], trainer: dict[str, Any], lora_rank: int = 0
    ) -> None:
        layout = EngineParallelConfig(**engine.pop("parallel", {"data": RANKS}))
        config = Config(
            model=ModelConfig(path=directory),
            data=DataConfig(prompts=["unused"], max_prompt_tokens=16),
            rollout=RolloutConfig(max_response_tokens=8),
            actor=ActorConfig(parallel=ParallelConfig(**trainer), lora=LoraConfig(rank=lora_rank)),
            engine=EngineConfig(parallel=layout, **engine),
        )
        world = worlds.initialize(config.actor.parallel, seed=1, timeout_s=120)
        path = Path(directory)
        self.rank = world.rank
        self.policy = Policy(read_shape(path), world, config.actor, path, 1.0, total_updates=1)
        self.spans: list[str] = []
        tokenizer: Any = None  # only episodes need it
        sampler, publisher = build_sampler_and_publisher(
            config,
            self.policy,
            tokenizer,
            client=None,
            listener=lambda name, start, end: self.spans.append(name),
        )
        assert isinstance(sampler, ColocatedSampler)
        assert isinstance(sampler.engine, EmbeddedEngine)
        assert isinstance(publisher, VerifyingPublisher)
        self.engine = sampler.engine
        self.publisher = publisher

    @torch.no_grad()
    def change_policy(self) -> None:
        """Change all weights of the policy, as a training step does."""
        weights = self.policy.runner.weights
        for name in weights:
            tensor = weights.read(name)
            weights.write(name, tensor * 1.01 + 0.001)

    def publish(self, version: int) -> PublishStats:
        self.publisher.publish(version)
        stats = self.publisher.stats
        assert stats is not None
        return stats

    def fail_to_publish(self, version: int) -> str:
        """Return the error of a weight sync that must fail."""
        try:
            self.publisher.publish(version)
        except AlignerError as error:
            return str(error)
        finally:
            torch.distributed.barrier()
        raise AssertionError("the weight sync succeeded")


def publish_and_train(
    directory: str, engine: dict[str, Any], trainer: dict[str, Any], lora_rank: int = 0
) -> tuple[list[PublishStats], list[str]]:
    """Publish three versions; return their statistics and the spans of the timeline."""
    colocated = Colocated(directory, engine, trainer, lora_rank)
    found = []
    for version in range(3):
        found.append(colocated.publish(version))
        if not lora_rank:
            colocated.change_policy()
    worlds.shutdown()
    return found, colocated.spans


def publish_with_fault(
    directory: str, engine: dict[str, Any], fault: str, name: str, at: int
) -> str:
    """Let the weights that the engine of one rank holds be wrong after its first weight sync;
    return the error.

    Args:
        directory: Model directory.
        engine: Settings of the engine.
        fault: "corrupt" changes one element; "missing" leaves zeros instead of the received weights.
        name: Name of the tensor.
        at: The rank.
    """
    colocated = Colocated(directory, engine, {"data": RANKS})
    commit = EmbeddedUpdate.commit

    def damage_and_commit(update: EmbeddedUpdate) -> None:
        tensor = update._views[name]
        if fault == "corrupt":
            tensor.view(-1)[-1] += 1e-3
        else:
            tensor.zero_()
        commit(update)

    with pytest.MonkeyPatch.context() as patch:
        if colocated.rank == at:
            patch.setattr(EmbeddedUpdate, "commit", damage_and_commit)
        error = colocated.fail_to_publish(1)
    assert colocated.engine.version is None
    worlds.shutdown()
    return error


def publish_to_stale_engine(directory: str, at: int) -> str:
    """Let the engine of one rank keep its old weights in its second weight sync; return the error."""
    colocated = Colocated(directory, {"update": "atomic"}, {"data": RANKS})
    colocated.publish(1)
    colocated.change_policy()
    if colocated.rank == at:
        colocated.engine._swap_weights = lambda target: None  # type: ignore[method-assign]
    error = colocated.fail_to_publish(2)
    worlds.shutdown()
    return error


def publish_after_flipped_bit(
    directory: str, engine: dict[str, Any], name: str, at: int
) -> tuple[str, bool]:
    """Flip a bit of the weights that one engine rank holds between two weight syncs.

    Returns the error of the second one, and whether the tensor's memory belongs to the trainer.
    """
    colocated = Colocated(directory, engine, {"data": RANKS})
    colocated.publish(1)
    if colocated.rank == at:
        colocated.engine.held_weights()[name].view(torch.int32).view(-1)[0] ^= 1
    is_shared = name in colocated.engine.shared_names
    error = colocated.fail_to_publish(2)
    worlds.shutdown()
    return error, is_shared


def publish_with_wrong_computation(directory: str, at: int) -> str:
    """Let the engine of one rank compute other logits with the right weights; return the error."""
    colocated = Colocated(directory, {}, {"data": RANKS})
    decoder: Any = colocated.engine._state.decoder
    compute_logits: Callable[..., torch.Tensor] = decoder.compute_logits
    if colocated.rank == at:
        decoder.compute_logits = lambda states: compute_logits(states) * 1.1
    error = colocated.fail_to_publish(1)
    worlds.shutdown()
    return error
