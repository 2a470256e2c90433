"""Arguments and environment variables that a configuration passes on to vLLM."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from aligner.checks.check import check
from aligner.checks.source_types import SourcePackage, read_fields
from aligner.checks.vllm_arguments import (
    find_invalid_arguments,
    find_refused_arguments,
    format_environment,
)
from aligner.config.compose import compose_config
from aligner.errors import ConfigError
from aligner.schema import VLLMConfig
from aligner.vllm_environment import find_vllm_package
from tests.engines.vllm.shared_clients import INSTALLED

_VLLM = ("experiment=tiny_ppo", "engine=vllm", "+model.config.head_dim=32")
_ACCEPTED_ON_GPUS = (
    "attention_backend attention_config enable_chunked_prefill long_prefill_token_threshold"
    " long_prefill_token_threshold_adaptive"
)
# Arguments of vLLM 0.32 that reach it on all machines. A new release's arguments are added here, or
# to the refusals in `aligner/checks/vllm_arguments.py`.
_ACCEPTED = (
    "additional_config aggregate_engine_logging all2all_backend allowed_local_media_path "
    "allowed_media_domains async_scheduling block_size collect_detailed_traces compilation_config "
    "cp_kv_cache_interleave_size cpu_distributed_timeout_seconds cudagraph_capture_sizes "
    "cudagraph_metrics custom_histogram_buckets dbo_decode_token_threshold "
    "dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate "
    "decode_context_parallel_size disable_cascade_attn disable_chunked_mm_input "
    "disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_log_stats "
    "disable_nccl_for_dp_synchronization distributed_timeout_seconds dp_sync_interval "
    "ec_manager_config enable_cumem_allocator enable_dbo enable_fault_tolerance "
    "enable_flashinfer_autotune enable_hc_sp enable_layerwise_nvtx_tracing enable_log_requests "
    "enable_logging_iteration_details enable_mamba_cache_stochastic_rounding "
    "enable_mamba_shared_prefix_checkpoint enable_mfu_metrics enable_mm_embeds "
    "enable_mm_processor_stats enable_nccl_comm_suspend enable_prefix_caching "
    "enable_shm_tensor_arena enable_trace_replay engram_config fail_on_environ_validation "
    "fault_tolerance_config gdn_prefill_backend hf_token interleave_mm_strings io_processor_plugin "
    "ir_op_priority jit_monitor_mode jit_monitor_verbose kda_decode_backend kda_prefill_backend "
    "kernel_config kv_cache_metrics kv_cache_metrics_sample kv_events_config language_model_only "
    "limit_mm_per_prompt linear_backend log_config_file log_level logging_config mamba_backend "
    "mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds mamba_config "
    "mamba_ssm_cache_dtype mamba_ssu_algorithm max_cudagraph_capture_size max_num_active_seqs "
    "max_num_batched_tokens max_num_scheduled_tokens max_parallel_loading_workers media_io_kwargs "
    "mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
    "mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_only "
    "mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb "
    "mm_processor_cache_type mm_processor_device mm_processor_kwargs "
    "mm_shm_cache_max_object_size_mb mm_tensor_ipc moe_backend numa_bind numa_bind_cpus "
    "numa_bind_nodes optimization_level otlp_traces_endpoint per_request_spec_decode_metrics "
    "performance_mode prefill_schedule_interval prefix_cache_retention_interval "
    "prefix_caching_hash_algo prefix_match_unit profiler_config reasoning_config reasoning_parser "
    "reasoning_parser_plugin renderer_num_workers replayssm_buffer_len scheduler_cls "
    "scheduler_reserve_full_isl scheduling_policy served_model_name show_hidden_metrics_for_version "
    "shutdown_timeout skip_mm_profiling sleep_mode_offload_cudagraph sleep_preserve_parameter_names "
    "sparse_indexer_topk_backend structured_outputs_config swa_bounded_replay trust_remote_code "
    "ubatch_size use_fp64_gumbel use_replayssm video_pruning_method video_pruning_rate watermark"
)


def refuse(*, on_gpus: bool = False, **settings: Any) -> list[str]:
    """Return the lines about refused settings."""
    return [*find_refused_arguments(VLLMConfig(**settings), on_gpus=on_gpus)]


def find_invalid(**settings: Any) -> list[str]:
    """Return the lines about settings that the installed vLLM does not accept."""
    return [*find_invalid_arguments(VLLMConfig(**settings))]


@pytest.mark.promise("vllm-arguments-are-checked")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("seed", "aligner sets it; set seed"),
        ("tensor_parallel_size", "aligner sets it; set engine.parallel.tensor"),
        ("dtype", "aligner sets it; set engine.precision"),
        ("enforce_eager", "aligner sets it; set engine.cuda_graphs"),
        ("load_format", "vLLM reads no weights from files; they arrive by weight sync"),
        ("safetensors_load_strategy", "vLLM reads no weights from files"),
        ("weight_transfer_config", "a weight sync requires aligner's own extension"),
        ("quantization", "a weight sync cannot load the trainer's weights into quantized layers"),
        ("logprobs_mode", "aligner computes the log-probs in vLLM's workers"),
        ("speculative_config", "the log-probs of this sampler of vLLM are not those"),
        ("pipeline_parallel_size", "aligner sets it; set engine.parallel.pipeline"),
        ("nnodes", "aligner starts one worker of vLLM for each rank"),
        ("enable_expert_parallel", "aligner sets it; set engine.parallel.expert"),
        ("enable_eplb", "a weight sync sends each worker consecutive experts"),
        ("kv_transfer_config", "a KV cache outside the engine would survive a weight sync"),
        ("enable_lora", "a weight sync sends weights with the adapter merged; set actor.lora.rank"),
    ],
)
def test_argument_that_would_break_a_promise_is_refused(name: str, message: str) -> None:
    for on_gpus in (False, True):
        (problem,) = refuse(args={name: "value"}, on_gpus=on_gpus)
        assert problem.startswith(f"engine.vllm.args.{name}: is refused, because {message}")


@pytest.mark.parametrize("name", _ACCEPTED_ON_GPUS.split())
def test_argument_that_fails_on_cpus_is_refused_there_only(name: str) -> None:
    (problem,) = refuse(args={name: True})
    assert problem.startswith(f"engine.vllm.args.{name}: is refused, because ")
    assert not refuse(args={name: True}, on_gpus=True)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("async_scheduling", True, "the model runner of vLLM that aligner uses does not support"),
        ("enable_dbo", True, "vLLM does not support dual batch overlap with pipeline parallelism"),
        ("async_scheduling", False, ""),
    ],
)
def test_argument_is_refused_with_a_pipeline_only(name: str, value: bool, message: str) -> None:
    settings = VLLMConfig(args={name: value})
    problems = [*find_refused_arguments(settings, on_gpus=True, has_pipeline=True)]
    assert len(problems) == bool(message)
    assert all(message in problem for problem in problems)
    assert not refuse(args={name: value}, on_gpus=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CUDA_VISIBLE_DEVICES", "is refused, because aligner starts one worker"),
        ("PYTHONPATH", "is refused, because aligner sets it; set engine.vllm.python"),
        ("VLLM_CPU_KVCACHE_SPACE", "is refused, because aligner sets it; set engine.kv_cache_mib"),
        ("VLLM_USE_V2_MODEL_RUNNER", "is refused, because aligner computes the log-probs"),
        ("BAD NAME", "is not the name of an environment variable"),
    ],
)
def test_variable_that_would_break_a_promise_is_refused(name: str, message: str) -> None:
    (problem,) = refuse(env={name: "1"})
    assert problem.startswith(f"engine.vllm.env.{name}: {message}")


def test_environment_has_texts_as_values() -> None:
    values = {"A": True, "B": False, "C": 3, "D": "text"}
    assert format_environment(VLLMConfig(env=values)) == {"A": "1", "B": "0", "C": "3", "D": "text"}


@pytest.mark.promise("vllm-arguments-are-checked")
def test_check_reports_refused_arguments_without_vllm(tmp_path: Path) -> None:
    overrides = ["+engine.vllm.args.seed=3", "+engine.vllm.env.RANK=0", "cluster=slurm"]
    with pytest.raises(ConfigError) as error:
        check(compose_config([*_VLLM, *overrides, f"run.dir={tmp_path / 'run'}"]))
    assert "engine.vllm.args.seed: is refused, because aligner sets it; set seed" in str(error)
    assert "engine.vllm.env.RANK: is refused, because aligner starts one worker" in str(error)


def test_arguments_have_no_effect_on_another_engine(tmp_path: Path) -> None:
    message = re.escape(
        "engine.vllm.args.block_size=64: has no effect with engine.kind=embedded; requires"
        " engine.kind=vllm"
    )
    with pytest.raises(ConfigError, match=message):
        compose_config(
            ["experiment=tiny_ppo", "+engine.vllm.args.block_size=64", f"run.dir={tmp_path}"]
        )


@INSTALLED
@pytest.mark.promise("vllm-arguments-are-checked")
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            {"block_sise": 64},
            "block_sise: vLLM 0.32.0 has no such argument; did you mean"
            " engine.vllm.args.block_size?",
        ),
        ({"block_size": "large"}, "block_size=large: expected int or null, got str"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy=lifo: allowed: fcfs, priority"),
        (
            {"compilation_config": {"cudagraph_mod": 1}},
            "compilation_config.cudagraph_mod: CompilationConfig has no such argument; did you"
            " mean engine.vllm.args.compilation_config.cudagraph_mode?",
        ),
        (
            {"cudagraph_capture_sizes": [1, "two"]},
            "cudagraph_capture_sizes[1]=two: expected int, got str",
        ),
    ],
)
def test_argument_that_vllm_lacks_is_refused(args: dict[str, Any], message: str) -> None:
    assert find_invalid(args=args) == [f"engine.vllm.args.{message}"]


@INSTALLED
def test_valid_arguments_are_accepted() -> None:
    args = {
        "block_size": 64,
        "max_num_batched_tokens": 4096,
        "attention_backend": "FLASH_ATTN",
        "compilation_config": {"mode": 3, "cudagraph_mode": "FULL", "compile_sizes": [1, 2]},
        "performance_mode": "throughput",
        "enable_prefix_caching": None,
    }
    env = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_BATCH_INVARIANT": True, "NCCL_DEBUG": "INFO"}
    assert not find_invalid(args=args, env=env)


@INSTALLED
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "VLLM_LOGGIN_LEVEL",
            "INFO",
            ": vLLM 0.32.0 has no such environment variable; did you mean"
            " engine.vllm.env.VLLM_LOGGING_LEVEL?",
        ),
        ("VLLM_PORT", "many", "=many: expected an integer"),
        ("VLLM_BATCH_INVARIANT", "yes", "=yes: allowed: 0, 1"),
        ("VLLM_KV_CACHE_LAYOUT", "XYZ", "=XYZ: allowed: LBNHC, "),
        ("NCCL_DEBUG", ["INFO"], "=['INFO']: expected a text or a number"),
        ("NCCL_DEBUG", None, "=null: expected a text or a number"),
    ],
)
def test_invalid_variable_is_refused(name: str, value: Any, message: str) -> None:
    (problem,) = find_invalid(env={name: value})
    assert problem.startswith(f"engine.vllm.env.{name}{message}")


@INSTALLED
def test_check_reports_unknown_arguments_of_installed_vllm(tmp_path: Path) -> None:
    message = re.escape("engine.vllm.args.block_sise: vLLM 0.32.0 has no such argument")
    overrides = [*_VLLM, "+engine.vllm.args.block_sise=64", f"run.dir={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match=message):
        check(compose_config(overrides))


def test_release_with_other_source_layout_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_version.py").write_text("__version__ = version = '9.9'\n")
    module = "aligner.checks.vllm_arguments.find_vllm_package"
    monkeypatch.setattr(module, lambda settings: package)
    for key, settings in (("args", {"block_size": 1}), ("env", {"VLLM_PORT": 1})):
        message = f"engine.vllm.{key}: the installed vLLM 9.9 has no vllm."
        with pytest.raises(ConfigError, match=re.escape(message)):
            find_invalid(**{key: settings})


@INSTALLED
def test_every_argument_of_installed_vllm_is_accepted_or_refused() -> None:
    package = SourcePackage(find_vllm_package(VLLMConfig()))
    arguments = package.find_class("vllm.engine.arg_utils.AsyncEngineArgs")
    assert arguments is not None
    reaching = {name for name in read_fields(arguments) if not refuse(args={name: 1})}
    assert reaching == set(_ACCEPTED.split())
