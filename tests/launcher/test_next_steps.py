from __future__ import annotations

import shlex
from pathlib import Path

from aligner.cli.command_table import parse_arguments
from aligner.config.compose import compose_config
from aligner.launcher.next_steps import next_steps

PROMPTS = "a b.jsonl"


def commands(run: Path, step: int, *overrides: str) -> list[list[str]]:
    """The arguments of each command, which the command line takes."""
    config = compose_config(["experiment=tiny_ppo", "run.steps=4", f"run.dir={run}", *overrides])
    head, *lines = next_steps(config, step)
    assert head == "next steps:"
    found = [shlex.split(line, comments=True) for line in lines]
    assert all(words[0] == "aligner" and parse_arguments(words[1:]) for words in found)
    return [words[1:] for words in found]


def test_a_finished_run_says_how_its_model_is_tried_scored_converted_and_trained_on(
    tmp_path: Path,
) -> None:
    run = tmp_path / "my runs" / "run"
    (run / "checkpoints" / "step_4").mkdir(parents=True)
    (run / "checkpoints" / "step_4" / "manifest.json").touch()
    (prompts := tmp_path / PROMPTS).write_text('{"prompt": "hello"}\n')
    found = commands(run, 4, f"data.path='{prompts}'")
    assert [words[:2] for words in found[:4]] == [
        [name, str(run)] for name in ("view", "generate", "evaluate", "convert")
    ]
    assert found[1][2:4] == ["--prompts", str(prompts)] and found[2][4:6] == [
        "--function",
        "digit_fraction",
    ]
    of_steps = commands(
        run, 4, f"data.path='{prompts}'", "reward.function=mine:steps", "reward.step_rewards=true"
    )
    assert [words[0] for words in of_steps] == ["view", "generate", "convert", "launch"]
    on = found[4]
    assert on[0] == "launch" and on[-3:] == ["run.steps=8", f"run.dir={run}", "run.resume=auto"]
    assert "run.steps=4" not in on


def test_a_run_that_has_ended_by_what_it_reached_says_how_it_goes_on_without_that(
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


def test_a_run_without_a_checkpoint_says_how_it_is_started_again(tmp_path: Path) -> None:
    found = commands(tmp_path, 2)
    assert [words[0] for words in found] == ["view", "launch"] and found[1][-2:] == [
        f"run.dir={tmp_path}",
        "run.resume=auto",
    ]
