"""Kinds of parts of models, and of layouts, whose pairs the slow round of tests must cover."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from aligner.models.shape import ModelShape


def describe_parts(shape: ModelShape) -> frozenset[str]:
    """Return the kinds of parts of a model, such as `qk_norm=head` and `experts.groups`.

    Sizes are ignored, and so are attributes with the default of the shape: the simplest model has
    multi-head attention, and a gated network between two norms.
    """
    parts = set(_describe_attributes(shape, ("layers", "family")))
    for layer in shape.layers:
        parts |= set(_describe_attributes(layer))
        if layer.has_attention and layer.rope is None:
            parts.add("no rope")
    if shape.experts is not None and any(layer.is_dense for layer in shape.layers):
        parts.add("dense layers among experts")
    if shape.has_query_latent:
        parts.add("query latent")
    if shape.num_kv_heads < shape.num_heads:
        parts.add("one KV head" if shape.num_kv_heads == 1 else "groups of query heads")
    elif shape.latent_attention is None:
        parts.add("as many KV heads as query heads")
    return frozenset(parts)


def _describe_attributes(part: Any, ignored: Iterable[str] = ()) -> Iterator[str]:
    """Yield the attributes of a part of a shape that differ from their defaults."""
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        has_default = field.default is not dataclasses.MISSING
        if field.name in ignored or (has_default and value == field.default):
            continue
        if dataclasses.is_dataclass(value):
            yield field.name
            yield from (f"{field.name}.{name}" for name in _describe_attributes(value))
        elif isinstance(value, str | bool | None):
            yield f"{field.name}={value}"
        elif has_default:
            yield field.name


def describe_layout(layout: Mapping[str, Any]) -> frozenset[str]:
    """Return the dimensions of a layout, which has keys of `actor.parallel`, with their sizes."""
    dimensions = (key if key == "stage_layers" else f"{key}={layout[key]}" for key in layout)
    return frozenset(dimensions) or frozenset({"one rank"})


def pair(dimensions: Iterable[str], parts: Iterable[str]) -> frozenset[str]:
    """Return the pairs of a dimension and a part."""
    parts = list(parts)
    return frozenset(f"{part} at {dimension}" for dimension in dimensions for part in parts)
