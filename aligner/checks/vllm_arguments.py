"""Checks of `engine.vllm.args` and `engine.vllm.env`, which reach vLLM unchanged.

Arguments with which aligner could not keep its promises are refused on every machine. All other
arguments are compared with those of the installed vLLM.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from aligner.checks.refused_arguments import Refusal, find_refusals
from aligner.checks.source_types import (
    SourceModule,
    SourcePackage,
    find_field_problems,
)
from aligner.errors import ConfigError
from aligner.schema import VLLMConfig
from aligner.schema.conditions import format_value
from aligner.schema.options import format_key_hint
from aligner.vllm_environment import find_vllm_package

_ARGS = "engine.vllm.args"
_ENV = "engine.vllm.env"
_ARGUMENTS_CLASS = "vllm.engine.arg_utils.AsyncEngineArgs"
_VARIABLES_MODULE = "vllm.envs"
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Arguments that aligner sets from keys of its own, with these keys.
_SET_BY_KEYS: Mapping[str, str] = {
    "seed": "seed",
    "dtype": "engine.precision",
    "max_model_len": "data.max_prompt_tokens and rollout.max_response_tokens",
    "max_num_seqs": "engine.batch_size",
    "gpu_memory_utilization": "engine.vllm.memory_fraction",
    "kv_cache_memory_bytes": "engine.kv_cache_mib",
    "num_gpu_blocks_override": "engine.kv_cache_mib",
    "enforce_eager": "engine.cuda_graphs",
    "enable_sleep_mode": "engine.sleep",
    "stream_interval": "engine.vllm.stream_interval",
    "tensor_parallel_size": "engine.parallel.tensor",
    "pipeline_parallel_size": "engine.parallel.pipeline",
    "data_parallel_size": "engine.parallel.data",
    "enable_expert_parallel": "engine.parallel.expert",
    **dict.fromkeys(
        ("model", "hf_config_path", "config_format", "revision", "code_revision"), "model.path"
    ),
}
# The same for environment variables.
_VARIABLES_SET_BY_KEYS: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "engine.kv_cache_mib",
    "VLLM_FLOAT32_MATMUL_PRECISION": "engine.precision",
    "VLLM_MODEL_REDIRECT_PATH": "model.path",
    "VLLM_USE_MODELSCOPE": "model.path",
    **dict.fromkeys(("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"), "engine.vllm.python"),
}


_REFUSALS = (
    Refusal(
        "load_format model_weights model_loader_extra_config ignore_patterns download_dir"
        " safetensors_* pt_load_map_location use_tqdm_on_load",
        "vLLM reads no weights from files; they arrive by weight sync",
    ),
    Refusal(
        "weight_transfer_config worker_cls worker_extension_cls",
        "a weight sync requires aligner's own extension of vLLM's workers",
    ),
    Refusal(
        "quantization quantization_config allow_deprecated_quantization",
        "a weight sync cannot load the trainer's weights into quantized layers",
    ),
    Refusal(
        "cpu_offload_* offload_*",
        "a weight sync cannot load weights that vLLM keeps outside the device's memory",
    ),
    Refusal(
        "enable_lora max_loras max_lora_rank max_cpu_loras lora_* default_mm_loras"
        " fully_sharded_loras enable_tower_connector_lora specialize_active_lora"
        " enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels",
        "a weight sync sends weights with the adapter merged",
        "set actor.lora.rank",
    ),
    Refusal(
        "hf_overrides model_class_overrides model_impl disable_sliding_window",
        "the engine would compute another model than the trainer, or have weights with other names",
        "change the model's config.json in model.path",
    ),
    Refusal(
        "kv_cache_dtype kv_cache_dtype_skip_layers",
        "another precision of the KV cache changes the log-probs of all tokens",
        "set engine.kv_cache_mib to save memory",
    ),
    Refusal(
        "logprobs_mode max_logprobs",
        "aligner computes the log-probs in vLLM's workers, at the sampling temperature and for any"
        " number of tokens",
    ),
    Refusal(
        "logits_processors generation_config override_generation_config watermark_config"
        " diffusion_config",
        "vLLM would sample from another distribution than that of the log-probs",
        "set rollout.temperature, rollout.top_k, rollout.top_p or rollout.min_p",
    ),
    Refusal(
        "speculative_config spec_method spec_model spec_tokens enable_batch_sharded_sampling",
        "the log-probs of this sampler of vLLM are not those at the sampling temperature",
        "for speculative decoding, set engine=embedded and engine.speculation.tokens",
    ),
    Refusal(
        "kv_sharing_fast_prefill",
        "vLLM would return wrong log-probs for the tokens of prompts",
    ),
    Refusal(
        "kv_transfer_config kv_offloading_size kv_offloading_backend ec_transfer_config",
        "a KV cache outside the engine would survive a weight sync",
    ),
    Refusal(
        "enable_return_routed_experts aux_output_config return_sampling_mask",
        "aligner does not read this output of vLLM",
        "use engine=embedded for algorithm.routing_replay and rollout.renormalize",
    ),
    Refusal(
        "tokenizer tokenizer_* skip_tokenizer_init tokens_only enable_prompt_embeds",
        "aligner exchanges token ids with vLLM, which loads no tokenizer",
        "set model.path",
    ),
    Refusal(
        "runner convert pooler_config",
        "aligner uses vLLM only to generate tokens and to score them",
    ),
    Refusal(
        "max_num_queued_*",
        "vLLM would reject requests that aligner has queued",
        "set engine.batch_size",
    ),
    Refusal(
        "enable_ep_weight_filter enable_elastic_ep elastic_ep_* enable_eplb eplb_config"
        " expert_placement_strategy",
        "a weight sync sends each worker consecutive experts",
        "set engine.parallel.expert",
    ),
    Refusal(
        "prefill_context_parallel_size data_parallel_* device_ids"
        " distributed_executor_backend master_addr master_port nnodes node_rank"
        " ray_workers_use_nsight",
        "aligner starts one worker of vLLM for each rank of a replica, on the rank's device",
        "set engine.parallel",
    ),
)
# Arguments that are refused if vLLM runs on CPUs.
_CPU_REFUSALS = (
    Refusal(
        "enable_chunked_prefill long_prefill_token_threshold*",
        "vLLM 0.32 on CPUs cannot divide the prefill of a request with a seed",
    ),
    Refusal(
        "attention_backend attention_config",
        "aligner selects the attention of vLLM on CPUs that computes in float32",
    ),
)
# Arguments that are refused with pipeline parallelism, unless their value is false or null.
_PIPELINE_REFUSALS = (
    Refusal(
        "async_scheduling",
        "the model runner of vLLM that aligner uses does not support it with pipeline parallelism",
        "set engine.parallel.pipeline=1",
    ),
    Refusal(
        "enable_dbo ubatch_size",
        "vLLM does not support dual batch overlap with pipeline parallelism",
        "set engine.parallel.pipeline=1",
    ),
)
_VARIABLE_REFUSALS = (
    Refusal(
        "CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES RANK LOCAL_RANK WORLD_SIZE"
        " LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_DP_* VLLM_RAY_* VLLM_PP_LAYER_PARTITION",
        "aligner starts one worker of vLLM for each rank of a replica, on the rank's device",
        "set engine.parallel",
    ),
    Refusal(
        "VLLM_WORKER_MULTIPROC_METHOD VLLM_ENABLE_V1_MULTIPROCESSING",
        "aligner must be able to stop all processes of vLLM, so that they are started in one way",
    ),
    Refusal(
        "VLLM_USE_V2_MODEL_RUNNER",
        "aligner computes the log-probs in the sampler of vLLM's first model runner",
    ),
    Refusal(
        "VLLM_TEST_FORCE_LOAD_FORMAT HF_HUB_OFFLINE",
        "vLLM reads only the model's config.json; the weights arrive by weight sync",
    ),
)


def find_refused_arguments(
    settings: VLLMConfig, *, on_gpus: bool, has_pipeline: bool = False
) -> Iterator[str]:
    """Yield a line for each argument and each environment variable that aligner refuses.

    Args:
        settings: Section `engine.vllm` of the configuration.
        on_gpus: Whether vLLM runs on GPUs.
        has_pipeline: Whether a replica has several pipeline stages.
    """
    refusals = _REFUSALS if on_gpus else (*_REFUSALS, *_CPU_REFUSALS)
    yield from find_refusals(_ARGS, settings.args, _SET_BY_KEYS, refusals).values()
    if has_pipeline:
        enabled = {name: value for name, value in settings.args.items() if value}
        yield from find_refusals(_ARGS, enabled, {}, _PIPELINE_REFUSALS).values()
    variables = find_refusals(_ENV, settings.env, _VARIABLES_SET_BY_KEYS, _VARIABLE_REFUSALS)
    yield from variables.values()
    for name in settings.env:
        if not _VARIABLE_NAME.fullmatch(name):
            yield f"{_ENV}.{name}: is not the name of an environment variable"


def find_invalid_arguments(settings: VLLMConfig) -> Iterator[str]:
    """Yield a line for each argument or environment variable that the installed vLLM does not
    accept.

    The arguments are read from vLLM's source, because importing vLLM takes 13 s of CPU time.

    Raises:
        ConfigError: vLLM is not installed, or its release defines its arguments in another way.
    """
    if not settings.args and not settings.env:
        return
    package = SourcePackage(find_vllm_package(settings))
    release = f"vLLM {_read_version(package)}"
    if settings.args:
        arguments = package.find_class(_ARGUMENTS_CLASS)
        if arguments is None:
            raise _make_layout_error(_ARGS, release, _ARGUMENTS_CLASS)
        # `find_refused_arguments` has a line about each refused argument.
        refused = find_refusals(_ARGS, settings.args, _SET_BY_KEYS, _REFUSALS)
        accepted = {name: value for name, value in settings.args.items() if name not in refused}
        yield from find_field_problems(arguments, _ARGS, accepted, release)
    if settings.env:
        yield from _find_variable_problems(package, settings.env, release)


def format_environment(settings: VLLMConfig) -> dict[str, str]:
    """Return `engine.vllm.env` with texts as values; true and false become 1 and 0."""
    return {
        name: str(int(value)) if isinstance(value, bool) else str(value)
        for name, value in settings.env.items()
    }


def _find_variable_problems(
    package: SourcePackage, variables: Mapping[str, Any], release: str
) -> Iterator[str]:
    """Yield a line for each variable `VLLM_…` that vLLM does not know, and for each invalid value.

    Other programs and libraries read variables with other names, of which any text is accepted.
    """
    module = package.load(_VARIABLES_MODULE)
    names = set() if module is None else _read_variable_names(module)
    if module is None or not names:
        raise _make_layout_error(_ENV, release, f"{_VARIABLES_MODULE}.environment_variables")
    for name, value in variables.items():
        key = f"{_ENV}.{name}"
        if isinstance(value, (list, dict)) or value is None:
            yield f"{key}={format_value(value)}: expected a text or a number"
        elif name in names:
            yield from _find_variable_problem(module, key, name, value)
        elif name.startswith("VLLM_"):
            hint = format_key_hint(_ENV, name, names, "")
            problem = f"{key}: {release} has no such environment variable"
            yield f"{problem}; {hint}" if hint else problem


def _find_variable_problem(module: SourceModule, key: str, name: str, value: Any) -> Iterator[str]:
    """Yield a line if vLLM cannot convert a variable's value to the variable's type."""
    definition = module.get_definition(name)
    if not isinstance(definition, ast.AnnAssign):
        return
    kind = module.read_type(definition.annotation)
    types = [scalar for scalar in kind.scalars if scalar != "None"]
    text = str(value)
    shown = f"{key}={format_value(value)}"
    if kind.choices and not types and text.lower() not in map(_lower, kind.choices):
        yield f"{shown}: allowed: {', '.join(map(str, kind.choices))}"
    elif types == ["bool"] and not isinstance(value, bool) and text not in ("0", "1"):
        yield f"{shown}: allowed: 0, 1"
    elif types == ["int"] and not re.fullmatch(r"[+-]?\d+", text):
        yield f"{shown}: expected an integer"
    elif types == ["float"] and not _is_number(text):
        yield f"{shown}: expected a number"


def _read_variable_names(module: SourceModule) -> set[str]:
    """Return the names of the environment variables that vLLM reads."""
    definition = module.get_definition("environment_variables")
    table = definition.value if isinstance(definition, (ast.Assign, ast.AnnAssign)) else None
    keys = table.keys if isinstance(table, ast.Dict) else []
    return {str(key.value) for key in keys if isinstance(key, ast.Constant)}


def _read_version(package: SourcePackage) -> str:
    """Return the version of vLLM; empty if it is not in the expected file."""
    module = package.load("vllm._version")
    definition = None if module is None else module.get_definition("__version__")
    value = definition.value if isinstance(definition, ast.Assign) else None
    return str(value.value) if isinstance(value, ast.Constant) else ""


def _make_layout_error(key: str, release: str, name: str) -> ConfigError:
    """Return the error for a release of vLLM in which a definition is missing."""
    return ConfigError(
        f"{key}: the installed {release} has no {name}, with which aligner checks this key; remove"
        " the key, or install vLLM with `aligner install-vllm`"
    )


def _lower(value: Any) -> str:
    """Return a value as text in lower case."""
    return str(value).lower()


def _is_number(text: str) -> bool:
    """Return whether Python can convert a text to a float."""
    try:
        float(text)
    except ValueError:
        return False
    return True
