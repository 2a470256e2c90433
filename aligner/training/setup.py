"""A trainer rank, put together from the configuration."""

from __future__ import annotations

import functools
import os
from datetime import timedelta

from aligner.algorithms.kl import KLController
from aligner.algorithms.online_algorithm import build_online_algorithm, build_shaping
from aligner.data.model_directory import read_shape
from aligner.data.prompts import PromptStream, open_prompts
from aligner.data.tokenizer import Tokenizer
from aligner.engines.build import build_engine
from aligner.engines.engine_protocol import GenerationEngine, SamplingOptions, SpanListener, weight_format
from aligner.engines.replicas import replica_group
from aligner.megatron import world as worlds
from aligner.megatron.policy import Policy
from aligner.megatron.world import World
from aligner.models.model_source import model_directory
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import engine_slices
from aligner.observability.metrics import MetricsWriter, RecordWriter, recording
from aligner.observability.sinks import open_sinks
from aligner.observability.timeline import open_timeline
from aligner.paths import run_paths
from aligner.placement.endpoints import load_endpoints, replicas, run_access
from aligner.placement.roles import has_generator
from aligner.resharding.link import Link
from aligner.resharding.publisher import Publisher
from aligner.resharding.remote_publisher import GeneratorCalls, RemotePublisher, plan_between_worlds
from aligner.resharding.transfer_plan import plan_resharding
from aligner.resharding.weight_update import WeightPublisher, WeightUpdate
from aligner.rollout.rollout_builder import RolloutBuilder
from aligner.rollout.rollout_pipeline import RolloutPipeline
from aligner.rollout.samplers import ColocatedSampler, RemoteSampler, Sampler
from aligner.rollout.services import Services, together
from aligner.schema import AlgorithmConfig, Config, RolloutConfig
from aligner.schema.derived import policy_updates
from aligner.servers.critic_client import CriticClient
from aligner.servers.critic_updates import UpdateJournal
from aligner.servers.generator_client import GeneratorClient
from aligner.servers.remote_client import RewardClient
from aligner.training.evaluator import build_evaluator
from aligner.training.offline import train_offline
from aligner.training.online import OnlineTrainer, Recorder
from aligner.training.preference_sampling import PairWriter, PreferenceSampler
from aligner.training.run_checkpoints import RunCheckpoints
from aligner.training.stopping import StopCondition


def train(config: Config) -> bool:
    """One trainer rank, from its start to the run's end; false when it was told to stop before its last step."""
    if not config.algorithm.generates:
        return train_offline(config)
    directory = model_directory(config)
    shape, tokenizer = read_shape(directory), Tokenizer(directory)
    prompts = open_prompts(config.data, tokenizer, config.seed)
    world = worlds.initialize(config.actor.parallel, config.seed, config.cluster.collective_timeout_s)
    checkpoints = RunCheckpoints(config)
    services = connect(config, world)
    try:
        trainer: OnlineTrainer | PreferenceSampler
        if config.algorithm.trainer == "preferences":
            trainer = build_sampler(config, shape, tokenizer, prompts, world, services)
        else:
            trainer = build_trainer(config, shape, tokenizer, prompts, world, services, checkpoints)
        with recording(trainer.recorder.metrics if trainer.recorder is not None else None, config.logging):
            trainer.run()
            source = trainer.pipeline if isinstance(trainer, OnlineTrainer) else trainer.builder
            source.close()
    finally:
        services.close()
    worlds.shutdown()
    return not trainer.ending.is_early


def build_trainer(
    config: Config,
    shape: ModelShape,
    tokenizer: Tokenizer,
    prompts: PromptStream,
    world: World,
    services: Services,
    checkpoints: RunCheckpoints,
) -> OnlineTrainer:
    """Put the parts of a trainer rank together."""
    paths, algorithm = run_paths(config), config.algorithm
    policy = Policy(
        shape,
        world,
        config.actor,
        model_directory(config),
        config.rollout.temperature,
        total_updates=policy_updates(config),
    )
    timeline = open_timeline(config, "trainer", world.rank)
    sampler, publisher = build_engine_ends(config, shape, world, policy, services.generator, timeline.add)
    options = build_options(config.rollout, shape)
    builder = build_rollout_builder(config, shape, tokenizer, prompts, sampler, services, options)
    ahead = None
    if world.rank == 0 and isinstance(publisher, RemotePublisher):
        alone = RemoteSampler(services.generator, publisher, is_alone=True)
        ahead = build_rollout_builder(config, shape, tokenizer, prompts, alone, services, options, is_alone=True)
    pipeline = RolloutPipeline(
        builder,
        ahead,
        publisher,
        services,
        config.rollout,
        config.run.steps,
        shape.pad_token_id,
        interrupts=config.engine.in_flight == "interrupt",
    )
    return OnlineTrainer(
        config=config,
        paths=paths,
        policy=policy,
        pipeline=pipeline,
        services=services,
        algorithm=build_online_algorithm(config),
        kl_controller=build_kl_controller(algorithm),
        checkpoints=checkpoints,
        saved=checkpoints.newest() if config.run.resumes else [],
        recorder=build_recorder(config, tokenizer, world),
        evaluator=build_evaluator(config, tokenizer, policy, builder, services, options),
        timeline=timeline,
        ending=StopCondition(config.run, world),
    )


def build_sampler(
    config: Config, shape: ModelShape, tokenizer: Tokenizer, prompts: PromptStream, world: World, services: Services
) -> PreferenceSampler:
    """Put the parts of a rank that samples preferences together."""
    temperature, directory = config.rollout.temperature, model_directory(config)
    policy = Policy(shape, world, config.actor, directory, temperature, total_updates=1, with_reference=False)
    timeline = open_timeline(config, "trainer", world.rank)
    sampler, publisher = build_engine_ends(config, shape, world, policy, services.generator, timeline.add)
    return PreferenceSampler(
        config=config,
        publisher=publisher,
        builder=build_rollout_builder(
            config, shape, tokenizer, prompts, sampler, services, build_options(config.rollout, shape)
        ),
        services=services,
        shaping=build_shaping(config),
        recorder=build_recorder(config, tokenizer, world),
        writer=PairWriter(run_paths(config), tokenizer) if world.rank == 0 else None,
        timeline=timeline,
        ending=StopCondition(config.run, world),
    )


def build_rollout_builder(
    config: Config,
    shape: ModelShape,
    tokenizer: Tokenizer,
    prompts: PromptStream,
    sampler: Sampler,
    services: Services,
    options: SamplingOptions,
    *,
    is_alone: bool = False,
) -> RolloutBuilder:
    """This rank's way from prompts to samples; rank 0's own where `is_alone`."""
    return RolloutBuilder(
        prompts,
        sampler,
        services,
        config.rollout,
        options,
        shape.pad_token_id,
        dynamic_sampling_rounds=config.algorithm.dynamic_sampling_rounds,
        compared=build_shaping(config).of_ends,
        truncate_token=tokenizer.single_token(config.rollout.truncate_token, "rollout.truncate_token"),
        is_alone=is_alone,
    )


def build_recorder(config: Config, tokenizer: Tokenizer, world: World) -> Recorder | None:
    """Rank 0's."""
    if world.rank != 0:
        return None
    paths = run_paths(config)
    return Recorder(MetricsWriter(paths, open_sinks(config, paths)), RecordWriter(paths.samples), tokenizer)


def connect(config: Config, world: World) -> Services:
    """Clients of the run's servers, on rank 0 alone."""
    if world.rank != 0:
        return Services(None, None)
    paths, server, access = run_paths(config), config.server, run_access(config)
    endpoints = load_endpoints(paths.endpoints)
    critic = reward = None
    if config.algorithm.has_critic:
        journal = UpdateJournal(paths.journal)
        critic = CriticClient(
            endpoints["critic"], access, server.request_timeout_s, str(config.run.name), journal, server.max_batch_size
        )
    if not config.critic_scores:
        reward = RewardClient(replicas(endpoints, "reward"), access, server.request_timeout_s, server.max_batch_size)
    generator = None
    if has_generator(config):
        generator = GeneratorClient(endpoints["generator"], access, server.request_timeout_s, config.engine.update_timeout_s)
    return Services(critic, reward, generator)


def build_engine_ends(
    config: Config,
    shape: ModelShape,
    world: World,
    policy: Policy,
    client: GeneratorClient | None,
    listener: SpanListener | None = None,
) -> tuple[Sampler, WeightPublisher]:
    """Where samples come from, and how weights get there. Collective. `client` is rank 0's, where there is a generator;
    `listener` is told what a colocated engine tells of, and when weights move to the generator.
    """
    if has_generator(config):
        publisher = build_remote_publisher(config, shape, world, policy, client, listener)
        return RemoteSampler(client, publisher), publisher
    engine = build_colocated_engine(config, shape, world, policy, listener)
    sampler = ColocatedSampler(engine, config.engine.parallel, world.rank, config.engine.sleep)
    return sampler, build_colocated_publisher(config, shape, world, policy, engine)


def build_remote_publisher(
    config: Config,
    shape: ModelShape,
    world: World,
    policy: Policy,
    client: GeneratorClient | None,
    listener: SpanListener | None,
) -> RemotePublisher:
    """What takes the policy's weights to the generator. Collective; `client` is rank 0's."""
    calls = None
    if client is not None:
        is_another = functools.partial(client.is_another, start_timeout_s=config.server.start_timeout_s)
        calls = GeneratorCalls(client.instance, is_another, client.connect, client.receive)
    to = weight_format(config.engine, world.device)
    return RemotePublisher(
        plan_between_worlds(shape, config.actor.parallel, to),
        world.rank,
        world.device,
        to,
        config.engine,
        host=os.environ["MASTER_ADDR"],
        read=policy.runner.weights.read,
        together=together,
        calls=calls,
        listener=listener if config.rollout.max_staleness > 0 else None,  # else the trainer's own phase is the span
    )


def build_colocated_publisher(
    config: Config, shape: ModelShape, world: World, policy: Policy, engine: GenerationEngine
) -> Publisher:
    """What takes the policy's weights to the engine on the trainer's own ranks. Collective."""
    weights, to = policy.runner.weights, engine.weight_format

    def begin_update(version: int) -> WeightUpdate:
        engine.wake()
        return engine.begin_update(version)

    plan = plan_resharding(shape, world.layout, to.layout, itemsize=to.dtype.itemsize)
    link = Link.of_world(plan.labels, timeout=timedelta(seconds=config.engine.update_timeout_s), device=world.device)
    return Publisher.to_engine(
        plan, link, config.engine, to, read=weights.read, begin_update=begin_update, copied=weights.copied
    )


def build_colocated_engine(
    config: Config, shape: ModelShape, world: World, policy: Policy, listener: SpanListener | None = None
) -> GenerationEngine:
    """This rank's part of the colocated engine. Collective: it makes the replicas' process groups.

    `listener` is told what the engine tells of.
    """
    layout, weights = config.engine.parallel, policy.runner.weights
    return build_engine(
        shape,
        config.engine,
        model_directory(config),
        rank=world.rank,
        seed=config.seed,
        group=replica_group(layout, world.rank, timedelta(seconds=config.cluster.collective_timeout_s)),
        device=world.device,
        shared=weights.parameters_cut_alike(engine_slices(weights.table, layout, world.rank))
        if config.engine.update == "shared"
        else None,
        context=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
        listener=listener,
    )


def build_options(settings: RolloutConfig, shape: ModelShape) -> SamplingOptions:
    """How the responses of a run are drawn."""
    return SamplingOptions(
        max_new_tokens=settings.max_response_tokens,
        min_new_tokens=settings.min_response_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        stop_token_ids=shape.eos_token_ids if settings.stop_at_eos else (),
    )


def build_kl_controller(settings: AlgorithmConfig) -> KLController:
    """A fixed coefficient, or one that follows a target."""
    if settings.kl_target is None:
        return KLController(settings.kl_coefficient)
    return KLController(settings.kl_coefficient, settings.kl_target, settings.kl_horizon)
