"""Conversion between Hugging Face's config.json and a `ModelShape`, as transformers reads it.

`architectures.py` has the entries of each supported architecture.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from aligner.errors import ConfigError
from aligner.file_limits import MAX_DIMENSION, MAX_EXPERTS, MAX_LAYERS
from aligner.models.architectures import (
    ARCHITECTURES,
    ARCHITECTURES_BY_CLASS,
    COMMON_SUPPORTED,
    Architecture,
    Entry,
)
from aligner.models.quantized_weights import check_quantization
from aligner.models.rope_entries import (
    FULL,
    SLIDING,
    RopeFormat,
    find_unknown_entries,
    is_number,
    read_ropes,
    write_ropes,
)
from aligner.models.shape import (
    DeltaNet,
    Experts,
    LatentAttention,
    LayerShape,
    ModelShape,
)
from aligner.models.weight_slices import Head

# Activation of a `ModelShape`, by its name in config.json.
_ACTIVATIONS: Mapping[str, Literal["silu", "gelu", "gelu_tanh"]] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
# Type of a layer with a gated delta net, in `layer_types`.
_DELTA_NET = "linear_attention"
# Attributes of a shape that `read_described_config` requires.
_SIZES = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "vocab_size",
)
# Entry of the number of layers of multi-token prediction.
_PREDICTION_LAYERS = "num_nextn_predict_layers"
# Attributes of `Experts` that `read_described_config` requires.
_EXPERT_SIZES = ("count", "ffn_hidden_size")
# Attributes of `DeltaNet` that `read_described_config` requires.
_DELTA_NET_SIZES = ("key_heads", "value_heads", "key_dim", "value_dim")


def read_config(config: Any, origin: str) -> ModelShape:
    """Return the shape that a Hugging Face configuration describes, as transformers reads it.

    Missing entries have the defaults of the transformers class. Entries that contradict each
    other are refused, unless transformers and this function resolve them alike.

    Args:
        config: The content of config.json.
        origin: Path or key, which errors begin with.

    Raises:
        ConfigError: The content is not a configuration, its architecture or an entry is not
            supported, or a value has the wrong type.
    """
    architecture, entries = _check_entries(with_architecture(config), origin)
    try:
        shape = _read_shape(architecture, entries, origin)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise ConfigError(
            f"{origin}: a value in config.json has the wrong type or size: {error}"
        ) from error
    if shape.num_heads % shape.num_kv_heads:
        raise ConfigError(
            f"{origin}: the number of attention heads, {shape.num_heads}, must be a multiple of"
            f" the number of key-value heads, {shape.num_kv_heads}"
        )
    net = shape.delta_net
    if net is not None and net.value_heads % net.key_heads:
        raise ConfigError(
            f"{origin}: linear_num_value_heads={net.value_heads}: must be a multiple of"
            f" linear_num_key_heads={net.key_heads}"
        )
    if (count := count_prediction_layers(config)) > MAX_LAYERS:
        raise ConfigError(f"{origin}: {_PREDICTION_LAYERS}={count}: must be at most {MAX_LAYERS}")
    experts = shape.experts
    if experts is not None and experts.per_token == 1 and experts.normalizes_weights:
        raise ConfigError(
            f"{origin}: one expert per token with normalized expert weights is not supported,"
            " because the router would get no gradient"
        )
    if experts is not None:
        _check_experts(experts, len(shape.expert_layers), origin)
    return shape


def _check_experts(experts: Experts, layers: int, origin: str) -> None:
    """Raise ConfigError if the numbers of experts and groups are too large or contradict each
    other.

    Args:
        experts: The mixture of experts.
        layers: Number of layers that have experts.
        origin: Path or key, which errors begin with.
    """
    if layers * experts.count > MAX_EXPERTS:
        raise ConfigError(
            f"{origin}: {layers} layers with {experts.count} experts each have more than"
            f" {MAX_EXPERTS} experts, the maximum"
        )
    if experts.count % experts.groups:
        raise ConfigError(
            f"{origin}: the number of experts, {experts.count}, must be a multiple of the number of"
            f" groups, {experts.groups}"
        )
    if experts.groups_per_token > experts.groups:
        raise ConfigError(
            f"{origin}: {experts.groups_per_token} groups of experts per token are more than the"
            f" model's {experts.groups} groups"
        )
    if experts.groups > 1 and experts.count // experts.groups < experts.scores_per_group:
        raise ConfigError(
            f"{origin}: {experts.groups} groups of {experts.count // experts.groups} experts are"
            f" not supported; a group must have at least {experts.scores_per_group} experts"
        )
    candidates = experts.count // experts.groups * experts.groups_per_token
    if experts.per_token > candidates:
        raise ConfigError(
            f"{origin}: {experts.per_token} experts per token are more than the {candidates}"
            " experts from which the router chooses"
        )


def with_architecture(config: Any) -> Any:
    """Return the content of config.json with the entry `architectures`.

    If config.json lacks the entry, it is the language model of `model_type`, which
    `AutoModelForCausalLM` would load.
    """
    if not isinstance(config, Mapping) or config.get("architectures"):
        return config
    names = [
        architecture.causal_name
        for architecture in ARCHITECTURES
        if architecture.model_type == config.get("model_type")
    ]
    return {**config, "architectures": names} if names else config


def read_described_config(config: Any, origin: str) -> ModelShape:
    """Return the shape of a model that a configuration key describes and no file contains.

    The configuration must contain the sizes, because the defaults of a transformers class are the
    sizes of one particular model.

    Args:
        config: Entries of a config.json.
        origin: Configuration key, which errors begin with.

    Raises:
        ConfigError: A size is missing, or `read_config` raises the error.
    """
    architecture, entries = _check_entries(with_architecture(config), origin)
    sizes = [architecture.entries[name] for name in _SIZES]
    if _has_experts(architecture, entries, origin):
        sizes += [architecture.expert_entries[name] for name in _EXPERT_SIZES]
    else:
        sizes.append(architecture.entries["ffn_hidden_size"])
    sizes += architecture.latent_entries.values()
    if architecture.delta_net_entries:
        sizes += [architecture.delta_net_entries[name] for name in _DELTA_NET_SIZES]
    missing = [
        entry.key for entry in sizes if not entry.nullable and entries.get(entry.key) is None
    ]
    if missing:
        raise ConfigError(
            f"{origin}: required entries of config.json are missing: {', '.join(missing)}"
        )
    shape = read_config(config, origin)
    ffn = architecture.entries["ffn_hidden_size"]
    is_dense = any(layer.is_dense for layer in shape.layers)
    if is_dense and not ffn.nullable and entries.get(ffn.key) is None:
        raise ConfigError(f"{origin}: required entries of config.json are missing: {ffn.key}")
    return shape


def count_prediction_layers(config: Mapping[str, Any]) -> int:
    """Return the number of layers of multi-token prediction in a model's files.

    Their tensors have the indices after those of the model's layers. aligner does not read them.

    Args:
        config: The content of config.json.
    """
    count = config.get(_PREDICTION_LAYERS, config.get("num_mtp_layers", 0))
    return count if _is_whole(count) else 0


def without_prediction_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of config.json for files without layers of multi-token prediction."""
    if not count_prediction_layers(config):
        return dict(config)
    entries = {key: value for key, value in config.items() if key != "num_mtp_layers"}
    return entries | {_PREDICTION_LAYERS: 0}


def config_notes(config: Mapping[str, Any]) -> list[str]:
    """Return notes about a configuration that `read_config` accepts, one line each.

    There is at most one note about entries that transformers does not know, one about dropout, and
    one about layers of multi-token prediction.
    """
    architecture = ARCHITECTURES_BY_CLASS[with_architecture(config)["architectures"][0]]
    unknown = [key for key in config if key not in architecture.known_entries]
    if architecture.rope is not None:
        unknown += find_unknown_entries(architecture.rope, config)
    notes = []
    if unknown:
        notes.append(
            f"config.json: ignored entries that transformers' {architecture.name}Config does not"
            f" know: {', '.join(unknown)}"
        )
    dropouts = [f"{key}={config[key]}" for key in architecture.dropouts if config.get(key)]
    if dropouts:
        notes.append(f"config.json: models train without dropout; ignored: {', '.join(dropouts)}")
    if count := count_prediction_layers(config):
        notes.append(
            f"config.json: {_PREDICTION_LAYERS}={count}: layers of multi-token prediction are not"
            " trained, and checkpoints and exported models do not contain them"
        )
    return notes


def _check_entries(config: Any, origin: str) -> tuple[Architecture, dict[str, Any]]:
    """Return the architecture, and the entries without aliases.

    Raises:
        ConfigError: The content is not an object, or its architecture is not supported.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"{origin}: config.json must be a JSON object, got {type(config).__name__}"
        )
    names = config.get("architectures") or ["<none>"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise ConfigError(f"{origin}: architectures={names!r}: must be a list of names")
    architecture = ARCHITECTURES_BY_CLASS.get(names[0])
    if architecture is None:
        raise ConfigError(
            f"{origin}: architecture {names[0]} is not supported; supported:"
            f" {', '.join(ARCHITECTURES_BY_CLASS)}"
        )
    # transformers chooses the class by this entry, not by `architectures`.
    model_type = config.get("model_type", architecture.model_type)
    if model_type not in (architecture.model_type, *architecture.other_model_types):
        raise ConfigError(
            f"{origin}: model_type={model_type!r} contradicts architectures={names!r}; set"
            f" model_type={architecture.model_type!r} or the architecture of that type"
        )
    return architecture, _without_aliases(architecture, config, origin)


def _without_aliases(
    architecture: Architecture, config: Mapping[str, Any], origin: str
) -> dict[str, Any]:
    """Return the entries under the names of the architecture's table."""
    entries = dict(config)
    for alias, key in architecture.aliases.items():
        if alias not in entries:
            continue
        value = entries.pop(alias)
        if entries.setdefault(key, value) != value:
            raise ConfigError(
                f"{origin}: {alias}={value!r} contradicts {key}={entries[key]!r}; remove one of"
                " them"
            )
    return entries


def _read_shape(architecture: Architecture, config: Mapping[str, Any], origin: str) -> ModelShape:
    check_quantization(config, origin)
    _refuse_unsupported(architecture, config, origin)

    table = architecture.entries
    values: dict[str, Any] = {
        attribute: entry.to_shape(_entry_value(entry, config, origin))
        for attribute, entry in table.items()
    }
    if "activation" in values:
        values["activation"] = _activation(
            values["activation"], f"{origin}: {table['activation'].key}"
        )
    hidden = values["hidden_size"]
    heads = values["num_heads"]
    # Null or missing entries have these defaults in the transformers classes.
    values["num_kv_heads"] = values.get("num_kv_heads") or heads
    values["ffn_hidden_size"] = values["ffn_hidden_size"] or 4 * hidden
    latent = _read_latent_attention(architecture, config, values, origin)
    values["latent_attention"] = latent
    if latent is not None:
        values["head_dim"] = latent.head_dim
    elif not values.get("head_dim"):
        if hidden % heads:
            raise ConfigError(
                f"{origin}: the hidden size, {hidden}, must be a multiple of the number of"
                f" attention heads, {heads}"
            )
        values["head_dim"] = hidden // heads
    # Architectures without this entry ignore it in transformers; another value is an error here.
    head_dim = config.get("head_dim")
    if latent is None and head_dim not in (None, values["head_dim"]):
        raise ConfigError(
            f"{origin}: head_dim={head_dim!r} is not supported; supported: the hidden size divided"
            f" by the number of attention heads, {values['head_dim']}"
        )

    values["experts"] = _read_experts(architecture, config, origin)
    values["delta_net"] = _read_delta_net(architecture, config, origin)
    layers = _read_layers(architecture, config, values, origin)
    del values["num_layers"]
    for layer in layers:
        scaling = None if layer.rope is None else layer.rope.scaling
        if scaling is not None and scaling.kind == "longrope":
            # longer contexts have other frequencies, which depend on the length of the sequence
            values["max_positions"] = min(values["max_positions"], scaling.original_positions)
    return ModelShape(
        layers,
        **values,
        **architecture.implied,
        family=architecture.family,
        eos_token_ids=_eos_token_ids(architecture, config, values["vocab_size"], origin),
        pad_token_id=_pad_token_id(architecture, config, values["vocab_size"], origin),
    )


def _refuse_unsupported(architecture: Architecture, config: Mapping[str, Any], origin: str) -> None:
    for key, supported in {**COMMON_SUPPORTED, **architecture.supported}.items():
        value = config.get(key, supported)
        if value != supported:
            raise ConfigError(
                f"{origin}: {key}={value!r} is not supported; supported: {supported!r}"
            )
    for key in architecture.dropouts:
        probability = config.get(key, 0.0)
        if probability is not None and not is_number(probability):
            raise ConfigError(f"{origin}: {key}={probability!r}: must be a number")


def _entry_value(entry: Entry, config: Mapping[str, Any], origin: str) -> Any:
    """Return the entry's value or default; None only if the entry may be null."""
    value = config.get(entry.key, entry.default)
    if value is None and entry.nullable:
        return None
    if value is None:
        raise ConfigError(
            f"{origin}: required entries of config.json are missing: {entry.key} (null)"
        )
    if isinstance(entry.default, bool):
        is_valid, allowed = isinstance(value, bool), "true or false"
    elif isinstance(entry.default, float) or entry.is_fractional:
        is_valid, allowed = is_number(value) and value >= 0, "a number >= 0"
        if entry.is_positive:
            is_valid, allowed = is_valid and value > 0, "a number > 0"
    elif isinstance(entry.default, str):
        is_valid, allowed = isinstance(value, str), "a name"
    else:
        is_valid, allowed = _is_whole(value) and value > 0, "an integer > 0"
        if _is_whole(value) and value > MAX_DIMENSION:
            is_valid, allowed = False, f"at most {MAX_DIMENSION}"
    if not is_valid:
        raise ConfigError(f"{origin}: {entry.key}={value!r:.100}: must be {allowed}")
    return value


def _is_whole(value: Any) -> bool:
    """Return whether a value is an integer, and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def _activation(name: Any, entry: str) -> Literal["silu", "gelu", "gelu_tanh"]:
    if name not in _ACTIVATIONS:
        raise ConfigError(
            f"{entry}={name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _read_experts(
    architecture: Architecture, config: Mapping[str, Any], origin: str
) -> Experts | None:
    """Return the mixture of experts; None if no layer has experts."""
    if not _has_experts(architecture, config, origin):
        return None
    values = {
        attribute: entry.to_shape(_entry_value(entry, config, origin))
        for attribute, entry in architecture.expert_entries.items()
    }
    if architecture.group_key is not None:
        method = config.get(architecture.group_key, "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise ConfigError(
                f"{origin}: {architecture.group_key}={method!r} is not supported; supported:"
                " greedy, group_limited_greedy"
            )
        if method == "greedy":
            values |= {"groups": 1, "groups_per_token": 1}
    return Experts(**values, **architecture.implied_experts)


def _read_latent_attention(
    architecture: Architecture, config: Mapping[str, Any], values: Mapping[str, Any], origin: str
) -> LatentAttention | None:
    """Return the latent attention; None for an architecture without it.

    Args:
        architecture: The architecture.
        config: Content of config.json.
        values: Attributes of the shape that have been read.
        origin: Path or key, which errors begin with.
    """
    if not architecture.latent_entries:
        return None
    latent = LatentAttention(
        **{
            attribute: entry.to_shape(_entry_value(entry, config, origin))
            for attribute, entry in architecture.latent_entries.items()
        }
    )
    if values["num_kv_heads"] != values["num_heads"]:
        raise ConfigError(
            f"{origin}: {architecture.entries['num_kv_heads'].key}={values['num_kv_heads']!r} is"
            " not supported; supported: the number of attention heads,"
            f" {values['num_heads']}"
        )
    if latent.v_head_dim > latent.head_dim:
        raise ConfigError(
            f"{origin}: v_head_dim={latent.v_head_dim}: must be at most qk_nope_head_dim +"
            f" qk_rope_head_dim, {latent.head_dim}"
        )
    # transformers computes these entries, and its configurations contain them.
    for key, expected in (
        ("head_dim", latent.qk_rope_head_dim),
        ("qk_head_dim", latent.head_dim),
    ):
        value = config.get(key)
        if value not in (None, expected):
            raise ConfigError(
                f"{origin}: {key}={value!r} is not supported; supported: {expected}, which follows"
                f" from qk_nope_head_dim={latent.qk_nope_head_dim} and"
                f" qk_rope_head_dim={latent.qk_rope_head_dim}"
            )
    return latent


def _has_experts(architecture: Architecture, config: Mapping[str, Any], origin: str) -> bool:
    """Return whether any layer has experts."""
    entry = architecture.entries["num_layers"]
    count = _entry_value(entry, config, origin)
    # Each layer is an object, so the number is checked before the layers are read.
    if count > MAX_LAYERS:
        raise ConfigError(f"{origin}: {entry.key}={count}: must be at most {MAX_LAYERS}")
    return any(_read_expert_layers(architecture, config, count, origin))


def _read_expert_layers(
    architecture: Architecture, config: Mapping[str, Any], count: int, origin: str
) -> list[bool]:
    """Return whether each of the `count` layers has experts."""
    if not architecture.expert_entries:
        return [False] * count
    if architecture.expert_layers == "listed":
        interval = config.get("decoder_sparse_step", 1)
        if not _is_whole(interval) or interval < 1:
            raise ConfigError(f"{origin}: decoder_sparse_step={interval!r}: must be an integer > 0")
        dense = config.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(map(_is_whole, dense)):
            raise ConfigError(
                f"{origin}: mlp_only_layers={dense!r}: must be a list of layer indices or null"
            )
        dense_layers = set(dense)
        return [layer not in dense_layers and (layer + 1) % interval == 0 for layer in range(count)]
    first = 0
    if architecture.expert_layers == "last":
        first = config.get("first_k_dense_replace", architecture.dense_count)
        if not _is_whole(first) or first < 0:
            raise ConfigError(f"{origin}: first_k_dense_replace={first!r}: must be an integer >= 0")
    return [layer >= first for layer in range(count)]


def _read_delta_net(
    architecture: Architecture, config: Mapping[str, Any], origin: str
) -> DeltaNet | None:
    """Return the gated delta net; None for an architecture without it."""
    if not architecture.delta_net_entries:
        return None
    return DeltaNet(
        **{
            attribute: _entry_value(entry, config, origin)
            for attribute, entry in architecture.delta_net_entries.items()
        }
    )


def _read_layers(
    architecture: Architecture, config: Mapping[str, Any], values: Mapping[str, Any], origin: str
) -> tuple[LayerShape, ...]:
    """Return the layers: their rotary positions, windows, experts and delta nets."""
    count = values["num_layers"]
    if architecture.rope is None:
        return (LayerShape(),) * count
    has_experts = _read_expert_layers(architecture, config, count, origin)
    has_rope = [True] * count
    if architecture.window == "without_rope":
        has_rope = _read_rope_layers(config, count, origin)
    windows: list[int | None] = [None] * count
    has_delta_net = [False] * count
    if architecture.delta_net_entries:
        has_delta_net = _read_delta_net_layers(architecture, config, count, origin)
        has_rope = [not has_net for has_net in has_delta_net]
    else:
        windows = _read_windows(architecture, config, has_rope, origin)
    latent = values["latent_attention"]
    rotary_dim = values["head_dim"] if latent is None else latent.qk_rope_head_dim
    full, sliding = read_ropes(
        architecture.rope, config, rotary_dim, values["max_positions"], origin
    )
    return tuple(
        LayerShape(
            rope=(full if window is None else sliding) if rotates else None,
            sliding_window=window,
            has_experts=mixes,
            has_delta_net=has_net,
        )
        for rotates, window, mixes, has_net in zip(
            has_rope, windows, has_experts, has_delta_net, strict=True
        )
    )


def _read_interval(architecture: Architecture, config: Mapping[str, Any], origin: str) -> int:
    """Return n if each n-th layer has full attention, for a file without `layer_types`."""
    interval = architecture.full_attention_interval
    if architecture.interval_key is None:
        return interval
    interval = config.get(architecture.interval_key, interval)
    if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
        raise ConfigError(
            f"{origin}: {architecture.interval_key}={interval!r}: must be an integer > 0"
        )
    return interval


def _read_delta_net_layers(
    architecture: Architecture, config: Mapping[str, Any], count: int, origin: str
) -> list[bool]:
    """Return whether each layer has a gated delta net instead of attention."""
    types = config.get("layer_types")
    if types is None:
        interval = _read_interval(architecture, config, origin)
        return [(layer + 1) % interval != 0 for layer in range(count)]
    if not (
        isinstance(types, list)
        and len(types) == count
        and all(each in (FULL, _DELTA_NET) for each in types)
    ):
        raise ConfigError(
            f"{origin}: layer_types={types!r}: must be a list of {FULL!r} and {_DELTA_NET!r} for"
            f" {count} layers"
        )
    return [each == _DELTA_NET for each in types]


def _read_rope_layers(config: Mapping[str, Any], count: int, origin: str) -> list[bool]:
    """Return whether each layer has rotary positions, from the entries of SmolLM3."""
    flags = config.get("no_rope_layers")
    if flags is None:
        interval = config.get("no_rope_layer_interval", 4)
        if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
            raise ConfigError(
                f"{origin}: no_rope_layer_interval={interval!r}: must be an integer > 0"
            )
        return [(layer + 1) % interval != 0 for layer in range(count)]
    # despite the name of the entry, 1 means a layer with rotary positions
    if not isinstance(flags, list) or len(flags) < count or not all(f in (0, 1) for f in flags):
        raise ConfigError(
            f"{origin}: no_rope_layers={flags!r}: must be a list of 0 and 1 for {count} layers"
        )
    return [bool(flag) for flag in flags[:count]]


def _read_windows(
    architecture: Architecture, config: Mapping[str, Any], has_rope: Sequence[bool], origin: str
) -> list[int | None]:
    """Return the sliding window of each layer, None for a layer without one.

    `has_rope` says which layers have rotary positions.
    """
    kind = architecture.window
    layers = len(has_rope)
    size = config.get("sliding_window", architecture.window_size)
    is_size = isinstance(size, int) and not isinstance(size, bool) and size > 0
    may_be_null = kind != "typed"
    if kind != "none" and not is_size and (size is not None or not may_be_null):
        allowed = "an integer > 0" + " or null" * may_be_null
        raise ConfigError(f"{origin}: sliding_window={size!r}: must be {allowed}")
    is_used = kind in ("always", "typed")
    if kind in ("switched", "layered", "without_rope"):
        is_used = config.get("use_sliding_window", False)
        if not isinstance(is_used, bool):
            raise ConfigError(f"{origin}: use_sliding_window={is_used!r}: must be true or false")
    if not is_used:
        size = None

    # In transformers, these layers have a window unless layer_types is set.
    first = config.get("max_window_layers", 28) if kind == "layered" else 0
    has_window = [layer >= first for layer in range(layers)]
    if kind == "typed":
        interval = _read_interval(architecture, config, origin)
        has_window = [(layer + 1) % interval != 0 for layer in range(layers)]
    elif kind == "without_rope":
        has_window = [not rotates for rotates in has_rope]
    default = [FULL if size is None or not each else SLIDING for each in has_window]
    types = config.get("layer_types")
    # Other architectures ignore layer_types in transformers; a contradiction is an error here.
    is_read = kind in ("layered", "typed", "without_rope") and size is not None
    read_types = [FULL, SLIDING] if is_read else []
    if types is None or types == default:
        types = default
    elif not (
        isinstance(types, list)
        and len(types) == layers
        and all(each in read_types for each in types)
    ):
        raise ConfigError(
            f"{origin}: layer_types={types!r} with sliding_window={size!r} is not supported;"
            f" supported: {layers} times {default[-1]!r}, or no layer_types"
        )
    return [size if each == SLIDING else None for each in types]


def _eos_token_ids(
    architecture: Architecture, config: Mapping[str, Any], vocabulary: int, origin: str
) -> tuple[int, ...]:
    default = architecture.eos_token_id
    # The default of the class belongs to a larger vocabulary.
    if default is not None and max(default if isinstance(default, tuple) else (default,)) >= (
        vocabulary
    ):
        default = None
    value = config.get("eos_token_id", default)
    # a class with several ids replaces null by them
    if value is None and isinstance(default, tuple):
        value = default
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list | tuple) else (value,)
    for token in ids:
        _check_token(token, "eos_token_id", value, vocabulary, origin)
    return ids


def _pad_token_id(
    architecture: Architecture, config: Mapping[str, Any], vocabulary: int, origin: str
) -> int:
    """Return the padding token, which no computation reads; 0 if the model has none.

    Conversions of the first Llama models have the id -1, which also means no padding token.
    """
    default = architecture.pad_token_id
    # The default of the class belongs to a larger vocabulary.
    if default is not None and default >= vocabulary:
        default = None
    value = config.get("pad_token_id", default)
    if value is None or (value == -1 and isinstance(value, int)):
        return 0
    _check_token(value, "pad_token_id", value, vocabulary, origin)
    return int(value)


def _check_token(token: Any, key: str, value: Any, vocabulary: int, origin: str) -> None:
    is_whole = isinstance(token, int) and not isinstance(token, bool)
    if not is_whole or not 0 <= token < vocabulary:
        raise ConfigError(
            f"{origin}: {key}={value!r}: must be at least 0 and less than vocab_size={vocabulary}"
        )


def hugging_face_config(shape: ModelShape, head: Head = "vocabulary") -> dict[str, Any]:
    """Return the content of a config.json from which `read_config` reads the given shape.

    Args:
        shape: The model's shape.
        head: Head of the model.
    """
    for architecture in ARCHITECTURES:
        if architecture.family == shape.family:
            config = _to_config(architecture, shape, head)
            if read_config(config, "shape") == shape:
                return config
    raise AssertionError(f"no architecture of the {shape.family} family has this shape: {shape}")


def _to_config(architecture: Architecture, shape: ModelShape, head: Head) -> dict[str, Any]:
    """Return the config.json of an architecture with a shape's values.

    The shape may have attributes that the architecture cannot represent.
    """
    config = {
        entry.key: entry.to_config(getattr(shape, attribute))
        for attribute, entry in architecture.entries.items()
    }
    if shape.experts is not None:
        config |= {
            entry.key: entry.to_config(getattr(shape.experts, attribute))
            for attribute, entry in architecture.expert_entries.items()
        }
        if architecture.group_key is not None and shape.experts.groups > 1:
            config[architecture.group_key] = "group_limited_greedy"
    config |= {
        entry.key: entry.to_config(getattr(shape.latent_attention, attribute))
        for attribute, entry in architecture.latent_entries.items()
    }
    config |= {
        entry.key: getattr(shape.delta_net, attribute)
        for attribute, entry in architecture.delta_net_entries.items()
    }
    if "activation" in architecture.entries:
        names = [
            name for name, activation in _ACTIVATIONS.items() if activation == shape.activation
        ]
        config[architecture.entries["activation"].key] = names[0]
    if architecture.rope is not None:
        config |= _write_layers(architecture, architecture.rope, shape)
    return {
        "architectures": [
            architecture.causal_name if head == "vocabulary" else architecture.scalar_name
        ],
        "model_type": architecture.model_type,
        **config,
        "eos_token_id": list(shape.eos_token_ids),
        "pad_token_id": shape.pad_token_id,
        **({} if head == "vocabulary" else {"num_labels": 1}),
    }


def _write_layers(
    architecture: Architecture, rope: RopeFormat, shape: ModelShape
) -> dict[str, Any]:
    """Return the entries from which `_read_layers` reads the layers of a shape."""
    rotary = [(layer.rope, layer.sliding_window) for layer in shape.layers if layer.rope]
    full = [rope for rope, window in rotary if window is None]
    sliding = [rope for rope, window in rotary if window is not None]
    entries: dict[str, Any] = {}
    if rotary:
        # without a layer of a type, its positions have no effect
        entries["rope_parameters"] = write_ropes(rope, (full or sliding)[0], (sliding or full)[0])
        if rope.interleaved_key is not None:
            entries[rope.interleaved_key] = rotary[0][0].is_interleaved
    dense = [index for index, layer in enumerate(shape.layers) if layer.is_dense]
    if architecture.expert_layers == "listed":
        entries |= {"mlp_only_layers": dense, "decoder_sparse_step": 1}
    elif architecture.expert_layers == "last":
        entries["first_k_dense_replace"] = len(dense)
    if architecture.delta_net_entries:
        entries["layer_types"] = [
            _DELTA_NET if layer.has_delta_net else FULL for layer in shape.layers
        ]
    kind = architecture.window
    if kind == "none":
        return entries
    windows = [layer.sliding_window for layer in shape.layers]
    size = next((window for window in windows if window is not None), None)
    if kind == "without_rope":
        entries["no_rope_layers"] = [int(layer.rope is not None) for layer in shape.layers]
    if kind in ("layered", "typed", "without_rope"):
        entries["layer_types"] = [FULL if window is None else SLIDING for window in windows]
    if kind in ("always", "typed"):
        return {**entries, "sliding_window": size}
    if size is None:
        return {**entries, "use_sliding_window": False}
    return {**entries, "use_sliding_window": True, "sliding_window": size}
