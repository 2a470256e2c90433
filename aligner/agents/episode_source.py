"""Construction of a source of episodes: environments or agents.

`start_episodes` starts the processes of either kind, for training, evaluation and `aligner
generate`; `build_episodes` calls it with the settings of a run. If an evaluation suite has an
environment of its own, `EpisodesBySuite` starts each episode in the environment of its prompt.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from aligner.agents.environment_pool import EnvironmentPool
from aligner.agents.episode_journal import EpisodeJournal
from aligner.agents.episodes import EnvironmentEpisodes
from aligner.agents.tool_catalogue import list_tools, with_tool_arguments
from aligner.agents.tool_protocol import ListedTool
from aligner.data.tokenizer import Tokenizer
from aligner.engines.engine_loop import (
    EpisodeFollower,
    EpisodeSource,
    SamplesInFlight,
    SampleStarter,
    SingleResponses,
)
from aligner.engines.engine_protocol import (
    GenerationEngine,
    GenerationRequest,
    SamplingOptions,
    SpanListener,
)
from aligner.errors import ConfigError
from aligner.paths import get_run_paths
from aligner.schema import Config
from aligner.schema.environment import EnvironmentConfig
from aligner.schema.evaluation_suites import Suite, get_active_suites

if TYPE_CHECKING:
    from aligner.agents.agent_episodes import TurnListener

_RUN_SETTINGS = {
    **{name: f"rollout.{name}" for name in ("temperature", "top_k", "top_p", "min_p")},
    "seed": "seed",
}
"""Keys of the sampling parameters of a run; see `SessionContext.sampling_settings`."""


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

    It starts the samples of training and of all evaluation suites. Suites with equal settings share
    the processes of their environment. The ranks of a replica other than the first have no
    environments: they execute the first rank's engine steps.

    Args:
        config: The configuration of the run.
        engine: The engine of this rank.
        tokenizer: Tokenizer of the policy.
        role: Role of this process.
        rank: Rank of this process in its role.
        listener: Callback for the time spans of environment calls.
        tools: Tools of the section `environment`; None if this function has to list them.

    Raises:
        ConfigError: Environments or agents cannot be started.
    """
    if not engine.is_leader:
        return EpisodeFollower(engine)

    def start(
        settings: EnvironmentConfig, journal_name: str, tools: Sequence[ListedTool] | None
    ) -> EpisodeSource:
        """Start the episodes of an environment with the settings of the run."""
        return start_episodes(
            settings,
            engine,
            tokenizer,
            config.seed,
            config.data.max_prompt_tokens + config.rollout.max_response_tokens,
            journal=_build_journal(config, journal_name),
            tools=tools,
            listener=listener,
            # With spare prompts, the step consists of the prompts that are complete first, and the
            # speed of environments must not affect the selection. With an external program, it
            # depends on timing in any case.
            should_deliver_by_steps=(
                config.rollout.spare_prompts > 0 and config.engine.kind == "embedded"
            ),
            sampling_settings=_RUN_SETTINGS,
        )

    # Every process that runs episodes has its own journals, one for each environment.
    journal_name = f"{role}-{rank}"
    own_suites = [
        suite for suite in get_active_suites(config) if suite.environment != config.environment
    ]
    if not own_suites:
        return start(config.environment, journal_name, tools)

    # If one environment cannot be started, the stack stops those that have been started.
    with ExitStack() as stack:
        training: EpisodeSource | None = None
        if config.environment.has_episodes:
            training = start(config.environment, journal_name, tools)
            stack.callback(training.close)
        started: list[tuple[EnvironmentConfig, EpisodeSource]] = []
        suite_sources: list[tuple[Suite, EpisodeSource | None]] = []
        for suite in own_suites:
            source = next((each for known, each in started if known == suite.environment), None)
            if source is None and suite.environment.has_episodes:
                with suite.renaming_environment_keys():
                    source = start(suite.environment, f"{journal_name}-{suite.name}", None)
                stack.callback(source.close)
                started.append((suite.environment, source))
            suite_sources.append((suite, source))
        stack.pop_all()
    return EpisodesBySuite(engine, training, suite_sources)


@dataclass(frozen=True)
class EpisodesBySuite:
    """Starts samples in the environment of training or of their evaluation suite (`EpisodeSource`).

    A source of None generates single responses.
    """

    engine: GenerationEngine
    training: EpisodeSource | None
    """Source of the training samples, and of suites without an environment of their own."""
    suites: Sequence[tuple[Suite, EpisodeSource | None]]
    """Sources of the suites with an environment of their own; suites may share a source."""
    uses_local_state = True
    """See `SampleStarter.uses_local_state`."""

    @property
    def _sources(self) -> list[EpisodeSource]:
        """All sources of episodes, each of them once."""
        suite_sources = (source for _, source in self.suites)
        sources = {id(source): source for source in (self.training, *suite_sources)}
        return [source for source in sources.values() if source is not None]

    def start(
        self,
        requests: Sequence[GenerationRequest],
        options: SamplingOptions,
        later: Sequence[GenerationRequest] = (),
    ) -> SamplesInFlight:
        """See `SampleStarter.start`. All requests must belong to training, or to one suite."""
        # The id of a prompt determines its suite, also in a generator, which gets only the id.
        prompt_ids = {request.prompt.id for request in requests}
        for suite, source in self.suites:
            if any(map(suite.has_prompt, prompt_ids)):
                with suite.renaming_environment_keys():
                    return self._get_starter(source).start(requests, options, later)
        return self._get_starter(self.training).start(requests, options, later)

    def _get_starter(self, source: EpisodeSource | None) -> SampleStarter:
        return SingleResponses(self.engine) if source is None else source

    def drop_journal_before(self, first_prompt: int) -> None:
        """See `EpisodeSource.drop_journal_before`."""
        for source in self._sources:
            source.drop_journal_before(first_prompt)

    def take_environment_wait_s(self) -> float | None:
        """See `EpisodeSource.take_environment_wait_s`; for training samples only."""
        return None if self.training is None else self.training.take_environment_wait_s()

    def close(self) -> None:
        """Stop the processes of all environments."""
        for source in self._sources:
            source.close()


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
    sampling_settings: Mapping[str, str] = MappingProxyType({}),
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
        sampling_settings: Names of the user's settings of the sampling parameters, by the name of
            the parameter in an agent's request.

    Raises:
        ConfigError: Environments or agents cannot be started.
    """
    if settings.has_agent:
        # requires the extra `agents`; `aligner.checks.environment` checks that it is installed
        from aligner.agents.agent_episodes import AgentEpisodes

        return AgentEpisodes.create(
            engine,
            tokenizer,
            settings,
            seed,
            max_sequence_length,
            journal,
            turn_listener,
            sampling_settings,
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
