"""Functions that worker ranks run in the tests of `aligner.megatron`."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aligner.algorithms.policy_losses import value_loss
from aligner.data.model_directory import read_shape
from aligner.data.types import Experience
from aligner.megatron import world as worlds
from aligner.megatron.named_weights import NamedWeights
from aligner.megatron.packing import PackedBatch, PackingLayout, pack
from aligner.megatron.policy import Policy
from aligner.megatron.value_model import ValueModel, build_critic
from aligner.models.shape import LayerShape
from aligner.models.weight_slices import Coordinates
from aligner.proof.rank_jobs import Slices
from aligner.proof.rank_jobs import train_and_observe as observed_train
from aligner.proof.reference import TEMPERATURE, make_experience
from aligner.proof.reference import compute_loss as loss
from aligner.schema import (
    ActorConfig,
    Config,
    CriticConfig,
    OptimizerConfig,
    ParallelConfig,
    RewardConfig,
)
from aligner.schema.keys import with_values

# Epsilon is larger than the smallest gradients: Adam amplifies rounding errors of gradients near epsilon
# by up to learning_rate / epsilon. With 1e-6, some processors compute weights that differ by 1.1e-5.
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, beta2=0.95, epsilon=1e-5, clip_grad_norm=0.5)


def policy(
    directory: str,
    layout: dict[str, Any],
    settings: dict[str, Any] | None = None,
    *,
    exact: bool = False,
) -> Policy:
    """Return a policy at a layout; `settings` are keys of the actor's section, with `optimizer` as
    a dictionary."""
    world = worlds.initialize(ParallelConfig(**layout), seed=1, timeout_s=120)
    section = ActorConfig(parallel=world.layout, **{"logprob_chunk_tokens": 10} | _chosen(settings))
    path = Path(directory)
    return Policy(read_shape(path), world, section, path, TEMPERATURE, total_updates=4, exact=exact)


def _chosen(settings: dict[str, Any] | None) -> dict[str, Any]:
    chosen = {"micro_batch_tokens": 24} | (settings or {})
    return chosen | {"optimizer": dataclasses.replace(OPTIMIZER, **chosen.get("optimizer", {}))}


def slices(weights: NamedWeights) -> Slices:
    """Return this rank's slices of the weights; assert that slices not listed as copies are views
    of their parameters."""
    for name in set(weights) - weights.copied_names:
        assert (
            weights.read(name).untyped_storage().data_ptr()
            == weights.parameter(name).untyped_storage().data_ptr()
        ), name
    return {name: (weights.slices[name], weights.read(name).clone()) for name in weights}


def policy_step(
    directory: str, layout: dict[str, Any], settings: dict[str, Any] | None = None, steps: int = 2
) -> dict[str, Any]:
    """Return log-probs before and after updates, and this rank's slices of the weights before and
    after and of the first gradients."""
    actor = policy(directory, layout, settings)
    experience = make_experience(read_shape(Path(directory)).vocab_size)
    before = slices(actor.runner.weights)
    first = actor.logprobs(experience.tokens, experience.lengths)
    stats, seen = observed_train(actor, experience)
    result = {
        "before": before,
        "logprobs": first,
        "gradients": seen,
        "stats": [stats, *(actor.train(experience, loss) for _ in range(steps - 1))],
        "after_logprobs": actor.logprobs(experience.tokens, experience.lengths),
        "reference": actor.reference_logprobs(experience.tokens, experience.lengths),
        "after": slices(actor.runner.weights),
    }
    worlds.shutdown()
    return result


def shared_prefix_update(
    directory: str, layout: dict[str, Any], settings: dict[str, Any], *, shared: bool
) -> dict[str, Any]:
    """Return log-probs, statistics and gradients of an update on rows with common prefixes.

    If `shared`, each prefix is computed once, otherwise in each row.
    """
    actor = policy(directory, layout, settings)
    assert actor.runner._packing_layout.should_share_prefixes
    actor.runner._packing_layout = dataclasses.replace(
        actor.runner._packing_layout, should_share_prefixes=shared
    )
    experience = make_experience(actor.runner.shape.vocab_size)
    experience.tokens[:, :5] = experience.tokens[::3, :5].repeat_interleave(3, 0)
    batches = actor.runner.pack(experience.tokens, experience.lengths)
    logprobs = actor.logprobs(experience.tokens, experience.lengths, mask=experience.mask)
    stats, seen = observed_train(actor, experience)
    worlds.shutdown()
    return {
        "logprobs": logprobs,
        "stats": stats,
        "gradients": seen,
        "saved": sum(len(batch.token_index) - batch.tokens.numel() for batch in batches),
    }


def logits(
    directory: str, layout: dict[str, Any], settings: dict[str, Any] | None = None
) -> Tensor:
    """Return logits of every token, [B, S, V], zeros past each sequence; equal on all ranks."""
    actor = policy(directory, layout, settings)
    whole = policy_logits(actor, make_experience(read_shape(Path(directory)).vocab_size))
    worlds.shutdown()
    return whole


def policy_logits(actor: Policy, experience: Experience) -> Tensor:
    """Return logits of every token, [B, S, V], zeros past each sequence; equal on all ranks."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    runner, world = actor.runner, actor.world

    def read(output: Tensor, batch: PackedBatch) -> Tensor:
        head = runner.chunks[-1].output_layer
        logits = ColumnParallelLinear.forward(head, output[0], weight=head.projection)[0].float()
        logits = logits * runner.shape.logit_scale
        if (softcap := runner.shape.logit_softcap) is not None:
            logits = softcap * (logits / softcap).tanh()
        return batch.unpack_tokens(logits)

    batches = runner.pack(
        experience.tokens, experience.lengths, expert_routing=experience.expert_routing
    )
    whole = torch.zeros(*experience.tokens.shape, runner.shape.vocab_size)
    mine = whole.chunk(world.layout.tensor, -1)[world.coordinates.tensor]
    parts = runner.forward(batches, read)
    if world.is_last_stage and world.coordinates.context == 0:
        for batch, part in zip(batches, parts, strict=True):
            if not batch.is_filler:
                # Drop the padding of the vocabulary.
                mine[batch.batch_rows, : batch.width] = part.cpu()[..., : mine.shape[-1]]
    return world.all_reduce_sum(whole)


def critic_step(
    directory: str, layout: dict[str, Any], num_layers: int, settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return a critic's values before and after two updates, and their statistics."""
    world = worlds.initialize(ParallelConfig(**layout), seed=1, timeout_s=120)
    path = Path(directory)
    shape = read_shape(path).with_layers(num_layers)
    section = CriticConfig(parallel=world.layout, **_chosen(settings))
    critic = ValueModel(
        shape, world, path, section, total_updates=4, loss=functools.partial(value_loss, clip=0.2)
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


def initialized_critic(
    directory: str, layout: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """Return the values before and after two updates of a critic that starts from `directory`.

    `settings` are keys of the critic's section.
    """
    critic, experience = _critic(directory, layout, settings)
    before = critic.values(experience.tokens, experience.lengths)
    stats = [_critic_update(critic, experience) for _ in range(2)]
    after = critic.values(experience.tokens, experience.lengths)
    worlds.shutdown()
    return {"before": before, "stats": stats, "after": after}


def critic_updates(
    directory: str,
    layout: dict[str, Any],
    settings: dict[str, Any],
    *,
    save: str | None = None,
    resume: str | None = None,
) -> dict[str, Any]:
    """Return a critic's weights before and after each of four updates, and their statistics.

    With `resume`, it loads that checkpoint and runs only the last two updates. With `save`, it
    saves a checkpoint there after two updates.
    """
    critic, experience = _critic(directory, layout, settings)
    if resume is not None:
        critic.load(Path(resume))
    weights, stats = [slices(critic.runner.weights)], []
    for update in range(2 if resume is not None else 0, 4):
        if update == 2 and save is not None:
            critic.save(Path(save))
        stats.append(_critic_update(critic, experience))
        weights.append(slices(critic.runner.weights))
    worlds.shutdown()
    return {"weights": weights, "stats": stats}


def _critic(
    directory: str, layout: dict[str, Any], settings: dict[str, Any]
) -> tuple[ValueModel, Experience]:
    world = worlds.initialize(ParallelConfig(**layout), seed=1, timeout_s=120)
    section = CriticConfig(parallel=world.layout, path=directory, **_chosen(settings))
    config = with_values(
        Config(),
        {"critic": section, "run.steps": 4, "algorithm.epochs": 1, "algorithm.minibatches": 1},
    )
    critic = build_critic(config, world, functools.partial(value_loss, clip=0.2))
    return critic, make_experience(critic.vocab_size)


def _critic_update(critic: ValueModel, experience: Experience) -> dict[str, float]:
    return critic.train(
        experience.tokens, experience.returns, experience.values, experience.mask.float()
    )


def reward_values(directory: str, layout: dict[str, Any]) -> Tensor:
    """Return a reward model's values of every token."""
    world = worlds.initialize(ParallelConfig(**layout), seed=1, timeout_s=120)
    model = ValueModel(
        read_shape(Path(directory)),
        world,
        Path(directory),
        RewardConfig(parallel=world.layout, micro_batch_tokens=24),
    )
    experience = make_experience(model.vocab_size)
    values = model.values(experience.tokens, experience.lengths)
    worlds.shutdown()
    return values


def places(layout: dict[str, Any]) -> Coordinates:
    """Return this rank's coordinates according to megatron-core."""
    from megatron.core import parallel_state

    worlds.initialize(ParallelConfig(**layout), seed=1, timeout_s=120)
    place = Coordinates(
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        context=parallel_state.get_context_parallel_rank(),
        data=parallel_state.get_data_parallel_rank(),
        pipeline=parallel_state.get_pipeline_model_parallel_rank(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_rank(),
        expert=parallel_state.get_expert_model_parallel_rank(),
    )
    worlds.shutdown()
    return place


def attention_weights(attended: Tensor) -> Tensor:
    """Return the weights of the attention outputs in the test's loss."""
    return torch.linspace(-1, 1, attended.numel()).view(attended.shape)


def attend(
    layout: dict[str, Any], whole: dict[str, Tensor], lengths: list[int], window: int | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return packed attention of rows of queries, keys and values [N, L, heads, dim], and their
    gradients."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    from aligner.megatron.attention import PackedAttention
    from aligner.megatron.shared_prefixes import bundle_without_sharing

    world = worlds.initialize(ParallelConfig(**layout), seed=1, timeout_s=120)
    cut = PackingLayout(
        context_size=world.layout.context,
        context_rank=world.coordinates.context,
        context_group=parallel_state.get_context_parallel_group(),
    )
    rows, width = len(lengths), max(lengths)
    # Each token id is the token's index in the flattened rows.
    counts = torch.tensor(lengths)
    batch = pack(
        torch.arange(rows * width).view(rows, width),
        counts,
        bundle_without_sharing(counts),
        world.device,
        cut,
    )
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in whole.items()}
    packed = [leaf.flatten(0, 1)[batch.tokens[0]] for leaf in leaves.values()]
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
    )
    layer = LayerShape(sliding_window=None if window is None else window + 1)
    attended = batch.unpack_tokens(
        PackedAttention(config, layer=layer)(*packed, None, packed_seq_params=batch.sequences)
    )
    (attended * attention_weights(attended)).sum().backward()
    gradients = {name: world.all_reduce_sum(leaf.grad) for name, leaf in leaves.items()}
    worlds.shutdown()
    return attended.detach(), gradients


def rms_norm(x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """Return the RMS norm of x [..., H], and the gradients of x and weight."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from aligner.megatron.norms import RMSNorm

    norm = RMSNorm(
        TransformerConfig(num_layers=1, hidden_size=len(weight), num_attention_heads=1), len(weight)
    )
    norm.weight = torch.nn.Parameter(weight)
    normed = norm(x.requires_grad_())
    return normed.detach(), *torch.autograd.grad(normed, (x, norm.weight), gradient)


def refused_sequence(directory: str, length: int) -> str:
    """Return the error of log-probs of a sequence of this length."""
    actor = policy(directory, {})
    try:
        actor.logprobs(torch.ones(2, length, dtype=torch.int64), torch.tensor([3, length]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        worlds.shutdown()
    return "no error"


def short_step(directory: str, layout: dict[str, Any]) -> tuple[Tensor, dict[str, float]]:
    """Return log-probs and the statistics of an update of a single sequence."""
    actor = policy(directory, layout)
    experience = make_experience(read_shape(Path(directory)).vocab_size, batch=1)
    logprobs = actor.logprobs(experience.tokens, experience.lengths)
    stats = actor.train(experience, loss)
    worlds.shutdown()
    return logprobs, stats


def attention_calls(directory: str, settings: dict[str, Any]) -> tuple[int, int]:
    """Return the number of calls of the attention core in a forward pass and in an update."""
    actor = policy(directory, {}, settings)
    experience = make_experience(read_shape(Path(directory)).vocab_size)
    calls: list[int] = []
    for layer in actor.runner.chunks[0].decoder.layers:
        layer.self_attention.core_attention.register_forward_pre_hook(lambda *_: calls.append(1))
    actor.logprobs(experience.tokens, experience.lengths)
    forward = len(calls)
    actor.train(experience, loss)
    worlds.shutdown()
    return forward, len(calls) - forward


def bf16_step(directory: str, layout: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return bf16 log-probs, and weights and fp32 main weights before and after one update."""
    actor = policy(directory, layout, {"precision": "bf16"} | settings)
    experience = make_experience(read_shape(Path(directory)).vocab_size)
    logprobs = actor.logprobs(experience.tokens, experience.lengths)
    # With the distributed optimizer a rank holds its own shard of the main weights, or none.
    held = [
        parameter for _, parameter in actor.runner.parameters() if parameter.main_param is not None
    ]
    weights = [[parameter.detach().clone() for _, parameter in actor.runner.parameters()]]
    mains = [torch.cat([parameter.main_param.detach().flatten().clone() for parameter in held])]
    stats = actor.train(experience, loss)
    weights.append([parameter.detach().clone() for _, parameter in actor.runner.parameters()])
    mains.append(torch.cat([parameter.main_param.detach().flatten().clone() for parameter in held]))
    worlds.shutdown()
    return {"logprobs": logprobs, "stats": stats, "weights": weights, "mains": mains}


def threads() -> int:
    """Return the number of this worker's threads."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def group_timeout_s(timeout_s: float) -> float:
    """Return the timeout in s of megatron-core's process groups."""
    from megatron.core import parallel_state

    worlds.initialize(ParallelConfig(tensor=2), seed=1, timeout_s=timeout_s)
    backend = parallel_state.get_tensor_model_parallel_group()._get_backend(torch.device("cpu"))
    waits: float = backend.options._timeout.total_seconds()
    worlds.shutdown()
    return waits
