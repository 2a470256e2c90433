"""Muon (Jordan et al. 2024): what a matrix is changed by is its momentum, orthogonalized.

Its size is that of Liu et al. 2025, with which AdamW's learning rates and weight decay fit. A
matrix is one weight by its Hugging Face name, whole: query, key, value, gate and up each, however
megatron-core fuses them and tensor parallelism cuts them. The ranks that hold parts or copies of
the same matrices deal them out among themselves, so that each is orthogonalized once, or once a
tensor rank where these do not cut it. Momentum is kept where its weight is.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from aligner import schema
from aligner.data.checkpoint_files import MOMENTUM
from aligner.megatron.l2_norm import l2_norm
from aligner.megatron.named_weights import NamedWeights
from aligner.models.weight_slices import is_layer_matrix

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x^3 and x^5: the steepest at 0 of those whose steps keep singular values near 1 (Jordan et
al. 2024)."""
_SMALLEST_NORM = 1e-7

Shape = tuple[int, ...]


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """U S' V^T of a matrix U S V^T [rows, columns], with S' near 1, in the matrix's type.

    By Newton-Schulz steps of the fifth degree on the matrix over its Frobenius norm. Five of them
    bring every singular value that is above 0.002 of that norm to between 0.68 and 1.21; smaller
    ones grow by 3.4445 a step at most. Zeros stay zeros.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if is_tall else matrix
    wide = wide / l2_norm(wide).to(wide.dtype).clamp(min=_SMALLEST_NORM)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if is_tall else wide


def deal(costs: Sequence[int], ranks: int) -> list[int]:
    """Which rank does each of some pieces of work: the most costly first, each to whoever has least
    so far."""
    loads, owners = [0] * ranks, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owners[index] = min(range(ranks), key=loads.__getitem__)
        loads[owners[index]] += costs[index]
    return owners


def _cost(shape: Shape) -> int:
    """Multiplications of a Newton-Schulz step."""
    short, long = sorted(shape)
    return short * short * (2 * long + short)


class Muon(torch.optim.Optimizer):
    """Updates this rank's parts of matrices, each in a parameter of its own or with others. A
    step's gradients are used up.

    Every rank of both groups makes every step.
    """

    def __init__(
        self,
        parameters: Mapping[nn.Parameter, tuple[str, ...]],
        weights: NamedWeights,
        settings: schema.OptimizerConfig,
        dtype: torch.dtype,
        tensor_group: ProcessGroup,
        replica_group: ProcessGroup,
    ) -> None:
        """`parameters` with the names of the weights in them, which all ranks of both groups have
        in common.

        The products are of `dtype`. `tensor_group` has the other parts of what is cut,
        `replica_group` the same parts.
        """
        group = {
            "params": list(parameters),
            "names": list(parameters.values()),
            "default_config": True,
            "wd_mult": 1.0,
        }
        super().__init__(
            [group], {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
        )
        self._weights, self._settings, self._dtype = weights, settings, dtype
        self._tensor, self._replicas = tensor_group, replica_group
        names = list(itertools.chain.from_iterable(parameters.values()))
        size = dist.get_world_size(tensor_group)
        owners = deal(
            [_cost(weights.specs[name].shape) for name in names],
            size * dist.get_world_size(replica_group),
        )
        # The replica whose ranks orthogonalize a matrix, and which of these, where it is cut; of
        # another each has all.
        self._owners = {
            name: divmod(owner, size) for name, owner in zip(names, owners, strict=True)
        }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update from the gradients, whose memory it takes. `closure` is torch's, and not
        called. Collective."""
        (group,) = self.param_groups
        for parameter in group["params"]:
            state = self.state[parameter]
            if not state:
                state[MOMENTUM[0]] = torch.zeros_like(parameter)
            momentum = state[MOMENTUM[0]].lerp_(parameter.grad, 1 - self._settings.momentum)
            parameter.grad.lerp_(momentum, self._settings.momentum)  # Nesterov's
        held = zip(group["params"], group["names"], strict=True)
        self._orthogonalize({name: parameter.grad for parameter, names in held for name in names})
        for parameter in group["params"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(
                parameter.grad, alpha=-group["lr"]
            )
        group["step"] = group.get("step", 0) + 1

    def _orthogonalize(self, holders: Mapping[str, Tensor]) -> None:
        """Put the updates, for a learning rate of 1, in place of the named matrices' parts in
        tensors shaped as parameters.

        The root of the mean square of an orthogonal matrix is 1 / sqrt(the longer side); that of an
        update is `update_rms`.
        """
        weights, replica = self._weights, dist.get_rank(self._replicas)
        dealt: list[list[str]] = [[] for _ in range(dist.get_world_size(self._replicas))]
        for name in holders:
            dealt[self._owners[name][0]].append(name)
        done = self._among_tensor_ranks(
            {name: weights.gather(name, holders[name]).to(self._dtype) for name in dealt[replica]}
        )
        for source, names in enumerate(dealt):
            if not names:
                continue
            if len(dealt) > 1:
                shapes = [weights.local_shape(name) for name in names]
                flat = torch.empty(
                    _size(shapes), dtype=self._dtype, device=holders[names[0]].device
                )
                if source == replica:
                    torch.cat([done[name].reshape(-1) for name in names], out=flat)
                dist.broadcast(flat, group=self._replicas, group_src=source)
                done |= dict(zip(names, _split(flat, shapes), strict=True))
            for name in names:
                size = self._settings.update_rms * math.sqrt(max(weights.specs[name].shape))
                weights.scatter(name, holders[name], done.pop(name).float() * size)

    def _among_tensor_ranks(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of the named matrices, orthogonalized, of what these were. All tensor
        ranks give the same names.

        The owner of a matrix that is cut gets the others' parts of it, and gives each its own back.
        """
        weights, steps, rank = (
            self._weights,
            self._settings.newton_schulz_steps,
            dist.get_rank(self._tensor),
        )
        dealt: list[list[str]] = [[] for _ in range(dist.get_world_size(self._tensor))]
        done = {}
        for name, part in parts.items():
            if weights.slices[name].axis is None:
                done[name] = orthogonalize(part, steps)
            else:
                dealt[self._owners[name][1]].append(name)
        if not any(dealt):
            return done
        shapes = [[weights.local_shape(name) for name in names] for names in dealt]
        given = [[parts[name] for name in names] for names in dealt]
        returned: list[list[Tensor]] = [[] for _ in dealt]
        for name, *pieces in zip(
            dealt[rank], *self._exchange(given, [shapes[rank]] * len(dealt)), strict=True
        ):
            axis = weights.specs[name].axis or 0
            whole = orthogonalize(torch.cat(pieces, axis), steps)
            for of_rank, piece in zip(returned, whole.chunk(len(dealt), axis), strict=True):
                of_rank.append(piece)
        for names, of_owner in zip(dealt, self._exchange(returned, shapes), strict=True):
            done |= dict(zip(names, of_owner, strict=True))
        return done

    def _exchange(
        self, given: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Shape]]
    ) -> list[Sequence[Tensor]]:
        """Give each tensor rank its tensors; what each has given, of these shapes."""
        outgoing = torch.cat([tensor.reshape(-1) for tensors in given for tensor in tensors])
        sizes = [sum(tensor.numel() for tensor in tensors) for tensors in given]
        incoming = outgoing.new_empty(sum(_size(of_rank) for of_rank in shapes))
        dist.all_to_all_single(
            incoming, outgoing, [_size(of_rank) for of_rank in shapes], sizes, group=self._tensor
        )
        pieces = incoming.split([_size(of_rank) for of_rank in shapes])
        return [_split(piece, of_rank) for piece, of_rank in zip(pieces, shapes, strict=True)]


def _size(shapes: Sequence[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _split(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    pieces = flat.split([math.prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def layer_matrices(weights: NamedWeights) -> dict[nn.Parameter, tuple[str, ...]]:
    """The parameters that Muon updates here, with the names of the weights in each."""
    found: dict[nn.Parameter, tuple[str, ...]] = {}
    for name in weights:
        parameter = weights.parameter(name)
        if parameter.requires_grad and is_layer_matrix(weights.specs[name]):
            found[parameter] = (*found.get(parameter, ()), name)
    return found


def build_muon(
    options: OptimizerConfig,
    settings: schema.OptimizerConfig,
    weights: NamedWeights,
    parameters: Mapping[nn.Parameter, tuple[str, ...]],
) -> list[MegatronOptimizer]:
    """Muon of these parameters as optimizers of megatron-core's: of the dense ones and, where the
    model has such, of experts.

    Every rank makes as many, whatever it holds: they add up their gradients' norms together.
    """
    dense, experts = (
        {key: names for key, names in parameters.items() if _is_of_expert(key) == of}
        for of in (False, True)
    )
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    plans = [(dense, tensor_group, replicas, parallel_state.get_model_parallel_group())]
    if any(spec.expert is not None for spec in weights.table):
        tensor, replicas = (
            parallel_state.get_expert_tensor_parallel_group(),
            parallel_state.get_expert_data_parallel_group(),
        )
        plans.append(
            (
                experts,
                tensor,
                replicas,
                parallel_state.get_expert_tensor_model_pipeline_parallel_group(),
            )
        )
    parts: list[MegatronOptimizer] = []
    for chosen, tensor, replicas, norm_group in plans:
        muon = Muon(chosen, weights, settings, options.params_dtype, tensor, replicas)
        if options.bf16:
            part: MegatronOptimizer = Float16OptimizerWithFloat16Params(
                muon, options, None, _no_state
            )
        else:
            part = FP32Optimizer(muon, options, _no_state)
        part.grad_stats_parallel_group, part.tp_group = norm_group, tensor_group
        parts.append(part)
    return parts


def _is_of_expert(parameter: nn.Parameter) -> bool:
    """Whether megatron-core adds its gradients up over the experts' own data ranks."""
    return not getattr(parameter, "allreduce", True)


def _no_state(*_: object) -> None:
    """For megatron-core's own checkpoints, which are not written."""
