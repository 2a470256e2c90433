"""A small config.json with every quirk of a model's config.json.

The entries themselves are edited, not the shape that `read_config` reads: an entry that
`read_config` reads wrongly or ignores stays in the small config.json, so that the comparison with
transformers finds the error.
"""

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aligner.errors import ConfigError
from aligner.models.architectures import ARCHITECTURES_BY_CLASS, Architecture, Entry
from aligner.models.hugging_face import read_config, with_architecture
from aligner.models.pipeline_stages import count_part_layers, find_similar_parts
from aligner.models.shape import DeltaNet, Experts, LayerShape, ModelShape
from aligner.schema import ParallelConfig

MAX_LENGTH = 32
"""Length of the longest sequence of a proof, in tokens."""
_VOCABULARY = 73  # tensor parallelism does not divide it, so it is padded
_HEAD_DIM = 16
_MAX_QUERIES_PER_GROUP = 8
_WINDOW = 5  # shorter than most sequences of a proof
_MIN_LAYERS = 4
_MAX_PREFIX = 8
_MAX_LAYERS = 256
_MIN_POSITIONS = 2 * MAX_LENGTH
# Original context of a scaled rotary embedding. It is close to the length of the sequences, so that
# all frequency bands occur: unchanged, blended and scaled.
_ORIGINAL_POSITIONS = 16
_ORIGINAL_KEY = "original_max_position_embeddings"
_PARTS = ("experts", "latent_attention", "delta_net")
# Attributes of a shape that a small model changes.
_SIZES = (
    "layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "ffn_hidden_size",
    "vocab_size",
    "max_positions",
    "attention_scale",
    "eos_token_ids",
    "pad_token_id",
    "experts",
    "latent_attention",
    "delta_net",
)
# Sizes of latent attention, by the attribute of `LatentAttention`. All differ.
_LATENT_SIZES = {
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}


def shrink_config(
    config: Mapping[str, Any], layouts: Sequence[ParallelConfig], origin: str
) -> dict[str, Any]:
    """Return a config.json with small sizes and all other entries of the given one.

    The small model has each kind of layer of the model. It keeps the number of query heads per
    key-value head (up to 8), whether the hidden size is the total size of the heads, and whether
    windows and the original context of scaled rotary embeddings are shorter than the context.

    Args:
        config: Content of config.json. `quantization_config` is dropped: a proof writes float32
            weights.
        layouts: Layouts at which the small model must run.
        origin: Path or key, which errors begin with.

    Raises:
        ConfigError: The model is not supported, the small model would lack one of its parts, or no
            number of layers fits the pipeline stages of all layouts.
    """
    whole = copy.deepcopy(remove_quantization(config))
    shape = read_config(whole, origin)
    (name,) = whole["architectures"]
    architecture = ARCHITECTURES_BY_CLASS[name]
    for alias, key in architecture.aliases.items():
        if alias in whole:
            whole.setdefault(key, whole.pop(alias))
    whole["architectures"] = [architecture.causal_name]
    # transformers chooses its own class by this entry, and others by auto_map
    whole["model_type"] = architecture.model_type
    whole.pop("auto_map", None)

    layers = _choose_layers(shape, layouts, origin)
    small = _select_layers(whole, shape.num_layers, layers)
    small |= _choose_sizes(architecture, whole, shape, layouts)
    small |= {architecture.entries["num_layers"].key: len(layers)}
    small |= {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "dtype": "float32"}
    small.pop("torch_dtype", None)
    for key in ("qk_head_dim", "head_dim") if architecture.latent_entries else ():
        small.pop(key, None)  # they follow from the sizes of latent attention
    _shrink_positions(architecture, small, shape)
    # Activations keep their size over the layers with this deviation of the weights.
    hidden = small[architecture.entries["hidden_size"].key]
    small["initializer_range"] = 1 / math.sqrt(hidden)
    small |= dict.fromkeys(architecture.dropouts, 0.0)

    if names := _find_missing_parts(shape, read_config(small, origin)):
        raise ConfigError(f"{origin}: the small model would lack parts of the model: {names}")
    return small


def remove_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with an architecture and without entries about weight files."""
    return {
        key: value
        for key, value in with_architecture(dict(config)).items()
        if key not in ("quantization_config", "compression_config")
    }


def fit_stages(layout: ParallelConfig, shape: ModelShape, layers: int) -> ParallelConfig:
    """Return a layout of a model for a small model of it.

    If the layout has `stage_layers` or `last_stage_layers`, a stage of the small model has more,
    fewer, or as many layers as another one like in the model.

    Args:
        layout: A layout of the model.
        shape: Shape of the model.
        layers: Number of layers of the small model, which `shrink_config` has chosen.
    """
    if not _has_given_stages(layout):
        return layout
    sizes = find_similar_parts(count_part_layers(shape, layout), layers)[layers]
    return dataclasses.replace(layout, stage_layers=sizes, last_stage_layers=None)


def _has_given_stages(layout: ParallelConfig) -> bool:
    return layout.stage_layers is not None or layout.last_stage_layers is not None


def _choose_layers(shape: ModelShape, layouts: Sequence[ParallelConfig], origin: str) -> list[int]:
    """Return the indices of the layers of the small model, with every kind of layer.

    They are the first layers if these have every kind, because some entries name layers by an
    interval.
    """
    min_layers = min(_MIN_LAYERS, shape.num_layers)
    depths = [depth for depth in _iterate_depths(shape, layouts) if depth >= min_layers]
    if not depths:
        raise ConfigError(
            f"{origin}: no small model fits all layouts, because of the layers of their pipeline"
            " stages; prove the layouts one by one"
        )
    kinds = list(map(_describe_kind, shape.layers))
    all_kinds = set(kinds)
    prefixes = [depth for depth in depths if depth < _MAX_PREFIX]
    for size in (*prefixes, *depths[len(prefixes) : len(prefixes) + 1]):
        indices = [index % shape.num_layers for index in range(size)]
        if {kinds[index] for index in indices} == all_kinds:
            return indices
    first = sorted(kinds.index(kind) for kind in dict.fromkeys(kinds))
    size = next(depth for depth in depths if depth >= len(first))
    return sorted((first * size)[:size])


def _iterate_depths(shape: ModelShape, layouts: Sequence[ParallelConfig]) -> Iterator[int]:
    """Yield the numbers of layers of small models that fit the pipeline stages of all layouts."""
    multiple = math.lcm(
        *(
            layout.pipeline * layout.virtual_pipeline
            for layout in layouts
            if not _has_given_stages(layout)
        )
    )
    sizes_by_depth = [
        find_similar_parts(count_part_layers(shape, layout), _MAX_LAYERS)
        for layout in layouts
        if _has_given_stages(layout)
    ]
    for depth in range(multiple, _MAX_LAYERS, multiple):
        if all(depth in sizes for sizes in sizes_by_depth):
            yield depth


def _select_layers(config: dict[str, Any], total: int, layers: list[int]) -> dict[str, Any]:
    """Return the entries of a model with only some of the layers."""
    small = dict(config)
    for key, value in config.items():
        if isinstance(value, list) and len(value) >= total and key != "architectures":
            small[key] = [value[layer] for layer in layers]
    if config.get("mlp_only_layers"):
        dense = config["mlp_only_layers"]
        small["mlp_only_layers"] = [new for new, old in enumerate(layers) if old in dense]
    for key in ("max_window_layers", "first_k_dense_replace"):
        if isinstance(config.get(key), int):
            small[key] = sum(old < config[key] for old in layers)
    return small


def _choose_sizes(
    architecture: Architecture,
    config: Mapping[str, Any],
    shape: ModelShape,
    layouts: Sequence[ParallelConfig],
) -> dict[str, Any]:
    """Return the entries of the sizes of the small model, except those of layers and positions."""
    tensor = math.lcm(*(layout.tensor for layout in layouts))
    kv_heads = _choose_kv_heads(shape, tensor)
    heads = kv_heads * min(shape.num_heads // shape.num_kv_heads, _MAX_QUERIES_PER_GROUP)
    heads = math.lcm(heads, tensor)
    hidden = heads * _HEAD_DIM
    total = shape.num_heads * shape.head_dim
    if shape.hidden_size != total:
        hidden = hidden * 2 if shape.hidden_size > total else hidden // 2
    # A multiple of all tensor-parallel sizes; the dense network and the experts differ in size.
    unit = math.lcm(tensor, *(layout.expert_tensor_size for layout in layouts)) * 8
    values: dict[str, Any] = {
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": _HEAD_DIM,
        "ffn_hidden_size": math.ceil(1.5 * hidden / unit) * unit,
        "vocab_size": _VOCABULARY,
    }
    sizes = {
        entry.key: values[attribute]
        for attribute, entry in architecture.entries.items()
        # null means a size that follows from others
        if attribute in values
        and not (entry.nullable and config.get(entry.key, entry.default) is None)
    }
    sizes |= {
        entry.key: _LATENT_SIZES[attribute]
        for attribute, entry in architecture.latent_entries.items()
        if attribute in _LATENT_SIZES and config.get(entry.key, entry.default) is not None
    }
    if shape.delta_net is not None:
        delta_values = _choose_delta_net_sizes(shape.delta_net, tensor)
        sizes |= _name_entries(architecture.delta_net_entries, delta_values)
        # With the usual epsilon, the norm after the delta rule amplifies the rounding of outputs
        # whose query and key are almost orthogonal.
        sizes[architecture.entries["norm_epsilon"].key] = 1e-3
    if shape.experts is not None:
        expert_values = _choose_expert_sizes(shape.experts, hidden, unit, layouts)
        sizes |= _name_entries(architecture.expert_entries, expert_values)
    return sizes


def _choose_kv_heads(shape: ModelShape, tensor: int) -> int:
    """Return the number of KV heads of the small model.

    Args:
        shape: Shape of the whole model.
        tensor: Common multiple of the tensor-parallel sizes.
    """
    # Tensor ranks have copies of KV heads if they have copies in the whole model.
    if tensor > shape.num_kv_heads:
        return shape.num_kv_heads
    kv_heads = math.lcm(tensor, 2) if shape.num_kv_heads > 1 else 1
    return kv_heads * 2 if shape.num_heads == shape.num_kv_heads else kv_heads


def _choose_delta_net_sizes(net: DeltaNet, tensor: int) -> dict[str, int]:
    """Return sizes of a small gated delta net, by the attribute of `DeltaNet`.

    Args:
        net: Gated delta net of the whole model.
        tensor: Common multiple of the tensor-parallel sizes.
    """
    key_heads = math.lcm(tensor, 2)
    return {
        "key_heads": key_heads,
        "value_heads": key_heads * (net.value_heads // net.key_heads),
        "key_dim": 12,
        "value_dim": 20,
    }


def _choose_expert_sizes(
    experts: Experts, hidden: int, unit: int, layouts: Sequence[ParallelConfig]
) -> dict[str, float]:
    """Return sizes of a small mixture of experts, by the attribute of `Experts`.

    Args:
        experts: Mixture of experts of the whole model.
        hidden: Hidden size of the small model.
        unit: Number of which the hidden sizes of the experts are multiples.
        layouts: Layouts of the proof.
    """
    groups = experts.groups
    per_token = min(experts.per_token, 4)
    # At least two experts in each group, and some experts that no token of a group chooses.
    multiple = math.lcm(2 * groups if groups > 1 else 1, *(each.expert for each in layouts))
    min_count = per_token + (experts.per_token < experts.count) * per_token
    count = math.ceil(min_count / multiple) * multiple
    values: dict[str, float] = {
        "count": count,
        "per_token": per_token,
        "ffn_hidden_size": math.ceil(0.75 * hidden / unit) * unit,
        "shared_ffn_hidden_size": math.ceil(hidden / unit) * unit,
    }
    sums_to_one = experts.score_function == "softmax" and not experts.normalizes_weights
    if sums_to_one and experts.weight_scale != 1:
        # Each of fewer experts has a larger score. With the whole factor, the experts would
        # amplify the activations, and with them rounding errors.
        values["weight_scale"] = experts.weight_scale * count / experts.count
    return values


def _name_entries(entries: Mapping[str, Entry], values: Mapping[str, float]) -> dict[str, float]:
    """Return the values of attributes by the keys of their entries in config.json."""
    return {
        entry.key: values[attribute] for attribute, entry in entries.items() if attribute in values
    }


def _shrink_positions(
    architecture: Architecture, config: dict[str, Any], shape: ModelShape
) -> None:
    """Set the context, the original context of scaled rotary embeddings, and windows in place.

    They keep their order.
    """
    key = architecture.entries["max_positions"].key
    total = int(config.get(key) or shape.max_positions)
    ropes = [
        each
        for entry in ("rope_parameters", "rope_scaling")
        for each in _iterate_ropes(config.get(entry))
    ]
    originals = [each[_ORIGINAL_KEY] for each in (*ropes, config) if each.get(_ORIGINAL_KEY)]
    if originals:
        ratio = total / max(originals)
        is_long = any(each.get("short_factor") for each in ropes)
        is_short = ratio * _ORIGINAL_POSITIONS < _MIN_POSITIONS
        original = _MIN_POSITIONS if is_long or is_short else _ORIGINAL_POSITIONS
        config[key] = max(round(ratio * original), _MIN_POSITIONS)
        for each in (*ropes, config):
            if each.get(_ORIGINAL_KEY):
                each[_ORIGINAL_KEY] = original
    else:
        config[key] = _MIN_POSITIONS
    for each in ropes:
        for name in ("short_factor", "long_factor"):
            if isinstance(each.get(name), list):
                each[name] = _thin_out(each[name], _count_pairs(shape))
    if architecture.rope is not None and architecture.rope.size_key in config:
        config[architecture.rope.size_key] = 2 * _count_pairs(shape)
    window = config.get("sliding_window")
    if isinstance(window, int) and not isinstance(window, bool):
        config["sliding_window"] = _WINDOW if window < total else config[key]


def _iterate_ropes(entry: Any) -> list[dict[str, Any]]:
    """Return the objects with rotary entries in `rope_parameters` or `rope_scaling`."""
    if not isinstance(entry, dict):
        return []
    nested = [value for value in entry.values() if isinstance(value, dict)]
    return nested or [entry]


def _count_pairs(shape: ModelShape) -> int:
    """Return the number of rotated pairs of a head of the small model."""
    rope = next(layer.rope for layer in shape.layers if layer.rope is not None)
    return int(_HEAD_DIM * rope.fraction) // 2


def _thin_out(factors: list[float], count: int) -> list[float]:
    """Return `count` of the factors, at equal distances, with the first and the last."""
    last = len(factors) - 1
    return [factors[round(index * last / max(1, count - 1))] for index in range(count)]


def _describe_kind(layer: LayerShape) -> tuple[Any, ...]:
    """Return the parts of a layer without their sizes."""
    values: list[Any] = []
    for field in dataclasses.fields(layer):
        value = getattr(layer, field.name)
        if field.name == "rope" and value is not None:
            scaling = None if value.scaling is None else value.scaling.kind
            value = (value.theta, value.fraction, value.is_interleaved, scaling)
        elif field.name == "sliding_window":
            value = value is not None
        values.append(value)
    return tuple(values)


def _describe_part(shape: ModelShape, name: str) -> dict[str, Any]:
    """Return the attributes of a part of a shape; of sizes, only whether they exist."""
    part = getattr(shape, name)
    if part is None:
        return {}
    exact_names = ("groups", "groups_per_token", "scores_per_group", "shared_count")
    values = {
        key: value
        if key in exact_names or isinstance(value, str | bool | float)
        else value is not None
        for key, value in dataclasses.asdict(part).items()
    }
    if name == "experts":
        values["weight_scale"] = part.weight_scale != 1
    return values


def _find_missing_parts(shape: ModelShape, small: ModelShape) -> str:
    """Return the attributes that a small model does not have in common with the model."""
    names = [
        field.name
        for field in dataclasses.fields(shape)
        if field.name not in _SIZES and getattr(shape, field.name) != getattr(small, field.name)
    ]
    if shape.delta_net is not None and "norm_epsilon" in names:
        names.remove("norm_epsilon")
    if set(map(_describe_kind, shape.layers)) != set(map(_describe_kind, small.layers)):
        names.append("layers")
    names += [name for name in _PARTS if _describe_part(shape, name) != _describe_part(small, name)]
    return ", ".join(names)
