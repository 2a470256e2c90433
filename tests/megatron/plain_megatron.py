"""A model of megatron-core without aligner: loads a torch_dist checkpoint and saves it again.

Arguments: the checkpoint to load, the directory of the new checkpoint, a directory for the
parameters of every rank (`rank_N.pt`), and a JSON object with the arguments of the model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

# megatron-core moves tied embeddings to a GPU, and waits for a GPU when it saves, without asking
# whether there is one.
torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
torch.cuda.synchronize = lambda *_: None
torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]


def main() -> None:
    source, target, dump, described = sys.argv[1:]
    settings = json.loads(described)
    dist.init_process_group("gloo")
    tensor, pipeline = settings["tensor"], settings["pipeline"]
    parallel_state.initialize_model_parallel(tensor, pipeline)
    activation = {"silu": F.silu, "gelu": F.gelu}[settings["activation"]]
    config = TransformerConfig(
        **settings["config"],
        activation_func=activation,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
    )
    experts = settings["config"].get("num_moe_experts")
    spec = get_gpt_layer_local_spec(
        num_experts=experts,
        qk_layernorm=settings["config"]["qk_layernorm"],
        normalization=settings["config"]["normalization"],
    )
    if experts:
        # The norm before experts has its own name with transformer-engine's layers, which
        # Megatron-LM uses.
        del spec.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    rank = parallel_state.get_pipeline_model_parallel_rank()
    model = GPTModel(
        config,
        spec,
        settings["vocab_size"],
        settings["max_positions"],
        pre_process=rank == 0,
        post_process=rank == pipeline - 1,
        share_embeddings_and_output_weights=settings["tied"],
        position_embedding_type=settings["positions"],
    )
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, source)
    model.load_state_dict(loaded["model"], strict=True)
    parameters = {name: each.detach().clone() for name, each in model.named_parameters()}
    torch.save(parameters, Path(dump) / f"rank_{dist.get_rank()}.pt")
    dist_checkpointing.save(
        {"model": model.sharded_state_dict(), "iteration": 7}, target, ("torch_dist", 1)
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
