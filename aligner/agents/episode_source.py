"""Construction of a source of episodes: environments or agents.

`start_episodes` starts the processes of either kind, for training, evaluation and `aligner
generate`; `build_episodes` calls it with the settings of a run.
"""

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
from aligner.errors import ConfigError
from aligner.paths import get_run_paths
from aligner.schema import Config
from aligner.schema.environment import EnvironmentConfig

if TYPE_CHECKING:
    from aligner.agents.agent_episodes import TurnListener


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
    return start_episodes(
        config.environment,
        engine,
        tokenizer,
        config.seed,
        config.data.max_prompt_tokens + config.rollout.max_response_tokens,
        # every process that runs episodes has its own journal
        journal=_build_journal(config, f"{role}-{rank}"),
        tools=tools,
        listener=listener,
        # With spare prompts, the step consists of the prompts that are complete first, and the
        # speed of environments must not affect the selection. With an external program, it depends
        # on timing in any case.
        should_deliver_by_steps=(
            config.rollout.spare_prompts > 0 and config.engine.kind == "embedded"
        ),
    )


def start_episodes(
    settings: EnvironmentConfig,
    engine: GenerationEngine,
    tokenizer: Tokenizer,
    seed: int,
    max_sequence_length: int,
    *,
    journal: EpisodeJournal | None = None,
    tools: Sequence[ListedTool] | None = None,
    listener: SpanListener | None = None,
    should_deliver_by_steps: bool = False,
    turn_listener: "TurnListener | None" = None,
) -> EpisodeSource:
    """Start the environments or agents of this process, and return the source of their episodes.

    The caller has to close the source.

    Args:
        settings: The section `environment` of the configuration, with an environment or an agent.
        engine: The engine of this rank, the first one of its replica.
        tokenizer: Tokenizer of the policy.
        seed: Seed of the random choices.
        max_sequence_length: Maximum number of input and generated tokens of one sequence of an
            agent. The sampling parameters limit the episodes of environments.
        journal: Journal of the episodes; None for no journal.
        tools: Tools of the environment; None if this function has to list them.
        listener: Callback for the time spans of environment calls.
        should_deliver_by_steps: Whether the number of engine steps, not the speed of the
            environments, determines when an observation is appended.
        turn_listener: Callback for the turns of each agent's episode that has ended.

    Raises:
        ConfigError: Environments or agents cannot be started.
    """
    if settings.has_agent:
        # requires the extra `agents`; `aligner.checks.environment` checks that it is installed
        from aligner.agents.agent_episodes import AgentEpisodes

        return AgentEpisodes.create(
            engine, tokenizer, settings, seed, max_sequence_length, journal, turn_listener
        )

    if tools is None:
        tools = list_tools(settings)
    environments = EnvironmentPool.from_config(
        with_tool_arguments(settings, tools, tokenizer), journal
    )
    environments.listener = listener
    try:
        environments.start()
    except ConfigError as error:
        raise ConfigError(f"environment.target: {error}") from error
    return EnvironmentEpisodes(
        engine,
        environments,
        tokenizer,
        settings,
        seed,
        should_deliver_by_steps=should_deliver_by_steps,
    )


def _build_journal(config: Config, process_name: str) -> EpisodeJournal | None:
    """Return the journal of this process; None without checkpoints: the run cannot resume."""
    has_checkpoints = config.checkpoint.every or config.checkpoint.every_minutes
    return (
        EpisodeJournal(get_run_paths(config).episodes / process_name) if has_checkpoints else None
    )
