"""How much memory a configuration needs: published numbers, and what does not fit."""

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
from aligner.placement.memory.activations import Layer, Load, Stage
from aligner.placement.memory.model_states import (
    engine_weights,
    shared_weights,
    trained_states,
    weight_census,
)
from aligner.placement.memory.role_memory import RoleMemory, memory_needs
from aligner.placement.roles import Device
from aligner.schema import ActorConfig, OptimizerConfig, ParallelConfig

BF16 = Device(gpus=True, itemsize=2)
GIB = 2**30


def gpt(layers: int, hidden: int, heads: int):
    """A model of Korthikanti et al. 2022, table 3."""
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
"""Bytes a token and hidden number of the two dropout masks outside attention, which we do not have.
"""


def described(*overrides: str):
    """A configuration, its model's shape, and the shapes of the models that are not there."""
    config = compose_config(list(overrides))
    expected = absent_inputs(config)
    return config, read_shape(config, expected), expected


def needs(*overrides: str) -> dict[str, RoleMemory]:
    return {role.role: role for role in memory_needs(*described(*overrides))}


@pytest.mark.parametrize("data", [1, 2, 8])
@pytest.mark.parametrize("distributed", [False, True])
def test_a_bf16_weight_takes_18_bytes_or_6_and_12_over_the_data_ranks(
    data: int, distributed: bool
) -> None:
    settings = ActorConfig(
        parallel=ParallelConfig(data=data), optimizer=OptimizerConfig(distributed=distributed)
    )
    states = trained_states(GPT_22B, "vocabulary", settings, 0, BF16)
    numbers = states.weights / 2
    taken = (states.weights + states.gradients + states.optimizer) / numbers
    assert taken == pytest.approx(6 + 12 / data if distributed else 18)


def test_frozen_weights_and_those_under_adapters_take_their_own_two_bytes() -> None:
    whole = trained_states(GPT_22B, "vocabulary", ActorConfig(), 0, BF16)
    frozen = trained_states(
        GPT_22B, "vocabulary", ActorConfig(frozen=["transformer.h.[0-9].*"]), 0, BF16
    )
    assert frozen.weights == whole.weights and frozen.gradients < whole.gradients
    adapted = trained_states(
        GPT_22B, "vocabulary", dataclasses.replace(ActorConfig(), lora=_lora(16)), 0, BF16
    )
    adapters = (adapted.weights - whole.weights) / 2
    assert adapters == 48 * 16 * (6144 + 3 * 6144 + 6144 + 6144 + 2 * (6144 + 4 * 6144))
    assert (adapted.gradients, adapted.optimizer) == (4 * adapters, 12 * adapters)


def _lora(rank: int):
    return dataclasses.replace(ActorConfig().lora, rank=rank)


def test_the_offloaded_share_of_the_optimizer_is_told_as_host_memory() -> None:
    settings = ActorConfig(
        parallel=ParallelConfig(data=2),
        optimizer=OptimizerConfig(distributed=True, offload_fraction=0.75),
    )
    states = trained_states(GPT_22B, "vocabulary", settings, 0, BF16)
    assert states.on_host == 3 * states.optimizer
    assert (
        trained_states(GPT_22B, "vocabulary", settings, 0, Device(gpus=False, itemsize=2)).on_host
        == 0
    )


@pytest.mark.parametrize(("shape", "billions"), [(GPT_22B, 22.3), (GPT_175B, 175.3)])
def test_the_published_models_have_as_many_weights_as_published(shape, billions: float) -> None:
    numbers = weight_census(dataclasses.replace(shape, tied_embeddings=True), "vocabulary").stage(
        ParallelConfig(), 0
    )
    assert numbers.dense(ParallelConfig()) / 1e9 == pytest.approx(billions, abs=0.7)


@pytest.mark.parametrize(("name", "billions"), [("8b", 8.03), ("70b", 70.55), ("405b", 405.85)])
def test_the_recipes_models_have_as_many_weights_as_published(name: str, billions: float) -> None:
    _, shape, _ = described("experiment=llama3_8b_grpo", f"model=llama3_{name}")
    numbers = weight_census(shape, "vocabulary").stage(ParallelConfig(), 0)
    assert numbers.dense(ParallelConfig()) / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.parametrize(
    ("layout", "published"),
    [
        (ParallelConfig(), 34.0),
        (ParallelConfig(tensor=8), 10 + 24 / 8),
        (ParallelConfig(tensor=8, sequence=True), 34 / 8),
    ],
    ids=["no-parallelism", "tensor", "tensor-sequence"],
)
def test_a_layer_outside_the_attention_core_keeps_what_table_2_says(
    layout: ParallelConfig, published: float
) -> None:
    """Korthikanti et al. 2022, table 2, selective recomputation, in bytes a token and hidden
    number."""
    masks = MASKS / 8 if layout.sequence else MASKS
    layer = Layer(GPT_22B, layout, BF16, row=2048, tokens=2048)
    assert layer.outside / GPT_22B.hidden_size == pytest.approx(published - masks)
    assert layer.input / GPT_22B.hidden_size == (2 / 8 if layout.sequence else 2)


def test_an_interleaved_pipeline_keeps_what_the_paper_says() -> None:
    """Section 4.2.3 for its 175B model: tensor 8, pipeline 8 of 3 chunks, micro-batches of one
    sequence, batch 64."""
    layout = ParallelConfig(tensor=8, sequence=True, pipeline=8, virtual_pipeline=3)
    settings = ActorConfig(parallel=layout, recompute="selective", micro_batch_tokens=2048)
    stage = Stage(GPT_175B, "vocabulary", settings, 0, Load(2048, 64 * 2048, 2048), BF16)
    layer = Layer(GPT_175B, layout, BF16, row=2048, tokens=2048)
    per_layer = 2048 * 12288 * (34 - MASKS) / 8
    published = 96 * per_layer * (1 + (8 - 1) / (8 * 3))
    assert stage.training().saved == pytest.approx(published + 2048 * layer.core, rel=1e-4)


def test_no_more_micro_batches_are_in_flight_than_there_are() -> None:
    settings = ActorConfig(parallel=ParallelConfig(pipeline=8), micro_batch_tokens=2048)
    saved = {
        batches: (
            Stage(GPT_22B, "vocabulary", settings, 0, Load(2048, batches * 2048, 2048), BF16)
            .training()
            .saved
        )
        for batches in (1, 3, 8, 20)
    }
    assert saved[3] == 3 * saved[1] and saved[8] == 8 * saved[1] == saved[20]


def test_experts_are_cut_by_their_own_layout() -> None:
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
    census = weight_census(shape, "vocabulary").stage(ParallelConfig(), 0)
    layout = ParallelConfig(tensor=2, sequence=True, data=4, expert=4, expert_tensor=1)
    settings = ActorConfig(parallel=layout, optimizer=OptimizerConfig(distributed=True))
    states = trained_states(shape, "vocabulary", settings, 0, BF16)
    experts, dense = census.experts // 4, census.cut // 2 + census.whole
    assert states.weights == 2 * (experts + dense)
    # 8 ranks over 4 experts' shares; 4 data ranks
    assert states.optimizer == 12 * (experts // 2 + -(-dense // 4))


@pytest.fixture
def gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNER_GPUS", "8")


def test_the_reference_takes_the_weights_place_twice_and_waits_in_host_memory() -> None:
    trainer = needs("experiment=llama3_70b_ppo")["trainer"]
    phases = {phase.name: phase for phase in trainer.phases}
    assert set(phases) == {"training", "reference"}, "the engine is elsewhere"
    assert phases["reference"].weights == 2 * phases["training"].weights
    # as much is copied for a checkpoint, which replicas share as well
    kept = trainer.host - phases["training"].optimizer
    assert kept == 3 * phases["training"].weights, (
        "beside it two snapshots of the weights for the generator"
    )
    adapted = needs("experiment=llama3_70b_ppo", "actor.lora.rank=16")["trainer"]
    assert [phase.name for phase in adapted.phases] == ["training"], (
        "the model without its adapters is the reference"
    )


def test_a_reference_that_stays_on_the_device_is_there_while_the_policy_trains_and_not_in_host_memory() -> (
    None
):
    waiting, resident = (
        needs("experiment=llama3_8b_ppo", f"actor.reference_on_device={answer}")["trainer"]
        for answer in ("false", "true")
    )
    weights = waiting.phases[0].weights
    assert {phase.weights for phase in resident.phases} == {2 * weights}
    assert waiting.host - resident.host == weights


@pytest.mark.usefixtures("gpu_machine")
def test_a_colocated_engine_is_counted_where_it_is_awake() -> None:
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


def test_a_trainer_that_publishes_beside_its_work_has_a_bucket_all_the_time() -> None:
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


def test_what_tensorrt_llm_keeps_of_a_model_that_sleeps_is_told_as_host_memory() -> None:
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


def test_a_checkpoints_copy_is_shared_by_replicas_and_has_what_is_not_trained_as_it_is() -> None:
    whole, shared = (
        trained_states(
            GPT_22B, "vocabulary", ActorConfig(parallel=ParallelConfig(data=data)), 0, BF16
        )
        for data in (1, 4)
    )
    # 12 bytes a weight
    assert (whole.snapshot, shared.snapshot) == (6 * whole.weights, 6 * whole.weights / 4)
    adapted = trained_states(
        GPT_22B, "vocabulary", dataclasses.replace(ActorConfig(), lora=_lora(16)), 0, BF16
    )
    assert adapted.snapshot == whole.weights + 6 * (adapted.weights - whole.weights)
    assert trained_states(GPT_22B, "vocabulary", ActorConfig(), 0, BF16, steps=False).snapshot == 0


def test_an_engine_that_shares_stores_what_is_cut_otherwise_alone() -> None:
    _, shape, _ = described("experiment=tiny_ppo")
    whole = engine_weights(shape, 1)
    of_attention = 4 * (64 + 2 * 32) * 64  # query, key and value of four layers
    assert shared_weights(shape, ParallelConfig(), 0, 1) == whole - of_attention
    norms = (2 * 4 + 1) * 64
    assert shared_weights(shape, ParallelConfig(tensor=2), 0, 1) == norms, "what no layout cuts"
    first, last = (
        shared_weights(shape, ParallelConfig(pipeline=2), stage, 1) for stage in range(2)
    )
    assert first + last == whole - of_attention


def test_the_cache_is_what_is_used_within_its_limit() -> None:
    token = 2 * 4 * 2 * 16 * 4  # keys and values, layers, heads, their size, fp32
    row = (16 + 16 - 1) * token

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


def test_a_critic_and_a_reward_model_take_turns_on_shared_devices() -> None:
    apart = needs("experiment=llama3_8b_ppo")
    together = needs(
        "experiment=llama3_8b_ppo",
        "critic.with_reward=true",
        "reward.parallel={tensor: 2, sequence: true, data: 4}",
    )
    assert set(apart) == {"trainer", "critic", "reward"} and set(together) == {"trainer", "critic"}
    training, scoring = together["critic"].phases
    assert training == apart["critic"].phases[0]
    assert (scoring.weights, scoring.gradients, scoring.optimizer) == (
        training.weights,
        0,
        training.optimizer,
    )
    assert apart["critic"].host == training.optimizer, "a checkpoint that is being written"
    assert together["critic"].host == training.optimizer + 2 * training.weights, (
        "one goes out before the other comes in"
    )


def test_the_fullest_stage_is_told() -> None:
    trainer = needs("experiment=llama3_405b_ppo")["trainer"]
    assert (trainer.stages, trainer.stage) == (9, 8), "the head is there"
    critic = needs("experiment=llama3_405b_ppo")["critic"]
    assert critic.stage == 0, "the embedding is there, and most micro-batches"


def test_offline_trainers_have_what_they_need() -> None:
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


TOLD = re.compile(
    r"cluster\.device_memory_gib=\S+: too small for the (\w+), which needs ([\d.]+) GiB per"
    " device.*; to reduce memory use, try (.+)"
)


def refused(*overrides: str) -> list[str]:
    """The lines that say what does not fit; none where everything does."""
    config, _, expected = described(*overrides)
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
def test_what_does_not_fit_is_refused_with_the_keys_that_help(name: str) -> None:
    overrides, key = TOO_LARGE[name]
    overrides = ["experiment=llama3_70b_ppo", *overrides]
    (problem,) = refused(*overrides)
    told = TOLD.fullmatch(problem)
    assert told is not None, problem
    assert f"{needs(*overrides)[told[1]].peak.total / GIB:.1f}" == told[2]
    assert key in told[3]


def test_a_colocated_engine_can_sleep_where_the_trainer_needs_too_much() -> None:
    smallest = [
        "actor.recompute=full",
        "actor.micro_batch_tokens=1536",
        "engine=embedded",
        "cluster.device_memory_gib=60",
    ]
    (problem,) = refused("experiment=llama3_8b_grpo", "engine.batch_size=256", *smallest)
    assert "too small for the trainer, which needs" in problem and "engine.sleep=true" in problem
    assert (
        refused(
            "experiment=llama3_8b_grpo", "engine.batch_size=256", "engine.sleep=true", *smallest
        )
        == []
    )


def test_nothing_is_refused_where_no_device_memory_is_given(tmp_path: Path) -> None:
    config = compose_config(
        [
            "experiment=tiny_ppo",
            f"run.dir={tmp_path / 'run'}",
            "model.config.num_hidden_layers=4000",
        ]
    )
    check(config)
