"""Settings of a dry run that differ from the run, besides layouts and model shapes.

Lengths, batches and schedules are smaller. Devices, precisions, models, rewards and servers are
replaced by those that this machine's CPU supports.
"""

from collections.abc import Collection
from itertools import count
from typing import Any

from aligner.config.dry_run.tiny_models import Models, list_layout_sections
from aligner.models.hugging_face import hugging_face_config
from aligner.models.model_source import first_layers
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import Head, TensorSpec, frozen_names, weight_table
from aligner.paths import get_run_paths
from aligner.schema import (
    Config,
    ParallelConfig,
    PortsConfig,
    RewardConfig,
    RunConfig,
    ServerConfig,
    TLSConfig,
)
from aligner.schema.derived import (
    count_critic_updates,
    count_policy_updates,
    count_trained_samples,
    get_max_sequence_length,
    get_rows_per_group,
)
from aligner.schema.evaluation_suites import Suite, parse_evaluation_suites
from aligner.schema.keys import get_value, with_values
from aligner.schema.reward_sources import (
    ModelSource,
    Source,
    get_request_url,
    parse_reward_sources,
    to_source_entry,
)

Values = dict[str, Any]
"""New values by key."""

# Minimum of timeouts in seconds. Many ranks share a core here, so that operations that take seconds
# on separate devices may take minutes.
_MIN_TIMEOUT_S = 1800.0

# Reward source that replaces a source that cannot be reached.
_VARYING_SCORE: Values = {"kind": "function", "function": "digit_fraction"}


def get_text_limit(config: Config) -> int:
    """Return the number of characters to which a dry run shortens every text.

    The last characters of a text are kept. This many tokens fit both into a prompt and, with the
    EOS token, into a response.
    """
    prompt = config.data.max_prompt_tokens
    response = config.data.max_response_tokens - 1
    return prompt if config.algorithm.generates_samples else min(prompt, response)


def build_local_settings(config: Config) -> Values:
    """Return settings that run all roles on this machine's CPU.

    The run directory is next to the directory of the run, the timeouts are long, and trackers are
    off.
    """
    run = config.run
    cluster = config.cluster
    server = config.server
    engine = config.engine
    health_s = max(server.health_timeout_s, _MIN_TIMEOUT_S)
    start_s = max(server.start_timeout_s, _MIN_TIMEOUT_S)
    stop_s = max(cluster.stop_timeout_s, 30.0)

    values: Values = {
        "run.name": f"{run.name}-dry-run",
        "run.dir": f"{run.dir}-dry-run",
        "run.steps": config.dry_run.steps,
        "run.stop_after": None,
        **dict.fromkeys(("run.end_kl", "run.end_at", "run.end_without_gain")),
        "run.resume": RunConfig.resume,
        "run.inputs": {},
        "cluster.kind": "local",
        "cluster.device_memory_gib": None,
        "cluster.threads_per_rank": 1,
        "cluster.collective_timeout_s": max(cluster.collective_timeout_s, start_s),
        "cluster.heartbeat_timeout_s": max(cluster.heartbeat_timeout_s, _MIN_TIMEOUT_S),
        "cluster.stop_timeout_s": stop_s,
        "server.start_timeout_s": start_s,  # also the timeout of the preparation
        # An interpreter on the nodes of a cluster need not exist on this machine.
        "server.python": server.python if cluster.kind == "local" else None,
        "server.interface": "127.0.0.1",
        "server.tls": TLSConfig(),
        "server.health_timeout_s": health_s,
        # A request must wait for a restart of its server (checks/server.py).
        "server.request_timeout_s": max(server.request_timeout_s, health_s + stop_s + start_s + 1),
        "server.drain_timeout_s": max(server.drain_timeout_s, 60.0),
        "server.max_sequence_length": None,
        "server.max_request_tokens": max(
            server.max_request_tokens, ServerConfig.max_request_tokens
        ),
        "engine.kind": "embedded",
        "engine.precision": "fp32",
        "engine.verify": "sync",
        "engine.update_timeout_s": max(engine.update_timeout_s, _MIN_TIMEOUT_S),
        "checkpoint.every": min(config.checkpoint.every, 1),
        "logging.wandb.enabled": False,  # trackers are for real runs only
        "logging.mlflow.enabled": False,
        "logging.prometheus.port": None,
        "profile.steps": [],
    }
    values |= {f"{role}.precision": "fp32" for role in ("actor", "critic", "reward", "teacher")}
    values |= {f"{role}.optimizer.offload_fraction": 0.0 for role in ("actor", "critic")}
    return values | {
        f"{role}.ports": PortsConfig() for role in ("engine", "critic", "reward", "teacher")
    }


def build_engine_layout(config: Config) -> Values:
    """Return the layout of the embedded engine, which has no pipeline stages.

    A generator has fewer ranks than in the run; a colocated engine has more replicas instead.
    """
    layout = config.engine.parallel
    if layout.pipeline == 1:
        return {}
    is_colocated = config.engine.placement == "colocated"
    replicas = layout.data * layout.pipeline if is_colocated else layout.data
    return {"engine.parallel.pipeline": 1, "engine.parallel.data": replicas}


def build_teacher_settings(config: Config) -> Values:
    """Return the layout of the teacher: one rank.

    The tiny policy serves as the teacher, and its shape need not fit the teacher's own layout.
    """
    return (
        {"teacher.parallel": ParallelConfig(), "teacher.replicas": 1} if config.has_teacher else {}
    )


def build_critic_settings(run_config: Config, run_models: Models) -> Values:
    """Return settings of a critic that starts from the policy instead of its own model.

    The result is empty if the critic already starts from the policy. The critic has fewer layers
    than the policy if it has fewer in the run.

    Args:
        run_config: Configuration of the run.
        run_models: Shapes of the models of the run.
    """
    if run_models.critic is None:
        return {}
    layers = run_config.critic.num_layers or run_models.critic.num_layers
    return {
        "critic.path": None,
        "critic.num_layers": layers if layers < run_models.policy.num_layers else None,
    }


def build_length_settings(config: Config) -> Values:
    """Return short lengths of prompts and responses, and small evaluations."""
    data = config.data
    evaluation = config.evaluation
    rollout = config.rollout
    max_tokens = min(rollout.max_response_tokens, 8)
    # A response with step labels consists of all its steps, and each step is shortened separately.
    max_record_tokens = 64 if config.algorithm.trainer == "reward_model" else 16
    return {
        "data.generated_tokens": False,  # these tokens belong to the tokenizer of the run
        "teacher.scores": None,
        # The chat template of the tiny model does not distinguish the turns.
        "data.learned_turns": "last",
        "data.max_prompt_tokens": min(data.max_prompt_tokens, 16),
        "data.max_response_tokens": min(data.max_response_tokens, max_record_tokens),
        "data.held_out": min(data.held_out, 2 * config.actor.parallel.data),
        "data.normalization_samples": min(data.normalization_samples, 8),
        "evaluation.every": min(evaluation.every, config.dry_run.steps),
        **_build_evaluation_settings(config),
        "rollout.max_response_tokens": max_tokens,
        "algorithm.target_length": min(config.algorithm.target_length, max_tokens),
        "rollout.min_response_tokens": (
            max_tokens
            if rollout.min_response_tokens == rollout.max_response_tokens
            else min(rollout.min_response_tokens, max_tokens // 2)
        ),
        "rollout.truncate_after": max_tokens // 2,
        "rollout.truncate_token": None if rollout.truncate_token is None else ".",
    }


def _build_evaluation_settings(config: Config) -> Values:
    """Return settings of evaluation suites with few prompts and samples, and without a judge.

    A judge would cost money, and the responses of random models are not worth it.
    """
    values: Values = {}
    for suite in (Suite(None, config.evaluation), *parse_evaluation_suites(config)):
        count = min(suite.settings.count or 4, 4)
        samples = min(suite.settings.samples, 2)
        values |= {
            f"{suite.key}.count": count,
            f"{suite.key}.samples": samples,
            f"{suite.key}.judge": {},
        }
    return values


def build_batch_settings(config: Config) -> Values:
    """Return the smallest batches with which every rank has samples in each minibatch.

    If a step of the run has several minibatches, epochs, rollout micro-batches or samples per
    prompt, the dry run has two of them. A micro-batch has the minimum number of tokens, so that a
    minibatch consists of several micro-batches.
    """
    values: Values = {"data.batch_size": min(config.data.batch_size, _get_min_rows(config))}
    if config.algorithm.generates_samples:
        values = _build_sample_settings(config)
    config = with_values(config, values)
    max_length = get_max_sequence_length(config)
    values["actor.micro_batch_tokens"] = get_rows_per_group(config) * max_length
    values["actor.logprob_chunk_tokens"] = min(config.actor.logprob_chunk_tokens, max_length)
    values["teacher.logprob_chunk_tokens"] = min(config.teacher.logprob_chunk_tokens, max_length)
    other_roles = {
        "teacher",
        *(section.partition(".")[0] for section in list_layout_sections(config)),
    } - {"actor"}
    return values | {f"{role}.micro_batch_tokens": max_length for role in other_roles}


def _build_sample_settings(config: Config) -> Values:
    """Return the number of prompts, samples and updates per step."""
    rollout = config.rollout
    algorithm = config.algorithm
    values: Values = {
        "rollout.micro_batches": min(rollout.micro_batches, 2),
        "rollout.samples_per_prompt": min(rollout.samples_per_prompt, 2),
        "rollout.spare_prompts": min(rollout.spare_prompts, 1),
        "algorithm.minibatches": min(algorithm.minibatches, 2),
        "algorithm.epochs": min(algorithm.epochs, 2),
    }
    config = with_values(config, values)
    prompts = next(prompts for prompts in count(1) if _fits_layouts(config, prompts))
    # The horizon of the adaptive KL coefficient must be longer than one step.
    horizon = max(algorithm.kl_horizon, prompts * config.rollout.samples_per_prompt + 1)
    return values | {"rollout.prompts_per_step": prompts, "algorithm.kl_horizon": horizon}


def _get_min_rows(config: Config) -> int:
    """Return the number of rows that gives each data-parallel rank enough micro-batches.

    Each rank of a trained model needs one micro-batch per pipeline stage, and at least two.
    """
    layouts = [config.actor.parallel]
    if config.algorithm.has_critic:
        layouts.append(config.critic.parallel)
    # With one micro-batch, gradient accumulation and the pipeline's steady state would not run.
    return max(layout.data * max(layout.pipeline, 2) for layout in layouts)


def _fits_layouts(config: Config, prompts: int) -> bool:
    """Return whether a number of prompts per step is divisible as required, and large enough."""
    rollout = config.rollout
    algorithm = config.algorithm
    trained_samples = prompts * count_trained_samples(config)
    units = trained_samples // get_rows_per_group(config)
    is_divisible = prompts % rollout.micro_batches == 0 and units % algorithm.minibatches == 0
    samples = prompts // rollout.micro_batches * rollout.samples_per_prompt
    has_enough_rows = trained_samples // algorithm.minibatches >= _get_min_rows(config)
    return (
        is_divisible
        and samples % config.engine.parallel.data == 0
        and has_enough_rows
        and prompts >= rollout.spare_prompts
    )


def build_schedule_settings(config: Config) -> Values:
    """Return warm-ups that end before the run does.

    The configuration must already have the batches and the number of steps of the dry run.
    """
    critic_warmup = min(config.algorithm.steps_before_policy_updates, config.run.steps - 1)
    config = with_values(config, {"algorithm.critic_warmup_steps": critic_warmup})
    updates = {"actor": count_policy_updates(config)}
    if config.algorithm.has_critic:
        updates["critic"] = count_critic_updates(config)
    warmups = {f"{role}.optimizer.warmup_steps": steps - 1 for role, steps in updates.items()}
    return {
        "algorithm.critic_warmup_steps": critic_warmup,
        **{key: min(get_value(config, key), max_steps) for key, max_steps in warmups.items()},
    }


def build_model_settings(config: Config, tiny: Models) -> Values:
    """Return settings of random models.

    The reward models are stored in the run directory. The tiny policy serves as the teacher.

    Args:
        config: Configuration of the dry run.
        tiny: Shapes of the tiny models.
    """
    sources = (
        {source.key: source for source in parse_reward_sources(config.reward)}
        if tiny.rewards
        else {}
    )
    names = {key: sources[key].name for key in tiny.rewards}
    return {
        "model.source": "random",
        "model.path": None,
        "model.package": None,
        "model.config": hugging_face_config(tiny.policy),
        "dry_run.models": {
            names[key]: hugging_face_config(shape, "scalar") for key, shape in tiny.rewards.items()
        },
        **{
            f"{key}.path": str(get_run_paths(config).random_model(name))
            for key, name in names.items()
        },
        **_build_teacher_paths(config, str(get_run_paths(config).initial_model)),
        "rollout.top_k": min(config.rollout.top_k, tiny.policy.vocab_size),
        "actor.lora.rank": min(config.actor.lora.rank, 2),
    }


def _build_teacher_paths(config: Config, path: str) -> Values:
    """Return settings with which all teachers are the model at `path`."""
    settings = config.teacher
    if settings.sources:
        return {
            "teacher.sources": {
                name: {**entries, "path": path} for name, entries in settings.sources.items()
            }
        }
    return {"teacher.path": path if config.has_teacher else None}


def build_score_settings(config: Config, unreachable: Collection[str]) -> Values:
    """Return the sources of the reward, with replacements for the unreachable ones.

    If the algorithm drops prompts whose samples have equal scores, a source with varying scores is
    added, because the tiny models could otherwise end the run. `algorithm.min_score` is removed for
    the same reason.

    Args:
        config: Configuration of the dry run.
        unreachable: Addresses of sources that do not answer.
    """
    algorithm = config.algorithm
    if not algorithm.generates_samples:
        return {}
    sources = {source.name: source for source in parse_reward_sources(config.reward)}
    replacements = {
        name: (
            _VARYING_SCORE
            | {"weight": source.weight, "gain": source.gain, "bias": source.bias}
            | _get_task_weights(source)
        )
        for name, source in sources.items()
        if get_request_url(source) in unreachable
    }
    compares_scores = (
        algorithm.dynamic_sampling_rounds > 0
        or algorithm.train_on != "all"
        or algorithm.trainer == "preferences"
    ) and not any(isinstance(source, ModelSource) for source in sources.values())
    if not compares_scores and not replacements:
        return {"algorithm.min_score": None}
    combined_sources = {
        name: replacements.get(name) or to_source_entry(source) for name, source in sources.items()
    }
    if compares_scores:
        combined_sources |= {"dry_run": _VARYING_SCORE | {"weight": 0.01}}
    # Random models need many rounds until the scores of a prompt differ.
    rounds = max(algorithm.dynamic_sampling_rounds, 50) if algorithm.dynamic_sampling_rounds else 0
    neutral_values: Values = {"reward.gain": 1.0, "reward.bias": 0.0, "algorithm.min_score": None}
    # With another combination, such as the minimum, the added score might have no effect.
    if compares_scores:
        neutral_values |= {
            "reward.combine": "sum",
            "reward.disagreement_weight": RewardConfig.disagreement_weight,
        }
    return {
        "reward.kind": "combined",
        "reward.sources": combined_sources,
        "algorithm.dynamic_sampling_rounds": rounds,
    } | neutral_values


def _get_task_weights(source: Source) -> Values:
    """Return the entry `task_weights` of a source; empty if the source has no such weights."""
    return {"task_weights": dict(source.task_weights)} if source.task_weights else {}


def build_frozen_settings(
    config: Config, run_config: Config, tiny: Models, run_models: Models
) -> Values:
    """Return settings with the names of the frozen weights of the tiny models.

    The patterns of the run may name layers that the tiny models do not have. Therefore each layer
    of a tiny model corresponds to a layer of the model of the run: the first to the first, the last
    to the last, and the layers between them to evenly spaced layers. A weight is frozen if the
    corresponding weight is.

    Args:
        config: Configuration of the dry run.
        run_config: Configuration of the run.
        tiny: Shapes of the tiny models.
        run_models: Shapes of the models of the run.
    """
    heads: dict[str, Head] = {"actor": "vocabulary", "critic": "scalar"}
    sections = [section.partition(".")[0] for section in list_layout_sections(config)]
    values: Values = {}
    for role in (
        role for role in heads if role in sections and get_value(config, f"{role}.frozen")
    ):
        initial_model = (
            run_models.critic
            if role == "critic" and run_models.critic is not None
            else run_models.policy
        )
        run_shape = _get_trained_shape(run_config, role, initial_model)
        tiny_shape = _get_trained_shape(config, role, tiny.policy)
        values[f"{role}.frozen"] = _find_frozen_names(
            get_value(config, f"{role}.frozen"), run_shape, tiny_shape, heads[role]
        )
    return values


def _get_trained_shape(config: Config, role: str, shape: ModelShape) -> ModelShape:
    """Return the shape that a role trains: critics and reward models may have fewer layers."""
    return (
        first_layers(config, shape)
        if role == "critic" or config.algorithm.trainer == "reward_model"
        else shape
    )


def _find_frozen_names(
    patterns: list[str], run_shape: ModelShape, tiny_shape: ModelShape, head: Head
) -> list[str]:
    """Return the names of the frozen weights of a tiny model; empty if all would be frozen.

    Args:
        patterns: Patterns of frozen weights of the model of the run.
        run_shape: Shape of the model of the run.
        tiny_shape: Shape of the tiny model.
        head: Output head of both models.
    """
    frozen_in_run = frozen_names(weight_table(run_shape, head), patterns)
    tiny_table = weight_table(tiny_shape, head)

    def get_counterpart_name(spec: TensorSpec) -> str:
        """Return the name that a weight of the tiny model has in the run's model."""
        name = spec.name
        if spec.layer is not None:
            name = name.replace(
                f".{spec.layer}.",
                f".{_map_index(spec.layer, tiny_shape.num_layers, run_shape.num_layers)}.",
                1,
            )
        if spec.expert is not None:
            expert = _map_index(spec.expert, tiny_shape.num_experts, run_shape.num_experts)
            name = name.replace(f"experts.{spec.expert}.", f"experts.{expert}.")
        return name

    names = [spec.name for spec in tiny_table if get_counterpart_name(spec) in frozen_in_run]
    # A model whose weights are all frozen could not be trained.
    return names if len(names) < len(tiny_table) else []


def _map_index(index: int, count: int, target_count: int) -> int:
    """Return the index in `target_count` items that corresponds to an index in `count` items.

    The first and the last items correspond to each other, and the items between them are evenly
    spaced.
    """
    return index * (target_count - 1) // max(count - 1, 1)
