"""The Muon optimizer (Jordan et al. 2024): updates of matrices by their orthogonalized momentum.

The size of an update follows Liu et al. 2025, so that AdamW's learning rates and weight decay can
be used. A matrix is one whole weight of the Hugging Face model: query, key, value, gate and up are
separate matrices, although megatron-core fuses them and tensor parallelism splits them. The ranks
that hold parts or copies of the same matrices divide the matrices among themselves, so that each
matrix is orthogonalized once. A matrix that tensor parallelism does not split is orthogonalized
once on each tensor rank. The momentum is stored with its weight.
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

# Coefficients of x, x^3 and x^5 in a Newton-Schulz step. Among the coefficients whose steps keep
# singular values near 1, they have the steepest slope at 0 (Jordan et al. 2024).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_MIN_NORM = 1e-7

Shape = tuple[int, ...]


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Return U S' V^T of a matrix U S V^T, where S' is near 1.

    The function applies Newton-Schulz steps of the fifth degree to the matrix divided by its
    Frobenius norm. Five steps move every singular value above 0.002 of that norm to between 0.68
    and 1.21; smaller singular values grow by a factor of at most 3.4445 per step. A zero matrix
    stays zero.

    Args:
        matrix: [rows, columns].
        steps: Number of Newton-Schulz steps.

    Returns:
        [rows, columns], in the dtype of `matrix`.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    # A wide matrix has a smaller Gram matrix than its transpose.
    wide = matrix.T if is_tall else matrix
    wide = wide / l2_norm(wide).to(wide.dtype).clamp(min=_MIN_NORM)
    for _ in range(steps):
        # X <- a X + (b A + c A^2) X with A = X X^T
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if is_tall else wide


def assign_owners(costs: Sequence[int], ranks: int) -> list[int]:
    """Return the rank that computes each piece of work.

    The pieces are assigned in order of decreasing cost, each to the rank whose assigned cost is the
    smallest (longest-processing-time greedy, Graham 1969).
    """
    loads = [0] * ranks
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owners[index] = min(range(ranks), key=loads.__getitem__)
        loads[owners[index]] += costs[index]
    return owners


def _newton_schulz_cost(shape: Shape) -> int:
    """Return the number of multiplications of a Newton-Schulz step."""
    short, long = sorted(shape)
    return short * short * (2 * long + short)


class Muon(torch.optim.Optimizer):
    """Muon optimizer of the matrices of which this rank holds parts.

    A parameter contains one matrix, or several that megatron-core fuses. A step overwrites the
    gradients. Every rank of both process groups must take every step.
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
        """Assign each matrix to the ranks that orthogonalize it.

        Args:
            parameters: Names of the weights in each parameter, equal on all ranks of both groups.
            weights: Named weights that contain the weights of `parameters`.
            settings: Configuration section of the optimizer.
            dtype: Dtype of the GEMMs of the orthogonalization.
            tensor_group: Ranks with the other parts of matrices that tensor parallelism splits.
            replica_group: Ranks with copies of the same parts.
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
        self._weights = weights
        self._settings = settings
        self._dtype = dtype
        self._tensor_group = tensor_group
        self._replica_group = replica_group
        names = list(itertools.chain.from_iterable(parameters.values()))
        size = dist.get_world_size(tensor_group)
        owners = assign_owners(
            [_newton_schulz_cost(weights.specs[name].shape) for name in names],
            size * dist.get_world_size(replica_group),
        )
        # For each matrix: the replica that orthogonalizes it and, if the matrix is split, the
        # tensor rank within this replica. A matrix that is not split is orthogonalized by all
        # tensor ranks of the replica.
        self._owners = {
            name: divmod(owner, size) for name, owner in zip(names, owners, strict=True)
        }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step, which overwrites the gradients with the updates. Collective.

        Args:
            closure: Argument of torch's interface; it is not called.
        """
        (group,) = self.param_groups
        for parameter in group["params"]:
            state = self.state[parameter]
            if not state:
                state[MOMENTUM[0]] = torch.zeros_like(parameter)
            momentum = state[MOMENTUM[0]].lerp_(parameter.grad, 1 - self._settings.momentum)
            # Nesterov momentum.
            parameter.grad.lerp_(momentum, self._settings.momentum)
        parameter_names = zip(group["params"], group["names"], strict=True)
        self._orthogonalize(
            {name: parameter.grad for parameter, names in parameter_names for name in names}
        )
        for parameter in group["params"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(
                parameter.grad, alpha=-group["lr"]
            )
        group["step"] = group.get("step", 0) + 1

    def _orthogonalize(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace each matrix's momentum, in place, by the matrix's update at a learning rate of 1.

        The root mean square of an orthogonal matrix is 1 / sqrt(longer side). The updates are
        scaled to a root mean square of `update_rms` (Liu et al. 2025).

        Args:
            gradients: For each matrix name, the gradient tensor of the parameter that contains the
                matrix. The tensor holds the Nesterov momentum.
        """
        weights = self._weights
        replica = dist.get_rank(self._replica_group)
        assigned_names: list[list[str]] = [
            [] for _ in range(dist.get_world_size(self._replica_group))
        ]
        for name in gradients:
            assigned_names[self._owners[name][0]].append(name)
        updates = self._orthogonalize_parts(
            {
                name: weights.gather(name, gradients[name]).to(self._dtype)
                for name in assigned_names[replica]
            }
        )

        # Each replica broadcasts the updates that it has computed, in one flat tensor.
        for source, names in enumerate(assigned_names):
            if not names:
                continue
            if len(assigned_names) > 1:
                shapes = [weights.local_shape(name) for name in names]
                flat = torch.empty(
                    _total_size(shapes), dtype=self._dtype, device=gradients[names[0]].device
                )
                if source == replica:
                    torch.cat([updates[name].reshape(-1) for name in names], out=flat)
                dist.broadcast(flat, group=self._replica_group, group_src=source)
                updates |= dict(zip(names, _split_flat(flat, shapes), strict=True))
            for name in names:
                scale = self._settings.update_rms * math.sqrt(max(weights.specs[name].shape))
                weights.scatter(name, gradients[name], updates.pop(name).float() * scale)

    def _orthogonalize_parts(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's parts of the orthogonalized matrices. Collective over tensor ranks.

        The owner of a split matrix receives the other ranks' parts, orthogonalizes the whole
        matrix, and sends each rank its part of the result.

        Args:
            parts: This rank's parts of the named matrices. All tensor ranks pass the same names.
        """
        weights = self._weights
        steps = self._settings.newton_schulz_steps
        rank = dist.get_rank(self._tensor_group)
        assigned_names: list[list[str]] = [
            [] for _ in range(dist.get_world_size(self._tensor_group))
        ]
        results = {}
        for name, part in parts.items():
            if weights.slices[name].axis is None:
                results[name] = orthogonalize(part, steps)
            else:
                assigned_names[self._owners[name][1]].append(name)
        if not any(assigned_names):
            return results

        # Send the parts of each split matrix to its owner.
        shapes = [[weights.local_shape(name) for name in names] for names in assigned_names]
        inputs = [[parts[name] for name in names] for names in assigned_names]
        outputs: list[list[Tensor]] = [[] for _ in assigned_names]
        for name, *pieces in zip(
            assigned_names[rank],
            *self._exchange(inputs, [shapes[rank]] * len(assigned_names)),
            strict=True,
        ):
            spec = weights.specs[name]
            axis = spec.axis or 0
            # Consecutive ranks may have sent copies of the same part.
            copies = spec.count_copies(len(assigned_names))
            whole = orthogonalize(torch.cat(pieces[::copies], axis), steps)
            parts_of_whole = whole.chunk(len(assigned_names) // copies, axis)
            for target, rank_outputs in enumerate(outputs):
                rank_outputs.append(parts_of_whole[target // copies])

        # Send each rank its parts of the results.
        for names, owner_outputs in zip(
            assigned_names, self._exchange(outputs, shapes), strict=True
        ):
            results |= dict(zip(names, owner_outputs, strict=True))
        return results

    def _exchange(
        self, tensors: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Shape]]
    ) -> list[Sequence[Tensor]]:
        """Send tensors to each tensor rank and return the tensors that each rank has sent.

        This is one all-to-all over the tensor ranks.

        Args:
            tensors: Tensors for each rank.
            shapes: Shapes of the tensors that each rank sends to this rank.
        """
        outgoing = torch.cat(
            [tensor.reshape(-1) for rank_tensors in tensors for tensor in rank_tensors]
        )
        sizes = [sum(tensor.numel() for tensor in rank_tensors) for rank_tensors in tensors]
        incoming = outgoing.new_empty(sum(_total_size(rank_shapes) for rank_shapes in shapes))
        dist.all_to_all_single(
            incoming,
            outgoing,
            [_total_size(rank_shapes) for rank_shapes in shapes],
            sizes,
            group=self._tensor_group,
        )
        pieces = incoming.split([_total_size(rank_shapes) for rank_shapes in shapes])
        return [
            _split_flat(piece, rank_shapes)
            for piece, rank_shapes in zip(pieces, shapes, strict=True)
        ]


def _total_size(shapes: Sequence[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _split_flat(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    pieces = flat.split([math.prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def layer_matrices(weights: NamedWeights) -> dict[nn.Parameter, tuple[str, ...]]:
    """Return the parameters on this rank that Muon updates, with the names of their weights."""
    matrices: dict[nn.Parameter, tuple[str, ...]] = {}
    for name in weights:
        parameter = weights.parameter(name)
        if parameter.requires_grad and is_layer_matrix(weights.specs[name]):
            matrices[parameter] = (*matrices.get(parameter, ()), name)
    return matrices


def build_muon(
    options: OptimizerConfig,
    settings: schema.OptimizerConfig,
    weights: NamedWeights,
    parameters: Mapping[nn.Parameter, tuple[str, ...]],
) -> list[MegatronOptimizer]:
    """Return Muon in megatron-core's optimizers: one for dense parameters, one for experts.

    The second optimizer exists if the model has experts. Every rank builds the same number of
    optimizers, even if an optimizer has no parameter on this rank, because the optimizers reduce
    the gradient norm together.

    Args:
        options: megatron-core's optimizer configuration.
        settings: Configuration section of the optimizer.
        weights: Named weights that contain the parameters.
        parameters: Parameters that Muon updates, with the names of the weights in them.
    """
    dense, experts = (
        {key: names for key, names in parameters.items() if _is_expert_parameter(key) == is_expert}
        for is_expert in (False, True)
    )
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    # Each plan: parameters, ranks with other parts of the parameters, ranks with copies of the
    # parameters, and ranks over which the gradient norm is reduced.
    plans = [(dense, tensor_group, replicas, parallel_state.get_model_parallel_group())]
    if any(spec.expert is not None for spec in weights.table):
        tensor = parallel_state.get_expert_tensor_parallel_group()
        replicas = parallel_state.get_expert_data_parallel_group()
        plans.append(
            (
                experts,
                tensor,
                replicas,
                parallel_state.get_expert_tensor_model_pipeline_parallel_group(),
            )
        )
    parts: list[MegatronOptimizer] = []
    for plan_parameters, tensor, replicas, norm_group in plans:
        muon = Muon(plan_parameters, weights, settings, options.params_dtype, tensor, replicas)
        if options.bf16:
            part: MegatronOptimizer = Float16OptimizerWithFloat16Params(
                muon, options, None, _ignore_state
            )
        else:
            part = FP32Optimizer(muon, options, _ignore_state)
        part.grad_stats_parallel_group = norm_group
        part.tp_group = tensor_group
        parts.append(part)
    return parts


def _is_expert_parameter(parameter: nn.Parameter) -> bool:
    """Return whether megatron-core sums the gradients over the experts' own data ranks."""
    return not getattr(parameter, "allreduce", True)


def _ignore_state(*_: object) -> None:
    """Do nothing. megatron-core's own checkpoints, which aligner does not write, would need this
    function."""
