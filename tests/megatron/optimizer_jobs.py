"""Functions that worker ranks run in the tests of the optimizer and the adapters."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aligner.data.model_directory import read_shape
from aligner.errors import AlignerError
from aligner.megatron import world as worlds
from aligner.megatron.lora import LoraWeights
from aligner.megatron.policy import Policy
from aligner.resharding.publisher import Publisher
from aligner.resharding.transfer_plan import plan_resharding
from aligner.resharding.transport import Link
from aligner.schema import EngineParallelConfig
from tests.megatron import jobs
from tests.resharding.sink import Sink

# By update index: the weight and the value that is written into its gradient.
Poison = Mapping[int, tuple[str, float]]


def whole_gradient(name: str, shape: Sequence[int], step: int) -> Tensor:
    """Return a weight's gradient at a step; it depends only on the name, the shape and the step."""
    seed = int.from_bytes(hashlib.sha256(f"{name}:{step}".encode()).digest()[:6], "big")
    return 0.01 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _give_gradients(actor: Policy, step: int) -> None:
    weights = actor.runner.trained_weights
    for name in weights:
        cut, whole = weights.slices[name], whole_gradient(name, weights.specs[name].shape, step)
        piece = (
            whole if cut.axis is None else whole.narrow(cut.axis, cut.start, cut.stop - cut.start)
        )
        weights.scatter(name, weights.parameter(name).main_grad, piece)


def moment_devices(actor: Policy) -> set[str]:
    """Return the types of the devices that hold Adam's moments and main weights."""
    states = [
        state
        for part in actor.runner.optimizer.chained_optimizers
        for state in part.optimizer.state.values()
    ]
    return {
        value.device.type for state in states for name, value in state.items() if name != "step"
    }


def optimizer_state(actor: Policy) -> list[Tensor]:
    """Return copies of this rank's Adam moments, step counts and weights."""
    parts = actor.runner.optimizer.chained_optimizers
    states = [state for part in parts for state in part.optimizer.state.values()]
    tensors = [torch.as_tensor(value) for state in states for value in state.values()]
    return [
        tensor.clone()
        for tensor in (
            *tensors,
            *(parameter.detach() for _, parameter in actor.runner.parameters()),
        )
    ]


def guided_steps(
    directory: str,
    layout: dict[str, Any],
    settings: dict[str, Any],
    gradients: Sequence[int],
    poison: Poison | None = None,
) -> dict[str, Any]:
    """Run optimizer steps with gradients of `whole_gradient`, some of them overwritten by `poison`.

    Returns the statistics of every step, the final weights, the devices of the optimizer's moments,
    and for each poisoned step whether it left the state unchanged, bit for bit.
    """
    actor = jobs.policy(directory, layout, settings)
    stats, untouched = [], []
    try:
        for index, step in enumerate(gradients):
            before = optimizer_state(actor)
            _give_gradients(actor, step)
            if index in (poison or {}):
                name, value = poison[index]
                if name in actor.runner.trained_weights:
                    parameter = actor.runner.trained_weights.parameter(name)
                    parameter.main_grad.view(-1)[:3] = value
            stats.append(actor.runner._guarded_step())
            if index in (poison or {}):
                same = zip(before, optimizer_state(actor), strict=True)
                untouched.append(all(torch.equal(left, right) for left, right in same))
        after, devices = jobs.slices(actor.runner.weights), moment_devices(actor)
        return {"stats": stats, "after": after, "devices": devices, "untouched": untouched}
    except AlignerError as error:
        return {"stats": stats, "error": str(error), "rank": actor.world.rank}
    finally:
        worlds.shutdown()


def learning_rates(directory: str, settings: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Return the learning rates of four steps for each of the optimizer settings."""
    rates = []
    for optimizer in settings:
        actor = jobs.policy(directory, {}, {"optimizer": optimizer})
        rates.append([])
        for step in range(4):
            _give_gradients(actor, step)
            rates[-1].append(actor.runner._guarded_step()["lr"])
    worlds.shutdown()
    return rates


def spoiled_update(directory: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Run an update with a NaN loss and then a normal update; and the normal update alone."""

    def bad_loss(
        logprobs: Tensor, entropy: Tensor, experience: Any, denominator: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        value, stats = jobs.loss(logprobs, entropy, experience, denominator)
        return value * torch.nan, {
            name: value * torch.nan if name == "loss" else value for name, value in stats.items()
        }

    experience = jobs.make_experience(read_shape(Path(directory)).vocab_size)
    actor = jobs.policy(directory, layout)
    stats = [actor.train(experience, bad_loss), actor.train(experience, jobs.loss)]
    spoiled = jobs.slices(actor.runner.weights)
    actor = jobs.policy(directory, layout)
    alone = actor.train(experience, jobs.loss)
    result = {
        "stats": stats,
        "alone": alone,
        "after": spoiled,
        "after_alone": jobs.slices(actor.runner.weights),
    }
    worlds.shutdown()
    return result


def adapted_policy(
    directory: str, layout: dict[str, Any], settings: dict[str, Any], steps: int
) -> dict[str, Any]:
    """Update a policy with adapters; return log-probs, gradients, adapters, merged weights and
    reference log-probs."""
    actor = jobs.policy(directory, layout, settings)
    weights = actor.runner.weights
    assert isinstance(weights, LoraWeights)
    experience = jobs.make_experience(read_shape(Path(directory)).vocab_size)
    base = {name: weights.parameter(name).detach().clone() for name in weights}
    fresh = jobs.slices(weights.adapters)
    first = actor.logprobs(experience.tokens, experience.lengths)
    seen, stats = [], []
    for _ in range(steps):
        update, gradients = jobs.observed_train(actor, experience)
        stats.append(update)
        seen.append(gradients)
    result = {
        "logprobs": first,
        "gradients": seen,
        "stats": stats,
        "after_logprobs": actor.logprobs(experience.tokens, experience.lengths),
        "reference": actor.reference_logprobs(experience.tokens, experience.lengths),
        "fresh": fresh,
        "adapters": jobs.slices(weights.adapters),
        "merged": jobs.slices(weights),
        "base_untouched": all(torch.equal(base[name], weights.parameter(name)) for name in weights),
        "buffered": sum(buffer.numel for chunk in actor.runner.ddp for buffer in chunk.buffers),
    }
    worlds.shutdown()
    return result


def trained_weights(
    directory: str, layout: dict[str, Any], settings: dict[str, Any], steps: int
) -> dict[str, Any]:
    """Return the statistics of updates, the final weights, and the size of this rank's gradient
    buffers."""
    actor = jobs.policy(directory, layout, settings)
    experience = jobs.make_experience(read_shape(Path(directory)).vocab_size)
    stats = [actor.train(experience, jobs.loss) for _ in range(steps)]
    buffered = sum(buffer.numel for chunk in actor.runner.ddp for buffer in chunk.buffers)
    result = {"stats": stats, "after": jobs.slices(actor.runner.weights), "buffered": buffered}
    worlds.shutdown()
    return result


def publish_trained_policy(
    directory: str, layout: dict[str, Any], settings: dict[str, Any], steps: int
) -> dict[str, Tensor]:
    """Train, and publish to an engine whose ranks each hold the whole model; return the engine's
    weights."""
    actor = jobs.policy(directory, layout, settings)
    experience = jobs.make_experience(read_shape(Path(directory)).vocab_size)
    for _ in range(steps):
        actor.train(experience, jobs.loss)
    weights, world = actor.runner.weights, actor.world
    engine = EngineParallelConfig(tensor=1, data=world.size)
    plan = plan_resharding(actor.runner.shape, world.layout, engine)
    link, sink = (
        Link.from_default_group(plan.labels, timeout=timedelta(seconds=60)),
        Sink(plan, world.rank),
    )
    publisher = Publisher(
        plan,
        link,
        read=weights.read,
        begin_update=sink.begin_update,
        bucket_bytes=1 << 20,
        held_weights=sink,
        verify="sync",
    )
    publisher.publish(version=1)
    worlds.shutdown()
    return sink.front


def adapted_checkpoint(
    directory: str, layout: dict[str, Any], settings: dict[str, Any], checkpoint: str, resume: bool
) -> dict[str, Any]:
    """Run the third update: after two updates and a save, or after loading that checkpoint."""
    actor = jobs.policy(directory, layout, settings)
    experience = jobs.make_experience(read_shape(Path(directory)).vocab_size)
    if resume:
        actor.load(Path(checkpoint))
    else:
        for _ in range(2):
            actor.train(experience, jobs.loss)
        actor.save(Path(checkpoint))
    stats = actor.train(experience, jobs.loss)
    result = {"stats": stats, "adapters": jobs.slices(actor.runner.trained_weights)}
    worlds.shutdown()
    return result
