"""The models of a dry run: of their family, and as small as the layouts allow."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from aligner.models.shape import ModelShape
from aligner.schema import Config, ParallelConfig
from aligner.schema.keys import value_at, with_values

_VOCABULARY = 64
_MOST_LAYERS = 1024


@dataclass(frozen=True)
class Models:
    """The shapes of the models that a run reads."""

    policy: ModelShape
    rewards: Mapping[str, ModelShape]
    """Reward models, by their source's key."""


def with_tiny_models(config: Config, given: Config, models: Models) -> tuple[Config, Models]:
    """The models for a configuration's layouts, and the configuration with what of it speaks of their layers.

    `given` is the configuration with the layouts that `models` were made for. More than one of anything stays more than one:
    layers of a stage or chunk, heads, groups of heads, experts; the critic has fewer layers than the policy where it had, and
    the last stage more or fewer than the others.
    """
    layers, values = _policy_layers(config, given, models.policy)
    config = with_values(config, values)
    trained = [config.actor.parallel] + ([config.critic.parallel] if config.algorithm.has_critic else [])
    tensor = {layout.tensor for layout in trained} | ({config.engine.parallel.tensor} if config.algorithm.generates else set())
    key = "critic.parallel" if config.critic_scores else "reward.parallel"
    layout: ParallelConfig = value_at(config, key)
    all_tensor = tensor | ({layout.tensor} if models.rewards else set())
    vocabulary = _multiple(_VOCABULARY, all_tensor)  # one for all: a reward model reads the policy's tokens
    policy = _narrow(dataclasses.replace(models.policy, num_layers=layers), trained, tensor, vocabulary)
    depth = config.critic.num_layers or layers  # at the critic's layout what fits one model fits the other
    if models.rewards and not config.critic_scores:
        first = next(iter(models.rewards.values()))
        depth, last = next(_depths(layout, given.reward.parallel, first.num_layers))
        config = with_values(config, {f"{key}.last_stage_layers": last})
    rewards = {
        source: _narrow(dataclasses.replace(shape, num_layers=depth), [layout], {layout.tensor}, vocabulary)
        for source, shape in models.rewards.items()
    }
    return config, Models(policy, rewards)


def _policy_layers(config: Config, given: Config, shape: ModelShape) -> tuple[int, dict[str, Any]]:
    """The policy's layers, and `critic.num_layers` and the layers of last stages with it."""
    total, cut = shape.num_layers, given.critic.num_layers
    part = total if cut is None else cut
    trains_part = config.algorithm.trainer == "reward_model"
    own = (config.actor.parallel, given.actor.parallel, part if trains_part else total)
    critic = (config.critic.parallel, given.critic.parallel, part)
    for layers, last in _depths(*own):
        values = {"actor.parallel.last_stage_layers": last}
        if trains_part:
            return (layers + (part < total), values | ({} if cut is None else {"critic.num_layers": layers}))
        if not config.algorithm.has_critic:
            return layers, values
        for depth, critic_last in _depths(*critic, most=layers):
            if (depth < layers) == (part < total):
                values |= {"critic.parallel.last_stage_layers": critic_last}
                return layers, values | ({} if cut is None else {"critic.num_layers": depth})
    raise AssertionError(f"no number of layers fits {own[0]} and {critic[0]}")


def _depths(
    layout: ParallelConfig, given: ParallelConfig, layers: int, most: int = _MOST_LAYERS
) -> Iterator[tuple[int, int | None]]:
    """Numbers of layers that fit a layout, from the smallest on, each with those of the last stage where that differs.

    The last stage has more layers than the others, fewer or as many, as it has of `layers` in the `given` layout.
    """
    stages, smallest = layout.pipeline, min(layers, 2)
    if stages == 1:
        yield from ((depth, None) for depth in range(smallest, most + 1))
    elif given.last_stage_layers is None or given.pipeline == 1 or given.virtual_pipeline > 1:
        parts = stages * layout.virtual_pipeline
        yield from ((depth, None) for depth in range(max(parts, smallest), most + 1) if depth % parts == 0)
    else:
        before = (layers - given.last_stage_layers) // (given.pipeline - 1)
        for depth in range(stages, most + 1):
            for last in range(1, depth - stages + 2):
                each, rest = divmod(depth - last, stages - 1)
                if not rest and (last > each) - (last < each) == _order(given.last_stage_layers, before):
                    yield depth, last
                    break


def _order(one: int, other: int) -> int:
    return (one > other) - (one < other)


def _narrow(shape: ModelShape, layouts: Sequence[ParallelConfig], tensor: set[int], vocabulary: int) -> ModelShape:
    """The shape at the smallest widths that all of the tensor-parallel sizes cut, for a tokenizer with one end of sequence."""
    inside = {layout.expert_tensor_size for layout in layouts} if shape.num_experts else set()
    groups = _multiple(min(shape.num_kv_heads, 2), tensor)
    heads = groups * min(shape.num_heads // shape.num_kv_heads, 2)
    head = _head_dim(shape)
    hidden = heads * head
    whole = shape.num_heads * shape.head_dim
    if shape.hidden_size != whole:
        hidden = hidden * 2 if shape.hidden_size > whole else hidden // 2
    experts: dict[str, Any] = {}
    if shape.num_experts:
        chosen = min(shape.experts_per_token, 2)
        least = chosen + (shape.experts_per_token < shape.num_experts)
        experts = {"experts_per_token": chosen, "num_experts": _multiple(least, {layout.expert for layout in layouts})}
    return dataclasses.replace(
        shape,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head,
        ffn_hidden_size=_multiple(2 * hidden, tensor | inside),
        vocab_size=vocabulary,
        eos_token_ids=(1,),
        pad_token_id=0,
        **experts,
    )


def _multiple(least: int, sizes: set[int]) -> int:
    """The smallest multiple of all sizes that is no less."""
    return math.lcm(*sizes) * math.ceil(least / math.lcm(*sizes))


def _head_dim(shape: ModelShape) -> int:
    """The smallest from 8 up of which the rotated share is a whole number of pairs."""
    return next(size for size in count(8, 8) if size == shape.head_dim or (size * shape.rotary_fraction) % 2 == 0)


def with_positions(models: Models, longest: int, given_longest: int) -> Models:
    """The models for sequences of so many tokens instead of `given_longest`; a window that was shorter than these still is."""

    def shortened(shape: ModelShape) -> ModelShape:
        window = shape.sliding_window
        if window is not None and window < given_longest:
            window = max(1, longest // 2)
        return dataclasses.replace(shape, max_positions=longest, sliding_window=window)

    return Models(shortened(models.policy), {key: shortened(shape) for key, shape in models.rewards.items()})
