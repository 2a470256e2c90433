"""Build the generation engine that `engine.kind` selects.

The modules of an engine are imported only when that engine is built.
"""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from aligner.checks.engine import (
    find_engine_kind_problems,
    find_engine_machine_problems,
    find_refused_arguments,
)
from aligner.engines.engine_protocol import GenerationEngine, SpanListener
from aligner.errors import ConfigError
from aligner.models.shape import ModelShape
from aligner.schema import EngineConfig
from aligner.user_code import import_object
from aligner.values import split_callable_name

# Number of parameters of an engine class that `build_engine` passes itself.
_PASSED_PARAMETERS = 8


def build_engine(
    shape: ModelShape,
    settings: EngineConfig,
    directory: Path,
    *,
    rank: int = 0,
    seed: int,
    group: ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    shared_parameters: Mapping[str, Tensor] | None = None,
    max_sequence_length: int | None = None,
    listener: SpanListener | None = None,
) -> GenerationEngine:
    """Return this rank's part of an engine of kind `settings.kind`, without weights.

    Args:
        shape: Dimensions of the model.
        settings: Section `engine` of the configuration.
        directory: Hugging Face directory of the model; only its configuration is read, and its
            tokenizer for stop strings.
        rank: Rank of this process in the engine.
        seed: Seed of the random streams.
        group: Ranks of this rank's replica, in order; None if the replica has one rank.
        device: Device of this rank.
        shared_parameters: Parameters of the trainer that the embedded engine uses instead of
            copies.
        max_sequence_length: Maximum sequence length in tokens for which vLLM or TensorRT-LLM
            reserves memory; None: the model's maximum.
        listener: The embedded engine calls it with `prefill` after each forward pass that prefills
            prompts.

    Raises:
        ConfigError: The engine does not support this model, or cannot run on this machine.
    """
    if problems := [
        *find_engine_kind_problems(settings, shape),
        *find_engine_machine_problems(settings),
        *find_refused_arguments(settings, on_gpus=torch.device(device).type == "cuda"),
    ]:
        raise ConfigError("\n".join(problems))

    if settings.kind == "embedded":
        from aligner.engines.embedded.embedded_engine import EmbeddedEngine

        return EmbeddedEngine(
            shape, settings, rank, seed, group, device, shared_parameters, listener, directory
        )
    is_own = split_callable_name(settings.kind) is not None
    engine: GenerationEngine = _import_engine_class(settings)(
        directory,
        shape,
        settings,
        rank,
        seed,
        group,
        device=device,
        max_sequence_length=max_sequence_length,
        **(settings.arguments if is_own else {}),
    )
    return engine


def _import_engine_class(settings: EngineConfig) -> Any:
    """Return the class of an engine other than the embedded one."""
    # Imported here, because each engine needs packages that may be missing for the others.
    if settings.kind == "tensorrt_llm":
        from aligner.engines.tensorrt_llm.tensorrt_llm_engine import TensorRTLLMEngine

        return TensorRTLLMEngine
    if settings.kind == "vllm":
        from aligner.engines.vllm.vllm_engine import VLLMEngine

        return VLLMEngine
    location = split_callable_name(settings.kind)
    assert location is not None, "the schema allows no other kinds"
    return _import_own_engine_class(settings, *location)


def _import_own_engine_class(settings: EngineConfig, module: str, name: str) -> Any:
    """Return the user's engine class. Raise ConfigError if it is not a suitable class."""
    key = f"engine.kind={settings.kind}"
    engine_class = import_object(module, name)
    if not (isinstance(engine_class, type) and issubclass(engine_class, GenerationEngine)):
        raise ConfigError(
            f"{key}: is not a subclass of aligner.engines.engine_protocol.GenerationEngine"
        )
    # Abstract methods that are missing, and arguments that the class does not have, are reported
    # with their names.
    if missing := sorted(engine_class.__abstractmethods__):
        raise ConfigError(f"{key}: does not define {', '.join(missing)}")
    can_verify = any(
        getattr(engine_class, name) is not getattr(GenerationEngine, name)
        for name in ("held_weights", "find_wrong_weights")
    )
    if settings.verify != "never" and not can_verify:
        raise ConfigError(
            f"{key}: does not define held_weights, which engine.verify={settings.verify} requires;"
            " return the engine's parameters by their Hugging Face names, or set"
            " engine.verify=never"
        )
    parameters = inspect.signature(engine_class).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    for argument in settings.arguments:
        if argument not in parameters and not takes_all:
            allowed = ", ".join(list(parameters)[_PASSED_PARAMETERS:]) or "none"
            raise ConfigError(
                f"engine.arguments.{argument}: {name} has no such argument; allowed: {allowed}"
            )
    return engine_class
