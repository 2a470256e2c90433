"""GPT models in megatron-core from a model's shape and a parallel layout."""

from __future__ import annotations

import warnings
from typing import Literal

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from aligner.config.model_shape import ModelShape
from aligner.config.schema import Parallel
from aligner.megatron.modules import ScalarHead, decoder_submodules
from aligner.megatron.world import World

Head = Literal["vocabulary", "scalar"]


def _finalize_gradients(model: list[MegatronModule], num_tokens: torch.Tensor | None = None, **_: object) -> None:
    # Our losses are sums over a global denominator: gradients are added up, and never divided by a count.
    finalize_model_grads(model, None)


def transformer_config(shape: ModelShape, layout: Parallel, dtype: torch.dtype) -> TransformerConfig:
    """megatron-core's description of the model at a layout."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig(
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_heads,
            num_query_groups=shape.num_kv_heads,
            kv_channels=shape.head_dim,
            ffn_hidden_size=shape.ffn_hidden_size,
            normalization="RMSNorm",
            layernorm_epsilon=shape.norm_epsilon,
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            num_layers_in_last_pipeline_stage=layout.last_stage_layers if layout.pipeline > 1 else None,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            # Weights are read from files, so none are drawn.
            perform_initialization=False,
            use_cpu_initialization=True,
            # Packed micro-batches differ in length; megatron-core ties that to this dispatcher, for dense models too.
            variable_seq_lengths=True,
            moe_token_dispatcher_type="alltoall",
            # With it neither the schedule nor DDP divides by micro-batches or ranks (see _finalize_gradients).
            calculate_per_token_loss=True,
            finalize_model_grads_func=_finalize_gradients,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            apply_rope_fusion=False,
        )


def build_model(shape: ModelShape, world: World, head: Head, dtype: torch.dtype) -> GPTModel:
    """This rank's stage and tensor slice of the model, weights not yet read."""
    config = transformer_config(shape, world.layout, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = GPTModel(
            config=config,
            transformer_layer_spec=decoder_submodules(config),
            vocab_size=shape.vocab_size,
            max_sequence_length=shape.max_positions,
            pre_process=world.is_first_stage,
            post_process=world.is_last_stage,
            share_embeddings_and_output_weights=shape.tied_embeddings and head == "vocabulary",
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,
            parallel_output=True,
        )
    _mark_tensor_parallel(model)
    if head == "scalar" and world.is_last_stage:
        model.output_layer = ScalarHead(shape.hidden_size).to(dtype)
    return model.to(world.device)


def _mark_tensor_parallel(model: GPTModel) -> None:
    # megatron-core marks a cut weight only where it draws it; unmarked, it would be counted once in the gradient norm
    # instead of once a slice.
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding)):
            dimension = 0
        elif isinstance(module, RowParallelLinear):
            dimension = 1
        else:
            continue
        if module.weight is not None:  # a tied head of the same stage has none of its own
            set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=dimension, stride=1)


def wrap_for_training(model: GPTModel) -> DistributedDataParallel:
    """megatron-core's DDP: contiguous fp32 gradient buffers, summed over the data ranks."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False, average_in_collective=False
    )
    return DistributedDataParallel(model.config, settings, model)
