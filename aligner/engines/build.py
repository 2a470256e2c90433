"""The engine that a configuration asks for, and what draws episodes by it."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from aligner.checks.engine import engine_kind_problems, engine_machine_problems
from aligner.engines.engine_protocol import GenerationEngine, SpanListener
from aligner.errors import ConfigError
from aligner.models.shape import ModelShape
from aligner.schema import EngineConfig

if TYPE_CHECKING:
    pass


def build_engine(
    shape: ModelShape,
    settings: EngineConfig,
    directory: Path,
    *,
    rank: int = 0,
    seed: int,
    group: ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    shared: Mapping[str, Tensor] | None = None,
    context: int | None = None,
    listener: SpanListener | None = None,
) -> GenerationEngine:
    """Rank `rank` of an engine of `settings.kind`, still without weights.

    `directory` is a Hugging Face directory of the model, of which only the configuration is read;
    `group` holds the ranks of this rank's replica, in order (None when it is the only one).
    `shared` are the trainer's parameters that the embedded engine may use as its own; `context` is
    the longest sequence that TensorRT-LLM or vLLM is to be ready for, the model's if None. The
    embedded engine tells `listener` of every pass that runs prompts, as "prefill". Raises
    ConfigError when the engine can not run this model, here.
    """
    if problems := [*engine_kind_problems(settings, shape), *engine_machine_problems(settings)]:
        raise ConfigError("\n".join(problems))
    if settings.kind == "tensorrt_llm":
        from aligner.engines.tensorrt_llm.tensorrt_llm_engine import TensorRTLLMEngine

        return TensorRTLLMEngine(
            directory, shape, settings, rank, seed, group, device=device, context=context
        )
    if settings.kind == "vllm":
        from aligner.engines.vllm.vllm_engine import VLLMEngine

        return VLLMEngine(
            directory, shape, settings, rank, seed, group, device=device, context=context
        )
    from aligner.engines.embedded.embedded_engine import EmbeddedEngine

    return EmbeddedEngine(shape, settings, rank, seed, group, device, shared, listener)
