"""Checks of `teacher`: one or several teachers, their models, layouts and losses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from aligner.checks.check import check
from aligner.config.compose import compose_config
from aligner.data.model_directory import prepare_model
from aligner.errors import ConfigError
from aligner.placement.addresses import get_configured_ports
from aligner.placement.memory.role_memory import compute_role_memory
from aligner.placement.placement_table import build_placements
from aligner.placement.roles import computes_on_devices, count_role_ranks, count_server_ranks
from aligner.schema import Config
from aligner.schema.keys import with_values
from aligner.schema.references import find_read_paths

ALONE, DIVERGENCE = "algorithm=on_policy_distillation", {"teacher.loss": "forward_kl"}


@pytest.fixture(scope="module")
def models_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with tiny models.

    `deeper-model` has twice the layers of `policy-model`, `short-model` has 16 positions,
    `small-model` a smaller vocabulary, and `other-model` another tokenizer.
    """
    root = tmp_path_factory.mktemp("models")
    for name, more in {
        "policy": (),
        "deeper": ("model.config.num_hidden_layers=8",),
        "short": ("model.config.max_position_embeddings=16",),
        "small": ("model.config.vocab_size=60",),
    }.items():
        config = compose_config(["experiment=tiny_ppo", f"run.dir={root / name}", *more])
        prepare_model(config).rename(root / f"{name}-model")
    other = root / "other-model"
    other.mkdir()
    for file in (root / "policy-model").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "zebra": 2}, unk_token="<pad>")).save(
        str(other / "tokenizer.json")
    )
    return root


def compose(root: Path, teacher: str, *overrides: str) -> Config:
    given = [
        "model.source=directory",
        f"model.path={root / 'policy-model'}",
        f"teacher.path={root / teacher}",
    ]
    return compose_config(["experiment=tiny_ppo", f"run.dir={root / 'run'}", *given, *overrides])


def test_teacher_replicas_have_ports_and_memory(
    models_directory: Path,
) -> None:
    more = (
        "algorithm=grpo",
        "teacher.replicas=2",
        "teacher.parallel.tensor=2",
        "teacher.ports.http=20300",
    )
    config = compose(models_directory, "deeper-model", *more)
    shape = check(config)
    assert count_server_ranks(config) == {"reward": 1, "teacher": 2, "teacher.1": 2}
    assert list(count_role_ranks(config))[-1] == "trainer" and computes_on_devices(
        config, "teacher.1"
    )
    assert get_configured_ports(config) == {
        "teacher.ports.http": 20300,
        "teacher.ports.http + 3 (teacher.1)": 20303,
    }
    assert [(each.role, each.ranks, each.layout) for each in build_placements(config)][2:] == [
        ("teacher", 2, "TP2 PP1 DP1"),
        ("teacher.1", 2, "TP2 PP1 DP1"),
    ]
    needs = {each.role: each for each in compute_role_memory(config, shape)}
    assert set(needs) == {"trainer", "teacher", "teacher.1"}
    (phase,) = needs["teacher"].phases
    assert phase.gradients == phase.optimizer == 0 < phase.activations
    # The teacher has 8 layers on 2 ranks, the policy 4 layers on 1 rank.
    whole = needs["trainer"].phases[0].weights
    assert 0.5 * whole < phase.weights < whole


def test_teacher_keys_without_effect_are_refused(models_directory: Path) -> None:
    assert "teacher" not in count_server_ranks(compose_config(["experiment=tiny_ppo"]))
    with pytest.raises(
        ConfigError, match=r"teacher\.path=.*: has no effect with algorithm\.trainer=sft"
    ):
        compose(models_directory, "deeper-model", "algorithm=sft")
    with pytest.raises(
        ConfigError, match=r"teacher\.weight=2: has no effect with teacher\.path=null"
    ):
        compose_config(["experiment=tiny_ppo", "teacher.weight=2"])


def test_advantage_none_requires_a_teacher(models_directory: Path) -> None:
    check(compose(models_directory, "deeper-model", ALONE))
    with pytest.raises(
        ConfigError,
        match=r"algorithm.advantage=none: algorithm.loss=clip requires advantages; .* or set teacher",
    ):
        check(compose_config(["experiment=tiny_ppo", f"run.dir={models_directory / 'run'}", ALONE]))


def test_future_initial_model_may_be_the_teacher(tmp_path: Path) -> None:
    run = tmp_path / "run"
    check(
        compose_config(
            ["experiment=tiny_ppo", f"run.dir={run}", f"teacher.path={run / 'initial_model'}"]
        )
    )


@pytest.mark.parametrize(
    ("teacher", "overrides", "message"),
    [
        ("absent", [], r"teacher\.path=.*absent: no such model directory"),
        (
            "other-model",
            [],
            (
                r"teacher\.path=.*other-model: \d+ of the policy's \d+ token ids are different"
                " tokens in this model's tokenizer, for example 2"
            ),
        ),
        (
            "short-model",
            [],
            (
                r"teacher\.path=.*short-model: the model has 16 positions, but the longest"
                r" sequence has \d+ tokens"
            ),
        ),
        ("small-model", [], r"teacher\.path=.*small-model: "),
        (
            "deeper-model",
            ["algorithm=copg"],
            (
                r"teacher\.path=.*algorithm\.loss=copg does not use advantages; set"
                r" algorithm\.loss to clip"
            ),
        ),
        (
            "deeper-model",
            ["algorithm=online_dpo"],
            r"teacher\.path=.*algorithm\.loss=dpo does not use advantages",
        ),
        (
            "deeper-model",
            [ALONE, "algorithm.kl_coefficient=0.1"],
            (
                r"algorithm\.kl_coefficient=0\.1: with algorithm\.advantage=none a KL penalty in"
                " the reward has no effect"
            ),
        ),
        (
            "deeper-model",
            ["teacher.parallel.tensor=3"],
            r"teacher\.parallel\.tensor=3: must divide the model's",
        ),
        (
            "deeper-model",
            ["teacher.parallel.pipeline=9"],
            r"teacher\.parallel\.pipeline=9: must be at most the model's 8 layers",
        ),
        (
            "deeper-model",
            ["teacher.micro_batch_tokens=4"],
            r"teacher\.micro_batch_tokens=4: must be at least \d+ to hold the longest sequence",
        ),
        ("deeper-model", ["teacher.precision=fp8"], r"teacher\.precision=fp8: requires GPUs"),
        (
            "deeper-model",
            ["algorithm=copg", "teacher.loss=forward_kl"],
            (
                r"teacher\.loss=forward_kl: is a mean over tokens and is not supported with"
                r" algorithm\.loss=copg, which compares whole responses"
            ),
        ),
        (
            "deeper-model",
            [ALONE, "teacher.loss=reverse_kl", "rollout.top_p=0.9"],
            r"teacher\.loss=reverse_kl: rollout\.top_p=0\.9 excludes tokens",
        ),
        ("deeper-model", [ALONE, "teacher.loss=kl"], r"teacher\.loss=kl: .*forward_kl"),
        (
            "deeper-model",
            [ALONE, "teacher.loss=forward_kl", "teacher.top_k=0"],
            r"teacher\.top_k=0: must be at least 1",
        ),
        (
            "deeper-model",
            [ALONE, "teacher.loss=jensen_shannon", "teacher.beta=1"],
            r"teacher\.beta=1.*: must be below 1",
        ),
        (
            "deeper-model",
            [ALONE, "teacher.top_k=4"],
            r"teacher\.top_k=4: has no effect with teacher\.loss=advantage",
        ),
        (
            "deeper-model",
            [ALONE, "teacher.loss=forward_kl", "teacher.beta=0.2"],
            r"teacher\.beta=0\.2: has no effect with",
        ),
        ("deeper-model", ["teacher.weight=0"], r"teacher\.weight=0.*: must be above 0"),
        ("deeper-model", ["teacher.replicas=0"], r"teacher\.replicas=0: must be at least 1"),
    ],
)
def test_incompatible_teacher_is_refused(
    models_directory: Path, teacher: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(compose(models_directory, teacher, *overrides))
    assert re.search(message, str(caught.value)), caught.value


def compose_with_sources(root: Path, **sources: object) -> Config:
    config = compose_config(["experiment=tiny_ppo", f"run.dir={root / 'run'}", "algorithm=grpo"])
    policy = {"model.source": "directory", "model.path": str(root / "policy-model")}
    return with_values(config, policy | {"teacher.sources": sources})


def test_several_teachers_share_one_role(models_directory: Path) -> None:
    paths = [str(models_directory / name) for name in ("deeper-model", "policy-model")]
    both = compose_with_sources(
        models_directory,
        all={"path": paths[0]},
        sums={"path": paths[1], "weight": 2, "tasks": ["sums"]},
    )
    shape = check(both)
    alone = compose_with_sources(models_directory, all={"path": paths[0]})
    assert count_server_ranks(both) == count_server_ranks(alone) == {"reward": 1, "teacher": 1}
    assert build_placements(both)[2].runs == f"teacher {paths[0]}, {paths[1]}"
    (two,), (one,) = (compute_role_memory(config, shape)[-1].phases for config in (both, alone))
    assert two.weights == pytest.approx(1.5 * one.weights, rel=0.1)
    assert {
        key: Path(path).name
        for key, path in find_read_paths(both).items()
        if key.startswith("teacher.")
    } == {
        "teacher.sources.all.path": "deeper-model",
        "teacher.sources.sums.path": "policy-model",
    }


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            "deeper-model",
            (
                r"teacher\.sources\.sums=deeper-model: expected a mapping with path and optionally"
                r" weight and tasks"
            ),
        ),
        ({}, r"teacher\.sources\.sums\.path: missing"),
        ({"path": "absent"}, r"teacher\.sources\.sums\.path=absent: no such model directory"),
        (
            {"path": "short-model"},
            r"teacher\.sources\.sums\.path=.*short-model: the model has 16 positions",
        ),
        (
            {"path": "a", "task": "sums"},
            (
                r"teacher\.sources\.sums\.task: unknown key; did you mean"
                r" teacher\.sources\.sums\.tasks"
            ),
        ),
        (
            {"path": "a", "weight": 0},
            r"teacher\.sources\.sums\.weight=0: must be a finite number above 0",
        ),
        (
            {"path": "a", "tasks": "sums"},
            r"teacher\.sources\.sums\.tasks=sums: expected a list of task names",
        ),
    ],
)
def test_invalid_teacher_source_is_refused(
    models_directory: Path, monkeypatch: pytest.MonkeyPatch, entries: object, message: str
) -> None:
    monkeypatch.chdir(models_directory)
    with pytest.raises(ConfigError) as caught:
        check(compose_with_sources(models_directory, all={"path": "deeper-model"}, sums=entries))
    assert re.search(message, str(caught.value)), caught.value


def test_divergence_requires_one_teacher_per_prompt(models_directory: Path) -> None:
    path = str(models_directory / "deeper-model")
    check(
        with_values(
            compose_with_sources(
                models_directory, **{task: {"path": path, "tasks": [task]} for task in "ab"}
            ),
            DIVERGENCE,
        )
    )
    for tasks in ({}, {"tasks": ["b", "a"]}):
        config = compose_with_sources(
            models_directory, all={"path": path, **tasks}, sums={"path": path, "tasks": ["a"]}
        )
        check(config)
        with pytest.raises(
            ConfigError,
            match=r"teacher\.loss=forward_kl: .*all and .*sums apply to the same prompts",
        ):
            check(with_values(config, DIVERGENCE))


def test_divergence_combines_with_other_losses(
    models_directory: Path,
) -> None:
    for algorithm in ("best_of_n", "cispo", "on_policy_distillation", "ppo"):
        check(
            compose(
                models_directory,
                "deeper-model",
                f"algorithm={algorithm}",
                "teacher.loss=forward_kl",
            )
        )


def test_path_and_sources_exclude_each_other(models_directory: Path) -> None:
    config = compose_with_sources(models_directory, all={"path": "deeper-model"})
    with pytest.raises(ConfigError, match=r"teacher\.sources: is not supported with teacher\.path"):
        check(with_values(config, {"teacher.path": "deeper-model"}))
