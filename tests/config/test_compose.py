"""Compose, save and load configurations: overrides, run names, user experiments."""

from __future__ import annotations

from pathlib import Path

import pytest

from aligner.checks.check import check
from aligner.config.compose import compose_config, load_config, save_config
from aligner.errors import ConfigError

TINY = "experiment=tiny_ppo"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [TINY, "actor.paralel.tensor=2"],
            "actor.paralel.tensor: unknown key; did you mean actor.parallel.tensor?",
        ),
        (
            [TINY, "learning_rate=1"],
            "did you mean actor.optimizer.learning_rate or critic.optimizer.learning_rate?",
        ),
        (
            [TINY, "+actor.depth=1"],
            "actor.depth: unknown key; allowed in actor: fp8_recipe, frozen, logprob_chunk_tokens",
        ),
        (
            [TINY, "actor={paralel: {tensor: 2}}"],
            "actor.paralel: unknown key; did you mean actor.parallel?",
        ),
        ([TINY, "expriment=x"], "expriment: unknown key; did you mean experiment?"),
        (
            [TINY, "model.config.depth=1"],
            "model.config.depth: no such entry; add it with +model.config.depth=",
        ),
        ([TINY, "run.steps=ten"], "run.steps=ten: expected int, got str"),
        ([TINY, "run.steps=2.5"], "run.steps=2.5: expected int, got float"),
        ([TINY, "run.steps=true"], "run.steps=true: expected int, got bool"),
        ([TINY, "run.steps=null"], "run.steps=null: expected int"),
        ([TINY, "critic.num_layers=two"], "critic.num_layers=two: expected int or null, got str"),
        (
            [TINY, "data.prompts=abc"],
            "data.prompts=abc: expected list[str], got a single value; write data.prompts=[abc]",
        ),
        ([TINY, "actor=5"], "actor=5: is a section; set a key of this section, such as actor."),
        ([TINY, "run.steps=1,2"], "run.steps=1,2: expected one value"),
        ([TINY, "~run.steps"], "~run.steps: keys cannot be deleted"),
        ([TINY, "run.name=a=b"], "run.name=a=b: "),
        ([TINY, "run.name=../elsewhere"], "run.name=../elsewhere: must consist of"),
        (
            [TINY, "run.resume=true"],
            (
                "run.resume=true: requires the directory or name of the run to resume; set"
                " run.dir=DIRECTORY or run.name=NAME"
            ),
        ),
        (
            [TINY, "model=tiny_randon"],
            "model=tiny_randon: no such model; did you mean model=tiny_random?",
        ),
        (
            ["tiny_ppo"],
            "tiny_ppo: expected an override key=value; did you mean experiment=tiny_ppo?",
        ),
        (
            ["experiment=nope"],
            (
                "experiment=nope: no such experiment; allowed: arithmetic, arithmetic_distillation,"
                " arithmetic_iterated_dpo"
            ),
        ),
        (
            [],
            (
                "experiment=NAME is missing; experiments: arithmetic, arithmetic_distillation,"
                " arithmetic_iterated_dpo, "
            ),
        ),
    ],
)
def test_invalid_override_is_refused_concisely(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config(overrides)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2


def test_default_run_dir_is_in_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = compose_config([TINY]).run
    assert run.experiment == "tiny_ppo"
    assert run.name is not None and run.name.startswith("tiny_ppo-2")
    assert run.dir == str(tmp_path / "runs" / run.name)
    assert compose_config([TINY, "run.dir=mine"]).run.dir == str(tmp_path / "mine")


def test_resumed_run_keeps_its_original_name(tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "config.yaml").write_text("run: {name: first}\n")
    resumed = [TINY, f"run.dir={tmp_path / 'moved'}", "run.resume=true"]
    assert (
        compose_config(resumed).run.name
        == compose_config([*resumed, "run.name=first"]).run.name
        == "first"
    )
    with pytest.raises(ConfigError, match=r"run\.name=second: the run to resume is named first"):
        compose_config([*resumed, "run.name=second"])
    (tmp_path / "moved" / "config.yaml").write_text("{")
    with pytest.raises(ConfigError, match=r"moved/config\.yaml: not the configuration of a run"):
        compose_config(resumed)


def test_overrides_reach_the_configuration() -> None:
    config = compose_config(
        [TINY, "actor.optimizer.learning_rate=1", "model.config.hidden_size=32", "run.name=x"]
    )
    assert config.actor.optimizer.learning_rate == 1.0
    assert config.model.config["hidden_size"] == 32
    assert config.rollout.prompts_per_step == 16  # set by the experiment


def test_engine_replicas_fill_the_trainers_ranks() -> None:
    config = compose_config(
        [TINY, "actor.parallel.tensor=2", "actor.parallel.pipeline=2", "engine.parallel.tensor=2"]
    )
    assert (config.engine.parallel.tensor, config.engine.parallel.data) == (2, 2)


def test_saved_configuration_loads_unchanged(tmp_path: Path) -> None:
    config = compose_config(
        [TINY, "run.name=2024", r'data.prompts=["pay \${5}", "3", "a: b", "ü\n"]']
    )
    assert config.data.prompts[0] == "pay ${5}"
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


def test_unknown_key_or_absent_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("actor: {parallel: {tenser: 2}}\n")
    with pytest.raises(
        ConfigError,
        match=r"actor\.parallel\.tenser: unknown key; did you mean actor\.parallel\.tensor\?",
    ):
        load_config(file)
    with pytest.raises(ConfigError, match="no such configuration file"):
        load_config(tmp_path / "absent.yaml")


def _own_experiment(directory: Path, name: str, text: str) -> Path:
    file = directory / "experiment" / f"{name}.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text("# @package _global_\n" + text)
    return directory


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"run: {name: caf\xe9}\n", b"3\n", b"[" * 3000, b"{"]
)
def test_malformed_config_yaml_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{tmp_path}/config.yaml: "):
        load_config(tmp_path / "config.yaml")


def test_user_experiment_is_composed(tmp_path: Path) -> None:
    directory = _own_experiment(
        tmp_path, "mine", "defaults: [{override /data: letters}]\nrun: {steps: 7}\n"
    )
    config = compose_config(["experiment=mine"], directory)
    assert (config.run.steps, config.run.experiment) == (7, "mine")


def test_default_response_limit_is_128_tokens(
    tmp_path: Path,
) -> None:
    config = compose_config(
        ["experiment=mine"], _own_experiment(tmp_path, "mine", "run: {steps: 7}\n")
    )
    assert config.rollout.max_response_tokens == 128
    check(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "actor: {paralel: {tensor: 2}}\n",
            "actor.paralel: unknown key; did you mean actor.parallel? (in experiment/mine.yaml)",
        ),
        ("run: {steps: many}\n", "run.steps=many: expected int, got str (in experiment/mine.yaml)"),
        ("run: {steps: [\n", "mine.yaml"),
        (
            "run: {name: '${nothing.here}'}\n",
            "run.name: Interpolation key 'nothing.here' not found",
        ),
        ("defaults: [{override /model: absent}]\n", "Could not find 'model/absent'"),
    ],
)
def test_user_experiment_error_names_key_or_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config(["experiment=mine"], _own_experiment(tmp_path, "mine", text))
    assert message in str(caught.value)


def test_built_in_experiment_cannot_be_shadowed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="experiment=tiny_ppo already exists in"):
        compose_config([TINY], _own_experiment(tmp_path, "tiny_ppo", "run: {steps: 7}\n"))


@pytest.mark.parametrize("time", ["12:00:00", "90:00", "1-00:00:00", "90"])
def test_slurm_time_in_file_equals_override(tmp_path: Path, time: str) -> None:
    (tmp_path / "cluster").mkdir()
    own = f"# @package _global_\ndefaults: [slurm, _self_]\ncluster: {{slurm: {{time: {time}}}}}\n"
    (tmp_path / "cluster" / "mine.yaml").write_text(own)
    from_file = compose_config([TINY, "cluster=mine"], tmp_path)
    assert from_file.cluster.slurm.time == time
    assert (
        compose_config([TINY, "cluster=slurm", f"cluster.slurm.time={time}"]).cluster
        == from_file.cluster
    )
    (tmp_path / "config.yaml").write_text(f"cluster: {{slurm: {{time: {time}}}}}\n")
    assert load_config(tmp_path / "config.yaml").cluster.slurm.time == time


def test_sexagesimal_value_of_integer_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.steps=1:30: expected int, got str"):
        compose_config(
            ["experiment=mine"], _own_experiment(tmp_path, "mine", "run: {steps: 1:30}\n")
        )
