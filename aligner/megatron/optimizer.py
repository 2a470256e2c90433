"""megatron-core's optimizer and learning-rate schedule, built from the configuration.

- `build_optimizer`: AdamW or Muon with the learning-rate schedule.
- `ParameterGather`: the all-gathers of updated parameters (ZeRO-1), which overlap with the next
  forward pass.
- `GuardedStep`: optimizer steps that skip updates with gradients that are not finite.
"""

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
from aligner.megatron.kv_head_copies import count_copies_once
from aligner.megatron.muon import Muon, build_muon, layer_matrices
from aligner.megatron.named_weights import NamedWeights
from aligner.megatron.optimizer_state import optimizer_parts
from aligner.megatron.world import World
from aligner.models.families import SCALAR_HEAD


class ParameterGather:
    """All-gathers of updated parameters that are in flight after an optimizer step.

    Each layer waits for the DDP buckets of its own weights before its forward pass. megatron-core's
    own hooks do not suffice: they wait for the parameters of a single module, but the weights of
    grouped experts are read by the module that contains the experts. Here, all all-gathers start
    before the update returns, in the same order on every rank. Any other reader of the weights may
    therefore call `finish` at any time, without the other ranks.
    """

    def __init__(self, wrapped: Sequence[DistributedDataParallel]) -> None:
        """Replace megatron-core's forward hooks.

        Args:
            wrapped: Model chunks whose DDP was built with `overlap_param_gather`.
        """
        # DDP fills its buckets from the last layer on, but the forward pass reads the first layer
        # first.
        self._groups = [
            group
            for ddp in wrapped
            for group in reversed(ddp.bucket_groups + ddp.expert_parallel_bucket_groups)
        ]
        for ddp in wrapped:
            ddp.disable_forward_pre_hook(param_sync=False)
            for module in _reading_modules(ddp.module):
                trained = (
                    parameter
                    for parameter in module.parameters()
                    if parameter in ddp.param_to_bucket_group
                )
                # The dictionary removes duplicates: several parameters share a bucket.
                groups = list(
                    {
                        id(group): group for group in map(ddp.param_to_bucket_group.get, trained)
                    }.values()
                )
                module.register_forward_pre_hook(
                    lambda module, inputs, groups=groups: _wait_for_groups(groups)
                )

    def start(self) -> None:
        """Start the all-gathers of all updated parameters. Collective."""
        for group in self._groups:
            group.start_param_sync()

    def finish(self) -> None:
        """Wait until all weights have the values of the last update.

        Only the training thread may call it, and only this thread may read the weights.
        """
        _wait_for_groups(self._groups)


def _reading_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the transformer layers, and the other modules that have weights of their own."""
    if isinstance(module, nn.ModuleList):
        yield from module
    elif next(module.parameters(recurse=False), None) is not None:
        yield module
    else:
        for child in module.children():
            yield from _reading_modules(child)


def _wait_for_groups(groups: Sequence[Any]) -> None:
    """Wait for the parameter all-gathers of some of DDP's bucket groups."""
    for group in groups:
        if group.param_gather_handle is not None:
            group.param_gather_handle.wait()
            group.param_gather_handle = None


# Maximum number of weights that an error message names.
_MAX_NAMED_WEIGHTS = 8
# megatron-core adds this to the gradient norm before it divides by the norm.
_CLIP_EPSILON = 1e-6


def build_optimizer(
    chunks: list[DistributedDataParallel],
    weights: NamedWeights,
    settings: schema.OptimizerConfig,
    total_steps: int,
    head_learning_rate: float | None = None,
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Return the optimizer and the learning-rate schedule of a model.

    The optimizer is AdamW with gradient clipping; with `optimizer.kind=muon`, Muon updates the
    matrices of the layers. Weight decay excludes biases and norms. The learning rate of step k,
    counted from 0, is peak x k / warmup_steps during warm-up; afterwards it moves from the peak to
    `min_learning_rate` at k = `total_steps`. On a machine without a GPU, nothing is offloaded.

    Args:
        chunks: This rank's model chunks.
        weights: The chunks' weights, or the adapters if only these are trained.
        settings: Configuration section of the optimizer.
        total_steps: Number of optimizer steps of the schedule.
        head_learning_rate: Peak learning rate of the scalar head; its ratio to the learning rate of
            the other weights is the same at every step. None means the learning rate of the other
            weights.
    """
    options = _optimizer_config(settings, chunks[0].config.params_dtype)
    # The optimizer slices the parameters. If autograd recorded the slicing, its graph would never
    # release the model's memory.
    with torch.no_grad():
        overrides = _group_overrides(options, head_learning_rate)
        if settings.kind == "muon":
            optimizer = _build_muon_and_adam(options, chunks, weights, settings, overrides)
        else:
            optimizer = get_megatron_optimizer(options, chunks, overrides)
    _use_fused_kernels(optimizer)
    count_copies_once(optimizer, chunks)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.learning_rate,
        min_lr=options.min_lr,
        # megatron-core requires fewer warm-up steps than total steps. Only a run that trains no
        # weights could violate this rule, and it does not use `warmup_steps`.
        lr_warmup_steps=min(settings.warmup_steps, total_steps - 1),
        lr_decay_steps=total_steps,
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=total_steps,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def _optimizer_config(settings: schema.OptimizerConfig, dtype: torch.dtype) -> OptimizerConfig:
    """Return megatron-core's optimizer configuration for parameters of `dtype`."""
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
        # The offloading optimizer then holds the only copy of the main weights. These fields are
        # set after the construction, because OptimizerConfig would otherwise compare
        # transformer-engine's version, which fails if transformer-engine is not installed.
        options.use_precision_aware_optimizer = (
            options.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        ) = True
    return options


def _build_muon_and_adam(
    options: OptimizerConfig,
    chunks: list[DistributedDataParallel],
    weights: NamedWeights,
    settings: schema.OptimizerConfig,
    overrides: dict[ParamKey, ParamGroupOverride],
) -> MegatronOptimizer:
    """Return Muon for the matrices of the layers, chained with AdamW for all other parameters."""
    matrices = layer_matrices(weights)
    # get_megatron_optimizer takes every parameter that requires gradients.
    for parameter in matrices:
        parameter.requires_grad_(False)
    adam = get_megatron_optimizer(options, chunks, overrides)
    for parameter in matrices:
        parameter.requires_grad_(True)
    return ChainedOptimizer(
        [*build_muon(options, settings, weights, matrices), *optimizer_parts(adam)]
    )


def _group_overrides(
    options: OptimizerConfig, head_learning_rate: float | None
) -> dict[ParamKey, ParamGroupOverride]:
    """Return the optimizer settings that override the defaults for some parameters.

    These are megatron-core's standard overrides (no weight decay of biases and norms), and the
    learning rates of the scalar head.
    """
    overrides: dict[ParamKey, ParamGroupOverride] = get_standard_config_overrides(options)
    if head_learning_rate is not None:
        # The ratio of minimum to peak is the same for both learning rates. If the peak is 0, the
        # minimum is 0 too.
        min_rate = head_learning_rate * options.min_lr / options.lr if options.lr else 0.0
        head = ParamKey(name=f"*.{SCALAR_HEAD.parameter}")
        overrides[head] = ParamGroupOverride(max_lr=head_learning_rate, min_lr=min_rate)
    return overrides


def _learning_rates(optimizer: MegatronOptimizer) -> dict[str, float]:
    """Return `lr` of the next step, and `head_lr` if the scalar head has its own learning rate."""
    head_groups = [group for group in optimizer.param_groups if not group["default_config"]]
    other_groups = [
        group for group in optimizer.param_groups if group["default_config"]
    ] or head_groups
    return {"lr": float(other_groups[0]["lr"])} | (
        {"head_lr": float(head_groups[0]["lr"])} if head_groups else {}
    )


def _use_fused_kernels(optimizer: MegatronOptimizer) -> None:
    """Make torch's AdamW use its fused kernel on a CPU.

    The fused kernel reads each parameter once instead of about twelve times. Results differ in the
    last digit.
    """
    if torch.cuda.is_available():
        # transformer-engine's and apex's Adam are fused, and torch's default on GPUs processes all
        # parameters at once.
        return
    for part in optimizer_parts(optimizer):
        if isinstance(part.optimizer, torch.optim.AdamW):
            for group in part.optimizer.param_groups:
                group.update(fused=True, foreach=False)


def _is_fused(part: MegatronOptimizer) -> bool:
    """Return whether torch's fused CPU kernel updates the parameters of this optimizer."""
    return isinstance(part.optimizer, torch.optim.AdamW) and any(
        group["fused"] for group in part.param_groups
    )


def _apply_tensorflow_epsilon(
    optimizer: MegatronOptimizer, settings: schema.OptimizerConfig
) -> None:
    """Make the next step, number t, equal to a step of TensorFlow's Adam.

    TensorFlow adds epsilon before the bias correction of the second moment. In torch's formula,
    this corresponds to an epsilon of epsilon / sqrt(1 - beta2^t) (Huang et al. 2023, detail 14).
    """
    for part in optimizer_parts(optimizer):
        if isinstance(part.optimizer, Muon):
            continue
        for group in part.param_groups:
            step = 1 + _completed_steps(part.optimizer, group)
            group["eps"] = settings.epsilon / math.sqrt(1 - settings.beta2**step)


def _completed_steps(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> int:
    """Return the number of steps that the optimizer has taken on a parameter group."""
    # transformer-engine's and apex's Adam count the steps of a group; torch's Adam counts the steps
    # of a parameter.
    if "step" in group:
        return int(group["step"])
    states = (optimizer.state.get(parameter) for parameter in group["params"])
    return next((int(state["step"]) for state in states if state), 0)


@dataclass
class GuardedStep:
    """Optimizer steps that are skipped, on every rank, if the gradients are not finite.

    A skipped step changes neither weights nor optimizer state nor learning-rate schedule.
    """

    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    settings: schema.OptimizerConfig
    weights: NamedWeights
    """Trained weights; error messages contain their names."""
    world: World
    skipped_in_a_row: int = 0
    """Number of consecutive skipped steps."""

    def __call__(self) -> dict[str, float]:
        """Take one step with the gradients in DDP's buffers. Collective.

        The gradient norm costs one pass over the gradients and is computed even without clipping.

        Returns:
            `lr`; `head_lr`, if the scalar head has its own learning rate; `skipped`, 1 or 0; and
            `grad_norm`, the norm before clipping, if it is finite.

        Raises:
            AlignerError: On every rank, at the `max_skipped_steps`-th consecutive skipped step.
        """
        rates = _learning_rates(self.optimizer)
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        # The norm covers the gradients of the whole model, so every rank makes the same decision.
        if not math.isfinite(norm):
            self.skipped_in_a_row += 1
            if self.skipped_in_a_row >= self.settings.max_skipped_steps:
                raise AlignerError(self._describe_failure(norm))
            return rates | {"skipped": 1.0}
        self.skipped_in_a_row = 0
        self._clip_gradients(norm)
        if self.settings.epsilon_placement == "tensorflow":
            _apply_tensorflow_epsilon(self.optimizer, self.settings)
        self.optimizer.step_with_ready_grads()
        self.scheduler.step(increment=1)
        return rates | {"skipped": 0.0, "grad_norm": norm}

    def _clip_gradients(self, norm: float) -> None:
        """Scale the gradients so that their norm is at most `clip_grad_norm`."""
        max_norm = self.settings.clip_grad_norm
        if not max_norm:
            return
        for part in optimizer_parts(self.optimizer):
            if _is_fused(part):
                # The fused kernel divides the gradients while it reads them, which saves a pass.
                divisor = (norm + _CLIP_EPSILON) / max_norm
                part.optimizer.grad_scale = torch.tensor(divisor) if divisor > 1 else None
            elif parameters := part.get_parameters():
                decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(parameters, max_norm, norm, decoupled)

    def _describe_failure(self, norm: float) -> str:
        """Return the message of an error after too many skipped steps. Collective."""
        descriptions = list(itertools.chain.from_iterable(gather_json(self._nonfinite_gradients())))
        names = (
            ", ".join(descriptions[:_MAX_NAMED_WEIGHTS])
            or "none, but the sum of their squares overflows"
        )
        more = (
            f" and {len(descriptions) - _MAX_NAMED_WEIGHTS} more"
            if len(descriptions) > _MAX_NAMED_WEIGHTS
            else ""
        )
        return (
            f"the gradient norm was {norm} in {self.skipped_in_a_row} consecutive updates, which"
            f" were skipped (optimizer.max_skipped_steps={self.settings.max_skipped_steps})."
            f" Non-finite gradients: {names}{more}. Check the last samples and rewards, lower"
            " optimizer.learning_rate, or resume from an earlier checkpoint."
        )

    def _nonfinite_gradients(self) -> list[str]:
        """Return a description of each weight on this rank whose gradient is not finite."""
        descriptions = []
        for name in self.weights:
            gradient = getattr(self.weights.parameter(name), "main_grad", None)
            if gradient is None:
                continue
            piece = self.weights.gather(name, gradient)
            if count := piece.numel() - int(piece.isfinite().sum()):
                descriptions.append(
                    f"{name} ({count} of {piece.numel()} values on rank {self.world.rank})"
                )
        return descriptions
