"""Whether the engine that is asked for can run a model, and whether it can run on this machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from aligner.config.devices import has_gpu
from aligner.config.model_shape import ModelShape
from aligner.config.schema import Engine

TENSORRT_LLM_FAMILIES = ("llama", "mixtral", "qwen3_moe")
_ELSE = "use engine=embedded"


def cache_bytes_per_token(shape: ModelShape, tensor: int, itemsize: int) -> int:
    """Memory of one token's keys and values on one of `tensor` tensor-parallel ranks, at so many bytes a number."""
    return 2 * shape.num_layers * (shape.num_kv_heads // tensor) * shape.head_dim * itemsize


def engine_kind_problems(engine: Engine, shape: ModelShape) -> Iterator[str]:
    """One line for each thing that keeps the engine from running this model, wherever it runs."""
    if engine.kind != "tensorrt_llm":
        return
    prefix = "engine.kind=tensorrt_llm"
    if shape.family not in TENSORRT_LLM_FAMILIES:
        yield (
            f"{prefix}: it does not run models of the {shape.family} kind, it does: {', '.join(TENSORRT_LLM_FAMILIES)}"
            f" (Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE); {_ELSE}"
        )
    if engine.precision == "fp32":
        yield f"engine.precision=fp32: TensorRT-LLM computes in bf16; allowed: auto, bf16; {_ELSE}"
    if engine.update != "in_place":
        yield f"engine.update={engine.update}: TensorRT-LLM overwrites its weights; allowed: in_place"


def engine_machine_problems(engine: Engine) -> Iterator[str]:
    """One line for each thing that keeps the engine from running on this machine; nothing is imported for it."""
    if engine.kind != "tensorrt_llm":
        return
    prefix = "engine.kind=tensorrt_llm"
    missing = [package for package in ("tensorrt_llm", "ray") if importlib.util.find_spec(package) is None]
    if missing:
        yield (
            f"{prefix}: {' and '.join(missing)} cannot be imported; run in a TensorRT-LLM release image with ray installed"
            f" (docs/tensorrt_llm.md), or {_ELSE}"
        )
    if not has_gpu():
        yield f"{prefix}: this machine has no GPU; {_ELSE}"
