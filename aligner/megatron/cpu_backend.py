"""Patches that let megatron-core run on machines without CUDA, over gloo.

With CUDA, `install` does nothing. megatron-core is written for CUDA, but nothing in its layers,
schedules or optimizers needs a GPU; only its names of devices, streams and tensor types, and its
compiled kernels, prevent it from running on CPUs. All patches of the project are in this file, each
with its reason. They fit the releases 0.16 to 0.19; other differences between these releases are in
`core_releases`.
"""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from aligner.megatron.l2_norm import multi_tensor_l2_norm


class _NoOpStream:
    """CUDA stream or event without effect: a CPU executes all operations in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, _: str) -> "Callable[..., _NoOpStream]":
        # Every method returns such an object, since recording an event on a stream returns the
        # event.
        return lambda *args, **kwargs: _NoOpStream()


class _TorchWithoutCudaLiterals:
    """Replacement of `torch` in modules that pass device="cuda" to tensor factories.

    The factories create CPU tensors instead.
    """

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(torch, name)
        if name not in ("zeros", "ones", "empty", "tensor", "full"):
            return attribute

        def factory(*args: Any, **kwargs: Any) -> Tensor:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return attribute(*args, **kwargs)

        return factory


def _with_cuda_type_names(tensor_type: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of `Tensor.type` that names CUDA tensor types for CPU tensors.

    megatron-core compares these names. Conversions with `Tensor.type(dtype)` are unchanged.
    """
    names = {
        torch.float32: "FloatTensor",
        torch.float16: "HalfTensor",
        torch.bfloat16: "BFloat16Tensor",
    }

    def type_(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or self.dtype not in names:
            return tensor_type(self, *args, **kwargs)
        return f"torch.cuda.{names[self.dtype]}"

    return type_


def _convert_split_sizes(value: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Convert split sizes like megatron-core's maybe_move_tensor_to_cpu, without moving them."""
    return value.numpy() if as_numpy and isinstance(value, Tensor) else value


def _gather_unequal_parts(gather_equal_parts: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return megatron-core's all-gather along the first dimension, extended to unequal parts.

    Unequal parts are padded to the longest.
    """

    def gather(
        part: Tensor, group: dist.ProcessGroup, sizes: list[int] | None = None, *args: Any
    ) -> Tensor:
        """Gather parts whose first dimensions differ in size; see `gather_equal_parts`."""
        if sizes is None or len(set(sizes)) == 1:
            return gather_equal_parts(part, group, sizes, *args)
        padded = torch.cat([part, part.new_zeros(max(sizes) - len(part), *part.shape[1:])])
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded, group=group)
        return torch.cat([whole[:size] for whole, size in zip(gathered, sizes, strict=True)])

    return gather


def _reduce_scatter_unequal_parts(
    reduce_scatter_equal_parts: Callable[..., Tensor],
) -> Callable[..., Tensor]:
    """Return megatron-core's reduce-scatter along the first dimension, extended to unequal parts.

    For unequal parts, every rank all-reduces the whole tensor and returns its own part.
    """

    def reduce_scatter(
        whole: Tensor, group: dist.ProcessGroup, sizes: list[int] | None = None, *args: Any
    ) -> Tensor:
        if sizes is None or len(set(sizes)) == 1:
            return reduce_scatter_equal_parts(whole, group, sizes, *args)
        total = whole.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total.split(sizes)[group.rank()]

    return reduce_scatter


# The next four functions replace megatron-core's fused element-wise functions, which it compiles
# for GPUs and calls while autograd does not record. They work in place where possible, since
# allocating memory is their main cost on a CPU. Each has the name and the signature of the
# original.


def swiglu(y: Tensor) -> Tensor:
    """Return silu(gate) * up (Shazeer 2020).

    Args:
        y: Gates in the first half of the last dimension, up projections in the second, [..., 2F].

    Returns:
        [..., F], in the dtype of `y`.
    """
    gate, up = y.chunk(2, -1)
    return F.silu(gate).mul_(up)


def swiglu_back(g: Tensor, y: Tensor) -> Tensor:
    """Return the gradient [..., 2F] of the input of `swiglu`.

    Args:
        g: Gradient of the output, [..., F].
        y: Input of `swiglu`, [..., 2F].
    """
    gate, up = y.chunk(2, -1)
    gradient = torch.empty_like(y)
    for_gate, for_up = gradient.chunk(2, -1)
    torch.mul(g, up, out=for_gate)
    torch.ops.aten.silu_backward.grad_input(for_gate, gate, grad_input=for_gate)
    torch.ops.aten.silu.out(gate, out=for_up).mul_(g)
    return gradient


def weighted_swiglu(y: Tensor, weights: Tensor) -> Tensor:
    """Return `swiglu` of each token times the token's weight, [..., F] in the dtype of `y`.

    Args:
        y: Input of `swiglu`, [..., 2F].
        weights: Weight of each token, [..., 1].
    """
    return (swiglu(y) * weights).to(y.dtype)


def weighted_swiglu_back(g: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `weighted_swiglu` for y [..., 2F] and for the weights [..., 1].

    Args:
        g: Gradient of the output, [..., F].
        y: Input of `swiglu`, [..., 2F].
        weights: Weight of each token, [..., 1].
    """
    for_weights = (swiglu(y) * g.to(weights.dtype)).sum(-1, keepdim=True)
    return swiglu_back((g * weights).to(y.dtype), y), for_weights.to(weights.dtype)


# Gradient buffers. The gradient of a linear layer's weight is computed directly into DDP's fp32
# buffer (`main_grad`). The first GEMM of an update overwrites the buffer, so a reset need not write
# zeros. The reset marks the buffer as blank instead: its contents are undefined and count as zero,
# and its attribute `is_blank` is true.


def accumulate_matmul(total: Any, left: Tensor, right: Tensor) -> Tensor:
    """Add left @ right to a gradient buffer in place, and return the buffer.

    If the buffer is blank, the product overwrites its contents.

    Args:
        total: Gradient buffer, float32 [m, n].
        left: [m, k].
        right: [k, n], in the dtype of `left`.
    """
    is_blank = getattr(total, "is_blank", False)
    total.is_blank = False
    # `reset_gradient_buffer` leaves buffers with this attribute blank.
    total.is_written_by_matmul = True
    gradient: Tensor = total
    if left.dtype != torch.float32:
        return gradient.copy_(left @ right) if is_blank else gradient.add_(left @ right)
    return torch.mm(left, right, out=gradient) if is_blank else gradient.addmm_(left, right)


def mark_gradient_accumulated(weight: Any) -> Tensor | None:
    """Return the gradient that autograd receives for a weight whose gradient buffer is already
    filled.

    The result is None, unless DDP reduces gradients during the backward pass
    (`optimizer.overlap_grad_reduce`). DDP's hook then waits for a gradient of each weight, but
    ignores its contents, which are undefined. If a weight is both embedding and head, the returned
    gradient is zero, because it is added to the weight's other gradient.
    """
    if not getattr(weight, "is_reduced_early", False):
        return None
    weight.grad_added_to_main_grad = True
    return (torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like)(
        weight
    )


def reset_gradient_buffer(buffer: Any) -> None:
    """Reset the gradients of a DDP buffer; this replaces megatron-core's method `reset`.

    Gradients that GEMMs write become blank, all others zero.
    """
    for parameter in buffer.params:
        total = parameter.main_grad
        total.is_blank = getattr(total, "is_written_by_matmul", False)
        if not total.is_blank:
            total.zero_()


def _zero_if_blank(total: Any) -> None:
    """Write zeros to a gradient buffer if it is blank."""
    if getattr(total, "is_blank", False):
        total.zero_()
        total.is_blank = False


def _zero_blanks_before(start: Callable[..., None]) -> Callable[..., None]:
    """Return a bucket group's `start_grad_sync` that first writes zeros to blank gradients.

    A gradient stays blank if no GEMM has written it, for example the gradient of an expert without
    tokens.
    """

    def start_grad_sync(group: Any, *args: Any, **kwargs: Any) -> None:
        for parameter in group.params:
            _zero_if_blank(parameter.main_grad)
        start(group, *args, **kwargs)

    return start_grad_sync


class GradientAccumulation:
    """Replacement of apex's kernels for fused gradient accumulation, for fp32 buffers only."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Tensor, for_outputs: Tensor, total: Tensor) -> None:
        """Add a linear layer's weight gradient, for_outputs^T inputs, to its gradient buffer.

        Args:
            inputs: Inputs of the layer, [T, in].
            for_outputs: Gradients of its outputs, [T, out].
            total: Gradient buffer, float32 [out, in].
        """
        accumulate_matmul(total, for_outputs.t(), inputs)


class _Embedding(Function):
    """Embedding lookup that adds its gradient to the weight's gradient buffer, row by row.

    A separate gradient tensor would be as large as the whole embedding.
    """

    @staticmethod
    def forward(context: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        """Return the rows of `weight` [V, H] for `tokens`, int64 [...]: [..., H]."""
        context.tokens = tokens  # type: ignore[attr-defined]
        context.weight = weight  # type: ignore[attr-defined]
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(context: Any, for_rows: Tensor) -> tuple[None, Tensor | None]:
        """Add the gradients of the rows, [..., H], to the gradient buffer [V, H]."""
        total = context.weight.main_grad
        _zero_if_blank(total)
        total.index_add_(
            0, context.tokens.flatten(), for_rows.reshape(-1, total.shape[1]).to(total.dtype)
        )
        return None, mark_gradient_accumulated(context.weight)


class _LayerFunctions:
    """Replacement of `torch.nn.functional` in megatron-core's layers, with our embedding lookup."""

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)

    @staticmethod
    def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
        """Return the rows of `weight` [V, H] for `tokens`, int64 [...]: [..., H]."""
        has_buffer = (
            weight.requires_grad and hasattr(weight, "main_grad") and torch.is_grad_enabled()
        )
        return _Embedding.apply(tokens, weight) if has_buffer else F.embedding(tokens, weight)  # type: ignore[no-untyped-call]


def remove_compiler_from_optimizers() -> None:
    """Make torch's optimizers run without importing torch's compiler.

    The optimizers import the compiler at their first call, even if nothing is compiled, to mark
    functions that must not be compiled. The import takes 0.7 s of processor time and 70 MiB in each
    process.
    """
    optimizer: Any = torch.optim.Optimizer
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        setattr(optimizer, name, inspect.unwrap(getattr(optimizer, name)))

    # AdamW inherits `step` from Adam.
    adam: Any = torch.optim.Adam
    eager_step = inspect.unwrap(adam.step)

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; see torch.optim.Adam.step."""
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return eager_step(self, closure)

    adam.step = step


def install() -> None:
    """Patch megatron-core for the CPU.

    Call it before a model is built. Further calls, and calls on a machine with CUDA, have no
    effect.
    """
    if torch.cuda.is_available() or getattr(torch.cuda.current_device, "answers_cpu", False):
        return

    # megatron-core allocates buffers on torch.cuda.current_device(): return the CPU.
    def current_device() -> torch.device:
        return torch.device("cpu")

    current_device.answers_cpu = True  # type: ignore[attr-defined]
    cuda: Any = torch.cuda
    cuda.current_device = current_device
    tensor_class: Any = Tensor
    tensor_class.cuda = lambda self, *args, **kwargs: self

    # Streams, events and synchronization order the work of a GPU; a CPU needs none of them.
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.Stream = cuda.Event = _NoOpStream
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _NoOpStream()
    cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()

    # megatron-core's tracker of model-parallel random states saves and restores CUDA's generator.
    # Use the CPU's generator instead.
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    # `torch.manual_seed` would also record a stack trace for the absent devices, which takes 6 ms.
    cuda.manual_seed = torch.default_generator.manual_seed
    from megatron.core.tensor_parallel import random as tensor_parallel_random

    tensor_parallel_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    tensor_parallel_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(
        state
    )

    # These modules pass device="cuda" to tensor factories.
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.pipeline_parallel import schedules

    for module in (schedules, clip_grads, optimizer, utils):
        module.torch = _TorchWithoutCudaLiterals()

    # megatron-core's fallback for the gradient norm of transformer-engine and apex is inaccurate
    # for large tensors.
    clip_grads.l2_norm_impl = multi_tensor_l2_norm

    # The token dispatcher converts split sizes to lists only while it copies them from a GPU, but
    # the all-to-all accepts no tensors.
    from megatron.core.transformer.moe import token_dispatcher

    token_dispatcher.maybe_move_tensor_to_cpu = _convert_split_sizes

    # gloo's all-gather and reduce-scatter support equal parts only, but the tensor ranks of an
    # expert receive different numbers of tokens.
    from megatron.core.tensor_parallel import layers, mappings

    mappings._gather_along_first_dim = _gather_unequal_parts(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _reduce_scatter_unequal_parts(
        mappings._reduce_scatter_along_first_dim
    )
    _patch_gradient_buffers(layers)

    # Optimizers and gradient clipping distinguish fp32 from 16-bit parameters by the names of CUDA
    # tensor types.
    tensor_class.type = _with_cuda_type_names(Tensor.type)

    remove_compiler_from_optimizers()

    # megatron-core's versions are compiled for GPUs, or allocate a tensor for every temporary.
    from megatron.core.fusions import fused_bias_swiglu

    for function in (swiglu, swiglu_back, weighted_swiglu, weighted_swiglu_back):
        setattr(fused_bias_swiglu, function.__name__, function)


def _patch_gradient_buffers(layers: Any) -> None:
    """Make backward passes add the gradients of weights directly to DDP's gradient buffers.

    A separate gradient tensor would be written, read and added: three times the memory traffic.
    """
    from megatron.core.distributed import param_and_grad_buffer

    param_and_grad_buffer._ParamAndGradBuffer.reset = reset_gradient_buffer
    group = param_and_grad_buffer._ParamAndGradBucketGroup
    group.start_grad_sync = _zero_blanks_before(group.start_grad_sync)
    layers.fused_weight_gradient_mlp_cuda = GradientAccumulation
    layers._grad_accum_fusion_available = True
    layers.F = _LayerFunctions()
