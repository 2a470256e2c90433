"""Checks of the section `engine` against the model, the layout, the algorithm and the machine."""

import importlib.util
from collections.abc import Iterator

from aligner.checks import tensorrt_llm_arguments, vllm_arguments
from aligner.errors import ConfigError
from aligner.models.layouts import (
    cache_bytes_per_sequence,
    choose_block_tokens,
    engine_problems,
    iterate_engine_stages,
    speculation_problems,
    tensor_sizes,
)
from aligner.models.model_source import ExpectedInputs, read_architecture, read_quantization
from aligner.models.shape import ModelShape
from aligner.placement.roles import get_device, has_gpu, uses_gpus
from aligner.schema import Config, EngineConfig
from aligner.schema.derived import describe_max_sequence_length, get_max_sequence_length
from aligner.user_code import import_object
from aligner.values import split_callable_name
from aligner.vllm_environment import read_supported_architectures

TENSORRT_LLM_FAMILIES = ("llama", "mixtral", "qwen3_moe")
"""Model families whose weights can be sent to TensorRT-LLM."""
VLLM_FAMILIES = (
    "llama",
    "smollm3",
    "granite",
    "seed_oss",
    "phi3",
    "olmo2",
    "gemma2",
    "gemma3",
    "glm4",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "glm4_moe",
    "minimax_m2",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "olmoe",
    "gpt2",
    "gpt_neox",
)
"""Model families whose weights can be sent to vLLM."""
# Families whose models in vLLM have the biases of `attention_bias` and `mlp_bias`.
_VLLM_BIASED_FAMILIES = ("gpt_oss", "seed_oss")
# Limit of clamped feed-forward networks in vLLM 0.32, which ignores the entry `swiglu_limit`.
_VLLM_GATE_LIMIT = 7.0
# Number by which vLLM 0.32 on CPUs must be able to divide the feed-forward rows of an expert with a
# clamped network. The rows of other experts are padded.
_VLLM_CPU_EXPERT_ROWS = 32
# Families whose models in vLLM 0.32 require a layer with experts in each pipeline stage.
_VLLM_EXPERT_STAGES = ("glm4_moe", "qwen3_moe")
# Head dimensions that the CPU attention of vLLM 0.32 supports.
_VLLM_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# `kv_lora_rank` and `qk_rope_head_dim` that the latent attention of vLLM 0.32 on CPUs supports.
_VLLM_CPU_LATENT = (512, 64)
# External engines, which run in processes of their own and have a start timeout `timeout_s`.
_EXTERNAL_ENGINES = ("tensorrt_llm", "vllm")
_EMBEDDED_ADVICE = "use engine=embedded"
# Number of elements that a vectorized activation function computes at a time on CPUs. The remaining
# elements are computed in another way and may be rounded differently.
_VECTOR_SIZE = 32


def find_problems(
    config: Config, model: ModelShape | None, expected: ExpectedInputs
) -> Iterator[str]:
    """Yield a line for each reason why the engine cannot generate samples or receive weights."""
    if not config.algorithm.generates_samples:
        return
    if model is not None:
        yield from engine_problems(config.engine.parallel, model)
        if config.engine.kind == "embedded":
            yield from speculation_problems(config.engine.speculation, model)
        yield from find_engine_kind_problems(config.engine, model)
        if config.engine.kind in _EXTERNAL_ENGINES:
            yield from _find_quantization_problems(config, expected)
        yield from _find_rank_problems(config, model)
        yield from _find_cache_problems(config, model)
        if config.engine.kind == "vllm" and not uses_gpus(config):
            yield from _find_vllm_cpu_problems(config.engine, model)
    yield from find_refused_arguments(config.engine, on_gpus=uses_gpus(config))

    # The nodes of a Slurm job may have other packages and devices than this machine.
    if config.cluster.kind == "local":
        architecture = None
        if model and config.engine.kind == "vllm":
            architecture = read_architecture(config, model, expected)
        yield from find_engine_machine_problems(config.engine, architecture)
    yield from _find_sampling_problems(config)
    if config.engine.exact:
        yield from _find_exact_problems(config, model)
    yield from _find_update_problems(config)
    yield from _find_start_problems(config)


def _find_vllm_cpu_problems(engine: EngineConfig, shape: ModelShape) -> Iterator[str]:
    """Yield a problem for each size of the model that vLLM's kernels for CPUs do not support."""
    latent = shape.latent_attention
    if latent is not None:
        if (latent.kv_lora_rank, latent.qk_rope_head_dim) != _VLLM_CPU_LATENT:
            kv_lora_rank, rope_dim = _VLLM_CPU_LATENT
            yield (
                "engine.kind=vllm: vLLM on CPUs supports latent attention only with"
                f" kv_lora_rank={kv_lora_rank} and qk_rope_head_dim={rope_dim}, but the model has"
                f" {latent.kv_lora_rank} and {latent.qk_rope_head_dim}; {_EMBEDDED_ADVICE}"
            )
    elif shape.head_dim not in _VLLM_CPU_HEADS:
        sizes = ", ".join(map(str, _VLLM_CPU_HEADS))
        yield (
            f"engine.kind=vllm: vLLM on CPUs supports the head dimensions {sizes}, but the"
            f" model has {shape.head_dim}; {_EMBEDDED_ADVICE}"
        )
    if shape.experts is not None and shape.gate_limit is not None:
        rows = shape.experts.ffn_hidden_size
        if rows // engine.parallel.expert_tensor_size % _VLLM_CPU_EXPERT_ROWS:
            yield (
                f"engine.parallel.tensor={engine.parallel.tensor}: vLLM on CPUs requires that each"
                f" rank's part of the {rows} feed-forward rows of an expert is a multiple of"
                f" {_VLLM_CPU_EXPERT_ROWS}; {_EMBEDDED_ADVICE}"
            )


def _find_rank_problems(config: Config, shape: ModelShape) -> Iterator[str]:
    """Yield a problem if a colocated engine does not use all ranks of the trainer."""
    engine = config.engine.parallel
    ranks = config.actor.parallel.ranks
    if config.engine.placement == "colocated" and engine.ranks != ranks:
        pipeline = engine.pipeline
        possible_sizes = " or ".join(
            f"{size}x{ranks // size // pipeline}"
            for size in tensor_sizes(shape, ranks)
            if ranks % (size * pipeline) == 0
        )
        pipeline_text = f" x pipeline={pipeline}" if pipeline > 1 else ""
        advice = f"tensor x data can be {possible_sizes}"
        if not possible_sizes:
            advice = f"engine.parallel.pipeline must divide {ranks}"
        yield (
            f"engine.parallel: tensor={engine.tensor}{pipeline_text} x data={engine.data} is"
            f" {engine.ranks} ranks, but a colocated engine must use all {ranks} ranks of the"
            f" trainer; {advice}"
        )


def _find_cache_problems(config: Config, model: ModelShape) -> Iterator[str]:
    """Yield a problem if the KV cache is too small for the longest sequence."""
    budget = config.engine.kv_cache_mib
    max_length = get_max_sequence_length(config)
    itemsize = get_device(config, config.engine.precision).itemsize
    # The last token of a response is sampled, but never fed back into the model.
    block_tokens = 1
    if config.engine.kind == "embedded":
        block_tokens = choose_block_tokens(max_length - 1, is_gpu=uses_gpus(config))
    needed_bytes = max(
        cache_bytes_per_sequence(
            stage, config.engine.parallel.tensor, itemsize, max_length - 1, block_tokens
        )
        for stage in iterate_engine_stages(model, config.engine.parallel.pipeline)
    )
    if budget is not None and needed_bytes > budget << 20:
        yield (
            f"engine.kv_cache_mib={budget}: must be at least {needed_bytes / 2**20:.1f} MiB to hold"
            f" the KV cache of the longest sequence, {max_length} tokens"
            f" ({describe_max_sequence_length(config)})"
        )


def _find_sampling_problems(config: Config) -> Iterator[str]:
    """Yield sampling settings that the engine does not support."""
    rollout = config.rollout
    if config.engine.kind == "embedded":
        if config.engine.speculation.tokens and config.algorithm.routing_replay:
            draft_tokens = config.engine.speculation.tokens
            yield (
                f"engine.speculation.tokens={draft_tokens}: is not supported with"
                " algorithm.routing_replay=true, which records the expert routing of one token at a"
                " time; set engine.speculation.tokens=0 or algorithm.routing_replay=false"
            )
        return
    # An engine of the user refuses what it does not support itself.
    if split_callable_name(config.engine.kind) is not None:
        return
    if rollout.min_p and config.engine.kind == "tensorrt_llm":
        yield (
            f"rollout.min_p={rollout.min_p:g}: must be 0 with engine.kind=tensorrt_llm, because"
            " not every sampler of TensorRT-LLM supports min_p; set rollout.min_p=0, or"
            f" {_EMBEDDED_ADVICE}"
        )
    # The trainer renormalizes its log-probs over the sampling support of each token.
    elif rollout.renormalize and (rollout.top_k or rollout.top_p < 1 or rollout.min_p):
        yield (
            f"rollout.renormalize=true: is not supported with engine.kind={config.engine.kind},"
            f" which does not return the token ids kept by rollout.top_k={rollout.top_k},"
            f" rollout.top_p={rollout.top_p:g} and rollout.min_p={rollout.min_p:g}; set"
            f" rollout.renormalize=false, or {_EMBEDDED_ADVICE}"
        )


def _find_exact_problems(config: Config, model: ModelShape | None) -> Iterator[str]:
    """Yield settings with which log-probs cannot be bitwise equal in the engine and the trainer.

    With `engine.exact`, a log-prob must depend only on the sequence and the weights.
    """
    key = "engine.exact=true"
    engine = config.engine
    actor = config.actor
    threads = config.cluster.threads_per_rank
    # Bitwise equality requires the same order of summation and the same rounding in all matmuls.
    if uses_gpus(config):
        yield f"{key}: is supported on CPUs only, but this run uses GPUs; set engine.exact=false"
    for name, section in (("engine", engine), ("actor", actor)):
        if section.parallel.tensor > 1:
            yield (
                f"{name}.parallel.tensor={section.parallel.tensor}: must be 1 with {key}, because"
                " tensor parallelism changes the order of summation; use data or pipeline"
                " parallelism instead"
            )
        if section.precision in ("bf16", "fp8"):
            yield (
                f"{name}.precision={section.precision}: must be auto or fp32 with {key}, which"
                " requires float32 in the engine and the trainer"
            )
    if actor.lora.rank:
        yield (
            f"actor.lora.rank={actor.lora.rank}: must be 0 with {key}, because the trainer"
            " computes the base weight and the adapter in separate matmuls, but the engine"
            " computes both in one matmul"
        )
    if threads is not None and threads > 1:
        yield (
            f"cluster.threads_per_rank={threads}: must be 1 or null with {key}, which uses one"
            " thread per rank"
        )
    if model is not None and model.latent_attention is not None:
        yield (
            f"{key}: is not supported for models with latent attention, because the engine attends"
            " to the compressed KV cache, and the trainer to uncompressed keys and values; set"
            " engine.exact=false"
        )
    if model is not None and not (model.has_plain_scores and model.logit_softcap is None):
        yield (
            f"{key}: is not supported for models with soft caps or attention sinks, which have no"
            " batch-invariant kernels; set engine.exact=false"
        )
    elif model is not None and model.num_experts:
        yield (
            f"{key}: is not supported for mixture-of-experts models, whose experts may receive too"
            " few tokens for batch-invariant matmuls; set engine.exact=false"
        )
    elif model is not None and model.delta_net is not None:
        yield (
            f"{key}: is not supported for models with gated delta nets, which the trainer computes"
            " in chunks of tokens and the engine token by token; set engine.exact=false"
        )
    elif model is not None and model.ffn_hidden_size % _VECTOR_SIZE:
        yield (
            f"{key}: requires a feed-forward size that is a multiple of {_VECTOR_SIZE}, but the"
            f" model has {model.ffn_hidden_size}, so the engine and the trainer could round the"
            " last elements differently; set engine.exact=false"
        )


def _find_update_problems(config: Config) -> Iterator[str]:
    """Yield problems of the weight sync with the placement of the engine."""
    if config.engine.in_flight == "interrupt" and not config.rollout.max_staleness:
        yield (
            "engine.in_flight=interrupt: has no effect with rollout.max_staleness=0, because no"
            " request is then in flight during a weight sync; set engine.in_flight=finish, or set"
            " rollout.max_staleness to 1 or more"
        )
    if config.engine.placement == "server":
        yield from _find_generator_problems(config)
    yield from _find_publish_problems(config)
    if config.engine.update != "shared":
        return
    if config.actor.lora.rank:
        yield (
            "engine.update=shared: is not supported with"
            f" actor.lora.rank={config.actor.lora.rank}, because the engine would use the"
            " trainer's base weights without the adapters; set engine.update to atomic or in_place"
        )
    # The engine computes with the trainer's own tensors.
    engine_bytes = get_device(config, config.engine.precision).itemsize
    actor_bytes = get_device(config, config.actor.precision).itemsize
    if engine_bytes != actor_bytes:
        yield (
            "engine.update=shared: requires the same precision in the engine and the trainer, but"
            f" engine.precision={config.engine.precision} uses {engine_bytes} bytes per value and"
            f" actor.precision={config.actor.precision} uses {actor_bytes} bytes; set both keys to"
            " the same precision"
        )


def _find_publish_problems(config: Config) -> Iterator[str]:
    """Yield problems of `engine.publish=changes`, which sends only the changed weights."""
    engine = config.engine
    key = f"engine.publish={config.engine.publish}"
    if engine.publish == "changes":
        if engine.placement != "server":
            yield (
                f"{key}: is not supported for a colocated engine, where copying weights is as"
                " fast as comparing them; set engine.placement=server, or engine.publish=whole"
            )
        if engine.kind == "tensorrt_llm":
            yield (
                f"{key}: is not supported with engine.kind=tensorrt_llm, where every GPU would"
                " keep a second copy of all tensors; set engine.publish=whole"
            )


def _find_generator_problems(config: Config) -> Iterator[str]:
    """Yield settings that an engine on its own devices (`engine.placement=server`) lacks."""
    engine = config.engine
    key = "engine.placement=server"
    if engine.update == "shared":
        yield (
            f"{key}: is not supported with engine.update=shared, which uses the trainer's own"
            " tensors; set engine.update to atomic or in_place"
        )
    if engine.sleep:
        yield (
            f"{key}: is not supported with engine.sleep=true, which frees GPU memory for a"
            " colocated trainer; set engine.sleep=false"
        )
    if engine.kind in _EXTERNAL_ENGINES:
        # A generator becomes healthy only after its engine has started. A colocated engine starts
        # together with the trainer, for which there is no start timeout.
        start_timeout_s = config.server.start_timeout_s
        engine_start_s = _get_start_timeout(engine)
        if start_timeout_s < engine_start_s:
            yield (
                f"server.start_timeout_s={start_timeout_s:g}: must be at least"
                f" {engine_start_s:g}, because the"
                " generator becomes healthy only after its engine has started, which may take"
                f" engine.{engine.kind}.timeout_s={engine_start_s:g} s"
            )


def _get_start_timeout(engine: EngineConfig) -> float:
    """Return the start timeout of an external engine in seconds."""
    return engine.vllm.timeout_s if engine.kind == "vllm" else engine.tensorrt_llm.timeout_s


def _find_start_problems(config: Config) -> Iterator[str]:
    """Yield a problem if the start of an external engine may exceed the collective timeout.

    The other ranks of a replica wait in a collective until the engine of the replica has started.
    """
    engine = config.engine
    collective_s = config.cluster.collective_timeout_s
    if (
        engine.kind in _EXTERNAL_ENGINES
        and engine.parallel.replica_ranks > 1
        and collective_s <= _get_start_timeout(engine)
    ):
        yield (
            f"cluster.collective_timeout_s={collective_s:g}: must be above"
            f" {_get_start_timeout(engine):g}, because the other ranks of a replica wait for its"
            " engine to start, which may take"
            f" engine.{engine.kind}.timeout_s={_get_start_timeout(engine):g} s"
        )


def find_engine_kind_problems(engine: EngineConfig, shape: ModelShape) -> Iterator[str]:
    """Yield a line for each reason why the engine cannot run a model on any machine."""
    layout = engine.parallel
    if layout.pipeline > 1 and engine.kind != "vllm":
        yield (
            f"engine.parallel.pipeline={layout.pipeline}: must be 1 with"
            f" engine.kind={engine.kind}, because only vLLM divides the layers of a replica into"
            " stages; set engine.kind=vllm, or a larger engine.parallel.tensor"
        )
    if engine.kind == "vllm":
        if layout.expert not in (1, layout.tensor):
            yield (
                f"engine.parallel.expert={layout.expert}: must be 1 or {layout.tensor} with"
                f" engine.kind=vllm; {_EMBEDDED_ADVICE}"
            )
        if shape.delta_net is not None:
            yield (
                "engine.kind=vllm: does not support gated delta nets, which vLLM 0.32 computes on"
                f" CPUs in bf16 only; {_EMBEDDED_ADVICE}"
            )
        elif shape.family not in VLLM_FAMILIES:
            families = ", ".join(VLLM_FAMILIES)
            yield (
                "engine.kind=vllm: weight sync is not supported for the model family"
                f" {shape.family}; supported: {families}; {_EMBEDDED_ADVICE}"
            )
        yield from _find_part_problems(engine, shape)
        yield from _find_vllm_part_problems(shape)
        stages = iterate_engine_stages(shape, layout.pipeline)
        needs_experts = layout.pipeline > 1 and shape.family in _VLLM_EXPERT_STAGES
        if needs_experts and not all(stage.expert_layers for stage in stages):
            yield (
                f"engine.parallel.pipeline={layout.pipeline}: leaves a stage without experts, with"
                " which vLLM 0.32 does not start; use fewer stages"
            )
        if engine.update != "in_place":
            yield f"engine.update={engine.update}: must be in_place with engine.kind=vllm"
        return
    if split_callable_name(engine.kind) is not None and engine.update == "shared":
        yield (
            "engine.update=shared: is not supported with your own engine, which gets none of the"
            " trainer's tensors; set engine.update to atomic or in_place"
        )
    if engine.kind != "tensorrt_llm":
        return
    prefix = "engine.kind=tensorrt_llm"
    if shape.family not in TENSORRT_LLM_FAMILIES:
        yield (
            f"{prefix}: does not support the model family {shape.family}; supported:"
            f" {', '.join(TENSORRT_LLM_FAMILIES)} (Llama, Mistral, Qwen2, Qwen3, Mixtral,"
            f" Qwen3-MoE); {_EMBEDDED_ADVICE}"
        )
    yield from _find_part_problems(engine, shape)
    if engine.precision == "fp32":
        yield (
            "engine.precision=fp32: must be auto or bf16 with engine.kind=tensorrt_llm, which"
            f" computes in bf16; for fp32, {_EMBEDDED_ADVICE}"
        )
    if engine.update != "in_place":
        yield (f"engine.update={engine.update}: must be in_place with engine.kind=tensorrt_llm")
    if shape.vocab_size % engine.parallel.tensor:
        yield (
            f"engine.parallel.tensor={engine.parallel.tensor}: must divide the model's"
            f" {shape.vocab_size} vocabulary entries with engine.kind=tensorrt_llm;"
            f" {_EMBEDDED_ADVICE}"
        )


def _find_quantization_problems(config: Config, expected: ExpectedInputs) -> Iterator[str]:
    """Yield a problem if an external engine would have to load quantized weights.

    It would build quantized layers, to which the trainer's weights cannot be sent.
    """
    method = read_quantization(config, expected)
    if method is not None:
        yield (
            f"engine.kind={config.engine.kind}: does not support the quantized weights in"
            f" model.path={config.model.path} (quant_method={method}); convert them to bf16 with"
            f" `aligner convert {config.model.path} OUTPUT` and set model.path=OUTPUT, or"
            f" {_EMBEDDED_ADVICE}"
        )


def _find_part_problems(engine: EngineConfig, shape: ModelShape) -> Iterator[str]:
    """Yield a line for each part of the model that an external engine may lack."""
    # vLLM's Qwen3 has no bias in the output projection, for example. The families with layer norms
    # always have biases.
    has_biases_in_vllm = engine.kind == "vllm" and shape.family in _VLLM_BIASED_FAMILIES
    has_output_biases = shape.attention_output_bias or shape.ffn_bias
    if shape.normalization == "rms" and has_output_biases and not has_biases_in_vllm:
        yield (
            f"engine.kind={engine.kind}: does not support the biases of attention_bias or mlp_bias"
            f" in config.json; {_EMBEDDED_ADVICE}"
        )
    is_mixed = shape.num_experts and len(shape.expert_layers) < shape.num_layers
    if engine.kind == "tensorrt_llm" and is_mixed:
        yield (
            f"engine.kind={engine.kind}: does not support layers without experts in a"
            f" mixture-of-experts model; {_EMBEDDED_ADVICE}"
        )


def _find_vllm_part_problems(shape: ModelShape) -> Iterator[str]:
    """Yield a line for each part whose entry in config.json vLLM 0.32 ignores."""
    if shape.gate_limit not in (None, _VLLM_GATE_LIMIT):
        yield (
            f"engine.kind=vllm: supports only swiglu_limit={_VLLM_GATE_LIMIT:g}, but config.json"
            f" has {shape.gate_limit:g}; {_EMBEDDED_ADVICE}"
        )
    has_windows = [layer.sliding_window is not None for layer in shape.layers]
    alternates = [index % 2 == 0 for index in range(shape.num_layers)]
    if shape.attention_sinks and has_windows != alternates:
        yield (
            "engine.kind=vllm: supports attention sinks only if layer_types in config.json"
            " alternates sliding_attention and full_attention, in this order;"
            f" {_EMBEDDED_ADVICE}"
        )
    ropes = [layer.rope for layer in shape.layers if layer.rope is not None]
    if shape.latent_attention is not None and not all(rope.is_interleaved for rope in ropes):
        yield (
            "engine.kind=vllm: does not support rope_interleave=false in config.json;"
            f" {_EMBEDDED_ADVICE}"
        )


def find_refused_arguments(engine: EngineConfig, *, on_gpus: bool) -> Iterator[str]:
    """Yield a line for each argument that aligner does not pass on to vLLM or TensorRT-LLM."""
    if engine.kind == "vllm":
        has_pipeline = engine.parallel.pipeline > 1
        yield from vllm_arguments.find_refused_arguments(
            engine.vllm, on_gpus=on_gpus, has_pipeline=has_pipeline
        )
    if engine.kind == "tensorrt_llm":
        yield from tensorrt_llm_arguments.find_refused_arguments(engine.tensorrt_llm)


def find_engine_machine_problems(
    engine: EngineConfig, architecture: str | None = None
) -> Iterator[str]:
    """Yield a line for each reason why the engine cannot run on this machine.

    The packages of the engine are not imported, because that takes too long for a check.

    Args:
        engine: Settings of the engine.
        architecture: Architecture in the model's config.json; None if it is not known.
    """
    if engine.kind == "vllm":
        try:
            # An empty result means that the list of architectures could not be read.
            supported = read_supported_architectures(engine.vllm)
            if architecture is not None and supported and architecture not in supported:
                yield (
                    "engine.kind=vllm: the installed vLLM does not support the architecture"
                    f" {architecture}; {_EMBEDDED_ADVICE}"
                )
            yield from vllm_arguments.find_invalid_arguments(engine.vllm)
        except ConfigError as error:
            yield str(error)
        if engine.sleep and not has_gpu():
            yield "engine.sleep=true: vLLM supports sleep on GPUs only; set engine.sleep=false"
        return
    if (location := split_callable_name(engine.kind)) is not None:
        try:
            import_object(*location)
        except ConfigError as error:
            yield f"engine.kind={engine.kind}: {error}"
    if engine.kind != "tensorrt_llm":
        return
    prefix = "engine.kind=tensorrt_llm"
    missing = [
        package for package in ("tensorrt_llm", "ray") if importlib.util.find_spec(package) is None
    ]
    if missing:
        yield (
            f"{prefix}: requires the Python packages {' and '.join(missing)}, which are not"
            " installed here; run in a TensorRT-LLM release image with ray installed"
            f" (docs/tensorrt_llm.md), or {_EMBEDDED_ADVICE}"
        )
    try:
        yield from tensorrt_llm_arguments.find_invalid_arguments(engine.tensorrt_llm)
    except ConfigError as error:
        yield str(error)
    if not has_gpu():
        yield f"{prefix}: requires a GPU, but this machine has none; {_EMBEDDED_ADVICE}"
