"""Automatic values for models from 1 M to 70 B parameters, CPUs and GPUs, and every algorithm."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from aligner.checks.check import check
from aligner.config.compose import compose_config, find_user_keys
from aligner.config.conf_files import find_built_in_directory
from aligner.config.defaults import SIZES, UNREAD_REASON, choose, get_size
from aligner.config.prerequisites import plan_run
from aligner.config.situation import Choice, DataStatistics, Situation
from aligner.errors import ConfigError
from aligner.models.hugging_face import read_config
from aligner.models.model_source import absent_inputs
from aligner.placement.machine import Machine
from aligner.placement.memory.role_memory import compute_role_memory
from aligner.placement.roles import count_role_ranks
from aligner.schema import Config
from aligner.schema.keys import get_value

ALGORITHMS = sorted(file.stem for file in (find_built_in_directory() / "algorithm").glob("*.yaml"))
OFFLINE = ("sft", "dpo", "simpo", "orpo", "rpo", "kto", "reward_model", "teacher_scores")
DATA = DataStatistics(7473, "512 of 7473 records, including the longest", False, 230, 160, 320)


def entries(
    layers: int,
    hidden: int,
    heads: int,
    groups: int,
    feed_forward: int,
    vocabulary: int,
    tied: bool,
) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": feed_forward,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": tied,
        "eos_token_id": 2,
    }


MODELS = {
    "1M": entries(2, 128, 4, 4, 512, 2048, True),
    "135M": entries(30, 576, 9, 3, 1536, 49152, True),
    "600M": entries(28, 1024, 16, 8, 3072, 128256, True),
    "3B": entries(28, 3072, 24, 8, 8192, 128256, True),
    "8B": entries(32, 4096, 32, 8, 14336, 128256, False),
    "70B": entries(80, 8192, 64, 8, 28672, 128256, False),
}
CORES = Machine(cores=2, memory_gib=24)
GPU = Machine(cores=16, memory_gib=256, gpus=1, gpu_memory_gib=76)
NODE = Machine(cores=128, memory_gib=2000, gpus=8, gpu_memory_gib=76)
TOO_LARGE = [("600M", 0, "ppo"), ("8B", 1, "ppo"), ("70B", 8, "ppo")]
"""Model, number of GPUs and algorithm for which policy and critic do not fit together."""
CLUSTER = replace(NODE, max_nodes=64)


@pytest.fixture(autouse=True)
def a_directory_of_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("records.jsonl").write_text(
        json.dumps({"prompt": "a", "chosen": "b", "rejected": "c", "response": "d"}) + "\n"
    )


def choose_defaults(
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    machine: Machine,
    *overrides: str,
    data: DataStatistics | None = DATA,
) -> tuple[Config, dict[str, Choice], Situation]:
    """Choose the automatic values of a run on the given machine.

    Returns:
        The configuration, the choices by key, and the situation that they are based on.
    """
    monkeypatch.setenv("ALIGNER_GPUS", str(machine.gpus))
    given = ["model.path=models/mine", "data.path=records.jsonl", "run.dir=run", *overrides]
    config = compose_config(given)
    config = replace(config, model=replace(config.model, config=MODELS[model]))
    expected = absent_inputs(config)
    situation = Situation(
        read_config(MODELS[model], "model"), data, machine, find_user_keys(given, config), expected
    )
    config, choices = choose(config, situation)
    return config, {choice.key: choice for choice in choices}, situation


def online(algorithm: str) -> list[str]:
    teacher = ["teacher.path=models/mine"] if algorithm == "on_policy_distillation" else []
    return [
        f"algorithm={algorithm}",
        *teacher,
        *([] if algorithm in OFFLINE else ["reward.function=gsm8k"]),
    ]


@pytest.mark.promise("defaults-fit-the-machine")
@pytest.mark.parametrize(
    ("model", "machine", "cluster"),
    [
        ("135M", CORES, "local"),
        ("600M", CORES, "local"),
        ("135M", GPU, "local"),
        ("3B", GPU, "local"),
        ("8B", GPU, "local"),
        ("3B", NODE, "local"),
        ("8B", NODE, "local"),
        ("70B", NODE, "local"),
        ("8B", CLUSTER, "slurm"),
        ("70B", CLUSTER, "slurm"),
    ],
)
@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "sft", "dpo"])
def test_automatic_values_fit_device_memory(
    monkeypatch: pytest.MonkeyPatch, model: str, machine: Machine, cluster: str, algorithm: str
) -> None:
    overrides = [f"cluster={cluster}", *online(algorithm)]
    if (model, machine.gpus * machine.max_nodes, algorithm) in TOO_LARGE:
        with pytest.raises(
            ConfigError,
            match=(
                r"parameters does not fit into .*\. Memory of the smallest layout in GiB per rank:"
                r" trainer .*, critic "
            ),
        ):
            choose_defaults(monkeypatch, model, machine, *overrides)
        return
    config, choices, situation = choose_defaults(monkeypatch, model, machine, *overrides)
    assert check(config, situation.expected) == situation.shape
    needs = compute_role_memory(config, situation.shape, situation.expected)
    if machine.gpus == 0:
        ranks = count_role_ranks(config)
        held = sum((role.peak.total + role.host) * ranks[role.role] for role in needs)
        assert held < machine.memory_gib * 2**30
    elif cluster == "local":
        assert config.actor.parallel.ranks == machine.gpus
        assert sum(role.peak.total for role in needs) < machine.gpu_memory_gib * 2**30
    else:
        assert config.actor.parallel.ranks % machine.gpus == 0
        assert max(role.peak.total for role in needs) < machine.gpu_memory_gib * 2**30
    assert all(choice.reason for choice in choices.values())


def test_defaults_shard_adam_but_not_muon_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = ["actor.optimizer.kind=muon", "critic.optimizer.kind=adam"]
    config, _, situation = choose_defaults(monkeypatch, "3B", NODE, *online("ppo"), *kinds)
    assert (
        config.actor.parallel.data > 1
        and not config.actor.optimizer.distributed
        and config.critic.optimizer.distributed
    )
    check(config, situation.expected)


def test_too_large_model_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"70\.6 B parameters does not fit into 76 GiB of GPU memory\. Memory of the smallest"
            r" layout.*actor\.lora\.rank=16"
        ),
    ):
        choose_defaults(monkeypatch, "70B", GPU, *online("grpo"))


@pytest.mark.parametrize(("model", "machine"), [("8B", GPU), ("70B", NODE)])
def test_lora_is_used_if_full_training_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, model: str, machine: Machine
) -> None:
    config, choices, situation = choose_defaults(monkeypatch, model, machine, *online("grpo"))
    check(config, situation.expected)
    assert (
        config.actor.lora.rank == 16
        and "LoRA, because the weights" in choices["actor.lora.rank"].reason
    )
    assert config.actor.optimizer.learning_rate == float(
        f"{10 * get_size(situation.parameters).online:.3g}"
    )
    with pytest.raises(ConfigError, match="does not fit into 76 GiB of GPU memory"):
        choose_defaults(monkeypatch, model, machine, *online("grpo"), "actor.lora.rank=0")
    whole, _, _ = choose_defaults(monkeypatch, "3B", machine, *online("grpo"))
    assert whole.actor.lora.rank == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("model", "machine"), [("135M", CORES), ("8B", CLUSTER)])
def test_every_algorithm_gets_valid_defaults(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, model: str, machine: Machine
) -> None:
    cluster = "slurm" if machine.gpus else "local"
    config, choices, situation = choose_defaults(
        monkeypatch, model, machine, f"cluster={cluster}", *online(algorithm)
    )
    check(config, situation.expected)
    assert "run.steps" in choices and "data.max_prompt_tokens" in choices


def test_explicit_values_are_kept_and_others_adapt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = [
        "rollout.samples_per_prompt=2",
        "actor.optimizer.learning_rate=3e-7",
        "rollout.max_response_tokens=1000",
    ]
    config, choices, situation = choose_defaults(
        monkeypatch, "135M", CORES, *online("grpo"), *given
    )
    assert not choices.keys() & {
        "rollout.samples_per_prompt",
        "actor.optimizer.learning_rate",
        "rollout.max_response_tokens",
    }
    assert (config.rollout.samples_per_prompt, config.actor.optimizer.learning_rate) == (2, 3e-7)
    assert config.rollout.prompts_per_step == 8  # still 16 samples per step
    check(config, situation.expected)


@pytest.mark.parametrize(
    ("model", "rate"), [("135M", 2e-5), ("600M", 5e-6), ("3B", 2e-6), ("8B", 1e-6), ("70B", 5e-7)]
)
def test_learning_rate_decreases_with_model_size(
    monkeypatch: pytest.MonkeyPatch, model: str, rate: float
) -> None:
    config, _, _ = choose_defaults(monkeypatch, model, CLUSTER, "cluster=slurm", *online("grpo"))
    assert config.actor.optimizer.learning_rate == rate
    adapted, _, _ = choose_defaults(
        monkeypatch, model, CLUSTER, "cluster=slurm", *online("grpo"), "actor.lora.rank=8"
    )
    # the rate is rounded to three digits
    assert adapted.actor.optimizer.learning_rate == float(f"{10 * rate:.3g}")


def test_size_table_is_sorted_with_falling_rates() -> None:
    for smaller, larger in itertools.pairwise(SIZES):
        assert smaller.max_parameters < larger.max_parameters
        for rate in ("online", "critic", "imitation", "preference"):
            assert getattr(smaller, rate) >= getattr(larger, rate)


def test_lengths_fit_data_and_model_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, _, _ = choose_defaults(monkeypatch, "8B", CLUSTER, "cluster=slurm", *online("grpo"))
    assert (config.data.max_prompt_tokens, config.data.long_prompts) == (240, "drop")
    assert config.rollout.max_response_tokens == 1024
    outlier = replace(DATA, longest_prompt=20_000)
    config, choices, _ = choose_defaults(
        monkeypatch, "8B", CLUSTER, "cluster=slurm", *online("grpo"), data=outlier
    )
    assert (
        config.data.max_prompt_tokens == 160
        and "20000 tokens" in choices["data.max_prompt_tokens"].reason
    )
    long = replace(DATA, longest_prompt=20_000, prompt_length_p99=15_000)
    config, _, situation = choose_defaults(monkeypatch, "135M", CORES, *online("grpo"), data=long)
    assert config.data.max_prompt_tokens == 4096
    check(config, situation.expected)


def test_defaults_for_unreadable_records_are_valid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, choices, situation = choose_defaults(
        monkeypatch, "135M", CORES, *online("grpo"), data=None
    )
    check(config, situation.expected)
    assert choices["run.steps"].reason == UNREAD_REASON


def test_few_prompts_limit_prompts_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    few = replace(DATA, records=3, is_complete=True)
    config, _, situation = choose_defaults(monkeypatch, "1M", CORES, *online("grpo"), data=few)
    assert config.rollout.prompts_per_step == 3 and config.run.steps == 50
    check(config, situation.expected)


def test_tiny_model_runs_at_least_50_steps_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    few = replace(DATA, records=100, is_complete=True, longest_answer=0)
    config, choices, _ = choose_defaults(monkeypatch, "1M", CORES, *online("grpo"), data=few)
    assert config.run.steps == 50 and choices["run.steps"].reason.endswith(
        "limited to the range 50 to 200 on this machine"
    )
    assert (
        "the default on CPUs, where generation is slow, because no answers were found in the data"
        in choices["rollout.max_response_tokens"].reason
    )


@pytest.mark.parametrize(
    ("machine", "model", "overrides", "words"),
    [
        (CORES, "135M", [], "16 samples per step on 2 cores for a model with 134.5 M parameters"),
        (
            GPU,
            "8B",
            ["actor.lora.rank=16"],
            "128 samples per step on 1 GPU for a model with 8.0 B parameters",
        ),
        (
            CLUSTER,
            "70B",
            ["cluster=slurm"],
            "512 samples per step with 8 GPUs per node for a model with 70.6 B parameters",
        ),
    ],
)
def test_reasons_name_machine_and_model_size(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, model: str, overrides: list[str], words: str
) -> None:
    _, choices, _ = choose_defaults(monkeypatch, model, machine, *overrides, *online("grpo"))
    assert choices["rollout.prompts_per_step"].reason == words


@pytest.mark.parametrize(
    "key", ["rollout.max_staleness", "actor.parallel.data", "data.max_prompt_tokens"]
)
def test_keys_of_group_file_count_as_explicit(
    monkeypatch: pytest.MonkeyPatch, key: str, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.yaml").write_text("path: records.jsonl\nmax_prompt_tokens: 7\n")
    given = ["model.path=x", "data=mine", "reward.function=gsm8k", "run.dir=run"]
    config = compose_config(given, tmp_path)
    assert (key in find_user_keys(given, config, tmp_path)) == (key == "data.max_prompt_tokens")
    assert get_value(config, "data.max_prompt_tokens") == 7


def test_automatic_prerequisite_is_refused(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults: [tiny_ppo]\nrun: {automatic: true}\n"
    (tmp_path / "experiment" / "first.yaml").write_text(text)
    config = compose_config(
        ["experiment=tiny_ppo", "model.source=directory", "model.path=experiment:first"], tmp_path
    )
    with pytest.raises(
        ConfigError,
        match=r"model\.path=experiment:first: run\.automatic=true is not supported in an",
    ):
        plan_run(config, tmp_path)
