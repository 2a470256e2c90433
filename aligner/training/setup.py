"""Builds the training loop of a trainer rank from the configuration, and runs it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from aligner.agents.tool_catalogue import list_tools, tool_schemas
from aligner.agents.tool_protocol import ListedTool
from aligner.algorithms.kl import KLController
from aligner.algorithms.online_algorithm import build_online_algorithm, build_shaping
from aligner.data.example_cache import ExampleCache
from aligner.data.examples import LabeledSteps, RunData, open_run_data
from aligner.data.fencing import claim_run, set_writer_claim
from aligner.data.model_directory import read_shape
from aligner.data.pass_rates import PassRates
from aligner.data.prompts import PromptStream
from aligner.data.run_inputs import compute_input_checksums
from aligner.data.tokenizer import Tokenizer, build_run_tokenizer
from aligner.errors import ConfigError
from aligner.megatron import world as worlds
from aligner.megatron.policy import FrozenPolicy, Policy
from aligner.megatron.value_model import build_initial_reward_model
from aligner.megatron.world import World
from aligner.models.model_source import model_directory
from aligner.models.vocabulary import read_vocabulary
from aligner.observability.metrics import MetricsWriter, RecordWriter, recording
from aligner.observability.sample_files import SampleFiles
from aligner.observability.sinks import open_sinks
from aligner.observability.timeline import Timeline, open_timeline, report_stage
from aligner.paths import get_run_paths
from aligner.placement.addresses import load_access, load_endpoints, select_role_endpoints
from aligner.placement.roles import has_generator
from aligner.resharding.publisher import RemotePublisher
from aligner.rewards.judge import JudgeMeter, judge_directory, judge_run_name
from aligner.schema import Config
from aligner.schema.derived import count_policy_updates, has_reference
from aligner.schema.evaluation_suites import get_active_suites, has_any_episodes
from aligner.schema.reward_sources import (
    count_score_parts,
    list_source_names,
    parse_evaluation_judge,
    parse_judge_sources,
)
from aligner.servers.critic_client import CriticClient, RunId, UpdateJournal
from aligner.servers.generator_client import GeneratorClient
from aligner.servers.remote_client import RewardClient, TeacherClient
from aligner.training.engine_setup import build_sampler_and_publisher, build_sampling_options
from aligner.training.evaluator import build_evaluations
from aligner.training.loop import StopCondition, TrainingLoop
from aligner.training.offline import (
    DirectPreferenceOptimization,
    KahnemanTverskyOptimization,
    OfflineDistillation,
    OfflineTask,
    OfflineTrainer,
    PairwiseRewardModel,
    ProcessRewardModel,
    SupervisedFineTuning,
    TeacherScorer,
    flatten_pairs,
)
from aligner.training.online import OnlineTrainer
from aligner.training.preference_sampling import PairWriter, PreferenceSampler
from aligner.training.prepare import open_run_prompts
from aligner.training.rollout_builder import RolloutBuilder
from aligner.training.rollout_pipeline import RolloutPipeline
from aligner.training.run_checkpoints import RunCheckpoints
from aligner.training.samplers import RemoteSampler, Sampler
from aligner.training.services import Services, run_and_broadcast_result
from aligner.training.step_metrics import Recorder
from aligner.training.step_samples import SampleRecorder


def train(config: Config) -> bool:
    """Run one trainer rank from its start to the end of the run.

    Returns:
        False if the rank received the stop signal before its last step.
    """
    report_stage(config, "trainer", "reading the data")
    tokenizer = build_run_tokenizer(config, model_directory(config))
    cache = ExampleCache.for_run(config, partial(report_stage, config, "trainer"), is_prepared=True)
    data: PromptStream | RunData
    tools: Sequence[ListedTool] = ()
    if config.algorithm.generates_samples:
        tools = list_tools(config.environment)
        data = open_run_prompts(config, tokenizer, tool_schemas(tools), cache)
    else:
        data = open_run_data(config, tokenizer, cache)

    world = worlds.initialize(
        config.actor.parallel, config.seed, config.cluster.collective_timeout_s
    )
    # From here on an older trainer of the run can no longer write to the run directory.
    claim = run_and_broadcast_result(lambda: claim_run(config) if world.rank == 0 else None)
    set_writer_claim(config, claim)

    report_stage(config, "trainer", "computing checksums of models and data")
    checkpoints = RunCheckpoints(config, compute_input_checksums(config, cache.get_file_records()))
    if config.run.should_resume:
        # Rename damaged checkpoints first, so that the newest checkpoint is intact when it is
        # compared.
        checkpoints.rename_damaged(world.rank)
        checkpoints.check_inputs()

    report_stage(config, "trainer", "waiting for the servers")
    services = connect_services(config, world, claim["attempt"])
    report_stage(config, "trainer", "loading the model weights and building the engine")
    try:
        trainer = build_trainer(config, world, tokenizer, data, services, tools, checkpoints)
        metrics_writer = None if trainer.recorder is None else trainer.recorder.metrics_writer
        with recording(metrics_writer, config.logging):
            trainer.run()
            trainer.close()
    finally:
        # Also after an error: requests in flight would keep this process alive.
        services.close()
    worlds.shutdown()
    return not trainer.stop_condition.is_early


def build_trainer(
    config: Config,
    world: World,
    tokenizer: Tokenizer,
    data: PromptStream | RunData,
    services: Services,
    tools: Sequence[ListedTool] = (),
    checkpoints: RunCheckpoints | None = None,
) -> TrainingLoop:
    """Build the training loop of a trainer rank. Collective.

    Args:
        tools: The tools of the environment.
        checkpoints: The run's checkpoints; None for checkpoints that record no input checksums.
    """
    checkpoints = checkpoints or RunCheckpoints(config)
    timeline = open_timeline(config, "trainer", world.rank)
    if isinstance(data, RunData) and config.algorithm.trainer == "teacher_scores":
        return build_teacher_scorer(config, world, tokenizer, data, timeline)
    if isinstance(data, RunData):
        return OfflineTrainer(
            task=build_task(config, world, data),
            examples=data.examples,
            held_out_examples=data.held_out,
            **_build_loop_arguments(config, world, tokenizer, timeline, checkpoints),
        )

    settings = config.algorithm
    directory = model_directory(config)
    policy = Policy(
        read_shape(directory),
        world,
        config.actor,
        directory,
        config.rollout.temperature,
        # A preference sampler never updates the policy, but the schedule must not be empty.
        total_updates=count_policy_updates(config) if settings.trainer == "online" else 1,
        with_reference=has_reference(config),
        exact=config.engine.exact,
    )

    sampler, publisher = build_sampler_and_publisher(
        config, policy, tokenizer, services.generator, timeline.add, tools
    )
    builder = build_rollout_builder(config, policy, tokenizer, data, sampler, services)

    if settings.trainer != "online":
        # This trainer only writes the policy's responses and preference pairs. It has no run
        # checkpoints, because nothing is trained.
        writer = PairWriter(
            get_run_paths(config), tokenizer, settings.pairs != "none", settings.kept_fields
        )
        return PreferenceSampler(
            publisher=publisher,
            builder=builder,
            services=services,
            shaping=build_shaping(config),
            writer=writer if world.rank == 0 else None,
            **_build_loop_arguments(config, world, tokenizer, timeline, None, data),
        )

    # An asynchronous run generates from a thread of rank 0, which needs its own builder and
    # sampler.
    ahead_builder = None
    if world.rank == 0 and isinstance(publisher, RemotePublisher):
        ahead_sampler = RemoteSampler(services.generator, publisher, is_rank0_only=True)
        ahead_builder = build_rollout_builder(
            config, policy, tokenizer, data, ahead_sampler, services, is_rank0_only=True
        )

    pipeline = RolloutPipeline(
        builder,
        ahead_builder,
        publisher,
        services,
        config.rollout,
        config.run.steps,
        policy.runner.shape.pad_token_id,
        publishes_during_generation=config.engine.in_flight == "interrupt",
    )

    return OnlineTrainer(
        policy=policy,
        pipeline=pipeline,
        services=services,
        algorithm=build_online_algorithm(config),
        prompts=data,
        pass_rates=PassRates.empty(len(data), data.compute_checksum()),
        kl_controller=KLController(
            settings.kl_coefficient, settings.kl_target, settings.kl_horizon
        ),
        evaluations=build_evaluations(config, tokenizer, policy, builder, services, tools),
        **_build_loop_arguments(config, world, tokenizer, timeline, checkpoints, data),
    )


def _build_loop_arguments(
    config: Config,
    world: World,
    tokenizer: Tokenizer,
    timeline: Timeline,
    checkpoints: RunCheckpoints | None,
    prompts: PromptStream | None = None,
) -> dict[str, Any]:
    """Return the arguments that all training loops take.

    Args:
        prompts: The prompt stream of a loop that generates samples; None for the other loops.
    """
    paths = get_run_paths(config)
    recorder = None
    if world.rank == 0:
        sample_recorder = None
        limit_mib = config.logging.samples_mib
        if prompts is not None and limit_mib:
            files = SampleFiles(paths.sample_files, limit_mib)
            sources = list_source_names(config.reward)
            sample_recorder = SampleRecorder(files, tokenizer, prompts.locate, sources)
        recorder = Recorder(
            MetricsWriter(paths, open_sinks(config, paths)),
            RecordWriter(paths.samples),
            tokenizer,
            sample_recorder,
            _build_judge_meter(config),
        )

    return {
        "config": config,
        "checkpoints": checkpoints,
        "recorder": recorder,
        "timeline": timeline,
        "stop_condition": StopCondition(config, world),
    }


def _build_judge_meter(config: Config) -> JudgeMeter | None:
    """Return the meter that reads the counts of the run's judges from their directories; None
    without judges."""
    paths = get_run_paths(config)
    judges = parse_judge_sources(config.reward) if config.algorithm.generates_samples else ()
    for suite in get_active_suites(config):
        if (judge := parse_evaluation_judge(suite.settings, suite.key)) is not None:
            judges = (*judges, judge)
    # Judges can share a directory, whose counts must not be read twice.
    directories = tuple(dict.fromkeys(judge_directory(judge, paths) for judge in judges))
    return JudgeMeter(directories, judge_run_name(paths)) if directories else None


def build_rollout_builder(
    config: Config,
    policy: Policy,
    tokenizer: Tokenizer,
    prompts: PromptStream,
    sampler: Sampler,
    services: Services,
    *,
    is_rank0_only: bool = False,
) -> RolloutBuilder:
    """Build the object that generates this rank's samples from prompts.

    Args:
        is_rank0_only: Whether rank 0 uses it without the other ranks, to generate ahead of
            training.
    """
    options = replace(
        build_sampling_options(config.rollout, policy.runner.shape),
        # Only training needs the engine to record the expert routing; evaluations do not.
        routes=config.algorithm.routing_replay,
    )
    return RolloutBuilder(
        prompts,
        sampler,
        services,
        config.rollout,
        options,
        policy.runner.shape.pad_token_id,
        dynamic_sampling_rounds=config.algorithm.dynamic_sampling_rounds,
        # A missing end changes a score: dynamic sampling must compare the penalized scores.
        transform_scores=build_shaping(config).penalize_missing_ends,
        truncate_token=tokenizer.get_single_token(
            config.rollout.truncate_token, "rollout.truncate_token"
        ),
        source_count=count_score_parts(config.reward),
        is_rank0_only=is_rank0_only,
    )


def build_task(config: Config, world: World, data: RunData) -> OfflineTask:
    """Build the offline task of `algorithm.trainer` with the run's initial model. Collective."""
    directory = model_directory(config)
    trainer = config.algorithm.trainer
    shape = read_shape(directory)
    if trainer == "reward_model":
        model = build_initial_reward_model(config, world)
        if isinstance(data.examples.take(0, 1)[0], LabeledSteps):
            return ProcessRewardModel(model, shape.pad_token_id)

        samples = data.normalization_samples
        if samples is None:
            # Without samples of the initial policy, normalize with the answers of the first pairs;
            # each pair has two answers.
            count = config.data.normalization_samples
            pair_count = min(len(data.examples), -(-count // 2))
            samples = flatten_pairs(data.examples.take(0, pair_count))[:count]
        return PairwiseRewardModel.from_initial_model(model, shape.pad_token_id, samples)

    policy = Policy(
        shape,
        world,
        config.actor,
        directory,
        temperature=1.0,  # the data was not sampled at the run's temperature
        total_updates=config.run.steps,  # an offline step has one update
        with_reference=has_reference(config),
    )
    if trainer == "dpo":
        preference = config.algorithm.preference
        task_class = (
            DirectPreferenceOptimization if preference.has_pairs else KahnemanTverskyOptimization
        )
        return task_class(policy, shape.pad_token_id, preference)
    if config.teacher.scores is not None:
        return OfflineDistillation(policy, shape.pad_token_id, config.teacher)
    return SupervisedFineTuning(policy, shape.pad_token_id)


def build_teacher_scorer(
    config: Config, world: World, tokenizer: Tokenizer, data: RunData, timeline: Timeline
) -> TeacherScorer:
    """Build the loop that scores the demonstrations with the run's model. Collective.

    Raises:
        ConfigError: There are fewer demonstrations than steps.
    """
    directory = model_directory(config)
    demonstrations = data.examples
    if len(demonstrations) < config.run.steps:
        raise ConfigError(
            f"run.steps={config.run.steps}: must be <= {len(demonstrations)}, the number of rows in"
            " the data, because each step scores at least one row"
        )

    shape = read_shape(directory)
    vocabulary_size = shape.vocab_size
    vocabulary = read_vocabulary(directory)
    if vocabulary is not None:
        # A model may have more embeddings than its tokenizer has tokens.
        vocabulary_size = min(vocabulary_size, max(vocabulary) + 1)

    return TeacherScorer(
        model=FrozenPolicy(
            shape, world, config.actor, directory, config.actor.logprob_chunk_tokens
        ),
        demonstrations=demonstrations,
        pad_token_id=shape.pad_token_id,
        vocabulary_size=vocabulary_size,
        tokenizer_file=directory / "tokenizer.json",
        **_build_loop_arguments(config, world, tokenizer, timeline, None),
    )


def connect_services(config: Config, world: World, attempt: int) -> Services:
    """Create the clients of the run's servers on rank 0.

    On other ranks, and for offline runs, the returned `Services` have no clients.

    Args:
        attempt: Number of earlier claims of the run by a trainer, see `claim_run`.
    """
    if world.rank != 0 or not config.algorithm.generates_samples:
        return Services(None, None)
    paths = get_run_paths(config)
    server = config.server
    access = load_access(config)
    endpoints = load_endpoints(paths.endpoints)

    critic = None
    if config.algorithm.has_critic:
        # The critic rejects requests of earlier attempts (fencing).
        run_id = RunId(str(config.run.name), attempt)
        critic = CriticClient(
            endpoints["critic"],
            access,
            server.request_timeout_s,
            run_id,
            UpdateJournal(paths.journal),
            server.max_batch_size,
        )

    reward = None
    if not config.critic_serves_reward:
        reward = RewardClient(
            select_role_endpoints(endpoints, "reward"),
            access,
            server.request_timeout_s,
            server.max_batch_size,
        )

    generator = None
    if has_generator(config):
        generator = GeneratorClient(
            endpoints["generator"],
            access,
            server.request_timeout_s,
            config.engine.update_timeout_s,
            has_environment=has_any_episodes(config),
        )

    teacher = None
    if config.has_teacher:
        teacher = TeacherClient(
            select_role_endpoints(endpoints, "teacher"),
            access,
            server.request_timeout_s,
            server.max_batch_size,
            # The teacher's distribution must have the temperature of the samples.
            config.rollout.temperature,
            config.teacher.requested_top_k,
        )

    return Services(critic, reward, generator, teacher)
