"""When a run may go on in its directory, and what it may have otherwise than it was started
with."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml

from aligner.config.compose import compose_config, load_config, save_config
from aligner.config.prerequisites import RunPlan
from aligner.config.resume import MAY_CHANGE, settled
from aligner.data.model_directory import prepare_model
from aligner.errors import ConfigError
from aligner.schema import Config
from aligner.schema.keys import schema_keys


def started(directory: Path, *overrides: str, step: int | None = 3) -> list[str]:
    """A run that was stopped, behind a complete checkpoint or before its first; what else its
    launch is to be given."""
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


def test_an_existing_run_directory_is_only_continued_when_asked(tmp_path: Path) -> None:
    given = started(tmp_path / "run")
    assert "already exists; resume it with run.resume=true" in refusal(*given)
    for resume in ("true", "True", "auto"):
        config = compose_config([*given, f"run.resume={resume}"])
        check_run(config)
        assert settled(config).run.resume == "true" and config.run.resumes


def test_without_a_complete_checkpoint_only_auto_starts_a_run_again(tmp_path: Path) -> None:
    given = started(tmp_path / "run", step=None)
    (tmp_path / "run" / "checkpoints" / "step_1" / "policy").mkdir(parents=True)
    assert "already exists; restart it with run.resume=auto" in refusal(*given)
    assert "no complete checkpoint in" in refusal(*given, "run.resume=true")
    config = compose_config([*given, "run.resume=auto"])
    check_run(config)
    assert settled(config).run.resume == "false"


def test_where_there_is_no_run_auto_starts_one_and_true_is_refused(tmp_path: Path) -> None:
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
def test_a_run_does_not_go_on_under_another_configuration(tmp_path: Path, resume: str) -> None:
    given = started(tmp_path / "run", "model.config.num_hidden_layers=2")
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


def test_what_changes_nothing_that_is_learned_may_change(tmp_path: Path) -> None:
    given = started(tmp_path / "run")
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


def test_what_a_user_means_to_change_may_change(tmp_path: Path) -> None:
    given = [
        *started(tmp_path / "run"),
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


def test_what_made_the_model_stays_whatever_a_user_means_to_change(tmp_path: Path) -> None:
    given = [*started(tmp_path / "run"), "run.resume=true"]
    for changes, key, told in (
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
        name = told.partition(":")[0]
        assert told in message
        assert (
            f"the initial model was created with {name}: these keys cannot change, even if"
            " run.changes contains them" in message
        )
        assert message.endswith("  restore the original values, or start another run")


def test_a_model_directory_that_was_moved_may_be_named_anew(tmp_path: Path) -> None:
    model = prepare_model(compose_config(["experiment=tiny_ppo", f"run.dir={tmp_path / 'other'}"]))
    given = started(tmp_path / "run", "model.source=directory", f"model.path={tmp_path / 'before'}")
    moved = [*given[:-1], f"model.path={model}", "seed=7", "run.resume=true"]
    check_run(compose_config([*moved, "run.changes=[model.path,seed]"]))


def test_the_inputs_that_other_experiments_made_are_compared(tmp_path: Path) -> None:
    given = started(tmp_path / "run", "+run.inputs.model=experiment:pairs")
    assert '  run.inputs.model: "experiment:pairs" -> not set' in refusal(
        *given[:2], "run.resume=true"
    )


def test_a_config_yaml_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    given = started(tmp_path / "run")
    file = tmp_path / "run" / "config.yaml"
    content = yaml.safe_load(file.read_text())
    content["run"]["resume"] = False
    del content["run"]["changes"], content["cluster"]["slurm"]
    file.write_text(yaml.safe_dump(content))
    assert load_config(file).run.resume == "false"
    check_run(compose_config([*given, "run.resume=true"]))


@pytest.mark.parametrize(
    "pattern", [pattern for patterns, _ in MAY_CHANGE for pattern in patterns.split()]
)
def test_every_pattern_of_keys_that_may_change_speaks_of_some(pattern: str) -> None:
    keys = schema_keys()
    assert any(
        fnmatchcase(name, pattern) or (key.is_mapping and pattern.startswith(name))
        for name, key in keys.items()
    )
