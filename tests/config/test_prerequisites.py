"""References to results of other experiments: resolution, cache entries and errors."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

from aligner.config.compose import compose_config, load_config, save_config
from aligner.config.prerequisites import RunPlan, plan_run
from aligner.errors import ConfigError
from aligner.models.model_source import critic_shape, read_shape
from aligner.schema.references import Reference, parse_reference

PAIRS = {
    "defaults": ["override /algorithm: preferences"],
    "rollout": {"samples_per_prompt": 3, "max_response_tokens": 16},
}
JUDGE = {
    "defaults": ["override /algorithm: reward_model"],
    "data": {"path": "experiment:pairs", "normalization": "experiment:pairs/responses.jsonl"},
    "critic": {"num_layers": 2},
}
AGAINST = {"reward": {"kind": "model", "path": "experiment:judge"}}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALIGNER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "experiments"


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """Config directory of a user with a chain of experiments."""
    for name, content in {"pairs": PAIRS, "judge": JUDGE, "against": AGAINST}.items():
        write(tmp_path / "conf", name, content)
    return tmp_path / "conf"


def write(conf: Path, name: str, content: dict[str, object]) -> None:
    (conf / "experiment").mkdir(parents=True, exist_ok=True)
    defaults = [dict([default.split(": ")]) for default in content.get("defaults", [])]  # type: ignore[attr-defined]
    body = yaml.safe_dump({**content, "defaults": defaults})
    (conf / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{body}")


def make_plan(conf: Path, *overrides: str) -> RunPlan:
    return plan_run(compose_config([*overrides, f"run.dir={conf.parent / 'run'}"], conf), conf)


def expect_error(conf: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        make_plan(conf, *overrides).check()
    return str(caught.value)


def entries(plan: RunPlan) -> dict[str, str]:
    return {first.name: first.entry.name for first in plan.prerequisites}


def test_reference_is_distinguished_from_path() -> None:
    assert parse_reference("data.path", "runs/experiment:a") is None
    assert parse_reference("data.path", "experiment:a-1") == Reference("data.path", "a-1", None)
    assert parse_reference("data.path", "experiment:a/b/c.jsonl") == Reference(
        "data.path", "a", "b/c.jsonl"
    )


@pytest.mark.parametrize(
    "text",
    [
        "experiment:",
        "experiment:/x",
        "experiment:a b",
        "experiment:a@2",
        "experiment:a/../b",
        "experiment:a//b",
    ],
)
def test_a_malformed_reference_is_refused(text: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^data\.path=experiment:.*: expected experiment:NAME, or experiment:NAME/FILE for a file",
    ):
        parse_reference("data.path", text)


def test_references_resolve_to_cache_paths(conf: Path, cache: Path, tmp_path: Path) -> None:
    plan = make_plan(conf, "experiment=against")
    pairs, judge = plan.prerequisites
    assert (pairs.name, judge.name) == ("pairs", "judge")
    assert plan.config.reward.path == str(judge.result) == str(cache / judge.entry.name / "result")
    assert plan.config.run.inputs == {"reward.path": "experiment:judge"}
    assert judge.config.data.path == str(pairs.result / "preferences.jsonl")
    assert judge.config.data.normalization == str(pairs.result / "responses.jsonl")
    assert judge.config.run.dir == str(judge.entry / "run")
    save_config(plan.config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == plan.config

    assert plan.missing_prerequisites == plan.prerequisites
    assert plan.check().num_layers == 4, "what does not exist yet is taken as what it will be"
    assert not cache.parent.exists(), "checking makes nothing"
    judge.result.mkdir(parents=True)
    assert plan.missing_prerequisites == (pairs,)
    plan = make_plan(conf, "experiment=against")
    assert plan.prerequisites == (judge,), "what is complete needs nothing first"
    with pytest.raises(ConfigError, match=r"reward\.path=.*has no config\.json"):
        plan.check()  # an existing result is checked itself


def test_critic_from_result_has_its_layers(conf: Path) -> None:
    plan = make_plan(conf, "experiment=against", "critic.path=experiment:judge")
    assert plan.config.critic.path == plan.config.reward.path == str(plan.prerequisites[-1].result)
    plan.check()
    shape = read_shape(plan.config)
    assert (
        shape.num_layers,
        critic_shape(plan.config, shape, plan.get_result_shapes()).num_layers,
    ) == (4, 2)
    assert (
        "critic.num_layers=3: must be at most 2, the number of layers of the model"
        in expect_error(
            conf, "experiment=against", "critic.path=experiment:judge", "critic.num_layers=3"
        )
    )


def test_references_in_sources_are_resolved(conf: Path) -> None:
    judges = {
        "judge": {"kind": "model", "path": "experiment:judge", "weight": 2},
        "digits": {"kind": "function"},
    }
    sources = {"a": {"path": "experiment:pairs"}, "b": {"path": "b.jsonl"}}
    write(conf, "judge", {**JUDGE, "data": {"sources": sources}})
    write(conf, "sum", {"reward": {"kind": "combined", "sources": judges}})
    plan = make_plan(conf, "experiment=sum")
    pairs, judge = plan.prerequisites
    assert plan.config.reward.sources["judge"]["path"] == str(judge.result)
    assert judge.config.data.sources["a"]["path"] == str(pairs.result / "preferences.jsonl")
    assert judge.config.data.sources["b"]["path"] == "b.jsonl"


def test_unread_path_adds_no_prerequisite(conf: Path) -> None:
    assert make_plan(conf, "experiment=against", "reward.kind=function").prerequisites == ()
    write(conf, "starts", {"model": {"source": "random", "path": "experiment:judge"}})
    assert make_plan(conf, "experiment=starts").prerequisites == ()


def test_layout_must_fit_future_reward_model(conf: Path) -> None:
    message = expect_error(conf, "experiment=against", "reward.parallel.pipeline=3")
    assert "reward.parallel.pipeline=3" in message
    assert "2 layers" in message, "the reward model's, which is two layers deep"


def test_prerequisite_error_names_experiment(conf: Path) -> None:
    write(conf, "pairs", {**PAIRS, "rollout": {"samples_per_prompt": 1}})
    message = expect_error(conf, "experiment=against")
    assert message.startswith("prerequisite experiment pairs: rollout.samples_per_prompt=1: ")


def test_model_prerequisites_can_be_chained(conf: Path) -> None:
    start = {"model": {"source": "directory", "path": "experiment:tiny_ppo"}}
    write(conf, "more", start)
    plan = make_plan(
        conf, "experiment=tiny_ppo", "model.source=directory", "model.path=experiment:more"
    )
    assert list(entries(plan)) == ["tiny_ppo", "more"]
    assert plan.check().hidden_size == 64


def test_circular_prerequisites_are_refused(conf: Path) -> None:
    write(conf, "pairs", {**PAIRS, **AGAINST})
    message = expect_error(conf, "experiment=against")
    assert (
        message == "reward.path=experiment:judge: circular dependency between experiments:"
        " judge -> pairs -> judge"
    )


def test_invalid_result_reference_is_refused(conf: Path) -> None:
    assert expect_error(conf, "experiment=against", "reward.path=experiment:jugde").startswith(
        "reward.path=experiment:jugde: experiment=jugde: no such experiment; did you mean"
        " experiment=judge?"
    )
    assert (
        "critic.path=experiment:pairs: expected a reward model or a policy, got preferences"
        " (experiment pairs has algorithm.trainer=preferences)"
        in expect_error(conf, "experiment=against", "critic.path=experiment:pairs")
    )
    assert (
        expect_error(conf, "experiment=against", "reward.path=experiment:pairs")
        == "reward.path=experiment:pairs: expected a reward model, got preferences (experiment"
        " pairs has algorithm.trainer=preferences)"
    )
    assert (
        expect_error(conf, "experiment=judge", "data.path=experiment:tiny_ppo")
        == "data.path=experiment:tiny_ppo: expected preferences, got a policy (experiment tiny_ppo"
        " has algorithm.trainer=online)"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["experiment=judge", "data.path=experiment:pairs/prefs.jsonl"],
            "no such file in the result of experiment pairs; its files: pref",
        ),
        (
            ["experiment=judge", "data.path=experiment:pairs/responses.jsonl"],
            "expected preferences, got responses",
        ),
        (
            ["experiment=judge", "data.normalization=experiment:pairs"],
            "expected responses, got preferences",
        ),
        (
            ["experiment=tiny_ppo", "algorithm=sft", "data.path=experiment:pairs"],
            "expected responses, got preferences",
        ),
        (
            ["experiment=tiny_ppo", "data.path=experiment:judge"],
            "expected preferences or responses, got a reward model",
        ),
        (
            ["experiment=against", "reward.path=experiment:judge/a"],
            (
                "the result is a reward model, but a single file of this result cannot be selected;"
                " use experiment:judge"
            ),
        ),
    ],
)
def test_unsuitable_result_file_is_refused(conf: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{re.escape(overrides[-1])}: {message}"):
        make_plan(conf, *overrides)


def test_prompts_may_come_from_preference_results(conf: Path) -> None:
    for file in ("", "/preferences.jsonl", "/responses.jsonl"):
        assert make_plan(
            conf, "experiment=tiny_ppo", f"data.path=experiment:pairs{file}"
        ).missing_prerequisites


def test_user_experiment_requires_config_dir(conf: Path) -> None:
    with pytest.raises(ConfigError, match="no such experiment"):
        plan_run(
            compose_config(
                ["experiment=tiny_ppo", "reward.kind=model", "reward.path=experiment:judge"]
            )
        )


def test_only_relevant_keys_change_cache_entry(conf: Path) -> None:
    before = entries(make_plan(conf, "experiment=against"))
    unrelated_keys = {
        "logging": {"tensorboard": False},
        "cluster": {"threads_per_rank": 1},
        "server": {"max_restarts": 0},
    }
    write(
        conf,
        "pairs",
        {
            **PAIRS,
            **unrelated_keys,
            "checkpoint": {"every": 5},
            "reward": {"ports": {"grpc": 8001}},
        },
    )
    assert entries(make_plan(conf, "experiment=against")) == before
    for changed in ({"seed": 7}, {"run": {"steps": 3}}):
        write(conf, "pairs", {**PAIRS, **changed})
        after = entries(make_plan(conf, "experiment=against"))
        assert all(before[name] != after[name] for name in ("pairs", "judge")), (
            "nor does what is made from it"
        )


def test_end_condition_changes_cache_entry(conf: Path) -> None:
    found = []
    for more in (
        {},
        {"run": {"end_at": "eval/loss:0.5"}},
        {"run": {"end_at": "eval/loss:0.5"}, "evaluation": {"every": 3}},
    ):
        write(conf, "judge", {**JUDGE, **more})
        found.append(entries(make_plan(conf, "experiment=against"))["judge"])
    assert len(set(found)) == 3


def test_modified_input_file_changes_cache_entry(conf: Path, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    write(conf, "judge", {**JUDGE, "data": {"path": str(file)}})
    before = entries(make_plan(conf, "experiment=against"))
    assert entries(make_plan(conf, "experiment=against")) == before
    os.utime(file, (1, 1))
    assert entries(make_plan(conf, "experiment=against")) != before


def test_experiment_without_pairs_gives_responses(conf: Path) -> None:
    write(
        conf,
        "drawn",
        {**PAIRS, "algorithm": {"pairs": "none", "responses": "best", "min_score": 1}},
    )
    plan = make_plan(conf, "experiment=tiny_ppo", "algorithm=sft", "data.path=experiment:drawn")
    assert plan.config.data.path == str(plan.prerequisites[0].result / "responses.jsonl")
    assert plan.prerequisites[0].result_kind == "responses"
    given = "data.path=experiment:drawn/preferences.jsonl"
    message = f"{given}: no such file in the result of experiment drawn; its files: responses.jsonl"
    assert expect_error(conf, "experiment=tiny_ppo", "algorithm=sft", given) == message
