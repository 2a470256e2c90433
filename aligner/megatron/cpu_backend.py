"""Lets megatron-core run on a machine without CUDA, over gloo. Does nothing where CUDA is present.

megatron-core 0.16 is written for CUDA, but nothing in its layers, schedules or optimizer needs a GPU: what stands in the
way is the spelling of devices, streams and tensor type names. Every redirection of the project is in this file, each with
its reason, so that a new megatron-core release is one file to check.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


class _Inert:
    """Stands for a CUDA stream or event: there is one queue on a CPU, so ordering is given."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


@contextlib.contextmanager
def _inert_context(*_: Any, **__: Any) -> Iterator[None]:
    yield


class _TorchWithoutCudaLiterals:
    """`torch` as seen by a module that writes device="cuda": its tensor factories make CPU tensors instead."""

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(torch, name)
        if name not in ("zeros", "ones", "empty", "tensor", "full"):
            return attribute

        def factory(*args: Any, **kwargs: Any) -> Tensor:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return attribute(*args, **kwargs)

        return factory


def _clip_by_total_norm(
    parameters: Iterable[Tensor] | Tensor, max_norm: float, total_norm: float, use_decoupled_grad: bool = False
) -> None:
    """megatron-core's clip_grad_by_total_norm_fp32 without its assertion on the CUDA tensor type name."""
    if use_decoupled_grad:
        raise NotImplementedError("decoupled gradients belong to precision-aware optimizers, which need a GPU")
    chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [parameter.grad for parameter in chosen if parameter.grad is not None]
    coefficient = max_norm / (total_norm + 1.0e-6)
    if coefficient < 1.0 and gradients:
        torch._foreach_mul_(gradients, coefficient)


def install() -> None:
    """Redirect megatron-core to the CPU; call before a model is built. Harmless to call again."""
    if torch.cuda.is_available() or getattr(torch.cuda.current_device, "answers_cpu", False):
        return

    # Buffers are allocated on torch.cuda.current_device(): let the answer be the CPU.
    def current_device() -> torch.device:
        return torch.device("cpu")

    current_device.answers_cpu = True  # type: ignore[attr-defined]
    cuda: Any = torch.cuda
    cuda.current_device = current_device
    tensor_class: Any = Tensor
    tensor_class.cuda = lambda self, *args, **kwargs: self

    # Streams, events and synchronization order GPU work: nothing to order here.
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.Stream = cuda.Event = _Inert
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _Inert()
    cuda.stream = _inert_context

    # The model-parallel random state tracker saves and restores the CUDA generator: give it the CPU's.
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.manual_seed = torch.manual_seed
    from megatron.core.tensor_parallel import random as tensor_parallel_random

    tensor_parallel_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    tensor_parallel_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    # Modules that spell device="cuda" in tensor factories.
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.pipeline_parallel import schedules

    for module in (schedules, clip_grads, optimizer, utils):
        module.torch = _TorchWithoutCudaLiterals()

    # The clipping function compares type names with 'torch.cuda.FloatTensor'.
    optimizer.clip_grad_by_total_norm_fp32 = _clip_by_total_norm
