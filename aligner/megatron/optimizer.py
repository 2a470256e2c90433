"""megatron-core's optimizer and learning-rate schedule from our configuration, and guarded
steps."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    ChainedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride
from torch import nn

from aligner import schema
from aligner.data.collectives import gather_json
from aligner.errors import AlignerError
from aligner.megatron.muon import Muon, build_muon, layer_matrices
from aligner.megatron.named_weights import NamedWeights
from aligner.megatron.optimizer_state import optimizer_parts
from aligner.megatron.world import World
from aligner.models.families import SCALAR_HEAD


class ParameterGather:
    """The gathers that are under way behind an update, bucket by bucket: a layer waits for those of
    its own weights.

    megatron-core's own hooks wait for a module's own parameters alone, but experts that are
    multiplied together are read by the module around them. Here everything is on its way before the
    update returns, on every rank in the same order, so that whoever else reads weights may `finish`
    whenever he likes, without the other ranks.
    """

    def __init__(self, wrapped: Sequence[DistributedDataParallel]) -> None:
        """Of chunks whose DDP was made with `overlap_param_gather`."""
        # Buckets were filled from the last layer on; the first is read first.
        self._groups = [
            group
            for ddp in wrapped
            for group in reversed(ddp.bucket_groups + ddp.expert_parallel_bucket_groups)
        ]
        for ddp in wrapped:
            ddp.disable_forward_pre_hook(param_sync=False)
            for module in _readers(ddp.module):
                trained = (
                    parameter
                    for parameter in module.parameters()
                    if parameter in ddp.param_to_bucket_group
                )
                groups = list(
                    {
                        id(group): group for group in map(ddp.param_to_bucket_group.get, trained)
                    }.values()
                )
                module.register_forward_pre_hook(
                    lambda module, inputs, groups=groups: _wait(groups)
                )

    def start(self) -> None:
        """Send on what was updated. Collective."""
        for group in self._groups:
            group.start_param_sync()

    def finish(self) -> None:
        """Return when all weights are this version's. Only the thread that trains may call it, and
        may look at weights."""
        _wait(self._groups)


def _readers(module: nn.Module) -> Iterator[nn.Module]:
    """The layers, and what else has weights around them."""
    if isinstance(module, nn.ModuleList):
        yield from module
    elif next(module.parameters(recurse=False), None) is not None:
        yield module
    else:
        for child in module.children():
            yield from _readers(child)


def _wait(groups: Sequence[Any]) -> None:
    for group in groups:
        if group.param_gather_handle is not None:
            group.param_gather_handle.wait()
            group.param_gather_handle = None


_NAMED_AT_MOST = 8
_CLIP_EPSILON = 1e-6
"""Added to the norm that gradients are clipped by, as megatron-core has it."""


def build_optimizer(
    chunks: list[DistributedDataParallel],
    weights: NamedWeights,
    settings: schema.OptimizerConfig,
    total_steps: int,
    head_learning_rate: float | None = None,
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """AdamW with gradient clipping, Muon for the layers' matrices where it is asked for, and their
    schedule over `total_steps` optimizer steps. `weights` are the chunks', or the adapters that are
    trained.

    The learning rate of step k (from 0) is peak x k / warmup_steps during warm-up; then it goes
    from the peak to min_learning_rate at k = total_steps. Weight decay leaves out biases and norms.
    On a CPU nothing is offloaded. The scalar head's learning rate is in the same proportion to the
    others' at every step, `head_learning_rate` at the peak.
    """
    options = _options(settings, chunks[0].config.params_dtype)
    # What the optimizer cuts out of the parameters must not record it: the graph would keep the
    # model alive for good.
    with torch.no_grad():
        overrides = _overrides(options, head_learning_rate)
        if settings.kind == "muon":
            optimizer = _muon_beside_adam(options, chunks, weights, settings, overrides)
        else:
            optimizer = get_megatron_optimizer(options, chunks, overrides)
    _use_fused_kernels(optimizer)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.learning_rate,
        min_lr=options.min_lr,
        # a run that learns nothing reads no warm-up
        lr_warmup_steps=min(settings.warmup_steps, total_steps - 1),
        lr_decay_steps=total_steps,
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=total_steps,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def _options(settings: schema.OptimizerConfig, dtype: torch.dtype) -> OptimizerConfig:
    offload = settings.offload_fraction > 0 and torch.cuda.is_available()
    options = OptimizerConfig(
        optimizer="adam",
        lr=settings.learning_rate,
        min_lr=0.0 if settings.schedule == "constant" else settings.min_learning_rate,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.epsilon,
        clip_grad=settings.clip_grad_norm,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_distributed_optimizer=settings.distributed,
        overlap_param_gather=settings.overlap_param_gather,
        optimizer_cpu_offload=offload,
        optimizer_offload_fraction=settings.offload_fraction if offload else 0.0,
        overlap_cpu_optimizer_d2h_h2d=offload,
    )
    if offload and dtype != torch.float32:
        # Main weights are then the offloading optimizer's alone. Given to the configuration itself,
        # it would compare transformer-engine's version, which fails where that is not installed.
        options.use_precision_aware_optimizer = (
            options.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        ) = True
    return options


def _muon_beside_adam(
    options: OptimizerConfig,
    chunks: list[DistributedDataParallel],
    weights: NamedWeights,
    settings: schema.OptimizerConfig,
    overrides: dict[ParamKey, ParamGroupOverride],
) -> MegatronOptimizer:
    matrices = layer_matrices(weights)
    # megatron-core takes for Adam's what asks for gradients.
    for parameter in matrices:
        parameter.requires_grad_(False)
    adam = get_megatron_optimizer(options, chunks, overrides)
    for parameter in matrices:
        parameter.requires_grad_(True)
    return ChainedOptimizer(
        [*build_muon(options, settings, weights, matrices), *optimizer_parts(adam)]
    )


def _overrides(
    options: OptimizerConfig, head_learning_rate: float | None
) -> dict[ParamKey, ParamGroupOverride]:
    """What is otherwise for some parameters: no weight decay, as megatron-core has it, and the
    head's learning rates."""
    overrides: dict[ParamKey, ParamGroupOverride] = get_standard_config_overrides(options)
    if head_learning_rate is not None:
        # The lowest is at most the peak; where that is 0 both are.
        least = head_learning_rate * options.min_lr / options.lr if options.lr else 0.0
        head = ParamKey(name=f"*.{SCALAR_HEAD.parameter}")
        overrides[head] = ParamGroupOverride(max_lr=head_learning_rate, min_lr=least)
    return overrides


def _learning_rates(optimizer: MegatronOptimizer) -> dict[str, float]:
    """`lr` of the next step, and `head_lr` where the scalar head has one of its own."""
    own = [group for group in optimizer.param_groups if not group["default_config"]]
    others = [group for group in optimizer.param_groups if group["default_config"]] or own
    return {"lr": float(others[0]["lr"])} | ({"head_lr": float(own[0]["lr"])} if own else {})


def _use_fused_kernels(optimizer: MegatronOptimizer) -> None:
    """Let torch's AdamW on a CPU go over each parameter once instead of a dozen times; it differs
    in the last digit."""
    if torch.cuda.is_available():
        # transformer-engine's or apex's are fused, and torch's default there goes over all
        # parameters at once
        return
    for part in optimizer_parts(optimizer):
        if isinstance(part.optimizer, torch.optim.AdamW):
            for group in part.optimizer.param_groups:
                group["fused"], group["foreach"] = True, False


def _is_fused(part: MegatronOptimizer) -> bool:
    """Whether torch's kernel for a CPU updates its parameters."""
    return isinstance(part.optimizer, torch.optim.AdamW) and any(
        group["fused"] for group in part.param_groups
    )


def _place_epsilon_as_tensorflow(
    optimizer: MegatronOptimizer, settings: schema.OptimizerConfig
) -> None:
    """Make the next step t that of TensorFlow's Adam, which adds epsilon before the second moment's
    bias is corrected.

    With torch's formula that is an epsilon of epsilon / sqrt(1 - beta2^t) (Huang et al. 2023,
    detail 14).
    """
    for part in optimizer_parts(optimizer):
        if isinstance(part.optimizer, Muon):
            continue
        for group in part.param_groups:
            step = 1 + _steps_taken(part.optimizer, group)
            group["eps"] = settings.epsilon / math.sqrt(1 - settings.beta2**step)


def _steps_taken(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> int:
    # transformer-engine's and apex's Adam count a group's steps, torch's each parameter's
    if "step" in group:
        return int(group["step"])
    states = (optimizer.state.get(parameter) for parameter in group["params"])
    return next((int(state["step"]) for state in states if state), 0)


@dataclass
class GuardedStep:
    """Takes optimizer steps, and leaves out, on every rank, those whose gradients are not finite:
    all stays as it is then."""

    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    settings: schema.OptimizerConfig
    weights: NamedWeights
    """What is trained, to name what has gone wrong."""
    world: World
    skipped_in_a_row: int = 0

    def __call__(self) -> dict[str, float]:
        """One step from the gradients in the buffers; returns `lr`, `head_lr` where the scalar head
        has one of its own, `skipped` (1 or 0) and, if it is finite, `grad_norm`.

        The norm is that before clipping; the gradients are gone over once for it, whatever comes
        out. Collective. Raises AlignerError on every rank at the `max_skipped_steps`-th step in a
        row that is left out.
        """
        rates = _learning_rates(self.optimizer)
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        # Every rank has the same norm of the whole model's gradients, so every rank decides alike.
        if not math.isfinite(norm):
            self.skipped_in_a_row += 1
            if self.skipped_in_a_row >= self.settings.max_skipped_steps:
                raise AlignerError(self._describe_failure(norm))
            return rates | {"skipped": 1.0}
        self.skipped_in_a_row = 0
        self._clip(norm)
        if self.settings.epsilon_placement == "tensorflow":
            _place_epsilon_as_tensorflow(self.optimizer, self.settings)
        self.optimizer.step_with_ready_grads()
        self.scheduler.step(increment=1)
        return rates | {"skipped": 0.0, "grad_norm": norm}

    def _clip(self, norm: float) -> None:
        most = self.settings.clip_grad_norm
        if not most:
            return
        for part in optimizer_parts(self.optimizer):
            if _is_fused(part):  # it goes over the gradients anyway
                divisor = (norm + _CLIP_EPSILON) / most
                part.optimizer.grad_scale = torch.tensor(divisor) if divisor > 1 else None
            elif parameters := part.get_parameters():
                decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(parameters, most, norm, decoupled)

    def _describe_failure(self, norm: float) -> str:
        found = list(itertools.chain.from_iterable(gather_json(self._not_finite())))
        named = ", ".join(found[:_NAMED_AT_MOST]) or "none, but the sum of their squares overflows"
        more = f" and {len(found) - _NAMED_AT_MOST} more" if len(found) > _NAMED_AT_MOST else ""
        return (
            f"the gradient norm was {norm} in {self.skipped_in_a_row} consecutive updates, which"
            f" were skipped (optimizer.max_skipped_steps={self.settings.max_skipped_steps})."
            f" Non-finite gradients: {named}{more}. Check the last samples and rewards, lower"
            " optimizer.learning_rate, or resume from an earlier checkpoint."
        )

    def _not_finite(self) -> list[str]:
        """What of this rank's gradients is not finite, a line for each weight."""
        found = []
        for name in self.weights:
            gradient = getattr(self.weights.parameter(name), "main_grad", None)
            if gradient is None:
                continue
            piece = self.weights.gather(name, gradient)
            if count := piece.numel() - int(piece.isfinite().sum()):
                found.append(
                    f"{name} ({count} of {piece.numel()} values on rank {self.world.rank})"
                )
        return found
