"""Memory estimates: comparison with published numbers, phases, and the check of the limit."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from aligner.checks.check import check
from aligner.config.compose import compose_config
from aligner.errors import ConfigError
from aligner.models.hugging_face import read_config
from aligner.models.model_source import absent_inputs, read_shape
from aligner.placement.memory.activations import BatchLoad, Layer, StageActivations
from aligner.placement.memory.model_states import (
    compute_trained_states,
    count_engine_weights,
    count_shared_weights,
    count_weights,
)
from aligner.placement.memory.role_memory import RoleMemory, compute_role_memory
from aligner.placement.roles import Device
from aligner.schema import ActorConfig, OptimizerConfig, ParallelConfig

BF16 = Device(is_gpu=True, itemsize=2)
GIB = 2**30


def gpt(layers: int, hidden: int, heads: int):
    """Return the shape of a model in table 3 of Korthikanti et al. 2022."""
    sizes = {
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        "vocab_size": 51200,
        "n_positions": 2048,
    }
    shape = read_config(
        {"architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new", **sizes}, "test"
    )
    return dataclasses.replace(shape, tied_embeddings=False)


GPT_22B, GPT_175B = gpt(48, 6144, 64), gpt(96, 12288, 96)
MASKS = 2
"""Bytes per token and hidden unit of the paper's two dropout masks outside attention.

Our models have no dropout.
"""


def load_config_and_shapes(*overrides: str):
    """Return a configuration, its model's shape, and the shapes of absent models by path."""
    config = compose_config(list(overrides))
    expected = absent_inputs(config)
    return config, read_shape(config, expected), expected


def needs(*overrides: str) -> dict[str, RoleMemory]:
    return {role.role: role for role in compute_role_memory(*load_config_and_shapes(*overrides))}


@pytest.mark.parametrize("data", [1, 2, 8])
@pytest.mark.parametrize("distributed", [False, True])
def test_bf16_weight_takes_18_or_6_plus_12_bytes(data: int, distributed: bool) -> None:
    settings = ActorConfig(
        parallel=ParallelConfig(data=data), optimizer=OptimizerConfig(distributed=distributed)
    )
    states = compute_trained_states(GPT_22B, "vocabulary", settings, 0, BF16)
    numbers = states.weights / 2
    taken = (states.weights + states.gradients + states.optimizer) / numbers
    assert taken == pytest.approx(6 + 12 / data if distributed else 18)


def test_only_trained_weights_have_training_states() -> None:
    whole = compute_trained_states(GPT_22B, "vocabulary", ActorConfig(), 0, BF16)
    frozen = compute_trained_states(
        GPT_22B, "vocabulary", ActorConfig(frozen=["transformer.h.[0-9].*"]), 0, BF16
    )
    assert frozen.weights == whole.weights and frozen.gradients < whole.gradients
    adapted = compute_trained_states(
        GPT_22B, "vocabulary", dataclasses.replace(ActorConfig(), lora=_lora(16)), 0, BF16
    )
    adapters = (adapted.weights - whole.weights) / 2
    assert adapters == 48 * 16 * (6144 + 3 * 6144 + 6144 + 6144 + 2 * (6144 + 4 * 6144))
    assert (adapted.gradients, adapted.optimizer) == (4 * adapters, 12 * adapters)


def _lora(rank: int):
    return dataclasses.replace(ActorConfig().lora, rank=rank)


def test_offloaded_optimizer_counts_as_host_memory() -> None:
    settings = ActorConfig(
        parallel=ParallelConfig(data=2),
        optimizer=OptimizerConfig(distributed=True, offload_fraction=0.75),
    )
    states = compute_trained_states(GPT_22B, "vocabulary", settings, 0, BF16)
    assert states.on_host == 3 * states.optimizer
    assert (
        compute_trained_states(
            GPT_22B, "vocabulary", settings, 0, Device(is_gpu=False, itemsize=2)
        ).on_host
        == 0
    )


@pytest.mark.parametrize(("shape", "billions"), [(GPT_22B, 22.3), (GPT_175B, 175.3)])
def test_weight_count_equals_gpt_paper(shape, billions: float) -> None:
    numbers = count_weights(
        dataclasses.replace(shape, tied_embeddings=True), "vocabulary"
    ).count_stage(ParallelConfig(), 0)
    assert numbers.count_dense_on_rank(ParallelConfig()) / 1e9 == pytest.approx(billions, abs=0.7)


@pytest.mark.parametrize(("name", "billions"), [("8b", 8.03), ("70b", 70.55), ("405b", 405.85)])
def test_weight_count_equals_published_llama3(name: str, billions: float) -> None:
    _, shape, _ = load_config_and_shapes("experiment=llama3_8b_grpo", f"model=llama3_{name}")
    numbers = count_weights(shape, "vocabulary").count_stage(ParallelConfig(), 0)
    assert numbers.count_dense_on_rank(ParallelConfig()) / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.parametrize(
    ("layout", "published"),
    [
        (ParallelConfig(), 34.0),
        (ParallelConfig(tensor=8), 10 + 24 / 8),
        (ParallelConfig(tensor=8, sequence=True), 34 / 8),
    ],
    ids=["no-parallelism", "tensor", "tensor-sequence"],
)
def test_layer_activations_equal_table_2_of_paper(layout: ParallelConfig, published: float) -> None:
    """Korthikanti et al. 2022, table 2, selective recomputation, in bytes per token and hidden
    unit."""
    masks = MASKS / 8 if layout.sequence else MASKS
    layer = Layer(GPT_22B, GPT_22B.layers[0], layout, BF16, longest_tokens=2048, tokens=2048)
    assert layer.outside_core_bytes / GPT_22B.hidden_size == pytest.approx(published - masks)
    assert layer.residual_bytes / GPT_22B.hidden_size == (2 / 8 if layout.sequence else 2)


def test_interleaved_activations_equal_paper() -> None:
    """Section 4.2.3 of Korthikanti et al. 2022 for the 175B model: tensor=8, pipeline=8 with 3
    chunks per stage, micro-batches of 1 sequence, 64 sequences per batch."""
    layout = ParallelConfig(tensor=8, sequence=True, pipeline=8, virtual_pipeline=3)
    settings = ActorConfig(parallel=layout, recompute="selective", micro_batch_tokens=2048)
    stage = StageActivations(
        GPT_175B, "vocabulary", settings, 0, BatchLoad(2048, 64 * 2048, 2048), BF16
    )
    layer = Layer(GPT_175B, GPT_175B.layers[0], layout, BF16, longest_tokens=2048, tokens=2048)
    per_layer = 2048 * 12288 * (34 - MASKS) / 8
    published = 96 * per_layer * (1 + (8 - 1) / (8 * 3))
    assert stage.training_activations().saved == pytest.approx(
        published + 2048 * layer.core_bytes, rel=1e-4
    )


def test_micro_batches_in_flight_are_at_most_stages() -> None:
    settings = ActorConfig(parallel=ParallelConfig(pipeline=8), micro_batch_tokens=2048)
    saved = {
        batches: (
            StageActivations(
                GPT_22B, "vocabulary", settings, 0, BatchLoad(2048, batches * 2048, 2048), BF16
            )
            .training_activations()
            .saved
        )
        for batches in (1, 3, 8, 20)
    }
    assert saved[3] == 3 * saved[1] and saved[8] == 8 * saved[1] == saved[20]


def test_experts_are_sharded_by_expert_layout() -> None:
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 128,
    }
    entries = {
        "architectures": ["MixtralForCausalLM"],
        "num_key_value_heads": 4,
        "num_local_experts": 8,
        **sizes,
    }
    shape = read_config(entries, "test")
    counts = count_weights(shape, "vocabulary").count_stage(ParallelConfig(), 0)
    layout = ParallelConfig(tensor=2, sequence=True, data=4, expert=4, expert_tensor=1)
    settings = ActorConfig(parallel=layout, optimizer=OptimizerConfig(distributed=True))
    states = compute_trained_states(shape, "vocabulary", settings, 0, BF16)
    experts, dense = counts.expert // 4, counts.sharded // 2 + counts.replicated
    assert states.weights == 2 * (experts + dense)
    # Each expert shard is on 2 of 8 ranks; dense weights are sharded over 4 data ranks.
    assert states.optimizer == 12 * (experts // 2 + -(-dense // 4))


@pytest.fixture
def gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNER_GPUS", "8")


def test_offloaded_reference_counts_host_and_device() -> None:
    trainer = needs("experiment=llama3_70b_ppo")["trainer"]
    phases = {phase.name: phase for phase in trainer.phases}
    assert set(phases) == {"training", "reference"}, "the engine is elsewhere"
    assert phases["reference"].weights == 2 * phases["training"].weights
    # The checkpoint snapshot has the size of the optimizer state, which is sharded as well.
    kept = trainer.host - phases["training"].optimizer
    assert kept == 3 * phases["training"].weights, (
        "beside it two snapshots of the weights for the generator"
    )
    adapted = needs("experiment=llama3_70b_ppo", "actor.lora.rank=16")["trainer"]
    assert [phase.name for phase in adapted.phases] == ["training"], (
        "the model without its adapters is the reference"
    )


def test_resident_reference_needs_no_host_memory() -> None:
    waiting, resident = (
        needs("experiment=llama3_8b_ppo", f"actor.reference_on_device={answer}")["trainer"]
        for answer in ("false", "true")
    )
    weights = waiting.phases[0].weights
    assert {phase.weights for phase in resident.phases} == {2 * weights}
    assert waiting.host - resident.host == weights


@pytest.mark.usefixtures("gpu_machine")
def test_sleeping_engine_frees_training_memory() -> None:
    awake = {phase.name: phase for phase in needs("experiment=tiny_ppo")["trainer"].phases}
    asleep = {
        phase.name: phase
        for phase in needs("experiment=tiny_ppo", "engine.sleep=true")["trainer"].phases
    }
    assert awake["training"].engine == 2 * asleep["generation"].engine > 0, (
        "two copies: update=atomic"
    )
    assert (asleep["training"].engine, asleep["training"].cache, asleep["reference"].engine) == (
        0,
        0,
        0,
    )
    assert asleep["generation"].cache == awake["generation"].cache > 0
    assert (
        asleep["weight sync"].cache == 0
        and asleep["weight sync"].engine > asleep["generation"].engine
    )
    in_place = {
        phase.name: phase
        for phase in needs("experiment=tiny_ppo", "engine.update=in_place")["trainer"].phases
    }
    assert 2 * in_place["generation"].engine == awake["generation"].engine


def test_async_weight_sync_reserves_a_bucket() -> None:
    smaller, larger = (
        {
            phase.name: phase.engine
            for phase in needs("experiment=llama3_70b_ppo", f"engine.bucket_mib={mib}")[
                "trainer"
            ].phases
        }
        for mib in (64, 1024)
    )
    assert (
        set(smaller.values()) == {64 << 20}
        and set(larger.values()) == {1 << 30}
        and smaller.keys() == larger.keys()
    )
    assert (
        needs("experiment=tiny_ppo", "engine.placement=server")["trainer"].phases[0].engine
        < 1 << 20
    ), "all of the weights"


def test_sleeping_tensorrt_llm_uses_host_memory() -> None:
    asleep, awake = (
        needs("experiment=llama3_8b_grpo", f"engine.sleep={sleep}")["trainer"]
        for sleep in ("true", "false")
    )
    engine = {phase.name: phase for phase in asleep.phases}["generation"].engine
    assert asleep.host - awake.host == engine > 0
    embedded = [f"engine.{key}" for key in ("kind=embedded", "update=in_place", "sleep=true")]
    assert needs("experiment=llama3_8b_grpo", *embedded)["trainer"].host == awake.host, (
        "whose weights are dropped"
    )


def test_snapshot_is_sharded_over_data_ranks() -> None:
    whole, shared = (
        compute_trained_states(
            GPT_22B, "vocabulary", ActorConfig(parallel=ParallelConfig(data=data)), 0, BF16
        )
        for data in (1, 4)
    )
    # 12 bytes per weight, which is 6 times the 2 bytes in bf16
    assert (whole.snapshot, shared.snapshot) == (6 * whole.weights, 6 * whole.weights / 4)
    adapted = compute_trained_states(
        GPT_22B, "vocabulary", dataclasses.replace(ActorConfig(), lora=_lora(16)), 0, BF16
    )
    assert adapted.snapshot == whole.weights + 6 * (adapted.weights - whole.weights)
    assert (
        compute_trained_states(
            GPT_22B, "vocabulary", ActorConfig(), 0, BF16, has_optimizer_steps=False
        ).snapshot
        == 0
    )


def test_engine_shares_only_equal_shards() -> None:
    _, shape, _ = load_config_and_shapes("experiment=tiny_ppo")
    whole = count_engine_weights(shape, 1)
    of_attention = 4 * (64 + 2 * 32) * 64  # query, key and value of four layers
    assert count_shared_weights(shape, ParallelConfig(), 0, 1) == whole - of_attention
    norms = (2 * 4 + 1) * 64
    assert count_shared_weights(shape, ParallelConfig(tensor=2), 0, 1) == norms, (
        "what no layout cuts"
    )
    first, last = (
        count_shared_weights(shape, ParallelConfig(pipeline=2), stage, 1) for stage in range(2)
    )
    assert first + last == whole - of_attention


def test_kv_cache_size_follows_batch_within_limit() -> None:
    token = 2 * 4 * 2 * 16 * 4  # keys and values, layers, KV heads, head size, bytes in fp32
    row = 32 * token  # two blocks, for a prompt of 16 tokens and a response of 16, without the last

    def used(*overrides: str) -> int:
        return needs("experiment=tiny_ppo", *overrides)["trainer"].phases[0].cache

    assert used() == 32 * row, "one of two rollout micro-batches of a step's 64 samples"
    assert used("rollout.micro_batches=1") == 64 * row
    assert used("engine.batch_size=8") == 8 * row
    assert used("rollout.micro_batches=1", "engine.kv_cache_mib=1") == 1 << 20
    assert used("evaluation.every=1") == 64 * row, (
        "how many prompts that has is not known: engine.batch_size"
    )
    ahead = [
        "engine.placement=server",
        "engine.parallel.data=2",
        "rollout.max_staleness=2",
        "rollout.spare_prompts=3",
    ]
    ahead.append("algorithm=ppo_decoupled")
    generator = needs("experiment=tiny_ppo", *ahead)["generator"]
    assert generator.phases[0].cache == (8 + 3) * 4 // 2 * row, (
        "one batch is drawn after another, however far ahead"
    )
    generator = needs("experiment=llama3_70b_ppo")["generator"].phases[0]
    rest = (
        76 * GIB
        - needs("experiment=llama3_70b_ppo", "engine.kv_cache_mib=1")["generator"].phases[1].total
        + (1 << 20)
    )
    assert generator.cache == pytest.approx(0.85 * (rest - generator.activations), rel=1e-6)
    fixed = needs("experiment=llama3_70b_ppo", "engine.kv_cache_mib=4096")["generator"].phases[0]
    assert fixed.cache == 4 * GIB


def test_critic_and_reward_model_share_devices() -> None:
    separate = needs("experiment=llama3_8b_ppo")
    combined = needs(
        "experiment=llama3_8b_ppo",
        "critic.with_reward=true",
        "reward.parallel={tensor: 2, sequence: true, data: 4}",
    )
    assert set(separate) == {"trainer", "critic", "reward"} and set(combined) == {
        "trainer",
        "critic",
    }
    training, scoring = combined["critic"].phases
    assert training == separate["critic"].phases[0]
    assert (scoring.weights, scoring.gradients, scoring.optimizer) == (
        training.weights,
        0,
        training.optimizer,
    )
    assert separate["critic"].host == training.optimizer, "a checkpoint that is being written"
    assert combined["critic"].host == training.optimizer + 2 * training.weights, (
        "one goes out before the other comes in"
    )


def test_stage_with_most_memory_is_reported() -> None:
    trainer = needs("experiment=llama3_405b_ppo")["trainer"]
    assert (trainer.stages, trainer.stage) == (9, 8), "the head is there"
    critic = needs("experiment=llama3_405b_ppo")["critic"]
    assert critic.stage == 0, "the embedding is there, and most micro-batches"


def test_phases_and_weights_match_trainer_kind() -> None:
    overrides = ("experiment=tiny_ppo", "algorithm=dpo", "data.path=pairs.jsonl")
    assert [phase.name for phase in needs(*overrides)["trainer"].phases] == [
        "training",
        "reference",
    ]
    assert [phase.name for phase in needs("experiment=arithmetic_sft")["trainer"].phases] == [
        "training"
    ]
    scalar = needs("experiment=tiny_ppo", "algorithm=reward_model", "critic.num_layers=2")[
        "trainer"
    ].peak
    assert scalar.weights == 4 * (2 * 36992 + 64 * 64 + 2 * 64)
    sampling = needs(
        "experiment=tiny_ppo", "algorithm=preferences", "rollout.samples_per_prompt=4"
    )["trainer"]
    assert sampling.phases[0].optimizer == 0, "nothing is trained"


REFUSAL = re.compile(
    r"cluster\.device_memory_gib=\S+: too small for the (\w+), which needs ([\d.]+) GiB per"
    " device.*; to reduce memory use, try (.+)"
)


def problems(*overrides: str) -> list[str]:
    """Return the lines of the check's error, or an empty list if the configuration is valid."""
    config, _, expected = load_config_and_shapes(*overrides)
    try:
        check(config, expected)
    except ConfigError as error:
        return str(error).splitlines()
    return []


TOO_LARGE = {
    "optimizer": (
        ["critic.optimizer.distributed=false", "cluster.device_memory_gib=60"],
        "critic.optimizer.distributed=true",
    ),
    "recompute": (
        ["actor.recompute=none", "actor.micro_batch_tokens=65536"],
        "actor.micro_batch_tokens",
    ),
    "layout": (["actor.parallel.tensor=2", "actor.parallel.data=16"], "actor.parallel.tensor"),
    "reward": (["reward.parallel.tensor=1"], "reward.parallel.tensor"),
    "generator": (["engine.parallel.tensor=1"], "engine.parallel.tensor"),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_low_memory_is_refused_with_helpful_keys(name: str) -> None:
    overrides, key = TOO_LARGE[name]
    overrides = ["experiment=llama3_70b_ppo", *overrides]
    (problem,) = problems(*overrides)
    match = REFUSAL.fullmatch(problem)
    assert match is not None, problem
    assert f"{needs(*overrides)[match[1]].peak.total / GIB:.1f}" == match[2]
    assert key in match[3]


def test_suggested_engine_sleep_frees_memory() -> None:
    smallest = [
        "actor.recompute=full",
        "actor.micro_batch_tokens=1536",
        "engine=embedded",
        "cluster.device_memory_gib=60",
    ]
    (problem,) = problems("experiment=llama3_8b_grpo", "engine.batch_size=256", *smallest)
    assert "too small for the trainer, which needs" in problem and "engine.sleep=true" in problem
    assert (
        problems(
            "experiment=llama3_8b_grpo", "engine.batch_size=256", "engine.sleep=true", *smallest
        )
        == []
    )


def test_memory_is_not_checked_without_a_limit(tmp_path: Path) -> None:
    config = compose_config(
        [
            "experiment=tiny_ppo",
            f"run.dir={tmp_path / 'run'}",
            "model.config.num_hidden_layers=4000",
        ]
    )
    check(config)
