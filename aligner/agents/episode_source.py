"""Construction of a rank's source of episodes, from the configuration: environments or agents."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from aligner.agents.environment_pool import EnvironmentPool
from aligner.agents.episode_journal import EpisodeJournal
from aligner.agents.episodes import EnvironmentEpisodes
from aligner.agents.tool_catalogue import list_tools, with_tool_arguments
from aligner.agents.tool_protocol import ListedTool
from aligner.data.tokenizer import Tokenizer
from aligner.engines.engine_loop import FollowsEpisodes, SampleSource
from aligner.engines.engine_protocol import GenerationEngine, SpanListener
from aligner.paths import run_paths
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
) -> SampleSource:
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
        tools: Tools of the environment; None to list them here.

    Raises:
        ConfigError: Environments or agents cannot be started.
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
    """Start the environments of this process, and return the source of their episodes."""
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
    """Return the journal of this process; None without checkpoints, since no run can resume."""
    has_checkpoints = config.checkpoint.every or config.checkpoint.every_minutes
    return EpisodeJournal(run_paths(config).episodes / process) if has_checkpoints else None


def _agents(
    config: Config, engine: GenerationEngine, tokenizer: Tokenizer, process: str
) -> "AgentEpisodes":
    """Start the agents' processes and their endpoint, and return the source of their episodes."""
    # imports packages of the extra `agents`; `aligner.checks.environment` checks that it is there
    from aligner.agents.agent_episodes import AgentEpisodes

    context = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return AgentEpisodes.begin(
        engine, tokenizer, config.environment, config.seed, context, _journal(config, process)
    )
