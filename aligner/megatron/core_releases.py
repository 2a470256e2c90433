"""Differences between the supported releases of megatron-core, 0.16 to 0.19."""

from dataclasses import replace
from functools import partial
from typing import Any


def get_submodules(spec: Any) -> Any:
    """Return the parts of a module in a layer spec, which the caller may replace.

    The spec is a ModuleSpec in release 0.16. It is a `functools.partial` with the argument
    `submodules` for experts since release 0.17, and for all feed-forward networks since 0.18.
    """
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def replace_module(spec: Any, module: type) -> Any:
    """Return a spec of another class with the parts of `spec`; see `get_submodules`."""
    if isinstance(spec, partial):
        return partial(module, *spec.args, **spec.keywords)
    return replace(spec, module=module)
