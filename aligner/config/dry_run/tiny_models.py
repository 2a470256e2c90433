"""Layouts and models of a dry run.

The layouts are smaller than those of the run if the machine would have too many ranks. The models
are as small as the layouts allow.
"""

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
"""Parallel sizes by key; the number of ranks of a role is the product of its sizes."""

# Kinds of parallelism in the order in which their sizes are reduced.
_KINDS: tuple[tuple[str, ...], ...] = (
    ("replicas", "data"),
    ("pipeline",),
    ("context",),
    ("tensor",),
)

# Sections whose sizes become 1, in this order, if sizes of 2 still result in too many ranks.
_LAST_RESORT = (("reward", "critic"), ("engine",), ("actor",))


def with_fitting_layouts(config: Config) -> Config:
    """Return the configuration with layouts of at most `dry_run.max_ranks` ranks in total.

    Sizes are reduced in this order, and only as far as necessary:

    1. Data-parallel sizes and reward replicas become 2.
    2. Pipeline-, context- and tensor-parallel sizes are halved, one kind after the other, for all
       roles at the same time, down to 2.
    3. Sizes become 1, one by one and in the same order: first those of the reward and the critic,
       then those of the generator, then those of the trainer.

    Settings that depend on the sizes, such as expert parallelism, are adapted.

    Raises:
        ConfigError: The limit is lower than one rank per role.
    """
    limit = config.dry_run.max_ranks
    smaller = config
    for sizes in _ever_smaller(_sizes(config)):
        smaller = with_values(config, sizes)
        if sum(role_ranks(smaller).values()) <= limit:
            break
    if (min_ranks := sum(role_ranks(smaller).values())) > limit:
        raise ConfigError(
            f"dry_run.max_ranks={limit}: must be at least {min_ranks}, one rank per role"
        )
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
    """Return the keys of the Megatron layouts that the run uses, except for the teacher's."""
    sections = ["actor.parallel"]
    if config.algorithm.has_critic:
        sections.append("critic.parallel")
    if config.algorithm.generates and not config.critic_scores and has_reward_model(config.reward):
        sections.append("reward.parallel")
    return tuple(sections)


def _sizes(config: Config) -> Sizes:
    """Return the parallel sizes of all roles, including replicas."""
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
    """Yield the sizes, and then smaller and smaller sizes; see `with_fitting_layouts`."""
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
    """Return the keys of the sizes of some kinds of parallelism."""
    return [key for key in sizes if key.rpartition(".")[2] in kinds]


def _dependent(key: str, given: ParallelConfig, smaller: ParallelConfig) -> dict[str, Any]:
    """Return the settings of a layout that depend on its sizes.

    Args:
        key: Dotted key of the layout.
        given: Layout of the run.
        smaller: The same layout with the sizes of the dry run.
    """
    stage_ranks = smaller.tensor * smaller.context * smaller.data
    expert_tensor = given.expert_tensor
    if expert_tensor is not None and expert_tensor > 1:
        expert_tensor = _smallest_part(stage_ranks)
    # Megatron forms the groups of expert parallelism from the remaining ranks of a stage.
    expert_ranks = stage_ranks // (expert_tensor or smaller.tensor)
    return {
        f"{key}.sequence": given.sequence and smaller.tensor > 1,
        f"{key}.virtual_pipeline": min(given.virtual_pipeline, 2) if smaller.pipeline > 1 else 1,
        f"{key}.expert_tensor": expert_tensor,
        f"{key}.expert": _smallest_part(expert_ranks) if given.expert > 1 else 1,
    }


def _smallest_part(ranks: int) -> int:
    """Return the smallest divisor above 1 of a number of ranks; 1 for one rank."""
    return next((size for size in range(2, ranks + 1) if ranks % size == 0), 1)


def _colocated(config: Config, trainer: ParallelConfig) -> EngineParallelConfig:
    """Return the layout of a colocated engine on the ranks of the smaller trainer.

    The layout resembles the engine's layout in `config`: it has tensor and data parallelism if that
    layout has them, and the same order of the engine's and the trainer's tensor-parallel sizes.

    Args:
        config: Configuration with the layouts of the run.
        trainer: Layout of the trainer in the dry run.
    """
    run_layout = config.engine.parallel
    ranks = trainer.ranks

    def strangeness(tensor: int) -> tuple[int, bool, int]:
        """Return how much a layout with a tensor-parallel size differs from the run's layout."""
        lost = ((tensor > 1) != (run_layout.tensor > 1)) + (
            (ranks // tensor > 1) != (run_layout.data > 1)
        )
        return (
            lost,
            _order(tensor, trainer.tensor)
            != _order(run_layout.tensor, config.actor.parallel.tensor),
            tensor,
        )

    tensor = min((size for size in range(1, ranks + 1) if ranks % size == 0), key=strangeness)
    return EngineParallelConfig(tensor=tensor, data=ranks // tensor)


def _order(one: int, other: int) -> int:
    """Return 1, 0 or -1 if the first number is larger, equal or smaller."""
    return (one > other) - (one < other)


_VOCABULARY = 64
_MOST_LAYERS = 1024


@dataclass(frozen=True)
class Models:
    """Shapes of the models of a run."""

    policy: ModelShape
    """Shape of the policy."""
    rewards: Mapping[str, ModelShape]
    """Shapes of the reward models, by the key of the source."""
    critic: ModelShape | None = None
    """Shape of the model in `critic.path`, with all layers; None if the critic starts from the
    policy."""


def with_tiny_models(config: Config, given: Config, models: Models) -> tuple[Config, Models]:
    """Return the configuration with the layers of tiny models, and the shapes of these models.

    The tiny models keep the structure of the models of the run. If a model has more than one of
    them, its tiny model has more than one, too: layers of a stage or chunk, heads, groups of heads,
    experts. The critic has fewer layers than the policy if it has fewer in the run, and the last
    stage has more or fewer layers than the other stages if it has in the run.

    Args:
        config: Configuration with the layouts of the dry run.
        given: Configuration with the layouts of the run.
        models: Shapes of the models of the run.
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
    # All models have the same vocabulary, because a reward model reads the policy's tokens.
    vocabulary = _multiple(_VOCABULARY, all_tensor)
    policy = _narrow(
        dataclasses.replace(models.policy, num_layers=layers), trained, tensor, vocabulary
    )
    # In the critic's processes, a number of layers that fits the critic fits the reward model, too.
    depth = config.critic.num_layers or layers
    if models.rewards and not config.critic_scores:
        first_reward = next(iter(models.rewards.values()))
        depth, last = next(_depths(layout, given.reward.parallel, first_reward.num_layers))
        config = with_values(config, {f"{key}.last_stage_layers": last})
    rewards = {
        source: _narrow(
            dataclasses.replace(shape, num_layers=depth), [layout], {layout.tensor}, vocabulary
        )
        for source, shape in models.rewards.items()
    }
    return config, Models(policy, rewards)


def _policy_layers(config: Config, given: Config, shape: ModelShape) -> tuple[int, dict[str, Any]]:
    """Choose the number of layers of the tiny policy.

    Args:
        config: Configuration with the layouts of the dry run.
        given: Configuration with the layouts of the run.
        shape: Shape of the policy of the run.

    Returns:
        The number of layers, and the values of `critic.num_layers` and of the layers of the last
        stages that fit this number.
    """
    total = shape.num_layers
    critic_num_layers = given.critic.num_layers
    partial_layers = total if critic_num_layers is None else critic_num_layers
    trains_reward_model = config.algorithm.trainer == "reward_model"
    policy_layouts = (
        config.actor.parallel,
        given.actor.parallel,
        partial_layers if trains_reward_model else total,
    )
    critic_layouts = (config.critic.parallel, given.critic.parallel, partial_layers)

    # Take the smallest number of layers with which the policy and the critic fit their layouts,
    # and with which the critic has fewer layers than the policy if it has fewer in the run.
    for layers, last_layers in _depths(*policy_layouts):
        values = {"actor.parallel.last_stage_layers": last_layers}
        if trains_reward_model:
            return (
                layers + (partial_layers < total),
                values | ({} if critic_num_layers is None else {"critic.num_layers": layers}),
            )
        if not config.algorithm.has_critic:
            return layers, values
        for depth, critic_last_layers in _depths(*critic_layouts, most=layers):
            if (depth < layers) == (partial_layers < total):
                values |= {"critic.parallel.last_stage_layers": critic_last_layers}
                return layers, values | (
                    {} if critic_num_layers is None else {"critic.num_layers": depth}
                )
    raise AssertionError(f"no number of layers fits {policy_layouts[0]} and {critic_layouts[0]}")


def _depths(
    layout: ParallelConfig, given: ParallelConfig, layers: int, most: int = _MOST_LAYERS
) -> Iterator[tuple[int, int | None]]:
    """Yield numbers of layers that fit a layout, in increasing order.

    The last stage has more, fewer, or as many layers as the other stages, like the last stage in
    the layout of the run.

    Args:
        layout: Layout of the dry run.
        given: Layout of the run.
        layers: Number of layers in the run.
        most: Maximum number of layers.

    Yields:
        Pairs of the number of layers and of the layers of the last stage. The latter is None if all
        stages have the same number.
    """
    stages = layout.pipeline
    smallest = min(layers, 2)
    if stages == 1:
        yield from ((depth, None) for depth in range(smallest, most + 1))
    elif given.last_stage_layers is None or given.pipeline == 1 or given.virtual_pipeline > 1:
        chunks = stages * layout.virtual_pipeline
        yield from (
            (depth, None) for depth in range(max(chunks, smallest), most + 1) if depth % chunks == 0
        )
    else:
        run_stage_layers = (layers - given.last_stage_layers) // (given.pipeline - 1)
        for depth in range(stages, most + 1):
            for last in range(1, depth - stages + 2):
                stage_layers, remainder = divmod(depth - last, stages - 1)
                if not remainder and (last > stage_layers) - (last < stage_layers) == _order(
                    given.last_stage_layers, run_stage_layers
                ):
                    yield depth, last
                    break


def _narrow(
    shape: ModelShape, layouts: Sequence[ParallelConfig], tensor: set[int], vocabulary: int
) -> ModelShape:
    """Return the shape with the smallest widths that all tensor-parallel sizes divide.

    The token ids are those of a tokenizer with one EOS token.

    Args:
        shape: Shape of the model of the run, with the layers of the tiny model.
        layouts: Layouts in which the model is trained or scores.
        tensor: Tensor-parallel sizes, including the engine's.
        vocabulary: Size of the vocabulary.
    """
    expert_tensor = (
        {layout.expert_tensor_size for layout in layouts} if shape.num_experts else set()
    )
    groups = _multiple(min(shape.num_kv_heads, 2), tensor)
    heads = groups * min(shape.num_heads // shape.num_kv_heads, 2)
    # The smallest head dimension from 8 whose rotary part has an even number of elements, since
    # rotary position embeddings rotate pairs.
    head = next(
        size
        for size in count(8, 8)
        if size == shape.head_dim or (size * shape.rotary_fraction) % 2 == 0
    )
    hidden = heads * head
    attention_size = shape.num_heads * shape.head_dim
    if shape.hidden_size != attention_size:
        hidden = hidden * 2 if shape.hidden_size > attention_size else hidden // 2
    experts: dict[str, Any] = {}
    if shape.num_experts:
        active_experts = min(shape.experts_per_token, 2)
        min_experts = active_experts + (shape.experts_per_token < shape.num_experts)
        experts = {
            "experts_per_token": active_experts,
            "num_experts": _multiple(min_experts, {layout.expert for layout in layouts}),
        }
    return dataclasses.replace(
        shape,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head,
        ffn_hidden_size=_multiple(2 * hidden, tensor | expert_tensor),
        vocab_size=vocabulary,
        eos_token_ids=(1,),
        pad_token_id=0,
        **experts,
    )


def _multiple(least: int, sizes: set[int]) -> int:
    """Return the smallest common multiple of all sizes that is at least `least`."""
    return math.lcm(*sizes) * math.ceil(least / math.lcm(*sizes))


def with_positions(models: Models, longest: int, given_longest: int) -> Models:
    """Return the models with the number of positions of the dry run.

    A sliding window that is shorter than the sequences of the run is shorter than the sequences of
    the dry run, too.

    Args:
        models: Shapes of the tiny models.
        longest: Length of the longest sequence of the dry run in tokens.
        given_longest: Length of the longest sequence of the run in tokens.
    """

    def shortened(shape: ModelShape) -> ModelShape:
        window = shape.sliding_window
        if window is not None and window < given_longest:
            window = max(1, longest // 2)
        return dataclasses.replace(shape, max_positions=longest, sliding_window=window)

    return Models(
        shortened(models.policy), {key: shortened(shape) for key, shape in models.rewards.items()}
    )
