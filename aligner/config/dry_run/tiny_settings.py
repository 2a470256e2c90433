"""What else a dry run has smaller, or otherwise than the run: lengths, batches, schedules, and what
a CPU does not have."""

from collections.abc import Collection
from itertools import count
from typing import Any

from aligner.config.dry_run.tiny_models import Models, layout_sections
from aligner.models.hugging_face import hugging_face_config
from aligner.models.model_source import first_layers
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import Head, TensorSpec, frozen_names, weight_table
from aligner.paths import run_paths
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
    critic_updates,
    longest_sequence,
    policy_updates,
    rows_together,
    samples_learned_from,
)
from aligner.schema.evaluation_suites import Suite, evaluation_suites
from aligner.schema.keys import value_at, with_values
from aligner.schema.reward_sources import (
    ModelSource,
    Source,
    asked_address,
    reward_sources,
    source_entry,
)

Values = dict[str, Any]
"""New values by key."""

_PATIENCE_S = 1800.0
"""For what takes seconds where every rank has a device to itself: here many share a core."""

_DRAWN_SCORE: Values = {"kind": "function", "function": "digit_fraction"}


def text_limit(config: Config) -> int:
    """Characters that a dry run keeps of any text, its last ones: so many tokens fit as a prompt
    and as a response."""
    prompt, response = config.data.max_prompt_tokens, config.data.max_response_tokens - 1
    return prompt if config.algorithm.generates else min(prompt, response)


def place(config: Config) -> Values:
    """This machine's CPU, a directory beside the run's own, services as this machine has them, and
    patience."""
    run, cluster, server, engine = config.run, config.cluster, config.server, config.engine
    health_s, start_s = (
        max(seconds, _PATIENCE_S) for seconds in (server.health_timeout_s, server.start_timeout_s)
    )
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
        "cluster.heartbeat_timeout_s": max(cluster.heartbeat_timeout_s, _PATIENCE_S),
        "cluster.stop_timeout_s": stop_s,
        "server.start_timeout_s": start_s,  # prepare's as well
        "server.interface": "127.0.0.1",
        "server.tls": TLSConfig(),
        "server.health_timeout_s": health_s,
        "server.request_timeout_s": max(server.request_timeout_s, health_s + stop_s + start_s + 1),
        "server.drain_timeout_s": max(server.drain_timeout_s, 60.0),
        "server.max_sequence_length": None,
        "server.max_request_tokens": max(
            server.max_request_tokens, ServerConfig.max_request_tokens
        ),
        "engine.kind": "embedded",
        "engine.precision": "fp32",
        "engine.verify_every": 1,
        "engine.update_timeout_s": max(engine.update_timeout_s, _PATIENCE_S),
        "checkpoint.every": min(config.checkpoint.every, 1),
        "logging.wandb.enabled": False,  # a tracker has the runs themselves
        "logging.mlflow.enabled": False,
    }
    values |= {f"{role}.precision": "fp32" for role in ("actor", "critic", "reward", "teacher")}
    values |= {f"{role}.optimizer.offload_fraction": 0.0 for role in ("actor", "critic")}
    return values | {
        f"{role}.ports": PortsConfig() for role in ("engine", "critic", "reward", "teacher")
    }


def teacher(config: Config) -> Values:
    """A teacher of one rank: it is the tiny policy itself, which any layout of the teacher's own
    need not cut."""
    return (
        {"teacher.parallel": ParallelConfig(), "teacher.replicas": 1} if config.has_teacher else {}
    )


def critic(given: Config, models: Models) -> Values:
    """A critic of the policy's first layers, fewer of them where it had fewer, instead of one from
    a model of its own."""
    if models.critic is None:
        return {}
    layers = given.critic.num_layers or models.critic.num_layers
    return {
        "critic.path": None,
        "critic.num_layers": layers if layers < models.policy.num_layers else None,
    }


def lengths(config: Config) -> Values:
    """Short prompts and responses, and less to evaluate on."""
    data, evaluation, rollout = config.data, config.evaluation, config.rollout
    longest = min(rollout.max_response_tokens, 8)
    # A response that is labeled step by step is all of its steps, of which each is cut by itself.
    longest_record = 64 if config.algorithm.trainer == "reward_model" else 16
    return {
        "data.generated_tokens": False,  # they are another tokenizer's
        "teacher.scores": None,
        # the template that stands for the model's tells no turns apart
        "data.learned_turns": "last",
        "data.max_prompt_tokens": min(data.max_prompt_tokens, 16),
        "data.max_response_tokens": min(data.max_response_tokens, longest_record),
        "data.held_out": min(data.held_out, 2 * config.actor.parallel.data),
        "data.normalization_samples": min(data.normalization_samples, 8),
        "evaluation.every": min(evaluation.every, config.dry_run.steps),
        **_evaluated(config),
        "rollout.max_response_tokens": longest,
        "algorithm.target_length": min(config.algorithm.target_length, longest),
        "rollout.min_response_tokens": (
            longest
            if rollout.min_response_tokens == rollout.max_response_tokens
            else min(rollout.min_response_tokens, longest // 2)
        ),
        "rollout.truncate_after": longest // 2,
        "rollout.truncate_token": None if rollout.truncate_token is None else ".",
    }


def _evaluated(config: Config) -> Values:
    """Few responses to few prompts of each suite, and no judge, who would be paid for what random
    models say."""
    values: Values = {}
    for suite in (Suite(None, config.evaluation), *evaluation_suites(config)):
        count, samples = min(suite.settings.count or 4, 4), min(suite.settings.samples, 2)
        values |= {
            f"{suite.key}.count": count,
            f"{suite.key}.samples": samples,
            f"{suite.key}.judge": {},
        }
    return values


def batches(config: Config) -> Values:
    """The fewest samples of which every rank has some in each minibatch; what there were several of
    there are two of.

    A micro-batch holds as few as it may, so that there are several.
    """
    values: Values = {"data.batch_size": min(config.data.batch_size, _rows_at_a_time(config))}
    if config.algorithm.generates:
        values = _samples(config)
    config = with_values(config, values)
    longest = longest_sequence(config)
    values["actor.micro_batch_tokens"] = rows_together(config) * longest
    values["actor.logprob_chunk_tokens"] = min(config.actor.logprob_chunk_tokens, longest)
    values["teacher.logprob_chunk_tokens"] = min(config.teacher.logprob_chunk_tokens, longest)
    others = {"teacher", *(section.partition(".")[0] for section in layout_sections(config))} - {
        "actor"
    }
    return values | {f"{role}.micro_batch_tokens": longest for role in others}


def _samples(config: Config) -> Values:
    rollout, algorithm = config.rollout, config.algorithm
    fewer: Values = {
        "rollout.micro_batches": min(rollout.micro_batches, 2),
        "rollout.samples_per_prompt": min(rollout.samples_per_prompt, 2),
        "rollout.spare_prompts": min(rollout.spare_prompts, 1),
        "algorithm.minibatches": min(algorithm.minibatches, 2),
        "algorithm.epochs": min(algorithm.epochs, 2),
    }
    config = with_values(config, fewer)
    prompts = next(prompts for prompts in count(1) if _is_enough(config, prompts))
    horizon = max(algorithm.kl_horizon, prompts * config.rollout.samples_per_prompt + 1)
    return fewer | {"rollout.prompts_per_step": prompts, "algorithm.kl_horizon": horizon}


def _rows_at_a_time(config: Config) -> int:
    """So many rows that every data-parallel rank of a trained model has a micro-batch of them for
    each pipeline stage."""
    layouts = [config.actor.parallel] + (
        [config.critic.parallel] if config.algorithm.has_critic else []
    )
    return max(layout.data * max(layout.pipeline, 2) for layout in layouts)


def _is_enough(config: Config, prompts: int) -> bool:
    """Whether so many prompts a step divide as they must, and are enough."""
    rollout, algorithm = config.rollout, config.algorithm
    learned_from = prompts * samples_learned_from(config)
    units = learned_from // rows_together(config)
    divide = prompts % rollout.micro_batches == 0 and units % algorithm.minibatches == 0
    samples = prompts // rollout.micro_batches * rollout.samples_per_prompt
    enough = learned_from // algorithm.minibatches >= _rows_at_a_time(config)
    return (
        divide
        and samples % config.engine.parallel.data == 0
        and enough
        and prompts >= rollout.spare_prompts
    )


def schedules(config: Config) -> Values:
    """Warm-ups that end before the run does; call it when batches and steps are known."""
    policy_waits = min(config.algorithm.policy_starts_after, config.run.steps - 1)
    config = with_values(config, {"algorithm.critic_warmup_steps": policy_waits})
    updates = {"actor": policy_updates(config)}
    if config.algorithm.has_critic:
        updates["critic"] = critic_updates(config)
    warmups = {f"{role}.optimizer.warmup_steps": steps - 1 for role, steps in updates.items()}
    return {
        "algorithm.critic_warmup_steps": policy_waits,
        **{key: min(value_at(config, key), most) for key, most in warmups.items()},
    }


def models(config: Config, tiny: Models) -> Values:
    """Random weights, and a reward model's directory in the run's own; a teacher is the tiny
    policy."""
    sources = (
        {source.key: source for source in reward_sources(config.reward)} if tiny.rewards else {}
    )
    named = {key: sources[key].name for key in tiny.rewards}
    return {
        "model.source": "random",
        "model.path": None,
        "model.package": None,
        "model.config": hugging_face_config(tiny.policy),
        "dry_run.models": {
            named[key]: hugging_face_config(shape, "scalar") for key, shape in tiny.rewards.items()
        },
        **{f"{key}.path": str(run_paths(config).random_model(name)) for key, name in named.items()},
        **_taught_by(config, str(run_paths(config).initial_model)),
        "rollout.top_k": min(config.rollout.top_k, tiny.policy.vocab_size),
        "actor.lora.rank": min(config.actor.lora.rank, 2),
    }


def _taught_by(config: Config, path: str) -> Values:
    teacher = config.teacher
    if teacher.sources:
        return {
            "teacher.sources": {
                name: {**entries, "path": path} for name, entries in teacher.sources.items()
            }
        }
    return {"teacher.path": path if config.has_teacher else None}


def scores(config: Config, unreachable: Collection[str]) -> Values:
    """Sources of the reward that do not answer here exchanged; and one added where equal scores
    would end the run, as low ones would with `algorithm.min_score`."""
    algorithm = config.algorithm
    if not algorithm.generates:
        return {}
    sources = {source.name: source for source in reward_sources(config.reward)}
    exchanged = {
        name: (
            _DRAWN_SCORE
            | {"weight": source.weight, "gain": source.gain, "bias": source.bias}
            | _tasks(source)
        )
        for name, source in sources.items()
        if asked_address(source) in unreachable
    }
    compares = (
        algorithm.dynamic_sampling_rounds > 0
        or algorithm.train_on != "all"
        or algorithm.trainer == "preferences"
    ) and not any(isinstance(source, ModelSource) for source in sources.values())
    if not compares and not exchanged:
        return {"algorithm.min_score": None}
    combined = {
        name: exchanged.get(name) or source_entry(source) for name, source in sources.items()
    }
    if compares:
        combined |= {"dry_run": _DRAWN_SCORE | {"weight": 0.01}}
    rounds = max(algorithm.dynamic_sampling_rounds, 50) if algorithm.dynamic_sampling_rounds else 0
    neutral: Values = {"reward.gain": 1.0, "reward.bias": 0.0, "algorithm.min_score": None}
    if compares:  # the least of the scores, for one, may be another than that which was added
        neutral |= {
            "reward.combine": "sum",
            "reward.disagreement_weight": RewardConfig.disagreement_weight,
        }
    return {
        "reward.kind": "combined",
        "reward.sources": combined,
        "algorithm.dynamic_sampling_rounds": rounds,
    } | neutral


def _tasks(source: Source) -> Values:
    return {"task_weights": dict(source.task_weights)} if source.task_weights else {}


def frozen(config: Config, given: Config, tiny: Models, models: Models) -> Values:
    """The tiny models' weights that are frozen in the given ones, by name: patterns count layers
    that are not there.

    The first layer stands for the first, the last for the last, and those between for the ones
    evenly between.
    """
    heads: dict[str, Head] = {"actor": "vocabulary", "critic": "scalar"}
    sections = [section.partition(".")[0] for section in layout_sections(config)]
    values: Values = {}
    for role in (role for role in heads if role in sections and value_at(config, f"{role}.frozen")):
        begun_from = (
            models.critic if role == "critic" and models.critic is not None else models.policy
        )
        whole, small = _trained(given, role, begun_from), _trained(config, role, tiny.policy)
        values[f"{role}.frozen"] = _frozen_names(
            value_at(config, f"{role}.frozen"), whole, small, heads[role]
        )
    return values


def _trained(config: Config, role: str, shape: ModelShape) -> ModelShape:
    return (
        first_layers(config, shape)
        if role == "critic" or config.algorithm.trainer == "reward_model"
        else shape
    )


def _frozen_names(
    patterns: list[str], whole: ModelShape, small: ModelShape, head: Head
) -> list[str]:
    chosen, small_table = (
        frozen_names(weight_table(whole, head), patterns),
        weight_table(small, head),
    )

    def stands_for(spec: TensorSpec) -> str:
        name = spec.name
        if spec.layer is not None:
            name = name.replace(
                f".{spec.layer}.",
                f".{_counterpart(spec.layer, small.num_layers, whole.num_layers)}.",
                1,
            )
        if spec.expert is not None:
            expert = _counterpart(spec.expert, small.num_experts, whole.num_experts)
            name = name.replace(f"experts.{spec.expert}.", f"experts.{expert}.")
        return name

    names = [spec.name for spec in small_table if stands_for(spec) in chosen]
    return names if len(names) < len(small_table) else []


def _counterpart(index: int, few: int, many: int) -> int:
    """Of many things the one that one of few stands for."""
    return index * (many - 1) // max(few - 1, 1)
