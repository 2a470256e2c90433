"""Lets megatron-core run on a machine without CUDA, over gloo. Does nothing where CUDA is present.

megatron-core 0.16 is written for CUDA, but nothing in its layers, schedules or optimizer needs a
GPU: what stands in the way is the spelling of devices, streams and tensor type names. Every
redirection of the project is in this file, each with its reason, so that a new megatron-core
release is one file to check.
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


class _Inert:
    """Stands for a CUDA stream or event: there is one queue on a CPU, so ordering is given."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, _: str) -> "Callable[..., _Inert]":
        # Recording an event on a stream gives the event, which is waited for later.
        return lambda *args, **kwargs: _Inert()


class _TorchWithoutCudaLiterals:
    """`torch` as seen by a module that writes device="cuda": its tensor factories make CPU tensors
    instead."""

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(torch, name)
        if name not in ("zeros", "ones", "empty", "tensor", "full"):
            return attribute

        def factory(*args: Any, **kwargs: Any) -> Tensor:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return attribute(*args, **kwargs)

        return factory


def _cuda_type_name(tensor_type: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type`, whose answer (not its conversion) names CPU tensors as megatron-core expects
    them: CUDA's."""
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


def _split_sizes(value: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """megatron-core's maybe_move_tensor_to_cpu, for what is there already."""
    return value.numpy() if as_numpy and isinstance(value, Tensor) else value


def _gather_parts(equal: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """megatron-core's all-gather along the first dimension, of unequal parts too: padded to the
    longest."""

    def gather(
        part: Tensor, group: dist.ProcessGroup, sizes: list[int] | None = None, *more: Any
    ) -> Tensor:
        if sizes is None or len(set(sizes)) == 1:
            return equal(part, group, sizes, *more)
        padded = torch.cat([part, part.new_zeros(max(sizes) - len(part), *part.shape[1:])])
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded, group=group)
        return torch.cat([whole[:size] for whole, size in zip(gathered, sizes, strict=True)])

    return gather


def _reduce_scatter_parts(equal: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """megatron-core's reduce-scatter along the first dimension, into unequal parts too: all are
    reduced, one is kept."""

    def reduce_scatter(
        whole: Tensor, group: dist.ProcessGroup, sizes: list[int] | None = None, *more: Any
    ) -> Tensor:
        if sizes is None or len(set(sizes)) == 1:
            return equal(whole, group, sizes, *more)
        total = whole.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total.split(sizes)[group.rank()]

    return reduce_scatter


# megatron-core's fused element-wise functions, called where autograd does not record: in place
# where they can be, since fresh memory is what costs on a CPU. Each keeps the name and signature of
# the one that megatron-core compiles for GPUs.


def swiglu(y: Tensor) -> Tensor:
    """silu(gate) * up of y [..., 2F], the gates in the first half (Shazeer 2020)."""
    gate, up = y.chunk(2, -1)
    return F.silu(gate).mul_(up)


def swiglu_back(g: Tensor, y: Tensor) -> Tensor:
    """Gradient [..., 2F] of `swiglu`, given its output's g [..., F]."""
    gate, up = y.chunk(2, -1)
    gradient = torch.empty_like(y)
    for_gate, for_up = gradient.chunk(2, -1)
    torch.mul(g, up, out=for_gate)
    torch.ops.aten.silu_backward.grad_input(for_gate, gate, grad_input=for_gate)
    torch.ops.aten.silu.out(gate, out=for_up).mul_(g)
    return gradient


def weighted_swiglu(y: Tensor, weights: Tensor) -> Tensor:
    """`swiglu` of each token times its weight [..., 1], in y's type."""
    return (swiglu(y) * weights).to(y.dtype)


def weighted_swiglu_back(g: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `weighted_swiglu` for y and for the weights."""
    for_weights = (swiglu(y) * g.to(weights.dtype)).sum(-1, keepdim=True)
    return swiglu_back((g * weights).to(y.dtype), y), for_weights.to(weights.dtype)


def add_product(total: Any, left: Tensor, right: Tensor) -> Tensor:
    """Add left @ right to a float32 total, in place; the first one of an update is written over
    what was there before."""
    is_blank, total.is_blank, total.is_of_products = getattr(total, "is_blank", False), False, True
    found: Tensor = total
    if left.dtype != torch.float32:
        return found.copy_(left @ right) if is_blank else found.add_(left @ right)
    return torch.mm(left, right, out=found) if is_blank else found.addmm_(left, right)


def told_of_gradient(weight: Any) -> Tensor | None:
    """What a backward pass returns that has added a weight's gradient to its buffer: nothing, as
    there is none to add.

    Where DDP adds up over the ranks meanwhile (`optimizer.overlap_grad_reduce`) it waits for a
    gradient, whatever that holds; to one of a weight that is embedding and head it is added.
    """
    if not getattr(weight, "is_reduced_early", False):
        return None
    weight.grad_added_to_main_grad = True
    return (torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like)(
        weight
    )


def forget_gradients(buffer: Any) -> None:
    """megatron-core's reset of a buffer: all is zero, or `is_blank` where a product is about to be
    written over it."""
    for parameter in buffer.params:
        total = parameter.main_grad
        total.is_blank = getattr(total, "is_of_products", False)
        if not total.is_blank:
            total.zero_()


def _settle(total: Any) -> None:
    """Have a buffer's memory say what it means."""
    if getattr(total, "is_blank", False):
        total.zero_()
        total.is_blank = False


def _settled_before(start: Callable[..., None]) -> Callable[..., None]:
    """A bucket group's `start_grad_sync`, with zeros where no product has come, as for an expert
    without tokens."""

    def settled_start(group: Any, *args: Any, **kwargs: Any) -> None:
        for parameter in group.params:
            _settle(parameter.main_grad)
        start(group, *args, **kwargs)

    return settled_start


class GradientAccumulation:
    """Stands for apex's kernels that add a weight's gradient to its buffer within the product; fp32
    buffers alone."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Tensor, for_outputs: Tensor, total: Tensor) -> None:
        """Add for_outputs^T inputs to `total` [out, in], of inputs [T, in] and outputs' gradients
        [T, out]."""
        add_product(total, for_outputs.t(), inputs)


class _Lookup(Function):
    """An embedding whose gradient goes into the weight's buffer, row by row: made apart it is as
    large as the vocabulary."""

    @staticmethod
    def forward(context: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        """Rows of `weight` [V, H] by `tokens`, int64."""
        context.tokens, context.weight = tokens, weight  # type: ignore[attr-defined]
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(context: Any, for_rows: Tensor) -> tuple[None, Tensor | None]:
        """Add the rows' gradients."""
        total = context.weight.main_grad
        _settle(total)
        total.index_add_(
            0, context.tokens.flatten(), for_rows.reshape(-1, total.shape[1]).to(total.dtype)
        )
        return None, told_of_gradient(context.weight)


class _FunctionsOfLayers:
    """`torch.nn.functional` as seen by megatron-core's layers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)

    @staticmethod
    def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
        """As torch's."""
        into_buffer = (
            weight.requires_grad and hasattr(weight, "main_grad") and torch.is_grad_enabled()
        )
        return _Lookup.apply(tokens, weight) if into_buffer else F.embedding(tokens, weight)  # type: ignore[no-untyped-call]


def keep_compiler_out_of_optimizers() -> None:
    """Have torch's optimizers run without its compiler.

    They import it at their first call, whether or not anything is compiled, to mark what must not
    be compiled. The import takes 0.7 s of a processor and 70 MiB of each process.
    """
    optimizer: Any = torch.optim.Optimizer
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        setattr(optimizer, name, inspect.unwrap(getattr(optimizer, name)))

    adam: Any = torch.optim.Adam  # also the class that AdamW inherits its step from
    eager_step = inspect.unwrap(adam.step)

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """As torch's."""
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return eager_step(self, closure)

    adam.step = step


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
    cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()

    # The model-parallel random state tracker saves and restores the CUDA generator: give it the
    # CPU's.
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    # `torch.manual_seed` would also record a stack trace for the absent devices, in 6 ms.
    cuda.manual_seed = torch.default_generator.manual_seed
    from megatron.core.tensor_parallel import random as tensor_parallel_random

    tensor_parallel_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    tensor_parallel_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(
        state
    )

    # Modules that spell device="cuda" in tensor factories.
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.pipeline_parallel import schedules

    for module in (schedules, clip_grads, optimizer, utils):
        module.torch = _TorchWithoutCudaLiterals()

    # The fallback for transformer-engine's and apex's norm of the gradients is inaccurate for large
    # tensors.
    clip_grads.l2_norm_impl = multi_tensor_l2_norm

    # The token dispatcher makes arrays of split sizes only as it copies them from a GPU; the
    # collective takes no tensors.
    from megatron.core.transformer.moe import token_dispatcher

    token_dispatcher.maybe_move_tensor_to_cpu = _split_sizes

    # gloo gathers and scatters equal parts only, but each tensor rank of an expert receives its own
    # number of tokens.
    from megatron.core.tensor_parallel import layers, mappings

    mappings._gather_along_first_dim = _gather_parts(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _reduce_scatter_parts(
        mappings._reduce_scatter_along_first_dim
    )
    _install_gradient_buffers(layers)

    # Optimizers and gradient clipping tell fp32 from 16-bit parameters by the type names of CUDA
    # tensors.
    tensor_class.type = _cuda_type_name(Tensor.type)

    keep_compiler_out_of_optimizers()

    # These are compiled for GPUs, or make a temporary a tensor.
    from megatron.core.fusions import fused_bias_swiglu

    for function in (swiglu, swiglu_back, weighted_swiglu, weighted_swiglu_back):
        setattr(fused_bias_swiglu, function.__name__, function)


def _install_gradient_buffers(layers: Any) -> None:
    """Have weights' gradients added where they are kept: one that is made apart takes its memory's
    way three times."""
    from megatron.core.distributed import param_and_grad_buffer

    param_and_grad_buffer._ParamAndGradBuffer.reset = forget_gradients
    group = param_and_grad_buffer._ParamAndGradBucketGroup
    group.start_grad_sync = _settled_before(group.start_grad_sync)
    layers.fused_weight_gradient_mlp_cuda, layers._grad_accum_fusion_available = (
        GradientAccumulation,
        True,
    )
    layers.F = _FunctionsOfLayers()
