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
from aligner.models.pipeline_stages import count_part_layers, find_similar_parts
from aligner.models.shape import Experts, LayerShape, ModelShape
from aligner.placement.roles import count_role_ranks, has_generator
from aligner.schema import Config, EngineParallelConfig, ParallelConfig
from aligner.schema.keys import get_value, with_values
from aligner.schema.reward_sources import has_reward_model

Sizes = Mapping[str, int]
"""Parallel sizes by key; the number of ranks of a role is the product of its sizes."""

# Kinds of parallelism in the order in which their sizes are reduced.
_PARALLELISM_KINDS: tuple[tuple[str, ...], ...] = (
    ("replicas", "data"),
    ("pipeline",),
    ("context",),
    ("tensor",),
)

# Sections whose sizes become 1, in this order, if sizes of 2 still result in too many ranks.
_SECTIONS_REDUCED_TO_ONE = (("reward", "critic"), ("engine",), ("actor",))


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
    smaller_config = config
    for sizes in _iterate_smaller_sizes(_get_sizes(config)):
        smaller_config = with_values(config, sizes)
        if sum(count_role_ranks(smaller_config).values()) <= limit:
            break
    if (min_ranks := sum(count_role_ranks(smaller_config).values())) > limit:
        raise ConfigError(
            f"dry_run.max_ranks={limit}: must be at least {min_ranks}, one rank per role"
        )
    if smaller_config == config:
        return config

    for section in list_layout_sections(config):
        smaller_config = with_values(
            smaller_config,
            _get_dependent_settings(
                section, get_value(config, section), get_value(smaller_config, section)
            ),
        )
    if config.algorithm.generates_samples:
        if config.engine.placement == "colocated":
            engine = _find_colocated_layout(config, smaller_config.actor.parallel)
            smaller_config = with_values(smaller_config, {"engine.parallel": engine})
        expert = _choose_engine_experts(
            config.engine.parallel, smaller_config.engine.parallel.tensor
        )
        smaller_config = with_values(smaller_config, {"engine.parallel.expert": expert})
    if config.critic_serves_reward and config.reward.parallel == config.critic.parallel:
        smaller_config = with_values(
            smaller_config, {"reward.parallel": smaller_config.critic.parallel}
        )
    return smaller_config


def list_layout_sections(config: Config) -> tuple[str, ...]:
    """Return the keys of the Megatron layouts that the run uses, except for the teacher's."""
    sections = ["actor.parallel"]
    if config.algorithm.has_critic:
        sections.append("critic.parallel")
    if (
        config.algorithm.generates_samples
        and not config.critic_serves_reward
        and has_reward_model(config.reward)
    ):
        sections.append("reward.parallel")
    return tuple(sections)


def _get_sizes(config: Config) -> Sizes:
    """Return the parallel sizes of all roles, including replicas."""
    keys = [
        f"{section}.{name}"
        for section in list_layout_sections(config)
        for name in ("data", "pipeline", "context", "tensor")
    ]
    if config.algorithm.generates_samples and not config.critic_serves_reward:
        keys.append("reward.replicas")
    if has_generator(config):
        keys += ["engine.parallel.data", "engine.parallel.tensor"]
    return {key: get_value(config, key) for key in keys}


def _iterate_smaller_sizes(sizes: Sizes) -> Iterator[Sizes]:
    """Yield the sizes, and then smaller and smaller sizes; see `with_fitting_layouts`."""
    yield sizes
    for kinds in _PARALLELISM_KINDS:
        while large_keys := [key for key in _select_kinds(sizes, kinds) if sizes[key] > 2]:
            # Fewer replicas lose no kind of communication, so that these sizes become 2 at once.
            halved = {key: 2 if "data" in kinds else max(2, sizes[key] // 2) for key in large_keys}
            sizes = {**sizes, **halved}
            yield sizes

    # A size of 1 loses a kind of parallelism in the dry run. Therefore sizes become 1 one by one.
    for sections in _SECTIONS_REDUCED_TO_ONE:
        for kinds, section in product(_PARALLELISM_KINDS, sections):
            for key in _select_kinds(sizes, kinds):
                if key.partition(".")[0] == section and sizes[key] > 1:
                    sizes = {**sizes, key: 1}
                    yield sizes


def _select_kinds(sizes: Sizes, kinds: tuple[str, ...]) -> list[str]:
    """Return the keys of the sizes of some kinds of parallelism."""
    return [key for key in sizes if key.rpartition(".")[2] in kinds]


def _get_dependent_settings(
    key: str, run_layout: ParallelConfig, smaller_layout: ParallelConfig
) -> dict[str, Any]:
    """Return the settings of a layout that depend on its sizes.

    Args:
        key: Dotted key of the layout.
        run_layout: Layout of the run.
        smaller_layout: The same layout with the sizes of the dry run.
    """
    stage_ranks = smaller_layout.tensor * smaller_layout.context * smaller_layout.data
    expert_tensor = run_layout.expert_tensor
    if expert_tensor is not None and expert_tensor > 1:
        expert_tensor = _find_smallest_divisor(stage_ranks)
    # Megatron forms the groups of expert parallelism from the remaining ranks of a stage.
    expert_ranks = stage_ranks // (expert_tensor or smaller_layout.tensor)
    return {
        f"{key}.sequence": run_layout.sequence and smaller_layout.tensor > 1,
        f"{key}.virtual_pipeline": min(run_layout.virtual_pipeline, 2)
        if smaller_layout.pipeline > 1
        else 1,
        f"{key}.expert_tensor": expert_tensor,
        f"{key}.expert": _find_smallest_divisor(expert_ranks) if run_layout.expert > 1 else 1,
    }


def _find_smallest_divisor(ranks: int) -> int:
    """Return the smallest divisor above 1 of a number of ranks; 1 for one rank."""
    return next((size for size in range(2, ranks + 1) if ranks % size == 0), 1)


def _choose_engine_experts(run_layout: EngineParallelConfig, tensor: int) -> int:
    """Return the engine's expert-parallel size in the dry run.

    Args:
        run_layout: Layout of the engine in the run.
        tensor: Tensor-parallel size of the engine in the dry run.
    """
    if run_layout.expert == run_layout.tensor:
        return tensor
    return _find_smallest_divisor(tensor) if run_layout.expert > 1 else 1


def _find_colocated_layout(config: Config, trainer: ParallelConfig) -> EngineParallelConfig:
    """Return the layout of a colocated engine on the ranks of the smaller trainer.

    The layout resembles the engine's layout in `config`: it has tensor and data parallelism if that
    layout has them, and the same order of the engine's and the trainer's tensor-parallel sizes.

    Args:
        config: Configuration with the layouts of the run.
        trainer: Layout of the trainer in the dry run.
    """
    run_layout = config.engine.parallel
    ranks = trainer.ranks

    def compute_difference(tensor: int) -> tuple[int, bool, int]:
        """Return how much a layout with a tensor-parallel size differs from the run's layout."""
        num_differences = ((tensor > 1) != (run_layout.tensor > 1)) + (
            (ranks // tensor > 1) != (run_layout.data > 1)
        )
        # The smallest tensor-parallel size wins among layouts that are equally close.
        return (
            num_differences,
            _compare(tensor, trainer.tensor)
            != _compare(run_layout.tensor, config.actor.parallel.tensor),
            tensor,
        )

    tensor = min(
        (size for size in range(1, ranks + 1) if ranks % size == 0), key=compute_difference
    )
    return EngineParallelConfig(tensor=tensor, data=ranks // tensor)


def _compare(first: int, second: int) -> int:
    """Return 1, 0 or -1 if the first number is larger, equal or smaller."""
    return (first > second) - (first < second)


_MIN_VOCABULARY = 64
_MAX_LAYERS = 1024


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


def with_tiny_models(config: Config, run_config: Config, models: Models) -> tuple[Config, Models]:
    """Return the configuration with the layers of tiny models, and the shapes of these models.

    The tiny models keep the structure of the models of the run. If a model has more than one of
    them, its tiny model has more than one, too: layers of a stage or chunk, heads, groups of heads,
    experts. The critic has fewer layers than the policy if it has fewer in the run, and a pipeline
    stage has more or fewer layers than another stage if it has in the run.

    Args:
        config: Configuration with the layouts of the dry run.
        run_config: Configuration with the layouts of the run.
        models: Shapes of the models of the run.
    """
    layers, values = _choose_policy_layers(config, run_config, models.policy)
    config = with_values(config, values)
    policy_layouts: list[ParallelConfig | EngineParallelConfig] = [config.actor.parallel]
    if config.algorithm.has_critic:
        policy_layouts.append(config.critic.parallel)
    if config.algorithm.generates_samples:
        policy_layouts.append(config.engine.parallel)
    tensor_sizes = _policy_tensor_sizes(config)
    key = "critic.parallel" if config.critic_serves_reward else "reward.parallel"
    layout: ParallelConfig = get_value(config, key)
    all_tensor_sizes = tensor_sizes | ({layout.tensor} if models.rewards else set())

    # All models have the same vocabulary, because a reward model reads the policy's tokens.
    vocabulary = _round_up_to_multiple(_MIN_VOCABULARY, all_tensor_sizes)
    policy = _make_narrow(
        _with_few_layers(models.policy, layers),
        policy_layouts,
        tensor_sizes,
        vocabulary,
        copies_kv_heads=max(_policy_tensor_sizes(run_config)) > models.policy.num_kv_heads,
    )
    # In the critic's processes, a number of layers that fits the critic fits the reward model, too.
    depth = config.critic.num_layers or layers
    if models.rewards and not config.critic_serves_reward:
        first_reward = next(iter(models.rewards.values()))
        depth, stage_layers = next(
            _iterate_depths(layout, run_config.reward.parallel, first_reward)
        )
        config = with_values(config, _get_stage_values(key, stage_layers))
    run_layout: ParallelConfig = get_value(run_config, key)
    rewards = {
        source: _make_narrow(
            _with_few_layers(shape, depth),
            [layout],
            {layout.tensor},
            vocabulary,
            copies_kv_heads=run_layout.tensor > shape.num_kv_heads,
        )
        for source, shape in models.rewards.items()
    }
    return config, Models(policy, rewards)


def _policy_tensor_sizes(config: Config) -> set[int]:
    """Return the tensor-parallel sizes of the policy and the critic, and of the engine."""
    sizes = {config.actor.parallel.tensor}
    if config.algorithm.has_critic:
        sizes.add(config.critic.parallel.tensor)
    if config.algorithm.generates_samples:
        sizes.add(config.engine.parallel.tensor)
    return sizes


def _with_few_layers(shape: ModelShape, count: int) -> ModelShape:
    """Return a shape with `count` layers, of as many different kinds as possible."""
    kinds = tuple(dict.fromkeys(shape.layers))
    repeated = tuple(kind for kind in kinds if kind.has_experts) or kinds
    # In a model with experts, layers without them come first, and at least one layer has experts.
    dense = tuple(kind for kind in kinds if kind not in repeated)[: count - 1]
    return dataclasses.replace(shape, layers=(*dense, *repeated * count)[:count])


def _choose_policy_layers(
    config: Config, run_config: Config, shape: ModelShape
) -> tuple[int, dict[str, Any]]:
    """Choose the number of layers of the tiny policy.

    Args:
        config: Configuration with the layouts of the dry run.
        run_config: Configuration with the layouts of the run.
        shape: Shape of the policy of the run.

    Returns:
        The number of layers, and the values of `critic.num_layers` and of the layers of the
        stages that fit this number.
    """
    total = shape.num_layers
    critic_num_layers = run_config.critic.num_layers
    partial_layers = total if critic_num_layers is None else critic_num_layers
    partial_shape = shape.with_layers(partial_layers)
    trains_reward_model = config.algorithm.trainer == "reward_model"
    policy_layouts = (
        config.actor.parallel,
        run_config.actor.parallel,
        partial_shape if trains_reward_model else shape,
    )
    critic_layouts = (config.critic.parallel, run_config.critic.parallel, partial_shape)

    # Take the smallest number of layers with which the policy and the critic fit their layouts,
    # and with which the critic has fewer layers than the policy if it has fewer in the run. If no
    # number keeps the order of the stages of both models by size, the layers are divided
    # automatically.
    for keeps_stages in (True, False):
        for layers, stage_layers in _iterate_depths(*policy_layouts, keeps_stages=keeps_stages):
            values = _get_stage_values("actor.parallel", stage_layers)
            if trains_reward_model:
                if critic_num_layers is not None:
                    values["critic.num_layers"] = layers
                # The initial model has one more layer if the reward model drops some.
                return layers + (partial_layers < total), values
            if not config.algorithm.has_critic:
                return layers, values
            for depth, critic_stage_layers in _iterate_depths(
                *critic_layouts, keeps_stages=keeps_stages
            ):
                if depth <= layers and (depth < layers) == (partial_layers < total):
                    values |= _get_stage_values("critic.parallel", critic_stage_layers)
                    if critic_num_layers is not None:
                        values["critic.num_layers"] = depth
                    return layers, values
                if depth > layers:
                    break
    raise AssertionError(f"no number of layers fits {policy_layouts[0]} and {critic_layouts[0]}")


def _get_stage_values(key: str, stage_layers: list[int] | None) -> dict[str, Any]:
    """Return the values of a layout that set the layers of its pipeline stages.

    Args:
        key: Dotted key of the layout.
        stage_layers: Number of layers of each stage or chunk; None if they are equal.
    """
    return {f"{key}.stage_layers": stage_layers, f"{key}.last_stage_layers": None}


def _iterate_depths(
    layout: ParallelConfig,
    run_layout: ParallelConfig,
    shape: ModelShape,
    *,
    keeps_stages: bool = True,
) -> Iterator[tuple[int, list[int] | None]]:
    """Yield numbers of layers that fit a layout, in increasing order.

    Args:
        layout: Layout of the dry run.
        run_layout: Layout of the run.
        shape: Shape of the model in the run.
        keeps_stages: Whether a stage has more, fewer, or as many layers as another stage, like in
            the layout of the run.

    Yields:
        Pairs of the number of layers and of the layers of each stage or chunk. The latter is None
        if the layers are divided automatically.
    """
    parts = layout.pipeline * layout.virtual_pipeline
    min_depth = min(shape.num_layers, 2)
    if layout.pipeline == 1 or not keeps_stages:
        yield from ((depth, None) for depth in range(max(parts, min_depth), _MAX_LAYERS + 1))
        return
    sizes = _select_evenly(count_part_layers(shape, run_layout), parts)
    is_even = len(set(sizes)) == 1
    for depth, stage_layers in sorted(find_similar_parts(sizes, _MAX_LAYERS).items()):
        if depth >= min_depth:
            yield depth, None if is_even else stage_layers


def _select_evenly(sizes: Sequence[int], count: int) -> list[int]:
    """Return `count` of the sizes at equal distances, with the first and the last of them."""
    return [sizes[round(index * (len(sizes) - 1) / max(1, count - 1))] for index in range(count)]


def _make_narrow(
    shape: ModelShape,
    layouts: Sequence[ParallelConfig | EngineParallelConfig],
    tensor_sizes: set[int],
    vocabulary: int,
    *,
    copies_kv_heads: bool,
) -> ModelShape:
    """Return the shape with the smallest widths that all tensor-parallel sizes divide.

    The token ids are those of a tokenizer with one EOS token.

    Args:
        shape: Shape of the model of the run, with the layers of the tiny model.
        layouts: Layouts in which the model is trained, scores or generates.
        tensor_sizes: Tensor-parallel sizes, including the engine's.
        vocabulary: Size of the vocabulary.
        copies_kv_heads: Whether a layout of the run has more tensor ranks than KV heads.
    """
    expert_tensor = (
        {layout.expert_tensor_size for layout in layouts} if shape.num_experts else set()
    )
    num_kv_heads = _round_up_to_multiple(min(shape.num_kv_heads, 2), tensor_sizes)
    if copies_kv_heads and max(tensor_sizes) > 1:
        num_kv_heads = _count_copied_kv_heads(tensor_sizes)
    num_heads = _round_up_to_multiple(
        num_kv_heads * min(shape.num_heads // shape.num_kv_heads, 2), tensor_sizes | {num_kv_heads}
    )
    # The smallest head dimension from 8 whose rotary part has an even number of elements, since
    # rotary position embeddings rotate pairs.
    rotary_fractions = {layer.rope.fraction for layer in shape.layers if layer.rope is not None}
    head_dim = next(
        size
        for size in count(8, 8)
        if size == shape.head_dim or all((size * part) % 2 == 0 for part in rotary_fractions)
    )
    latent = shape.latent_attention
    if latent is not None:
        latent = dataclasses.replace(
            latent,
            q_lora_rank=None if latent.q_lora_rank is None else 24,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
        )
        head_dim = latent.head_dim
    # The hidden size keeps its relation to the total size of the heads: equal, larger or smaller.
    hidden_size = num_heads * head_dim
    attention_size = shape.num_heads * shape.head_dim
    if shape.hidden_size != attention_size:
        hidden_size = hidden_size * 2 if shape.hidden_size > attention_size else hidden_size // 2
    ffn_hidden_size = _round_up_to_multiple(2 * hidden_size, tensor_sizes | expert_tensor)
    experts = shape.experts
    if experts is not None:
        experts = _make_few(experts, ffn_hidden_size, {layout.expert for layout in layouts})
    delta_net = shape.delta_net
    if delta_net is not None:
        key_heads = _round_up_to_multiple(min(delta_net.key_heads, 2), tensor_sizes)
        values_per_key = min(delta_net.value_heads // delta_net.key_heads, 2)
        delta_net = dataclasses.replace(
            delta_net,
            key_heads=key_heads,
            value_heads=key_heads * values_per_key,
            key_dim=8,
            value_dim=8 if delta_net.value_dim == delta_net.key_dim else 16,
        )
    return dataclasses.replace(
        shape,
        layers=tuple(_with_head_dim(layer, head_dim) for layer in shape.layers),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_hidden_size=ffn_hidden_size,
        vocab_size=vocabulary,
        eos_token_ids=(1,),
        pad_token_id=0,
        latent_attention=latent,
        experts=experts,
        delta_net=delta_net,
    )


def _make_few(experts: Experts, ffn_hidden_size: int, expert_sizes: set[int]) -> Experts:
    """Return a small mixture of experts with the parts of another one.

    Args:
        experts: Mixture of experts of the run.
        ffn_hidden_size: Hidden size of each expert of the small one.
        expert_sizes: Expert-parallel sizes, which must divide the number of experts.
    """
    active_experts = min(experts.per_token, 2)
    # Some experts, and some groups, stay inactive for a token if that is so in the run.
    min_experts = active_experts + (experts.per_token < experts.count)
    groups = min(experts.groups, 2)
    if groups > 1:
        min_experts = groups * max(min_experts, experts.scores_per_group)
    return dataclasses.replace(
        experts,
        count=_round_up_to_multiple(min_experts, expert_sizes | {groups}),
        per_token=active_experts,
        ffn_hidden_size=ffn_hidden_size,
        groups=groups,
        groups_per_token=1 if experts.groups_per_token < experts.groups else groups,
        shared_count=min(experts.shared_count, 2),
        shared_ffn_hidden_size=experts.shared_ffn_hidden_size and ffn_hidden_size,
    )


def _count_copied_kv_heads(tensor_sizes: set[int]) -> int:
    """Return the largest number of KV heads that fits all tensor-parallel sizes and of which ranks
    of the largest size have copies."""
    return next(
        heads
        for heads in range(max(tensor_sizes) - 1, 0, -1)
        if all(heads % size == 0 or size % heads == 0 for size in tensor_sizes)
    )


def _with_head_dim(layer: LayerShape, head_dim: int) -> LayerShape:
    """Return the layer with as many factors of rotary frequencies as heads of this size need."""
    rope = layer.rope
    if rope is None or rope.scaling is None or rope.scaling.kind != "longrope":
        return layer
    factors = rope.scaling.short_factors[: int(head_dim * rope.fraction) // 2]
    scaling = dataclasses.replace(rope.scaling, short_factors=factors)
    return dataclasses.replace(layer, rope=dataclasses.replace(rope, scaling=scaling))


def _round_up_to_multiple(minimum: int, sizes: set[int]) -> int:
    """Return the smallest common multiple of all sizes that is at least `minimum`."""
    return math.lcm(*sizes) * math.ceil(minimum / math.lcm(*sizes))


def with_positions(models: Models, max_length: int, run_max_length: int) -> Models:
    """Return the models with the number of positions of the dry run.

    A sliding window that is shorter than the sequences of the run is shorter than the sequences of
    the dry run, too.

    Args:
        models: Shapes of the tiny models.
        max_length: Length of the longest sequence of the dry run in tokens.
        run_max_length: Length of the longest sequence of the run in tokens.
    """

    def with_shorter_sequences(shape: ModelShape) -> ModelShape:
        layers = tuple(map(with_shorter_window, shape.layers))
        return dataclasses.replace(shape, max_positions=max_length, layers=layers)

    def with_shorter_window(layer: LayerShape) -> LayerShape:
        # The window must still exclude tokens, or the dry run would not test it.
        window = layer.sliding_window
        if window is not None and window < run_max_length:
            return dataclasses.replace(layer, sliding_window=max(1, max_length // 2))
        return layer

    return Models(
        with_shorter_sequences(models.policy),
        {key: with_shorter_sequences(shape) for key, shape in models.rewards.items()},
    )
