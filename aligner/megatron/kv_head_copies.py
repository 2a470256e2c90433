"""Gradients of KV heads that several tensor ranks hold, with more tensor ranks than KV heads.

Each rank then computes a part of the attention heads, and the one KV head that they read. Ranks
that read the same KV head have copies of its weights. The gradient of a copy contains the rank's
own attention heads only, so:

- `mark_copies` finds the copies when the model has been built.
- `sum_gradients_of_copies` gives all copies the sum of their gradients, after each backward pass.
  Equal gradients keep the copies equal in each update.
- `count_copies_once` makes the gradient norm count each weight once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.parallel_state import get_tensor_model_parallel_group
from torch import Tensor, nn

from aligner.megatron.named_weights import NamedWeights
from aligner.megatron.optimizer_state import find_main_shard, optimizer_parts


@dataclass(frozen=True)
class _Copies:
    """Part of a parameter that several consecutive tensor ranks hold.

    It is the end of the parameter: queries come before the key and the value.
    """

    start: int
    """Index of the first element in the flattened parameter."""
    count: int
    """Number of ranks that hold the part."""


def mark_copies(weights: NamedWeights) -> None:
    """Mark the parameters that contain weights of a KV head which several tensor ranks hold.

    Args:
        weights: The weights of a model, or of its adapters.
    """
    own_elements: dict[nn.Parameter, int] = {}
    copies: dict[nn.Parameter, int] = {}
    for name in weights:
        parameter = weights.parameter(name)
        count = weights.specs[name].count_copies(weights.tensor_ranks)
        if count > 1:
            copies[parameter] = count
        else:
            elements = torch.Size(weights.local_shape(name)).numel()
            own_elements[parameter] = own_elements.get(parameter, 0) + elements
    for parameter, count in copies.items():
        start = own_elements.get(parameter, 0)
        parameter.kv_head_copies = _Copies(start, count)  # type: ignore[attr-defined]


def _find_copies(parameter: nn.Parameter) -> _Copies | None:
    """Return the part of a parameter that several tensor ranks hold, if there is one."""
    return getattr(parameter, "kv_head_copies", None)


@torch.no_grad()
def sum_gradients_of_copies(chunks: Iterable[nn.Module]) -> None:
    """Replace the gradients of the copies of each KV head by their sum. Collective.

    Call it after DDP has reduced the gradients over the data and context ranks. With a distributed
    optimizer, only a rank's own range of a gradient is valid then. It is the same range on all
    tensor ranks, so the sums are valid in this range.

    Args:
        chunks: This rank's model chunks, wrapped for training.
    """
    group = get_tensor_model_parallel_group()
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        copies = _find_copies(parameter)
        if copies is None or not parameter.requires_grad:
            continue
        gradient = parameter.main_grad.view(-1)[copies.start :]  # type: ignore[attr-defined]
        # Each rank adds up the gradients in the same order, so the sums are bitwise equal.
        first = group.rank() - group.rank() % copies.count
        sizes = [
            gradient.numel() if first <= rank < first + copies.count else 0
            for rank in range(group.size())
        ]
        sent = gradient.repeat(copies.count)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, sizes, sizes, group=group)
        gradient.copy_(received.view(copies.count, -1).sum(0))


def count_copies_once(optimizer: MegatronOptimizer, chunks: Sequence[nn.Module]) -> None:
    """Make the gradient norm of an optimizer count each weight of a KV head once.

    megatron-core assumes that a parameter that is split over tensor ranks has different elements
    on each rank. Therefore only the first rank that holds a KV head counts its weights.

    Args:
        optimizer: megatron-core's optimizer.
        chunks: This rank's model chunks.
    """
    rank = get_tensor_model_parallel_group().rank()
    parameters = [
        parameter
        for chunk in chunks
        for parameter in chunk.parameters()
        if (copies := _find_copies(parameter)) is not None and rank % copies.count
    ]
    for part in optimizer_parts(optimizer):
        _limit_norm(part, parameters)


def _limit_norm(part: MegatronOptimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Exclude the copied parts of parameters from the gradient norm of one optimizer."""
    updated = {id(tensor) for tensor in part.get_parameters()}
    # For each tensor that the optimizer updates: the number of leading elements to count.
    limits: list[tuple[Tensor, int]] = []
    for parameter in parameters:
        copies = _find_copies(parameter)
        assert copies is not None
        main: Tensor | None = getattr(parameter, "main_param", parameter)
        start = 0
        if isinstance(part, DistributedOptimizer):
            main, start, _ = find_main_shard(part, parameter)
        if main is not None and id(main) in updated:
            limits.append((main, max(0, copies.start - start)))
    if not limits:
        return
    find_all = part.get_main_grads_for_grad_norm

    def find_counted() -> list[Tensor]:
        """Return the gradients whose norm counts, without those of copied KV heads."""
        lengths = {}
        for main, limit in limits:
            for gradient in (main.grad, getattr(main, "decoupled_grad", None)):
                if gradient is not None:
                    lengths[id(gradient)] = limit
        counted = [
            gradient.reshape(-1)[: lengths[id(gradient)]] if id(gradient) in lengths else gradient
            for gradient in find_all()
        ]
        return [gradient for gradient in counted if gradient.numel()]

    part.get_main_grads_for_grad_norm = find_counted
