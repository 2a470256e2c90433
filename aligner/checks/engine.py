"""The engine against the model, the layout and the machine."""

import importlib.util
from collections.abc import Iterator

from aligner.errors import ConfigError
from aligner.models.layouts import cache_bytes_per_token, engine_problems, tensor_sizes
from aligner.models.model_source import ExpectedInputs, read_architecture
from aligner.models.shape import ModelShape
from aligner.models.weight_blocks import BLOCK_FORMATS, block_problems
from aligner.models.weight_slices import tensor_slice, weight_table
from aligner.placement.roles import device_of, has_gpu, uses_gpus
from aligner.schema import Config, EngineConfig
from aligner.schema.derived import longest_sequence, longest_sequence_keys
from aligner.vllm_environment import vllm_architectures

TENSORRT_LLM_FAMILIES = ("llama", "mixtral", "qwen3_moe")
VLLM_FAMILIES = ("llama", "mixtral", "qwen3_moe", "gpt2", "gpt_neox")
_VLLM_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of heads that vLLM 0.32 has attention for on CPUs."""
_PROGRAMS = ("tensorrt_llm", "vllm")
"""The engines that are programs of their own, and have a `timeout_s`."""
_ELSE = "use engine=embedded"
_VECTOR = 32
"""Numbers that an activation is computed of at a time; what is left over is computed otherwise."""


def problems(config: Config, model: ModelShape | None, expected: ExpectedInputs) -> Iterator[str]:
    """What keeps the engine from drawing samples, or weights from reaching it."""
    if not config.algorithm.generates:
        return
    if model is not None:
        yield from engine_problems(config.engine.parallel, model)
        yield from engine_kind_problems(config.engine, model)
        yield from _rank_problems(config, model)
        yield from _cache_problems(config, model)
        if (
            config.engine.kind == "vllm"
            and not uses_gpus(config)
            and model.head_dim not in _VLLM_CPU_HEADS
        ):
            sizes = ", ".join(map(str, _VLLM_CPU_HEADS))
            yield (
                f"engine.kind=vllm: the model's heads have {model.head_dim} numbers each, on CPUs"
                f" it takes {sizes}; {_ELSE}"
            )
    if config.cluster.kind == "local":
        named = (
            read_architecture(config, model, expected)
            if model and config.engine.kind == "vllm"
            else None
        )
        yield from engine_machine_problems(config.engine, named)
    yield from _drawing_problems(config)
    if config.engine.exact:
        yield from _exact_problems(config, model)
    yield from _update_problems(config, model)
    yield from _start_problems(config)


def _rank_problems(config: Config, shape: ModelShape) -> Iterator[str]:
    """A colocated engine that does not span the trainer's ranks."""
    engine, ranks = config.engine.parallel, config.actor.parallel.ranks
    if config.engine.placement == "colocated" and engine.ranks != ranks:
        fitting = " or ".join(
            f"{size}x{ranks // size}" for size in tensor_sizes(shape, ranks) if ranks % size == 0
        )
        yield (
            f"engine.parallel: tensor {engine.tensor} x data {engine.data} is {engine.ranks} ranks,"
            f" but a colocated engine spans the trainer's {ranks} ranks; tensor x data that fit:"
            f" {fitting}"
        )


def _cache_problems(config: Config, model: ModelShape) -> Iterator[str]:
    """Keys and values of one sequence that do not fit the engine's memory for them."""
    budget, longest = config.engine.kv_cache_mib, longest_sequence(config)
    itemsize = device_of(config, config.engine.precision).itemsize
    needed = cache_bytes_per_token(model, config.engine.parallel.tensor, itemsize) * (longest - 1)
    if budget is not None and needed > budget << 20:
        yield (
            f"engine.kv_cache_mib={budget}: keys and values of the longest sequence, {longest}"
            f" tokens ({longest_sequence_keys(config)}), need {needed / 2**20:.1f} MiB"
        )


def _drawing_problems(config: Config) -> Iterator[str]:
    """How tokens are drawn, against what the engine can do and tell."""
    rollout = config.rollout
    if config.engine.kind == "embedded":
        if config.engine.speculation.tokens and config.algorithm.replay_routes:
            guessed = config.engine.speculation.tokens
            yield (
                f"engine.speculation.tokens={guessed}: algorithm.replay_routes=true tells the"
                " experts of every token that is run, one at a time; give 0, or"
                " algorithm.replay_routes=false"
            )
        return
    if rollout.min_p and config.engine.kind == "tensorrt_llm":
        yield (
            f"rollout.min_p={rollout.min_p:g}: not every sampler of TensorRT-LLM's reads it;"
            f" allowed: 0; or {_ELSE}"
        )
    elif rollout.renormalize and (rollout.top_k or rollout.top_p < 1 or rollout.min_p):
        yield (
            f"rollout.renormalize=true: engine.kind={config.engine.kind} does not tell among which"
            f" tokens it drew with rollout.top_k={rollout.top_k}, top_p={rollout.top_p:g} and"
            f" min_p={rollout.min_p:g}; give rollout.renormalize=false, or {_ELSE}"
        )


def _exact_problems(config: Config, model: ModelShape | None) -> Iterator[str]:
    """What has the bits of a log-prob hang on more than the sequence and the weights."""
    key, engine, actor, threads = (
        "engine.exact=true",
        config.engine,
        config.actor,
        config.cluster.threads_per_rank,
    )
    if uses_gpus(config):
        yield f"{key}: it was made for CPUs, and this run's roles have GPUs; give false"
    for name, section in (("engine", engine), ("actor", actor)):
        if section.parallel.tensor > 1:
            yield (
                f"{name}.parallel.tensor={section.parallel.tensor}: {key} needs layers whole on a"
                " rank, whose sums have one order; give 1, with data or pipeline parallelism"
                " instead"
            )
        if section.precision in ("bf16", "fp8"):
            yield (
                f"{name}.precision={section.precision}: {key} needs float32 in engine and trainer;"
                " allowed: auto, fp32"
            )
    if actor.lora.rank:
        yield (
            f"actor.lora.rank={actor.lora.rank}: {key} needs one weight, where the trainer adds up"
            " two products; give 0"
        )
    if threads is not None and threads > 1:
        yield (
            f"cluster.threads_per_rank={threads}: {key} computes with one thread a rank; give 1 or"
            " null"
        )
    if model is not None and model.num_experts:
        yield (
            f"{key}: the model is a mixture of experts, of which one may get too few tokens at a"
            " time; give false"
        )
    elif model is not None and model.ffn_hidden_size % _VECTOR:
        yield (
            f"{key}: the model's feed-forward size, {model.ffn_hidden_size}, is no multiple of"
            f" {_VECTOR}, so that what is left of a vector has other bits; give false"
        )


def _update_problems(config: Config, model: ModelShape | None) -> Iterator[str]:
    """How weights reach the engine, against where it runs."""
    if config.engine.in_flight == "interrupt" and not config.rollout.max_staleness:
        yield (
            "engine.in_flight=interrupt: nothing is under way when weights come with"
            " rollout.max_staleness=0; give engine.in_flight=finish, or rollout.max_staleness of at"
            " least 1"
        )
    if config.engine.placement == "server":
        yield from _generator_problems(config)
    yield from _publish_problems(config, model)
    if config.engine.update != "shared":
        return
    if config.actor.lora.rank:
        yield (
            "engine.update=shared: the engine would serve the trainer's own tensors, without the"
            f" adapters of actor.lora.rank={config.actor.lora.rank}; allowed with adapters: atomic,"
            " in_place"
        )
    engine, actor = (
        device_of(config, precision).itemsize
        for precision in (config.engine.precision, config.actor.precision)
    )
    if engine != actor:
        yield (
            f"engine.update=shared: engine.precision={config.engine.precision} and"
            f" actor.precision={config.actor.precision} are {engine} and {actor} bytes a number"
            " here; shared tensors need one precision"
        )


def _publish_problems(config: Config, model: ModelShape | None) -> Iterator[str]:
    """What weights travel as, against where they go."""
    engine, key = config.engine, f"engine.publish={config.engine.publish}"
    if engine.publish == "changes":
        if engine.placement != "server":
            yield (
                f"{key}: an engine on the trainer's ranks copies what it is given as fast as"
                " numbers are compared; give engine.placement=server, or engine.publish=whole"
            )
        if engine.kind == "tensorrt_llm":
            yield (
                f"{key}: every GPU would keep all tensors a second time; allowed with"
                " engine.kind=tensorrt_llm: whole"
            )
    elif engine.publish in BLOCK_FORMATS:
        if engine.update == "shared":
            yield (
                f"{key}: engine.update=shared takes the trainer's own tensors; allowed: atomic,"
                " in_place"
            )
        if engine.exact:
            yield (
                f"{key}: engine.exact=true needs the trainer's own numbers in the engine; give"
                " engine.publish=whole"
            )
        if model is not None:
            trainer, table = (
                config.actor.parallel,
                [spec for spec in weight_table(model) if spec.layer == 0],
            )
            slices = {
                tensor_slice(spec, at, size)
                for spec in table
                for size in (
                    trainer.tensor if spec.expert is None else trainer.expert_tensor_size,
                    engine.parallel.tensor,
                )
                for at in range(size)
            }
            found = sorted(block_problems(table, slices))
            yield from (
                f"{key}: {problem}; give other parallel sizes, or engine.publish=whole"
                for problem in found
            )


def _generator_problems(config: Config) -> Iterator[str]:
    """What an engine in a world of its own cannot do."""
    engine, key = config.engine, "engine.placement=server"
    if engine.update == "shared":
        yield (
            f"{key}: engine.update=shared takes the trainer's own tensors, which are elsewhere;"
            " allowed: atomic, in_place"
        )
    if engine.sleep:
        yield (
            f"{key}: engine.sleep=true gives memory to the trainer, which is elsewhere; give"
            " engine.sleep=false"
        )
    if engine.kind in _PROGRAMS:
        # It serves once it is built; one on the trainer's ranks starts with these, which nobody
        # waits for to be healthy.
        starts, may_take = config.server.start_timeout_s, _may_start(engine)
        if starts < may_take:
            yield (
                f"server.start_timeout_s={starts:g}: the generator is healthy once its engine has"
                f" started, which may take engine.{engine.kind}.timeout_s={may_take:g} s; give"
                f" {may_take:g} or more"
            )


def _may_start(engine: EngineConfig) -> float:
    """Seconds that an engine of another program may take to start."""
    return engine.vllm.timeout_s if engine.kind == "vllm" else engine.tensorrt_llm.timeout_s


def _start_problems(config: Config) -> Iterator[str]:
    """Who waits for another program's engine to start: its replica's other ranks, in a
    collective."""
    engine, waits = config.engine, config.cluster.collective_timeout_s
    if engine.kind in _PROGRAMS and engine.parallel.tensor > 1 and waits <= _may_start(engine):
        yield (
            f"cluster.collective_timeout_s={waits:g}: a replica's other ranks wait so long for its"
            " engine to start, which may take"
            f" engine.{engine.kind}.timeout_s={_may_start(engine):g} s; give more than that"
        )


def engine_kind_problems(engine: EngineConfig, shape: ModelShape) -> Iterator[str]:
    """One line for each thing that keeps the engine from running this model, wherever it runs."""
    if engine.kind == "vllm":
        if shape.family not in VLLM_FAMILIES:
            families = ", ".join(VLLM_FAMILIES)
            yield (
                f"engine.kind=vllm: weights of the {shape.family} kind are not known to reach it,"
                f" of {families} are; {_ELSE}"
            )
        if engine.update != "in_place":
            yield f"engine.update={engine.update}: vLLM overwrites its weights; allowed: in_place"
        return
    if engine.kind != "tensorrt_llm":
        return
    prefix = "engine.kind=tensorrt_llm"
    if shape.family not in TENSORRT_LLM_FAMILIES:
        yield (
            f"{prefix}: it does not run models of the {shape.family} kind, it does:"
            f" {', '.join(TENSORRT_LLM_FAMILIES)} (Llama, Mistral, Qwen2, Qwen3, Mixtral,"
            f" Qwen3-MoE); {_ELSE}"
        )
    if engine.precision == "fp32":
        yield f"engine.precision=fp32: TensorRT-LLM computes in bf16; allowed: auto, bf16; {_ELSE}"
    if engine.update != "in_place":
        yield (
            f"engine.update={engine.update}: TensorRT-LLM overwrites its weights; allowed: in_place"
        )


def engine_machine_problems(engine: EngineConfig, architecture: str | None = None) -> Iterator[str]:
    """One line for each thing that keeps the engine from running on this machine; nothing is
    imported for it.

    `architecture` is the model's in its config.json, where that is known.
    """
    if engine.kind == "vllm":
        try:
            known = vllm_architectures(engine.vllm)
            if architecture is not None and known and architecture not in known:
                yield (
                    f"engine.kind=vllm: the vLLM that is installed has no model {architecture};"
                    f" {_ELSE}"
                )
        except ConfigError as error:
            yield str(error)
        if engine.sleep and not has_gpu():
            yield "engine.sleep=true: vLLM gives memory back on GPUs alone; give engine.sleep=false"
        return
    if engine.kind != "tensorrt_llm":
        return
    prefix = "engine.kind=tensorrt_llm"
    missing = [
        package for package in ("tensorrt_llm", "ray") if importlib.util.find_spec(package) is None
    ]
    if missing:
        yield (
            f"{prefix}: {' and '.join(missing)} cannot be imported; run in a TensorRT-LLM release"
            f" image with ray installed (docs/tensorrt_llm.md), or {_ELSE}"
        )
    if not has_gpu():
        yield f"{prefix}: this machine has no GPU; {_ELSE}"
