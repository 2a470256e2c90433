"""The engine that a configuration asks for, and what draws episodes by it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from aligner.checks.engine import engine_kind_problems, engine_machine_problems
from aligner.data.tokenizer import Tokenizer
from aligner.engines.engine_loop import FollowsEpisodes, SampleSource
from aligner.engines.engine_protocol import GenerationEngine, SpanListener
from aligner.engines.episodes import EnvironmentEpisodes
from aligner.environments.environment_pool import EnvironmentPool
from aligner.environments.episode_journal import EpisodeJournal
from aligner.environments.tool_catalogue import list_tools, with_tool_arguments
from aligner.environments.tool_protocol import ListedTool
from aligner.errors import ConfigError
from aligner.models.shape import ModelShape
from aligner.paths import run_paths
from aligner.schema import Config, EngineConfig

if TYPE_CHECKING:
    from aligner.engines.agents import AgentEpisodes


def build_engine(
    shape: ModelShape,
    settings: EngineConfig,
    directory: Path,
    *,
    rank: int = 0,
    seed: int,
    group: ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    shared: Mapping[str, Tensor] | None = None,
    context: int | None = None,
    listener: SpanListener | None = None,
) -> GenerationEngine:
    """Rank `rank` of an engine of `settings.kind`, still without weights.

    `directory` is a Hugging Face directory of the model, of which only the configuration is read;
    `group` holds the ranks of this rank's replica, in order (None when it is the only one).
    `shared` are the trainer's parameters that the embedded engine may use as its own; `context` is
    the longest sequence that TensorRT-LLM or vLLM is to be ready for, the model's if None. The
    embedded engine tells `listener` of every pass that runs prompts, as "prefill". Raises
    ConfigError when the engine can not run this model, here.
    """
    if problems := [*engine_kind_problems(settings, shape), *engine_machine_problems(settings)]:
        raise ConfigError("\n".join(problems))
    if settings.kind == "tensorrt_llm":
        from aligner.engines.tensorrt_llm.tensorrt_llm_engine import TensorRTLLMEngine

        return TensorRTLLMEngine(
            directory, shape, settings, rank, seed, group, device=device, context=context
        )
    if settings.kind == "vllm":
        from aligner.engines.vllm.vllm_engine import VLLMEngine

        return VLLMEngine(
            directory, shape, settings, rank, seed, group, device=device, context=context
        )
    from aligner.engines.embedded.embedded_engine import EmbeddedEngine

    return EmbeddedEngine(shape, settings, rank, seed, group, device, shared, listener)


def build_episodes(
    config: Config,
    engine: GenerationEngine,
    tokenizer: Tokenizer,
    role: Literal["trainer", "generator"],
    rank: int,
    listener: SpanListener | None = None,
    tools: Sequence[ListedTool] | None = None,
) -> SampleSource:
    """Return the source of this rank's episodes, which the caller has to close.

    Arguments as for `build_engine`; `tools` are the environment's, None if they have not been
    listed yet; the listener is called with the times of environment calls. The ranks of a replica
    other than the first have no environments: they execute the first rank's engine steps. Raises
    ConfigError if environments or agents cannot be started.
    """
    if not engine.leads:
        return FollowsEpisodes(engine)
    process = f"{role}-{rank}"
    if config.environment.has_agent:
        return _agents(config, engine, tokenizer, process)
    return _environments(config, engine, tokenizer, process, listener, tools)


def _environments(
    config: Config,
    engine: GenerationEngine,
    tokenizer: Tokenizer,
    process: str,
    listener: SpanListener | None,
    tools: Sequence[ListedTool] | None,
) -> EnvironmentEpisodes:
    tools = list_tools(config.environment) if tools is None else tools
    environments = EnvironmentPool.of(
        with_tool_arguments(config.environment, tools, tokenizer), _journal(config, process)
    )
    environments.listener = listener
    environments.start()
    return EnvironmentEpisodes(
        engine,
        environments,
        tokenizer,
        config.environment,
        config.seed,
        by_steps=config.rollout.spare_prompts > 0,
    )


def _journal(config: Config, process: str) -> EpisodeJournal | None:
    """A process's own; None without checkpoints, where nothing goes on from what was said."""
    is_kept = config.checkpoint.every or config.checkpoint.every_minutes
    return EpisodeJournal(run_paths(config).episodes / process) if is_kept else None


def _agents(
    config: Config, engine: GenerationEngine, tokenizer: Tokenizer, process: str
) -> "AgentEpisodes":
    # What the agents extra brings, which `aligner.checks.environment` asks for.
    from aligner.engines.agents import AgentEpisodes

    context = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return AgentEpisodes.begin(
        engine, tokenizer, config.environment, config.seed, context, _journal(config, process)
    )
