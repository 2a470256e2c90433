"""megatron-core's optimizer and learning-rate schedule from our configuration."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from aligner.config.schema import Optimizer


def build_optimizer(
    model: DistributedDataParallel, settings: Optimizer, total_steps: int
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Adam with gradient clipping, and its schedule over `total_steps` optimizer steps."""
    dtype = model.config.params_dtype
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.learning_rate,
            min_lr=0.0,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.epsilon,
            clip_grad=settings.clip_grad_norm,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            use_distributed_optimizer=False,
            log_num_zeros_in_grad=False,
        ),
        [model],
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.learning_rate,
        min_lr=0.0,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=total_steps,
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=total_steps,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def adam_state(optimizer: MegatronOptimizer) -> dict[torch.nn.Parameter, dict[str, Any]]:
    """The state of Adam by parameter, of all the torch optimizers that megatron-core chained together."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return {parameter: state for part in chained for parameter, state in part.optimizer.state.items()}
