"""What the installed TensorRT-LLM knows, found out from its signatures: it refuses keywords that it does not know."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

from aligner.engines.tensorrt_llm.contract import KV_CACHE
from aligner.errors import AlignerError

_MEMORY_TYPES = ("tensorrt_llm.llmapi.llm_args", "tensorrt_llm._torch.virtual_memory")
"""Where releases keep `ExecutorMemoryType`, newer ones first."""


def load_package() -> ModuleType:
    """TensorRT-LLM. Raises AlignerError where it is not installed, or has no `AsyncLLM`."""
    try:
        package = importlib.import_module("tensorrt_llm")
    except ImportError as error:
        raise AlignerError(
            f"engine.kind=tensorrt_llm: TensorRT-LLM cannot be imported ({error}); run in a TensorRT-LLM release image, see"
            " docs/tensorrt_llm.md"
        ) from error
    if not hasattr(package, "AsyncLLM"):
        raise AlignerError(
            f"engine.kind=tensorrt_llm: TensorRT-LLM {getattr(package, '__version__', '')} has no AsyncLLM; 1.2 is the first"
            " release that has"
        )
    return package


def find(path: str) -> Any:
    """The object at a dotted path: attributes of the longest prefix that is a module. None where there is none."""
    names = path.split(".")
    for end in range(len(names), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(names[:end]))
        except ImportError:
            continue
        for name in names[end:]:
            found = getattr(found, name, None)
        return found
    return None


def keywords(call: Any, fields: Any = None) -> Mapping[str, Any]:
    """The keywords that a class or function takes, with their defaults (`inspect.Parameter.empty`: none).

    The fields of a pydantic model count, its own and those of `fields`, the model that **kwargs are checked with.
    """
    several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    found = {
        name: parameter.default
        for name, parameter in inspect.signature(call).parameters.items()
        if parameter.kind not in several and name != "self"
    }
    for model in (call, fields):
        for name, field in getattr(model, "model_fields", {}).items():
            required = getattr(field, "is_required", bool)()
            found[name] = inspect.Parameter.empty if required else field.default
    return found


def known(what: str, arguments: Mapping[str, Any], accepted: Collection[str], *, optional: Collection[str]) -> dict[str, Any]:
    """The arguments that are accepted. Raises AlignerError naming those that are not, unless they are `optional`."""
    missing = [name for name in arguments if name not in accepted and name not in optional]
    if missing:
        raise AlignerError(f"this release's {what} has no {', '.join(missing)}; see docs/tensorrt_llm.md for those that fit")
    return {name: value for name, value in arguments.items() if name in accepted}


def llm_keywords() -> frozenset[str]:
    """What `AsyncLLM` accepts; `backend` is, although it is no field."""
    fields = find("tensorrt_llm.llmapi.llm_args.TorchLlmArgs")
    return frozenset(keywords(find("tensorrt_llm.AsyncLLM"), fields)) | {"backend"}


def sleep_arguments(accepted: Collection[str]) -> dict[str, Any]:
    """What lets this release give memory back. Raises AlignerError where nothing does."""
    if "sleep_config" in accepted:
        return {"sleep_config": find("tensorrt_llm.llmapi.llm_args.SleepConfig")()}
    if "enable_sleep" in accepted:
        return {"enable_sleep": True}
    raise AlignerError("engine.sleep=true: this release of TensorRT-LLM can not give memory back; set engine.sleep=false")


def memory_tags() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What memory is released by: the tags of the model and the executor, and those of keys and values."""
    kinds = next((kinds for path in _MEMORY_TYPES if (kinds := find(f"{path}.ExecutorMemoryType"))), None)
    if kinds is None:
        raise AlignerError("engine.sleep=true: this release of TensorRT-LLM names no kinds of memory; set engine.sleep=false")
    tags = [kind.value for kind in kinds if not kind.value.startswith("_")]
    return tuple(tag for tag in tags if tag != KV_CACHE), tuple(tag for tag in tags if tag == KV_CACHE)
