"""Checks of `engine.tensorrt_llm.args`, which reach TensorRT-LLM unchanged.

Arguments with which aligner could not keep its promises are refused on every machine. All other
arguments are compared with those of the installed TensorRT-LLM.
"""

import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path

from aligner.checks.refused_arguments import Refusal, find_refusals
from aligner.checks.source_types import SourcePackage, find_field_problems
from aligner.errors import ConfigError
from aligner.schema import TensorRTLLMConfig

_ARGS = "engine.tensorrt_llm.args"
_ARGUMENTS_CLASS = "tensorrt_llm.llmapi.llm_args.TorchLlmArgs"

# Arguments that aligner sets from keys of its own, with these keys.
_SET_BY_KEYS: Mapping[str, str] = {
    "dtype": "engine.precision",
    "max_seq_len": "data.max_prompt_tokens and rollout.max_response_tokens",
    "max_input_len": "data.max_prompt_tokens and rollout.max_response_tokens",
    "max_batch_size": "engine.batch_size",
    "max_num_tokens": "engine.tensorrt_llm.max_num_tokens",
    "stream_interval": "engine.tensorrt_llm.stream_interval",
    "cuda_graph_config": "engine.cuda_graphs",
    "kv_cache_config": "engine.kv_cache_mib or engine.tensorrt_llm.free_memory_fraction",
    **dict.fromkeys(("enable_sleep", "sleep_config"), "engine.sleep"),
    "tensor_parallel_size": "engine.parallel.tensor",
    **dict.fromkeys(
        ("moe_tensor_parallel_size", "moe_expert_parallel_size"), "engine.parallel.expert"
    ),
    **dict.fromkeys(("model", "revision"), "model.path"),
}
_REFUSALS = (
    Refusal(
        "load_format checkpoint_format checkpoint_loader mx_* gms_* force_dynamic_quantization"
        " quant_config",
        "TensorRT-LLM reads no weights from files; they arrive by weight sync in bf16",
    ),
    Refusal(
        "ray_worker_extension_cls orchestrator_type",
        "a weight sync requires aligner's own extension of TensorRT-LLM's Ray workers",
    ),
    Refusal(
        "enable_lora lora_config max_lora_rank max_loras max_cpu_loras peft_cache_config",
        "a weight sync sends weights with the adapter merged",
        "set actor.lora.rank",
    ),
    Refusal(
        "sampler_type enable_chunked_prefill",
        "aligner selects what the log-probs and resumed responses require in each release",
    ),
    Refusal(
        "speculative_config decoding_config batched_logits_processor guided_decoding_backend"
        " max_beam_width",
        "TensorRT-LLM would sample from another distribution than that of the log-probs",
        "set rollout.temperature, rollout.top_k or rollout.top_p",
    ),
    Refusal(
        "kv_connector_config cache_transceiver_config",
        "a KV cache outside the engine would survive a weight sync",
    ),
    Refusal(
        "tokenizer tokenizer_* skip_tokenizer_init postprocess_tokenizer_dir"
        " num_postprocess_workers",
        "aligner exchanges token ids with TensorRT-LLM, which loads no tokenizer",
        "set model.path",
    ),
    Refusal(
        "pipeline_parallel_size pp_partition context_parallel_size cp_config"
        " moe_cluster_parallel_size enable_attention_dp enable_lm_head_tp_in_adp"
        " attention_dp_config gpus_per_node ray_placement_config placement_groups"
        " placement_bundle_indices per_worker_gpu_share",
        "aligner starts one worker of TensorRT-LLM for each rank of a replica, on the rank's"
        " device",
        "set engine.parallel",
    ),
    Refusal("backend build_config", "aligner uses TensorRT-LLM's PyTorch backend only"),
)


def find_refused_arguments(settings: TensorRTLLMConfig) -> Iterator[str]:
    """Yield a line for each argument that aligner refuses on every machine.

    Args:
        settings: Section `engine.tensorrt_llm` of the configuration.
    """
    yield from find_refusals(_ARGS, settings.args, _SET_BY_KEYS, _REFUSALS).values()


def find_invalid_arguments(settings: TensorRTLLMConfig) -> Iterator[str]:
    """Yield a line for each argument that the installed TensorRT-LLM does not accept.

    The arguments are read from TensorRT-LLM's source, because its import starts MPI.

    Raises:
        ConfigError: The installed release defines its arguments in another way.
    """
    if not settings.args:
        return
    specification = importlib.util.find_spec("tensorrt_llm")
    if specification is None or not specification.submodule_search_locations:
        return  # another line reports that TensorRT-LLM is not installed
    package = SourcePackage(Path(specification.submodule_search_locations[0]))
    release = "TensorRT-LLM"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        release += f" {importlib.metadata.version('tensorrt_llm')}"
    arguments = package.find_class(_ARGUMENTS_CLASS)
    if arguments is None:
        raise ConfigError(
            f"{_ARGS}: the installed {release} has no {_ARGUMENTS_CLASS}, with which aligner checks"
            " this key; remove the key, or install a release that docs/tensorrt_llm.md names"
        )
    refused = find_refusals(_ARGS, settings.args, _SET_BY_KEYS, _REFUSALS)
    accepted = {name: value for name, value in settings.args.items() if name not in refused}
    yield from find_field_problems(arguments, _ARGS, accepted, release)
