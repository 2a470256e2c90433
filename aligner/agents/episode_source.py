"""Construction of a rank's source of episodes, from the configuration: environments or agents."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from aligner.agents.environment_pool import EnvironmentPool
from aligner.agents.episode_journal import EpisodeJournal
from aligner.agents.episodes import EnvironmentEpisodes
from aligner.agents.tool_catalogue import list_tools, with_tool_arguments
from aligner.agents.tool_protocol import ListedTool
from aligner.data.tokenizer import Tokenizer
from aligner.engines.engine_loop import EpisodeFollower, EpisodeSource
from aligner.engines.engine_protocol import GenerationEngine, SpanListener
from aligner.paths import get_run_paths
from aligner.schema import Config

if TYPE_CHECKING:
    from aligner.agents.agent_episodes import AgentEpisodes


def build_episodes(
    config: Config,
    engine: GenerationEngine,
    tokenizer: Tokenizer,
    role: Literal["trainer", "generator"],
    rank: int,
    listener: SpanListener | None = None,
    tools: Sequence[ListedTool] | None = None,
) -> EpisodeSource:
    """Return the source of this rank's episodes, which the caller has to close.

    The ranks of a replica other than the first have no environments: they execute the first rank's
    engine steps.

    Args:
        config: The configuration of the run.
        engine: The engine of this rank.
        tokenizer: Tokenizer of the policy.
        role: Role of this process.
        rank: Rank of this process in its role.
        listener: Callback for the time spans of environment calls.
        tools: Tools of the environment; None if this function has to list them.

    Raises:
        ConfigError: Environments or agents cannot be started.
    """
    if not engine.is_leader:
        return EpisodeFollower(engine)
    # every process that runs episodes has its own journal
    process_name = f"{role}-{rank}"
    if config.environment.has_agent:
        return _start_agents(config, engine, tokenizer, process_name)
    return _start_environments(config, engine, tokenizer, process_name, listener, tools)


def _start_environments(
    config: Config,
    engine: GenerationEngine,
    tokenizer: Tokenizer,
    process_name: str,
    listener: SpanListener | None,
    tools: Sequence[ListedTool] | None,
) -> EnvironmentEpisodes:
    """Start the environments of this process, and return the source of their episodes."""
    if tools is None:
        tools = list_tools(config.environment)
    environments = EnvironmentPool.from_config(
        with_tool_arguments(config.environment, tools, tokenizer),
        _build_journal(config, process_name),
    )
    environments.listener = listener
    environments.start()
    return EnvironmentEpisodes(
        engine,
        environments,
        tokenizer,
        config.environment,
        config.seed,
        # With spare prompts, the step consists of the prompts that are complete first, and the
        # speed of environments must not affect the selection.
        should_deliver_by_steps=config.rollout.spare_prompts > 0,
    )


def _build_journal(config: Config, process_name: str) -> EpisodeJournal | None:
    """Return the journal of this process; None without checkpoints: the run cannot resume."""
    has_checkpoints = config.checkpoint.every or config.checkpoint.every_minutes
    return (
        EpisodeJournal(get_run_paths(config).episodes / process_name) if has_checkpoints else None
    )


def _start_agents(
    config: Config, engine: GenerationEngine, tokenizer: Tokenizer, process_name: str
) -> "AgentEpisodes":
    """Start the agents' processes and their endpoint, and return the source of their episodes."""
    # requires the extra `agents`; `aligner.checks.environment` checks that it is installed
    from aligner.agents.agent_episodes import AgentEpisodes

    max_sequence_length = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return AgentEpisodes.create(
        engine,
        tokenizer,
        config.environment,
        config.seed,
        max_sequence_length,
        _build_journal(config, process_name),
    )
