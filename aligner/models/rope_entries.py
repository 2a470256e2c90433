"""Rotary entries of config.json, as transformers reads them.

transformers 5 moved the base, the rotated fraction and the scaling into `rope_parameters`; older
files have `rope_theta`, `partial_rotary_factor` and `rope_scaling`. Both forms are read. Models
whose layers with a sliding window have rotary positions of their own have one object for each type
of layer in `rope_parameters`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aligner.errors import ConfigError
from aligner.models.shape import Rope, RopeScaling, compute_mscale
from aligner.values import is_finite_number

FULL = "full_attention"
SLIDING = "sliding_attention"
ROPE_ENTRIES = ("rope_parameters", "rope_scaling", "original_max_position_embeddings")
"""Entries of every architecture with rotary embeddings."""

_THETA = "rope_theta"
_FRACTION = "partial_rotary_factor"
_POSITIONS = "original_max_position_embeddings"
_SHORT = "short_factor"
_LONG = "long_factor"
# Required entries of each kind of scaling.
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _POSITIONS),
    "yarn": ("factor", _POSITIONS),
    "longrope": (_SHORT, _LONG, _POSITIONS),
}
# Further entries, which may be null.
_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "longrope": ("attention_factor", "factor"),
}


@dataclass(frozen=True)
class RopeFormat:
    """Names and defaults of the rotary entries of an architecture."""

    theta: float = 10000.0
    """Default base of the transformers class."""
    theta_key: str = _THETA
    """Entry of the base outside `rope_parameters`."""
    fraction: float | None = None
    """Default fraction of a head's dimensions that is rotated; None if the architecture rotates all
    dimensions and has no such entry."""
    fraction_key: str = _FRACTION
    """Entry of the rotated fraction outside `rope_parameters`."""
    size_key: str | None = None
    """Entry of the number of rotated dimensions of a head, which is used if the fraction is
    missing; None if there is none."""
    is_interleaved: bool = False
    """Whether the rotated pairs are adjacent dimensions."""
    interleaved_key: str | None = None
    """Entry of whether the rotated pairs are adjacent dimensions, whose default is
    `is_interleaved`; None if there is none."""
    scales_scores: bool = False
    """Whether `mscale_all_dim` scales the attention scores too (DeepSeek-V2 and V3)."""
    kinds: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
    """Supported kinds of scaling."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Kinds of scaling by their other names."""
    default: Mapping[str, Any] = field(default_factory=dict)
    """Content of `rope_parameters` if config.json has no rotary object."""
    original_positions: int | None = None
    """Default of the entry `original_max_position_embeddings` outside of `rope_parameters`."""
    local_theta: float | None = None
    """Default base of layers with a sliding window, if they have rotary positions of their own:
    `rope_parameters` then contains an object for each type of layer. Otherwise None."""
    local_theta_key: str | None = None
    """Entry of this base outside `rope_parameters`; None if there is none."""

    @property
    def entries(self) -> tuple[str, ...]:
        """All rotary entries of the architecture in config.json."""
        others = (self.local_theta_key, self.size_key, self.interleaved_key)
        named = tuple(key for key in others if key is not None)
        return (*ROPE_ENTRIES, self.theta_key, self.fraction_key, *named)


def read_ropes(
    entries: RopeFormat,
    config: Mapping[str, Any],
    head_dim: int,
    max_positions: int,
    origin: str,
) -> tuple[Rope, Rope]:
    """Return the rotary positions of layers without and with a sliding window.

    transformers lets `rope_scaling` replace all of `rope_parameters`, which other programs do not
    do. If the two differ, they are refused.

    Args:
        entries: The entries of the architecture.
        config: Content of config.json.
        head_dim: Number of dimensions of a head.
        max_positions: Context length of the model, in tokens.
        origin: Path or key, which errors begin with.

    Raises:
        ConfigError: An entry is missing, invalid or not supported, or two entries contradict each
            other.
    """
    newer = config.get("rope_parameters")
    older = config.get("rope_scaling")
    for key, value in (("rope_parameters", newer), ("rope_scaling", older)):
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{origin}: {key}={value!r}: must be an object or null")

    reader = _Reader(entries, config, head_dim, max_positions, origin)
    if entries.local_theta is not None:
        return _read_nested_ropes(reader, newer or {}, older or {})
    rope = reader.read(*_find_entry(entries, config))
    if newer and older and reader.read("rope_parameters", newer) != rope:
        raise ConfigError(
            f"{origin}: rope_scaling={dict(older)!r} contradicts"
            f" rope_parameters={dict(newer)!r}; remove one of them"
        )
    return rope, rope


def _read_nested_ropes(
    reader: "_Reader", newer: Mapping[str, Any], older: Mapping[str, Any]
) -> tuple[Rope, Rope]:
    """Return the positions of both types of layers; `rope_scaling` is that of full attention."""
    if unknown := [
        name
        for name, value in newer.items()
        if name not in (FULL, SLIDING) or not isinstance(value, Mapping | None)
    ]:
        raise ConfigError(
            f"{reader.origin}: rope_parameters={dict(newer)!r}: must contain objects for {FULL} and"
            f" {SLIDING}, got {', '.join(unknown)}"
        )
    full = {**(newer.get(FULL) or {}), **older}
    local_format = replace(
        reader.entries,
        theta=reader.entries.local_theta or reader.entries.theta,
        theta_key=reader.entries.local_theta_key or _THETA,
    )
    # the base outside of rope_parameters is that of full attention
    local_config = {key: value for key, value in reader.config.items() if key != _THETA}
    local_reader = replace(reader, entries=local_format, config=local_config)
    return (
        reader.read(f"rope_parameters.{FULL}", full),
        local_reader.read(f"rope_parameters.{SLIDING}", newer.get(SLIDING) or {}),
    )


def find_unknown_entries(entries: RopeFormat, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of rotary entries that transformers does not know.

    `read_ropes` must have accepted the configuration.
    """
    key, content = _find_entry(entries, config)
    objects = {key: content}
    if entries.local_theta is not None and key == "rope_parameters":
        objects = {f"{key}.{name}": value for name, value in content.items() if value}
    for name, rope in objects.items():
        kind = entries.aliases.get(_get_kind(rope), _get_kind(rope))
        known = (_THETA, _FRACTION, "rope_type", "type", *_REQUIRED[kind])
        known = (*known, *_OPTIONAL.get(kind, ()), *(("truncate",) if kind == "yarn" else ()))
        yield from (f"{name}.{entry}" for entry in rope if entry not in known)


def write_ropes(entries: RopeFormat, full: Rope, sliding: Rope) -> dict[str, Any]:
    """Return the entry `rope_parameters` from which `read_ropes` reads the given positions."""
    if entries.local_theta is None:
        return _write_rope(entries, full)
    return {FULL: _write_rope(entries, full), SLIDING: _write_rope(entries, sliding)}


def _write_rope(entries: RopeFormat, rope: Rope) -> dict[str, Any]:
    result: dict[str, Any] = {"rope_type": "default", _THETA: rope.theta}
    if entries.fraction is not None:
        result[_FRACTION] = rope.fraction
    scaling = rope.scaling
    if scaling is None:
        return result
    result |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn", "longrope"):
        result[_POSITIONS] = scaling.original_positions
    if scaling.kind == "llama3":
        result |= {
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
        }
    elif scaling.kind == "yarn":
        result |= {
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
            "attention_factor": scaling.attention_factor,
        }
        if scaling.mscale_all_dim:
            result["mscale_all_dim"] = scaling.mscale_all_dim
    elif scaling.kind == "longrope":
        factors = list(scaling.short_factors)
        # the factors of longer contexts have no effect
        result |= {_SHORT: factors, _LONG: factors, "attention_factor": scaling.attention_factor}
    return result


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number, and not a boolean."""
    return is_finite_number(value) and math.isfinite(value)


def _find_entry(entries: RopeFormat, config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the name and content of the rotary entry that transformers reads.

    If config.json has neither entry, return the newer name and the default of the architecture.
    """
    if config.get("rope_scaling"):
        return "rope_scaling", config["rope_scaling"]
    content = config.get("rope_parameters")
    return "rope_parameters", entries.default if content is None else content


def _get_kind(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


@dataclass(frozen=True)
class _Reader:
    """Reads one object with rotary entries; the attributes are the arguments of `read_ropes`."""

    entries: RopeFormat
    config: Mapping[str, Any]
    head_dim: int
    max_positions: int
    origin: str

    def read(self, key: str, rope: Mapping[str, Any]) -> Rope:
        """Return the rotary positions that an object describes; `key` is its name."""
        kind = _get_kind(rope)
        if isinstance(kind, str):
            kind = self.entries.aliases.get(kind, kind)
        nested = [name for name, value in rope.items() if isinstance(value, Mapping)]
        if nested:
            raise ConfigError(
                f"{self.origin}: {key} for each type of layer is not supported: {', '.join(nested)}"
            )
        if kind not in self.entries.kinds:
            raise ConfigError(
                f"{self.origin}: rope scaling {kind!r} is not supported; supported:"
                f" {', '.join(self.entries.kinds)}"
            )
        return Rope(
            self._read_number(rope, _THETA, self.entries.theta_key, self.entries.theta),
            self._read_fraction(rope),
            self._read_scaling(key, kind, rope),
            self._read_interleaving(),
        )

    def _read_interleaving(self) -> bool:
        """Return whether the rotated pairs are adjacent dimensions."""
        key = self.entries.interleaved_key
        if key is None:
            return self.entries.is_interleaved
        value = self.config.get(key, self.entries.is_interleaved)
        if not isinstance(value, bool | None):
            raise ConfigError(f"{self.origin}: {key}={value!r}: must be true or false")
        # null is false for transformers, although its default is true
        return bool(value)

    def _read_scaling(self, key: str, kind: str, rope: Mapping[str, Any]) -> RopeScaling | None:
        # original_max_position_embeddings: an entry outside of rope_parameters takes precedence. If
        # there is neither, the model's context was not extended.
        values = {_POSITIONS: self.max_positions, **rope}
        outer = self.config.get(_POSITIONS, self.entries.original_positions)
        if outer is not None or _POSITIONS in self.config:
            values[_POSITIONS] = outer
        if self.entries.scales_scores and kind != "yarn" and rope.get("mscale_all_dim"):
            raise ConfigError(
                f"{self.origin}: {key}: mscale_all_dim={rope['mscale_all_dim']!r} with rope scaling"
                f" {kind!r} is not supported; supported: yarn"
            )
        required = _REQUIRED[kind]
        if missing := [name for name in required if name not in values]:
            raise ConfigError(
                f"{self.origin}: rope scaling {kind}: required entries are missing:"
                f" {', '.join(missing)}"
            )
        optional = [name for name in _OPTIONAL.get(kind, ()) if values.get(name) is not None]
        numbers = [name for name in (*required, *optional) if name not in (_SHORT, _LONG)]
        for name in numbers:
            if not is_number(values[name]) or values[name] <= 0:
                raise ConfigError(
                    f"{self.origin}: {key}: {name}={values[name]!r}: must be a number > 0"
                )

        if kind == "linear":
            return RopeScaling("linear", float(values["factor"]))
        if kind == "dynamic":
            return RopeScaling("dynamic", float(values["factor"]))
        if kind == "llama3":
            low, high = values["low_freq_factor"], values["high_freq_factor"]
            if high <= low:
                raise ConfigError(
                    f"{self.origin}: {key}: high_freq_factor={high!r}: must be above"
                    f" low_freq_factor={low!r}"
                )
            return RopeScaling(
                "llama3",
                float(values["factor"]),
                low_frequency_factor=float(low),
                high_frequency_factor=float(high),
                original_positions=int(values[_POSITIONS]),
            )
        if kind == "longrope":
            return self._read_longrope(key, rope, values)
        return self._read_yarn(key, values) if kind == "yarn" else None

    def _read_longrope(
        self, key: str, rope: Mapping[str, Any], values: Mapping[str, Any]
    ) -> RopeScaling:
        """Return the scaling of LongRoPE within the context of pretraining."""
        pairs = int(self.head_dim * self._read_fraction(rope)) // 2
        for name in (_SHORT, _LONG):
            factors = values[name]
            if (
                not isinstance(factors, list)
                or len(factors) != pairs
                or not all(is_number(factor) and factor > 0 for factor in factors)
            ):
                raise ConfigError(
                    f"{self.origin}: {key}: {name}: must be a list of {pairs} numbers > 0, one for"
                    " each pair of rotated dimensions"
                )
        positions = int(values[_POSITIONS])
        factor = float(values.get("factor") or self.max_positions / positions)
        attention_factor = values.get("attention_factor")
        if attention_factor is None:
            # Ding et al. 2024, "LongRoPE", as in the model code of Phi-3
            attention_factor = (
                1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(positions))
            )
        return RopeScaling(
            "longrope",
            factor,
            original_positions=positions,
            attention_factor=float(attention_factor),
            short_factors=tuple(map(float, values[_SHORT])),
        )

    def _read_yarn(self, key: str, values: Mapping[str, Any]) -> RopeScaling:
        """Return the scaling of YaRN; null and missing entries have transformers' defaults."""
        fast = float(values.get("beta_fast") or 32)
        slow = float(values.get("beta_slow") or 1)
        if fast <= slow:
            raise ConfigError(
                f"{self.origin}: {key}: beta_fast={fast:g}: must be above beta_slow={slow:g}"
            )
        truncate = values.get("truncate", True)
        if not isinstance(truncate, bool):
            raise ConfigError(f"{self.origin}: {key}: truncate={truncate!r}: must be true or false")
        factor = float(values["factor"])
        attention_factor = values.get("attention_factor")
        if attention_factor is None:
            attention_factor = _compute_attention_factor(
                factor, values.get("mscale"), values.get("mscale_all_dim")
            )
        return RopeScaling(
            "yarn",
            factor,
            original_positions=int(values[_POSITIONS]),
            beta_fast=fast,
            beta_slow=slow,
            truncate=truncate,
            attention_factor=float(attention_factor),
            mscale_all_dim=float(
                (values.get("mscale_all_dim") or 0.0) if self.entries.scales_scores else 0.0
            ),
        )

    def _read_number(
        self, rope: Mapping[str, Any], name: str, outer_name: str, default: float
    ) -> float:
        """Return a number above 0.

        Args:
            rope: Content of `rope_parameters` or `rope_scaling`.
            name: Name of the number in `rope`.
            outer_name: Other name of the number in config.json. If the file contains the number
                too, both must be equal.
            default: Value if neither contains the number.
        """
        value = rope.get(name, self.config.get(outer_name, default))
        if not is_number(value) or value <= 0:
            raise ConfigError(f"{self.origin}: {name}={value!r}: must be a number > 0")
        for other in dict.fromkeys((outer_name, name)):
            if self.config.get(other) not in (None, value):
                raise ConfigError(
                    f"{self.origin}: {other}={self.config[other]!r} contradicts {name}={value!r},"
                    " which transformers reads; remove the former"
                )
        return float(value)

    def _read_fraction(self, rope: Mapping[str, Any]) -> float:
        """Return the fraction of a head's dimensions that is rotated."""
        outer_name = self.entries.fraction_key
        if self.entries.fraction is None:
            for value in (rope.get(_FRACTION), self.config.get(outer_name)):
                if value not in (None, 1.0):
                    raise ConfigError(
                        f"{self.origin}: {_FRACTION}={value!r} is not supported; supported: 1.0"
                    )
            fraction = 1.0
        else:
            size_fraction = self._read_size_fraction()
            default = self.entries.fraction if size_fraction is None else size_fraction
            fraction = self._read_number(rope, _FRACTION, outer_name, default)
            key = self.entries.size_key
            if key is not None and size_fraction not in (None, fraction):
                raise ConfigError(
                    f"{self.origin}: {key}={self.config[key]!r} with head_dim={self.head_dim}"
                    f" contradicts {_FRACTION}={fraction:g}, which transformers reads; remove the"
                    " former"
                )
        rotated = int(self.head_dim * fraction)
        if fraction > 1 or rotated < 1:
            raise ConfigError(
                f"{self.origin}: {_FRACTION}={fraction:g} with head_dim={self.head_dim}: must"
                f" rotate at least 1 and at most {self.head_dim} dimensions"
            )
        # Dimensions are rotated in pairs. An odd number is rounded up, which exceeds an odd head
        # size.
        if self.head_dim % 2 and rotated == self.head_dim:
            raise ConfigError(
                f"{self.origin}: head_dim={self.head_dim}: must be even, because all dimensions are"
                " rotated in pairs"
            )
        return fraction

    def _read_size_fraction(self) -> float | None:
        """Return the fraction that follows from the number of rotated dimensions, if given."""
        key = self.entries.size_key
        size = None if key is None else self.config.get(key)
        if size is None:
            return None
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"{self.origin}: {key}={size!r}: must be an integer > 0")
        return size / self.head_dim


def _compute_attention_factor(
    factor: float, mscale: float | None, mscale_all_dim: float | None
) -> float:
    """Return YaRN's factor of queries and keys (Peng et al. 2023, "YaRN", section 3.4).

    `mscale` and `mscale_all_dim` are entries of DeepSeek-V2's configurations.
    """
    if mscale and mscale_all_dim:
        return compute_mscale(factor, mscale) / compute_mscale(factor, mscale_all_dim)
    return compute_mscale(factor, 1.0)
