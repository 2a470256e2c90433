"""How engines take their weights; known where there is no engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aligner.schema import EngineConfig, EngineParallelConfig


@dataclass(frozen=True)
class WeightFormat:
    """What a `GenerationEngine` says of its weights."""

    layout: EngineParallelConfig
    """To publish to, over the engine's ranks."""
    dtype: torch.dtype
    group_bytes: int | None
    """Most bytes of tensors that an update takes at a time; None: all its views exist at once."""


def weight_format(settings: EngineConfig, device: torch.device | str) -> WeightFormat:
    """What the engine of these settings, on such devices, will say."""
    layout = settings.parallel
    if settings.kind == "tensorrt_llm":  # it takes whole tensors on every GPU, and cuts its share out of them
        return WeightFormat(EngineParallelConfig(tensor=1, data=layout.ranks), torch.bfloat16, settings.bucket_mib << 20)
    return WeightFormat(layout, weight_dtype(settings.precision, torch.device(device)), None)


def weight_dtype(precision: str, device: torch.device) -> torch.dtype:
    """What the embedded engine's weights are at a precision, on a device."""
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
