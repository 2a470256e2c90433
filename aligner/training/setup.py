"""Builds the training loop of a trainer rank from the configuration, and runs it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aligner.agents.tool_catalogue import list_tools, tool_schemas
from aligner.agents.tool_protocol import ListedTool
from aligner.algorithms.kl import KLController
from aligner.algorithms.online_algorithm import build_online_algorithm, build_shaping
from aligner.data.examples import LabeledSteps, RunData, open_run_data
from aligner.data.fencing import claim_run, set_writer_claim
from aligner.data.model_directory import read_shape
from aligner.data.pass_rates import PassRates
from aligner.data.prompts import PromptStream, open_prompts
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
from aligner.paths import run_paths
from aligner.placement.addresses import load_endpoints, role_endpoints, run_access
from aligner.placement.roles import has_generator
from aligner.resharding.publisher import RemotePublisher
from aligner.rewards.judge import JudgeMeter, judge_directory, judge_run_name
from aligner.schema import Config
from aligner.schema.derived import has_reference, policy_updates
from aligner.schema.evaluation_suites import evaluated_suites
from aligner.schema.reward_sources import evaluation_judge, judge_sources, score_parts, source_names
from aligner.servers.critic_client import CriticClient, RunId, UpdateJournal
from aligner.servers.generator_client import GeneratorClient
from aligner.servers.remote_client import RewardClient, TeacherClient
from aligner.training.engine_setup import build_engine_ends, build_options
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
    pair_members,
)
from aligner.training.online import OnlineTrainer
from aligner.training.preference_sampling import PairWriter, PreferenceSampler
from aligner.training.rollout_builder import RolloutBuilder
from aligner.training.rollout_pipeline import RolloutPipeline
from aligner.training.run_checkpoints import RunCheckpoints
from aligner.training.samplers import RemoteSampler, Sampler
from aligner.training.services import Services, together
from aligner.training.step_metrics import Recorder
from aligner.training.step_samples import SampleRecorder


def train(config: Config) -> bool:
    """Run one trainer rank from its start to the end of the run.

    Returns:
        False if the rank received the stop signal before its last step.
    """
    report_stage(config, "trainer", "reading the data")
    tokenizer = build_run_tokenizer(config, model_directory(config))
    data: PromptStream | RunData
    tools: Sequence[ListedTool] = ()
    if config.algorithm.generates:
        tools = list_tools(config.environment)
        data = open_prompts(
            config.data,
            tokenizer,
            config.seed,
            include_messages=config.environment.draws_episodes,
            include_responses=config.algorithm.has_demonstrations,
            tools=tool_schemas(tools),
        )
    else:
        data = open_run_data(config, tokenizer)

    world = worlds.initialize(
        config.actor.parallel, config.seed, config.cluster.collective_timeout_s
    )
    # From here on an older trainer of the run can no longer write to the run directory.
    claim = together(lambda: claim_run(config) if world.rank == 0 else None)
    set_writer_claim(config, claim)

    report_stage(config, "trainer", "computing checksums of models and data")
    checkpoints = RunCheckpoints(config, compute_input_checksums(config))
    if config.run.resumes:
        # Rename damaged checkpoints first, so that the newest checkpoint is intact when it is
        # compared.
        checkpoints.set_damaged_aside(world.rank)
        checkpoints.check_inputs()

    report_stage(config, "trainer", "waiting for the servers")
    services = connect(config, world, claim["attempt"])
    report_stage(config, "trainer", "loading the model weights and building the engine")
    try:
        trainer = build_trainer(config, world, tokenizer, data, services, tools, checkpoints)
        with recording(
            None if trainer.recorder is None else trainer.recorder.metrics, config.logging
        ):
            trainer.run()
            trainer.close()
    finally:
        services.close()
    worlds.shutdown()
    return not trainer.stop.is_early


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
        task = build_task(config, world, data)
        parts = _loop_parts(config, world, tokenizer, timeline, checkpoints)
        return OfflineTrainer(task=task, examples=data.examples, held_out=data.held_out, **parts)

    settings = config.algorithm
    directory = model_directory(config)
    policy = Policy(
        read_shape(directory),
        world,
        config.actor,
        directory,
        config.rollout.temperature,
        total_updates=policy_updates(config) if settings.trainer == "online" else 1,
        with_reference=has_reference(config),
        exact=config.engine.exact,
    )

    sampler, publisher = build_engine_ends(
        config, policy, tokenizer, services.generator, timeline.add, tools
    )
    builder = build_rollout_builder(config, policy, tokenizer, data, sampler, services)

    if settings.trainer != "online":
        writer = PairWriter(
            run_paths(config), tokenizer, settings.pairs != "none", settings.kept_fields
        )
        return PreferenceSampler(
            publisher=publisher,
            builder=builder,
            services=services,
            shaping=build_shaping(config),
            writer=writer if world.rank == 0 else None,
            **_loop_parts(config, world, tokenizer, timeline, None, data),
        )

    ahead_builder = None
    # An asynchronous run generates from a thread of rank 0, which needs its own builder and
    # sampler.
    if world.rank == 0 and isinstance(publisher, RemotePublisher):
        ahead_sampler = RemoteSampler(services.generator, publisher, is_alone=True)
        ahead_builder = build_rollout_builder(
            config, policy, tokenizer, data, ahead_sampler, services, is_alone=True
        )

    pipeline = RolloutPipeline(
        *(builder, ahead_builder, publisher, services),
        config.rollout,
        config.run.steps,
        policy.runner.shape.pad_token_id,
        interrupts=config.engine.in_flight == "interrupt",
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
        **_loop_parts(config, world, tokenizer, timeline, checkpoints, data),
    )


def _loop_parts(
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
    paths = run_paths(config)
    recorder = None
    if world.rank == 0:
        sample_recorder = None
        limit_mib = config.logging.samples_mib
        if prompts is not None and limit_mib:
            files = SampleFiles(paths.sample_files, limit_mib)
            names = source_names(config.reward)
            sample_recorder = SampleRecorder(files, tokenizer, prompts.locate, names)
        writers = MetricsWriter(paths, open_sinks(config, paths)), RecordWriter(paths.samples)
        recorder = Recorder(*writers, tokenizer, sample_recorder, _judge_meter(config))

    return {
        "config": config,
        "checkpoints": checkpoints,
        "recorder": recorder,
        "timeline": timeline,
        "stop": StopCondition(config, world),
    }


def _judge_meter(config: Config) -> JudgeMeter | None:
    """Return the meter that reads the counts of the run's judges from their directories; None
    without judges."""
    paths = run_paths(config)
    judges = judge_sources(config.reward) if config.algorithm.generates else ()
    for suite in evaluated_suites(config):
        if (judge := evaluation_judge(suite.settings, suite.key)) is not None:
            judges = (*judges, judge)
    directories = tuple(dict.fromkeys(judge_directory(source, paths) for source in judges))
    return JudgeMeter(directories, judge_run_name(paths)) if directories else None


def build_rollout_builder(
    config: Config,
    policy: Policy,
    tokenizer: Tokenizer,
    prompts: PromptStream,
    sampler: Sampler,
    services: Services,
    *,
    is_alone: bool = False,
) -> RolloutBuilder:
    """Build the object that generates this rank's samples from prompts.

    Args:
        is_alone: Whether rank 0 uses it without the other ranks, to generate ahead of training.
    """
    return RolloutBuilder(
        prompts,
        sampler,
        services,
        config.rollout,
        replace(
            build_options(config.rollout, policy.runner.shape),
            routes=config.algorithm.routing_replay,
        ),
        policy.runner.shape.pad_token_id,
        dynamic_sampling_rounds=config.algorithm.dynamic_sampling_rounds,
        compared=build_shaping(config).penalize_missing_ends,
        truncate_token=tokenizer.get_single_token(
            config.rollout.truncate_token, "rollout.truncate_token"
        ),
        score_parts=score_parts(config.reward),
        is_alone=is_alone,
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
        count = config.data.normalization_samples
        if samples is None:
            samples = pair_members(data.examples.take(0, min(len(data.examples), -(-count // 2))))[
                :count
            ]
        return PairwiseRewardModel.start(model, shape.pad_token_id, samples)

    policy = Policy(
        shape,
        world,
        config.actor,
        directory,
        temperature=1.0,
        total_updates=config.run.steps,
        with_reference=has_reference(config),
    )
    if trainer == "dpo":
        preference = config.algorithm.preference
        kind = DirectPreferenceOptimization if preference.has_pairs else KahnemanTverskyOptimization
        return kind(policy, shape.pad_token_id, preference)
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
    demonstrations = list(data.examples.iterate_examples())
    if len(demonstrations) < config.run.steps:
        raise ConfigError(
            f"run.steps={config.run.steps}: must be <= {len(demonstrations)}, the number of rows in"
            " the data, because each step scores at least one row"
        )

    shape = read_shape(directory)
    vocabulary = read_vocabulary(directory)
    # A model may have more embeddings than its tokenizer has tokens.
    vocabulary_size = (
        shape.vocab_size if vocabulary is None else min(shape.vocab_size, max(vocabulary) + 1)
    )

    return TeacherScorer(
        model=FrozenPolicy(
            shape, world, config.actor, directory, config.actor.logprob_chunk_tokens
        ),
        demonstrations=demonstrations,
        pad_token_id=shape.pad_token_id,
        vocabulary=vocabulary_size,
        tokenizer_file=directory / "tokenizer.json",
        **_loop_parts(config, world, tokenizer, timeline, None),
    )


def connect(config: Config, world: World, attempt: int) -> Services:
    """Connect rank 0 to the servers of the run; return `Services` without clients on other ranks
    and for offline runs.

    Args:
        attempt: Number of earlier claims of the run by a trainer, see `claim_run`.
    """
    if world.rank != 0 or not config.algorithm.generates:
        return Services(None, None)
    paths = run_paths(config)
    server = config.server
    access = run_access(config)

    endpoints = load_endpoints(paths.endpoints)
    critic = reward = generator = teacher = None
    if config.algorithm.has_critic:
        run = RunId(str(config.run.name), attempt)
        journal = UpdateJournal(paths.journal)
        critic = CriticClient(
            endpoints["critic"],
            access,
            server.request_timeout_s,
            run,
            journal,
            server.max_batch_size,
        )

    if not config.critic_scores:
        reward = RewardClient(
            role_endpoints(endpoints, "reward"),
            access,
            server.request_timeout_s,
            server.max_batch_size,
        )

    if has_generator(config):
        timeouts = (
            server.request_timeout_s,
            config.engine.update_timeout_s,
        )
        has_environment = config.environment.draws_episodes
        generator = GeneratorClient(
            endpoints["generator"], access, *timeouts, has_environment=has_environment
        )

    if config.has_teacher:
        limits = (
            server.request_timeout_s,
            server.max_batch_size,
        )
        temperature = config.rollout.temperature
        teacher = TeacherClient(
            role_endpoints(endpoints, "teacher"),
            access,
            *limits,
            temperature,
            config.teacher.asked_tokens,
        )

    return Services(critic, reward, generator, teacher)
