"""Tests of the next steps that a launch prints at its end."""

from __future__ import annotations

import shlex
from pathlib import Path

from aligner.cli.command_table import parse_arguments
from aligner.config.compose import compose_config
from aligner.launcher.failure import describe_next_steps

PROMPTS = "a b.jsonl"


def commands(run: Path, step: int, *overrides: str) -> list[list[str]]:
    """Return the arguments of each printed command, after checking that they can be parsed."""
    config = compose_config(["experiment=tiny_ppo", "run.steps=4", f"run.dir={run}", *overrides])
    head, *lines = describe_next_steps(config, step)
    assert head == "next steps:"
    command_lines = [shlex.split(line, comments=True) for line in lines]
    assert all(words[0] == "aligner" and parse_arguments(words[1:]) for words in command_lines)
    return [words[1:] for words in command_lines]


def test_finished_run_prints_commands_for_its_model(
    tmp_path: Path,
) -> None:
    run = tmp_path / "my runs" / "run"
    (run / "checkpoints" / "step_4").mkdir(parents=True)
    (run / "checkpoints" / "step_4" / "manifest.json").touch()
    (prompts := tmp_path / PROMPTS).write_text('{"prompt": "hello"}\n')
    command_lines = commands(run, 4, f"data.path='{prompts}'")
    assert [words[:2] for words in command_lines[:4]] == [
        [name, str(run)] for name in ("view", "generate", "evaluate", "convert")
    ]
    sampling = ["--prompts", str(prompts), "--limit", "100", "--max-new-tokens", "16"]
    assert command_lines[1][2:8] == sampling
    assert command_lines[2][2:] == [*sampling, "--function", "digit_fraction"]
    _, generate, evaluate, *_ = commands(
        run, 4, f"data.path='{prompts}'", "rollout.temperature=0.7"
    )
    assert generate[8:10] == ["--temperature", "0.7"] and "--temperature" not in evaluate
    with_step_rewards = commands(
        run, 4, f"data.path='{prompts}'", "reward.function=mine:steps", "reward.step_rewards=true"
    )
    assert [words[0] for words in with_step_rewards] == ["view", "generate", "convert", "launch"]
    on = command_lines[4]
    assert on[0] == "launch" and on[-3:] == ["run.steps=8", f"run.dir={run}", "run.resume=auto"]
    assert "run.steps=4" not in on


def test_reached_target_is_removed_from_next_command(
    tmp_path: Path,
) -> None:
    (tmp_path / "end.txt").write_text(
        "ended after step 2: reward/mean 0.5 has reached run.end_at=reward/mean:0.5\n"
    )
    *_, on = commands(tmp_path, 2, "run.end_at=reward/mean:0.5", "run.end_kl=9")
    changes = "run.changes=[run.end_kl,run.end_at]"
    assert on[-5:] == [
        "run.end_kl=null",
        "run.end_at=null",
        changes,
        f"run.dir={tmp_path}",
        "run.resume=auto",
    ]
    assert "run.end_at=reward/mean:0.5" not in on and "run.end_kl=9" not in on


def test_restart_is_suggested_without_checkpoint(tmp_path: Path) -> None:
    command_lines = commands(tmp_path, 2)
    assert [words[0] for words in command_lines] == ["view", "launch"] and command_lines[1][
        -2:
    ] == [
        f"run.dir={tmp_path}",
        "run.resume=auto",
    ]
