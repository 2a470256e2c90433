"""Building a trainer rank from the configuration."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from aligner.algorithms.checkpoints import RunCheckpoints
from aligner.algorithms.evaluator import build_evaluator
from aligner.algorithms.kl import AdaptiveKLController, FixedKLController, KLController
from aligner.algorithms.offline import train_offline
from aligner.algorithms.online import OnlineTrainer, Recorder
from aligner.algorithms.online_algorithm import build_online_algorithm
from aligner.algorithms.preferences import PairWriter, PreferenceSampler
from aligner.config.access import run_access
from aligner.config.algorithms import policy_updates
from aligner.config.endpoints import load_endpoints, replicas
from aligner.config.model_shape import ModelShape
from aligner.config.paths import model_directory, run_paths
from aligner.config.schema import Algorithm, Config, EngineParallel, Rollout
from aligner.config.weights import engine_slices
from aligner.data.model_directory import read_shape
from aligner.data.prompts import PromptStream, open_prompts
from aligner.data.tokenizer import Tokenizer
from aligner.engines.build import build_engine
from aligner.engines.protocol import GenerationEngine, SamplingOptions, SpanListener
from aligner.megatron import world as worlds
from aligner.megatron.policy import Policy
from aligner.megatron.world import World
from aligner.observability.metrics import MetricsWriter, SampleWriter
from aligner.observability.timeline import open_timeline
from aligner.resharding.link import Link
from aligner.resharding.plan import plan_resharding
from aligner.resharding.publisher import Publisher
from aligner.resharding.update import WeightUpdate
from aligner.rollout.rollouts import Rollouts
from aligner.rollout.services import Services
from aligner.servers.client import RewardClient
from aligner.servers.critic_client import CriticClient
from aligner.servers.journal import UpdateJournal


def train(config: Config) -> None:
    """One trainer rank, from its start to the run's last step."""
    if not config.algorithm.generates:
        train_offline(config)
        return
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
        trainer.run()
        trainer.rollouts.close()
    finally:
        services.close()
    worlds.shutdown()


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
    engine = build_colocated_engine(config, shape, world, policy, timeline.add)
    options = build_options(config.rollout, shape)
    rollouts = build_rollouts(config, shape, tokenizer, prompts, engine, services, world, options)
    return OnlineTrainer(
        config=config,
        paths=paths,
        policy=policy,
        publisher=build_publisher(config, shape, world, policy, engine),
        rollouts=rollouts,
        services=services,
        algorithm=build_online_algorithm(config),
        kl_controller=build_kl_controller(algorithm),
        checkpoints=checkpoints,
        saved=checkpoints.newest() if config.run.resume else [],
        recorder=build_recorder(config, tokenizer, world),
        evaluator=build_evaluator(config, tokenizer, policy, rollouts, services, options),
        timeline=timeline,
    )


def build_sampler(
    config: Config, shape: ModelShape, tokenizer: Tokenizer, prompts: PromptStream, world: World, services: Services
) -> PreferenceSampler:
    """Put the parts of a rank that samples preferences together."""
    temperature, directory = config.rollout.temperature, model_directory(config)
    policy = Policy(shape, world, config.actor, directory, temperature, total_updates=1, with_reference=False)
    timeline = open_timeline(config, "trainer", world.rank)
    engine = build_colocated_engine(config, shape, world, policy, timeline.add)
    return PreferenceSampler(
        config=config,
        publisher=build_publisher(config, shape, world, policy, engine),
        rollouts=build_rollouts(
            config, shape, tokenizer, prompts, engine, services, world, build_options(config.rollout, shape)
        ),
        services=services,
        recorder=build_recorder(config, tokenizer, world),
        writer=PairWriter(run_paths(config), tokenizer) if world.rank == 0 else None,
        timeline=timeline,
    )


def build_rollouts(
    config: Config,
    shape: ModelShape,
    tokenizer: Tokenizer,
    prompts: PromptStream,
    engine: GenerationEngine,
    services: Services,
    world: World,
    options: SamplingOptions,
) -> Rollouts:
    """This rank's way from prompts to samples."""
    return Rollouts(
        prompts,
        engine,
        services,
        config.rollout,
        config.engine.parallel,
        world.rank,
        options,
        shape.pad_token_id,
        engine_sleeps=config.engine.sleep,
        dynamic_sampling_rounds=config.algorithm.dynamic_sampling_rounds,
        truncate_token=tokenizer.single_token(config.rollout.truncate_token, "rollout.truncate_token"),
    )


def build_recorder(config: Config, tokenizer: Tokenizer, world: World) -> Recorder | None:
    """Rank 0's."""
    if world.rank != 0:
        return None
    paths = run_paths(config)
    return Recorder(MetricsWriter(paths, config.logging.tensorboard), SampleWriter(paths), tokenizer)


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
    if not config.critic.with_reward:
        reward = RewardClient(replicas(endpoints, "reward"), access, server.request_timeout_s, server.max_batch_size)
    return Services(critic, reward)


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
        group=_replica_group(layout, world.rank, timedelta(seconds=config.cluster.collective_timeout_s)),
        device=world.device,
        shared=weights.parameters_cut_alike(engine_slices(weights.table, layout, world.rank))
        if config.engine.update == "shared"
        else None,
        context=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
        listener=listener,
    )


def _replica_group(layout: EngineParallel, rank: int, timeout: timedelta) -> dist.ProcessGroup | None:
    if layout.tensor == 1:
        return None
    members = [list(range(first, first + layout.tensor)) for first in range(0, layout.ranks, layout.tensor)]
    groups = [dist.new_group(ranks, timeout=timeout) for ranks in members]  # every rank takes part in making every group
    return groups[rank // layout.tensor]


def build_publisher(config: Config, shape: ModelShape, world: World, policy: Policy, engine: GenerationEngine) -> Publisher:
    """The way of the policy's weights into the engine."""
    weights, settings = policy.runner.weights, config.engine

    def begin_update(version: int) -> WeightUpdate:
        engine.wake()
        return engine.begin_update(version)

    itemsize = engine.weight_dtype.itemsize
    plan = plan_resharding(weights.table, shape.num_layers, world.layout, engine.weight_layout, itemsize=itemsize)
    link = Link.of_world(plan.labels, timeout=timedelta(seconds=settings.update_timeout_s), device=world.device)
    return Publisher(
        plan,
        link,
        read=weights.read,
        begin_update=begin_update,
        dtype=engine.weight_dtype,
        bucket_bytes=settings.bucket_mib << 20,
        verify_every=settings.verify_every,
        group_bytes=engine.group_bytes,
        copied=weights.copied,
    )


def build_options(settings: Rollout, shape: ModelShape) -> SamplingOptions:
    """How the responses of a run are drawn."""
    return SamplingOptions(
        max_new_tokens=settings.max_response_tokens,
        min_new_tokens=settings.min_response_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        stop_token_ids=shape.eos_token_ids if settings.stop_at_eos else (),
    )


def build_kl_controller(settings: Algorithm) -> KLController:
    """A fixed coefficient, or one that follows a target."""
    if settings.kl_target is None:
        return FixedKLController(settings.kl_coefficient)
    return AdaptiveKLController(settings.kl_coefficient, settings.kl_target, settings.kl_horizon)
