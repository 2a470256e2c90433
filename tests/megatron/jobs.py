"""What the worker ranks run for the tests of the Megatron room."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aligner.algorithms.losses import policy_loss, value_loss
from aligner.config.schema import Actor, Optimizer, Parallel
from aligner.data.model_directory import read_shape
from aligner.data.types import Experience, response_mask
from aligner.megatron import world as worlds
from aligner.megatron.packing import pack
from aligner.megatron.policy import Policy
from aligner.megatron.value_model import ValueModel

TEMPERATURE = 0.7
OPTIMIZER = Optimizer(learning_rate=1e-3, beta2=0.95, epsilon=1e-8, clip_grad_norm=0.5)


def make_experience(vocab_size: int, batch: int = 6, seed: int = 3) -> Experience:
    """Random experience over sequences of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, 15, (batch,), generator=generator)
    prompt_lengths = torch.randint(1, 5, (batch,), generator=generator)
    width = int(lengths.max())
    tokens = torch.randint(2, vocab_size, (batch, width), generator=generator)
    tokens = torch.where(torch.arange(width) < lengths[:, None], tokens, 0)
    mask = response_mask(lengths, prompt_lengths, width)
    old = -4 + 0.1 * torch.randn(batch, width - 1, generator=generator)
    rest = [torch.where(mask, torch.randn(batch, width - 1, generator=generator), 0.0) for _ in range(5)]
    return Experience(tokens, lengths, mask, old, torch.where(mask, old, 0.0), *rest)


def loss(logprobs: Tensor, experience: Experience, denominator: float) -> tuple[Tensor, dict[str, Tensor]]:
    return policy_loss(logprobs, experience.old_logprobs, experience.advantages, experience.mask, denominator=denominator)


def policy(directory: str, layout: dict[str, int]) -> Policy:
    world = worlds.initialize(Parallel(**layout), seed=1, timeout_s=120)
    settings = Actor(parallel=world.layout, optimizer=OPTIMIZER, micro_batch_tokens=24)
    path = Path(directory)
    return Policy(read_shape(path), world, settings, path, TEMPERATURE, total_updates=4)


def slices(weights: Any) -> dict[str, tuple[Any, Tensor]]:
    return {name: (weights.slices[name], weights.read(name).clone()) for name in weights}


def policy_step(directory: str, layout: dict[str, int]) -> dict[str, Any]:
    """Log-probs, two updates, log-probs again; plus this rank's slices before and after."""
    actor = policy(directory, layout)
    experience = make_experience(read_shape(Path(directory)).vocab_size)
    before = slices(actor.runner.weights)
    first = actor.logprobs(experience.tokens, experience.lengths)
    stats = [actor.train(experience, loss) for _ in range(2)]
    result = {
        "before": before,
        "logprobs": first,
        "stats": stats,
        "after_logprobs": actor.logprobs(experience.tokens, experience.lengths),
        "reference": actor.reference_logprobs(experience.tokens, experience.lengths),
        "after": slices(actor.runner.weights),
    }
    worlds.shutdown()
    return result


def logits(directory: str, layout: dict[str, int]) -> Tensor | None:
    """This rank's part of the vocabulary's logits of every token, [T, V/TP], on the last stage."""
    actor = policy(directory, layout)
    experience = make_experience(read_shape(Path(directory)).vocab_size)
    rows = torch.arange(len(experience.lengths))
    batch = pack(experience.tokens, experience.lengths, rows, actor.world.device)
    parts = actor.runner.forward([batch], lambda output, _: output[0].clone())
    worlds.shutdown()
    return parts[0] if parts else None


def resume_step(directory: str, layout: dict[str, int], checkpoint: str) -> dict[str, Any]:
    """Three updates in one go, against one, a checkpoint, a fresh policy, and two more."""
    experience = make_experience(read_shape(Path(directory)).vocab_size)
    actor = policy(directory, layout)
    straight = [actor.train(experience, loss) for _ in range(3)]
    final = slices(actor.runner.weights)
    actor = policy(directory, layout)
    stopped = [actor.train(experience, loss)]
    actor.save(Path(checkpoint) / "policy")
    actor = policy(directory, layout)
    actor.load(Path(checkpoint) / "policy")
    stopped += [actor.train(experience, loss) for _ in range(2)]
    resumed = slices(actor.runner.weights)
    worlds.shutdown()
    return {"straight": straight, "stopped": stopped, "final": final, "resumed": resumed}


def load_checkpoint(directory: str, layout: dict[str, int], checkpoint: str) -> str:
    """The error that a checkpoint gives."""
    actor = policy(directory, layout)
    try:
        actor.load(Path(checkpoint))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        worlds.shutdown()
    return "no error"


def critic_step(directory: str, layout: dict[str, int], num_layers: int) -> dict[str, Any]:
    """Values, two updates, values again."""
    import dataclasses

    world = worlds.initialize(Parallel(**layout), seed=1, timeout_s=120)
    path = Path(directory)
    shape = dataclasses.replace(read_shape(path), num_layers=num_layers)
    critic = ValueModel(
        shape, world, path, 24, optimizer=OPTIMIZER, total_updates=4, loss=functools.partial(value_loss, clip=0.2)
    )
    experience = make_experience(shape.vocab_size)
    before = critic.values(experience.tokens, experience.lengths)
    batch = (experience.tokens, experience.returns, experience.values, experience.mask.float())
    stats = [critic.train(*batch) for _ in range(2)]
    result = {
        "before": before,
        "stats": stats,
        "after": critic.values(experience.tokens, experience.lengths),
        "version": critic.version,
    }
    worlds.shutdown()
    return result


def reward_values(directory: str, layout: dict[str, int]) -> Tensor:
    """A reward model's numbers."""
    world = worlds.initialize(Parallel(**layout), seed=1, timeout_s=120)
    model = ValueModel(read_shape(Path(directory)), world, Path(directory), 24)
    experience = make_experience(model.vocab_size)
    values = model.values(experience.tokens, experience.lengths)
    worlds.shutdown()
    return values


def places(layout: dict[str, int]) -> tuple[int, int, int]:
    """megatron-core's own idea of where this rank stands: tensor, data, pipeline."""
    from megatron.core import parallel_state

    worlds.initialize(Parallel(**layout), seed=1, timeout_s=120)
    place = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    worlds.shutdown()
    return place


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Vocab-parallel log-probs, entropy and gradient of this rank's part of the vocabulary."""
    import torch.distributed as dist

    from aligner.megatron.logprobs import vocab_parallel_logprobs

    local = logits.chunk(dist.get_world_size(), -1)[dist.get_rank()].clone().requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(local, targets, temperature, dist.group.WORLD)
    weights = torch.linspace(-1, 2, len(targets))
    (logprobs * weights).sum().backward()
    return logprobs.detach(), entropy, local.grad
