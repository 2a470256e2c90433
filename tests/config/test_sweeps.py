"""Tests of the runs of a sweep: Hydra's grammar, combinations and errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from aligner.config.compose import compose_config
from aligner.config.sweeps import expand_sweep
from aligner.errors import ConfigError

TINY = "experiment=tiny_ppo"


def test_values_are_combined_and_the_last_changes_fastest() -> None:
    points = expand_sweep([TINY, "rollout.top_k=3,4", "run.name=both", "seed=range(1,3)"])
    assert [point.swept for point in points] == [
        ("rollout.top_k=3", "seed=1"),
        ("rollout.top_k=3", "seed=2"),
        ("rollout.top_k=4", "seed=1"),
        ("rollout.top_k=4", "seed=2"),
    ]
    # The name of the sweep is not an override of its runs.
    assert points[0].overrides == (TINY, "rollout.top_k=3", "seed=1")


@pytest.mark.parametrize(
    ("override", "swept"),
    [
        ("seed=5", []),
        ("seed=5,7,5", ["seed=5", "seed=7"]),
        ("seed=choice(5,7)", ["seed=5", "seed=7"]),
        ("seed=range(1,6,2)", ["seed=1", "seed=3", "seed=5"]),
        ("algorithm=ppo,rloo", ["algorithm=ppo", "algorithm=rloo"]),
        ("model=glob(tiny_r*)", ["model=tiny_random", "model=tiny_reasoning"]),
        ("model=glob(tiny_r*,exclude=*random)", ["model=tiny_reasoning"]),
        ("data.prompts=[ab,cd],[ef]", ["data.prompts=[ab,cd]", "data.prompts=[ef]"]),
        (
            "actor.optimizer.learning_rate=1e-5,2e-6",
            ["actor.optimizer.learning_rate=1e-05", "actor.optimizer.learning_rate=2e-06"],
        ),
        ("rollout={top_k: 1},{top_k: 2}", ["rollout={top_k:1}", "rollout={top_k:2}"]),
        (
            "reward.function=mine:one,mine:two",
            ["reward.function=mine:one", "reward.function=mine:two"],
        ),
        ("checkpoint.best_metric=null,reward/mean", None),
    ],
)
def test_values_follow_the_grammar_of_hydra(override: str, swept: list[str] | None) -> None:
    points = expand_sweep([TINY, override])
    if swept is None:
        values = [compose_config(point.overrides).checkpoint.best_metric for point in points]
        assert values == [None, "reward/mean"]
    else:
        assert [value for point in points for value in point.swept] == swept


def test_quoted_comma_is_no_sweep() -> None:
    (point,) = expand_sweep([TINY, "data.prompt_before='a,b'"])
    assert point.overrides == (TINY, "data.prompt_before='a,b'") and point.swept == ()


def test_sweep_uses_the_experiment_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("run: {steps: 3}\n")
    points = expand_sweep(["seed=1,2"], config_file=tmp_path / "mine.yaml")
    assert [point.overrides for point in points] == [("seed=1",), ("seed=2",)]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm=ppo,grppo"], "did you mean algorithm=grpo?"),
        (["run.steps=1,x"], "run.steps=x: expected int, got str (in the run with run.steps=x)"),
        (["rollout.top_k=1,2", "algorithm=ppo,sft"], "(in the run with rollout.top_k=1 algo"),
        (["sed=1,2"], "sed: unknown key; did you mean seed?"),
        (["seed=interval(0,2)"], "seed=interval(0,2): has no finite list of values"),
        (["seed=glob(a*)"], "seed=glob(a*): matches no option; glob() selects options"),
        (["model=glob(absent*)"], "matches no option"),
        (["run.dir=a,b"], "run.dir=a,b: expected one value; it applies to the whole sweep"),
        (["run.resume=true,false"], "expected one value"),
    ],
)
def test_error_in_one_run_is_found_before_the_sweep(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        expand_sweep([TINY, *overrides])
    assert message in str(error.value)


def test_several_values_without_a_sweep_name_the_option() -> None:
    with pytest.raises(ConfigError, match=r"seed=1,2: expected one value.* launch --multirun"):
        compose_config([TINY, "seed=1,2"])
