"""Resuming a run: when it is allowed, and which keys may have changed since the start."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml

from aligner.config.compose import compose_config, load_config, save_config
from aligner.config.prerequisites import RunPlan
from aligner.config.resume import CHANGEABLE_KEYS, with_decided_resume
from aligner.data.model_directory import prepare_model
from aligner.errors import ConfigError
from aligner.schema import Config
from aligner.schema.keys import get_schema_keys


def create_stopped_run(directory: Path, *overrides: str, step: int | None = 3) -> list[str]:
    """Create the directory of a stopped run and return the overrides of its launch.

    The run has a complete checkpoint of `step`, or none if `step` is None.
    """
    given = ["experiment=tiny_ppo", f"run.dir={directory}", *overrides]
    directory.mkdir()
    save_config(compose_config(given), directory / "config.yaml")
    if step is not None:
        (directory / "checkpoints" / f"step_{step}").mkdir(parents=True)
        (directory / "checkpoints" / f"step_{step}" / "manifest.json").write_text("{}")
    return given


def check_run(config: Config) -> None:
    RunPlan(config, ()).check()


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_run(compose_config(overrides))
    return str(caught.value)


def test_existing_run_requires_resume_to_continue(tmp_path: Path) -> None:
    given = create_stopped_run(tmp_path / "run")
    assert "already exists; resume it with run.resume=true" in refusal(*given)
    for resume in ("true", "True", "auto"):
        config = compose_config([*given, f"run.resume={resume}"])
        check_run(config)
        assert with_decided_resume(config).run.resume == "true" and config.run.should_resume


def test_run_without_checkpoint_requires_auto(tmp_path: Path) -> None:
    given = create_stopped_run(tmp_path / "run", step=None)
    (tmp_path / "run" / "checkpoints" / "step_1" / "policy").mkdir(parents=True)
    assert "already exists; restart it with run.resume=auto" in refusal(*given)
    assert "no complete checkpoint in" in refusal(*given, "run.resume=true")
    config = compose_config([*given, "run.resume=auto"])
    check_run(config)
    assert with_decided_resume(config).run.resume == "false"


def test_absent_run_is_refused_with_resume_true(tmp_path: Path) -> None:
    given = ["experiment=tiny_ppo", f"run.dir={tmp_path / 'run'}"]
    assert f"no run found in {tmp_path / 'run'}" in refusal(*given, "run.resume=true")
    check_run(compose_config([*given, "run.resume=auto"]))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    for resume in ("false", "true", "auto"):
        assert "is not the directory of a run (no config.yaml)" in refusal(
            *given, f"run.resume={resume}"
        )


@pytest.mark.parametrize("resume", ["true", "auto"])
def test_resume_with_changed_keys_is_refused(tmp_path: Path, resume: str) -> None:
    given = create_stopped_run(tmp_path / "run", "model.config.num_hidden_layers=2")
    changes = (
        "seed=7",
        "model.config.num_hidden_layers=3",
        "+model.config.new=[1,2]",
        "data.prompt_after=x",
    )
    message = refusal(*given, *changes, "run.steps=10", f"run.resume={resume}")
    assert message.splitlines() == [
        (
            f"run.resume={resume}: the run was started with other values. Changed keys"
            f" ({tmp_path / 'run' / 'config.yaml'} -> this launch):"
        ),
        '  data.prompt_after: null -> "x"',
        "  model.config.new: not set -> [1, 2]",
        "  model.config.num_hidden_layers: 2 -> 3",
        "  run.steps: 40 -> 10",
        "  seed: 1 -> 7",
        (
            "  the initial model was created with model.config.new,"
            " model.config.num_hidden_layers, seed: these keys cannot change, even if run.changes"
            " contains them"
        ),
        (
            "  restore the original values, list the keys that you want to change in"
            " run.changes=[KEY,...], or start another run"
        ),
    ]


def test_keys_without_effect_on_learning_may_change(tmp_path: Path) -> None:
    given = create_stopped_run(tmp_path / "run")
    changes = (
        *(
            "run.steps=50",
            "run.stop_after=45",
            "actor.parallel.data=2",
            "engine.parallel.data=2",
            "critic.parallel.pipeline=2",
        ),
        *(
            "actor.optimizer.distributed=true",
            "critic.micro_batch_tokens=4096",
            "checkpoint.every=5",
            "logging.timeline=false",
        ),
        *(
            "server.request_timeout_s=900",
            "reward.ports.http=29990",
            "reward.replicas=2",
            "cluster.threads_per_rank=1",
        ),
        *("evaluation.every=5", "evaluation.prompts=[abc]"),
    )
    check_run(compose_config([*given, *changes, "run.resume=true"]))


def test_keys_listed_in_run_changes_may_change(tmp_path: Path) -> None:
    given = [
        *create_stopped_run(tmp_path / "run"),
        "actor.optimizer.learning_rate=0.001",
        "actor.optimizer.beta1=0.5",
        "run.resume=true",
    ]
    message = refusal(*given, "run.changes=[actor.optimizer.learning_rate]")
    assert "beta1" in message and "learning_rate" not in message
    check_run(compose_config([*given, "run.changes=[actor.optimizer]"]))
    assert "run.changes: unknown keys: learning_rate" in refusal(
        *given, "run.changes=[actor.optimizer,learning_rate]"
    )


def test_keys_of_initial_model_cannot_change(tmp_path: Path) -> None:
    given = [*create_stopped_run(tmp_path / "run"), "run.resume=true"]
    for changes, key, changed_line in (
        ("[model]", "model.config.num_hidden_layers=2", "model.config.num_hidden_layers: 4 -> 2"),
        (
            "[model.config.hidden_size]",
            "model.config.hidden_size=32",
            "model.config.hidden_size: 64 -> 32",
        ),
        ("[model]", "model.initializer_std=0.5", "model.initializer_std: 0.05 -> 0.5"),
        ("[model.source]", "model.source=gguf", 'model.source: "random" -> "gguf"'),
        ("[seed]", "seed=7", "seed: 1 -> 7"),
    ):
        message = refusal(*given, key, f"run.changes={changes}")
        name = changed_line.partition(":")[0]
        assert changed_line in message
        assert (
            f"the initial model was created with {name}: these keys cannot change, even if"
            " run.changes contains them" in message
        )
        assert message.endswith("  restore the original values, or start another run")


def test_moved_model_directory_is_accepted(tmp_path: Path) -> None:
    model = prepare_model(compose_config(["experiment=tiny_ppo", f"run.dir={tmp_path / 'other'}"]))
    given = create_stopped_run(
        tmp_path / "run", "model.source=directory", f"model.path={tmp_path / 'before'}"
    )
    moved = [*given[:-1], f"model.path={model}", "seed=7", "run.resume=true"]
    check_run(compose_config([*moved, "run.changes=[model.path,seed]"]))


def test_resume_compares_experiment_inputs(tmp_path: Path) -> None:
    given = create_stopped_run(tmp_path / "run", "+run.inputs.model=experiment:pairs")
    assert '  run.inputs.model: "experiment:pairs" -> not set' in refusal(
        *given[:2], "run.resume=true"
    )


def test_run_of_earlier_release_can_be_resumed(tmp_path: Path) -> None:
    given = create_stopped_run(tmp_path / "run")
    file = tmp_path / "run" / "config.yaml"
    content = yaml.safe_load(file.read_text())
    content["run"]["resume"] = False
    del content["run"]["changes"], content["cluster"]["slurm"]
    file.write_text(yaml.safe_dump(content))
    assert load_config(file).run.resume == "false"
    check_run(compose_config([*given, "run.resume=true"]))


@pytest.mark.parametrize(
    "pattern", [pattern for patterns, _ in CHANGEABLE_KEYS for pattern in patterns.split()]
)
def test_changeable_key_pattern_matches_a_key(pattern: str) -> None:
    keys = get_schema_keys()
    assert any(
        fnmatchcase(name, pattern) or (key.is_mapping and pattern.startswith(name))
        for name, key in keys.items()
    )
