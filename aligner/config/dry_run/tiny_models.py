"""The layouts of a dry run, smaller where their ranks are too many for one machine, and models as
small as these allow."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product
from typing import Any

from aligner.errors import ConfigError
from aligner.models.shape import ModelShape
from aligner.placement.roles import has_generator, role_ranks
from aligner.schema import Config, EngineParallelConfig, ParallelConfig
from aligner.schema.keys import value_at, with_values
from aligner.schema.reward_sources import has_reward_model

Sizes = Mapping[str, int]
"""Sizes that a role's ranks are the product of, by key."""

_KINDS: tuple[tuple[str, ...], ...] = (
    ("replicas", "data"),
    ("pipeline",),
    ("context",),
    ("tensor",),
)
"""In the order in which they are made smaller."""

_LAST_RESORT = (("reward", "critic"), ("engine",), ("actor",))
"""Whose sizes become 1, in this order, where all of them at 2 are still too many."""


def with_fitting_layouts(config: Config) -> Config:
    """The configuration with layouts of at most `dry_run.max_ranks` ranks together; unchanged where
    they are no more.

    Data parallelism and reward replicas become 2 first; then pipeline, context and tensor
    parallelism are halved in turn, of all roles at once, down to 2. If that is not enough sizes
    become 1 in the same order, one by one: those of reward and critic first, then the generator's,
    the trainer's last. What depends on a layout's sizes, such as expert parallelism, follows them.
    Raises ConfigError where not even one rank a role fits.
    """
    limit, smaller = config.dry_run.max_ranks, config
    for sizes in _ever_smaller(_sizes(config)):
        smaller = with_values(config, sizes)
        if sum(role_ranks(smaller).values()) <= limit:
            break
    if (least := sum(role_ranks(smaller).values())) > limit:
        raise ConfigError(f"dry_run.max_ranks={limit}: must be at least {least}, one rank per role")
    if smaller == config:
        return config
    for section in layout_sections(config):
        smaller = with_values(
            smaller, _dependent(section, value_at(config, section), value_at(smaller, section))
        )
    if config.algorithm.generates and config.engine.placement == "colocated":
        smaller = with_values(
            smaller, {"engine.parallel": _colocated(config, smaller.actor.parallel)}
        )
    if config.critic_scores and config.reward.parallel == config.critic.parallel:
        smaller = with_values(smaller, {"reward.parallel": smaller.critic.parallel})
    return smaller


def layout_sections(config: Config) -> tuple[str, ...]:
    """The keys of the Megatron layouts that the run uses."""
    sections = ["actor.parallel"]
    if config.algorithm.has_critic:
        sections.append("critic.parallel")
    if config.algorithm.generates and not config.critic_scores and has_reward_model(config.reward):
        sections.append("reward.parallel")
    return tuple(sections)


def _sizes(config: Config) -> Sizes:
    keys = [
        f"{section}.{name}"
        for section in layout_sections(config)
        for name in ("data", "pipeline", "context", "tensor")
    ]
    if config.algorithm.generates and not config.critic_scores:
        keys.append("reward.replicas")
    if has_generator(config):
        keys += ["engine.parallel.data", "engine.parallel.tensor"]
    return {key: value_at(config, key) for key in keys}


def _ever_smaller(sizes: Sizes) -> Iterator[Sizes]:
    yield sizes
    for kinds in _KINDS:
        while large := [key for key in _of_kind(sizes, kinds) if sizes[key] > 2]:
            sizes = {
                **sizes,
                **{key: 2 if "data" in kinds else max(2, sizes[key] // 2) for key in large},
            }
            yield sizes
    for sections in _LAST_RESORT:
        for kinds, section in product(_KINDS, sections):
            for key in _of_kind(sizes, kinds):
                if key.partition(".")[0] == section and sizes[key] > 1:
                    sizes = {**sizes, key: 1}
                    yield sizes


def _of_kind(sizes: Sizes, kinds: tuple[str, ...]) -> list[str]:
    return [key for key in sizes if key.rpartition(".")[2] in kinds]


def _dependent(key: str, given: ParallelConfig, smaller: ParallelConfig) -> dict[str, Any]:
    """What of a layout goes with its sizes."""
    stage_ranks = smaller.tensor * smaller.context * smaller.data
    inside = given.expert_tensor
    if inside is not None and inside > 1:
        inside = _smallest_part(stage_ranks)
    shared = stage_ranks // (inside or smaller.tensor)
    return {
        f"{key}.sequence": given.sequence and smaller.tensor > 1,
        f"{key}.virtual_pipeline": min(given.virtual_pipeline, 2) if smaller.pipeline > 1 else 1,
        f"{key}.expert_tensor": inside,
        f"{key}.expert": _smallest_part(shared) if given.expert > 1 else 1,
    }


def _smallest_part(ranks: int) -> int:
    """The smallest size above 1 that divides so many ranks; 1 where they are one."""
    return next((size for size in range(2, ranks + 1) if ranks % size == 0), 1)


def _colocated(config: Config, trainer: ParallelConfig) -> EngineParallelConfig:
    """The engine's layout over the smaller trainer's ranks: as the given one in what is cut, and
    cut more or less finely."""
    given, ranks = config.engine.parallel, trainer.ranks

    def strangeness(tensor: int) -> tuple[int, bool, int]:
        lost = ((tensor > 1) != (given.tensor > 1)) + ((ranks // tensor > 1) != (given.data > 1))
        return (
            lost,
            _order(tensor, trainer.tensor) != _order(given.tensor, config.actor.parallel.tensor),
            tensor,
        )

    tensor = min((size for size in range(1, ranks + 1) if ranks % size == 0), key=strangeness)
    return EngineParallelConfig(tensor=tensor, data=ranks // tensor)


def _order(one: int, other: int) -> int:
    return (one > other) - (one < other)


_VOCABULARY = 64
_MOST_LAYERS = 1024


@dataclass(frozen=True)
class Models:
    """The shapes of the models that a run reads."""

    policy: ModelShape
    rewards: Mapping[str, ModelShape]
    """Reward models, by their source's key."""
    critic: ModelShape | None = None
    """What the critic begins as before it is cut, where that is not the policy."""


def with_tiny_models(config: Config, given: Config, models: Models) -> tuple[Config, Models]:
    """The models for a configuration's layouts, and the configuration with what of it speaks of
    their layers.

    `given` is the configuration with the layouts that `models` were made for. More than one of
    anything stays more than one: layers of a stage or chunk, heads, groups of heads, experts; the
    critic has fewer layers than the policy where it had, and the last stage more or fewer than the
    others.
    """
    layers, values = _policy_layers(config, given, models.policy)
    config = with_values(config, values)
    trained = [config.actor.parallel] + (
        [config.critic.parallel] if config.algorithm.has_critic else []
    )
    tensor = {layout.tensor for layout in trained} | (
        {config.engine.parallel.tensor} if config.algorithm.generates else set()
    )
    key = "critic.parallel" if config.critic_scores else "reward.parallel"
    layout: ParallelConfig = value_at(config, key)
    all_tensor = tensor | ({layout.tensor} if models.rewards else set())
    # one for all: a reward model reads the policy's tokens
    vocabulary = _multiple(_VOCABULARY, all_tensor)
    policy = _narrow(
        dataclasses.replace(models.policy, num_layers=layers), trained, tensor, vocabulary
    )
    # at the critic's layout what fits one model fits the other
    depth = config.critic.num_layers or layers
    if models.rewards and not config.critic_scores:
        first = next(iter(models.rewards.values()))
        depth, last = next(_depths(layout, given.reward.parallel, first.num_layers))
        config = with_values(config, {f"{key}.last_stage_layers": last})
    rewards = {
        source: _narrow(
            dataclasses.replace(shape, num_layers=depth), [layout], {layout.tensor}, vocabulary
        )
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
            return (
                layers + (part < total),
                values | ({} if cut is None else {"critic.num_layers": layers}),
            )
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
    """Numbers of layers that fit a layout, from the smallest on, each with those of the last stage
    where that differs.

    The last stage has more layers than the others, fewer or as many, as it has of `layers` in the
    `given` layout.
    """
    stages, smallest = layout.pipeline, min(layers, 2)
    if stages == 1:
        yield from ((depth, None) for depth in range(smallest, most + 1))
    elif given.last_stage_layers is None or given.pipeline == 1 or given.virtual_pipeline > 1:
        parts = stages * layout.virtual_pipeline
        yield from (
            (depth, None) for depth in range(max(parts, smallest), most + 1) if depth % parts == 0
        )
    else:
        before = (layers - given.last_stage_layers) // (given.pipeline - 1)
        for depth in range(stages, most + 1):
            for last in range(1, depth - stages + 2):
                each, rest = divmod(depth - last, stages - 1)
                if not rest and (last > each) - (last < each) == _order(
                    given.last_stage_layers, before
                ):
                    yield depth, last
                    break


def _narrow(
    shape: ModelShape, layouts: Sequence[ParallelConfig], tensor: set[int], vocabulary: int
) -> ModelShape:
    """The shape at the smallest widths that all of the tensor-parallel sizes cut, for a tokenizer
    with one end of sequence."""
    inside = {layout.expert_tensor_size for layout in layouts} if shape.num_experts else set()
    groups = _multiple(min(shape.num_kv_heads, 2), tensor)
    heads = groups * min(shape.num_heads // shape.num_kv_heads, 2)
    # The smallest from 8 up of which the rotated share is a whole number of pairs.
    head = next(
        size
        for size in count(8, 8)
        if size == shape.head_dim or (size * shape.rotary_fraction) % 2 == 0
    )
    hidden = heads * head
    whole = shape.num_heads * shape.head_dim
    if shape.hidden_size != whole:
        hidden = hidden * 2 if shape.hidden_size > whole else hidden // 2
    experts: dict[str, Any] = {}
    if shape.num_experts:
        chosen = min(shape.experts_per_token, 2)
        least = chosen + (shape.experts_per_token < shape.num_experts)
        experts = {
            "experts_per_token": chosen,
            "num_experts": _multiple(least, {layout.expert for layout in layouts}),
        }
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


def with_positions(models: Models, longest: int, given_longest: int) -> Models:
    """The models for sequences of so many tokens instead of `given_longest`; a window that was
    shorter than these still is."""

    def shortened(shape: ModelShape) -> ModelShape:
        window = shape.sliding_window
        if window is not None and window < given_longest:
            window = max(1, longest // 2)
        return dataclasses.replace(shape, max_positions=longest, sliding_window=window)

    return Models(
        shortened(models.policy), {key: shortened(shape) for key, shape in models.rewards.items()}
    )
